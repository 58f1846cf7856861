//! Abort: in each state of its victim, on one core and across two.

use std::sync::Arc;

use nvme_spec::feature::FeatureId;
use nvme_spec::sqe::Fuse;
use nvme_spec::{Sqe, Status};
use spindle_nvme_transport::CloseReason;
use spindle_reactor::clock::Nanos;
use spindle_target::qpair::request::RequestState;
use spindle_target_disk::fault::{Fault, FaultControl, FaultDisk};
use spindle_tests::script::{CC_ENABLED, Host, Probe, Queue, Record, Rig, Setup, Want};

use crate::{assert_ok, pool_disk};

struct Fixture {
    rig: Rig,
    host: Host,
    control: Arc<FaultControl>,
    record: Record,
}

/// A host with its admin queue on the first core and its I/O queue on the last; two buffers.
fn fixture(cores: usize) -> Fixture {
    let (disk, record) = Probe::over(pool_disk(512), |geometry| geometry);
    let (disk, control) = FaultDisk::new(disk, 1);
    let setup = Setup { cores, zones: vec![(4096, 2)], ..Setup::small(vec![disk]) };
    let mut rig = Rig::new(setup);
    let host = rig.host();
    Fixture { rig, host, control, record }
}

/// Abort a command of queue `qid`; whether the target says that it was aborted.
fn abort(rig: &mut Rig, admin: &Queue, qid: u16, cid: u16) -> bool {
    let answer = rig.run(admin, Sqe::abort(0x500, qid, cid), &[]);
    assert_ok(&answer);
    assert!(answer.result <= 1, "bit 0 only");
    answer.result == 0
}

fn write(cid: u16) -> Sqe {
    Sqe::write(cid, 1, u64::from(cid), 1, false)
}

fn on_one_and_two_cores(test: impl Fn(&mut Fixture)) {
    for cores in [1, 2] {
        let mut fixture = fixture(cores);
        test(&mut fixture);
        fixture.control.release_dropped();
        fixture.rig.finish();
    }
}

#[test]
fn a_command_that_waits_for_memory_is_aborted_at_once() {
    on_one_and_two_cores(|Fixture { rig, host, record, .. }| {
        for cid in 1..=5 {
            rig.send(&host.io, write(cid), 512);
        }
        assert!(abort(rig, &host.admin, 1, 4));
        let answer = rig.answer(&host.io).expect("an answer");
        assert_eq!((answer.cid, answer.status), (4, Status::ABORTED_BY_REQUEST));
        // Those around it go on, in order.
        for cid in [1, 2, 3, 5] {
            assert_ok(&rig.finish_command(&host.io, cid, &[1; 512]));
        }
        assert_eq!(record.take().len(), 4, "it never reached the disk");
    });
}

#[test]
fn the_last_waiting_command_may_be_aborted_and_the_line_goes_on() {
    on_one_and_two_cores(|Fixture { rig, host, .. }| {
        for cid in 1..=3 {
            rig.send(&host.io, write(cid), 512);
        }
        assert!(abort(rig, &host.admin, 1, 3));
        assert_eq!(rig.answer(&host.io).map(|answer| answer.cid), Some(3));
        rig.send(&host.io, write(4), 512);
        rig.turn();
        for cid in [1, 2, 4] {
            assert_ok(&rig.finish_command(&host.io, cid, &[1; 512]));
        }
    });
}

#[test]
fn a_command_whose_data_is_to_come_from_the_host_ends_at_once_without_effect() {
    // It was answered when its data had come, up to 30 s after an Abort that said "aborted".
    on_one_and_two_cores(|Fixture { rig, host, record, .. }| {
        let free = rig.cores[host.io.core].pools().0.free_bytes();
        rig.send(&host.io, write(1), 512);
        assert!(abort(rig, &host.admin, 1, 1));
        let answer = rig.answer(&host.io).expect("an answer at once");
        assert_eq!((answer.cid, answer.status), (1, Status::ABORTED_BY_REQUEST));
        assert!(!abort(rig, &host.admin, 1, 1), "it is over");
        assert_eq!((record.take(), host.io.line.fetching()), (vec![], vec![]));
        assert_eq!(rig.cores[host.io.core].pools().0.free_bytes(), free, "its buffer is back");
        // Nothing is waited for any more, and the identifier serves again.
        rig.pass(Nanos::from_secs(60));
        assert_ok(&rig.run(&host.io, write(1), &[1; 512]));
    });
}

#[test]
fn a_command_whose_data_a_device_brings_ends_without_effect_when_it_is_here() {
    on_one_and_two_cores(|Fixture { rig, host, record, .. }| {
        host.io.line.keep_fetches();
        rig.send(&host.io, write(1), 512);
        assert!(abort(rig, &host.admin, 1, 1));
        assert!(abort(rig, &host.admin, 1, 1), "again, and it is still so");
        assert_eq!(rig.answer(&host.io), None, "the transport still has its buffer");
        rig.bring(&host.io, 1, &[1; 512]);
        let answer = rig.answer(&host.io).expect("an answer");
        assert_eq!((answer.cid, answer.status), (1, Status::ABORTED_BY_REQUEST));
        assert_eq!(record.take(), []);
    });
}

