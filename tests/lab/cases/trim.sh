# what is trimmed is given back: the blocks of the file behind a file disk, and the memory of a RAM disk
config_both 128MiB
start_target
connect
file_kib() { echo $(($(stat -c %b "$FILE") / 2)); }
fill() { dd if=/dev/urandom of="$BLOCK" bs=1M count=64 oflag=direct status=none; }
# trimmed FROM-MIB TO-MIB: that stretch reads as zeroes.
trimmed() {
    read_blocks "$WORK/back" $(($1 << 20)) $((($2 - $1) << 20))
    is_zero "$WORK/back" || fail "the trimmed blocks of $BLOCK are not zero"
}

wait_for_block 2
[ "$(file_kib)" -lt 4096 ] || fail "the file starts with $(file_kib) KiB"
fill
sync -f "$SCRATCH"
[ "$(file_kib)" -ge 65536 ] || fail "after 64 MiB were written the file has $(file_kib) KiB"
blkdiscard --offset 0 --length $((48 << 20)) "$BLOCK"
trimmed 0 48
sync -f "$SCRATCH"
[ "$(file_kib)" -le $((20 << 10)) ] || fail "after 48 of 64 MiB were trimmed the file has $(file_kib) KiB"
expect 'the file keeps its length' "$(stat -c %s "$FILE")" $((128 << 20))

wait_for_block 1
[ "$TARGET_KIND" != nvmet ] || exit 0 # its RAM disk is not a process, whose memory could be asked for
if [ "$TRANSPORT" = rdma ]; then # all of its memory is the network device's from the start on
    fill
    blkdiscard --offset 0 --length $((64 << 20)) "$BLOCK"
    trimmed 0 64
else
    empty=$(target_memory_kib)
    fill
    full=$(target_memory_kib)
    [ $((full - empty)) -ge 60000 ] || fail "64 MiB written took $((full - empty)) KiB of memory (huge pages?)"
    blkdiscard --offset 0 --length $((64 << 20)) "$BLOCK"
    trimmed 0 64
    left=$(($(target_memory_kib) - empty))
    [ "$left" -le 8192 ] || fail "64 MiB trimmed left $left KiB"
fi
