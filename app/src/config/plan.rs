//! [`Plan`]: what a configuration says, in types that cannot be wrong. All of `spindle serve` begins from
//! here.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use nvme_spec::nqn::Nqn;
use spindle_disk::{CacheMode, CacheSpec, DelaySpec, PolicyKind};
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
    /// The cores that poll.
    pub reactor: ReactorPlan,
    /// Buffers of each core.
    pub pool: PoolPlan,
    /// What hosts can ask for and what the process holds.
    pub limits: LimitsPlan,
    /// NVMe/TCP.
    pub tcp: TcpPlan,
    /// NVMe/RDMA.
    pub rdma: spindle_rdma::shell::ShellConfig,
    /// Disks in the file's order; names are unique.
    pub disks: Vec<DiskPlan>,
    /// Listeners in the file's order; addresses and names are unique.
    pub listeners: Vec<ListenerPlan>,
    /// Subsystems in the file's order; NQNs are unique.
    pub subsystems: Vec<SubsystemPlan>,
    /// Referrals in the file's order.
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

/// The cores that poll.
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

/// Buffers of each core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolPlan {
    /// Pages that are asked for.
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
    /// What controllers promise.
    pub controller: ControllerLimits,
    /// Most I/O queues of a controller.
    pub io_queues_max: u16,
    /// Most connections of the process.
    pub connections: usize,
    /// Most connections of one address, over TCP and RDMA together, that have not sent Connect; 0: no limit.
    pub unconnected_per_address: usize,
    /// Most commands that one core gives one disk at once.
    pub disk_commands: u32,
    /// Full RAM disks may be larger than the memory that is available.
    pub may_overcommit: bool,
}

/// NVMe/TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpPlan {
    /// Each core's sockets.
    pub shell: ShellConfig,
    /// Each connection; a listener has its own `in_capsule_bytes`.
    pub conn: ConnConfig,
}

/// A disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPlan {
    /// Its name.
    pub name: String,
    /// Bytes of a block: 512 or 4096; 0 where the drive says it.
    pub block_bytes: u32,
    /// Capacity, a multiple of the block size, not 0; 0 where the drive says it.
    pub bytes: u64,
    /// What it is.
    pub kind: DiskKind,
    /// Name that its medium must have.
    pub medium_id: Option<String>,
    /// The cache in front of it.
    pub cache: Option<CachePlan>,
    /// It is made slow on purpose.
    pub delay: Option<DelayPlan>,
}

impl DelayPlan {
    /// What to make.
    #[must_use]
    pub fn spec(&self) -> DelaySpec {
        let DelayPlan { latency_us, bandwidth, seek_us } = *self;
        DelaySpec { latency: Nanos::from_us(latency_us), bandwidth, seek: Nanos::from_us(seek_us) }
    }

    /// As it is shown: what takes no time is left out.
    #[must_use]
    pub fn words(delay: Option<&DelayPlan>) -> String {
        let words = |it: &DelayPlan| {
            let parts = [
                (it.latency_us > 0).then(|| format!("latency {} us", it.latency_us)),
                it.bandwidth.map(|bytes| format!("bandwidth {}/s", Bytes::new(bytes))),
                (it.seek_us > 0).then(|| format!("seek {} us", it.seek_us)),
            ];
            parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
        };
        delay.map_or_else(|| "none".to_owned(), words)
    }
}

/// How slow a disk is made on purpose; at least one of them takes time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DelayPlan {
    /// Of each command, in microseconds.
    pub latency_us: u64,
    /// Bytes per second of the device.
    pub bandwidth: Option<u64>,
    /// A seek over the whole disk, in microseconds.
    pub seek_us: u64,
}

impl CachePlan {
    /// What to make, in such pages of memory.
    #[must_use]
    pub fn spec(&self, pages: Pages) -> CacheSpec {
        let CachePlan { bytes, policy, mode, read_ahead } = *self;
        CacheSpec { bytes, policy, mode, read_ahead, pages }
    }

    /// As it is shown.
    #[must_use]
    pub fn words(cache: Option<&CachePlan>) -> String {
        let words = |it: &CachePlan| {
            let (size, ahead) = (Bytes::new(it.bytes), Bytes::new(it.read_ahead.into()));
            format!("{size} {} {} read_ahead {ahead}", it.policy.name(), it.mode.name())
        };
        cache.map_or_else(|| "none".to_owned(), words)
    }
}

