# the target is killed under fio and started again: the host reconnects, and no acknowledged block is wrong
# limit: 600 s
expect_reconnect
config_file 64MiB
start_target
connect_block --reconnect-delay=1 --ctrl-loss-tmo=120 --keep-alive-tmo=5

# Each run fills its blocks with their offset and its own name. So what a run finds of the one before is a
# write that was lost; fio's checksums alone would be content with it.
# The one before is of a quarter of the blocks; in the others a write that was lost leaves zeroes.
run=(--rw=randwrite --bs=4k --iodepth=32 --verify=pattern --verify_fatal=1 --verify_state_save=0)
first=(--verify_pattern='%o"first"') second=(--verify_pattern='%o"second"')
run_fio first --size=8M "${run[@]}" "${first[@]}"
run_fio first-again --size=8M "${run[@]}" "${first[@]}" --verify_only
if ( run_fio teeth --size=8M "${run[@]}" "${second[@]}" --verify_only ) >/dev/null 2>&1; then
    fail 'fio does not tell one run from the other'
fi
run_fio killed --size=32M "${run[@]}" "${second[@]}" --rate_iops=300,300 &
fio=$!
under_way "$fio"
for pause in 1 3 5; do
    sleep "$pause"
    kill -0 "$fio" 2>/dev/null || fail 'fio is done too early to have seen a kill'
    kill_target
    sleep 1
    start_target
    within 40 has_state live
done
wait "$fio"

# Once more, with nothing under way: what is acknowledged is not in the process that dies.
kill_target
sleep 1
start_target
within 40 has_state live
run_fio after --size=32M "${run[@]}" "${second[@]}" --verify_only
dmesg | grep 'Successfully reconnected' || fail 'the host never reconnected'
