//! Builds the [`Plan`] from the tree of a file and checks rules between values and against the machine.
//!
//! A failed check adds an error and validation continues, so that one run reports many errors. Zones are
//! checked only if there is no error so far, and then memory. The plan is used only if there are no errors.
//!
//! | file | content |
//! |---|---|
//! | this | cores, zones, largest transfer, port of optimistic reads, control socket; memory; notes |
//! | [`disks`] | disks, with the files and devices at their paths |
//! | [`subsystems`] | listeners, subsystems, namespaces, referrals |

pub mod disks;
pub mod subsystems;

use std::cell::LazyCell;
use std::collections::HashSet;
use std::sync::Arc;

use spindle_nvme_transport::TransportKind;
use spindle_reactor::mem::{PIECES_MAX, ZoneSpec, can_serve};
use spindle_reactor::run::Idle;
use spindle_target::snapshot::ControllerLimits;

use super::document::{Errors, Location, Node};
use super::kind::Kind;
use super::machine::{Machine, group_id};
use super::memory;
use super::plan::{DiskKind, DiskPlan, ListenerPlan, Plan, delay_text};
use super::schema;
use super::tree::Located;
use crate::size::{Bytes, rounded};
use crate::text::alternatives;

/// Default zones of a core's pool: 4 KiB for most commands, 64 KiB to 2 MiB for larger ones. Few large ones
/// suffice: a command can use several smaller ones. The total, 24 MiB, bounds an idle target's memory.
const ZONES_DEFAULT: [ZoneSpec; 7] = [
    ZoneSpec { buffer_bytes: 4 << 10, count: 1024 },
    ZoneSpec { buffer_bytes: 64 << 10, count: 64 },
    ZoneSpec { buffer_bytes: 128 << 10, count: 32 },
    ZoneSpec { buffer_bytes: 256 << 10, count: 16 },
    ZoneSpec { buffer_bytes: 512 << 10, count: 6 },
    ZoneSpec { buffer_bytes: 1 << 20, count: 3 },
    ZoneSpec { buffer_bytes: 2 << 20, count: 1 },
];
/// Most zones and most bytes of one zone: the limits of `Pool::new`.
const ZONES_MAX: usize = 16;
const ZONE_BYTES_MAX: u64 = 1 << 30;

/// File descriptors besides connections: 64 for disks, listeners and epoll, 128 for control clients.
const OTHER_FILES: u64 = 64 + 128;

/// Checks the values of the tree against each other and against `machine`. The plan is valid only if `errors`
/// stays empty. `in_force`: the plan of this process, which is not checked against the machine again: cores
/// and memory that it has are allowed.
pub fn plan(root: &Node, machine: &Machine, in_force: Option<&Plan>, errors: &Errors) -> Plan {
    let (mut notes, mut plan) = (Vec::new(), Plan::default());
    for section in root.keys.iter().filter(|key| matches!(key.kind, Kind::Section(_))) {
        root.section(section.name).fill(&mut plan);
    }
    check_reactor(root.section("reactor"), &mut plan, machine, in_force, errors, &mut notes);
    check_transfer(root.section("limits"), errors);
    let ControllerLimits { queue_entries, transfer_bytes, .. } = plan.limits.controller;
    (plan.tcp.conn.queue_entries, plan.tcp.conn.transfer_bytes) = (queue_entries, transfer_bytes);
    plan.pool.zones = zones(root, errors);
    let may_be_away = machine.is_for_start && in_force.is_none();
    plan.disks = disks::plan(root.sections("disk"), plan.pool.pages, machine, may_be_away, errors);
    plan.listeners = subsystems::listeners(root, plan.tcp.conn.in_capsule_bytes, errors);
    // Whatever the listeners are: a cache whose settings change is replaced by an empty one.
    for disk in &mut plan.disks {
        set_seals(disk, plan.optimistic_port != 0);
    }
    check_optimistic_port(root.section("rdma"), &plan, errors);
    plan.subsystems = subsystems::subsystems(root, &plan.listeners, errors);
    plan.referrals = subsystems::referrals(root, errors);
    check_group(root.section("control"), machine, errors);
    // Checks of invalid values would cause misleading errors.
    if errors.borrow().is_empty() {
        check_zones(root, &plan, errors);
    }
    if errors.borrow().is_empty() {
        check_memory(root, &plan, machine, in_force, errors, &mut notes);
        check_lockable(root, &plan, machine, in_force, errors, &mut notes);
        note_unusual(&plan, machine, &mut notes);
    }
    Plan { notes, ..plan }
}

