//! What there is to tell of a running target: atomics of the cores, the registry of controllers, the snapshot
//! and the plan that are in force. Cores are not asked and do not notice.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use serde_json::{Value, json};
use spindle_reactor::run::Turns;
use spindle_target::shared::{ControllerShared, Registry};
use spindle_target::snapshot::Snapshot;
use spindle_transport::TransportKind;

use crate::config::{DiskPlan, Plan};

/// A core as it is seen from outside.
pub struct CoreView {
    /// The CPU that it is pinned to.
    pub cpu: Option<usize>,
    /// What its turns took.
    pub turns: Arc<Turns>,
}

/// What there is to tell.
pub struct View {
    started: Instant,
    /// In their order.
    pub cores: Vec<CoreView>,
    pub loads: Arc<[AtomicUsize]>,
    /// A listener was on RDMA at the start.
    has_rdma: bool,
    pub registry: Arc<Registry>,
    /// Locked while it is read. The last of its owners is never here: it shuts down the disks.
    in_force: Mutex<InForce>,
}

struct InForce {
    snapshot: Weak<Snapshot>,
    plan: Arc<Plan>,
}

/// A look at all of it; what is in force stays meanwhile.
pub struct Look<'a> {
    /// What does not change.
    pub view: &'a View,
    /// `None`: the target is ending. Dropped before the lock.
    pub snapshot: Option<Arc<Snapshot>>,
    /// What the configuration says.
    pub plan: Arc<Plan>,
    _in_force: MutexGuard<'a, InForce>,
}

impl View {
    /// Of cores that have begun with this snapshot.
    pub fn new(
        cores: Vec<CoreView>,
        loads: Arc<[AtomicUsize]>,
        registry: Arc<Registry>,
        (plan, snapshot): (&Plan, &Arc<Snapshot>),
    ) -> View {
        let in_force = InForce { snapshot: Arc::downgrade(snapshot), plan: Arc::new(plan.clone()) };
        let (has_rdma, in_force) = (plan.rdma_capsule().is_some(), Mutex::new(in_force));
        View { started: Instant::now(), cores, loads, has_rdma, registry, in_force }
    }

    /// Those that can be listened on.
    pub fn transports(&self) -> impl Iterator<Item = TransportKind> {
        let has_rdma = self.has_rdma;
        TransportKind::ALL.into_iter().filter(move |kind| *kind == TransportKind::Tcp || has_rdma)
    }

    /// The cores change to this.
    pub fn change_to(&self, plan: &Plan, next: &Arc<Snapshot>) {
        *self.lock() = InForce { snapshot: Arc::downgrade(next), plan: Arc::new(plan.clone()) };
    }

    /// The snapshot goes: requests from now on see none.
    pub fn end(&self) {
        self.lock().snapshot = Weak::new();
    }

    /// Look at it.
    pub fn look(&self) -> Look<'_> {
        let in_force = self.lock();
        let (snapshot, plan) = (in_force.snapshot.upgrade(), Arc::clone(&in_force.plan));
        Look { view: self, snapshot, plan, _in_force: in_force }
    }

    pub fn uptime_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, InForce> {
        self.in_force.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cores(&self) -> Vec<Value> {
        let longest = |turns: &Turns| -> Vec<Value> {
            let longest = turns.longest().into_iter();
            longest
                .map(|(parts, took)| {
                    let parts: Vec<_> = turns.names(parts).collect();
                    json!({ "parts": parts, "ns": took.as_u64() })
                })
                .collect()
        };
        let core = |(core, view): (usize, &CoreView)| {
            json!({
                "core": core,
                "cpu": view.cpu,
                "connections": self.loads.get(core).map_or(0, |load| load.load(Ordering::Relaxed)),
                "busy_ns": view.turns.busy().as_u64(),
                "long_turns": view.turns.long(),
                "longest_turns": longest(&view.turns),
            })
        };
        self.cores.iter().enumerate().map(core).collect()
    }

    fn controllers(&self) -> Vec<Value> {
        let mut controllers = self.registry.all();
        controllers.sort_by_key(|it| (it.subsystem_nqn.to_string(), it.cntlid));
        let tell = |it: &Arc<ControllerShared>| {
            json!({
                "host": it.host_nqn.to_string(),
                "subsystem": it.subsystem_nqn.to_string(),
                "controller": it.cntlid,
                "core": it.admin_core,
                "is_ready": it.is_ready(),
                "io_queues": it.live_queues(),
            })
        };
        controllers.iter().map(tell).collect()
    }
}

impl Look<'_> {
    /// What `spindle status` prints.
    pub fn status(&self) -> Value {
        let snapshot = self.snapshot.as_deref();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "uptime_ns": self.view.uptime_ns(),
            "generation": snapshot.map(|snapshot| snapshot.generation),
            "cores": self.view.cores(),
            "controllers": self.view.controllers(),
            "namespaces": snapshot.map_or_else(Vec::new, namespaces),
            "disks": self.plan.disks.iter().map(disk).collect::<Vec<_>>(),
        })
    }
}

/// A disk of the configuration, open or not.
fn disk(disk: &DiskPlan) -> Value {
    json!({ "name": disk.name, "kind": disk.kind.name() })
}

fn namespaces(snapshot: &Snapshot) -> Vec<Value> {
    let mut namespaces = Vec::new();
    for subsystem in &snapshot.subsystems {
        for namespace in subsystem.active() {
            let (geometry, totals) = (namespace.geometry, namespace.counters.totals());
            namespaces.push(json!({
                "subsystem": subsystem.nqn.to_string(),
                "nsid": namespace.nsid,
                "disk": namespace.source.name(),
                "kind": namespace.source.kind(),
                "bytes": geometry.bytes(),
                "block_bytes": geometry.block_bytes,
                "reads": totals.reads,
                "writes": totals.writes,
                "bytes_read": totals.units_read.saturating_mul(512),
                "bytes_written": totals.units_written.saturating_mul(512),
                "media_errors": totals.media_errors,
            }));
        }
    }
    namespaces
}
