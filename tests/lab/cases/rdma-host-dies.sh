# a host is gone without a word, under load: the target frees its queue pairs, and takes it in again
# limit: 600 s
expect_reconnect
expect_kernel_log 'nvme nvme[0-9]+: Removing' "${lost[@]}"
config_ram
start_target
connect_block -w "$RDMA_HOST_ADDRESS" --keep-alive-tmo=3
[ "$(queue_pairs)" = 6 ] || fail "two ends of three queues are $(queue_pairs) queue pairs"
udevadm settle --timeout=60
fio --name=load --filename="$BLOCK" --allow_file_create=0 --direct=1 --ioengine=libaio --iodepth=16 --rw=randrw --bs=16k \
    --time_based --runtime=600 >/dev/null 2>&1 &
fio=$!
under_way "$fio"
ip addr delete "$RDMA_HOST_ADDRESS/32" dev d0
# The host's end is removed; nothing of that reaches the target.
echo 1 >"/sys/class/nvme/$CTRL/delete_controller"
wait "$fio" || true
within 90 has_queue_pairs 0
rdma_up
connect_block -w "$RDMA_HOST_ADDRESS"
verify_fio after --bs=16k --iodepth=16 --size=4M
