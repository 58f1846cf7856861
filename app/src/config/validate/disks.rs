//! Disks: what each kind needs, and what is at their paths.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nvme_spec::nqn::Nqn;
use spindle_disk::{CacheMode, PolicyKind, medium_id};
use spindle_initiator::{Host, Target};
use spindle_nvme_pcie::PciAddress;
use spindle_reactor::mem::Pages;

use super::super::document::{Errors, Location, Node};
use super::super::machine::{self, BackingFile, Machine, PathState};
use super::super::plan::{CachePlan, DelayPlan, DiskKind, DiskPlan};
use super::super::schema;
use super::super::tree::At;
use crate::size::Bytes;

/// Why a kind without a plan is refused.
pub const NOT_SERVED: &str = "must be a kind that this version serves";

/// The disks of the file.
pub fn plan(nodes: &[Node], machine: &Machine, errors: &Errors) -> Vec<DiskPlan> {
    let mut names: Vec<At<String>> = Vec::new();
    let mut media: Vec<((u64, u64), Location, bool)> = Vec::new();
    let mut drives: Vec<((PciAddress, u32), Location)> = Vec::new();
    let mut remotes: Vec<((SocketAddr, Nqn, u32), Location)> = Vec::new();
    let mut disks = Vec::new();
    for node in nodes {
        if let Some(name) = node.find::<String>("name") {
            if let Some(other) = names.iter().find(|other| other.value == name.value) {
                name.location
                    .refuse(errors, format!("also the name of the disk in line {}", other.location.line));
            }
            names.push(name);
        }
        let mut plan = disk(node, machine, &mut media, errors);
        if let Some(plan) = &mut plan {
            plan.cache = cache(node, &plan.kind, errors);
            plan.delay = delay(node, errors);
        }
        if let Some(DiskKind::Nvme { address, namespace }) = plan.as_ref().map(|plan| &plan.kind)
            && let Some(location) = node.given::<PciAddress>("nvme").map(|at| at.location)
        {
            if let Some((_, other)) = drives.iter().find(|(drive, _)| *drive == (*address, *namespace)) {
                let line = other.line;
                let words =
                    format!("namespace {namespace} is also the disk in line {line}; two would destroy it");
                location.refuse(errors, words);
            }
            drives.push(((*address, *namespace), location));
        }
        if let Some(DiskKind::Remote { target, namespace, .. }) = plan.as_ref().map(|plan| &plan.kind)
            && let Some(location) = node.given::<Nqn>("nqn").map(|at| at.location)
        {
            let key = (target.address, target.nqn, *namespace);
            if let Some((_, other)) = remotes.iter().find(|(known, _)| *known == key) {
                let line = other.line;
                let words = format!("its namespace {namespace} is also the disk in line {line}");
                location.refuse(errors, format!("{words}; two would destroy it"));
            }
            remotes.push((key, location));
        }
        disks.extend(plan);
    }
    disks
}

fn disk(
    node: &Node,
    machine: &Machine,
    media: &mut Vec<((u64, u64), Location, bool)>,
    errors: &Errors,
) -> Option<DiskPlan> {
    let kind = kind_of(node, errors)?;
    refuse_foreign_keys(node, &kind, errors);
    match kind.as_str() {
        "ram" => {
            let pages = if node.get("huge_pages") { Pages::Huge } else { Pages::Transparent };
            memory(node, DiskKind::Ram { pages, is_populated: node.get("populate") }, errors)
        }
        "null" => memory(node, DiskKind::Null, errors),
        "file" => file_disk(node, media, errors),
        "nvme" => nvme(node, machine, errors),
        "ng" => ng(node, media, errors),
        "remote" => remote(node, errors),
        // No file reaches it: the schema refuses every other word. A test holds this list to the schema.
        _ => {
            node.location.inside("kind").refuse(errors, NOT_SERVED);
            None
        }
    }
}

/// The capacity, a multiple of the block size, and the block size. `None`: not given, or refused.
fn shape(node: &Node, errors: &Errors) -> (Option<At<u64>>, Option<u32>) {
    let block_bytes = node.find::<u32>("block_bytes").map(|at| at.value);
    let size = node.find::<u64>("size");
    if let (Some(size), Some(block_bytes)) = (&size, block_bytes)
        && !size.value.is_multiple_of(block_bytes.into())
    {
        size.location.refuse(errors, format!("must be a multiple of block_bytes = {block_bytes}"));
    }
    (size, block_bytes)
}

