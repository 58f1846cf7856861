//! [`SnapshotBuilder`]: the configuration of a target in a test.

use std::sync::Arc;

use spindle_nvme_transport::TransportKind;
use spindle_target::counters::NamespaceCounters;
use spindle_target::discovery::DiscoveryLogs;
use spindle_target::snapshot::{
    AllowedHosts, ControllerLimits, DiskId, Listener, Namespace, Snapshot, Subsystem,
};
use spindle_target_disk::Disk;

use crate::direct::name;

/// What [`SnapshotBuilder::build`] makes a snapshot of: one subsystem on all listeners that are open.
#[derive(Clone)]
pub struct SnapshotBuilder {
    /// Number of the snapshot.
    pub generation: u64,
    /// Cores of the target.
    pub cores: usize,
    /// Name of the subsystem.
    pub subsystem: &'static str,
    /// Who may connect to it.
    pub hosts: AllowedHosts,
    /// Of these, the hosts that may read caches by RDMA.
    pub optimistic_hosts: AllowedHosts,
    /// Disks, by [`DiskId`].
    pub disks: Vec<Option<Arc<dyn Disk>>>,
    /// The disk of namespace 1, 2, ...
    pub namespaces: Vec<Option<usize>>,
    /// Which listeners are open: 127.0.0.1, from port 4420 on.
    pub listeners: Vec<bool>,
    /// Their transport.
    pub transport: TransportKind,
    /// In-capsule data of an I/O queue.
    pub in_capsule_bytes: u32,
    /// Limits of all controllers.
    pub limits: ControllerLimits,
}

impl SnapshotBuilder {
    /// One core, one listener for NVMe/TCP, every host, a namespace for each disk.
    #[must_use]
    pub fn new(subsystem: &'static str, disks: &[Arc<dyn Disk>]) -> SnapshotBuilder {
        SnapshotBuilder {
            generation: 1,
            cores: 1,
            subsystem,
            hosts: AllowedHosts::Any,
            optimistic_hosts: AllowedHosts::Any,
            disks: disks.iter().cloned().map(Some).collect(),
            namespaces: (0..disks.len()).map(Some).collect(),
            listeners: vec![true],
            transport: TransportKind::Tcp,
            in_capsule_bytes: 4096,
            limits: ControllerLimits {
                queue_entries: 128,
                transfer_bytes: 1 << 20,
                bulk_unit: 0,
                keep_alive_ms_max: 3_600_000,
                discovery_keep_alive_ms: 120_000,
            },
        }
    }

    /// The snapshot. Namespaces whose disk is not there are left out.
    #[must_use]
    pub fn build(&self) -> Arc<Snapshot> {
        let namespace = |(disk, number): (&Option<usize>, u8)| {
            let index = (*disk)?;
            let source = Arc::clone(self.disks[index].as_ref()?);
            Some(Arc::new(Namespace {
                nsid: u32::from(number),
                disk: DiskId(index),
                geometry: source.geometry(),
                source,
                uuid: [number; 16],
                nguid: [number; 16],
                is_identity_derived: false,
                counters: Arc::new(NamespaceCounters::new(self.cores)),
            }))
        };
        let subsystem = Subsystem {
            nqn: name(self.subsystem),
            serial: "TEST".to_owned(),
            model: "Spindle".to_owned(),
            hosts: self.hosts.clone(),
            optimistic_hosts: self.optimistic_hosts.clone(),
            cntlid_range: (1, 100),
            io_queues_max: 16,
            listeners: (0..self.listeners.len()).filter(|index| self.listeners[*index]).collect(),
            namespaces: self.namespaces.iter().zip(1..).map(namespace).collect(),
        };
        let listener = |(port_id, is_open): (u16, &bool)| Listener {
            port_id,
            transport: self.transport,
            address: ([127, 0, 0, 1], 4419 + port_id).into(),
            in_capsule_bytes: self.in_capsule_bytes,
            is_open: *is_open,
        };
        Arc::new(Snapshot {
            generation: self.generation,
            disks: self.disks.clone(),
            slots: Vec::new(),
            listeners: (1..).zip(&self.listeners).map(listener).collect(),
            subsystems: vec![Arc::new(subsystem)],
            referrals: Vec::new(),
            discovery_logs: DiscoveryLogs::default(),
            limits: self.limits.clone(),
        })
    }
}
