//! Memory use of a plan, itemized by reason. `spindle check` prints the items; validation compares their
//! totals with the machine's memory.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use nvme_spec::fabrics::ADMIN_QUEUE_ENTRIES;
use spindle_nvme_rdma::controller::CAPSULE_BYTES;
use spindle_nvme_tcp::controller::Conn;
use spindle_nvme_tcp::shell;
use spindle_nvme_transport::TransportKind;
use spindle_reactor::mem::Pages;
use spindle_target::core::TargetCore;
use spindle_target_card::Cluster;
use spindle_target_disk::RamSpec;
use spindle_target_remote::RemoteDisk;

use super::plan::{DiskKind, DiskPlan, Plan};
use crate::size::{Bytes, rounded};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AllocationPhase {
    /// Allocated at the start. An upper bound: pages become resident on first use.
    Start,
    /// Allocated as RAM disks are written and caches fill.
    Filled,
    /// Allocated as hosts connect and have commands in flight.
    Busy,
}

/// Memory for one purpose: `count` allocations of `each` bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryItem {
    /// The disk that it is for.
    disk: Option<Arc<DiskPlan>>,
    is_cache: bool,
    what: Cow<'static, str>,
    /// Bytes of one allocation.
    pub each: u64,
    pub count: u64,
    pub phase: AllocationPhase,
    /// Allocated from reserved huge pages if enough are free.
    pub is_huge: bool,
}

impl MemoryItem {
    /// Returns an item of one allocation of `each` bytes, not from reserved huge pages.
    fn new(what: impl Into<Cow<'static, str>>, each: u64, phase: AllocationPhase) -> MemoryItem {
        MemoryItem { disk: None, is_cache: false, what: what.into(), each, count: 1, phase, is_huge: false }
    }

    fn of_disk(
        disk: &Arc<DiskPlan>,
        what: impl Into<Cow<'static, str>>,
        each: u64,
        phase: AllocationPhase,
        is_huge: bool,
    ) -> MemoryItem {
        MemoryItem { disk: Some(Arc::clone(disk)), is_huge, ..MemoryItem::new(what, each, phase) }
    }

    /// Returns what the memory is for, in words.
    pub fn reason(&self) -> String {
        match &self.disk {
            Some(disk) => format!("disk {}: {}", disk.name, self.what),
            None => self.what.to_string(),
        }
    }

    /// Returns the disk that it is for, and whether it is for the cache of that disk.
    pub fn of(&self) -> Option<(&DiskPlan, bool)> {
        self.disk.as_ref().map(|disk| (&**disk, self.is_cache))
    }

    fn times(self, count: u64) -> MemoryItem {
        MemoryItem { count, ..self }
    }

    /// Returns the bytes of all `count` allocations.
    pub fn bytes(&self) -> u64 {
        self.each.saturating_mul(self.count)
    }
}

/// Program, stacks and all memory without an item of its own. About three times the resident size of an idle
/// target with a null disk (docs/lab-notes.md, "Footprint").
const PROCESS_BYTES: u64 = 16 << 20;
/// Bytes of a huge page; regions are rounded up to whole huge pages.
const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// Kernel memory of a TCP connection with empty buffers (docs/lab-notes.md, "Footprint").
const SOCKET_BYTES: u64 = 4 << 10;

impl AllocationPhase {
    pub fn label(self) -> &'static str {
        match self {
            AllocationPhase::Start => "at the start",
            AllocationPhase::Filled => "as disks fill",
            AllocationPhase::Busy => "while hosts are busy",
        }
    }
}

