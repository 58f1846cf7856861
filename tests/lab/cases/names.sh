# names in /dev/disk/by-id survive a restart of the target, for a host that waits and for a new connection
expect_reconnect
config_both 64MiB
# The names that udev gives to a block device, and what they are made of. As udev lists them, for it names a
# disk by its serial number alone as well, which several namespaces of one subsystem then compete for.
names() {
    udevadm settle --timeout=20
    udevadm info --query=symlink --name="$1" | tr ' ' '\n' | grep ^disk/by-id/ | sort
    cat "/sys/block/${1##*/}/"{wwid,uuid,nguid} 2>/dev/null || true
}
has_name() { [ "$(readlink -f "/dev/disk/by-id/nvme-$(cat "/sys/block/${1##*/}/wwid")")" = "$1" ]; }
both_names() {
    local nsid
    for nsid in 1 2; do
        wait_for_block "$nsid"
        within 10 has_name "$BLOCK"
        names "$BLOCK"
    done
    cat "/sys/class/nvme/$CTRL/"{serial,model}
}

start_target
connect --reconnect-delay=1 --ctrl-loss-tmo=120
before=$(both_names)
grep -q '^disk/by-id/nvme-' <<<"$before" || fail "no by-id names: $before"

stop_target
start_target
within 40 has_state live
expect 'the names after a restart' "$(both_names)" "$before"

disconnect
stop_target
start_target
connect
expect 'the names after a restart and a new connection' "$(both_names)" "$before"
echo "$before"