#[test]
fn aborts_do_not_make_a_host_that_keeps_its_data_back_live_longer() {
    on_one_and_two_cores(|Fixture { rig, host, .. }| {
        rig.send(&host.io, write(1), 512);
        for cid in 2..5 {
            rig.send(&host.io, write(cid), 512);
            assert!(abort(rig, &host.admin, 1, cid));
            rig.pass(Nanos::from_secs(9));
        }
        rig.pass(Nanos::from_secs(5));
        assert_eq!(host.io.line.closed(), Some(CloseReason::HostError));
    });
}

#[test]
fn a_command_that_the_disk_has_is_not_aborted_and_ends_as_it_would() {
    on_one_and_two_cores(|Fixture { rig, host, control, .. }| {
        control.set_all(Fault::Drop, 1_000_000);
        rig.send(&host.io, Sqe::read(1, 1, 0, 1), 512);
        assert_eq!(rig.states(&host.io), [(RequestState::Executing, 1)]);
        assert!(!abort(rig, &host.admin, 1, 1));
        assert_eq!(rig.answer(&host.io), None);
        control.release_dropped();
        assert_ok(&rig.finish_command(&host.io, 1, &[]));
    });
}

#[test]
fn a_long_command_between_two_steps_is_not_aborted() {
    on_one_and_two_cores(|Fixture { rig, host, .. }| {
        rig.send(&host.io, Sqe::verify(1, 1, 0, 2048), 0);
        assert_eq!(rig.states(&host.io), [(RequestState::NeedStepBuffer, 1)]);
        assert!(!abort(rig, &host.admin, 1, 1));
        assert_ok(&rig.finish_command(&host.io, 1, &[]));
    });
}

#[test]
fn a_first_half_that_has_its_data_is_not_aborted() {
    on_one_and_two_cores(|Fixture { rig, host, .. }| {
        rig.send(&host.io, Sqe::compare(1, 1, 0, 1).with_fuse(Fuse::FIRST), 512);
        rig.bring(&host.io, 1, &[0; 512]);
        assert_eq!(rig.states(&host.io), [(RequestState::Fused, 1)]);
        assert!(!abort(rig, &host.admin, 1, 1));
        rig.send(&host.io, Sqe::write(2, 1, 0, 1, false).with_fuse(Fuse::SECOND), 512);
        rig.bring(&host.io, 2, &[1; 512]);
        let mut answers = rig.answers(&host.io);
        answers.iter().for_each(assert_ok);
        answers.sort_by_key(|answer| answer.cid);
        assert_eq!(answers.iter().map(|answer| answer.cid).collect::<Vec<_>>(), [1, 2]);
    });
}

#[test]
fn what_is_answered_or_was_never_there_is_not_aborted() {
    on_one_and_two_cores(|Fixture { rig, host, .. }| {
        rig.send(&host.io, Sqe::read(1, 1, 0, 1), 512);
        assert_eq!(rig.states(&host.io), [(RequestState::Replying, 1)]);
        assert!(!abort(rig, &host.admin, 1, 1));
        assert!(!abort(rig, &host.admin, 1, 99), "no such command");
        assert!(!abort(rig, &host.admin, 2, 1), "no such queue");
        assert!(!abort(rig, &host.admin, 0xffff, 1));
        assert!(!abort(rig, &host.admin, 0, 99));
        assert!(!abort(rig, &host.admin, 0, 0x500), "not the Abort itself");
    });
}

#[test]
fn an_abort_does_not_reach_another_hosts_queue_of_the_same_number() {
    on_one_and_two_cores(|Fixture { rig, host, .. }| {
        let core = rig.setup.cores - 1;
        let (other, cntlid) = rig.admin(core, 0);
        let io = rig.io(core, Want::io(cntlid, 1));
        rig.send(&io, write(1), 512);
        assert!(!abort(rig, &host.admin, 1, 1));
        assert_ok(&rig.finish_command(&io, 1, &[0; 512]));
        drop(other);
    });
}

#[test]
fn a_held_event_request_is_aborted_and_its_place_is_free_again() {
    on_one_and_two_cores(|Fixture { rig, host, .. }| {
        for cid in 1..=4 {
            rig.send(&host.admin, Sqe::async_event_request(cid), 0);
        }
        for cid in [2, 4] {
            rig.send(&host.admin, Sqe::abort(0x500, 0, cid), 0);
            let answers = rig.answers(&host.admin);
            let seen: Vec<_> =
                answers.iter().map(|answer| (answer.cid, answer.status, answer.result)).collect();
            assert_eq!(seen, [(cid, Status::ABORTED_BY_REQUEST, 0), (0x500, Status::SUCCESS, 0)]);
        }
        rig.send(&host.admin, Sqe::async_event_request(5), 0);
        rig.send(&host.admin, Sqe::async_event_request(6), 0);
        assert_eq!(rig.answers(&host.admin), []);
        assert_eq!(rig.states(&host.admin), [(RequestState::Parked, 4)]);
    });
}

