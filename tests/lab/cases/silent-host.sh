# a host that goes silent under load: its controller ends by keep alive, its resources come back, others do not notice
# limit: 300 s
skip_over rdma 'rdma-host-dies has it'
skip_on nvmet 'it is our log that is read'
expect_reconnect
network_apart
spindle=$SPINDLE
cat >"$WORK/inside" <<END
#!/bin/sh
exec nsenter --net=/run/netns/target "$spindle" "\$@"
END
chmod +x "$WORK/inside"
SPINDLE=$WORK/inside
ADDRESS=10.9.7.2 PORTAL=(-t tcp -a 10.9.7.2 -s "$PORT")
is_listening() { ip netns exec target ss -Hltn "sport = :$PORT" | grep . >/dev/null; }

config_ram 256MiB
start_target
# Descriptors of the target's connections.
sockets() { find "/proc/$target_pid/fd" -lname 'socket:*' | wc -l; }
sockets_are() { [ "$(sockets)" = "$1" ]; }
alone=$(sockets)

connect_block --keep-alive-tmo=5 --reconnect-delay=1 --ctrl-loss-tmo=120
run=(--bs=16k --size=16M --iodepth=16 --verify=crc32c --verify_fatal=1 --verify_state_save=0)
run_fio before "${run[@]}" --rw=randwrite
[ "$(sockets)" -gt "$alone" ] || fail 'the connections are not seen'

under() { until [ -e "$WORK/enough" ]; do run_fio under "${run[@]}" --rw=randwrite --rate_iops=200; done; }
under &
fio=$!
under_way "$fio"
echo "silent from $EPOCHREALTIME"
tc qdisc add dev v0 root netem loss 100%
# Another host, of the target's own network, while the first one is silent.
"$SPINDLE" bench 10.9.7.2:$PORT --nqn "$NQN" --rw read --bs 4KiB --qd 16 --seconds 2 --span 16MiB --json >"$WORK/other"
grep -E '"errors": *0' "$WORK/other" >/dev/null || fail "the other host: $(cat "$WORK/other")"
# 5 s, what it may be late, and 2 s for what is queued to leave.
within 15 grep -q 'keep alive of controller .* expired after' "$target_log"
within 15 sockets_are "$alone"
echo "its connections are gone at $EPOCHREALTIME"
tc qdisc del dev v0 root
within 60 has_state live
touch "$WORK/enough"
wait "$fio"
run_fio after "${run[@]}" --rw=randwrite
[ "$(sockets)" -gt "$alone" ] || fail 'the host is not connected again'
