//! A run: the target, its hosts, and the loop that lets it happen. What happens besides commands is in
//! `happen`.

use std::collections::VecDeque;
use std::sync::Arc;

use nvme_spec::nqn::Nqn;
use spindle_nvme_transport::Connections;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_target::core::{CoreSettings, TargetCore};
use spindle_target::env::Message;
use spindle_target::shared::Registry;
use spindle_target::snapshot::{AllowedHosts, ControllerLimits, Snapshot};
use spindle_target_disk::CachedDisk;
use spindle_target_disk::fault::Fault;

use super::carrier::Carrier;
use super::counts::Counts;
use super::history::{NEVER, Overlaps, Time};
use super::host::{Issue, Queue, Stage, Who};
use super::optimistic::{Client, Issuer, Service};
use super::place::SimNamespace;
use super::rng::Rng;
use super::swarm::Swarm;
use crate::snapshot::SnapshotBuilder;

/// What a run did.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Commands that were answered.
    pub commands: u64,
    /// How often what happened.
    pub counts: Counts,
}

impl Report {
    /// Add another run's.
    pub fn add(&mut self, other: &Report) {
        self.commands += other.commands;
        self.counts.add_all(&other.counts);
    }
}

pub(super) struct SimHost<W> {
    pub(super) nqn: Nqn,
    pub(super) id: [u8; 16],
    pub(super) cntlid: u16,
    pub(super) queues: Vec<Queue<W>>,
    /// Its association, and former ones that are not replaced yet.
    pub(super) association: usize,
    pub(super) former: Vec<usize>,
    /// It sends nothing and takes nothing.
    pub(super) is_silent: bool,
    pub(super) client: Client,
}

/// A target with its hosts.
pub struct World<W: Carrier> {
    pub(super) swarm: Swarm,
    pub(super) rng: Rng,
    /// Which hosts are revoked, and when.
    pub(super) revocations: Rng,
    pub(super) now: Nanos,
    pub(super) cores: Vec<TargetCore<W::Conn>>,
    /// Messages from core to core, in order.
    pub(super) mail: Vec<VecDeque<Message>>,
    pub(super) hosts: Vec<SimHost<W>>,
    /// Connections whose host is gone, and whose end the target has not seen yet; with their associations.
    pub(super) ending: Vec<(usize, W)>,
    pub(super) places: Vec<SimNamespace>,
    pool: Pool,
    pub(super) registry: Arc<Registry>,
    pub(super) subsystem: Nqn,
    /// Generation of the newest configuration, and the number of disks that there ever were.
    pub(super) generation: u64,
    pub(super) disks: usize,
    /// The target shuts down.
    pub(super) is_draining: bool,
    pub(super) completed: u64,
    pub(super) clock: Time,
    /// When each association was replaced.
    pub(super) closed: Vec<Time>,
    pub(super) counts: Counts,
    overlaps: Overlaps,
    turns: u64,
    next_happening: u64,
    /// Free bytes of each core's pools at the start.
    home: Vec<(u64, u64)>,
}

const SUBSYSTEM: &str = "nqn.2026-01.io.spindle:sim";

fn nqn(text: &str) -> Nqn {
    Nqn::new(text).expect("a name")
}

fn zone(buffer_bytes: u32, count: u32) -> ZoneSpec {
    ZoneSpec { buffer_bytes, count }
}

