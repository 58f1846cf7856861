# verify: good blocks pass, those beyond the end are refused
skip_on nvmet 'the kernel target has no Verify'
config_ram
start_target
connect_block
nvme verify "$BLOCK" -n 1 -s 0 -c 127 >/dev/null || fail 'nvme verify'
refused 'LBA Out of Range' nvme verify "$BLOCK" -n 1 -s $((256 << 11)) -c 0
