//! A seed's run: commands at random, whatever its [`Scenario`] has go wrong, the end of everything.

use std::collections::BTreeMap;

use nvme_spec::log::CriticalWarning;
use spindle_reactor::mem::Buf;
use spindle_target_disk::{BlockRange, CacheCounts, DiskError, Done, IoRequest, Op, Prepared, Token};
use spindle_tests_emulator::{Counters, EmulatorSpec, Faults};

use super::model::{Change, Stamp, Versions};
use super::scenario::Scenario;
use super::world::World;
use crate::sim::Rng;
use crate::sim::model::fill;

/// Turns that a command may take when nothing goes wrong any more.
const TURNS_MAX: u64 = 100_000;
/// Commands in flight, from which on no more are submitted.
const IN_FLIGHT_MAX: usize = 100;
/// A small cache, so that pages are evicted.
const CACHE_BYTES: u64 = 512 << 10;
/// Copies in flight, and blocks of one: what a block may be multiplies with both.
const COPIES_MAX: usize = 3;
const COPY_BLOCKS_MAX: u32 = 512;

/// What a run did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Commands that were submitted.
    pub commands: u64,
    /// Of those, how many did not succeed.
    pub errors: u64,
    /// How many ended because the drive was gone.
    pub gone: u64,
    /// Completions that named no command.
    pub strays: u64,
    /// Of everything that happened, in order.
    pub hash: u64,
    /// Of the drive.
    pub counters: Counters,
    /// Of the cache, if there is one.
    pub cache: CacheCounts,
}

/// What a core was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Task {
    Op(Op),
    Copy {
        from: u64,
        fua: bool,
    },
    /// Compare and write, of one block.
    Swap,
}

impl Task {
    /// It has a buffer, which comes back.
    fn has_data(self) -> bool {
        matches!(self, Task::Op(Op::Read | Op::Write { .. } | Op::Compare) | Task::Swap)
    }
}

struct InFlight {
    core: usize,
    task: Task,
    range: BlockRange,
    began: Stamp,
    /// Of a compare-and-write.
    expected: Vec<u8>,
}

/// What is not there now, and when it is again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Absence {
    No,
    Pulled(u64),
    Other(u64),
    Link(u64),
}

struct Sim {
    scenario: Scenario,
    rng: Rng,
    world: World,
    model: Versions,
    in_flight: BTreeMap<u64, InFlight>,
    stamp: Stamp,
    absence: Absence,
    /// Bytes that cores which were closed have kept from use.
    leaked: Vec<u64>,
    /// Completions may have any status.
    may_lie: bool,
    /// There is a cache in front of the disk.
    is_cached: bool,
    report: Report,
}

/// A run of `commands` commands.
///
/// # Panics
/// When a promise is broken.
#[must_use]
pub fn run(seed: u64, commands: u64) -> Report {
    run_with(seed, commands, false)
}

/// The same with a cache in front of the disk.
///
/// # Panics
/// As [`run`].
#[must_use]
pub fn run_cached(seed: u64, commands: u64) -> Report {
    run_with(seed, commands, true)
}

fn run_with(seed: u64, commands: u64, is_cached: bool) -> Report {
    let scenario = Scenario::draw(seed);
    let namespace = scenario.spec.namespaces.first().expect("one");
    let blocks = usize::try_from(namespace.blocks).expect("small");
    let judged = if scenario.has_resizes { blocks * 3 / 4 } else { blocks };
    let model = Versions::new(blocks, judged, namespace.block_bytes as usize, scenario.spec.has_write_cache);
    let mut world = World::new(scenario.spec.clone(), Scenario::settings(), scenario.cores, scenario.depth);
    let cached = is_cached.then(|| world.put_cache(CACHE_BYTES));
    world.emulator.set_faults(scenario.faults.clone());
    let mut sim = Sim {
        rng: Rng::new(seed ^ 0x5117),
        leaked: vec![0; scenario.cores],
        may_lie: scenario.faults.wrong_status != 0,
        is_cached,
        scenario,
        world,
        model,
        in_flight: BTreeMap::new(),
        stamp: 1,
        absence: Absence::No,
        report: Report::default(),
    };
    while sim.report.commands < commands {
        sim.turn();
    }
    sim.report.cache = cached.map(|cached| cached.counts()).unwrap_or_default();
    sim.finish();
    sim.report
}

