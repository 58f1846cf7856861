//! A seed's run.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_target_disk::{BlockRange, Disk, Done, IoRequest, Op, Prepared, Token};

use super::agent::SimAgent;
use super::disk::BLOCK;
use super::history::History;
use super::wire::{CORES, Sent, lock};
use super::world::World;
use crate::sim::Rng;
use crate::sim::counts::Counts;
use crate::sim::model::{fill, tag_of};

/// Pages of the disk: a command may have more than are announced one by one.
const PAGES: usize = 2048;
/// Most commands are for the first pages of some extents: so many of so many, with a distance of so many
/// pages.
const HOT_EXTENTS: u64 = 6;
const HOT_PAGES: u64 = 4;
const HOT_STEP: u64 = 64;
/// Most simulated time for the commands in flight at the end.
const REST_MAX: Nanos = Nanos::from_secs(120);

/// What a run did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Commands that were submitted.
    pub commands: u64,
    /// How often what happened.
    pub counts: Counts,
    /// Simulated time.
    pub seconds: u64,
}

impl Report {
    /// With another one's.
    pub fn add(&mut self, other: &Report) {
        self.commands += other.commands;
        self.seconds += other.seconds;
        self.counts.add_all(&other.counts);
    }
}

/// A command in flight.
struct Command {
    op: Op,
    range: BlockRange,
    begin: Nanos,
}

struct Sim {
    rng: Rng,
    world: World,
    clock: Arc<AtomicU64>,
    agents: Vec<SimAgent>,
    history: History,
    now: Nanos,
    next_id: u64,
    /// Of a thousand commands.
    writes: u64,
    /// By number: of the agents' cores, and of hosts of the target.
    commands: BTreeMap<u64, Command>,
    /// Values that hosts of the target have written, which are not sent twice.
    direct_values: BTreeSet<u64>,
    report: Report,
}

/// A run of `commands` commands.
///
/// # Panics
/// When a read returns older data than a write that was acknowledged before it began.
#[must_use]
pub fn run(seed: u64, commands: u64) -> Report {
    let outcome = std::panic::catch_unwind(|| {
        let mut sim = Sim::new(seed);
        while sim.report.commands < commands {
            sim.turn();
        }
        sim.finish()
    });
    outcome.unwrap_or_else(|panic| {
        eprintln!(
            "SEED={seed} failed; replay: SPINDLE_SIM_SEED={seed} cargo nextest run one_seed_of_the_cluster"
        );
        std::panic::resume_unwind(panic)
    })
}

impl Sim {
    fn new(seed: u64) -> Sim {
        let mut rng = Rng::new(seed ^ 0xc1a5);
        let count = rng.size(2, 6);
        let (fails, writes) = (rng.pick(&[0, 0, 20]), rng.pick(&[10, 40, 300]));
        let world = World::new(seed, PAGES, count, fails);
        let now = lock(&world.wire).now;
        let clock = Arc::new(AtomicU64::new(now.0));
        let agents =
            (0..count).map(|number| SimAgent::new(number, &world.wire, &clock, PAGES, &mut rng)).collect();
        Sim {
            rng,
            world,
            clock,
            agents,
            history: History::new(PAGES),
            now,
            next_id: 0,
            writes,
            commands: BTreeMap::new(),
            direct_values: BTreeSet::new(),
            report: Report::default(),
        }
    }

    fn turn(&mut self) {
        self.go_on();
        for _ in 0..self.rng.below(4) {
            self.submit();
        }
        self.happen();
    }

    /// Time passes, and everybody does something.
    fn go_on(&mut self) {
        let us = match self.rng.below(100) {
            0..80 => self.rng.between(1, 250),
            80..96 => self.rng.between(250, 5000),
            _ => self.rng.between(10_000, 120_000),
        };
        self.now += Nanos::from_us(us);
        self.clock.store(self.now.0, Ordering::Relaxed);
        self.world.advance(self.now);
        let direct = std::mem::take(&mut self.world.direct);
        for (id, is_ok, tags) in direct {
            self.end(id, is_ok, &tags, "a host of the target");
        }
        for at in 0..self.agents.len() {
            self.agents[at].step(&self.world, self.now, &mut self.rng);
            for core in 0..self.agents[at].cores.len() {
                self.poll(at, core);
            }
        }
        if self.rng.permille(20) {
            self.history.forget(self.now - Nanos::from_secs(30));
        }
    }

