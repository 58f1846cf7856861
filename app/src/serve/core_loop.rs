//! The pollers of a core, in the order in which its [`Reactor`] runs them in each turn, and their shared
//! state.
//!
//! ```text
//!   Acceptor      TCP listeners: admits connections, assigns each to the core with the fewest
//!   TcpPoller     takes over TCP connections; receives and sends their bytes
//!   RdmaPoller    the same for RDMA, and requests of the RDMA listeners; only with an RDMA listener
//!   TargetPoller  disks, time-outs, messages to and from other cores, log lines
//! ```
//!
//! The loop itself and epoll are in the reactor. In the log and in `spindle status` the pollers have the
//! names `acceptor`, `sockets`, `adapters` and `requests`.

mod acceptor;
mod arrivals;
mod rdma_poller;
mod shared;
mod target_poller;
mod tcp_poller;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

use spindle_nvme_rdma::shell as rdma;
use spindle_nvme_transport::admission::{Admission, Admitted};
use spindle_reactor::clock::{Clock, wall_ms};
use spindle_reactor::mailbox::Mailbox;
use spindle_reactor::mem::{Area, Pages, Pool};
use spindle_reactor::net::{Accepted, Listener};
use spindle_reactor::run::{Poller, Reactor, Turns};
use spindle_target::core::{CoreSettings, TargetCore};
use spindle_target::env::Message;
use spindle_target::shared::Registry;
use spindle_target::snapshot::Snapshot;

use self::acceptor::Acceptor;
use self::rdma_poller::RdmaPoller;
use self::shared::Core;
pub use self::shared::{DiskError, DiskErrors, PublishedListeners, RdmaListeners};
use self::target_poller::TargetPoller;
use self::tcp_poller::TcpPoller;
use super::ServeError;
use crate::config::Plan;

/// A message from another core or thread.
pub enum CoreMessage {
    Target(Message),
    /// An accepted TCP connection, for the receiving core to take over.
    Accept(Box<AdmittedTcp>),
    /// An RDMA connection request, for the receiving core to accept.
    AcceptRdma(Box<AdmittedRdma>),
    /// New TCP listeners; sent to core [`ACCEPTOR`].
    Listen(NewListeners),
    /// An RDMA device was added, removed or failed, or has other memory.
    Rdma(rdma::DeviceMessage),
    /// Nothing but the end of a sleep: there are entries for a member of a cluster.
    Wake,
    /// All cores have been sent the devices and memory of the first snapshot; sent to core [`ACCEPTOR`],
    /// which opens its RDMA listeners.
    ListenRdma,
}

/// A listening TCP socket and the index of its listener in the snapshot.
pub type Listening = (Arc<Listener>, usize);
/// A snapshot's generation and the listeners that are new in it.
pub type NewListeners = (u64, Vec<Listening>);
/// A connection that has not sent Connect yet, its admission, and the index of its listener.
type AdmittedTcp = (Accepted, Admitted, usize);
/// A connection request, which contains the index of its listener, and its admission.
type AdmittedRdma = (rdma::Request, Admitted);

/// The RDMA devices, shared by all cores, and the RDMA listeners of a core.
#[derive(Clone)]
pub struct RdmaSetup {
    /// The current devices, updated as devices are added and removed; shared with the registrar.
    pub known: rdma::KnownDevices,
    /// In-capsule data for which each posted receive has space, in bytes.
    pub in_capsule_bytes: u32,
    /// Addresses and snapshot indices of the listeners; empty on all cores but [`ACCEPTOR`].
    pub listeners: Vec<(SocketAddr, usize)>,
    pub published: PublishedListeners,
}

