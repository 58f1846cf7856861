# a file disk with a cache: fio with a working set of half, one and three times its size, ext4, kill -9 under writes
# limit: 600 s
skip_on nvmet 'it has no cache'
expect_reconnect
{
    reactor; control; disk_file file "$FILE" 256MiB
    printf '%s\n' '[disk.cache]' 'size = "16MiB"'
    listener; subsystem "$NQN" file
} | config
# counted NAME: pages, since the target was started.
counted() { "$SPINDLE" ctl --socket "$WORK/control" cache --json | sed -nE "s/.*\"$1\": ([0-9]+).*/\1/p"; }
missed() { echo $(($(counted misses) + $(counted passed) + $(counted over_budget))); }
start_target
connect_block --reconnect-delay=1 --ctrl-loss-tmo=120 --keep-alive-tmo=5
for set in 8 16 48; do
    verify_fio "set-$set" --size="${set}M" --bs=4k --iodepth=16
    verify_fio "large-$set" --size="${set}M" --bsrange=512-128k --iodepth=8
    verify_fio "whole-$set" --size="${set}M" --bs=4k --iodepth=16
    for attempt in 1 2 3 4; do
        hits=$(counted hits) missed=$(missed)
        verify_fio "again-$set-$attempt" --size="${set}M" --bs=4k --iodepth=16 --verify_only
        hits=$(($(counted hits) - hits)) missed=$(($(missed) - missed))
        echo "a set of $set MiB read again: $hits pages found, $missed not"
        [ $((hits + missed)) -ge $((set * 256)) ] || fail "$((set * 256)) pages were read, $((hits + missed)) counted"
        # What was beyond the budget of the core enters now.
        if [ "$set" != 8 ] || [ "$missed" -le $((set * 256 / 50)) ]; then break; fi
        [ "$attempt" -lt 4 ] || fail 'what fits is not found'
    done
done
[ "$(counted evictions)" -gt 4096 ] || fail 'nothing was evicted'

tree=/usr/lib/modules/$(uname -r)/kernel/fs
mnt=$WORK/mnt
mkdir "$mnt"
mkfs.ext4 -q "$BLOCK"
mount "$BLOCK" "$mnt"
cp -a "$tree" "$mnt/copy"
umount "$mnt"
mount "$BLOCK" "$mnt"
diff -r "$tree" "$mnt/copy"
rm -rf "$mnt/copy"
fstrim "$mnt"
umount "$mnt"
fsck.ext4 -fn "$BLOCK" || fail 'fsck found something'

named_fio first first --size=16M --iodepth=32
named_differ second --size=8M --iodepth=32
named_fio killed second --size=16M --iodepth=32 --rate_iops=300,300 &
fio=$!
under_way "$fio"
sleep 2
kill -0 "$fio" 2>/dev/null || fail 'fio is done too early to have seen a kill'
kill_target
sleep 1
start_target
within 40 has_state live
wait "$fio"
named_fio after second --size=16M --iodepth=32 --verify_only