impl<W: Carrier> World<W> {
    /// A world as drawn, with all hosts about to connect.
    #[must_use]
    pub fn new(swarm: Swarm) -> World<W> {
        let places: Vec<_> = (0..swarm.namespaces).map(|index| SimNamespace::new(&swarm, index)).collect();
        let mut zones = vec![zone(4096, 2000), zone(1 << 16, 1000)];
        if swarm.transfer_bytes > 1 << 17 {
            zones.push(zone(swarm.transfer_bytes, 200));
        }
        let pool = Pool::new(&zones, Pages::Base).expect("a pool");
        let mut world = World {
            rng: Rng::new(swarm.seed ^ 0xabcd),
            revocations: Rng::new(swarm.seed ^ 0x7e70),
            now: Nanos::ZERO,
            mail: Vec::new(),
            cores: Vec::new(),
            hosts: Vec::new(),
            ending: Vec::new(),
            disks: places.len(),
            places,
            pool,
            registry: Arc::new(Registry::default()),
            subsystem: nqn(SUBSYSTEM),
            generation: 0,
            is_draining: false,
            completed: 0,
            clock: 1,
            closed: Vec::new(),
            counts: Counts::default(),
            overlaps: Overlaps::default(),
            turns: 0,
            next_happening: 0,
            home: Vec::new(),
            swarm,
        };
        for index in 0..world.swarm.hosts {
            let id = [u8::try_from(index + 1).expect("few"); 16];
            let nqn = nqn(&format!("nqn.2026-01.io.spindle:host{index}"));
            let association = world.closed.len();
            world.closed.push(NEVER);
            world.hosts.push(SimHost {
                nqn,
                id,
                cntlid: 0,
                queues: Vec::new(),
                association,
                former: Vec::new(),
                is_silent: false,
                client: Client::new(Arc::default(), world.swarm.namespaces, world.swarm.seed ^ index as u64),
            });
        }
        world.next_happening = world.rng.between(20, 400);
        world.start();
        world
    }

    /// The target starts: new cores, with the disks as they are.
    pub(super) fn start(&mut self) {
        self.generation += 1;
        self.registry = Arc::new(Registry::default());
        let service = Arc::new(Service::default());
        self.registry.set_optimistic(Box::new(Issuer(Arc::clone(&service))));
        // A service that starts has no connections: those of the one before have ended (`cut`, `drain`).
        self.hosts.iter_mut().for_each(|host| host.client.set_service(&service));
        self.is_draining = false;
        let swarm = &self.swarm;
        let snapshot = self.snapshot();
        self.mail = (0..swarm.cores * swarm.cores).map(|_| VecDeque::new()).collect();
        let make = |core| {
            let mut zones = vec![zone(4096, swarm.buffers), zone(1 << 17, swarm.buffers)];
            if swarm.transfer_bytes > 1 << 17 {
                zones.push(zone(swarm.transfer_bytes, 1));
            }
            let settings = CoreSettings {
                core,
                cores: swarm.cores,
                connections: 64,
                disk_depth: 64,
                pool: Pool::new(&zones, Pages::Base).expect("a pool"),
                admin_pool: Pool::new(&[zone(8192, 2)], Pages::Base).expect("a pool"),
                snapshot: Arc::clone(&snapshot),
                registry: Arc::clone(&self.registry),
                now: self.now,
                wall_ms: 0,
            };
            TargetCore::new(settings)
        };
        self.cores = (0..swarm.cores).map(make).collect();
        self.home = self.free_bytes();
    }

    /// The configuration as it is now.
    fn snapshot(&self) -> Arc<Snapshot> {
        let (swarm, places) = (&self.swarm, &self.places);
        let base = SnapshotBuilder::new(SUBSYSTEM, &[]);
        let transfer_bytes = swarm.transfer_bytes;
        let of = |disk: usize| places.iter().find(|place| place.is_there && place.disk == disk);
        let is_revoked = |host: &&SimHost<W>| host.client.denial.is_now;
        let optimistic_hosts = if self.hosts.iter().any(|host| is_revoked(&host)) {
            let allowed = self.hosts.iter().filter(|host| !is_revoked(host));
            AllowedHosts::Only(allowed.map(|host| host.nqn).collect())
        } else {
            AllowedHosts::Any
        };
        SnapshotBuilder {
            generation: self.generation,
            cores: swarm.cores,
            disks: (0..self.disks).map(|disk| of(disk).map(|place| Arc::clone(&place.source))).collect(),
            namespaces: places.iter().map(|place| place.is_there.then_some(place.disk)).collect(),
            transport: W::KIND,
            in_capsule_bytes: swarm.in_capsule_bytes,
            limits: ControllerLimits { queue_entries: 64, transfer_bytes, bulk_unit: 8192, ..base.limits },
            optimistic_hosts,
            ..base
        }
        .build()
    }

    fn free_bytes(&self) -> Vec<(u64, u64)> {
        self.cores.iter().map(|core| (core.pools().0.free_bytes(), core.pools().1.free_bytes())).collect()
    }