/// Returns all items of the plan, ordered by [`AllocationPhase`].
pub fn memory_items(plan: &Plan) -> Vec<MemoryItem> {
    let cores = plan.reactor.cores.len() as u64;
    let is_huge = plan.pool.pages == Pages::Huge;
    let mut items = vec![MemoryItem::new("the process itself", PROCESS_BYTES, AllocationPhase::Start)];
    for zone in &plan.pool.zones {
        let buffer = u64::from(zone.buffer_bytes);
        let reason = format!("pool: {} buffers of {}, a core", zone.count, Bytes::new(buffer));
        let each = buffer * u64::from(zone.count);
        items.push(MemoryItem {
            is_huge,
            ..MemoryItem::new(reason, each, AllocationPhase::Start).times(cores)
        });
    }
    for zone in &plan.pool.admin_zones {
        let buffer = u64::from(zone.buffer_bytes);
        let reason = format!("admin reserve: {} buffers of {}, a core", zone.count, Bytes::new(buffer));
        items.push(
            MemoryItem::new(reason, buffer * u64::from(zone.count), AllocationPhase::Start).times(cores),
        );
    }
    let batch_bytes = plan.tcp.shell.batch_bytes as u64;
    items.push(MemoryItem::new("receive batch, a core", batch_bytes, AllocationPhase::Start).times(cores));
    let is_rdma = plan.listeners.iter().any(|listener| listener.transport == TransportKind::Rdma);
    for disk in &plan.disks {
        items.extend(ram_items(disk, is_rdma));
        items.extend(cache_items(disk, is_rdma));
        items.extend(cluster_item(disk));
        if let DiskKind::Remote { is_optimistic, optimistic, .. } = &disk.kind {
            let known = if *is_optimistic { ", which pages the far cache has" } else { "" };
            let what = format!("pieces of long commands and what it receives{known}, a core");
            let each =
                RemoteDisk::core_bytes(is_optimistic.then_some(optimistic), plan.remote_depth()) as u64;
            items.push(MemoryItem::of_disk(disk, what, each, AllocationPhase::Start, false).times(cores));
        }
    }
    if is_rdma {
        let receives = u64::from(plan.rdma.srq_entries);
        // Counts one shared receive queue. Each completion queue beyond the first has one, and a worn queue
        // (docs/rdma.md) exists until its last connection ends. Their count depends on the hosts, so the sum
        // leaves them out and the text mentions them.
        let reason = format!(
            "{receives} receives over RDMA, a core and RDMA device (as many again for a worn queue, and for \
             each further completion queue)"
        );
        let in_capsule = plan.listeners.iter().map(|listener| listener.in_capsule_bytes).max().unwrap_or(0);
        let each = receives * u64::from(CAPSULE_BYTES + in_capsule);
        items.push(MemoryItem::new(reason, each, AllocationPhase::Busy).times(cores));
    }
    let connections = plan.limits.connections as u64;
    let entries = plan.limits.controller.queue_entries.max(ADMIN_QUEUE_ENTRIES);
    let reason = format!("connections, each with {entries} queue entries that were all in use");
    items.push(
        MemoryItem::new(reason, connection_bytes(entries, cores), AllocationPhase::Busy).times(connections),
    );
    let reason = "what connections have sent while no buffer was free";
    items.push(MemoryItem::new(reason, batch_bytes, AllocationPhase::Busy).times(connections));
    items.sort_by_key(|item| item.phase);
    items
}

/// Returns the bytes of a connection whose queue entries were all in use at once.
fn connection_bytes(entries: u16, cores: u64) -> u64 {
    let cores = usize::try_from(cores).unwrap_or(usize::MAX);
    let own = TargetCore::<Conn>::connection_bytes(entries, cores) + shell::connection_bytes(entries);
    own as u64 + SOCKET_BYTES
}

/// Returns the memory of a RAM disk; empty for other kinds. Registration with an RDMA device makes all pages
/// of the disk resident at the start, and so does `populate`.
fn ram_items(disk: &Arc<DiskPlan>, is_rdma: bool) -> Vec<MemoryItem> {
    let DiskKind::Ram { pages, is_populated, has_seals } = disk.kind else { return Vec::new() };
    let spec = RamSpec { bytes: disk.bytes, block_bytes: disk.block_bytes, pages, has_seals };
    let slack = RamSpec::slack_bytes_default();
    let tables = spec.memory_bytes().saturating_sub(disk.bytes).saturating_sub(slack);
    let is_huge = pages == Pages::Huge;
    let of = |what: &'static str, each, phase, is_huge| MemoryItem::of_disk(disk, what, each, phase, is_huge);
    vec![
        of("table of its pages and frames", tables, AllocationPhase::Start, false),
        match (is_rdma, is_populated) {
            (true, _) => {
                of("data, registered with RDMA devices", disk.bytes, AllocationPhase::Start, is_huge)
            }
            (false, true) => of("data, taken in advance", disk.bytes, AllocationPhase::Start, is_huge),
            (false, false) => {
                of("data, when every block is written", disk.bytes, AllocationPhase::Filled, is_huge)
            }
        },
        of(
            "writes and replies in flight",
            slack,
            if is_huge || is_rdma || is_populated { AllocationPhase::Start } else { AllocationPhase::Busy },
            is_huge,
        ),
    ]
}

