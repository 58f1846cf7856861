# the target's device is removed under fio, again and again: it lets go of it, listens again, hosts come back
# limit: 600 s
skip_on nvmet 'the kernel target has to be told to listen again'
expect_reconnect
expect_kernel_log '(h0|t0) speed is unknown' 'nvme nvme[0-9]+: Removing' "${lost[@]}"

# The host has a device of its own, so that only the target's goes. Two soft-RoCE devices of one namespace
# reach each other over a veth, when what is sent from one end does not take the short way over lo.
ip link add h0 type veth peer name t0
udevadm settle --timeout=60 # which gives them other hardware addresses
for end in h0:2 t0:1; do
    ip link set "${end%:*}" mtu 4200 up
    ip addr add "10.9.2.${end#*:}/32" dev "${end%:*}"
    echo 1 >"/proc/sys/net/ipv4/conf/${end%:*}/accept_local"
    echo 0 >"/proc/sys/net/ipv4/conf/${end%:*}/rp_filter"
done
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
ways=(h0:t0:1:101 t0:h0:2:102)
for way in "${ways[@]}"; do
    IFS=: read -r from to last table <<<"$way"
    ip route add "10.9.2.$last/32" dev "$from" src "10.9.2.$((3 - last))" table "$table"
    ip rule add pref 5 oif "$from" to "10.9.2.$last" lookup "$table"
    ip rule add pref 6 iif lo to "10.9.2.$last" lookup "$table"
    ip neigh replace "10.9.2.$last" lladdr "$(cat "/sys/class/net/$to/address")" dev "$from"
done
ip rule add pref 10 lookup local
ip rule del pref 0
rdma link add rxeh type rxe netdev h0
rdma link add rxet type rxe netdev t0

ADDRESS=10.9.2.1 PORTAL=(-t rdma -a 10.9.2.1 -s "$PORT")
{ reactor 0,1; disk_ram ram 64MiB; listener; subsystem "$NQN" ram; } | config
start_target
connect_block -w 10.9.2.2 --reconnect-delay=1 --ctrl-loss-tmo=600 --keep-alive-tmo=5
udevadm settle --timeout=60
of_target() { [ "$(rdma resource show qp | grep -c "type RC .*comm reactor")" = "$1" ]; }
of_target 3 || fail "the target has other queue pairs: $(rdma resource show qp)"
verify_fio gone --bs=4k --size=24M --iodepth=16 --rate_iops=400 &
fio=$!
under_way "$fio"
# lines_are TEXT COUNT, in the target's log
lines_are() { [ "$(grep -c "$1" "$target_log")" = "$2" ]; }
memory=0
for round in 1 2 3; do
    sleep 1
    kill -0 "$fio" 2>/dev/null || fail 'fio is done too early'
    # It returns when no process has the device any more.
    timeout 60 rdma link delete rxet || fail "round $round: the device cannot be removed"
    target_is_gone && fail 'the target has ended'
    of_target 0 || fail "round $round: the target keeps $(rdma resource show qp)"
    within 10 lines_are 'RDMA device gone' "$round"
    within 60 has_state connecting
    rdma link add rxet type rxe netdev t0
    within 60 has_state live
    within 10 lines_are 'listening again' "$round"
    [ "$round" = 1 ] && memory=$(target_memory_kib)
done
wait "$fio"
grown=$(($(target_memory_kib) - memory - (64 << 10)))
[ "$grown" -le 4096 ] || fail "two lost devices left $grown KiB in the target's memory"
disconnect
verify_again() { connect_block -w 10.9.2.2; verify_fio after --bs=16k --iodepth=16 --size=4M; disconnect; }
verify_again
stop_target
# As it was.
rdma link delete rxet
rdma link delete rxeh
ip link delete h0
ip rule add pref 0 lookup local
for pref in 5 5 6 6 10; do ip rule del pref "$pref"; done
