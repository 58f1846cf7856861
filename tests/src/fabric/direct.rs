//! A target core with one host over the fabric, driven by hand: no chance but the keys' addresses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme_spec::fabrics::{ConnectAttributes, ConnectData};
use nvme_spec::register::CC;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Cqe, Sqe};
use spindle_nvme_rdma::controller::{Conn, ConnConfig};
use spindle_nvme_rdma::host::{HostConfig, HostEvent};
use spindle_nvme_transport::host::HostData;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_target::core::{CoreSettings, TargetCore};
use spindle_target::shared::Registry;
use spindle_target_disk::Disk;

use super::{Link, Setting, Weather};
use crate::direct::{SUBSYSTEM, name, snapshot};
use crate::sim::Rng;

/// A command that takes longer hangs.
const TIME_MAX: Duration = Duration::from_secs(60);
/// Turns until a command that has its memory has ended, and its answer is acknowledged.
pub const TURNS_MAX: u32 = 200;
/// In-capsule data of an I/O queue.
pub const IN_CAPSULE_BYTES: u32 = 4096;

/// What a queue is made with: nothing ever fails.
#[must_use]
pub fn setting(qid: u16) -> Setting {
    let in_capsule_bytes = if qid == 0 { 0 } else { IN_CAPSULE_BYTES };
    Setting {
        target: ConnConfig {
            in_capsule_bytes,
            receives: 32,
            send_queue: 64,
            segments_max: 16,
            reads_max: 4,
            can_invalidate: true,
            ..ConnConfig::default()
        },
        host: HostConfig { entries: 32, send_wr: 32, max_sge: 2, in_capsule_bytes, descriptors: 16 },
        receives: 32,
        weather: Weather { pieces: 1, ..Weather::default() },
        is_honest: true,
    }
}

/// A core with an admin queue and an I/O queue, both connected, of one host.
pub struct Direct {
    /// The core.
    pub core: TargetCore<Conn>,
    /// The host's admin queue.
    pub admin: Link,
    /// Its I/O queue.
    pub io: Link,
    /// Buffers of the host's side.
    pub pool: Pool,
    /// Addresses.
    pub rng: Rng,
    /// Controllers.
    pub registry: Arc<Registry>,
    home: (u64, u64),
}

fn zone(buffer_bytes: u32, count: u32) -> ZoneSpec {
    ZoneSpec { buffer_bytes, count }
}

impl Direct {
    /// On this disk, with these zones in the target's pool.
    ///
    /// # Panics
    /// When the target does not play along.
    #[must_use]
    pub fn on(disk: &Arc<dyn Disk>, zones: &[ZoneSpec], io: Setting) -> Direct {
        let registry = Arc::new(Registry::default());
        let settings = CoreSettings {
            core: 0,
            cores: 1,
            connections: 8,
            disk_depth: 64,
            pool: Pool::new(zones, Pages::Base).expect("a pool"),
            admin_pool: Pool::new(&[zone(8192, 4)], Pages::Base).expect("a pool"),
            snapshot: snapshot(disk, 1, IN_CAPSULE_BYTES, 1 << 20),
            registry: Arc::clone(&registry),
            now: Nanos::ZERO,
            wall_ms: 0,
        };
        let mut core = TargetCore::new(settings);
        let home = (core.pools().0.free_bytes(), core.pools().1.free_bytes());
        let zones = [zone(4096, 64), zone(64 << 10, 40), zone(1 << 20, 8)];
        let pool = Pool::new(&zones, Pages::Base).expect("a pool");
        let mut rng = Rng::new(1);
        let (admin, io) = connect(&mut core, &pool, &mut rng, io);
        Direct { core, admin, io, pool, rng, registry, home }
    }

    /// A command on the I/O queue from beginning to end.
    ///
    /// # Panics
    /// When it fails, or has no end.
    pub fn run(&mut self, sqe: Sqe, data: HostData) -> Option<Buf> {
        let Direct { core, io, rng, .. } = self;
        finish(io, core, rng, sqe, data).1
    }

    /// Carry on until nothing moves.
    pub fn exchange(&mut self, on_event: &mut impl FnMut(HostEvent)) {
        while self.io.turn(&mut self.core, &mut self.rng, on_event) {}
    }

    /// All connections go; nothing is left.
    ///
    /// # Panics
    /// When something is.
    pub fn finish(mut self) {
        for link in [&mut self.io, &mut self.admin] {
            end(link, &mut self.core, &mut self.rng);
        }
        self.core.poll();
        assert_eq!(self.core.usage().connections, 0, "a connection outlived its queue pair");
        let now = (self.core.pools().0.free_bytes(), self.core.pools().1.free_bytes());
        assert_eq!(now, self.home, "buffers did not come home");
        assert_eq!(self.registry.all().len(), 0, "a controller outlived its host");
    }
}

