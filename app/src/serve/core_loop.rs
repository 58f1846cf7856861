//! What runs on one core: the pollers of its [`Reactor`] and what they share.
//!
//! ```text
//!   acceptor   TCP listeners ── a place before Connect, the core with the fewest ──> arrivals, here or there
//!   sockets    TCP: arrivals ──> connections; their bytes
//!   adapters   RDMA: the same, and requests of its listeners
//!   requests   controllers, queue pairs and disks; configuration and messages of other cores; the log
//! ```
//!
//! This is their order in a turn. What it does not do: it has neither loop nor epoll, which the reactor has.

mod acceptor;
mod adapters;
mod arrivals;
mod requests;
mod shared;
mod sockets;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

use spindle_rdma::shell as rdma;
use spindle_reactor::clock::{Clock, wall_ms};
use spindle_reactor::mailbox::Mailbox;
use spindle_reactor::mem::{Area, Pages, Pool};
use spindle_reactor::net::{Accepted, Listener};
use spindle_reactor::run::{Poller, Reactor, Turns};
use spindle_target::core::{CoreSettings, TargetCore};
use spindle_target::env::Message;
use spindle_target::shared::Registry;
use spindle_target::snapshot::Snapshot;
use spindle_transport::admission::{Admission, Admitted};

use self::acceptor::Acceptor;
use self::adapters::Adapters;
use self::requests::Requests;
use self::shared::Core;
use self::sockets::Sockets;
use super::ServeError;
use crate::config::Plan;

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

/// A socket with its listener's index in the snapshot. The core that accepts has it; a reload looks at it.
pub type Listening = (Arc<Listener>, usize);
/// Those that are new in the snapshot of this generation.
pub type NewListeners = (u64, Vec<Listening>);
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
    /// The machine's devices; empty where nothing listens on RDMA.
    pub devices: Arc<[Arc<rdma::SharedDevice>]>,
    /// The same, and those that come; the registrar has it too.
    pub known: rdma::KnownDevices,
    /// Most in-capsule data that receives have room for.
    pub in_capsule_bytes: u32,
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
    /// What the configuration says of pools, connections, disks and transports.
    pub plan: Arc<Plan>,
    pub registry: Arc<Registry>,
    /// Listeners that this core accepts for all.
    pub listeners: Vec<Listening>,
    /// Connections of each core, so that the next goes to the one with the fewest.
    pub loads: Arc<[AtomicUsize]>,
    /// Generation of the configuration that hosts of each core are shown.
    pub advertised: Arc<[AtomicU64]>,
    /// Connections that have not sent Connect.
    pub admission: Arc<Admission>,
    pub rdma: RdmaSetup,
    /// Raised when a core has failed or all are to end at once.
    pub stop: Arc<AtomicBool>,
}

/// A core that works, as others see it.
pub struct CoreReady {
    /// Index, from 0.
    pub core: usize,
    /// The memory of its data.
    pub pool: Area,
    /// What its turns take.
    pub turns: Arc<Turns>,
}

/// The core that accepts connections for all.
pub const ACCEPTOR: usize = 0;

/// The places of those in the list of pollers that watch descriptors.
const ACCEPTOR_PLACE: u32 = 0;
const SOCKETS_PLACE: u32 = 1;
const ADAPTERS_PLACE: u32 = 2;

/// A core at work.
pub struct CoreLoop {
    /// First: they are dropped first, and the queue pairs of RDMA go before the buffers that their
    /// connections hold.
    pollers: Vec<Box<dyn Poller<Core, CoreMessage>>>,
    shared: Core,
    reactor: Reactor<CoreMessage>,
    stop: Arc<AtomicBool>,
    pool: Area,
}

impl CoreLoop {
    /// Take memory, open the disks of the configuration, listen. The mailbox is that of the core.
    pub fn new(
        setup: CoreSetup,
        mailbox: Mailbox<CoreMessage>,
        snapshot: Arc<Snapshot>,
    ) -> Result<CoreLoop, ServeError> {
        if let Some(cpu) = setup.cpu {
            spindle_reactor::affinity::pin_current_thread(cpu)
                .map_err(|error| ServeError::Start(error.to_string()))?;
        }
        let (plan, connections) = (&*setup.plan, setup.plan.connections_per_core());
        let start = |error: &dyn std::fmt::Display| ServeError::Start(error.to_string());
        let pool = Pool::new(&plan.pool.zones, plan.pool.pages).map_err(|error| start(&error))?;
        let admin_pool = Pool::new(&plan.pool.admin_zones, Pages::Base).map_err(|error| start(&error))?;
        let area = pool.area();
        let reactor = Reactor::new(mailbox, plan.reactor.idle).map_err(|error| start(&error))?;
        let mut adapters = None;
        if !setup.rdma.devices.is_empty() {
            let areas = [pool.area(), admin_pool.area()];
            let watcher = reactor.watcher(ADAPTERS_PLACE);
            adapters = Some(Adapters::new(&setup, snapshot.generation, &areas, watcher)?);
        }
        let generation = snapshot.generation;
        let target = TargetCore::new(CoreSettings {
            core: setup.core,
            cores: setup.cores,
            connections,
            disk_depth: plan.limits.disk_commands,
            pool,
            admin_pool,
            snapshot,
            registry: setup.registry,
            now: Clock::now(),
            wall_ms: wall_ms(),
        })
        .map_err(|error| start(&error))?;
        let acceptor = Acceptor::new(setup.listeners, generation, reactor.watcher(ACCEPTOR_PLACE));
        let sockets = Sockets::new(plan.tcp, connections, reactor.watcher(SOCKETS_PLACE));
        let mut pollers: Vec<Box<dyn Poller<Core, CoreMessage>>> = Vec::new();
        pollers.push(Box::new(acceptor.map_err(|error| start(&error))?));
        pollers.push(Box::new(sockets));
        // Without RDMA its place is that of what watches nothing.
        if let Some(adapters) = adapters {
            pollers.push(Box::new(adapters));
        }
        // The last: what flushing brings goes to other cores and into the log with it.
        pollers.push(Box::new(Requests::new(setup.core, plan.log.peer_lines_per_s)));
        let shared = Core::new(target, setup.core, (setup.loads, setup.advertised), setup.admission);
        Ok(CoreLoop { pollers, shared, reactor, stop: setup.stop, pool: area })
    }

    /// What others need of it.
    pub fn ready(&self) -> CoreReady {
        CoreReady {
            core: self.shared.core(),
            pool: self.pool.clone(),
            turns: Arc::clone(self.reactor.turns()),
        }
    }

    /// Work until shutdown is through or `stop` is raised.
    pub fn run(mut self) {
        self.reactor.run(&mut self.shared, &mut self.pollers, &self.stop);
    }

    #[cfg(test)]
    fn turn(&mut self) -> bool {
        self.reactor.turn(&mut self.shared, &mut self.pollers)
    }
}

#[cfg(test)]
mod tests;
