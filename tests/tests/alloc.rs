//! Zero allocations: in steady state no command of any kind allocates anything, on either end, on any kind of
//! disk, over TCP and over RDMA.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

use nvme_spec::Sqe;
use spindle_nvme_pcie::Settings;
use spindle_nvme_transport::host::{HostData, HostEvent};
use spindle_reactor::alloc_count::{CountingAllocator, allocations_here};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_target_disk::ram::{RamDisk, RamSpec};
use spindle_target_disk::{
    BlockRange, CacheSpec, CachedDisk, Disk, DiskError, Done, FileDisk, FileSpec, IoRequest, NullDisk,
    NullSpec, Op, PolicyKind, Token,
};
use spindle_tests::direct::Direct;
use spindle_tests::drive::threads::Threads;
use spindle_tests::drive::world::World;
use spindle_tests::fabric::direct as rdma;
use spindle_tests_emulator::EmulatorSpec;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Commands outstanding at a time.
const DEPTH: u16 = 24;
/// Bytes of every disk.
const BYTES: u64 = 64 << 20;
const BLOCK: u32 = 4096;

/// Commands of a kind, each with its own identifier and data; all data are zeroes, so that compares agree.
fn command(pool: &Pool, kind: u16, cid: u16, round: u64) -> (Sqe, HostData) {
    let buf = |bytes: u32| {
        let mut buf = pool.take(bytes).expect("the host has enough");
        buf.clear();
        buf
    };
    // Far enough apart for the largest.
    let lba = (u64::from(cid) * 64 + round) % (BYTES / u64::from(BLOCK) - 64);
    let list = |bytes: u32, fill: &dyn Fn(&mut Buf)| {
        let mut list = buf(bytes);
        fill(&mut list);
        HostData::ToController(list)
    };
    match kind {
        0 => (Sqe::read(cid, 1, lba, 1), HostData::FromController(buf(BLOCK))),
        1 => (Sqe::read(cid, 1, lba, 16), HostData::FromController(buf(64 << 10))),
        // In the capsule, then by R2T.
        2 => (Sqe::write(cid, 1, lba, 1, false), HostData::ToController(buf(BLOCK))),
        3 => (Sqe::write(cid, 1, lba, 16, true), HostData::ToController(buf(64 << 10))),
        4 => (Sqe::flush(cid, 1), HostData::None),
        5 => (Sqe::write_zeroes(cid, 1, lba, 3, round.is_multiple_of(2)), HostData::None),
        6 => (Sqe::compare(cid, 1, lba, 1), HostData::ToController(buf(BLOCK))),
        7 => (Sqe::verify(cid, 1, lba, 40), HostData::None),
        8 => {
            let range = |buf: &mut Buf| {
                buf.copy_in(4, &2_u32.to_le_bytes());
                buf.copy_in(8, &lba.to_le_bytes());
            };
            (Sqe::dsm(cid, 1, 1), list(4096, &range))
        }
        _ => {
            let source = |buf: &mut Buf| {
                buf.copy_in(8, &lba.to_le_bytes());
                buf.copy_in(16, &3_u16.to_le_bytes());
            };
            (Sqe::copy(cid, 1, lba + 8, 1), list(32, &source))
        }
    }
}

/// One command for each identifier, from beginning to end.
fn round(direct: &mut Direct, round: u64) {
    for cid in 0..DEPTH {
        let kind = (cid + u16::try_from(round % 10).expect("small")) % 10;
        let (sqe, data) = command(&direct.pool, kind, cid, round);
        direct.io_link.host.submit(sqe, data).expect("room");
    }
    let mut left = DEPTH;
    while left > 0 {
        direct.io_link.turn(&mut direct.core, &mut |event| match event {
            HostEvent::Completed { result: Ok(()), .. } => left -= 1,
            HostEvent::Ready | HostEvent::Completed { .. } | HostEvent::Closed { .. } => {
                panic!("{event:?}")
            }
        });
    }
}

/// The same over RDMA, on the fabric, which allocates nothing either.
fn rdma_round(direct: &mut rdma::Direct, round: u64) {
    let mut left = 0;
    for cid in 0..DEPTH {
        let kind = (cid + u16::try_from(round % 10).expect("small")) % 10;
        let (sqe, data) = command(&direct.pool, kind, cid, round);
        assert!(direct.io.submit(sqe, data, &mut direct.rng).is_ok(), "room");
        left += 1;
    }
    while left > 0 {
        direct.exchange(&mut |event| match event {
            HostEvent::Completed { result: Ok(()), .. } => left -= 1,
            HostEvent::Ready | HostEvent::Completed { .. } | HostEvent::Closed { .. } => panic!("{event:?}"),
        });
    }
}

#[track_caller]
fn assert_no_allocation(disk: &Arc<dyn Disk>) {
    let before = allocations_here();
    let mut direct = Direct::on(disk);
    assert!(allocations_here() > before, "the counter counts");
    assert_steady(&mut |number| round(&mut direct, number));
    let zone = |buffer_bytes, count| ZoneSpec { buffer_bytes, count };
    let zones = [zone(4096, 256), zone(64 << 10, 64), zone(1 << 20, 8)];
    let mut direct = rdma::Direct::on(disk, &zones, rdma::setting(1));
    assert_steady(&mut |number| rdma_round(&mut direct, number));
}

/// Lists grow to the longest that they ever were, and with real files that is not the same in every run: the
/// warming up goes on while it does. What allocates now and then never gets through.
#[track_caller]
fn assert_steady(round: &mut impl FnMut(u64)) {
    const ROUNDS: u64 = 60;
    let mut counts = Vec::new();
    for phase in 0..6 {
        let before = allocations_here();
        (phase * ROUNDS..(phase + 1) * ROUNDS).for_each(&mut *round);
        let count = allocations_here() - before;
        if phase > 0 && count == 0 {
            return;
        }
        counts.push(count);
    }
    panic!("allocations of {} commands each: {counts:?}", ROUNDS * u64::from(DEPTH));
}

