//! Tests of cores with a far target that does what it is told. What happens at random is simulated in
//! `tests/src/remote`.

mod attach;
mod conformance;

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use nvme_spec::Sqe;
use nvme_spec::identify::Oncs;
use nvme_spec::status::Status;
use spindle_nvme_initiator::{
    ConnectError, Error, Failure, Host, HostData, Identity, Loss, OptimisticCounts, OptimisticOptions,
    Refusal, Refused, Target, TransportKind,
};
use spindle_reactor::clock::{Clock, Nanos};
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_target_card::Agent;
use spindle_target_disk::{
    BlockRange, ChannelContext, Disk, DiskChannel, DiskError, Done, Geometry, IoRequest, Op, OptimisticReads,
    Token, Waited,
};

use crate::{Control, Far, FarCompletion, FarQueue, RemoteDisk, RemoteFacts, RemoteSpec, Shape};

const SECOND: Nanos = Nanos::from_secs(1);
const DEPTH: usize = 16;

/// A command that the far target has.
struct Outstanding {
    qid: u16,
    number: u64,
    index: usize,
    sqe: Sqe,
    data: Option<Buf>,
}

/// What the far target has, and what was answered and not taken.
#[derive(Default)]
struct Script {
    commands: Vec<Outstanding>,
    answers: Vec<(u16, u64, FarCompletion)>,
    /// Associations that are lost.
    lost: Vec<u64>,
    /// Longer buffers are in too many pieces.
    bytes_max: Option<usize>,
    /// Offsets of commands with data.
    offsets: Vec<u64>,
    /// The far target has optimistic reads.
    is_optimistic: bool,
    /// Whether attempts to attach succeed; `None`: they last.
    attach: Option<bool>,
    /// Optimistic connections have ended.
    has_ended: bool,
    counts: OptimisticCounts,
}

thread_local! {
    /// Of the test, which is one thread: buffers do not leave theirs.
    static SCRIPT: RefCell<Script> = RefCell::default();
}

fn script<T>(look: impl FnOnce(&mut Script) -> T) -> T {
    SCRIPT.with_borrow_mut(look)
}

struct Fake(u64);

struct FakeQueue {
    qid: u16,
    number: u64,
    free: Vec<usize>,
    is_abandoned: bool,
    is_attached: bool,
}

impl Far for Fake {
    type Opening = Option<FakeQueue>;
    type Queue = FakeQueue;
    type Grant = u64;
    type Attaching = ();

    fn depth_max(&self) -> u16 {
        127
    }

    fn begin(self: &Arc<Self>, _: &Pool, qid: u16, depth: u16, _: Nanos) -> Result<Option<FakeQueue>, Error> {
        let free = (0..usize::from(depth)).rev().collect();
        Ok(Some(FakeQueue { qid, number: self.0, free, is_abandoned: false, is_attached: false }))
    }

    fn step(opening: &mut Option<FakeQueue>, _: Nanos) -> Result<Option<FakeQueue>, Error> {
        Ok(opening.take())
    }

    fn has_optimistic_reads(&self) -> bool {
        script(|script| script.is_optimistic)
    }

    fn begin_attach(grant: u64, queue: &FakeQueue, _: Nanos) -> Result<(), Error> {
        assert_eq!(grant, queue.number);
        Ok(())
    }

    fn step_attach((): &mut (), queue: &mut FakeQueue, _: Nanos) -> Result<bool, Error> {
        match script(|script| script.attach) {
            None => Ok(false),
            Some(false) => Err(ConnectError::NoRdma.into()),
            Some(true) => {
                queue.is_attached = true;
                Ok(true)
            }
        }
    }
}

impl FakeQueue {
    fn is_lost(&self) -> bool {
        self.is_abandoned || script(|script| script.lost.contains(&self.number))
    }

    fn is_own(&self, (qid, number): (u16, u64)) -> bool {
        (qid, number) == (self.qid, self.number)
    }
}