/// Parameters of a core's thread.
pub struct CoreSetup {
    /// Index, from 0.
    pub core: usize,
    pub cores: usize,
    /// CPU that the thread is pinned to; `None`: not pinned.
    pub cpu: Option<usize>,
    pub plan: Arc<Plan>,
    pub registry: Arc<Registry>,
    /// TCP listeners; empty on all cores but [`ACCEPTOR`].
    pub listeners: Vec<Listening>,
    /// Count of connections of each core. A new connection is assigned to the core with the fewest.
    pub loads: Arc<[AtomicUsize]>,
    /// Per core, the generation of its advertised snapshot.
    pub advertised: Arc<[AtomicU64]>,
    /// Per core, the disks that are not open there.
    pub disk_errors: DiskErrors,
    /// Limits connections that have not sent Connect, per address.
    pub admission: Arc<Admission>,
    pub rdma: RdmaSetup,
    /// Set when all cores must stop at once: a core could not be started, or the shutdown deadline passed.
    pub stop: Arc<AtomicBool>,
}

/// Reported by a core's thread once the core can serve.
pub struct CoreReady {
    /// Index, from 0.
    pub core: usize,
    /// Memory of the core's pools, for registration with devices: of I/O and of admin commands.
    pub pools: [Area; 2],
    /// Durations of the core's turns.
    pub turns: Arc<Turns>,
}

/// Index of the core that accepts the connections of all cores.
pub const ACCEPTOR: usize = 0;

/// Indices in `CoreLoop::pollers` of the pollers that watch descriptors.
const ACCEPTOR_INDEX: u32 = 0;
const TCP_INDEX: u32 = 1;
const RDMA_INDEX: u32 = 2;

/// A core: its reactor, its pollers and their state.
pub struct CoreLoop {
    /// Fields are dropped in order: RDMA queue pairs are destroyed before the buffers of their connections
    /// (in `shared`) are freed.
    pollers: Vec<Box<dyn Poller<Core, CoreMessage>>>,
    shared: Core,
    reactor: Reactor<CoreMessage>,
    stop: Arc<AtomicBool>,
    pools: [Area; 2],
}

impl CoreLoop {
    /// Pins the calling thread if configured, allocates the pools, opens the snapshot's disks, binds the RDMA
    /// listeners and watches the TCP listeners.
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
        let pools = [pool.area(), admin_pool.area()];
        let reactor = Reactor::new(mailbox, plan.reactor.idle).map_err(|error| start(&error))?;
        let mut rdma = None;
        if plan.rdma_capsule().is_some() {
            let watcher = reactor.watcher(RDMA_INDEX);
            rdma = Some(RdmaPoller::new(&setup, snapshot.generation, &pools, watcher)?);
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
        });
        let acceptor = Acceptor::new(setup.listeners, generation, reactor.watcher(ACCEPTOR_INDEX));
        let tcp = TcpPoller::new(plan.tcp, connections, reactor.watcher(TCP_INDEX));
        let mut pollers: Vec<Box<dyn Poller<Core, CoreMessage>>> = Vec::new();
        pollers.push(Box::new(acceptor.map_err(|error| start(&error))?));
        pollers.push(Box::new(tcp));
        // Without RDMA, `RDMA_INDEX` is the index of `TargetPoller`, which watches no descriptor.
        if let Some(rdma) = rdma {
            pollers.push(Box::new(rdma));
        }
        // The last poller, so that it also sends the messages and logs the notices of the other pollers'
        // flushes.
        pollers.push(Box::new(TargetPoller::new(setup.core, plan.log.peer_lines_per_s)));
        let published = (setup.loads, setup.advertised, setup.disk_errors);
        let shared = Core::new(target, setup.core, published, setup.admission);
        Ok(CoreLoop { pollers, shared, reactor, stop: setup.stop, pools })
    }

    pub fn ready(&self) -> CoreReady {
        CoreReady {
            core: self.shared.core(),
            pools: self.pools.clone(),
            turns: Arc::clone(self.reactor.turns()),
        }
    }

    /// Runs the pollers until all connections have ended after a shutdown, or until `stop` is set.
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
