# teeth
config_ram 64MiB; start_target; connect_block
run=(--name=v --filename="$BLOCK" --rw=randwrite --bs=4k --size=8M --direct=1 --ioengine=libaio --iodepth=32
    --verify=crc32c --verify_fatal=1 --verify_state_save=0)
run_fio one "${run[@]}" --randseed=1
run_fio one "${run[@]}" --randseed=1 --verify_only
! fio "${run[@]}" --randseed=2 --verify_only || fail "no teeth"