impl Sim {
    fn tick(&mut self) -> Stamp {
        self.stamp += 1;
        self.stamp
    }

    fn note(&mut self, value: u64) {
        let hash = (self.report.hash ^ value).wrapping_mul(0x0100_0000_01b3);
        self.report.hash = hash ^ hash >> 29;
    }

    fn turn(&mut self) {
        // While the drive is away they only fail.
        let most = if self.in_flight.len() > IN_FLIGHT_MAX {
            0
        } else if self.absence == Absence::No || self.rng.permille(30) {
            4
        } else {
            0
        };
        for _ in 0..self.rng.below(most) {
            self.submit();
        }
        self.go_on();
        self.happen();
    }

    /// Everybody does something.
    fn go_on(&mut self) {
        let ms = if self.rng.permille(20) { self.rng.between(20, 120) } else { self.rng.between(1, 5) };
        self.world.step_manager(ms);
        self.world.emulator.steps(self.rng.below(4));
        for core in 0..self.scenario.cores {
            if self.rng.permille(800) {
                self.poll(core);
            }
        }
        match self.absence {
            Absence::Pulled(until) if until <= self.world.now => {
                self.world.emulator.plug();
                self.absence = Absence::No;
            }
            Absence::Other(until) if until <= self.world.now => {
                // The one that was there before, without what was on it.
                self.world.emulator.plug_other(self.scenario.spec.clone());
                self.world.emulator.set_faults(self.scenario.faults.clone());
                let now = self.tick();
                self.model.wipe(now);
                self.absence = Absence::No;
            }
            Absence::Link(until) if until <= self.world.now => {
                self.world.emulator.link_up();
                self.absence = Absence::No;
            }
            Absence::No | Absence::Pulled(_) | Absence::Other(_) | Absence::Link(_) => {}
        }
    }

    fn poll(&mut self, core: usize) {
        let ended: Vec<Done> = self.world.poll(core).collect();
        for done in ended {
            self.end(done);
        }
    }

    /// Its range, of a size that is mostly small and sometimes 2 MiB.
    fn range(&mut self, core: usize) -> Option<BlockRange> {
        let geometry = self.world.cores.get(core)?.disk.as_ref()?.geometry();
        let largest = (2 << 20) / geometry.block_bytes;
        let blocks = match self.rng.below(20) {
            0 => self.rng.between(1, u64::from(largest)),
            1 => u64::from(largest),
            2..8 => self.rng.between(1, 64),
            _ => self.rng.between(1, 9),
        };
        let blocks = blocks.min(geometry.block_count);
        // Many at the same places.
        let room = geometry.block_count - blocks + 1;
        let lba = if self.rng.permille(600) { self.rng.below(room.min(64)) } else { self.rng.below(room) };
        Some(BlockRange { lba, blocks: u32::try_from(blocks).ok()? })
    }

    /// What to ask for; `None` where it cannot be.
    fn draw(&mut self, core: usize, range: BlockRange) -> Option<Task> {
        let fua = self.rng.permille(200);
        Some(Task::Op(match self.rng.below(27) {
            0..8 => Op::Read,
            8..15 => Op::Write { fua },
            15..17 => Op::Flush,
            17..19 => Op::WriteZeroes { deallocate: self.rng.permille(500), fua },
            19 => Op::Deallocate,
            20 | 21 => Op::Compare,
            22 => Op::Verify,
            23 | 24 => return Some(Task::Swap),
            _ => {
                let disk = self.world.cores.get(core)?.disk.as_ref()?;
                let (able, size) = (disk.abilities().copy, disk.geometry().block_count);
                let blocks = u64::from(range.blocks);
                let is_copy = |it: &&InFlight| matches!(it.task, Task::Copy { .. });
                let is_enough = self.in_flight.values().filter(is_copy).count() >= COPIES_MAX;
                if !able || is_enough || range.blocks > COPY_BLOCKS_MAX {
                    return None;
                }
                let from = self.rng.below(size - blocks + 1);
                let is_apart = from + blocks <= range.lba || range.lba + blocks <= from;
                // What lies behind the part that is judged is not known.
                return (is_apart && self.model.is_judged(from + blocks)).then_some(Task::Copy { from, fua });
            }
        }))
    }

