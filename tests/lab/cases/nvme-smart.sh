# what a drive says of its own health the host reads with smart-log, and hears of a warning
# limit: 600 s
. "$LAB/nvme-serve.sh"
drives_up_both
over tcp
# of_drive FIELD: as the kernel's driver has it.
find_drive_block "$DRIVE0"
nvme smart-log "$BLOCK" >"$WORK/kernel"
"$SPINDLE" nvme bind --force "$DRIVE0" "$DRIVE1"
config_drives
start_target
connect
both_blocks
# smart FIELD BLOCK: of the namespace, which is the drive behind it.
smart() { nvme smart-log "/dev/$CTRL" -n "$2" | field "$1"; }
for name in temperature available_spare available_spare_threshold percentage_used critical_warning media_errors; do
    expect "$name" "$(smart "$name" 1)" "$(field "$name" <"$WORK/kernel")"
done
expect_match 'the temperature' "$(smart temperature 1)" '50.*\(323 Kelvin\)'

# has_warning NSID VALUE
has_warning() { [ "$(smart critical_warning "$1")" = "$2" ]; }
warn() { qmp qom-set "{\"path\":\"/machine/peripheral/nv0\",\"property\":\"smart_critical_warning\",\"value\":$1}"; }
# The kernel hands such an event on to udev, once it is let through (feature 0Bh; the namespace notices are on).
nvme set-feature "/dev/$CTRL" -f 0x0b -v 0x1ff >/dev/null
udevadm monitor --kernel --property >"$WORK/uevents" 2>&1 &
within 10 grep -q KERNEL "$WORK/uevents"
warn 4
within 30 has_warning 1 0x4
within 10 grep -qx NVME_AEN=0x020001 "$WORK/uevents"
has_warning 2 0 || fail "the other drive's namespace has a warning: $(smart critical_warning 2)"
within 30 says_of "$DRIVE0" 'critical warnings of the drive changed.*0x04'
expect 'lines of it' "$(lines_of "$DRIVE0" | wc -l)" 1
expect 'events of it' "$(grep -c NVME_AEN=0x02 "$WORK/uevents")" 1
# For the cases that follow; that a warning is over is no event, and read a minute later.
warn 0
