//! Zero copy: what the target copies of the data of a command, on any kind of disk.
//!
//! For the target alone, where the test is the transport, and what it copies itself is known; and with
//! NVMe/RDMA, over a fabric whose own copies are not counted. On the road from there to a drive of our own
//! also: no locks.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme_spec::Sqe;
use spindle_nvme_transport::DataPointer;
use spindle_nvme_transport::host::HostData;
use spindle_reactor::lock::locks_taken;
use spindle_reactor::mem::{Pages, ZoneSpec, copied_bytes};
use spindle_target_disk::ram::{RamDisk, RamSpec};
use spindle_target_disk::{Disk, FileDisk, FileSpec, NullDisk, NullSpec};
use spindle_tests::drive::threads::Threads;
use spindle_tests::fabric::direct::{Direct, IN_CAPSULE_BYTES, setting};
use spindle_tests::script::{Answer, LIMITS, Queue, Rig, Setup};

/// A file that is removed at the end of the test.
struct TempPath(PathBuf);

impl Drop for TempPath {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

const BYTES: u64 = 16 << 20;
/// A command that takes longer hangs.
const TIME_MAX: Duration = Duration::from_secs(60);

fn disks() -> (TempPath, Vec<Arc<dyn Disk>>) {
    let at = TempPath(std::env::temp_dir().join(format!("spindle-copies-{}", std::process::id())));
    let ram = RamSpec { bytes: BYTES, block_bytes: 4096, pages: Pages::Base, has_seals: false };
    let file = FileSpec { create_bytes: Some(BYTES), ..FileSpec::new(&at.0, 4096) };
    let disks: Vec<Arc<dyn Disk>> = vec![
        Arc::new(RamDisk::with_slack("ram", ram, 4 << 20).expect("a disk")),
        FileDisk::new("file", &file).expect("a disk"),
        NullDisk::new("null", NullSpec { bytes: BYTES, block_bytes: 4096 }).expect("a disk"),
    ];
    (at, disks)
}

/// Bytes that are copied while `act` is done.
fn copied(act: impl FnOnce()) -> u64 {
    let before = copied_bytes();
    act();
    copied_bytes() - before
}

/// The next answer; a file takes its time.
fn answer(rig: &mut Rig, queue: &Queue) -> Answer {
    let since = Instant::now();
    while since.elapsed() < TIME_MAX {
        rig.turn();
        if let Some(answer) = rig.answer(queue) {
            return answer;
        }
        std::thread::yield_now();
    }
    panic!("no answer");
}

/// What a RAM disk copies of a write of whole pages: a page that is written alone is published from a frame
/// of its own and moved to its place from there. Whole extents of 64 KiB are written where they stay.
fn copied_home(bytes: usize) -> u64 {
    if bytes < 64 << 10 { bytes as u64 } else { 0 }
}

#[test]
fn a_command_whose_data_the_transport_moves_copies_nothing() {
    let (_at, disks) = disks();
    // The second half of the sizes is put together of pieces.
    let zones = vec![(4096, 64), (128 << 10, 1)];
    let mut rig = Rig::new(Setup { zones, ..Setup::small(disks) });
    let host = rig.host();
    for nsid in 1..=3 {
        for blocks in [1, 3, 16, 32] {
            let bytes = blocks as usize * 4096;
            let data: Vec<u8> = (0..bytes).map(|at| u8::try_from(at % 251).expect("a byte")).collect();
            // The test's own copy, to bring it, is the only one but for the RAM disk's.
            let write = Sqe::write(1, nsid, 64, blocks, false);
            rig.send(&host.io, write, bytes);
            let count = copied(|| {
                rig.bring(&host.io, 1, &data);
                assert!(answer(&mut rig, &host.io).status.is_success());
            });
            let expected = bytes as u64 + if nsid == 1 { copied_home(bytes) } else { 0 };
            assert_eq!(count, expected, "a write of {blocks} blocks to namespace {nsid}");
            let mut read = None;
            let count = copied(|| {
                rig.send(&host.io, Sqe::read(2, nsid, 64, blocks), bytes);
                read = Some(answer(&mut rig, &host.io));
            });
            let answer = read.expect("an answer");
            assert!(answer.status.is_success() && (nsid == 3 || answer.data == data));
            assert_eq!(count, 0, "a read of {blocks} blocks of namespace {nsid}");
        }
    }
    rig.finish();
}

#[test]
fn data_in_a_capsule_is_copied_once_and_within_a_ram_disk_once_more() {
    let (_at, disks) = disks();
    let mut rig = Rig::new(Setup::small(disks));
    let host = rig.host();
    let data = vec![7; LIMITS.in_capsule_bytes as usize];
    for cid in 0..4 {
        host.io.line.set_in_capsule(&data);
        let bytes = LIMITS.in_capsule_bytes;
        let write = Sqe::write(cid, 1, 3, 1, false);
        let count = copied(|| {
            rig.send_pointer(&host.io, write, Ok(DataPointer::InCapsule { bytes }));
            assert!(rig.answer(&host.io).expect("at once").status.is_success());
        });
        assert_eq!(count, u64::from(bytes) + copied_home(bytes as usize));
    }
    rig.finish();
}

#[test]
fn a_write_of_part_of_a_page_copies_the_rest_of_it() {
    let spec = RamSpec { bytes: BYTES, block_bytes: 512, pages: Pages::Base, has_seals: false };
    let disk: Arc<dyn Disk> = Arc::new(RamDisk::with_slack("ram", spec, 1 << 20).expect("a disk"));
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    let count = copied(|| {
        assert!(rig.run(&host.io, Sqe::write(1, 1, 2, 1, false), &[1; 512]).status.is_success());
    });
    assert_eq!(count, 512 + (4096 - 512) + copied_home(4096));
    rig.finish();
}

/// Zones of which the first makes long transfers scattered.
fn zones() -> [ZoneSpec; 2] {
    [ZoneSpec { buffer_bytes: 4096, count: 64 }, ZoneSpec { buffer_bytes: 1 << 20, count: 2 }]
}

#[test]
fn over_rdma_only_capsules_and_small_writes_to_ram_are_copied() {
    let (_at, disks) = disks();
    for (index, disk) in disks.iter().enumerate() {
        let mut direct = Direct::on(disk, &zones(), setting(1));
        for blocks in [1_u32, 2, 3, 16, 32, 256] {
            let bytes = blocks * 4096;
            let data: Vec<u8> = (0..bytes).map(|at| u8::try_from(at % 251).expect("a byte")).collect();
            let mut buf = direct.pool.take(bytes).expect("the host's own");
            buf.copy_in(0, &data);
            let write = Sqe::write(1, 1, 64, blocks, false);
            let count = copied(|| {
                direct.run(write, HostData::ToController(buf));
            });
            let capsule = if bytes <= IN_CAPSULE_BYTES { u64::from(bytes) } else { 0 };
            let expected = capsule + if index == 0 { copied_home(bytes as usize) } else { 0 };
            assert_eq!(count, expected, "a write of {blocks} blocks to disk {index}");
            let mut read = direct.pool.take(bytes);
            let count = copied(|| {
                let buf = read.take().expect("the host's own");
                read = direct.run(Sqe::read(2, 1, 64, blocks), HostData::FromController(buf));
            });
            assert_eq!(count, 0, "a read of {blocks} blocks of disk {index}");
            let read: Vec<u8> = read.iter().flat_map(|buf| buf.segments().flatten().copied()).collect();
            assert!(index == 2 || read == data, "{blocks} blocks of disk {index}");
        }
        direct.finish();
    }
}

#[test]
fn over_rdma_a_capsule_is_copied_once_and_within_a_ram_disk_once_more() {
    let spec = RamSpec { bytes: BYTES, block_bytes: 512, pages: Pages::Base, has_seals: false };
    let disk: Arc<dyn Disk> = Arc::new(RamDisk::with_slack("ram", spec, 1 << 20).expect("a disk"));
    let mut direct = Direct::on(&disk, &zones(), setting(1));
    for blocks in 1..=8 {
        let buf = direct.pool.take(blocks * 512).expect("the host's own");
        let count = copied(|| {
            direct.run(Sqe::write(1, 1, 8, blocks, false), HostData::ToController(buf));
        });
        // What the write leaves of the page is the disk's copy, and so is the way to its place.
        let expected = u64::from(blocks * 512) + u64::from(4096 - blocks * 512) + copied_home(4096);
        assert_eq!(count, expected, "{blocks} blocks");
    }
    direct.finish();
}

/// A write and a read of the same blocks over RDMA: what this thread copied, and the locks that it took.
fn there_and_back(direct: &mut Direct, blocks: u32, fill: u8) -> (u64, u64) {
    let bytes = blocks * 4096;
    let data: Vec<u8> = (0..bytes).map(|at| u8::try_from(at % 251).expect("a byte") ^ fill).collect();
    let mut buf = direct.pool.take(bytes).expect("the host's own");
    buf.copy_in(0, &data);
    let mut read = direct.pool.take(bytes);
    let locks = locks_taken();
    let count = copied(|| {
        direct.run(Sqe::write(1, 1, 64, blocks, true), HostData::ToController(buf));
        let buf = read.take().expect("the host's own");
        read = direct.run(Sqe::read(2, 1, 64, blocks), HostData::FromController(buf));
    });
    let locks = locks_taken() - locks;
    let read: Vec<u8> = read.iter().flat_map(|buf| buf.segments().flatten().copied()).collect();
    assert!(read == data, "{blocks} blocks");
    (count, locks)
}

#[test]
fn rdma_to_an_nvme_drive_copies_only_in_capsule_data_and_takes_no_lock() {
    let drive = Threads::new(BYTES);
    let locks = locks_taken();
    let mut direct = Direct::on(drive.disk(), &zones(), setting(1));
    assert!(locks_taken() > locks, "the counter counts: a core opens the drive under a lock");
    // The first wait for the queue pair, and take it over.
    there_and_back(&mut direct, 1, 0);
    for round in 1..4 {
        for blocks in [1_u32, 2, 3, 16, 32, 256] {
            let bytes = blocks * 4096;
            let expected = if bytes <= IN_CAPSULE_BYTES { u64::from(bytes) } else { 0 };
            assert_eq!(there_and_back(&mut direct, blocks, round), (expected, 0), "{blocks} blocks");
        }
    }
    direct.finish();
    assert_eq!(drive.emulator.first_violation(), None);
}
