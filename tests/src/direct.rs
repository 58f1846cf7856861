//! A target core with one connected I/O queue, driven by hand: no sockets, no chance, no threads.

use std::io::IoSlice;
use std::sync::Arc;

use arrayvec::ArrayVec;
use nvme_spec::Sqe;
use nvme_spec::fabrics::{ConnectAttributes, ConnectData};
use nvme_spec::nqn::Nqn;
use nvme_spec::register::CC;
use nvme_spec::zerocopy::IntoBytes;
use spindle_disk::DiskSource;
use spindle_disk::ram::{RamDisk, RamSpec};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_reactor::slab::Slot;
use spindle_target::core::{CoreSettings, TargetCore};
use spindle_target::counters::NamespaceCounters;
use spindle_target::shared::Registry;
use spindle_target::snapshot::{
    AllowedHosts, ControllerLimits, DiskId, Listener, Namespace, Peer, Snapshot, Subsystem, TransportKind,
};
use spindle_tcp::RxBatch;
use spindle_tcp::controller::{Conn, ConnConfig};
use spindle_tcp::host::{self, HostConfig, HostData, HostEvent};

/// Name of the subsystem that [`snapshot`] makes.
pub const SUBSYSTEM: &str = "nqn.2026-01.io.spindle:direct";

/// One subsystem with one namespace on `disk`, on 127.0.0.1:4420.
#[must_use]
pub fn snapshot(
    disk: &Arc<dyn DiskSource>,
    cores: usize,
    in_capsule_bytes: u32,
    transfer_bytes: u32,
) -> Arc<Snapshot> {
    let namespace = Namespace {
        nsid: 1,
        disk: DiskId(0),
        source: Arc::clone(disk),
        geometry: disk.geometry(),
        uuid: [1; 16],
        nguid: [2; 16],
        counters: Arc::new(NamespaceCounters::new(cores)),
    };
    let subsystem = Subsystem {
        nqn: name(SUBSYSTEM),
        serial: "DIRECT".to_owned(),
        model: "Spindle".to_owned(),
        hosts: AllowedHosts::Any,
        cntlid_range: (1, 100),
        io_queues_max: 16,
        listeners: vec![0],
        namespaces: vec![Some(Arc::new(namespace))],
    };
    Arc::new(Snapshot {
        generation: 1,
        disks: vec![Some(Arc::clone(disk))],
        listeners: vec![Listener {
            port_id: 1,
            transport: TransportKind::Tcp,
            address: "127.0.0.1:4420".parse().expect("an address"),
            in_capsule_bytes,
        }],
        subsystems: vec![Arc::new(subsystem)],
        referrals: Vec::new(),
        limits: ControllerLimits {
            queue_entries: 128,
            transfer_bytes,
            keep_alive_ms_max: 3_600_000,
            discovery_keep_alive_ms: 120_000,
        },
    })
}

/// A checked name.
///
/// # Panics
/// When it is none.
#[must_use]
pub fn name(text: &str) -> Nqn {
    Nqn::new(text).expect("a name")
}

/// A core with an admin queue and an I/O queue, both connected, of one host.
pub struct Direct {
    /// The core.
    pub core: TargetCore<Conn>,
    /// The admin queue.
    pub admin: Slot,
    /// The I/O queue: 128 entries, SQ flow control off.
    pub io: Slot,
    /// Buffers of the host's side.
    pub pool: Pool,
}

