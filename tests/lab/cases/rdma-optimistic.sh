# optimistic reads: our initiator reads the target's cache by RDMA beside a writer, under eviction, beside the kernel's host, and when the cache or the device goes
# limit: 600 s
skip_on nvmet 'it has no cache'
{
    printf '%s\n' '[rdma]' 'optimistic_port = 4430'
    reactor; control; disk_file file "$FILE" 128MiB
    printf '%s\n' '[disk.cache]' 'size = "32MiB"'
    listener; printf '%s\n' '[[listener]]' "address = \"$ADDRESS:4421\""
    subsystem "$NQN" file
    disk_ram ram 32MiB
    subsystem "$NQN-ram" ram
    disk_ram small 2MiB
    subsystem "$NQN-small" small
} | config
start_target
# optimistic NAME OPTION...: a benchmark with optimistic reads of $block at $nqn; leaves its result in $WORK/NAME.json.
nqn=$NQN block=4KiB
optimistic() {
    local name=$1
    shift
    "$SPINDLE" bench "rdma:$ADDRESS:$PORT" --nqn "$nqn" --optimistic --bs "$block" --json "$@" \
        >"$WORK/$name.json" 2>"$WORK/$name.log" || fail "$name: $(tail -n 3 "$WORK/$name.log")"
    echo "$name: $(sed -nE 's/.*("optimistic":\{[^}]*\}).*/\1/p' "$WORK/$name.json")"
}
# counted NAME FIELD: accepted, rejected or learned of that benchmark.
counted() { sed -nE "s/.*\"optimistic\":\{[^}]*\"$2\":([0-9]+).*/\1/p" "$WORK/$1.json"; }

optimistic fits --rw randread --span 8MiB --seconds 3
[ "$(counted fits accepted)" -gt "$((10 * $(counted fits rejected) + 1000))" ] || fail 'what fits the cache is not read by RDMA'
optimistic verified --rw randrw --verify --span 8MiB --seconds 5
[ "$(counted verified accepted)" -gt 100 ] || fail 'beside writes nothing was read by RDMA'
# evictions: of the cache of the file, so far.
evictions() { "$SPINDLE" ctl --socket "$WORK/control" cache --json | sed -nE '0,/"evictions"/s/.*"evictions": ([0-9]+).*/\1/p'; }
before=$(evictions)
optimistic evicted --rw randrw --mix 90 --verify --span 96MiB --seconds 10
[ "$(($(evictions) - before))" -gt 100 ] || fail 'no page was evicted'
[ "$(counted evicted accepted)" -gt 100 ] || fail 'while pages are evicted nothing was read by RDMA'

# Reads of several pages, of which Get References tells where they are.
block=32KiB optimistic several --rw randrw --verify --span 8MiB --seconds 5
[ "$(counted several accepted)" -gt 100 ] || fail 'no read of several pages is optimistic'
before=$(evictions)
block=64KiB optimistic several-evicted --rw randrw --mix 90 --verify --span 96MiB --seconds 8
[ "$(($(evictions) - before))" -gt 100 ] || fail 'no page was evicted by reads of several'
[ "$(counted several-evicted accepted)" -gt 10 ] || fail 'while pages are evicted no read of several pages is optimistic'

# A RAM disk, and the references of all its pages at once.
nqn=$NQN-ram optimistic ram --rw randrw --verify --span 8MiB --seconds 5
[ "$(counted ram accepted)" -gt 100 ] || fail 'a RAM disk is not read by RDMA'
nqn=$NQN-ram block=64KiB optimistic ram-several --rw randrw --verify --span 32MiB --seconds 5
[ "$(counted ram-several accepted)" -gt 100 ] || fail 'no read of several pages of a RAM disk is optimistic'
# executed: Reads that the target has executed.
executed() { "$SPINDLE" status "$WORK/control" --json | grep -oE '"reads": *[0-9]+' | tr -dc '0-9\n' | awk '{ sum += $1 } END { print sum }'; }
# A small one, so that a slow machine has told of all its pages, too, before the benchmark ends.
nqn=$NQN-small optimistic small --rw randrw --verify --seconds 2
before=$(executed)
nqn=$NQN-small optimistic eager --rw randread --optimistic-eager --seconds 5
echo "executed: $(($(executed) - before))"
# Those of the time before the target has told where all pages are: none of the optimistic reads is among them.
[ "$(($(executed) - before))" -le "$(($(counted eager learned) - 512 + 64))" ] || fail 'the target has executed optimistic reads'
[ "$(counted eager learned)" -ge 512 ] || fail 'an eager host does not know all pages of the RAM disk'
[ "$(counted eager accepted)" -gt 100 ] || fail 'an eager host reads nothing by RDMA'
[ "$(counted eager rejected)" = 0 ] || fail 'references of pages that nobody has changed are refused'

# A host on TCP reads by RDMA as well. Several queues, so that those without work are in epoll.
"$SPINDLE" bench "$ADDRESS:4421" --nqn "$NQN" --optimistic --json --rw randrw --verify --span 8MiB --queues 6 --seconds 4 \
    >"$WORK/tcp.json" 2>"$WORK/tcp.log" || fail "tcp: $(tail -n 3 "$WORK/tcp.log")"
