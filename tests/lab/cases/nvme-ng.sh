# drives past the kernel's block layer, polled and with interrupts: fio verifies; others are kept out; one goes
# limit: 1200 s
disk_ng() { printf '%s\n' '[[disk]]' "name = \"$1\"" "ng = \"$2\""; }
# The generic device of a block device.
generic() { echo "/dev/ng${1#/dev/nvme}"; }
# How often the drives' I/O queues have interrupted.
interrupts() { awk '$NF ~ /^nvme[0-9]+q[1-9]/ { for (i = 2; i <= NF; i++) if ($i ~ /^[0-9]+$/) n += $i } END { print n + 0 }' /proc/interrupts; }

# find_local NAME: sets LOCAL, the block device of the drive in this machine.
find_local() { find_drive_block "$(drive_place "$1")"; LOCAL=$BLOCK; }

# serve_drives: nv0, of 512-byte blocks, and nv1, of 4096.
serve_drives() {
    find_local nv1 && LOCAL1=$LOCAL
    find_local nv0 && LOCAL0=$LOCAL
    {
        reactor; disk_ng first "$(generic "$LOCAL0")"; disk_ng second "$(generic "$LOCAL1")"; listener
        subsystem "$NQN" first second
    } | config
    start_target
    connect
}

# check_drive NSID LOCAL: what is written over the network is on the drive.
check_drive() {
    local bs
    wait_for_block "$1"
    for bs in 4k:8M 64k:8M 1m:16M; do
        verify_fio "$1-${bs%:*}" --bs="${bs%:*}" --size="${bs#*:}" --iodepth=16
    done
    pattern "$WORK/data" $((3 << 20))
    write_blocks "$WORK/data" 1048576
    nvme flush "$BLOCK" >/dev/null || fail 'flush'
    BLOCK=$2 read_blocks "$WORK/back" 1048576 $((3 << 20))
    cmp "$WORK/data" "$WORK/back" || fail "the drive has something else than was written over the network"
    dd if="$WORK/data" of="$BLOCK" bs=64k oflag=direct,dsync,seek_bytes seek=1048576 conv=nocreat,notrunc status=none
    blkdiscard -z -o 1048576 -l 1048576 "$BLOCK"
    read_blocks "$WORK/back" 1048576 $((1 << 20))
    is_zero "$WORK/back" || fail 'zeroed blocks are not zero'
    read_blocks "$WORK/back" $((2 << 20)) $((2 << 20))
    cmp "$WORK/back" <(tail -c $((2 << 20)) "$WORK/data") || fail 'a block beside the zeroes was changed'
    # QEMU's drive has no Write Zeroes that deallocates, so that a discard is taken and changes nothing.
    blkdiscard -o 2097152 -l 1048576 "$BLOCK"
    read_blocks "$WORK/back" $((2 << 20)) $((2 << 20))
    cmp "$WORK/back" <(tail -c $((2 << 20)) "$WORK/data") || fail 'a discard changed data'
}

# Said of the mount that is refused.
expect_kernel_log "nvme[0-9]+n1: Can't open blockdev"
for poll_queues in 2 0; do
    drives_up "poll_queues=$poll_queues"
    serve_drives
    expect 'io_poll' "$(cat "/sys/block/${LOCAL0#/dev/}/queue/io_poll")" "$((poll_queues > 0))"
    wanted=$([ "$poll_queues" = 0 ] && echo false || echo true)
    within 10 grep -q "is_polled=$wanted" "$target_log"
    if [ "$poll_queues" = 0 ]; then
        within 10 grep -q 'completes by interrupts.*nvme.poll_queues' "$target_log"
    fi
    refused 'busy' mount "$LOCAL0" "$SCRATCH"
    refused 'another disk or process has it locked' "$SPINDLE" bench disk "ng:$(generic "$LOCAL0")" --seconds 0.1
    refused 'busy' "$SPINDLE" bench disk "file:$LOCAL0" --seconds 0.1
    refused "open for writing: $(generic "$LOCAL0") by pid $target_pid \(spindle\)" \
        "$SPINDLE" nvme bind "$(drive_place nv0)"
    before=$(interrupts)
    check_drive 1 "$LOCAL0"
    # dd reads the drive through the kernel: 48 times.
    taken=$(($(interrupts) - before))
    echo "poll_queues=$poll_queues: $taken interrupts"
    if [ "$poll_queues" = 0 ]; then
        [ "$taken" -gt 1000 ] || fail "only $taken interrupts without polling"
    else
        [ "$taken" -lt 200 ] || fail "$taken interrupts in spite of polling"
    fi
    check_drive 2 "$LOCAL1"
    if [ "$poll_queues" = 2 ]; then
        disconnect
        stop_target
        : >"$target_log"
        modprobe -r nvme
    fi
done

# A drive goes while it is served: its host hears of it, the other drive goes on.
expect_kernel_log "${lost[@]}" 'nvme nvme[0-9]+: (failed|Device not ready|Removing|frozen)' 'pcieport .*: (Slot|pciehp)' \
    'critical (target|medium) error' 'I/O Cmd\(0x' 'nvme[0-9]+n[0-9]+: (rescheduling|unable)'
wait_for_block 2
drive_unplug nv1
drive_wait 60 drive_is_gone nv1
! dd if="$BLOCK" of=/dev/null bs=4k count=1 iflag=direct status=none 2>"$WORK/dd" || fail 'a drive that is gone is read'
! nvme flush "$BLOCK" >/dev/null 2>&1 || fail 'a drive that is gone is flushed'
wait_for_block 1
verify_fio rest --bs=4k --size=4M --iodepth=8
disconnect
stop_target
drive_plug nv1
drive_wait 60 drive_is_there nv1
