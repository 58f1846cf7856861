# a drive that is missing at the start: the other is served, and the missing one once it is there
# limit: 600 s
. "$LAB/nvme-serve.sh"
over tcp
drives_for_spindle
config_drives
drive_unplug nv1
drive_wait 60 drive_is_gone nv1
start_target
within 10 says_of "$DRIVE1" 'open failed .*next attempt in 60 s'
connect
wait_for_block 1
verify_fio first --bs=16k --iodepth=8 --size=2M
active() { nvme list-ns "/dev/$CTRL" | grep -c 0x; }
expect 'active namespaces' "$(active)" 1
# It comes, and the host hears of it and looks by itself.
drive_plug nv1
drive_wait 30 drive_is_there nv1
expect 'its place' "$(drive_place nv1)" "$DRIVE1"
"$SPINDLE" nvme bind --force "$DRIVE1"
is_served() { grep -E 'serving the current size of the drive.*nsid=2' "$WORK/target.log" >/dev/null; }
within 60 is_served
wait_for_block 2
expect 'active namespaces' "$(active)" 2
verify_fio second --bs=16k --iodepth=8 --size=2M
expect 'lines of it' "$(lines_of "$DRIVE1" | wc -l)" 1
