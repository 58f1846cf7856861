//! What a reload would do: the difference between two plans, as a list for the log, with what it cannot do
//! named.
//!
//! A reload with a refusal in it changes nothing at all: half of a file is not a configuration that anybody
//! wrote.

use std::fmt::{self, Debug};
use std::net::SocketAddr;
use std::time::Duration;

use nvme_spec::nqn::Nqn;
use spindle_reactor::run::Idle;
use spindle_target::snapshot::AllowedHosts;
use spindle_transport::TransportKind;

use super::plan::{
    DiskKind, DiskPlan, ListenerPlan, LogPlan, NamespacePlan, Plan, SubsystemPlan, cache_words, delay_words,
};
use crate::size::Bytes;

/// One difference between what runs and what is to run.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Another address is listened on; hosts find it in the discovery log.
    ListenerAdded(TransportKind, SocketAddr),
    /// An address is not listened on any more. Connections that came by it stay.
    ListenerRemoved(TransportKind, SocketAddr),
    /// Something else that can change while it runs, in words.
    Other(String),
    /// Something that cannot change while it runs: what, why not, and what can be done instead.
    Refused(String),
}

const AT_START: &str = "is fixed at the start; restart to change it";
const DISK_IDENTITY: &str = "would be another disk under the same name; give it a new name";
const NO_DEVICES: &str = "no listener was on RDMA at the start, so no device is open; restart to add one";
const RECEIVES: &str = "receives were made at the start for less, and are shared; restart to change it";
const HOST_IDENTITY: &str = "hosts know the disk by it; restart when none is connected";

impl Change {
    /// True for what cannot be done while it runs.
    pub fn is_refused(&self) -> bool {
        matches!(self, Change::Refused(_))
    }
}

/// What a process that runs has, and its plan does not say.
pub struct Has<'a> {
    /// Only these disks are open: another one may become anything.
    pub is_open: &'a dyn Fn(&str) -> bool,
    /// See [`Plan::rdma_capsule`], of the plan at the start.
    pub rdma_capsule: Option<u32>,
}

impl Plan {
    /// What running this plan instead of `previous` changes, in the order in which it is said, where that one
    /// was started and all of its disks are open.
    pub fn changes(&self, previous: &Plan) -> Vec<Change> {
        self.changes_from(previous, &Has { is_open: &|_| true, rdma_capsule: previous.rdma_capsule() })
    }

    /// The same of a process that has this.
    pub fn changes_from(&self, previous: &Plan, has: &Has<'_>) -> Vec<Change> {
        let mut changes = Vec::new();
        self.fixed(previous, &mut changes);
        self.disk_changes(previous, has.is_open, &mut changes);
        self.listener_changes(previous, has.rdma_capsule, &mut changes);
        self.subsystem_changes(previous, &mut changes);
        for referral in &self.referrals {
            if !previous.referrals.contains(referral) {
                changes.push(Change::Other(format!("referral to {} added", referral.address)));
            }
        }
        for referral in &previous.referrals {
            if !self.referrals.contains(referral) {
                changes.push(Change::Other(format!("referral to {} removed", referral.address)));
            }
        }
        self.settings(previous, &mut changes);
        changes
    }

