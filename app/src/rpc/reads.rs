//! Methods that read the state of the target. Their results have the structure of SPDK's.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nvme_spec::nqn::Nqn;
use serde_json::{Value, json};
use spindle_nvme_transport::TransportKind;
use spindle_target::counters::IoTotals;
use spindle_target::shared::ControllerShared;
use spindle_target::snapshot::{AllowedHosts, Listener, Snapshot, Subsystem};
use spindle_target_disk::{CacheCounts, CacheUse, Disk, OptimisticReads};
use uuid::Uuid;

use super::Failure;
use super::edit::{LIST_DISKS, LIST_SUBSYSTEMS, unknown_name};
use super::params::Args;
use crate::config::DiskKind;
use crate::serve::view::{CoreView, Look};
use crate::text::did_you_mean;

type MethodResult = Result<Value, Failure>;

/// SPDK's `tick_rate`, ticks per second: times are in nanoseconds.
const TICK_RATE: u64 = 1_000_000_000;
/// NQN of the well-known discovery subsystem (Base 2.0 section 4.5).
const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

pub fn version(_: &Look<'_>, _: &Args) -> MethodResult {
    let number = |text: &str| text.parse::<u64>().unwrap_or(0);
    Ok(json!({
        "version": concat!("Spindle v", env!("CARGO_PKG_VERSION")),
        "fields": {
            "major": number(env!("CARGO_PKG_VERSION_MAJOR")),
            "minor": number(env!("CARGO_PKG_VERSION_MINOR")),
            "patch": number(env!("CARGO_PKG_VERSION_PATCH")),
            "suffix": env!("CARGO_PKG_VERSION_PRE"),
        },
    }))
}

pub fn reactors(look: &Look<'_>, _: &Args) -> MethodResult {
    let uptime = look.view.uptime_ns();
    let core = |(index, core): (usize, &CoreView)| {
        let busy = core.turns.busy().as_u64();
        json!({
            "lcore": core.cpu.unwrap_or(index),
            "busy": busy,
            "idle": uptime.saturating_sub(busy),
            "in_interrupt": false,
            "lw_threads": [{ "name": thread_name(index), "id": index + 1, "elapsed": uptime }],
        })
    };
    let cores: Vec<_> = look.view.cores.iter().enumerate().map(core).collect();
    Ok(json!({ "tick_rate": TICK_RATE, "pid": std::process::id(), "reactors": cores }))
}

pub fn framework_subsystems(_: &Look<'_>, _: &Args) -> MethodResult {
    Ok(json!([
        { "subsystem": "bdev", "depends_on": [] },
        { "subsystem": "nvmf", "depends_on": ["bdev"] },
    ]))
}

pub fn transports(look: &Look<'_>, args: &Args) -> MethodResult {
    let plan = &look.plan;
    let transports = look.view.transports().map(|kind| {
        let controller = &plan.limits.controller;
        json!({
            "trtype": trtype(kind),
            "max_queue_depth": controller.queue_entries,
            "max_io_qpairs_per_ctrlr": plan.limits.io_queues_max,
            "in_capsule_data_size": plan.tcp.conn.in_capsule_bytes,
            "max_io_size": controller.transfer_bytes,
            "abort_timeout_sec": 0,
        })
    });
    let transports: Vec<_> = transports.collect();
    let Some(wanted) = args.text("trtype") else { return Ok(json!(transports)) };
    let is_wanted = |it: &&Value| it["trtype"].as_str().is_some_and(|it| it.eq_ignore_ascii_case(wanted));
    match transports.iter().find(is_wanted) {
        Some(transport) => Ok(json!([transport])),
        None => Err(args.refuse("trtype", "must be a transport that is in use")),
    }
}

/// Returns SPDK's thread name for a core.
fn thread_name(core: usize) -> String {
    format!("reactor-{core}")
}