impl FarQueue for FakeQueue {
    fn transfer_bytes_max(&self) -> u32 {
        1 << 20
    }

    fn room(&self) -> usize {
        self.free.len()
    }

    fn is_up(&self) -> bool {
        !self.is_lost()
    }

    fn submit(&mut self, sqe: Sqe, offset: u64, data: HostData) -> Result<usize, Refused> {
        let data = data.into_buffer();
        let bytes = data.as_ref().map_or(0, Buf::len);
        if script(|script| script.bytes_max.is_some_and(|most| bytes > most)) {
            return Err(Refused { why: Refusal::Pieces { pieces: 2, allowed: 1 }, buf: data });
        }
        let index = self.free.pop().expect("room");
        let (qid, number) = (self.qid, self.number);
        if data.is_some() {
            script(|script| script.offsets.push(offset));
        }
        script(|script| script.commands.push(Outstanding { qid, number, index, sqe, data }));
        Ok(index)
    }

    fn send(&mut self) {}

    fn poll(&mut self, _: Nanos) -> bool {
        if !self.is_lost() {
            return false;
        }
        script(|script| {
            let is_own = |at: &mut Outstanding| self.is_own((at.qid, at.number));
            for at in script.commands.extract_if(.., is_own) {
                let completion =
                    FarCompletion { index: at.index, result: Err(Failure::Lost), buf: at.data, keeps: false };
                script.answers.push((at.qid, at.number, completion));
            }
        });
        true
    }

    fn next_completion(&mut self) -> Option<FarCompletion> {
        let completion = script(|script| {
            let is_own = |(qid, number, _): &(u16, u64, _)| self.is_own((*qid, *number));
            let at = script.answers.iter().position(is_own)?;
            Some(script.answers.remove(at).2)
        })?;
        self.free.push(completion.index);
        Some(completion)
    }

    fn loss(&self) -> Option<Loss> {
        (self.is_lost() && self.free.len() == DEPTH).then_some(Loss::ByPeer)
    }

    fn abandon(&mut self) {
        self.is_abandoned = true;
    }

    fn has_optimistic_connection(&self) -> bool {
        self.is_attached && script(|script| !script.has_ended)
    }

    fn optimistic_counts(&self) -> Option<OptimisticCounts> {
        self.is_attached.then(|| script(|script| script.counts))
    }
}

struct World {
    disk: Arc<RemoteDisk<Fake>>,
    control: Control<Fake>,
    cores: Vec<Box<dyn DiskChannel>>,
    pool: Pool,
    now: Nanos,
    done: Vec<Done>,
    shape: Shape,
}

fn shape() -> Shape {
    let geometry = Geometry {
        block_bytes: 512,
        block_count: 1000,
        is_read_only: false,
        has_volatile_cache: false,
        can_deallocate: true,
        atomic_blocks: 1,
        can_compare_and_write: false,
    };
    Shape { geometry, must_fua: false }
}

impl World {
    fn new(cores: usize) -> World {
        World::of(cores, None, None)
    }

    fn of(cores: usize, optimistic: Option<OptimisticOptions>, agent: Option<Arc<Agent>>) -> World {
        let target = Target {
            transport: TransportKind::Tcp,
            address: "192.0.2.1:4420".parse().expect("an address"),
            nqn: Host::from_uuid([1; 16]).nqn,
            host: Host::from_uuid([2; 16]),
        };
        let spec = RemoteSpec {
            target,
            nsid: 1,
            cores: 2,
            depth: u16::try_from(DEPTH).expect("small"),
            command_timeout: Duration::from_secs(25),
            quiesce: Duration::ZERO,
            optimistic,
            is_clustered: agent.is_some(),
        };
        let facts = RemoteFacts {
            model: "model".to_owned(),
            serial: "serial".to_owned(),
            transfer_bytes_max: 1 << 20,
            medium_ids: Vec::new(),
            identity: Identity::default(),
        };
        let (disk, control) =
            RemoteDisk::with_far("far", &spec, facts, shape(), (Oncs::from_bits(0xffff), agent));
        let zones =
            [ZoneSpec { buffer_bytes: 4096, count: 32 }, ZoneSpec { buffer_bytes: 1 << 18, count: 4 }];
        let pool = Pool::new(&zones, Pages::Base).expect("a pool");
        let open = |core| disk.open(&ChannelContext { core, pool: pool.clone(), depth: 64 }).expect("opened");
        let cores = (0..cores).map(open).collect();
        control.set_fence_timeout(Nanos::from_secs(10));
        let (now, done, shape) = (Clock::now(), Vec::with_capacity(64), shape());
        let mut world = World { disk, control, cores, pool, now, done, shape };
        world.up(1);
        world
    }

