//! The loop of one core: mailbox, sockets, disks, timers, and what it does when there is nothing to do.

use std::collections::VecDeque;
use std::fs::File;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use arrayvec::ArrayVec;
use nvme_spec::rdma::CmStatus;
use spindle_rdma::controller::ConnConfig as RdmaConfig;
use spindle_rdma::shell as rdma;
use spindle_reactor::clock::{Clock, Nanos, wall_ms};
use spindle_reactor::mailbox::Mailbox;
use spindle_reactor::mem::{Area, Pages, Pool, ZoneSpec};
use spindle_reactor::net::{Accepted, Interest, Listener, Ready};
use spindle_reactor::rate::RateLimit;
use spindle_target::core::{CoreSettings, TargetCore};
use spindle_target::env::Message;
use spindle_target::notice::Notice;
use spindle_target::shared::Registry;
use spindle_target::snapshot::{Listener as Listening, Snapshot};
use spindle_tcp::controller::ConnConfig;
use spindle_tcp::shell::{FOREIGN_KEYS, Incoming, Shell, ShellConfig};
use spindle_transport::admission::{Admission, Admitted};
use spindle_transport::{Peer, TransportKind};

use super::ServeError;
use super::arrivals::{ACCEPTS_PER_TURN, Arrival, Arrivals};
use super::conn::Conn;
use crate::config::Idle;

/// Between cores.
#[derive(Clone)]
pub enum CoreMessage {
    /// For the target core.
    Target(Message),
    /// A connection to take over.
    Accept(Arc<Handover<AdmittedTcp>>),
    /// The same over RDMA.
    AcceptRdma(Arc<Handover<AdmittedRdma>>),
    /// Addresses to accept on, by one core for all.
    Listen(Arc<Handover<NewListeners>>),
    /// An RDMA device has gone, come, or told something.
    Rdma(rdma::DeviceMessage),
    /// Memory of the disks of this snapshot, or of the next, is registered with the RDMA devices.
    RdmaMemory(Arc<rdma::RegisteredDisks>),
}

/// Sockets with their index in the snapshot of this generation.
pub type NewListeners = (u64, Vec<(Listener, usize)>);
/// A connection with its place among those without Connect, and its listener's index.
type AdmittedTcp = (Accepted, Admitted, usize);
/// The same over RDMA; the request names its listener.
type AdmittedRdma = (rdma::Request, Admitted);

/// A connection, or listeners, on the way to a core; taken once.
pub struct Handover<A> {
    accepted: std::sync::Mutex<Option<A>>,
}

impl<A> Handover<A> {
    /// To be sent.
    pub fn new(accepted: A) -> Arc<Self> {
        Arc::new(Handover { accepted: std::sync::Mutex::new(Some(accepted)) })
    }

    fn take(&self) -> Option<A> {
        self.accepted.lock().ok().and_then(|mut accepted| accepted.take())
    }
}

/// What a core needs for RDMA.
#[derive(Clone)]
pub struct RdmaSetup {
    /// Settings.
    pub shell: rdma::ShellConfig,
    /// The machine's devices; empty where nothing listens on RDMA.
    pub devices: Arc<[Arc<rdma::SharedDevice>]>,
    /// Addresses to listen on, with their index in the snapshot: on this core.
    pub listeners: Vec<(SocketAddr, usize)>,
}

