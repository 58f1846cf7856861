//! Hosts that are gone: what they left at a disk lands over nothing that they write when they are back, and
//! what the disk has not begun is not begun.

use std::sync::Arc;

use nvme_spec::register::{CC, CSTS, ShutdownNotification};
use nvme_spec::{Sqe, Status};
use spindle_nvme_transport::CloseReason;
use spindle_reactor::clock::Nanos;
use spindle_target::notice::Notice;
use spindle_target::orphaned_commands::ORPHAN_MAX;
use spindle_target::qpair::request::RequestState;
use spindle_target_disk::fault::{Fault, FaultControl, FaultDisk, OpKind};
use spindle_tests::script::{
    Answer, CC_DISABLED, CC_ENABLED, HOST, Host, Queue, Rig, SUBSYSTEM, Setup, Want, connect_data,
    connect_sqe,
};

use crate::{assert_ok, pool_disk, ram_disk};

/// CC with SHN normal.
const CC_SHUTDOWN: u64 = CC_ENABLED | (ShutdownNotification::NORMAL.0 as u64) << 14;
/// The first look of the timer comes within it.
const A_MOMENT: Nanos = Nanos::from_ms(200);

/// A host whose write of ones to block 0 is at the disk, which takes its time.
struct Fixture {
    rig: Rig,
    host: Host,
    control: Arc<FaultControl>,
}

fn fixture(cores: usize) -> Fixture {
    let (disk, control) = FaultDisk::new(pool_disk(512), 1);
    let mut rig = Rig::new(Setup { cores, ..Setup::small(vec![disk]) });
    let host = rig.host();
    control.set(Fault::Drop, OpKind::Write, 1_000_000);
    rig.send(&host.io, Sqe::write(1, 1, 0, 1, false), 512);
    rig.bring(&host.io, 1, &[1; 512]);
    assert_eq!(rig.states(&host.io), [(RequestState::Executing, 1)]);
    // Writes from now on take no time: the disk is slow for this one.
    control.set(Fault::Drop, OpKind::Write, 0);
    Fixture { rig, host, control }
}

/// Begin Connect of an admin queue; its answer within a moment, if there is one.
fn begin_connect(rig: &mut Rig, core: usize, host: &str) -> (Queue, Option<Answer>) {
    let queue = rig.accept(core);
    rig.send(&queue, connect_sqe(Want::admin()), 1024);
    rig.bring(&queue, 0, &connect_data(Want::admin(), host));
    rig.pass(A_MOMENT);
    let answer = rig.answer(&queue);
    (queue, answer)
}

fn csts(rig: &mut Rig, admin: &Queue) -> u64 {
    let answer = rig.run(admin, Sqe::property_get(9, false, CSTS), &[]);
    assert_ok(&answer);
    answer.result
}

impl Fixture {
    /// The disk does what it had.
    fn release(&mut self) {
        self.control.release_dropped();
        self.rig.pass(A_MOMENT);
    }

    /// The host is back with this controller. It writes twos; then the disk does whatever it still had.
    fn write_and_look(mut self, admin: &Queue, cntlid: u16) {
        let io = self.rig.io(self.rig.setup.cores - 1, Want::io(cntlid, 1));
        assert_ok(&self.rig.run(&io, Sqe::write(2, 1, 0, 1, false), &[2; 512]));
        self.release();
        let now = self.rig.read(&io, Sqe::read(3, 1, 0, 1), 512);
        assert_eq!(now.data, [2; 512], "the old write landed over the newer one");
        assert_eq!(admin.line.closed(), None);
        self.rig.finish();
    }
}

