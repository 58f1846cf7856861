//! The difference between two plans, as a list for the log and `spindle check`. Settings that a running
//! process cannot change are marked as refused; a reload with one of them changes nothing.
//!
//! The rows of [`super::schema`] say which keys are compared and what becomes of a change. Here is what a row
//! cannot say: elements that come and go, and changes that depend on other keys.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use nvme_spec::nqn::Nqn;
use spindle_nvme_transport::TransportKind;
use spindle_target::snapshot::AllowedHosts;

use super::kind::Kind;
use super::plan::{
    DiskKind, DiskPlan, ListenerPlan, NamespacePlan, Plan, ReferralPlan, SubsystemPlan, by_name,
};
use super::schema::{self, Field, Key, Reload};
use super::tree::{FromValue, Owner};
use crate::size::Bytes;

/// One difference between the running plan and the next.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// A listener at a transport and address that had none.
    ListenerAdded(TransportKind, SocketAddr),
    /// A listener was removed. Connections that were accepted at the address stay open.
    ListenerRemoved(TransportKind, SocketAddr),
    /// Any other change that a reload makes, as text for the log.
    Other(String),
    /// A change that a reload cannot make: field, old and new value, reason, and the remedy if there is one.
    Refused(String),
}

const AT_START: &str = "is fixed at the start; restart to change it";
const NO_RDMA_DEVICES: &str =
    "no listener was on RDMA at the start, so no device is open; restart to add one";
const RECEIVES_TOO_SMALL: &str =
    "receives were made at the start for less, and are shared; restart to change it";

impl Change {
    pub fn is_refused(&self) -> bool {
        matches!(self, Change::Refused(_))
    }
}

/// State of the running process that is not part of its plan.
pub struct RunningState<'a> {
    /// Whether the disk of a name is open. Any setting of a disk that is not open may change.
    pub is_open: &'a dyn Fn(&str) -> bool,
    /// [`Plan::rdma_capsule`] of the plan that the process started with.
    pub rdma_capsule: Option<u32>,
}

impl Plan {
    /// Returns the changes from `previous` to this plan, for a process that has all disks of `previous` open.
    pub fn changes(&self, previous: &Plan) -> Vec<Change> {
        let rdma_capsule = previous.rdma_capsule();
        self.changes_from(previous, &RunningState { is_open: &|_| true, rdma_capsule })
    }

    /// Returns the changes from `previous`, which is running now, to this plan.
    pub fn changes_from(&self, previous: &Plan, state: &RunningState<'_>) -> Vec<Change> {
        let mut settings = Vec::new();
        for section in schema::ROOT {
            if let Kind::Section(keys) = section.kind {
                let field = |key: &str| format!("{}.{key}", section.name);
                compare(keys.iter(), previous, self, field, &mut settings);
            }
        }
        let (mut changes, mut settings): (Vec<_>, Vec<_>) =
            settings.into_iter().partition(Change::is_refused);
        self.disk_changes(previous, state.is_open, &mut changes);
        self.listener_changes(previous, state.rdma_capsule, &mut changes);
        self.subsystem_changes(previous, &mut changes);
        for referral in self.referrals.iter().filter(|referral| !previous.referrals.contains(referral)) {
            changes.push(referral_change(referral, "added"));
        }
        for referral in previous.referrals.iter().filter(|referral| !self.referrals.contains(referral)) {
            changes.push(referral_change(referral, "removed"));
        }
        changes.append(&mut settings);
        changes
    }

