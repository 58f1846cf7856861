# power cuts: what was flushed or had FUA is there, on every kind of disk; files that were made and grown too
# limit: 1800 s
# outside: scripts/lab/power-cut
# This is the guest's part of round $ROUND. It only ends by itself in the third; $LOGS is kept by the machine outside.
round=$ROUND acks=$LOGS/acks
# The media by their serial numbers.
device() {
    local path
    for path in /sys/block/vd*; do
        [ "$(cat "$path/serial")" != "$1" ] || { echo "/dev/${path##*/}"; return; }
    done
    fail "there is no disk $1"
}
# controller FILE VALUE: of the kernel's own NVMe controllers the one that has this.
controller() {
    local path
    for path in /sys/class/nvme/nvme*; do
        [ "$(tr -d ' ' <"$path/$1")" != "$2" ] || { echo "${path##*/}"; return; }
    done
    return 1
}
sizes() { if [ "$round" = 1 ]; then echo 32; else echo 48; fi; }
files=(cached direct made)
written=(cached direct block loop forgetful ng nvme)
nsid_of=([1]=cached [2]=direct [3]=block [4]=loop [5]=forgetful [6]=ng [7]=nvme [8]=made)

# --- the media ---

# Nothing reaches a medium but what is asked for: no writeback by time, no commit of the journal.
echo 0 >/proc/sys/vm/dirty_writeback_centisecs
echo 360000 >/proc/sys/vm/dirty_expire_centisecs
modprobe -a ext4 nvme nvme-tcp nvme-loop
for name in "${files[@]}"; do
    mkdir -p "$SCRATCH/$name"
    mount -o noatime,commit=900 "$(device "$name")" "$SCRATCH/$name"
done
if [ "$round" != 1 ]; then
    # Before Spindle, which would give an empty file its size. After the first cut as they were made, then as they grew.
    wanted=$(((round == 2 ? 32 : 48) << 20))
    for name in "${files[@]}"; do
        bytes=$(stat -c %s "$SCRATCH/$name/disk" || echo no file)
        if [ "$bytes" = "$wanted" ]; then bytes=right; fi
        echo "$round $name size $bytes" >>"$LOGS/found"
    done
fi

# The drive `ng` as it is; `loop` by the kernel's own target, which passes FUA on.
nvmet=/sys/kernel/config/nvmet
mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
mkdir -p "$nvmet/subsystems/loop/namespaces/1" "$nvmet/ports/1"
echo 1 >"$nvmet/subsystems/loop/attr_allow_any_host"
device loop >"$nvmet/subsystems/loop/namespaces/1/device_path"
echo 1 >"$nvmet/subsystems/loop/namespaces/1/enable"
echo loop >"$nvmet/ports/1/addr_trtype"
ln -s "$nvmet/subsystems/loop" "$nvmet/ports/1/subsystems/loop"
nvme connect -t loop -n loop >/dev/null
generic() { local found; found=$(compgen -G "/dev/${1/nvme/ng}n1") && echo "$found"; }
within 60 generic "$(controller subsysnqn loop)"
within 60 generic "$(controller serial ng)"
address=$(cat "/sys/class/nvme/$(controller serial nvme)/address")
disk_ng() { printf '%s\n' '[[disk]]' "name = \"$1\"" "ng = \"$(generic "$2")\""; }
loop=$(controller subsysnqn loop) ng=$(controller serial ng)
"$SPINDLE" nvme bind "$address"

# --- the target and its host ---

# configure MIB: files of this size.
configure() {
    {
        reactor; listener
        disk_file cached "$SCRATCH/cached/disk" "${1}MiB"; echo 'direct = false'
        disk_file direct "$SCRATCH/direct/disk" "${1}MiB"
        disk_file made "$SCRATCH/made/disk" "${1}MiB"
        printf '%s\n' '[[disk]]' 'name = "block"' 'kind = "file"' "path = \"$(device block)\""
        printf '%s\n' '[[disk]]' 'name = "forgetful"' 'kind = "file"' "path = \"$(device forgetful)\""
        disk_ng loop "$loop"
        disk_ng ng "$ng"
        printf '%s\n' '[[disk]]' 'name = "nvme"' "nvme = \"$address\""
        subsystem "$NQN" "${nsid_of[@]}"
    } | config
}
configure $((round == 3 ? 48 : 32))
start_target
connect
declare -A block
for nsid in "${!nsid_of[@]}"; do
    wait_for_block "$nsid"
    block[${nsid_of[nsid]}]=$BLOCK
done
devices() { local name; for name; do echo "$name=${block[$name]}"; done; }

if [ "$round" != 1 ]; then
    for name in "${written[@]}"; do
        echo "$round $name $("$MEDIUM" check "$acks" "$name" "${block[$name]}" || true)" >>"$LOGS/found"
    done
fi
if [ "$round" = 3 ]; then
    disconnect
    stop_target
    exit 0
fi

# --- writes, until the power goes ---

if [ "$round" = 1 ]; then
    touch "$LOGS/writing1"
    mapfile -t all < <(devices "${written[@]}")
    "$MEDIUM" write "$acks" "${all[@]}"
    fail 'it was to write until the power goes'
fi

# The files grow under the host.
configure 48
reload_target
for name in "${files[@]}"; do within 60 has_bytes "${block[$name]}" $((48 << 20)); done
with_fua=(cached direct block loop forgetful)
# The emulator's drives take FUA for nothing: flushes again.
mapfile -t flushed < <(devices ng nvme)
mapfile -t noisy < <(devices "${with_fua[@]}")
# By passing the command through: what asks the kernel for a durable write to a block device gets a flush behind it.
write_with_fua() {
    local name=$1 number offset sector bytes folder=$WORK/$1
    sector=$(blockdev --getss "${block[$name]}")
    mkdir "$folder"
    "$MEDIUM" stamps "$acks" "$name" 500 "$folder"
    while read -r number offset; do
        bytes=$(stat -c %s "$folder/$number")
        nvme write "${block[$name]}" -f -s $((offset / sector)) -c $((bytes / sector - 1)) -z "$bytes" -d "$folder/$number" >/dev/null
        echo "kept $number" >>"$acks/$name.fua"
    done <"$folder/list"
}
touch "$LOGS/writing2"
"$MEDIUM" write "$acks" "${flushed[@]}" &
"$MEDIUM" noise "${noisy[@]}" &
for name in "${with_fua[@]}"; do write_with_fua "$name" & done
wait
fail 'it was to write until the power goes'
