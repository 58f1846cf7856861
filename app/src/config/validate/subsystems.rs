//! Validates listeners, subsystems, namespaces and referrals; names and identifiers are unique.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use std::net::SocketAddr;

use nvme_spec::nqn::Nqn;
use spindle_nvme_transport::TransportKind;
use spindle_target::snapshot::AllowedHosts;

use super::super::document::{Errors, Location, Node};
use super::super::plan::{ListenerPlan, NamespacePlan, ReferralPlan, SubsystemPlan};
use super::super::tree::Located;
use crate::identity::{self, Data};
use crate::text::quoted;

pub fn listeners(root: &Node, in_capsule_bytes: u32, errors: &Errors) -> Vec<ListenerPlan> {
    let nodes = root.sections("listener");
    let mut addresses: Vec<(TransportKind, Located<SocketAddr>)> = Vec::new();
    let mut names = Unique::default();
    let mut listeners = Vec::new();
    for node in nodes {
        let Some(address) = node.find::<SocketAddr>("address") else { continue };
        let transport: TransportKind = node.get("transport");
        let is_taken = |(kind, other): &&(TransportKind, Located<SocketAddr>)| {
            *kind == transport && overlap(other.value, address.value)
        };
        if let Some((_, other)) = addresses.iter().find(is_taken) {
            let (with, line) = (other.value, other.location.line);
            address.refuse(errors, format!("already listened on by {with} in line {line}"));
        }
        let name = node.find::<String>("name");
        if let Some(name) = &name {
            names.insert_or_refuse(name.value.clone(), &name.location, "listener", errors);
        }
        listeners.push(ListenerPlan {
            name: name.map_or_else(|| default_listener_name(transport, address.value), |name| name.value),
            transport,
            address: address.value,
            in_capsule_bytes: node.find("in_capsule").map_or(in_capsule_bytes, |at| at.value),
        });
        addresses.push((transport, address));
    }
    listeners
}

/// Returns the name of a listener without the key `name`.
pub fn default_listener_name(transport: TransportKind, address: SocketAddr) -> String {
    match transport {
        TransportKind::Tcp => address.to_string(),
        TransportKind::Rdma => format!("rdma:{address}"),
    }
}

/// True if the addresses cannot both be bound: equal port and family, and equal IP or one is unspecified.
fn overlap(a: SocketAddr, b: SocketAddr) -> bool {
    let is_ip_shared = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() == b.port() && a.is_ipv4() == b.is_ipv4() && is_ip_shared
}

pub fn subsystems(root: &Node, listeners: &[ListenerPlan], errors: &Errors) -> Vec<SubsystemPlan> {
    let is_identified_when_open =
        |disk: &Node| disk.text("kind").is_some_and(|kind| ["ram", "remote"].contains(&kind));
    let disks = root.sections("disk").iter();
    let disks = disks.map(|disk| Some((disk.text("name")?, is_identified_when_open(disk)))).collect();
    let mut used = UsedNames { disks, ..UsedNames::default() };
    let subsystems = root
        .sections("subsystem")
        .iter()
        .filter_map(|node| subsystem(node, listeners, &mut used, errors))
        .collect();
    // No identifier that the file sets may equal a derived one. Example: a renamed disk keeps its identifier
    // in the file, and a new disk has the old name.
    for (identity, location) in &used.given {
        if let Some(line) = used.derived.get(identity) {
            location
                .refuse(errors, format!("also what the namespace in line {line} has when it is given none"));
        }
    }
    subsystems
}

pub fn referrals(root: &Node, errors: &Errors) -> Vec<ReferralPlan> {
    let mut known = Unique::default();
    let mut referral = |node: &Node| {
        let (transport, address) =
            (node.get::<TransportKind>("transport"), node.find::<SocketAddr>("address")?);
        if address.value.ip().is_unspecified() {
            let allowed = "must be an address at which hosts reach that service, which this is none of";
            address.refuse(errors, allowed);
        }
        // A duplicate would appear twice in the discovery log.
        known.insert_or_refuse(
            (transport == TransportKind::Rdma, address.value),
            &address.location,
            "referral",
            errors,
        );
        Some(ReferralPlan { transport, address: address.value })
    };
    root.sections("referral").iter().filter_map(|node| referral(node)).collect()
}

