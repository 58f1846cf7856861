//! What hosts see: listeners, subsystems, namespaces, referrals. Names and identities are unique.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::net::SocketAddr;

use nvme_spec::nqn::Nqn;
use spindle_target::snapshot::AllowedHosts;
use spindle_transport::TransportKind;

use super::super::document::{Errors, Location, Node};
use super::super::plan::{ListenerPlan, NamespacePlan, ReferralPlan, SubsystemPlan};
use super::super::tree::At;
use crate::identity::{self, Data};
use crate::text::quoted;

pub fn listeners(root: &Node, in_capsule_bytes: u32, errors: &Errors) -> Vec<ListenerPlan> {
    let nodes = root.sections("listener");
    let mut addresses: Vec<(TransportKind, At<SocketAddr>)> = Vec::new();
    let mut names = Unique::default();
    let mut listeners = Vec::new();
    for node in nodes {
        let Some(address) = node.find::<SocketAddr>("address") else { continue };
        let transport = transport(node);
        let is_taken = |(kind, other): &&(TransportKind, At<SocketAddr>)| {
            *kind == transport && are_the_same(other.value, address.value)
        };
        if let Some((_, other)) = addresses.iter().find(is_taken) {
            let (with, line) = (other.value, other.location.line);
            address.refuse(errors, format!("already listened on by {with} in line {line}"));
        }
        let name = node.find::<String>("name");
        if let Some(name) = &name {
            names.take(name.value.clone(), &name.location, "listener", errors);
        }
        listeners.push(ListenerPlan {
            name: name.map_or_else(|| named_by(transport, address.value), |name| name.value),
            transport,
            address: address.value,
            in_capsule_bytes: node.find("in_capsule").map_or(in_capsule_bytes, |at| at.value),
        });
        addresses.push((transport, address));
    }
    listeners
}

/// The transport of a listener, a referral or another target; TCP where the file does not say.
pub fn transport(node: &Node) -> TransportKind {
    match node.find::<String>("transport") {
        Some(word) if word.value == "rdma" => TransportKind::Rdma,
        Some(_) | None => TransportKind::Tcp,
    }
}

/// The name of a listener that is given none.
pub fn named_by(transport: TransportKind, address: SocketAddr) -> String {
    match transport {
        TransportKind::Tcp => address.to_string(),
        TransportKind::Rdma => format!("rdma:{address}"),
    }
}

/// True when both cannot be bound: they are equal, or one is all addresses of the family.
fn are_the_same(a: SocketAddr, b: SocketAddr) -> bool {
    let overlap = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() == b.port() && a.is_ipv4() == b.is_ipv4() && overlap
}

pub fn subsystems(root: &Node, listeners: &[ListenerPlan], errors: &Errors) -> Vec<SubsystemPlan> {
    // Without all names it cannot be said that one is of no disk.
    let disks = root.sections("disk").iter().map(|disk| disk.find("name").map(|at| at.value)).collect();
    let knows_later = |disk: &&Node| {
        disk.find::<String>("kind").is_some_and(|kind| ["ram", "remote"].contains(&kind.value.as_str()))
    };
    let name = |disk: &Node| disk.find("name").map(|at| at.value);
    let known_later = root.sections("disk").iter().filter(knows_later).filter_map(name).collect();
    let mut taken = Taken { disks, known_later, ..Taken::default() };
    let subsystems = root
        .sections("subsystem")
        .iter()
        .filter_map(|node| subsystem(node, listeners, &mut taken, errors))
        .collect();
    // As when a disk that was renamed keeps its identity, and a new one gets its name.
    for (identity, location) in &taken.given {
        if let Some((_, other)) = taken.derived.iter().find(|(derived, _)| derived == identity) {
            let line = other.line;
            location
                .refuse(errors, format!("also what the namespace in line {line} has when it is given none"));
        }
    }
    subsystems
}

