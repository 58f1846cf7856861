# list, bind, unbind: what uses a drive forbids it, a dry run changes nothing, a rule outlives a hot-plug
# limit: 600 s
drives_up
nvme=("$SPINDLE" nvme)
DRIVE0=$(drive_place nv0)
DRIVE1=$(drive_functions | grep -vFx "$DRIVE0" | grep -vFx "$(drive_place nv1)")
find_drive_block "$DRIVE1" && BLOCK1=$BLOCK
find_drive_block "$DRIVE0" && BLOCK0=$BLOCK
driver_is() { [ "$(function_driver "$1")" = "$2" ]; }
# in_list TEXT...: what `list` says has each of these, as text for people or as JSON.
in_list() {
    local text said
    said=$("${nvme[@]}" list; "${nvme[@]}" list --json)
    for text; do grep -F -- "$text" <<<"$said" >/dev/null || fail "no '$text' in: $said"; done
}
# What cases before have left on them.
wipefs -qa "$BLOCK0" "$BLOCK1"
udevadm settle --timeout=60
expect 'the name of the multipath disk' "$(ls "/sys/bus/pci/devices/$DRIVE1"/nvme/nvme*/ | grep -cE '^nvme[0-9]+c[0-9]+n1$')" 1
in_list "$DRIVE0" "$DRIVE1" nv0 multi0 'QEMU NVMe Ctrl' '256 MiB' '"in_use":false'
pattern "$WORK/data" $((8 << 20))
write_blocks "$WORK/data" 1048576

# What uses a drive, on a partition of the multipath disk.
addpart "$BLOCK1" 1 2048 409600
within 10 test -b "${BLOCK1}p1"
mkfs.ext4 -q "${BLOCK1}p1"
mkdir -p "$WORK/my data"
mount "${BLOCK1}p1" "$WORK/my data"
in_list "mounted: ${BLOCK1#/dev/}p1 at $WORK/my data (ext4)" '"kind":"mounted"'
refused "$DRIVE1: in use = mounted: ${BLOCK1#/dev/}p1 at $WORK/my data .*must not be mounted" "${nvme[@]}" bind "$DRIVE1"
# With one that could be: neither is moved.
refused 'must not be mounted' "${nvme[@]}" bind "$DRIVE0" "$DRIVE1"
driver_is "$DRIVE0" nvme && driver_is "$DRIVE1" nvme || fail 'a drive was moved in spite of the refusal'
umount "$WORK/my data"
mkswap -q "${BLOCK1}p1"
swapon "${BLOCK1}p1"
refused 'in use = swap: .*swapoff' "${nvme[@]}" bind "$DRIVE1"
swapoff "${BLOCK1}p1"
{ reactor; disk_file file "$BLOCK0" 256MiB; listener; subsystem "$NQN" file; } | config
start_target
refused "in use = open for writing: $BLOCK0 by pid $target_pid \(spindle\)" "${nvme[@]}" bind "$DRIVE0"
stop_target
# By another name, and by the drive's own device.
mknod "$WORK/another name" b "$(stat -c 0x%t "$BLOCK0")" "$(stat -c 0x%T "$BLOCK0")"
exec {other}<>"$WORK/another name"
refused "in use = open for writing: $BLOCK0 by pid $BASHPID \(.*\) as $WORK/another name" "${nvme[@]}" bind "$DRIVE0"
exec {other}>&-
controller=/dev/$(basename "$(echo "/sys/bus/pci/devices/$DRIVE0"/nvme/nvme*)")
exec {other}<>"$controller"
refused "in use = open for writing: $controller by pid $BASHPID" "${nvme[@]}" bind "$DRIVE0"
exec {other}>&-
# The kernel's own target has no process, and lets others have the disk exclusively.
modprobe nvmet
mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
exported=/sys/kernel/config/nvmet/subsystems/nqn.2026-01.lab:kernel
mkdir "$exported" "$exported/namespaces/1"
printf '%s' "$BLOCK0" >"$exported/namespaces/1/device_path"
echo 1 >"$exported/namespaces/1/enable"
in_list "exported by the kernel: ${BLOCK0#/dev/} by nvmet subsystem nqn.2026-01.lab:kernel, namespace 1" '"kind":"exported"'
refused 'must not be exported by the kernel' "${nvme[@]}" bind --force "$DRIVE0"
refused 'disk "file": path = .*must not be exported by the kernel as well \(nvmet subsystem' "$SPINDLE" serve -c "$CONFIG"
{ reactor; printf '%s\n' '[[disk]]' 'name = "ng"' "ng = \"/dev/ng${BLOCK0#/dev/nvme}\""; listener; subsystem "$NQN" ng; } >"$WORK/ng.toml"
refused 'disk "ng": ng = .*must not be exported by the kernel as well \(nvmet subsystem' "$SPINDLE" serve -c "$WORK/ng.toml"
echo 0 >"$exported/namespaces/1/enable"
rmdir "$exported/namespaces/1" "$exported"
# What is on it and not in use now.
mkswap -q "$BLOCK0"
refused "$DRIVE0: holds = swap on ${BLOCK0#/dev/}: .*--force" "${nvme[@]}" bind "$DRIVE0"
wipefs -qa "$BLOCK0"
refused 'class = 0x.*must be 0x010802' "${nvme[@]}" bind 0000:00:00.0
refused 'ADDRESS = 0000:77:00.0.*NVMe' "${nvme[@]}" bind 77:00.0
refused 'ADDRESS|PCI function' "${nvme[@]}" bind "$BLOCK0"

