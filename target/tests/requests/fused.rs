//! Fused Compare and Write: the pair, and everything that is not one.

use nvme_spec::identify::Cns;
use nvme_spec::sqe::Fuse;
use nvme_spec::{Sqe, Status};
use spindle_nvme_transport::DataPointer;
use spindle_reactor::clock::Nanos;
use spindle_target::qpair::FUSED_TIMEOUT;
use spindle_target::qpair::request::RequestState;
use spindle_target_disk::fault::{Fault, FaultDisk, OpKind};
use spindle_target_disk::{BlockRange, DiskError, Geometry};
use spindle_tests::script::{Answer, Asked, Host, Probe, Queue, Rig, Setup};

use crate::{assert_ok, assert_refused, kinds, pattern, pool_disk, ram_disk};

const COMPARE: u16 = 0xc0;
const WRITE: u16 = 0xd0;

fn first(nsid: u32, lba: u64) -> Sqe {
    Sqe::compare(COMPARE, nsid, lba, 1).with_fuse(Fuse::FIRST)
}

fn second(nsid: u32, lba: u64) -> Sqe {
    Sqe::write(WRITE, nsid, lba, 1, false).with_fuse(Fuse::SECOND)
}

/// The completions of the two halves, whichever came first.
#[track_caller]
fn pair(rig: &mut Rig, io: &Queue) -> (Answer, Answer) {
    for _ in 0..1000 {
        rig.turn();
    }
    let mut answers = rig.answers(io);
    answers.sort_by_key(|answer| answer.cid);
    let [compare, write] = answers.try_into().expect("two completions");
    assert_eq!((compare.cid, write.cid), (COMPARE, WRITE));
    (compare, write)
}

fn content(rig: &mut Rig, io: &Queue, nsid: u32, lba: u64, bytes: usize) -> Vec<u8> {
    let answer = rig.read(io, Sqe::read(1, nsid, lba, 1), bytes);
    assert_ok(&answer);
    answer.data
}

#[test]
fn a_pair_writes_when_the_content_is_as_expected_and_otherwise_not() {
    for disk in kinds() {
        let block = disk.geometry().block_bytes as usize;
        let mut rig = Rig::new(Setup::small(vec![disk]));
        let host = rig.host();
        let io = &host.io;
        for is_second_brought_first in [false, true] {
            let (old, new) =
                (content(&mut rig, io, 1, 5, block), pattern(usize::from(is_second_brought_first), block));
            rig.send(io, first(1, 5), block);
            rig.send(io, second(1, 5), block);
            let halves = [(COMPARE, &old), (WRITE, &new)];
            let order = if is_second_brought_first { [1, 0] } else { [0, 1] };
            for at in order {
                let (cid, data) = halves[at];
                rig.bring(io, cid, data);
            }
            let (compare, write) = pair(&mut rig, io);
            assert_ok(&compare);
            assert_ok(&write);
            assert_eq!(content(&mut rig, io, 1, 5, block), new);
        }
        let now = content(&mut rig, io, 1, 5, block);
        rig.send(io, first(1, 5), block);
        rig.send(io, second(1, 5), block);
        rig.bring(io, COMPARE, &pattern(77, block));
        rig.bring(io, WRITE, &pattern(78, block));
        let (compare, write) = pair(&mut rig, io);
        assert_refused(&compare, Status::COMPARE_FAILURE);
        assert_eq!(write.status.code(), Status::ABORTED_FAILED_FUSED);
        assert_eq!(content(&mut rig, io, 1, 5, block), now);
        rig.finish();
    }
}

/// A rig, a host and a namespace of 512-byte blocks, and one of 4096.
fn two_namespaces() -> (Rig, Host) {
    let mut rig = Rig::new(Setup::small(vec![pool_disk(512), pool_disk(4096)]));
    let host = rig.host();
    // A device brings the data: a half that is given up ends when that is through.
    host.io.line.keep_fetches();
    (rig, host)
}

