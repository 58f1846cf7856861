# a target in front of a target in front of a drive, over TCP and RDMA: the far one is killed, and its network cut and stalled, under fio
# limit: 1500 s
. "$LAB/nvme-serve.sh"
# shellcheck source=tests/lab/far.sh
. "$LAB/far.sh"
drives_for_spindle
run=(--size=8M --iodepth=16)
for transport in tcp rdma; do
    over "$transport"
    : >"$target_log"
    far_up "$(disk_nvme far "$DRIVE0")"
    expect "bytes of $BLOCK" "$(block_bytes "$BLOCK")" $((256 << 20))
    verify_fio "sizes-$transport" --bsrange=512-128k --blockalign=512 --size=4M --iodepth=16
    named_fio "lost-$transport" "$transport" "${run[@]}" --rate_iops=60,60 --fsync=16 &
    fio=$!
    under_way "$fio"
    sleep 1
    far_kill
    far_start
    within 30 said 1 'found namespace 1 of'
    far_lasts
    far_cut
    within 30 said 2 'lost namespace 1 of'
    kill -0 "$fio" 2>/dev/null || fail 'fio is done too early'
    far_mend
    within 60 said 2 'found namespace 1 of'
    wait "$fio"
    named_fio "after-$transport" "$transport" "${run[@]}" --verify_only
    # Too short to be noticed; noticed or not; longer than a command may take.
    for stall in 3 6 30; do
        named_fio "stall-$stall-$transport" "$stall$transport" "${run[@]}" --rate_iops=60,60 --fsync=16 &
        fio=$!
        under_way "$fio"
        far_cut
        sleep "$stall"
        kill -0 "$fio" 2>/dev/null || fail 'fio is done too early'
        far_mend
        if [ "$transport" = rdma ] && ! rdma_manager_works; then
            # Soft-RoCE's queue pair of the connection manager is in its error state, for good: no host connects.
            # The checks before are as good; what follows is not shown, and said.
            partly="RDMA after a stall of $stall s: soft-RoCE takes no connection any more"
            kill "$fio"
            wait "$fio" || true
            break
        fi
        wait "$fio"
        named_fio "after-$stall-$transport" "$stall$transport" "${run[@]}" --verify_only
        has_state live || fail 'the host lost its controller'
    done
    finish
    far_stop
done
[ -z "${partly:-}" ] || skip "$partly"