/// A disk of this kind, bytes of a block and capacity, with nothing in front of it yet.
fn bare(node: &Node, (block_bytes, bytes): (u32, u64), kind: DiskKind) -> DiskPlan {
    let (name, medium_id) = (node.get("name"), medium_id(node));
    DiskPlan { name, block_bytes, bytes, kind, medium_id, cache: None, delay: None }
}

/// A disk without a medium: `ram` or `null`.
fn memory(node: &Node, kind: DiskKind, errors: &Errors) -> Option<DiskPlan> {
    let (size, block_bytes) = shape(node, errors);
    if size.is_none() && node.is_absent("size") {
        let words = format!("missing; a {} disk needs one, like \"1GiB\"", kind.name());
        node.location.inside("size").refuse(errors, words);
    }
    Some(bare(node, (block_bytes?, size?.value), kind))
}

/// A regular file or a block device.
fn file_disk(
    node: &Node,
    media: &mut Vec<((u64, u64), Location, bool)>,
    errors: &Errors,
) -> Option<DiskPlan> {
    let (size, block_bytes) = shape(node, errors);
    let (path, bytes) = file(node, size, block_bytes.unwrap_or(512), media, errors)?;
    let (is_read_only, create) = (node.get("read_only"), node.get("create"));
    let (is_direct, is_polled) = (node.get("direct"), node.get("poll"));
    let kind = DiskKind::File { path, is_read_only, create, is_direct, is_polled };
    Some(bare(node, (block_bytes?, bytes), kind))
}

/// The kind, which a key that only one kind has says as well.
fn kind_of(node: &Node, errors: &Errors) -> Option<String> {
    let Some(kind) = node.find::<String>("kind") else {
        if node.given::<PciAddress>("nvme").is_some() {
            return Some("nvme".to_owned());
        }
        if node.given::<PathBuf>("ng").is_some() {
            return Some("ng".to_owned());
        }
        if ["kind", "nvme", "ng"].iter().all(|key| node.is_absent(key)) {
            let words = "missing; it must be \"ram\", \"null\", \"file\", \"nvme\", \"ng\" or \"remote\"";
            node.location.inside("kind").refuse(errors, words);
        }
        return None;
    };
    Some(kind.value)
}

/// A namespace of a drive. What it is is known when it is open. A drive that is missing does not keep the
/// other disks from being served; `spindle check` reports it.
fn nvme(node: &Node, machine: &Machine, errors: &Errors) -> Option<DiskPlan> {
    if node.is_absent("nvme") {
        let words = "missing; an nvme disk needs the PCI address of its drive, like \"0000:01:00.0\"";
        node.location.inside("nvme").refuse(errors, words);
    }
    let address = node.find::<PciAddress>("nvme")?;
    let found = match machine::look_at_function(address.value) {
        Ok(false) if !machine.is_to_start => {
            Err("there is no such PCI function; spindle nvme list shows the drives".to_owned())
        }
        found => found,
    };
    if let Err(error) = found {
        address.location.refuse(errors, format!("must be a drive of this machine: {error}"));
    }
    let kind = DiskKind::Nvme { address: address.value, namespace: node.get("namespace") };
    Some(bare(node, (0, 0), kind))
}

/// A namespace of a drive with the kernel. What it is is known when it is open.
fn ng(node: &Node, media: &mut Vec<((u64, u64), Location, bool)>, errors: &Errors) -> Option<DiskPlan> {
    if node.is_absent("ng") {
        let words = "missing; an ng disk needs the generic device of its namespace, like \"/dev/ng0n1\"";
        node.location.inside("ng").refuse(errors, words);
    }
    let path = node.find::<PathBuf>("ng")?;
    let is_read_only: bool = node.get("read_only");
    match spindle_disk::ng::look_at(&path.value) {
        // The block device and the generic one are one medium.
        Ok(location) => check_medium(&path, (u64::MAX, location.block_number), is_read_only, media, errors),
        Err(error) => {
            let words = format!("must be the generic device of an NVMe namespace, like /dev/ng0n1: {error}");
            path.location.refuse(errors, words);
        }
    }
    check_medium_id(node, &path.value, errors);
    let kind = DiskKind::Ng { path: path.value, is_read_only };
    Some(bare(node, (0, 0), kind))
}

