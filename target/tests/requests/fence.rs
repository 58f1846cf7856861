//! End Former Associations: a host that is back ends what the target still holds for alive of it, and writes
//! when nothing of that can land any more.

use std::sync::Arc;

use nvme_spec::fabrics::ConnectData;
use nvme_spec::register::ShutdownNotification;
use nvme_spec::vendor::FormerAssociations;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sqe, Status};
use spindle_nvme_transport::CloseReason;
use spindle_reactor::clock::Nanos;
use spindle_target::env::Message;
use spindle_target::notice::Notice;
use spindle_target::orphaned_commands::ORPHAN_MAX;
use spindle_target::qpair::request::RequestState;
use spindle_target_disk::fault::{Fault, FaultControl, FaultDisk, OpKind};
use spindle_tests::direct::name;
use spindle_tests::script::{
    Answer, CC_DISABLED, CC_ENABLED, HOST, Host, Queue, Rig, SUBSYSTEM, Setup, Want, connect_sqe,
};

use crate::{assert_ok, assert_refused, pool_disk};

const TOKEN: u64 = 0x1234_5678_9abc_def0;
const OTHER_TOKEN: u64 = TOKEN ^ 1 << 63;
const OTHER_HOST: &str = "nqn.2026-01.io.spindle:other";
/// HOSTID of the rig's hosts.
const HOST_ID: [u8; 16] = [7; 16];
/// CC with SHN normal.
const CC_SHUTDOWN: u64 = CC_ENABLED | (ShutdownNotification::NORMAL.0 as u64) << 14;
/// The first look of the timer comes within it.
const A_MOMENT: Nanos = Nanos::from_ms(200);
/// CID of the command in question.
const CID: u16 = 0x77;

fn over(ended: u16) -> u64 {
    u64::from(FormerAssociations::new().with_ended(ended).into_bits())
}

fn may_land(ended: u16) -> u64 {
    over(ended) | 1 << 31
}

/// An admin queue of this host with an enabled controller.
fn admin_of(rig: &mut Rig, core: usize, host: &str, id: [u8; 16]) -> (Queue, u16) {
    let queue = rig.accept(core);
    let data = ConnectData::new(id, 0xffff, &name(SUBSYSTEM), &name(host));
    let answer = rig.run(&queue, connect_sqe(Want::admin()), data.as_bytes());
    assert_ok(&answer);
    rig.set_cc(&queue, CC_ENABLED);
    (queue, u16::try_from(answer.result & 0xffff).expect("16 bits"))
}

fn begin(rig: &mut Rig, admin: &Queue, token: u64) {
    rig.send(admin, Sqe::end_former_associations(CID, token), 0);
}

/// The answer, within a moment.
fn answer(rig: &mut Rig, admin: &Queue) -> Option<Answer> {
    rig.pass(A_MOMENT);
    let answer = rig.answer(admin)?;
    assert_eq!(answer.cid, CID);
    Some(answer)
}

#[track_caller]
fn ends(rig: &mut Rig, admin: &Queue, token: u64, result: u64) {
    begin(rig, admin, token);
    let answer = answer(rig, admin).expect("nothing is at a disk");
    assert_ok(&answer);
    assert_eq!(answer.result, result);
}

/// A host that has noted the token, and whose write of ones to block 0 is at the disk, which takes its time.
struct Fixture {
    rig: Rig,
    host: Host,
    control: Arc<FaultControl>,
}

fn fixture(cores: usize) -> Fixture {
    let (disk, control) = FaultDisk::new(pool_disk(512), 1);
    let mut rig = Rig::new(Setup { cores, ..Setup::small(vec![disk]) });
    let host = rig.host();
    ends(&mut rig, &host.admin, TOKEN, over(0));
    control.set(Fault::Drop, OpKind::Write, 1_000_000);
    rig.send(&host.io, Sqe::write(1, 1, 0, 1, false), 512);
    rig.bring(&host.io, 1, &[1; 512]);
    assert_eq!(rig.states(&host.io), [(RequestState::Executing, 1)]);
    // Writes from now on take no time: the disk is slow for this one.
    control.set(Fault::Drop, OpKind::Write, 0);
    Fixture { rig, host, control }
}

impl Fixture {
    /// The disk does what it had.
    fn release(&mut self) {
        self.control.release_dropped();
        self.rig.pass(A_MOMENT);
    }

    fn block(&mut self, admin: &Queue, cntlid: u16, lba: u64) -> u8 {
        let io = self.rig.io(0, Want::io(cntlid, 1));
        let data = self.rig.read(&io, Sqe::read(3, 1, lba, 1), 512).data;
        assert!(data.len() == 512 && data.iter().all(|byte| *byte == data[0]));
        assert_eq!(admin.line.closed(), None);
        self.rig.hang_up(&io);
        data[0]
    }
}

