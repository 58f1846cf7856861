# a file disk on a block device that is polled: fio verifies, nothing interrupts; refused where it cannot be
# limit: 900 s
interrupts() { awk '$NF ~ /^nvme[0-9]+q[1-9]/ { for (i = 2; i <= NF; i++) if ($i ~ /^[0-9]+$/) n += $i } END { print n + 0 }' /proc/interrupts; }
polled() {
    find_drive_block "$(drive_place nv0)" && LOCAL=$BLOCK
    {
        reactor; printf '%s\n' '[[disk]]' 'name = "d"' 'kind = "file"' "path = \"$LOCAL\"" 'poll = true'; listener
        subsystem "$NQN" d
    } | config
}

drives_up poll_queues=2
polled
start_target
connect_block
before=$(interrupts)
for bs in 4k 64k; do
    verify_fio "$bs" --bs="$bs" --size=24M --iodepth=16
done
taken=$(($(interrupts) - before))
echo "$taken interrupts"
[ "$taken" -lt 50 ] || fail "$taken interrupts in spite of polling"
# What is larger than the driver takes in one command is split by the kernel, and not polled.
verify_fio 1m --bs=1m --size=24M --iodepth=4
# What does not poll goes another way: flush, FUA, zeroes, discard.
pattern "$WORK/data" $((2 << 20))
write_blocks "$WORK/data" 0
nvme flush "$BLOCK" >/dev/null || fail 'flush'
dd if="$WORK/data" of="$BLOCK" bs=64k oflag=direct,dsync conv=nocreat,notrunc status=none
blkdiscard -z -o 0 -l 524288 "$BLOCK"
blkdiscard -o 524288 -l 524288 "$BLOCK"
read_blocks "$WORK/back" 0 $((2 << 20))
cmp "$WORK/back" <(head -c $((1 << 20)) /dev/zero; tail -c $((1 << 20)) "$WORK/data") || fail 'the data are not what they should be'
verify_fio mixed --bs=8k --size=16M --iodepth=16 --fsync=32
disconnect
stop_target
udevadm settle --timeout=60
modprobe -r nvme

drives_up poll_queues=0
polled
refused 'poll = true: must be false.*io_poll is 0.*nvme.poll_queues' timeout 60 "$SPINDLE" serve -c "$CONFIG"
