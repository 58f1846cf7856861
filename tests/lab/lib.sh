# What a lab case may call. The runner (tests/lab/guest) sources this, then the case, in a shell of its own:
# a case is a list of steps, and the first one that fails ends it. Set by the runner: TRANSPORT (tcp,
# rdma), TARGET_KIND (spindle, nvmet), CASE, WORK (this case's own directory), SCRATCH (an ext4 of
# 1 GiB on a scratch disk), SCRATCH_DISK (a bare scratch disk), LAB (the directory of this file).
# shellcheck shell=bash disable=SC2034

# With pipefail, behind a pipe use grep >/dev/null: grep -q leaves early, and then the writer before it fails.
set -Eeuo pipefail
trap 'echo "failed at ${BASH_SOURCE[0]##*/}:$LINENO: $BASH_COMMAND" >&2' ERR

# shellcheck source=tests/lab/rdma.sh
. "$LAB/rdma.sh"
# shellcheck source=tests/lab/nvme.sh
. "$LAB/nvme.sh"

NQN=nqn.2026-01.io.spindle:s0
NQN1=nqn.2026-01.io.spindle:s1
DISCOVERY_NQN=nqn.2014-08.org.nvmexpress.discovery
# The kernel holds a host NQN and a host identifier to be one pair, so each host has one of its own.
HOST_A=(--hostnqn nqn.2026-01.lab:host-a --hostid 0f0f0f0f-0000-4000-8000-00000000000a)
HOST_B=(--hostnqn nqn.2026-01.lab:host-b --hostid 0f0f0f0f-0000-4000-8000-00000000000b)
case $TRANSPORT in
    tcp) ADDRESS=127.0.0.1 ADDRESS6=::1 ;;
    rdma) ADDRESS=$RDMA_ADDRESS ADDRESS6=$RDMA_ADDRESS6 ;;
esac
PORT=4420
PORTAL=(-t "$TRANSPORT" -a "$ADDRESS" -s "$PORT")
CONFIG=$WORK/target.toml
# Behind the file disk of a case that has one.
FILE=$SCRATCH/$CASE.img

# shellcheck source=tests/lab/target-spindle.sh
# Inside: target_start, target_stop, target_kill, target_reload, target_memory_kib.
. "$LAB/target-$TARGET_KIND.sh"

trace() {
    [ "${TRACE:-}" = 1 ] || return 0
    PS4='+ ${EPOCHREALTIME:6:7} ${BASH_SOURCE+${BASH_SOURCE[0]##*/}}:$LINENO '
    set -x
}

# --- verdicts ---

fail() { echo "FAIL: $*" >&2; exit 1; }

# Not a failure: what the case wants cannot be had from this target.
skip() { echo "$*" >"$WORK/skipped"; exit 0; }
skip_over() { [ "$TRANSPORT" != "$1" ] || skip "$2"; }
skip_on() { [ "$TARGET_KIND" != "$1" ] || skip "$2"; }

# expect WHAT ACTUAL WANTED
expect() { [ "$2" = "$3" ] || fail "$1 is '$2', wanted '$3'"; }

# expect_match WHAT ACTUAL PATTERN (an extended regular expression that all of it must match)
expect_match() { [[ $2 =~ ^($3)$ ]] || fail "$1 is '$2', wanted something like '$3'"; }

# refused STATUS COMMAND...: the command must fail, and say the words of STATUS.
refused() {
    local wanted=$1 said
    shift
    if said=$("$@" 2>&1); then fail "accepted: $*"; fi
    grep -qiE "$wanted" <<<"$said" || fail "$*: wanted a refusal by '$wanted', got: $said"
}

# within SECONDS COMMAND...: try until it holds. Nothing is waited for under a second: a virtual processor
# may be away for tens of milliseconds.
within() {
    local deadline=$((${EPOCHREALTIME/./} + $1 * 1000000)) limit=$1
    shift
    until "$@"; do
        [ "${EPOCHREALTIME/./}" -lt "$deadline" ] || fail "not within $limit s: $*"
        pause
    done
}
# A tenth of a second, without a process: each costs some 50 ms here.
exec {silence}<> <(:)
pause() { read -rt 0.1 -u "$silence" || true; }

