# The body of the fio cases: write and verify, with blocks of 512 B to 1 MiB, at queue depth 1 and 32.
# shellcheck shell=bash

# Each block size has a stretch of its own, so that one fio run does them all, one after another; a MiB for
# each of the smallest, which under emulation takes as long as 16 of the largest.
sizes=(512:128k 1k:256k 4k:1M 8k:1M 12k:1536k 64k:4M 128k:8M 256k:8M 1M:16M)

# fio_matrix CORES DEPTHS [nvme connect options for the digests]: on a RAM disk.
fio_matrix() {
    local cores=$1 depths
    read -ra depths <<<"$2"
    shift 2
    { reactor "$cores"; disk_ram d0 128MiB; listener; subsystem "$NQN" d0; } | config
    start_target
    connect_block "$@"
    fio_sizes "${depths[@]}"
    disconnect
}

# fio_sizes DEPTH...: all of it on $BLOCK, of at least 128 MiB, at each of these depths, of 1 and 32; without the sizes that are
# less than its sector.
fio_sizes() {
    local depth size jobs offset sector
    # Another checksum at each depth, so that what the first left behind cannot pass for what the second
    # wrote. Who calls it again for the same disk gives a third, in checksum_32.
    local -A checksum=([1]=crc32c [32]=${checksum_32:-xxhash})
    sector=$(blockdev --getss "$BLOCK")
    for depth; do
        jobs=() offset=0
        for size in "${sizes[@]}"; do
            [ "$(numfmt --from=iec "$(tr k K <<<"${size%:*}")")" -ge "$sector" ] || continue
            # Off the MiB by a sector: nothing here may lean on alignment.
            jobs+=(--name="${size%:*}" --stonewall --bs="${size%:*}" --size="${size#*:}")
            jobs+=(--offset=$(((offset << 20) + sector)))
            offset=$((offset + 17))
            [ "$offset" -le 110 ] || offset=0
        done
        # Not run_fio: what comes before the first --name holds for all of them.
        fio --output="$WORK/fio.$depth" --filename="$BLOCK" --allow_file_create=0 --direct=1 --thread --ioengine=libaio \
            --iodepth="$depth" --rw=randwrite --verify="${checksum[$depth]}" --verify_fatal=1 \
            --verify_state_save=0 "${jobs[@]}" ||
            { grep -v '^ ' "$WORK/fio.$depth" >&2; fail "fio on $BLOCK at depth $depth"; }
    done
}
