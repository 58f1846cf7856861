# compare, verify and copy on a drive: what the drive has of them it does itself, and the data is what it should be
# limit: 600 s
. "$LAB/nvme-serve.sh"
drives_up_both
over tcp
# The drive that is no simple one. QEMU's say that they have Copy, and only of this one's namespace how much.
DRIVE1=$(drive_functions | grep -vFx "$DRIVE0" | grep -vFx "$DRIVE1")
# Bits of ONCS: Compare 0, Verify 7, Copy 8; without Copy where a source range may have no blocks (MSSRL).
declare -A oncs
for drive in "$DRIVE0" "$DRIVE1"; do
    within 15 find_drive_block "$drive"
    oncs[$drive]=$(($(nvme id-ctrl "$BLOCK" | field oncs)))
    [ "$(nvme id-ns "$BLOCK" | field mssrl)" != 0 ] || oncs[$drive]=$((oncs[$drive] & ~(1 << 8)))
done
[ $((oncs[$DRIVE1] >> 8 & 1)) = 1 ] || fail "no drive has Copy: ONCS is ${oncs[$DRIVE1]}"
"$SPINDLE" nvme bind --force "$DRIVE0" "$DRIVE1"
config_drives
start_target
connect
both_blocks
size=$((4 << 20))
pattern "$WORK/data" "$size"
for BLOCK in "$BLOCK0" "$BLOCK1"; do
    nsid=$(nvme get-ns-id "$BLOCK" | grep -oE '[0-9]+$')
    sector=$(blockdev --getss "$BLOCK")
    # blocks BYTES, and blocks_z BYTES, which is one less
    blocks() { echo $(($1 / sector)); }
    blocks_z() { echo $(($1 / sector - 1)); }
    write_blocks "$WORK/data" 0

    head -c $((64 << 10)) "$WORK/data" >"$WORK/part"
    compare() {
        nvme compare "$BLOCK" -n "$nsid" -s 0 -c "$(blocks_z $((64 << 10)))" -z $((64 << 10)) -d "$WORK/part"
    }
    compare >/dev/null || fail "compare of equal data on $BLOCK"
    for at in 0 5000 $(((64 << 10) - 1)); do
        byte=$(od -An -tu1 -j "$at" -N1 "$WORK/part" | tr -d ' ')
        put() { printf "$(printf '\\x%02x' "$1")" | dd of="$WORK/part" bs=1 seek="$at" conv=notrunc status=none; }
        put $((byte ^ 1))
        refused 'Compare Failure' compare
        put "$byte"
    done
    compare >/dev/null || fail "compare of equal data on $BLOCK, after it differed"

    nvme verify "$BLOCK" -n "$nsid" -s 0 -c "$(blocks_z "$size")" >/dev/null || fail "verify on $BLOCK"
    refused 'LBA Out of Range' nvme verify "$BLOCK" -n "$nsid" -s "$(($(blockdev --getsize64 "$BLOCK") / sector))" -c 0

    # 1 MiB, longer than a source range that the drive takes, and behind it one block.
    to=$((64 << 20))
    nvme copy "$BLOCK" -n "$nsid" --sdlba="$(blocks "$to")" --slbs="$(blocks $((1 << 20))),3" \
        --blocks="$(blocks_z $((1 << 20))),0" >/dev/null || fail "copy on $BLOCK"
    read_blocks "$WORK/back" "$to" $(((1 << 20) + 4096))
    dd if="$WORK/data" bs=64k iflag=skip_bytes,count_bytes skip=$((1 << 20)) count=$((1 << 20)) status=none >"$WORK/want"
    dd if="$WORK/data" bs="$sector" skip=3 count=1 status=none >>"$WORK/want"
    cmp -n $(((1 << 20) + sector)) "$WORK/want" "$WORK/back" || fail "what was copied on $BLOCK"
    refused 'overlap|0x[0-9]?187' nvme copy "$BLOCK" -n "$nsid" --sdlba=8 --slbs=0 --blocks=8
    read_blocks "$WORK/back" 0 "$size"
    cmp "$WORK/data" "$WORK/back" || fail "the source on $BLOCK changed"
done
expect 'what was said of the drives' "$(lines_of 0000:)" ''
udevadm settle --timeout=60 || true
nvme disconnect-all >/dev/null
stop_target

# did ADDRESS NAME: how many such commands the target says that the drive did itself; 0 where it says nothing.
did() {
    sed -E 's/\x1b\[[0-9;]*m//g' "$WORK/target.log" | grep -F 'executed by the drive itself' | grep -F "$1" |
        grep -oE "$2=[0-9]+" | grep -oE '[0-9]+$' || echo 0
}
for drive in "$DRIVE0" "$DRIVE1"; do
    for name in compares:0:5 verifies:7:1 copies:8:2; do
        IFS=: read -r what bit least <<<"$name"
        count=$(did "$drive" "$what")
        if [ $((oncs[$drive] >> bit & 1)) = 1 ]; then
            [ "$count" -ge "$least" ] || fail "$what of $drive: $count, wanted $least or more (ONCS is ${oncs[$drive]})"
        else
            expect "$what of $drive, which does not have them" "$count" 0
        fi
    done
done
