# a cache in front of a namespace of another target, which is killed under fio: no block is wrong, and what fits is found
# limit: 600 s
skip_on nvmet 'it has no cache'
# shellcheck source=tests/lab/far.sh
. "$LAB/far.sh"
far_disk=('[disk.cache]' 'size = "16MiB"' 'sole_writer = true')
far_up "$(disk_file far "$FILE" 64MiB)"
for set in 8 48; do
    verify_fio "set-$set" --size="${set}M" --bs=4k --iodepth=16
    verify_fio "sizes-$set" --bsrange=512-128k --blockalign=512 --size="${set}M" --iodepth=8
done
named_fio first first --size=8M --iodepth=32
named_differ second --size=8M --iodepth=32
named_fio killed second --size=16M --iodepth=32 --rate_iops=300,300 &
fio=$!
under_way "$fio"
for kills in 1 2; do
    sleep "$kills"
    kill -0 "$fio" 2>/dev/null || fail 'fio is done too early to have seen a kill'
    far_kill
    sleep 1
    far_start
    has_state live || fail 'the host lost its controller'
done
wait "$fio"
named_fio after second --size=16M --iodepth=32 --verify_only
