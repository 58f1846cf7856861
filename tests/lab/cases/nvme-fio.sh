# two drives, of 512 B and of 4096 B blocks: fio writes and verifies 512 B to 1 MiB, over TCP and RDMA
# limit: 900 s
. "$LAB/nvme-serve.sh"
. "$LAB/fio-matrix.sh"
drives_for_spindle
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
        fio_sizes
    done
    finish
done
expect 'what was said of the drives' "$(lines_of 0000:)" ''
