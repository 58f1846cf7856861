//! [`Plan`]: a validated configuration in typed form, the input of `spindle serve`. Also formats caches,
//! delays and the `nvme connect` command.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nvme_spec::nqn::Nqn;
use spindle_nvme_initiator::{Host, OptimisticOptions, Target};
use spindle_nvme_pcie::PciAddress;
use spindle_nvme_tcp::controller::ConnConfig;
use spindle_nvme_tcp::shell::ShellConfig;
use spindle_nvme_transport::TransportKind;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_reactor::run::Idle;
use spindle_target::snapshot::{AllowedHosts, ControllerLimits};
use spindle_target_disk::{CacheSpec, DelaySpec};

use crate::size::Bytes;

/// A validated configuration: consistent in itself and possible on this machine.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    pub reactor: ReactorPlan,
    pub pool: PoolPlan,
    pub limits: LimitsPlan,
    pub tcp: TcpPlan,
    pub rdma: spindle_nvme_rdma::shell::ShellConfig,
    /// RDMA port for optimistic reads; 0: hosts cannot read caches.
    pub optimistic_port: u16,
    /// Disks in the file's order; names are unique.
    pub disks: Vec<Arc<DiskPlan>>,
    /// Listeners in the file's order; names are unique, and so are pairs of transport and address.
    pub listeners: Vec<ListenerPlan>,
    /// Subsystems in the file's order; NQNs are unique.
    pub subsystems: Vec<SubsystemPlan>,
    pub referrals: Vec<ReferralPlan>,
    pub log: LogPlan,
    pub control: ControlPlan,
    /// Time for commands in flight to complete after SIGTERM.
    pub drain_deadline: Duration,
    /// Warnings for the operator about settings that are valid.
    pub notes: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReactorPlan {
    /// CPUs with one polling thread each: at least one, no duplicates, all in the affinity mask.
    pub cores: Vec<usize>,
    /// Threads are bound to their CPUs.
    pub is_pinned: bool,
    pub idle: Idle,
}

