//! Target cores on scripted connections: the test is host, wire, mail between cores and clock, so that it can
//! stop a request in each of its states and look.
//!
//! ```text
//!   send (a command) -> [bring (its data)] -> turn (disks, requests, mail) -> read (completion) -> sent
//! ```
//!
//! [`Rig`] has the cores; a [`Queue`] names one connection. At the end [`Rig::finish`] hangs up whatever is
//! left and checks that every buffer is home and no controller is left behind.

mod line;
mod patience;
mod probe;

use spindle_nvme_transport::ConnectionId;
use std::collections::VecDeque;
use std::sync::Arc;

use nvme_spec::fabrics::{ConnectAttributes, ConnectData};
use nvme_spec::register::CC;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sqe, Status};
use spindle_nvme_transport::{Connections, DataPointer, Event, Peer, TransportKind};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Holder, Pages, Pool, ZoneSpec};
use spindle_target::core::{CoreSettings, TargetCore};
use spindle_target::env::Message;
use spindle_target::notice::Notice;
use spindle_target::qpair::Qpair;
use spindle_target::qpair::request::RequestState;
use spindle_target::shared::Registry;
use spindle_target::snapshot::{AllowedHosts, ControllerLimits, Snapshot};
use spindle_target_disk::Disk;

pub use line::{Answer, Fetch, LIMITS, Line, Part, stack_address};
pub use patience::Patience;
pub use probe::{Asked, Probe, Record};

use crate::direct::name;
use crate::snapshot::SnapshotBuilder;

/// Name of the subsystem.
pub const SUBSYSTEM: &str = "nqn.2026-01.io.spindle:script";
/// Name of the first host.
pub const HOST: &str = "nqn.2026-01.io.spindle:host";
/// CC with EN, IOSQES 6 and IOCQES 4.
pub const CC_ENABLED: u64 = 1 | 6 << 16 | 4 << 20;
/// CC with the sizes only.
pub const CC_DISABLED: u64 = 6 << 16 | 4 << 20;

/// What a target is made of.
#[derive(Clone)]
pub struct Setup {
    /// Number of cores.
    pub cores: usize,
    /// Disks, by [`DiskId`](spindle_target::snapshot::DiskId).
    pub disks: Vec<Option<Arc<dyn Disk>>>,
    /// The disk of namespace 1, 2, ...
    pub namespaces: Vec<Option<usize>>,
    /// Zones of each core's pool.
    pub zones: Vec<(u32, u32)>,
    /// Buffers of 8 KiB for admin commands.
    pub admin_buffers: u32,
    /// Connections of a core.
    pub connections: usize,
    /// Most entries of an I/O queue.
    pub queue_entries: u16,
    /// Most bytes of a command.
    pub transfer_bytes: u32,
    /// Bytes of the pieces of a larger one; 0: it is not cut.
    pub bulk_unit: u32,
    /// Who may connect.
    pub hosts: AllowedHosts,
    /// Of these, the hosts that may read caches by RDMA.
    pub optimistic_hosts: AllowedHosts,
    /// Which listeners are open.
    pub listeners: Vec<bool>,
}

impl Setup {
    /// One core, memory for a few commands.
    #[must_use]
    pub fn small(disks: Vec<Arc<dyn Disk>>) -> Setup {
        Setup {
            cores: 1,
            namespaces: (0..disks.len()).map(Some).collect(),
            disks: disks.into_iter().map(Some).collect(),
            zones: vec![(4096, 16), (128 << 10, 4)],
            admin_buffers: 2,
            connections: 16,
            queue_entries: 128,
            transfer_bytes: 128 << 10,
            bulk_unit: 0,
            hosts: AllowedHosts::Any,
            optimistic_hosts: AllowedHosts::Any,
            listeners: vec![true],
        }
    }

    /// Take a namespace away, and its disk.
    ///
    /// # Panics
    /// When there is none.
    pub fn remove(&mut self, nsid: usize) -> Arc<dyn Disk> {
        let index = self.namespaces[nsid - 1].take().expect("a namespace");
        self.disks[index].take().expect("a disk")
    }

    /// Add a namespace on this disk, which gets an identifier of its own: none is used twice.
    pub fn add(&mut self, nsid: usize, disk: Arc<dyn Disk>) {
        self.namespaces.resize(self.namespaces.len().max(nsid), None);
        self.namespaces[nsid - 1] = Some(self.disks.len());
        self.disks.push(Some(disk));
    }