/// Returns the table of `[disk.cluster]`. That of a `remote` disk has a 32nd of this for each extent, and
/// its size is known only once the disk is open.
fn cluster_item(disk: &Arc<DiskPlan>) -> Option<MemoryItem> {
    let is_remote = matches!(disk.kind, DiskKind::Remote { .. });
    disk.cluster.as_ref().filter(|_| !is_remote)?;
    let bytes = Cluster::memory_bytes(disk.bytes);
    let what = "which hosts may have which part in a cache";
    Some(MemoryItem::of_disk(disk, what, bytes, AllocationPhase::Start, false))
}

/// Returns the memory of a disk's cache; empty without a cache. All of it becomes resident at the start: see
/// [`CacheSpec::is_resident`](spindle_target_disk::CacheSpec::is_resident).
fn cache_items(disk: &Arc<DiskPlan>, is_rdma: bool) -> Vec<MemoryItem> {
    let Some(spec) = disk.cache else { return Vec::new() };
    let is_huge = spec.pages == Pages::Huge;
    let of = |what: &'static str, each, phase, is_huge| MemoryItem {
        is_cache: true,
        ..MemoryItem::of_disk(disk, what, each, phase, is_huge)
    };
    let tables = spec.memory_bytes().saturating_sub(spec.bytes);
    let what = match (is_rdma, &disk.kind) {
        (true, _) => "cache, registered with RDMA devices",
        (false, DiskKind::Nvme { .. }) => "cache, mapped for its drive",
        (false, _) => "cache",
    };
    vec![
        of("tables of the cache", tables, AllocationPhase::Start, false),
        of(what, spec.bytes, AllocationPhase::Start, is_huge),
    ]
}

/// Memory that is locked for devices of one kind (RDMA devices, NVMe drives); the kernel accounts each kind
/// separately.
pub struct LockedMemory<'a> {
    /// The kind of device, in words.
    pub device_kind: &'static str,
    pub bytes: u64,
    /// The disk whose cache, or memory with seals, is the largest of those in `bytes`.
    pub largest: &'a DiskPlan,
}

/// Returns the locked memory of NVMe drives or of RDMA devices, whichever is more; `None` if no cache and no
/// RAM disk with seals is locked.
pub fn locked_memory(plan: &Plan) -> Option<LockedMemory<'_>> {
    let is_rdma = plan.listeners.iter().any(|listener| listener.transport == TransportKind::Rdma);
    let drives = locked_by_devices("drives", plan, |disk| matches!(disk.kind, DiskKind::Nvme { .. }));
    let rdma = locked_by_devices(RDMA_DEVICES, plan, |_| is_rdma);
    drives.into_iter().chain(rdma).max_by_key(|locked| locked.bytes)
}

const RDMA_DEVICES: &str = "RDMA devices";

