//! The configuration that the cores serve: one immutable [`Snapshot`], replaced by message.
//!
//! A snapshot has disks, subsystems with their namespaces and allowed hosts, listeners, referrals and limits.
//! `app` builds a snapshot from the checked configuration file; a reload builds a new one with a higher
//! `generation`. Counters and disks outlive a snapshot: they are behind `Arc` and carried over to the next.
//!
//! State of controllers and queues is in `shared`, `controller` and `qpair`.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use nvme_spec::nqn::Nqn;
use spindle_nvme_transport::TransportKind;
use spindle_target_disk::{Disk, Geometry};

use crate::counters::NamespaceCounters;
use crate::discovery::DiscoveryLogs;

/// Index of a disk in [`Snapshot::disks`], its slot: the same in all snapshots that have the disk. Another
/// disk may get the slot of a removed disk once nobody has the removed disk ([`DiskSlot::is_free`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DiskId(pub usize);

/// Use of one slot of [`Snapshot::disks`], also after its disk was removed.
#[derive(Clone)]
pub struct DiskSlot {
    /// Number of the disk; no two disks of a process have the same.
    pub number: u64,
    /// The disk that has the slot, or the last that had it.
    pub disk: Weak<dyn Disk>,
}

impl DiskSlot {
    /// True when the slot may be used for another disk. A snapshot keeps its disks, and so does a namespace;
    /// a core keeps the disk of each of its handles until no request of the core has its index. So a core
    /// that has not received a newer snapshot, or whose disk has commands, keeps the slot in use.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.disk.strong_count() == 0
    }
}

/// Highest NSID of a subsystem; NN and MNAN of Identify Controller.
pub const NSID_MAX: u32 = 1024;

/// A namespace: a disk with an NSID and identifiers that stay the same after a restart.
pub struct Namespace {
    /// NSID, 1 ..= [`NSID_MAX`].
    pub nsid: u32,
    /// Disk of the namespace; a core finds its handle by this index.
    pub disk: DiskId,
    /// The same disk, for size, usage and health, which need no handle of a core.
    pub source: Arc<dyn Disk>,
    /// Geometry when this snapshot was built, so that a resize is a difference between two snapshots.
    pub geometry: Geometry,
    /// RFC 4122 UUID; all zero: none.
    pub uuid: [u8; 16],
    /// Namespace Globally Unique Identifier; all zero: none.
    pub nguid: [u8; 16],
    /// UUID and NGUID are derived from the disk, not configured.
    pub is_identity_derived: bool,
    /// Statistics by core; carried over by a reload.
    pub counters: Arc<NamespaceCounters>,
}

/// Hosts that may connect to a subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllowedHosts {
    /// Every host, also one without HOSTNQN.
    Any,
    /// Hosts with these HOSTNQNs.
    Only(Vec<Nqn>),
}

impl AllowedHosts {
    /// True when a host with this HOSTNQN may connect.
    #[must_use]
    pub fn allows(&self, host: &Nqn) -> bool {
        match self {
            AllowedHosts::Any => true,
            AllowedHosts::Only(hosts) => hosts.contains(host),
        }
    }

    /// True when each host that `other` allows is allowed here too.
    #[must_use]
    pub fn includes(&self, other: &AllowedHosts) -> bool {
        match (self, other) {
            (AllowedHosts::Any, _) => true,
            (AllowedHosts::Only(_), AllowedHosts::Any) => false,
            (AllowedHosts::Only(_), AllowedHosts::Only(others)) => {
                others.iter().all(|host| self.allows(host))
            }
        }
    }
}

/// An NVM subsystem.
pub struct Subsystem {
    /// SUBNQN by which hosts connect.
    pub nqn: Nqn,
    /// Serial number: printable ASCII, at most 20 characters, the same after a restart.
    pub serial: String,
    /// Model number: printable ASCII, at most 40 characters.
    pub model: String,
    /// Hosts that may connect; checked at each Connect and at a reload.
    pub hosts: AllowedHosts,
    /// Of these, the hosts that may attach to caches (optimistic reads).
    pub optimistic_hosts: AllowedHosts,
    /// Lowest and highest CNTLID that this process assigns.
    pub cntlid_range: (u16, u16),
    /// Most I/O queues of one controller.
    pub io_queues_max: u16,
    /// Indices in [`Snapshot::listeners`] of the listeners on which the subsystem is offered.
    pub listeners: Vec<usize>,
    /// Namespaces at index `nsid - 1`; `None`: the NSID is not active.
    pub namespaces: Vec<Option<Arc<Namespace>>>,
}

impl Subsystem {
    /// True when a host with this HOSTNQN may read caches by RDMA.
    #[must_use]
    pub fn allows_optimistic(&self, host: &Nqn) -> bool {
        self.hosts.allows(host) && self.optimistic_hosts.allows(host)
    }

    /// True when the caches of several hosts are kept coherent with one of the disks.
    #[must_use]
    pub fn has_clusters(&self) -> bool {
        self.active().any(|namespace| namespace.source.cluster().is_some())
    }

