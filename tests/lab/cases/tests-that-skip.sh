# the tests that leave something out where the machine lacks it: here it lacks nothing, and none may leave anything out
# limit: 900 s
skip_over rdma 'the machine of these tests has no RDMA'
skip_on nvmet 'they have nothing to do with a target'
[ -s "${TESTS:-}" ] || fail 'no list of the test binaries: run it by scripts/lab-tcp'

# Loop devices, reserved huge pages, and a file system that is not in memory.
modprobe loop
# udev looks at a new loop device under a lock, and the tests open it at once.
# Told to go on, its daemon now and then (once in some 30 times) does not look at its queue before it hears something more; all
# that settles after this case would wait for it in vain.
udev_goes_on() {
    for _ in {1..5}; do
        udevadm control --start-exec-queue
        ! udevadm settle --timeout=5 || return 0
    done
    fail 'udev does not go on'
}
trap udev_goes_on EXIT
udevadm control --stop-exec-queue
echo 8 >/proc/sys/vm/nr_hugepages
mkdir -p "$SCRATCH/tmp"
export TMPDIR=$SCRATCH/tmp SPINDLE_SKIPS=none

# run BINARY-ID TEST...
run() {
    local id=$1 binary test
    shift
    binary=$(awk -v id="$id" '$1 == id { print $2 }' "$TESTS")
    [ -x "$binary" ] || fail "no test binary $id"
    for test; do
        "$binary" --exact "$test" >"$WORK/said" 2>&1 || { cat "$WORK/said" >&2; fail "$id $test"; }
        grep 'test result: ok. 1 passed' "$WORK/said" >/dev/null || fail "$id has no test $test"
    done
}

run spindle-target-disk \
    file::tests::fua_and_flush_reach_the_medium \
    file::tests::a_block_device_is_a_disk \
    file::tests::blocks_smaller_than_those_of_the_device_are_zeroed_through_the_page_cache \
    testing::model::a_file_disk_in_memory_reads_what_was_written_although_it_knows_no_zero_range \
    testing::model::no_count_is_lost_between_two_cores_that_compare_and_write
run spindle-reactor \
    mem::region::tests::a_region_is_rounded_aligned_zero_and_released_to_zero \
    mem::region::tests::one_small_page_does_not_leave_a_region_that_a_device_takes_on_small_pages \
    net::listener::tests::a_connection_knows_both_addresses
run spindle-app::bin/spindle config::tests::errors::a_medium_is_held_to_its_name
run spindle-rdma \
    cm_channel::tests::a_machine_without_rdma_says_so \
    device::tests::a_machine_without_rdma_has_no_devices_and_that_is_no_error
run spindle-nvme-initiator::loopback connecting::a_machine_without_rdma_says_so_and_nothing_else
run spindle-tests::loopback control::a_file_that_is_mounted_alone_is_written_in_place
echo 0 >/proc/sys/vm/nr_hugepages