pub fn trtype(kind: TransportKind) -> String {
    kind.to_string().to_uppercase()
}

pub fn address(kind: TransportKind, address: SocketAddr) -> Value {
    json!({
        "trtype": trtype(kind),
        "adrfam": if address.is_ipv4() { "IPv4" } else { "IPv6" },
        "traddr": address.ip().to_string(),
        "trsvcid": address.port().to_string(),
    })
}

fn addresses<'a>(listeners: impl Iterator<Item = &'a Listener>) -> Vec<Value> {
    listeners.filter(|it| it.is_open).map(|it| address(it.transport, it.address)).collect()
}

fn subsystem_listeners<'a>(
    snapshot: &'a Snapshot,
    subsystem: &'a Subsystem,
) -> impl Iterator<Item = &'a Listener> {
    subsystem.listeners.iter().filter_map(|index| snapshot.listeners.get(*index))
}

pub fn subsystems(look: &Look<'_>, args: &Args) -> MethodResult {
    let Some(snapshot) = &look.snapshot else { return Ok(json!([])) };
    let own = snapshot.subsystems.iter().map(|subsystem| subsystem_json(snapshot, subsystem));
    let discovery = json!({
        "nqn": DISCOVERY_NQN,
        "subtype": "Discovery",
        "listen_addresses": addresses(snapshot.open_listeners()),
        "allow_any_host": true,
        "hosts": [],
    });
    let all: Vec<Value> = std::iter::once(discovery).chain(own).collect();
    let Some(wanted) = args.text("nqn") else { return Ok(json!(all)) };
    match all.iter().find(|it| it["nqn"] == wanted) {
        Some(subsystem) => Ok(json!([subsystem])),
        None => Err(no_subsystem(snapshot, args)),
    }
}

fn subsystem_json(snapshot: &Snapshot, subsystem: &Subsystem) -> Value {
    let hosts: Vec<_> = match &subsystem.hosts {
        AllowedHosts::Any => Vec::new(),
        AllowedHosts::Only(hosts) => hosts.iter().map(|host| json!({ "nqn": host.to_string() })).collect(),
    };
    let namespaces = subsystem.active().map(|namespace| {
        json!({
            "nsid": namespace.nsid,
            "bdev_name": namespace.source.name(),
            "name": namespace.source.name(),
            "nguid": Uuid::from_bytes(namespace.nguid).simple().to_string().to_uppercase(),
            "uuid": Uuid::from_bytes(namespace.uuid).to_string(),
        })
    });
    json!({
        "nqn": subsystem.nqn.to_string(),
        "subtype": "NVMe",
        "listen_addresses": addresses(subsystem_listeners(snapshot, subsystem)),
        "allow_any_host": subsystem.hosts == AllowedHosts::Any,
        "hosts": hosts,
        "serial_number": subsystem.serial,
        "model_number": subsystem.model,
        "max_namespaces": spindle_target::snapshot::NSID_MAX,
        "min_cntlid": subsystem.cntlid_range.0,
        "max_cntlid": subsystem.cntlid_range.1,
        "namespaces": namespaces.collect::<Vec<_>>(),
    })
}

fn no_subsystem(snapshot: &Snapshot, args: &Args) -> Failure {
    let names: Vec<String> = snapshot.subsystems.iter().map(|it| it.nqn.to_string()).collect();
    unknown_name(args, "nqn", "subsystem", &names, LIST_SUBSYSTEMS)
}

/// Returns the NQN in the parameter `nqn` and the controllers of that subsystem, in the order of CNTLID. An
/// error without such a subsystem, or if the target is shutting down.
fn subsystem_controllers(look: &Look<'_>, args: &Args) -> Result<(Nqn, Vec<Arc<ControllerShared>>), Failure> {
    let Some(snapshot) = &look.snapshot else {
        return Err(args.refuse("nqn", "the target is shutting down"));
    };
    let nqn = args.nqn("nqn").filter(|nqn| snapshot.subsystem(nqn).is_some());
    let nqn = nqn.ok_or_else(|| no_subsystem(snapshot, args))?;
    let mut controllers = look.view.registry.all();
    controllers.retain(|it| it.subsystem_nqn == nqn);
    controllers.sort_by_key(|it| it.cntlid);
    Ok((nqn, controllers))
}

