# two hosts: each finds and gets what it is allowed, and both work on the namespaces of one subsystem
# One kernel would take its two connections for two paths of one host; without multipath it keeps them apart.
host_modules N
expect_kernel_log 'Found shared namespace [0-9]+, but multipathing not supported' \
    'Support for shared namespaces' 'nvme nvme[0-9]+: (Connect |failed to connect queue)'
a=${HOST_A[1]} b=${HOST_B[1]}
{
    reactor; disk_ram d0 64MiB; disk_ram d1 64MiB; disk_ram d2 32MiB; listener
    subsystem_for "$a,$b" "$NQN" d0 d1
    subsystem_for "$a" "$NQN1" d2
} | config
start_target
sees() { nvme discover "${PORTAL[@]}" "${@:2}" | grep -E "subnqn: +$1\$" >/dev/null; }
sees "$NQN" "${HOST_A[@]}" || fail 'A is not shown s0'
sees "$NQN1" "${HOST_A[@]}" || fail 'A is not shown s1'
sees "$NQN" "${HOST_B[@]}" || fail 'B is not shown s0'
! sees "$NQN1" "${HOST_B[@]}" || fail 'B is shown s1'
refused '' nvme connect "${PORTAL[@]}" "${HOST_B[@]}" -n "$NQN1"

connect
ctrl_a=$CTRL
connect_directly "$b" "${HOST_B[3]}" "$NQN"
ctrl_b=$CTRL
id_of() { cat "/sys/class/nvme/$1/cntlid"; }
[ "$(id_of "$ctrl_a")" != "$(id_of "$ctrl_b")" ] || fail 'one controller id for both'
on() { CTRL=$1; wait_for_block "$2"; }
for nsid in 1 2; do
    pattern "$WORK/data" $((1 << 20))
    on "$ctrl_a" "$nsid"
    write_blocks "$WORK/data" $((nsid << 20))
    on "$ctrl_b" "$nsid"
    read_blocks "$WORK/back" $((nsid << 20)) $((1 << 20))
    cmp "$WORK/data" "$WORK/back"
done
# Each its half, at once.
on "$ctrl_a" 1
for half in 0 1; do
    if [ "$half" = 1 ]; then on "$ctrl_b" 1; fi
    verify_fio "half-$half" --offset=$((half * 32))M --size=12M --bs=8k --iodepth=16 &
    jobs[half]=$!
done
wait "${jobs[0]}"
wait "${jobs[1]}"
# One leaves, the other stays.
disconnect "$ctrl_a"
read_blocks "$WORK/back" $((1 << 20)) 4096
