//! [`Plan`]: what a configuration says, in types that cannot be wrong. All of `spindle serve` begins from
//! here.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::time::Duration;

use nvme_spec::nqn::Nqn;
use spindle_disk::{CacheSpec, DelaySpec};
use spindle_initiator::Target;
use spindle_nvme_pcie::PciAddress;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_reactor::run::Idle;
use spindle_target::snapshot::{AllowedHosts, ControllerLimits};
use spindle_tcp::controller::ConnConfig;
use spindle_tcp::shell::ShellConfig;
use spindle_transport::TransportKind;

use crate::size::Bytes;

/// A whole configuration, checked against itself and against the machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub reactor: ReactorPlan,
    pub pool: PoolPlan,
    /// What hosts can ask for and what the process holds.
    pub limits: LimitsPlan,
    pub tcp: TcpPlan,
    pub rdma: spindle_rdma::shell::ShellConfig,
    /// Disks in the file's order; names are unique.
    pub disks: Vec<DiskPlan>,
    /// Listeners in the file's order; addresses and names are unique.
    pub listeners: Vec<ListenerPlan>,
    /// Subsystems in the file's order; NQNs are unique.
    pub subsystems: Vec<SubsystemPlan>,
    pub referrals: Vec<ReferralPlan>,
    /// What goes to standard error.
    pub log: LogPlan,
    /// Where operators ask.
    pub control: ControlPlan,
    /// How long commands in flight get to end after SIGTERM.
    pub drain_deadline: Duration,
    /// What an operator should know though nothing is wrong.
    pub notes: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReactorPlan {
    /// One thread on each: CPUs that the process may use, at least one, none twice.
    pub cores: Vec<usize>,
    /// Bind the threads to them.
    pub is_pinned: bool,
    /// What a core does without work.
    pub idle: Idle,
}

