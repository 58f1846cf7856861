# two drives, of 512 B and of 4096 B blocks: fio writes and verifies 512 B to 1 MiB, at depth 32 over TCP and RDMA, the first over TCP at 1 too
# limit: 900 s
. "$LAB/nvme-serve.sh"
. "$LAB/fio-matrix.sh"
drives_for_spindle
depths=(1 32) # of the first
for transport in tcp rdma; do
    over "$transport"
    config_drives
    start_target
    connect
    both_blocks
    expect 'sectors of nv0' "$(blockdev --getss "$BLOCK0")" 512
    expect 'sectors of nv1' "$(blockdev --getss "$BLOCK1")" 4096
    for BLOCK in "$BLOCK0" "$BLOCK1"; do
        expect "bytes of $BLOCK" "$(block_bytes "$BLOCK")" $((256 << 20))
        fio_sizes "${depths[@]}"
        depths=(32)
    done
    finish
    checksum_32=crc64
done
expect 'what was said of the drives' "$(lines_of 0000:)" ''
