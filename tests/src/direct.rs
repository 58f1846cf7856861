//! A target core with one connected I/O queue, driven by hand: no sockets, no chance, no threads.

use spindle_nvme_transport::ConnectionId;
use std::io::IoSlice;
use std::sync::Arc;

use arrayvec::ArrayVec;
use nvme_spec::Sqe;
use nvme_spec::fabrics::{ConnectAttributes, ConnectData};
use nvme_spec::nqn::Nqn;
use nvme_spec::register::CC;
use nvme_spec::zerocopy::IntoBytes;
use spindle_nvme_tcp::RxBatch;
use spindle_nvme_tcp::controller::{Conn, ConnConfig};
use spindle_nvme_tcp::host::{self, HostConfig, HostData, HostEvent};
use spindle_nvme_transport::{Connections, Peer, TransportKind};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_target::core::{CoreSettings, TargetCore};
use spindle_target::shared::Registry;
use spindle_target::snapshot::{ControllerLimits, Snapshot};
use spindle_target_disk::ram::{RamDisk, RamSpec};
use spindle_target_disk::{BlockRange, ChannelContext, Disk, IoRequest, Op, Prepared, Token};

use crate::snapshot::SnapshotBuilder;

/// Name of the subsystem that [`snapshot`] makes.
pub const SUBSYSTEM: &str = "nqn.2026-01.io.spindle:direct";

/// One subsystem with one namespace on `disk`, on 127.0.0.1:4420.
#[must_use]
pub fn snapshot(
    disk: &Arc<dyn Disk>,
    cores: usize,
    in_capsule_bytes: u32,
    transfer_bytes: u32,
) -> Arc<Snapshot> {
    let base = SnapshotBuilder::new(SUBSYSTEM, std::slice::from_ref(disk));
    let limits = ControllerLimits { transfer_bytes, ..base.limits };
    SnapshotBuilder { cores, in_capsule_bytes, limits, ..base }.build()
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
    pub admin: ConnectionId,
    /// The I/O queue: 128 entries, SQ flow control off.
    pub io: ConnectionId,
    /// The host's end of the admin queue.
    pub admin_link: Link,
    /// The host's end of the I/O queue.
    pub io_link: Link,
    /// Buffers of the host's side.
    pub pool: Pool,
}

/// In-capsule data of an I/O queue.
pub const IN_CAPSULE_BYTES: u32 = 4096;

fn pool() -> Pool {
    let zone = |buffer_bytes, count| ZoneSpec { buffer_bytes, count };
    let zones = [zone(4096, 256), zone(64 << 10, 64), zone(1 << 20, 8)];
    Pool::new(&zones, Pages::Base).expect("a pool")
}

/// A RAM disk whose blocks are all written.
///
/// # Panics
/// When there is no memory.
#[must_use]
pub fn written_disk(bytes: u64, block_bytes: u32) -> Arc<dyn Disk> {
    let spec = RamSpec { bytes, block_bytes, pages: Pages::Transparent, has_seals: false };
    let disk: Arc<dyn Disk> = RamDisk::new("ram", spec).expect("a disk");
    // Past the target and without copies, which take long where instructions are counted.
    let mut core = disk.open(&ChannelContext { core: 0, pool: pool(), depth: 1 }).expect("a core");
    let blocks = (1 << 20) / block_bytes;
    for lba in (0..bytes / u64::from(block_bytes)).step_by(blocks as usize) {
        let range = BlockRange { lba, blocks };
        let request = IoRequest::new(Op::Write { fua: false }, range);
        let Prepared::Fill(mut buf) = core.prepare(&request, None) else { panic!("no frames") };
        buf.copy_in(0, &lba.to_le_bytes());
        let done = core.submit(Token(0), &request, Some(buf));
        assert_eq!(done.map(|done| done.result), Some(Ok(())));
    }
    drop(core);
    disk
}

impl Direct {
    /// On a RAM disk whose blocks are all written.
    ///
    /// # Panics
    /// When the target does not play along.
    #[must_use]
    pub fn new(bytes: u64, block_bytes: u32) -> Direct {
        Direct::on(&written_disk(bytes, block_bytes))
    }

    /// On this disk, as it is.
    ///
    /// # Panics
    /// When the target does not play along.
    #[must_use]
    pub fn on(disk: &Arc<dyn Disk>) -> Direct {
        let admin_zone = ZoneSpec { buffer_bytes: 8192, count: 4 };
        let settings = CoreSettings {
            core: 0,
            cores: 1,
            connections: 8,
            disk_depth: 128,
            pool: pool(),
            admin_pool: Pool::new(&[admin_zone], Pages::Base).expect("a pool"),
            snapshot: snapshot(disk, 1, IN_CAPSULE_BYTES, 1 << 20),
            registry: Arc::new(Registry::default()),
            now: Nanos::ZERO,
            wall_ms: 0,
        };
        let mut core = TargetCore::new(settings);
        let pool = pool();
        let (mut admin_link, cntlid) = Link::connect(&mut core, &pool, 0, 0xffff);
        let sqe = Sqe::property_set(0, false, CC, 1 | 6 << 16 | 4 << 20);
        admin_link.host.submit(sqe, HostData::None).expect("room");
        admin_link.exchange(&mut core);
        let (io_link, _) = Link::connect(&mut core, &pool, 1, cntlid);
        Direct { core, admin: admin_link.id, io: io_link.id, admin_link, io_link, pool }
    }

