# fio writes and verifies blocks of mixed sizes: 4096-byte sectors, a file, a block device
{
    reactor; disk_ram d0 64MiB; echo 'block_bytes = 4096'; disk_file d1 "$FILE" 64MiB
    disk_file d2 "$SCRATCH_DISK" 256MiB; listener; subsystem "$NQN" d0 d1 d2
} | config
start_target
connect
for nsid in 1 2 3; do
    wait_for_block "$nsid"
    [ "$nsid" != 1 ] || expect 'the block size' "$(blockdev --getss "$BLOCK")" 4096
    verify_fio "namespace-$nsid" --iodepth=32 --size=24M --bssplit=4k/60:16k/20:128k/15:1M/5
done
