# killed with -9 under fio on two drives, in rounds: the same drives go on, no acknowledged block is wrong
# limit: 900 s
. "$LAB/nvme-serve.sh"
drives_for_spindle
over rdma
expect_reconnect
config_drives
start_target
connect --reconnect-delay=1 --ctrl-loss-tmo=120 --keep-alive-tmo=5
both_blocks

# On nv0 a flush follows every 16 writes; on nv1 all have FUA.
run=(--size=8M --iodepth=32)
for BLOCK in "$BLOCK0" "$BLOCK1"; do named_fio "first-${BLOCK##*/}" first "${run[@]}"; done
named_differ second "${run[@]}"
BLOCK=$BLOCK0 named_fio killed-flush second "${run[@]}" --rate_iops=60,60 --fsync=16 &
fio=($!)
BLOCK=$BLOCK1 named_fio killed-fua second "${run[@]}" --rate_iops=60,60 --sync=dsync &
fio+=($!)
under_way "${fio[0]}" "$BLOCK0"
under_way "${fio[1]}" "$BLOCK1"
for pause in 1 3 5; do
    sleep "$pause"
    for pid in "${fio[@]}"; do
        kill -0 "$pid" 2>/dev/null || fail 'fio is done too early to have seen a kill'
    done
    kill_target
    sleep 1
    start_target
    within 40 has_state live
done
for pid in "${fio[@]}"; do wait "$pid"; done

# Once more, with nothing under way: what is acknowledged is not in the process that dies.
kill_target
sleep 1
start_target
within 40 has_state live
for BLOCK in "$BLOCK0" "$BLOCK1"; do
    named_fio "after-${BLOCK##*/}" second "${run[@]}" --verify_only
done
dmesg | grep 'Successfully reconnected' || fail 'the host never reconnected'
expect 'what was said of the drives' "$(lines_of 0000:)" ''
