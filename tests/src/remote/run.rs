//! A seed's run: commands at random, whatever its [`Scenario`] has go wrong, the end of everything.

use std::sync::Arc;
use std::time::Duration;

use nvme_spec::Nqn;
use spindle_nvme_initiator::{Host, Identity, OptimisticOptions, Target};
use spindle_nvme_transport::TransportKind;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_target_disk::{
    BlockRange, CacheSpec, CachedDisk, ChannelContext, Disk, DiskChannel, DiskError, Done, Geometry,
    IoRequest, Op, Owner, PolicyKind, Prepared, Token,
};
use spindle_target_remote::{RemoteDisk, RemoteFacts, RemoteSpec, Shape};

use super::book::index;
use super::cache::PAGE_BYTES;
use super::far::{FarShared, World, lock};
use super::manager::Manager;
use super::scenario::{COMMAND_TIMEOUT, Scenario};
use super::seam::Limits;
use crate::sim::Rng;
use crate::sim::counts::Counts;
use crate::sim::history::What;
use crate::sim::model::{fill, stamp, tag_of};

/// Most blocks of a command.
const COMMAND_BLOCKS: u64 = 12;
/// Most ends that a poll brings: as many as there can be.
const DONE_MAX: usize = 256;
/// The smallest cache there is: more than the largest disk of 512-byte blocks, less than the others.
const CACHE_BYTES: u64 = 64 << 10;
/// Memory of a core's hosts: what is longer than the small ones is in pieces, as the large one is taken.
const ZONES: [ZoneSpec; 2] =
    [ZoneSpec { buffer_bytes: 4096, count: 1024 }, ZoneSpec { buffer_bytes: 65_536, count: 1 }];

/// What a run did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Commands that were submitted.
    pub commands: u64,
    /// How often what happened.
    pub counts: Counts,
    /// Of everything that ended, in order.
    pub hash: u64,
    /// Simulated time.
    pub seconds: u64,
}

impl Report {
    /// With another one's.
    pub fn add(&mut self, other: &Report) {
        self.commands += other.commands;
        self.seconds += other.seconds;
        self.hash ^= other.hash;
        self.counts.add_all(&other.counts);
    }
}

struct Core {
    disk: Option<Box<dyn DiskChannel>>,
    pool: Pool,
    /// Of them the large one.
    _large: Option<Buf>,
    pool_bytes: u64,
    /// It is not polled until then.
    hung_until: Nanos,
    /// Hosts that are there.
    owners: Vec<u32>,
}

struct Sim {
    scenario: Scenario,
    rng: Rng,
    world: FarShared,
    source: Arc<dyn Disk>,
    /// The cache in front of it.
    cached: Option<Arc<CachedDisk>>,
    manager: Manager,
    cores: Vec<Core>,
    now: Nanos,
    done: Vec<Done>,
    /// Something has ended or begun in this turn.
    is_busy: bool,
    next_id: u64,
    next_owner: u32,
    report: Report,
    /// The disk is back then.
    moved_until: Option<Nanos>,
}

/// A run of `commands` commands.
///
/// # Panics
/// When a promise is broken.
#[must_use]
pub fn run(seed: u64, commands: u64) -> Report {
    run_scenario(seed, commands, Scenario::draw, "one_seed_of_the_remote_disk")
}

/// A run of `commands` commands, with optimistic reads.
///
/// # Panics
/// When a promise is broken.
#[must_use]
pub fn run_optimistic(seed: u64, commands: u64) -> Report {
    run_scenario(
        seed,
        commands,
        Scenario::draw_optimistic,
        "one_seed_with_optimistic_reads_of_the_remote_disk",
    )
}

/// A run of `commands` commands, with a cache in front of the disk.
///
/// # Panics
/// When a promise is broken.
#[must_use]
pub fn run_cached(seed: u64, commands: u64) -> Report {
    run_scenario(seed, commands, Scenario::draw_cached, "one_seed_of_the_cached_remote_disk")
}

fn run_scenario(seed: u64, commands: u64, draw: fn(u64) -> Scenario, test: &str) -> Report {
    let outcome = std::panic::catch_unwind(|| {
        let mut sim = Sim::new(draw(seed), seed);
        while sim.report.commands < commands {
            sim.turn();
        }
        sim.finish()
    });
    outcome.unwrap_or_else(|panic| {
        let replay = format!("SPINDLE_SIM_SEED={seed} cargo nextest run {test}");
        eprintln!("SEED={seed} failed; replay: {replay}");
        std::panic::resume_unwind(panic)
    })
}