pub fn controllers(look: &Look<'_>, args: &Args) -> MethodResult {
    let (_, controllers) = subsystem_controllers(look, args)?;
    let controllers = controllers.iter().map(|it| {
        json!({
            "cntlid": it.cntlid,
            "hostnqn": it.host_nqn.to_string(),
            "hostid": Uuid::from_bytes(it.host_id).to_string(),
            "num_io_qpairs": it.connected_queues(),
        })
    });
    Ok(json!(controllers.collect::<Vec<_>>()))
}

pub fn qpairs(look: &Look<'_>, args: &Args) -> MethodResult {
    let (_, controllers) = subsystem_controllers(look, args)?;
    let qpairs = controllers
        .iter()
        .flat_map(|it| it.connections().into_iter().map(move |queue| (it, queue)))
        .map(|(it, queue)| {
            json!({
                "cntlid": it.cntlid,
                "qid": queue.qid,
                "state": if it.is_ready() || queue.qid == 0 { "active" } else { "inactive" },
                "thread": thread_name(queue.core),
                "hostnqn": it.host_nqn.to_string(),
                "listen_address": address(queue.peer.transport, queue.peer.local),
                "peer_address": address(queue.peer.transport, queue.peer.remote),
            })
        });
    Ok(json!(qpairs.collect::<Vec<_>>()))
}

pub fn listeners(look: &Look<'_>, args: &Args) -> MethodResult {
    let (nqn, _) = subsystem_controllers(look, args)?;
    let Some(snapshot) = &look.snapshot else { return Ok(json!([])) };
    let Some(subsystem) = snapshot.subsystem(&nqn) else { return Ok(json!([])) };
    let listeners = addresses(subsystem_listeners(snapshot, subsystem)).into_iter().map(
        |address| json!({ "address": address, "ana_states": [{ "ana_group": 1, "ana_state": "optimized" }] }),
    );
    Ok(json!(listeners.collect::<Vec<_>>()))
}

pub fn stats(look: &Look<'_>, _: &Args) -> MethodResult {
    let controllers = look.view.registry.all();
    let groups = look.view.cores.iter().enumerate().map(|(core, _)| {
        let connections = look.view.loads.get(core).map_or(0, |load| load.load(Ordering::Relaxed));
        let admin = controllers.iter().filter(|it| it.admin_core == core).count();
        json!({
            "name": thread_name(core),
            "current_admin_qpairs": admin,
            "current_io_qpairs": connections.saturating_sub(admin),
            "pending_bdev_io": 0,
            "transports": TransportKind::ALL.map(|kind| json!({ "trtype": trtype(kind) })),
        })
    });
    Ok(json!({ "tick_rate": TICK_RATE, "poll_groups": groups.collect::<Vec<_>>() }))
}

pub fn referrals(look: &Look<'_>, _: &Args) -> MethodResult {
    let Some(snapshot) = &look.snapshot else { return Ok(json!([])) };
    let referrals = snapshot.referrals.iter().map(|referral| {
        json!({
            "address": address(referral.transport, referral.address),
            "secure_channel": false,
            "subnqn": DISCOVERY_NQN,
            "allow_any_host": true,
            "hosts": [],
        })
    });
    Ok(json!(referrals.collect::<Vec<_>>()))
}

