# the control socket builds a subsystem out of nothing, and changes it under fio: the host notices each change, its I/O goes on
# limit: 600 s
skip_on nvmet 'it has no control socket'
expect_kernel_log 'nvme[0-9]+n[0-9]+: detected capacity change' 'rescanning namespaces' 'nvme[0-9]+: IDs don.t match' \
    'block device autoloading is deprecated' # who opens the node of a disk that has just gone: udev
ctl() { "$SPINDLE" ctl --socket "$WORK/control" "$@" >"$WORK/ctl" 2>&1 || fail "spindle ctl $*: $(<"$WORK/ctl")"; }
ctl_refused() { ! "$SPINDLE" ctl --socket "$WORK/control" "$@" >"$WORK/ctl" 2>&1 || fail "spindle ctl $* was not refused"; }
at() { echo --listen_address.trtype "$TRANSPORT" --listen_address.traddr "$ADDRESS" --listen_address.trsvcid "$1"; }
# Over RDMA a listener is there from the start: devices are opened for it.
{ reactor; control; [ "$TRANSPORT" = tcp ] || listener; } | config
if [ "$TRANSPORT" = tcp ]; then target_start; within 30 test -S "$WORK/control"; else start_target; fi
ctl bdev_malloc_create --name stays --num_blocks 131072 --block_size 512
ctl nvmf_create_subsystem --nqn "$NQN"
ctl nvmf_subsystem_add_ns --nqn "$NQN" --namespace.bdev_name stays
ctl nvmf_subsystem_add_host --nqn "$NQN" --host "${HOST_A[1]}"
# shellcheck disable=SC2046 # words
ctl nvmf_subsystem_add_listener --nqn "$NQN" $(at "$PORT")
within 10 is_listening
connect_block
stays=$BLOCK

# latencies NAME: fio on the disk that stays, for 15 s; tells the 99th percentile.
latencies() { BLOCK=$stays run_fio "$1" --rw=randrw --bs=4k --iodepth=4 --rate_iops=200,200 --time_based --runtime="${2:-15}" --lat_percentiles=1 --clat_percentiles=0; }
tells() {
    sed -nE "s/^ *lat percentiles \((.)sec\):.*/unit \1/p; s/.*99.00th=\[ *([0-9]+)\].*/\1/p" "$WORK/fio.$1" |
        awk '$1 == "unit" { unit = $2; next } { printf "%s%d us", n++ ? " / " : "", unit == "n" ? $1 / 1000 : unit == "m" ? $1 * 1000 : $1 }'
}
latencies before
latencies during 40 &
on_stays=$!
under_way "$on_stays" "$stays"
second_gone() { ! find_block 2; }
lists() { nvme discover -t "$TRANSPORT" -a "$ADDRESS" -s "$1" "${HOST_A[@]}" | grep -E "trsvcid: +$2\$" >/dev/null; }
lists_not() { ! lists "$@"; }
# Over RDMA a disk is resident as a whole: 32 MiB, and some 80 MiB for writes in flight. After each round the memory of the
# disk that was removed is given back: less than one disk is left, where the next one would come on top.
rss() { while read -r name rss _; do [ "$name" != VmRSS: ] || return 0; done <"/proc/$target_pid/status"; fail 'no VmRSS'; }
spare=$((64 << 10)) # KiB
given_back() { rss && [ "$rss" -le $((rss_before + spare)) ]; }
rss
rss_before=$rss rss_most=0
rounds=0
while kill -0 "$on_stays" 2>/dev/null; do
    rounds=$((rounds + 1))
    # A name that was used is another disk: its identity, too.
    disk=comes$rounds
    ctl bdev_malloc_create --name "$disk" --num_blocks 65536 --block_size 512
    ctl nvmf_subsystem_add_ns --nqn "$NQN" --namespace.bdev_name "$disk" --namespace.nsid 2
    wait_for_block 2
    comes=$BLOCK
    ctl bdev_malloc_resize --name "$disk" --new_size 16
    within 20 has_bytes "$comes" $((16 << 20))
    ctl bdev_malloc_resize --name "$disk" --new_size 32
    within 20 has_bytes "$comes" $((32 << 20))
    # shellcheck disable=SC2046
    ctl nvmf_subsystem_add_listener --nqn "$NQN" $(at 4421)
    within 10 lists 4421 4421
    # shellcheck disable=SC2046
    ctl nvmf_subsystem_remove_listener --nqn "$NQN" $(at 4421)
    within 10 lists_not "$PORT" 4421
    ctl nvmf_subsystem_remove_ns --nqn "$NQN" --nsid 2
    within 20 second_gone
    ctl bdev_malloc_delete --name "$disk"
    if [ "$TRANSPORT" = rdma ]; then
        within 20 given_back
        rss_most=$((rss > rss_most ? rss : rss_most))
    fi
done
wait "$on_stays" || fail 'the disk that stays was disturbed'
has_state live
ctl nvmf_subsystem_get_qpairs --nqn "$NQN"
grep -F "\"traddr\": \"$ADDRESS\"" "$WORK/ctl" >/dev/null || fail "no address in $(<"$WORK/ctl")"
if dmesg | grep -E 'starting error recovery|Reconnecting'; then fail 'the connection was lost in between'; fi
ctl_refused nvmf_subsystem_add_ns --nqn "$NQN" --namespace.bdev_name nothing
echo "p99 of other I/O, read / write: before $(tells before), during $rounds rounds of changes $(tells during)" >&2
[ "$TRANSPORT" != rdma ] || echo "resident: $rss_before KiB before, at most $rss_most KiB after a round" >&2

# What was changed is in the file.
disconnect
stop_target
start_target
connect_block
# A host that is no longer allowed is gone at once.
ctl nvmf_subsystem_remove_host --nqn "$NQN" --host "${HOST_A[1]}"
expect_reconnect
no_longer() { ! has_state live; }
within 20 no_longer