    fn submit(&mut self) {
        let core = self.rng.size(0, self.scenario.cores - 1);
        let Some(range) = self.range(core) else { return };
        let Some(task) = self.draw(core, range) else { return };
        let range = if task == Task::Swap { BlockRange { blocks: 1, ..range } } else { range };
        let bytes = range.blocks * self.scenario.spec.namespaces.first().map_or(512, |it| it.block_bytes);
        let own = self.world.cores.get_mut(core).expect("a core");
        let (disk, pool) = (own.disk.as_mut().expect("open"), &own.pool);
        let prepared = if task == Task::Op(Op::Read) {
            disk.prepare(&IoRequest::new(Op::Read, range), None)
        } else {
            Prepared::Pool
        };
        let mut buf = if task.has_data() && matches!(prepared, Prepared::Pool) {
            let Some(buf) = pool.take(bytes) else { return };
            Some(buf)
        } else {
            None
        };
        let began = self.tick();
        let command = began;
        let (first, count) = (usize::try_from(range.lba).expect("small"), range.blocks as usize);
        match task {
            Task::Op(Op::Write { .. }) => {
                let tag_of = |block: u32| command << 20 | u64::from(block) << 1 | 1;
                self.model.begin(command, first, (0..range.blocks).map(tag_of));
                write_tags(buf.as_mut().expect("taken"), range.blocks, tag_of);
            }
            Task::Op(Op::Deallocate) if self.scenario.is_deallocation_a_hint() => {}
            Task::Op(Op::WriteZeroes { .. } | Op::Deallocate) => {
                self.model.begin(command, first, (0..range.blocks).map(|_| 0));
            }
            Task::Op(Op::Compare) => buf.as_mut().expect("taken").copy_in(0, &self.guess(first, count)),
            Task::Swap => return self.submit_swap(core, range, buf.expect("taken"), began),
            Task::Copy { from, .. } => {
                self.model.begin_copy(command, usize::try_from(from).expect("small"), first, count);
            }
            Task::Op(Op::Read | Op::Flush | Op::Verify) => {}
        }
        self.report.commands += 1;
        self.in_flight.insert(command, InFlight { core, task, range, began, expected: Vec::new() });
        let disk = self.world.cores.get_mut(core).and_then(|core| core.disk.as_mut()).expect("open");
        let token = Token(command);
        let done = match (task, prepared) {
            (_, Prepared::Ready(data)) => Some(Done { token, result: Ok(()), buf: Some(data) }),
            (Task::Op(op), _) => disk.submit(token, &IoRequest::new(op, range), buf),
            (Task::Copy { from, fua }, _) => {
                disk.copy(token, BlockRange { lba: from, ..range }, range.lba, fua)
            }
            (Task::Swap, _) => None,
        };
        if let Some(done) = done {
            self.end(done);
        }
    }

    /// What the blocks may hold, and sometimes not quite.
    fn guess(&mut self, first: usize, count: usize) -> Vec<u8> {
        let mut expected = self.model.guess(first, count);
        if self.rng.permille(200) {
            let at = self.rng.size(0, expected.len() - 1);
            expected[at] ^= 0x40;
        }
        expected
    }

    fn submit_swap(&mut self, core: usize, range: BlockRange, mut data: Buf, command: Stamp) {
        let owner = self.world.cores.get_mut(core).expect("a core");
        let bytes = u32::try_from(data.len()).expect("a block");
        let Some(mut buf) = owner.pool.take(bytes) else { return };
        let first = usize::try_from(range.lba).expect("small");
        let expected = self.guess(first, 1);
        buf.copy_in(0, &expected);
        let tag = command << 20 | 1;
        self.model.begin(command, first, std::iter::once(tag));
        write_tags(&mut data, 1, |_| tag);
        self.report.commands += 1;
        let in_flight = InFlight { core, task: Task::Swap, range, began: command, expected };
        self.in_flight.insert(command, in_flight);
        let disk = self.world.cores.get_mut(core).and_then(|core| core.disk.as_mut()).expect("open");
        if let Some(done) = disk.compare_and_write(Token(command), range, buf, data) {
            self.end(done);
        }
    }

