# persistent discovery: the controller stays, and tells the host when a subsystem appears
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
