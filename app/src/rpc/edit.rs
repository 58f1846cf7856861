//! [`Edit`], and methods that change the configuration, except those for disks. The methods edit the TOML
//! text and keep comments and order. The new text is validated like a file.

use std::net::SocketAddr;

use nvme_spec::nqn::Nqn;
use serde_json::{Value, json};
use spindle_nvme_transport::TransportKind;
use spindle_target::snapshot::AllowedHosts;
use toml_edit::{Array, Item, Table, value};

use super::Failure;
use super::params::Args;
use super::reads::LEVELS;
use crate::config::comments;
use crate::config::{
    ListenerPlan, Plan, Section, SectionKind, Sections, SubsystemPlan, default_listener_name,
};
use crate::text::{alternatives, did_you_mean};

type MethodResult = Result<Value, Failure>;

/// IANA port of NVMe over Fabrics.
const NVME_PORT: u16 = 4420;
/// IANA port of NVMe discovery services.
const DISCOVERY_PORT: u16 = 8009;
pub const LIST_SUBSYSTEMS: &str = "nvmf_get_subsystems lists them";
pub const LIST_DISKS: &str = "bdev_get_bdevs lists them";

/// A configuration that a method edits.
pub struct Edit<'a> {
    pub sections: Sections,
    /// The plan before the edit.
    pub plan: &'a Plan,
    /// RDMA devices are open: there was an RDMA listener at the start.
    pub has_rdma: bool,
    /// The environment variable `SPINDLE_LOG` goes before `log.level`.
    pub is_log_level_fixed: bool,
    /// The method takes something away from hosts: it takes effect even if it cannot be kept.
    pub is_revocation: bool,
}

impl Edit<'_> {
    /// Returns the subsystem of the parameter `nqn` in the plan before the edit; an error if there is none.
    fn subsystem(&self, args: &Args) -> Result<&SubsystemPlan, Failure> {
        let nqn = args.nqn("nqn");
        let found = self.plan.subsystems.iter().find(|subsystem| Some(subsystem.nqn) == nqn);
        found.ok_or_else(|| {
            let names: Vec<_> = self.plan.subsystems.iter().map(|it| it.nqn.to_string()).collect();
            unknown_name(args, "nqn", "subsystem", &names, LIST_SUBSYSTEMS)
        })
    }

    fn position(&self, nqn: Nqn) -> Option<usize> {
        self.sections.position("subsystem", |section| section.value("nqn") == Some(nqn))
    }

    fn edit(&mut self, nqn: Nqn, edit: impl FnOnce(&mut Table)) -> Result<(), Failure> {
        self.position(nqn).map_or(Ok(()), |at| self.edit_at(at, edit))
    }

    /// Edits the section at `index`.
    pub fn edit_at(&mut self, index: usize, edit: impl FnOnce(&mut Table)) -> Result<(), Failure> {
        self.sections.edit(index, edit).map_err(|error| unusable(&error))
    }

    /// Edits the `listeners` of a subsystem's section. A missing key first gets its default: all listeners.
    fn edit_listeners(
        &mut self,
        subsystem: &SubsystemPlan,
        edit: impl FnOnce(&mut Array),
    ) -> Result<(), Failure> {
        let all = subsystem.listeners.iter().cloned().collect::<Array>();
        self.edit(subsystem.nqn, |table| {
            if let Some(listeners) = table.entry("listeners").or_insert_with(|| value(all)).as_array_mut() {
                edit(listeners);
            }
        })
    }
}

/// Returns the error of a text that is not TOML any more.
pub fn unusable(error: &toml_edit::TomlError) -> Failure {
    Failure::system(format!("the configuration cannot be changed: {error}"))
}

/// Returns the error for an unknown name in the parameter `field`. The text suggests a similar name of
/// `names`, or else is `listed`, which names the method that lists them.
pub fn unknown_name(args: &Args, field: &str, noun: &str, names: &[String], listed: &str) -> Failure {
    let given = args.text(field).unwrap_or_default();
    let meant = did_you_mean(given, names.iter().map(String::as_str), || listed.to_owned());
    args.refuse(field, format!("there is no such {noun}; {meant}"))
}

/// Copies string and integer parameters to keys of `table`, and skips parameters that are not set. `names`
/// are pairs of (parameter, key).
pub fn copy_params(args: &Args, table: &mut Table, names: &[(&str, &str)]) {
    for (from, to) in names {
        let text = args.text(from).map(value);
        if let Some(item) = text.or_else(|| args.whole(from).map(integer_item)) {
            table[*to] = item;
        }
    }
}

pub fn integer_item(number: u64) -> Item {
    value(i64::try_from(number).unwrap_or(i64::MAX))
}