#[test]
fn a_half_that_is_given_up_does_not_wait_for_data_that_its_host_may_keep_back() {
    let mut rig = Rig::new(Setup::small(vec![pool_disk(512), pool_disk(4096)]));
    let host = rig.host();
    let io = &host.io;
    rig.send(io, first(1, 5), 512);
    rig.send(io, Sqe::flush(1, 1), 0);
    let mut answers: Vec<_> =
        rig.answers(io).iter().map(|answer| (answer.cid, answer.status.code())).collect();
    answers.sort_unstable();
    assert_eq!(answers, [(1, Status::SUCCESS), (COMPARE, Status::ABORTED_MISSING_FUSED)]);
    // A half with damaged data ends the other, of which none has come.
    rig.send(io, first(1, 5), 512);
    rig.send(io, second(1, 5), 512);
    rig.bring_result(io, COMPARE, &[0; 512], Err(Status::COMMAND_TRANSIENT_TRANSPORT_ERROR));
    let (compare, write) = pair(&mut rig, io);
    assert_eq!(compare.status.code(), Status::COMMAND_TRANSIENT_TRANSPORT_ERROR);
    assert_eq!(write.status.code(), Status::ABORTED_FAILED_FUSED);
    rig.finish();
}

#[test]
fn a_first_half_followed_by_anything_but_its_second_misses_it() {
    let followers: [(Sqe, usize); 8] = [
        (Sqe::read(WRITE, 1, 0, 1), 512),
        (Sqe::flush(WRITE, 1), 0),
        (Sqe::flush(WRITE, u32::MAX), 0),
        (Sqe::write(WRITE, 1, 5, 1, false), 512),
        (Sqe::compare(WRITE, 1, 5, 1).with_fuse(Fuse::FIRST), 512),
        (Sqe::read(WRITE, 1, 5, 1).with_fuse(Fuse::SECOND), 512),
        (Sqe::new(0x6e, WRITE, 1), 0),
        (Sqe::read(WRITE, 1, u64::MAX, 1), 512),
    ];
    // Before its data is here, and after.
    for is_brought in [false, true] {
        for (sqe, bytes) in followers {
            let (mut rig, host) = two_namespaces();
            let io = &host.io;
            rig.send(io, first(1, 5), 512);
            if is_brought {
                rig.bring(io, COMPARE, &[0; 512]);
            }
            rig.send(io, sqe, bytes);
            let mut answers = rig.answers(io);
            if !is_brought {
                // The host's data is on its way: the buffer stays with the transport until it is here.
                assert!(answers.iter().all(|answer| answer.cid != COMPARE), "answered with its fetch out");
                rig.bring(io, COMPARE, &[0; 512]);
                answers = rig.answers(io);
            }
            let compare = answers.iter().find(|answer| answer.cid == COMPARE);
            let status = compare.map(|answer| answer.status.code());
            let is_second = sqe.fuse() == Fuse::SECOND;
            let expected =
                if is_second { Status::ABORTED_FAILED_FUSED } else { Status::ABORTED_MISSING_FUSED };
            assert_eq!(status, Some(expected), "{sqe:?}");
            rig.finish();
        }
    }
}

#[test]
fn a_lone_fused_first_half_times_out_frees_its_memory_and_the_queue_goes_on() {
    // Once it kept its buffers for as long as its host was connected, and others waited as long.
    let zones = vec![(4096, 2)];
    let mut rig = Rig::new(Setup { zones, ..Setup::small(vec![pool_disk(512), pool_disk(512)]) });
    let (lone, other) = (rig.host(), rig.host());
    rig.send(&lone.io, first(1, 5), 512);
    rig.bring(&lone.io, COMPARE, &[0; 512]);
    rig.send(&other.io, Sqe::read(1, 1, 0, 1), 512);
    rig.turn();
    assert_eq!(rig.states(&other.io), [(RequestState::NeedBuffer, 1)], "all memory is the first half's");
    rig.pass(Nanos(FUSED_TIMEOUT.0 - Nanos::from_secs(1).0));
    assert_eq!(rig.states(&lone.io), [(RequestState::Fused, 1)]);
    rig.pass(Nanos::from_secs(2));
    assert_refused(&rig.answer(&lone.io).expect("an answer"), Status::ABORTED_MISSING_FUSED);
    assert_ok(&rig.answer(&other.io).expect("an answer"));
    // The next one has its own time.
    rig.send(&lone.io, first(1, 5), 512);
    rig.bring(&lone.io, COMPARE, &[0; 512]);
    rig.pass(Nanos::from_secs(2));
    rig.send(&lone.io, second(1, 5), 512);
    rig.bring(&lone.io, WRITE, &[1; 512]);
    let (compare, write) = pair(&mut rig, &lone.io);
    assert_ok(&compare);
    assert_ok(&write);
    rig.finish();
}

