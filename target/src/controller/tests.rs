//! Controllers as hosts see them: a small world with two subsystems, and a file of tests for each part.

mod arbitrary;
mod commands;
mod connect;
mod events;
mod features;
mod identify;
mod logs;
mod property;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use nvme_spec::fabrics::{ConnectAttributes, ConnectData};
use nvme_spec::log::CriticalWarning;
use nvme_spec::nqn::Nqn;
use nvme_spec::register::{self, Cc};
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_nvme_transport::{Limits, Peer, TransportKind};
use spindle_reactor::clock::Nanos;
use spindle_target_disk::{
    ChannelContext, Disk, DiskChannel, Geometry, Health, OpenError, ResizeError, Usage,
};

use super::{ConnectedQueue, Context, Controller, Effect, Need, Outcome, connect as connect_command};
use crate::counters::NamespaceCounters;
use crate::discovery::DiscoveryLogs;
use crate::shared::Registry;
use crate::snapshot::{
    AllowedHosts, ControllerLimits, DiskId, Listener, Namespace, Referral, Snapshot, Subsystem,
};

pub(crate) const SUBSYSTEM: &str = "nqn.2026-01.test:everyone";
pub(crate) const PRIVATE: &str = "nqn.2026-01.test:private";
pub(crate) const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:host-a";
pub(crate) const OTHER_HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:host-b";
pub(crate) const HOST_ID: [u8; 16] = [0xa5; 16];
pub(crate) const KATO_MS: u32 = 5000;
pub(crate) const LIMITS: Limits =
    Limits { in_capsule_bytes: 4096, queue_entries: 128, transfer_bytes: 1 << 20 };

pub(crate) fn nqn(name: &str) -> Nqn {
    Nqn::new(name).unwrap()
}

/// A disk that is only a shape.
pub(crate) struct Shape {
    geometry: Geometry,
    blocks: AtomicU64,
    bytes_used: u64,
    /// What [`Shape::warn`] made of it. 0 K: a disk without a health.
    warning: AtomicU8,
    kelvin: AtomicU16,
}

impl Shape {
    pub(crate) fn new(geometry: Geometry) -> Shape {
        let blocks = AtomicU64::new(geometry.block_count);
        Shape { geometry, blocks, bytes_used: 5000, warning: AtomicU8::new(0), kelvin: AtomicU16::new(0) }
    }

    /// From now on it is a drive that warns of this, at this temperature.
    pub(crate) fn warn(&self, warning: CriticalWarning, kelvin: u16) {
        self.warning.store(warning.into_bits(), Ordering::Relaxed);
        self.kelvin.store(kelvin, Ordering::Relaxed);
    }
}

impl Disk for Shape {
    fn name(&self) -> &'static str {
        "shape"
    }

    fn kind(&self) -> &'static str {
        "shape"
    }

    fn geometry(&self) -> Geometry {
        Geometry { block_count: self.blocks.load(Ordering::Relaxed), ..self.geometry }
    }

    fn open(&self, _: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        unreachable!("controllers open no disk")
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.blocks.store(bytes / u64::from(self.geometry.block_bytes), Ordering::Relaxed);
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage { bytes_used: self.bytes_used }
    }

    /// A drive (see [`Shape::warn`]) promises nothing.
    fn deallocated_is_zero(&self) -> bool {
        self.kelvin.load(Ordering::Relaxed) == 0
    }

    fn health(&self) -> Option<Health> {
        let temperature_kelvin = self.kelvin.load(Ordering::Relaxed);
        (temperature_kelvin != 0).then(|| Health {
            critical_warning: self.warning.load(Ordering::Relaxed),
            temperature_kelvin,
            spare_percent: 90,
            spare_threshold_percent: 10,
            used_percent: 1,
            media_errors: 0,
            unsafe_shutdowns: 0,
        })
    }
}

pub(crate) const THIN_512: Geometry = Geometry {
    block_bytes: 512,
    block_count: 2048,
    is_read_only: false,
    has_volatile_cache: false,
    can_deallocate: true,
    atomic_blocks: 8,
    can_compare_and_write: true,
};

pub(crate) const THICK_4096: Geometry = Geometry {
    block_bytes: 4096,
    block_count: 1000,
    is_read_only: false,
    has_volatile_cache: true,
    can_deallocate: false,
    atomic_blocks: 2,
    can_compare_and_write: true,
};

