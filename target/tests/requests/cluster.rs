//! Coherent caches: Join, Next, Register, and writes that wait for members.

use std::sync::Arc;

use nvme_spec::cluster::{JOIN_BYTES, JoinData, Joined, NEXT_BYTES, NextData, Notice, Registered};
use nvme_spec::zerocopy::{FromBytes, IntoBytes};
use nvme_spec::{Nqn, Sqe, Status};
use spindle_reactor::clock::Nanos;
use spindle_target_card::{Cluster, NEXT_WAIT};
use spindle_target_disk::{ClusterDisk, Disk};
use spindle_tests::script::{Answer, HOST, Host, Queue, Rig, Setup, Want};

use crate::{BLOCKS, assert_ok, pool_disk, ram_disk};

/// Blocks of 4 KiB, so pages of a block; extents of 16.
fn clustered(inner: Arc<dyn Disk>, agents: &[&str]) -> Arc<dyn Disk> {
    let agents = agents.iter().map(|agent| Nqn::new(agent).expect("an NQN")).collect();
    ClusterDisk::new(inner, Cluster::new(BLOCKS * 4096, agents, Nanos::ZERO))
}

struct World {
    rig: Rig,
    /// The member, and a host that is none.
    member: Host,
    other: Host,
    incarnation: u64,
}

impl World {
    fn new(disk: Arc<dyn Disk>, cores: usize) -> World {
        let mut rig = Rig::new(Setup { cores, ..Setup::small(vec![disk]) });
        let host = |rig: &mut Rig, core: usize| {
            let (admin, cntlid) = rig.admin(core, 60_000);
            let io = rig.io(core, Want::io(cntlid, 1));
            Host { admin, io, cntlid }
        };
        let (member, other) = (host(&mut rig, 0), host(&mut rig, cores - 1));
        rig.pass(Nanos::from_ms(1));
        World { rig, member, other, incarnation: 0 }
    }

    fn on_ram(cores: usize) -> World {
        World::new(clustered(ram_disk(4096), &[HOST]), cores)
    }

    fn join(&mut self) -> Answer {
        self.incarnation += 1;
        let data = JoinData::new(self.incarnation, self.incarnation - 1);
        self.rig.run(&self.member.admin, Sqe::join(1, 1), data.as_bytes())
    }

    fn joined(&mut self) {
        let answer = self.join();
        assert_ok(&answer);
        let joined = Joined::from_bits(u32::try_from(answer.result).expect("a dword"));
        assert_eq!((joined.number(), joined.extent_shift()), (0, 4));
        self.next(10, 0);
        assert_eq!(self.answered(10), (0, vec![]), "the first is answered at once");
    }

    fn next(&mut self, cid: u16, acknowledged: u64) {
        self.rig.send(&self.member.admin, Sqe::next_notices(cid, acknowledged), NEXT_BYTES);
        self.rig.pass(Nanos::from_ms(1));
    }

    /// The sequence and the notices of the answer to a Next.
    fn answered(&mut self, cid: u16) -> (u64, Vec<Notice>) {
        self.rig.pass(Nanos::from_ms(1));
        let answer = self.rig.answer(&self.member.admin).expect("an answer");
        assert_eq!(answer.cid, cid);
        assert_ok(&answer);
        let data = NextData::read_from_bytes(&answer.data).expect("4 KiB");
        let notices = data.entries().expect("as many as it says").iter().map(|entry| entry.notice());
        (data.sequence.get(), notices.map(|notice| notice.expect("a kind")).collect())
    }

    fn is_waiting(&mut self) -> bool {
        self.rig.pass(Nanos::from_ms(1));
        self.rig.answer(&self.member.admin).is_none()
    }

    /// Read and Register of a block: its first byte, and KEEP.
    fn register(&mut self, block: u64) -> (u8, bool) {
        let answer = self.rig.read(&self.member.io, Sqe::read_and_register(1, 1, block, 1), 4096);
        assert_ok(&answer);
        let result = u32::try_from(answer.result).expect("a dword");
        (answer.data[0], Registered::from_bits(result).keep())
    }

    /// A Controller Reset of the member, and a new I/O queue. Its former number is free.
    fn reset(&mut self) {
        let admin = self.member.admin.clone();
        self.rig.set_cc(&admin, spindle_tests::script::CC_DISABLED);
        self.rig.set_cc(&admin, spindle_tests::script::CC_ENABLED);
        self.member.io = self.rig.io(0, Want::io(self.member.cntlid, 1));
        self.rig.pass(Nanos::from_secs(3));
        self.rig.answers(&admin);
    }

    fn begin_write(&mut self, queue: &Queue, cid: u16, block: u64, byte: u8) {
        self.rig.send(queue, Sqe::write(cid, 1, block, 1, false), 4096);
        self.rig.bring(queue, cid, &[byte; 4096]);
    }

    fn write_answer(&mut self, queue: &Queue) -> Option<Answer> {
        self.rig.pass(Nanos::from_ms(1));
        self.rig.answer(queue)
    }
}