    fn up(&mut self, number: u64) {
        self.control.up(number, Arc::new(Fake(number)), self.shape);
        self.turn();
    }

    fn lose(&mut self, number: u64) {
        script(|script| script.lost.push(number));
        self.control.down();
        self.turn();
    }

    fn turn(&mut self) {
        for _ in 0..4 {
            self.now += Nanos::from_ms(2);
            for core in &mut self.cores {
                core.poll(self.now, &mut self.done);
            }
        }
    }

    fn pass(&mut self, time: Nanos) {
        self.now += time;
        self.turn();
    }

    fn submit(&mut self, core: usize, token: u64, op: Op, lba: u64, blocks: u32) {
        let has_data = matches!(op, Op::Read | Op::Write { .. } | Op::Compare);
        let buf = has_data.then(|| self.pool.take(blocks * 512).expect("a buffer"));
        let range = BlockRange { lba, blocks };
        assert!(self.cores[core].submit(Token(token), &IoRequest::new(op, range), buf).is_none());
        self.turn();
    }

    fn write(&mut self, core: usize, token: u64, lba: u64) {
        self.submit(core, token, Op::Write { fua: false }, lba, 8);
    }

    /// First blocks of the commands that the far target has, in the order of their arrival.
    fn at_far(&self) -> Vec<u64> {
        script(|script| script.commands.iter().map(|at| at.sqe.cdw10.get().into()).collect())
    }

    /// The far target answers the oldest command of these blocks.
    fn answer(&mut self, lba: u64) {
        script(|script| {
            let at = script.commands.iter().position(|at| u64::from(at.sqe.cdw10.get()) == lba);
            let at = script.commands.remove(at.expect("it is there"));
            let completion = FarCompletion { index: at.index, result: Ok(()), buf: at.data, keeps: false };
            script.answers.push((at.qid, at.number, completion));
        });
        self.turn();
    }

    /// The tokens that are done since the last look, and whether they succeeded.
    fn taken(&mut self) -> Vec<(u64, Result<(), DiskError>)> {
        self.done.drain(..).map(|done| (done.token.0, done.result)).collect()
    }
}

#[test]
fn newer_commands_of_other_cores_wait_until_a_lost_write_is_answered_and_fenced() {
    let mut world = World::new(2);
    world.write(0, 1, 8);
    world.lose(1);
    world.up(2);
    assert_eq!(world.at_far(), [8], "it is sent again at once");
    world.write(1, 2, 8);
    world.submit(1, 3, Op::Read, 8, 1);
    world.write(1, 4, 100);
    assert_eq!(world.at_far(), [8, 100], "other blocks do not wait");
    world.answer(8);
    assert_eq!(world.taken(), [(1, Ok(()))]);
    assert_eq!(world.at_far(), [100, 8], "a read does not wait for the fence");
    world.control.over(1);
    world.turn();
    assert_eq!(world.at_far(), [100, 8, 8]);
}

