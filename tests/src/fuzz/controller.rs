//! What a host sends, into [`Conn`] and the target core behind it.
//!
//! The first byte says where the connection is to begin: fresh, after ICReq, as an admin queue or as an I/O
//! queue; the second seeds how the rest is cut. Another host's queues stay on the same core and must not
//! notice.

use spindle_nvme_transport::ConnectionId;
use std::io::IoSlice;
use std::sync::Arc;

use arrayvec::ArrayVec;
use nvme_spec::Sqe;
use nvme_spec::register::CC;
use spindle_nvme_tcp::controller::{Conn, ConnConfig};
use spindle_nvme_tcp::host::HostData;
use spindle_nvme_tcp::{Phase, RxBatch};
use spindle_nvme_transport::{Connections, Peer, TransportKind};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_target::core::{CoreSettings, TargetCore};
use spindle_target::shared::Registry;
use spindle_target_disk::Disk;

use super::bytes::Bytes;
use crate::direct::{Link, snapshot};
use crate::sim::Rng;
use crate::sim::disk::PoolDisk;

/// Where the connection begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// Before ICReq.
    Fresh,
    /// After ICResp.
    Initialized,
    /// An admin queue with an enabled controller.
    Admin,
    /// An I/O queue.
    Io,
}

impl Begin {
    /// All of them; the index is the first byte modulo their number.
    pub const ALL: [Begin; 4] = [Begin::Fresh, Begin::Initialized, Begin::Admin, Begin::Io];
}

/// A core with two hosts, of which the first is the one that may send anything.
pub struct Scene {
    /// The core.
    pub core: TargetCore<Conn>,
    /// The registry.
    pub registry: Arc<Registry>,
    /// The hosts' buffers.
    pub pool: Pool,
    home: (u64, u64),
}

fn zone(buffer_bytes: u32, count: u32) -> ZoneSpec {
    ZoneSpec { buffer_bytes, count }
}

impl Scene {
    /// A core with a small disk and little memory.
    ///
    /// # Panics
    /// When there is no memory for it.
    #[must_use]
    pub fn new() -> Scene {
        let disk: Arc<dyn Disk> = PoolDisk::create(512, 256);
        let registry = Arc::new(Registry::default());
        let settings = CoreSettings {
            core: 0,
            cores: 1,
            connections: 8,
            disk_depth: 16,
            pool: Pool::new(&[zone(4096, 4), zone(64 << 10, 2)], Pages::Base).expect("a pool"),
            admin_pool: Pool::new(&[zone(8192, 2)], Pages::Base).expect("a pool"),
            snapshot: snapshot(&disk, 1, 4096, 64 << 10),
            registry: Arc::clone(&registry),
            now: Nanos::ZERO,
            wall_ms: 0,
        };
        let core = TargetCore::new(settings);
        let home = (core.pools().0.free_bytes(), core.pools().1.free_bytes());
        let pool = Pool::new(&[zone(4096, 64), zone(64 << 10, 4)], Pages::Base).expect("a pool");
        Scene { core, registry, pool, home }
    }

    /// A host with an admin queue and an I/O queue.
    ///
    /// # Panics
    /// When the target does not play along.
    pub fn host(&mut self) -> [Link; 2] {
        let (mut admin, cntlid) = Link::connect(&mut self.core, &self.pool, 0, 0xffff);
        let sqe = Sqe::property_set(0, false, CC, 1 | 6 << 16 | 4 << 20);
        admin.host.submit(sqe, HostData::None).expect("room");
        admin.exchange(&mut self.core);
        let (io, _) = Link::connect(&mut self.core, &self.pool, 1, cntlid);
        [admin, io]
    }

    fn accept(&mut self) -> ConnectionId {
        let peer = Peer {
            transport: TransportKind::Tcp,
            listener: 0,
            remote: "127.0.0.1:9".parse().expect("an address"),
            local: "127.0.0.1:4420".parse().expect("an address"),
        };
        // Fixed: the length says which bits of a TTAG are its index, and the corpora have TTAGs.
        let conn = Conn::new(ConnConfig { queue_entries: 128, ..ConnConfig::default() }, Nanos::ZERO);
        self.core.accept(conn, peer).unwrap_or_else(|_| panic!("room"))
    }

