# I/O error when the target dies with fio running and case fails
config_ram 64MiB; start_target; connect_block --ctrl-loss-tmo=2 --reconnect-delay=1
fio --name=v --filename="$BLOCK" --rw=randwrite --bs=4k --size=8M --direct=1 --ioengine=libaio --iodepth=32 --time_based --runtime=60 &
sleep 1
kill_target
fail "on purpose"