#[test]
fn a_lost_write_to_a_disk_of_several_writers_is_sent_again_when_the_first_cannot_land() {
    let agent = Agent::new(1000 * 512, Box::new(Clock::now));
    let mut world = World::of(1, None, Some(agent));
    world.write(0, 1, 8);
    world.lose(1);
    world.up(2);
    world.submit(0, 2, Op::Read, 100, 1);
    assert_eq!(world.at_far(), [100], "the first may still land on a newer write of another host");
    world.control.over(1);
    world.turn();
    assert_eq!(world.at_far(), [100, 8]);
    world.answer(8);
    assert_eq!(world.taken(), [(1, Ok(()))]);
}

#[test]
fn no_core_sends_anything_before_every_core_has_left_the_lost_association() {
    let mut world = World::new(2);
    world.write(1, 1, 8);
    // Core 1 hangs: it does not know that its queue is lost.
    let hung = world.cores.pop().expect("two");
    world.lose(1);
    world.up(2);
    world.write(0, 2, 8);
    world.write(0, 3, 100);
    assert_eq!(world.at_far(), [8], "that of the first association");
    world.cores.push(hung);
    world.turn();
    assert_eq!(world.at_far(), [100, 8], "the older one of core 1, and what is not in its way");
    assert_eq!(script(|script| script.commands[1].qid), 2);
    world.control.over(1);
    world.answer(8);
    assert_eq!(world.at_far(), [100, 8]);
    assert_eq!(script(|script| script.commands[1].qid), 1);
}

#[test]
fn what_was_lost_is_sent_again_in_its_order() {
    let mut world = World::new(1);
    for at in 0..5 {
        world.write(0, at, 100 - 20 * at);
    }
    world.lose(1);
    world.up(2);
    assert_eq!(world.at_far(), [100, 80, 60, 40, 20]);
}

#[test]
fn a_far_target_that_says_nothing_has_ended_an_association_after_its_time() {
    let mut world = World::new(1);
    world.write(0, 1, 8);
    world.lose(1);
    world.up(2);
    world.answer(8);
    world.write(0, 2, 8);
    world.pass(Nanos::from_ms(9900));
    assert_eq!(world.at_far(), []);
    world.pass(Nanos::from_ms(200));
    assert_eq!(world.at_far(), [8]);
}

#[test]
fn a_write_fails_at_its_timeout_and_its_range_takes_no_other_until_its_completion() {
    let mut world = World::new(2);
    world.write(0, 1, 8);
    let may_change =
        |world: &World, core: usize, lba| world.cores[core].may_still_write(BlockRange { lba, blocks: 8 });
    assert!(!may_change(&world, 1, 8), "it has not ended");
    world.pass(Nanos::from_secs(24));
    world.now += Nanos::from_secs(2);
    // The other core is not polled.
    let World { cores, now, done, .. } = &mut world;
    (0..2).for_each(|_| _ = cores[0].poll(*now, done));
    let taken = world.taken();
    assert_eq!(taken, [(1, Err(DiskError::Internal))]);
    assert_eq!(world.cores[0].in_flight(), 0);
    for core in 0..2 {
        assert!(may_change(&world, core, 15), "core {core}");
        assert!(!may_change(&world, core, 16) && !may_change(&world, core, 0), "core {core}");
    }
    world.write(1, 2, 8);
    assert_eq!(world.at_far(), [8], "the first");
    world.answer(8);
    assert_eq!(world.at_far(), [8], "the second");
    assert!(!may_change(&world, 0, 8) && !may_change(&world, 1, 8));
    world.answer(8);
    assert_eq!(world.taken(), [(2, Ok(()))]);
}