    /// What memory and threads were made for at the start.
    fn fixed(&self, previous: &Plan, changes: &mut Vec<Change>) {
        fixed(changes, "reactor.cores", &previous.reactor.cores, &self.reactor.cores);
        fixed(changes, "reactor.pin", &previous.reactor.is_pinned, &self.reactor.is_pinned);
        fixed(changes, "reactor.idle", &idle(previous), &idle(self));
        fixed(changes, "pool.pages", &previous.pool.pages, &self.pool.pages);
        fixed(changes, "pool.zone", &previous.pool.zones, &self.pool.zones);
        fixed(changes, "pool.admin_buffer, admin_count", &previous.pool.admin_zones, &self.pool.admin_zones);
        let (from, to) = (&previous.limits, &self.limits);
        fixed(changes, "limits.queue_entries", &from.controller.queue_entries, &to.controller.queue_entries);
        fixed(changes, "limits.transfer", &from.controller.transfer_bytes, &to.controller.transfer_bytes);
        fixed(changes, "limits.connections", &from.connections, &to.connections);
        let (was, is) = (&from.unconnected_per_address, &to.unconnected_per_address);
        fixed(changes, "limits.unconnected_per_address", was, is);
        fixed(changes, "limits.disk_commands", &from.disk_commands, &to.disk_commands);
        fixed(changes, "rdma", &previous.rdma, &self.rdma);
        fixed(changes, "tcp", &without_in_capsule(previous), &without_in_capsule(self));
        fixed(changes, "control.socket", &previous.control.socket, &self.control.socket);
        fixed(changes, "control.group", &previous.control.group, &self.control.group);
        let without_level = |plan: &Plan| LogPlan { level: tracing::Level::INFO, ..plan.log };
        fixed(changes, "log.format, peer_lines_per_s", &without_level(previous), &without_level(self));
    }

    fn disk_changes(&self, previous: &Plan, is_open: &dyn Fn(&str) -> bool, changes: &mut Vec<Change>) {
        for disk in &self.disks {
            let before = previous.disk(&disk.name).filter(|before| *before == disk || is_open(&disk.name));
            let Some(before) = before else {
                changes.push(Change::Other(format!("disk {:?} added", disk.name)));
                continue;
            };
            let field = |name: &str| format!("disk {:?}: {name}", disk.name);
            refuse(changes, &field("block_bytes"), &before.block_bytes, &disk.block_bytes, DISK_IDENTITY);
            refuse(changes, &field("kind"), &for_good(&before.kind), &for_good(&disk.kind), DISK_IDENTITY);
            let (was, is) = (is_populated(&before.kind), is_populated(&disk.kind));
            refuse(changes, &field("populate"), &was, &is, AT_START);
            refuse(changes, &field("poll"), &polls(&before.kind), &polls(&disk.kind), AT_START);
            if let (Some(was), Some(is)) = (times(&before.kind), times(&disk.kind)) {
                refuse(changes, &field("command_timeout_ms"), &was.0, &is.0, AT_START);
                refuse(changes, &field("quiesce_ms"), &was.1, &is.1, AT_START);
            }
            let cache = |disk: &DiskPlan| cache_words(disk.cache.as_ref());
            set(changes, &field("cache"), &cache(before), &cache(disk));
            let delay = |disk: &DiskPlan| delay_words(disk.delay.as_ref());
            refuse(changes, &field("delay"), &delay(before), &delay(disk), AT_START);
            set(changes, &field("medium_id"), &before.medium_id, &disk.medium_id);
            if before.bytes != disk.bytes {
                let (from, to) = (Bytes::new(before.bytes), Bytes::new(disk.bytes));
                changes.push(Change::Other(format!("disk {:?} resized from {from} to {to}", disk.name)));
            }
        }
        for disk in previous.disks.iter().filter(|disk| self.disk(&disk.name).is_none()) {
            changes.push(Change::Other(format!("disk {:?} removed", disk.name)));
        }
    }

    /// Most in-capsule data for which a process that starts with this plan has receives over RDMA. `None`: no
    /// listener is on RDMA, so no device is opened.
    pub fn rdma_capsule(&self) -> Option<u32> {
        let mut listeners = self.listeners.iter();
        listeners.any(|it| it.transport == TransportKind::Rdma).then(|| {
            let largest = self.listeners.iter().map(|it| it.in_capsule_bytes).max();
            largest.map_or(0, |largest| largest.max(self.tcp.conn.in_capsule_bytes))
        })
    }

