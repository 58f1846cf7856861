//! The difference between two plans, as a list for the log and `spindle check`. Settings that a running
//! process cannot change are marked as refused; a reload with one of them changes nothing.
//!
//! Plan structs are destructured without `..`: a new field does not compile until its changes are handled
//! here.

use std::fmt::{self, Debug};
use std::net::SocketAddr;
use std::time::Duration;

use nvme_spec::nqn::Nqn;
use spindle_nvme_initiator::{OptimisticOptions, Target};
use spindle_nvme_rdma::shell::ShellConfig as RdmaConfig;
use spindle_nvme_tcp::controller::ConnConfig;
use spindle_nvme_tcp::shell::ShellConfig;
use spindle_nvme_transport::TransportKind;
use spindle_reactor::mem::{Pages, ZoneSpec};
use spindle_reactor::run::Idle;
use spindle_target::snapshot::{AllowedHosts, ControllerLimits};

use super::plan::{
    ControlPlan, DiskKind, DiskPlan, LimitsPlan, ListenerPlan, LogFormat, LogPlan, NamespacePlan, Plan,
    PoolPlan, ReactorPlan, ReferralPlan, SubsystemPlan, TcpPlan, by_name, cache_text, delay_text,
};
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
const DISK_IDENTITY: &str = "would be another disk under the same name; give it a new name";
const NO_RDMA_DEVICES: &str =
    "no listener was on RDMA at the start, so no device is open; restart to add one";
const RECEIVES_TOO_SMALL: &str =
    "receives were made at the start for less, and are shared; restart to change it";
