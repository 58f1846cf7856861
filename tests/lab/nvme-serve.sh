# For cases in which Spindle serves the drives of the guest itself: nv0, with blocks of 512 bytes, and nv1, with
# 4096. Sourced by them, after lib.sh.
# shellcheck shell=bash disable=SC2034

# over tcp|rdma: what the case does from here on goes over this transport.
over() {
    TRANSPORT=$1 ADDRESS=127.0.0.1
    if [ "$TRANSPORT" = rdma ]; then
        ADDRESS=$RDMA_ADDRESS
        rdma_up || fail 'there is no RDMA network'
        modprobe nvme-rdma
    fi
    PORTAL=(-t "$TRANSPORT" -a "$ADDRESS" -s "$PORT")
}

# drives_up_both: both are there (a case that failed may have left one unplugged) and the kernel's; sets
# DRIVE0 and DRIVE1, their addresses.
drives_up_both() {
    local name
    for name in nv0 nv1; do
        drive_is_there "$name" || drive_plug "$name"
        drive_wait 30 drive_is_there "$name"
    done
    drives_up
    DRIVE0=$(drive_place nv0) DRIVE1=$(drive_place nv1)
}
# drives_for_spindle: both are there and bound to vfio-pci.
drives_for_spindle() {
    drives_up_both
    "$SPINDLE" nvme bind --force "$DRIVE0" "$DRIVE1"
}

# disk_nvme NAME ADDRESS: a part of a configuration.
disk_nvme() { printf '%s\n' '[[disk]]' "name = \"$1\"" "nvme = \"$2\""; }
# config_first: nv0 is namespace 1; config_drives: and nv1 is namespace 2. What answers at the control socket must not keep a
# drive from its end.
config_first() { { reactor; control; listener; disk_nvme d0 "$DRIVE0"; subsystem "$NQN" d0; } | config; }
config_drives() {
    {
        reactor; control; listener; disk_nvme d0 "$DRIVE0"; disk_nvme d1 "$DRIVE1"
        subsystem "$NQN" d0 d1
    } | config
}

# both_blocks: sets BLOCK0 and BLOCK1, the namespaces 1 and 2 of $CTRL.
both_blocks() {
    wait_for_block 1
    BLOCK0=$BLOCK
    wait_for_block 2
    BLOCK1=$BLOCK
}

# lines_of ADDRESS: what the target has said of a drive at level WARN or ERROR.
lines_of() { grep -E ' (WARN|ERROR) ' "$WORK/target.log" | grep -F "$1" || true; }
# says_of ADDRESS PATTERN: it has.
says_of() { lines_of "$1" | grep -E "$2" >/dev/null; }

# block_works: what the drive behind $BLOCK answers at all; a host that asks meanwhile is answered with errors.
block_works() { dd if="$BLOCK" of=/dev/null bs=4k count=1 iflag=direct status=none 2>/dev/null; }

# Commands to a drive that is not there are answered with Internal Error, which the host's kernel says.
gone=(
    'nvme[0-9]+(c[0-9]+)?n[0-9]+: I/O Cmd\(0x[0-9a-f]+\) @ LBA [0-9]+, [0-9]+ blocks, I/O Error \(sct 0x0 / sc 0x6\)'
    '(Buffer )?I/O error,? (on )?dev nvme[0-9]+(c[0-9]+)?n[0-9]+, '
    'Dev nvme[0-9]+n[0-9]+: unable to read RDB block'
)
