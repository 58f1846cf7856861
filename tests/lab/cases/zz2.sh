# hangs
# limit: 3 s
config_ram; start_target; connect_block
sleep 100
