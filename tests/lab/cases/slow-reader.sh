# a host that stops reading its replies, with 64 reads of 1 MiB under way, takes nothing from another one
# limit: 300 s
skip_over rdma 'the buffers of TCP'
skip_on nvmet 'its keep alive and its memory are not ours'
{ reactor; disk_ram ram 256MiB; disk_file file "$FILE" 256MiB; listener; subsystem "$NQN" ram file; } | config
start_target
# Three hosts, a target and the machine's other work share two emulated processors: 5 s may go by without anybody's fault.
connect_block --nr-io-queues=1 --keep-alive-tmo=15
run=(--bs=4k --size=4M --iodepth=8 --verify=crc32c --verify_fatal=1 --verify_state_save=0)
# The file disk's reads go through the pool.
wait_for_block 2
run_fio fill --rw=write --bs=1M --size=256M --iodepth=4

# Two readers, one on each disk, are stopped in the middle, while another host works on one of the disks.
for nsid in 1 2; do
    slow=()
    for of in 1 2; do
        "$SPINDLE" bench "$ADDRESS:$PORT" --nqn "$NQN" --nsid "$of" --rw read --bs 1MiB --qd 64 --seconds 8 \
            --keep-alive-tmo 600 --json >"$WORK/slow.$nsid.$of" 2>&1 &
        slow+=($!)
    done
    sleep 2
    for pid in "${slow[@]}"; do
        kill -STOP "$pid" || fail "a reader has ended: $(cat "$WORK/slow.$nsid".*)"
    done
    wait_for_block "$nsid"
    run_fio "beside-$nsid" "${run[@]}" --rw=randwrite
    run_fio "large-beside-$nsid" --rw=randread --bs=1M --size=16M --iodepth=4
    for pid in "${slow[@]}"; do kill -CONT "$pid"; done
    for pid in "${slow[@]}"; do wait "$pid" || fail "a reader failed: $(cat "$WORK/slow.$nsid".*)"; done
    for of in 1 2; do
        grep -E '"errors": *0' "$WORK/slow.$nsid.$of" >/dev/null || fail "a reader has errors: $(cat "$WORK/slow.$nsid.$of")"
    done
done
