# two hosts on one namespace with a cache: each finds what the other has just written, and both work on it at once
# limit: 600 s
skip_on nvmet 'it has no cache'
# One kernel would take its two connections for two paths of one host; without multipath it keeps them apart.
host_modules N
expect_kernel_log 'Found shared namespace [0-9]+, but multipathing not supported' 'Support for shared namespaces'
{
    reactor 0,1; control; disk_file file "$FILE" 64MiB
    printf '%s\n' '[disk.cache]' 'size = "8MiB"' 'policy = "lru"'
    listener; subsystem "$NQN" file
} | config
start_target
connect
ctrl_a=$CTRL
connect_directly "${HOST_B[1]}" "${HOST_B[3]}" "$NQN"
ctrl_b=$CTRL
on() { CTRL=$1; wait_for_block 1; }
on "$ctrl_a"
a=$BLOCK
on "$ctrl_b"
b=$BLOCK
# Written by one, read by the other, who had read what was there before.
for round in 1 2 3 4 5 6 7 8; do
    for bytes in 4096 65536; do
        pattern "$WORK/data" "$bytes"
        if [ $((round % 2)) = 0 ]; then writer=$a reader=$b; else writer=$b reader=$a; fi
        BLOCK=$reader read_blocks "$WORK/old" 65536 "$bytes"
        BLOCK=$writer write_blocks "$WORK/data" 65536
        BLOCK=$reader read_blocks "$WORK/back" 65536 "$bytes"
        cmp "$WORK/data" "$WORK/back"
        BLOCK=$writer read_blocks "$WORK/back" 65536 "$bytes"
        cmp "$WORK/data" "$WORK/back"
    done
done
# Each its half at once, while both read all of it.
BLOCK=$a verify_fio half-a --offset=0 --size=12M --bs=4k --iodepth=16 &
jobs[0]=$!
BLOCK=$b verify_fio half-b --offset=32M --size=12M --bs=8k --iodepth=16 &
jobs[1]=$!
BLOCK=$a run_fio reads-a --rw=randread --size=64M --bs=4k --iodepth=8 --io_size=24M &
jobs[2]=$!
BLOCK=$b run_fio reads-b --rw=randread --size=64M --bs=16k --iodepth=8 --io_size=24M &
jobs[3]=$!
for job in "${jobs[@]}"; do wait "$job"; done
BLOCK=$b verify_fio half-a-by-b --offset=0 --size=12M --bs=4k --iodepth=16 --verify_only
BLOCK=$a verify_fio half-b-by-a --offset=32M --size=12M --bs=8k --iodepth=16 --verify_only
