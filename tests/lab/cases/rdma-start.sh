# a target with a large RAM disk: TCP serves at once, RDMA follows when the memory is registered, and the log says so
skip_on nvmet 'the kernel target registers no memory of disks'
{
    reactor; disk_ram d0 350MiB; listener; listener "127.0.0.1:$PORT" tcp; subsystem "$NQN" d0
} | config
begin=${EPOCHREALTIME/./}
ms() { echo $(((${EPOCHREALTIME/./} - begin) / 1000)); }
target_start
# The kernel takes a connection before the target does: what counts is an answer.
until "$SPINDLE" discover "127.0.0.1:$PORT" >"$WORK/discovered" 2>&1; do
    [ "$(ms)" -lt 30000 ] || fail "no answer over TCP: $(cat "$WORK/discovered")"
    sleep 0.1
done
tcp=$(ms)
within 30 is_listening rdma
rdma=$(ms)
echo "from the start: an answer over TCP after $tcp ms, RDMA listens after $rdma ms"
within 5 grep -q 'listening (NVMe/RDMA' "$target_log"
# By its log, and not by when this script sees it: to end a process takes a guest as long as the memory.
# A host may connect a moment before the line about the TCP listener, which is another thread's.
order=$(grep -oE 'listening \(NVMe/RDMA|connected to nqn.*discovery|memory of disks is registered' "$target_log" | tr '\n' ';')
expect 'the order in the log' "$order" \
    'connected to nqn.2014-08.org.nvmexpress.discovery;memory of disks is registered;listening (NVMe/RDMA;'
connect_block
verify_fio rdma --bs=128k --size=16M --iodepth=8
disconnect
# A reload with another large disk: those who are connected do not wait for its memory, which takes as long again.
connect_block
longest=$(((rdma - tcp) / 2))
[ "$longest" -gt 2000 ] || longest=2000
verify_fio reloaded --bs=4k --size=8M --iodepth=16 --rate_iops=800 --max_latency="${longest}ms" &
fio=$!
under_way "$fio"
{
    reactor; disk_ram d0 350MiB; disk_ram d1 350MiB; listener; listener "127.0.0.1:$PORT" tcp
    subsystem "$NQN" d0 d1
} | config
reload_target
within 30 find_block 2
wait "$fio" || fail 'a command waited for the registration'
find_block 2
verify_fio second --bs=128k --size=16M --iodepth=8