    fn poll(&mut self, at: usize, core: usize) {
        let own = &mut self.agents[at].cores[core];
        if self.now < own.paused_until {
            return;
        }
        own.pool.clear_claims();
        let mut done = Vec::with_capacity(64);
        own.channel.poll(self.now, &mut done);
        for done in done {
            self.on_done(at, &done);
        }
    }

    fn on_done(&mut self, at: usize, done: &Done) {
        let tags = done.buf.as_ref().map_or_else(Vec::new, tags_of);
        let who = format!("agent {at}");
        self.end(done.token.0 & 0x7fff_ffff, done.result.is_ok(), &tags, &who);
    }

    fn end(&mut self, id: u64, is_ok: bool, tags: &[u64], who: &str) {
        let command = self.commands.remove(&id).expect("in flight");
        let first = usize::try_from(command.range.lba).expect("small");
        if !is_ok {
            return self.report.counts.hit("errors");
        }
        if command.op == Op::Read {
            assert_eq!(tags.len(), command.range.blocks as usize);
            for (page, value) in (first..).zip(tags) {
                let is_resent = !self.direct_values.contains(value);
                self.history.read(page, *value, (command.begin, self.now), (who, is_resent));
            }
            return;
        }
        for page in first..first + command.range.blocks as usize {
            self.history.end_write(page, id, self.now);
        }
    }

    fn range(&mut self, is_write: bool) -> BlockRange {
        if is_write && self.rng.permille(4) {
            return BlockRange { lba: 0, blocks: 1500 };
        }
        let blocks = if self.rng.permille(800) { 1 } else { self.rng.between(1, 16) };
        let lba = match self.rng.permille(950) {
            true => self.rng.below(HOT_EXTENTS) * HOT_STEP + self.rng.below(HOT_PAGES),
            false => self.rng.below(PAGES as u64 - 20),
        };
        BlockRange { lba, blocks: u32::try_from(blocks).expect("few") }
    }

    fn submit(&mut self) {
        let op = match (self.rng.permille(self.writes), self.rng.permille(200)) {
            (true, false) => Op::Write { fua: false },
            (true, true) => Op::WriteZeroes { deallocate: false, fua: false },
            (false, _) => Op::Read,
        };
        let range = self.range(matches!(op, Op::WriteZeroes { .. }));
        let at = self.rng.size(0, self.agents.len());
        if at == self.agents.len() {
            return self.submit_direct(op, range);
        }
        let core = self.rng.size(0, self.agents[at].cores.len() - 1);
        if self.now >= self.agents[at].cores[core].paused_until {
            self.submit_to(at, core, op, range);
        }
    }

    /// Notes a command. Returns its number and the value that it writes.
    fn begin(&mut self, op: Op, range: BlockRange) -> (u64, u64) {
        self.next_id += 1;
        self.report.commands += 1;
        let value = if matches!(op, Op::Write { .. }) { self.next_id << 8 | 1 } else { 0 };
        if op != Op::Read {
            let first = usize::try_from(range.lba).expect("small");
            for page in first..first + range.blocks as usize {
                self.history.begin_write(page, (self.next_id, value), self.now);
            }
        }
        self.commands.insert(self.next_id, Command { op, range, begin: self.now });
        (self.next_id, value)
    }

    fn submit_direct(&mut self, op: Op, range: BlockRange) {
        let (id, value) = self.begin(op, range);
        if value != 0 {
            self.direct_values.insert(value);
        }
        let tags = vec![value; range.blocks as usize];
        let sent = Sent { op, range, registers: false, tags };
        self.world.submit_direct(id, &sent);
    }

