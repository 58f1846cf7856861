# an RDMA address that is absent at the start is served when it comes, the others meanwhile; a new one is refused, or connected to at once
# limit: 600 s
skip_on nvmet 'it has no control socket'
absent=10.9.3.1
new=10.9.3.2
ctl() { "$SPINDLE" ctl --socket "$WORK/control" "$@" >"$WORK/ctl" 2>&1; }
# missing NAME: whether the status has it as missing.
missing() { ctl spindle_get_status && grep -F "\"listener $1 (rdma)\"" "$WORK/ctl" >/dev/null; }
there() { ctl spindle_get_status && ! grep -F "\"listener $1 (rdma)\"" "$WORK/ctl" >/dev/null; }
discovers() { nvme discover -t rdma -a "$1" -s "$PORT" "${HOST_A[@]}" >"$WORK/discovered" 2>&1; }
# The absent address is the only one: no device is used until it comes.
{ reactor; control; disk_ram ram 64MiB; listener "127.0.0.1:$PORT" tcp; listener "$absent:$PORT"; subsystem "$NQN" ram; } | config
target_start
within 30 tcp_listens "$PORT"
within 10 missing "$absent:$PORT"
grep -F "listener $absent:$PORT (rdma): cannot listen" "$target_log" >/dev/null || fail 'the log does not name it'
TRANSPORT=tcp ADDRESS=127.0.0.1
connect_directly "${HOST_A[1]}" "${HOST_A[3]}" "$NQN"
wait_for_block
verify_fio tcp --bs=4k --size=4M --iodepth=4
disconnect
ip addr add "$absent/32" dev d0
within 30 there "$absent:$PORT"
TRANSPORT=rdma
PORTAL=(-t rdma -a "$absent" -s "$PORT") ADDRESS=$absent
connect_block
verify_fio rdma --bs=4k --size=8M --iodepth=8
disconnect
stop_target
ip addr delete "$absent/32" dev d0

# One of two.
listeners() { listener "$RDMA_ADDRESS:$PORT"; listener "$absent:$PORT"; }
{ reactor; control; disk_ram ram 64MiB; disk_ram other 16MiB; listeners; subsystem "$NQN" ram; subsystem "$NQN1" other; } | config
start_target
within 10 missing "$absent:$PORT"
PORTAL=(-t rdma -a "$RDMA_ADDRESS" -s "$PORT") ADDRESS=$RDMA_ADDRESS
connect_block
verify_fio meanwhile --bs=4k --size=16M --iodepth=8 --rate_iops=400 &
fio=$!
under_way "$fio"
# A new one that is absent is refused, and the file stays as it was.
cp "$CONFIG" "$WORK/before.toml"
! ctl listener add "$NQN1" "rdma:$new:$PORT" || fail 'an absent address was not refused'
grep -F "listener $new:$PORT (rdma): cannot listen" "$WORK/ctl" >/dev/null || fail "refused otherwise: $(<"$WORK/ctl")"
cmp "$CONFIG" "$WORK/before.toml"
! missing "$new:$PORT" || fail 'it is waited for'
# One that is acknowledged is connected to at once, each time.
ip addr add "$new/32" dev d0
of_fio=$CTRL
for round in 1 2 3; do
    ctl listener add "$NQN1" "rdma:$new:$PORT" || fail "round $round: $(<"$WORK/ctl")"
    connect -a "$new" -n "$NQN1"
    disconnect
    ctl listener remove "$NQN1" "rdma:$new:$PORT" || fail "round $round: $(<"$WORK/ctl")"
done
CTRL=$of_fio
ip addr add "$absent/32" dev d0
within 30 there "$absent:$PORT"
discovers "$absent" || fail "not heard at the address that has come: $(<"$WORK/discovered")"
wait "$fio" || fail 'the others were disturbed'
has_state live || fail 'the connection did not stay'
disconnect
stop_target
for address in "$absent" "$new"; do ip addr delete "$address/32" dev d0; done
