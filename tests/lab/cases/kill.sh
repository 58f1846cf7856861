# the target is killed under fio and started again: the host reconnects, and no acknowledged block is wrong
# limit: 240 s
expect_reconnect
config_file 64MiB
start_target
connect_block --reconnect-delay=1 --ctrl-loss-tmo=120 --keep-alive-tmo=5

# fio's blocks carry the seed of their run: what the second run finds of the first is a write that was lost.
run=(--name=v --filename="$BLOCK" --rw=randwrite --bs=4k --size=32M --direct=1 --ioengine=libaio --iodepth=32
    --verify=crc32c --verify_fatal=1 --verify_state_save=0)
run_fio before "${run[@]}" --randseed=1
run_fio killed "${run[@]}" --randseed=2 --rate_iops=700,700 &
fio=$!
for pause in 2 3 5; do
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
run_fio after "${run[@]}" --randseed=2 --verify_only
dmesg | grep -q 'Successfully reconnected' || fail 'the host never reconnected'