    /// A compare-and-write has ended.
    fn end_swap(&mut self, change: &Change, expected: &[u8], result: Result<(), DiskError>, now: Stamp) {
        let oldest = self.in_flight.values().map(|other| other.began).min().unwrap_or(now);
        match result {
            Ok(()) => self.model.judge(change.first, expected, change.began, now, oldest.min(change.began)),
            Err(DiskError::CompareDiffers) => {
                self.model.never(change);
                return self.model.judge_differs(change.first, expected, change.began);
            }
            Err(_) => {}
        }
        self.model.end(change, now, result.is_ok());
    }

    fn end(&mut self, done: Done) {
        let Done { token, result, buf } = done;
        let ended = self.in_flight.remove(&token.0).expect("ended once, and was in flight");
        let InFlight { task, range, began, expected, .. } = ended;
        if let Some(buf) = &buf {
            assert!(!self.world.holds(buf), "{task:?} {range:?}: the drive still has the buffer");
        }
        let now = self.tick();
        self.note(token.0);
        self.note(result.err().map_or(0, number_of));
        let is_compare = matches!(task, Task::Op(Op::Compare) | Task::Swap);
        let has_differed = is_compare && result == Err(DiskError::CompareDiffers);
        self.report.errors += u64::from(result.is_err());
        self.report.gone += u64::from(result == Err(DiskError::Gone));
        // One whose block is written for a long time waits only for so long.
        let is_late = (task, result) == (Task::Swap, Err(DiskError::Internal));
        if self.scenario.is_quiet && !is_late && result != Err(DiskError::NotSupported) && !has_differed {
            assert_eq!(result, Ok(()), "{task:?} {range:?} without any fault");
        }
        // A read of a cache that fails has none.
        let may_lack = self.is_cached && task == Task::Op(Op::Read) && result.is_err();
        assert!(may_lack || task.has_data() == buf.is_some(), "a buffer comes back");
        let first = usize::try_from(range.lba).expect("small");
        let (count, is_ok) = (range.blocks as usize, result.is_ok());
        let change = |is_durable| Change { command: token.0, began, first, count, is_durable };
        match task {
            Task::Op(Op::Read | Op::Compare) if is_ok || has_differed => {
                let buf = buf.expect("just seen");
                let mut bytes = vec![0; buf.len()];
                buf.copy_out(0, &mut bytes);
                self.note(
                    bytes.iter().step_by(509).fold(7, |sum, byte| sum * 31 % 65_521 + u64::from(*byte)),
                );
                let oldest = self.in_flight.values().map(|other| other.began).min().unwrap_or(now);
                if !has_differed {
                    self.model.judge(first, &bytes, began, now, oldest.min(began));
                } else if !self.may_lie {
                    self.model.judge_differs(first, &bytes, began);
                }
            }
            Task::Op(Op::Read | Op::Compare | Op::Verify) => {}
            Task::Swap => self.end_swap(&change(true), &expected, result, now),
            Task::Op(Op::Write { fua } | Op::WriteZeroes { fua, .. }) | Task::Copy { fua, .. } => {
                self.model.end(&change(fua), now, is_ok);
            }
            Task::Op(Op::Deallocate) if self.scenario.is_deallocation_a_hint() => {}
            Task::Op(Op::Deallocate) => self.model.end(&change(false), now, is_ok),
            Task::Op(Op::Flush) => self.model.flushed(began, is_ok),
        }
    }