# --- the kernel's log ---

# Lines at level warning or worse fail a case, unless it says here that they belong to what it does.
expect_kernel_log() { printf '%s\n' "$@" >>"$WORK/expected.kernel"; }

# I/O that waits for a path: said once for each, then counted.
requeued=(
    'block nvme[0-9]+n[0-9]+: no usable path - requeuing I/O'
    # What udev reads ahead, to look for a file system after fio has closed the device, is not tried again.
    'nvme[0-9]+c[0-9]+n[0-9]+: I/O Cmd\(0x2\) .* \(sct 0x3 / sc 0x7[01]\)'
    '(I/O|recoverable transport) error, dev nvme[0-9]+c[0-9]+n[0-9]+, .* op 0x0:\(READ\) flags 0x[0-9a-f]*8[0-9a-f]7[0-9a-f]{2} '
)

# I/O that fails because the controller is taken away from under it.
lost=(
    'nvme nvme[0-9]+: (Property (Set|Get) error|Shutdown timeout)'
    'block nvme[0-9]+n[0-9]+: no available path - failing I/O'
    '((Buffer )?I/O|recoverable transport) error,? (on )?dev nvme[0-9]+(c[0-9]+)?n[0-9]+, '
    'Dev nvme[0-9]+n[0-9]+: unable to read RDB block'
    # Soft-RoCE, of a transfer to memory that its owner took along.
    'rxe[0-9]+: qp#[0-9]+ (make_send_cqe|do_complete): non-flush error status'
)

# What the host's driver says when its target goes away and comes back.
expect_reconnect() {
    expect_kernel_log "${requeued[@]}" \
        'nvme nvme[0-9]+: (starting error recovery|Reconnecting in|Failed reconnect)' \
        'nvme nvme[0-9]+: (Connect command failed|failed to connect (queue|socket))' \
        'nvme nvme[0-9]+: failed nvme_keep_alive_end_io' \
        'nvme nvme[0-9]+: (failed to send request|failed to receive|receive failed|I/O tag .* type)' \
        'nvme nvme[0-9]+: (Property (Set|Get) error|Shutdown timeout|icreq|queue [0-9]+: failed)'
    [ "$TRANSPORT" != rdma ] || expect_kernel_log \
        'nvme nvme[0-9]+: (SEND|RECV|MEMREG|LOCAL_INV) for CQE 0x[0-9a-f]+ failed with status' \
        'nvme nvme[0-9]+: (Connect rejected|rdma (connection establishment|resolve address) failed)' \
        'nvme nvme[0-9]+: I/O tag .* timeout'
}

# no_kernel_warnings [EXPECTED-FILE]: what the log has since the case began; prints the offenders.
no_kernel_warnings() {
    # The emulator's, when the machine beneath is busy: its processors come late.
    local bad
    # First of all, as nearly always there is nothing.
    bad=$(
        dmesg -x | awk -v level="^[a-z0-9]+ *:(emerg|alert|crit|err|warn) *: " '
            /WARNING:|BUG:|Call Trace|blocked for more than|I\/O error|rcu.*stall/ || $0 ~ level { sub(/^[a-z0-9]+ *:[a-z]+ *: /, ""); print }'
    )
    [ -n "$bad" ] || return 0
    local expected='^$|hrtimer: interrupt took|perf: interrupt took too long|hogged CPU for|long keepalive RTT'
    # Soft-RoCE's device has no speed of its own.
    expected+='|d0 speed is unknown'
    expected+='|sched: DL replenish lagged|clocksource: .*(read-back|watchdog)'
    # Comes after ten lines of one kind, each of which was looked at, of this case or of one before.
    expected+='|\] [a-z0-9_]+: [0-9]+ callbacks suppressed$'
    # Not the host's: the kernel's own target says in the log whom it refuses.
    [ "$TARGET_KIND" != nvmet ] || expected+='|^\[[ 0-9.]+\] nvmet(_tcp|_rdma)?: '
    bad=$(sort -u <<<"$bad" | grep -vE "$expected" || true)
    [ ! -s "${1:-/nonexistent}" ] || bad=$(grep -vEf "$1" <<<"$bad" || true)
    [ -z "$bad" ] || { echo "$bad"; return 1; }
}

