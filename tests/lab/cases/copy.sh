# copy: two ranges to one place, inside the target
skip_on nvmet 'the kernel target has no Copy'
config_ram
start_target
connect_block
pattern "$WORK/data" 65536
write_blocks "$WORK/data" 0
nvme copy "$BLOCK" --sdlba=1024 --slbs=16,64 --blocks=7,15 >/dev/null || fail 'nvme copy'
read_blocks "$WORK/back" $((1024 * 512)) $((24 * 512))
dd if="$WORK/data" of="$WORK/want" bs=512 skip=16 count=8 status=none
dd if="$WORK/data" of="$WORK/want" bs=512 skip=64 count=16 seek=8 status=none
cmp "$WORK/want" "$WORK/back"