pub fn create_transport(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    let plan = edit.plan;
    if transport_of(args) == Some(TransportKind::Rdma) && !edit.has_rdma {
        let allowed = "RDMA devices are opened only at the start: add a listener with transport = \"rdma\" \
                       to the file and restart";
        return Err(args.refuse("trtype", allowed));
    }
    let fixed = [
        ("max_queue_depth", u64::from(plan.limits.controller.queue_entries), "limits.queue_entries"),
        ("max_io_qpairs_per_ctrlr", u64::from(plan.limits.io_queues_max), "limits.io_queues"),
        ("in_capsule_data_size", u64::from(plan.tcp.conn.in_capsule_bytes), "tcp.in_capsule"),
        ("max_io_size", u64::from(plan.limits.controller.transfer_bytes), "limits.transfer"),
    ];
    for (name, is, key) in fixed {
        if args.whole(name).is_some_and(|wanted| wanted != is) {
            return Err(args.refuse(name, format!("must be {is}, as {key} in the file says")));
        }
    }
    Ok(json!(true))
}

pub fn create_subsystem(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    if edit.subsystem(args).is_ok() {
        return Err(args.refuse("nqn", "there is a subsystem of this name; it must be a new one"));
    }
    let mut table = Table::new();
    table["nqn"] = value(args.text("nqn").unwrap_or_default());
    copy_params(args, &mut table, &[("serial_number", "serial"), ("model_number", "model")]);
    copy_params(args, &mut table, &[("min_cntlid", "cntlid_min"), ("max_cntlid", "cntlid_max")]);
    if args.flag("allow_any_host") {
        table["allow_any_host"] = value(true);
    } else {
        table["hosts"] = value(Array::new());
    }
    table["listeners"] = value(Array::new());
    edit.sections.push("subsystem", table);
    Ok(json!(true))
}

pub fn delete_subsystem(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    edit.is_revocation = true;
    let nqn = edit.subsystem(args)?.nqn;
    edit.sections.remove(SectionKind::Element("subsystem"), |section| section.value("nqn") == Some(nqn));
    Ok(json!(true))
}

pub fn add_ns(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    let (subsystem, namespace) = (edit.subsystem(args)?, args.object("namespace"));
    let disk = namespace.text("bdev_name").unwrap_or_default().to_owned();
    if edit.plan.disk(&disk).is_none() {
        let disks: Vec<_> = edit.plan.disks.iter().map(|disk| disk.name.clone()).collect();
        return Err(unknown_name(&namespace, "bdev_name", "disk", &disks, LIST_DISKS));
    }
    let is_taken = |nsid: &u64| subsystem.namespaces.iter().any(|it| u64::from(it.nsid) == *nsid);
    // They are in ascending order.
    let first_gap = (1..).zip(&subsystem.namespaces).find(|(nsid, it)| u64::from(it.nsid) != *nsid);
    let free = first_gap.map_or(subsystem.namespaces.len() as u64 + 1, |(nsid, _)| nsid);
    let nsid = match namespace.whole("nsid") {
        Some(nsid) if is_taken(&nsid) => {
            let allowed = format!("the subsystem has a namespace of this number; the lowest free is {free}");
            return Err(namespace.refuse("nsid", allowed));
        }
        Some(nsid) => nsid,
        None => free,
    };
    let nqn = subsystem.nqn;
    let mut table = Table::new();
    table["nsid"] = integer_item(nsid);
    table["disk"] = value(disk);
    copy_params(&namespace, &mut table, &[("uuid", "uuid")]);
    if let Some(nguid) = namespace.text("nguid").and_then(super::params::nguid) {
        table["nguid"] = value(nguid);
    }
    if let Some(subsystem) = edit.position(nqn) {
        edit.sections.push_namespace(subsystem, table);
    }
    Ok(json!(nsid))
}

pub fn remove_ns(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    edit.is_revocation = true;
    let subsystem = edit.subsystem(args)?;
    let nsid = args.whole("nsid").unwrap_or(0);
    if !subsystem.namespaces.iter().any(|it| u64::from(it.nsid) == nsid) {
        let allowed = "the subsystem has no namespace of this number; nvmf_get_subsystems lists them";
        return Err(args.refuse("nsid", allowed));
    }
    let nqn = subsystem.nqn;
    if let Some(subsystem) = edit.position(nqn) {
        edit.sections.remove_namespaces(subsystem, |section| section.value("nsid") == Some(nsid));
    }
    Ok(json!(true))
}

