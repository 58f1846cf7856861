//! A disk is removed from the configuration while it is loaded, one of every kind: each command is answered,
//! the handle goes when the disk is through, and nothing is left behind.

use std::sync::Arc;

use nvme_spec::{Sqe, Status};
use spindle_target::qpair::request::RequestState;
use spindle_target_disk::fault::{Fault, FaultDisk};
use spindle_target_disk::{Disk, FileDisk, FileSpec, NullDisk, NullSpec};
use spindle_tests::loopback::Folder;
use spindle_tests::script::{Host, Patience, Probe, Rig, Setup, Want};

use crate::{able_disk, assert_ok, pattern, pool_disk, ram_disk};

/// Commands at the disk, or on their way there.
const LOAD: u16 = 100;
const BYTES: usize = 4096;

fn rig(disk: Arc<dyn Disk>) -> (Rig, Host) {
    let zones = vec![(4096, 400), (128 << 10, 4)];
    let mut rig = Rig::new(Setup { zones, ..Setup::small(vec![disk, pool_disk(512)]) });
    let (admin, cntlid) = rig.admin(0, 0);
    let io = rig.io(0, Want { entries: 128, ..Want::io(cntlid, 1) });
    (rig, Host { admin, io, cntlid })
}

/// Load the disk behind namespace 1, take it away, and go on until all is answered. `step` does the disk's
/// work, or (false) all but that.
fn remove_loaded(disk: Arc<dyn Disk>, kind: &str, mut step: impl FnMut(bool)) {
    let block = disk.geometry().block_bytes;
    let blocks = u32::try_from(BYTES).expect("small") / block;
    let (mut rig, host) = rig(disk);
    let io = &host.io;
    let mut turns = |rig: &mut Rig, count, works| {
        for _ in 0..count {
            step(works);
            rig.turn();
        }
    };
    turns(&mut rig, 100, true);
    for cid in 0..LOAD {
        let lba = u64::from(cid % 32) * u64::from(blocks);
        match cid % 4 {
            0 | 1 => rig.send(io, Sqe::read(cid, 1, lba, blocks), BYTES),
            2 => {
                rig.send(io, Sqe::write(cid, 1, lba, blocks, false), BYTES);
                rig.bring(io, cid, &pattern(usize::from(cid), BYTES));
            }
            // Its data has not come when the disk goes.
            _ => rig.send(io, Sqe::write(cid, 1, lba, blocks, false), BYTES),
        }
    }
    turns(&mut rig, 5, false);
    let removed = rig.setup.remove(1);
    rig.publish();
    drop(removed);
    turns(&mut rig, 5, false);
    for cid in (3..LOAD).step_by(4) {
        rig.bring(io, cid, &pattern(usize::from(cid), BYTES));
    }
    let mut answers = Vec::new();
    let mut patience = Patience::for_turns(200_000);
    while answers.len() < usize::from(LOAD) && patience.is_left() {
        turns(&mut rig, 1, true);
        answers.extend(rig.answers(io));
    }
    assert_eq!(answers.len(), usize::from(LOAD), "{kind}: commands without an answer: {:?}", rig.states(io));
    let gone = Status::INTERNAL_ERROR.dnr();
    for answer in &answers {
        let is_late = answer.cid % 4 == 3;
        let is_right = answer.status == Status::SUCCESS || is_late && answer.status == gone;
        assert!(is_right, "{kind}: command {} ended with {}", answer.cid, answer.status);
    }
    // Others go on, and the namespace is gone for good.
    assert_ok(&rig.read(io, Sqe::read(1, 2, 0, 1), 512));
    let answer = rig.read(io, Sqe::read(1, 1, 0, 1), block as usize);
    assert_eq!(answer.status, Status::INVALID_NAMESPACE_OR_FORMAT.dnr());
    rig.finish();
}

#[test]
fn disks_in_memory_that_are_removed_under_load_answer_everything() {
    for (kind, disk) in [("ram", ram_disk(512)), ("ram", ram_disk(4096)), ("able", able_disk(512))] {
        remove_loaded(disk, kind, |_| {});
    }
    remove_loaded(pool_disk(512), "pool", |_| {});
    let null = NullDisk::new("null", NullSpec { bytes: 1 << 20, block_bytes: 512 }).expect("a disk");
    remove_loaded(null, "null", |_| {});
}

