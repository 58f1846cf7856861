//! Reads of data that lies in place, and writes whose data is here with the command: answered as they come,
//! and everything that sends them the long way.

use std::sync::Arc;

use nvme_spec::register::CC;
use nvme_spec::{Sqe, Status};
use spindle_nvme_transport::{CloseReason, Connections, DataPointer};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Pages;
use spindle_target::qpair::request::RequestState;
use spindle_target_disk::fault::{Fault, FaultDisk, OpKind};
use spindle_target_disk::ram::{RamDisk, RamSpec};
use spindle_target_disk::{Disk, DiskError};
use spindle_tests::script::{CC_DISABLED, Probe, Queue, Rig, Setup, Want};

use crate::{assert_ok, assert_refused, pattern, pool_disk, ram_disk};

/// Send a command with its data in the capsule; true when the target took the data at once.
fn send(rig: &mut Rig, queue: &Queue, sqe: Sqe, data: &[u8]) -> bool {
    queue.line.set_in_capsule(data);
    let bytes = u32::try_from(data.len()).unwrap();
    rig.send_pointer(queue, sqe, Ok(DataPointer::InCapsule { bytes }));
    !queue.line.has_in_capsule()
}

#[test]
fn a_write_with_its_data_is_done_and_counted_without_a_place_among_the_requests() {
    for block in [512, 4096] {
        let mut rig = Rig::new(Setup::small(vec![ram_disk(block)]));
        let host = rig.host();
        let last =
            rig.cores[0].snapshot().subsystems[0].namespaces[0].as_ref().unwrap().geometry.block_count - 1;
        for (cid, lba) in [(1, 0), (2, 5), (3, last)] {
            let data = pattern(usize::from(cid), block as usize);
            assert!(send(&mut rig, &host.io, Sqe::write(cid, 1, lba, 1, cid == 2), &data));
            assert_eq!(rig.states(&host.io), [], "it took no place");
            assert_ok(&rig.answer(&host.io).expect("an answer"));
            assert_eq!(rig.read(&host.io, Sqe::read(9, 1, lba, 1), block as usize).data, data);
        }
        let totals = rig.cores[0].snapshot().subsystems[0].namespaces[0].as_ref().unwrap().counters.totals();
        assert_eq!((totals.writes, totals.units_written), (3, 3 * u64::from(block) / 512));
        rig.finish();
    }
}

#[test]
fn what_is_wrong_with_such_a_write_is_refused_as_on_the_long_way() {
    let mut rig = Rig::new(Setup::small(vec![ram_disk(512)]));
    let host = rig.host();
    let blocks = rig.cores[0].snapshot().subsystems[0].namespaces[0].as_ref().unwrap().geometry.block_count;
    let wrong = [
        (Sqe::write(1, 1, blocks, 1, false), 512, Status::LBA_OUT_OF_RANGE),
        (Sqe::write(1, 1, blocks - 1, 2, false), 1024, Status::LBA_OUT_OF_RANGE),
        (Sqe::write(1, 1, u64::MAX, 1, false), 512, Status::LBA_OUT_OF_RANGE),
        (Sqe::write(1, 1, 0, 2, false), 512, Status::DATA_SGL_LENGTH_INVALID),
        (Sqe::write(1, 1, 0, 1, false), 1024, Status::DATA_SGL_LENGTH_INVALID),
        (Sqe::write(1, 2, 0, 1, false), 512, Status::INVALID_NAMESPACE_OR_FORMAT),
        (Sqe::read(1, 1, 0, 1), 512, Status::SGL_DESCRIPTOR_TYPE_INVALID),
    ];
    for (sqe, bytes, status) in wrong {
        assert!(!send(&mut rig, &host.io, sqe, &vec![1; bytes]), "{sqe:?}");
        assert_refused(&rig.answer(&host.io).expect("an answer"), status);
    }
    assert_eq!(rig.read(&host.io, Sqe::read(2, 1, 0, 2), 1024).data, vec![0; 1024], "nothing was written");
    rig.finish();
}

