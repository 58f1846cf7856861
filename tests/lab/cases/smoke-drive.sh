# an emulated drive: bind, serve over RDMA, fio with verification, unbind; the kernel reads what was written
skip_on nvmet 'it takes drives from the kernel'
. "$LAB/nvme-serve.sh"
drives_for_spindle
over rdma
config_first
start_target
connect_block
expect 'the size' "$(block_bytes "$BLOCK")" $((256 << 20))
verify_fio served --bsrange=512-128k --blockalign=512 --size=4M --iodepth=16
pattern "$WORK/data" $((1 << 20))
write_blocks "$WORK/data" $((255 << 20))
refused "in use = VFIO group open: .* by pid $target_pid" "$SPINDLE" nvme unbind "$DRIVE0"
finish
"$SPINDLE" nvme unbind "$DRIVE0" "$DRIVE1"
expect 'the driver' "$(function_driver "$DRIVE0")" nvme
within 15 find_drive_block "$DRIVE0"
read_blocks "$WORK/back" $((255 << 20)) $((1 << 20))
cmp "$WORK/data" "$WORK/back" || fail 'the kernel does not read what was written through Spindle'
expect 'what was said of the drives' "$(lines_of 0000:)" ''
