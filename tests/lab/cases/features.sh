# get-feature and set-feature: the values a host lives by, the selectors, a clean refusal of the unknown
config_ram
start_target
connect --keep-alive-tmo=7
value() { nvme get-feature "/dev/$CTRL" "$@" | sed -nE 's/.*[Vv]alue: *(0x)?([0-9a-f]+)$/\2/p'; }

queues=$(value -f 7)
expect 'number of queues: as many to complete as to submit' "${queues:0:4}" "${queues:4:4}"
expect 'keep-alive' "$((16#$(value -f 0xf)))" 7000
# Namespace attribute notices, which the host asked for when it connected.
[ $((16#$(value -f 0xb) & 0x100)) != 0 ] || fail "async events: $(value -f 0xb)"
vwc=$(nvme id-ctrl "/dev/$CTRL" | field vwc)
expect 'volatile write cache: as Identify has it' "$((16#$(value -f 6) & 1))" "$((vwc & 1))"

# The host identifier, 16 bytes of it.
hostid=$(nvme get-feature "/dev/$CTRL" -f 0x81 -l 16 -c 1 -b 2>/dev/null | od -An -t x1 | tr -d ' \n')
expect 'the host identifier' "$hostid" "$(tr -d - <<<"${HOST_A[3]}")"

nvme set-feature "/dev/$CTRL" -f 0xb -v 0x100 >/dev/null || fail 'set-feature 0bh'
expect 'async events, as set' "$((16#$(value -f 0xb) & 0xfff))" $((0x100))

# By its length or by its number, which nvme-cli's data buffer leaves to the target.
refused 'Invalid' nvme get-feature "/dev/$CTRL" -f 0x7f
refused 'Invalid Field|Not Saveable|Not Changeable' nvme set-feature "/dev/$CTRL" -f 0x7f -v 1

[ "$TARGET_KIND" != nvmet ] || exit 0 # the kernel target knows none of these, and no selectors
for feature in 0x02 0x04 0x05 0x16; do
    length=$((feature == 0x16 ? 512 : 0))
    nvme get-feature "/dev/$CTRL" -f "$feature" -l "$length" >/dev/null || fail "get-feature $feature"
done
for selector in 0 1 3; do
    nvme get-feature "/dev/$CTRL" -f 0x0b -s "$selector" >/dev/null || fail "selector $selector of 0bh"
done
