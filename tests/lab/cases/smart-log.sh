# smart-log: it can be read by controller and by namespace, and its counters follow what the host did
config_ram
start_target
connect_block
get() { nvme smart-log "$@" | field "$name"; }

name=host_write_commands before=$(get "/dev/$CTRL")
name='Data Units Written' units_before=$(get "/dev/$CTRL" | sed 's/ .*//')
run_fio write --rw=write --bs=64k --size=16M
name=host_write_commands after=$(get "/dev/$CTRL")
name='Data Units Written' units_after=$(get "/dev/$CTRL" | sed 's/ .*//')
# 256 writes of 64 KiB: 32 MiB hold 65536 sectors, and a data unit is a thousand of them, rounded up.
[ $((after - before)) -ge 256 ] || fail "host_write_commands went from $before to $after"
expect_match 'data units written by 16 MiB' $((units_after - units_before)) '3[2-5]'

name=media_errors
expect 'media errors' "$(get "/dev/$CTRL")" 0
name=critical_warning
expect 'critical warning' "$(get "/dev/$CTRL")" 0
name=host_write_commands
if [ "$TARGET_KIND" = spindle ]; then
    expect 'writes, counted exactly' $((after - before)) 256
    name=power_on_hours
    expect_match 'power on hours' "$(get "/dev/$CTRL")" '[0-9,]+'
fi
