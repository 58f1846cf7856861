# an idle connection stays: keep-alives alone hold it, longer than its time-out, twice over
config_ram
start_target
connect_block --keep-alive-tmo=3
sleep 8
expect 'the state after being idle' "$(cat "/sys/class/nvme/$CTRL/state")" live
if dmesg | grep -E 'starting error recovery|Reconnecting'; then fail 'the connection was lost in between'; fi
pattern "$WORK/data" 4096
write_blocks "$WORK/data" 0
