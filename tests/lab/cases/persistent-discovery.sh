# persistent discovery: the controller stays, and tells the host when a subsystem appears; listeners come and go
{ reactor; disk_ram d0 32MiB; disk_ram d1 32MiB; listener; subsystem "$NQN" d0; } | config
start_target
log=$(nvme discover "${PORTAL[@]}" "${HOST_A[@]}" --persistent --keep-alive-tmo=5)
find_discovery() {
    local path
    for path in /sys/class/nvme/nvme*; do
        [ "$(cat "$path/subsysnqn" 2>/dev/null)" = "$DISCOVERY_NQN" ] && CTRL=${path##*/} && return
    done
    return 1
}
within 5 find_discovery
within 5 has_state live
generation() { sed -n 's/.*Generation counter //p'; }
before=$(generation <<<"$log")
# Longer than the keep-alive: nothing but keep-alives holds it.
sleep 7
has_state live || fail "the discovery controller is $(cat "/sys/class/nvme/$CTRL/state")"

# The host's kernel passes the notice on as an event: a discovery log change, log page 70h.
udevadm monitor --kernel --property --subsystem-match=nvme >"$WORK/events" &
monitor=$!
within 10 grep -q KERNEL "$WORK/events"
{ cat "$CONFIG"; subsystem "$NQN1" d1; } >"$WORK/more"
cp "$WORK/more" "$CONFIG"
reload_target
within 15 grep -q 'NVME_AEN=0x70f002' "$WORK/events"
kill "$monitor"

log=$(nvme discover -d "$CTRL")
grep -qE "subnqn: +$NQN1\$" <<<"$log" || fail "the new subsystem is not in: $log"
[ "$(generation <<<"$log")" -gt "$before" ] || fail "the generation was $before, and is still: $log"
has_state live || fail 'the discovery controller did not stay'
disconnect

# Listeners come and go, too: hosts find the new one in the log, and who is connected by one that goes stays.
if [ "$TRANSPORT $TARGET_KIND" = 'tcp spindle' ]; then
    { cat "$WORK/more"; listener "$ADDRESS:4421"; } >"$CONFIG"
    reload_target
    is_told() { nvme discover "${PORTAL[@]}" "${HOST_A[@]}" >"$WORK/told" && grep -qE 'trsvcid: +4421$' "$WORK/told"; }
    within 15 is_told
    PORTAL=(-t tcp -a "$ADDRESS" -s 4421)
    connect_block -n "$NQN1"
    cp "$WORK/more" "$CONFIG"
    reload_target
    is_closed() { ! tcp_listens 4421; }
    within 15 is_closed
    # Not s1: nvme-cli would say that it is connected, without a look.
    expect_kernel_log 'nvme nvme[0-9]+: failed to connect socket: -111'
    refused '' nvme connect "${PORTAL[@]}" "${HOST_B[@]}" -n "$NQN"
    pattern "$WORK/data" 65536
    write_blocks "$WORK/data" 0
    read_blocks "$WORK/back" 0 65536
    cmp "$WORK/data" "$WORK/back"
    has_state live || fail 'the connection by the listener that is gone did not stay'
fi