#[test]
fn a_write_of_a_lost_connection_does_not_land_over_writes_after_the_reconnect() {
    for cores in [1, 2] {
        for is_admin_first in [false, true] {
            let mut it = fixture(cores);
            let (admin, io) = (it.host.admin.clone(), it.host.io.clone());
            let queues = if is_admin_first { [&admin, &io] } else { [&io, &admin] };
            queues.into_iter().for_each(|queue| it.rig.hang_up(queue));
            let (queue, answer) = begin_connect(&mut it.rig, 0, HOST);
            let answer = answer.unwrap_or_else(|| {
                it.release();
                it.rig.pass(A_MOMENT);
                it.rig.answer(&queue).expect("nothing is at the disk any more")
            });
            assert_ok(&answer);
            it.rig.set_cc(&queue, CC_ENABLED);
            it.write_and_look(&queue, u16::try_from(answer.result & 0xffff).expect("16 bits"));
        }
    }
}

#[test]
fn a_connect_waits_although_the_core_of_the_io_queue_has_not_heard_of_the_end() {
    let mut it = fixture(2);
    it.rig.is_mail_held = true;
    it.rig.hang_up(&it.host.admin);
    let (queue, answer) = begin_connect(&mut it.rig, 0, HOST);
    assert_eq!((answer, it.host.io.line.closed()), (None, None));
    it.rig.is_mail_held = false;
    it.rig.pass(A_MOMENT);
    assert_eq!(it.host.io.line.closed(), Some(CloseReason::ControllerGone));
    assert_eq!(it.rig.answer(&queue), None, "the disk has it");
    it.release();
    it.rig.pass(A_MOMENT);
    assert_ok(&it.rig.answer(&queue).expect("now"));
    it.rig.finish();
}

#[test]
fn a_reset_is_not_complete_before_the_disk_is_through() {
    for cores in [1, 2] {
        let mut it = fixture(cores);
        let admin = it.host.admin.clone();
        it.rig.set_cc(&admin, CC_DISABLED);
        it.rig.pass(A_MOMENT);
        assert_eq!(csts(&mut it.rig, &admin) & 1, 1, "not before the disk is through");
        // A host that does not wait may try again.
        let early = it.rig.run(&admin, Sqe::property_set(4, false, CC, CC_ENABLED), &[]);
        assert_eq!(early.status.code(), Status::COMMAND_SEQUENCE_ERROR);
        assert!(!early.status.is_dnr());
        it.release();
        assert_eq!(csts(&mut it.rig, &admin) & 1, 0);
        it.rig.set_cc(&admin, CC_ENABLED);
        assert_eq!(csts(&mut it.rig, &admin) & 1, 1);
        let cntlid = it.host.cntlid;
        it.write_and_look(&admin, cntlid);
    }
}

#[test]
fn a_shutdown_is_not_complete_before_the_disk_is_through() {
    let shst = |csts: u64| csts >> 2 & 3;
    let mut it = fixture(2);
    let admin = it.host.admin.clone();
    it.rig.set_cc(&admin, CC_SHUTDOWN);
    it.rig.pass(A_MOMENT);
    assert_eq!(shst(csts(&mut it.rig, &admin)), 1, "occurring");
    it.release();
    assert_eq!(shst(csts(&mut it.rig, &admin)), 2, "complete");
    it.rig.finish();
}

#[test]
fn without_anything_at_a_disk_nobody_waits() {
    let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![pool_disk(512)]) });
    let host = rig.host();
    rig.set_cc(&host.admin, CC_DISABLED);
    rig.turn();
    assert_eq!(csts(&mut rig, &host.admin) & 1, 0);
    rig.hang_up(&host.admin);
    let (admin, _) = rig.admin(0, 0);
    drop(admin);
    rig.finish();
}

#[test]
fn another_host_does_not_wait() {
    let mut it = fixture(1);
    it.rig.hang_up(&it.host.io);
    it.rig.hang_up(&it.host.admin);
    let (_, answer) = begin_connect(&mut it.rig, 0, "nqn.2026-01.io.spindle:other");
    assert_ok(&answer.expect("at once"));
    it.control.release_dropped();
    it.rig.finish();
}

