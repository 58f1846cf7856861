# NVMe drives of a lab guest: binding them to drivers without our own tool, unplugging, pulling and plugging
# them. To be sourced; with `set -e` or without. The host's side is
# `scripts/lab/run "${drive_machine[@]}" -- ...`, which makes the drives; each has the name it was given there,
# which is its serial number too. A function that fails says on standard error why.
# shellcheck shell=bash

# For scripts/lab/run: an IOMMU, huge pages, two drives.
# shellcheck disable=SC2034
drive_machine=(--iommu --append hugepages=64 --nvme nv0=1G --nvme nv1=1G)

# drive_modules: what VFIO needs of the kernel. Nothing loads it by itself where there is no udev.
drive_modules() { modprobe -a vfio-pci vfio_iommu_type1; }

# drive_port NAME: the PCI address of the root port that the drive is behind.
drive_port() { sed -n 1p "$LAB_DRIVES/$1"; }

# drive_place NAME: the PCI address of the drive; fails where there is none now.
drive_place() {
    local path
    for path in "/sys/bus/pci/devices/$(drive_port "$1")"/0000:*; do
        [ ! -e "$path/class" ] || { echo "${path##*/}"; return; }
    done
    return 1
}
drive_is_there() { drive_place "$1" >/dev/null; }
drive_is_gone() { ! drive_is_there "$1"; }

# drive_driver NAME: which driver it is bound to; nothing for none.
drive_driver() {
    local link
    link=$(readlink "/sys/bus/pci/devices/$(drive_place "$1")/driver") || return 0
    echo "${link##*/}"
}

# drive_bind NAME DRIVER (vfio-pci, nvme), whose module is loaded. A drive that was plugged in is a new one,
# and bound to nothing or to nvme.
drive_bind() {
    local address path
    address=$(drive_place "$1") || { echo "drive_bind $1: it is not there" >&2; return 1; }
    path=/sys/bus/pci/devices/$address
    [ ! -e "$path/driver" ] || echo "$address" >"$path/driver/unbind"
    echo "$2" >"$path/driver_override"
    echo "$address" >/sys/bus/pci/drivers_probe
    [ "$(drive_driver "$1")" = "$2" ] || { echo "drive_bind $1: it is not bound to $2" >&2; return 1; }
}

# drive_wait SECONDS CONDITION NAME: drive_wait 30 drive_is_gone nv0
drive_wait() {
    local deadline=$((SECONDS + $1 + 1))
    until "$2" "$3"; do
        [ "$SECONDS" -lt "$deadline" ] || { echo "not within $1 s: $2 $3" >&2; return 1; }
        sleep 0.1
    done
}

# qmp COMMAND [ARGUMENTS]: one command of QEMU's monitor, its arguments as JSON. Fails if it is refused.
qmp() {
    local port line id=$RANDOM$RANDOM arguments=${2:-}
    exec {port}<>"$LAB_QMP" || return 1
    # Needed once; later it is an error, which is ignored.
    printf '{"execute":"qmp_capabilities","id":"hello"}\n' >&"$port"
    printf '{"execute":"%s","id":"%s"%s}\n' "$1" "$id" "${arguments:+,\"arguments\":$arguments}" >&"$port"
    # Events of the past, and answers to others, come first.
    while IFS= read -r -t 20 line <&"$port"; do
        [[ $line == *"\"$id\""* ]] || continue
        exec {port}>&-
        [[ $line != *'"error"'* ]] || { echo "qmp $1: $line" >&2; return 1; }
        return 0
    done
    exec {port}>&-
    echo "qmp $1: no answer" >&2
    return 1
}

# drive_unplug NAME: press the button beside it. Five seconds later the kernel takes the driver off, and
# waits as long as that takes; then the slot's power goes off, and the drive is gone. Returns at once.
drive_unplug() { qmp device_del "{\"id\":\"$1\"}"; }

# drive_plug NAME: put it in again, with the data that it had.
drive_plug() {
    local options
    # The port's driver takes no notice of what happens in the second after it has switched the power off.
    sleep 2
    options=$(sed -n 2p "$LAB_DRIVES/$1")
    # QEMU 10, as Debian 13 has it, wants numbers as numbers. No drive's serial number is one.
    options=$(awk -v RS=, -F= '{ sub(/\n/, "", $2); print ",\"" $1 "\":" ($2 ~ /^[0-9]+$/ ? $2 : "\"" $2 "\"") }' ORS= <<<"$options")
    qmp device_add "{\"driver\":\"nvme\",\"id\":\"$1\"$options}"
}