# --- the target ---

# The configuration comes on standard input.
config() { cat >"$CONFIG"; }

# What most cases want: a subsystem for any host, with a RAM disk, a file disk, or both as namespaces 1 and 2.
config_ram() { { reactor; disk_ram ram "${1:-64MiB}"; listener; subsystem "$NQN" ram; } | config; }
config_file() {
    { reactor; disk_file file "$FILE" "${1:-256MiB}"; listener; subsystem "$NQN" file; } | config
}
config_both() {
    { reactor; disk_ram ram "$1"; disk_file file "$FILE" "$1"; listener; subsystem "$NQN" ram file; } | config
}

# The parts of a configuration, printed.
reactor() { printf '%s\n' '[reactor]' "cores = [${1:-0}]" 'idle = "adaptive"'; }
control() { printf '%s\n' '[control]' "socket = \"$WORK/control\""; }
disk_ram() { printf '%s\n' '[[disk]]' "name = \"$1\"" 'kind = "ram"' "size = \"$2\""; }
disk_file() { printf '%s\n' '[[disk]]' "name = \"$1\"" 'kind = "file"' "path = \"$2\"" "size = \"$3\"" 'create = true'; }
# listener [ADDRESS [TRANSPORT]]
listener() {
    printf '%s\n' '[[listener]]' "address = \"${1:-$ADDRESS:$PORT}\""
    [ "${2:-$TRANSPORT}" = tcp ] || echo "transport = \"${2:-$TRANSPORT}\""
}
# subsystem NQN DISK...: the disks become namespaces 1, 2, ...
subsystem() {
    local nsid=0 disk
    printf '%s\n' '[[subsystem]]' "nqn = \"$1\"" 'allow_any_host = true'
    shift
    for disk; do
        nsid=$((nsid + 1))
        printf '%s\n' '[[subsystem.namespace]]' "nsid = $nsid" "disk = \"$disk\""
    done
}
# subsystem_for HOSTNQN[,HOSTNQN] NQN DISK...: the same for these hosts only.
subsystem_for() {
    local hosts=\"${1//,/\", \"}\"
    shift
    subsystem "$@" | sed "s/^allow_any_host = true/allow_any_host = false\nhosts = [$hosts]/"
}

# start_target [CONFIG]: returns when its listeners are there.
start_target() {
    [ $# = 0 ] || cp "$1" "$CONFIG"
    target_start
    within 30 is_listening
}
# is_listening [TRANSPORT]
is_listening() {
    case ${1:-$TRANSPORT} in
        tcp) tcp_listens "$PORT" ;;
        rdma) rdma resource show cm_id | grep -E "state LISTEN .*:$PORT( |\$)" >/dev/null ;;
    esac
}
# tcp_listens PORT: to any address; state 0A in what the kernel lists.
tcp_listens() {
    local port local_address remote_address state rest file
    printf -v port ':%04X' "$1"
    for file in /proc/net/tcp /proc/net/tcp6; do
        while read -r _ local_address remote_address state rest; do
            [[ $local_address != *"$port" || $state != 0A ]] || return 0
        done <"$file"
    done
    return 1
}
# stop_target: ask it to, and hold it to an orderly end.
stop_target() { target_stop; }
kill_target() { target_kill; }
reload_target() { target_reload; }

# finish: the runner's last step of a case that went well: the target must end in order every time. The
# kernel's own has no end of its own.
finish() {
    [ -n "${target_pid:-}" ] || return 0
    # udev looks at a disk again after it was written to; a disk that goes away meanwhile is an I/O error in the kernel's log.
    udevadm settle --timeout=60 || true
    nvme disconnect-all >/dev/null || fail 'disconnect-all'
    stop_target
}

# --- the host ---

