# verify: good blocks pass, those beyond the end are refused, a bad one is found and named
skip_on nvmet 'the kernel target has no Verify'
expect_kernel_log 'I/O error, dev nullb0, ' 'critical medium error, dev nvme' 'nvme[0-9]+(c[0-9]+)?n[0-9]+: (Verify|Read)\(0x' \
    '(Buffer )?I/O error,? (on )?dev nvme[0-9]+(c[0-9]+)?n[0-9]+, .*sector 2000[0-9]'
# Namespace 2 is a disk of the kernel's that cannot give block 20003 (of 512 bytes).
modprobe null_blk nr_devices=0
bad=/sys/kernel/config/nullb/nullb0
mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
take_away() { echo 0 >"$bad/power" && rmdir "$bad"; }
mkdir "$bad"
echo 64 >"$bad/size"
echo 1 >"$bad/memory_backed"
echo 512 >"$bad/blocksize"
echo '+20003-20003' >"$bad/badblocks"
echo 1 >"$bad/power"
{
    reactor; disk_ram ram 64MiB; printf '%s\n' '[[disk]]' 'name = "bad"' 'kind = "file"' 'path = "/dev/nullb0"'
    listener; subsystem "$NQN" ram bad
} | config
start_target
connect_block
nvme verify "$BLOCK" -n 1 -s 0 -c 127 >/dev/null || fail 'nvme verify'
refused 'LBA Out of Range' nvme verify "$BLOCK" -n 1 -s $((64 << 11)) -c 0

wait_for_block 2
verify() { nvme verify "$BLOCK" -n 2 -s "$1" -c $(($2 - 1)); }
verify 16000 4003 >/dev/null || fail 'blocks before the bad one'
verify 20004 4096 >/dev/null || fail 'blocks behind the bad one'
refused 'Unrecovered Read Error' verify 20000 8
for block in {20000..20007}; do
    if [ "$block" = 20003 ]; then
        refused 'Unrecovered Read Error' verify "$block" 1
    else
        verify "$block" 1 >/dev/null || fail "block $block is good"
    fi
done
entry=$(nvme error-log "/dev/$CTRL" -e 1)
expect_match 'the status in the error log' "$(field status_field <<<"$entry")" '.*Unrecovered Read Error.*'
expect 'its block' "$(($(field lba <<<"$entry")))" 20003
expect 'its namespace' "$(($(field nsid <<<"$entry")))" 2
disconnect
stop_target
take_away
