# the port fails under fio: the path over TCP takes over, the target frees its queue pairs and ends in order
# limit: 600 s
expect_reconnect
# What is on the path that fails goes over the other one, and the kernel says so.
expect_kernel_log 'infiniband rxe0: set (down|active)' \
    'nvme[0-9]+c[0-9]+n[0-9]+: I/O Cmd\(0x[12]\) .* \(sct 0x3 / sc 0x7[01]\)' \
    '(I/O error|recoverable transport error), dev nvme[0-9]+c[0-9]+n[0-9]+, sector' \
    'block nvme[0-9]+n[0-9]+: no available path - failing I/O' \
    'Buffer I/O error on dev nvme[0-9]+n[0-9]+, .* async page read'
{
    reactor; disk_file file "$FILE" 64MiB; listener "127.0.0.1:$PORT" tcp; listener
    subsystem "$NQN" file
} | config
start_target
# It must not connect again by itself: soft-RoCE would never answer (rdma_manager_works), and the device
# could not be removed while the driver waits for it.
connect_directly "${HOST_A[1]}" "${HOST_A[3]}" "$NQN" keep_alive_tmo=5,reconnect_delay=900,ctrl_loss_tmo=1800
by_rdma=$CTRL
queue_pairs_before=$(queue_pairs)
TRANSPORT=tcp ADDRESS=127.0.0.1 connect_directly "${HOST_A[1]}" "${HOST_A[3]}" "$NQN"
by_tcp=$CTRL
wait_for_block
echo round-robin | tee /sys/class/nvme-subsystem/*/iopolicy >/dev/null
verify_fio taken-over --bs=4k --size=16M --iodepth=16 --rate_iops=800 &
fio=$!
under_way "$fio"
sleep 1
kill -0 "$fio" 2>/dev/null || fail 'fio is done too early'
ip link set d0 down
CTRL=$by_rdma
within 60 has_state connecting
wait "$fio"
within 90 has_queue_pairs 0
[ "$queue_pairs_before" = 6 ] || fail "two ends of three queues were $queue_pairs_before queue pairs"
CTRL=$by_tcp
has_state live || fail 'the path over TCP is gone as well'
pattern "$WORK/data" $((1 << 20))
write_blocks "$WORK/data" $((32 << 20))
udevadm settle --timeout=60
disconnect "$by_tcp"
disconnect "$by_rdma"
stop_target

# Another device, the same target again.
ip link set d0 up
rdma_repair || fail 'somebody keeps the device'
start_target
connect_block
read_blocks "$WORK/back" $((32 << 20)) $((1 << 20))
cmp "$WORK/data" "$WORK/back"