#[test]
fn without_anything_before_it_is_answered_at_once() {
    let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![pool_disk(512)]) });
    let host = rig.host();
    for _ in 0..2 {
        begin(&mut rig, &host.admin, TOKEN);
        let answer = rig.answer(&host.admin).expect("without a turn");
        assert_ok(&answer);
        assert_eq!((answer.cid, answer.result), (CID, 0));
    }
    assert_eq!(host.io.line.closed(), None, "its own queues stay");
    assert!(!rig.notices.iter().any(|notice| matches!(notice, Notice::FormerEnded { .. })));
    rig.finish();
}

#[test]
fn end_former_closes_queues_waits_for_writes_at_the_disk_and_drops_the_others() {
    for cores in [1, 2, 3] {
        let mut it = fixture(cores);
        // Arrived, and not begun: its data is not here.
        it.rig.send(&it.host.io, Sqe::write(2, 1, 8, 1, false), 512);
        assert_eq!(it.rig.states(&it.host.io), [(RequestState::Fetching, 1), (RequestState::Executing, 1)]);
        let (admin, cntlid) = admin_of(&mut it.rig, cores - 1, HOST, HOST_ID);
        assert_eq!(it.host.io.line.closed(), None, "the target takes it for alive");
        begin(&mut it.rig, &admin, TOKEN);
        assert_eq!(answer(&mut it.rig, &admin), None, "the disk has a write");
        for queue in [&it.host.admin, &it.host.io] {
            assert_eq!(queue.line.closed(), Some(CloseReason::ControllerGone));
        }
        // Other commands go on meanwhile.
        assert_ok(&it.rig.run(&admin, Sqe::keep_alive(5), &[]));
        it.rig.pass(Nanos::from_secs(5));
        assert_eq!(it.rig.states(&admin), [(RequestState::ConnectBlocked, 1)]);
        it.release();
        let answer = it.rig.answer(&admin).expect("nothing is at the disk any more");
        assert_ok(&answer);
        assert_eq!(answer.result, over(1));
        assert_eq!((it.block(&admin, cntlid, 0), it.block(&admin, cntlid, 8)), (1, 0), "begun, not begun");
        let told = it.rig.notices.iter().filter(|it| matches!(it, Notice::FormerEnded { .. }));
        let told: Vec<_> = told.collect();
        let [Notice::FormerEnded { host, subsystem, cntlid: by, ended: 1 }] = told[..] else {
            panic!("{told:?}")
        };
        assert_eq!((host.as_str(), subsystem.as_str(), *by), (HOST, SUBSYSTEM, cntlid));
        it.rig.finish();
    }
}

#[test]
fn a_core_that_has_not_heard_of_it_begins_nothing_and_is_waited_for() {
    let mut it = fixture(2);
    it.release();
    it.rig.answers(&it.host.io);
    it.rig.is_mail_held = true;
    let (admin, cntlid) = admin_of(&mut it.rig, 0, HOST, HOST_ID);
    begin(&mut it.rig, &admin, TOKEN);
    assert_eq!(answer(&mut it.rig, &admin), None, "the core of its I/O queue has not answered");
    // Whole commands arrive there.
    it.rig.send(&it.host.io, Sqe::write_zeroes(3, 1, 0, 1, false), 0);
    assert_eq!(it.host.io.line.closed(), Some(CloseReason::ControllerGone));
    it.rig.is_mail_held = false;
    assert_eq!(answer(&mut it.rig, &admin).expect("now").result, over(1));
    assert_eq!(it.block(&admin, cntlid, 0), 1, "not zeroed");
    it.rig.finish();
}

#[test]
fn a_former_admin_queue_on_another_core_is_waited_for() {
    let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![pool_disk(512)]) });
    let (old, _) = admin_of(&mut rig, 1, HOST, HOST_ID);
    ends(&mut rig, &old, TOKEN, over(0));
    let (new, _) = admin_of(&mut rig, 0, HOST, HOST_ID);
    rig.is_mail_held = true;
    begin(&mut rig, &new, TOKEN);
    assert_eq!((answer(&mut rig, &new), old.line.closed()), (None, None));
    rig.is_mail_held = false;
    assert_eq!(answer(&mut rig, &new).expect("now").result, over(1));
    assert_eq!(old.line.closed(), Some(CloseReason::ControllerGone));
    rig.finish();
}