    /// A command on the I/O queue from beginning to end.
    ///
    /// # Panics
    /// When it fails.
    pub fn run(&mut self, sqe: Sqe, data: HostData) {
        self.io_link.host.submit(sqe, data).expect("room");
        self.io_link.exchange(&mut self.core);
    }
}

/// The host's end of a connection, and the bytes on their way between the two ends. Allocates nothing once it
/// is warm.
pub struct Link {
    /// The target's end.
    pub id: ConnectionId,
    /// The host's end.
    pub host: host::Conn,
    bytes: Vec<u8>,
    batch: Option<RxBatch>,
}

/// Bytes of a receive, as a shell does it.
const BATCH_BYTES: usize = 256 << 10;

impl Link {
    /// Connect queue `qid`; the controller's identifier is what Connect answers.
    ///
    /// # Panics
    /// When the target does not play along.
    pub fn connect(core: &mut TargetCore<Conn>, pool: &Pool, qid: u16, cntlid: u16) -> (Link, u16) {
        let peer = Peer {
            transport: TransportKind::Tcp,
            listener: 0,
            remote: "127.0.0.1:9".parse().expect("an address"),
            local: "127.0.0.1:4420".parse().expect("an address"),
        };
        let conn = Conn::new(ConnConfig::default(), Nanos::ZERO);
        let id = core.accept(conn, peer).unwrap_or_else(|_| panic!("room"));
        let host = host::Conn::new(HostConfig::default(), Nanos::ZERO);
        let mut link = Link { id, host, bytes: Vec::new(), batch: Some(RxBatch::new(BATCH_BYTES)) };
        link.exchange(core);
        let data = ConnectData::new([1; 16], cntlid, &name(SUBSYSTEM), &name("nqn.2026-01.io.spindle:host"));
        let mut buf = pool.take(1024).expect("a buffer");
        buf.copy_in(0, data.as_bytes());
        let attributes = ConnectAttributes::new().with_disable_sq_flow_control(true);
        let sqe = Sqe::connect(0, qid, if qid == 0 { 31 } else { 127 }, 0, attributes);
        link.host.submit(sqe, HostData::ToController(buf)).expect("room");
        let result = link.exchange(core);
        if qid > 0 {
            link.host.set_in_capsule_bytes(IN_CAPSULE_BYTES);
        }
        (link, u16::try_from(result & 0xffff).expect("16 bits"))
    }

    /// Carry bytes both ways until nothing moves; dword 0 of the last completion.
    ///
    /// # Panics
    /// When a command fails or the connection ends.
    pub fn exchange(&mut self, core: &mut TargetCore<Conn>) -> u32 {
        let mut result = 0;
        let on_event = |event| match event {
            HostEvent::Completed { cqe, result: Ok(()), .. } => result = cqe.result_u32(),
            HostEvent::Ready => {}
            HostEvent::Completed { .. } | HostEvent::Closed { .. } => panic!("{event:?}"),
        };
        let mut on_event = on_event;
        while self.turn(core, &mut on_event) {}
        result
    }

    /// Carry bytes up, then down; false when there were none.
    ///
    /// # Panics
    /// When the target has closed the connection.
    pub fn turn(&mut self, core: &mut TargetCore<Conn>, on_event: &mut impl FnMut(HostEvent)) -> bool {
        self.bytes.clear();
        gather(&mut self.bytes, |pieces| self.host.send_pieces(pieces));
        self.host.sent(self.bytes.len());
        let has_sent = !self.bytes.is_empty();
        for chunk in self.bytes.chunks(BATCH_BYTES) {
            let mut batch = self.batch.take().unwrap_or_default();
            batch.extend(chunk);
            core.transport(self.id).expect("open").load(batch);
            core.step_deferred(self.id);
            self.batch = Some(core.transport(self.id).expect("open").unload());
        }
        self.bytes.clear();
        let conn = core.transport(self.id).expect("open");
        gather(&mut self.bytes, |pieces| conn.send_pieces(pieces));
        conn.sent(self.bytes.len());
        core.step(self.id);
        core.poll();
        while let Some(id) = core.next_send_ready() {
            if core.transport(id).is_some_and(|conn| conn.has_unread() && !conn.is_paused()) {
                core.step(id);
            }
        }
        for chunk in self.bytes.chunks(BATCH_BYTES) {
            let mut batch = self.batch.take().unwrap_or_default();
            batch.extend(chunk);
            self.host.load(batch);
            while let Some(event) = self.host.next_event() {
                on_event(event);
            }
            self.batch = Some(self.host.unload());
        }
        has_sent || !self.bytes.is_empty()
    }
}

/// Appends what these pieces hold.
fn gather<'a>(bytes: &mut Vec<u8>, pieces: impl FnOnce(&mut ArrayVec<IoSlice<'a>, 1024>) -> usize) {
    let mut slices = ArrayVec::<IoSlice<'a>, 1024>::new();
    pieces(&mut slices);
    slices.iter().for_each(|slice| bytes.extend_from_slice(slice));
}
