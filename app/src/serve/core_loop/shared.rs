//! [`Core`]: state that the pollers of a core share: the target core, new connections, and the limits and
//! counts of connections.

use spindle_nvme_transport::ConnectionId;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use spindle_nvme_transport::admission::{Admission, Admitted};
use spindle_nvme_transport::{Connections, TransportKind};
use spindle_reactor::clock::Nanos;
use spindle_reactor::rate::RateLimit;
use spindle_reactor::run::{CoreShared, LONG, LongTurn, Turns};
use spindle_target::core::TargetCore;
use spindle_target::qpair::Qpair;

use super::arrivals::Arrivals;
use super::{AdmittedRdma, AdmittedTcp};
use crate::serve::conn::Conn;

/// Least time between two log lines about long turns of a core.
const LONG_LOG_PERIOD: Nanos = Nanos::from_secs(60);

/// Why a disk is not open on a core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskError {
    pub core: usize,
    pub disk: String,
    pub why: String,
}

/// Per core, the disks of its advertised snapshot that are not open there.
pub type DiskErrors = Arc<[Mutex<Vec<DiskError>>]>;

/// The RDMA listeners as core `ACCEPTOR` has them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RdmaListeners {
    /// Generation of the snapshot whose listeners these are.
    pub generation: u64,
    /// Those that are not listened on, each with the reason. They are tried again every second.
    pub missing: Vec<(SocketAddr, String)>,
}

/// Published by core `ACCEPTOR`.
pub type PublishedListeners = Arc<Mutex<RdmaListeners>>;

pub struct Core {
    /// Connections with their queue pairs, and disks.
    pub target: TargetCore<Conn>,
    /// Start of the current turn.
    pub now: Nanos,
    /// Connections that were handed to this core and not taken over yet.
    pub arrivals: Arrivals<AdmittedTcp, AdmittedRdma>,
    core: usize,
    loads: Arc<[AtomicUsize]>,
    /// Per core, the generation of its advertised snapshot.
    advertised: Arc<[AtomicU64]>,
    disk_errors: DiskErrors,
    admission: Arc<Admission>,
    refused_log: RateLimit,
    /// Earliest time of the next line about a long turn, and the count of long turns that were not logged
    /// since the last line.
    long_log: (Nanos, u64),
    /// Connections that the poller of their transport must end, to make room for a connection of the other
    /// transport.
    evicted: Vec<ConnectionId>,
}

impl Core {
    pub fn new(
        target: TargetCore<Conn>,
        core: usize,
        (loads, advertised, disk_errors): (Arc<[AtomicUsize]>, Arc<[AtomicU64]>, DiskErrors),
        admission: Arc<Admission>,
    ) -> Core {
        let core = Core {
            target,
            now: Nanos::ZERO,
            arrivals: Arrivals::new(),
            core,
            loads,
            advertised,
            disk_errors,
            admission,
            refused_log: RateLimit::new(1, 5),
            long_log: (Nanos::ZERO, 0),
            evicted: Vec::new(),
        };
        core.publish_disk_errors();
        core
    }

    pub fn core(&self) -> usize {
        self.core
    }

    /// Counts a new connection for its address until the connection has sent Connect. `None`: the address has
    /// reached `limits.unconnected_per_address`, so the caller refuses the connection.
    pub fn admit(&mut self, remote: SocketAddr, now: Nanos) -> Option<Admitted> {
        let admitted = self.admission.admit(remote.ip());
        if admitted.is_none()
            && let Some(allowed) = self.refused_log.allow(now)
        {
            let (limit, untold) = (self.admission.per_address(), allowed.suppressed);
            tracing::warn!(
                %remote,
                limit,
                untold,
                "connection refused: too many connections of its address have not sent Connect \
                 (limits.unconnected_per_address)"
            );
        }
        admitted
    }

    /// Returns the core with the fewest connections. Increments the load of another core, until that core
    /// publishes its exact count.
    pub fn assign_core(&self) -> usize {
        let loads = &self.loads;
        let least = (0..loads.len()).min_by_key(|core| loads[*core].load(Ordering::Relaxed)).unwrap_or(0);
        if least != self.core {
            loads[least].fetch_add(1, Ordering::Relaxed);
        }
        least
    }

    /// Stores this core's count of connections, for [`Core::assign_core`].
    pub fn publish_load(&self) {
        let load = &self.loads[self.core];
        let connections = self.target.usage().connections + self.arrivals.waiting();
        if load.load(Ordering::Relaxed) != connections {
            load.store(connections, Ordering::Relaxed);
        }
    }

    /// Stores the generation that this core advertises. Changes by the control socket wait for that
    /// generation.
    pub fn publish_advertised(&self) {
        let (generation, advertised) =
            (self.target.advertised_snapshot().generation, &self.advertised[self.core]);
        if advertised.load(Ordering::Relaxed) != generation {
            // First: who sees the generation finds its errors.
            self.publish_disk_errors();
            advertised.store(generation, Ordering::Release);
        }
    }

    #[cold]
    fn publish_disk_errors(&self) {
        let errors = self.target.disk_errors().iter().map(|error| DiskError {
            core: self.core,
            disk: error.disk().to_owned(),
            why: error.to_string(),
        });
        let mut published = self.disk_errors[self.core].lock().unwrap_or_else(PoisonError::into_inner);
        *published = errors.collect();
    }

    /// Calls [`TargetCore::make_room`] for the caller's transport. `evict` returns false for a connection of
    /// the other transport, which the poller of that transport then ends ([`Core::next_evicted`]).
    pub fn make_room(&mut self, evict: impl FnOnce(&mut TargetCore<Conn>, ConnectionId) -> bool) -> bool {
        let Core { target, arrivals, evicted, .. } = self;
        target.make_room(arrivals.waiting(), |target, id| {
            if !evict(target, id) {
                evicted.push(id);
            }
        })
    }

    /// Returns the next connection of `transport` to end, to make room for a connection of the other
    /// transport.
    pub fn next_evicted(&mut self, transport: TransportKind) -> Option<ConnectionId> {
        let Core { target, evicted, .. } = self;
        // Skips connections that have ended, or have sent Connect, since they were chosen.
        evicted.retain(|id| target.qpair(*id).is_some_and(Qpair::may_be_evicted));
        let is_meant = |id: &ConnectionId| target.peer(*id).is_some_and(|peer| peer.transport == transport);
        let at = evicted.iter().position(is_meant)?;
        Some(evicted.swap_remove(at))
    }
}

impl CoreShared for Core {
    fn begin_turn(&mut self, now: Nanos, wall_ms: u64) {
        self.now = now;
        self.target.set_time(now, wall_ms);
        self.arrivals.begin_turn();
    }

    fn is_done(&self) -> bool {
        self.target.is_draining() && self.target.usage().connections == 0
    }

    #[cold]
    fn on_long_turn(&mut self, turns: &Turns, turn: LongTurn) {
        let (next, untold) = self.long_log;
        if self.now < next {
            self.long_log.1 += 1;
            return;
        }
        self.long_log = (self.now + LONG_LOG_PERIOD, 0);
        let parts: Vec<_> = turns.names(turn.parts).collect();
        tracing::info!(
            core = self.core,
            untold,
            "a turn took {}, more than {LONG}: {}",
            turn.took,
            parts.join(", ")
        );
    }
}