    fn disk_changes(&self, previous: &Plan, is_open: &dyn Fn(&str) -> bool, changes: &mut Vec<Change>) {
        let (own, former) = differing(&self.disks, &previous.disks);
        let (own_names, former_names) = (by_name(own), by_name(former));
        for disk in own {
            let before = former_names.get(disk.name.as_str());
            if before.is_some_and(|before| *before == disk) {
                continue;
            }
            let removed = |it: &&Arc<DiskPlan>| {
                it.kind.path() == disk.kind.path() && is_open(&it.name) && !own_names.contains_key(&*it.name)
            };
            let is_new_file = before.is_none() && matches!(disk.kind, DiskKind::File { .. });
            changes.push(match (before.filter(|_| is_open(&disk.name)), former.iter().find(removed)) {
                (Some(before), _) => {
                    disk.changes(before, changes);
                    continue;
                }
                // The new disk would wait for the lock of the other one, which is open until the change.
                (None, Some(other)) if is_new_file => Change::Refused(format!(
                    "disk {:?}: path is that of disk {:?}, which is open; remove that disk first, and add \
                     this one with another change",
                    disk.name, other.name
                )),
                (None, _) => Change::Other(format!("disk {:?} added", disk.name)),
            });
        }
        for disk in former.iter().filter(|disk| !own_names.contains_key(disk.name.as_str())) {
            changes.push(Change::Other(format!("disk {:?} removed", disk.name)));
        }
    }

    /// Returns the largest in-capsule data in bytes for which a process that starts with this plan posts RDMA
    /// receives. It is the largest of all listeners, TCP included, and of `[tcp]`. `None` without an RDMA
    /// listener: then no RDMA device is opened.
    pub fn rdma_capsule(&self) -> Option<u32> {
        let mut listeners = self.listeners.iter();
        listeners.any(|it| it.transport == TransportKind::Rdma).then(|| {
            let largest = self.listeners.iter().map(|it| it.in_capsule_bytes).max();
            largest.map_or(0, |largest| largest.max(self.tcp.conn.in_capsule_bytes))
        })
    }

    fn listener_changes(&self, previous: &Plan, rdma_capsule: Option<u32>, changes: &mut Vec<Change>) {
        let find = |plan: &Plan, listener: &ListenerPlan| {
            plan.listeners.iter().find(|other| other.endpoint() == listener.endpoint()).cloned()
        };
        for listener in &self.listeners {
            // A new name changes the `listeners` of subsystems, which `SubsystemPlan::changes` compares.
            let ListenerPlan { name: _, transport, address, in_capsule_bytes: is } = *listener;
            let (before, is_rdma) = (find(previous, listener), transport == TransportKind::Rdma);
            let field = |key: &str| format!("listener {address}: {key}");
            let was = before.as_ref().map_or(0, |before| before.in_capsule_bytes);
            match (before, rdma_capsule) {
                (None, None) if is_rdma => {
                    let (from, to) = ("none".to_owned().text(), transport.text());
                    changes.push(change(&field("transport"), &from, &to, Some(NO_RDMA_DEVICES)));
                }
                (_, Some(largest)) if is_rdma && was != is && is > largest => {
                    let reason = Some(RECEIVES_TOO_SMALL);
                    changes.push(change(&field("in_capsule"), &was.text(), &is.text(), reason));
                }
                (None, _) => changes.push(Change::ListenerAdded(transport, address)),
                (Some(_), _) if was != is => {
                    changes.push(change(&field("in_capsule"), &was.text(), &is.text(), None));
                }
                (Some(_), _) => {}
            }
        }
        for listener in previous.listeners.iter().filter(|listener| find(self, listener).is_none()) {
            changes.push(Change::ListenerRemoved(listener.transport, listener.address));
        }
    }

    fn subsystem_changes(&self, previous: &Plan, changes: &mut Vec<Change>) {
        let find = |plan: &Plan, nqn: Nqn| plan.subsystems.iter().position(|subsystem| subsystem.nqn == nqn);
        for before in &previous.subsystems {
            let now = find(self, before.nqn).map(|index| &self.subsystems[index]);
            for namespace in &before.namespaces {
                if !now.is_some_and(|now| now.has(namespace)) {
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
                if !before.is_some_and(|before| before.has(namespace)) {
                    changes.push(namespace_change(&subsystem.nqn, namespace, "added"));
                }
            }
        }
    }
}

/// Returns two lists without what they begin and end with in common.
fn differing<'a, T: PartialEq>(mut a: &'a [T], mut b: &'a [T]) -> (&'a [T], &'a [T]) {
    while let ([first, rest @ ..], [other, others @ ..]) = (a, b)
        && first == other
    {
        (a, b) = (rest, others);
    }
    while let ([rest @ .., last], [others @ .., other]) = (a, b)
        && last == other
    {
        (a, b) = (rest, others);
    }
    (a, b)
}

