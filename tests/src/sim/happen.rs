//! What happens to a target besides commands: reload, resize, shutdown, power cut, a host that falls silent.

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Pages;
use spindle_target::core::TargetCore;
use spindle_target::env::Message;
use spindle_target_disk::{CacheSpec, Disk, PolicyKind};

use super::carrier::Carrier;
use super::history::{Fate, NEVER, What};
use super::host::{Queue, Stage};
use super::optimistic::Denial;
use super::swarm::Happening;
use super::world::World;

/// Turns in which each host has an answer while another one is stalled, with the slowest wires and disks;
/// and how often.
const STALL_TURNS: u64 = 6000;
const STALL_ROUNDS: u64 = 2;
/// Turns in which the target must have done what it was told.
const TURNS_MAX: u64 = 3_000_000;

impl<W: Carrier> World<W> {
    /// One of those that were drawn.
    pub(super) fn happen(&mut self) {
        if self.swarm.happenings.is_empty() {
            return;
        }
        let at = self.rng.size(0, self.swarm.happenings.len() - 1);
        match self.swarm.happenings[at] {
            Happening::Reload => self.reload(),
            Happening::Resize => self.resize(),
            Happening::Drain => self.drain(),
            Happening::PowerCut => self.power_cut(),
            Happening::Silence => self.silence(),
            Happening::Recache => self.recache(),
            Happening::Stall => self.stall(),
        }
        if self.revocations.permille(300) {
            self.revoke();
        }
    }

    /// A host may not read optimistically any more, or may again.
    fn revoke(&mut self) {
        let index = self.revocations.size(0, self.hosts.len() - 1);
        let is_now = !self.hosts[index].client.denial.is_now;
        self.hosts[index].client.denial = Denial { is_now, since: None, until: NEVER };
        self.publish();
        self.until_advertised();
        let now = self.tick();
        let denial = &mut self.hosts[index].client.denial;
        if is_now {
            denial.since = Some(now);
        } else {
            denial.until = now;
        }
        self.counts.hit(if is_now { "revoked hosts" } else { "allowed hosts" });
    }

    fn some_turns(&mut self, most: u64) {
        for _ in 0..self.rng.between(0, most) {
            self.turn();
        }
    }

    fn until_published(&mut self) {
        self.turns_until("a core does not take its configuration", |core| core.snapshot().generation);
    }

    /// Admin queues go by what is advertised: each core must have heard that all cores serve it.
    fn until_advertised(&mut self) {
        let advertised = |core: &TargetCore<W::Conn>| core.advertised_snapshot().generation;
        self.turns_until("a core does not advertise its configuration", advertised);
    }

