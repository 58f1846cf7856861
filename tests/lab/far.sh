# A second target, which the one under test has behind a disk of kind = "remote", and the network to it. For the
# cases remote, remote-* and nvme-remote. Over TCP it is in a network namespace behind a pair of veth devices; over RDMA it
# listens at the host's address of tests/lab/rdma.sh.
# shellcheck shell=bash

FAR_PORT=4430 far_log=$WORK/far.log
# More lines of the disk in front.
far_disk=()

# A command that waits for too long fails in a way that the host may repeat; what udev reads ahead is not repeated.
expect_kernel_log 'nvme[0-9]+c[0-9]+n[0-9]+: I/O Cmd\(0x2\) .* \(sct 0x0 / sc 0x6\)' \
    'I/O error, dev nvme[0-9]+c[0-9]+n[0-9]+, .* op 0x0:\(READ\) flags 0x[0-9a-f]*8[0-9a-f]7[0-9a-f]{2} '

# far_network: before far_start, with TRANSPORT as it will be.
far_network() {
    case $TRANSPORT in
        tcp) FAR_ADDRESS=10.9.7.2 && network_apart ;;
        rdma) FAR_ADDRESS=$RDMA_HOST_ADDRESS ;;
    esac
}
# far_cut and far_mend: what is sent to it is lost, without a word to either end.
far_cut() {
    case $TRANSPORT in
        tcp) tc qdisc add dev v0 root netem loss 100% ;;
        rdma) ip addr delete "$FAR_ADDRESS/32" dev d0 ;;
    esac
}
far_mend() {
    case $TRANSPORT in
        tcp) tc qdisc del dev v0 root ;;
        rdma) rdma_up ;;
    esac
}

# far_config LINE...: what it serves, the disk `far` of these lines, and the target under test in front of it.
far_config() {
    { reactor; printf '%s\n' "$@"; listener "$FAR_ADDRESS:$FAR_PORT"; subsystem "$NQN1" far; } >"$WORK/far.toml"
    {
        reactor
        printf '%s\n' '[[disk]]' 'name = "d0"' 'kind = "remote"' "address = \"$FAR_ADDRESS:$FAR_PORT\"" \
            "transport = \"$TRANSPORT\"" "nqn = \"$NQN1\"" "${far_disk[@]}"
        listener
        subsystem "$NQN" d0
    } | config
}

# far_start: returns when it listens.
far_start() {
    local apart=()
    [ "$TRANSPORT" = rdma ] || apart=(nsenter --net=/run/netns/target)
    : >"$far_log"
    "${apart[@]}" "$SPINDLE" serve -c "$WORK/far.toml" >"$far_log" 2>&1 &
    far_pid=$!
    within 30 grep -q 'listening' "$far_log"
}
# far_up LINE...: both targets, and BLOCK, which is the disk of these lines.
far_up() {
    far_network
    far_config "$@"
    far_start
    start_target
    connect_block
}
far_kill() {
    kill -KILL "$far_pid"
    wait "$far_pid" 2>/dev/null || true
}
far_stop() {
    local code=0
    kill -TERM "$far_pid"
    wait "$far_pid" || code=$?
    expect "the far target's exit code after SIGTERM" "$code" 0
}
# far_lasts: until each reason for a loss is told again, which it is once an association has lasted for 10 s.
far_lasts() { sleep 11; }
# said COUNT PATTERN: the target under test has said it so many times.
said() { [ "$(grep -cE "$2" "$target_log" || true)" -ge "$1" ]; }
