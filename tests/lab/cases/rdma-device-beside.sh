# a device is removed, returns, and a disk is added and removed while hosts use another device: their I/O goes on
# limit: 600 s
skip_on nvmet 'the kernel target has to be told to listen again'
expect_kernel_log 'd1 speed is unknown'

# A device of its own for the second listener.
ip link add d1 type dummy
ip addr add 10.9.3.1/32 dev d1
ip link set d1 mtu 4200 up
rdma link add rxe1 type rxe netdev d1
{
    reactor 0,1
    control
    disk_ram ram 64MiB
    listener
    printf '%s\n' '[[listener]]' "address = \"10.9.3.1:$PORT\"" 'transport = "rdma"'
    subsystem "$NQN" ram
} | config
start_target
connect_block
run_fio fill --rw=write --bs=128k --size=64M --iodepth=4
ctl() { "$SPINDLE" ctl --socket "$WORK/control" "$@" >"$WORK/ctl" 2>&1 || fail "spindle ctl $*: $(<"$WORK/ctl")"; }
lines_are() { [ "$(grep -c "$1" "$target_log")" = "$2" ]; }

# p99 NAME: reads for 8 s; the 99th percentile in us. Fails on an error of a read.
p99() {
    run_fio "$1" --rw=randread --bs=4k --size=64M --iodepth=4 --rate_iops=400 --time_based --runtime=8 --output-format=terse
    tr ';' '\n' <"$WORK/fio.$1" | sed -n 's/^99.000000%=//p' | head -n 1
}
# One removal, return, and live change after the other, until the file is gone.
changes() {
    while [ -e "$WORK/changing" ]; do
        rounds=$((rounds + 1))
        timeout 60 rdma link delete rxe1 || fail "round $rounds: the device cannot be removed"
        within 10 lines_are 'RDMA device gone' "$rounds"
        rdma link add rxe1 type rxe netdev d1
        within 10 lines_are 'RDMA device is back: listening again' "$rounds"
        ctl bdev_malloc_create --name added --num_blocks 65536 --block_size 4096
        ctl bdev_malloc_delete --name added
    done
    echo "$rounds" >"$WORK/rounds"
}
rounds=0
for run in 1 2 3; do
    alone=$(p99 "alone-$run")
    : >"$WORK/changing"
    rounds=$(cat "$WORK/rounds" 2>/dev/null || echo 0)
    changes &
    changing=$!
    beside=$(p99 "beside-$run")
    rm "$WORK/changing"
    wait "$changing" || fail 'a change failed'
    echo "run $run: p99 of 4 KiB reads $alone us alone, $beside us beside $(($(cat "$WORK/rounds") - rounds)) rounds of changes"
done
has_state live || fail 'the host has lost its connection'
grep 'a turn took' "$target_log" || true
disconnect
stop_target
rdma link delete rxe1
ip link delete d1