#[test]
fn the_data_of_a_half_that_was_given_up_may_come_before_its_reply_has_left() {
    // Once it panicked: the first half was answered while its data was still on its way.
    let (mut rig, host) = two_namespaces();
    let io = &host.io;
    rig.send(io, first(1, 5), 512);
    rig.send(io, Sqe::flush(1, 1), 0);
    rig.bring(io, COMPARE, &[0; 512]);
    let mut cids: Vec<u16> = rig.answers(io).iter().map(|answer| answer.cid).collect();
    cids.sort_unstable();
    assert_eq!(cids, [1, COMPARE]);
    rig.finish();
}

#[test]
fn a_second_half_without_its_first_is_refused() {
    let (mut rig, host) = two_namespaces();
    let io = &host.io;
    assert_refused(&rig.run(io, second(1, 5), &[0; 512]), Status::ABORTED_MISSING_FUSED);
    // Not adjacent: a command came in between.
    rig.send(io, first(1, 5), 512);
    rig.bring(io, COMPARE, &[0; 512]);
    rig.send(io, Sqe::flush(1, 1), 0);
    rig.send(io, second(1, 5), 512);
    let statuses: Vec<_> = rig.answers(io).iter().map(|answer| (answer.cid, answer.status.code())).collect();
    let missing = Status::ABORTED_MISSING_FUSED;
    assert_eq!(statuses, [(COMPARE, missing), (1, Status::SUCCESS), (WRITE, missing)]);
    // Nor is a pair adjacent that has a command with a wrong SGL in between.
    rig.send(io, first(1, 5), 512);
    rig.bring(io, COMPARE, &[0; 512]);
    rig.send_pointer(io, Sqe::read(1, 1, 0, 1), Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.dnr()));
    rig.send(io, second(1, 5), 512);
    let statuses: Vec<_> = rig.answers(io).iter().map(|answer| (answer.cid, answer.status.code())).collect();
    assert_eq!(statuses, [(COMPARE, missing), (1, Status::SGL_DESCRIPTOR_TYPE_INVALID), (WRITE, missing)]);
    rig.finish();
}

#[test]
fn halves_of_different_blocks_or_namespaces_are_no_pair() {
    // Once the second half wrote a block of one size into a disk of the other.
    let wrong = [second(1, 6), second(2, 5), Sqe::write(WRITE, 1, 5, 2, false).with_fuse(Fuse::SECOND)];
    for is_brought in [false, true] {
        for sqe in wrong {
            let (mut rig, host) = two_namespaces();
            let io = &host.io;
            rig.send(io, first(1, 5), 512);
            if is_brought {
                rig.bring(io, COMPARE, &[0; 512]);
            }
            let bytes = if sqe.nsid() == 2 { 4096 } else { 512 * sqe.blocks() as usize };
            rig.send(io, sqe, bytes);
            if !is_brought {
                rig.bring(io, COMPARE, &[0; 512]);
            }
            let (compare, write) = pair(&mut rig, io);
            assert_refused(&compare, Status::ABORTED_FAILED_FUSED);
            assert_refused(&write, Status::INVALID_FIELD);
            rig.finish();
        }
    }
}

#[test]
fn a_second_half_that_fails_its_checks_ends_the_first() {
    for (sqe, pointer, status) in [
        (second(1, u64::MAX), Ok(DataPointer::Host { bytes: 512 }), Status::LBA_OUT_OF_RANGE),
        (second(1, 5), Ok(DataPointer::Host { bytes: 513 }), Status::DATA_SGL_LENGTH_INVALID),
        (second(3, 5), Ok(DataPointer::Host { bytes: 512 }), Status::INVALID_NAMESPACE_OR_FORMAT),
        (second(1, 5), Err(Status::SGL_OFFSET_INVALID.dnr()), Status::SGL_OFFSET_INVALID),
    ] {
        let (mut rig, host) = two_namespaces();
        rig.send(&host.io, first(1, 5), 512);
        rig.bring(&host.io, COMPARE, &[0; 512]);
        rig.send_pointer(&host.io, sqe, pointer);
        let (compare, write) = pair(&mut rig, &host.io);
        assert_refused(&compare, Status::ABORTED_FAILED_FUSED);
        assert_refused(&write, status);
        rig.finish();
    }
}

