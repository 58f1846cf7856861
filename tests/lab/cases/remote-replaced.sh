# the disk of the far target becomes another one: it is not written to, and the first one is found again
# limit: 600 s
skip_on nvmet 'its disks are devices and files'
# shellcheck source=tests/lab/far.sh
. "$LAB/far.sh"
far_disk=('command_timeout_ms = 2000')
far_up "$(disk_file far "$FILE" 64MiB)"
pattern "$WORK/first" 65536
write_blocks "$WORK/first" 65536
# A file of another name is another disk: its UUID differs.
truncate -s 64M "$WORK/other.img"
cp "$WORK/far.toml" "$WORK/first.toml"
far_kill
{ reactor; disk_file other "$WORK/other.img" 64MiB; listener "$FAR_ADDRESS:$FAR_PORT"; subsystem "$NQN1" other; } >"$WORK/far.toml"
far_start
within 30 said 1 'cannot use namespace 1 of .* namespace 1 is another disk'
# The kernel's host repeats a command five times, and reads ahead; udev has it look for partitions, or not.
expect_kernel_log 'nvme[0-9]+(c[0-9]+)?n[0-9]+: I/O Cmd\(0x[12]\) .* \(sct 0x0 / sc 0x6\)' \
    '(Buffer )?I/O error,? (on )?dev nvme[0-9]+(c[0-9]+)?n[0-9]+, ' \
    'Dev nvme[0-9]+(c[0-9]+)?n[0-9]+: unable to read RDB block 0' 'nvme[0-9]+(c[0-9]+)?n[0-9]+: unable to read partition table'
pattern "$WORK/second" 65536
if write_blocks "$WORK/second" 65536 2>/dev/null; then fail 'a write to a disk that is not there succeeded'; fi
has_state live || fail 'the host lost its controller'
cp "$WORK/first.toml" "$WORK/far.toml"
far_kill
is_zero "$WORK/other.img" || fail 'the other disk was written to'
far_start
within 60 said 1 'found namespace 1 of'
read_blocks "$WORK/back" 65536 65536
cmp "$WORK/first" "$WORK/back"
write_blocks "$WORK/second" 65536
read_blocks "$WORK/back" 65536 65536
cmp "$WORK/second" "$WORK/back"
disconnect
stop_target
far_stop
