//! [`World`]: the far target, with whatever is on its way to it, at its disk, and on its way back.
//!
//! ```text
//!   submitted ──> on its way ──> at the disk: each block at an instant of its own ──> answer ──> taken
//!                     │               │                                                 │
//!   queue lost:  left over, or not    goes on, or not                                   never comes
//! ```
//! What is left over of a lost queue may be executed until the far target has ended its association, and at
//! the latest within the fence time that the near side has after it has noticed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvme_spec::optimistic::PageReference;
use nvme_spec::status::Status;
use spindle_reactor::clock::Nanos;
use spindle_target_disk::BlockRange;

use super::book::{Book, index};
use super::cache::FarCache;
use super::scenario::{Kind, SLOWEST, Scenario};
use crate::sim::Rng;

/// As all share it.
pub type FarShared = Arc<Mutex<World>>;

/// The world, for a moment.
pub fn lock(world: &Mutex<World>) -> MutexGuard<'_, World> {
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the far disk is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Read, Compare, Verify, Flush.
    Look,
    /// Write.
    Write,
    /// Write Zeroes.
    Zeroes,
    /// Dataset Management: some of the blocks are zeroes afterwards.
    Trim,
}

/// A command as a core has sent it.
#[derive(Debug, Clone)]
pub struct Sent {
    /// What.
    pub verb: Verb,
    /// Where.
    pub range: BlockRange,
    /// What it writes, or expects.
    pub tags: Vec<u64>,
    /// It compares.
    pub is_compare: bool,
    /// FUA.
    pub is_durable: bool,
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The command's index in the queue.
    pub slot: usize,
    /// How it ended.
    pub result: Result<(), Status>,
    /// What each block held.
    pub seen: Vec<u64>,
    /// Of a read of a page: where the cache has it.
    pub reference: Option<PageReference>,
}

/// One sending of a command.
#[derive(Debug)]
struct Try {
    queue: usize,
    slot: usize,
    sent: Sent,
    /// Whose; only of writes.
    command: Option<u64>,
    is_at_disk: bool,
    /// Blocks that are still to be executed.
    pending: Vec<usize>,
    seen: Vec<u64>,
    error: Option<Status>,
    /// Its latest instant.
    latest: Nanos,
    /// Plans of an older version are void.
    version: u64,
    is_left_over: bool,
}

#[derive(Debug)]
struct Association {
    must_fua: bool,
    /// The far target executes nothing more that arrives of it.
    is_ended: bool,
    /// Its connection with the manager is lost.
    is_broken: bool,
}

/// A queue, as the far target has it.
#[derive(Debug)]
struct Queue {
    association: u64,
    core: usize,
    is_broken: bool,
    /// When the core notices.
    notice: Nanos,
    stalled: Nanos,
    answers: Vec<(Nanos, u64, Answer)>,
    /// The core has left it.
    is_left: bool,
}

#[derive(Debug, Clone, Copy)]
enum Plans {
    Arrive(u64, u64),
    Execute(u64, u64, usize),
    Finish(u64, u64),
    End(u64),
}

/// See the module.
#[derive(Debug)]
pub struct World {
    /// Simulated.
    pub now: Nanos,
    /// Chance.
    pub rng: Rng,
    /// What is promised.
    pub book: Book,
    /// The blocks of the disk.
    pub disk: Vec<u64>,
    /// Its cache, for optimistic reads.
    pub cache: FarCache,
    /// Nothing of the far target's own accord goes wrong any more.
    pub is_healed: bool,
    /// When each core was last polled.
    pub polled: Vec<Nanos>,
    /// Cores may send: the manager has said that the association leads to the disk.
    pub may_send: bool,
    scenario: Scenario,
    associations: BTreeMap<u64, Association>,
    queues: Vec<Queue>,
    tries: BTreeMap<u64, Try>,
    agenda: BTreeMap<(Nanos, u64), Plans>,
    numbers: u64,
    /// Another disk is there.
    is_moved: bool,
    /// No core can connect until then.
    away: Nanos,
}

impl World {
    /// An empty disk.
    #[must_use]
    pub fn new(scenario: Scenario, seed: u64) -> FarShared {
        Arc::new(Mutex::new(World {
            now: Nanos::from_ms(1),
            rng: Rng::new(seed ^ 0xfa_7fa7),
            book: Book::new(scenario.blocks, scenario.fence_timeout, scenario.is_cached),
            disk: vec![0; index(scenario.blocks)],
            cache: FarCache::new(scenario.blocks, scenario.block_bytes, seed),
            is_healed: false,
            polled: vec![Nanos::ZERO; scenario.cores],
            may_send: false,
            scenario,
            associations: BTreeMap::new(),
            queues: Vec::new(),
            tries: BTreeMap::new(),
            agenda: BTreeMap::new(),
            numbers: 0,
            is_moved: false,
            away: Nanos::ZERO,
        }))
    }

