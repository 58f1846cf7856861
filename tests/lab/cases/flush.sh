# flush, and writes with forced unit access
config_file
start_target
connect_block
nvme flush "$BLOCK" -n 1 >/dev/null || fail 'nvme flush'
expect 'the cache, as the host sees it' "$(cat "/sys/block/${BLOCK##*/}/queue/write_cache")" 'write back'
pattern "$WORK/data" 65536
# oflag=dsync becomes FUA or a flush behind the write, as the device offers.
dd if="$WORK/data" of="$BLOCK" bs=4k oflag=direct,dsync conv=nocreat status=none
sector=$(blockdev --getss "$BLOCK")
nvme write "$BLOCK" -s 256 -c $((32768 / sector - 1)) -z 32768 -f -d "$WORK/data" >/dev/null ||
    fail 'nvme write --force-unit-access'
read_blocks "$WORK/back" 0 65536
cmp "$WORK/data" "$WORK/back"
read_blocks "$WORK/back" $((256 * sector)) 32768
cmp -n 32768 "$WORK/data" "$WORK/back"
