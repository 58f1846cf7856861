# a port goes down and up: an idle connection stays; when all packets are lost under fio the host recovers
# limit: 600 s
expect_reconnect
expect_kernel_log 'infiniband rxe0: set (down|active)'
config_file 64MiB
start_target
connect_block -w "$RDMA_HOST_ADDRESS" --reconnect-delay=1 --ctrl-loss-tmo=300 --keep-alive-tmo=60 # none is due while the port is down
udevadm settle --timeout=60 # whose reads would not be idle

ip link set d0 down
sleep 2
ip link set d0 up
within 10 rdma_port_is_active
pattern "$WORK/data" 65536
write_blocks "$WORK/data" 0
read_blocks "$WORK/back" 0 65536
cmp "$WORK/data" "$WORK/back"
has_state live || fail 'the connection did not outlive that the port was down for two seconds'
if dmesg | grep -E 'starting error recovery|Reconnecting'; then fail 'the connection was lost in between'; fi
disconnect

# Neither end is told: requests go to nowhere, replies have no address to come from.
connect_block -w "$RDMA_HOST_ADDRESS" --reconnect-delay=1 --ctrl-loss-tmo=300 --keep-alive-tmo=3
verify_fio port-down --bs=4k --size=16M --iodepth=16 --rate_iops=800 &
fio=$!
under_way "$fio"
sleep 1
kill -0 "$fio" 2>/dev/null || fail 'fio is done too early'
# The target stands still until the device has forgotten the address, too: what its connection manager sends from an address that is
# gone, and that the device still knows, puts soft-RoCE's own queue pair into its error state for good (seen once in some 60 runs).
address_forgotten() { ! grep -F '0a09:0101' /sys/class/infiniband/rxe0/ports/1/gids/* >/dev/null 2>&1; }
! address_forgotten || fail "the device does not know $RDMA_ADDRESS"
[ "$TARGET_KIND" = nvmet ] || kill -STOP "$target_pid"
ip addr delete "$RDMA_ADDRESS/32" dev d0
within 10 address_forgotten
[ "$TARGET_KIND" = nvmet ] || kill -CONT "$target_pid"
within 60 has_state connecting
sleep 2
rdma_up
rdma_manager_works || fail "the connection manager's queue pair is in its error state"
within 120 has_state live
wait "$fio"