    fn turns_until(&mut self, otherwise: &str, generation: impl Fn(&TargetCore<W::Conn>) -> u64) {
        for _ in 0..TURNS_MAX {
            if self.cores.iter().all(|core| generation(core) == self.generation) {
                return;
            }
            self.turn();
        }
        panic!("{otherwise}");
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// A namespace goes with its disk, under load, and comes back as another disk of the configuration.
    fn reload(&mut self) {
        let index = self.rng.size(0, self.places.len() - 1);
        self.places[index].begin_change();
        self.places[index].is_there = false;
        self.publish();
        self.until_published();
        self.some_turns(300);
        self.places[index].is_there = true;
        self.places[index].disk = self.disks;
        self.disks += 1;
        self.publish();
        self.until_published();
        let now = self.tick();
        self.places[index].end_change(now);
        self.counts.hit("reloads");
    }

    /// A disk shrinks under load, and grows to what it was: what was cut off is zeroes.
    fn resize(&mut self) {
        let index = self.rng.size(0, self.places.len() - 1);
        let (blocks, block_bytes) = (self.places[index].history.len(), self.places[index].block_bytes());
        let smaller = self.rng.size(blocks / 3, blocks - 1);
        let begin = self.tick();
        self.places[index].begin_change();
        let bytes = |blocks: usize| (blocks * block_bytes) as u64;
        self.places[index].source.resize(bytes(smaller)).expect("a disk may always shrink");
        self.publish();
        self.until_published();
        self.some_turns(300);
        // A RAM disk without a free frame for the ragged end of a page refuses for now, and stays as it is.
        let mut tries = 0;
        while self.places[index].source.resize(bytes(blocks)).is_err() {
            let is_as_it_was = self.places[index].source.geometry().block_count == smaller as u64;
            assert!(is_as_it_was, "a disk that refuses to grow has another size");
            self.turn();
            tries += 1;
            assert!(tries < TURNS_MAX, "a disk does not grow to what it was");
        }
        let end = self.tick();
        for block in smaller..blocks {
            let what = What::Wrote { tag: 0, is_durable: false };
            self.places[index].history.note(block, what, begin, end, Fate::Done);
        }
        self.publish();
        self.until_published();
        let now = self.tick();
        self.places[index].end_change(now);
        self.counts.hit("resizes");
        self.counts.add("refused growths", tries);
    }

    /// The cache of a disk comes, gets another size, or goes, under load.
    fn recache(&mut self) {
        let index = self.rng.size(0, self.places.len() - 1);
        let Some(cache) = self.places[index].cache.clone() else { return };
        let bytes = self.rng.pick(&[None, Some(64 << 10), Some(96 << 10), Some(1 << 20)]);
        let policy = self.rng.pick(&[PolicyKind::S3Fifo, PolicyKind::Lru]);
        let spec = bytes.map(|bytes| CacheSpec {
            read_ahead: 64 << 10,
            has_seals: true,
            is_paced: bytes == 96 << 10,
            ..CacheSpec::new(bytes, policy, Pages::Base)
        });
        let Some(change) = cache.prepare_cache(spec.as_ref()).expect("a cache") else { return };
        self.count_cache(&cache);
        cache.set_cache(change);
        self.publish();
        // The next change may come before this one has come to its end.
        self.until_published();
        self.some_turns(200);
        self.counts.hit("changed caches");
    }

    /// Shutdown in order: what was taken is answered, then all connections end. Then the target starts again.
    fn drain(&mut self) {
        self.is_draining = true;
        for core in 0..self.cores.len() {
            let own = core * self.cores.len() + core;
            self.mail[own].push_back(Message::Shutdown);
        }
        for turn in 0.. {
            assert!(turn < TURNS_MAX, "the target does not shut down");
            self.turn();
            let hosts = self.hosts.iter().filter(|host| !host.queues.is_empty()).count();
            let connections: usize = self.cores.iter().map(|core| core.usage().connections).sum();
            if hosts == 0 && connections == 0 && self.ending.is_empty() {
                break;
            }
        }
        self.settle();
        self.check_home();
        self.start();
        self.counts.hit("drains");
    }

    /// The power is gone in the middle of everything.
    fn power_cut(&mut self) {
        for index in 0..self.hosts.len() {
            self.cut(index);
        }
        // Nothing of this target does anything any more, its RDMA device included: `cut` has ended the
        // clients.
        self.ending.clear();
        self.mail.clear();
        self.cores.clear();
        let now = self.tick() + 1;
        self.clock = now;
        for index in 0..self.places.len() {
            let overlaps = self.places[index].power_cut(now, &self.closed);
            self.judged(overlaps);
        }
        // What was lost is settled.
        self.closed.iter_mut().for_each(|closed| *closed = (*closed).min(now));
        for host in &mut self.hosts {
            host.former.clear();
            host.association = self.closed.len();
            self.closed.push(super::history::NEVER);
        }
        self.start();
        self.counts.hit("power cuts");
    }

    /// A host neither sends the data that its writes need nor takes what it reads: every queue of every
    /// other host goes on meanwhile.
    fn stall(&mut self) {
        // With no slack a RAM disk has no memory beside what one command of the stalled host takes; a disk
        // with stuck commands keeps hosts waiting by itself. Of a zone of fewer than four buffers one host
        // may have what a Compare of another needs (docs/guarantees.md); of the largest there is one.
        let swarm = &self.swarm;
        let bytes_max = swarm.blocks_max * swarm.block_bytes as usize;
        let is_slow = swarm.slack_bytes == Some(0) || swarm.stuck_permille > 0;
        let is_small = swarm.buffers < 4 || bytes_max > 1 << 17;
        if self.hosts.len() < 2 || is_slow || is_small || swarm.cuts_ppm > 0 {
            return;
        }
        // A large command is many pieces at a slow disk.
        let turns = STALL_TURNS * (1 + (bytes_max >> 17) as u64);
        let index = self.rng.size(0, self.hosts.len() - 1);
        let outstanding = self.hosts[index].queues.iter().map(Queue::count).sum::<usize>();
        self.counts.add("stalled commands", outstanding as u64);
        self.hosts[index].is_silent = true;
        for _ in 0..STALL_ROUNDS {
            let before = self.answered_of_others(index);
            for _ in 0..turns {
                self.turn();
            }
            let after = self.answered_of_others(index);
            for (queue, answered) in before {
                // Not of a queue that has ended meanwhile.
                let is_stuck = after.iter().any(|(other, count)| *other == queue && *count == answered);
                assert!(!is_stuck, "{queue:?} has no answer in {turns} turns beside a stalled host");
            }
        }
        self.hosts[index].is_silent = false;
        self.counts.hit("stalls");
    }

    /// Answered commands of each live I/O queue (association, identifier) of the other hosts.
    fn answered_of_others(&self, index: usize) -> Vec<((usize, u16), u64)> {
        let others = self.hosts.iter().enumerate().filter(|(other, _)| *other != index);
        let queues = others.flat_map(|(_, host)| &host.queues);
        let live = queues.filter(|queue| queue.qid > 0 && queue.stage == Stage::Live);
        live.map(|queue| ((queue.association, queue.qid), queue.answered)).collect()
    }

    /// A host says nothing while its keep-alive time passes: the target lets it go, and no other.
    fn silence(&mut self) {
        let index = self.rng.size(0, self.hosts.len() - 1);
        let queues = &self.hosts[index].queues;
        let is_up = queues.len() > self.swarm.io_queues;
        // One that has reset its controller has more time.
        if !is_up || queues.iter().any(|queue| queue.stage != Stage::Live || queue.wire.is_excused()) {
            return;
        }
        let outstanding = queues.iter().map(Queue::count).sum::<usize>();
        self.counts.add("silenced commands", outstanding as u64);
        let cntlid = self.hosts[index].cntlid;
        self.hosts[index].is_silent = true;
        let step = Nanos::from_ms(u64::from(self.swarm.kato_ms) / 8);
        // Twice its time, and some checks more: one begins a receive pass on each core, a later one judges.
        let mut was_gone = false;
        for _ in 0..26 {
            self.now = Nanos(self.now.0 + step.0);
            for _ in 0..400 {
                self.turn();
            }
            // Later its identifier may be another host's.
            was_gone |= self.registry.find(&self.subsystem, cntlid).is_none();
        }
        assert!(was_gone, "a host that was silent for its keep-alive time is still there");
        self.hosts[index].is_silent = false;
        self.cut(index);
        self.counts.hit("silences");
    }
}