/// A namespace of another target. What it is is known when it is open. One that is away does not keep the
/// other disks from being served.
fn remote(node: &Node, errors: &Errors) -> Option<DiskPlan> {
    for (key, example) in [("address", "192.0.2.7:4420"), ("nqn", "nqn.2026-01.io.spindle:far")] {
        if node.is_absent(key) {
            let words = format!("missing; a remote disk needs that of the other target, like \"{example}\"");
            node.location.inside(key).refuse(errors, words);
        }
    }
    let (address, nqn) = (node.find::<SocketAddr>("address")?, node.find::<Nqn>("nqn")?);
    if nqn.value.is_discovery() {
        nqn.location.refuse(errors, "must be a subsystem with namespaces; this is the discovery service");
    }
    let host =
        node.given::<Nqn>("host_nqn").map_or_else(Host::of_this_machine, |at| Host::from_nqn(at.value));
    let transport = super::subsystems::transport(node);
    let target = Target { transport, address: address.value, nqn: nqn.value, host };
    let ms = |key| Duration::from_millis(node.get::<u64>(key));
    let kind = DiskKind::Remote {
        target: Box::new(target),
        namespace: node.get("namespace"),
        command_timeout: ms("command_timeout_ms"),
        quiesce: ms("quiesce_ms"),
    };
    Some(bare(node, (0, 0), kind))
}

/// The cache in front of a disk of this kind.
fn cache(node: &Node, kind: &DiskKind, errors: &Errors) -> Option<CachePlan> {
    let section = node.section("cache");
    if !section.is_given {
        return None;
    }
    let refusal = match kind {
        DiskKind::Ram { .. } | DiskKind::Null => Some("has its data in memory already"),
        DiskKind::Remote { .. } | DiskKind::File { .. } | DiskKind::Ng { .. } | DiskKind::Nvme { .. } => None,
    };
    if let Some(why) = refusal {
        let allowed = "a cache is for kind = \"file\", \"nvme\", \"ng\" or \"remote\"";
        let words = format!("a {} disk {why}; {allowed}", kind.name());
        section.location.refuse(errors, words);
    }
    let is_remote = matches!(kind, DiskKind::Remote { .. });
    match (section.get::<bool>("sole_writer"), is_remote) {
        (false, true) => {
            let words = "must be true for a remote disk: it says that only this process writes to the far \
                         namespace, as the cache does not see other writes";
            section.location.inside("sole_writer").refuse(errors, words);
        }
        (true, false) => {
            let words = format!("a {} disk has no such key; it is for kind = \"remote\"", kind.name());
            section.location.inside("sole_writer").refuse(errors, words);
        }
        _ => {}
    }
    if section.is_absent("size") {
        section.location.inside("size").refuse(errors, "missing; a cache needs one, like \"1GiB\"");
    }
    let policy = match section.get::<String>("policy").as_str() {
        "lru" => PolicyKind::Lru,
        _ => PolicyKind::S3Fifo,
    };
    let mode = match section.get::<String>("mode").as_str() {
        "exclusive" => CacheMode::Exclusive,
        _ => CacheMode::Shared,
    };
    // At most READ_AHEAD_BYTES_MAX.
    let read_ahead = u32::try_from(section.get::<u64>("read_ahead")).unwrap_or(0);
    Some(CachePlan { bytes: section.find::<u64>("size")?.value, policy, mode, read_ahead })
}

/// How slow the disk is made. A section that makes it no slower is a mistake.
fn delay(node: &Node, errors: &Errors) -> Option<DelayPlan> {
    let section = node.section("delay");
    if !section.is_given {
        return None;
    }
    let keys = ["latency_us", "bandwidth", "seek_us"];
    let values = keys.map(|key| section.find::<u64>(key).map(|at| at.value));
    let [latency_us, bandwidth, seek_us] = values;
    let (latency_us, seek_us) = (latency_us.unwrap_or(0), seek_us.unwrap_or(0));
    // A wrong value is refused for itself.
    let is_wrong = keys.iter().zip(values).any(|(key, value)| value.is_none() && !section.is_absent(key));
    if latency_us == 0 && seek_us == 0 && bandwidth.is_none() && !is_wrong {
        let words =
            "delays nothing; set latency_us or seek_us above 0, or bandwidth, or leave the section out";
        section.location.refuse(errors, words);
    }
    Some(DelayPlan { latency_us, bandwidth, seek_us })
}

