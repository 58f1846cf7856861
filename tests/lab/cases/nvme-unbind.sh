# what is written through Spindle the kernel's driver reads after unbind, and the other way round
# limit: 600 s
. "$LAB/nvme-serve.sh"
over tcp
drives_up_both
# each COMMAND...: with BLOCK and number for each of the two drives.
each() {
    for number in 0 1; do
        if [ "$1" = kernel ]; then
            address=DRIVE$number
            within 15 find_drive_block "${!address}"
        else
            BLOCK=BLOCK$number BLOCK=${!BLOCK}
        fi
        "${@:2}"
    done
}
serve() {
    "$SPINDLE" nvme bind --force "$DRIVE0" "$DRIVE1"
    config_drives
    start_target
    connect
    both_blocks
}
fill() {
    pattern "$WORK/$1.$number" $((8 << 20))
    write_blocks "$WORK/$1.$number" $(($2 << 20))
}
holds() {
    read_blocks "$WORK/back" $(($2 << 20)) $((8 << 20))
    cmp "$WORK/$1.$number" "$WORK/back" || fail "nv$number has not what $1 wrote"
}
bytes() { expect "bytes of nv$number" "$(block_bytes "$BLOCK")" $((256 << 20)); }

each kernel fill kernel 0
serve
each served bytes
each served holds kernel 0
# At both ends of the drive, and over the kernel's in part.
each served fill spindle 4
each served fill last $((256 - 8))
refused "in use = VFIO group open: .* by pid $target_pid" "$SPINDLE" nvme unbind "$DRIVE0"
finish
"$SPINDLE" nvme unbind "$DRIVE0" "$DRIVE1"
each kernel holds spindle 4
each kernel holds last $((256 - 8))
each kernel fill kernel-again 64
expect 'the driver of nv0' "$(function_driver "$DRIVE0")" nvme
serve
each served holds kernel-again 64
each served holds spindle 4
expect 'what was said of the drives' "$(lines_of 0000:)" ''