fn spec(scenario: &Scenario) -> RemoteSpec {
    let nqn = Nqn::new("nqn.2014-08.org.example:far").expect("well formed");
    let address = ([127, 0, 0, 1], 4420).into();
    let host = Host::from_uuid([7; 16]);
    RemoteSpec {
        target: Target { transport: TransportKind::Tcp, address, nqn, host },
        nsid: 1,
        cores: u16::try_from(scenario.cores).expect("few"),
        depth: scenario.depth,
        command_timeout: COMMAND_TIMEOUT.as_duration(),
        quiesce: Duration::from_secs(1),
        optimistic: scenario.is_optimistic.then(OptimisticOptions::default),
        is_clustered: false,
    }
}

fn facts() -> RemoteFacts {
    let identity = Identity { nguid: [1; 16], eui64: [0; 8], uuid: [0; 16], serial: [b' '; 20] };
    RemoteFacts {
        model: "far".to_owned(),
        serial: "1".to_owned(),
        transfer_bytes_max: u32::MAX,
        medium_ids: Vec::new(),
        identity,
    }
}

impl Sim {
    fn new(scenario: Scenario, seed: u64) -> Sim {
        let world = World::new(scenario.clone(), seed);
        let geometry = Geometry {
            block_bytes: scenario.block_bytes,
            block_count: scenario.blocks,
            is_read_only: false,
            has_volatile_cache: false,
            can_deallocate: scenario.abilities.dataset_management(),
            atomic_blocks: 1,
            can_compare_and_write: false,
        };
        let shape = Shape { geometry, must_fua: false };
        let (source, control) =
            RemoteDisk::with_far("far", &spec(&scenario), facts(), shape, (scenario.abilities, None));
        control.set_fence_timeout(scenario.fence_timeout);
        let limits = Limits {
            block_bytes: scenario.block_bytes,
            transfer_blocks: scenario.transfer_blocks,
            pieces_max: scenario.pieces_max,
            depth: scenario.depth,
        };
        let manager = Manager::new(Arc::clone(&world), control, (shape, limits), scenario.may_land, seed);
        let core = |_| {
            let pool = Pool::new(&ZONES, Pages::Base).expect("a pool");
            let _large = pool.take(65_536);
            let (pool_bytes, hung_until) = (pool.free_bytes(), Nanos::ZERO);
            Core { disk: None, pool, _large, pool_bytes, hung_until, owners: Vec::new() }
        };
        let cores = (0..scenario.cores).map(core).collect();
        let spec = CacheSpec::new(CACHE_BYTES, PolicyKind::S3Fifo, Pages::Base);
        let cached =
            scenario.is_cached.then(|| CachedDisk::new(source.clone(), Some(&spec)).expect("a cache"));
        let source: Arc<dyn Disk> = cached.clone().map_or(source as _, |cached| cached as _);
        let mut sim = Sim {
            scenario,
            rng: Rng::new(seed ^ 0x5117),
            world,
            source,
            cached,
            manager,
            cores,
            now: Nanos::from_ms(1),
            done: Vec::with_capacity(DONE_MAX),
            is_busy: true,
            next_id: 0,
            next_owner: 0,
            report: Report::default(),
            moved_until: None,
        };
        (0..sim.cores.len()).for_each(|core| sim.open(core));
        sim
    }

    fn open(&mut self, core: usize) {
        let own = &mut self.cores[core];
        let context = ChannelContext { core, pool: own.pool.clone(), depth: 32 };
        own.disk = Some(self.source.open(&context).expect("memory"));
        own.owners.clear();
        for _ in 0..self.rng.between(1, 3) {
            self.next_owner += 1;
            self.cores[core].owners.push(self.next_owner);
        }
        self.poll(core);
    }

    fn turn(&mut self) {
        self.go_on();
        if self.is_busy || self.rng.permille(100) {
            let core = self.rng.size(0, self.cores.len() - 1);
            for _ in 0..self.rng.below(4) {
                self.submit(core);
            }
        }
        self.happen();
    }

    /// Everybody does something.
    fn go_on(&mut self) {
        let next = lock(&self.world).next();
        let is_near = next.is_some_and(|at| at < self.now + Nanos::from_ms(5));
        let us =
            if self.is_busy || is_near { self.rng.between(1, 1500) } else { self.rng.between(5000, 40_000) };
        self.is_busy = false;
        self.now += Nanos::from_us(us);
        lock(&self.world).advance(self.now);
        if self.moved_until.is_some_and(|until| self.now >= until) {
            self.moved_until = None;
            lock(&self.world).move_back();
            self.manager.event(self.now);
        }
        self.manager.step(self.now);
        let first = self.rng.size(0, self.cores.len() - 1);
        for core in 0..self.cores.len() {
            self.poll((first + core) % self.cores.len());
        }
        self.check_times();
    }