#[test]
fn other_tokens_hosts_and_host_identifiers_are_left_alone() {
    let mut it = fixture(2);
    let others = [
        (HOST, HOST_ID, Some(OTHER_TOKEN)),
        (HOST, HOST_ID, None),
        (HOST, [8; 16], Some(TOKEN)),
        (OTHER_HOST, HOST_ID, Some(TOKEN)),
    ];
    let others = others.map(|(host, id, token)| {
        let (admin, cntlid) = admin_of(&mut it.rig, 1, host, id);
        if let Some(token) = token {
            begin(&mut it.rig, &admin, token);
            assert_eq!(answer(&mut it.rig, &admin).expect("none is ended").result, over(0));
        }
        (admin, cntlid)
    });
    assert_eq!(it.host.admin.line.closed(), None, "none of them has ended the first");
    it.release();
    let (admin, _) = admin_of(&mut it.rig, 0, HOST, HOST_ID);
    ends(&mut it.rig, &admin, TOKEN, over(1));
    assert_eq!(it.host.admin.line.closed(), Some(CloseReason::ControllerGone));
    for (other, _) in &others {
        assert_eq!(other.line.closed(), None);
        assert_ok(&it.rig.run(other, Sqe::keep_alive(5), &[]));
    }
    it.rig.finish();
}

#[test]
fn several_former_controllers_end_and_the_last_token_counts() {
    let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![pool_disk(512)]) });
    let queues: Vec<Queue> = (0..3).map(|at| admin_of(&mut rig, at % 2, HOST, HOST_ID).0).collect();
    ends(&mut rig, &queues[0], TOKEN, over(0));
    ends(&mut rig, &queues[1], OTHER_TOKEN, over(0));
    // It has changed its mind; so has the first.
    ends(&mut rig, &queues[0], OTHER_TOKEN, over(1));
    assert_eq!(queues[1].line.closed(), Some(CloseReason::ControllerGone));
    ends(&mut rig, &queues[2], TOKEN, over(0));
    ends(&mut rig, &queues[2], OTHER_TOKEN, over(1));
    assert_eq!(queues[0].line.closed(), Some(CloseReason::ControllerGone));
    rig.finish();
}

#[test]
fn a_disk_that_never_answers_is_waited_for_with_a_bound_and_the_answer_says_so() {
    let mut it = fixture(2);
    let (admin, _) = admin_of(&mut it.rig, 0, HOST, HOST_ID);
    begin(&mut it.rig, &admin, TOKEN);
    it.rig.pass(Nanos(ORPHAN_MAX.0 - A_MOMENT.0));
    assert_eq!(it.rig.answer(&admin), None);
    let late = answer(&mut it.rig, &admin).or_else(|| answer(&mut it.rig, &admin)).expect("let through");
    assert_ok(&late);
    assert_eq!(late.result, may_land(1));
    // A later request is told the same, at once: the target does not wait for it a second time.
    ends(&mut it.rig, &admin, TOKEN, may_land(0));
    let (next, _) = admin_of(&mut it.rig, 0, HOST, HOST_ID);
    ends(&mut it.rig, &next, OTHER_TOKEN, may_land(0));
    let (other, _) = admin_of(&mut it.rig, 0, OTHER_HOST, HOST_ID);
    ends(&mut it.rig, &other, TOKEN, over(0));
    it.release();
    ends(&mut it.rig, &next, OTHER_TOKEN, over(0));
    it.rig.finish();
}

#[test]
fn a_core_that_never_answers_is_waited_for_with_the_same_bound() {
    let mut it = fixture(2);
    it.release();
    it.rig.answers(&it.host.io);
    it.rig.is_mail_held = true;
    let (admin, _) = admin_of(&mut it.rig, 0, HOST, HOST_ID);
    begin(&mut it.rig, &admin, TOKEN);
    it.rig.pass(Nanos(ORPHAN_MAX.0 - A_MOMENT.0));
    assert_eq!(it.rig.answer(&admin), None);
    it.rig.pass(A_MOMENT);
    assert_eq!(answer(&mut it.rig, &admin).expect("let through").result, may_land(1));
    it.rig.finish();
}

#[test]
fn what_an_association_left_that_ended_by_itself_is_waited_for_as_well() {
    let mut it = fixture(2);
    // Before it ends: afterwards Connect waits.
    let (admin, _) = admin_of(&mut it.rig, 0, HOST, HOST_ID);
    it.rig.hang_up(&it.host.admin);
    it.rig.turn();
    begin(&mut it.rig, &admin, OTHER_TOKEN);
    assert_eq!(answer(&mut it.rig, &admin), None);
    it.release();
    assert_eq!(it.rig.answer(&admin).expect("now").result, over(0));
    it.rig.finish();
}

#[test]
fn its_own_queue_that_is_gone_is_no_former_association() {
    let mut it = fixture(2);
    it.rig.hang_up(&it.host.io);
    let admin = it.host.admin.clone();
    ends(&mut it.rig, &admin, TOKEN, over(0));
    it.release();
    it.rig.finish();
}