    /// A configuration with the namespaces as they are now, on its way to all cores.
    pub(super) fn publish(&mut self) {
        self.generation += 1;
        let snapshot = self.snapshot();
        for core in 0..self.cores.len() {
            let own = core * self.cores.len() + core;
            self.mail[own].push_back(Message::Snapshot(Arc::clone(&snapshot)));
        }
    }

    /// Let it happen until `commands` were answered; then close everything and check that nothing is left
    /// behind.
    ///
    /// # Panics
    /// When the target breaks a promise, or makes no progress.
    pub fn run(mut self, commands: u64) -> Report {
        while self.completed < commands {
            self.turn();
            if self.completed >= self.next_happening {
                self.next_happening = self.completed + self.rng.between(50, 600);
                self.happen();
            }
        }
        self.finish()
    }

    pub(super) fn turn(&mut self) {
        self.turns += 1;
        self.now = Nanos(self.now.0 + self.rng.between(100, 20_000));
        for index in 0..self.hosts.len() {
            if self.hosts[index].queues.is_empty() && !self.is_draining {
                self.connect(index, 0);
            }
            if self.hosts[index].is_silent || self.hosts[index].queues.is_empty() {
                continue;
            }
            self.host_turn(index);
            if self.rng.below(1_000_000) < self.swarm.cuts_ppm {
                self.counts.hit("cuts");
                self.cut(index);
            }
        }
        self.cores_turn();
        if !self.ending.is_empty() {
            self.end_some();
        }
        if self.rng.permille(2) {
            self.places.iter().for_each(|place| place.control.release_dropped());
        }
    }

    fn connect(&mut self, index: usize, qid: u16) {
        let core = self.rng.size(0, self.cores.len() - 1);
        let World { swarm, cores, now, rng, .. } = self;
        let wire = W::open(swarm, qid, &mut cores[core], core, *now, rng);
        let host = &mut self.hosts[index];
        host.queues.push(Queue::new(qid, wire, self.swarm.queue_entries, host.association));
    }

    fn host_turn(&mut self, index: usize) {
        let World { swarm, rng, cores, hosts, places, pool, completed, subsystem, now, ending, .. } = self;
        let host = &mut hosts[index];
        let queues = &mut host.queues;
        host.former.retain(|old| self.closed[*old] == NEVER);
        // What the target has not noticed yet does not hold up a Connect.
        let is_ending = |old: &usize| ending.iter().any(|(association, _)| association == old);
        let replaces: Vec<usize> = host.former.iter().copied().filter(|old| !is_ending(old)).collect();
        let is_draining = self.is_draining;
        let is_leaving = is_draining
            || queues.iter().any(|queue| queue.stage == Stage::Leaving || queue.wire.is_excused());
        let mut issue = Issue {
            rng,
            places,
            pool,
            clock: &mut self.clock,
            closed: &mut self.closed,
            turn: self.turns,
            blocks_max: swarm.blocks_max,
            has_faults: swarm.faults.iter().any(|rate| *rate > 0),
            completed,
            counts: &mut self.counts,
            client: &mut host.client,
            aborts_over: Vec::new(),
            leaves_permille: swarm.leaves_permille,
            is_leaving,
        };
        let who = Who {
            nqn: &host.nqn,
            id: host.id,
            subsystem,
            sq_flow_off: swarm.sq_flow_off,
            kato_ms: swarm.kato_ms,
            replaces: &replaces,
        };
        for queue in queues.iter_mut() {
            let core = queue.wire.core();
            for _ in 0..issue.rng.size(1, 6 + swarm.fabric.haste) {
                queue.wire.shake(&mut cores[core], swarm, issue.rng, *now);
                queue.on_events(&mut issue, &who, &mut host.cntlid);
            }
            queue.issue(&mut issue);
            // What is lost in this turn, the queues after it may hear of in this turn: with the admin queue
            // goes the controller, and a Connect of an I/O queue is refused.
            issue.is_leaving |= queue.stage == Stage::Leaving || queue.wire.is_excused();
            if issue.turn.is_multiple_of(128) && !is_draining {
                queue.check_age(issue.turn, swarm.patience);
            }
        }
        Client::turn(&mut issue, *now);
        if queues.len() > 1 && issue.rng.permille(5) {
            let (admin, ios) = queues.split_at_mut(1);
            let victim = issue.rng.size(0, ios.len() - 1);
            admin[0].abort(&mut issue, &mut ios[victim]);
        }
        for (qid, cid) in std::mem::take(&mut issue.aborts_over) {
            queues.iter_mut().filter(|queue| queue.qid == qid).for_each(|queue| queue.end_abort(cid));
        }
        self.after_host_turn(index);
    }