/// Values that must be unique in the file, with their lines.
pub struct Unique<T>(HashMap<T, usize>);

impl<T> Default for Unique<T> {
    fn default() -> Self {
        Unique(HashMap::new())
    }
}

impl<T: Eq + Hash> Unique<T> {
    /// Inserts the value and returns `None`, or returns the line of an equal value.
    pub fn insert_or_line(&mut self, value: T, location: &Location) -> Option<usize> {
        match self.0.entry(value) {
            Entry::Occupied(other) => Some(*other.get()),
            Entry::Vacant(place) => {
                place.insert(location.line);
                None
            }
        }
    }

    /// Inserts the value, or refuses it as a duplicate.
    fn insert_or_refuse(&mut self, value: T, location: &Location, noun: &str, errors: &Errors) {
        if let Some(line) = self.insert_or_line(value, location) {
            location.refuse(errors, format!("also that of the {noun} in line {line}"));
        }
    }
}

/// Disk names, and the names and identifiers of the subsystems that were validated so far.
#[derive(Default)]
struct UsedNames<'a> {
    /// All disks by name, and whether their namespaces have identifiers only once the disk is open: `ram` and
    /// `remote`. `None` if a name is invalid: then a reference to an unknown disk is not an error.
    disks: Option<HashMap<&'a str, bool>>,
    nqns: Unique<Nqn>,
    serials: Unique<String>,
    /// Disks that are in a namespace.
    used_disks: Unique<&'a str>,
    uuids: Unique<[u8; 16]>,
    nguids: Unique<[u8; 16]>,
    /// UUIDs and NGUIDs that the file sets.
    given: Vec<([u8; 16], Location)>,
    /// UUIDs and NGUIDs derived from NQN, NSID and disk name, with the line of the namespace.
    derived: HashMap<[u8; 16], usize>,
}

fn subsystem<'a>(
    node: &'a Node,
    listeners: &[ListenerPlan],
    used: &mut UsedNames<'a>,
    errors: &Errors,
) -> Option<SubsystemPlan> {
    check_hosts(node, errors);
    check_listeners(node, listeners, errors);
    check_cntlid_range(node, errors);
    // The namespaces of a subsystem with an invalid NQN are still validated.
    let nqn = node.find::<Nqn>("nqn");
    if let Some(nqn) = &nqn {
        if nqn.value.is_discovery() {
            nqn.refuse(errors, "is the discovery service's, which every listener has; choose another name");
        }
        used.nqns.insert_or_refuse(nqn.value, &nqn.location, "subsystem", errors);
    }
    let name = nqn.as_ref().map_or_else(Nqn::discovery, |nqn| nqn.value);
    if let Some(serial) = node.find::<String>("serial") {
        used.serials.insert_or_refuse(serial.value.clone(), &serial.location, "subsystem", errors);
    }
    let mut plan = SubsystemPlan {
        nqn: name,
        serial: identity::serial(&name),
        model: String::new(),
        // Closed, unless the file says otherwise.
        hosts: AllowedHosts::Only(Vec::new()),
        optimistic_hosts: AllowedHosts::Any,
        listeners: listeners.iter().map(|listener| listener.name.clone()).collect(),
        cntlid_range: (0, 0),
        namespaces: namespaces(node, &name, used, errors),
    };
    node.fill(&mut plan);
    if node.get("allow_any_host") {
        plan.hosts = AllowedHosts::Any;
    }
    nqn.map(|_| plan)
}

fn check_hosts(node: &Node, errors: &Errors) {
    let hosts = node.find::<Vec<Located<Nqn>>>("hosts");
    let is_any = node.find::<bool>("allow_any_host");
    match (&hosts, &is_any) {
        (Some(hosts), Some(is_any)) if is_any.value && !hosts.value.is_empty() => {
            is_any.refuse(errors, "hosts lists who may connect; leave one of the two out");
        }
        (_, Some(is_any)) if is_any.value => {}
        (Some(hosts), _) => refuse_duplicates(&hosts.value, "host", errors),
        (None, Some(_)) if node.is_absent("hosts") => {
            let what = "missing; say who may connect: a list of host NQNs, or allow_any_host = true";
            node.refuse("hosts", errors, what);
        }
        (None, _) => {}
    }
    if let Some(hosts) = node.find::<Vec<Located<Nqn>>>("optimistic_hosts") {
        refuse_duplicates(&hosts.value, "host", errors);
    }
}

