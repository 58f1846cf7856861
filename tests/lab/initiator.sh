# The body of the cases of our own initiator over RDMA.
# shellcheck shell=bash

# initiator_checks: against the target that runs, which has s0 and s1.
initiator_checks() {
    local log shape bs qd queues span
    log=$("$SPINDLE" discover "rdma:$ADDRESS:$PORT") || fail 'discover'
    grep "$NQN" <<<"$log" >/dev/null && grep "$NQN1" <<<"$log" >/dev/null || fail "discover: $log"
    grep -i rdma <<<"$log" >/dev/null || fail "no transport rdma in: $log"
    # Small blocks in the capsule, and large ones that are fetched; one queue and several.
    # All of the span is written first, and read at the end: less of it in small blocks, each of which takes as long.
    for shape in '4KiB 32 1 8MiB' '512B 8 2 1MiB' '64KiB 16 4 16MiB' '1MiB 4 1 16MiB'; do
        read -r bs qd queues span <<<"$shape"
        "$SPINDLE" bench "rdma:$ADDRESS:$PORT" --nqn "$NQN" --rw randrw --verify --seconds 1 \
            --span "$span" --bs "$bs" --qd "$qd" --queues "$queues" >"$WORK/bench.log" 2>&1 ||
            fail "bench $shape: $(tail -n 3 "$WORK/bench.log")"
    done
    # The host's driver and our initiator mean the same blocks.
    connect_block
    "$SPINDLE" bench "rdma:$ADDRESS:$PORT" --nqn "$NQN" --rw randrw --verify --seconds 1 --span 8MiB \
        >"$WORK/bench.log" 2>&1 || fail "bench beside the kernel's host: $(tail -n 3 "$WORK/bench.log")"
    ! head -c $((1 << 20)) "$BLOCK" | cmp -s -n $((1 << 20)) - /dev/zero || fail 'bench wrote nothing'
    disconnect
    within 60 has_queue_pairs 0
}
config_initiator() {
    {
        reactor; disk_ram d0 128MiB; disk_ram d1 32MiB; listener
        subsystem "$NQN" d0; subsystem "$NQN1" d1
    } | config
}
