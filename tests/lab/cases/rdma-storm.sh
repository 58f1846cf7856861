# connect storms: many hosts come and go at once, strangers among them; nothing is left of them
# limit: 600 s
# A process that looks at a new block device is late for one of these, and so is a keep alive.
expect_kernel_log 'nvme nvme[0-9]+: (Removing|failed nvme_keep_alive_end_io)' "${lost[@]}" "${requeued[@]}"
config_ram
start_target

# One controller, made and removed by the kernel's own interface, without processes.
come_and_go() {
    local said fabrics
    exec {fabrics}<>/dev/nvme-fabrics
    printf 'transport=%s,traddr=%s,trsvcid=%s,hostnqn=%s,hostid=%s,nqn=%s%s' "$TRANSPORT" "$ADDRESS" "$PORT" \
        "${HOST_A[1]}" "${HOST_A[3]}" "$NQN" ,nr_io_queues=2,queue_size=16,duplicate_connect >&"$fabrics" ||
        fail 'refused in a storm'
    read -r said <&"$fabrics"
    [[ $said =~ instance=([0-9]+), ]] || fail "the kernel says: $said"
    echo 1 >"/sys/class/nvme/nvme${BASH_REMATCH[1]}/delete_controller"
}
# Connects, but speaks another protocol.
stranger() { timeout 60 rping -c -a "$ADDRESS" -p "$PORT" -C 1 >/dev/null 2>&1 || true; }

storm() {
    local jobs=() job
    for _ in {1..8}; do come_and_go & jobs+=($!); done
    stranger & jobs+=($!)
    for job in "${jobs[@]}"; do wait "$job"; done
    within 60 has_queue_pairs 0
}

# The first leaves what is kept for the next: completion queues, pages, receive slots. More of them meet in a
# later one if it so happens, which takes another chunk of slots: a memory region, or two. Nothing else grows.
storm
within 30 rdma_is_at_rest
before=$(rdma_resources)
memory=0
[ "$TARGET_KIND" = nvmet ] || memory=$(target_memory_kib)
for _ in {1..4}; do storm; done
regions() { sed 's/.* mr \([0-9]*\).*/\1/' <<<"$1"; }
but_regions() { sed 's/ mr [0-9]*//' <<<"$1"; }
is_as_before() {
    now=$(rdma_resources)
    [ "$(but_regions "$now")" = "$(but_regions "$before")" ] && [ "$(regions "$now")" -le $(($(regions "$before") + 2)) ]
}
within 30 is_as_before
if [ "$TARGET_KIND" = spindle ]; then
    grown=$(($(target_memory_kib) - memory))
    # A region of slots is a huge page, or more.
    regions=$(($(regions "$now") - $(regions "$before")))
    [ "$regions" -gt 0 ] || regions=0
    echo "32 connections left $grown KiB, and $regions memory regions"
    [ "$grown" -le $((3072 + 2048 * regions)) ] || fail "32 connections left $grown KiB in the target's memory, and $regions regions"
fi
connect_block
verify_fio after --bs=16k --iodepth=16 --size=4M