    fn listener_changes(&self, previous: &Plan, rdma_capsule: Option<u32>, changes: &mut Vec<Change>) {
        let find = |plan: &Plan, it: &ListenerPlan| {
            plan.listeners.iter().find(|other| other.endpoint() == it.endpoint()).cloned()
        };
        for it in &self.listeners {
            let (before, is_rdma) = (find(previous, it), it.transport == TransportKind::Rdma);
            let field = |name: &str| format!("listener {}: {name}", it.address);
            let was = before.as_ref().map_or(0, |before| before.in_capsule_bytes);
            let is = it.in_capsule_bytes;
            match (before, rdma_capsule) {
                (None, None) if is_rdma => {
                    refuse(changes, &field("transport"), &"none", &"rdma", NO_DEVICES);
                }
                (_, Some(largest)) if is_rdma && was != is && is > largest => {
                    refuse(changes, &field("in_capsule"), &was, &is, RECEIVES);
                }
                (None, _) => changes.push(Change::ListenerAdded(it.transport, it.address)),
                (Some(_), _) => set(changes, &field("in_capsule"), &was, &is),
            }
        }
        for it in previous.listeners.iter().filter(|it| find(self, it).is_none()) {
            changes.push(Change::ListenerRemoved(it.transport, it.address));
        }
    }

    fn subsystem_changes(&self, previous: &Plan, changes: &mut Vec<Change>) {
        let find = |plan: &Plan, nqn: Nqn| plan.subsystems.iter().position(|subsystem| subsystem.nqn == nqn);
        for before in &previous.subsystems {
            let now = find(self, before.nqn).map(|index| &self.subsystems[index]);
            for namespace in &before.namespaces {
                if !now.is_some_and(|now| now.namespaces.contains(namespace)) {
                    changes.push(namespace_change(&before.nqn, namespace, "removed"));
                }
            }
            if now.is_none() {
                changes.push(Change::Other(format!("subsystem {} removed", before.nqn)));
            }
        }
        for subsystem in &self.subsystems {
            let before = find(previous, subsystem.nqn).map(|index| &previous.subsystems[index]);
            match before {
                None => changes.push(Change::Other(format!("subsystem {} added", subsystem.nqn))),
                Some(before) => subsystem.changes(before, changes),
            }
            for namespace in &subsystem.namespaces {
                if !before.is_some_and(|before| before.namespaces.contains(namespace)) {
                    changes.push(namespace_change(&subsystem.nqn, namespace, "added"));
                }
            }
        }
    }

    fn settings(&self, previous: &Plan, changes: &mut Vec<Change>) {
        let (from, to) = (&previous.limits, &self.limits);
        set(changes, "limits.io_queues", &from.io_queues_max, &to.io_queues_max);
        set(changes, "limits.bulk_unit", &from.controller.bulk_unit, &to.controller.bulk_unit);
        set(
            changes,
            "limits.keep_alive_ms_max",
            &from.controller.keep_alive_ms_max,
            &to.controller.keep_alive_ms_max,
        );
        let keep_alive = |plan: &Plan| plan.limits.controller.discovery_keep_alive_ms;
        set(changes, "discovery.keep_alive_ms", &keep_alive(previous), &keep_alive(self));
        set(changes, "log.level", &previous.log.level.as_str(), &self.log.level.as_str());
        set(changes, "shutdown.deadline_ms", &previous.drain_deadline, &self.drain_deadline);
    }
}

impl SubsystemPlan {
    fn changes(&self, before: &SubsystemPlan, changes: &mut Vec<Change>) {
        let field = |name: &str| format!("subsystem {}: {name}", self.nqn);
        refuse(changes, &field("serial"), &before.serial, &self.serial, HOST_IDENTITY);
        refuse(changes, &field("model"), &before.model, &self.model, HOST_IDENTITY);
        if before.hosts != self.hosts {
            let (from, to) = (Hosts(&before.hosts), Hosts(&self.hosts));
            changes.push(Change::Other(format!("{} from {from} to {to}", field("hosts"))));
        }
        set(changes, &field("listeners"), &before.listeners, &self.listeners);
        set(changes, &field("cntlid_min, cntlid_max"), &before.cntlid_range, &self.cntlid_range);
        for namespace in &self.namespaces {
            let is_same = |a: Option<[u8; 16]>, b: Option<[u8; 16]>| a.is_some() && a == b;
            let has_same_identity = |other: &&NamespacePlan| {
                is_same(other.uuid, namespace.uuid) || is_same(other.nguid, namespace.nguid)
            };
            if let Some(other) = before.namespaces.iter().find(has_same_identity) {
                let field = field(&format!("namespace {}: disk", namespace.nsid));
                refuse(
                    changes,
                    &field,
                    &other.disk,
                    &namespace.disk,
                    "hosts would take it for the disk with that UUID",
                );
            }
        }
    }
}