# drive_pull NAME [PID...]: it is gone at once, without a removal request. QEMU takes out what is behind a
# port when the slot's power goes off with its light, so that is done behind the back of the port's driver.
# The processes PID... are held still meanwhile: QEMU (7.2) uses what it has freed if a doorbell rings at that
# moment, and dies of it.
drive_pull() {
    local config at control name=$1
    shift
    config=/sys/bus/pci/devices/$(drive_port "$name")/config
    # The capability PCI Express (10h); its Slot Control is at 18h.
    at=$(pci_byte "$config" 0x34)
    while [ "$at" != 0 ] && [ "$(pci_byte "$config" "$at")" != 16 ]; do
        at=$(pci_byte "$config" $((at + 1)))
    done
    [ "$at" != 0 ] || { echo "drive_pull $name: its port has no slot" >&2; return 1; }
    at=$((at + 0x18))
    control=$(($(pci_byte "$config" "$at") | $(pci_byte "$config" $((at + 1))) << 8))
    [ $# = 0 ] || kill -STOP "$@"
    # Its driver hears of it when all is done, or it would find the power off and think it had done that: no
    # interrupts of Hot-Plug and Command Completed (bits 5, 4) before. Presence Detect Changed (bit 3) is off
    # in a slot with a button, whose driver relies on the link going down; QEMU does not tell that.
    pci_set_word "$config" "$at" $((control & ~0x38))
    # Power Controller Control off (bit 10), Power Indicator Control off (bits 9:8 11b); and as it was.
    pci_set_word "$config" "$at" $((control & ~0x38 | 0x700))
    pci_set_word "$config" "$at" $((control & ~0x38))
    pci_set_word "$config" "$at" $((control | 0x38))
    [ $# = 0 ] || kill -CONT "$@"
}
pci_byte() { echo $(($(od -An -tu1 -j "$(($2))" -N1 "$1"))); }
# pci_set_word CONFIG OFFSET VALUE
pci_set_word() {
    # shellcheck disable=SC2059
    printf "$(printf '\\x%02x\\x%02x' $(($3 & 255)) $(($3 >> 8)))" |
        dd of="$1" bs=2 seek="$2" oflag=seek_bytes conv=notrunc status=none
}

# --- for cases: drives that begin each without a driver, and end so ---

# All NVMe functions, in order of address.
drive_functions() {
    local path class
    for path in /sys/bus/pci/devices/*; do
        read -r class <"$path/class" && [ "$class" = 0x010802 ] && echo "${path##*/}"
    done
    return 0
}

# function_driver ADDRESS: the driver that has it, or none.
function_driver() {
    local link
    link=$(readlink "/sys/bus/pci/devices/$1/driver") || link=none
    echo "${link##*/}"
}

# drives_up [PARAMETER=VALUE...]: give all to the kernel's driver, which is loaded with these parameters.
drives_up() {
    local address
    modprobe nvme "$@" || return 1
    for address in $(drive_functions); do within 15 find_drive_block "$address"; done
    # udev's reads are interrupts, and errors in the kernel's log when a drive goes.
    udevadm settle --timeout=60 || true
}

# find_drive_block ADDRESS: sets BLOCK (/dev/nvme0n1), the drive's first namespace. With multipath the
# controller's own entry is the path nvme0c0n1 and the disk nvme0n1.
# shellcheck disable=SC2034
find_drive_block() {
    local path
    for path in "/sys/bus/pci/devices/$1"/nvme/nvme*/nvme*n*; do
        BLOCK=/dev/$(sed -E 's/c[0-9]+n/n/' <<<"${path##*/}")
        [ ! -b "$BLOCK" ] || ! opens "$BLOCK" || return 0
    done
    return 1
}

# drives_forget: as they were before the case. Where there are none nothing is done.
drives_forget() {
    local address driver
    [ -n "$(drive_functions)" ] || return 0
    udevadm settle --timeout=60 || true
    rm -f /etc/udev/rules.d/*spindle* /etc/modules-load.d/*spindle* /etc/{sysctl,tmpfiles}.d/*spindle*
    swapoff -a
    for address in $(drive_functions); do
        driver=$(function_driver "$address")
        # Of a process that died with it open; the kernel may not be done with that.
        [ "$driver" = none ] || timeout 30 sh -c "echo $address >/sys/bus/pci/drivers/$driver/unbind" || return 1
        echo >"/sys/bus/pci/devices/$address/driver_override" || return 1
    done
    [ ! -e /sys/module/nvme ] || timeout 30 modprobe -r nvme
}
