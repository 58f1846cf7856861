//! Disks that fail, at once or later: the status that the host gets, what is counted, what is noted.

use nvme_spec::{Sqe, Status};
use spindle_target::notice::Notice;
use spindle_target_disk::DiskError;
use spindle_target_disk::fault::{Fault, FaultDisk, OpKind};
use spindle_tests::script::{Rig, Setup};

use crate::{able_disk, kinds, pool_disk};

/// Every error of a disk, and what it means: a media error, a status, whether repeating may help.
const MEANINGS: [(DiskError, Status, bool); 11] = [
    (DiskError::MediaRead, Status::UNRECOVERED_READ_ERROR, false),
    (DiskError::MediaWrite, Status::WRITE_FAULT, false),
    (DiskError::NoSpace, Status::CAPACITY_EXCEEDED, false),
    (DiskError::WriteProtected, Status::NAMESPACE_IS_WRITE_PROTECTED, false),
    (DiskError::NotSupported, Status::INVALID_FIELD, false),
    (DiskError::CompareDiffers, Status::COMPARE_FAILURE, false),
    (DiskError::Internal, Status::INTERNAL_ERROR, true),
    (DiskError::Gone, Status::INTERNAL_ERROR, false),
    // A drive says for itself whether repeating may help.
    (DiskError::Device(Status::UNRECOVERED_READ_ERROR), Status::UNRECOVERED_READ_ERROR, true),
    (DiskError::Device(Status::GUARD_CHECK_ERROR.dnr()), Status::GUARD_CHECK_ERROR, false),
    (DiskError::Device(Status::WRITE_FAULT), Status::WRITE_FAULT, true),
];

/// A command that comes down to this kind of op, and its data.
fn command(kind: OpKind) -> Vec<(Sqe, Vec<u8>)> {
    match kind {
        OpKind::Read => vec![
            (Sqe::read(1, 1, 5, 1), vec![0; 512]),
            (Sqe::compare(1, 1, 5, 1), vec![0; 512]),
            (Sqe::verify(1, 1, 5, 1), vec![]),
        ],
        OpKind::Write => vec![(Sqe::write(1, 1, 5, 1, false), vec![7; 512])],
        OpKind::Flush => vec![(Sqe::flush(1, 1), vec![]), (Sqe::flush(1, u32::MAX), vec![])],
        OpKind::WriteZeroes => vec![(Sqe::write_zeroes(1, 1, 5, 1, false), vec![])],
        OpKind::Deallocate => {
            let mut range = vec![0; 16];
            range[4] = 1;
            vec![(Sqe::dsm(1, 1, 1), range)]
        }
        OpKind::CompareAndWrite => vec![],
        OpKind::Compare => vec![(Sqe::compare(1, 1, 5, 1), vec![0; 512])],
        OpKind::Verify => vec![(Sqe::verify(1, 1, 5, 1), vec![])],
        // Of block 0.
        OpKind::Copy => vec![(Sqe::copy(1, 1, 5, 1), vec![0; 32])],
    }
}

#[test]
fn every_failure_of_a_disk_has_its_status_whether_it_comes_at_once_or_later() {
    for is_later in [false, true] {
        for kind in OpKind::ALL {
            for (error, status, may_pass) in MEANINGS {
                let is_own = matches!(kind, OpKind::Compare | OpKind::Verify | OpKind::Copy);
                let disk = if is_own { able_disk(512) } else { pool_disk(512) };
                let (disk, control) = FaultDisk::new(disk, 1);
                control.set(Fault::Error, kind, 1_000_000);
                control.set_error(kind, error);
                control.set(Fault::Delay, kind, if is_later { 1_000_000 } else { 0 });
                let mut rig = Rig::new(Setup::small(vec![disk]));
                let host = rig.host();
                for (sqe, data) in command(kind) {
                    let answer = rig.run(&host.io, sqe, &data);
                    let is_hint = kind == OpKind::Deallocate && error == DiskError::NotSupported;
                    // A disk that has said that it can: the next time it is asked in another way.
                    let is_forgotten = is_own && error == DiskError::NotSupported;
                    let expected = match (is_hint, is_forgotten, may_pass) {
                        (true, _, _) => Status::SUCCESS,
                        (false, true, _) => Status::INTERNAL_ERROR,
                        (false, false, true) => status,
                        (false, false, false) => status.dnr(),
                    };
                    assert_eq!(answer.status, expected, "{kind:?} {error:?}");
                    assert!(answer.data.is_empty(), "no data with a failure");
                }
                rig.finish();
            }
        }
    }
}