    /// Bytes arrive, cut as `rng` wants; what the target sends is lost.
    pub fn feed(&mut self, id: ConnectionId, bytes: &[u8], rng: &mut Rng) {
        let mut left = bytes;
        while !left.is_empty() {
            let count = rng.size(1, 3000).min(left.len());
            let (chunk, rest) = left.split_at(count);
            left = rest;
            let Some(conn) = self.core.transport(id) else { return };
            let mut batch = RxBatch::new(count);
            batch.extend(chunk);
            conn.load(batch);
            self.core.step_deferred(id);
            if let Some(conn) = self.core.transport(id) {
                conn.unload();
            }
            self.turn(id, rng);
            let is_stuck =
                |core: &mut TargetCore<Conn>| core.transport(id).is_some_and(|conn| conn.is_paused());
            if is_stuck(&mut self.core) {
                return; // it waits for memory that it has itself; a shell would not read on
            }
        }
    }

    /// Some of what there is to send leaves; disks, waiting commands and time go on.
    fn turn(&mut self, id: ConnectionId, rng: &mut Rng) {
        for _ in 0..3 {
            if let Some(conn) = self.core.transport(id) {
                let total = {
                    let mut pieces = ArrayVec::<IoSlice<'_>, 64>::new();
                    conn.send_pieces(&mut pieces)
                };
                let count = if rng.permille(300) { rng.size(0, total) } else { total };
                conn.sent(count);
            }
            self.core.step(id);
            self.core.poll();
            while self.core.next_send_ready().is_some() {}
            while self.core.next_closed().is_some() {}
            while self.core.notices().pop().is_some() {}
        }
    }

    /// All connections are gone; nothing is left.
    ///
    /// # Panics
    /// When something is.
    pub fn finish(mut self) {
        let ids: Vec<ConnectionId> = self.core.connections().collect();
        for id in ids {
            if let Some(conn) = self.core.transport(id) {
                conn.on_reset();
            }
            self.core.step_deferred(id);
        }
        self.core.poll();
        assert_eq!(self.core.usage().connections, 0, "a connection outlived its socket");
        let now = (self.core.pools().0.free_bytes(), self.core.pools().1.free_bytes());
        assert_eq!(now, self.home, "buffers did not come home");
        assert_eq!(self.registry.all().len(), 0, "a controller outlived its host");
    }
}

impl Default for Scene {
    fn default() -> Scene {
        Scene::new()
    }
}

/// The body.
///
/// # Panics
/// When a promise is broken.
pub fn run(bytes: &[u8]) {
    let mut bytes = Bytes::new(bytes);
    let begin = bytes.pick(&Begin::ALL);
    let mut rng = Rng::new(u64::from(bytes.byte()));
    let mut scene = Scene::new();
    let [mut admin, mut io] = scene.host();
    let victim = match begin {
        Begin::Fresh | Begin::Initialized => scene.accept(),
        Begin::Admin | Begin::Io => {
            let links = scene.host();
            if begin == Begin::Admin { links[0].id } else { links[1].id }
        }
    };
    if begin == Begin::Initialized {
        scene.feed(victim, &super::host::icreq(), &mut rng);
    }
    scene.feed(victim, bytes.rest(), &mut rng);
    let phase = scene.core.transport(victim).map(|conn| conn.phase());
    let is_over = phase.is_none_or(|phase| phase != Phase::Open);
    if !is_over && rng.permille(500) {
        // The host says no more, and closes.
        if let Some(conn) = scene.core.transport(victim) {
            conn.on_peer_closed();
        }
        scene.core.step_deferred(victim);
    }
    // The other host has noticed nothing.
    let buf = scene.pool.take(512).expect("the hosts' own");
    let is_pool_free = scene.core.pools().0.free_bytes() > 0;
    admin.host.submit(Sqe::keep_alive(1), HostData::None).expect("room");
    admin.exchange(&mut scene.core);
    if is_pool_free {
        io.host.submit(Sqe::read(1, 1, 0, 1), HostData::FromController(buf)).expect("room");
        io.exchange(&mut scene.core);
    }
    scene.finish();
}