    /// The configuration.
    #[must_use]
    pub fn snapshot(&self, generation: u64) -> Arc<Snapshot> {
        let base = SnapshotBuilder::new(SUBSYSTEM, &[]);
        let (queue_entries, transfer_bytes, bulk_unit) =
            (self.queue_entries, self.transfer_bytes, self.bulk_unit);
        SnapshotBuilder {
            generation,
            cores: self.cores,
            hosts: self.hosts.clone(),
            optimistic_hosts: self.optimistic_hosts.clone(),
            disks: self.disks.clone(),
            namespaces: self.namespaces.clone(),
            listeners: self.listeners.clone(),
            limits: ControllerLimits { queue_entries, transfer_bytes, bulk_unit, ..base.limits },
            ..base
        }
        .build()
    }
}

/// One connection of a host.
#[derive(Clone)]
pub struct Queue {
    /// Its core.
    pub core: usize,
    /// Its name there.
    pub id: ConnectionId,
    /// The wire.
    pub line: Line,
}

/// A host that is connected: an admin queue and one I/O queue.
pub struct Host {
    /// The admin queue.
    pub admin: Queue,
    /// I/O queue 1.
    pub io: Queue,
    /// The controller.
    pub cntlid: u16,
}

/// How a queue is to be connected.
#[derive(Debug, Clone, Copy)]
pub struct Want {
    /// The queue.
    pub qid: u16,
    /// The controller, or `ffffh`.
    pub cntlid: u16,
    /// Entries of the queue.
    pub entries: u16,
    /// SQ flow control is off.
    pub sq_flow_off: bool,
    /// KATO.
    pub kato_ms: u32,
}

impl Want {
    /// An admin queue of 32 entries.
    #[must_use]
    pub fn admin() -> Want {
        Want { qid: 0, cntlid: 0xffff, entries: 32, sq_flow_off: false, kato_ms: 0 }
    }

    /// An I/O queue of 16 entries.
    #[must_use]
    pub fn io(cntlid: u16, qid: u16) -> Want {
        Want { qid, cntlid, entries: 16, sq_flow_off: false, kato_ms: 0 }
    }
}

/// The target.
pub struct Rig {
    /// Its cores.
    pub cores: Vec<TargetCore<Line>>,
    /// Live controllers.
    pub registry: Arc<Registry>,
    /// What it was made of; change it, then [`Rig::publish`].
    pub setup: Setup,
    /// The time.
    pub now: Nanos,
    /// What the log would say.
    pub notices: Vec<Notice>,
    /// Messages between cores, by sender and receiver; delivered by [`Rig::turn`].
    pub mail: Vec<VecDeque<Message>>,
    /// By which connections come.
    pub listener: usize,
    /// HOSTNQN of the host that connects.
    pub host_nqn: String,
    /// Messages stay where they are.
    pub is_mail_held: bool,
    /// A core whose shells have not come to receive: it makes no receive pass.
    pub unreceived_core: Option<usize>,
    generation: u64,
    /// Cores that have the newest configuration, when it goes to one after the other.
    published: usize,
    home: Vec<(u64, u64)>,
    lines: Vec<Queue>,
}

impl Rig {
    /// A target that waits for hosts.
    ///
    /// # Panics
    /// When a disk cannot be opened.
    #[must_use]
    pub fn new(setup: Setup) -> Rig {
        let registry = Arc::new(Registry::default());
        let snapshot = setup.snapshot(1);
        let zone = |(buffer_bytes, count): (u32, u32)| ZoneSpec { buffer_bytes, count };
        let cores: Vec<_> = (0..setup.cores)
            .map(|core| {
                let zones: Vec<_> = setup.zones.iter().copied().map(zone).collect();
                let settings = CoreSettings {
                    core,
                    cores: setup.cores,
                    connections: setup.connections,
                    disk_depth: 64,
                    pool: Pool::new(&zones, Pages::Base).expect("a pool"),
                    admin_pool: Pool::new(&[zone((8192, setup.admin_buffers))], Pages::Base).expect("a pool"),
                    snapshot: Arc::clone(&snapshot),
                    registry: Arc::clone(&registry),
                    now: Nanos::ZERO,
                    wall_ms: 0,
                };
                TargetCore::new(settings)
            })
            .collect();
        let home = cores.iter().map(free_bytes).collect();
        Rig {
            listener: 0,
            host_nqn: HOST.to_owned(),
            mail: (0..setup.cores * setup.cores).map(|_| VecDeque::new()).collect(),
            cores,
            registry,
            setup,
            now: Nanos::ZERO,
            notices: Vec::new(),
            is_mail_held: false,
            unreceived_core: None,
            generation: 1,
            published: 0,
            home,
            lines: Vec::new(),
        }
    }

