# large reads over a link with a delay follow what the socket's buffer allows, not a timer of the target
# limit: 600 s
skip_over rdma 'the buffers of TCP'
skip_on nvmet 'its buffers are not ours to set'
# As fast as the bare exchange over the same link, with the same buffers: at least this share of it, in one round of
# these at least. The emulator takes the processor away from either at times, and never from one side in all rounds;
# a target that sends at its tick has a tenth in each.
share_min=50 rounds_max=6

limit=${SPINDLE%/*}/spindle-limit
[ -x "$limit" ] || fail "no $limit: cargo build --release -p spindle-tests-limit"

# delay MS: so long there and back.
delay() { tc qdisc replace dev lo root netem delay "$(($1 * 500))us" limit 100000; }
modprobe sch_netem
trap 'tc qdisc del dev lo root 2>/dev/null || true' EXIT

# rate COMMAND...: MB/s that this measures.
rate() {
    "$@" --rw read --bs 1MiB --qd 4 --seconds 1 --json >"$WORK/rate" || return 1
    sed -n 's/.*"mb_per_s": *\([0-9]*\).*/\1/p' "$WORK/rate"
}

# round: true if both have their share; prints what was measured.
round() {
    local bare ours kernel
    bare=$(rate "$limit" --span 64MiB --socket-buffer "$buffer") && [ "${bare:-0}" -gt 0 ] || fail "the bare exchange has no rate"
    ours=$(rate "$SPINDLE" bench "$ADDRESS:$PORT" --nqn "$NQN" --span 64MiB)
    run_fio "kernel-$buffer-$ms" --rw=read --bs=1M --size=64M --iodepth=4 --time_based --runtime=1 --output-format=terse
    kernel=$(($(cut -d ';' -f 7 "$WORK/fio.kernel-$buffer-$ms") * 1024 / 1000000))
    echo "buffer $buffer, $ms ms: bare $bare MB/s, spindle bench $ours MB/s, the kernel's host $kernel MB/s"
    [ $((ours * 100)) -ge $((bare * share_min)) ] && [ $((kernel * 100)) -ge $((bare * share_min)) ]
}

for buffer in 64KiB 256KiB 0; do
    { reactor; printf '%s\n' '[tcp]' "socket_buffer = \"$buffer\""; disk_ram ram 256MiB; listener; subsystem "$NQN" ram; } | config
    start_target
    connect_block --nr-io-queues=1
    run_fio "fill-$buffer" --rw=write --bs=1M --size=64M --iodepth=4
    for ms in 1 10; do
        delay "$ms"
        tried=1
        until round; do
            [ "$tried" -lt "$rounds_max" ] || fail "buffer $buffer, $ms ms: in none of $tried rounds both had $share_min % of the bare exchange"
            tried=$((tried + 1))
        done
        tc qdisc del dev lo root
    done
    disconnect
    stop_target
done
