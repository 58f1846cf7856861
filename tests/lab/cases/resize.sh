# disks grow and shrink by a reload, and the connected host sees the new size; a file is never cut
expect_kernel_log 'nvme[0-9]+n[0-9]+: detected capacity change' 'rescanning namespaces'
config_file 64MiB
start_target
connect_block
expect 'the size' "$(block_bytes "$BLOCK")" $((64 << 20))
pattern "$WORK/data" 65536
write_blocks "$WORK/data" $((60 << 20))
config_file 96MiB
reload_target
within 20 has_bytes "$BLOCK" $((96 << 20))
has_state live
read_blocks "$WORK/back" $((60 << 20)) 65536
cmp "$WORK/data" "$WORK/back"
# The new part is there to be used.
write_blocks "$WORK/data" $((90 << 20))
read_blocks "$WORK/back" $((90 << 20)) 65536
cmp "$WORK/data" "$WORK/back"

[ "$TARGET_KIND" != nvmet ] || exit 0 # its disks are other ones when they shrink
# A file would lose what is at its end: refused, and all stays as it was.
config_file 64MiB
reload_target
within 20 grep -q 'a smaller disk would cut off its end' "$target_log"
expect 'the file' "$(stat -c %s "$FILE")" $((96 << 20))
expect 'the size' "$(block_bytes "$BLOCK")" $((96 << 20))
read_blocks "$WORK/back" $((90 << 20)) 65536
cmp "$WORK/data" "$WORK/back"
# A RAM disk shrinks and grows back; the host sees it, what stays is as it was, what comes back is zero.
disconnect
stop_target
config_ram 64MiB
start_target
connect_block
write_blocks "$WORK/data" $((16 << 20))
write_blocks "$WORK/data" $((60 << 20))
# udev looks at the end of a disk that was written to, which may be behind the new end by then: a read out of range.
udevadm settle --timeout=60 || true
# 64 MiB are 131072 sectors and 16384 pages, of which the first half stays.
expect_kernel_log 'nvme[0-9]+(c[0-9]+)?n[0-9]+: I/O Cmd\(0x2\) @ LBA 1[0-3][0-9]{4}, .* \(sct 0x0 / sc 0x80\)' \
    'I/O error, dev nvme[0-9]+(c[0-9]+)?n[0-9]+, sector 1[0-3][0-9]{4} op 0x0:\(READ\)' \
    'Buffer I/O error on dev nvme[0-9]+n[0-9]+, logical block 1[0-6][0-9]{3}, async page read'
config_ram 32MiB
reload_target
within 20 has_bytes "$BLOCK" $((32 << 20))
has_state live
refused 'LBA Out of Range' nvme read "$BLOCK" -s $((60 << 11)) -c 0 -z 512 -d "$WORK/back"
read_blocks "$WORK/back" $((16 << 20)) 65536
cmp "$WORK/data" "$WORK/back" || fail 'what is left of the disk has changed'
config_ram 64MiB
reload_target
within 20 has_bytes "$BLOCK" $((64 << 20))
read_blocks "$WORK/back" $((60 << 20)) 65536
is_zero "$WORK/back" || fail 'what was cut off is there again'