fn check_listeners(node: &Node, listeners: &[ListenerPlan], errors: &Errors) {
    let Some(list) = node.find::<Vec<Located<String>>>("listeners") else { return };
    for name in &list.value {
        if !listeners.iter().any(|listener| listener.name == name.value) {
            let all = quoted(listeners.iter().map(|listener| &listener.name));
            name.refuse(errors, format!("must be the name of a [[listener]]; there is {all}"));
        }
    }
    refuse_duplicates(&list.value, "listener", errors);
}

/// Refuses duplicates in a list, which are probably typing errors.
fn refuse_duplicates<T: Clone + Eq + Hash>(list: &[Located<T>], what: &str, errors: &Errors) {
    let mut known = HashSet::new();
    for at in list.iter().filter(|at| !known.insert(at.value.clone())) {
        at.refuse(errors, format!("the same {what} twice; it must be another one, or be left out"));
    }
}

fn check_cntlid_range(node: &Node, errors: &Errors) {
    let (min, max) = (node.find::<u16>("cntlid_min"), node.find::<u16>("cntlid_max"));
    let (Some(min), Some(max)) = (min, max) else { return };
    if min.value > max.value {
        let at = if node.is_absent("cntlid_max") { &min } else { &max };
        at.refuse(errors, format!("the range is empty: {} to {}", min.value, max.value));
    }
}

fn namespaces<'a>(
    subsystem: &'a Node,
    nqn: &Nqn,
    used: &mut UsedNames<'a>,
    errors: &Errors,
) -> Vec<NamespacePlan> {
    let mut nsids = Unique::default();
    let nodes = subsystem.sections("namespace").iter();
    let mut namespaces: Vec<_> =
        nodes.filter_map(|node| namespace(node, nqn, &mut nsids, used, errors)).collect();
    namespaces.sort_by_key(|namespace| namespace.nsid);
    namespaces
}

fn namespace<'a>(
    node: &'a Node,
    nqn: &Nqn,
    nsids: &mut Unique<u32>,
    used: &mut UsedNames<'a>,
    errors: &Errors,
) -> Option<NamespacePlan> {
    let (nsid, disk) = (node.value::<u32>("nsid"), node.text("disk"));
    if let (Some(nsid), Some(location)) = (nsid, node.location_of("nsid")) {
        nsids.insert_or_refuse(nsid, location, "namespace", errors);
    }
    if let (Some(disk), Some(location), Some(disks)) = (disk, node.location_of("disk"), &used.disks) {
        if disks.contains_key(disk) {
            used.used_disks.insert_or_refuse(disk, location, "namespace", errors);
        } else {
            let all = quoted(disks.keys().collect::<BTreeSet<_>>());
            location.refuse(errors, format!("must be the name of a [[disk]]; there is {all}"));
        }
    }
    let identity = |name: &str, unique: &mut Unique<[u8; 16]>| {
        let identity = node.given::<[u8; 16]>(name)?;
        unique.insert_or_refuse(identity.value, &identity.location, "namespace", errors);
        Some(identity)
    };
    let (uuid, nguid) = (identity("uuid", &mut used.uuids), identity("nguid", &mut used.nguids));
    let (nsid, disk) = (nsid?, disk?);
    let is_identified_when_open = used.disks.as_ref().and_then(|disks| disks.get(disk)) == Some(&true);
    let mut record =
        |given: Option<Located<[u8; 16]>>, derive: fn(&Nqn, u32, Data<'_>) -> [u8; 16]| match given {
            Some(given) => {
                used.given.push((given.value, given.location));
                Some(given.value)
            }
            None if is_identified_when_open => None,
            None => {
                let derived = derive(nqn, nsid, Data::Named(disk));
                used.derived.entry(derived).or_insert(node.location.line);
                Some(derived)
            }
        };
    Some(NamespacePlan {
        nsid,
        uuid: record(uuid, identity::uuid),
        nguid: record(nguid, identity::nguid),
        disk: disk.to_owned(),
    })
}
