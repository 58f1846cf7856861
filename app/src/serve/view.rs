//! [`View`]: the state of a running target for `spindle status` and the control socket. A view reads atomics,
//! the registry of controllers, and the current snapshot and plan. It sends no message to a core.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use serde_json::{Value, json};
use spindle_nvme_transport::TransportKind;
use spindle_reactor::run::Turns;
use spindle_target::shared::{ControllerShared, Registry};
use spindle_target::snapshot::Snapshot;
use spindle_target_disk::CacheUse;

use super::core_loop::{PublishedListeners, RdmaListeners};
use crate::config::{DiskPlan, Plan};

pub struct CoreView {
    /// `None`: not pinned.
    pub cpu: Option<usize>,
    /// Durations of the core's turns.
    pub turns: Arc<Turns>,
}

pub struct View {
    started: Instant,
    /// Indexed by core.
    pub cores: Vec<CoreView>,
    /// Count of connections of each core.
    pub loads: Arc<[AtomicUsize]>,
    /// The configuration had an RDMA listener at the start. Without one, none can be added.
    has_rdma: bool,
    pub registry: Arc<Registry>,
    /// Locked while a [`Look`] exists, so that a `Look` never drops the last reference to a snapshot: that
    /// would close the disks on the caller's thread.
    current: Mutex<Current>,
    /// Why the file lacks a revocation that is in force.
    unsaved: Mutex<Option<String>>,
    /// Disks and TCP listeners of the configuration that are not there, each with the reason.
    missing: Mutex<Vec<(String, String)>>,
    rdma_listeners: PublishedListeners,
}

struct Current {
    snapshot: Weak<Snapshot>,
    plan: Arc<Plan>,
}

/// A consistent view: the current snapshot and plan cannot be replaced while a `Look` exists.
pub struct Look<'a> {
    pub view: &'a View,
    /// `None`: the target is shutting down. Dropped before the lock (fields drop in order).
    pub snapshot: Option<Arc<Snapshot>>,
    pub plan: Arc<Plan>,
    _current: MutexGuard<'a, Current>,
}

impl View {
    pub fn new(
        cores: Vec<CoreView>,
        loads: Arc<[AtomicUsize]>,
        registry: Arc<Registry>,
        (plan, snapshot): (&Arc<Plan>, &Arc<Snapshot>),
        rdma_listeners: PublishedListeners,
    ) -> View {
        let current = Current { snapshot: Arc::downgrade(snapshot), plan: Arc::clone(plan) };
        let (has_rdma, current) = (plan.rdma_capsule().is_some(), Mutex::new(current));
        let (unsaved, missing) = Default::default();
        let started = Instant::now();
        View { started, cores, loads, has_rdma, registry, current, unsaved, missing, rdma_listeners }
    }

    /// Returns the transports on which listeners can be added.
    pub fn transports(&self) -> impl Iterator<Item = TransportKind> {
        let has_rdma = self.has_rdma;
        TransportKind::ALL.into_iter().filter(move |kind| *kind == TransportKind::Tcp || has_rdma)
    }

    /// Replaces the current plan and snapshot.
    pub fn change_to(&self, plan: &Arc<Plan>, next: &Arc<Snapshot>) {
        *self.lock() = Current { snapshot: Arc::downgrade(next), plan: Arc::clone(plan) };
    }

    /// Sets why the file lacks a revocation that is in force; `None`: it has all that is in force.
    pub fn set_unsaved(&self, why: Option<&str>) {
        *self.unsaved.lock().unwrap_or_else(PoisonError::into_inner) = why.map(str::to_owned);
    }

    /// Sets the disks and TCP listeners of the configuration that are not there, each with the reason.
    pub fn set_missing(&self, missing: Vec<(String, String)>) {
        *self.missing.lock().unwrap_or_else(PoisonError::into_inner) = missing;
    }

    fn missing(&self) -> Vec<Value> {
        let missing = self.missing.lock().unwrap_or_else(PoisonError::into_inner);
        let missing = missing.iter().map(|(what, why)| json!({ "what": what, "why": why }));
        let listeners = self.rdma_listeners().missing;
        let listener = |(address, why): &(SocketAddr, String)| {
            let what = format!("listener {address} (rdma)");
            json!({ "what": what, "why": why })
        };
        missing.chain(listeners.iter().map(listener)).collect()
    }

    /// Returns the RDMA listeners as the accepting core last published them.
    pub fn rdma_listeners(&self) -> RdmaListeners {
        self.rdma_listeners.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Drops the reference to the snapshot: later [`Look`]s have none.
    pub fn clear_snapshot(&self) {
        self.lock().snapshot = Weak::new();
    }

    /// Locks the current snapshot and plan.
    pub fn look(&self) -> Look<'_> {
        let current = self.lock();
        let (snapshot, plan) = (current.snapshot.upgrade(), Arc::clone(&current.plan));
        Look { view: self, snapshot, plan, _current: current }
    }

    pub fn uptime_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
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
                "io_queues": it.connected_queues(),
                "optimistic_connections": it.optimistic_connections().load(Ordering::Relaxed),
            })
        };
        controllers.iter().map(tell).collect()
    }
}

impl Look<'_> {
    /// Returns the result of `spindle_get_status`, which `spindle status` prints as text or JSON.
    pub fn status(&self) -> Value {
        let snapshot = self.snapshot.as_deref();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "uptime_ns": self.view.uptime_ns(),
            "generation": snapshot.map(|snapshot| snapshot.generation),
            "unsaved": *self.view.unsaved.lock().unwrap_or_else(PoisonError::into_inner),
            "missing": self.view.missing(),
            "stalled_hosts": self.view.registry.stalled_hosts(),
            "cores": self.view.cores(),
            "controllers": self.view.controllers(),
            "namespaces": snapshot.map_or_else(Vec::new, namespaces),
            "disks": self.plan.disks.iter().map(|it| disk(it)).collect::<Vec<_>>(),
        })
    }
}

/// Returns a disk of the plan as JSON; the disk need not be open.
fn disk(disk: &DiskPlan) -> Value {
    json!({ "name": disk.name, "kind": disk.kind.name() })
}

/// Returns how much of a cache is resident. The cores use only that.
fn cache(cache: &CacheUse) -> Value {
    json!({
        "size": cache.bytes,
        "usable": cache.usable_bytes,
        "resident_after_ms": cache.resident_after.map(|it| it.as_millis()),
    })
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
                "cache": namespace.source.cache().as_ref().map(cache),
            }));
        }
    }
    namespaces
}
