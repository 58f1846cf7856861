//! [`Core`]: what the pollers of a core share: the target's core, and connections on their way to it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use spindle_reactor::clock::Nanos;
use spindle_reactor::rate::RateLimit;
use spindle_reactor::run::{LONG, LongTurn, Shared, Turns};
use spindle_reactor::slab::Slot;
use spindle_target::core::TargetCore;
use spindle_target::qpair::Qpair;
use spindle_transport::admission::{Admission, Admitted};
use spindle_transport::{Connections, TransportKind};

use super::arrivals::Arrivals;
use super::{AdmittedRdma, AdmittedTcp};
use crate::serve::conn::Conn;

/// Between two lines about long turns of a core.
const LONG_LOG_PERIOD: Nanos = Nanos::from_secs(60);

pub struct Core {
    /// Its connections and their queue pairs, and the disks.
    pub target: TargetCore<Conn>,
    /// When the turn began.
    pub now: Nanos,
    /// Connections to take over: a few in every turn.
    pub arrivals: Arrivals<AdmittedTcp, AdmittedRdma>,
    core: usize,
    loads: Arc<[AtomicUsize]>,
    /// Generation of the configuration that hosts of each core are shown.
    advertised: Arc<[AtomicU64]>,
    admission: Arc<Admission>,
    refused_log: RateLimit,
    /// When a long turn may be told again, and how many were not.
    long_log: (Nanos, u64),
    /// Connections that are to end for newcomers of the other transport.
    evicted: Vec<Slot>,
}

impl Core {
    pub fn new(
        target: TargetCore<Conn>,
        core: usize,
        (loads, advertised): (Arc<[AtomicUsize]>, Arc<[AtomicU64]>),
        admission: Arc<Admission>,
    ) -> Core {
        Core {
            target,
            now: Nanos::ZERO,
            arrivals: Arrivals::new(),
            core,
            loads,
            advertised,
            admission,
            refused_log: RateLimit::new(1, 5),
            long_log: (Nanos::ZERO, 0),
            evicted: Vec::new(),
        }
    }

    /// Its index, from 0.
    pub fn core(&self) -> usize {
        self.core
    }

    /// A place among the connections without Connect. `None`: the address has as many as it may, and the
    /// connection is to be refused.
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
                "connection refused: its address has limit connections that have not sent Connect \
                 (limits.unconnected_per_address)"
            );
        }
        admitted
    }

    /// The core with the fewest connections; another one's count goes up, and is corrected by itself.
    pub fn least_loaded(&self) -> usize {
        let loads = &self.loads;
        let least = (0..loads.len()).min_by_key(|core| loads[*core].load(Ordering::Relaxed)).unwrap_or(0);
        if least != self.core {
            loads[least].fetch_add(1, Ordering::Relaxed);
        }
        least
    }

    /// Tell the core that places connections how many are here.
    pub fn count_connections(&self) {
        let load = &self.loads[self.core];
        let connections = self.target.usage().connections + self.arrivals.waiting();
        if load.load(Ordering::Relaxed) != connections {
            load.store(connections, Ordering::Relaxed);
        }
    }

    /// Tell who waits for it which configuration hosts are shown.
    pub fn tell_shown(&self) {
        self.advertised[self.core].store(self.target.advertised_snapshot().generation, Ordering::Release);
    }

    /// See [`TargetCore::make_room`]. `evict` says whether the connection was one of its own; if not, the
    /// other transport ends it when it has its turn, unless it is connected by then.
    pub fn make_room(&mut self, evict: impl FnOnce(&mut TargetCore<Conn>, Slot) -> bool) -> bool {
        let Core { target, arrivals, evicted, .. } = self;
        target.make_room(arrivals.waiting(), |target, id| {
            if !evict(target, id) {
                evicted.push(id);
            }
        })
    }

    /// The next connection of this transport that is to end for a newcomer of the other.
    pub fn next_evicted(&mut self, transport: TransportKind) -> Option<Slot> {
        let Core { target, evicted, .. } = self;
        // One that is gone has made its room, and one that has sent Connect meanwhile keeps it.
        evicted.retain(|id| target.qpair(*id).is_some_and(Qpair::may_end_for_newcomer));
        let is_meant = |id: &Slot| target.peer(*id).is_some_and(|peer| peer.transport == transport);
        let at = evicted.iter().position(is_meant)?;
        Some(evicted.swap_remove(at))
    }
}

impl Shared for Core {
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