/// Adds the changes of the keys of a section, by their rows. `field` returns what a key is called.
fn compare<T: Owner>(
    keys: impl Iterator<Item = &'static Key>,
    before: &T,
    after: &T,
    field: impl Fn(&str) -> String,
    changes: &mut Vec<Change>,
) {
    for key in keys {
        let Some(access) = T::access(&key.field) else { continue };
        let reason = match key.reload {
            Reload::Live => None,
            Reload::Restart => Some(AT_START),
            Reload::Identity(reason) => Some(reason),
            Reload::Untold => continue,
        };
        let (Some(from), Some(to)) = ((access.read)(before), (access.read)(after)) else { continue };
        // Both are of one zone.
        let name = if key.name == "admin_buffer" { "admin_buffer, admin_count" } else { key.name };
        if !access.same.map_or(from == to, |same| same(before, after)) {
            changes.push(change(&field(name), &from, &to, reason));
        }
    }
}

/// Returns a change from one text to another; with `reason`, a refused one.
fn change(field: &str, from: &str, to: &str, reason: Option<&str>) -> Change {
    let change = format!("{field} from {from} to {to}");
    match reason {
        Some(reason) => Change::Refused(format!("{change}: refused, {reason}")),
        None => Change::Other(change),
    }
}

impl DiskPlan {
    fn changes(&self, before: &DiskPlan, changes: &mut Vec<Change>) {
        let field = |key: &str| format!("disk {:?}: {key}", self.name);
        let is_same_kind = before.kind.name() == self.kind.name();
        let keys = schema::DISK.iter().filter(|key| is_same_kind || !matches!(key.field, Field::Variant(..)));
        compare(keys, before, self, field, changes);
        if before.bytes != self.bytes {
            let (from, to) = (Bytes::new(before.bytes), Bytes::new(self.bytes));
            changes.push(Change::Other(format!("disk {:?} resized from {from} to {to}", self.name)));
        }
    }
}

impl SubsystemPlan {
    fn changes(&self, before: &SubsystemPlan, changes: &mut Vec<Change>) {
        let field = |name: &str| format!("subsystem {}: {name}", self.nqn);
        compare(schema::SUBSYSTEM.iter(), before, self, field, changes);
        for namespace in &self.namespaces {
            let is_same = |a: Option<[u8; 16]>, b: Option<[u8; 16]>| a.is_some() && a == b;
            let has_same_identity = |other: &&NamespacePlan| {
                is_same(other.uuid, namespace.uuid) || is_same(other.nguid, namespace.nguid)
            };
            let same = before.namespaces.iter().find(has_same_identity);
            if let Some(other) = same.filter(|other| other.disk != namespace.disk) {
                let field = field(&format!("namespace {}: disk", namespace.nsid));
                let reason = Some("hosts would take it for the disk with that UUID");
                changes.push(change(&field, &other.disk.text(), &namespace.disk.text(), reason));
            }
        }
    }
}

fn referral_change(ReferralPlan { transport, address }: &ReferralPlan, verb: &str) -> Change {
    Change::Other(format!("referral to {transport} {address} {verb}"))
}

fn namespace_change(nqn: &Nqn, namespace: &NamespacePlan, verb: &str) -> Change {
    let NamespacePlan { nsid, disk, uuid: _, nguid: _ } = namespace;
    Change::Other(format!("subsystem {nqn}: namespace {nsid} {verb}, disk {disk:?}"))
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

/// Displays the hosts that may connect: `any`, `none` or their NQNs.
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
