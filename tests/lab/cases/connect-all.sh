# connect-all: everything that discovery lists, once
{
    reactor; disk_ram d0 32MiB; disk_ram d1 32MiB; listener
    subsystem "$NQN" d0; subsystem "$NQN1" d1
} | config
start_target
nvme connect-all "${PORTAL[@]}" "${HOST_A[@]}" >/dev/null || fail 'connect-all'
connected() { cat /sys/class/nvme/nvme*/subsysnqn 2>/dev/null | sort | tr '\n' ' '; }
all_connected() { [ "$(connected)" = "$NQN $NQN1 " ]; }
within 10 all_connected
for path in /sys/class/nvme/nvme*; do
    CTRL=${path##*/}
    within 10 has_state live
    wait_for_block
    expect 'the size' "$(block_bytes "$BLOCK")" $((32 << 20))
done
# Again: they are all there already.
nvme connect-all "${PORTAL[@]}" "${HOST_A[@]}" >/dev/null 2>&1 || true
expect 'connected, after the second time' "$(connected)" "$NQN $NQN1 "