#[test]
fn fuse_is_refused_where_it_means_nothing() {
    let (mut rig, host) = two_namespaces();
    let io = &host.io;
    let reserved = Fuse(3);
    for (sqe, bytes) in [
        (Sqe::read(1, 1, 0, 1).with_fuse(Fuse::FIRST), 512),
        (Sqe::write(1, 1, 0, 1, false).with_fuse(Fuse::FIRST), 512),
        (Sqe::compare(1, 1, 0, 1).with_fuse(Fuse::SECOND), 512),
        (Sqe::flush(1, 1).with_fuse(Fuse::FIRST), 0),
        (Sqe::flush(1, u32::MAX).with_fuse(Fuse::FIRST), 0),
        (Sqe::flush(1, u32::MAX).with_fuse(Fuse::SECOND), 0),
        (Sqe::verify(1, 1, 0, 1).with_fuse(Fuse::FIRST), 0),
        (Sqe::read(1, 1, 0, 1).with_fuse(reserved), 512),
        (Sqe::write(1, 1, 0, 1, false).with_fuse(reserved), 512),
        (Sqe::compare(1, 1, 0, 1).with_fuse(reserved), 512),
        (Sqe::flush(1, u32::MAX).with_fuse(reserved), 0),
        // A pair is of one block: ACWU is 0.
        (Sqe::compare(1, 1, 0, 2).with_fuse(Fuse::FIRST), 1024),
        (Sqe::write(1, 1, 0, 2, false).with_fuse(Fuse::SECOND), 1024),
    ] {
        assert_refused(&rig.read(io, sqe, bytes), Status::INVALID_FIELD);
    }
    let (disk, _) =
        Probe::over(pool_disk(512), |geometry| Geometry { can_compare_and_write: false, ..geometry });
    let mut rig = Rig::new(Setup::small(vec![disk, pool_disk(512)]));
    let host = rig.host();
    let id = rig.read(&host.admin, Sqe::identify(1, Cns::CONTROLLER, 0, 0), 4096);
    assert_eq!(id.data[522] & 1, 1, "FUSES: one namespace can");
    assert_refused(&rig.run(&host.io, first(1, 0), &[0; 512]), Status::INVALID_FIELD);
    assert_refused(&rig.run(&host.io, second(1, 0), &[1; 512]), Status::INVALID_FIELD);
    assert_eq!(content(&mut rig, &host.io, 1, 0, 512), [0; 512]);
    rig.send(&host.io, first(2, 0), 512);
    rig.send(&host.io, second(2, 0), 512);
    rig.bring(&host.io, COMPARE, &[0; 512]);
    rig.bring(&host.io, WRITE, &[1; 512]);
    let (compare, write) = pair(&mut rig, &host.io);
    assert_ok(&compare);
    assert_ok(&write);
    assert_eq!(content(&mut rig, &host.io, 2, 0, 512), [1; 512]);
    rig.finish();
}

#[test]
fn damaged_data_of_either_half_fails_both_and_writes_nothing() {
    for damaged in [COMPARE, WRITE] {
        for order in [[COMPARE, WRITE], [WRITE, COMPARE]] {
            let (mut rig, host) = two_namespaces();
            rig.send(&host.io, first(1, 5), 512);
            rig.send(&host.io, second(1, 5), 512);
            for cid in order {
                let result =
                    if cid == damaged { Err(Status::COMMAND_TRANSIENT_TRANSPORT_ERROR) } else { Ok(()) };
                let data = if cid == COMPARE { vec![0; 512] } else { pattern(1, 512) };
                rig.bring_result(&host.io, cid, &data, result);
            }
            let (compare, write) = pair(&mut rig, &host.io);
            let (wrong, other) = if damaged == COMPARE { (compare, write) } else { (write, compare) };
            assert_eq!(wrong.status, Status::COMMAND_TRANSIENT_TRANSPORT_ERROR, "the host may try again");
            assert_eq!(other.status.code(), Status::ABORTED_FAILED_FUSED);
            assert_eq!(content(&mut rig, &host.io, 1, 5, 512), [0; 512]);
            rig.finish();
        }
    }
}