    /// Queues that are gone, and queues that are still to come.
    fn after_host_turn(&mut self, index: usize) {
        let queues = &self.hosts[index].queues;
        let admin_is_live = queues.first().is_some_and(|queue| queue.stage == Stage::Live);
        let is_dead = queues.iter().any(|queue| queue.stage == Stage::Dead);
        let excused = queues.iter().filter(|queue| queue.wire.is_excused()).count() as u64;
        assert!(!is_dead || excused > 0 || self.is_draining, "the target closed a connection by itself");
        // As Linux: what one queue loses, the controller has lost. Some never hear of it, and time out.
        if is_dead || excused > 0 && self.rng.permille(5 * excused) {
            self.counts.add("losses", excused);
            self.cut(index);
            return;
        }
        if admin_is_live && queues.len() <= self.swarm.io_queues && !self.is_draining {
            let qid = u16::try_from(queues.len()).expect("few");
            self.connect(index, qid);
        }
    }

    /// A host vanishes with all its connections, and comes back.
    pub(super) fn cut(&mut self, index: usize) {
        let mut queues = std::mem::take(&mut self.hosts[index].queues);
        // In any order: the admin queue may be the last to be noticed.
        let turn = self.rng.size(0, queues.len().saturating_sub(1));
        queues.rotate_left(turn);
        for queue in &mut queues {
            let core = queue.wire.core();
            queue.wire.cut(&mut self.cores[core], &mut self.rng);
        }
        let World { swarm, rng, hosts, places, pool, completed, subsystem, .. } = self;
        let host = &mut hosts[index];
        let mut issue = Issue {
            rng,
            places,
            pool,
            clock: &mut self.clock,
            closed: &mut self.closed,
            turn: self.turns,
            blocks_max: 1,
            has_faults: true,
            completed,
            counts: &mut self.counts,
            client: &mut host.client,
            aborts_over: Vec::new(),
            leaves_permille: 0,
            is_leaving: true,
        };
        let who = Who {
            nqn: &host.nqn,
            id: host.id,
            subsystem,
            sq_flow_off: swarm.sq_flow_off,
            kato_ms: swarm.kato_ms,
            replaces: &[],
        };
        for queue in &mut queues {
            queue.stage = Stage::Dead;
            queue.on_events(&mut issue, &who, &mut host.cntlid);
        }
        Client::end_all(&mut issue);
        host.former.push(host.association);
        host.association = self.closed.len();
        self.closed.push(NEVER);
        self.ending.extend(queues.into_iter().map(|queue| (queue.association, queue.wire)));
        self.end_some();
    }

    /// Connections without a host go on until the target has noticed.
    fn end_some(&mut self) {
        let World { swarm, rng, cores, ending, now, .. } = self;
        ending.retain_mut(|(_, wire)| {
            for _ in 0..rng.size(1, 20) {
                let core = &mut cores[wire.core()];
                if wire.is_over() {
                    break;
                }
                wire.shake(core, swarm, rng, *now);
            }
            !wire.is_over()
        });
    }

    /// Let the disks come to rest.
    pub(super) fn settle(&mut self) {
        for _ in 0..10_000 {
            self.places.iter().for_each(|place| place.control.release_dropped());
            for core in &mut self.cores {
                core.poll();
            }
            self.deliver(1000);
            let is_quiet = self.cores.iter().all(|core| core.is_disk_idle());
            if is_quiet && self.mail.iter().all(VecDeque::is_empty) {
                break;
            }
        }
    }

    pub(super) fn cores_turn(&mut self) {
        for index in 0..self.cores.len() {
            if self.rng.permille(600) {
                self.cores[index].set_time(self.now, self.now.as_ms());
                self.cores[index].poll();
                crate::receive_pass(&mut self.cores[index]);
            }
        }
        let share = self.rng.between(0, 1000);
        self.deliver(share);
    }