#[test]
fn token_zero_and_a_second_one_at_a_time_are_refused_and_change_nothing() {
    let mut it = fixture(2);
    let (admin, _) = admin_of(&mut it.rig, 0, HOST, HOST_ID);
    let zero = it.rig.run(&admin, Sqe::end_former_associations(4, 0), &[]);
    assert_refused(&zero, Status::INVALID_FIELD);
    begin(&mut it.rig, &admin, TOKEN);
    let second = it.rig.run(&admin, Sqe::end_former_associations(5, OTHER_TOKEN), &[]);
    assert_eq!(second.status, Status::COMMAND_SEQUENCE_ERROR, "not for good");
    // An Abort does not reach it.
    let abort = it.rig.run(&admin, Sqe::abort(6, 0, CID), &[]);
    assert_eq!((abort.status, abort.result & 1), (Status::SUCCESS, 1));
    it.release();
    assert_eq!(it.rig.answer(&admin).expect("now").result, over(1));
    // The token of the second was not noted.
    let (next, _) = admin_of(&mut it.rig, 0, HOST, HOST_ID);
    ends(&mut it.rig, &next, OTHER_TOKEN, over(0));
    assert_eq!(admin.line.closed(), None);
    it.rig.finish();
}

#[test]
fn of_two_that_end_each_other_one_stays_and_nobody_waits_for_ever() {
    for is_mail_held in [false, true] {
        let mut it = fixture(2);
        let (first, _) = admin_of(&mut it.rig, 1, HOST, HOST_ID);
        let (second, _) = admin_of(&mut it.rig, 0, HOST, HOST_ID);
        let closed = Some(CloseReason::ControllerGone);
        it.rig.is_mail_held = is_mail_held;
        begin(&mut it.rig, &first, TOKEN);
        it.rig.turn();
        assert_eq!(it.host.admin.line.closed(), if is_mail_held { None } else { closed });
        begin(&mut it.rig, &second, TOKEN);
        // One that is ended and has not heard of it ends no other, and is closed.
        it.rig.send(&it.host.admin, Sqe::end_former_associations(9, TOKEN), 0);
        assert_eq!(it.host.admin.line.closed(), closed);
        it.rig.is_mail_held = false;
        it.release();
        assert_eq!((first.line.closed(), it.host.admin.line.closed()), (closed, closed));
        assert_eq!(second.line.closed(), None);
        assert_eq!(it.rig.answer(&second).expect("an answer").result, over(1));
        it.rig.finish();
    }
}

#[test]
fn a_reset_and_a_shutdown_forget_the_command_and_what_it_has_ended_stays_ended() {
    for (is_reset, cc) in [(true, CC_DISABLED), (false, CC_SHUTDOWN)] {
        let mut it = fixture(2);
        let (admin, _) = admin_of(&mut it.rig, 0, HOST, HOST_ID);
        begin(&mut it.rig, &admin, TOKEN);
        it.rig.set_cc(&admin, cc);
        it.rig.pass(A_MOMENT);
        assert_eq!((it.rig.states(&admin), admin.line.forgotten()), (Vec::new(), 1));
        assert_eq!(it.host.io.line.closed(), Some(CloseReason::ControllerGone));
        if is_reset {
            it.rig.set_cc(&admin, CC_ENABLED);
            begin(&mut it.rig, &admin, TOKEN);
            assert_eq!(answer(&mut it.rig, &admin), None, "the disk has the write still");
        }
        it.release();
        let result = it.rig.answer(&admin).map(|answer| answer.result);
        assert_eq!(result, is_reset.then_some(over(0)));
        it.rig.finish();
    }
}

#[test]
fn a_controller_that_ends_while_it_waits_leaves_nothing_behind() {
    type End = fn(&mut Fixture, &Queue);
    let ends: [End; 4] = [
        |it, admin| it.rig.hang_up(admin),
        |it, admin| {
            for cid in 200..300 {
                it.rig.send(admin, Sqe::new(0x6e, cid, 1), 0);
            }
            assert_eq!(admin.line.closed(), Some(CloseReason::HostError));
        },
        |it, admin| {
            it.rig.tell(&Message::Shutdown);
            (0..3).for_each(|_| it.rig.turn());
            assert_eq!(admin.line.closed(), Some(CloseReason::Shutdown), "nothing that a drain waits for");
        },
        |it, admin| {
            it.rig.setup.hosts = spindle_target::snapshot::AllowedHosts::Only(Vec::new());
            it.rig.publish();
            it.rig.turn();
            assert_eq!(admin.line.closed(), Some(CloseReason::ControllerGone));
        },
    ];
    for end in ends {
        let mut it = fixture(2);
        let (admin, _) = admin_of(&mut it.rig, 0, HOST, HOST_ID);
        begin(&mut it.rig, &admin, TOKEN);
        assert_eq!(answer(&mut it.rig, &admin), None);
        end(&mut it, &admin);
        it.release();
        assert_eq!(it.rig.answers(&admin).iter().filter(|answer| answer.cid == CID).count(), 0);
        it.rig.finish();
    }
}
