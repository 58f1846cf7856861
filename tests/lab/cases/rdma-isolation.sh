# the key of memory that a far target may write to is refused on the queue pairs of hosts
# limit: 300 s
skip_on nvmet 'its disks are devices and files'
# shellcheck source=tests/lab/far.sh
. "$LAB/far.sh"
expect_kernel_log 'make_send_cqe: non-flush error status = 1[02]'
peers=${SPINDLE%/*}/examples/optimistic-peers
[ -x "$peers" ] || fail "no $peers: cargo build --release -p spindle-tests --no-default-features --features peers --example optimistic-peers"
export SPINDLE_LOG=spindle_nvme_rdma=trace,info
far_up "$(disk_file far "$FILE" 64MiB)"
pattern "$WORK/data" 65536
write_blocks "$WORK/data" 0
read_blocks "$WORK/back" 0 65536
cmp "$WORK/data" "$WORK/back"
# What the far target has written to: memory of this target, in which the next host's data may lie.
line=$(sed 's/\x1b\[[0-9;]*m//g' "$target_log" | grep 'registered memory' | grep 'is_writable=true' | tail -1)
memory=$(sed -n 's/.* address=\(0x[0-9a-f]*\).*/\1/p' <<<"$line")
key=$(sed -n 's/.* key=\([0-9]*\).*/\1/p' <<<"$line")
[ -n "$memory" ] && [ -n "$key" ] || fail "no registration in the log: $line"
"$peers" write "$ADDRESS:$PORT" "$memory" "$key" || fail 'a host writes to memory with the key of another target'
# Everything else goes on.
verify_fio beside --size=8M --bs=4k --iodepth=16
disconnect