fn set_seals(disk: &mut Arc<DiskPlan>, has_them: bool) {
    let has = match (&disk.kind, &disk.cache) {
        (DiskKind::Ram { has_seals, .. }, _) => *has_seals,
        (_, Some(cache)) => cache.has_seals,
        (_, None) => return,
    };
    if has == has_them {
        return;
    }
    let disk = Arc::make_mut(disk);
    if let DiskKind::Ram { has_seals, .. } = &mut disk.kind {
        *has_seals = has_them;
    }
    if let Some(cache) = &mut disk.cache {
        cache.has_seals = has_them;
    }
}

/// The group is looked up here only for `spindle check`: the start does so when it binds the socket, and a
/// later change does not use it.
fn check_group(node: &Node, machine: &Machine, errors: &Errors) {
    if let Some(group) = node.find::<String>("group").filter(|_| !machine.is_for_start)
        && let Err(refusal) = group_id(&group.value)
    {
        group.refuse(errors, refusal);
    }
}

/// Checks the cores, of which there is one by default, and notes those that spin.
fn check_reactor(
    node: &Node,
    plan: &mut Plan,
    machine: &Machine,
    in_force: Option<&Plan>,
    errors: &Errors,
    notes: &mut Vec<String>,
) {
    let is_in_use = |core: &usize| in_force.is_some_and(|plan| plan.reactor.cores.contains(core));
    let allowed = || alternatives(machine.cores.iter().map(usize::to_string));
    match node.find::<Vec<Located<usize>>>("cores") {
        Some(list) => {
            if list.value.is_empty() {
                list.refuse(errors, "must name at least one core");
            }
            let mut known = HashSet::new();
            for core in list.value {
                if !machine.cores.contains(&core.value) && !is_in_use(&core.value) {
                    core.refuse(errors, format!("must be a core that this process may use: {}", allowed()));
                } else if known.contains(&core.value) {
                    core.refuse(errors, "the same core twice; each core has one thread");
                }
                known.insert(core.value);
            }
        }
        None => plan.reactor.cores.extend(machine.cores.first()),
    }
    if plan.reactor.idle == Idle::Spin && plan.reactor.cores.len() >= machine.cores.len() {
        notes.push(format!(
            "reactor.idle = \"spin\" on every core that the process may use ({}): nothing else gets to run \
             there, the network stack included",
            allowed()
        ));
    }
}

fn check_transfer(node: &Node, errors: &Errors) {
    let Some(transfer) = node.find::<u64>("transfer") else { return };
    if !transfer.value.is_power_of_two() {
        let (below, above) = (1 << transfer.value.ilog2(), transfer.value.next_power_of_two());
        let (below, above) = (Bytes::new(below), Bytes::new(above.min(schema::TRANSFER_MAX)));
        transfer.refuse(errors, format!("must be a power of two, like \"{below}\" or \"{above}\""));
    }
}

/// Returns the zones of the data path. The largest default buffer has room for the largest allowed transfer.
fn zones(root: &Node, errors: &Errors) -> Vec<ZoneSpec> {
    let nodes = root.section("pool").sections("zone");
    if nodes.is_empty() {
        return ZONES_DEFAULT.to_vec();
    }
    let zones = ascending_zones(nodes, errors);
    if let Some(node) = nodes.get(ZONES_MAX) {
        node.location.refuse(errors, format!("there may be at most {ZONES_MAX} zones"));
    }
    let largest = zones.last().map_or(0, |zone| zone.buffer_bytes);
    let transfer = root.section("limits").find::<u64>("transfer");
    if let Some(transfer) = transfer.filter(|it| it.value > u64::from(largest) && largest > 0) {
        let (asked, has) = (Bytes::new(transfer.value), Bytes::new(largest.into()));
        let what = format!(
            "the largest buffer must hold a whole transfer, limits.transfer = {asked}, and has {has}"
        );
        last_zone_location(root, "buffer").refuse(errors, what);
    }
    zones
}