/// What one core's thread is started with.
pub struct CoreSetup {
    /// Index, from 0.
    pub core: usize,
    /// Number of cores.
    pub cores: usize,
    /// CPU to be pinned to; `None`: not pinned.
    pub cpu: Option<usize>,
    /// When idle.
    pub idle: Idle,
    /// Zones of the data pool and of the admin pool of this core.
    pub zones: (Vec<ZoneSpec>, Vec<ZoneSpec>),
    /// Pages of the pools.
    pub pages: Pages,
    /// Most connections of this core.
    pub connections: usize,
    /// Most commands of a disk on this core.
    pub disk_depth: u32,
    /// Live controllers.
    pub registry: Arc<Registry>,
    /// To and from the other cores.
    pub mailbox: Mailbox<CoreMessage>,
    /// Listeners that this core accepts for all, with their index in the snapshot.
    pub listeners: Vec<(Listener, usize)>,
    /// Connections of each core, so that the next goes to the least loaded.
    pub loads: Arc<[AtomicUsize]>,
    /// Connections that have not sent Connect.
    pub admission: Arc<Admission>,
    /// Sockets and batches.
    pub shell: ShellConfig,
    /// NVMe/TCP.
    pub conn: ConnConfig,
    /// NVMe/RDMA.
    pub rdma: RdmaSetup,
    /// Log lines a second that hosts can cause on this core.
    pub peer_lines_per_s: u32,
    /// Raised when a core has failed or all are to end at once.
    pub stop: Arc<AtomicBool>,
}

/// The core that accepts connections for all.
pub const ACCEPTOR: usize = 0;
/// Log lines that hosts can cause at once, in seconds of their rate.
const LOG_BURST_SECONDS: u32 = 5;
/// Longest sleep: time-outs are looked at after it.
const SLEEP_MAX: Duration = Duration::from_millis(50);
/// Connection requests over RDMA that are given to their cores in a turn.
const RDMA_PLACED_PER_TURN: usize = 16;

/// A core at work.
pub struct CoreLoop {
    /// Where there is a listener for it. First: it is dropped first, and its queue pairs go before the
    /// buffers that their connections hold.
    rdma: Option<rdma::Shell>,
    setup: CoreSetup,
    /// For devices that come later.
    pool: Area,
    core: TargetCore<Conn>,
    shell: Shell,
    /// A device of it works on this processor too.
    wants_yield: bool,
    log: RateLimit,
    last_work: Nanos,
    wall_base: u64,
    time_base: Nanos,
    /// Messages for which a mailbox had no room.
    backlog: VecDeque<(usize, CoreMessage)>,
    due: Due,
    /// Connections to take over: a few in every turn.
    arrivals: Arrivals<AdmittedTcp, AdmittedRdma>,
    accept_log: RateLimit,
    refused_log: RateLimit,
    /// With the generation that has them: a connection is placed on any core, so all have to know them first.
    new_listeners: Vec<(u64, (Listener, usize))>,
    /// The generation that the listeners are of.
    listens_as_of: u64,
    /// The listener that is accepted from first in the next turn.
    first_listener: usize,
    /// A descriptor to be given up where there are no others; only on a core that accepts.
    spare: Option<File>,
}