pub fn referrals(root: &Node, errors: &Errors) -> Vec<ReferralPlan> {
    let mut known = Unique::default();
    let mut referral = |node: &Node| {
        let (transport, address) = (transport(node), node.find::<SocketAddr>("address")?);
        if address.value.ip().is_unspecified() {
            let allowed = "must be an address at which hosts reach that service, which this is none of";
            address.refuse(errors, allowed);
        }
        // Hosts would be told of it twice.
        known.take((transport == TransportKind::Rdma, address.value), &address.location, "referral", errors);
        Some(ReferralPlan { transport, address: address.value })
    };
    root.sections("referral").iter().filter_map(&mut referral).collect()
}

/// Values that may be there once, with the location where each is.
pub struct Unique<T>(HashMap<T, Location>);

impl<T> Default for Unique<T> {
    fn default() -> Self {
        Unique(HashMap::new())
    }
}

impl<T: Eq + Hash> Unique<T> {
    /// The line of the other one, where the value is there already.
    pub fn line_of_other(&mut self, value: T, location: &Location) -> Option<usize> {
        if let Some(other) = self.0.get(&value) {
            return Some(other.line);
        }
        self.0.insert(value, location.clone());
        None
    }

    fn take(&mut self, value: T, location: &Location, whose: &str, errors: &Errors) {
        if let Some(line) = self.line_of_other(value, location) {
            location.refuse(errors, format!("also that of the {whose} in line {line}"));
        }
    }
}

/// What the subsystems before have taken.
#[derive(Default)]
struct Taken {
    /// Names of all disks; `None` when one has a name that is wrong.
    disks: Option<Vec<String>>,
    /// Names of those whose identity is known when they are open: in memory, and of other targets.
    known_later: Vec<String>,
    nqns: Unique<Nqn>,
    serials: Unique<String>,
    used: Unique<String>,
    uuids: Unique<[u8; 16]>,
    nguids: Unique<[u8; 16]>,
    /// UUIDs and NGUIDs that the file gives, and those that are derived.
    given: Vec<([u8; 16], Location)>,
    derived: Vec<([u8; 16], Location)>,
}

fn subsystem(
    node: &Node,
    listeners: &[ListenerPlan],
    taken: &mut Taken,
    errors: &Errors,
) -> Option<SubsystemPlan> {
    let hosts = hosts(node, errors);
    let listeners = offered_at(node, listeners, errors);
    let cntlid_range = cntlid_range(node, errors);
    // An NQN that is wrong is reported; its namespaces are looked at all the same.
    let nqn = node.find::<Nqn>("nqn");
    if let Some(nqn) = &nqn {
        if nqn.value.is_discovery() {
            nqn.refuse(errors, "is the discovery service's, which every listener has; choose another name");
        }
        taken.nqns.take(nqn.value, &nqn.location, "subsystem", errors);
    }
    let name = nqn.as_ref().map_or_else(Nqn::discovery, |nqn| nqn.value);
    let serial = node.find::<String>("serial");
    if let Some(serial) = &serial {
        taken.serials.take(serial.value.clone(), &serial.location, "subsystem", errors);
    }
    let serial = serial.map_or_else(|| identity::serial(&name), |serial| serial.value);
    let namespaces = namespaces(node, &name, taken, errors);
    Some(SubsystemPlan {
        nqn: nqn?.value,
        serial,
        model: node.get("model"),
        hosts,
        listeners,
        cntlid_range,
        namespaces,
    })
}

fn hosts(node: &Node, errors: &Errors) -> AllowedHosts {
    let hosts = node.find::<Vec<At<Nqn>>>("hosts");
    let is_any = node.find::<bool>("allow_any_host");
    match (hosts, is_any) {
        (Some(hosts), Some(is_any)) if is_any.value && !hosts.value.is_empty() => {
            is_any.refuse(errors, "hosts lists who may connect; leave one of the two out");
            AllowedHosts::Any
        }
        (_, Some(is_any)) if is_any.value => AllowedHosts::Any,
        (Some(hosts), _) => {
            each_once(&hosts.value, "host", errors);
            AllowedHosts::Only(hosts.value.into_iter().map(|host| host.value).collect())
        }
        (None, is_any) => {
            if is_any.is_some() && node.is_absent("hosts") {
                let what = "missing; say who may connect: a list of host NQNs, or allow_any_host = true";
                node.refuse("hosts", errors, what);
            }
            AllowedHosts::Only(Vec::new())
        }
    }
}

