//! The configuration as every core sees it: one immutable [`Snapshot`], swapped by message.
//!
//! Subsystems, their namespaces and allowed hosts, listeners and referrals. Made and checked by `app` from
//! the configuration file; a reload makes a new one with a higher `generation`. Things that live on
//! (counters, disks) are behind `Arc` and are carried over from the old snapshot to the new.
//!
//! What it does not do: no state of controllers or queues is here (`shared`, `controller`).

use std::net::SocketAddr;
use std::sync::Arc;

use nvme_spec::nqn::Nqn;
use spindle_disk::{DiskSource, Geometry};
use spindle_transport::TransportKind;

use crate::counters::NamespaceCounters;

/// Index of a disk in [`Snapshot::disks`]; stays the same disk over all snapshots of a process. Once the disk
/// was removed, it is not used again: commands that were on their way to it must find nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DiskId(pub usize);

/// Highest NSID that a subsystem may have; also what Identify Controller reports as NN and MNAN.
pub const NSID_MAX: u32 = 1024;

/// A namespace: a disk under a number, with an identity that outlives restarts.
pub struct Namespace {
    /// 1 ..= [`NSID_MAX`].
    pub nsid: u32,
    /// The disk behind it.
    pub disk: DiskId,
    /// The same disk, for what does not go through a core's own handle (size, space used).
    pub source: Arc<dyn DiskSource>,
    /// Its shape when this snapshot was made, so that a resize is seen as a difference between two snapshots.
    pub geometry: Geometry,
    /// RFC 4122 UUID.
    pub uuid: [u8; 16],
    /// Namespace Globally Unique Identifier.
    pub nguid: [u8; 16],
    /// What was done to it, by core.
    pub counters: Arc<NamespaceCounters>,
}

/// Who may connect to a subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllowedHosts {
    /// Every host.
    Any,
    /// These host NQNs only.
    Only(Vec<Nqn>),
}

impl AllowedHosts {
    /// True when `host` may connect.
    #[must_use]
    pub fn allows(&self, host: &Nqn) -> bool {
        match self {
            AllowedHosts::Any => true,
            AllowedHosts::Only(hosts) => hosts.contains(host),
        }
    }
}

/// An NVM subsystem.
pub struct Subsystem {
    /// Its name.
    pub nqn: Nqn,
    /// Serial number: printable ASCII, at most 20 characters, the same after a restart.
    pub serial: String,
    /// Model number: printable ASCII, at most 40 characters.
    pub model: String,
    /// Who may connect.
    pub hosts: AllowedHosts,
    /// Lowest and highest controller identifier that this process gives out.
    pub cntlid_range: (u16, u16),
    /// Most I/O queues that one controller may have.
    pub io_queues_max: u16,
    /// Index of the listeners ([`Snapshot::listeners`]) on which it is offered.
    pub listeners: Vec<usize>,
    /// Namespaces at index `nsid - 1`.
    pub namespaces: Vec<Option<Arc<Namespace>>>,
}

impl Subsystem {
    /// The namespace with this number, when there is one.
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

/// An address on which hosts connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// Port identifier in the discovery log (PORTID), unique, from 1.
    pub port_id: u16,
    /// The transport.
    pub transport: TransportKind,
    /// Address and port as bound; an unspecified address (0.0.0.0, ::) is replaced by the one the host used.
    pub address: SocketAddr,
    /// In-capsule data of I/O queues, in bytes, a multiple of 16.
    pub in_capsule_bytes: u32,
    /// False: a reload has taken it away. It keeps its place in the list, by which its connections know it,
    /// and its port identifier.
    pub is_open: bool,
}

impl Listener {
    /// What no two listeners have in common: the transports have ports of their own.
    #[must_use]
    pub fn endpoint(&self) -> (TransportKind, SocketAddr) {
        (self.transport, self.address)
    }
}

/// Another discovery service that hosts are pointed to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Referral {
    /// The transport there.
    pub transport: TransportKind,
    /// Address and port there.
    pub address: SocketAddr,
    /// Port identifier for the log.
    pub port_id: u16,
}

/// Limits that all controllers of the process share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerLimits {
    /// Most entries of a queue (MQES + 1), 2 ..= 1024... the slab's and tag's range.
    pub queue_entries: u16,
    /// Most bytes of one command, a power of two times 4096 (MDTS).
    pub transfer_bytes: u32,
    /// Bytes of the pieces into which a larger Read or Write is cut where its transport and its disk allow
    /// it; 0: none is cut. A queue keeps what it was connected with.
    pub bulk_unit: u32,
    /// Longest keep-alive time-out that is granted, in ms; longer ones are refused. 0 in Connect means none.
    pub keep_alive_ms_max: u32,
    /// What a discovery connection gets when it asks for none, in ms.
    pub discovery_keep_alive_ms: u32,
}

/// The whole configuration of the target, immutable.
pub struct Snapshot {
    /// Rises with every change; 1 at start.
    pub generation: u64,
    /// All disks of the process, by [`DiskId`]; one that was removed leaves `None`.
    pub disks: Vec<Option<Arc<dyn DiskSource>>>,
    /// Listeners; each keeps its index over all snapshots of a process.
    pub listeners: Vec<Listener>,
    /// Subsystems in the file's order.
    pub subsystems: Vec<Arc<Subsystem>>,
    /// Referrals.
    pub referrals: Vec<Referral>,
    /// Limits.
    pub limits: ControllerLimits,
}

impl Snapshot {
    /// The addresses on which hosts can connect.
    pub fn open_listeners(&self) -> impl Iterator<Item = &Listener> {
        self.listeners.iter().filter(|listener| listener.is_open)
    }

    /// The subsystem of this name.
    #[must_use]
    pub fn subsystem(&self, nqn: &Nqn) -> Option<&Arc<Subsystem>> {
        self.subsystems.iter().find(|subsystem| subsystem.nqn == *nqn)
    }
}
