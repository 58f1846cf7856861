# a drive is pulled under load, without a request to remove it: the same as when it is unplugged
# limit: 600 s
. "$LAB/nvme-serve.sh"
drives_for_spindle
over tcp
expect_kernel_log "${gone[@]}"
config_drives
start_target
connect
both_blocks
take_out() { drive_pull nv0 "$target_pid"; }
. "$LAB/nvme-away.sh"
