//! The memory that a plan takes, as a sum of named reasons. Printed by `spindle check`, and held against the
//! machine.

use spindle_disk::RamSpec;
use spindle_disk_remote::RemoteDisk;
use spindle_rdma::controller::CAPSULE_BYTES;
use spindle_reactor::mem::Pages;
use spindle_target::core::TargetCore;
use spindle_tcp::controller::Conn;
use spindle_tcp::shell;
use spindle_transport::TransportKind;

use super::plan::{DiskKind, DiskPlan, Plan};
use crate::size::{Bytes, rounded};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum When {
    /// At the start, at most: pages are touched when they are first used.
    Start,
    /// As RAM disks are written.
    Filled,
    /// By hosts and while they are busy; given back afterwards.
    Busy,
}

/// One reason for which memory is taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sum {
    pub reason: String,
    /// Bytes of one.
    pub each: u64,
    pub count: u64,
    pub when: When,
    /// Taken from reserved huge pages when there are enough.
    pub is_huge: bool,
}

impl Sum {
    /// One, of ordinary memory.
    fn new(reason: impl Into<String>, each: u64, when: When) -> Sum {
        Sum { reason: reason.into(), each, count: 1, when, is_huge: false }
    }

    /// One of a disk.
    fn of_disk(disk: &DiskPlan, what: &str, each: u64, when: When, is_huge: bool) -> Sum {
        Sum { is_huge, ..Sum::new(format!("disk {}: {what}", disk.name), each, when) }
    }

    /// So many.
    fn times(self, count: u64) -> Sum {
        Sum { count, ..self }
    }

    /// All of them.
    pub fn bytes(&self) -> u64 {
        self.each.saturating_mul(self.count)
    }
}

/// The program, its stacks and what belongs to no other reason: three times what an idle target with a null
/// disk has resident (docs/lab-notes.md, "Footprint").
const PROCESS_BYTES: u64 = 16 << 20;
/// A huge page as regions take it: each is rounded up to whole ones.
const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// What the kernel has for a connection without data in its buffers: socket, file, timers
/// (docs/lab-notes.md, "Footprint").
const SOCKET_BYTES: u64 = 4 << 10;

impl When {
    /// In words, for a table.
    pub fn words(self) -> &'static str {
        match self {
            When::Start => "at the start",
            When::Filled => "as disks fill",
            When::Busy => "while hosts are busy",
        }
    }
}

/// All reasons, those of the start first.
pub fn sums(plan: &Plan) -> Vec<Sum> {
    let cores = plan.reactor.cores.len() as u64;
    let is_huge = plan.pool.pages == Pages::Huge;
    let mut sums = vec![Sum::new("the process itself", PROCESS_BYTES, When::Start)];
    for zone in &plan.pool.zones {
        let buffer = u64::from(zone.buffer_bytes);
        let reason = format!("pool: {} buffers of {}, a core", zone.count, Bytes::new(buffer));
        let each = buffer * u64::from(zone.count);
        sums.push(Sum { is_huge, ..Sum::new(reason, each, When::Start).times(cores) });
    }
    for zone in &plan.pool.admin_zones {
        let buffer = u64::from(zone.buffer_bytes);
        let reason = format!("admin reserve: {} buffers of {}, a core", zone.count, Bytes::new(buffer));
        sums.push(Sum::new(reason, buffer * u64::from(zone.count), When::Start).times(cores));
    }
    let batch_bytes = plan.tcp.shell.batch_bytes as u64;
    sums.push(Sum::new("receive batch, a core", batch_bytes, When::Start).times(cores));
    let is_rdma = plan.listeners.iter().any(|listener| listener.transport == TransportKind::Rdma);
    for disk in &plan.disks {
        sums.extend(ram_sums(disk, is_rdma));
        sums.extend(cache_sums(disk, is_rdma));
        if matches!(disk.kind, DiskKind::Remote { .. }) {
            let reason = format!("disk {}: pieces of long commands and what it receives, a core", disk.name);
            sums.push(Sum::new(reason, RemoteDisk::core_bytes() as u64, When::Start).times(cores));
        }
    }
    if is_rdma {
        let receives = u64::from(plan.rdma.srq_entries);
        // Of one queue. A worn one (docs/rdma.md) stays beside it until its last connection ends; how many
        // there are depends on the hosts, so they are named and not counted.
        let reason =
            format!("{receives} receives over RDMA, a core and RDMA device (as many again for a worn queue)");
        let in_capsule = plan.listeners.iter().map(|listener| listener.in_capsule_bytes).max().unwrap_or(0);
        let each = receives * u64::from(CAPSULE_BYTES + in_capsule);
        sums.push(Sum::new(reason, each, When::Busy).times(cores));
    }
    let connections = plan.limits.connections as u64;
    let entries = plan.limits.controller.queue_entries;
    let reason = format!("connections, each with {entries} queue entries that were all in use");
    sums.push(Sum::new(reason, connection_bytes(entries), When::Busy).times(connections));
    let reason = "what connections have sent while no buffer was free";
    sums.push(Sum::new(reason, batch_bytes, When::Busy).times(connections));
    sums.sort_by_key(|sum| sum.when);
    sums
}

/// What a connection takes when its whole queue is used; an idle one takes what it has used at once.
fn connection_bytes(entries: u16) -> u64 {
    let own = TargetCore::<Conn>::connection_bytes(entries) + shell::connection_bytes(entries);
    own as u64 + SOCKET_BYTES
}