#[test]
fn a_write_of_another_host_waits_until_the_member_has_acknowledged() {
    for (disk, cores) in
        [(ram_disk(4096), 1), (ram_disk(4096), 2), (pool_disk(4096), 1), (pool_disk(4096), 2)]
    {
        let mut world = World::new(clustered(disk, &[HOST]), cores);
        world.joined();
        world.next(11, 0);
        assert_eq!(world.register(3), (0, true));
        let other = world.other.io.clone();
        world.begin_write(&other, 1, 3, 7);
        assert!(world.write_answer(&other).is_none());
        let (sequence, notices) = world.answered(11);
        let [Notice::Invalidate { number, first: 3, pages: 1 }] = notices[..] else { panic!("{notices:?}") };
        assert_eq!(world.register(3), (0, false), "the write is in flight, and not at the disk");
        assert!(world.write_answer(&other).is_none());
        world.next(12, sequence);
        assert_ok(&world.write_answer(&other).expect("the member has acknowledged"));
        let (sequence, notices) = world.answered(12);
        assert_eq!(notices, [Notice::Done { number }]);
        assert_eq!(world.register(3), (7, true));
        // A write of what the member does not have, and its own writes, wait for nobody.
        world.begin_write(&other, 1, 16, 8);
        assert_ok(&world.write_answer(&other).expect("nobody has it"));
        let own = world.member.io.clone();
        world.begin_write(&own, 1, 3, 9);
        assert_ok(&world.write_answer(&own).expect("its own"));
        world.next(13, sequence);
        assert!(world.is_waiting());
        world.rig.pass(NEXT_WAIT);
        assert_eq!(world.answered(13), (sequence, vec![]));
        world.rig.finish();
    }
}

#[test]
fn a_write_waits_for_a_silent_member_until_its_lease_has_ended() {
    for has_gone in [false, true] {
        let mut world = World::on_ram(2);
        world.joined();
        assert_eq!(world.register(3), (0, true));
        if has_gone {
            world.rig.hang_up(&world.member.admin);
        }
        let other = world.other.io.clone();
        world.begin_write(&other, 1, 3, 7);
        world.rig.pass(Nanos::from_ms(1900));
        assert!(world.write_answer(&other).is_none());
        world.rig.pass(Nanos::from_ms(150));
        assert_ok(&world.write_answer(&other).expect("the lease has ended"));
        world.rig.finish();
    }
}

#[test]
fn a_member_that_does_not_acknowledge_loses_its_controller() {
    let mut world = World::on_ram(1);
    world.joined();
    assert_eq!(world.register(3), (0, true));
    world.next(11, 0);
    let other = world.other.io.clone();
    world.begin_write(&other, 1, 3, 7);
    let (sequence, _) = world.answered(11);
    for cid in 12..16 {
        assert!(world.member.admin.line.closed().is_none());
        world.next(cid, sequence - 1);
        world.rig.pass(NEXT_WAIT);
        world.rig.answers(&world.member.admin.clone());
    }
    assert!(world.member.admin.line.closed().is_none(), "four fifths of a second");
    world.rig.pass(Nanos::from_ms(300));
    assert!(world.member.admin.line.closed().is_some(), "more than a second");
    world.rig.finish();
}

#[test]
fn commands_out_of_order_are_refused() {
    let mut world = World::on_ram(1);
    let admin = world.member.admin.clone();
    let status = |answer: Option<Answer>| answer.expect("an answer").status.code();
    world.rig.send(&admin, Sqe::next_notices(1, 0), NEXT_BYTES);
    assert_eq!(status(world.rig.answer(&admin)), Status::COMMAND_SEQUENCE_ERROR);
    assert_eq!(world.rig.run(&admin, Sqe::leave(1), &[]).status.code(), Status::COMMAND_SEQUENCE_ERROR);
    for sqe in [Sqe::register(1, 1, 0, 1), Sqe::read_and_register(1, 1, 0, 1)] {
        let answer = world.rig.read(&world.member.io.clone(), sqe, 4096);
        assert_eq!(answer.status.code(), Status::COMMAND_SEQUENCE_ERROR, "{sqe:?}");
    }
    let zero = [0; JOIN_BYTES];
    assert_eq!(world.rig.run(&admin, Sqe::join(1, 1), &zero).status.code(), Status::INVALID_FIELD);
    assert_eq!(
        world.rig.run(&admin, Sqe::join(1, 9), &zero).status.code(),
        Status::INVALID_NAMESPACE_OR_FORMAT
    );
    world.joined();
    assert_eq!(world.join().status.code(), Status::COMMAND_SEQUENCE_ERROR, "it has joined");
    world.rig.send(&admin, Sqe::next_notices(20, 1), NEXT_BYTES);
    assert_eq!(status(world.rig.answer(&admin)), Status::INVALID_FIELD, "nothing was sent");
    for cid in 21..24 {
        world.rig.send(&admin, Sqe::next_notices(cid, 0), NEXT_BYTES);
    }
    let third = world.rig.answer(&admin).expect("an answer");
    assert_eq!((third.cid, third.status.code()), (23, Status::COMMAND_SEQUENCE_ERROR), "two may wait");
    let beyond = world.rig.read(&world.member.io.clone(), Sqe::register(1, 1, BLOCKS, 1), 0);
    assert_eq!(beyond.status.code(), Status::LBA_OUT_OF_RANGE);
    world.rig.finish();
}

