# no RDMA device, and no connection manager: TCP is served, the RDMA listeners are missing, and are served when both have come
# limit: 600 s
skip_on nvmet 'the kernel target waits for a device'
missing() {
    "$SPINDLE" ctl --socket "$WORK/control" spindle_get_status >"$WORK/ctl" 2>&1 &&
        grep -F "\"listener $RDMA_ADDRESS:$PORT (rdma)\"" "$WORK/ctl" >/dev/null
}
there() { ! missing && grep -F '"missing"' "$WORK/ctl" >/dev/null; }
over() { TRANSPORT=$1 ADDRESS=$2 PORTAL=(-t "$1" -a "$2" -s "$PORT"); }
# serves TRANSPORT ADDRESS: reads and writes of the kernel's host.
serves() {
    over "$1" "$2"
    connect_block
    verify_fio "$1" --bs=4k --size=4M --iodepth=4
    disconnect
}
# waits_for_rdma: the log says so in one line, and the status for each listener.
waits_for_rdma() {
    within 30 missing
    expect "lines in the log: $(<"$target_log")" "$(grep -c 'RDMA listeners are suspended' "$target_log")" 1
    ! grep -E 'panicked|listening \(NVMe/RDMA|memory of disks is registered' "$target_log" || fail 'it says otherwise'
}
rdma link delete rxe0
{
    printf '%s\n' '[rdma]' 'optimistic_port = 4430'
    reactor '0, 1'; control; disk_ram d0 32MiB; listener; listener "127.0.0.1:$PORT" tcp; subsystem "$NQN" d0
} | config
target_start
within 30 tcp_listens "$PORT"
waits_for_rdma
serves tcp 127.0.0.1
missing || fail 'it is not missing any more'
rdma link add rxe0 type rxe netdev d0
within 30 there
serves rdma "$RDMA_ADDRESS"
within 10 grep -q 'listening for optimistic reads' "$target_log"
"$SPINDLE" bench "rdma:$RDMA_ADDRESS:$PORT" --nqn "$NQN" --optimistic --bs 4KiB --span 8MiB --rw randread --seconds 3 --json \
    >"$WORK/bench" 2>&1 || fail "optimistic reads: $(<"$WORK/bench")"
grep -E '"accepted":[1-9]' "$WORK/bench" >/dev/null || fail "no read is optimistic: $(<"$WORK/bench")"
stop_target

# Nor the kernel's side of it, which the kernel may not load by itself here. The device comes first.
rdma link delete rxe0
modprobe -r nvme_rdma rdma_ucm
loader=$(</proc/sys/kernel/modprobe)
echo >/proc/sys/kernel/modprobe
: >"$target_log"
target_start
within 30 tcp_listens "$PORT"
waits_for_rdma
serves tcp 127.0.0.1
rdma link add rxe0 type rxe netdev d0
sleep 3
missing || fail 'it listens without the connection manager'
stop_target
# Another one starts with the device, and gets the connection manager later.
: >"$target_log"
target_start
within 30 tcp_listens "$PORT"
waits_for_rdma
[ ! -e /sys/module/rdma_ucm ] || fail 'the connection manager was loaded'
modprobe -a rdma_ucm nvme_rdma
echo "$loader" >/proc/sys/kernel/modprobe
within 30 there
serves rdma "$RDMA_ADDRESS"
stop_target

# RDMA listeners only.
rdma link delete rxe0
{ reactor; control; disk_ram d0 32MiB; listener; subsystem "$NQN" d0; } | config
: >"$target_log"
target_start
waits_for_rdma
rdma link add rxe0 type rxe netdev d0
within 30 there
serves rdma "$RDMA_ADDRESS"