/// Returns the memory that is locked for devices of `device_kind`: all pools, and RAM disks and caches of the
/// disks for which `is_among` returns true. `None` if none of these disks has a cache or seals.
fn locked_by_devices<'a>(
    device_kind: &'static str,
    plan: &'a Plan,
    is_among: impl Fn(&DiskPlan) -> bool,
) -> Option<LockedMemory<'a>> {
    let cache = |disk: &DiskPlan| disk.cache.map_or(0, |cache| cache.bytes);
    // Optimistic reads: the memory is registered a second time, with 8 bytes for each page.
    let sealed = |disk: &DiskPlan| match (&disk.kind, disk.cache) {
        _ if device_kind != RDMA_DEVICES => 0,
        (DiskKind::Ram { has_seals: true, .. }, _) => disk.bytes,
        (_, Some(cache)) if cache.has_seals => cache.bytes,
        _ => 0,
    };
    let again = |disk: &DiskPlan| sealed(disk) + sealed(disk) / 512;
    let pools = plan.pool.bytes_per_core().saturating_mul(plan.reactor.cores.len() as u64);
    let disks = || plan.disks.iter().filter(|disk| is_among(disk));
    let bytes = disks().fold(pools, |sum, disk| {
        let is_ram = matches!(disk.kind, DiskKind::Ram { .. });
        sum.saturating_add(if is_ram { disk.bytes } else { cache(disk) }).saturating_add(again(disk))
    });
    let of_disk = |disk: &DiskPlan| cache(disk).max(sealed(disk));
    let largest = disks().max_by_key(|disk| of_disk(disk)).filter(|disk| of_disk(disk) > 0)?;
    Some(LockedMemory { device_kind, bytes, largest })
}

/// Returns the bytes of all items up to and including `phase`.
pub fn total_bytes(items: &[MemoryItem], phase: AllocationPhase) -> u64 {
    items
        .iter()
        .filter(|item| item.phase <= phase)
        .fold(0, |total: u64, item| total.saturating_add(item.bytes()))
}

/// Returns the bytes of reserved huge pages and of ordinary memory that the plan uses with full disks,
/// without connections. `huge_bytes` is the size of the free huge pages. If they are too few for the pools or
/// for a disk, that memory counts as ordinary memory, and a note is added.
pub fn huge_and_ordinary(
    plan: &Plan,
    items: &[MemoryItem],
    huge_bytes: u64,
    notes: &mut Vec<String>,
) -> (u64, u64) {
    let all = total_bytes(items, AllocationPhase::Filled);
    // By the disk; `None`: the pools.
    let mut wanted_by = HashMap::<Option<&str>, u64>::new();
    for item in items.iter().filter(|item| item.is_huge) {
        let wanted = wanted_by.entry(item.disk.as_ref().map(|disk| disk.name.as_str())).or_default();
        *wanted = wanted.saturating_add(item.bytes());
    }
    // Each core has a pool of its own.
    let pools = (None, plan.reactor.cores.len().max(1) as u64);
    let disks = plan.disks.iter().map(|disk| (Some(disk.name.as_str()), 1));
    let mut huge = 0;
    for (who, regions) in std::iter::once(pools).chain(disks).filter(|_| !wanted_by.is_empty()) {
        let Some(wanted) = wanted_by.get(&who).copied().filter(|wanted| *wanted > 0) else { continue };
        let who = who.map_or_else(|| "pool".to_owned(), |name| format!("disk {name}"));
        let free = huge_bytes.saturating_sub(huge);
        if wanted <= free {
            huge += wanted;
        } else {
            let pages = (wanted / regions).div_ceil(HUGE_PAGE_BYTES) * regions;
            let (wanted, free) = (rounded(wanted), rounded(free));
            notes.push(format!(
                "{who} asks for {wanted} of reserved huge pages and {free} are free: it takes transparent \
                 ones; it needs {pages} pages of 2 MiB (sysctl vm.nr_hugepages=N reserves N in all)"
            ));
        }
    }
    (huge, all.saturating_sub(huge))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn receives_over_rdma_are_those_of_one_queue_and_say_that_worn_ones_have_their_own() {
        let mut plan = Config::builtin().plan().clone();
        plan.listeners[0].transport = TransportKind::Rdma;
        let items = memory_items(&plan);
        let item = items.iter().find(|item| item.reason().contains("receives over RDMA")).expect("an item");
        assert!(item.reason().contains("as many again for a worn queue"), "{}", item.reason());
        assert_eq!(item.each / u64::from(plan.rdma.srq_entries), 64 + 4096, "of one queue");
    }
}
