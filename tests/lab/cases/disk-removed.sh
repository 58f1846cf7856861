# a reload takes a disk away under fio: its commands are answered with errors, the other disk goes on, it comes back
# limit: 600 s
skip_on nvmet 'it has no reload'
expect_kernel_log "${lost[@]}" '(critical target|operation not supported) error, dev nvme[0-9]+(c[0-9]+)?n[0-9]+, ' 'rescanning namespaces' \
    'nvme[0-9]+(c[0-9]+)?n[0-9]+: I/O Cmd\(0x[0-9a-f]+\) @ LBA [0-9]+, [0-9]+ blocks, ' \
    'nvme[0-9]+: IDs don.t match'
# disks NAME...: the configuration with these as namespaces 1, 2.
disks() { { reactor; disk_ram stays 32MiB; [ $# = 1 ] || disk_file goes "$FILE" 32MiB; listener; subsystem "$NQN" "$@"; } | config; }
disks stays goes
start_target
connect
wait_for_block 1
stays=$BLOCK
wait_for_block 2
goes=$BLOCK
# It is first without a usable path, and then gone. The other is never without.
expect_kernel_log "block ${goes#/dev/}: no usable path - requeuing I/O"
pattern "$WORK/data" 65536
write_blocks "$WORK/data" $((24 << 20))
udevadm settle --timeout=60

stays() {
    until [ -e "$WORK/enough" ]; do
        BLOCK=$stays verify_fio stays --bs=4k --size=4M --iodepth=16 --rate_iops=500 --max_latency=10s
    done
}
stays &
on_stays=$!
( BLOCK=$goes run_fio goes --rw=randrw --bs=4k --size=16M --iodepth=16 --time_based --runtime=120 ) >"$WORK/goes" 2>&1 &
on_goes=$!
under_way "$on_goes" "$goes"
under_way "$on_stays" "$stays"
disks stays
reload_target
second_gone() { ! find_block 2; }
within 20 second_gone
# Every command has an answer: fio ends, in error.
ended() { ! kill -0 "$on_goes" 2>/dev/null; }
within 30 ended
! wait "$on_goes" || fail 'fio on a disk that was taken away did not fail'
# No process has its file any more.
within 15 flock -n "$FILE" true

disks stays goes
under_way "$on_stays" "$stays"
reload_target
wait_for_block 2
read_blocks "$WORK/back" $((24 << 20)) 65536
cmp "$WORK/data" "$WORK/back" || fail 'the disk came back with something else'
touch "$WORK/enough"
wait "$on_stays" || fail 'the disk that stays was disturbed'
has_state live