pub fn add_host(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    let subsystem = edit.subsystem(args)?;
    let (nqn, host) = (subsystem.nqn, args.nqn("host"));
    match &subsystem.hosts {
        AllowedHosts::Any => {
            let allowed = "every host may connect; first call nvmf_subsystem_allow_any_host with \
                           allow_any_host = false, and hosts = those that stay connected";
            return Err(args.refuse("host", allowed));
        }
        AllowedHosts::Only(hosts) if host.is_some_and(|host| hosts.contains(&host)) => {
            return Ok(json!(true));
        }
        AllowedHosts::Only(_) => {}
    }
    edit.edit(nqn, |section| {
        let hosts = section.entry("hosts").or_insert_with(|| value(Array::new())).as_array_mut();
        hosts.into_iter().for_each(|hosts| comments::push(hosts, args.text("host").unwrap_or_default()));
    })?;
    Ok(json!(true))
}

pub fn remove_host(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    edit.is_revocation = true;
    let subsystem = edit.subsystem(args)?;
    let (nqn, host) = (subsystem.nqn, args.text("host").unwrap_or_default());
    let hosts = match &subsystem.hosts {
        AllowedHosts::Any => {
            let allowed = "every host may connect; call nvmf_subsystem_allow_any_host with allow_any_host = \
                           false to change that";
            return Err(args.refuse("host", allowed));
        }
        AllowedHosts::Only(hosts) => hosts.iter().map(Nqn::to_string).collect::<Vec<_>>(),
    };
    if !hosts.iter().any(|it| it == host) {
        return Err(unknown_name(args, "host", "host in the list", &hosts, "nvmf_get_subsystems has it"));
    }
    edit.edit(nqn, |section| {
        let hosts = section.get_mut("hosts").and_then(Item::as_array_mut);
        hosts.into_iter().for_each(|hosts| comments::retain(hosts, |it| it.as_str() != Some(host)));
    })?;
    Ok(json!(true))
}

pub fn allow_any_host(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    let (nqn, is_any) = (edit.subsystem(args)?.nqn, args.flag("allow_any_host"));
    edit.is_revocation = !is_any;
    let hosts = args.has("hosts").then(|| args.texts("hosts").collect::<Array>());
    if is_any && hosts.is_some() {
        return Err(
            args.refuse("hosts", "must not be given with allow_any_host = true, which deletes the list")
        );
    }
    edit.edit(nqn, |section| {
        if is_any {
            comments::remove(section, "hosts");
            comments::set(section, "allow_any_host", value(true));
        } else {
            comments::remove(section, "allow_any_host");
            match hosts {
                Some(hosts) => comments::set(section, "hosts", value(hosts)),
                None => drop(section.entry("hosts").or_insert_with(|| value(Array::new()))),
            }
        }
    })?;
    Ok(json!(true))
}

/// Returns the transport of the parameter `trtype`; `None` for `pcie` or without the parameter.
pub fn transport_of(args: &Args) -> Option<TransportKind> {
    let name = args.text("trtype")?;
    TransportKind::ALL.into_iter().find(|kind| name.eq_ignore_ascii_case(&kind.to_string()))
}

/// Returns the endpoint in the object parameter `name`; `port` is the default of `trsvcid`. The default
/// transport is TCP.
fn endpoint(args: &Args, name: &str, port: u16) -> Result<(TransportKind, SocketAddr), Failure> {
    let inner = args.object(name);
    Ok((transport_of(&inner).unwrap_or(TransportKind::Tcp), inner.address(port)?))
}

fn endpoints(all: impl Iterator<Item = (TransportKind, SocketAddr)>) -> String {
    alternatives(all.map(|(transport, address)| format!("{address} ({transport})")))
}

/// Returns a section with the keys `address` and, for RDMA, `transport`.
fn endpoint_table((transport, address): (TransportKind, SocketAddr)) -> Table {
    let mut table = Table::new();
    table["address"] = value(address.to_string());
    if transport != TransportKind::Tcp {
        table["transport"] = value(transport.to_string());
    }
    table
}

fn is_at(section: &Section, (transport, address): (TransportKind, SocketAddr)) -> bool {
    section.value("address") == Some(address)
        && section.text("transport").unwrap_or("tcp") == transport.to_string()
}

/// Whether the method is called for the discovery service, which is at every listener.
fn is_of_discovery(args: &Args) -> bool {
    args.nqn("nqn").is_some_and(|nqn| nqn.is_discovery())
}

/// Opens a listener unless there is one at this address.
fn add_discovery_listener(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    let endpoint = endpoint(args, "listen_address", DISCOVERY_PORT)?;
    let is_there = |listener: &ListenerPlan| {
        let (transport, address) = listener.endpoint();
        let ip = address.ip();
        let is_everywhere = ip.is_unspecified() && ip.is_ipv4() == endpoint.1.is_ipv4();
        transport == endpoint.0
            && address.port() == endpoint.1.port()
            && (is_everywhere || ip == endpoint.1.ip())
    };
    if !edit.plan.listeners.iter().any(is_there) {
        edit.sections.push("listener", endpoint_table(endpoint));
    }
    Ok(json!(true))
}

