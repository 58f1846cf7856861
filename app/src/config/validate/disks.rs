//! Validates `[[disk]]` sections: the keys of each kind, and the files and devices at their paths.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nvme_spec::nqn::Nqn;
use spindle_nvme_initiator::OptimisticOptions;
use spindle_nvme_pcie::PciAddress;
use spindle_reactor::mem::Pages;
use spindle_target_disk::{CacheSpec, DelaySpec, PolicyKind};

use super::super::document::{Errors, Location, Node};
use super::super::machine::{self, BackingFile, Machine, PathState};
use super::super::path_probe::{PathFacts, Paths};
use super::super::plan::{ClusterPlan, DiskKind, DiskMedium, DiskPlan};
use super::super::schema::{DISK_KIND, Preset};
use super::super::tree::Located;
use super::subsystems::Unique;
use crate::size::Bytes;
use crate::text::quoted;

pub const NOT_SERVED: &str = "must be a kind that this version serves";

/// Media of the disks so far: location of the path in the configuration, and whether the disk is read-only.
type Media = HashMap<MediumKey, Vec<(Location, bool)>>;

/// By what two disks on one medium are found.
#[derive(PartialEq, Eq, Hash)]
enum MediumKey {
    Identity((u64, u64)),
    /// Also while no file is there, or another one than the open one.
    Path(PathBuf),
}

/// Validates the disks. One that was validated before ([`Node::disk`]) is not checked against the machine
/// again: its file may be gone or may not answer, which is no part of a change of something else.
///
/// With `may_be_away`, what is not at the path of a disk may come later.
pub fn plan(
    nodes: &[Arc<Node>],
    pages: Pages,
    machine: &Machine,
    may_be_away: bool,
    errors: &Errors,
) -> Vec<Arc<DiskPlan>> {
    let paths = Paths::ask(nodes.iter().filter_map(|node| asked_path(node)), may_be_away);
    let (mut names, mut media, mut far) = (Unique::default(), Media::new(), Unique::default());
    let mut disks = Vec::new();
    for node in nodes {
        let count = errors.borrow().len();
        if let (Some(name), Some(location)) = (node.text("name"), node.location_of("name"))
            && let Some(line) = names.insert_or_line(name, location)
        {
            location.refuse(errors, format!("also the name of the disk in line {line}"));
        }
        let known = node.disk.get().map(Arc::clone);
        let Some(plan) = known.or_else(|| new_disk(node, pages, machine, &paths, errors)) else {
            continue;
        };
        check_medium(node, &plan, &paths, &mut media, errors);
        check_far(node, &plan, &mut far, errors);
        if errors.borrow().len() == count {
            let _ = node.disk.set(Arc::clone(&plan));
        }
        disks.push(plan);
    }
    disks
}

/// Returns the path that validation asks about; `None` for a disk without a path, and for one that is known.
fn asked_path(node: &Node) -> Option<PathBuf> {
    match node.disk.get() {
        Some(plan) => plan.kind.path().filter(|_| is_medium_unknown(plan)).map(Path::to_owned),
        None => ["path", "ng"].into_iter().find_map(|key| node.value(key)),
    }
}

/// Whether the file was to be made when it was validated, and may be there by now.
fn is_medium_unknown(plan: &DiskPlan) -> bool {
    plan.medium.identity.get().is_none() && !plan.medium.is_away
}

fn new_disk(
    node: &Node,
    pages: Pages,
    machine: &Machine,
    paths: &Paths,
    errors: &Errors,
) -> Option<Arc<DiskPlan>> {
    let mut plan = disk(node, machine, paths, errors)?;
    add_cluster(node, &mut plan, errors);
    add_cache(node, &mut plan, pages, errors);
    add_delay(node, &mut plan, errors);
    Some(Arc::new(plan))
}