impl CoreLoop {
    /// Take memory, open the disks of the configuration, listen.
    ///
    /// The first configuration is no part of the setup, which stays for as long as the core does: disks that
    /// a reload takes away would stay with it.
    ///
    /// # Errors
    /// [`ServeError`] with the reason.
    pub fn new(mut setup: CoreSetup, snapshot: Arc<Snapshot>) -> Result<CoreLoop, ServeError> {
        if let Some(cpu) = setup.cpu {
            spindle_reactor::affinity::pin_current_thread(cpu)
                .map_err(|error| ServeError::Start(error.to_string()))?;
        }
        let start = |error: &dyn std::fmt::Display| ServeError::Start(error.to_string());
        let pool = Pool::new(&setup.zones.0, setup.pages).map_err(|error| start(&error))?;
        let admin_pool = Pool::new(&setup.zones.1, Pages::Base).map_err(|error| start(&error))?;
        let mut rdma = open_rdma(&setup, &snapshot, &pool, &admin_pool)?;
        let area = pool.area();
        // A device that goes is let go of: the shell alone holds it.
        setup.rdma.devices = Arc::default();
        let now = Clock::now();
        let first = snapshot.generation;
        let core = TargetCore::new(CoreSettings {
            core: setup.core,
            cores: setup.cores,
            connections: setup.connections,
            disk_depth: setup.disk_depth,
            pool,
            admin_pool,
            snapshot,
            registry: Arc::clone(&setup.registry),
            now,
            wall_ms: wall_ms(),
        })
        .map_err(|error| start(&error))?;
        let shell = Shell::new(setup.shell, setup.connections).map_err(|error| start(&error))?;
        for (listener, index) in &setup.listeners {
            let key = LISTENERS + *index as u64;
            shell.readiness().add(listener, key, Interest::READ).map_err(|error| start(&error))?;
        }
        shell
            .readiness()
            .add(setup.mailbox.waker(), MAILBOX, Interest::READ)
            .map_err(|error| start(&error))?;
        for (source, descriptor) in rdma.iter_mut().flat_map(rdma::Shell::take_descriptors) {
            let key = rdma_key(source);
            shell.readiness().add(descriptor, key, Interest::READ).map_err(|error| start(&error))?;
        }
        Ok(CoreLoop {
            pool: area,
            core,
            shell,
            wants_yield: rdma.as_ref().is_some_and(rdma::Shell::wants_yield),
            rdma,
            log: RateLimit::new(
                setup.peer_lines_per_s,
                setup.peer_lines_per_s.saturating_mul(LOG_BURST_SECONDS),
            ),
            last_work: now,
            wall_base: wall_ms(),
            time_base: now,
            backlog: VecDeque::new(),
            due: Due::default(),
            arrivals: Arrivals::new(),
            accept_log: RateLimit::new(1, 5),
            refused_log: RateLimit::new(1, 5),
            new_listeners: Vec::new(),
            listens_as_of: first,
            first_listener: 0,
            spare: if setup.listeners.is_empty() { None } else { spare() },
            setup,
        })
    }

    /// The memory of its data.
    pub fn pool(&self) -> &Area {
        &self.pool
    }

    /// Work until shutdown is through or `stop` is raised.
    pub fn run(mut self) {
        while !self.setup.stop.load(Ordering::Relaxed) {
            let has_worked = self.turn();
            if self.core.is_draining() && self.core.usage().connections == 0 {
                break;
            }
            if has_worked {
                self.last_work = Clock::now();
            } else {
                self.idle();
            }
        }
        self.log_notices();
    }

    fn turn(&mut self) -> bool {
        let now = Clock::now();
        let wall = self.wall_base + (now.0 - self.time_base.0) / 1_000_000;
        self.core.set_time(now, wall);
        if std::mem::take(&mut self.due.mail) {
            self.setup.mailbox.drain();
        }
        let mut has_worked = self.receive_messages();
        // Hosts are told at the same time.
        if self.core.shown().generation != self.listens_as_of {
            self.change_listeners();
        }
        self.shell.set_shared(self.rdma.as_ref().is_some_and(rdma::Shell::has_connections));
        let due = &mut self.due;
        has_worked |= self.shell.poll(&mut self.core, now, &mut |ready| due.note(ready));
        if std::mem::take(&mut self.due.accept) {
            has_worked = true;
            self.accept(now);
        }
        has_worked |= self.poll_rdma(now);
        has_worked |= self.take_arrivals(now);
        has_worked |= self.core.poll();
        while let Some(id) = self.core.next_touched() {
            if !self.shell.flush(&mut self.core, id)
                && let Some(rdma) = &mut self.rdma
            {
                rdma.flush(&mut self.core, id);
            }
        }
        self.send_messages();
        self.log_notices();
        has_worked
    }

    #[inline]
    fn poll_rdma(&mut self, now: Nanos) -> bool {
        let Some(shell) = &mut self.rdma else { return false };
        if !self.due.rdma.is_empty() {
            self.due.rdma.drain(..).for_each(|source| shell.on_ready(source));
        }
        let has_worked = shell.poll(&mut self.core, now);
        while let Some(message) = shell.next_message() {
            let others = (0..self.setup.cores).filter(|core| *core != self.setup.core);
            self.backlog.extend(others.map(|core| (core, CoreMessage::Rdma(message.clone()))));
        }
        if shell.has_descriptors() {
            self.watch_rdma();
        }
        self.place_rdma(now);
        has_worked
    }