fn offered_at(node: &Node, listeners: &[ListenerPlan], errors: &Errors) -> Vec<String> {
    let Some(list) = node.find::<Vec<At<String>>>("listeners") else {
        return listeners.iter().map(|listener| listener.name.clone()).collect();
    };
    for name in &list.value {
        if !listeners.iter().any(|listener| listener.name == name.value) {
            let all = quoted(listeners.iter().map(|listener| &listener.name));
            name.refuse(errors, format!("must be the name of a [[listener]]; there is {all}"));
        }
    }
    each_once(&list.value, "listener", errors);
    list.value.into_iter().map(|name| name.value).collect()
}

/// One that is named twice was perhaps meant to be another.
fn each_once<T: Clone + Eq + Hash>(list: &[At<T>], what: &str, errors: &Errors) {
    let mut known = HashSet::new();
    for at in list.iter().filter(|at| !known.insert(at.value.clone())) {
        at.refuse(errors, format!("the same {what} twice; it must be another one, or be left out"));
    }
}

fn cntlid_range(node: &Node, errors: &Errors) -> (u16, u16) {
    let (min, max) = (node.find::<u16>("cntlid_min"), node.find::<u16>("cntlid_max"));
    if let (Some(min), Some(max)) = (&min, &max)
        && min.value > max.value
    {
        let location = if node.given::<u16>("cntlid_max").is_some() { &max.location } else { &min.location };
        location.refuse(errors, format!("the range is empty: {} to {}", min.value, max.value));
    }
    (min.map_or(1, |min| min.value), max.map_or(1, |max| max.value))
}

fn namespaces(subsystem: &Node, nqn: &Nqn, taken: &mut Taken, errors: &Errors) -> Vec<NamespacePlan> {
    let mut nsids = Unique::default();
    let mut namespaces = Vec::new();
    for node in subsystem.sections("namespace") {
        let (nsid, disk) = (node.find::<u32>("nsid"), node.find::<String>("disk"));
        if let Some(nsid) = &nsid {
            nsids.take(nsid.value, &nsid.location, "namespace", errors);
        }
        if let (Some(disk), Some(disks)) = (&disk, &taken.disks) {
            if disks.contains(&disk.value) {
                taken.used.take(disk.value.clone(), &disk.location, "namespace", errors);
            } else {
                let all = quoted(disks);
                disk.refuse(errors, format!("must be the name of a [[disk]]; there is {all}"));
            }
        }
        let identity = |name: &str, taken: &mut Unique<[u8; 16]>| {
            let identity = node.find::<[u8; 16]>(name)?;
            taken.take(identity.value, &identity.location, "namespace", errors);
            Some(identity)
        };
        let (uuid, nguid) = (identity("uuid", &mut taken.uuids), identity("nguid", &mut taken.nguids));
        let (Some(nsid), Some(disk)) = (nsid, disk) else { continue };
        let (nsid, disk) = (nsid.value, disk.value);
        let is_known_later = taken.known_later.contains(&disk);
        let mut settle = |given: Option<At<[u8; 16]>>, derived: [u8; 16]| match given {
            Some(given) => {
                taken.given.push((given.value, given.location));
                Some(given.value)
            }
            None if is_known_later => None,
            None => {
                taken.derived.push((derived, node.location.clone()));
                Some(derived)
            }
        };
        namespaces.push(NamespacePlan {
            nsid,
            uuid: settle(uuid, identity::uuid(nqn, nsid, Data::Named(&disk))),
            nguid: settle(nguid, identity::nguid(nqn, nsid, Data::Named(&disk))),
            disk,
        });
    }
    namespaces.sort_by_key(|namespace| namespace.nsid);
    namespaces
}