impl ReactorPlan {
    /// Returns, for each core, the CPU to which its thread is bound; `None` if threads are not pinned.
    pub fn cpus(&self) -> Vec<Option<usize>> {
        self.cores.iter().map(|core| self.is_pinned.then_some(*core)).collect()
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PoolPlan {
    pub pages: Pages,
    /// Zones of the data path in ascending order of buffer size; the largest buffer holds a whole transfer.
    pub zones: Vec<ZoneSpec>,
    /// Zones reserved for admin and Fabrics commands.
    pub admin_zones: [ZoneSpec; 1],
}

impl PoolPlan {
    /// Returns the bytes of one core's data zones, without `admin_zones`.
    pub fn bytes_per_core(&self) -> u64 {
        Pool::bytes_for(&self.zones)
    }
}

/// `[limits]` and `[discovery]`. `controller` contains the limits that are part of a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LimitsPlan {
    pub controller: ControllerLimits,
    pub io_queues_max: u16,
    pub connections: usize,
    /// Most connections from one IP address, TCP and RDMA together, that have not sent Connect; 0: no limit.
    pub unconnected_per_address: usize,
    /// Most commands in flight of one core at one disk.
    pub disk_commands: u32,
    /// Full RAM disks and caches may be larger than the available memory.
    pub may_overcommit: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TcpPlan {
    pub shell: ShellConfig,
    /// Defaults for connections; each listener has its own `in_capsule_bytes`.
    pub conn: ConnConfig,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPlan {
    pub name: String,
    /// Bytes of a block: 512 or 4096; 0 for `nvme`, `ng` and `remote`, whose namespace defines it.
    pub block_bytes: u32,
    /// Capacity in bytes, a multiple of the block size; 0 for `nvme`, `ng` and `remote`, which define it.
    pub bytes: u64,
    pub kind: DiskKind,
    pub medium: DiskMedium,
    pub medium_id: Option<String>,
    pub cache: Option<CacheSpec>,
    /// Artificial delay, for tests.
    pub delay: Option<DelaySpec>,
    /// Caches of several hosts are kept coherent with the disk; of a `remote` disk: its cache is one of them.
    pub cluster: Option<ClusterPlan>,
}

/// `[disk.cluster]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterPlan {
    /// Hosts that may join; empty for a `remote` disk.
    pub agents: Vec<Nqn>,
}

/// The file or device at the path of a disk when it was validated. No part of a comparison: an open disk
/// keeps its medium, whatever is at the path later.
#[derive(Debug, Clone, Default)]
pub struct DiskMedium {
    /// [`BackingFile::identity`](super::machine::BackingFile::identity); not set for a file that was missing.
    pub identity: OnceLock<(u64, u64)>,
    /// It was not there or could not be opened at the start: the disk is an [`Origin`](super::Origin) that is
    /// opened later. If the size was not set, it is 0.
    pub is_away: bool,
}

impl DiskMedium {
    pub fn known(identity: (u64, u64)) -> DiskMedium {
        DiskMedium { identity: OnceLock::from(identity), is_away: false }
    }

    pub fn away() -> DiskMedium {
        DiskMedium { is_away: true, ..DiskMedium::default() }
    }
}

impl PartialEq for DiskMedium {
    fn eq(&self, _other: &DiskMedium) -> bool {
        true
    }
}

impl Eq for DiskMedium {}

/// Formats the delay for display, without parts that are zero; `none` without a delay.
pub fn delay_text(delay: Option<&DelaySpec>) -> String {
    let Some(it) = delay else { return "none".to_owned() };
    let parts = [
        (it.latency > Nanos::ZERO).then(|| format!("latency {} us", it.latency.as_us())),
        it.bandwidth.map(|bytes| format!("bandwidth {}/s", Bytes::new(bytes))),
        (it.seek > Nanos::ZERO).then(|| format!("seek {} us", it.seek.as_us())),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Formats the cluster for display; `none` without one.
pub fn cluster_text(cluster: Option<&ClusterPlan>) -> String {
    let Some(it) = cluster else { return "none".to_owned() };
    let agents: Vec<_> = it.agents.iter().map(ToString::to_string).collect();
    if agents.is_empty() { "member".to_owned() } else { agents.join(", ") }
}

/// Formats the cache for display; `none` without a cache.
pub fn cache_text(cache: Option<&CacheSpec>) -> String {
    let Some(it) = cache else { return "none".to_owned() };
    let (size, ahead) = (Bytes::new(it.bytes), Bytes::new(it.read_ahead.into()));
    format!("{size} {} {} read_ahead {ahead}", it.policy.name(), it.mode.name())
}

impl DiskPlan {
    /// Returns a disk of a kind, for the keys of the file to be written to.
    pub fn blank(kind: DiskKind) -> DiskPlan {
        let (medium, name) = (DiskMedium::default(), String::new());
        DiskPlan {
            name,
            block_bytes: 0,
            bytes: 0,
            kind,
            medium,
            medium_id: None,
            cache: None,
            delay: None,
            cluster: None,
        }
    }

    /// Returns the PCI address of the drive of an `nvme` disk; `None` for other kinds.
    #[must_use]
    pub fn address(&self) -> Option<PciAddress> {
        if let DiskKind::Nvme { address, .. } = self.kind { Some(address) } else { None }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskKind {
    Ram {
        pages: Pages,
        /// All memory is allocated in the background once the disk is created.
        is_populated: bool,
        /// Initiators of Spindle read its pages by RDMA (`rdma.optimistic_port`).
        has_seals: bool,
    },
    /// Reads return zeroes, writes are discarded.
    Null,
    File {
        path: PathBuf,
        is_read_only: bool,
        /// A missing file is created, with the configured size.
        create: bool,
        /// I/O bypasses the page cache (`O_DIRECT`).
        is_direct: bool,
        /// Completions are polled (IOPOLL).
        is_polled: bool,
    },
    /// A namespace of a drive with the kernel's driver, through its generic device (`/dev/ng0n1`).
    Ng { path: PathBuf, is_read_only: bool },
    /// A namespace of a drive bound to vfio-pci.
    Nvme { address: PciAddress, namespace: u32 },
    /// A namespace of a far target.
    Remote {
        target: Box<Target>,
        namespace: u32,
        /// Longest time from submission to completion of a command, across reconnects, else it fails.
        command_timeout: Duration,
        /// Time beyond two keep-alive timeouts in which the far target may execute commands of a lost
        /// association.
        quiesce: Duration,
        /// Pages of the far target's cache are read by RDMA READ.
        is_optimistic: bool,
        /// How, if they are.
        optimistic: OptimisticOptions,
    },
}

impl DiskKind {
    /// True if a drive or far target defines size and block size, known once the disk is open.
    pub fn has_drive_geometry(&self) -> bool {
        matches!(self, DiskKind::Nvme { .. } | DiskKind::Ng { .. } | DiskKind::Remote { .. })
    }

    /// Returns the path of the file or device of a `file` or `ng` disk; `None` for other kinds.
    pub fn path(&self) -> Option<&Path> {
        match self {
            DiskKind::File { path, .. } | DiskKind::Ng { path, .. } => Some(path),
            DiskKind::Ram { .. } | DiskKind::Null | DiskKind::Nvme { .. } | DiskKind::Remote { .. } => None,
        }
    }

    /// False for `ram` and `null`, whose data a cache cannot make faster.
    pub fn can_have_cache(&self) -> bool {
        match self {
            DiskKind::Ram { .. } | DiskKind::Null => false,
            DiskKind::File { .. } | DiskKind::Ng { .. } | DiskKind::Nvme { .. } | DiskKind::Remote { .. } => {
                true
            }
        }
    }

    /// True for a kind whose reads need a buffer of the core's pool, so that a Compare needs two.
    pub fn reads_into_pool(&self) -> bool {
        match self {
            DiskKind::Ram { .. } | DiskKind::Null => false,
            DiskKind::File { .. } | DiskKind::Ng { .. } | DiskKind::Nvme { .. } | DiskKind::Remote { .. } => {
                true
            }
        }
    }

    /// Returns SPDK's `product_name` for the kind.
    pub fn product_name(&self) -> &'static str {
        match self {
            DiskKind::Ram { .. } => "Malloc disk",
            DiskKind::Null => "Null disk",
            DiskKind::File { .. } => "URING bdev",
            DiskKind::Nvme { .. } | DiskKind::Ng { .. } | DiskKind::Remote { .. } => "NVMe disk",
        }
    }

    /// Returns the kind of this name, with values for the keys of the file to replace.
    pub fn named(name: &str) -> Option<DiskKind> {
        let path = PathBuf::new();
        Some(match name {
            "ram" => DiskKind::Ram { pages: Pages::Base, is_populated: false, has_seals: false },
            "null" => DiskKind::Null,
            "file" => {
                let (is_read_only, create, is_direct, is_polled) = (false, false, false, false);
                DiskKind::File { path, is_read_only, create, is_direct, is_polled }
            }
            "nvme" => DiskKind::Nvme { address: PciAddress::default(), namespace: 0 },
            "ng" => DiskKind::Ng { path, is_read_only: false },
            "remote" => DiskKind::Remote {
                target: Box::new(Target {
                    transport: TransportKind::Tcp,
                    address: SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
                    nqn: Nqn::discovery(),
                    host: Host::of_this_machine(),
                }),
                namespace: 0,
                command_timeout: Duration::ZERO,
                quiesce: Duration::ZERO,
                is_optimistic: false,
                optimistic: OptimisticOptions::default(),
            },
            _ => return None,
        })
    }

    pub fn name(&self) -> &'static str {
        match self {
            DiskKind::Ram { .. } => "ram",
            DiskKind::Null => "null",
            DiskKind::File { .. } => "file",
            DiskKind::Nvme { .. } => "nvme",
            DiskKind::Ng { .. } => "ng",
            DiskKind::Remote { .. } => "remote",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerPlan {
    /// Unique; subsystems refer to the listener by this name.
    pub name: String,
    pub transport: TransportKind,
    /// The port is not 0.
    pub address: SocketAddr,
    /// Most in-capsule data of a command on an I/O queue.
    pub in_capsule_bytes: u32,
}

impl ListenerPlan {
    /// Returns transport and address, which identify a listener across reloads.
    pub fn endpoint(&self) -> (TransportKind, SocketAddr) {
        (self.transport, self.address)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubsystemPlan {
    pub nqn: Nqn,
    pub serial: String,
    pub model: String,
    pub hosts: AllowedHosts,
    /// Hosts that may read caches by RDMA, if they may connect.
    pub optimistic_hosts: AllowedHosts,
    /// Names of listeners.
    pub listeners: Vec<String>,
    /// Lowest and highest CNTLID, both included.
    pub cntlid_range: (u16, u16),
    /// Namespaces in ascending order of NSID.
    pub namespaces: Vec<NamespacePlan>,
}

impl SubsystemPlan {
    /// Returns true if the subsystem has a namespace that is equal to this one.
    pub fn has(&self, namespace: &NamespacePlan) -> bool {
        let at = self.namespaces.binary_search_by_key(&namespace.nsid, |own| own.nsid);
        at.is_ok_and(|at| self.namespaces[at] == *namespace)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespacePlan {
    /// 1 ..= `NSID_MAX`.
    pub nsid: u32,
    /// Name of a disk in the plan; each disk is in at most one namespace.
    pub disk: String,
    /// `None` for `ram` and `remote` disks without a configured UUID, which is derived once the disk is open.
    pub uuid: Option<[u8; 16]>,
    /// `None` as for `uuid`.
    pub nguid: Option<[u8; 16]>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReferralPlan {
    pub transport: TransportKind,
    pub address: SocketAddr,
}

/// `[control]`: the control socket.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ControlPlan {
    /// `None`: [`default_path`](crate::serve::control::default_path); an empty path: no socket.
    pub socket: Option<PathBuf>,
    /// Group whose members may connect; `None`: the group of the process.
    pub group: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogPlan {
    /// Least severe level that is written.
    pub level: tracing::Level,
    pub format: LogFormat,
    /// Most lines per second and core that peers can cause; the rest is counted.
    pub peer_lines_per_s: u32,
}

impl Default for LogPlan {
    fn default() -> LogPlan {
        LogPlan { level: tracing::Level::INFO, format: LogFormat::Text, peer_lines_per_s: 0 }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    /// One JSON object per line.
    Json,
}

/// Returns disks by name.
pub fn by_name(disks: &[Arc<DiskPlan>]) -> HashMap<&str, &Arc<DiskPlan>> {
    disks.iter().map(|disk| (disk.name.as_str(), disk)).collect()
}

impl Plan {
    /// Returns the most connections of one core. Each new connection is assigned to the core with the fewest.
    pub fn connections_per_core(&self) -> usize {
        self.limits.connections.div_ceil(self.reactor.cores.len().max(1))
    }

    pub fn disk(&self, name: &str) -> Option<&DiskPlan> {
        self.disks.iter().find(|disk| disk.name == name).map(Arc::as_ref)
    }

    /// Returns where each subsystem is offered.
    pub fn offers(&self) -> HashSet<(Nqn, (TransportKind, SocketAddr))> {
        let of = |it: &SubsystemPlan| {
            let endpoints = self.listeners_of(it).map(|listener| listener.endpoint());
            endpoints.map(|endpoint| (it.nqn, endpoint)).collect::<Vec<_>>()
        };
        self.subsystems.iter().flat_map(of).collect()
    }

    /// Returns the disks by name, for look-ups of many.
    pub fn disks_by_name(&self) -> HashMap<&str, &Arc<DiskPlan>> {
        by_name(&self.disks)
    }

    pub fn listeners_of(&self, subsystem: &SubsystemPlan) -> impl Iterator<Item = &ListenerPlan> {
        self.listeners.iter().filter(|listener| subsystem.listeners.contains(&listener.name))
    }
}

/// Returns `address` as a host can connect to it: an unspecified IP address (0.0.0.0, ::) is replaced by the
/// source address of the default route.
pub fn reachable_address(address: SocketAddr) -> SocketAddr {
    if !address.ip().is_unspecified() {
        return address;
    }
    SocketAddr::new(default_source_address(address.is_ipv4()), address.port())
}

/// Returns the source address of the default route, else the loopback address. Connecting a UDP socket looks
/// up the route and sends nothing; the destinations are documentation addresses (RFC 5737, RFC 3849).
fn default_source_address(is_ipv4: bool) -> IpAddr {
    let (any, far, loopback): (IpAddr, IpAddr, IpAddr) = if is_ipv4 {
        (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into(), Ipv4Addr::LOCALHOST.into())
    } else {
        let far = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
        (Ipv6Addr::UNSPECIFIED.into(), far.into(), Ipv6Addr::LOCALHOST.into())
    };
    let asked = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((far, 9))?;
        socket.local_addr()
    });
    asked.map_or(loopback, |address| address.ip())
}

/// Returns the nvme-cli command that connects a Linux host; the NQN is quoted for a shell.
pub fn connect_line(listener: (TransportKind, SocketAddr), nqn: &Nqn) -> String {
    let (transport, address) = (listener.0, reachable_address(listener.1));
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-+@/".contains(&byte);
    let nqn = nqn.as_str();
    let quoted =
        if nqn.bytes().all(is_plain) { nqn.to_owned() } else { format!("'{}'", nqn.replace('\'', r"'\''")) };
    format!("nvme connect -t {transport} -a {} -s {} -n {quoted}", address.ip(), address.port())
}