/// A host's two queues.
///
/// # Panics
/// When the target does not play along.
pub fn connect(core: &mut TargetCore<Conn>, pool: &Pool, rng: &mut Rng, io: Setting) -> (Link, Link) {
    let mut queue = |core: &mut TargetCore<Conn>, qid: u16, cntlid: u16, setting: Setting| {
        let mut link = Link::new(setting, core, 0);
        let data = ConnectData::new([1; 16], cntlid, &name(SUBSYSTEM), &name("nqn.2026-01.io.spindle:host"));
        let mut buf = pool.take(1024).expect("a buffer");
        buf.copy_in(0, data.as_bytes());
        let attributes = ConnectAttributes::new().with_disable_sq_flow_control(true);
        let sqe = Sqe::connect(0, qid, 31, 0, attributes);
        let (cqe, _) = finish(&mut link, core, rng, sqe, HostData::ToController(buf));
        (link, u16::try_from(cqe.result_u32() & 0xffff).expect("16 bits"))
    };
    let (mut admin, cntlid) = queue(core, 0, 0xffff, setting(0));
    let (io, _) = {
        let sqe = Sqe::property_set(0, false, CC, 1 | 6 << 16 | 4 << 20);
        let mut rng = Rng::new(2);
        finish(&mut admin, core, &mut rng, sqe, HostData::None);
        queue(core, 1, cntlid, io)
    };
    (admin, io)
}

/// One command from beginning to end.
///
/// # Panics
/// When it fails, or has no end.
pub fn finish(
    link: &mut Link,
    core: &mut TargetCore<Conn>,
    rng: &mut Rng,
    sqe: Sqe,
    data: HostData,
) -> (Cqe, Option<Buf>) {
    assert!(link.submit(sqe, data, rng).is_ok(), "the connection is closed");
    let mut ended = None;
    let since = Instant::now();
    // A file takes its time.
    while ended.is_none() {
        assert!(since.elapsed() < TIME_MAX, "a command hangs");
        std::thread::yield_now();
        let mut on_event = |event: HostEvent| match event {
            HostEvent::Completed { cqe, buf, result: Ok(()), .. } => {
                ended = Some((cqe, buf.map(|data| data.buf)));
            }
            HostEvent::Ready | HostEvent::Completed { .. } | HostEvent::Closed { .. } => panic!("{event:?}"),
        };
        // On to where nothing moves; a core with too little memory for another's command goes on for ever.
        for _ in 0..TURNS_MAX {
            if !link.turn(core, rng, &mut on_event) {
                break;
            }
        }
    }
    ended.expect("it has")
}

/// The host goes, and the target notices.
///
/// # Panics
/// When the connection does not end.
pub fn end(link: &mut Link, core: &mut TargetCore<Conn>, rng: &mut Rng) {
    link.cut(core, rng);
    while link.next_event().is_some() {}
    for _ in 0..10_000 {
        if link.is_over() {
            return;
        }
        link.target_disconnected(core);
        link.touch();
        link.shake(core, rng, 8);
    }
    panic!("a connection does not end");
}

impl Link {
    /// What the host sends arrives before an event says that the connection is established.
    pub fn before_established(&mut self, core: &mut TargetCore<Conn>, rng: &mut Rng) {
        self.host_posts(rng);
        while self.host_starts() {}
        while self.arrives_at_target() {}
        while self.target_receives(core) {}
        self.target_turn(core, rng);
    }

    /// Everything that can happen happens, in order. False when nothing did.
    pub fn turn(
        &mut self,
        core: &mut TargetCore<Conn>,
        rng: &mut Rng,
        on_event: &mut impl FnMut(HostEvent),
    ) -> bool {
        let mut has_worked = self.host_posts(rng);
        while self.host_starts() {}
        while self.host_acknowledged(rng) {}
        while self.arrives_at_target() {}
        if !self.is_established {
            self.establish(core);
        }
        while self.target_receives(core) {}
        while self.target_completes(core) {}
        self.target_turn(core, rng);
        has_worked |= core.poll();
        crate::receive_pass(core);
        self.touch();
        self.target_turn(core, rng);
        while core.next_send_ready().is_some() {}
        while core.next_message().is_some() {}
        while self.target_starts(core) {
            has_worked = true;
        }
        while self.target_acknowledged(core, rng) {}
        while self.target_completes(core) {
            has_worked = true;
        }
        while self.arrives_at_host() {
            has_worked = true;
        }
        while self.host_takes_one(true) || self.host_takes_one(false) {}
        while let Some(event) = self.next_event() {
            has_worked = true;
            on_event(event);
        }
        has_worked
    }
}
