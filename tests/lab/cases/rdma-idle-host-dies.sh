# an idle host without keep alive is gone without a word: the target asks, hears nothing, frees its queue pair
# limit: 600 s
expect_reconnect
expect_kernel_log 'nvme nvme[0-9]+: Removing' "${lost[@]}"
skip_on nvmet 'the kernel target keeps it for ever'
config_ram
start_target
# Of a disk's controller the driver makes KATO 0 its default; of a discovery controller it leaves it.
connect_directly "${HOST_A[1]}" "${HOST_A[3]}" "$DISCOVERY_NQN" "host_traddr=$RDMA_HOST_ADDRESS"
expect 'queue pairs: two ends of one queue' "$(queue_pairs)" 2
expect 'KATO' "$(cat "/sys/class/nvme/$CTRL/kato")" 0

# Alive and idle for longer than the target waits: nothing happens to it.
sleep 20
has_state live || fail 'the target did not leave a host alone that is there'
expect 'queue pairs of an idle host' "$(queue_pairs)" 2

# Of the target alone: the host's driver keeps its own until it has waited for an answer in vain.
of_target() { [ "$(rdma resource show qp | grep -c "type RC .*comm reactor")" = "$1" ]; }
of_target 1 || fail "the target has other queue pairs: $(rdma resource show qp)"
ip addr delete "$RDMA_HOST_ADDRESS/32" dev d0
since=$SECONDS
# 15 s of silence, then 30 s in which nothing is acknowledged: soft-RoCE repeats for ever when told "7 times".
within 50 of_target 0
echo "found after $((SECONDS - since)) s"
echo 1 >"/sys/class/nvme/$CTRL/delete_controller"
within 10 has_queue_pairs 0
rdma_up
connect_block -w "$RDMA_HOST_ADDRESS"
verify_fio after --bs=16k --iodepth=16 --size=4M