/// Refuses a namespace of a drive or far target that is already a disk.
fn check_far(node: &Node, plan: &DiskPlan, far: &mut Unique<((&'static str, String), u32)>, errors: &Errors) {
    let (key, place, namespace) = match &plan.kind {
        DiskKind::Nvme { address, namespace } => ("nvme", address.to_string(), *namespace),
        DiskKind::Remote { target, namespace, .. } => {
            ("nqn", format!("{} {}", target.address, target.nqn), *namespace)
        }
        DiskKind::Ram { .. } | DiskKind::Null | DiskKind::File { .. } | DiskKind::Ng { .. } => return,
    };
    if let Some(location) = node.location_of(key)
        && let Some(line) = far.insert_or_line(((key, place), namespace), location)
    {
        let words = format!("namespace {namespace} is also the disk in line {line}");
        location.refuse(errors, format!("{words}; two would destroy it"));
    }
}

/// Returns a disk without cache and delay.
fn disk(node: &Node, machine: &Machine, paths: &Paths, errors: &Errors) -> Option<DiskPlan> {
    let word = kind_of(node, errors)?;
    refuse_foreign_keys(node, &word, errors);
    refuse_missing_keys(node, &word, errors);
    let Some(kind) = DiskKind::named(&word) else {
        // Unreachable: the schema allows no other kind, which a test checks.
        node.refuse("kind", errors, NOT_SERVED);
        return None;
    };
    let mut disk = DiskPlan::blank(kind);
    node.fill(&mut disk);
    match &disk.kind {
        DiskKind::Ram { .. } | DiskKind::Null => {
            let (size, block_bytes) = size_and_block_bytes(node, errors);
            if size.is_none() && node.is_absent("size") {
                node.refuse("size", errors, format!("missing; a {word} disk needs one, like \"1GiB\""));
            }
            size.and(block_bytes)?;
        }
        DiskKind::File { .. } => {
            let (size, block_bytes) = size_and_block_bytes(node, errors);
            let (bytes, medium) = size_and_medium(node, size, block_bytes.unwrap_or(512), paths, errors)?;
            block_bytes?;
            (disk.bytes, disk.medium) = (bytes, medium);
        }
        DiskKind::Nvme { .. } => check_drive(node, machine, errors)?,
        DiskKind::Ng { .. } => disk.medium = ng_medium(node, paths, errors)?,
        DiskKind::Remote { .. } => check_target(node, errors)?,
    }
    Some(disk)
}

/// Returns capacity in bytes and block size. `None`: not set, or invalid. Checks that the capacity is a
/// multiple of the block size.
fn size_and_block_bytes(node: &Node, errors: &Errors) -> (Option<Located<u64>>, Option<u32>) {
    let block_bytes = node.find::<u32>("block_bytes").map(|at| at.value);
    let size = node.find::<u64>("size");
    if let (Some(size), Some(block_bytes)) = (&size, block_bytes)
        && !size.value.is_multiple_of(block_bytes.into())
    {
        size.refuse(errors, format!("must be a multiple of block_bytes = {block_bytes}"));
    }
    (size, block_bytes)
}

/// Returns the kind; without the key `kind`, the kind of the key `nvme` or `ng`. `None`: none of these keys
/// is set, or one is invalid; an error is recorded.
fn kind_of(node: &Node, errors: &Errors) -> Option<String> {
    let Some(kind) = node.find::<String>("kind") else {
        if let Some(kind) = ["nvme", "ng"].into_iter().find(|key| node.location_of(key).is_some()) {
            return Some(kind.to_owned());
        }
        if ["kind", "nvme", "ng"].iter().all(|key| node.is_absent(key)) {
            node.refuse("kind", errors, format!("missing; it must be {DISK_KIND}"));
        }
        return None;
    };
    Some(kind.value)
}

/// Checks the drive of an `nvme` disk. A drive without vfio-pci as its driver is an error. An absent drive is
/// an error only in `spindle check`; at the start the other disks are served. `None`: the address is invalid.
fn check_drive(node: &Node, machine: &Machine, errors: &Errors) -> Option<()> {
    let address = node.find::<PciAddress>("nvme")?;
    let found = match machine::probe_nvme_function(address.value) {
        Ok(false) if !machine.is_for_start => {
            Err("there is no such PCI function; spindle nvme list shows the drives".to_owned())
        }
        found => found,
    };
    if let Err(error) = found {
        address.refuse(errors, format!("must be a drive of this machine: {error}"));
    }
    Some(())
}

/// Returns the medium of an `ng` disk; `None` without a valid path.
fn ng_medium(node: &Node, paths: &Paths, errors: &Errors) -> Option<DiskMedium> {
    let path = node.find::<PathBuf>("ng")?;
    let facts = paths.facts(&path.value);
    let medium = match &facts.ng_block {
        // The generic device has the same identity as its block device: both are one medium.
        Ok(number) => DiskMedium::known((u64::MAX, *number)),
        // Also if there is no thread to ask (`WouldBlock`).
        Err(error)
            if paths.may_be_away
                && matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
                ) =>
        {
            DiskMedium::away()
        }
        Err(error) => {
            let words = format!("must be the generic device of an NVMe namespace, like /dev/ng0n1: {error}");
            path.refuse(errors, words);
            DiskMedium::default()
        }
    };
    if !medium.is_away {
        check_medium_id(node, &path.value, &facts, errors);
    }
    Some(medium)
}

/// Checks the keys of a `remote` disk, without contacting the far target. `None`: it has no valid address or
/// subsystem.
fn check_target(node: &Node, errors: &Errors) -> Option<()> {
    let (_, nqn) = (node.find::<SocketAddr>("address")?, node.find::<Nqn>("nqn")?);
    if nqn.value.is_discovery() {
        nqn.refuse(errors, "must be a subsystem with namespaces; this is the discovery service");
    }
    if node.get::<bool>("optimistic") {
        return Some(());
    }
    // The default may be written out, as in conf/spindle.toml.
    let OptimisticOptions { directory_pages, is_eager } = OptimisticOptions::default();
    let is_set = [
        ("optimistic_pages", node.get::<usize>("optimistic_pages") != directory_pages),
        ("optimistic_eager", node.get::<bool>("optimistic_eager") != is_eager),
    ];
    for (key, _) in is_set.into_iter().filter(|(_, is_set)| *is_set) {
        if let Some(location) = node.location_of(key) {
            location.refuse(errors, "has no effect without optimistic = true; set that, or leave it out");
        }
    }
    Some(())
}

/// Adds `[disk.cache]` of a disk, if there is such a section with a size.
fn add_cache(node: &Node, disk: &mut DiskPlan, pages: Pages, errors: &Errors) {
    let (section, kind) = (node.section("cache"), &disk.kind);
    if !section.is_given {
        return;
    }
    if !kind.can_have_cache() {
        let allowed = "a cache is for kind = \"file\", \"nvme\", \"ng\" or \"remote\"";
        let words = format!("{} disk has its data in memory already; {allowed}", with_article(kind.name()));
        section.location.refuse(errors, words);
    }
    let is_clustered = disk.cluster.is_some();
    match (section.get::<bool>("sole_writer"), matches!(kind, DiskKind::Remote { .. })) {
        (false, true) if !is_clustered => {
            let words = "must be true for a remote disk without [disk.cluster]: it says that only this \
                         process writes to the far namespace, as the cache does not see other writes";
            section.refuse("sole_writer", errors, words);
        }
        (true, true) if is_clustered => {
            let words =
                "has no effect with [disk.cluster], by which the cache sees other writes; leave it out";
            section.refuse("sole_writer", errors, words);
        }
        (true, false) => {
            let words =
                format!("{} disk has no such key; it is for kind = \"remote\"", with_article(kind.name()));
            section.refuse("sole_writer", errors, words);
        }
        _ => {}
    }
    if section.is_absent("size") {
        section.refuse("size", errors, "missing; a cache needs one, like \"1GiB\"");
    }
    let empty = CacheSpec::new(0, PolicyKind::S3Fifo, pages);
    disk.cache =
        section.find::<u64>("size").map(|_| CacheSpec { is_resident: true, is_paced: true, ..empty });
    section.fill(disk);
}

/// Adds `[disk.cluster]` of a disk, if there is such a section.
fn add_cluster(node: &Node, disk: &mut DiskPlan, errors: &Errors) {
    let section = node.section("cluster");
    if !section.is_given {
        return;
    }
    let refuse = |words: &str| section.location.refuse(errors, words);
    let has_agents = !section.is_absent("agents");
    match &disk.kind {
        DiskKind::Ram { .. } | DiskKind::File { .. } if !has_agents => {
            section.refuse("agents", errors, "missing; it names the hosts that may keep the disk in a cache");
        }
        DiskKind::Ram { .. } | DiskKind::File { .. } => {}
        DiskKind::Remote { .. } if has_agents => {
            section.refuse("agents", errors, "is a key of the far target's disk; leave it out");
        }
        DiskKind::Remote { is_optimistic: true, .. } => refuse("needs optimistic = false"),
        DiskKind::Remote { .. } if !node.section("cache").is_given => refuse("needs [disk.cache]"),
        DiskKind::Remote { .. } => {}
        DiskKind::Null | DiskKind::Nvme { .. } | DiskKind::Ng { .. } => {
            let kind = with_article(disk.kind.name());
            refuse(&format!("{kind} disk has none; it is for kind = \"ram\", \"file\" or \"remote\""));
        }
    }
    disk.cluster = Some(ClusterPlan::default());
    section.fill(disk);
    if section.find::<Vec<Nqn>>("agents").is_some_and(|agents| agents.value.is_empty()) {
        section.refuse("agents", errors, "is empty; it names the hosts that may keep the disk in a cache");
    }
}

/// Adds `[disk.delay]` of a disk, if there is such a section. One without any delay is an error.
fn add_delay(node: &Node, disk: &mut DiskPlan, errors: &Errors) {
    let section = node.section("delay");
    if !section.is_given {
        return;
    }
    disk.delay = Some(DelaySpec::default());
    section.fill(disk);
    // An invalid value already has its own error.
    if disk.delay == Some(DelaySpec::default()) && section.leaves.values().all(Option::is_some) {
        let words =
            "delays nothing; set latency_us or seek_us above 0, or bandwidth, or leave the section out";
        section.location.refuse(errors, words);
    }
}

/// Returns the kind with its article: `a file`, `an nvme`.
fn with_article(kind: &str) -> String {
    let article = if matches!(kind, "nvme" | "ng") { "an" } else { "a" };
    format!("{article} {kind}")
}

/// Refuses keys of other kinds, which would have no effect.
fn refuse_foreign_keys(node: &Node, kind: &str, errors: &Errors) {
    for key in node.keys.iter().filter(|key| !key.is_of(kind)) {
        let Some(location) = node.location_of(key.name) else { continue };
        let (name, disk) = (key.name, format!("{} disk", with_article(kind)));
        let words = match name {
            "size" | "block_bytes" => {
                let by = if kind == "remote" { "other target" } else { "drive" };
                format!("the {by} says the {name} of its namespace; leave it out")
            }
            "pages" => format!("{disk} has no memory of its own; it is for kind = \"ram\""),
            _ => {
                format!("{disk} has no {name}; it is for kind = {}", key.disk_kinds())
            }
        };
        location.refuse(errors, words);
    }
}

fn refuse_missing_keys(node: &Node, kind: &str, errors: &Errors) {
    for key in node.keys.iter().filter(|key| key.is_of(kind)) {
        let Preset::Needed(needs) = key.preset else { continue };
        if node.is_absent(key.name) {
            node.refuse(key.name, errors, format!("missing; {} disk needs {needs}", with_article(kind)));
        }
    }
}

/// Returns size in bytes and medium of a file disk; `None` after an error that leaves the size unknown.
fn size_and_medium(
    node: &Node,
    size: Option<Located<u64>>,
    block_bytes: u32,
    paths: &Paths,
    errors: &Errors,
) -> Option<(u64, DiskMedium)> {
    let path = node.find::<PathBuf>("path")?;
    let facts = paths.facts(&path.value);
    let state = match &facts.state {
        Ok(state) => state,
        Err(error) if paths.may_be_away && may_come(error) => {
            return Some((size.map_or(0, |size| size.value), DiskMedium::away()));
        }
        Err(error) => {
            path.refuse(errors, format!("must be a file or block device that can be looked at: {error}"));
            return None;
        }
    };
    refuse_poll(node, state, errors);
    let is_read_only: bool = node.get("read_only");
    let bytes = match state {
        PathState::Missing { has_directory } => {
            return missing_file(node, &path, size, *has_directory, paths.may_be_away, errors);
        }
        PathState::Other(what) => {
            path.refuse(errors, format!("must be a regular file or a block device; this is {what}"));
            return None;
        }
        PathState::Regular(medium) => {
            // A writable file grows to `size`, is never truncated. A read-only one is served up to `size`.
            let is_cut = size.as_ref().is_some_and(|size| size.value < medium.bytes) && !is_read_only;
            if let Some(size) = size.as_ref().filter(|_| is_cut) {
                let what =
                    format!("the file has {} bytes, and a smaller disk would cut off its end", medium.bytes);
                size.refuse(errors, format!("{what}; leave the size out, or shorten the file yourself"));
            }
            let bytes = size.as_ref().map_or(medium.bytes, |size| size.value);
            check_size_fits(&path, size.as_ref(), bytes, medium, is_read_only, errors);
            if bytes == 0 || !bytes.is_multiple_of(block_bytes.into()) {
                let what = format!(
                    "the file has {bytes} bytes, which are not a multiple of block_bytes = {block_bytes}"
                );
                path.refuse(errors, format!("{what}, at least one block; give it a size that is"));
            }
            bytes
        }
        PathState::Block(medium) => {
            let given = size.as_ref().map_or(0, |size| size.value);
            check_size_fits(&path, size.as_ref(), given, medium, true, errors);
            // A partial block at the end of the device is not served.
            size.as_ref().map_or(medium.bytes - medium.bytes % u64::from(block_bytes), |size| size.value)
        }
    };
    if let Err(error) = facts.may_open(is_read_only) {
        let verb = if is_read_only { "read" } else { "read and write" };
        path.refuse(errors, format!("must be one that this process may {verb}: {error}"));
    }
    check_medium_id(node, &path.value, &facts, errors);
    Some((bytes, medium_of(state)))
}

fn medium_of(state: &PathState) -> DiskMedium {
    match state {
        PathState::Regular(medium) | PathState::Block(medium) => DiskMedium::known(medium.identity),
        PathState::Missing { .. } | PathState::Other(_) => DiskMedium::default(),
    }
}

/// Checks the medium at `path` against `medium_id`; `snapshot` checks the open disk again. sysfs may lack
/// some names of an NVMe namespace. So a type (`eui.`, `uuid.`) without a name there is accepted here.
fn check_medium_id(node: &Node, path: &Path, facts: &PathFacts, errors: &Errors) {
    let Some(wanted) = node.given::<String>("medium_id") else { return };
    // An unreadable path already has its own error.
    let Ok(ids) = &facts.medium_ids else { return };
    let sort = |id: &str| id.split('.').next().map(str::to_owned);
    let is_namespace = ids.iter().any(|id| id.contains('/'));
    if is_namespace && !ids.iter().any(|id| sort(id) == sort(&wanted.value)) {
        return;
    }
    if !ids.contains(&wanted.value) {
        wanted.refuse(errors, medium_id_error(&path.display().to_string(), ids));
    }
}

/// Returns the error text for a medium whose names `ids` do not contain the configured `medium_id`.
pub fn medium_id_error(what: &str, ids: &[String]) -> String {
    if ids.is_empty() {
        return format!("{what} has no name of its own to be known by; leave the key out");
    }
    let ids = quoted(ids);
    format!("must be a name of the medium that is meant; {what} is another one, {ids}")
}

/// Refuses `poll` except on block devices with `direct`. Poll queues are known only once the disk is open.
fn refuse_poll(node: &Node, state: &PathState, errors: &Errors) {
    let Some(poll) = node.given::<bool>("poll").filter(|poll| poll.value) else { return };
    if !matches!(state, PathState::Block(_)) {
        poll.refuse(errors, "must be false for what is no block device");
    } else if !node.get::<bool>("direct") {
        poll.refuse(errors, "must be false with direct = false");
    }
}

/// Refuses a `size` beyond the end of a medium that cannot grow (`is_fixed`): a device or a read-only file.
fn check_size_fits(
    path: &Located<PathBuf>,
    size: Option<&Located<u64>>,
    bytes: u64,
    medium: &BackingFile,
    is_fixed: bool,
    errors: &Errors,
) {
    if let Some(size) = size.filter(|_| is_fixed && bytes > medium.bytes) {
        let path = path.value.display();
        size.refuse(
            errors,
            format!("{path} has {} bytes and does not grow; leave the size out", medium.bytes),
        );
    }
}

/// Records the medium of a disk. Refuses a medium that is already a disk, unless both disks are read-only.
fn check_medium(node: &Node, plan: &DiskPlan, paths: &Paths, media: &mut Media, errors: &Errors) {
    let (key, path, is_read_only) = match &plan.kind {
        DiskKind::File { path, is_read_only, .. } => ("path", path, *is_read_only),
        DiskKind::Ng { path, is_read_only } => ("ng", path, *is_read_only),
        DiskKind::Ram { .. } | DiskKind::Null | DiskKind::Nvme { .. } | DiskKind::Remote { .. } => return,
    };
    // A file that was made after it was validated.
    if is_medium_unknown(plan)
        && let Ok(state) = &paths.facts(path).state
        && let Some(identity) = medium_of(state).identity.get()
    {
        let _ = plan.medium.identity.set(*identity);
    }
    let Some(location) = node.location_of(key) else { return };
    let identity = plan.medium.identity.get().map(|identity| MediumKey::Identity(*identity));
    let mut other = None;
    for medium in identity.into_iter().chain([MediumKey::Path(path.clone())]) {
        let same = media.entry(medium).or_default();
        let is_refused = |(_, is_shared): &&(Location, bool)| !(*is_shared && is_read_only);
        other = other.or(same.iter().find(is_refused).map(|(other, _)| other.line));
        same.push((location.clone(), is_read_only));
    }
    if let Some(line) = other {
        location.refuse(errors, format!("also the path of the disk in line {line}; two would destroy it"));
    }
}

/// Whether a path at which `stat` or `open` fails may be right later; false where its text is wrong.
fn may_come(error: &io::Error) -> bool {
    !matches!(error.kind(), io::ErrorKind::NotADirectory | io::ErrorKind::InvalidInput)
}

/// Returns size and medium of a missing file; an error without `create`, unless it may be away.
fn missing_file(
    node: &Node,
    path: &Located<PathBuf>,
    size: Option<Located<u64>>,
    has_directory: bool,
    may_be_away: bool,
    errors: &Errors,
) -> Option<(u64, DiskMedium)> {
    let create = node.find::<bool>("create")?;
    if !create.value {
        if may_be_away {
            return Some((size.map_or(0, |size| size.value), DiskMedium::away()));
        }
        path.refuse(errors, "there is no such file; create = true with a size makes a sparse one");
        return None;
    }
    if !has_directory && !may_be_away {
        let directory = path.value.parent().unwrap_or(Path::new("/")).display();
        path.refuse(errors, format!("cannot be made: there is no directory {directory}"));
    }
    if let Some(wanted) = node.given::<String>("medium_id") {
        wanted.refuse(errors, "a file that is to be made has no name yet; leave the key out");
    }
    if size.is_none() && node.is_absent("size") {
        let size = Bytes::new(1 << 30);
        create.refuse(errors, format!("a file that is made needs a size as well, like size = \"{size}\""));
    }
    let medium = if has_directory { DiskMedium::default() } else { DiskMedium::away() };
    Some((size?.value, medium))
}