impl Direct {
    /// On a RAM disk whose blocks are all written.
    ///
    /// # Panics
    /// When the target does not play along.
    #[must_use]
    pub fn new(bytes: u64, block_bytes: u32) -> Direct {
        let spec = RamSpec { bytes, block_bytes, pages: Pages::Transparent };
        let disk = RamDisk::new("ram", spec).expect("a disk");
        let zone = |buffer_bytes, count| ZoneSpec { buffer_bytes, count };
        let pool = || Pool::new(&[zone(4096, 256), zone(1 << 20, 8)], Pages::Base).expect("a pool");
        let settings = CoreSettings {
            core: 0,
            cores: 1,
            connections: 8,
            disk_depth: 128,
            pool: pool(),
            admin_pool: Pool::new(&[zone(8192, 4)], Pages::Base).expect("a pool"),
            snapshot: snapshot(&disk, 1, 4096, 1 << 20),
            registry: Arc::new(Registry::default()),
            now: Nanos::ZERO,
            wall_ms: 0,
        };
        let mut core = TargetCore::new(settings).expect("a core");
        let pool = pool();
        let (admin, mut host, result) = connect(&mut core, &pool, 0, 0xffff);
        let sqe = Sqe::property_set(0, false, CC, 1 | 6 << 16 | 4 << 20);
        host.submit(sqe, HostData::None).expect("room");
        exchange(&mut core, admin, &mut host);
        let cntlid = u16::try_from(result & 0xffff).expect("16 bits");
        let (io, mut host, _) = connect(&mut core, &pool, 1, cntlid);
        let piece = 1 << 20;
        for lba in (0..bytes / u64::from(block_bytes)).step_by(piece / block_bytes as usize) {
            let mut buf = pool.take(1 << 20).expect("a buffer");
            buf.copy_in(0, &lba.to_le_bytes());
            let blocks = u32::try_from(piece).expect("small") / block_bytes;
            host.submit(Sqe::write(0, 1, lba, blocks, false), HostData::ToController(buf)).expect("room");
            exchange(&mut core, io, &mut host);
        }
        Direct { core, admin, io, pool }
    }
}

/// Connect queue `qid`; its name on the core, the host's end, and Connect's result.
fn connect(core: &mut TargetCore<Conn>, pool: &Pool, qid: u16, cntlid: u16) -> (Slot, host::Conn, u32) {
    let peer = Peer {
        transport: TransportKind::Tcp,
        listener: 0,
        remote: "127.0.0.1:9".parse().expect("an address"),
        local: "127.0.0.1:4420".parse().expect("an address"),
    };
    let id =
        core.accept(Conn::new(ConnConfig::default(), Nanos::ZERO), peer).unwrap_or_else(|_| panic!("room"));
    let mut host = host::Conn::new(HostConfig::default(), Nanos::ZERO);
    host.connect();
    exchange(core, id, &mut host);
    let data = ConnectData::new([1; 16], cntlid, &name(SUBSYSTEM), &name("nqn.2026-01.io.spindle:host"));
    let mut buf = pool.take(1024).expect("a buffer");
    buf.copy_in(0, data.as_bytes());
    let attributes = ConnectAttributes::new().with_disable_sq_flow_control(true);
    let sqe = Sqe::connect(0, qid, if qid == 0 { 31 } else { 127 }, 0, attributes);
    host.submit(sqe, HostData::ToController(buf)).expect("room");
    let result = exchange(core, id, &mut host);
    (id, host, result)
}

/// Carry bytes both ways until nothing moves; dword 0 of the last completion.
///
/// # Panics
/// When a command fails or the connection ends.
pub fn exchange(core: &mut TargetCore<Conn>, id: Slot, host: &mut host::Conn) -> u32 {
    let mut result = 0;
    loop {
        let to_target = gather(|pieces| host.send_pieces(pieces));
        host.sent(to_target.len());
        let mut batch = RxBatch::new(to_target.len().max(1));
        batch.extend(&to_target);
        core.transport(id).expect("open").load(batch);
        core.step(id);
        let conn = core.transport(id).expect("open");
        conn.unload();
        let to_host = gather(|pieces| conn.send_pieces(pieces));
        conn.sent(to_host.len());
        core.step_sent(id);
        core.poll();
        while core.next_touched().is_some() {}
        if to_target.is_empty() && to_host.is_empty() {
            return result;
        }
        let mut batch = RxBatch::new(to_host.len().max(1));
        batch.extend(&to_host);
        host.load(batch);
        while let Some(event) = host.next_event() {
            match event {
                HostEvent::Completed { cqe, result: Ok(()), .. } => result = cqe.result_u32(),
                HostEvent::Ready { .. } => {}
                HostEvent::Completed { .. } | HostEvent::Closed { .. } => panic!("{event:?}"),
            }
        }
        host.unload();
    }
}

fn gather<'a>(pieces: impl FnOnce(&mut ArrayVec<IoSlice<'a>, 1024>) -> usize) -> Vec<u8> {
    let mut slices = ArrayVec::<IoSlice<'a>, 1024>::new();
    pieces(&mut slices);
    slices.iter().flat_map(|slice| slice.iter().copied()).collect()
}
