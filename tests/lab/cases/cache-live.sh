# the cache of a file disk comes, gets another size and policy, and goes, by reload and by a call, while fio writes and verifies
# limit: 300 s
skip_on nvmet 'it has no cache'
# with SIZE [POLICY]: the configuration with this cache; without a size none.
with() {
    {
        reactor; control; disk_file file "$FILE" 128MiB
        [ $# = 0 ] || printf '%s\n' '[disk.cache]' "size = \"$1\"" "policy = \"${2:-s3-fifo}\""
        listener; subsystem "$NQN" file
    } | config
}
ctl() { "$SPINDLE" ctl --socket "$WORK/control" "$@"; }
counted() { ctl cache --json | sed -nE "s/.*\"$1\": ([0-9]+).*/\1/p"; }
with
start_target
connect_block
verify_fio before --size=16M --bs=4k --iodepth=16
verify_fio small --size=32M --bs=4k --iodepth=16 --time_based --runtime=25 &
small=$!
under_way "$small"
# 64 KiB at 64 MiB, where fio reads nothing.
read_some() { dd if="$BLOCK" of=/dev/null bs=4k count=16 skip=$((64 << 8)) iflag=direct status=none; }
changes=0
while kill -0 "$small" 2>/dev/null; do
    for size in 8MiB 32MiB 1MiB '' 64KiB; do
        with ${size:+"$size" "$([ $((changes % 2)) = 0 ] && echo lru || echo s3-fifo)"}
        reload_target
        changes=$((changes + 1))
        sleep 0.3
        [ -n "$size" ] || continue
        # A core takes the cache once it has no command in flight.
        for try in {1..20}; do
            read_some
            seen=$(counted hits)$(counted misses)
            [ "${seen:-0}" -eq 0 ] || break
            [ "$try" -lt 20 ] || fail "the cache of change $changes, $size, counts no read"
        done
    done
    ctl disk cache file 16MiB --policy lru >/dev/null
    sleep 0.3
    ctl disk cache file 0 >/dev/null
    changes=$((changes + 2))
    sleep 0.3
done
wait "$small"
echo "$changes changes"
with 32MiB
reload_target
sleep 1
verify_fio after --size=16M --bs=4k --iodepth=16
for attempt in 1 2 3 4; do
    hits=$(counted hits)
    verify_fio "again-$attempt" --size=16M --bs=4k --iodepth=16 --verify_only
    # What was beyond the budget of the core enters now.
    [ $(($(counted hits) - hits)) -lt 4000 ] || break
    [ "$attempt" -lt 4 ] || fail 'what fits is not found'
done
