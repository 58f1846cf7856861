# a disk that is a namespace of another target, which is killed under fio: no acknowledged block is wrong
# limit: 600 s
skip_on nvmet 'its disks are devices and files'
# shellcheck source=tests/lab/far.sh
. "$LAB/far.sh"
far_up "$(disk_file far "$FILE" 64MiB)"
has_bytes "$BLOCK" $((64 << 20)) || fail "$(block_bytes "$BLOCK") bytes"

# Every kind of command, the last block, and more in one than the far target takes.
verify_fio sizes --bsrange=512-256k --blockalign=512 --size=8M --iodepth=16
pattern "$WORK/data" 65536
write_blocks "$WORK/data" $(((64 << 20) - 65536))
read_blocks "$WORK/back" $(((64 << 20) - 65536)) 65536
cmp "$WORK/data" "$WORK/back"
sync "$BLOCK"
blkdiscard -z -o $(((64 << 20) - 65536)) -l 4096 "$BLOCK"
blkdiscard -o $(((64 << 20) - 8192)) -l 8192 "$BLOCK"
read_blocks "$WORK/back" $(((64 << 20) - 65536)) 4096
is_zero "$WORK/back" || fail 'Write Zeroes left something'
read_blocks "$WORK/back" $(((64 << 20) - 8192)) 8192
is_zero "$WORK/back" || fail 'what was trimmed is not zero'

# The first run is of a quarter of the blocks; in the others a write that was lost leaves zeroes.
named_fio first first --size=8M --iodepth=32
named_fio first-again first --size=8M --iodepth=32 --verify_only
named_differ second --size=8M --iodepth=32
named_fio killed second --size=32M --iodepth=32 --rate_iops=300,300 &
fio=$!
under_way "$fio"
for kills in 1 2 3; do
    sleep "$kills"
    kill -0 "$fio" 2>/dev/null || fail 'fio is done too early to have seen a kill'
    far_kill
    sleep 1
    far_start
    # The host notices nothing but time: commands wait for the far target.
    has_state live || fail 'the host lost its controller'
done
wait "$fio"
named_fio after second --size=32M --iodepth=32 --verify_only
said 1 'found namespace 1 of' || fail 'the far target was never found again'
disconnect
stop_target
# What the front acknowledged and flushed is in the far target's file.
far_stop
