# mkfs.ext4, mount, copy a tree, unmount, fsck, and the tree is the same
# limit: 600 s
config_file
start_target
connect_block
tree=/usr/lib/modules/$(uname -r)/kernel/fs
mnt=$WORK/mnt
mkdir "$mnt"
mkfs.ext4 -q "$BLOCK"
mount "$BLOCK" "$mnt"
cp -a "$tree" "$mnt/copy"
umount "$mnt"
fsck.ext4 -fn "$BLOCK" || fail 'fsck found something'
mount "$BLOCK" "$mnt"
diff -r "$tree" "$mnt/copy"
rm -rf "$mnt/copy"
fstrim -v "$mnt"
umount "$mnt"
fsck.ext4 -fn "$BLOCK" || fail 'fsck found something after the trim'