#[test]
fn no_command_on_a_ram_disk_allocates() {
    let spec = RamSpec { bytes: BYTES, block_bytes: BLOCK, pages: Pages::Base, has_seals: false };
    assert_no_allocation(&RamDisk::new("ram", spec).expect("a disk"));
}

#[test]
fn no_command_on_a_null_disk_allocates() {
    assert_no_allocation(
        &NullDisk::new("null", NullSpec { bytes: BYTES, block_bytes: BLOCK }).expect("a disk"),
    );
}

/// A file disk, and the file.
fn file(name: &str) -> (Arc<dyn Disk>, PathBuf) {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.img", std::process::id()));
    let spec = FileSpec { create_bytes: Some(BYTES), is_direct: false, ..FileSpec::new(&path, BLOCK) };
    (FileDisk::new("file", &spec).expect("a disk"), path)
}

#[test]
fn no_command_on_a_file_disk_allocates() {
    let (disk, path) = file("alloc");
    assert_no_allocation(&disk);
    std::fs::remove_file(path).expect("it is there");
}

/// Hits, misses, evictions, pages that are written and stay, and what is read ahead.
#[test]
fn no_command_on_a_cached_disk_allocates() {
    for (policy, cache_bytes) in [(PolicyKind::S3Fifo, 64 << 20), (PolicyKind::Lru, 1 << 20)] {
        let (inner, path) = file(policy.name());
        let spec = CacheSpec { read_ahead: 64 << 10, ..CacheSpec::new(cache_bytes, policy, Pages::Base) };
        let disk = CachedDisk::new(inner, Some(&spec)).expect("a cache");
        assert_no_allocation(&(Arc::clone(&disk) as Arc<dyn Disk>));
        let counts = disk.counts();
        assert!(counts.hits > 1000 && counts.written > 100, "{counts:?}");
        assert!(counts.evictions > 1000 || cache_bytes > 1 << 20, "{counts:?}");
        std::fs::remove_file(path).expect("it is there");
    }
}

/// All of the road, from capsules to the drive and back; what the drive and its manager do they do on threads
/// of their own.
#[test]
fn no_command_from_a_host_to_a_drive_of_our_own_allocates() {
    let drive = Threads::new(BYTES);
    assert_no_allocation(drive.disk());
    assert_eq!(drive.emulator.first_violation(), None);
}

/// What the driver of NVMe drives allocates for commands of all kinds and sizes, the drive's own work aside.
#[test]
fn no_command_on_a_drive_of_our_own_allocates() {
    for has_doorbell_buffer in [false, true] {
        let spec =
            EmulatorSpec { has_doorbell_buffer, has_write_cache: true, mdts: 5, ..EmulatorSpec::default() };
        let zones = [(4096, 64), (64 << 10, 16), (1 << 20, 8)]
            .map(|(buffer_bytes, count)| ZoneSpec { buffer_bytes, count });
        let mut world = World::with_pools(spec, Settings::default(), 1, 64, &zones);
        for _ in 0..100 {
            world.step_manager(1);
            world.emulator.step();
            world.poll(0);
        }
        let mut done: Vec<Done> = Vec::with_capacity(64);
        let mut round = |number: u64| drive_round(&mut world, &mut done, number);
        for number in 0..40 {
            let _ = round(number);
        }
        assert_eq!((40..400).map(round).sum::<u64>(), 0);
    }
}

/// 24 commands, from beginning to end; what was allocated for them.
fn drive_round(world: &mut World, done: &mut Vec<Done>, number: u64) -> u64 {
    const OPS: [(Op, u32); 10] = [
        (Op::Compare, 1),
        // A copy follows.
        (Op::Verify, 100),
        (Op::Read, 1),
        (Op::Write { fua: false }, 1),
        (Op::Read, 16),
        (Op::Write { fua: true }, 16),
        // Eight commands.
        (Op::Read, 256),
        (Op::Flush, 0),
        (Op::WriteZeroes { deallocate: true, fua: false }, 100),
        (Op::Deallocate, 9),
    ];
    let (emulator, core) = (&world.emulator, &mut world.cores[0]);
    let disk = core.disk.as_mut().expect("open");
    let (mut count, mut left) = (0, 24);
    for command in 0..24 {
        let (op, blocks) = OPS[usize::try_from((command + number) % 10).expect("small")];
        let has_data = matches!(op, Op::Read | Op::Write { .. } | Op::Compare);
        let buf = has_data.then(|| core.pool.take(blocks * 4096).expect("room"));
        let range = BlockRange { lba: command * 512 + number % 7, blocks };
        let before = allocations_here();
        let ended = disk.submit(Token(command), &IoRequest::new(op, range), buf);
        count += allocations_here() - before;
        assert!(ended.is_none());
        if op == Op::Verify {
            let before = allocations_here();
            let ended = disk.copy(Token(24 + command), range, range.lba + 200, false);
            count += allocations_here() - before;
            assert!(ended.is_none());
            left += 1;
        }
    }
    while left > 0 {
        emulator.step();
        let before = allocations_here();
        disk.poll(Nanos::ZERO, done);
        count += allocations_here() - before;
        // What a compare expects is whatever was in the buffer.
        let is_fine = |done: &Done| matches!(done.result, Ok(()) | Err(DiskError::CompareDiffers));
        left -= done.drain(..).inspect(|done| assert!(is_fine(done), "{done:?}")).count();
    }
    count
}
