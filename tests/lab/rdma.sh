# The RDMA network of a guest: soft-RoCE on a dummy device. The target has an address there and so has the
# host, apart from one that holds the route to both: taking one of the two away loses all that is sent to it,
# without a word to either end. Sourced by the runner (tests/lab/guest) and by lib.sh.
# shellcheck shell=bash disable=SC2034

RDMA_ADDRESS=10.9.1.1
RDMA_ADDRESS6=fd09:1::1
RDMA_HOST_ADDRESS=10.9.1.2

# rdma_up: all of it, or what is missing of it. An MTU of 4200 lets soft-RoCE have its largest, 4096.
rdma_up() {
    modprobe -a dummy rdma_rxe rdma_ucm ib_uverbs || return 1
    if [ ! -e /sys/class/net/d0 ]; then
        ip link add d0 type dummy || return 1
        # Or taking the link down takes the addresses of IPv6 along.
        echo 1 >/proc/sys/net/ipv6/conf/d0/keep_addr_on_down
        ip addr add 10.9.1.9/24 dev d0 || return 1
    fi
    ip link set d0 mtu 4200 up || return 1
    ip addr replace "$RDMA_ADDRESS/32" dev d0 || return 1
    ip addr replace "$RDMA_HOST_ADDRESS/32" dev d0 || return 1
    ip addr replace "$RDMA_ADDRESS6/64" dev d0 nodad || return 1
    [ -e /sys/class/infiniband/rxe0 ] || rdma link add rxe0 type rxe netdev d0
}

# The queue pair of the connection manager. Soft-RoCE puts it into its error state, for good, when it sends
# while the link is down; no connection is made after that until the device is made anew.
rdma_manager_works() { rdma resource show qp | grep 'type GSI state RTS' >/dev/null; }

# rdma_repair: as rdma_up left it. What still uses a device that has to be made anew is killed with it.
rdma_repair() {
    if [ -e /sys/class/infiniband/rxe0 ] && ! rdma_manager_works; then
        [ -z "${group:-}" ] || kill -KILL -- "-$group" 2>/dev/null
        ip link set d0 up
        timeout 60 rdma link delete rxe0 || return 1
    fi
    rdma_up
}

rdma_port_is_active() { rdma link show rxe0/1 | grep 'state ACTIVE' >/dev/null; }

# How many queue pairs there are, of all ends; and what there is of everything.
queue_pairs() { rdma resource show qp | grep -c 'type RC' || true; }
has_queue_pairs() { [ "$(queue_pairs)" = "$1" ]; }
rdma_resources() { rdma resource show rxe0 | sed 's/.*rxe0: *//; s/ *$//'; }
# rdma_is_at_rest: they were the same a second before. What goes with a queue pair goes a moment after it.
rdma_is_at_rest() { local before; before=$(rdma_resources) && sleep 1 && [ "$(rdma_resources)" = "$before" ]; }
