# an RDMA address or its device that is absent at the start is served when it comes, the others meanwhile; a new one is refused, or bound once acknowledged
# limit: 600 s
skip_on nvmet 'it has no control socket'
expect_kernel_log '(d1|d2) speed is unknown'
absent=10.9.3.1 later=10.9.3.2 new=10.9.3.3 nowhere=10.9.3.4
ctl() { "$SPINDLE" ctl --socket "$WORK/control" "$@" >"$WORK/ctl" 2>&1; }
# missing NAME: whether the status has it as missing.
missing() { ctl spindle_get_status && grep -F "\"listener $1 (rdma)\"" "$WORK/ctl" >/dev/null; }
there() { ctl spindle_get_status && ! grep -F "\"listener $1 (rdma)\"" "$WORK/ctl" >/dev/null; }
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

# One of two: the address is there, and its device is not yet. Another device has no listener at the start.
for device in "d1 $new" "d2 $later"; do
    read -r link address <<<"$device"
    ip link add "$link" type dummy
    ip addr add "$address/32" dev "$link"
    ip link set "$link" mtu 4200 up
done
rdma link add rxe1 type rxe netdev d1
{
    reactor; control; disk_ram ram 64MiB; disk_ram other 350MiB
    listener "$RDMA_ADDRESS:$PORT"; listener "$later:$PORT"; subsystem "$NQN" ram; subsystem "$NQN1" other
} | config
start_target
within 10 missing "$later:$PORT"
PORTAL=(-t rdma -a "$RDMA_ADDRESS" -s "$PORT") ADDRESS=$RDMA_ADDRESS
connect_block
verify_fio meanwhile --bs=4k --size=16M --iodepth=8 --rate_iops=400 &
fio=$!
under_way "$fio"
# A new one that is absent is refused, and the file stays as it was.
cp "$CONFIG" "$WORK/before.toml"
! ctl listener add "$NQN1" "rdma:$nowhere:$PORT" || fail 'an absent address was not refused'
grep -F "listener $nowhere:$PORT (rdma): cannot listen" "$WORK/ctl" >/dev/null || fail "refused otherwise: $(<"$WORK/ctl")"
cmp "$CONFIG" "$WORK/before.toml"
! missing "$nowhere:$PORT" || fail 'it is waited for'
# One that is acknowledged is connected to at once, also the first on a device, with which the memory is registered before. The
# batch asks for the status again and again right after the answer: a process of its own would come too late to see a listener that
# is not bound.
add_and_ask() {
    python3 - "$WORK/control" "$NQN1" "$new" "$PORT" <<'END'
import json, socket, sys
path, nqn, address, port = sys.argv[1:]
listen = {"trtype": "rdma", "traddr": address, "trsvcid": port}
params = {"nqn": nqn, "listen_address": listen}
calls = [("nvmf_subsystem_add_listener", params), *[("spindle_get_status", {})] * 60]
batch = [{"jsonrpc": "2.0", "id": id, "method": method, "params": params} for id, (method, params) in enumerate(calls)]
stream = socket.socket(socket.AF_UNIX)
stream.connect(path)
stream.sendall(json.dumps(batch).encode())
stream.shutdown(socket.SHUT_WR)
added, *after = json.load(stream.makefile())
if not added.get("result"):
    sys.exit(f"refused: {added}")
missing = [it for status in after for it in status["result"]["missing"] if it["what"] == f"listener {address}:{port} (rdma)"]
if missing:
    sys.exit(f"acknowledged, and {missing}")
END
}
of_fio=$CTRL
for round in 1 2 3; do
    add_and_ask || fail "round $round"
    connect -a "$new" -n "$NQN1"
    disconnect
    ctl listener remove "$NQN1" "rdma:$new:$PORT" || fail "round $round: $(<"$WORK/ctl")"
done
CTRL=$of_fio
rdma link add rxe2 type rxe netdev d2
within 30 there "$later:$PORT"
nvme discover -t rdma -a "$later" -s "$PORT" "${HOST_A[@]}" >"$WORK/discovered" 2>&1 || fail "not heard: $(<"$WORK/discovered")"
wait "$fio" || fail 'the others were disturbed'
has_state live || fail 'the connection did not stay'
disconnect
stop_target
for device in 1 2; do rdma link delete "rxe$device" && ip link delete "d$device"; done
