# What a host does first with a disk: connect, fio, a file system, a target that is killed under it. Sourced by smoke-tcp
# and smoke-rdma after lib.sh; short, for scripts/test without --all.
# shellcheck shell=bash
. "$LAB/nvme-serve.sh"

# smoke tcp|rdma
smoke() {
    over "$1"
    expect_reconnect
    # A file, as what is acknowledged has to outlive the process.
    config_file 64MiB
    start_target
    connect_block --reconnect-delay=1 --ctrl-loss-tmo=120 --keep-alive-tmo=5
    expect 'the size' "$(block_bytes "$BLOCK")" $((64 << 20))
    expect 'the NQN' "$(<"/sys/class/nvme/$CTRL/subsysnqn")" "$NQN"
    expect 'queues, the admin queue too' "$(<"/sys/class/nvme/$CTRL/queue_count")" 3
    # 512 B goes in a capsule, 128 KiB by R2T or RDMA READ.
    verify_fio small --bs=512 --size=256k --iodepth=32
    verify_fio large --bs=128k --size=8M --iodepth=16
    smoke_filesystem
    smoke_kill
    finish
}

smoke_filesystem() {
    local tree mnt=$WORK/mnt
    tree=/usr/lib/modules/$(uname -r)/kernel/fs/ext4
    mkdir -p "$mnt"
    mkfs.ext4 -q "$BLOCK"
    mount "$BLOCK" "$mnt"
    cp -a "$tree" "$mnt/copy"
    umount "$mnt"
    fsck.ext4 -fn "$BLOCK" || fail 'fsck found something'
    mount "$BLOCK" "$mnt"
    diff -r "$tree" "$mnt/copy"
    fstrim "$mnt"
    umount "$mnt"
}

# smoke_kill: kill -9 under fio. The runs before leave other bytes in each block, so a write that was lost is seen.
smoke_kill() {
    local fio run=(--size=6M --iodepth=16)
    named_fio first first "${run[@]}"
    named_differ second "${run[@]}"
    named_fio killed second "${run[@]}" --rate_iops=300,300 &
    fio=$!
    under_way "$fio"
    kill_target
    start_target
    within 40 has_reconnected 1
    kill -0 "$fio" 2>/dev/null || fail 'fio is done too early to have seen a kill'
    wait "$fio"
    # Once more, with nothing under way: what is acknowledged is not in the process that dies.
    kill_target
    start_target
    within 40 has_reconnected 2
    named_fio after second "${run[@]}" --verify_only
}
# has_reconnected TIMES: the state alone may still be that of before the host has seen the loss.
has_reconnected() { [ "$(dmesg | grep -c 'Successfully reconnected' || true)" -ge "$1" ] && has_state live; }
