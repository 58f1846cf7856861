# what is trimmed is given back, and can be written again: blocks of the file behind a file disk, memory of a RAM disk
config_both 64MiB
start_target
connect
file_kib() { echo $(($(stat -c %b "$FILE") / 2)); }
fill() { pattern /dev/stdout $((32 << 20)) | dd of="$BLOCK" bs=1M iflag=fullblock oflag=direct conv=nocreat status=none; }
# trimmed FROM-MIB TO-MIB: that stretch reads as zeroes.
trimmed() {
    # A command takes milliseconds here, so large ones.
    dd if="$BLOCK" of="$WORK/back" bs=1M iflag=direct skip="$1" count=$(($2 - $1)) status=none
    is_zero "$WORK/back" || fail "the trimmed blocks of $BLOCK are not zero"
}

wait_for_block 2
[ "$(file_kib)" -lt 4096 ] || fail "the file starts with $(file_kib) KiB"
fill
sync -f "$SCRATCH"
[ "$(file_kib)" -ge 32768 ] || fail "after 32 MiB were written the file has $(file_kib) KiB"
blkdiscard --offset 0 --length $((24 << 20)) "$BLOCK"
trimmed 0 24
sync -f "$SCRATCH"
[ "$(file_kib)" -le $((12 << 10)) ] || fail "after 24 of 32 MiB were trimmed the file has $(file_kib) KiB"
expect 'the file keeps its length' "$(stat -c %s "$FILE")" $((64 << 20))

wait_for_block 1
[ "$TARGET_KIND" != nvmet ] || exit 0 # its RAM disk is not a process, whose memory could be asked for
if [ "$TRANSPORT" = rdma ]; then # all of its memory is the network device's from the start on
    fill
    blkdiscard --offset 0 --length $((32 << 20)) "$BLOCK"
    trimmed 0 32
else
    empty=$(target_memory_kib)
    fill
    full=$(target_memory_kib)
    [ $((full - empty)) -ge 30000 ] || fail "32 MiB written took $((full - empty)) KiB of memory (huge pages?)"
    blkdiscard --offset 0 --length $((32 << 20)) "$BLOCK"
    trimmed 0 32
    # A page of 2 MiB may be in use yet. Not measured against $empty: other memory of the process grows with the first commands.
    given=$((full - $(target_memory_kib)))
    [ "$given" -ge $((30 << 10)) ] || fail "32 MiB trimmed gave back $given KiB; their writing took $((full - empty))"
fi

# Trimmed blocks are there to be written again, beside others that stay zero; and so once more.
pattern "$WORK/data" 262144
zero_at() {
    read_blocks "$WORK/back" "$1" "$2"
    is_zero "$WORK/back" || fail "$BLOCK: $2 bytes at $1 were trimmed and not written again"
}
written_at() {
    read_blocks "$WORK/back" "$1" 262144
    cmp "$WORK/data" "$WORK/back" || fail "$BLOCK: what was written to trimmed blocks at $1"
}
for nsid in 1 2; do
    wait_for_block "$nsid"
    for round in 1 2; do
        # In the middle of pages of 2 MiB, across the end of one, and off the beginning of one of 4 KiB.
        for at in $((3 << 20)) $(((8 << 20) - 131072)) $(((20 << 20) + 4096)); do
            dd if="$WORK/data" of="$BLOCK" bs=64k oflag=direct,seek_bytes seek="$at" conv=nocreat,notrunc status=none
            written_at "$at"
            zero_at $((at - 65536)) 65536
            zero_at $((at + 262144)) 65536
            [ "$round" = 2 ] || blkdiscard --offset "$at" --length 262144 "$BLOCK"
            [ "$round" = 2 ] || zero_at "$at" 262144
        done
    done
done
