# reset: the controller comes back, and I/O that was under way neither fails nor goes wrong
expect_kernel_log 'nvme nvme[0-9]+: resetting controller' "${requeued[@]}"
config_ram
start_target
connect_block
nvme reset "/dev/$CTRL" || fail 'nvme reset'
within 20 has_state live
cntlid=$(cat "/sys/class/nvme/$CTRL/cntlid")
expect 'the controller id, in Identify and sysfs' "$(($(nvme id-ctrl "/dev/$CTRL" | field cntlid)))" "$cntlid"

verify_fio under-reset --bs=4k --size=16M --iodepth=16 --rate_iops=800 &
fio=$!
under_way "$fio"
for _ in 1 2 3; do
    sleep 1
    nvme reset "/dev/$CTRL" || fail 'nvme reset under I/O'
    within 20 has_state live
done
wait "$fio"
