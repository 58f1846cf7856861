# one subsystem over TCP and RDMA at once: discovery lists both, both are paths to the same blocks
# limit: 600 s
{
    reactor; disk_ram d0 64MiB; listener "$ADDRESS:$PORT" tcp; listener "$ADDRESS:$PORT" rdma
    subsystem "$NQN" d0
} | config
start_target
within 30 is_listening tcp
for by in tcp rdma; do
    log=$(nvme discover -t "$by" -a "$ADDRESS" -s "$PORT" "${HOST_A[@]}")
    for transport in tcp rdma; do
        # The kernel's target lists of a port what this port has.
        [ "$TARGET_KIND" = spindle ] || [ "$transport" = "$by" ] || continue
        entries=$(awk -v RS='=====Discovery Log Entry' -v n="$NQN" -v t="$transport" \
            'index($0, "subnqn:  " n "\n") && $0 ~ "trtype: +" t "\n"' <<<"$log" | grep -c '^trtype') || true
        expect "entries of $transport, asked over $by" "$entries" 1
    done
done

paths=()
for TRANSPORT in tcp rdma; do
    connect_directly "${HOST_A[1]}" "${HOST_A[3]}" "$NQN"
    paths+=("$CTRL")
done
wait_for_block
expect 'the size' "$(block_bytes "$BLOCK")" $((64 << 20))
namespaces() { local path; for path in "/sys/class/nvme/$1"/nvme*n*; do cat "$path/stat"; done; }
# requests CTRL: how many reads and writes have gone by this path.
requests() { awk '{ n += $1 + $5 } END { print n + 0 }' < <(namespaces "$1"); }
has_path() { [ -n "$(namespaces "$1" 2>/dev/null)" ]; }
within 15 has_path "${paths[0]}"
within 15 has_path "${paths[1]}"
echo round-robin | tee /sys/class/nvme-subsystem/*/iopolicy >/dev/null
before=("$(requests "${paths[0]}")" "$(requests "${paths[1]}")")
verify_fio both-paths --bs=4k --iodepth=16 --size=8M
for i in 0 1; do
    went=$(($(requests "${paths[i]}") - before[i]))
    [ "$went" -ge 1000 ] || fail "of 4096 requests only $went went by ${paths[i]}: not both are paths"
done

# One may leave under load; and what was written by the other it reads when it is back.
echo numa | tee /sys/class/nvme-subsystem/*/iopolicy >/dev/null
verify_fio one-leaves --bs=4k --iodepth=16 --size=8M --rate_iops=800 &
fio=$!
under_way "$fio"
disconnect "${paths[0]}"
wait "$fio"
pattern "$WORK/data" $((1 << 20))
write_blocks "$WORK/data" $((32 << 20))
disconnect "${paths[1]}"
TRANSPORT=tcp connect_directly "${HOST_A[1]}" "${HOST_A[3]}" "$NQN"
wait_for_block
read_blocks "$WORK/back" $((32 << 20)) $((1 << 20))
cmp "$WORK/data" "$WORK/back"
