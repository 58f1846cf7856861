# what a configuration asks of drives and cannot have: one line each, with field, value and what is allowed
# limit: 600 s
. "$LAB/nvme-serve.sh"
expect_kernel_log 'vfio_pin_pages_remote: RLIMIT_MEMLOCK'
over tcp
drives_up_both
# one DISK-LINE...: a configuration of one disk.
one() { { reactor; listener; printf '%s\n' '[[disk]]' 'name = "d"' "$@"; subsystem "$NQN" d; } | config; }
# refuses PATTERN [COMMAND...]: serve, run by the command, ends by itself, with an exit code, and says this.
refuses() {
    local said code=0
    said=$(timeout 60 "${@:2}" "$SPINDLE" serve -c "$CONFIG" 2>&1) || code=$?
    echo "$code: $said"
    [ "$code" != 0 ] && [ "$code" != 124 ] || fail "serve went on, code $code"
    grep -E "$1" <<<"$said" >/dev/null || fail "wanted a refusal by '$1', got: $said"
    if grep -F panicked <<<"$said" >/dev/null; then fail "a panic: $said"; fi
}

one "nvme = \"$DRIVE0\""
refuses "disk\[0\].nvme = \"$DRIVE0\": must be .* its driver is nvme; spindle nvme bind $DRIVE0"
drives_for_spindle
one 'nvme = "0000:77:00.0"'
# Served, as drives may be missing for a while; `spindle check` reports it.
refused 'disk\[0\].nvme = "0000:77:00.0": must be .* no such PCI function; spindle nvme list' "$SPINDLE" check "$CONFIG"
one 'nvme = "0000:00:00.0"'
refuses 'disk\[0\].nvme = "0000:00:00.0": .*class is 0x060000, that of an NVMe drive is 0x010802'
one 'nvme = "0000:01:00"'
refuses 'disk\[0\].nvme = "0000:01:00": .*must be a PCI address, like'
one "nvme = \"$DRIVE0\"" 'namespace = 2'
refuses "namespace = 2: $DRIVE0 has these usable namespaces: \[1\]"
one "nvme = \"$DRIVE0\"" 'namespace = 0'
refuses 'disk\[0\].namespace = 0: must be a whole number from 1 to'
one "nvme = \"$DRIVE0\"" 'size = "1GiB"'
refuses 'disk\[0\].size = "1GiB": the drive says'
one 'ng = "/dev/null"'
refuses 'disk\[0\].ng = "/dev/null": must be .*like /dev/ng0n1'
one 'ng = "/dev/ng7n1"'
# As with a drive that is missing.
refused 'disk\[0\].ng = "/dev/ng7n1": .*No such file' "$SPINDLE" check "$CONFIG"
# The same namespace twice.
{ reactor; listener; disk_nvme a "$DRIVE0"; disk_nvme b "$DRIVE0"; subsystem "$NQN" a b; } | config
refuses "disk\[1\].nvme = \"$DRIVE0\": namespace 1 is also the disk in line"
# Another process has the drive.
config_drives
start_target
CONFIG=$WORK/second.toml
{ reactor; printf '%s\n' '[[listener]]' 'address = "127.0.0.1:4421"'; disk_nvme d "$DRIVE0"; subsystem "$NQN" d; } | config
refuses "$DRIVE0: IOMMU group is [0-9]+, busy: another process has it open"
stop_target
one "nvme = \"$DRIVE0\""
# A user that may not have the drive, and one that may: the group that the unit has, by the rule beside it.
user=(setpriv --reuid=65534 --regid=65534 --clear-groups)
refuses "$DRIVE0: permission is none for /dev/vfio/" "${user[@]}"
"$SPINDLE" nvme unbind "$DRIVE0"
cp "$LAB/../../conf/90-spindle.rules" /etc/udev/rules.d/
udevadm control --reload
"$SPINDLE" nvme bind --force "$DRIVE0"
file=/dev/vfio/$(basename "$(readlink "/sys/bus/pci/devices/$DRIVE0/iommu_group")")
# udev's settle returned, and CI's log has a file that is not the group's yet.
for _ in {1..200}; do
    [ "$(stat -c %G "$file")" != disk ] || break
    sleep 0.1
done
[ "$(stat -c %G "$file")" = disk ] ||
    fail "20 s after the bind: $(stat -c '%n %G %a' "$file"), $(pgrep -c systemd-udevd) udevd, $(udevadm test "/sys/class/vfio/${file##*/}" 2>&1)"
user=(setpriv --reuid=65534 --regid=65534 --groups=disk prlimit --memlock=unlimited)
timeout 60 "${user[@]}" "$SPINDLE" serve -c "$CONFIG" >"$WORK/user.log" 2>&1 &
server=$!
until grep -qF serving "$WORK/user.log" || ! kill -0 "$server"; do sleep 0.1; done
kill "$server" || true
wait "$server" || true
grep -F serving "$WORK/user.log" || fail "a user of the group disk cannot serve it: $(cat "$WORK/user.log")"
# No more locked memory than this: the rest is served, the log says why the disk is not, and the core tries again.
said=$(timeout 20 setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock prlimit --memlock=65536 "$SPINDLE" serve -c "$CONFIG" 2>&1) || true
grep -F 'RLIMIT_MEMLOCK' <<<"$said" >/dev/null || fail "wanted the limit of locked memory, got: $said"
# What was refused has left nothing behind.
CONFIG=$WORK/target.toml
config_drives
start_target
connect
both_blocks
expect 'what was said of the drives' "$(lines_of drive)" ''
