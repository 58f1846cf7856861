# connect (IPv4, IPv6, few queues, no flow control), list, list-subsys, disconnect; the unknown is refused
{ reactor; disk_ram d0 64MiB; listener; listener "[$ADDRESS6]:$PORT"; subsystem "$NQN" d0; } | config
start_target

connect_block
expect 'the state' "$(cat "/sys/class/nvme/$CTRL/state")" live
expect 'queues, the admin queue too' "$(cat "/sys/class/nvme/$CTRL/queue_count")" 3
expect 'the NQN' "$(cat "/sys/class/nvme/$CTRL/subsysnqn")" "$NQN"
expect 'the size' "$(block_bytes "$BLOCK")" $((64 << 20))
expect 'the block size' "$(blockdev --getss "$BLOCK")" 512
serial=$(tr -d ' ' <"/sys/class/nvme/$CTRL/serial")
model=$(sed 's/ *$//' "/sys/class/nvme/$CTRL/model")
line=$(nvme list | grep "^$BLOCK ")
[[ $line == *"$serial"* && $line == *"$model"* ]] || fail "nvme list: $line"
nvme list-subsys >"$WORK/list-subsys"
grep -q "$TRANSPORT traddr=$ADDRESS,trsvcid=$PORT.* live" "$WORK/list-subsys" ||
    fail "list-subsys: $(cat "$WORK/list-subsys")"
disconnect
[ ! -e "$BLOCK" ] || within 5 test ! -e "$BLOCK"

connect_block -a "$ADDRESS6"
expect 'the size over IPv6' "$(block_bytes "$BLOCK")" $((64 << 20))
disconnect

# As many queues as asked for, and small ones.
connect_block --nr-io-queues=1 --queue-size=16
expect 'queues, the admin queue too' "$(cat "/sys/class/nvme/$CTRL/queue_count")" 2
expect 'the queue size, less one' "$(cat "/sys/class/nvme/$CTRL/sqsize")" 15
verify_fio queue-16 --bs=4k --iodepth=64 --size=4M
disconnect

# Without flow control the target may leave out the completions of reads.
connect_block --disable-sqflow
verify_fio no-flow --bs=4k --iodepth=32 --size=4M
disconnect

expect_kernel_log 'nvme nvme[0-9]+: (Connect |failed to connect queue)'
refused '' nvme connect "${PORTAL[@]}" "${HOST_A[@]}" -n nqn.2026-01.io.spindle:none