    /// What happens beside the commands.
    fn happen(&mut self) {
        if self.absence == Absence::No && self.world.emulator.counters().vanished > 0 && self.is_gone() {
            // By a fault: plugged again some time later.
            self.absence = Absence::Pulled(self.world.now + self.rng.between(1, 5000));
            return;
        }
        if self.absence == Absence::No && self.rng.permille(self.scenario.pulls) {
            self.pull();
        }
        let events = self.scenario.events;
        if events == 0 || self.absence != Absence::No || !self.rng.permille(events * 4) {
            return;
        }
        match self.rng.below(9) {
            8 => {
                self.world.emulator.link_down();
                self.absence = Absence::Link(self.world.now + self.rng.between(1, 5000));
            }
            0 => {
                self.world.emulator.ask_removal();
                self.absence = Absence::Pulled(self.world.now + self.rng.between(2000, 8000));
            }
            1 => self.world.emulator.set_fatal(),
            2 => {
                self.world.emulator.freeze_registers();
                self.world.emulator.fail_resets(u32::from(self.rng.permille(300)));
                self.world.emulator.set_fatal();
            }
            3 => {
                let spec = EmulatorSpec { serial: "ANOTHER".to_owned(), ..self.scenario.spec.clone() };
                self.world.emulator.plug_other(spec);
                self.absence = Absence::Other(self.world.now + self.rng.between(5000, 9000));
            }
            4 | 5 => self.reopen(),
            6 => self.world.emulator.set_health(|health| {
                health.critical_warning = CriticalWarning::new().with_spare(health.media_errors % 2 == 0);
                health.media_errors += 1;
            }),
            _ if self.scenario.has_resizes => {
                let blocks = self.scenario.spec.namespaces.first().map_or(0, |namespace| namespace.blocks);
                let blocks = self.rng.between(blocks * 3 / 4, blocks);
                self.world.emulator.set_namespace_blocks(1, blocks);
            }
            _ => {}
        }
    }

    fn is_gone(&self) -> bool {
        use spindle_nvme_pcie::{Bus, OpenFunctionError};
        !self.world.emulator.is_open()
            && matches!(self.world.emulator.open().err(), Some(OpenFunctionError::Missing { .. }))
    }

    /// The drive is pulled; its power is lost at once, or it never was.
    fn pull(&mut self) {
        self.world.emulator.vanish();
        let now = self.tick();
        if self.rng.permille(700) {
            self.world.emulator.power_cut(now);
            self.model.cut(now);
        }
        self.absence = Absence::Pulled(self.world.now + self.rng.between(1, 5000));
    }

    /// A core drops its queue, with whatever is in flight, and takes another.
    fn reopen(&mut self) {
        let core = self.rng.size(0, self.scenario.cores - 1);
        // Whether they were done is never known, nor when: the model has them in flight for ever.
        self.in_flight.retain(|_, it| it.core != core);
        if let (Some(core), Some(leaked)) = (self.world.cores.get_mut(core), self.leaked.get_mut(core)) {
            core.disk = None;
            *leaked = core.pool_bytes - core.pool.free_bytes();
        }
        // A read that finds no frame waits for memory, which must not become less and less.
        if self.is_cached {
            self.world.renew_pool(core);
            self.leaked[core] = 0;
        }
        self.world.open(core);
    }

    /// Nothing goes wrong any more: everything ends, is as it should be, and is closed.
    fn finish(&mut self) {
        self.world.emulator.set_faults(Faults::default());
        self.scenario.faults = Faults::default();
        for _ in 0..2 {
            self.settle();
            self.read_all();
            self.scenario.is_quiet = false;
            // What was flushed is there after a loss of power.
            self.pull();
        }
        self.settle();
        self.read_all();
        self.report.strays = self.world.nvme.as_ref().map_or(0, |disk| disk.drive().faults().0);
        self.world.close();
        self.report.counters = self.world.emulator.counters();
        let violation = self.world.emulator.first_violation();
        assert_eq!((self.world.emulator.violations(), violation), (0, None));
        for (core, leaked) in self.world.cores.iter().zip(&self.leaked) {
            assert_eq!(core.pool.free_bytes() + leaked, core.pool_bytes, "every buffer is home");
        }
    }

