# drives past the kernel's block layer with caches, of 512-byte and of 4096-byte blocks: fio verifies, zeroes, hits
# limit: 600 s
disk_ng() { printf '%s\n' '[[disk]]' "name = \"$1\"" "ng = \"$2\"" '[disk.cache]' 'size = "8MiB"'; }
generic() { echo "/dev/ng${1#/dev/nvme}"; }
drives_up poll_queues=2
find_drive_block "$(drive_place nv1)" && local1=$BLOCK
find_drive_block "$(drive_place nv0)" && local0=$BLOCK
{
    reactor; control; disk_ng first "$(generic "$local0")"; disk_ng second "$(generic "$local1")"; listener
    subsystem "$NQN" first second
} | config
counted() { "$SPINDLE" ctl --socket "$WORK/control" cache --json | sed -nE "s/.*\"$1\": ([0-9]+).*/\1/p" | awk '{ sum += $1 } END { print sum }'; }
start_target
connect
for nsid in 1 2; do
    wait_for_block "$nsid"
    for bs in 4k:4M 64k:8M 1m:16M; do
        verify_fio "$nsid-${bs%:*}" --bs="${bs%:*}" --size="${bs#*:}" --iodepth=16
    done
    pattern "$WORK/data" $((3 << 20))
    write_blocks "$WORK/data" 1048576
    for round in 1 2; do
        read_blocks "$WORK/back" 1048576 $((3 << 20))
        cmp "$WORK/data" "$WORK/back" || fail "round $round: something else than was written"
    done
    blkdiscard -z -o 1048576 -l 1048576 "$BLOCK"
    read_blocks "$WORK/back" 1048576 $((1 << 20))
    is_zero "$WORK/back" || fail 'zeroed blocks are not zero'
    read_blocks "$WORK/back" $((2 << 20)) $((2 << 20))
    cmp "$WORK/back" <(tail -c $((2 << 20)) "$WORK/data") || fail 'a block beside the zeroes was changed'
    before=$(counted hits)
    named_fio "named-$nsid" word --size=4M --iodepth=16
    named_fio "found-$nsid" word --size=4M --iodepth=16 --verify_only
    named_fio "found-again-$nsid" word --size=4M --iodepth=16 --verify_only
    [ $(($(counted hits) - before)) -ge 1000 ] || fail "$(counted hits) hits, $before before"
done