    /// A connection that is just accepted.
    ///
    /// # Panics
    /// When there is no room for it.
    pub fn accept(&mut self, core: usize) -> Queue {
        let peer = Peer {
            transport: TransportKind::Tcp,
            listener: self.listener,
            remote: "127.0.0.1:9".parse().expect("an address"),
            local: "127.0.0.1:4420".parse().expect("an address"),
        };
        let line = Line::default();
        let id = self.cores[core].accept(line.clone(), peer).unwrap_or_else(|_| panic!("room"));
        let queue = Queue { core, id, line };
        self.lines.push(queue.clone());
        queue
    }

    /// Connect a queue of the host `host_nqn`, and what the answer is.
    pub fn connect(&mut self, core: usize, want: Want) -> (Queue, Answer) {
        let queue = self.accept(core);
        let host = self.host_nqn.clone();
        let answer = self.try_connect(&queue, want, &host);
        (queue, answer)
    }

    /// Another host, as [`Rig::host`]: its number is part of its HOSTNQN. Later connects are of the same.
    pub fn host_number(&mut self, number: u16) -> Host {
        self.host_nqn = format!("{HOST}-{number}");
        self.host()
    }

    /// Bytes of a core's pool that the host of this queue has.
    ///
    /// # Panics
    /// When the queue is not connected.
    #[must_use]
    pub fn held(&self, queue: &Queue) -> u64 {
        let core = &self.cores[queue.core];
        let client = core.qpair(queue.id).and_then(Qpair::client).expect("an I/O queue");
        core.pools().0.share(Holder::host(client)).held()
    }

    /// Say Connect on a connection.
    pub fn try_connect(&mut self, queue: &Queue, want: Want, host: &str) -> Answer {
        let sqe = connect_sqe(want);
        self.run(queue, sqe, &connect_data(want, host))
    }

    /// A connected host with an enabled controller and I/O queue 1, admin on core 0, I/O on the last core.
    ///
    /// # Panics
    /// When the target does not play along.
    pub fn host(&mut self) -> Host {
        let (admin, cntlid) = self.admin(0, 0);
        let io = self.io(self.setup.cores - 1, Want::io(cntlid, 1));
        Host { admin, io, cntlid }
    }

    /// An admin queue with an enabled controller; its identifier.
    ///
    /// # Panics
    /// When the target does not play along.
    pub fn admin(&mut self, core: usize, kato_ms: u32) -> (Queue, u16) {
        let (admin, answer) = self.connect(core, Want { kato_ms, ..Want::admin() });
        assert_eq!(answer.status, Status::SUCCESS);
        let cntlid = u16::try_from(answer.result & 0xffff).expect("16 bits");
        self.set_cc(&admin, CC_ENABLED);
        (admin, cntlid)
    }

    /// An I/O queue.
    ///
    /// # Panics
    /// When the target does not play along.
    pub fn io(&mut self, core: usize, want: Want) -> Queue {
        let (io, answer) = self.connect(core, want);
        assert_eq!(answer.status, Status::SUCCESS);
        io
    }

    /// Set CC.
    ///
    /// # Panics
    /// When it is refused.
    pub fn set_cc(&mut self, admin: &Queue, value: u64) {
        let answer = self.run(admin, Sqe::property_set(0x7000, false, CC, value), &[]);
        assert_eq!(answer.status, Status::SUCCESS);
    }

    /// A command arrives, with its data at the host. The core steps, nothing more.
    pub fn send(&mut self, queue: &Queue, sqe: Sqe, bytes: usize) {
        let bytes = u32::try_from(bytes).expect("small");
        let data = if bytes == 0 { DataPointer::None } else { DataPointer::Host { bytes } };
        self.send_pointer(queue, sqe, Ok(data));
    }

    /// The same, with this data pointer.
    pub fn send_pointer(&mut self, queue: &Queue, sqe: Sqe, data: Result<DataPointer, Status>) {
        queue.line.push(Event::Command { sqe, data });
        self.step(queue);
    }

    /// The core looks at the connection.
    pub fn step(&mut self, queue: &Queue) {
        self.cores[queue.core].step(queue.id);
    }