#[test]
fn an_abort_of_either_half_fails_both_and_writes_nothing() {
    for victim in [COMPARE, WRITE] {
        for order in [[COMPARE, WRITE], [WRITE, COMPARE]] {
            // A device has the buffers in one order, and in the other nothing is waited for.
            let is_at_device = order[0] == COMPARE;
            let mut rig = Rig::new(Setup::small(vec![pool_disk(512), pool_disk(4096)]));
            let host = rig.host();
            if is_at_device {
                host.io.line.keep_fetches();
            }
            rig.send(&host.io, first(1, 5), 512);
            rig.send(&host.io, second(1, 5), 512);
            let answer = rig.run(&host.admin, Sqe::abort(1, 1, victim), &[]);
            assert_eq!((answer.status, answer.result), (Status::SUCCESS, 0), "aborted");
            for cid in order.into_iter().filter(|_| is_at_device) {
                rig.bring(&host.io, cid, &if cid == COMPARE { vec![0; 512] } else { pattern(1, 512) });
            }
            let (compare, write) = pair(&mut rig, &host.io);
            let (aborted, other) = if victim == COMPARE { (compare, write) } else { (write, compare) };
            assert_eq!(aborted.status.code(), Status::ABORTED_BY_REQUEST);
            assert_eq!(other.status.code(), Status::ABORTED_FAILED_FUSED);
            assert_eq!(content(&mut rig, &host.io, 1, 5, 512), [0; 512]);
            rig.finish();
        }
    }
}

#[test]
fn a_disk_that_fails_the_pair_fails_the_half_that_it_could_not_do() {
    for (error, failed, status) in [
        (DiskError::MediaRead, COMPARE, Status::UNRECOVERED_READ_ERROR.dnr()),
        (DiskError::MediaWrite, WRITE, Status::WRITE_FAULT.dnr()),
        (DiskError::NoSpace, WRITE, Status::CAPACITY_EXCEEDED.dnr()),
        (DiskError::Internal, COMPARE, Status::INTERNAL_ERROR),
        (DiskError::Gone, COMPARE, Status::INTERNAL_ERROR.dnr()),
        (DiskError::Device(Status::WRITE_FAULT), WRITE, Status::WRITE_FAULT),
        (DiskError::Device(Status::UNRECOVERED_READ_ERROR), COMPARE, Status::UNRECOVERED_READ_ERROR),
    ] {
        let (disk, control) = FaultDisk::new(pool_disk(512), 1);
        control.set(Fault::Error, OpKind::CompareAndWrite, 1_000_000);
        control.set_error(OpKind::CompareAndWrite, error);
        control.set_all(Fault::Reorder, 1_000_000);
        let mut rig = Rig::new(Setup::small(vec![disk]));
        let host = rig.host();
        rig.send(&host.io, first(1, 5), 512);
        rig.send(&host.io, second(1, 5), 512);
        rig.bring(&host.io, COMPARE, &[0; 512]);
        rig.bring(&host.io, WRITE, &[1; 512]);
        assert_eq!(rig.states(&host.io), [(RequestState::Executing, 2)]);
        let (compare, write) = pair(&mut rig, &host.io);
        let (wrong, other) = if failed == COMPARE { (compare, write) } else { (write, compare) };
        assert_eq!(wrong.status, status);
        assert_eq!(other.status.code(), Status::ABORTED_FAILED_FUSED);
        let is_device = matches!(error, DiskError::Device(_));
        let is_media = is_device || matches!(error, DiskError::MediaRead | DiskError::MediaWrite);
        let counters =
            rig.cores[0].snapshot().subsystems[0].namespaces[0].as_ref().unwrap().counters.totals();
        assert_eq!(counters.media_errors, u64::from(is_media));
        rig.finish();
    }
}

