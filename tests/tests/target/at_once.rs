//! Writes whose data is here with the command: answered as they come, and everything that sends them the long
//! way.

use nvme_spec::{Sqe, Status};
use spindle_disk::DiskError;
use spindle_disk::fault::{Fault, FaultDisk, OpKind};
use spindle_target::qpair::request::State;
use spindle_target::transport::DataPointer;
use spindle_tests::script::{Queue, Rig, Setup};

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
fn a_disk_that_fails_such_a_write_or_takes_its_time_is_waited_for() {
    let (disk, control) = FaultDisk::new(ram_disk(512), 1);
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    control.set(Fault::Error, OpKind::Write, 1_000_000);
    control.set_error(OpKind::Write, DiskError::MediaWrite);
    send(&mut rig, &host.io, Sqe::write(1, 1, 7, 1, false), &[1; 512]);
    assert_refused(&rig.finish_command(&host.io, 1, &[1; 512]), Status::WRITE_FAULT);
    control.set(Fault::Error, OpKind::Write, 0);
    control.set(Fault::Drop, OpKind::Write, 1_000_000);
    send(&mut rig, &host.io, Sqe::write(2, 1, 7, 1, false), &[2; 512]);
    assert_eq!(rig.states(&host.io), [(State::Executing, 1)]);
    control.release_dropped();
    rig.turn();
    assert!(rig.answer(&host.io).is_some_and(|answer| answer.cid == 2));
    control.set(Fault::Drop, OpKind::Write, 0);
    assert!(send(&mut rig, &host.io, Sqe::write(3, 1, 7, 1, false), &[3; 512]));
    assert_ok(&rig.answer(&host.io).expect("an answer"));
    rig.finish();
}

#[test]
fn a_disk_that_gives_no_memory_for_writes_fetches_as_ever() {
    let mut rig = Rig::new(Setup::small(vec![pool_disk(512)]));
    let host = rig.host();
    assert!(!send(&mut rig, &host.io, Sqe::write(1, 1, 7, 1, false), &[9; 512]));
    assert_eq!(rig.states(&host.io), [(State::Fetching, 1)]);
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
    assert_eq!(rig.states(&host.io), [(State::NeedBuffer, 1), (State::Fetching, 1)]);
    assert!(!send(&mut rig, &host.io, Sqe::write(3, 2, 7, 1, false), &[3; 512]), "it has its turn");
    assert_eq!(rig.states(&host.io), [(State::NeedBuffer, 2), (State::Fetching, 1)]);
    for cid in 1..=3 {
        assert_ok(&rig.finish_command(&host.io, cid, &[3; 512]));
    }
    assert_eq!(rig.read(&host.io, Sqe::read(4, 2, 7, 1), 512).data, [3; 512]);
    rig.finish();
}
