# the steps that docs/operating.md gives for a drive, from the kernel to a host and back, as they stand there
# limit: 600 s
. "$LAB/nvme-serve.sh"
over tcp
drives_up_both
# As on a machine with one drive.
for address in $(drive_functions); do
    [ "$address" = "$DRIVE0" ] || echo "$address" >/sys/bus/pci/drivers/nvme/unbind
done
ln -sf "$SPINDLE" /usr/local/bin/spindle
find_drive_block "$DRIVE0"
wipefs -qa "$BLOCK"
pattern "$WORK/data" $((1 << 20))
write_blocks "$WORK/data" 1048576
# Its blocks of code, those of four more spaces.
sed -n '/^### Step by step/,/^### What the commands do/{s/^    //p}' "$LAB/../../docs/operating.md" |
    sed "s/0000:01:00.0/$DRIVE0/g" >"$WORK/steps"
expect_match 'the number of steps' "$(wc -l <"$WORK/steps")" '[2-4][0-9]'
cd "$WORK"
# A person looks before the next step: whether the target listens, whether the disk is there. And udev has read it before it goes.
bash -Eeuxo pipefail -c 'set -m
    sleep() { until ss -Hltn "sport = :4420" | grep . >/dev/null; do kill -0 %1; command sleep 0.2; done; }
    nvme() {
        [ "$1" != disconnect ] || udevadm settle --timeout=60
        command nvme "$@"
        [ "$1" != connect ] || until compgen -G "/dev/nvme*n1" >/dev/null; do command sleep 0.2; done
    }
    . ./steps' >"$WORK/said" 2>&1 || fail "the steps: $(tail -n 20 "$WORK/said")"
cat "$WORK/said"
grep -E '^/dev/nvme[0-9]+n1 ' "$WORK/said" >/dev/null || fail 'the host saw no disk'
grep -E '^critical_warning' "$WORK/said" >/dev/null || fail 'the host read no SMART log'
within 15 find_drive_block "$DRIVE0"
read_blocks "$WORK/back" 1048576 $((1 << 20))
cmp "$WORK/data" "$WORK/back" || fail 'the data is not what it was'
rm -f /usr/local/bin/spindle
