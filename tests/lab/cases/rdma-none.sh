# no RDMA device: a target with an RDMA listener says so in one line and does not start; over TCP it does
skip_on nvmet 'the kernel target waits for a device'
# refuses_to_start: and says why.
refuses_to_start() {
    local code=0 lines
    timeout --kill-after=5 60 "$SPINDLE" serve -c "$CONFIG" >"$WORK/said" 2>&1 || code=$?
    [ "$code" -ne 0 ] && [ "$code" -lt 124 ] || fail "exit code $code: $(cat "$WORK/said")"
    ! grep 'panicked' "$WORK/said" || fail 'a panic'
    lines=$(grep -ci 'rdma' "$WORK/said") || true
    expect "lines about RDMA in: $(cat "$WORK/said")" "$lines" 1
}
rdma link delete rxe0
{ reactor; disk_ram d0 32MiB; listener; listener "127.0.0.1:$PORT" tcp; subsystem "$NQN" d0; } | config
refuses_to_start
# Nor without the kernel's side of it.
modprobe -r nvme_rdma rdma_ucm
refuses_to_start

{ reactor; disk_ram d0 32MiB; listener "127.0.0.1:$PORT" tcp; subsystem "$NQN" d0; } | config
TRANSPORT=tcp ADDRESS=127.0.0.1
start_target
connect_directly "${HOST_A[1]}" "${HOST_A[3]}" "$NQN"
wait_for_block
pattern "$WORK/data" 65536
write_blocks "$WORK/data" 0
read_blocks "$WORK/back" 0 65536
cmp "$WORK/data" "$WORK/back"
