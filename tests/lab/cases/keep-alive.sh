# an idle connection stays: keep-alives alone hold it, longer than its time-out, twice over
config_ram
start_target
connect_block --keep-alive-tmo=3
sleep 8
expect 'the state after being idle' "$(cat "/sys/class/nvme/$CTRL/state")" live
! dmesg | grep -qE 'starting error recovery|Reconnecting' || fail 'the connection was lost in between'
pattern "$WORK/data" 4096
write_blocks "$WORK/data" 0