/// Keys that the file gives and that this kind has no use for: the user expects an effect of them.
fn refuse_foreign_keys(node: &Node, kind: &str, errors: &Errors) {
    let flag = |key| node.given::<bool>(key).map(|at| at.location);
    let path = |key| node.given::<PathBuf>(key).map(|at| at.location);
    let text = |key| node.given::<String>(key).map(|at| at.location);
    let nqn = |key| node.given::<Nqn>(key).map(|at| at.location);
    let number = |key| node.given::<u64>(key).map(|at| at.location);
    for (key, location, of) in [
        ("path", path("path"), &["file"][..]),
        ("populate", flag("populate"), &["ram"]),
        ("read_only", flag("read_only"), &["file", "ng"]),
        ("create", flag("create"), &["file"]),
        ("direct", flag("direct"), &["file"]),
        ("poll", flag("poll"), &["file"]),
        ("ng", path("ng"), &["ng"]),
        ("medium_id", text("medium_id"), &["file", "nvme", "ng", "remote"]),
        ("nvme", node.given::<PciAddress>("nvme").map(|at| at.location), &["nvme"]),
        ("namespace", node.given::<u32>("namespace").map(|at| at.location), &["nvme", "remote"]),
        ("address", node.given::<SocketAddr>("address").map(|at| at.location), &["remote"]),
        ("transport", text("transport"), &["remote"]),
        ("nqn", nqn("nqn"), &["remote"]),
        ("host_nqn", nqn("host_nqn"), &["remote"]),
        ("command_timeout_ms", number("command_timeout_ms"), &["remote"]),
        ("quiesce_ms", number("quiesce_ms"), &["remote"]),
    ] {
        if let Some(location) = location.filter(|_| !of.contains(&kind)) {
            let of: Vec<String> = of.iter().map(|kind| format!("{kind:?}")).collect();
            let of = of.join(" or ");
            location.refuse(errors, format!("a {kind} disk has no {key}; it is for kind = {of}"));
        }
    }
    let of_drive_itself = [
        ("size", node.given::<u64>("size").map(|at| at.location)),
        ("block_bytes", node.given::<u32>("block_bytes").map(|at| at.location)),
    ];
    for (key, location) in of_drive_itself {
        let by = if kind == "remote" { "other target" } else { "drive" };
        if let Some(location) = location.filter(|_| ["nvme", "ng", "remote"].contains(&kind)) {
            location.refuse(errors, format!("the {by} says the {key} of its namespace; leave it out"));
        }
    }
    if let Some(huge_pages) = node.given::<bool>("huge_pages").filter(|_| kind != "ram") {
        huge_pages
            .location
            .refuse(errors, format!("a {kind} disk has no memory of its own; it is for kind = \"ram\""));
    }
}

/// Path and size of a file disk, when there will be one.
fn file(
    node: &Node,
    size: Option<At<u64>>,
    block_bytes: u32,
    media: &mut Vec<((u64, u64), Location, bool)>,
    errors: &Errors,
) -> Option<(PathBuf, u64)> {
    if node.is_absent("path") {
        node.location
            .inside("path")
            .refuse(errors, "missing; a file disk needs one, like \"/var/lib/spindle/disk0.img\"");
    }
    let path = node.find::<PathBuf>("path")?;
    let state = match machine::look_at(&path.value) {
        Ok(state) => state,
        Err(error) => {
            path.location
                .refuse(errors, format!("must be a file or block device that can be looked at: {error}"));
            return None;
        }
    };
    refuse_poll(node, &state, errors);
    let is_read_only: bool = node.get("read_only");
    let bytes = match &state {
        PathState::Missing { has_directory } => return missing(node, &path, size, *has_directory, errors),
        PathState::Other(what) => {
            path.location.refuse(errors, format!("must be a regular file or a block device; this is {what}"));
            return None;
        }
        PathState::Regular(medium) => {
            // Writable files grow to the size that is asked for and are never cut; others are served up to
            // it.
            let is_cut = size.as_ref().is_some_and(|size| size.value < medium.bytes) && !is_read_only;
            if let Some(size) = size.as_ref().filter(|_| is_cut) {
                let what =
                    format!("the file has {} bytes, and a smaller disk would cut off its end", medium.bytes);
                size.location
                    .refuse(errors, format!("{what}; leave the size out, or shorten the file yourself"));
            }
            let bytes = size.as_ref().map_or(medium.bytes, |size| size.value);
            check_end(&path, size.as_ref(), bytes, medium, is_read_only, errors);
            if bytes == 0 || !bytes.is_multiple_of(block_bytes.into()) {
                let what = format!(
                    "the file has {bytes} bytes, which are not a multiple of block_bytes = {block_bytes}"
                );
                path.location.refuse(errors, format!("{what}, at least one block; give it a size that is"));
            }
            bytes
        }
        PathState::Block(medium) => {
            check_end(&path, size.as_ref(), size.as_ref().map_or(0, |size| size.value), medium, true, errors);
            // A device may end with a part of a block, which no host sees.
            size.as_ref().map_or(medium.bytes - medium.bytes % u64::from(block_bytes), |size| size.value)
        }
    };
    if let Err(error) = machine::may_open(&path.value, is_read_only) {
        let verb = if is_read_only { "read" } else { "read and write" };
        path.location.refuse(errors, format!("must be one that this process may {verb}: {error}"));
    }
    check_medium_id(node, &path.value, errors);
    if let PathState::Regular(medium) | PathState::Block(medium) = state {
        check_medium(&path, medium.identity, is_read_only, media, errors);
    }
    Some((path.value, bytes))
}