# A dry run says all and does nothing.
state() { ls /etc/udev/rules.d /etc/modules-load.d /etc/sysctl.d; lsmod | awk '{ print $1 }' | sort; cat /sys/bus/pci/devices/*/driver_override; }
before=$(state)
dry=$("${nvme[@]}" bind --dry-run --persist --huge-pages 16 "$DRIVE0")
expect 'the state after a dry run' "$(state)" "$before"
said=$("${nvme[@]}" bind "$DRIVE0")
echo "$said"
# One more where vfio-pci is not loaded yet.
expect 'the first steps' "$(head -n 3 <<<"$said")" "$(head -n 3 <<<"$dry")"
expect 'the driver' "$(function_driver "$DRIVE0")" vfio-pci
group=$(basename "$(readlink "/sys/bus/pci/devices/$DRIVE0/iommu_group")")
[ -c "/dev/vfio/$group" ] || fail "no /dev/vfio/$group"
[ ! -b "$BLOCK0" ] || fail "$BLOCK0 is still there"
in_list vfio-pci '"in_use":false'
expect_match 'a second bind' "$("${nvme[@]}" bind "$DRIVE0")" '.*is bound to vfio-pci already.*'

# A group that is open is not taken away.
exec {vfio}<>"/dev/vfio/$group"
in_list "VFIO group open: /dev/vfio/$group by pid $BASHPID"
refused "in use = VFIO group open: /dev/vfio/$group by pid $BASHPID" "${nvme[@]}" unbind "$DRIVE0"
exec {vfio}>&-
"${nvme[@]}" unbind "$DRIVE0"
within 15 find_drive_block "$DRIVE0"
read_blocks "$WORK/back" 1048576 $((8 << 20))
cmp "$WORK/data" "$WORK/back" || fail 'the data is not what it was'

# A rule takes the drive again when it appears, and only that drive, and only unused.
"${nvme[@]}" bind --persist --huge-pages 16 "$DRIVE0"
[ "$(awk '$1 == "HugePages_Total:" { print $2 }' /proc/meminfo)" -ge 16 ] || fail 'no huge pages'
in_list '(persists)' '"persistent":true'
rule=/etc/udev/rules.d/90-spindle-nvme-$DRIVE0.rules
udevadm control --reload
# as_at_boot: as an initramfs leaves it: with the kernel; then udev reports it again.
as_at_boot() {
    echo >"/sys/bus/pci/devices/$DRIVE0/driver_override"
    echo "$DRIVE0" >/sys/bus/pci/drivers/vfio-pci/unbind
    echo "$DRIVE0" >/sys/bus/pci/drivers_probe
    within 15 find_drive_block "$DRIVE0"
    "$@"
    udevadm trigger --action=add "/sys/bus/pci/devices/$DRIVE0"
    udevadm settle --timeout=60
}
as_at_boot true
within 10 driver_is "$DRIVE0" vfio-pci
echo 1 >"/sys/bus/pci/devices/$DRIVE0/remove"
[ ! -e "/sys/bus/pci/devices/$DRIVE0" ] || fail 'the drive is not gone'
echo 1 >/sys/bus/pci/rescan
within 20 driver_is "$DRIVE0" vfio-pci
mkfs_and_mount() { mkfs.ext4 -q -F "$BLOCK"; mount "$BLOCK" "$WORK/my data"; }
as_at_boot mkfs_and_mount
driver_is "$DRIVE0" nvme || fail 'the rule took a mounted drive'
umount "$WORK/my data"
refused "holds = ext4 on " "${nvme[@]}" bind "$DRIVE0"
"${nvme[@]}" bind --force "$DRIVE0"
sed -i 's/^# serial: .*/# serial: OTHER/' "$rule"
as_at_boot true
driver_is "$DRIVE0" nvme || fail 'the rule took another drive'
"${nvme[@]}" unbind "$DRIVE0"
compgen -G '/etc/*/*spindle*' && fail 'unbind left a file'
compgen -G '/etc/udev/rules.d/*spindle*' && fail 'unbind left a rule'
true
