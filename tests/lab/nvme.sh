# The local NVMe drives of a guest of scripts/lab-nvme. A case finds them without a driver, and has the module
# loaded as it wants it. Sourced by the runner (tests/lab/guest) and by lib.sh.
# shellcheck shell=bash disable=SC2034

# The PCI addresses of the drives, in order: that of LAB0001, then that of LAB0002.
drive_addresses() {
    local function
    for function in /sys/bus/pci/devices/*; do
        [ "$(cat "$function/class")" != 0x010802 ] || echo "${function##*/}"
    done
}

# drive_driver ADDRESS: the driver that has it, or none.
drive_driver() { basename "$(readlink "/sys/bus/pci/devices/$1/driver" || echo none)"; }

# drives_up [PARAMETER=VALUE...]: give both to the kernel's driver; sets DRIVE0, DRIVE1 (addresses) and BLOCK0,
# BLOCK1 (/dev/nvme0n1).
drives_up() {
    modprobe nvme "$@" || return 1
    read -r DRIVE0 DRIVE1 < <(drive_addresses | paste -sd ' ')
    within 15 drive_is_up "$DRIVE0"
    BLOCK0=$DRIVE_BLOCK
    within 15 drive_is_up "$DRIVE1"
    BLOCK1=$DRIVE_BLOCK
}

# drive_is_up ADDRESS: sets DRIVE_BLOCK. With multipath the controller's own entry is the path nvme0c0n1.
drive_is_up() {
    local path
    for path in "/sys/bus/pci/devices/$1"/nvme/nvme*/nvme*n*; do
        DRIVE_BLOCK=/dev/$(sed -E 's/c[0-9]+n/n/' <<<"${path##*/}")
        [ ! -b "$DRIVE_BLOCK" ] || return 0
    done
    return 1
}

# drives_forget: as they were before the case. Where there are none nothing is done.
drives_forget() {
    local address driver
    [ -n "$(drive_addresses)" ] || return 0
    rm -f /etc/udev/rules.d/*spindle* /etc/modules-load.d/*spindle* /etc/{sysctl,tmpfiles}.d/*spindle*
    swapoff -a
    for address in $(drive_addresses); do
        driver=$(drive_driver "$address")
        # Of a process that died with it open; the kernel may not be done with that.
        [ "$driver" = none ] || timeout 30 sh -c "echo $address >/sys/bus/pci/drivers/$driver/unbind" || return 1
        echo >"/sys/bus/pci/devices/$address/driver_override" || return 1
    done
    [ ! -e /sys/module/nvme ] || timeout 30 modprobe -r nvme
}