[ "$(counted tcp accepted)" -gt 100 ] || fail 'a host on TCP reads nothing by RDMA'

# The kernel's host writes to the same namespace.
connect_block
verify_fio beside --offset=64M --size=32M --bs=4k --iodepth=16 &
fio=$!
optimistic beside-bench --rw randrw --verify --span 8MiB --seconds 5
wait "$fio"
disconnect

# One of two hosts may not read the cache any more: its optimistic connections end, its NVMe queues live, the other host reads on.
optimistic denied --hostnqn nqn.2026-01.lab:host-a --rw randread --span 8MiB --seconds 8 &
denied=$!
optimistic allowed --hostnqn nqn.2026-01.lab:host-b --rw randread --span 8MiB --seconds 8 &
allowed=$!
# Two queue pairs of NVMe and one for optimistic reads, of both ends, of both hosts.
within 30 has_queue_pairs 12
sleep 1
sed -i "/^nqn = /a optimistic_hosts = [\"nqn.2026-01.lab:host-b\"]" "$CONFIG"
reload_target
within 20 grep 'optimistic connections ended' "$target_log" >/dev/null
"$SPINDLE" status "$WORK/control" --json >"$WORK/revoked.json"
expect 'the optimistic connections' "$(grep -oE '"optimistic_connections": *[0-9]+' "$WORK/revoked.json" | tr -dc '0-9\n' | sort | tr '\n' ' ')" '0 1 '
wait "$denied" || fail 'the NVMe queue of a host does not survive the end of its optimistic connection'
wait "$allowed" || fail 'another host does not survive it'
[ "$(counted denied accepted)" -gt 100 ] || fail 'the host has read nothing by RDMA before'
# That host goes on without.
! "$SPINDLE" bench "rdma:$ADDRESS:$PORT" --nqn "$NQN" --hostnqn nqn.2026-01.lab:host-a --optimistic --seconds 1 >"$WORK/again.log" 2>&1 ||
    fail 'a denied host may attach'
grep -i 'operation denied' "$WORK/again.log" >/dev/null || fail "the host is not told why: $(tail -n 3 "$WORK/again.log")"
sed -i '/^optimistic_hosts/d' "$CONFIG"
reload_target

# A listener that is added live has a port for optimistic reads, until it is removed.
second=10.9.1.77
ip address add "$second/24" dev "$(ip -o address show to "$ADDRESS" | awk '{ print $2; exit }')"
at_second() { "$SPINDLE" ctl --socket "$WORK/control" "$1" --nqn "$2" --listen_address.trtype rdma --listen_address.traddr "$second" --listen_address.trsvcid "$PORT"; }
at_second nvmf_subsystem_add_listener "$NQN" || fail 'no listener is added'
listening() { grep -F "listening for optimistic reads" "$target_log" | grep -F "$second:4430"; }
within 30 listening
rdma resource show cm_id | grep -F "$second:4430" || fail 'no identifier listens at the address'
ADDRESS=$second optimistic second --rw randread --span 8MiB --seconds 2
[ "$(counted second accepted)" -gt 100 ] || fail 'at an address that was added live nothing is read by RDMA'
# The other subsystems have it too, as their configuration names no listeners.
for subsystem in "$NQN" "$NQN-ram" "$NQN-small"; do at_second nvmf_subsystem_remove_listener "$subsystem" || fail 'the listener is not removed'; done
without_port() { ! rdma resource show cm_id | grep -F "$second:4430"; }
within 30 without_port

# The cache goes under the reads: they go on as ordinary reads.
optimistic gone --rw randrw --verify --span 8MiB --seconds 8 &
bench=$!
sleep 4
"$SPINDLE" ctl --socket "$WORK/control" disk cache file 0 || fail 'the cache is not removed'
wait "$bench" || fail 'a benchmark does not survive the end of the cache'
grep 'optimistic connections ended' "$target_log" >/dev/null || fail 'the log does not say that the connection ends'
within 60 has_queue_pairs 0

# The device goes under the reads of a new cache, and comes back.
"$SPINDLE" ctl --socket "$WORK/control" disk cache file 16MiB || fail 'no cache is added'
"$SPINDLE" bench "rdma:$ADDRESS:$PORT" --nqn "$NQN" --optimistic --rw randread --span 8MiB --seconds 100 >"$WORK/lost.log" 2>&1 &
bench=$!
# Two queue pairs of NVMe and one for optimistic reads, of both ends.
within 30 has_queue_pairs 6
sleep 3
timeout 60 rdma link delete rxe0 || fail 'the device cannot be removed'
! wait "$bench" || fail 'the benchmark does not notice that its device is gone'
! target_is_gone || fail 'the target has ended'
rdma_up
within 60 grep 'listening again' "$target_log"
within 60 grep -c 'listening for optimistic reads' "$target_log"
within 60 "$SPINDLE" bench "rdma:$ADDRESS:$PORT" --nqn "$NQN" --optimistic --seconds 1
optimistic back --rw randread --span 8MiB --seconds 3
[ "$(counted back accepted)" -gt 100 ] || fail 'after the device was away nothing is read by RDMA'
within 60 has_queue_pairs 0