#[test]
fn a_pair_waits_for_the_memory_of_both_halves_and_then_is_one() {
    // One buffer is held by a write that has not got its data: the pair needs two.
    let mut rig = Rig::new(Setup { zones: vec![(4096, 2)], ..Setup::small(vec![pool_disk(512)]) });
    let host = rig.host();
    let io = &host.io;
    rig.send(io, Sqe::write(1, 1, 9, 1, false), 512);
    rig.send(io, first(1, 5), 512);
    rig.send(io, second(1, 5), 512);
    rig.turn();
    assert_eq!(rig.states(io), [(RequestState::NeedBuffer, 2), (RequestState::Fetching, 1)]);
    rig.bring(io, 1, &[3; 512]);
    assert_eq!(rig.answer(io).map(|answer| answer.cid), Some(1));
    rig.turn();
    assert_eq!(io.line.fetching(), [COMPARE, WRITE]);
    rig.bring(io, WRITE, &[4; 512]);
    rig.bring(io, COMPARE, &[0; 512]);
    let (compare, write) = pair(&mut rig, io);
    assert_ok(&compare);
    assert_ok(&write);
    rig.finish();
}

#[test]
fn a_pair_that_waits_for_memory_ends_with_its_disk() {
    // Once the second half was never answered.
    let mut rig =
        Rig::new(Setup { zones: vec![(4096, 2)], ..Setup::small(vec![pool_disk(512), pool_disk(512)]) });
    let host = rig.host();
    let io = &host.io;
    rig.send(io, Sqe::write(1, 1, 9, 1, false), 512);
    rig.send(io, first(2, 5), 512);
    rig.send(io, second(2, 5), 512);
    rig.setup.remove(2);
    rig.publish();
    let (compare, write) = pair(&mut rig, io);
    assert_eq!(compare.status, Status::INTERNAL_ERROR.dnr());
    assert_eq!(write.status.code(), Status::ABORTED_FAILED_FUSED);
    rig.finish();
}

#[test]
fn a_waiting_first_half_whose_second_does_not_come_is_answered_and_leaves_the_line() {
    let mut rig = Rig::new(Setup { zones: vec![(4096, 2)], ..Setup::small(vec![pool_disk(512)]) });
    let host = rig.host();
    let io = &host.io;
    rig.send(io, Sqe::write(1, 1, 9, 1, false), 512);
    rig.send(io, first(1, 5), 512);
    assert_eq!(rig.states(io), [(RequestState::NeedBuffer, 1), (RequestState::Fetching, 1)]);
    rig.send(io, Sqe::read(2, 1, 9, 1), 512);
    rig.turn();
    let answers: Vec<_> = rig.answers(io).iter().map(|answer| (answer.cid, answer.status.code())).collect();
    assert_eq!(answers, [(COMPARE, Status::ABORTED_MISSING_FUSED), (2, Status::SUCCESS)]);
    rig.finish();
}

#[test]
fn first_halves_that_were_given_up_leave_nothing_in_the_line() {
    // Once each stayed in it for as long as the command at its head waited.
    let mut rig = Rig::new(Setup { zones: vec![(4096, 1)], ..Setup::small(vec![pool_disk(512)]) });
    let host = rig.host();
    let io = &host.io;
    rig.send(io, Sqe::write(1, 1, 9, 1, false), 512);
    rig.send(io, Sqe::write(2, 1, 9, 1, false), 512);
    for _ in 0..100 {
        rig.send(io, first(1, 5), 512);
        rig.turn();
        rig.answers(io);
    }
    let waiting = rig.cores[0].qpair(io.id).expect("it is there").waiting();
    assert_eq!(waiting, 2, "the write and the last first half");
    rig.finish();
}

#[test]
fn a_pair_is_one_step_of_the_disk() {
    for (inner, block) in [(pool_disk(512), 512), (ram_disk(4096), 4096)] {
        let (disk, record) = Probe::over(inner, |geometry| geometry);
        let mut rig = Rig::new(Setup::small(vec![disk]));
        let host = rig.host();
        rig.send(&host.io, first(1, 5), block);
        rig.send(&host.io, second(1, 5), block);
        rig.bring(&host.io, COMPARE, &vec![0; block]);
        rig.bring(&host.io, WRITE, &vec![1; block]);
        pair(&mut rig, &host.io);
        assert_eq!(record.take(), [Asked::CompareAndWrite(BlockRange { lba: 5, blocks: 1 })]);
        rig.finish();
    }
}