    /// The disks' memory can be used. The first time also the listeners are opened.
    #[cold]
    fn take_rdma_memory(&mut self, memory: &rdma::RegisteredDisks) {
        let (core, Some(shell)) = (self.setup.core, &mut self.rdma) else { return };
        for (disk, error) in shell.set_disks(memory.disks().to_vec()) {
            tracing::error!(
                core,
                disk,
                error,
                "memory of the disk cannot be registered: not served over RDMA until that succeeds"
            );
        }
        let opened = shell.start_listening();
        for (address, result) in &opened {
            if let Err(error) = result {
                tracing::error!(%address, %error, "cannot listen over RDMA: it is tried again");
            }
        }
        if !opened.is_empty() {
            super::announce(self.core.snapshot(), TransportKind::Rdma);
        }
    }

    /// Wait for what a new device has to tell, too.
    #[cold]
    fn watch_rdma(&mut self) {
        for (source, descriptor) in self.rdma.iter_mut().flat_map(rdma::Shell::take_descriptors) {
            if let Err(error) = self.shell.readiness().add(descriptor, rdma_key(source), Interest::READ) {
                let core = self.setup.core;
                tracing::error!(core, %error, "events of an RDMA device cannot be waited for");
            }
        }
    }

    /// All cores have another configuration: accept from the listeners that it has, and from no other.
    #[cold]
    fn change_listeners(&mut self) {
        let shown = Arc::clone(self.core.shown());
        self.listens_as_of = shown.generation;
        let is_open = |index: usize| shown.listeners.get(index).filter(|listener| listener.is_open);
        let CoreLoop { setup, shell, new_listeners, .. } = self;
        setup.listeners.retain(|(listener, index)| {
            let is_kept = is_open(*index).is_some();
            if !is_kept {
                let _ = shell.readiness().remove(listener);
            }
            is_kept
        });
        for (listener, index) in
            new_listeners.extract_if(.., |new| new.0 <= shown.generation).map(|new| new.1)
        {
            // Else it was taken away again meanwhile.
            let Some(Listening { address, port_id, .. }) = is_open(index) else { continue };
            match shell.readiness().add(&listener, LISTENERS + index as u64, Interest::READ) {
                Ok(()) => {
                    tracing::info!(%address, port_id, "listening (NVMe/TCP, discovery included)");
                    setup.listeners.push((listener, index));
                }
                Err(error) => tracing::error!(%address, %error, "cannot listen: the socket is not watched"),
            }
        }
        if !setup.listeners.is_empty() && self.spare.is_none() {
            self.spare = spare();
        }
        // What came before they were watched.
        self.due.accept = true;
    }

    fn receive_messages(&mut self) -> bool {
        let mut has_worked = false;
        while let Some((_, message)) = self.setup.mailbox.receive() {
            has_worked = true;
            match message {
                CoreMessage::Target(message) => self.core.on_message(message),
                CoreMessage::Listen(handover) => {
                    let (generation, listeners) = handover.take().unwrap_or_default();
                    self.new_listeners.extend(listeners.into_iter().map(|listener| (generation, listener)));
                }
                CoreMessage::Accept(handover) => {
                    if let Some(accepted) = handover.take() {
                        self.arrivals.push(Arrival::Tcp(accepted));
                    }
                }
                CoreMessage::AcceptRdma(handover) => {
                    if let Some(request) = handover.take() {
                        self.arrivals.push(Arrival::Rdma(request));
                    }
                }
                CoreMessage::Rdma(message) => {
                    if let Some(shell) = &mut self.rdma {
                        shell.on_message(&mut self.core, message);
                    }
                }
                CoreMessage::RdmaMemory(memory) => self.take_rdma_memory(&memory),
            }
        }
        has_worked
    }

