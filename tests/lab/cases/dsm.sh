# dsm: ranges are deallocated, several in one command; what was not named stays
config_ram
start_target
connect_block
pattern "$WORK/data" $((1 << 20))
write_blocks "$WORK/data" 0
# Ranges of 64 and 8 blocks, at blocks 256 and 1024, by number of blocks.
nvme dsm "$BLOCK" -n 1 --ad --blocks=64,8 --slbs=256,1024 >/dev/null || fail 'nvme dsm'
read_blocks "$WORK/back" 0 $((1 << 20))
dd if=/dev/zero of="$WORK/data" bs=512 seek=256 count=64 conv=notrunc status=none
dd if=/dev/zero of="$WORK/data" bs=512 seek=1024 count=8 conv=notrunc status=none
cmp "$WORK/data" "$WORK/back"
# Hints without the deallocate bit change nothing.
nvme dsm "$BLOCK" -n 1 --idr --blocks=64 --slbs=0 >/dev/null || fail 'nvme dsm --idr'
read_blocks "$WORK/back" 0 $((1 << 20))
cmp "$WORK/data" "$WORK/back"
if [ "$TARGET_KIND" = spindle ]; then
    refused 'LBA Out of Range' nvme dsm "$BLOCK" -n 1 --ad --blocks=8 --slbs=$((64 << 11))
fi
