# queue pairs that never send Connect: an address has few of them, and none takes a host's place
skip_on nvmet 'it has no limit for these'
peers=${SPINDLE%/*}/examples/silent-peers
[ -x "$peers" ] || fail "no $peers: cargo build --release -p spindle-tests --no-default-features --features peers --example silent-peers"
# serve_with LIMIT: a target with room for 8 connections, and so many of an address without Connect.
serve_with() {
    config_ram
    printf '%s\n' '[limits]' 'connections = 8' "unconnected_per_address = $1" >>"$CONFIG"
    start_target
}
# silent COUNT: so many, that stay until `leave`; sets SAID.
silent() {
    coproc PEERS { exec "$peers" "$ADDRESS:$PORT" "$1"; }
    peers_pid=$PEERS_PID
    IFS= read -r -t 60 SAID <&"${PEERS[0]}" || fail 'the peers say nothing'
}
leave() {
    local input=${PEERS[1]}
    exec {input}>&-
    wait "$peers_pid" || fail 'the peers failed'
}
log_says() { grep -F "$1" "$target_log" >/dev/null; }

serve_with 3
silent 5
expect 'what became of five' "$SAID" 'accepted 3, refused 2'
within 10 log_says 'limits.unconnected_per_address'
leave
within 60 has_queue_pairs 0
# A queue that is connected does not count.
connect --nr-io-queues=2
silent 3
expect 'what became of three, beside a host' "$SAID" 'accepted 3, refused 0'
leave
disconnect
stop_target

# All places are taken; the newest take those of the oldest, and a host takes three.
serve_with 0
silent 12
expect 'what became of twelve' "$SAID" 'accepted 12, refused 0'
connect_block --nr-io-queues=2
verify_fio beside --bs=16k --iodepth=16 --size=4M
within 10 log_says 'has not sent Connect, and its slot is needed for a newer connection'
leave
disconnect