#[test]
fn admin_commands_are_aborted_while_they_wait_for_memory_or_data() {
    on_one_and_two_cores(|Fixture { rig, host, .. }| {
        let set = |cid| Sqe::set_features(cid, FeatureId::HOST_BEHAVIOR, 0, 0);
        rig.send(&host.admin, set(1), 512);
        rig.send(&host.admin, set(2), 512);
        rig.send(&host.admin, set(3), 512);
        assert_eq!(rig.states(&host.admin), [(RequestState::NeedBuffer, 1), (RequestState::Fetching, 2)]);
        rig.send(&host.admin, Sqe::abort(0x500, 0, 3), 0);
        rig.send(&host.admin, Sqe::abort(0x501, 0, 1), 0);
        let seen: Vec<_> =
            rig.answers(&host.admin).iter().map(|answer| (answer.cid, answer.status)).collect();
        let ok = Status::SUCCESS;
        let aborted = Status::ABORTED_BY_REQUEST;
        assert_eq!(seen, [(3, aborted), (0x500, ok), (1, aborted), (0x501, ok)]);
        rig.bring(&host.admin, 2, &[0; 512]);
        assert_ok(&rig.answer(&host.admin).expect("an answer"));
    });
}

#[test]
fn the_fifth_abort_at_a_time_is_one_too_many() {
    let Fixture { mut rig, host, .. } = fixture(2);
    rig.is_mail_held = true;
    for cid in 1..=5 {
        rig.send(&host.admin, Sqe::abort(cid, 1, 99), 0);
        rig.turn();
    }
    let answer = rig.answer(&host.admin).expect("an answer");
    assert_eq!((answer.cid, answer.status.code()), (5, Status::ABORT_LIMIT_EXCEEDED));
    assert_eq!(rig.states(&host.admin), [(RequestState::Aborting, 4)]);
    rig.is_mail_held = false;
    rig.turn();
    let answers = rig.answers(&host.admin);
    assert_eq!(answers.len(), 4);
    assert!(answers.iter().all(|answer| answer.result == 1));
    assert!(!abort(&mut rig, &host.admin, 1, 99), "and there is room again");
    rig.finish();
}

#[test]
fn an_abort_is_answered_although_the_queue_it_is_for_ends_meanwhile() {
    for is_answer_under_way in [false, true] {
        let Fixture { mut rig, host, .. } = fixture(2);
        rig.send(&host.io, write(1), 512);
        rig.is_mail_held = true;
        rig.send(&host.admin, Sqe::abort(2, 1, 1), 0);
        rig.turn();
        if is_answer_under_way {
            // Core 1 has carried it out, core 0 has not heard of it.
            let message = rig.mail[1].pop_front().expect("the question");
            rig.cores[1].on_message(message);
        }
        rig.hang_up(&host.io);
        rig.is_mail_held = false;
        let answer = rig.finish_command(&host.admin, 2, &[]);
        assert_eq!((answer.status, answer.result), (Status::SUCCESS, u64::from(!is_answer_under_way)));
        rig.finish();
    }
}

#[test]
fn an_answer_for_an_abort_whose_queue_has_ended_goes_to_nobody() {
    let Fixture { mut rig, host, .. } = fixture(2);
    rig.is_mail_held = true;
    rig.send(&host.admin, Sqe::abort(2, 1, 99), 0);
    rig.turn();
    let question = rig.mail[1].pop_front().expect("the question");
    rig.cores[1].on_message(question);
    rig.turn();
    rig.hang_up(&host.admin);
    // A new admin queue is in the same place, with an Abort of its own in the same place. It is of another
    // host: the same one would wait until its I/O queue is closed.
    let admin = rig.accept(0);
    let answer = rig.try_connect(&admin, Want::admin(), "nqn.2026-01.io.spindle:other");
    assert_eq!(admin.id.index(), host.admin.id.index());
    assert_ne!(answer.result & 0xffff, u64::from(host.cntlid));
    rig.set_cc(&admin, CC_ENABLED);
    rig.send(&admin, Sqe::abort(3, 1, 99), 0);
    let before = rig.states(&admin);
    assert_eq!(before, [(RequestState::Aborting, 1)]);
    let old = rig.mail[2].pop_front().expect("the answer");
    rig.cores[0].on_message(old);
    assert_eq!(rig.states(&admin), before);
    rig.is_mail_held = false;
    assert_eq!(rig.finish_command(&admin, 3, &[]).result, 1);
    rig.finish();
}