    /// The data that was asked for arrives.
    ///
    /// # Panics
    /// When it was not asked for.
    pub fn bring(&mut self, queue: &Queue, cid: u16, data: &[u8]) {
        self.bring_result(queue, cid, data, Ok(()));
    }

    /// The same; damaged, perhaps.
    ///
    /// # Panics
    /// When it was not asked for.
    pub fn bring_result(&mut self, queue: &Queue, cid: u16, data: &[u8], result: Result<(), Status>) {
        let Fetch { slot, mut buf, .. } = queue.line.take_fetch(cid).expect("data that was asked for");
        assert_eq!(buf.len(), data.len(), "as much as the command has");
        buf.copy_in(0, data);
        queue.line.push(Event::Fetched { slot, buf, result });
        self.step(queue);
    }

    /// A part of the data that was asked for arrives; damaged, perhaps.
    ///
    /// # Panics
    /// When it was not asked for.
    pub fn bring_part(
        &mut self,
        queue: &Queue,
        cid: u16,
        offset: u32,
        data: &[u8],
        result: Result<(), Status>,
    ) {
        let part = queue.line.take_part(cid, offset).expect("a part that was asked for");
        let Part { slot, is_fetch, mut buf, .. } = part;
        assert!(is_fetch && buf.len() == data.len(), "{} bytes of {}", buf.len(), data.len());
        buf.copy_in(0, data);
        queue.line.push(Event::FetchedPart { slot, offset, buf, result });
        self.step(queue);
    }

    /// A part leaves for the host; its bytes.
    ///
    /// # Panics
    /// When it is not on the wire.
    pub fn part_sent(&mut self, queue: &Queue, cid: u16, offset: u32) -> Vec<u8> {
        let part = queue.line.take_part(cid, offset).expect("a part on the wire");
        let Part { slot, is_fetch, buf, .. } = part;
        assert!(!is_fetch, "a part of the host's data");
        let data = buf.segments().flatten().copied().collect();
        queue.line.push(Event::SentPart { slot, offset, buf });
        self.step(queue);
        data
    }

    /// Everything that a reactor's turn does besides receiving and sending: mail, disks, waiting requests,
    /// time-outs.
    pub fn turn(&mut self) {
        for index in 0..self.cores.len() {
            self.cores[index].set_time(self.now, self.now.as_ms());
            self.cores[index].poll();
            if self.unreceived_core != Some(index) {
                crate::receive_pass(&mut self.cores[index]);
            }
        }
        self.collect();
        while !self.is_mail_held && self.mail.iter().any(|lane| !lane.is_empty()) {
            for lane in 0..self.mail.len() {
                if let Some(message) = self.mail[lane].pop_front() {
                    self.cores[lane % self.setup.cores].on_message(message);
                }
            }
            self.collect();
        }
    }

    fn collect(&mut self) {
        for from in 0..self.cores.len() {
            let core = &mut self.cores[from];
            while let Some((to, message)) = core.next_message() {
                assert_ne!(to, from, "what a core tells itself needs no mail");
                self.mail[from * self.setup.cores + to].push_back(message);
            }
            while core.next_send_ready().is_some() {}
            while core.next_closed().is_some() {}
            while let Some(notice) = core.notices().pop() {
                self.notices.push(notice);
            }
        }
    }

    /// Time passes, looked at in steps of 50 ms.
    pub fn pass(&mut self, time: Nanos) {
        let end = Nanos(self.now.0 + time.0);
        while self.now.0 < end.0 {
            self.now = Nanos(end.0.min(self.now.0 + 50_000_000));
            self.turn();
        }
    }

    /// The next completion, which leaves.
    pub fn answer(&mut self, queue: &Queue) -> Option<Answer> {
        let answer = queue.line.read()?;
        self.sent(queue);
        Some(answer)
    }

    /// All completions, which leave.
    pub fn answers(&mut self, queue: &Queue) -> Vec<Answer> {
        std::iter::from_fn(|| self.answer(queue)).collect()
    }

    /// Whatever was read has left.
    pub fn sent(&mut self, queue: &Queue) {
        while let Some(slot) = queue.line.next_unsent() {
            // The wire keeps the order: the command's parts have left before.
            while let Some((cid, offset)) = queue.line.next_part_of(slot) {
                self.part_sent(queue, cid, offset);
            }
            queue.line.left(slot);
        }
        self.step(queue);
    }