#[test]
fn a_read_of_data_in_place_is_done_and_counted_without_a_place_among_the_requests() {
    let (disk, control) = FaultDisk::new(ram_disk(512), 1);
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    let namespace = rig.cores[0].snapshot().subsystems[0].namespaces[0].clone().expect("a namespace");
    let blocks = namespace.geometry.block_count;
    assert!(send(&mut rig, &host.io, Sqe::write(1, 1, blocks - 1, 1, false), &[7; 512]));
    assert_ok(&rig.answer(&host.io).expect("an answer"));
    rig.send(&host.io, Sqe::read(2, 1, blocks - 1, 1), 512);
    assert_eq!(rig.states(&host.io), [], "it took no place");
    let answer = rig.answer(&host.io).expect("an answer");
    assert_ok(&answer);
    assert_eq!((answer.cid, answer.data), (2, vec![7; 512]));
    assert_eq!(control.reads_in_place(), 1);
    let totals = namespace.counters.totals();
    assert_eq!((totals.reads, totals.units_read), (1, 1));
    // What does not pass the checks is not asked of the disk.
    let wrong = [
        (Sqe::read(3, 1, blocks, 1), 512, Status::LBA_OUT_OF_RANGE),
        (Sqe::read(3, 1, blocks - 1, 2), 1024, Status::LBA_OUT_OF_RANGE),
        (Sqe::read(3, 1, u64::MAX, 1), 512, Status::LBA_OUT_OF_RANGE),
        (Sqe::read(3, 1, 0, 2), 512, Status::DATA_SGL_LENGTH_INVALID),
        (Sqe::read(3, 2, 0, 1), 512, Status::INVALID_NAMESPACE_OR_FORMAT),
    ];
    for (sqe, bytes, status) in wrong {
        rig.send(&host.io, sqe, bytes);
        assert_refused(&rig.answer(&host.io).expect("an answer"), status);
    }
    assert_eq!((control.reads_in_place(), namespace.counters.totals().reads), (1, 1));
    rig.finish();
}

#[test]
fn a_disk_that_fails_such_a_command_or_takes_its_time_is_waited_for() {
    for (kind, error, status) in [
        (OpKind::Read, DiskError::MediaRead, Status::UNRECOVERED_READ_ERROR),
        (OpKind::Write, DiskError::MediaWrite, Status::WRITE_FAULT),
    ] {
        let (disk, control) = FaultDisk::new(ram_disk(512), 1);
        let mut rig = Rig::new(Setup::small(vec![disk]));
        let host = rig.host();
        // Data of 512 bytes, in the capsule or for the host.
        let give = |rig: &mut Rig, cid| {
            if kind == OpKind::Write {
                send(rig, &host.io, Sqe::write(cid, 1, 7, 1, false), &[1; 512]);
            } else {
                rig.send(&host.io, Sqe::read(cid, 1, 7, 1), 512);
            }
        };
        control.set(Fault::Error, kind, 1_000_000);
        control.set_error(kind, error);
        give(&mut rig, 1);
        assert_refused(&rig.finish_command(&host.io, 1, &[1; 512]), status);
        control.set(Fault::Error, kind, 0);
        control.set(Fault::Drop, kind, 1_000_000);
        give(&mut rig, 2);
        assert_eq!(rig.states(&host.io), [(RequestState::Executing, 1)]);
        assert!(rig.cores[0].has_submitted(host.io.id), "{kind:?}: the disk has it");
        let counted = [Fault::Error, Fault::Drop].map(|fault| control.injected(fault));
        assert_eq!((counted, control.reads_in_place()), ([1, 1], 0), "{kind:?}: each is counted once");
        control.release_dropped();
        rig.cores[0].poll();
        assert!(!rig.cores[0].has_submitted(host.io.id), "{kind:?}: the disk has ended it");
        rig.turn();
        assert!(rig.answer(&host.io).is_some_and(|answer| answer.cid == 2));
        control.set(Fault::Drop, kind, 0);
        give(&mut rig, 3);
        assert_eq!(rig.states(&host.io), [], "it took no place");
        assert!(!rig.cores[0].has_submitted(host.io.id), "{kind:?}: it has ended");
        assert_ok(&rig.answer(&host.io).expect("an answer"));
        assert_eq!(control.reads_in_place(), u64::from(kind == OpKind::Read));
        rig.finish();
    }
}

#[test]
fn a_disk_that_gives_no_memory_for_writes_fetches_as_ever() {
    let mut rig = Rig::new(Setup::small(vec![pool_disk(512)]));
    let host = rig.host();
    assert!(!send(&mut rig, &host.io, Sqe::write(1, 1, 7, 1, false), &[9; 512]));
    assert_eq!(rig.states(&host.io), [(RequestState::Fetching, 1)]);
    assert_ok(&rig.finish_command(&host.io, 1, &[9; 512]));
    assert_eq!(rig.read(&host.io, Sqe::read(2, 1, 7, 1), 512).data, [9; 512]);
    rig.finish();
}

#[test]
fn such_a_write_does_not_pass_what_waits_for_memory() {
    let zones = vec![(4096, 1)];
    let mut rig = Rig::new(Setup { zones, ..Setup::small(vec![pool_disk(512), ram_disk(512)]) });
    let host = rig.host();
    // The only buffer, and one that waits for it.
    rig.send(&host.io, Sqe::write(1, 1, 0, 1, false), 512);
    rig.send(&host.io, Sqe::write(2, 1, 1, 1, false), 512);
    assert_eq!(rig.states(&host.io), [(RequestState::NeedBuffer, 1), (RequestState::Fetching, 1)]);
    assert!(!send(&mut rig, &host.io, Sqe::write(3, 2, 7, 1, false), &[3; 512]), "it has its turn");
    assert_eq!(rig.states(&host.io), [(RequestState::NeedBuffer, 2), (RequestState::Fetching, 1)]);
    for cid in 1..=3 {
        assert_ok(&rig.finish_command(&host.io, cid, &[3; 512]));
    }
    assert_eq!(rig.read(&host.io, Sqe::read(4, 2, 7, 1), 512).data, [3; 512]);
    rig.finish();
}