fn ascending_zones(nodes: &[Arc<Node>], errors: &Errors) -> Vec<ZoneSpec> {
    let mut zones: Vec<ZoneSpec> = Vec::new();
    for node in nodes {
        let (Some(buffer), Some(count)) = (node.find::<u32>("buffer"), node.find::<u32>("count")) else {
            continue;
        };
        let spec = ZoneSpec { buffer_bytes: buffer.value, count: count.value };
        if let Some(previous) = zones.last().filter(|previous| previous.buffer_bytes >= spec.buffer_bytes) {
            let previous = Bytes::new(previous.buffer_bytes.into());
            buffer.refuse(errors, format!("must be more than {previous} of the zone before; zones ascend"));
        }
        if u64::from(spec.buffer_bytes) * u64::from(spec.count) > ZONE_BYTES_MAX {
            let most = ZONE_BYTES_MAX / u64::from(spec.buffer_bytes);
            let each = Bytes::new(spec.buffer_bytes.into());
            count.refuse(errors, format!("a zone has at most 1 GiB, which is {most} buffers of {each}"));
        }
        zones.push(spec);
    }
    zones
}

/// Refuses `rdma.optimistic_port` where an RDMA listener has the port.
fn check_optimistic_port(node: &Node, plan: &Plan, errors: &Errors) {
    let port = plan.optimistic_port;
    let is_rdma = |it: &&ListenerPlan| it.transport == TransportKind::Rdma && it.address.port() == port;
    let Some(listener) = plan.listeners.iter().find(is_rdma).filter(|_| port != 0) else { return };
    if let Some(at) = node.find::<u16>("optimistic_port") {
        at.location
            .refuse(errors, format!("the RDMA listener {} has this port; take another", listener.address));
    }
}

/// Most bytes of a range list (Copy, Dataset Management).
const LIST_BYTES_MAX: u32 = 8 << 10;
/// Most bytes that Copy copies at a time.
const COPY_BYTES_MAX: u32 = 128 << 10;

/// Checks that the zones can serve the buffers that a single command needs at once. Otherwise such a command
/// would wait forever and block the commands after it.
fn check_zones(root: &Node, plan: &Plan, errors: &Errors) {
    let zones = &plan.pool.zones;
    let transfer = plan.limits.controller.transfer_bytes;
    let largest = zones.last().map_or(0, |zone| zone.buffer_bytes);
    let takes_two = plan.disks.iter().any(|disk| disk.kind.reads_into_pool());
    let always = [("a list of ranges takes", [LIST_BYTES_MAX, 0])];
    let of_pool = [
        ("Compare takes", [transfer, transfer]),
        ("Copy takes", [LIST_BYTES_MAX, COPY_BYTES_MAX.min(largest)]),
        ("Compare and Write takes", [4096, 4096]),
    ];
    let wanted = always.iter().chain(of_pool.iter().filter(|_| takes_two));
    let Some((what, wanted)) = wanted.into_iter().find(|(_, wanted)| !can_serve(zones, wanted)) else {
        return;
    };
    let bytes: Vec<String> = wanted
        .iter()
        .filter(|bytes| **bytes > 0)
        .map(|bytes| Bytes::new((*bytes).into()).to_string())
        .collect();
    let what = format!(
        "{what} buffers of {} at once (limits.transfer = {}, at most {PIECES_MAX} smaller ones for one), and \
         the zones do not have them; allowed are zones that do, like one more buffer here",
        bytes.join(" and "),
        Bytes::new(transfer.into()),
    );
    last_zone_location(root, "count").refuse(errors, what);
}

