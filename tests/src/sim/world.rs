//! A run: everything that a seed draws, and the loop that lets it happen.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use nvme_spec::nqn::Nqn;
use spindle_disk::fault::{Fault, FaultControl, FaultDisk};
use spindle_disk::ram::{RamDisk, RamSpec};
use spindle_disk::{Abilities, DiskSource};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_target::core::{CoreSettings, TargetCore};
use spindle_target::counters::NamespaceCounters;
use spindle_target::env::Message;
use spindle_target::shared::Registry;
use spindle_target::snapshot::{
    AllowedHosts, ControllerLimits, DiskId, Listener, Namespace, Snapshot, Subsystem, TransportKind,
};

use super::carrier::Carrier;
use super::disk::PoolDisk;
use super::host::{Issue, Lost, Queue, Stage};
use super::model::Model;
use super::rdma::Fabric;
use super::rng::Rng;

/// What a seed draws.
#[derive(Debug, Clone)]
pub struct Swarm {
    /// The seed.
    pub seed: u64,
    /// Cores of the target.
    pub cores: usize,
    /// Hosts, each with a controller.
    pub hosts: usize,
    /// I/O queues of each host.
    pub io_queues: usize,
    /// Entries of a queue.
    pub queue_entries: u16,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Blocks of the namespace.
    pub blocks: usize,
    /// Most blocks of a command.
    pub blocks_max: usize,
    /// Buffers of a zone of a core's pool.
    pub buffers: u32,
    /// Frames beyond the RAM disk's size, in bytes; `None`: the disk uses the pool's buffers.
    pub slack_bytes: Option<u64>,
    /// In-capsule data of I/O queues.
    pub in_capsule_bytes: u32,
    /// MAXH2CDATA.
    pub max_h2c_data: u32,
    /// Header and data digests.
    pub digests: (bool, bool),
    /// SQ flow control is off.
    pub sq_flow_off: bool,
    /// Most bytes that move at a time.
    pub chunk: usize,
    /// Bytes that a wire holds.
    pub wire_bytes: usize,
    /// Faults a million commands: error, delay, drop, reorder.
    pub faults: [u32; 4],
    /// A host vanishes, in a thousand turns.
    pub cuts_permille: u64,
    /// Most bytes of a command.
    pub transfer_bytes: u32,
    /// NVMe/RDMA only.
    pub fabric: Fabric,
}

impl Swarm {
    /// Everything from the seed.
    #[must_use]
    pub fn draw(seed: u64) -> Swarm {
        let mut rng = Rng::new(seed);
        let rng = &mut rng;
        let has_faults = rng.permille(500);
        let mut fault = |max| if has_faults { u32::try_from(rng.below(max)).unwrap_or(0) } else { 0 };
        let faults = [fault(60_000), fault(200_000), fault(20_000), fault(300_000)];
        Swarm {
            seed,
            cores: rng.size(1, 2),
            hosts: rng.size(1, 2),
            io_queues: rng.size(1, 3),
            queue_entries: rng.pick(&[4, 8, 16, 32]),
            block_bytes: rng.pick(&[512, 4096]),
            blocks: rng.size(40, 200),
            blocks_max: rng.pick(&[1, 4, 12]),
            buffers: u32::try_from(rng.between(2, 12)).unwrap_or(2),
            slack_bytes: rng.pick(&[None, Some(0), Some(256 << 10)]),
            in_capsule_bytes: rng.pick(&[0, 512, 4096, 8192]),
            max_h2c_data: rng.pick(&[4096, 8192, 1 << 20]),
            digests: (rng.permille(300), rng.permille(300)),
            sq_flow_off: rng.permille(500),
            chunk: rng.pick(&[40, 300, 5000, 60_000]),
            wire_bytes: rng.pick(&[600, 9000, 200_000]),
            faults,
            cuts_permille: rng.pick(&[0, 0, 1, 3]),
            transfer_bytes: 1 << 17,
            fabric: Fabric::default(),
        }
    }
}

/// What a run did.
#[derive(Debug, Clone, Copy, Default)]
pub struct Report {
    /// Commands that were answered.
    pub commands: u64,
    /// Commands whose connection ended first.
    pub cuts: u64,
    /// Requests that waited for memory.
    pub waits: u64,
    /// Connections that ended without the host: the link was lost, or the target let it go.
    pub losses: u64,
}