    /// Sometimes short, sometimes long.
    pub fn span(&mut self, short_us: u64, long_us: u64) -> Nanos {
        let most = if self.rng.permille(100) { long_us } else { short_us };
        Nanos::from_us(self.rng.between(1, most))
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn scenario(&mut self, at: Nanos, what: Plans) {
        let number = self.number();
        self.agenda.insert((at, number), what);
    }

    /// When something is to happen next.
    #[must_use]
    pub fn next(&self) -> Option<Nanos> {
        self.agenda.first_key_value().map(|((at, _), _)| *at)
    }

    /// Time passes.
    pub fn advance(&mut self, now: Nanos) {
        while let Some(((at, number), what)) = self.agenda.pop_first() {
            if at > now {
                self.agenda.insert((at, number), what);
                break;
            }
            self.now = self.now.max(at);
            match what {
                Plans::Arrive(id, version) => self.arrive(id, version),
                Plans::Execute(id, version, block) => self.execute(id, version, block),
                Plans::Finish(id, version) => self.finish(id, version),
                Plans::End(number) => self.end(number),
            }
        }
        self.now = now;
        self.book.expire(now);
    }

    fn of(&mut self, id: u64, version: u64) -> Option<&mut Try> {
        self.tries.get_mut(&id).filter(|it| it.version == version)
    }

    /// A command is at the far target.
    fn arrive(&mut self, id: u64, version: u64) {
        let now = self.now;
        let Some(it) = self.of(id, version) else { return };
        let (queue, is_left_over) = (it.queue, it.is_left_over);
        let Queue { association, stalled, .. } = self.queues[queue];
        if stalled > now && !is_left_over {
            let at = stalled + self.span(1000, 50_000);
            return self.scenario(at, Plans::Arrive(id, version));
        }
        if self.associations[&association].is_ended {
            self.tries.remove(&id);
            return self.book.counts.hit("dropped at the far side");
        }
        let most = if self.rng.permille(self.scenario.slow) && !self.is_healed {
            self.book.counts.hit("slow");
            SLOWEST - Nanos::from_ms(50)
        } else {
            self.span(2000, 400_000)
        };
        let error = self.draw_error(id);
        let it = self.tries.get_mut(&id).expect("just seen");
        it.is_at_disk = true;
        if let Some((status, has_effect)) = error {
            it.error = Some(status);
            if !has_effect {
                it.pending.clear();
            }
        }
        self.place(id, most);
    }

    /// How it fails, and whether it has its effect.
    fn draw_error(&mut self, id: u64) -> Option<(Status, bool)> {
        let verb = self.tries[&id].sent.verb;
        if self.is_moved {
            return Some((Status::INVALID_NAMESPACE_OR_FORMAT.dnr(), false));
        }
        if verb == Verb::Zeroes && self.scenario.lacks_zeroes {
            let status = self.rng.pick(&[Status::INVALID_OPCODE, Status::INVALID_FIELD]);
            return Some((status.dnr(), false));
        }
        if self.is_healed || !self.rng.permille(self.scenario.errors) {
            return None;
        }
        self.book.counts.hit("errors");
        let codes = [Status::INTERNAL_ERROR, Status::WRITE_FAULT, Status::NAMESPACE_NOT_READY];
        Some((self.rng.pick(&codes), self.rng.permille(500)))
    }

    /// Give each of its blocks an instant from now on, and its end one after that.
    fn place(&mut self, id: u64, most: Nanos) {
        let now = self.now;
        let it = self.tries.get_mut(&id).expect("known");
        it.version += 1;
        let (version, pending, latest) = (it.version, it.pending.clone(), it.latest);
        let most = most.min(latest - now).as_us().max(1);
        let mut end = now;
        for block in pending {
            let at = now + Nanos::from_us(self.rng.between(0, most));
            end = end.max(at);
            self.scenario(at, Plans::Execute(id, version, block));
        }
        let end = end + Nanos::from_us(self.rng.between(0, (now + Nanos::from_us(most) - end).as_us()));
        self.scenario(end, Plans::Finish(id, version));
    }

    fn execute(&mut self, id: u64, version: u64, block: usize) {
        if self.of(id, version).is_some() {
            self.execute_block(id, block);
        }
    }

    fn execute_block(&mut self, id: u64, block: usize) {
        let trims = self.rng.permille(500);
        let it = self.tries.get_mut(&id).expect("known");
        it.pending.retain(|other| *other != block);
        let held = &mut self.disk[index(it.sent.range.lba) + block];
        match it.sent.verb {
            Verb::Look => {
                it.seen[block] = *held;
                return;
            }
            Verb::Write => *held = it.sent.tags[block],
            Verb::Zeroes => *held = 0,
            Verb::Trim if trims => *held = 0,
            Verb::Trim => {}
        }
        self.cache.on_change(it.sent.range.lba + block as u64);
        let (command, is_left_over) = (it.command.expect("of a host"), it.is_left_over);
        self.book.check_executed(command);
        if is_left_over {
            self.book.counts.hit("left over and executed");
        }
    }

    /// It is answered.
    fn finish(&mut self, id: u64, version: u64) {
        if self.of(id, version).is_none() {
            return;
        }
        let at = self.now + self.span(200, 100_000);
        let it = self.tries.remove(&id).expect("just seen");
        let queue = &mut self.queues[it.queue];
        if queue.is_broken {
            return;
        }
        let differs = it.sent.is_compare && it.sent.tags != it.seen;
        let result = match it.error {
            Some(status) => Err(status),
            None if differs => Err(Status::COMPARE_FAILURE),
            None => Ok(()),
        };
        let Sent { verb, range, is_compare, .. } = it.sent;
        let is_newest = || {
            let first = index(range.lba);
            self.disk[first..first + range.blocks as usize] == it.seen
        };
        let page = self.cache.page_of(range.lba, range.blocks).filter(|_| {
            self.scenario.is_optimistic && verb == Verb::Look && !is_compare && result.is_ok() && is_newest()
        });
        let reference = page.and_then(|page| self.cache.enter(page));
        queue.answers.push((at, id, Answer { slot: it.slot, result, seen: it.seen, reference }));
    }

    /// The manager has an association.
    pub fn begin_association(&mut self, number: u64, must_fua: bool) {
        let association = Association { must_fua, is_ended: false, is_broken: false };
        self.associations.insert(number, association);
    }

    /// No target is there, or another one.
    #[must_use]
    pub fn is_away(&self) -> bool {
        self.now < self.away || self.is_moved
    }

    /// The manager's connection is lost.
    #[must_use]
    pub fn is_broken(&self, number: u64) -> bool {
        self.associations[&number].is_broken
    }

    /// A queue can be connected.
    #[must_use]
    pub fn is_connectable(&self, number: u64) -> bool {
        let association = &self.associations[&number];
        !association.is_broken && !association.is_ended && self.now >= self.away
    }

    /// A queue is connected.
    pub fn connect(&mut self, association: u64, core: usize) -> usize {
        self.queues.push(Queue {
            association,
            core,
            is_broken: false,
            notice: Nanos::ZERO,
            stalled: Nanos::ZERO,
            answers: Vec::new(),
            is_left: false,
        });
        self.queues.len() - 1
    }

    /// A core sends a command, or reads a page from the cache: it may.
    pub fn check_may_send(&self, queue: usize) {
        let Queue { association, core, .. } = self.queues[queue];
        assert!(self.may_send, "core {core} sends while it is not known to which disk");
        let is_older = |other: &&Queue| !other.is_left && other.association < association;
        if let Some(older) = self.queues.iter().find(is_older) {
            panic!("core {core} sends over association {association}, core {} has {older:?}", older.core);
        }
    }

    /// A core sends a command. Of a write: whose it is.
    pub fn submit(&mut self, queue: usize, slot: usize, sent: Sent) -> Option<u64> {
        self.check_may_send(queue);
        self.send(queue, slot, sent)
    }

    /// As [`World::submit`], of a command that the core had sent before: a rejected optimistic read.
    pub fn send(&mut self, queue: usize, slot: usize, sent: Sent) -> Option<u64> {
        let Queue { association, core, is_broken, .. } = self.queues[queue];
        let is_write = sent.verb != Verb::Look;
        if self.associations[&association].must_fua && [Verb::Write, Verb::Zeroes].contains(&sent.verb) {
            assert!(sent.is_durable, "core {core} sends {sent:?} without FUA");
            self.book.counts.hit("must have FUA");
        }
        let command = is_write.then(|| self.command_of(core, &sent));
        if let Some(command) = command {
            self.book.sent(command, sent.range);
        }
        if is_broken {
            // The target is not there to get it.
            return command;
        }
        let blocks = sent.range.blocks as usize;
        let id = self.number();
        let it = Try {
            queue,
            slot,
            sent,
            command,
            is_at_disk: false,
            pending: (0..blocks).collect(),
            seen: vec![0; blocks],
            error: None,
            latest: Nanos::MAX,
            version: 0,
            is_left_over: false,
        };
        self.tries.insert(id, it);
        let at = self.now + self.span(300, 30_000);
        self.scenario(at, Plans::Arrive(id, 0));
        command
    }

    fn command_of(&self, core: usize, sent: &Sent) -> u64 {
        let first = sent.tags.first().copied().unwrap_or(0);
        let found = if first == 0 { self.book.zeroes(core, sent.range) } else { Some(first >> 32) };
        let id = found.unwrap_or_else(|| panic!("core {core} sends {sent:?}, which was not asked for"));
        let command = &self.book.commands[&id];
        let from = sent.range.lba.checked_sub(command.range.lba).map(index);
        let own = from.and_then(|from| command.tags.get(from..from + sent.range.blocks as usize));
        assert_eq!(Some(&*sent.tags), own, "core {core} sends {sent:?} for {command:?}");
        id
    }

    /// Answers that have come, or `None`: the queue is lost.
    pub fn poll(&mut self, queue: usize) -> Option<Vec<Answer>> {
        let now = self.now;
        let Queue { is_broken, notice, stalled, .. } = self.queues[queue];
        if is_broken && now >= notice {
            return None;
        }
        let mut come: Vec<(Nanos, u64, Answer)> = Vec::new();
        if !is_broken && now >= stalled {
            let answers = std::mem::take(&mut self.queues[queue].answers);
            let (here, later) = answers.into_iter().partition(|(at, _, _)| *at <= now);
            self.queues[queue].answers = later;
            come = here;
            come.sort_by_key(|(at, id, _)| (*at, *id));
        }
        Some(come.into_iter().map(|(_, _, answer)| answer).collect())
    }

    /// A core has an answer: of which command of a host it was the end.
    pub fn taken(&mut self, queue: usize, command: Option<u64>, is_ok: bool) {
        let core = self.queues[queue].core;
        self.book.answered(command, core, is_ok);
    }

    /// The link of a queue is gone; its core notices after some time.
    pub fn break_queue(&mut self, queue: usize) {
        let notice = self.now + self.span(20_000, 3_000_000);
        if self.queues[queue].is_broken {
            return;
        }
        let it = &mut self.queues[queue];
        (it.is_broken, it.notice) = (true, notice);
        it.answers.clear();
        let own = self.tries_of(|it| it.queue == queue);
        for id in own {
            let is_gone = self.rng.permille(300);
            let it = self.tries.get_mut(&id).expect("known");
            it.is_left_over = true;
            if !it.is_at_disk && is_gone {
                self.tries.remove(&id);
            }
        }
    }

    fn tries_of(&self, is_meant: impl Fn(&Try) -> bool) -> Vec<u64> {
        self.tries.iter().filter(|(_, it)| is_meant(it)).map(|(id, _)| *id).collect()
    }

    /// A core leaves a queue, and has lost these writes with it. What is left over of them comes to an end
    /// within the fence time that it has.
    pub fn leave(&mut self, queue: usize, lost: impl Iterator<Item = (u64, BlockRange)>) {
        self.break_queue(queue);
        let Queue { association, core, .. } = self.queues[queue];
        self.queues[queue].is_left = true;
        self.book.counts.hit("losses");
        let noticed = self.polled[core];
        for (command, piece) in lost {
            self.book.lose(command, piece, association, noticed);
        }
        let latest = noticed + self.scenario.fence_timeout - Nanos::from_ms(100);
        for id in self.tries_of(|it| it.queue == queue) {
            let it = self.tries.get_mut(&id).expect("known");
            it.latest = latest;
            if it.sent.verb == Verb::Look {
                self.tries.remove(&id);
            } else {
                self.delay(id);
            }
        }
    }

    /// What is left over takes as long as it likes.
    fn delay(&mut self, id: u64) {
        let spans = [2, 50, 1000, 10_000, 60_000].map(Nanos::from_ms);
        let span = self.rng.pick(&spans);
        let it = self.tries.get_mut(&id).expect("known");
        if it.is_at_disk {
            return self.place(id, span.min(SLOWEST - Nanos::from_ms(50)));
        }
        it.version += 1;
        let (version, latest) = (it.version, it.latest);
        let most = span.min(latest - self.now).as_us().max(1);
        let at = self.now + Nanos::from_us(self.rng.between(1, most));
        self.scenario(at, Plans::Arrive(id, version));
    }

    /// The far target ends an association: of what arrives nothing is executed any more.
    pub fn end(&mut self, number: u64) {
        let Some(association) = self.associations.get_mut(&number).filter(|it| !it.is_ended) else { return };
        (association.is_ended, association.is_broken) = (true, true);
        let queues = &self.queues;
        for id in self.tries_of(|it| queues[it.queue].association == number && !it.is_at_disk) {
            self.tries.remove(&id);
        }
        for queue in 0..self.queues.len() {
            if self.queues[queue].association == number {
                self.break_queue(queue);
            }
        }
    }

    /// The manager has left an association: who does not hear of it ends it some time later.
    pub fn left_by_manager(&mut self, number: u64) {
        self.associations.get_mut(&number).expect("known").is_broken = true;
        let at = self.now + self.span(100_000, 9_900_000);
        self.scenario(at, Plans::End(number));
    }

    /// End all associations before `number`: each had told whose it is before a queue was connected.
    pub fn end_former(&mut self, number: u64) {
        (1..number).for_each(|former| self.end(former));
    }

    /// Of the associations before `number` nothing is at the disk.
    #[must_use]
    pub fn is_quiet_before(&self, number: u64) -> bool {
        self.tries.values().all(|it| self.queues[it.queue].association >= number)
    }

    fn up(&self) -> Vec<usize> {
        let is_up = |it: &Queue| !it.is_broken && !it.is_left;
        (0..self.queues.len()).filter(|queue| is_up(&self.queues[*queue])).collect()
    }

    /// A link is lost.
    pub fn lose_queue(&mut self) {
        let up = self.up();
        if !up.is_empty() {
            let queue = self.rng.pick(&up);
            self.break_queue(queue);
        }
    }

    /// All links are lost; the manager's too, or not.
    pub fn lose_all(&mut self) {
        self.up().into_iter().for_each(|queue| self.break_queue(queue));
        let with_manager = self.rng.permille(700);
        if with_manager && let Some((_, association)) = self.associations.iter_mut().next_back() {
            association.is_broken = true;
        }
    }

    /// A link moves nothing for some time, and is lost then, or not.
    pub fn stall(&mut self) {
        let up = self.up();
        if up.is_empty() {
            return;
        }
        let queue = self.rng.pick(&up);
        self.queues[queue].stalled = self.now + self.span(500_000, 30_000_000);
        self.book.counts.hit("stalls");
    }

    /// The network is cut for some time; the far target goes on.
    pub fn cut(&mut self) {
        self.lose_all();
        self.away = self.now + self.span(5_000_000, 60_000_000);
        self.book.counts.hit("cuts");
    }

    /// The far target is started anew: what it had is done, or never is.
    pub fn restart(&mut self) {
        for id in self.tries_of(|_| true) {
            let is_done = self.rng.permille(500) && self.tries[&id].is_at_disk;
            let pending = self.tries[&id].pending.clone();
            for block in pending.into_iter().filter(|_| is_done) {
                self.execute_block(id, block);
            }
            self.tries.remove(&id);
        }
        let numbers: Vec<u64> = self.associations.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.end(number));
        self.away = self.now + self.span(5_000_000, 60_000_000);
        self.book.counts.hit("restarts");
    }