#[test]
fn media_errors_are_counted_and_each_error_but_compare_failure_is_noted_with_lba() {
    for (error, status, _) in MEANINGS {
        let (disk, control) = FaultDisk::new(pool_disk(512), 1);
        control.set(Fault::Error, OpKind::Read, 1_000_000);
        control.set_error(OpKind::Read, error);
        let mut rig = Rig::new(Setup::small(vec![disk]));
        let host = rig.host();
        rig.read(&host.io, Sqe::read(1, 1, 77, 1), 512);
        rig.turn();
        let is_device = matches!(error, DiskError::Device(_));
        let is_media = is_device || matches!(error, DiskError::MediaRead | DiskError::MediaWrite);
        let totals = rig.cores[0].snapshot().subsystems[0].namespaces[0].as_ref().unwrap().counters.totals();
        assert_eq!((totals.media_errors, totals.reads, totals.units_read), (u64::from(is_media), 0, 0));
        let note = rig.notices.iter().find_map(|notice| match notice {
            Notice::DiskError { nsid, lba, status, .. } => Some((*nsid, *lba, status.code())),
            Notice::Connected { .. }
            | Notice::Disconnected { .. }
            | Notice::Refused { .. }
            | Notice::HostError { .. }
            | Notice::Stalled { .. }
            | Notice::ConnectionRefused { .. }
            | Notice::Violation { .. }
            | Notice::KeepAliveExpired { .. }
            | Notice::Orphan { .. }
            | Notice::OtherHostId { .. }
            | Notice::FormerEnded { .. }
            | Notice::DiskOpen { .. } => None,
        });
        let is_difference = error == DiskError::CompareDiffers;
        assert_eq!(note, (!is_difference).then_some((1, 77, status)));
        rig.finish();
    }
}

#[test]
fn what_succeeded_is_counted_in_units_of_512_bytes() {
    for disk in kinds() {
        let block = disk.geometry().block_bytes;
        let mut rig = Rig::new(Setup::small(vec![disk]));
        let host = rig.host();
        let bytes = vec![1; 3 * block as usize];
        rig.run(&host.io, Sqe::write(1, 1, 0, 3, false), &bytes);
        rig.read(&host.io, Sqe::read(1, 1, 0, 2), 2 * block as usize);
        rig.run(&host.io, Sqe::compare(1, 1, 0, 3), &bytes);
        rig.run(&host.io, Sqe::verify(1, 1, 0, 5), &[]);
        rig.run(&host.io, Sqe::write_zeroes(1, 1, 0, 9, false), &[]);
        let totals = rig.cores[0].snapshot().subsystems[0].namespaces[0].as_ref().unwrap().counters.totals();
        let units = u64::from(block / 512);
        assert_eq!((totals.writes, totals.units_written), (1, 3 * units));
        assert_eq!((totals.reads, totals.units_read), (3, 10 * units));
        rig.finish();
    }
}

#[test]
fn a_disk_that_goes_away_fails_what_comes_and_what_it_had() {
    let (disk, control) = FaultDisk::new(pool_disk(512), 1);
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    control.set_all(Fault::Drop, 1_000_000);
    rig.send(&host.io, Sqe::read(1, 1, 0, 1), 512);
    control.set_gone(true);
    rig.send(&host.io, Sqe::read(2, 1, 0, 1), 512);
    control.release_dropped();
    rig.turn();
    rig.turn();
    let mut answers = rig.answers(&host.io);
    answers.sort_by_key(|answer| answer.cid);
    let statuses: Vec<_> = answers.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses, [Status::SUCCESS, Status::INTERNAL_ERROR.dnr()]);
    rig.finish();
}