/// Checks that the memory allocated at the start fits the machine's memory, and that the memory with full RAM
/// disks and caches fits the available memory. The second failure is only a note with
/// `limits.memory_overcommit`. In `spindle check` it is a note if the memory fits the machine's memory. What
/// is not more than the memory of the plan in force is allowed.
fn check_memory(
    root: &Node,
    plan: &Plan,
    machine: &Machine,
    in_force: Option<&Plan>,
    errors: &Errors,
    notes: &mut Vec<String>,
) {
    let items = memory::memory_items(plan);
    let at_start = memory::total_bytes(&items, memory::AllocationPhase::Start);
    let is_start_in_force = |plan: &Plan| {
        at_start <= memory::total_bytes(&memory::memory_items(plan), memory::AllocationPhase::Start)
    };
    if at_start > machine.memory_bytes && !in_force.is_some_and(is_start_in_force) {
        let (asked, has) = (rounded(at_start), rounded(machine.memory_bytes));
        let what = format!("all that is taken at the start comes to {asked}, and the machine has {has}");
        let (of_disks, largest) = largest_of_disks(&items, memory::AllocationPhase::Start);
        let largest = largest.filter(|_| of_disks > at_start / 2);
        if let Some((disk, is_cache)) = largest
            && let Some(location) = size_location(root, plan, disk, is_cache)
        {
            let ram = ", most of it for the tables of RAM disks";
            let whose = if is_cache { "; the largest part is this cache" } else { ram };
            return location.refuse(errors, format!("{what}{whose}; make it smaller"));
        }
        return last_zone_location(root, "count").refuse(errors, format!("{what}; take fewer buffers"));
    }
    let (huge, ordinary) = memory::huge_and_ordinary(plan, &items, machine.huge_bytes, notes);
    let is_in_force = |plan: &Plan| {
        let items = memory::memory_items(plan);
        ordinary <= memory::huge_and_ordinary(plan, &items, machine.huge_bytes, &mut Vec::new()).1
    };
    if ordinary <= machine.available_bytes || in_force.is_some_and(is_in_force) {
        return;
    }
    let asked = rounded(ordinary);
    let besides = if huge > 0 { format!(", besides {} of huge pages", rounded(huge)) } else { String::new() };
    let asked = format!("full RAM disks and all that is taken at the start come to {asked}{besides}");
    let retired = machine.retired.ordinary;
    let has = match retired {
        0 => rounded(machine.available_bytes),
        _ => format!(
            "{} (without {} of removed disks that are not given back yet)",
            rounded(machine.available_bytes),
            rounded(retired)
        ),
    };
    if plan.limits.may_overcommit {
        notes.push(format!(
            "{asked}, and {has} are available: limits.memory_overcommit = true takes the risk"
        ));
        return;
    }
    let has = if ordinary > machine.memory_bytes {
        format!("the machine has {}", rounded(machine.memory_bytes))
    } else if machine.is_for_start {
        format!("{has} are available")
    } else {
        notes.push(format!(
            "{asked}, and {has} are available now: unless this file is served here, it would not start"
        ));
        return;
    };
    let what = format!("{asked}, and {has}; make it smaller, or set limits.memory_overcommit = true");
    let largest = largest_of_disks(&items, memory::AllocationPhase::Filled).1;
    let location = largest.and_then(|(disk, is_cache)| size_location(root, plan, disk, is_cache));
    location.unwrap_or_else(|| root.section("pool").location.clone()).refuse(errors, what);
}