    fn is_awake(&self, core: usize) -> bool {
        self.cores[core].disk.is_some() && self.now >= self.cores[core].hung_until
    }

    fn poll(&mut self, core: usize) {
        if !self.is_awake(core) {
            return;
        }
        lock(&self.world).polled[core] = self.now;
        // As the target's core in each of its turns.
        self.cores[core].pool.clear_claims();
        let disk = self.cores[core].disk.as_mut().expect("open");
        disk.poll(self.now, &mut self.done);
        for done in self.done.drain(..).collect::<Vec<_>>() {
            self.end(done);
        }
    }

    /// No command has had more than its time.
    fn check_times(&self) {
        let world = lock(&self.world);
        for (id, command) in world.book.commands.iter().filter(|(_, command)| command.is_open()) {
            if self.is_awake(command.core) {
                world.book.check_time(*id, self.now, self.cores[command.core].hung_until);
            }
        }
    }

    /// Pages are read and written as such, and often the same ones.
    fn page_range(&self) -> Option<BlockRange> {
        let blocks = PAGE_BYTES as u64 / u64::from(self.scenario.block_bytes);
        let rng = &mut lock(&self.world).cache.rng;
        if !rng.permille(600) {
            return None;
        }
        let page = rng.below((self.scenario.blocks / blocks).min(4));
        Some(BlockRange { lba: page * blocks, blocks: u32::try_from(blocks).expect("few") })
    }

    fn range(&mut self) -> BlockRange {
        if self.scenario.is_optimistic
            && let Some(range) = self.page_range()
        {
            return range;
        }
        let most = if self.rng.permille(300) { COMMAND_BLOCKS } else { 3 };
        let blocks = self.rng.between(1, most);
        let room = self.scenario.blocks - blocks + 1;
        // Many at the same places.
        let lba = if self.rng.permille(600) { self.rng.below(room.min(8)) } else { self.rng.below(room) };
        BlockRange { lba, blocks: u32::try_from(blocks).expect("few") }
    }

    fn draw(&mut self, core: usize, range: BlockRange) -> Op {
        let fua = self.rng.permille(200);
        match self.rng.below(24) {
            0..8 => Op::Read,
            16 => Op::Flush,
            17 | 18 => Op::Compare,
            19 => Op::Verify,
            // Zeroes do not tell whose they are: a core has only one command that writes them there.
            20..22 if lock(&self.world).book.zeroes(core, range).is_none() => {
                Op::WriteZeroes { deallocate: self.rng.permille(500), fua }
            }
            22 if lock(&self.world).book.zeroes(core, range).is_none() => Op::Deallocate,
            _ => Op::Write { fua },
        }
    }

    /// The value of each block that a command writes or expects.
    fn tags(&mut self, id: u64, op: Op, range: BlockRange) -> Vec<u64> {
        let first = index(range.lba);
        let blocks = first..first + range.blocks as usize;
        match op {
            Op::Write { .. } => blocks.map(|block| stamp(id, 0, block)).collect(),
            Op::WriteZeroes { .. } | Op::Deallocate => vec![0; range.blocks as usize],
            Op::Compare if self.rng.permille(200) => blocks.map(|block| stamp(id, 0, block)).collect(),
            Op::Compare => lock(&self.world).disk[blocks].to_vec(),
            Op::Read | Op::Flush | Op::Verify => Vec::new(),
        }
    }

    fn submit(&mut self, core: usize) {
        if !self.is_awake(core) || self.open_count(core) >= self.scenario.in_flight {
            return;
        }
        let range = self.range();
        let op = self.draw(core, range);
        let range = if op == Op::Flush { BlockRange { lba: 0, blocks: 1 } } else { range };
        self.submit_op(core, op, range);
    }

    fn open_count(&self, core: usize) -> usize {
        let world = lock(&self.world);
        world.book.commands.values().filter(|command| command.core == core && command.is_open()).count()
    }