    /// Until nothing is in flight and every core can read.
    fn settle(&mut self) {
        for _ in 0..TURNS_MAX {
            if self.in_flight.is_empty() && self.absence == Absence::No {
                break;
            }
            self.go_on_to_settle();
        }
        let left: Vec<_> = self.in_flight.values().map(|it| (it.core, it.task, it.range)).take(3).collect();
        assert!(left.is_empty(), "commands that never end: {left:?}");
        // One that was closed may hold its queue pair until the manager has deleted that.
        for core in 0..self.scenario.cores {
            // One that has just vanished, unnoticed, is not opened; it is plugged again.
            for _ in 0..TURNS_MAX {
                if self.world.cores.get(core).is_none_or(|core| core.disk.is_some()) {
                    break;
                }
                self.go_on_to_settle();
                self.world.open(core);
                self.go_on();
            }
        }
    }

    /// Who has vanished by itself comes back.
    fn go_on_to_settle(&mut self) {
        self.go_on();
        if self.absence == Absence::No && self.is_gone() {
            self.absence = Absence::Pulled(self.world.now);
        }
    }

    /// Every block, by each core in turn; a flush in between.
    fn read_all(&mut self) {
        let blocks = self.scenario.spec.namespaces.first().map_or(0, |namespace| namespace.blocks);
        let mut lba = 0;
        let mut turns = 0;
        while lba < blocks {
            turns += 1;
            assert!(turns < TURNS_MAX, "reads fail for ever");
            let core = usize::try_from(turns).unwrap_or(0) % self.scenario.cores;
            let count = u32::try_from((blocks - lba).min(256)).expect("small");
            let before = self.report.errors;
            let range = BlockRange { lba, blocks: count };
            let op = if turns % 7 == 0 { Op::Flush } else { Op::Read };
            self.run_one(core, op, range);
            let is_shrunk = self.scenario.has_resizes && lba + u64::from(count) > blocks * 3 / 4;
            if op == Op::Read && (self.report.errors == before || is_shrunk) {
                lba += u64::from(count);
            }
        }
        while {
            let before = self.report.errors;
            self.run_one(0, Op::Flush, BlockRange { lba: 0, blocks: 0 });
            self.report.errors != before
        } {}
    }

    /// One command to its end, without anything beside.
    fn run_one(&mut self, core: usize, op: Op, range: BlockRange) {
        let bytes = range.blocks * self.scenario.spec.namespaces.first().map_or(512, |it| it.block_bytes);
        let Some(owner) = self.world.cores.get_mut(core) else { return };
        let buf: Option<Buf> = if op == Op::Read {
            let Some(buf) = owner.pool.take(bytes) else { return };
            Some(buf)
        } else {
            None
        };
        let command = self.tick();
        let (task, expected) = (Task::Op(op), Vec::new());
        self.in_flight.insert(command, InFlight { core, task, range, began: command, expected });
        let disk = self.world.cores.get_mut(core).and_then(|core| core.disk.as_mut());
        if let Some(done) = disk.expect("open").submit(Token(command), &IoRequest::new(op, range), buf) {
            self.end(done);
        }
        for _ in 0..TURNS_MAX {
            self.go_on();
            if self.in_flight.is_empty() {
                return;
            }
        }
        panic!("core {core}: {op:?} {range:?} never ends");
    }
}

fn write_tags(buf: &mut Buf, blocks: u32, tag_of: impl Fn(u32) -> u64) {
    let block_bytes = buf.len() / blocks as usize;
    let mut content = vec![0; block_bytes];
    for block in 0..blocks {
        fill(tag_of(block), &mut content);
        buf.copy_in(block as usize * block_bytes, &content);
    }
}

/// A number for each error, for the run's fingerprint.
fn number_of(error: DiskError) -> u64 {
    match error {
        DiskError::MediaRead => 1,
        DiskError::MediaWrite => 2,
        DiskError::NoSpace => 3,
        DiskError::WriteProtected => 4,
        DiskError::NotSupported => 5,
        DiskError::CompareDiffers => 6,
        DiskError::Internal => 7,
        DiskError::Gone => 8,
        DiskError::Cancelled => 9,
        DiskError::Device(status) => 1 << 16 | u64::from(status.bits()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_seeds_keep_every_promise_and_the_same_seed_is_the_same_run() {
        for seed in 0..8 {
            let report = run(seed, 300);
            assert!(report.commands >= 300 && report.counters.completions > 0, "{report:?}");
            if seed < 2 {
                assert_eq!(run(seed, 300), report);
            }
        }
    }
}
