# the target is asked to end under fio: it drains, ends in order, and the host goes on when it is back
# limit: 600 s
expect_reconnect
config_file 64MiB
start_target
connect_block --reconnect-delay=1 --ctrl-loss-tmo=120
verify_fio drained --bs=4k --size=16M --iodepth=32 --rate_iops=800 &
fio=$!
under_way "$fio"
sleep 1
kill -0 "$fio" 2>/dev/null || fail 'fio is done too early'
stop_target
sleep 1
start_target
within 40 has_state live
wait "$fio"
