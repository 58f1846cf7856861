# drives with the kernel that change places: a disk with medium_id is refused, and named; at its own place it is served
# limit: 600 s
. "$LAB/nvme-serve.sh"
over tcp
drives_up_both
find_drive_block "$DRIVE0" && first=$BLOCK
find_drive_block "$DRIVE1" && second=$BLOCK
generic() { echo "/dev/ng${1#/dev/nvme}"; }
# disk_ng NAME PATH [MEDIUM-ID]
disk_ng() {
    printf '%s\n' '[[disk]]' "name = \"$1\"" "ng = \"$2\""
    [ -z "${3:-}" ] || echo "medium_id = \"$3\""
}
drives() { reactor; disk_ng d0 "$1" "$id0"; disk_ng d1 "$2" "$id1"; listener; subsystem "$NQN" d0 d1; }
id0='' id1=''
drives "$(generic "$first")" "$(generic "$second")" | config
said=$("$SPINDLE" check "$CONFIG")
ids=$(sed -n 's/^ *medium_id = "\(.*\)"$/\1/p' <<<"$said")
expect 'the number of names' "$(sort -u <<<"$ids" | wc -l)" 2
{ read -r id0; read -r id1; } <<<"$ids"
echo "$id0 and $id1"
drives "$(generic "$first")" "$(generic "$second")" | config
start_target
connect
both_blocks
# udev looks at each namespace: what it asks for while the host disconnects fails, and the kernel says so.
udevadm settle --timeout=60
disconnect
stop_target

# As after a boot that found them in the other order.
drives "$(generic "$second")" "$(generic "$first")" | config
refused "disk\[0\].medium_id = \"$id0\": .*another one.*$id1" "$SPINDLE" check "$CONFIG"
refused "disk\[1\].medium_id = \"$id1\": .*another one.*$id0" "$SPINDLE" serve -c "$CONFIG"

# By the serial number on its label, and as a drive of our own.
id0=serial.nv0 id1=serial.nv1
drives "$(generic "$first")" "$(generic "$second")" | config
start_target
stop_target
"$SPINDLE" nvme bind --force "$DRIVE0"
own() { reactor; disk_nvme d0 "$DRIVE0"; echo "medium_id = \"$1\""; listener; subsystem "$NQN" d0; }
own serial.nv0/1 | config
start_target
stop_target
own serial.nv1 | config
refused 'disk "d0": medium_id = "serial.nv1": .*another one.*serial.nv0' "$SPINDLE" serve -c "$CONFIG"