    fn submit_to(&mut self, at: usize, core: usize, op: Op, range: BlockRange) {
        let request = IoRequest { client: 1, ..IoRequest::new(op, range) };
        let bytes = range.blocks * u32::try_from(BLOCK).expect("small");
        let own = &mut self.agents[at].cores[core];
        let has_data = matches!(op, Op::Read | Op::Write { .. });
        let buf = match has_data.then(|| own.channel.prepare(&request, None)) {
            Some(Prepared::Pool) => {
                let Some(buf) = own.pool.take(bytes) else { return };
                Some(buf)
            }
            Some(Prepared::Ready(data)) => {
                let (id, _) = self.begin(op, range);
                self.report.counts.hit("hits");
                return self.end(id, true, &tags_of(&data), &format!("agent {at}, a hit"));
            }
            Some(Prepared::Later) | None => None,
            Some(Prepared::Fill(_) | Prepared::Wait) => panic!("no answer of a cache"),
        };
        let (id, value) = self.begin(op, range);
        let buf = buf.map(|mut buf| {
            let mut block = vec![0; BLOCK];
            fill(value, &mut block);
            (0..range.blocks as usize).for_each(|at| buf.copy_in(at * BLOCK, &block));
            buf
        });
        let own = &mut self.agents[at].cores[core];
        if let Some(done) = own.channel.submit(Token(7 << 32 | id), &request, buf) {
            self.on_done(at, &done);
        }
    }

    /// What goes wrong.
    fn happen(&mut self) {
        let at = self.rng.size(0, self.agents.len() - 1);
        let long = self.now + Nanos::from_us(self.rng.between(100_000, 4_000_000));
        let short = self.now + Nanos::from_us(self.rng.between(100, 300_000));
        match self.rng.below(1000) {
            0..4 => {
                // Suspended, or a virtual machine that is paused: its clocks go on.
                self.report.counts.hit("suspends");
                self.agents[at].manager_paused_until = long;
                self.agents[at].cores.iter_mut().for_each(|core| core.paused_until = long);
            }
            4..8 => {
                self.report.counts.hit("hung managers");
                self.agents[at].manager_paused_until = long;
            }
            8..16 => {
                self.report.counts.hit("hung cores");
                let core = self.rng.size(0, self.agents[at].cores.len() - 1);
                self.agents[at].cores[core].paused_until = long;
            }
            16..22 => {
                self.report.counts.hit("cuts");
                self.agents[at].cut();
            }
            22..30 => {
                let core = self.rng.size(0, CORES - 1);
                self.world.paused_until[core] = short;
            }
            30 if self.rng.permille(500) => self.world.restart(),
            _ => {}
        }
    }

    /// Everything that is in flight ends, and all read the same.
    fn finish(mut self) -> Report {
        let end = self.now + REST_MAX;
        for agent in &mut self.agents {
            agent.manager_paused_until = Nanos::ZERO;
            agent.cores.iter_mut().for_each(|core| core.paused_until = Nanos::ZERO);
        }
        self.world.paused_until = [Nanos::ZERO; CORES];
        self.rest(end);
        for page in (0..HOT_EXTENTS * HOT_PAGES).map(|at| at / HOT_PAGES * HOT_STEP + at % HOT_PAGES) {
            for at in 0..self.agents.len() {
                let core = self.rng.size(0, self.agents[at].cores.len() - 1);
                self.submit_to(at, core, Op::Read, BlockRange { lba: page, blocks: 1 });
            }
            self.submit_direct(Op::Read, BlockRange { lba: page, blocks: 1 });
            self.rest(end);
        }
        for agent in &self.agents {
            let counts = agent.source.cache().map(|cache| cache.counts).unwrap_or_default();
            self.report.counts.add("doomed fills", counts.doomed);
            self.report.counts.add("written pages that stayed", counts.written);
        }
        self.report.counts.add_all(&self.world.counts);
        self.report.seconds = self.now.as_ms() / 1000;
        self.report
    }

    fn rest(&mut self, end: Nanos) {
        while !self.commands.is_empty() {
            self.go_on();
            assert!(self.now < end, "{} commands do not end", self.commands.len());
        }
    }
}

fn tags_of(buf: &Buf) -> Vec<u64> {
    let mut bytes = vec![0; buf.len()];
    buf.copy_out(0, &mut bytes);
    bytes.chunks_exact(BLOCK).map(|block| tag_of(block).expect("no block is torn")).collect()
}
