# bad peers of optimistic reads: wrong and used tokens, a leaked key, writes, reads out of bounds, silence: that connection ends, everything else goes on
# limit: 600 s
skip_on nvmet 'it has no cache'
expect_kernel_log 'make_send_cqe: non-flush error status = 1[02]'
peers=${SPINDLE%/*}/examples/optimistic-peers
[ -x "$peers" ] || fail "no $peers: cargo build --release -p spindle-tests --no-default-features --features peers --example optimistic-peers"
{
    printf '%s\n' '[rdma]' 'optimistic_port = 4430'
    reactor; control
    for name in file0 file1; do
        disk_file "$name" "$WORK/$name" 16MiB
        printf '%s\n' '[disk.cache]' 'size = "8MiB"'
    done
    listener; subsystem "$NQN" file0; subsystem "$NQN1" file1
} | config
start_target
"$peers" "$ADDRESS:$PORT" "$NQN" "$NQN1" || fail 'a bad peer is not refused as it should be'
connect_block
verify_fio beside --size=8M --bs=4k --iodepth=16
disconnect
grep 'optimistic connections ended: the client does not respond' "$target_log" >/dev/null || fail 'the log does not tell of silent peers'
grep 'optimistic connections refused' "$target_log" | grep 'token is unknown' >/dev/null || fail 'the log does not say why'
! grep -i panic "$target_log" || fail 'a panic'
within 60 has_queue_pairs 0