/// The open disks of the parameters `name` and `names`, or all without them; an error for an unknown name.
fn disks(look: &Look<'_>, args: &Args) -> Result<Vec<Arc<dyn Disk>>, Failure> {
    let Some(snapshot) = &look.snapshot else { return Ok(Vec::new()) };
    let all: Vec<_> = snapshot.disks.iter().flatten().cloned().collect();
    let named = args.text("name").map(|name| ("name", name));
    let wanted: Vec<_> = named.into_iter().chain(args.texts("names").map(|name| ("names", name))).collect();
    if wanted.is_empty() {
        return Ok(all);
    }
    let find = |(field, name): (&str, &str)| {
        let found = all.iter().find(|disk| disk.name() == name).cloned();
        let meant = || did_you_mean(name, all.iter().map(|disk| disk.name()), || LIST_DISKS.to_owned());
        found.ok_or_else(|| args.refuse(field, format!("there is no disk {name:?}; {}", meant())))
    };
    wanted.into_iter().map(find).collect()
}

pub fn bdevs(look: &Look<'_>, args: &Args) -> MethodResult {
    let snapshot = &look.snapshot;
    let namespaces = || snapshot.iter().flat_map(|it| &it.subsystems).flat_map(|it| it.active());
    let describe = |disk: &Arc<dyn Disk>| {
        let geometry = disk.geometry();
        let namespace = namespaces().find(|it| it.source.name() == disk.name());
        json!({
            "name": disk.name(),
            "aliases": [],
            "product_name": DiskKind::named(disk.kind()).map_or("NVMe disk", |kind| kind.product_name()),
            "block_size": geometry.block_bytes,
            "num_blocks": geometry.block_count,
            "uuid": namespace.map(|it| Uuid::from_bytes(it.uuid).to_string()),
            "claimed": namespace.is_some(),
            "claim_type": namespace.map(|_| "exclusive_write"),
            "zoned": false,
            "supported_io_types": {
                "read": true, "write": !geometry.is_read_only, "unmap": geometry.can_deallocate,
                "write_zeroes": !geometry.is_read_only, "flush": true, "compare": true,
                "compare_and_write": geometry.can_compare_and_write,
            },
            "driver_specific": { "spindle": { "kind": disk.kind(), "bytes_used": disk.usage().bytes_used } },
        })
    };
    Ok(json!(disks(look, args)?.iter().map(describe).collect::<Vec<_>>()))
}

/// Returns the counters of a disk or of a core. Latencies are not measured, and Copies are not counted.
fn io_counters((key, of): (&str, Value), totals: IoTotals) -> Value {
    let mut counters = json!({
        key: of,
        "bytes_read": totals.units_read.saturating_mul(512),
        "num_read_ops": totals.reads,
        "bytes_written": totals.units_written.saturating_mul(512),
        "num_write_ops": totals.writes,
        "bytes_unmapped": totals.units_unmapped.saturating_mul(512),
        "num_unmap_ops": totals.unmaps,
        "bytes_copied": 0,
        "num_copy_ops": 0,
        "num_media_errors": totals.media_errors,
        "busy_ticks": totals.busy_ns,
    });
    for operation in ["read", "write", "unmap", "copy"] {
        for bound in ["", "max_", "min_"] {
            counters[format!("{bound}{operation}_latency_ticks")] = 0.into();
        }
    }
    counters
}

/// Returns state and counters of a cache. `size` and `used` are in bytes; the counters are in pages of 4 KiB.
fn cache(used: &CacheUse) -> Value {
    let mut object = cache_counters(&used.counts);
    let counts = &used.counts;
    for (key, value) in [
        ("size", json!(used.bytes)),
        ("used", json!(used.used_bytes)),
        ("usable", json!(used.usable_bytes)),
        ("resident_after_ms", json!(used.resident_after.map(|it| it.as_millis()))),
        ("policy", json!(used.policy.name())),
        ("mode", json!(used.mode.name())),
        ("read_ahead_wasted", json!(counts.wasted)),
        ("written", json!(counts.written)),
        ("sampled", json!(counts.sampled)),
        ("sampled_hits_half_size", json!(counts.half)),
        ("sampled_hits_this_size", json!(counts.same)),
        ("sampled_hits_twice_size", json!(counts.twice)),
    ] {
        object[key] = value;
    }
    object
}

