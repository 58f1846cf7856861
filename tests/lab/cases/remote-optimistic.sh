# a disk on a namespace of another target, read from the cache there by RDMA: no block is wrong while others write, the cache goes and comes, and the target is killed
# limit: 900 s
skip_on nvmet 'its disks are devices and files'
skip_over tcp 'its network has no RDMA'
# shellcheck source=tests/lab/far.sh
. "$LAB/far.sh"
FAR_ADDRESS=$RDMA_HOST_ADDRESS
far_disk=('optimistic = true' '[control]' "socket = \"$WORK/control\"")
far_up '[rdma]' 'optimistic_port = 4431' '[control]' "socket = \"$WORK/far-control\"" \
    "$(disk_file far "$FILE" 64MiB)" '[disk.cache]' 'size = "16MiB"' '[[listener]]' "address = \"$FAR_ADDRESS:4432\""
# counted FIELD: accepted, rejected or attached_queues of the disk.
counted() {
    "$SPINDLE" ctl --socket "$WORK/control" bdev_get_iostat | tr -d ' \n' |
        sed -nE "s/.*\"optimistic\":\{[^}]*\"$1\":([0-9]+).*/\1/p"
}
has_queues() { [ "$(counted attached_queues)" = "$1" ]; }
# more_accepted COUNT: random reads of 2 MiB by the kernel's host; at least so many come from the cache by RDMA. fio reads all
# pages once before it reads one again.
more_accepted() {
    local before
    before=$(counted accepted)
    run_fio read --rw=randread --bs=4k --iodepth=16 --size=2M --time_based --runtime=10
    echo "accepted $(counted accepted), rejected $(counted rejected)"
    [ "$(counted accepted)" -ge $((before + $1)) ] || fail "accepted: $before before, $(counted accepted) after"
}
far_cache() { "$SPINDLE" ctl --socket "$WORK/far-control" disk cache far "$1" || fail "cache of $1"; }

within 60 has_queues 1
verify_fio first --bs=4k --size=8M --iodepth=16
more_accepted 500

# Beside writes of the same pages, and with more pages than the cache has.
"$SPINDLE" bench "rdma:$ADDRESS:$PORT" --nqn "$NQN" --rw randrw --verify --bs 4KiB --span 8MiB --seconds 5 \
    >"$WORK/bench.log" 2>&1 || fail "bench: $(tail -n 3 "$WORK/bench.log")"
verify_fio more --bs=4k --size=48M --iodepth=16
verify_fio sizes --bsrange=512-64k --blockalign=512 --size=8M --iodepth=8

# The cache goes under the reads, and another one comes: the queue is attached again.
named_fio named first --size=8M --iodepth=32
named_differ second --size=8M --iodepth=32
run_fio gone --rw=randread --bs=4k --iodepth=16 --size=8M --time_based --runtime=8 &
fio=$!
sleep 3
far_cache 0
within 30 has_queues 0
wait "$fio"
named_fio named-ordinary first --size=8M --iodepth=32 --verify_only
sleep 3
said 1 'cannot connect for optimistic reads, ordinary reads continue' || fail 'the log does not say that reads are ordinary'
! said 2 'cannot connect for optimistic reads, ordinary reads continue' || fail 'the log says it for each attempt'
far_cache 16MiB
within 90 has_queues 1
more_accepted 500
named_fio named-again first --size=8M --iodepth=32 --verify_only

# The far target is killed under writes and reads.
named_fio killed second --size=8M --iodepth=32 --rate_iops=300,300 &
fio=$!
under_way "$fio"
sleep 1
far_kill
sleep 1
far_start
has_state live || fail 'the host lost its controller'
wait "$fio"
within 90 has_queues 1
more_accepted 500
named_fio after second --size=8M --iodepth=32 --verify_only
disconnect
stop_target

# With NVMe over TCP to the far target, and the references of the pages asked for at the start.
sed -i -e "s/^address = \"$FAR_ADDRESS:$FAR_PORT\"/address = \"$FAR_ADDRESS:4432\"/" -e '0,/^transport = "rdma"/s//transport = "tcp"/' \
    -e 's/^optimistic = true/&\noptimistic_eager = true/' "$CONFIG"
start_target
connect_block
within 60 has_queues 1
more_accepted 500
run_fio several --rw=randread --bs=32k --iodepth=4 --size=4M --time_based --runtime=5
named_fio over-tcp second --size=8M --iodepth=32 --verify_only
disconnect
stop_target
far_stop
within 60 has_queue_pairs 0