    /// A command from beginning to end, with its data, if it has any, when it is asked for.
    ///
    /// # Panics
    /// When it is not answered.
    pub fn run(&mut self, queue: &Queue, sqe: Sqe, data: &[u8]) -> Answer {
        self.send(queue, sqe, data.len());
        self.finish_command(queue, sqe.cid(), data)
    }

    /// A read from beginning to end.
    ///
    /// # Panics
    /// When it is not answered.
    pub fn read(&mut self, queue: &Queue, sqe: Sqe, bytes: usize) -> Answer {
        self.run(queue, sqe, &vec![0; bytes])
    }

    /// Bring what is missing of a command and give it turns until its completion is read.
    ///
    /// # Panics
    /// When it is not answered.
    pub fn finish_command(&mut self, queue: &Queue, cid: u16, data: &[u8]) -> Answer {
        let mut patience = Patience::for_turns(10_000);
        while patience.is_left() {
            if queue.line.fetching().contains(&cid) {
                self.bring(queue, cid, data);
            }
            if let Some(answer) = self.answer(queue) {
                assert_eq!(answer.cid, cid, "another command's completion: {answer:?}");
                return answer;
            }
            self.turn();
        }
        panic!("command {cid:#x} is not answered; closed: {:?}", queue.line.closed());
    }

    /// Requests of a queue in each state that has any.
    #[must_use]
    pub fn states(&self, queue: &Queue) -> Vec<(RequestState, usize)> {
        let Some(qpair) = self.cores[queue.core].qpair(queue.id) else { return Vec::new() };
        RequestState::ALL
            .iter()
            .map(|state| (*state, qpair.count(*state)))
            .filter(|(_, count)| *count > 0)
            .collect()
    }

    /// The new configuration goes to all cores.
    pub fn publish(&mut self) {
        self.generation += 1;
        let snapshot = self.setup.snapshot(self.generation);
        self.tell(&Message::Snapshot(snapshot));
    }

    /// It goes to one core, and to the next one by the next call: the same for as many calls as there are
    /// cores.
    pub fn publish_to(&mut self, core: usize) {
        if self.published == 0 {
            self.generation += 1;
        }
        self.published = (self.published + 1) % self.setup.cores;
        let snapshot = self.setup.snapshot(self.generation);
        self.cores[core].on_message(Message::Snapshot(snapshot));
        self.collect();
    }

    /// A message to all cores.
    pub fn tell(&mut self, message: &Message) {
        for core in &mut self.cores {
            core.on_message(message.clone());
        }
        self.turn();
    }

    /// The connection is gone.
    pub fn hang_up(&mut self, queue: &Queue) {
        queue.line.hang_up();
        self.step(queue);
        assert!(self.cores[queue.core].qpair(queue.id).is_none(), "closed, and still there");
    }

    /// Everything is home: buffers and controllers, whatever connections are left.
    ///
    /// # Panics
    /// When something is missing.
    pub fn finish(mut self) {
        for queue in std::mem::take(&mut self.lines) {
            if self.cores[queue.core].qpair(queue.id).is_some() {
                self.hang_up(&queue);
            }
        }
        self.is_mail_held = false;
        self.unreceived_core = None;
        let mut patience = Patience::for_turns(1000);
        while patience.is_left() {
            self.turn();
            if self.cores.iter().all(TargetCore::is_disk_idle) {
                break;
            }
        }
        for (core, home) in self.cores.iter().zip(&self.home) {
            assert_eq!(core.usage().connections, 0);
            assert_eq!(free_bytes(core), *home, "buffers did not come home");
            assert!(core.is_quiet());
        }
        assert_eq!(self.registry.all().len(), 0, "a controller outlived its host");
    }
}

fn free_bytes(core: &TargetCore<Line>) -> (u64, u64) {
    let (pool, admin) = core.pools();
    (pool.free_bytes(), admin.free_bytes())
}

/// Connect, CID 0.
#[must_use]
pub fn connect_sqe(want: Want) -> Sqe {
    let attributes = ConnectAttributes::new().with_disable_sq_flow_control(want.sq_flow_off);
    Sqe::connect(0, want.qid, want.entries.wrapping_sub(1), want.kato_ms, attributes)
}

/// Connect's data.
#[must_use]
pub fn connect_data(want: Want, host: &str) -> Vec<u8> {
    ConnectData::new([7; 16], want.cntlid, &name(SUBSYSTEM), &name(host)).as_bytes().to_vec()
}
