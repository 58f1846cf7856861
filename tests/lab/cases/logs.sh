# the other log pages: commands and their effects, firmware, changed namespaces; at an offset and in pieces
config_ram
start_target
connect_block
nvme get-log "/dev/$CTRL" --log-id=5 --log-len=4096 -b >"$WORK/whole"
expect 'the length of the effects log' "$(stat -c %s "$WORK/whole")" 4096
# Read (02h) is an I/O command that the log must know; the I/O commands begin at 1024.
effects=$(od -An -t u1 -j $((1024 + 4 * 2)) -N 1 "$WORK/whole")
[ $((effects & 1)) = 1 ] || fail "the effects of Read: $effects"
nvme fw-log "/dev/$CTRL" >/dev/null || fail 'fw-log'
nvme changed-ns-list-log "/dev/$CTRL" >/dev/null || fail 'changed-ns-list-log'

[ "$TARGET_KIND" != nvmet ] || exit 0 # the kernel target gives out these pages as a whole only
nvme get-log "/dev/$CTRL" --log-id=5 --log-len=512 --lpo=1024 -b >"$WORK/piece"
cmp -n 512 -i 1024:0 "$WORK/whole" "$WORK/piece"
