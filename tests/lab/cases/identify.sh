# id-ctrl, id-ns, list-ns, ns-descs: the answers, and that they agree with each other
{ reactor; disk_ram d0 64MiB; disk_ram d1 32MiB; listener; subsystem "$NQN" d0 d1; } | config
start_target
connect_block

answer=$(nvme id-ctrl "/dev/$CTRL")
get() { field "$1" <<<"$answer"; }
expect 'subnqn' "$(get subnqn)" "$NQN"
expect 'cntlid' "$(($(get cntlid)))" "$(cat "/sys/class/nvme/$CTRL/cntlid")"
expect_match 'sn' "$(get sn)" '[!-~][ -~]*'
expect_match 'mn' "$(get mn)" '[!-~][ -~]*'
expect_match 'fr' "$(get fr)" '[!-~][ -~]*'
expect 'cntrltype' "$(get cntrltype)" 1
expect 'sqes' "$(get sqes)" 0x66
expect 'cqes' "$(get cqes)" 0x44
expect 'icdoff' "$(get icdoff)" 0
# What a Linux host asks of a fabrics controller before it takes it.
[ "$(get kas)" -gt 0 ] || fail "kas is $(get kas)"
[ "$(get maxcmd)" -gt 0 ] || fail "maxcmd is $(get maxcmd)"
[ "$(get ioccsz)" -ge 4 ] || fail "ioccsz is $(get ioccsz)"
[ "$(get iorcsz)" -ge 1 ] || fail "iorcsz is $(get iorcsz)"
[ "$(get nn)" -ge 2 ] || fail "nn is $(get nn)"
[ $(($(get sgls) & 1)) = 1 ] || fail "sgls is $(get sgls): fabrics needs SGLs"
[ $(($(get ver))) -ge $((0x10300)) ] || fail "ver is $(get ver)"

expect 'list-ns' "$(nvme list-ns "/dev/$CTRL" | sed 's/.*://' | tr '\n' ' ')" '0x1 0x2 '
expect 'list-ns from 1' "$(nvme list-ns "/dev/$CTRL" -n 2 | sed 's/.*://' | tr '\n' ' ')" '0x2 '

for nsid in 1 2; do
    mib=$((nsid == 1 ? 64 : 32))
    ns=$(nvme id-ns "/dev/$CTRL" -n "$nsid")
    expect "nsze of $nsid" "$(($(field nsze <<<"$ns")))" $((mib << 11))
    expect "ncap of $nsid" "$(($(field ncap <<<"$ns")))" $((mib << 11))
    expect_match "the format in use of $nsid" "$(grep 'in use' <<<"$ns")" 'lbaf +0 : ms:0 +lbads:9 .*in use.*'
    # No two namespaces have the same identifier.
    nguid=$(field nguid <<<"$ns")
    descs=$(nvme ns-descs "/dev/$CTRL" -n "$nsid")
    uuid=$(field uuid <<<"$descs")
    expect_match "the UUID of $nsid" "$uuid" '[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}'
    # The kernel scans them at once: nvme0n2 may be namespace 1.
    wait_for_block "$nsid"
    expect "the UUID of $nsid in sysfs" "$(cat "/sys/block/${BLOCK##*/}/uuid")" "$uuid"
    if grep -q ^nguid <<<"$descs"; then expect "the NGUID of $nsid" "$(field nguid <<<"$descs")" "$nguid"; fi
    echo "$uuid"
done | sort | uniq -d | { ! grep . >&2; } || fail 'two namespaces with one UUID'

# A namespace that is not there is all zeroes; one that cannot be is refused.
expect 'nsze of namespace 9' "$(nvme id-ns "/dev/$CTRL" -n 9 2>/dev/null | field nsze)" 0