struct SimHost<W> {
    nqn: Nqn,
    id: [u8; 16],
    cntlid: u16,
    queues: Vec<Queue<W>>,
}

/// A target with its hosts.
pub struct World<W: Carrier> {
    swarm: Swarm,
    rng: Rng,
    now: Nanos,
    cores: Vec<TargetCore<W::Conn>>,
    /// Messages from core to core, in order.
    mail: Vec<VecDeque<Message>>,
    hosts: Vec<SimHost<W>>,
    /// Connections whose host is gone, and whose end the target has not seen yet.
    ending: Vec<W>,
    model: Model,
    pool: Pool,
    control: Arc<FaultControl>,
    registry: Arc<Registry>,
    subsystem: Nqn,
    completed: u64,
    lost: Vec<Lost>,
    cuts: u64,
    losses: u64,
    /// Free bytes of each core's pools at the start.
    home: Vec<(u64, u64)>,
}

const SUBSYSTEM: &str = "nqn.2026-01.io.spindle:sim";

fn nqn(text: &str) -> Nqn {
    Nqn::new(text).expect("a name")
}

fn snapshot(swarm: &Swarm, disk: &Arc<dyn DiskSource>, transport: TransportKind) -> Arc<Snapshot> {
    let namespace = Namespace {
        nsid: 1,
        disk: DiskId(0),
        source: Arc::clone(disk),
        geometry: disk.geometry(),
        uuid: [1; 16],
        nguid: [2; 16],
        counters: Arc::new(NamespaceCounters::new(swarm.cores)),
    };
    let subsystem = Subsystem {
        nqn: nqn(SUBSYSTEM),
        serial: "SIM".to_owned(),
        model: "Spindle".to_owned(),
        hosts: AllowedHosts::Any,
        cntlid_range: (1, 100),
        io_queues_max: 16,
        listeners: vec![0],
        namespaces: vec![Some(Arc::new(namespace))],
    };
    let address: SocketAddr = "127.0.0.1:4420".parse().expect("an address");
    Arc::new(Snapshot {
        generation: 1,
        disks: vec![Some(Arc::clone(disk))],
        listeners: vec![Listener {
            port_id: 1,
            transport,
            address,
            in_capsule_bytes: swarm.in_capsule_bytes,
        }],
        subsystems: vec![Arc::new(subsystem)],
        referrals: Vec::new(),
        limits: ControllerLimits {
            queue_entries: 64,
            transfer_bytes: swarm.transfer_bytes,
            bulk_unit: 8192,
            keep_alive_ms_max: 3_600_000,
            discovery_keep_alive_ms: 120_000,
        },
    })
}

/// The disk as drawn, without faults.
fn disk_of(swarm: &Swarm) -> Arc<dyn DiskSource> {
    let bytes = swarm.blocks as u64 * u64::from(swarm.block_bytes);
    match swarm.slack_bytes {
        None => {
            let has = |bit: u64| swarm.seed >> bit & 1 == 1;
            let abilities = Abilities { compare: has(0), verify: has(1), copy: has(2) };
            PoolDisk::with_abilities(swarm.block_bytes, swarm.blocks as u64, abilities)
        }
        Some(slack) => {
            let spec = RamSpec { bytes, block_bytes: swarm.block_bytes, pages: Pages::Base };
            Arc::new(RamDisk::with_slack("ram", spec, slack).expect("a RAM disk"))
        }
    }
}