const HOST_IDENTITY: &str = "hosts know the disk by it; restart when none is connected";

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
    /// Returns the changes from `previous` to this plan, for a process that started with `previous` and has
    /// all of its disks open.
    pub fn changes(&self, previous: &Plan) -> Vec<Change> {
        let rdma_capsule = previous.rdma_capsule();
        self.changes_from(previous, &RunningState { is_open: &|_| true, rdma_capsule })
    }

    /// Returns the changes from `previous`, which is running now, to this plan.
    pub fn changes_from(&self, previous: &Plan, state: &RunningState<'_>) -> Vec<Change> {
        let Plan {
            reactor,
            pool,
            limits,
            tcp,
            rdma,
            optimistic_port,
            // Compared below by separate methods.
            disks: _,
            listeners: _,
            subsystems: _,
            referrals,
            log,
            control,
            drain_deadline,
            notes: _,
        } = self;
        let (mut changes, mut settings) = (Vec::new(), Vec::new());
        reactor.changes(&previous.reactor, &mut changes);
        pool.changes(&previous.pool, &mut changes);
        limits.changes(&previous.limits, &mut changes, &mut settings);
        rdma_changes(&previous.rdma, rdma, &mut changes);
        compare_fixed(&mut changes, "rdma.optimistic_port", &previous.optimistic_port, optimistic_port);
        tcp.changes(&previous.tcp, &mut changes);
        control.changes(&previous.control, &mut changes);
        log.changes(&previous.log, &mut changes, &mut settings);
        let ms = Duration::as_millis;
        compare_live(
            &mut settings,
            "shutdown.deadline_ms",
            &ms(&previous.drain_deadline),
            &ms(drain_deadline),
        );
        self.disk_changes(previous, state.is_open, &mut changes);
        self.listener_changes(previous, state.rdma_capsule, &mut changes);
        self.subsystem_changes(previous, &mut changes);
        for referral in referrals.iter().filter(|referral| !previous.referrals.contains(referral)) {
            changes.push(referral_change(referral, "added"));
        }
        for referral in previous.referrals.iter().filter(|referral| !referrals.contains(referral)) {
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
            match before.filter(|_| is_open(&disk.name)) {
                Some(before) => disk.changes(before, changes),
                None => changes.push(Change::Other(format!("disk {:?} added", disk.name))),
            }
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
                    compare_refused(changes, &field("transport"), &"none", &"rdma", NO_RDMA_DEVICES);
                }
                (_, Some(largest)) if is_rdma && was != is && is > largest => {
                    compare_refused(changes, &field("in_capsule"), &was, &is, RECEIVES_TOO_SMALL);
                }
                (None, _) => changes.push(Change::ListenerAdded(transport, address)),
                (Some(_), _) => compare_live(changes, &field("in_capsule"), &was, &is),
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

impl ReactorPlan {
    fn changes(&self, before: &ReactorPlan, changes: &mut Vec<Change>) {
        let ReactorPlan { cores, is_pinned, idle } = self;
        compare_fixed(changes, "reactor.cores", &before.cores, cores);
        compare_fixed(changes, "reactor.pin", &before.is_pinned, is_pinned);
        compare_fixed(changes, "reactor.idle", &idle_text(before.idle), &idle_text(*idle));
    }
}

impl PoolPlan {
    fn changes(&self, before: &PoolPlan, changes: &mut Vec<Change>) {
        let PoolPlan { pages, zones, admin_zones } = self;
        compare_fixed(changes, "pool.pages", &pages_word(before.pages), &pages_word(*pages));
        compare_fixed(changes, "pool.zone", &zones_text(&before.zones), &zones_text(zones));
        let (was, is) = (zones_text(&before.admin_zones), zones_text(admin_zones));
        compare_fixed(changes, "pool.admin_buffer, admin_count", &was, &is);
    }
}

impl LimitsPlan {
    fn changes(&self, before: &LimitsPlan, refused: &mut Vec<Change>, made: &mut Vec<Change>) {
        let LimitsPlan {
            controller,
            io_queues_max,
            connections,
            unconnected_per_address,
            disk_commands,
            may_overcommit,
        } = self;
        let ControllerLimits {
            queue_entries,
            transfer_bytes,
            bulk_unit,
            keep_alive_ms_max,
            discovery_keep_alive_ms,
        } = controller;
        let was = &before.controller;
        compare_fixed(refused, "limits.queue_entries", &was.queue_entries, queue_entries);
        compare_fixed(refused, "limits.transfer", &was.transfer_bytes, transfer_bytes);
        compare_fixed(refused, "limits.connections", &before.connections, connections);
        let unconnected = &before.unconnected_per_address;
        compare_fixed(refused, "limits.unconnected_per_address", unconnected, unconnected_per_address);
        compare_fixed(refused, "limits.disk_commands", &before.disk_commands, disk_commands);
        compare_live(made, "limits.io_queues", &before.io_queues_max, io_queues_max);
        compare_live(made, "limits.bulk_unit", &was.bulk_unit, bulk_unit);
        compare_live(made, "limits.keep_alive_ms_max", &was.keep_alive_ms_max, keep_alive_ms_max);
        compare_live(made, "limits.memory_overcommit", &before.may_overcommit, may_overcommit);
        compare_live(made, "discovery.keep_alive_ms", &was.discovery_keep_alive_ms, discovery_keep_alive_ms);
    }
}

impl TcpPlan {
    fn changes(&self, before: &TcpPlan, changes: &mut Vec<Change>) {
        let TcpPlan { shell, conn } = self;
        let ShellConfig { batch_bytes, user_timeout_ms, socket_buffer_bytes, congestion } = shell;
        let was = &before.shell;
        compare_fixed(changes, "tcp.receive_batch", &was.batch_bytes, batch_bytes);
        let (from, to) = (was.congestion.as_deref(), congestion.as_deref());
        compare_fixed(changes, "tcp.congestion", &from.unwrap_or("system"), &to.unwrap_or("system"));
        compare_fixed(changes, "tcp.user_timeout_ms", &was.user_timeout_ms, user_timeout_ms);
        compare_fixed(changes, "tcp.socket_buffer", &was.socket_buffer_bytes, socket_buffer_bytes);
        let ConnConfig {
            // Compared for each listener, which may have another value.
            in_capsule_bytes: _,
            max_h2c_data,
            // Copies of two keys of `[limits]`.
            queue_entries: _,
            transfer_bytes: _,
            header_digest,
            data_digest,
            initialize_timeout,
            close_timeout,
        } = conn;
        let was = &before.conn;
        compare_fixed(changes, "tcp.max_h2c_data", &was.max_h2c_data, max_h2c_data);
        compare_fixed(changes, "tcp.header_digest", &was.header_digest, header_digest);
        compare_fixed(changes, "tcp.data_digest", &was.data_digest, data_digest);
        let (from, to) = (was.initialize_timeout.as_ms(), initialize_timeout.as_ms());
        compare_fixed(changes, "tcp.initialize_timeout_ms", &from, &to);
        compare_fixed(changes, "tcp.close_timeout_ms", &was.close_timeout.as_ms(), &close_timeout.as_ms());
    }
}

fn rdma_changes(before: &RdmaConfig, after: &RdmaConfig, changes: &mut Vec<Change>) {
    let RdmaConfig { srq_entries, segments } = after;
    compare_fixed(changes, "rdma.shared_receives", &before.srq_entries, srq_entries);
    compare_fixed(changes, "rdma.segments", &before.segments, segments);
}

impl ControlPlan {
    fn changes(&self, before: &ControlPlan, changes: &mut Vec<Change>) {
        let ControlPlan { socket, group } = self;
        compare_fixed(changes, "control.socket", &Optional(&before.socket), &Optional(socket));
        compare_fixed(changes, "control.group", &Optional(&before.group), &Optional(group));
    }
}

impl LogPlan {
    fn changes(&self, before: &LogPlan, refused: &mut Vec<Change>, made: &mut Vec<Change>) {
        let LogPlan { level, format, peer_lines_per_s } = self;
        let format_word = |format| if format == LogFormat::Json { "json" } else { "text" };
        compare_fixed(refused, "log.format", &format_word(before.format), &format_word(*format));
        compare_fixed(refused, "log.peer_lines_per_s", &before.peer_lines_per_s, peer_lines_per_s);
        let level_word = |level: tracing::Level| level.as_str().to_ascii_lowercase();
        compare_live(made, "log.level", &level_word(before.level), &level_word(*level));
    }
}

impl DiskPlan {
    fn changes(&self, before: &DiskPlan, changes: &mut Vec<Change>) {
        let DiskPlan { name, block_bytes, bytes, kind, medium: _, medium_id, cache, delay } = self;
        let field = |key: &str| format!("disk {name:?}: {key}");
        compare_refused(changes, &field("block_bytes"), &before.block_bytes, block_bytes, DISK_IDENTITY);
        compare_refused(changes, &field("kind"), &before.kind.name(), &kind.name(), DISK_IDENTITY);
        if before.kind.name() == kind.name() {
            for (was, is) in kind_settings(&before.kind).into_iter().zip(kind_settings(kind)) {
                compare_refused(changes, &field(is.key), &was.value, &is.value, is.reason);
            }
        }
        compare_live(
            changes,
            &field("cache"),
            &cache_text(before.cache.as_ref()),
            &cache_text(cache.as_ref()),
        );
        let (was, is) = (delay_text(before.delay.as_ref()), delay_text(delay.as_ref()));
        compare_refused(changes, &field("delay"), &was, &is, AT_START);
        compare_live(changes, &field("medium_id"), &Optional(&before.medium_id), &Optional(medium_id));
        if before.bytes != *bytes {
            let (from, to) = (Bytes::new(before.bytes), Bytes::new(*bytes));
            changes.push(Change::Other(format!("disk {name:?} resized from {from} to {to}")));
        }
    }
}

/// A key that only disks of some kinds have, and why a reload cannot change `value`.
struct KindSetting {
    key: &'static str,
    value: FileText,
    reason: &'static str,
}

/// Returns the settings of a disk's kind. Two disks of one kind have the same keys in the same order.
fn kind_settings(kind: &DiskKind) -> Vec<KindSetting> {
    let setting = |reason| {
        move |key, value: &dyn Debug| KindSetting { key, value: FileText(format!("{value:?}")), reason }
    };
    let (of_identity, at_start) = (setting(DISK_IDENTITY), setting(AT_START));
    match kind {
        // `rdma.optimistic_port`, on which seals depend, is compared by itself.
        DiskKind::Ram { pages, is_populated, has_seals: _ } => {
            vec![of_identity("pages", &pages_word(*pages)), at_start("populate", is_populated)]
        }
        DiskKind::Null => Vec::new(),
        // `create` has an effect only while the file is missing.
        DiskKind::File { path, is_read_only, create: _, is_direct, is_polled } => vec![
            of_identity("path", path),
            of_identity("read_only", is_read_only),
            of_identity("direct", is_direct),
            at_start("poll", is_polled),
        ],
        DiskKind::Ng { path, is_read_only } => {
            vec![of_identity("ng", path), of_identity("read_only", is_read_only)]
        }
        DiskKind::Nvme { address, namespace } => {
            vec![of_identity("nvme", &address.to_string()), of_identity("namespace", namespace)]
        }
        DiskKind::Remote { target, namespace, command_timeout, quiesce, optimistic } => {
            let Target { transport, address, nqn, host } = &**target;
            let OptimisticOptions { directory_pages, is_eager } = optimistic.clone().unwrap_or_default();
            let host = format!("{} (HOSTID {:032x})", host.nqn, u128::from_be_bytes(host.id));
            vec![
                of_identity("address", &address.to_string()),
                of_identity("transport", &transport.to_string()),
                of_identity("nqn", &nqn.to_string()),
                of_identity("host_nqn", &host),
                of_identity("namespace", namespace),
                at_start("command_timeout_ms", &command_timeout.as_millis()),
                at_start("quiesce_ms", &quiesce.as_millis()),
                at_start("optimistic", &optimistic.is_some()),
                at_start("optimistic_pages", &directory_pages),
                at_start("optimistic_eager", &is_eager),
            ]
        }
    }
}

impl SubsystemPlan {
    fn changes(&self, before: &SubsystemPlan, changes: &mut Vec<Change>) {
        let SubsystemPlan {
            nqn,
            serial,
            model,
            hosts,
            optimistic_hosts,
            listeners,
            cntlid_range,
            namespaces,
        } = self;
        let field = |name: &str| format!("subsystem {nqn}: {name}");
        compare_refused(changes, &field("serial"), &before.serial, serial, HOST_IDENTITY);
        compare_refused(changes, &field("model"), &before.model, model, HOST_IDENTITY);
        let of_hosts = [
            ("hosts", &before.hosts, hosts),
            ("optimistic_hosts", &before.optimistic_hosts, optimistic_hosts),
        ];
        for (name, from, to) in of_hosts.into_iter().filter(|(_, from, to)| from != to) {
            let (from, to) = (Hosts(from), Hosts(to));
            changes.push(Change::Other(format!("{} from {from} to {to}", field(name))));
        }
        compare_live(changes, &field("listeners"), &before.listeners, listeners);
        compare_live(changes, &field("cntlid_min"), &before.cntlid_range.0, &cntlid_range.0);
        compare_live(changes, &field("cntlid_max"), &before.cntlid_range.1, &cntlid_range.1);
        for namespace in namespaces {
            let is_same = |a: Option<[u8; 16]>, b: Option<[u8; 16]>| a.is_some() && a == b;
            let has_same_identity = |other: &&NamespacePlan| {
                is_same(other.uuid, namespace.uuid) || is_same(other.nguid, namespace.nguid)
            };
            if let Some(other) = before.namespaces.iter().find(has_same_identity) {
                let field = field(&format!("namespace {}: disk", namespace.nsid));
                compare_refused(
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

/// A value in the syntax of the file; `Debug` prints it without quotes.
#[derive(PartialEq)]
struct FileText(String);

impl Debug for FileText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The value of an optional key; `Debug` prints `unset` for `None`.
#[derive(PartialEq)]
struct Optional<'a, T>(&'a Option<T>);

impl<T: Debug> Debug for Optional<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str("unset"),
        }
    }
}

fn pages_word(pages: Pages) -> &'static str {
    match pages {
        Pages::Base => "base",
        Pages::Transparent => "transparent",
        Pages::Huge => "huge",
    }
}

fn zones_text(zones: &[ZoneSpec]) -> FileText {
    let zone = |ZoneSpec { buffer_bytes, count }: &ZoneSpec| {
        format!("{{ buffer = \"{}\", count = {count} }}", Bytes::new((*buffer_bytes).into()))
    };
    FileText(format!("[{}]", zones.iter().map(zone).collect::<Vec<_>>().join(", ")))
}

fn idle_text(idle: Idle) -> String {
    match idle {
        Idle::Spin => "spin".to_owned(),
        Idle::SleepAfter(time) => format!("adaptive, adaptive_spin_us = {}", time.as_us()),
    }
}

fn referral_change(ReferralPlan { transport, address }: &ReferralPlan, verb: &str) -> Change {
    Change::Other(format!("referral to {transport} {address} {verb}"))
}

fn namespace_change(nqn: &Nqn, namespace: &NamespacePlan, verb: &str) -> Change {
    let NamespacePlan { nsid, disk, uuid: _, nguid: _ } = namespace;
    Change::Other(format!("subsystem {nqn}: namespace {nsid} {verb}, disk {disk:?}"))
}

/// Compares a setting that is fixed at the start: a difference is refused.
fn compare_fixed<T: Debug + PartialEq>(changes: &mut Vec<Change>, field: &str, from: &T, to: &T) {
    compare_refused(changes, field, from, to, AT_START);
}

fn compare_refused<T: Debug + PartialEq>(
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

fn compare_live<T: Debug + PartialEq>(changes: &mut Vec<Change>, field: &str, from: &T, to: &T) {
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