    fn send_messages(&mut self) {
        // What finds no room stays in the core's own list: by its length the core knows when to leave out
        // what hosts can cause without end.
        while let Some((to, message)) = self.backlog.pop_front() {
            if let Err(message) = self.setup.mailbox.send(to, message) {
                self.backlog.push_front((to, message));
                return;
            }
        }
        while let Some((to, message)) = self.core.next_message() {
            if let Err(message) = self.setup.mailbox.send(to, CoreMessage::Target(message)) {
                self.backlog.push_front((to, message));
                return;
            }
        }
    }

    /// Accept a few connections. The listener stays readable while there are more.
    fn accept(&mut self, now: Nanos) {
        let listeners = self.setup.listeners.len();
        let mut left = ACCEPTS_PER_TURN;
        for at in 0..listeners {
            // Each is the first in its turn: none is accepted from only while another has none.
            let index = (self.first_listener + at) % listeners;
            while left > 0 {
                let (listener, listener_index) = &self.setup.listeners[index];
                let listener_index = *listener_index;
                left -= 1;
                match listener.accept() {
                    // One that has no place is closed.
                    Ok(Some(accepted)) => {
                        if let Some(admitted) = self.admit(accepted.peer, now) {
                            self.place((accepted, admitted, listener_index));
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        if let Some(allowed) = self.accept_log.allow(now) {
                            tracing::warn!(%error, untold = allowed.suppressed, "cannot accept");
                        }
                        if !self.turn_away(index) {
                            break;
                        }
                    }
                }
            }
        }
        self.first_listener = (self.first_listener + 1) % listeners.max(1);
    }

    /// A place among the connections without Connect. `None`: the address has as many as it may, and the
    /// connection is to be refused.
    fn admit(&mut self, remote: SocketAddr, now: Nanos) -> Option<Admitted> {
        let admitted = self.setup.admission.admit(remote.ip());
        if admitted.is_none()
            && let Some(allowed) = self.refused_log.allow(now)
        {
            let (limit, untold) = (self.setup.admission.per_address(), allowed.suppressed);
            tracing::warn!(
                %remote,
                limit,
                untold,
                "connection refused: its address has limit connections that have not sent Connect \
                 (limits.unconnected_per_address)"
            );
        }
        admitted
    }

    /// Descriptors have run out. A connection that is not taken would wait without an answer, and keep this
    /// core awake: take it with the descriptor that was kept for that, and close it. False: there was none.
    fn turn_away(&mut self, listener: usize) -> bool {
        drop(self.spare.take());
        let is_closed = matches!(self.setup.listeners[listener].0.accept(), Ok(Some(_)));
        self.spare = spare();
        is_closed
    }

    /// To the core with the fewest connections.
    fn place(&mut self, accepted: AdmittedTcp) {
        let least = self.least_loaded();
        if least == self.setup.core {
            self.arrivals.push(Arrival::Tcp(accepted));
            return;
        }
        self.backlog.push_back((least, CoreMessage::Accept(Handover::new(accepted))));
    }

    /// The core with the fewest connections; another one's count goes up, and is corrected by itself.
    fn least_loaded(&self) -> usize {
        let loads = &self.setup.loads;
        let least = (0..loads.len()).min_by_key(|core| loads[*core].load(Ordering::Relaxed)).unwrap_or(0);
        if least != self.setup.core {
            loads[least].fetch_add(1, Ordering::Relaxed);
        }
        least
    }

    fn place_rdma(&mut self, now: Nanos) {
        for _ in 0..RDMA_PLACED_PER_TURN {
            let Some(request) = self.rdma.as_mut().and_then(rdma::Shell::next_request) else { return };
            // One without an address is refused by being dropped.
            let Some(remote) = request.remote() else { continue };
            let Some(admitted) = self.admit(remote, now) else {
                request.reject(CmStatus::NO_RESOURCES);
                continue;
            };
            let least = self.least_loaded();
            if least == self.setup.core {
                self.arrivals.push(Arrival::Rdma((request, admitted)));
            } else {
                let handover = Handover::new((request, admitted));
                self.backlog.push_back((least, CoreMessage::AcceptRdma(handover)));
            }
        }
    }

    /// Take over some of the connections that wait for it; the others have the next turn. True when there
    /// were any.
    #[inline]
    fn take_arrivals(&mut self, now: Nanos) -> bool {
        if self.arrivals.waiting() == 0 {
            return false;
        }
        self.arrivals.begin_turn();
        while self.arrivals.has_next() && self.make_room() {
            match self.arrivals.take_next() {
                Some(Arrival::Tcp(accepted)) => self.take_over(accepted, now),
                Some(Arrival::Rdma(request)) => self.take_over_rdma(request, now),
                None => break,
            }
        }
        true
    }

    /// See [`TargetCore::make_room`].
    fn make_room(&mut self) -> bool {
        let CoreLoop { core, shell, rdma, arrivals, .. } = self;
        core.make_room(arrivals.waiting(), |core, id| {
            if !shell.evict(core, id)
                && let Some(rdma) = rdma
            {
                rdma.evict(core, id);
            }
        })
    }

    fn take_over_rdma(&mut self, (request, admitted): AdmittedRdma, now: Nanos) {
        let Some(shell) = &mut self.rdma else { return };
        let snapshot = self.core.snapshot();
        let tcp = &self.setup.conn;
        let listener = snapshot.listeners.get(request.listener);
        let config = RdmaConfig {
            in_capsule_bytes: listener.map_or(tcp.in_capsule_bytes, |listener| listener.in_capsule_bytes),
            queue_entries: tcp.queue_entries,
            transfer_bytes: tcp.transfer_bytes,
            close_timeout: tcp.close_timeout,
            ..RdmaConfig::default()
        };
        shell.accept(&mut self.core, (request, admitted), config, now);
    }

    fn take_over(&mut self, (accepted, admitted, listener): AdmittedTcp, now: Nanos) {
        let remote = accepted.peer;
        let peer = Peer { transport: TransportKind::Tcp, listener, remote, local: accepted.local };
        let mut config = self.setup.conn;
        let snapshot = self.core.snapshot();
        if let Some(listener) = snapshot.listeners.get(listener) {
            config.in_capsule_bytes = listener.in_capsule_bytes;
        }
        let incoming = Incoming { socket: accepted.socket, peer, config, admitted };
        let is_taken = self.shell.accept(&mut self.core, incoming, now);
        if !is_taken
            && !self.core.is_draining()
            && let Some(allowed) = self.accept_log.allow(now)
        {
            let (connections, untold) = (self.setup.connections, allowed.suppressed);
            tracing::warn!(%remote, connections, untold, "no room for a connection on this core");
        }
    }

    fn log_notices(&mut self) {
        let loads = &self.setup.loads[self.setup.core];
        let connections = self.core.usage().connections + self.arrivals.waiting();
        if loads.load(Ordering::Relaxed) != connections {
            loads.store(connections, Ordering::Relaxed);
        }
        while let Some(notice) = self.core.notices().pop() {
            if let Some(allowed) = self.log.allow(Clock::now()) {
                if allowed.suppressed > 0 {
                    tracing::warn!(
                        core = self.setup.core,
                        lines = allowed.suppressed,
                        "log lines were left out"
                    );
                }
                log(self.setup.core, &notice);
            }
        }
        self.log.add_suppressed(self.core.notices().take_dropped());
    }

    /// Nothing to do: spin, or sleep once it has lasted.
    fn idle(&mut self) {
        if self.wants_yield {
            std::thread::yield_now();
        }
        let Idle::Adaptive { spin_us } = self.setup.idle else {
            std::hint::spin_loop();
            return;
        };
        let idle_for = Clock::now().0 - self.last_work.0;
        if idle_for < spin_us * 1000 || !self.core.is_quiet() || !self.backlog.is_empty() {
            std::hint::spin_loop();
            return;
        }
        self.shell.cool();
        if !self.setup.mailbox.prepare_sleep() {
            return; // something came meanwhile
        }
        if !self.rdma.as_mut().is_none_or(rdma::Shell::prepare_sleep) {
            self.setup.mailbox.rise();
            return; // a completion has come meanwhile
        }
        let due = &mut self.due;
        self.core.set_time(Clock::now(), self.wall_base + (Clock::now().0 - self.time_base.0) / 1_000_000);
        self.shell.sleep(&mut self.core, SLEEP_MAX, &mut |ready| due.note(ready));
        self.setup.mailbox.rise();
        if self.shell.hot_count() > 0 || self.due.accept || !self.due.rdma.is_empty() {
            self.last_work = Clock::now();
        }
    }
}

/// The RDMA shell of a core, where anything listens on RDMA.
fn open_rdma(
    setup: &CoreSetup,
    snapshot: &Snapshot,
    pool: &Pool,
    admin: &Pool,
) -> Result<Option<rdma::Shell>, ServeError> {
    if setup.rdma.devices.is_empty() {
        return Ok(None);
    }
    let failed = |error: &dyn std::fmt::Display| ServeError::Start(format!("RDMA: {error}"));
    let in_capsule = snapshot.listeners.iter().map(|listener| listener.in_capsule_bytes);
    let mut shell = rdma::Shell::new(&rdma::ShellSetup {
        config: setup.rdma.shell,
        core: setup.core,
        devices: &setup.rdma.devices,
        areas: &[pool.area(), admin.area()],
        connections: setup.connections,
        in_capsule_bytes: in_capsule.max().unwrap_or(0),
        entries_max: setup.conn.queue_entries,
    })
    .map_err(|error| failed(&error))?;
    // They listen when the disks' memory is registered: [`super::registrar`].
    for (address, index) in &setup.rdma.listeners {
        let refused = |error| ServeError::ListenRdma { address: *address, source: error };
        shell.bind(*address, *index).map_err(refused)?;
    }
    Ok(Some(shell))
}

/// A descriptor that costs nothing.
fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}

