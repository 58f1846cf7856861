# a target with a large RAM disk: TCP serves at once, RDMA follows when the memory is registered, and the log says so
skip_on nvmet 'the kernel target registers no memory of disks'
{
    reactor; disk_ram d0 350MiB; listener; listener "127.0.0.1:$PORT" tcp; subsystem "$NQN" d0
} | config
begin=${EPOCHREALTIME/./}
ms() { echo $(((${EPOCHREALTIME/./} - begin) / 1000)); }
target_start
# The kernel takes a connection before the target does: what counts is an answer, ICResp (type 1) to ICReq. In bash's own words: to
# start a process takes a guest longer than the memory.
answers() {
    local byte
    { exec {tcp_socket}<>"/dev/tcp/127.0.0.1/$PORT"; } 2>/dev/null || return 1
    printf '\0\0\200\0\200\0\0\0' >&"$tcp_socket"
    printf '\0%.0s' {1..120} >&"$tcp_socket"
    read -rt 10 -N 1 -u "$tcp_socket" byte && [ "$byte" = $'\1' ]
}
until answers; do
    [ "$(ms)" -lt 30000 ] || fail 'no answer over TCP'
    read -rt 0.01 -u "$silence" || true
done
answered=${EPOCHREALTIME/./}
exec {tcp_socket}>&-
tcp=$(ms)
within 30 is_listening rdma
rdma=$(ms)
echo "from the start: an answer over TCP after $tcp ms, RDMA listens after $rdma ms"
within 5 grep -q 'listening (NVMe/RDMA' "$target_log"
order=$(grep -oE 'listening \(NVMe/RDMA|memory of disks is registered' "$target_log" | tr '\n' ';')
expect 'the order in the log' "$order" 'memory of disks is registered;listening (NVMe/RDMA;'
registered=$(date -d "$(sed -n 's/ .*memory of disks is registered.*//p' "$target_log")" +%s%6N)
[ "$answered" -lt "$registered" ] || fail "TCP answered $(((answered - registered) / 1000)) ms after the memory was registered"
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
