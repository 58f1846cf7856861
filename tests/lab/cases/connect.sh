# connect, the state in sysfs, list and list-subsys, disconnect; over IPv4 and IPv6; what does not exist is refused
{ reactor; disk_ram d0 64MiB; listener "$ADDRESS:$PORT"; listener "[::1]:$PORT"; subsystem "$NQN" d0; } | config
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
nvme list-subsys | grep -q "tcp traddr=$ADDRESS,trsvcid=$PORT.* live" || fail "list-subsys: $(nvme list-subsys)"
disconnect
[ ! -e "$BLOCK" ] || within 5 test ! -e "$BLOCK"

connect_block -a ::1
expect 'the size over IPv6' "$(block_bytes "$BLOCK")" $((64 << 20))
disconnect

# As many queues as asked for, and small ones.
connect_block --nr-io-queues=1 --queue-size=16
expect 'queues, the admin queue too' "$(cat "/sys/class/nvme/$CTRL/queue_count")" 2
expect 'the queue size, less one' "$(cat "/sys/class/nvme/$CTRL/sqsize")" 15
run_fio queue-16 --name=w --filename="$BLOCK" --rw=randwrite --bs=4k --direct=1 --ioengine=libaio --iodepth=64 \
    --size=4M --verify=crc32c --verify_fatal=1
disconnect

# Without flow control the target may leave out the completions of reads.
connect_block --disable-sqflow
run_fio no-flow --name=w --filename="$BLOCK" --rw=randwrite --bs=4k --direct=1 --ioengine=libaio --iodepth=32 \
    --size=4M --verify=crc32c --verify_fatal=1
disconnect

expect_kernel_log 'nvme nvme[0-9]+: (Connect |failed to connect queue)'
refused '' nvme connect "${PORTAL[@]}" "${HOST_A[@]}" -n nqn.2026-01.io.spindle:none