/// Closes a listener at which no subsystem is offered.
fn remove_discovery_listener(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    let endpoint = endpoint(args, "listen_address", DISCOVERY_PORT)?;
    let known = edit.plan.listeners.iter().find(|listener| listener.endpoint() == endpoint);
    let Some(known) = known else {
        let at = edit.plan.listeners.iter().map(ListenerPlan::endpoint);
        let allowed = format!("there is no such listener; there is {}", endpoints(at));
        return Err(args.refuse("listen_address", allowed));
    };
    if let Some(user) = edit.plan.subsystems.iter().find(|it| it.listeners.contains(&known.name)) {
        let allowed = format!("{} is offered at this listener, and every listener has discovery", user.nqn);
        return Err(args.refuse("listen_address", allowed));
    }
    edit.sections.remove(SectionKind::Element("listener"), |section| is_at(section, endpoint));
    Ok(json!(true))
}

pub fn add_listener(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    if is_of_discovery(args) {
        return add_discovery_listener(edit, args);
    }
    let subsystem = edit.subsystem(args)?.clone();
    let endpoint = endpoint(args, "listen_address", NVME_PORT)?;
    let known = edit.plan.listeners.iter().find(|listener| listener.endpoint() == endpoint);
    let name = match known {
        Some(listener) => listener.name.clone(),
        None => {
            edit.sections.push("listener", endpoint_table(endpoint));
            default_listener_name(endpoint.0, endpoint.1)
        }
    };
    let section = edit.position(subsystem.nqn).map(|at| edit.sections.section(at));
    let is_everywhere = section.is_some_and(|section| !section.has("listeners"));
    if !subsystem.listeners.contains(&name) && !is_everywhere {
        edit.edit_listeners(&subsystem, |listeners| comments::push(listeners, name))?;
    }
    Ok(json!(true))
}

pub fn remove_listener(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    edit.is_revocation = true;
    if is_of_discovery(args) {
        return remove_discovery_listener(edit, args);
    }
    let subsystem = edit.subsystem(args)?.clone();
    let endpoint = endpoint(args, "listen_address", NVME_PORT)?;
    let known = edit.plan.listeners_of(&subsystem).find(|listener| listener.endpoint() == endpoint);
    let Some(name) = known.map(|listener| listener.name.clone()) else {
        let at = edit.plan.listeners_of(&subsystem).map(|listener| listener.endpoint());
        let allowed =
            format!("the subsystem is not offered at this address; it is offered at {}", endpoints(at));
        return Err(args.refuse("listen_address", allowed));
    };
    edit.edit_listeners(&subsystem, |listeners| {
        comments::retain(listeners, |it| it.as_str() != Some(&name));
    })?;
    let is_used = |other: &SubsystemPlan| other.nqn != subsystem.nqn && other.listeners.contains(&name);
    if !edit.plan.subsystems.iter().any(is_used) {
        edit.sections.remove(SectionKind::Element("listener"), |section| is_at(section, endpoint));
    }
    Ok(json!(true))
}

pub fn add_referral(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    let endpoint = endpoint(args, "address", DISCOVERY_PORT)?;
    let mut known = edit.plan.referrals.iter();
    if known.any(|referral| (referral.transport, referral.address) == endpoint) {
        return Err(args.refuse("address", "there is such a referral; it must be another address"));
    }
    edit.sections.push("referral", endpoint_table(endpoint));
    Ok(json!(true))
}

pub fn remove_referral(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    edit.is_revocation = true;
    let endpoint = endpoint(args, "address", DISCOVERY_PORT)?;
    let known = edit.plan.referrals.iter().map(|referral| (referral.transport, referral.address));
    if !known.clone().any(|known| known == endpoint) {
        let allowed = format!("there is no such referral; there is {}", endpoints(known));
        return Err(args.refuse("address", allowed));
    }
    edit.sections.remove(SectionKind::Element("referral"), |section| is_at(section, endpoint));
    Ok(json!(true))
}

pub fn set_log_level(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    if edit.is_log_level_fixed {
        let allowed = "the environment variable SPINDLE_LOG overrides the level; restart without it";
        return Err(args.refuse("level", allowed));
    }
    let wanted = args.text("level").unwrap_or_default();
    let level = LEVELS.iter().find(|(name, _)| name.eq_ignore_ascii_case(wanted));
    let level = level.map_or("info", |(_, own)| own);
    let set = |root: &mut Table| match root.entry("log").or_insert_with(|| Item::Table(Table::new())) {
        Item::Table(log) => comments::set(log, "level", value(level)),
        Item::Value(toml_edit::Value::InlineTable(log)) => comments::set(log, "level", value(level)),
        log @ (Item::None | Item::Value(_) | Item::ArrayOfTables(_)) => log["level"] = value(level),
    };
    edit.sections.edit_other("log", set).map_err(|error| unusable(&error))?;
    Ok(json!(true))
}