/// Returns the counters that a cache has in total and for each host.
fn cache_counters(counts: &CacheCounts) -> Value {
    json!({
        "hits": counts.hits,
        "misses": counts.misses,
        "ghost_hits": counts.ghost_hits,
        "joined": counts.joined,
        "passed": counts.passed,
        "over_budget": counts.over_budget,
        "evictions": counts.evictions,
        "doomed": counts.doomed,
        "read_ahead": counts.ahead,
        "read_ahead_useful": counts.useful,
        "read_ahead_late": counts.late,
    })
}

/// Returns the counters of a cache by host. Host 0, without `hostnqn`, counts events without a known host,
/// and events of hosts that the cache does not count separately.
fn cache_by_host(look: &Look<'_>, used: &CacheUse) -> Value {
    let known = look.view.registry.hosts();
    let describe = |(number, counts): &(u16, CacheCounts)| {
        let mut host = cache_counters(counts);
        if let Some((nqn, id)) = usize::from(*number).checked_sub(1).and_then(|at| known.get(at)) {
            host["hostnqn"] = json!(nqn.to_string());
            host["hostid"] = json!(Uuid::from_bytes(*id).to_string());
        }
        host
    };
    json!(used.by_host.iter().map(describe).collect::<Vec<_>>())
}

pub fn iostat(look: &Look<'_>, args: &Args) -> MethodResult {
    let snapshot = &look.snapshot;
    let subsystems = || snapshot.iter().flat_map(|it| &it.subsystems);
    let namespaces = || subsystems().flat_map(|it| it.active().map(move |namespace| (&it.nqn, namespace)));
    let describe = |disk: &Arc<dyn Disk>| {
        let found = namespaces().find(|(_, it)| it.source.name() == disk.name());
        let counters = found.map(|(_, it)| &it.counters);
        if args.flag("per_channel") {
            let cores = counters.into_iter().flat_map(|it| it.by_core()).enumerate();
            let channels = cores.map(|(core, totals)| io_counters(("thread_id", json!(core + 1)), totals));
            return json!({ "name": disk.name(), "channels": channels.collect::<Vec<_>>() });
        }
        let totals = counters.map_or_else(IoTotals::default, |it| it.totals());
        let mut bdev = io_counters(("name", json!(disk.name())), totals);
        if let Some((nqn, namespace)) = found {
            bdev["namespace"] = json!({ "nqn": nqn.to_string(), "nsid": namespace.nsid });
        }
        if let Some(OptimisticReads { accepted, rejected, attached }) = disk.optimistic_reads() {
            bdev["optimistic"] =
                json!({ "accepted": accepted, "rejected": rejected, "attached_queues": attached });
        }
        if let Some(used) = disk.cache() {
            bdev["cache"] = cache(&used);
            if args.flag("by_host") {
                bdev["cache"]["hosts"] = cache_by_host(look, &used);
            }
        }
        bdev
    };
    let bdevs: Vec<_> = disks(look, args)?.iter().map(describe).collect();
    Ok(json!({ "tick_rate": TICK_RATE, "ticks": look.view.uptime_ns(), "bdevs": bdevs }))
}

/// Log levels as (SPDK's name, name in the configuration).
pub const LEVELS: [(&str, &str); 5] =
    [("ERROR", "error"), ("WARNING", "warn"), ("NOTICE", "info"), ("INFO", "debug"), ("DEBUG", "trace")];

pub fn log_level(look: &Look<'_>, _: &Args) -> MethodResult {
    let level = look.plan.log.level.as_str();
    Ok(json!(LEVELS.iter().find(|(_, own)| own.eq_ignore_ascii_case(level)).map(|(name, _)| name)))
}
