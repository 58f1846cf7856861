# error-log: a refused command is an entry that says which and why
config_ram
start_target
connect_block
# entry COUNT: the newest entry is the COUNTth.
newest() { nvme error-log "/dev/$CTRL" -e 1; }
count() { newest | field error_count; }

before=$(count)
# One block after the last. nvme-cli's data buffer is as long as its file.
pattern "$WORK/block" 512
# The kernel's target hears of it only from the disk, as an error like any other.
status='LBA Out of Range'
[ "$TARGET_KIND" != nvmet ] || status='Internal Error'
refused "$status" nvme write "$BLOCK" -s $((64 << 11)) -c 0 -z 512 -d "$WORK/block"
entry=$(newest)
[ "$(field error_count <<<"$entry")" -gt "$before" ] || fail "no new entry: $entry"
expect_match 'status' "$(field status_field <<<"$entry")" ".*$status.*"
expect 'nsid' "$(($(field nsid <<<"$entry")))" 1
[ "$(($(field sqid <<<"$entry")))" -gt 0 ] || fail "an I/O command has an I/O queue: $entry"

before=$(count)
refused 'Invalid (Field|Log|Opcode)' nvme get-log "/dev/$CTRL" --log-id=0xde --log-len=512
[ "$(count)" -gt "$before" ] || fail "no entry for an unknown log page: $(newest)"
expect 'sqid of an admin command' "$(($(newest | field sqid)))" 0