/// Checks that memory accessed by DMA, which is locked, fits RLIMIT_MEMLOCK. Checks only plans with a cache,
/// or with a RAM disk that initiators of Spindle read by RDMA. A failure is only a note in `spindle check`.
/// What is not more than the plan in force locks is allowed.
fn check_lockable(
    root: &Node,
    plan: &Plan,
    machine: &Machine,
    in_force: Option<&Plan>,
    errors: &Errors,
    notes: &mut Vec<String>,
) {
    let (Some(lockable), Some(locked)) = (machine.lockable_bytes, memory::locked_memory(plan)) else {
        return;
    };
    let memory::LockedMemory { device_kind, bytes, largest } = locked;
    let retired = machine.retired.ordinary.saturating_add(machine.retired.huge);
    let is_in_force = || in_force.and_then(memory::locked_memory).is_some_and(|own| bytes <= own.bytes);
    if bytes.saturating_add(retired) <= lockable || is_in_force() {
        return;
    }
    let (bytes, lockable) = (rounded(bytes), rounded(lockable));
    let besides = match retired {
        0 => String::new(),
        _ => format!(", besides {} of removed disks that are not given back yet", rounded(retired)),
    };
    let words = format!(
        "caches and all else that {device_kind} reach come to {bytes}{besides}, which is locked, and the \
         process may lock {lockable} (ulimit -l)"
    );
    if !machine.is_for_start {
        notes.push(format!("{words}: a process with this limit would not start"));
        return;
    }
    let location = size_location(root, plan, largest, largest.cache.is_some());
    let words = format!("{words}; make it smaller, or raise the limit (LimitMEMLOCK=infinity of a service)");
    location.unwrap_or_else(|| root.section("pool").location.clone()).refuse(errors, words);
}

/// Returns the location of `key` in the last zone, or of `[pool]` if there is none.
fn last_zone_location(root: &Node, key: &str) -> Location {
    let pool = root.section("pool");
    let at = pool.sections("zone").last().and_then(|zone| zone.find::<u32>(key));
    at.map_or_else(|| pool.location.clone(), |at| at.location)
}

/// Returns the location of the `size` of a disk or of its cache; `None` without one.
fn size_location(root: &Node, plan: &Plan, disk: &DiskPlan, is_cache: bool) -> Option<Location> {
    let mut disks = root.sections("disk").iter().zip(&plan.disks);
    let (node, _) = disks.find(|(_, it)| it.name == disk.name)?;
    let node = if is_cache { node.section("cache") } else { node };
    Some(node.find::<u64>("size")?.location)
}

/// Returns the memory of disks and caches that is allocated up to `phase`, and the RAM disk or cache with the
/// largest part of it; true: a cache.
fn largest_of_disks(
    items: &[memory::MemoryItem],
    phase: memory::AllocationPhase,
) -> (u64, Option<(&DiskPlan, bool)>) {
    let of_disks = || items.iter().filter(|item| item.phase <= phase && item.of().is_some());
    let bytes = of_disks().fold(0_u64, |sum, item| sum.saturating_add(item.bytes()));
    let has_size = |of: &Option<(&DiskPlan, bool)>| {
        of.is_some_and(|(disk, is_cache)| is_cache || matches!(disk.kind, DiskKind::Ram { .. }))
    };
    let sized = of_disks().filter(|item| has_size(&item.of()));
    (bytes, sized.max_by_key(|item| item.bytes()).and_then(memory::MemoryItem::of))
}

/// Notes RAM disks with a configured UUID or NGUID: after a restart they are empty under the same identity.
fn note_ram_identities(plan: &Plan, notes: &mut Vec<String>) {
    let disks = LazyCell::new(|| plan.disks_by_name());
    let is_ram = |name: &str| disks.get(name).is_some_and(|disk| matches!(disk.kind, DiskKind::Ram { .. }));
    for subsystem in &plan.subsystems {
        for namespace in &subsystem.namespaces {
            let key = match (namespace.uuid, namespace.nguid) {
                (Some(_), _) => "uuid",
                (None, Some(_)) => "nguid",
                (None, None) => continue,
            };
            if !is_ram(&namespace.disk) {
                continue;
            }
            notes.push(format!(
                "subsystem {}: namespace {} has a {key} of its own and its disk {:?} is in memory: after a \
                 restart it is empty under the same identity, and a host that has it mounted goes on over \
                 zeroes; leave uuid and nguid out",
                subsystem.nqn, namespace.nsid, namespace.disk
            ));
        }
    }
}

