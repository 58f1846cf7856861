# a target in front of the kernel's own: its ports close under fio, its network is cut, and no acknowledged block is wrong
# limit: 600 s
skip_on nvmet 'its disks are devices and files'
skip_over rdma 'its two ends would be on one device'
# shellcheck source=tests/lab/far.sh
. "$LAB/far.sh"

# far_nvmet start|kill|stop: the kernel's target follows $WORK/far.toml, and listens in the far network.
far_nvmet() {
    CONFIG=$WORK/far.toml TRANSPORT=tcp LAB=$LAB nsenter --net=/run/netns/target bash -euc '
        fail() { echo "FAIL: $*" >&2; exit 1; }
        . "$LAB/target-nvmet.sh"
        "target_$1"' - "$1"
}
# The far target says in the log that its host was silent.
expect_kernel_log '\] nvmet(_tcp)?: '
far_network
trap 'far_nvmet stop || true; network_gone' EXIT
far_config "$(disk_file far "$FILE" 64MiB)"
far_nvmet start
start_target
connect_block
has_bytes "$BLOCK" $((64 << 20)) || fail "$(block_bytes "$BLOCK") bytes"
# It gives a file blocks of 4 KiB.
verify_fio sizes --bsrange=4k-256k --blockalign=4k --size=8M --iodepth=16
run=(--size=16M --iodepth=16)
named_fio closed first "${run[@]}" --rate_iops=100,100 &
fio=$!
under_way "$fio"
far_nvmet kill
within 30 said 1 'lost namespace 1 of'
far_nvmet start
within 60 said 1 'found namespace 1 of'
wait "$fio"
named_fio after-closed first "${run[@]}" --verify_only
far_lasts
named_fio cut second "${run[@]}" --rate_iops=100,100 &
fio=$!
under_way "$fio"
far_cut
within 30 said 2 'lost namespace 1 of'
far_mend
within 60 said 2 'found namespace 1 of'
wait "$fio"
named_fio after-cut second "${run[@]}" --verify_only
has_state live || fail 'the host lost its controller'
disconnect
stop_target