pub(crate) fn namespace(nsid: u32, geometry: Geometry) -> Arc<Namespace> {
    namespace_of(nsid, geometry, Arc::new(Shape::new(geometry)))
}

/// A namespace on this disk.
pub(crate) fn namespace_of(nsid: u32, geometry: Geometry, source: Arc<Shape>) -> Arc<Namespace> {
    let number = u8::try_from(nsid % 251).unwrap();
    Arc::new(Namespace {
        nsid,
        disk: DiskId(usize::from(number)),
        source,
        geometry,
        uuid: [number | 0x40; 16],
        nguid: [number | 0x80; 16],
        is_identity_derived: false,
        counters: Arc::new(NamespaceCounters::new(2)),
    })
}

pub(crate) fn subsystem(name: &str, hosts: AllowedHosts, namespaces: &[Arc<Namespace>]) -> Subsystem {
    let last = namespaces.iter().map(|namespace| namespace.nsid).max().unwrap_or(0);
    let mut slots = vec![None; usize::try_from(last).unwrap()];
    for namespace in namespaces {
        slots[usize::try_from(namespace.nsid - 1).unwrap()] = Some(Arc::clone(namespace));
    }
    Subsystem {
        nqn: nqn(name),
        serial: "SPDL0001".to_owned(),
        model: "Spindle test".to_owned(),
        hosts,
        optimistic_hosts: AllowedHosts::Any,
        cntlid_range: (1, 4),
        io_queues_max: 4,
        listeners: vec![0],
        namespaces: slots,
    }
}

/// All that a controller looks at.
pub(crate) struct World {
    pub(crate) snapshot: Snapshot,
    pub(crate) registry: Registry,
    pub(crate) peer: Peer,
    pub(crate) now: Nanos,
}

fn listener(port_id: u16, transport: TransportKind, address: &str) -> Listener {
    Listener { port_id, transport, address: address.parse().unwrap(), in_capsule_bytes: 4096, is_open: true }
}