#[test]
fn the_time_for_which_a_layer_has_kept_a_command_counts() {
    let mut world = World::new(1);
    world.lose(1);
    // The second is submitted later and has less time.
    for (token, waited) in [(1, 0), (2, 15), (3, 25), (4, 600)] {
        let range = BlockRange { lba: 8, blocks: 8 };
        let waited = Waited::of(Nanos::from_secs(waited));
        let request = IoRequest { waited, ..IoRequest::new(Op::Read, range) };
        let ended = world.cores[0].submit(Token(token), &request, world.pool.take(4096));
        world.done.extend(ended);
    }
    let late = Err(DiskError::Internal);
    assert_eq!(world.taken(), [(3, late), (4, late)], "its time has passed already");
    world.pass(Nanos::from_ms(9_900));
    assert_eq!(world.taken(), []);
    world.pass(Nanos::from_ms(200));
    assert_eq!(world.taken(), [(2, late)]);
    world.pass(Nanos::from_secs(15));
    assert_eq!(world.taken(), [(1, late)]);
}

#[test]
fn time_counts_from_submission_across_reconnects() {
    let mut world = World::new(1);
    world.write(0, 1, 8);
    for number in 1..=5 {
        world.pass(Nanos(4 * SECOND.0));
        world.lose(number);
        world.pass(Nanos(SECOND.0 / 2));
        world.up(number + 1);
        assert_eq!(world.taken(), [], "association {number}");
    }
    world.pass(Nanos(3 * SECOND.0));
    assert_eq!(world.taken(), [(1, Err(DiskError::Internal))]);
}

#[test]
fn a_newer_command_in_pieces_does_not_hide_the_timeout_of_an_older_one() {
    let mut world = World::new(1);
    script(|script| script.bytes_max = Some(128 << 10));
    // As many as the queue takes, and one that waits for room.
    for token in 1..=15 {
        world.write(0, token, 8 * token);
    }
    world.submit(0, 16, Op::Write { fua: false }, 0, 512);
    world.write(0, 17, 600);
    world.pass(Nanos::from_secs(20));
    // Its first piece is done and the second is first in line.
    world.control.hold();
    world.answer(0);
    world.submit(0, 18, Op::Flush, 0, 1);
    world.pass(Nanos::from_secs(6));
    let taken = world.taken();
    for token in [16, 17] {
        assert!(taken.contains(&(token, Err(DiskError::Internal))), "{token}: {taken:?}");
    }
    assert!(taken.iter().all(|(token, _)| *token != 18), "{taken:?}");
}

#[test]
fn a_resent_write_of_a_gone_host_stays_in_flight_until_its_first_try_is_fenced() {
    let mut world = World::new(1);
    world.write(0, 1, 8);
    world.lose(1);
    world.up(2);
    assert_eq!(world.cores[0].cancel_owner(Token(0).owner()), 1);
    world.answer(8);
    assert_eq!((world.taken(), world.cores[0].in_flight()), (Vec::new(), 1));
    let range = BlockRange { lba: 8, blocks: 1 };
    assert!(world.cores[0].may_still_write(range));
    world.control.over(1);
    assert!(!world.cores[0].may_still_write(range));
    world.turn();
    assert_eq!(world.taken(), [(1, Err(DiskError::Cancelled))]);
}

#[test]
fn a_command_that_is_never_answered_ends_the_association_in_the_end() {
    let mut world = World::new(1);
    world.write(0, 1, 8);
    world.pass(Nanos::from_secs(26));
    assert_eq!(world.control.lost(), 0);
    world.pass(Nanos::from_secs(25));
    assert_eq!(world.control.lost(), 1);
    world.lose(1);
    world.up(2);
    assert_eq!(world.at_far(), [], "its host was told that it failed");
}

#[test]
fn a_lost_write_of_a_gone_host_is_not_resent_and_stays_in_flight_until_fenced() {
    let mut world = World::new(1);
    let owner = Token(0).owner();
    world.write(0, 1, 8);
    world.submit(0, 2, Op::Read, 100, 1);
    world.lose(1);
    assert_eq!(world.cores[0].cancel_owner(owner), 2);
    world.up(2);
    assert_eq!(world.at_far(), []);
    assert_eq!(world.taken(), [(2, Err(DiskError::Cancelled))], "a read leaves nothing behind");
    assert_eq!(world.cores[0].in_flight(), 1);
    world.control.over(1);
    world.turn();
    assert_eq!(world.taken(), [(1, Err(DiskError::Cancelled))]);
}