    /// The namespace with this NSID; `None`: the NSID is not active.
    #[inline]
    #[must_use]
    pub fn namespace(&self, nsid: u32) -> Option<&Arc<Namespace>> {
        let index = usize::try_from(nsid.checked_sub(1)?).ok()?;
        self.namespaces.get(index)?.as_ref()
    }

    /// Active namespaces in ascending order of NSID.
    pub fn active(&self) -> impl Iterator<Item = &Arc<Namespace>> {
        self.namespaces.iter().flatten()
    }
}

/// An address at which hosts connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// Port identifier in the discovery log (PORTID), unique, from 1.
    pub port_id: u16,
    /// TCP or RDMA.
    pub transport: TransportKind,
    /// Address and port as bound. The discovery log replaces an unspecified address (0.0.0.0, ::) by the
    /// address that the host used.
    pub address: SocketAddr,
    /// Most in-capsule data of a command on an I/O queue, in bytes, a multiple of 16.
    pub in_capsule_bytes: u32,
    /// False: a reload has removed the listener. Its index, to which its connections refer, and its port
    /// identifier stay in use.
    pub is_open: bool,
}

impl Listener {
    /// Transport and address, unique among open listeners: TCP and RDMA ports are independent.
    #[must_use]
    pub fn endpoint(&self) -> (TransportKind, SocketAddr) {
        (self.transport, self.address)
    }
}

/// A discovery service of another system, listed in the discovery log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Referral {
    /// Transport of that service.
    pub transport: TransportKind,
    /// Address and port of that service.
    pub address: SocketAddr,
    /// PORTID in the discovery log.
    pub port_id: u16,
}

/// Limits of all controllers of the process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ControllerLimits {
    /// Most entries of an I/O queue (MQES + 1), from 2; the configuration allows at most 1024. An admin queue
    /// may have [`ADMIN_QUEUE_ENTRIES`](nvme_spec::fabrics::ADMIN_QUEUE_ENTRIES) if that is more.
    pub queue_entries: u16,
    /// Most bytes of one command, a power of two times 4096 (MDTS).
    pub transfer_bytes: u32,
    /// Bytes of a piece of a bulk transfer: larger Reads and Writes are split where transport and disk allow
    /// it. 0: no command is split. A queue keeps the value from its Connect.
    pub bulk_unit: u32,
    /// Longest keep-alive time-out that a host may request, in ms; longer time-outs are refused. KATO 0 in
    /// Connect of an I/O controller disables keep alive.
    pub keep_alive_ms_max: u32,
    /// Keep-alive time-out of a discovery controller whose host requests none, in ms.
    pub discovery_keep_alive_ms: u32,
}

/// Keep-alive time-out of a discovery controller whose host requests none (Base 2.0 section 3.1.3.3).
const DISCOVERY_KEEP_ALIVE_MS: u32 = 120_000;

impl ControllerLimits {
    /// Longest keep-alive time-out that a host may request of a discovery controller, in ms: that of a host
    /// that requests none, at least the one of the specification. Every host may have such controllers, so
    /// those that are left alone must end soon. Linux requests 30 s for a persistent one, SPDK 10 s.
    #[must_use]
    pub fn discovery_keep_alive_ms_max(&self) -> u32 {
        self.discovery_keep_alive_ms.max(DISCOVERY_KEEP_ALIVE_MS).min(self.keep_alive_ms_max)
    }
}

/// The whole configuration of the target, immutable except for the logs that are made of it.
pub struct Snapshot {
    /// Incremented by each reload that changes anything; 1 at start.
    pub generation: u64,
    /// All disks of the process, by [`DiskId`]; `None`: the disk was removed.
    pub disks: Vec<Option<Arc<dyn Disk>>>,
    /// Use of each slot of `disks`, for who makes the next snapshot; the cores do not read it.
    pub slots: Vec<DiskSlot>,
    /// Listeners; each keeps its index over all snapshots of a process.
    pub listeners: Vec<Listener>,
    /// NVM subsystems, in the order of the configuration file.
    pub subsystems: Vec<Arc<Subsystem>>,
    /// Entries for other systems in the discovery log.
    pub referrals: Vec<Referral>,
    /// From `[limits]` of the configuration file.
    pub limits: ControllerLimits,
    /// Discovery logs of this configuration that hosts have read.
    pub discovery_logs: DiscoveryLogs,
}

impl Snapshot {
    /// Listeners that were not removed by a reload.
    pub fn open_listeners(&self) -> impl Iterator<Item = &Listener> {
        self.listeners.iter().filter(|listener| listener.is_open)
    }

    /// The subsystem with this SUBNQN; `None` also for the discovery subsystem.
    #[must_use]
    pub fn subsystem(&self, nqn: &Nqn) -> Option<&Arc<Subsystem>> {
        self.subsystems.iter().find(|subsystem| subsystem.nqn == *nqn)
    }
}