/// A cache in front of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CachePlan {
    /// Bytes of its pages.
    pub bytes: u64,
    /// Which page is to go.
    pub policy: PolicyKind,
    /// Who keeps what a client was given.
    pub mode: CacheMode,
    /// Bytes that are read ahead of a stream at most.
    pub read_ahead: u32,
}

impl DiskPlan {
    /// Where its drive is, if it is a namespace of a drive of our own.
    #[must_use]
    pub fn address(&self) -> Option<PciAddress> {
        match self.kind {
            DiskKind::Nvme { address, .. } => Some(address),
            DiskKind::Ram { .. }
            | DiskKind::Null
            | DiskKind::File { .. }
            | DiskKind::Ng { .. }
            | DiskKind::Remote { .. } => None,
        }
    }
}

/// Kinds of disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskKind {
    /// Memory.
    Ram {
        /// Pages that are asked for.
        pages: Pages,
        /// All of it is taken when the disk is made.
        is_populated: bool,
    },
    /// Reads as zeroes.
    Null,
    /// A regular file or a block device.
    File {
        /// Where it is.
        path: PathBuf,
        /// Writes are refused.
        is_read_only: bool,
        /// Made when it is missing.
        create: bool,
        /// Goes past the page cache.
        is_direct: bool,
        /// The device is asked for completions.
        is_polled: bool,
    },
    /// A namespace of a drive with the kernel, past its block layer.
    Ng {
        /// The generic device.
        path: PathBuf,
        /// Writes are refused.
        is_read_only: bool,
    },
    /// A namespace of a drive that this process drives itself.
    Nvme {
        /// Where the drive is.
        address: PciAddress,
        /// Which namespace of it.
        namespace: u32,
    },
    /// A namespace of another target.
    Remote {
        /// Its subsystem, and as which host.
        target: Box<Target>,
        /// Which namespace of it.
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

    /// True where a cache can be put in front.
    pub fn can_have_cache(&self) -> bool {
        match self {
            DiskKind::Ram { .. } | DiskKind::Null => false,
            DiskKind::File { .. } | DiskKind::Nvme { .. } | DiskKind::Ng { .. } | DiskKind::Remote { .. } => {
                true
            }
        }
    }

    /// Its name in the file.
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

/// An address to listen on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerPlan {
    /// What subsystems call it.
    pub name: String,
    /// The transport.
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

/// A subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubsystemPlan {
    /// Its name.
    pub nqn: Nqn,
    /// Serial number.
    pub serial: String,
    /// Model number.
    pub model: String,
    /// Who may connect.
    pub hosts: AllowedHosts,
    /// Names of the listeners at which it is offered.
    pub listeners: Vec<String>,
    /// Lowest and highest controller identifier.
    pub cntlid_range: (u16, u16),
    /// Namespaces in ascending order of NSID.
    pub namespaces: Vec<NamespacePlan>,
}

/// A disk in a subsystem.
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

/// Another discovery service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReferralPlan {
    /// The transport there.
    pub transport: TransportKind,
    /// Address and port there.
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
    pub level: LogLevel,
    /// How a line is written.
    pub format: LogFormat,
    /// Most lines a second that peers can cause on one core.
    pub peer_lines_per_s: u32,
}

/// Urgency of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLevel {
    /// Something does not work.
    Error,
    /// Something is not as it should be.
    Warn,
    /// Start, end, connects, changes.
    Info,
    /// What was decided and why.
    Debug,
    /// Everything.
    Trace,
}

impl LogLevel {
    /// Its name in the file, and in `SPINDLE_LOG`.
    pub fn name(self) -> &'static str {
        match self {
            LogLevel::Error => "error",
            LogLevel::Warn => "warn",
            LogLevel::Info => "info",
            LogLevel::Debug => "debug",
            LogLevel::Trace => "trace",
        }
    }
}

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

impl Plan {
    /// Most connections of one core: connections go to the core that has the fewest.
    pub fn connections_per_core(&self) -> usize {
        self.limits.connections.div_ceil(self.reactor.cores.len().max(1))
    }

    /// The disk of this name.
    pub fn disk(&self, name: &str) -> Option<&DiskPlan> {
        self.disks.iter().find(|disk| disk.name == name)
    }

    /// The listeners at which a subsystem is offered.
    pub fn listeners_of(&self, subsystem: &SubsystemPlan) -> impl Iterator<Item = &ListenerPlan> {
        self.listeners.iter().filter(|listener| subsystem.listeners.contains(&listener.name))
    }
}
