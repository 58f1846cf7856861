# keep alive: it holds an idle connection, longer than its time-out, twice over; a host that does not send it loses its controller
# limit: 300 s
config_ram
start_target
connect_block --keep-alive-tmo=3 --reconnect-delay=1 --ctrl-loss-tmo=120
sleep 8
expect 'the state after being idle' "$(cat "/sys/class/nvme/$CTRL/state")" live
if dmesg | grep -E 'starting error recovery|Reconnecting'; then fail 'the connection was lost in between'; fi
pattern "$WORK/data" 4096
write_blocks "$WORK/data" 0
# Over RDMA the network cannot be held up so: rdma-idle-host-dies. Of nvmet it is not our log that is read.
if [ "$TRANSPORT $TARGET_KIND" = 'tcp spindle' ]; then
    # Nothing gets through, from an idle host either: the target ends its controller at 3 s and what it is late, and the host, which hears of
    # it when the network is back or by its own clock, connects again.
    expect_reconnect
    modprobe sch_netem
    trap 'tc qdisc del dev lo root 2>/dev/null || true' EXIT
    before=${EPOCHREALTIME/./}
    tc qdisc add dev lo root netem loss 100%
    within 30 grep -E "keep alive of controller [0-9]+ \(.*host-a\) expired after 3000 ms" "$target_log"
    took=$((${EPOCHREALTIME/./} - before))
    # The host's last one may have been sent half of the time-out before.
    [ "$took" -ge 1300000 ] || fail "the controller was ended after $took us, its time-out is 3 s"
    tc qdisc del dev lo root
    connected_again() { dmesg | grep 'Successfully reconnected' >/dev/null && has_state live; }
    within 60 connected_again
    read_blocks "$WORK/back" 0 4096
    cmp "$WORK/data" "$WORK/back"
fi