fn medium_id(node: &Node) -> Option<String> {
    node.given::<String>("medium_id").map(|at| at.value)
}

/// What is at the path is the medium that was meant. Looked at again when it is open: then a namespace may
/// have names that the kernel does not tell, so one of another sort is no reason to refuse it here.
fn check_medium_id(node: &Node, path: &Path, errors: &Errors) {
    let Some(wanted) = node.given::<String>("medium_id") else { return };
    // What cannot be looked at is refused for that.
    let Ok(ids) = medium_id::at(path) else { return };
    let sort = |id: &str| id.split('.').next().map(str::to_owned);
    let is_namespace = ids.iter().any(|id| id.contains('/'));
    if is_namespace && !ids.iter().any(|id| sort(id) == sort(&wanted.value)) {
        return;
    }
    if !ids.contains(&wanted.value) {
        wanted.location.refuse(errors, medium_refusal(&path.display().to_string(), &ids));
    }
}

/// What a medium is instead of the one that was meant.
pub fn medium_refusal(what: &str, ids: &[String]) -> String {
    if ids.is_empty() {
        return format!("{what} has no name of its own to be known by; leave the key out");
    }
    let ids = schema::alternatives(ids.iter().map(|id| format!("{id:?}")));
    format!("must be a name of the medium that is meant; {what} is another one, {ids}")
}

/// Polling works on block devices, past the page cache. Whether the device has queues for it shows when it is
/// open.
fn refuse_poll(node: &Node, state: &PathState, errors: &Errors) {
    let Some(poll) = node.given::<bool>("poll").filter(|poll| poll.value) else { return };
    if !matches!(state, PathState::Block(_)) {
        poll.location.refuse(errors, "must be false for what is no block device");
    } else if !node.get::<bool>("direct") {
        poll.location.refuse(errors, "must be false with direct = false");
    }
}

/// A disk does not reach beyond what it is on, where that cannot grow.
fn check_end(
    path: &At<PathBuf>,
    size: Option<&At<u64>>,
    bytes: u64,
    medium: &BackingFile,
    is_fixed: bool,
    errors: &Errors,
) {
    if let Some(size) = size.filter(|_| is_fixed && bytes > medium.bytes) {
        let path = path.value.display();
        size.location.refuse(
            errors,
            format!("{path} has {} bytes and does not grow; leave the size out", medium.bytes),
        );
    }
}

/// One medium is one disk; read-only disks may share it.
fn check_medium(
    path: &At<PathBuf>,
    identity: (u64, u64),
    is_read_only: bool,
    media: &mut Vec<((u64, u64), Location, bool)>,
    errors: &Errors,
) {
    let other =
        media.iter().find(|(other, _, is_shared)| *other == identity && !(*is_shared && is_read_only));
    if let Some((_, other, _)) = other {
        path.location.refuse(
            errors,
            format!("also the path of the disk in line {}; two would destroy it", other.line),
        );
    }
    media.push((identity, path.location.clone(), is_read_only));
}

fn missing(
    node: &Node,
    path: &At<PathBuf>,
    size: Option<At<u64>>,
    has_directory: bool,
    errors: &Errors,
) -> Option<(PathBuf, u64)> {
    let create = node.find::<bool>("create")?;
    if !create.value {
        path.location.refuse(errors, "there is no such file; create = true with a size makes a sparse one");
        return None;
    }
    if !has_directory {
        let directory = path.value.parent().unwrap_or(Path::new("/")).display();
        path.location.refuse(errors, format!("cannot be made: there is no directory {directory}"));
    }
    if let Some(wanted) = node.given::<String>("medium_id") {
        wanted.location.refuse(errors, "a file that is to be made has no name yet; leave the key out");
    }
    if size.is_none() && node.is_absent("size") {
        let size = Bytes::new(1 << 30);
        create
            .location
            .refuse(errors, format!("a file that is made needs a size as well, like size = \"{size}\""));
    }
    Some((path.value.clone(), size?.value))
}