fn socket(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

impl World {
    /// One subsystem for every host with namespaces 1 and 3, one for the other host only, two listeners.
    pub(crate) fn new() -> World {
        let everyone = [namespace(1, THIN_512), namespace(3, THICK_4096)];
        let only = AllowedHosts::Only(vec![nqn(OTHER_HOST)]);
        let snapshot = Snapshot {
            generation: 7,
            disks: Vec::new(),
            slots: Vec::new(),
            listeners: vec![
                listener(1, TransportKind::Tcp, "0.0.0.0:4420"),
                listener(2, TransportKind::Rdma, "[fe80::1]:4421"),
            ],
            subsystems: vec![
                Arc::new(subsystem(SUBSYSTEM, AllowedHosts::Any, &everyone)),
                Arc::new(subsystem(PRIVATE, only, &[namespace(1, THIN_512)])),
            ],
            referrals: vec![Referral {
                transport: TransportKind::Tcp,
                address: socket("10.9.8.7:8009"),
                port_id: 9,
            }],
            limits: ControllerLimits {
                queue_entries: 64,
                transfer_bytes: 1 << 20,
                bulk_unit: 0,
                keep_alive_ms_max: 60_000,
                discovery_keep_alive_ms: 120_000,
            },
            discovery_logs: DiscoveryLogs::default(),
        };
        let peer = Peer {
            transport: TransportKind::Tcp,
            listener: 0,
            remote: socket("192.0.2.7:50000"),
            local: socket("192.0.2.1:4420"),
        };
        World { snapshot, registry: Registry::default(), peer, now: Nanos::from_secs(1000) }
    }

    pub(crate) fn cx(&self) -> Context<'_> {
        Context {
            snapshot: &self.snapshot,
            registry: &self.registry,
            peer: &self.peer,
            now: self.now,
            process_started: Nanos::from_secs(400),
            wall_ms: 1_800_000_000_000,
            core: 1,
            cores: 2,
        }
    }

    /// The subsystem for every host, to be changed.
    pub(crate) fn subsystem(&mut self) -> &mut Subsystem {
        Arc::get_mut(&mut self.snapshot.subsystems[0]).unwrap()
    }

    /// An admin controller that is not enabled yet.
    pub(crate) fn connect(&self, name: &str, kato_ms: u32) -> Box<Controller> {
        let data = ConnectData::new(HOST_ID, 0xffff, &nqn(name), &nqn(HOST));
        let sqe = Sqe::connect(1, 0, 31, kato_ms, ConnectAttributes::new());
        let (connected, result) = connect_command(&self.cx(), &sqe, &data, &LIMITS).unwrap();
        assert_eq!((connected.entries, connected.is_sq_flow_off), (32, false));
        let ConnectedQueue::Admin(controller) = connected.queue else { panic!("an I/O queue") };
        assert_eq!(result, u32::from(controller.shared.cntlid));
        controller
    }

    /// An I/O controller, enabled as Linux enables it.
    pub(crate) fn io(&self) -> Box<Controller> {
        let mut controller = self.connect(SUBSYSTEM, KATO_MS);
        assert_eq!(self.set_cc(&mut controller, enabled()), Ok(Effect::None));
        controller
    }

    /// A discovery controller, enabled.
    pub(crate) fn discovery(&self, kato_ms: u32) -> Box<Controller> {
        let mut controller = self.connect(nvme_spec::nqn::DISCOVERY_NQN, kato_ms);
        assert_eq!(self.set_cc(&mut controller, enabled()), Ok(Effect::None));
        controller
    }

    pub(crate) fn set_cc(&self, controller: &mut Controller, cc: Cc) -> Result<Effect, Status> {
        let sqe = Sqe::property_set(1, false, register::CC, u64::from(cc.into_bits()));
        let (outcome, effect) = controller.property(&self.cx(), &sqe);
        match outcome {
            Outcome::Reply { status: Status::SUCCESS, .. } => Ok(effect),
            Outcome::Reply { status, .. } => Err(status),
            Outcome::ParkAsyncEvent
            | Outcome::Abort { .. }
            | Outcome::EndFormer { .. }
            | Outcome::Next { .. } => panic!("{outcome:?}"),
        }
    }

    /// Run an admin command as the queue does: `Ok` with result and data, or what it failed with.
    pub(crate) fn run(&self, controller: &mut Controller, sqe: &Sqe) -> Result<(u64, Vec<u8>), Refused> {
        self.run_with(controller, sqe, &[])
    }

    /// The same, with data from the host.
    pub(crate) fn run_with(
        &self,
        controller: &mut Controller,
        sqe: &Sqe,
        from_host: &[u8],
    ) -> Result<(u64, Vec<u8>), Refused> {
        let need = controller.need(&self.cx(), sqe).map_err(|failure| (failure.status, failure.field))?;
        let mut data = if need.is_to_host { Vec::new() } else { from_host.to_vec() };
        data.resize(usize::try_from(need.memory).unwrap(), 0);
        match controller.execute(&self.cx(), sqe, &mut data) {
            Outcome::Reply { status: Status::SUCCESS, result, .. } => {
                data.resize(usize::try_from(need.bytes).unwrap(), 0);
                Ok((result, data))
            }
            Outcome::Reply { status, field, .. } => Err((status, field)),
            Outcome::ParkAsyncEvent => Ok((u64::MAX, Vec::new())),
            Outcome::EndFormer { token } => Ok((token, Vec::new())),
            Outcome::Next { acknowledged } => Ok((acknowledged, Vec::new())),
            Outcome::Abort { sqid, cid } => Ok((u64::from(sqid) << 16 | u64::from(cid), Vec::new())),
        }
    }
}

/// Status and field.
pub(crate) type Refused = (Status, Option<u16>);

pub(crate) fn enabled() -> Cc {
    Cc::new().with_en(true).with_iosqes(6).with_iocqes(4)
}

/// A check of the timers in time, with all received.
pub(crate) fn tick(controller: &mut Controller, now: Nanos) -> Option<super::Expired> {
    controller.tick(now, Nanos::ZERO, |_, _| true)
}

pub(crate) fn u16_at(data: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(data[at..at + 2].try_into().unwrap())
}

pub(crate) fn u32_at(data: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(data[at..at + 4].try_into().unwrap())
}

pub(crate) fn u64_at(data: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(data[at..at + 8].try_into().unwrap())
}