impl ReactorPlan {
    /// For each core the CPU that its thread is bound to, `None` when it is not.
    pub fn cpus(&self) -> Vec<Option<usize>> {
        self.cores.iter().map(|core| self.is_pinned.then_some(*core)).collect()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolPlan {
    pub pages: Pages,
    /// Zones of the data path in ascending order; the largest holds a whole transfer.
    pub zones: Vec<ZoneSpec>,
    /// Zones that only admin and Fabrics commands take from.
    pub admin_zones: Vec<ZoneSpec>,
}

impl PoolPlan {
    /// Bytes of one core's pool for data.
    pub fn bytes_per_core(&self) -> u64 {
        Pool::bytes_for(&self.zones)
    }
}

/// What hosts can ask for and what the process holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitsPlan {
    pub controller: ControllerLimits,
    pub io_queues_max: u16,
    pub connections: usize,
    /// Most connections of one address, over TCP and RDMA together, that have not sent Connect; 0: no limit.
    pub unconnected_per_address: usize,
    /// Most commands that one core gives one disk at once.
    pub disk_commands: u32,
    /// Full RAM disks may be larger than the memory that is available.
    pub may_overcommit: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpPlan {
    /// Each core's sockets.
    pub shell: ShellConfig,
    /// Each connection; a listener has its own `in_capsule_bytes`.
    pub conn: ConnConfig,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPlan {
    pub name: String,
    /// Bytes of a block: 512 or 4096; 0 where the drive says it.
    pub block_bytes: u32,
    /// Capacity, a multiple of the block size, not 0; 0 where the drive says it.
    pub bytes: u64,
    pub kind: DiskKind,
    pub medium_id: Option<String>,
    pub cache: Option<CacheSpec>,
    /// It is made slow on purpose.
    pub delay: Option<DelaySpec>,
}

/// How slow a disk is made on purpose, as it is shown: what takes no time is left out.
pub fn delay_words(delay: Option<&DelaySpec>) -> String {
    let Some(it) = delay else { return "none".to_owned() };
    let parts = [
        (it.latency > Nanos::ZERO).then(|| format!("latency {} us", it.latency.as_us())),
        it.bandwidth.map(|bytes| format!("bandwidth {}/s", Bytes::new(bytes))),
        (it.seek > Nanos::ZERO).then(|| format!("seek {} us", it.seek.as_us())),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// A cache, as it is shown.
pub fn cache_words(cache: Option<&CacheSpec>) -> String {
    let Some(it) = cache else { return "none".to_owned() };
    let (size, ahead) = (Bytes::new(it.bytes), Bytes::new(it.read_ahead.into()));
    format!("{size} {} {} read_ahead {ahead}", it.policy.name(), it.mode.name())
}

impl DiskPlan {
    /// Where its drive is, if it is a namespace of a drive of our own.
    #[must_use]
    pub fn address(&self) -> Option<PciAddress> {
        if let DiskKind::Nvme { address, .. } = self.kind { Some(address) } else { None }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskKind {
    Ram {
        pages: Pages,
        /// All of it is taken when the disk is made.
        is_populated: bool,
    },
    /// Reads as zeroes.
    Null,
    File {
        path: PathBuf,
        is_read_only: bool,
        /// Made when it is missing.
        create: bool,
        /// Goes past the page cache.
        is_direct: bool,
        /// The device is asked for completions.
        is_polled: bool,
    },
    /// A namespace of a drive with the kernel, past its block layer.
    Ng { path: PathBuf, is_read_only: bool },
    /// A namespace of a drive that this process drives itself.
    Nvme { address: PciAddress, namespace: u32 },
    /// A namespace of another target.
    Remote {
        /// Its subsystem, and as which host.
        target: Box<Target>,
        namespace: u32,
        /// Each command is answered within this time.
        command_timeout: Duration,
        /// How much longer than usual it may execute commands of a lost association.
        quiesce: Duration,
    },
}

impl DiskKind {
    /// True when size and blocks are the drive's own, known when it is open.
    pub fn is_shaped_by_drive(&self) -> bool {
        matches!(self, DiskKind::Nvme { .. } | DiskKind::Ng { .. } | DiskKind::Remote { .. })
    }

    /// True where a cache can be put in front: its data are not in memory.
    pub fn can_have_cache(&self) -> bool {
        !matches!(self, DiskKind::Ram { .. } | DiskKind::Null)
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
    /// What subsystems call it.
    pub name: String,
    pub transport: TransportKind,
    /// Where; the port is not 0.
    pub address: SocketAddr,
    /// In-capsule data of I/O queues.
    pub in_capsule_bytes: u32,
}

impl ListenerPlan {
    /// What no two listeners have in common.
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
    /// Names of the listeners at which it is offered.
    pub listeners: Vec<String>,
    /// Lowest and highest controller identifier.
    pub cntlid_range: (u16, u16),
    /// Namespaces in ascending order of NSID.
    pub namespaces: Vec<NamespacePlan>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespacePlan {
    /// Its number, 1 ..= `NSID_MAX`.
    pub nsid: u32,
    /// Name of the disk, which is there and in no other namespace.
    pub disk: String,
    /// Its identity. `None`: known with the disk, as that of RAM disks and of those of other targets.
    pub uuid: Option<[u8; 16]>,
    /// Its identity, the other way to ask for it.
    pub nguid: Option<[u8; 16]>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReferralPlan {
    pub transport: TransportKind,
    pub address: SocketAddr,
}

/// Where operators ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlPlan {
    /// The socket. `None`: where it is without a word; an empty path: there is none.
    pub socket: Option<PathBuf>,
    /// Whose members may use it.
    pub group: Option<String>,
}

/// What goes to standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogPlan {
    /// Least urgent lines.
    pub level: tracing::Level,
    /// How a line is written.
    pub format: LogFormat,
    /// Most lines a second that peers can cause on one core.
    pub peer_lines_per_s: u32,
}

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    /// One JSON object a line.
    Json,
}

impl Plan {
    /// Most connections of one core: connections go to the core that has the fewest.
    pub fn connections_per_core(&self) -> usize {
        self.limits.connections.div_ceil(self.reactor.cores.len().max(1))
    }

    pub fn disk(&self, name: &str) -> Option<&DiskPlan> {
        self.disks.iter().find(|disk| disk.name == name)
    }

    /// The listeners at which a subsystem is offered.
    pub fn listeners_of(&self, subsystem: &SubsystemPlan) -> impl Iterator<Item = &ListenerPlan> {
        self.listeners.iter().filter(|listener| subsystem.listeners.contains(&listener.name))
    }
}

/// `address` as a host can name it: where all addresses are listened on, the one that this machine would send
/// from.
pub fn reachable(address: SocketAddr) -> SocketAddr {
    if !address.ip().is_unspecified() {
        return address;
    }
    SocketAddr::new(own_address(address.is_ipv4()), address.port())
}

/// The address that the default route sends from, or the loopback address without one. Nothing is sent:
/// connecting a datagram socket only asks the routing table. The far ends are those of documentation (RFC
/// 5737, RFC 3849).
fn own_address(is_ipv4: bool) -> IpAddr {
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

/// What a Linux host types to connect.
pub fn connect_line(listener: (TransportKind, SocketAddr), nqn: &Nqn) -> String {
    let (transport, address) = (listener.0, reachable(listener.1));
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-+@/".contains(&byte);
    let nqn = nqn.as_str();
    let quoted =
        if nqn.bytes().all(is_plain) { nqn.to_owned() } else { format!("'{}'", nqn.replace('\'', r"'\''")) };
    format!("nvme connect -t {transport} -a {} -s {} -n {quoted}", address.ip(), address.port())
}