/// What a RAM disk takes; nothing for the others. With RDMA it is registered, and so resident,
/// as a whole; `populate` asks for the same.
fn ram_sums(disk: &DiskPlan, is_rdma: bool) -> Vec<Sum> {
    let DiskKind::Ram { pages, is_populated } = disk.kind else { return Vec::new() };
    let spec = RamSpec { bytes: disk.bytes, block_bytes: disk.block_bytes, pages };
    let slack = RamSpec::slack_bytes_default();
    let tables = spec.memory_bytes().saturating_sub(disk.bytes).saturating_sub(slack);
    let is_huge = pages == Pages::Huge;
    let of = |what: &str, each, when, is_huge| Sum::of_disk(disk, what, each, when, is_huge);
    vec![
        of("table of its pages and frames", tables, When::Start, false),
        match (is_rdma, is_populated) {
            (true, _) => of("data, registered with RDMA devices", disk.bytes, When::Start, is_huge),
            (false, true) => of("data, taken in advance", disk.bytes, When::Start, is_huge),
            (false, false) => of("data, when every block is written", disk.bytes, When::Filled, is_huge),
        },
        of(
            "writes and replies in flight",
            slack,
            if is_huge || is_rdma || is_populated { When::Start } else { When::Busy },
            is_huge,
        ),
    ]
}

/// What the cache of a disk takes. With RDMA it is registered, and so resident, as a whole; in
/// front of a drive of our own it is mapped for that, which does the same.
fn cache_sums(disk: &DiskPlan, is_rdma: bool) -> Vec<Sum> {
    let Some(spec) = disk.cache else { return Vec::new() };
    let is_huge = spec.pages == Pages::Huge;
    let of = |what: &str, each, when, is_huge| Sum::of_disk(disk, what, each, when, is_huge);
    let tables = spec.memory_bytes().saturating_sub(spec.bytes);
    let (what, when) = match (is_rdma, &disk.kind) {
        (true, _) => ("cache, registered with RDMA devices", When::Start),
        (false, DiskKind::Nvme { .. }) => ("cache, mapped for its drive", When::Start),
        (false, _) => ("cache, when it is full", When::Filled),
    };
    vec![
        of("tables of the cache", tables, When::Start, false),
        of(what, spec.bytes, if is_huge { When::Start } else { when }, is_huge),
    ]
}

/// What devices of a kind lock: the kernel counts it apart for each kind.
pub struct Locked<'a> {
    pub what: &'static str,
    pub bytes: u64,
    /// The disk that has the largest cache of those among it.
    pub largest: &'a DiskPlan,
}

/// What is locked most; `None` where no cache is locked.
pub fn locked(plan: &Plan) -> Option<Locked<'_>> {
    let is_rdma = plan.listeners.iter().any(|listener| listener.transport == TransportKind::Rdma);
    let drives = locked_by("drives", plan, |disk| matches!(disk.kind, DiskKind::Nvme { .. }));
    let rdma = locked_by("RDMA devices", plan, |_| is_rdma);
    drives.into_iter().chain(rdma).max_by_key(|locked| locked.bytes)
}

/// By devices that reach the pools and the memory of these disks.
fn locked_by<'a>(
    what: &'static str,
    plan: &'a Plan,
    is_among: impl Fn(&DiskPlan) -> bool,
) -> Option<Locked<'a>> {
    let cache = |disk: &DiskPlan| disk.cache.map_or(0, |cache| cache.bytes);
    let pools = plan.pool.bytes_per_core().saturating_mul(plan.reactor.cores.len() as u64);
    let disks = || plan.disks.iter().filter(|disk| is_among(disk));
    let bytes = disks().fold(pools, |sum, disk| {
        let is_ram = matches!(disk.kind, DiskKind::Ram { .. });
        sum.saturating_add(if is_ram { disk.bytes } else { cache(disk) })
    });
    let largest = disks().max_by_key(|disk| cache(disk)).filter(|disk| cache(disk) > 0)?;
    Some(Locked { what, bytes, largest })
}

/// The sum of the reasons up to `when`.
pub fn total(sums: &[Sum], when: When) -> u64 {
    sums.iter().filter(|sum| sum.when <= when).fold(0, |total: u64, sum| total.saturating_add(sum.bytes()))
}

/// What start and full disks take of reserved huge pages, and of ordinary memory. What finds too few huge
/// pages takes ordinary ones, with a note.
pub fn huge_and_ordinary(plan: &Plan, sums: &[Sum], huge_bytes: u64, notes: &mut Vec<String>) -> (u64, u64) {
    let all = total(sums, When::Filled);
    let wants = |prefix: &str| {
        let wanted = sums.iter().filter(|sum| sum.is_huge && sum.reason.starts_with(prefix));
        wanted.fold(0, |total: u64, sum| total.saturating_add(sum.bytes()))
    };
    let disks = plan
        .disks
        .iter()
        .map(|disk| (format!("disk {}", disk.name), wants(&format!("disk {}: ", disk.name)), 1));
    // Each core has a pool of its own.
    let pools = ("pool".to_owned(), wants("pool: "), plan.reactor.cores.len().max(1) as u64);
    let mut huge = 0;
    for (who, wanted, regions) in std::iter::once(pools).chain(disks) {
        if wanted == 0 {
            continue;
        }
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
        let sums = sums(&plan);
        let sum = sums.iter().find(|sum| sum.reason.contains("receives over RDMA")).expect("a sum");
        assert!(sum.reason.contains("as many again for a worn queue"), "{}", sum.reason);
        assert_eq!(sum.each / u64::from(plan.rdma.srq_entries), 64 + 4096, "of one queue");
    }
}
