# a file disk grows: the configuration is raised and reloaded, and the connected host sees the new size
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