/// Descriptors that are no connection, and what they have told.
#[derive(Debug, Default)]
struct Due {
    accept: bool,
    /// The mailbox's waker is raised.
    mail: bool,
    rdma: ArrayVec<rdma::Source, 3>,
}

impl Due {
    fn note(&mut self, ready: Ready) {
        match ready.key {
            MAILBOX => self.mail = true,
            RDMA_COMPLETIONS => self.note_rdma(rdma::Source::Completions),
            RDMA_MANAGER => self.note_rdma(rdma::Source::Manager),
            RDMA_DEVICE => self.note_rdma(rdma::Source::Device),
            _ => self.accept = true,
        }
    }

    fn note_rdma(&mut self, source: rdma::Source) {
        if !self.rdma.contains(&source) {
            self.rdma.push(source);
        }
    }
}

/// Keys of descriptors: the mailbox's waker, the RDMA shell's, and the listeners' behind them.
const MAILBOX: u64 = FOREIGN_KEYS;
const RDMA_COMPLETIONS: u64 = FOREIGN_KEYS + 1;
const RDMA_MANAGER: u64 = FOREIGN_KEYS + 2;
const RDMA_DEVICE: u64 = FOREIGN_KEYS + 3;
const LISTENERS: u64 = FOREIGN_KEYS + 4;

fn rdma_key(source: rdma::Source) -> u64 {
    match source {
        rdma::Source::Completions => RDMA_COMPLETIONS,
        rdma::Source::Manager => RDMA_MANAGER,
        rdma::Source::Device => RDMA_DEVICE,
    }
}

fn log(core: usize, notice: &Notice) {
    match notice {
        Notice::Connected { .. } | Notice::Disconnected { .. } => tracing::info!(core, "{notice}"),
        Notice::Refused { .. }
        | Notice::HostError { .. }
        | Notice::Violation { .. }
        | Notice::ConnectionRefused { .. }
        | Notice::OtherHostId { .. }
        | Notice::KeepAliveExpired { .. } => tracing::warn!(core, "{notice}"),
        Notice::DiskOpen { .. } | Notice::DiskError { .. } | Notice::Leftover { .. } => {
            tracing::error!(core, "{notice}")
        }
    }
}

#[cfg(test)]
mod tests;