#[test]
fn a_file_that_is_removed_under_load_answers_everything() {
    for is_direct in [true, false] {
        let folder = Folder::new(if is_direct { "removal-direct" } else { "removal-cached" });
        let spec =
            FileSpec { create_bytes: Some(1 << 20), is_direct, ..FileSpec::new(folder.file("f"), 4096) };
        let disk = FileDisk::new("file", &spec).expect("a disk");
        remove_loaded(disk, "file", |_| {});
    }
}

#[test]
fn a_waiting_command_ends_with_its_disk_and_does_not_reach_the_new_disk_in_its_slot() {
    for disk in [pool_disk(512), ram_disk(512), ram_disk(4096), able_disk(512)] {
        let block = usize::try_from(disk.geometry().block_bytes).expect("small");
        let zones = vec![(4096, 2)];
        let mut rig = Rig::new(Setup { zones, ..Setup::small(vec![disk, pool_disk(512)]) });
        let host = rig.host();
        // One waits for its data, one for memory that the writes of the other namespace have.
        rig.send(&host.io, Sqe::write(1, 1, 0, 1, false), block);
        rig.send(&host.io, Sqe::write(2, 2, 0, 1, false), 512);
        rig.send(&host.io, Sqe::write(3, 2, 1, 1, false), 512);
        rig.send(&host.io, Sqe::compare(4, 1, 0, 1), block);
        assert!(rig.states(&host.io).iter().any(|(state, _)| *state == RequestState::NeedBuffer));
        let former = Arc::downgrade(&rig.setup.remove(1));
        rig.publish();
        assert_eq!(former.strong_count(), 0, "nobody has it");
        let (next, record) = Probe::over(ram_disk(512), |geometry| geometry);
        (rig.setup.disks[0], rig.setup.namespaces[0]) = (Some(next), Some(0));
        rig.publish();
        let mut answers = Vec::new();
        let mut patience = Patience::for_turns(1000);
        while answers.len() < 4 && patience.is_left() {
            for cid in host.io.line.fetching() {
                rig.bring(&host.io, cid, &pattern(1, if matches!(cid, 2 | 3) { 512 } else { block }));
            }
            rig.turn();
            answers.extend(rig.answers(&host.io));
        }
        answers.sort_by_key(|answer| answer.cid);
        let statuses: Vec<_> = answers.iter().map(|answer| answer.status).collect();
        let gone = Status::INTERNAL_ERROR.dnr();
        assert_eq!(statuses, [gone, Status::SUCCESS, Status::SUCCESS, gone]);
        assert_eq!(record.take(), [], "nothing of the former disk's");
        let answer = rig.read(&host.io, Sqe::read(5, 1, 0, 1), 512);
        assert_ok(&answer);
        assert_eq!(answer.data, [0; 512]);
        rig.finish();
    }
}

#[test]
fn a_core_keeps_a_removed_disk_until_it_has_the_new_snapshot_and_no_command_there() {
    let (disk, control) = FaultDisk::new(pool_disk(512), 1);
    let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![pool_disk(512), disk]) });
    let host = rig.host();
    control.set_all(Fault::Drop, 1_000_000);
    rig.send(&host.io, Sqe::read(1, 2, 0, 1), 512);
    let slots = |rig: &Rig| [0, 1].map(|core: usize| rig.cores[core].disk_slots());
    let former = Arc::downgrade(&rig.setup.remove(2));
    rig.publish_to(0);
    assert_eq!((slots(&rig), former.strong_count() > 0), ([1, 2], true), "core 1 is slow");
    rig.publish_to(1);
    assert_eq!((slots(&rig), former.strong_count() > 0), ([1, 2], true), "core 1 has a command there");
    control.release_dropped();
    rig.turn();
    rig.turn();
    assert_ok(&rig.answer(&host.io).expect("an answer"));
    assert_eq!((slots(&rig), former.strong_count()), ([1, 1], 0), "no turn walks its slot");
    rig.finish();
}