fn note_unusable_subsystems(plan: &Plan, notes: &mut Vec<String>) {
    for subsystem in &plan.subsystems {
        if !subsystem.nqn.has_prefix() {
            notes.push(format!(
                "subsystem[].nqn = \"{}\": an NQN begins with \"nqn.\" (NVMe Base 2.0, 4.5); it is served, \
                 but some hosts refuse such a name",
                subsystem.nqn
            ));
        }
        if matches!(&subsystem.hosts, spindle_target::snapshot::AllowedHosts::Only(hosts) if hosts.is_empty())
        {
            notes.push(format!("subsystem {}: hosts is empty, so no host may connect", subsystem.nqn));
        }
        if subsystem.listeners.is_empty() && !plan.listeners.is_empty() {
            notes.push(format!("subsystem {}: listeners is empty, so no host finds it", subsystem.nqn));
        }
        if subsystem.namespaces.is_empty() {
            notes.push(format!(
                "subsystem {} has no [[subsystem.namespace]]: hosts find no disk in it",
                subsystem.nqn
            ));
        }
    }
}

/// Notes settings that are valid but probably unintended.
fn note_unusual(plan: &Plan, machine: &Machine, notes: &mut Vec<String>) {
    if plan.listeners.is_empty() {
        notes.push("there is no [[listener]]: no host can connect".to_owned());
    }
    if plan.subsystems.is_empty() {
        notes.push("there is no [[subsystem]]: hosts find nothing here".to_owned());
    }
    let namespaces = plan.subsystems.iter().flat_map(|subsystem| &subsystem.namespaces);
    let used: HashSet<_> = namespaces.map(|namespace| namespace.disk.as_str()).collect();
    for disk in &plan.disks {
        if !used.contains(disk.name.as_str()) {
            notes.push(format!("disk {:?} is in no namespace: no host can reach it", disk.name));
        }
        if disk.delay.is_some() {
            let words = delay_text(disk.delay.as_ref());
            notes.push(format!("disk {:?} is slow on purpose: {words} ([disk.delay], for tests)", disk.name));
        }
    }
    note_unusable_subsystems(plan, notes);
    note_ram_identities(plan, notes);
    let is_remote = plan.listeners.iter().any(|listener| !listener.address.ip().is_loopback());
    if is_remote && plan.subsystems.iter().any(|subsystem| subsystem.nqn.as_str() == super::NQN_EXAMPLE) {
        notes.push(format!(
            "{} is the name in every example: a host that connects to two machines under it takes their \
             disks for one and the same; choose a name of your own",
            super::NQN_EXAMPLE
        ));
    }
    if let Some(name) =
        plan.tcp.shell.congestion.filter(|name| !machine.congestion.iter().any(|it| it == name.as_str()))
    {
        let all = machine.congestion.join(", ");
        notes.push(format!("tcp.congestion = \"{name}\": this kernel has {all}; sockets keep the system's"));
    }
    let connections = plan.limits.connections as u64;
    if let Some(files) = machine.files_max.filter(|files| *files < connections + OTHER_FILES) {
        notes.push(format!(
            "the process may have {files} files open (ulimit -Hn): too few for limits.connections = \
             {connections}"
        ));
    }
    let has_files = plan.disks.iter().any(|disk| matches!(disk.kind, DiskKind::File { .. }));
    let has_rdma = plan.listeners.iter().any(|listener| listener.transport == TransportKind::Rdma);
    let (unit, transfer) = (plan.limits.controller.bulk_unit, plan.limits.controller.transfer_bytes);
    if has_files && has_rdma && unit >= transfer {
        notes.push(format!(
            "limits.bulk_unit is {} and limits.transfer {}: no transfer is larger than the unit, so none is \
             cut in pieces, as with bulk_unit = 0",
            rounded(u64::from(unit)),
            rounded(u64::from(transfer))
        ));
    }
    let registered = plan.pool.bytes_per_core() * plan.reactor.cores.len() as u64;
    if let Some(lockable) = machine.lockable_bytes.filter(|lockable| has_files && *lockable < registered) {
        notes.push(format!(
            "the process may lock {} of memory (ulimit -l), less than the {} that busy file disks would \
             register with io_uring: buffers beyond it are passed one by one, which is slower",
            rounded(lockable),
            rounded(registered)
        ));
    }
}
