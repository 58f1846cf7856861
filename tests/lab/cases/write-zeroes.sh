# write-zeroes: exactly the blocks that were named read as zeroes
zeroes() {
    pattern "$WORK/data" $((1 << 20))
    write_blocks "$WORK/data" 0
    # 24 KiB from 8 KiB on.
    nvme write-zeroes "$BLOCK" -s $((8192 / sector)) -c $((24576 / sector - 1)) >/dev/null ||
        fail 'nvme write-zeroes'
    read_blocks "$WORK/back" 0 $((1 << 20))
    dd if=/dev/zero of="$WORK/data" bs=8k seek=1 count=3 conv=notrunc status=none
    cmp "$WORK/data" "$WORK/back"
    # The kernel's own way, over more than one command.
    pattern "$WORK/data" $((8 << 20))
    write_blocks "$WORK/data" 0
    blkdiscard --zeroout --offset $((1 << 20)) --length $((6 << 20)) "$BLOCK"
    read_blocks "$WORK/back" 0 $((8 << 20))
    dd if=/dev/zero of="$WORK/data" bs=1M seek=1 count=6 conv=notrunc status=none
    cmp "$WORK/data" "$WORK/back"
}
config_both 64MiB
start_target
for nsid in 1 2; do
    connect
    wait_for_block "$nsid"
    sector=$(blockdev --getss "$BLOCK")
    limit=$(cat "/sys/block/${BLOCK##*/}/queue/write_zeroes_max_bytes")
    [ "$limit" -gt 0 ] || fail "namespace $nsid offers no write-zeroes"
    zeroes
    disconnect
done
