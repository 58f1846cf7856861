# reloads under load: a drive's namespace comes and goes; then the drive is free, and unbound while serving
# limit: 600 s
. "$LAB/nvme-serve.sh"
drives_for_spindle
over rdma
config_first
start_target
connect_block
BLOCK0=$BLOCK
others() {
    local round
    for ((round = 0; ; round++)); do
        BLOCK=$BLOCK0 verify_fio "other$round" --bs=4k --iodepth=8 --size=2M --rate_iops=300 --max_latency=5s
        [ ! -e "$WORK/enough" ] || break
    done
}
others &
other=$!
has_no_second() { ! find_block 2; }
for round in 1 2; do
    config_drives
    reload_target
    wait_for_block 2
    BLOCK1=$BLOCK
    expect 'bytes of nv1' "$(block_bytes "$BLOCK1")" $((256 << 20))
    [ "$round" = 1 ] || { read_blocks "$WORK/back" 0 65536; cmp "$WORK/data" "$WORK/back"; }
    verify_fio "second$round" --bs=16k --iodepth=32 --size=4M
    pattern "$WORK/data" 65536
    write_blocks "$WORK/data" 0
    udevadm settle --timeout=60
    config_first
    reload_target
    within 20 has_no_second
    released() { "$SPINDLE" nvme unbind "$DRIVE1" >"$WORK/unbind" 2>&1; }
    within 30 released
    within 15 find_drive_block "$DRIVE1"
    read_blocks "$WORK/back" 0 65536
    cmp "$WORK/data" "$WORK/back" || fail 'the kernel reads something else'
    "$SPINDLE" nvme bind --force "$DRIVE1"
done

# A drive that is the kernel's: all stays as it was.
"$SPINDLE" nvme unbind "$DRIVE1"
config_drives
reload_target
says() { grep -F "$1" "$WORK/target.log" >/dev/null; }
within 20 says 'SIGHUP: reload failed, the configuration is unchanged'
says "nvme = \"$DRIVE1\": must be a drive of this machine: its driver is nvme" || fail 'it does not say why'
touch "$WORK/enough"
wait "$other"
has_state live || fail 'the connection did not stay'