impl<W: Carrier> World<W> {
    /// A world as drawn, with all hosts about to connect.
    #[must_use]
    pub fn new(swarm: Swarm) -> World<W> {
        let (disk, control) = FaultDisk::new(disk_of(&swarm), swarm.seed);
        for (fault, rate) in
            [Fault::Error, Fault::Delay, Fault::Drop, Fault::Reorder].into_iter().zip(swarm.faults)
        {
            control.set_all(fault, rate);
        }
        let snapshot = snapshot(&swarm, &disk, W::KIND);
        let registry = Arc::new(Registry::default());
        let zone = |buffer_bytes, count| ZoneSpec { buffer_bytes, count };
        let cores: Vec<_> = (0..swarm.cores)
            .map(|core| {
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
                    registry: Arc::clone(&registry),
                    now: Nanos::ZERO,
                    wall_ms: 0,
                };
                TargetCore::new(settings).expect("a core")
            })
            .collect();
        let home =
            cores.iter().map(|core| (core.pools().0.free_bytes(), core.pools().1.free_bytes())).collect();
        let mut zones = vec![zone(4096, 2000), zone(1 << 16, 1000)];
        if swarm.transfer_bytes > 1 << 17 {
            zones.push(zone(swarm.transfer_bytes, 200));
        }
        let pool = Pool::new(&zones, Pages::Base).expect("a pool");
        let mut world = World {
            rng: Rng::new(swarm.seed ^ 0xabcd),
            now: Nanos::ZERO,
            mail: (0..swarm.cores * swarm.cores).map(|_| VecDeque::new()).collect(),
            cores,
            hosts: Vec::new(),
            ending: Vec::new(),
            model: Model::new(swarm.blocks, swarm.block_bytes as usize),
            pool,
            control,
            registry,
            subsystem: nqn(SUBSYSTEM),
            completed: 0,
            lost: Vec::new(),
            cuts: 0,
            losses: 0,
            home,
            swarm,
        };
        for index in 0..world.swarm.hosts {
            let id = [u8::try_from(index + 1).expect("few"); 16];
            let nqn = nqn(&format!("nqn.2026-01.io.spindle:host{index}"));
            world.hosts.push(SimHost { nqn, id, cntlid: 0, queues: Vec::new() });
        }
        world
    }

    /// Let it happen until `commands` were answered; then close everything and check that nothing is left
    /// behind.
    ///
    /// # Panics
    /// When the target breaks a promise, or makes no progress.
    pub fn run(mut self, commands: u64) -> Report {
        let mut turns = 0u64;
        while self.completed < commands {
            self.turn();
            turns += 1;
            assert!(
                turns < commands * 20_000 + 1_000_000,
                "no progress: {} of {commands} commands",
                self.completed
            );
        }
        self.finish()
    }

    fn turn(&mut self) {
        self.now = Nanos(self.now.0 + self.rng.between(100, 20_000));
        for index in 0..self.hosts.len() {
            if self.hosts[index].queues.is_empty() {
                self.connect(index, 0);
            }
            self.host_turn(index);
            if self.rng.permille(self.swarm.cuts_permille) && self.rng.permille(100) {
                self.cut(index);
            }
        }
        self.cores_turn();
        if !self.ending.is_empty() {
            self.end_some();
        }
        if self.rng.permille(2) {
            self.control.release_dropped();
        }
    }

    fn connect(&mut self, index: usize, qid: u16) {
        let core = self.rng.size(0, self.cores.len() - 1);
        let World { swarm, cores, now, rng, .. } = self;
        let wire = W::open(swarm, qid, &mut cores[core], core, *now, rng);
        self.hosts[index].queues.push(Queue::new(qid, wire, self.swarm.queue_entries));
    }

    fn host_turn(&mut self, index: usize) {
        let World { swarm, rng, cores, hosts, model, pool, completed, lost, subsystem, now, .. } = self;
        let host = &mut hosts[index];
        let SimHost { nqn, id, cntlid, queues } = host;
        let has_faults = swarm.faults.iter().any(|rate| *rate > 0);
        let (blocks_max, leaves_permille) = (swarm.blocks_max, swarm.fabric.leaves_permille);
        let is_leaving = queues.iter().any(|queue| queue.stage == Stage::Leaving || queue.wire.is_excused());
        let mut issue =
            Issue { rng, model, pool, blocks_max, has_faults, completed, lost, leaves_permille, is_leaving };
        for queue in queues.iter_mut() {
            let core = queue.wire.core();
            for _ in 0..issue.rng.size(1, 6 + swarm.fabric.haste) {
                queue.wire.shake(&mut cores[core], swarm, issue.rng, *now);
                queue.on_events(&mut issue, (nqn, *id), subsystem, cntlid, swarm.sq_flow_off);
            }
            queue.issue(&mut issue);
            issue.is_leaving |= queue.stage == Stage::Leaving;
        }
        if queues.len() > 1 && issue.rng.permille(5) {
            let (admin, ios) = queues.split_at_mut(1);
            let victim = issue.rng.size(0, ios.len() - 1);
            admin[0].abort(&mut issue, &mut ios[victim]);
        }
        let admin_is_live = queues.first().is_some_and(|queue| queue.stage == Stage::Live);
        let is_dead = |queue: &Queue<W>| queue.stage == Stage::Dead;
        assert!(
            !queues.iter().any(is_dead) || queues.iter().any(|queue| queue.wire.is_excused()),
            "the target closed a connection by itself"
        );
        // As Linux: what one queue loses, the controller has lost. Some never hear of it, and time out.
        let excused = queues.iter().filter(|queue| queue.wire.is_excused()).count() as u64;
        if queues.iter().any(is_dead) || excused > 0 && issue.rng.permille(5 * excused) {
            self.losses += excused;
            self.cut(index);
            return;
        }
        if admin_is_live && queues.len() <= swarm.io_queues {
            let qid = u16::try_from(queues.len()).expect("few");
            self.connect(index, qid);
        }
    }

    /// A host vanishes with all its connections, and comes back.
    fn cut(&mut self, index: usize) {
        self.cuts += 1;
        let mut queues = std::mem::take(&mut self.hosts[index].queues);
        // In any order: the admin queue may be the last to be noticed.
        let turn = self.rng.size(0, queues.len().saturating_sub(1));
        queues.rotate_left(turn);
        for queue in &mut queues {
            let core = queue.wire.core();
            queue.wire.cut(&mut self.cores[core], &mut self.rng);
        }
        let World { swarm, rng, hosts, model, pool, completed, lost, subsystem, .. } = self;
        let host = &mut hosts[index];
        let mut issue = Issue {
            rng,
            model,
            pool,
            blocks_max: 1,
            has_faults: true,
            completed,
            lost,
            leaves_permille: 0,
            is_leaving: true,
        };
        for queue in &mut queues {
            queue.stage = Stage::Dead;
            queue.on_events(&mut issue, (&host.nqn, host.id), subsystem, &mut host.cntlid, swarm.sq_flow_off);
        }
        self.ending.extend(queues.into_iter().map(|queue| queue.wire));
        self.end_some();
    }

    /// Connections without a host go on until the target has noticed.
    fn end_some(&mut self) {
        let World { swarm, rng, cores, ending, now, .. } = self;
        ending.retain_mut(|wire| {
            for _ in 0..rng.size(1, 20) {
                let core = &mut cores[wire.core()];
                if wire.is_over() {
                    break;
                }
                wire.shake(core, swarm, rng, *now);
            }
            !wire.is_over()
        });
        if self.ending.is_empty() {
            self.settle();
        }
    }

    /// Let the disks come to rest; then the fate of lost writes is decided, if unknown.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            self.control.release_dropped();
            for core in &mut self.cores {
                core.poll();
            }
            self.deliver(1000);
            let is_quiet = self.cores.iter().all(|core| core.is_disk_idle());
            if is_quiet && self.mail.iter().all(VecDeque::is_empty) {
                break;
            }
        }
        for Lost { first, tags } in self.lost.drain(..) {
            self.model.end_write(first, &tags, false);
        }
    }

    fn cores_turn(&mut self) {
        for index in 0..self.cores.len() {
            if self.rng.permille(600) {
                self.cores[index].set_time(self.now, self.now.as_ms());
                self.cores[index].poll();
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
            while let Some(id) = self.cores[from].next_touched() {
                let queues = self.hosts.iter_mut().flat_map(|host| &mut host.queues);
                let wires = queues.map(|queue| &mut queue.wire).chain(&mut self.ending);
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

    fn finish(mut self) -> Report {
        for index in 0..self.hosts.len() {
            self.cut(index);
        }
        for _ in 0..100_000 {
            if self.ending.is_empty() {
                break;
            }
            self.now = Nanos(self.now.0 + 10_000);
            self.cores_turn();
            self.end_some();
        }
        assert!(self.ending.is_empty(), "a connection does not end");
        self.settle();
        let waits = self.cores.iter().map(|core| core.usage().waits).sum();
        for (core, home) in self.cores.iter().zip(&self.home) {
            assert_eq!(core.usage().connections, 0, "a connection outlived its host");
            let now = (core.pools().0.free_bytes(), core.pools().1.free_bytes());
            assert_eq!(now, *home, "buffers of core were not given back");
        }
        assert_eq!(self.registry.count(), 0, "a controller outlived its host");
        Report { commands: self.completed, cuts: self.cuts, waits, losses: self.losses }
    }
}
