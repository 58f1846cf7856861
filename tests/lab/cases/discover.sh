# what `nvme discover` finds, and that a wildcard listener is named by the address that the host used
{
    reactor; disk_ram d0 32MiB; disk_ram d1 32MiB; listener "0.0.0.0:$PORT"; listener "[$ADDRESS6]:$PORT"
    subsystem "$NQN" d0; subsystem "$NQN1" d1
} | config
start_target

log=$(nvme discover "${PORTAL[@]}" "${HOST_A[@]}")
head=$(grep 'Number of Records' <<<"$log")
expect_match 'the head of the log' "$head" '.*Number of Records [0-9]+, Generation counter [0-9]+'
for nqn in "$NQN" "$NQN1"; do
    # The entry of this subsystem at the address that we came by.
    entry=$(awk -v RS='=====Discovery Log Entry' -v n="$nqn" -v a="$ADDRESS" \
        'index($0, "subnqn:  " n "\n") && index($0, "traddr:  " a "\n")' <<<"$log")
    [ -n "$entry" ] || fail "no entry of $nqn at $ADDRESS in: $log"
    expect 'its transport' "$(field trtype <<<"$entry")" "$TRANSPORT"
    expect 'its address family' "$(field adrfam <<<"$entry")" ipv4
    expect 'its service' "$(field trsvcid <<<"$entry")" "$PORT"
    treq=$(field treq <<<"$entry")
    [ "$treq" != unrecognized ] || fail 'nvme-cli knows the TREQ values of Linux only: 0, 1, 2 and 4'
    expect 'its kind' "$(field subtype <<<"$entry")" 'nvme subsystem'
done
! grep -qE 'traddr: +(0\.0\.0\.0|::)$' <<<"$log" || fail "a wildcard address in: $log"

# Asking again is no change.
generation() { sed -n 's/.*Generation counter //p' <<<"$1"; }
again=$(nvme discover "${PORTAL[@]}" "${HOST_A[@]}")
expect 'the generation, asked twice' "$(generation "$again")" "$(generation "$log")"

log=$(nvme discover -t "$TRANSPORT" -a "$ADDRESS6" -s "$PORT" "${HOST_A[@]}")
grep -qE 'adrfam: +ipv6' <<<"$log" || fail "no IPv6 entry in: $log"
grep -qE "subnqn: +$NQN\$" <<<"$log" || fail "no entry of $NQN over IPv6 in: $log"
