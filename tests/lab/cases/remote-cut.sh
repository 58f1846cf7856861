# the network to the far target of a disk is cut under fio and comes back: commands wait, and every block is right
# limit: 600 s
skip_on nvmet 'its disks are devices and files'
# shellcheck source=tests/lab/far.sh
. "$LAB/far.sh"
far_up "$(disk_file far "$FILE" 64MiB)"
run=(--rw=randwrite --bs=16k --iodepth=16 --verify=crc32c --verify_fatal=1 --verify_state_save=0)
for round in 1 2; do
    run_fio "cut-$round" --size=32M "${run[@]}" --rate_iops=100,100 &
    fio=$!
    under_way "$fio"
    far_cut
    # Nothing but its keep alive tells it.
    within 30 said "$round" 'lost namespace 1 of'
    if [ "$round" = 1 ]; then within 30 said 1 'cannot use namespace 1 of'; fi
    kill -0 "$fio" 2>/dev/null || fail 'fio is done too early'
    has_state live || fail 'the host lost its controller'
    far_mend
    within 60 said "$round" 'found namespace 1 of'
    far_lasts
    wait "$fio"
done
run_fio after --size=32M "${run[@]}"
disconnect
stop_target
far_stop
