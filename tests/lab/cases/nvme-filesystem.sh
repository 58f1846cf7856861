# a drive: mkfs.ext4, a tree, fstrim, unmount, fsck, mount; the tree is the same, by the kernel's driver too
# limit: 600 s
. "$LAB/nvme-serve.sh"
drives_for_spindle
over rdma
config_drives
start_target
connect
both_blocks
tree=/usr/lib/modules/$(uname -r)/kernel/fs
mnt=$WORK/mnt
mkdir "$mnt"
for BLOCK in "$BLOCK0" "$BLOCK1"; do
    mkfs.ext4 -q "$BLOCK"
    mount "$BLOCK" "$mnt"
    cp -a "$tree" "$mnt/copy"
    cp -a "$tree" "$mnt/goes"
    sync -f "$mnt"
    rm -rf "$mnt/goes"
    fstrim -v "$mnt" | tee "$WORK/trimmed"
    grep -E ' \([1-9][0-9]* bytes\) trimmed' "$WORK/trimmed" >/dev/null || fail 'nothing was trimmed'
    umount "$mnt"
    fsck.ext4 -fn "$BLOCK" || fail 'fsck found something'
    mount "$BLOCK" "$mnt"
    diff -r "$tree" "$mnt/copy"
    umount "$mnt"
done
finish

# And as the kernel's driver finds it.
"$SPINDLE" nvme unbind "$DRIVE0" "$DRIVE1"
for address in "$DRIVE0" "$DRIVE1"; do
    within 15 find_drive_block "$address"
    fsck.ext4 -fn "$BLOCK" || fail "fsck found something on $BLOCK of the kernel's driver"
    mount -o ro "$BLOCK" "$mnt"
    diff -r "$tree" "$mnt/copy"
    umount "$mnt"
done