    fn submit_op(&mut self, core: usize, op: Op, range: BlockRange) -> u64 {
        self.next_id += 1;
        let id = self.next_id;
        let tags = self.tags(id, op, range);
        let has_data = matches!(op, Op::Read | Op::Write { .. } | Op::Compare);
        let request = IoRequest::new(op, range);
        let disk = self.cores[core].disk.as_mut().expect("open");
        let prepared = if op == Op::Read { disk.prepare(&request, None) } else { Prepared::Pool };
        let has_data = has_data && matches!(prepared, Prepared::Pool);
        let pool = &self.cores[core].pool;
        let mut buf: Option<Buf> =
            has_data.then(|| pool.take(range.blocks * self.scenario.block_bytes).expect("enough"));
        let mut content = vec![0; self.scenario.block_bytes as usize];
        for (block, tag) in tags.iter().enumerate() {
            if let Some(buf) = &mut buf {
                fill(*tag, &mut content);
                buf.copy_in(block * content.len(), &content);
            }
        }
        let owner = self.rng.pick(&self.cores[core].owners);
        lock(&self.world).book.begin(id, (core, owner), (op, range), tags, self.now);
        self.report.commands += 1;
        self.is_busy = true;
        let token = Token(u64::from(owner) << 32 | id);
        let disk = self.cores[core].disk.as_mut().expect("open");
        let done = match prepared {
            Prepared::Ready(data) => Some(Done { token, result: Ok(()), buf: Some(data) }),
            Prepared::Fill(_) | Prepared::Pool | Prepared::Later | Prepared::Wait => {
                disk.submit(token, &request, buf)
            }
        };
        done.into_iter().for_each(|done| self.end(done));
        id
    }

    fn end(&mut self, done: Done) {
        let Done { token, result, buf } = done;
        let id = token.0 & u64::from(u32::MAX);
        self.is_busy = true;
        let mut world = lock(&self.world);
        let book = &mut world.book;
        let hung_until = self.cores[book.commands[&id].core].hung_until;
        book.end(id, result, self.now, hung_until);
        self.report.hash = (self.report.hash ^ id << 1 ^ u64::from(result.is_ok())).wrapping_mul(0x100_01b3);
        let (op, tags) = (book.commands[&id].op, book.commands[&id].tags.clone());
        let is_data = matches!(op, Op::Read | Op::Write { .. } | Op::Compare);
        match op {
            Op::Read if result.is_ok() => {
                let buf = buf.as_ref().expect("a buffer comes back");
                let mut bytes = vec![0; buf.len()];
                buf.copy_out(0, &mut bytes);
                let tag = |block| What::Saw(tag_of(block).expect("no block is torn"));
                book.saw(id, bytes.chunks_exact(self.scenario.block_bytes as usize).map(tag));
            }
            Op::Compare if result == Err(DiskError::CompareDiffers) && tags.len() == 1 => {
                book.saw(id, tags.into_iter().map(What::SawOther));
                book.counts.hit("compared other");
            }
            Op::Compare if result.is_ok() => book.counts.hit("compared equal"),
            Op::Read
            | Op::Write { .. }
            | Op::Flush
            | Op::WriteZeroes { .. }
            | Op::Deallocate
            | Op::Compare
            | Op::Verify => {}
        }
        // A read of a cache that fails has none.
        if is_data && buf.is_none() && !(self.scenario.is_cached && op == Op::Read) {
            let overdue = self.now + super::book::SLACK >= book.commands[&id].begun + COMMAND_TIMEOUT;
            assert!(overdue, "{op:?} {id} ended with {result:?} and without its buffer");
        }
    }

    /// What happens beside the commands.
    fn happen(&mut self) {
        let rates = self.scenario.rates;
        let mut is_time = |rate: u64| self.rng.below(10_000) < rate;
        let [loss, breaks, stall, restart, cut, moves] =
            [rates.losses, rates.breaks, rates.stalls, rates.restarts, rates.cuts, rates.moves]
                .map(&mut is_time);
        let [hang, forget, reopen] = [rates.hangs, rates.forgets, rates.reopens].map(is_time);
        let mut world = lock(&self.world);
        if self.scenario.is_optimistic && world.cache.happen() {
            world.book.counts.hit("caches gone");
        }
        if loss {
            world.lose_queue();
        }
        if breaks {
            world.lose_all();
        }
        if stall {
            world.stall();
        }
        if self.manager.is_up() {
            if restart {
                world.restart();
            } else if cut {
                world.cut();
            } else if moves && self.moved_until.is_none() {
                world.move_away();
                self.moved_until = Some(self.now + world.span(200_000, 30_000_000));
                self.manager.event(self.now);
            }
        }
        drop(world);
        let core = self.rng.size(0, self.cores.len() - 1);
        if !self.is_awake(core) {
            return;
        }
        if hang {
            self.cores[core].hung_until = self.now + Nanos::from_ms(self.rng.between(1, 8000));
            lock(&self.world).book.counts.hit("hangs");
        } else if forget {
            self.forget(core);
        } else if reopen {
            self.reopen(core);
        }
    }

