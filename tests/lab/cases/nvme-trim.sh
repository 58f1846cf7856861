# what is trimmed or zeroed on a drive reads as zeroes, what lies beside it does not change; flush and FUA
# limit: 600 s
. "$LAB/nvme-serve.sh"
drives_for_spindle
over tcp
config_drives
start_target
connect
both_blocks
pattern "$WORK/data" $((16 << 20))
# part FILE BYTE-OFFSET BYTES
part() { dd if="$1" bs=64k iflag=skip_bytes,count_bytes skip="$2" count="$3" status=none; }
zeroes() {
    read_blocks "$WORK/back" $(($1 << 20)) $((($2 - $1) << 20))
    is_zero "$WORK/back" || fail "MiB $1 to $2 of $BLOCK are not zero after $3"
}
kept() {
    read_blocks "$WORK/back" $(($1 << 20)) $((($2 - $1) << 20))
    part "$WORK/data" $(($1 << 20)) $((($2 - $1) << 20)) | cmp - "$WORK/back" ||
        fail "MiB $1 to $2 of $BLOCK changed with $3"
}
for BLOCK in "$BLOCK0" "$BLOCK1"; do
    write_blocks "$WORK/data" 0
    # QEMU's drives make zeroes of what Dataset Management names, and have no Write Zeroes that deallocates. To a
    # drive the former is a hint, so hosts are promised nothing (bits 2:0).
    expect 'what is trimmed, as the host sees it' "$(nvme id-ns "$BLOCK" | field dlfeat | tail -c 2)" 8
    blkdiscard --offset $((4 << 20)) --length $((4 << 20)) "$BLOCK"
    zeroes 4 8 blkdiscard
    kept 0 4 blkdiscard
    kept 8 16 blkdiscard
    blkdiscard -z --offset $((10 << 20)) --length $((3 << 20)) "$BLOCK"
    zeroes 10 13 'blkdiscard -z'
    kept 8 10 'blkdiscard -z'
    kept 13 16 'blkdiscard -z'
    # A block at either end of a stretch, several stretches in one command.
    sector=$(blockdev --getss "$BLOCK")
    nvme dsm "$BLOCK" -d -b 1,3 -s 0,8 >/dev/null
    read_blocks "$WORK/back" 0 $((16 * sector))
    for block in {0..15}; do
        from=$WORK/data
        case $block in 0 | 8 | 9 | 10) from=/dev/zero ;; esac
        part "$WORK/back" $((block * sector)) "$sector" | cmp - <(part "$from" $((block * sector)) "$sector") ||
            fail "block $block of $BLOCK after dsm"
    done

    expect 'the cache, as the host sees it' "$(cat "/sys/block/${BLOCK##*/}/queue/write_cache")" 'write back'
    nvme flush "$BLOCK" -n "$(nvme get-ns-id "$BLOCK" | grep -oE '[0-9]+$')" >/dev/null || fail 'nvme flush'
    nvme write "$BLOCK" -s 256 -c $((32768 / sector - 1)) -z 32768 -f -d "$WORK/data" >/dev/null ||
        fail 'nvme write --force-unit-access'
    read_blocks "$WORK/back" $((256 * sector)) 32768
    cmp -n 32768 "$WORK/data" "$WORK/back"
done
expect 'what was said of the drives' "$(lines_of 0000:)" ''
