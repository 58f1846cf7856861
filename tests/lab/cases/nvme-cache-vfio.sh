# drives that the target drives itself, with caches: fio verifies half and three times a cache, hits; the kernel's driver finds the data, and what it writes is read when the drive is back
# limit: 900 s
. "$LAB/nvme-serve.sh"
drives_for_spindle
over tcp
expect_kernel_log "${gone[@]}"
cached() { disk_nvme "$@"; printf '%s\n' '[disk.cache]' 'size = "8MiB"'; }
{
    reactor; control; listener; cached d0 "$DRIVE0"; cached d1 "$DRIVE1"
    subsystem "$NQN" d0 d1
} | config
counted() { "$SPINDLE" ctl --socket "$WORK/control" cache --json | sed -nE "s/.*\"$1\": ([0-9]+).*/\1/p" | awk '{ sum += $1 } END { print sum }'; }

# Its memory is locked as a whole: where that is not allowed the target says how much it is, and does not start.
if (ulimit -l 1024; setpriv --bounding-set -ipc_lock "$SPINDLE" serve --config "$CONFIG") >"$WORK/refused" 2>&1; then
    fail 'started with 1 MiB that it may lock'
fi
grep -E 'disk\[[01]\]\.cache\.size .*come to .* the process may lock 1 MiB \(ulimit -l\)' "$WORK/refused" || fail "$(cat "$WORK/refused")"

start_target
connect
both_blocks
pattern "$WORK/data" $((24 << 20))
for BLOCK in "$BLOCK0" "$BLOCK1"; do
    name=${BLOCK##*/}
    for bs in 4k:4M 64k:24M 1m:24M; do
        verify_fio "$name-${bs%:*}" --bs="${bs%:*}" --size="${bs#*:}" --iodepth=16
    done
    before=$(counted hits)
    named_fio "named-$name" word --size=4M --iodepth=16
    named_fio "found-$name" word --size=4M --iodepth=16 --verify_only
    named_fio "found-again-$name" word --size=4M --iodepth=16 --verify_only
    [ $(($(counted hits) - before)) -ge 1000 ] || fail "$(counted hits) hits, $before before"
    write_blocks "$WORK/data" $((64 << 20))
    for round in 1 2; do
        read_blocks "$WORK/back" $((64 << 20)) $((24 << 20))
        cmp "$WORK/data" "$WORK/back" || fail "$name, round $round: something else than was written"
    done
    # In the cache from here on.
    for round in 1 2 3; do
        before=$(counted hits)
        read_blocks "$WORK/back" $((64 << 20)) $((1 << 20))
    done
    [ $(($(counted hits) - before)) -ge 200 ] || fail "$name: $(counted hits) hits, $before before"
done
expect 'what was said of the drives' "$(lines_of 0000:)" ''

# Another size while it works: its memory is mapped, and that of before is let go of.
"$SPINDLE" ctl --socket "$WORK/control" disk cache d1 16777216
BLOCK=$BLOCK1
for round in 1 2; do
    read_blocks "$WORK/back" $((64 << 20)) $((24 << 20))
    cmp "$WORK/data" "$WORK/back" || fail "round $round with another cache: something else than was written"
done
expect 'what was said of the drives' "$(lines_of 0000:)" ''

# The first goes to the kernel's driver, which writes to what is cached here, and comes back.
drive_unplug nv0
drive_wait 60 drive_is_gone nv0
drive_plug nv0
drive_wait 30 drive_is_there nv0
expect 'where it is' "$(drive_place nv0)" "$DRIVE0"
within 15 find_drive_block "$DRIVE0"
read_blocks "$WORK/back" $((64 << 20)) $((24 << 20))
cmp "$WORK/data" "$WORK/back" || fail "the kernel's driver finds something else than was written"
pattern "$WORK/other" $((1 << 20))
write_blocks "$WORK/other" $((64 << 20))
"$SPINDLE" nvme bind --force "$DRIVE0"
BLOCK=$BLOCK0
# Not from the cache: whether the drive is back says only what is read from it.
is_back() { dd if="$BLOCK" of=/dev/null bs=4k count=1 iflag=direct,skip_bytes skip=$((128 << 20)) status=none 2>/dev/null; }
within 30 is_back
read_blocks "$WORK/back" $((64 << 20)) $((1 << 20))
cmp "$WORK/other" "$WORK/back" || fail 'the cache has what the drive had before it was away'
read_blocks "$WORK/back" $((65 << 20)) $((23 << 20))
cmp "$WORK/back" <(tail -c $((23 << 20)) "$WORK/data") || fail 'a block beside was changed'
verify_fio after --bs=16k --iodepth=16 --size=24M
finish

"$SPINDLE" nvme unbind "$DRIVE0" "$DRIVE1"
within 15 find_drive_block "$DRIVE1"
read_blocks "$WORK/back" $((64 << 20)) $((24 << 20))
cmp "$WORK/data" "$WORK/back" || fail "the kernel's driver finds something else on the second drive"