    /// Move messages out of the cores, and some on into others.
    fn deliver(&mut self, permille: u64) {
        let count = self.cores.len();
        for from in 0..count {
            while let Some((to, message)) = self.cores[from].next_message() {
                self.mail[from * count + to].push_back(message);
            }
            while let Some(id) = self.cores[from].next_send_ready() {
                let queues = self.hosts.iter_mut().flat_map(|host| &mut host.queues);
                let wires =
                    queues.map(|queue| &mut queue.wire).chain(self.ending.iter_mut().map(|(_, wire)| wire));
                wires.filter(|wire| wire.core() == from).for_each(|wire| wire.touch(id));
            }
            while self.cores[from].next_closed().is_some() {}
            while self.cores[from].notices().pop().is_some() {}
        }
        for lane in 0..self.mail.len() {
            while self.rng.permille(permille) {
                let Some(message) = self.mail[lane].pop_front() else { break };
                self.cores[lane % count].on_message(message);
            }
        }
    }

    /// All hosts go; nothing of them is left in the target.
    pub(super) fn close_all(&mut self) {
        for index in 0..self.hosts.len() {
            self.cut(index);
        }
        self.end_all();
        self.settle();
        self.check_home();
    }

    pub(super) fn end_all(&mut self) {
        for _ in 0..100_000 {
            if self.ending.is_empty() {
                break;
            }
            // Over RDMA a close may take 2 s, and the end of a host that vanished before ESTABLISHED 30 s.
            self.now = Nanos(self.now.0 + 1_000_000);
            self.cores_turn();
            self.end_some();
        }
        assert!(self.ending.is_empty(), "a connection does not end");
    }

    /// Everything is back where it was at the start.
    pub(super) fn check_home(&mut self) {
        let waits: u64 = self.cores.iter().map(|core| core.usage().waits).sum();
        self.counts.add("waits", waits);
        for core in &self.cores {
            assert_eq!(core.usage().connections, 0, "a connection outlived its host");
        }
        assert_eq!(self.free_bytes(), self.home, "buffers of cores were not given back");
        assert_eq!(self.registry.all().len(), 0, "a controller outlived its host");
    }

    pub(super) fn judged(&mut self, overlaps: Result<Overlaps, String>) {
        self.overlaps += overlaps.unwrap_or_else(|complaint| panic!("{complaint}"));
    }

    /// Before the cache goes.
    pub(super) fn count_cache(&mut self, cache: &CachedDisk) {
        let counts = cache.counts();
        self.counts.add("cache hits", counts.hits);
        self.counts.add("cache misses", counts.misses);
        self.counts.add("cache evictions", counts.evictions);
        self.counts.add("doomed fills", counts.doomed);
        self.counts.add("joined fills", counts.joined);
        self.counts.add("written pages", counts.written);
        self.counts.add("pages read ahead", counts.ahead);
        self.counts.add("of use", counts.useful + counts.late);
    }

    fn finish(mut self) -> Report {
        self.close_all();
        for index in 0..self.places.len() {
            let place = &mut self.places[index];
            let faults = [Fault::Error, Fault::Delay, Fault::Drop, Fault::Reorder];
            faults
                .into_iter()
                .for_each(|fault| self.counts.add(name_of(fault), place.control.injected(fault)));
            self.counts.add("reads in place", place.control.reads_in_place());
            let cache = place.cache.clone();
            cache.iter().for_each(|cache| self.count_cache(cache));
            let place = &mut self.places[index];
            self.clock += 2;
            let left = place.left();
            self.counts.add("judged blocks", left.len() as u64);
            let overlaps = place.history.judge(self.clock, &left, &self.closed);
            if let Some(medium) = &place.medium {
                self.counts.add("planted", medium.planted());
                let (torn, lost) = medium.torn_and_lost();
                self.counts.add("torn writes", torn);
                self.counts.add("lost blocks", lost);
            }
            self.judged(overlaps);
        }
        self.counts.add("turns", self.turns);
        self.counts.add("overlapping reads", self.overlaps.reads);
        self.counts.add("overlapping writes", self.overlaps.writes);
        self.counts.add("overlapping swaps", self.overlaps.swaps);
        Report { commands: self.completed, counts: self.counts }
    }
}

fn name_of(fault: Fault) -> &'static str {
    match fault {
        Fault::Error => "errors",
        Fault::Delay => "delays",
        Fault::Drop => "drops",
        Fault::Reorder => "reorders",
    }
}
