# our initiator is killed under load, again and again: the target frees its queue pairs and its memory
expect_kernel_log "${lost[@]}"
config_ram
start_target
runs_or_ended() { has_queue_pairs 10 || ! kill -0 "$bench" 2>/dev/null; }
# killed WORKLOAD: returns when nothing is left of it.
killed() {
    local bench
    "$SPINDLE" bench "rdma:$ADDRESS:$PORT" --nqn "$NQN" --rw "$1" --bs 64KiB --qd 32 --queues 4 \
        --seconds 600 >"$WORK/bench.log" 2>&1 &
    bench=$!
    # Its admin queue and the four, at both ends.
    within 30 runs_or_ended
    sleep 1
    kill -KILL "$bench" 2>/dev/null || fail "bench ended by itself: $(cat "$WORK/bench.log")"
    wait "$bench" 2>/dev/null || true
    within 60 has_queue_pairs 0
}
killed randread
within 30 rdma_is_at_rest
before=$(rdma_resources)
memory=0
[ "$TARGET_KIND" = nvmet ] || memory=$(target_memory_kib)
for workload in randwrite randread randrw; do killed "$workload"; done
is_as_before() { [ "$(rdma_resources)" = "$before" ]; }
within 30 is_as_before
if [ "$TARGET_KIND" = spindle ]; then
    # The writes have filled some of the RAM disk.
    grown=$(($(target_memory_kib) - memory - (64 << 10)))
    [ "$grown" -le 4096 ] || fail "three dead hosts left $grown KiB in the target's memory"
fi
connect_block
verify_fio after --bs=16k --iodepth=16 --size=4M
