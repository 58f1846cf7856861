# drive to host over RDMA at depth 32: no system call for an I/O but those of soft-RoCE, no lock waited for
# limit: 600 s
. "$LAB/nvme-serve.sh"
drives_for_spindle
over rdma
config_drives
# Sleeping costs system calls, and under an emulator a core is out of work at any time.
sed -i 's/"adaptive"/"spin"/' "$CONFIG"
start_target
connect
both_blocks
thread=$(grep -lx reactor-0 "/proc/$target_pid"/task/*/comm)
thread=$(basename "$(dirname "$thread")")

# completed BLOCK: reads and writes so far.
completed() { awk '{ print $1 + $5 }' "/sys/block/$1/stat"; }
# counted NAME OPTION...: while fio runs with these, what the core calls goes to calls.NAME, a line each kind:
# how often, the system call and the file. Sets IOS, the I/Os meanwhile, and MS, how long that took.
counted() {
    local fio strace before began name=$1 disk=${BLOCK##*/}
    shift
    fio --name="$name" --filename="$BLOCK" --allow_file_create=0 --direct=1 --ioengine=libaio --iodepth=32 --size=64M --time_based \
        --runtime=600 "$@" >"$WORK/fio.$name" 2>&1 &
    fio=$!
    sleep 3
    kill -0 "$fio" || fail "fio does not run: $(cat "$WORK/fio.$name")"
    began=${EPOCHREALTIME/./}
    strace -y -p "$thread" -o "$WORK/strace" &
    strace=$!
    within 60 is_traced
    before=$(completed "$disk")
    within 200 has_completed "$disk" $((before + 4000))
    kill -INT "$strace"
    wait "$strace" || true
    IOS=$(($(completed "$disk") - before)) MS=$(((${EPOCHREALTIME/./} - began) / 1000))
    kill -INT "$fio"
    wait "$fio" || true
    grep 'err= 0' "$WORK/fio.$name" >/dev/null || fail "fio: $(cat "$WORK/fio.$name")"
    sed -nE 's/^([a-z_0-9]+)\(([0-9]+<([^>]*)>)?.*/\1 \3/p' "$WORK/strace" | sort | uniq -c >"$WORK/calls.$name"
    echo "$name: $IOS I/Os in $MS ms"
    cat "$WORK/calls.$name"
}
# calls PATTERN: how many of these there were.
calls() { awk -v pattern="$1" '$2 " " $3 ~ pattern { n += $1 } END { print n + 0 }' "$WORK/calls.$name"; }
is_traced() { grep -q '^TracerPid:[[:space:]]*[1-9]' "/proc/$target_pid/task/$thread/status"; }
has_completed() { [ "$(completed "$1")" -ge "$2" ]; }

for BLOCK in "$BLOCK0" "$BLOCK1"; do
    for rw in randread randwrite; do
        name=${BLOCK##*/}-$rw
        counted "$name" --rw="$rw" --bs=4k
        # What rings a queue pair of soft-RoCE is a write to its device, and the core yields its processor to
        # the kernel's thread that is the device: no adapter needs either.
        device=$(calls '^write /dev/infiniband/uverbs')
        [ "$device" -gt 0 ] || fail 'strace saw nothing'
        yields=$(calls '^sched_yield')
        # Once a millisecond, whatever the I/O: listeners and the connection manager.
        looks=$(calls '^epoll_p?wait')
        [ "$looks" -le $((MS + 10)) ] || fail "epoll was asked $looks times in $MS ms"
        others=$(($(calls .) - device - yields - looks))
        [ "$others" -le 40 ] || fail "$others other system calls in $IOS I/Os"
        expect 'waits for a lock, and asks for memory' "$(calls '^(futex|mmap|munmap|mremap|brk|madvise)')" 0
    done
done
