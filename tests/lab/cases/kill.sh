# the target is killed under fio and started again: the host reconnects, and no acknowledged block is wrong
# limit: 600 s
expect_reconnect
config_file 64MiB
start_target
connect_block --reconnect-delay=1 --ctrl-loss-tmo=120 --keep-alive-tmo=5

# The first run is of a quarter of the blocks; in the others a write that was lost leaves zeroes.
named_fio first first --size=8M --iodepth=32
named_fio first-again first --size=8M --iodepth=32 --verify_only
named_differ second --size=8M --iodepth=32
named_fio killed second --size=32M --iodepth=32 --rate_iops=300,300 &
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
named_fio after second --size=32M --iodepth=32 --verify_only
dmesg | grep 'Successfully reconnected' || fail 'the host never reconnected'
