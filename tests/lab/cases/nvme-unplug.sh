# a drive is unplugged under load: its I/O fails, the other drive's does not; plugged in and bound it goes on
# limit: 600 s
. "$LAB/nvme-serve.sh"
drives_for_spindle
over rdma
expect_kernel_log "${gone[@]}"
config_drives
start_target
connect
both_blocks
take_out() { drive_unplug nv0; }
. "$LAB/nvme-away.sh"