#[test]
fn such_a_write_passes_waits_for_the_pool_and_not_for_its_disk() {
    let spec = RamSpec { bytes: 1 << 20, block_bytes: 512, pages: Pages::Base, has_seals: false };
    let ram: Arc<dyn Disk> = Arc::new(RamDisk::with_slack("ram", spec, 256 << 10).expect("a disk"));
    let setup = Setup { zones: vec![(4096, 1)], connections: 64, ..Setup::small(vec![pool_disk(512), ram]) };
    let mut rig = Rig::new(setup);
    let [first, second, third] = [1, 2, 3].map(|number| rig.host_number(number).io);
    rig.send(&first, Sqe::write(1, 1, 0, 1, false), 512);
    rig.send(&second, Sqe::write(1, 1, 1, 1, false), 512);
    assert_eq!(rig.states(&second), [(RequestState::NeedBuffer, 1)]);
    assert!(send(&mut rig, &third, Sqe::write(1, 2, 7, 1, false), &[3; 512]), "it needs no buffer");
    assert_ok(&rig.answer(&third).expect("an answer"));
    assert_ok(&rig.finish_command(&first, 1, &[3; 512]));
    assert_ok(&rig.finish_command(&second, 1, &[3; 512]));
    // All of the disk is written, and the rest of its memory waits for data.
    let large = |lba| Sqe::write(2, 2, lba, 256, false);
    for lba in (0..2048).step_by(256) {
        assert_ok(&rig.run(&third, large(lba), &[5; 128 << 10]));
    }
    let mut waiters = Vec::new();
    while waiters.last().is_none_or(|queue: &Queue| !queue.line.fetching().is_empty()) {
        assert!(waiters.len() < 24, "the memory is never short");
        let number = u16::try_from(waiters.len()).expect("few");
        let queue = rig.host_number(4 + number).io;
        rig.send(&queue, large(0), 128 << 10);
        waiters.push(queue);
    }
    rig.bring(&waiters[0], 2, &[6; 128 << 10]);
    assert!(!send(&mut rig, &third, Sqe::write(3, 2, 7, 1, false), &[3; 512]), "another host was first");
    rig.turn();
    assert_eq!(waiters.last().map(|queue| queue.line.fetching()), Some(vec![2]));
    rig.finish();
}

#[test]
fn what_is_answered_at_once_is_a_sign_of_life() {
    for is_write in [false, true] {
        let mut rig = Rig::new(Setup::small(vec![ram_disk(512)]));
        let (admin, cntlid) = rig.admin(0, 5000);
        let io = rig.io(0, Want::io(cntlid, 1));
        for _ in 0..30 {
            if is_write {
                assert!(send(&mut rig, &io, Sqe::write(1, 1, 0, 1, false), &[1; 512]));
                assert_ok(&rig.answer(&io).expect("an answer"));
            } else {
                assert_ok(&rig.read(&io, Sqe::read(1, 1, 0, 1), 512));
            }
            rig.pass(Nanos::from_secs(1));
        }
        assert_eq!(io.line.closed(), None);
        rig.pass(Nanos::from_secs(11));
        assert_eq!(admin.line.closed(), Some(CloseReason::KeepAliveExpired));
        rig.finish();
    }
}

#[test]
fn a_controller_that_is_disabled_does_nothing_at_once_either() {
    let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![ram_disk(512)]) });
    let (admin, cntlid) = rig.admin(0, 0);
    let io = rig.io(1, Want::io(cntlid, 1));
    // The other core has not yet heard of it.
    rig.send(&admin, Sqe::property_set(1, false, CC, CC_DISABLED), 0);
    assert!(!send(&mut rig, &io, Sqe::write(1, 1, 7, 1, false), &[9; 512]));
    rig.send(&io, Sqe::read(2, 1, 7, 1), 512);
    for answer in rig.answers(&io) {
        assert_refused(&answer, Status::COMMAND_SEQUENCE_ERROR);
    }
    rig.finish();
}

#[test]
fn a_write_to_a_disk_that_is_read_only_is_refused_at_once_too() {
    let (disk, asked) = Probe::over(ram_disk(512), |geometry| spindle_target_disk::Geometry {
        is_read_only: true,
        ..geometry
    });
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    assert!(!send(&mut rig, &host.io, Sqe::write(1, 1, 7, 1, false), &[9; 512]));
    assert_refused(&rig.answer(&host.io).expect("an answer"), Status::NAMESPACE_IS_WRITE_PROTECTED);
    assert_eq!(asked.take(), []);
    assert_ok(&rig.read(&host.io, Sqe::read(2, 1, 7, 1), 512));
    rig.finish();
}
