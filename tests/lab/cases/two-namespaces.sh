# two namespaces: each its own data and size; one is added and one removed while the host is connected
lines_with() { reactor; disk_ram d0 64MiB; disk_ram d1 32MiB; listener; subsystem "$NQN" "$@"; }
lines_with d0 | config
start_target
connect_block
first=$BLOCK
pattern "$WORK/one" 65536
write_blocks "$WORK/one" 0

lines_with d0 d1 | config
reload_target
wait_for_block 2
expect 'the size of namespace 2' "$(block_bytes "$BLOCK")" $((32 << 20))
pattern "$WORK/two" 65536
write_blocks "$WORK/two" 0
read_blocks "$WORK/back" 0 65536
cmp "$WORK/two" "$WORK/back"
BLOCK=$first
read_blocks "$WORK/back" 0 65536
cmp "$WORK/one" "$WORK/back"

# What udev reads of a disk that goes would be an error in the kernel's log.
udevadm settle --timeout=60
lines_with d0 | config
reload_target
second_gone() { ! find_block 2; }
within 15 second_gone
BLOCK=$first
read_blocks "$WORK/back" 0 65536
cmp "$WORK/one" "$WORK/back"