    fn forget(&mut self, core: usize) {
        let at = self.rng.size(0, self.cores[core].owners.len() - 1);
        self.next_owner += 1;
        let owner = std::mem::replace(&mut self.cores[core].owners[at], self.next_owner);
        let mut world = lock(&self.world);
        let expected = world.book.forget(owner);
        world.book.counts.hit("forgets");
        drop(world);
        let count = self.cores[core].disk.as_mut().expect("open").cancel_owner(Owner(owner));
        assert_eq!(count, expected, "commands of owner {owner} that are to come back");
    }

    fn reopen(&mut self, core: usize) {
        self.cores[core].disk = None;
        let mut world = lock(&self.world);
        world.book.close(core);
        world.book.counts.hit("reopens");
        drop(world);
        self.open(core);
    }

    /// Nothing goes wrong any more: everything ends, is as it should be, and is closed.
    fn finish(mut self) -> Report {
        lock(&self.world).heal();
        if self.moved_until.take().is_some() {
            self.manager.event(self.now);
        }
        self.settle();
        for core in 0..self.cores.len() {
            self.check_core(core);
        }
        let mut world = lock(&self.world);
        assert!(world.is_idle() && world.book.is_settled(), "something is left");
        let left = world.disk.iter().map(|tag| Some(*tag)).collect();
        let now = world.book.tick();
        let overlaps = world.book.history.judge(now, &left, &[]).unwrap_or_else(|text| panic!("{text}"));
        let counts = &mut world.book.counts;
        counts.add("overlapping reads", overlaps.reads);
        counts.add("overlapping writes", overlaps.writes);
        if let Some(cached) = &self.cached {
            let cache = cached.counts();
            counts.add("cache hits", cache.hits);
            counts.add("cache misses", cache.misses);
            counts.add("passed reads", cache.passed);
            counts.add("doomed fills", cache.doomed);
            counts.add("joined fills", cache.joined);
            counts.add("written pages", cache.written);
        }
        let mut report = self.report;
        report.counts = counts.clone();
        report.seconds = self.now.as_ms() / 1000;
        drop(world);
        for core in &mut self.cores {
            assert_eq!(core.disk.as_ref().map(|disk| disk.in_flight()), Some(0), "in flight");
            core.disk = None;
            assert_eq!(core.pool.free_bytes(), core.pool_bytes, "every buffer is home");
        }
        report
    }

    /// Until every command has ended and is settled, and nothing has happened for a while.
    fn settle(&mut self) {
        let last = self.now + Nanos::from_secs(300);
        let mut since = self.now;
        while self.now < since + Nanos::from_secs(1) {
            assert!(self.now < last, "something never ends");
            let world = lock(&self.world);
            let is_open = world.book.commands.values().any(|command| command.is_open());
            let is_quiet = !is_open && world.is_idle() && world.book.is_settled();
            drop(world);
            if !is_quiet || !self.manager.is_up() || !self.manager.is_fenced() {
                since = self.now;
            }
            self.go_on();
        }
    }

    /// Every block takes a write at once, and has it then.
    fn check_core(&mut self, core: usize) {
        for op in [Op::Write { fua: false }, Op::Read] {
            let mut lba = 0;
            while lba < self.scenario.blocks {
                let blocks = (self.scenario.blocks - lba).min(COMMAND_BLOCKS);
                let range = BlockRange { lba, blocks: u32::try_from(blocks).expect("few") };
                let id = self.submit_op(core, op, range);
                let last = self.now + Nanos::from_secs(6);
                while lock(&self.world).book.commands[&id].is_open() {
                    assert!(self.now < last, "core {core}: {op:?} of {range:?} is not done at once");
                    self.go_on();
                }
                let done = lock(&self.world).book.commands[&id].done;
                assert!(done.is_some_and(|(_, is_ok)| is_ok), "core {core}: {op:?} of {range:?} fails");
                lba += blocks;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_is_the_same_run() {
        let mut total = Report::default();
        for seed in 0..6 {
            assert_eq!(run_optimistic(seed, 200), run_optimistic(seed, 200));
            let report = run(seed, 200);
            assert_eq!(run(seed, 200), report);
            total.add(&report);
        }
        assert!(total.commands >= 1200 && total.counts.get("losses") > 10, "{total:?}");
    }
}
