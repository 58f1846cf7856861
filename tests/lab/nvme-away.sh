# The body of nvme-unplug and nvme-pull: both drives are served as $BLOCK0 and $BLOCK1, take_out takes out nv0.
# shellcheck shell=bash

# The other drive works on all the time, and no command of it waits.
others() {
    local round
    for ((round = 0; ; round++)); do
        BLOCK=$BLOCK1 verify_fio "other$round" --bs=4k --iodepth=8 --size=2M --rate_iops=300 --max_latency=5s
        echo "$round" >"$WORK/rounds"
        [ ! -e "$WORK/enough" ] || break
    done
}
pattern "$WORK/data" $((8 << 20))
BLOCK=$BLOCK0 write_blocks "$WORK/data" $((200 << 20))
others &
other=$!
fio --name=load --filename="$BLOCK0" --allow_file_create=0 --direct=1 --ioengine=libaio --iodepth=32 --rw=randrw --bs=16k --size=64M \
    --time_based --runtime=600 >"$WORK/fio.load" 2>&1 &
load=$!
has_rounds() { [ -s "$WORK/rounds" ]; }
within 60 has_rounds
under_way "$load" "$BLOCK0"
take_out
drive_wait 60 drive_is_gone nv0
if wait "$load"; then fail 'the load did not notice that its drive has gone'; fi
grep -E 'error=(Input/output error|Remote I/O error)' "$WORK/fio.load" >/dev/null || fail "$(cat "$WORK/fio.load")"
# The namespace stays, and says so at once.
BLOCK=$BLOCK0
for _ in {1..20}; do if block_works; then fail 'a drive that is gone answers'; fi; done
has_state live || fail 'the connection did not stay'
rounds=$(cat "$WORK/rounds")

drive_plug nv0
drive_wait 30 drive_is_there nv0
expect 'where it is' "$(drive_place nv0)" "$DRIVE0"
within 15 find_drive_block "$DRIVE0"
"$SPINDLE" nvme bind --force "$DRIVE0"
BLOCK=$BLOCK0
within 30 block_works
read_blocks "$WORK/back" $((200 << 20)) $((8 << 20))
cmp "$WORK/data" "$WORK/back" || fail 'the data is not what it was'
verify_fio after --bs=16k --iodepth=32 --size=8M
touch "$WORK/enough"
wait "$other"
[ "$(cat "$WORK/rounds")" -gt "$rounds" ] || fail 'the other drive stood still'
grep -F "$DRIVE0" "$WORK/target.log"
says=$(lines_of "$DRIVE0" | sed 's/^[^ ]* *//')
[ -n "$says" ] || fail 'the target says nothing of it'
expect 'what it says twice' "$(sort <<<"$says" | uniq -d)" ''
expect 'what was said of the other drive' "$(lines_of "$DRIVE1")" ''
