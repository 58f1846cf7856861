//! [`SimAgent`]: the shipped cache, remote disk and session of one agent, and what stands for its manager's
//! thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nvme_spec::Nqn;
use nvme_spec::identify::Oncs;
use spindle_nvme_initiator::{Host, Identity, Target};
use spindle_nvme_transport::TransportKind;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_target_card::{Agent, Command, Session};
use spindle_target_disk::{CacheSpec, CachedDisk, ChannelContext, Disk, DiskChannel, Geometry, PolicyKind};
use spindle_target_remote::{Control, RemoteDisk, RemoteFacts, RemoteSpec, Shape};

use super::link::SimLink;
use super::wire::{AdminAnswer, Shared, lock};
use super::world::World;
use crate::sim::Rng;

/// The smallest cache there is: 16 pages.
const CACHE_BYTES: u64 = 64 << 10;

pub(super) struct AgentCore {
    pub(super) channel: Box<dyn DiskChannel>,
    pub(super) pool: Pool,
    pub(super) paused_until: Nanos,
}

pub(super) struct SimAgent {
    number: usize,
    wire: Shared,
    pub(super) source: Arc<CachedDisk>,
    agent: Arc<Agent>,
    control: Control<SimLink>,
    session: Session,
    pub(super) cores: Vec<AgentCore>,
    pub(super) manager_paused_until: Nanos,
    shape: Shape,
    transfer_blocks: u32,
    /// Number of the association, and the link.
    association: u64,
    link: Option<usize>,
    reconnect_at: Nanos,
    /// Former associations that the target may still execute commands of.
    former: Vec<(u64, usize)>,
    /// Outstanding Next commands, with the times at which they were sent.
    nexts: VecDeque<(u64, Nanos)>,
    next_number: u64,
}

fn spec(cores: usize) -> RemoteSpec {
    let nqn = Nqn::new("nqn.2014-08.org.example:far").expect("well formed");
    let address = ([127, 0, 0, 1], 4420).into();
    RemoteSpec {
        target: Target { transport: TransportKind::Tcp, address, nqn, host: Host::from_uuid([7; 16]) },
        nsid: 1,
        cores: u16::try_from(cores).expect("few"),
        depth: 16,
        command_timeout: Duration::from_secs(25),
        quiesce: Duration::from_secs(1),
        optimistic: None,
        is_clustered: true,
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

impl SimAgent {
    /// `clock`: nanoseconds of simulated time. The clock of the agent goes at a rate of its own.
    pub(super) fn new(
        number: usize,
        wire: &Shared,
        clock: &Arc<AtomicU64>,
        pages: usize,
        rng: &mut Rng,
    ) -> SimAgent {
        let geometry = Geometry {
            block_bytes: 4096,
            block_count: pages as u64,
            is_read_only: false,
            has_volatile_cache: false,
            can_deallocate: false,
            atomic_blocks: 1,
            can_compare_and_write: false,
        };
        let shape = Shape { geometry, must_fua: false };
        let (clock, percent, offset) = (Arc::clone(clock), rng.pick(&[90, 100, 110]), rng.below(1 << 40));
        let time = move || Nanos(clock.load(Ordering::Relaxed) / 100 * percent + offset);
        let agent = Agent::new(geometry.bytes(), Box::new(time));
        let count = rng.size(1, 2);
        let abilities = Oncs::new().with_write_zeroes(true);
        let (disk, control) =
            RemoteDisk::with_far("far", &spec(count), facts(), shape, (abilities, Some(Arc::clone(&agent))));
        control.set_fence_timeout(Nanos::from_secs(60));
        let spec = CacheSpec::new(CACHE_BYTES, PolicyKind::S3Fifo, Pages::Base);
        let read_ahead = rng.pick(&[0, 64 << 10]);
        let source = CachedDisk::new(disk, Some(&CacheSpec { read_ahead, ..spec })).expect("a cache");
        let core = |core| {
            let pool =
                Pool::new(&[ZoneSpec { buffer_bytes: 64 << 10, count: 256 }], Pages::Base).expect("a pool");
            let context = ChannelContext { core, pool: pool.clone(), depth: 32 };
            AgentCore { channel: source.open(&context).expect("opens"), pool, paused_until: Nanos::ZERO }
        };
        SimAgent {
            number,
            wire: Arc::clone(wire),
            cores: (0..count).map(core).collect(),
            source,
            session: Session::new(Arc::clone(&agent)),
            agent,
            control,
            manager_paused_until: Nanos::ZERO,
            shape,
            transfer_blocks: u32::try_from(rng.between(2, 16)).expect("few"),
            association: 0,
            link: None,
            reconnect_at: Nanos::ZERO,
            former: Vec::new(),
            nexts: VecDeque::new(),
            next_number: 0,
        }
    }

    pub(super) fn cut(&self) {
        if let Some(link) = self.link {
            lock(&self.wire).cut(link);
        }
    }

    /// What the manager's thread does. `rng`: of the run.
    pub(super) fn step(&mut self, world: &World, now: Nanos, rng: &mut Rng) {
        if now < self.manager_paused_until {
            return;
        }
        self.former.retain(|(association, link)| {
            let is_over = world.is_over(*link);
            if is_over {
                self.control.over(*association);
            }
            !is_over
        });
        match self.link {
            None if now >= self.reconnect_at => self.connect(),
            None => {}
            Some(link) => self.supervise(link, now, rng),
        }
    }

    fn connect(&mut self) {
        let link = lock(&self.wire).connect(self.number);
        self.association += 1;
        self.link = Some(link);
        let (wire, transfer_blocks) = (Arc::clone(&self.wire), self.transfer_blocks);
        let far = Arc::new(SimLink { wire, link, transfer_blocks });
        self.control.up(self.association, far, self.shape);
        self.session.on_up(self.agent.now());
    }

    fn supervise(&mut self, link: usize, now: Nanos, rng: &mut Rng) {
        let is_cut = lock(&self.wire).is_cut(link);
        // A loss of the admin queue is noticed some time later.
        if self.control.lost() >= self.association || is_cut && rng.permille(100) {
            lock(&self.wire).cut(link);
            self.session.on_down();
            self.nexts.clear();
            self.control.down();
            self.former.push((self.association, link));
            self.link = None;
            self.reconnect_at = now + Nanos::from_us(rng.between(100, 500_000));
            return;
        }
        loop {
            let answer = lock(&self.wire).admin_answer(link);
            let Some(answer) = answer else { break };
            self.on_answer(answer);
        }
        while let Some(command) = self.session.next_command(self.agent.now(), || rng.draw()) {
            let mut wire = lock(&self.wire);
            match command {
                Command::Join { incarnation, former } => wire.join(link, incarnation, former),
                Command::Next { acknowledged } => {
                    self.next_number += 1;
                    self.nexts.push_back((self.next_number, self.agent.now()));
                    wire.next(link, self.next_number, acknowledged);
                }
            }
        }
    }

    fn on_answer(&mut self, answer: AdminAnswer) {
        let now = self.agent.now();
        match answer {
            AdminAnswer::Joined(joined) => self.session.on_joined(joined, now).expect("a good answer"),
            AdminAnswer::Next(number, data) => {
                let Some(at) = self.nexts.iter().position(|(of, _)| *of == number) else { return };
                let (_, sent) = self.nexts.remove(at).expect("just found");
                if self.session.on_next(sent, data.as_deref()).is_err() {
                    assert!(data.is_none(), "an answer of the target is refused");
                    self.cut();
                }
            }
        }
    }
}