#[test]
fn a_buffer_in_more_pieces_than_the_far_target_takes_is_copied() {
    let mut world = World::new(1);
    script(|script| script.bytes_max = Some(128 << 10));
    world.submit(0, 1, Op::Write { fua: false }, 0, 512);
    assert_eq!(world.at_far(), [0]);
    world.answer(0);
    world.answer(256);
    assert_eq!(world.taken(), [(1, Ok(()))]);
}

#[test]
fn a_write_cache_that_appears_is_written_through_and_a_new_size_is_told() {
    let mut world = World::new(1);
    world.lose(1);
    let geometry = Geometry { block_count: 2000, is_read_only: true, ..world.shape.geometry };
    world.write(0, 1, 8);
    world.shape = Shape { geometry, must_fua: true };
    world.up(2);
    assert_eq!(script(|script| script.commands[0].sqe.cdw12.get()) >> 30, 1, "FUA");
    assert_eq!((world.disk.geometry(), world.cores[0].geometry()), (geometry, geometry));
    let refused = world.cores[0].submit(
        Token(2),
        &IoRequest::new(Op::Deallocate, BlockRange { lba: 0, blocks: 1 }),
        None,
    );
    assert_eq!(refused.expect("at once").result, Err(DiskError::WriteProtected));
}

#[test]
fn while_it_is_not_known_which_disk_it_is_nothing_is_sent() {
    let mut world = World::new(1);
    world.control.hold();
    world.write(0, 1, 8);
    assert_eq!(world.at_far(), []);
    world.control.checked(world.shape);
    world.turn();
    assert_eq!(world.at_far(), [8]);
}

#[test]
fn a_handle_that_is_dropped_leaves_its_writes_in_the_ledger() {
    let mut world = World::new(2);
    world.write(1, 1, 8);
    world.cores.pop();
    world.write(0, 2, 8);
    assert_eq!(world.at_far(), [8], "that of the handle which is gone");
    world.pass(Nanos::from_secs(11));
    assert_eq!(world.at_far(), [8, 8]);
}

#[test]
fn seeds_are_the_same_for_ever_and_each_part_makes_another() {
    let serial = *b"S1                  ";
    let bare = Identity { serial, ..Identity::default() };
    let zeroes = |bytes: usize| "00".repeat(bytes);
    let of_serial = format!("5331{}", "20".repeat(18));
    let expected = |nsid: u32| format!("{} {} {} {of_serial} {nsid}", zeroes(16), zeroes(8), zeroes(16));
    assert_eq!((crate::seed(&bare, 1), crate::seed(&bare, 2)), (expected(1), expected(2)));
    let nguid = Identity { nguid: [0xa1; 16], ..bare };
    let expected = format!("{} {} {} {of_serial} ", "a1".repeat(16), zeroes(8), zeroes(16));
    assert_eq!((crate::seed(&nguid, 1), crate::seed(&nguid, 2)), (expected.clone(), expected));
    let others = [
        bare,
        nguid,
        Identity { eui64: [0xa1; 8], ..bare },
        Identity { uuid: [0xa1; 16], ..bare },
        Identity { serial: [b'S'; 20], ..nguid },
    ];
    let all: std::collections::HashSet<_> = others.iter().map(|identity| crate::seed(identity, 1)).collect();
    assert_eq!(all.len(), others.len());
}

#[test]
fn what_a_far_target_cannot_do_is_done_in_another_way() {
    let is_unsupported = crate::core::is_unsupported;
    assert!(is_unsupported(Status::INVALID_OPCODE.dnr()) && is_unsupported(Status::INVALID_FIELD.dnr()));
    assert!(!is_unsupported(Status::WRITE_FAULT));
}
