# names in /dev/disk/by-id survive a restart; a RAM disk, empty then, is not taken for the one that was mounted
expect_reconnect
config_both 64MiB
# The names that udev gives to a block device, and what they are made of. As udev lists them, for it names a
# disk by its serial number alone as well, which several namespaces of one subsystem then compete for.
names() {
    udevadm settle --timeout=60
    udevadm info --query=symlink --name="$1" | tr ' ' '\n' | grep ^disk/by-id/ | sort
    cat "/sys/block/${1##*/}/"{wwid,uuid,nguid} 2>/dev/null || true
}
has_name() { [ "$(readlink -f "/dev/disk/by-id/nvme-$(cat "/sys/block/${1##*/}/wwid")")" = "$1" ]; }
names_of() {
    wait_for_block "$1"
    within 10 has_name "$BLOCK"
    names "$BLOCK"
    cat "/sys/class/nvme/$CTRL/"{serial,model}
}
is_no_block() { ! find_block "$1"; }

start_target
connect --reconnect-delay=1 --ctrl-loss-tmo=120
file=$(names_of 2)
grep -q '^disk/by-id/nvme-' <<<"$file" || fail "no by-id names: $file"
mnt=$WORK/mnt
if [ "$TARGET_KIND" = spindle ]; then
    ram=$(names_of 1)
    # A file system on the RAM disk, mounted over the restart: the host must not go on with it over zeroes.
    mkdir "$mnt"
    wait_for_block 1
    mkfs.ext4 -q "$BLOCK"
    mount "$BLOCK" "$mnt"
    echo before >"$mnt/before"
    sync -f "$mnt"
    expect_kernel_log "${lost[@]}" 'nvme nvme[0-9]+: identifiers changed for nsid 1' \
        'EXT4-fs( error| warning|) ?\(device nvme[0-9]+n[0-9]+\)' 'EXT4-fs .*(shut down|I/O error|unmount)' \
        'JBD2: ' 'Aborting journal on device' 'nvme[0-9]+n[0-9]+: rescheduling'
fi

stop_target
start_target
within 40 has_state live
expect 'the names of the file disk after a restart' "$(names_of 2)" "$file"
if [ "$TARGET_KIND" = spindle ]; then
    within 20 is_no_block 1
    ! { echo after >"$mnt/after" && sync -f "$mnt"; } 2>/dev/null || fail 'the file system went on over an empty disk'
    umount "$mnt"
fi

disconnect
stop_target
start_target
connect
expect 'the names of the file disk after a restart and a new connection' "$(names_of 2)" "$file"
if [ "$TARGET_KIND" = spindle ]; then
    again=$(names_of 1)
    if [ "$again" = "$ram" ]; then fail "the RAM disk came back under its names: $again"; fi
fi
echo "$file"