#[test]
fn one_queue_that_is_gone_is_waited_for_like_all() {
    let mut it = fixture(1);
    it.rig.hang_up(&it.host.io);
    // The controller is there, and its queue's number is taken.
    let (_, same) = it.rig.connect(0, Want::io(it.host.cntlid, 1));
    assert_eq!(same.status.code(), Status::COMMAND_SEQUENCE_ERROR);
    assert!(!same.status.is_dnr());
    let (queue, answer) = begin_connect(&mut it.rig, 0, HOST);
    assert_eq!(answer, None);
    it.release();
    it.rig.pass(A_MOMENT);
    assert_ok(&it.rig.answer(&queue).expect("now"));
    assert_ok(&it.rig.connect(0, Want::io(it.host.cntlid, 1)).1);
    it.rig.finish();
}

#[test]
fn a_disk_that_never_answers_is_waited_for_with_a_bound() {
    let mut it = fixture(1);
    it.rig.hang_up(&it.host.io);
    it.rig.hang_up(&it.host.admin);
    let (queue, answer) = begin_connect(&mut it.rig, 0, HOST);
    assert_eq!(answer, None);
    it.rig.pass(Nanos(ORPHAN_MAX.0 - 2 * A_MOMENT.0));
    assert_eq!(it.rig.answer(&queue), None);
    it.rig.pass(Nanos(4 * A_MOMENT.0));
    assert_ok(&it.rig.answer(&queue).expect("let through"));
    let told: Vec<_> = it.rig.notices.iter().filter(|it| matches!(it, Notice::Orphan { .. })).collect();
    let [Notice::Orphan { host, subsystem, commands: 1 }] = told[..] else { panic!("{told:?}") };
    assert_eq!((host.as_str(), subsystem.as_str()), (HOST, SUBSYSTEM));
    // What comes back after all has no receiver.
    it.release();
    it.rig.finish();
}

#[test]
fn a_connect_that_waits_holds_none_of_the_few_buffers_for_connects() {
    let mut it = fixture(1);
    it.rig.hang_up(&it.host.io);
    let waiting: Vec<Queue> = (0..4).map(|_| begin_connect(&mut it.rig, 0, HOST).0).collect();
    assert!(waiting.iter().all(|queue| it.rig.states(queue) == [(RequestState::ConnectBlocked, 1)]));
    let (_, answer) = begin_connect(&mut it.rig, 0, "nqn.2026-01.io.spindle:other");
    assert_ok(&answer.expect("at once"));
    // Nor does the end of the target wait for them.
    it.rig.tell(&spindle_target::env::Message::Shutdown);
    it.rig.turn();
    assert!(waiting.iter().all(|queue| queue.line.closed() == Some(CloseReason::Shutdown)));
    it.control.release_dropped();
    it.rig.finish();
}

#[test]
fn a_long_write_zeroes_of_a_host_that_is_gone_stops() {
    let mut rig = Rig::new(Setup::small(vec![ram_disk(4096)]));
    let host = rig.host();
    let end = 2048 - 16;
    for lba in (0..2048).step_by(16) {
        assert_ok(&rig.run(&host.io, Sqe::write(1, 1, lba, 16, false), &[7; 16 * 4096]));
    }
    rig.send(&host.io, Sqe::write_zeroes(2, 1, 0, 2048, true), 0);
    rig.turn();
    assert_eq!(rig.states(&host.io), [(RequestState::Executing, 1)], "a turn is too short for all of it");
    rig.hang_up(&host.io);
    rig.hang_up(&host.admin);
    (0..200).for_each(|_| rig.turn());
    rig.pass(A_MOMENT);
    let host = rig.host();
    assert_eq!(rig.read(&host.io, Sqe::read(1, 1, 0, 1), 4096).data, [0; 4096], "begun");
    assert_eq!(rig.read(&host.io, Sqe::read(1, 1, end, 1), 4096).data, [7; 4096], "and not gone on with");
    rig.finish();
}
