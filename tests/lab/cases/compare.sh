# compare: equal passes, unequal is refused as such and changes nothing
skip_on nvmet 'the kernel target has no Compare'
config_ram
start_target
connect_block
pattern "$WORK/data" 8192
write_blocks "$WORK/data" 0
nvme compare "$BLOCK" -s 0 -c 15 -z 8192 -d "$WORK/data" || fail 'compare of equal data'
printf x | dd of="$WORK/data" bs=1 seek=5000 conv=notrunc status=none
refused 'Compare Failure' nvme compare "$BLOCK" -s 0 -c 15 -z 8192 -d "$WORK/data"
read_blocks "$WORK/back" 0 8192
! cmp -s "$WORK/data" "$WORK/back" || fail 'compare wrote'