/// All of NVMe/TCP but what listeners have of their own.
fn without_in_capsule(plan: &Plan) -> super::plan::TcpPlan {
    let mut tcp = plan.tcp;
    tcp.conn.in_capsule_bytes = 0;
    tcp
}

/// What makes a disk the disk that it is: all but that it would be made if it were missing, when it takes its
/// memory, how its completions come, and how long they are waited for.
fn for_good(kind: &DiskKind) -> DiskKind {
    let mut kind = kind.clone();
    match &mut kind {
        DiskKind::File { create, is_polled, .. } => (*create, *is_polled) = (false, false),
        DiskKind::Ram { is_populated, .. } => *is_populated = false,
        DiskKind::Remote { command_timeout, quiesce, .. } => {
            (*command_timeout, *quiesce) = (Duration::ZERO, Duration::ZERO);
        }
        DiskKind::Null | DiskKind::Ng { .. } | DiskKind::Nvme { .. } => {}
    }
    kind
}

fn is_populated(kind: &DiskKind) -> bool {
    matches!(kind, DiskKind::Ram { is_populated: true, .. })
}

fn polls(kind: &DiskKind) -> bool {
    matches!(kind, DiskKind::File { is_polled: true, .. })
}

/// Milliseconds that a remote disk's commands are waited for, and that its far target needs to quiesce.
fn times(kind: &DiskKind) -> Option<(u128, u128)> {
    if let DiskKind::Remote { command_timeout, quiesce, .. } = kind {
        Some((command_timeout.as_millis(), quiesce.as_millis()))
    } else {
        None
    }
}

/// As the file says it.
fn idle(plan: &Plan) -> String {
    match plan.reactor.idle {
        Idle::Spin => "spin".to_owned(),
        Idle::SleepAfter(time) => format!("adaptive, adaptive_spin_us = {}", time.as_us()),
    }
}

fn namespace_change(nqn: &Nqn, NamespacePlan { nsid, disk, .. }: &NamespacePlan, verb: &str) -> Change {
    Change::Other(format!("subsystem {nqn}: namespace {nsid} {verb}, disk {disk:?}"))
}

fn fixed<T: Debug + PartialEq>(changes: &mut Vec<Change>, field: &str, from: &T, to: &T) {
    refuse(changes, field, from, to, AT_START);
}

fn refuse<T: Debug + PartialEq>(
    changes: &mut Vec<Change>,
    field: &str,
    from: &T,
    to: &T,
    reason: &'static str,
) {
    if from != to {
        changes.push(Change::Refused(format!("{field} from {from:?} to {to:?}: refused, {reason}")));
    }
}

fn set<T: Debug + PartialEq>(changes: &mut Vec<Change>, field: &str, from: &T, to: &T) {
    if from != to {
        changes.push(Change::Other(format!("{field} from {from:?} to {to:?}")));
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::ListenerAdded(transport, address) => write!(f, "listener {address} ({transport}) added"),
            Change::ListenerRemoved(transport, address) => {
                write!(f, "listener {address} ({transport}) removed")
            }
            Change::Other(what) | Change::Refused(what) => f.write_str(what),
        }
    }
}

/// Who may connect, in words.
pub struct Hosts<'a>(pub &'a AllowedHosts);

impl fmt::Display for Hosts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            AllowedHosts::Any => f.write_str("any"),
            AllowedHosts::Only(hosts) if hosts.is_empty() => f.write_str("none"),
            AllowedHosts::Only(hosts) => {
                let names: Vec<&str> = hosts.iter().map(Nqn::as_str).collect();
                f.write_str(&names.join(", "))
            }
        }
    }
}