# connect [nvme connect options]: sets CTRL (nvme0). Host A and subsystem s0 unless the options say otherwise.
connect() {
    local said options=("${PORTAL[@]}")
    case " $* " in *" -a "*) options=(-t "$TRANSPORT" -s "$PORT") ;; esac
    case " $* " in *" -n "*) ;; *) options+=(-n "$NQN") ;; esac
    case " $* " in *" --hostnqn "*) ;; *) options+=("${HOST_A[@]}") ;; esac
    said=$(nvme connect "${options[@]}" "$@" -o json 2>&1) || fail "nvme connect $*: $said"
    [[ $said =~ \"device\"\ *:\ *\"(nvme[0-9]+)\" ]] || fail "nvme connect named no device: $said"
    CTRL=${BASH_REMATCH[1]}
    within 10 has_state live
}
# connect_directly HOSTNQN HOSTID NQN [OPTIONS]: the same by the kernel's own interface. nvme-cli 2.3
# looks only at the address when it says "already connected", whatever the host and --duplicate-connect; the
# kernel knows hosts apart.
connect_directly() {
    local said
    exec {fabrics}<>/dev/nvme-fabrics
    printf 'transport=%s,traddr=%s,trsvcid=%s,hostnqn=%s,hostid=%s,nqn=%s%s' \
        "$TRANSPORT" "$ADDRESS" "$PORT" "$1" "$2" "$3" "${4:+,$4}" >&"$fabrics" ||
        fail "the kernel does not connect $1 to $3"
    read -r said <&"$fabrics"
    exec {fabrics}>&-
    [[ $said =~ instance=([0-9]+), ]] || fail "the kernel says of $1: $said"
    CTRL=nvme${BASH_REMATCH[1]}
    within 10 has_state live
}
has_state() {
    local state
    { read -r state <"/sys/class/nvme/$CTRL/state"; } 2>/dev/null && [ "$state" = "$1" ]
}
is_gone() { [ ! -e "/sys/class/nvme/$1" ]; }

disconnect() {
    local ctrl=${1:-$CTRL}
    # What udev reads of a disk that was written to would be an I/O error in the kernel's log.
    udevadm settle --timeout=60 || true
    nvme disconnect -d "$ctrl" >/dev/null || fail "nvme disconnect $ctrl"
    within 20 is_gone "$ctrl"
}

# find_block NSID: the block device of a namespace of $CTRL. With multipath the controller's own entry is
# the path nvme0c0n1 and the device, which all paths share, nvme0n1.
find_block() {
    local path nsid
    for path in "/sys/class/nvme/$CTRL"/nvme*n*; do
        { read -r nsid <"$path/nsid"; } 2>/dev/null && [ "$nsid" = "$1" ] || continue
        [[ $path =~ /(nvme[0-9]+)(c[0-9]+)?(n[0-9]+)$ ]] || continue
        BLOCK=/dev/${BASH_REMATCH[1]}${BASH_REMATCH[3]}
        [ -b "$BLOCK" ] && return
    done
    return 1
}
# wait_for_block [NSID]: sets BLOCK (/dev/nvme0n1).
wait_for_block() {
    within 15 find_block "${1:-1}"
    within 15 is_known
    within 15 opens "$BLOCK"
}
# is_known: udev, where the guest has one, has seen $BLOCK. Its node is there a moment before the disk is, and the
# kernel warns of who opens it then.
is_known() {
    local number
    [ -e /run/udev/control ] || return 0
    { read -r number <"/sys/class/block/${BLOCK##*/}/dev"; } 2>/dev/null && [ -e "/run/udev/data/b$number" ]
}
# opens FILE
opens() { { : <"$1"; } 2>/dev/null; }

connect_block() { connect "$@"; wait_for_block; }

block_bytes() { blockdev --getsize64 "$1"; }
has_bytes() { [ "$(block_bytes "$1" 2>/dev/null)" = "$2" ]; }

# field NAME: the value behind "NAME : value" in what nvme-cli prints; from standard input, all of which is
# read.
field() {
    awk -v name="$1" '
        function bare(text) { gsub(/^[ \t]+|[ \t]+$/, "", text); return text }
        { colon = index($0, ":") }
        bare(substr($0, 1, colon - 1)) == name && !n++ { print bare(substr($0, colon + 1)) }'
}

# network_apart: a network of its own for a target, so that what is sent to it (over v0) can be lost: the namespace
# `target`, with the address 10.9.7.2. It goes with the case.
network_apart() {
    modprobe -a veth sch_netem
    network_gone
    trap network_gone EXIT
    ip netns add target
    ip link add v0 type veth peer name v1 netns target
    ip addr add 10.9.7.1/24 dev v0
    ip link set v0 up
    ip -n target addr add 10.9.7.2/24 dev v1
    ip -n target link set v1 up
    ip -n target link set lo up
}
network_gone() { ip netns del target 2>/dev/null || true; ip link del v0 2>/dev/null || true; }

# --- data ---

# pattern FILE BYTES: something that is neither zero nor repeats, and another one each time: numbers from a random one on.
# The kernel's random bytes take an emulated processor a second for each few MiB.
pattern() { head -c "$2" < <(exec seq "$((1000000000 + SRANDOM))" 9999999999 2>/dev/null) >"$1"; }
# write_blocks FILE BYTE-OFFSET and read_blocks FILE BYTE-OFFSET BYTES: past the page cache.
# In steps of 64 KiB where it comes out even: a command takes milliseconds here.
step_of() { if [ $(($1 % 65536)) = 0 ]; then echo 64k; else echo 4k; fi; }
write_blocks() {
    dd if="$1" of="$BLOCK" bs="$(step_of "$(stat -c %s "$1")")" oflag=direct,seek_bytes seek="$2" \
        conv=nocreat,notrunc status=none
}
read_blocks() {
    dd if="$BLOCK" of="$1" bs="$(step_of "$3")" iflag=direct,skip_bytes,count_bytes skip="$2" count="$3" status=none
}
# is_zero FILE
is_zero() { cmp -s -n "$(stat -c %s "$1")" "$1" /dev/zero; }

# run_fio NAME OPTION...: one fio run on $BLOCK; what it says goes to a file, and to the log if it fails. fio
# must not create a file where a removed disk was: devtmpfs would make no node for the next disk.
run_fio() {
    local name=$1
    shift
    # The kernel's NVMe/TCP host sends from the process that submits, without MSG_NOSIGNAL: on a connection that has just
    # ended that process gets SIGPIPE.
    (
        trap '' PIPE
        exec fio --name="$name" --filename="$BLOCK" --allow_file_create=0 --direct=1 --ioengine=libaio --output="$WORK/fio.$name" "$@"
    ) ||
        { tail -n 40 "$WORK/fio.$name" >&2; fail "fio $name"; }
}
# verify_fio NAME OPTION...: random writes, then all of it read and checked.
verify_fio() { run_fio "$@" --rw=randwrite --verify=crc32c --verify_fatal=1 --verify_state_save=0; }

# Runs that tell whose write a block has: each fills its blocks with their offset and its own name, so what a run finds of the
# one before is a write that was lost; fio's checksums alone would be content with it.
named=(--rw=randwrite --bs=4k --verify=pattern --verify_fatal=1 --verify_state_save=0)
# named_fio NAME WORD OPTION...: such a run, whose name is WORD.
named_fio() { local name=$1 word=$2; shift 2; run_fio "$name" "${named[@]}" --verify_pattern="%o\"$word\"" "$@"; }
# named_differ WORD OPTION...: what is on $BLOCK is not of WORD, and fio sees that.
named_differ() {
    local word=$1
    shift
    if ( named_fio teeth "$word" "$@" --verify_only ) >/dev/null 2>&1; then fail "fio does not tell $word from what is there"; fi
}

# under_way PID [DISK]: waits until this process, in the background, writes to $BLOCK (/dev/nvme0n1). From its start to its first
# command it may take seconds.
under_way() {
    local disk=${2:-$BLOCK} before
    before=$(writes "$disk")
    within 60 has_written "$1" "$disk" "$before"
}
has_written() {
    kill -0 "$1" 2>/dev/null || fail "ended before it wrote to $2: $(tail -n 5 "$WORK"/fio.* 2>/dev/null)"
    [ "$(writes "$2")" -gt "$3" ]
}
# writes DISK: how many the kernel has completed, by all paths.
writes() {
    local disk=${1##*/} stats path fields sum=0
    stats=("/sys/block/${disk%n*}c"*"n${disk##*n}/stat")
    [ -e "${stats[0]}" ] || stats=("/sys/block/$disk/stat")
    for path in "${stats[@]}"; do
        read -ra fields <"$path" && sum=$((sum + fields[4]))
    done 2>/dev/null
    echo "$sum"
}
