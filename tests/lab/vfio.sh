#!/usr/bin/env bash
# tests/lab/vfio.sh CHECK: in a guest with two drives (tests/lab/nvme.sh, drive_machine): what nvme/pcie promises
# over VFIO, with CHECK, the example vfio-check of tests/: refusals, Identify, resets, two drives in one
# container, unplugging, pulling and unbinding while a process holds the drive. Says ok, or what failed.
set -Eeuo pipefail
trap 'echo "failed at $LINENO: $BASH_COMMAND" >&2' ERR
LAB=$(cd "$(dirname "$0")" && pwd)
. "$LAB/nvme.sh"
check=$1
said=/run/vfio-check

# refused PATTERN ADDRESS: to open it is refused with these words.
refused() {
    local words code=0
    words=$("$check" "$2" open) || code=$?
    echo "$words"
    [ "$code" = 3 ] && grep -E "$1" <<<"$words" >/dev/null || { echo "wanted a refusal by '$1'" >&2; return 1; }
}
# watch_begin: a process holds nv0 and works with it. watch_end: it has let go in order.
watch_begin() {
    "$check" "$(drive_place nv0)" watch >"$said" &
    watcher=$!
    timeout 20 bash -c "until grep watching $said; do sleep 0.1; done"
}
watch_end() {
    wait "$watcher"
    cat "$said"
    grep -x 'let go' "$said" >/dev/null
}
again() {
    drive_wait 30 drive_is_there nv0
    drive_bind nv0 vfio-pci
    "$check" "$(drive_place nv0)"
}

drive_modules
place=$(drive_place nv0)
refused 'no such PCI function' 0000:99:00.0
refused 'class is 0x060000: allowed is 0x010802' 0000:00:00.0
refused "driver is none: .*spindle nvme bind $place" "$place"
drive_bind nv0 vfio-pci
drive_bind nv1 vfio-pci
if (ulimit -l 1024; setpriv --bounding-set -ipc_lock "$check" "$place" 2>"$said"); then
    echo 'pinned more than RLIMIT_MEMLOCK' >&2
    exit 1
fi
grep 'RLIMIT_MEMLOCK is 1024 KiB.*CAP_IPC_LOCK' "$said"
"$check" "$place"
"$check" "$place" "$(drive_place nv1)"

watch_begin
refused 'IOMMU group is [0-9]+, busy: another process' "$place"
drive_unplug nv0
watch_end
drive_wait 30 drive_is_gone nv0
refused 'no such PCI function' "$place"
drive_plug nv0
again

watch_begin
drive_pull nv0 "$watcher"
watch_end
grep 'reset: Err.*it was removed' "$said" >/dev/null
drive_wait 30 drive_is_gone nv0
drive_plug nv0
again

watch_begin
echo "$place" >"/sys/bus/pci/devices/$place/driver/unbind"
watch_end
modprobe nvme
drive_bind nv0 nvme
drive_bind nv0 vfio-pci
"$check" "$place"
echo ok