#[test]
fn a_host_that_is_no_agent_and_a_disk_without_a_cluster_are_refused() {
    let mut world = World::new(clustered(ram_disk(4096), &["nqn.2026-01.io.spindle:another"]), 1);
    assert_eq!(world.join().status.code(), Status::OPERATION_DENIED);
    world.rig.finish();
    let mut world = World::new(ram_disk(4096), 1);
    assert_eq!(world.join().status.code(), Status::INVALID_OPCODE);
    world.rig.finish();
    let mut rig = Rig::new(Setup::small(vec![clustered(ram_disk(4096), &[HOST]), ram_disk(4096)]));
    let host = rig.host();
    let answer = rig.run(&host.admin, Sqe::join(1, 2), JoinData::new(1, 0).as_bytes());
    assert_eq!(answer.status.code(), Status::NAMESPACE_NOT_READY);
    rig.finish();
}

#[test]
fn a_member_that_leaves_is_not_waited_for_and_may_join_again_after_a_reset() {
    let mut world = World::on_ram(1);
    world.joined();
    assert_eq!(world.register(3), (0, true));
    world.next(11, 0);
    assert_ok(&world.rig.run(&world.member.admin.clone(), Sqe::leave(12), &[]));
    world.rig.pass(Nanos::from_ms(1));
    let next = world.rig.answer(&world.member.admin).expect("the waiting Next is refused");
    assert_eq!((next.cid, next.status.code()), (11, Status::COMMAND_SEQUENCE_ERROR));
    let other = world.other.io.clone();
    world.begin_write(&other, 1, 3, 7);
    assert_ok(&world.write_answer(&other).expect("nobody is waited for"));
    assert_eq!(world.join().status.code(), Status::COMMAND_SEQUENCE_ERROR, "its queues may still name it");
    world.reset();
    world.joined();
    assert_eq!(world.register(3), (7, true));
    world.rig.finish();
}

#[test]
fn a_number_is_not_used_again_while_the_queues_of_its_controller_live() {
    let mut world = World::on_ram(1);
    world.joined();
    let late = world.member.io.clone();
    world.rig.send(&late, Sqe::write(1, 1, 3, 1, false), 4096);
    assert_ok(&world.rig.run(&world.member.admin.clone(), Sqe::leave(12), &[]));
    world.rig.pass(Nanos::from_secs(3));
    std::mem::swap(&mut world.member, &mut world.other);
    let answer = world.join();
    assert_ok(&answer);
    let joined = Joined::from_bits(u32::try_from(answer.result).expect("a dword"));
    assert_eq!(joined.number(), 1, "the write of the other is one of number 0");
    world.next(10, 0);
    assert_eq!(world.answered(10), (0, vec![]));
    world.next(11, 0);
    assert_eq!(world.register(3), (0, true));
    world.rig.bring(&late, 1, &[7; 4096]);
    let (_, notices) = world.answered(11);
    assert!(matches!(notices[..], [Notice::Invalidate { first: 3, pages: 1, .. }]), "{notices:?}");
    world.rig.finish();
}

#[test]
fn waiting_writes_end_with_their_queue() {
    let mut world = World::on_ram(2);
    world.joined();
    assert_eq!(world.register(3), (0, true));
    let other = world.other.io.clone();
    world.begin_write(&other, 1, 3, 7);
    assert!(world.write_answer(&other).is_none());
    world.rig.hang_up(&other);
    world.rig.pass(Nanos::from_ms(1));
    assert_eq!(world.register(3), (0, true), "no write is in flight any more");
    world.rig.finish();
}

#[test]
fn a_next_can_be_aborted_and_a_reset_ends_the_membership() {
    let mut world = World::on_ram(1);
    world.joined();
    world.next(11, 0);
    let admin = world.member.admin.clone();
    world.rig.send(&admin, Sqe::abort(12, 0, 11), 0);
    let aborted = world.rig.answer(&admin).expect("an answer");
    assert_eq!((aborted.cid, aborted.status.code()), (11, Status::ABORTED_BY_REQUEST));
    assert_ok(&world.rig.answer(&admin).expect("the answer to the Abort"));
    world.next(13, 0);
    world.reset();
    world.rig.send(&admin, Sqe::next_notices(14, 0), NEXT_BYTES);
    assert_eq!(world.rig.answer(&admin).expect("refused").status.code(), Status::COMMAND_SEQUENCE_ERROR);
    world.rig.finish();
}