    /// Another disk is put under the NSID: what was meant for the one before fails.
    pub fn move_away(&mut self) {
        self.is_moved = true;
        self.book.counts.hit("moves");
        for id in self.tries_of(|_| true) {
            let it = self.tries.get_mut(&id).expect("known");
            if it.is_at_disk {
                it.pending.clear();
                it.error = Some(Status::INVALID_NAMESPACE_OR_FORMAT.dnr());
                self.place(id, Nanos::from_ms(1));
            }
        }
    }

    /// The disk is back.
    pub fn move_back(&mut self) {
        self.is_moved = false;
    }

    /// It is another disk now.
    #[must_use]
    pub fn is_moved(&self) -> bool {
        self.is_moved
    }

    /// Nothing goes wrong any more.
    pub fn heal(&mut self) {
        (self.is_healed, self.is_moved) = (true, false);
        self.away = self.away.min(self.now + Nanos::from_secs(1));
        self.queues.iter_mut().for_each(|queue| queue.stalled = Nanos::ZERO);
    }

    /// Nothing is on its way or at the disk, and no core is about to notice a loss.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let is_broken = self.associations.last_key_value().is_some_and(|(_, it)| it.is_broken);
        self.tries.is_empty() && !is_broken && self.queues.iter().all(|it| it.is_left || !it.is_broken)
    }

    /// Its cache can be read.
    #[must_use]
    pub fn is_optimistic(&self) -> bool {
        self.scenario.is_optimistic
    }

    /// Who the far target is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.scenario.kind
    }
}
