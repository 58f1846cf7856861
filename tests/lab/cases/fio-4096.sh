# a namespace with blocks of 4096 bytes, and the file disk: fio writes and verifies
{
    reactor; disk_ram d0 64MiB; echo 'block_size = 4096'; disk_file d1 "$SCRATCH/fio.img" 64MiB
    disk_file d2 "$SCRATCH_DISK" 256MiB; listener "$ADDRESS:$PORT"; subsystem "$NQN" d0 d1 d2
} | config
start_target
connect
for nsid in 1 2 3; do
    wait_for_block "$nsid"
    [ "$nsid" != 1 ] || expect 'the block size' "$(blockdev --getss "$BLOCK")" 4096
    run_fio "namespace-$nsid" --name=v --filename="$BLOCK" --direct=1 --ioengine=libaio --iodepth=32 --size=24M \
        --rw=randwrite --bssplit=4k/60:16k/20:128k/15:1M/5 --verify=crc32c --verify_fatal=1 --verify_state_save=0
done
