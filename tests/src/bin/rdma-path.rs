//! The target's user-space path of a random read of so many pages, or of a 4 KiB random write, over RDMA,
//! without verbs: for counting instructions, work requests and completions.
//!
//! `rdma-path N [DEPTH [read | write [PAGES]]]`: capsules of DEPTH commands, writes with their data, are
//! given to the connection as one poll would, its work requests are taken as for one doorbell, and the
//! signalled ones complete, N commands in all. `scripts/instructions` uses it as `read-path`.
#![forbid(unsafe_code)]

use std::hint::black_box;
use std::sync::Arc;

use nvme_spec::fabrics::{ConnectAttributes, ConnectData};
use nvme_spec::register::CC;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Cqe, Sgl, Sqe};
use spindle_nvme_rdma::controller::{CAPSULE_BYTES, Capsule, Conn, ConnConfig};
use spindle_nvme_rdma::work::{Completion, Op};
use spindle_nvme_transport::{ConnectionId, Connections, Peer, TransportKind};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_reactor::slab::Slot;
use spindle_target::core::{CoreSettings, TargetCore};
use spindle_target::shared::Registry;
use spindle_tests::direct::{IN_CAPSULE_BYTES, SUBSYSTEM, name, snapshot, written_disk};

const BLOCKS: u64 = 65_536;

/// A connection, its receive buffers and the counts of its work.
struct Link {
    id: ConnectionId,
    receives: Vec<Buf>,
    signalled: Vec<Slot>,
    work: u64,
    completions: u64,
}

impl Link {
    fn open(core: &mut TargetCore<Conn>, receives: &Pool) -> Link {
        let address = "127.0.0.1:4420".parse().expect("an address");
        let peer = Peer { transport: TransportKind::Rdma, listener: 0, remote: address, local: address };
        let config = ConnConfig {
            in_capsule_bytes: IN_CAPSULE_BYTES,
            segments_max: 16,
            reads_max: 16,
            can_invalidate: true,
            ..ConnConfig::default()
        };
        let id = core.accept(Conn::new(config), peer).unwrap_or_else(|_| panic!("room"));
        core.transport(id).expect("new").on_established();
        let receives = (0..128).map_while(|_| receives.take(CAPSULE_BYTES + IN_CAPSULE_BYTES)).collect();
        Link { id, receives, signalled: Vec::with_capacity(256), work: 0, completions: 0 }
    }

    /// A capsule arrives. `bytes`: in-capsule data, which is in the receive buffer already.
    fn receive(&mut self, core: &mut TargetCore<Conn>, sqe: Sqe, bytes: u32) {
        let buf = (bytes > 0).then(|| self.receives.pop().expect("a receive"));
        let conn = core.transport(self.id).expect("open");
        conn.received(Capsule { bytes: CAPSULE_BYTES + bytes, sqe, buf });
        self.completions += 1;
    }

    /// What a shell does after a poll, and the completions of its work. Returns the last completion queue
    /// entry that was sent.
    fn turn(&mut self, core: &mut TargetCore<Conn>) -> [u8; 64] {
        let mut last = [0; 64];
        core.step(self.id);
        let conn = core.transport(self.id).expect("open");
        while let Some(buf) = conn.next_buffer() {
            self.receives.push(buf);
        }
        while let Some(work) = conn.next_work() {
            self.work += 1;
            if work.is_signalled {
                self.signalled.push(work.chain);
            }
            if let Op::Send { head, .. } = black_box(&work).op {
                last = head;
            }
        }
        for chain in self.signalled.drain(..) {
            conn.completed(Completion { chain, is_signalled: true, is_ok: true });
            self.completions += 1;
        }
        core.step(self.id);
        core.poll();
        last
    }

    /// Connects the queue and returns the controller's identifier.
    fn connect(&mut self, core: &mut TargetCore<Conn>, qid: u16, cntlid: u16) -> u16 {
        let data = ConnectData::new([1; 16], cntlid, &name(SUBSYSTEM), &name("nqn.2026-01.io.spindle:host"));
        self.receives.last_mut().expect("a receive").copy_in(64, data.as_bytes());
        let attributes = ConnectAttributes::new().with_disable_sq_flow_control(true);
        let entries = if qid == 0 { 31 } else { 127 };
        let sqe = Sqe::connect(0, qid, entries, 0, attributes).with_sgl(Sgl::in_capsule(1024));
        self.receive(core, sqe, 1024);
        cntlid_of(&self.turn(core))
    }
}

fn cntlid_of(head: &[u8; 64]) -> u16 {
    assert_eq!(head[14..size_of::<Cqe>()], [0, 0], "Connect fails");
    u16::from_le_bytes([head[0], head[1]])
}

fn core() -> TargetCore<Conn> {
    let zone = |buffer_bytes, count| ZoneSpec { buffer_bytes, count };
    let pool = |zones: &[ZoneSpec]| Pool::new(zones, Pages::Base).expect("a pool");
    let disk = written_disk(BLOCKS * 4096, 4096);
    TargetCore::new(CoreSettings {
        core: 0,
        cores: 1,
        connections: 8,
        disk_depth: 128,
        pool: pool(&[zone(4096, 256), zone(64 << 10, 64), zone(1 << 20, 8)]),
        admin_pool: pool(&[zone(8192, 4)]),
        snapshot: snapshot(&disk, 1, IN_CAPSULE_BYTES, 1 << 20),
        registry: Arc::new(Registry::default()),
        now: Nanos::ZERO,
        wall_ms: 0,
    })
}

fn main() {
    let mut args = std::env::args().skip(1);
    let mut number = |default| args.next().map_or(default, |arg| arg.parse::<u64>().expect("a number"));
    let total = number(100_000);
    let depth = u16::try_from(number(32)).expect("up to 127");
    let is_write = args.next().is_some_and(|kind| kind == "write");
    let pages = args.next().map_or(1, |arg| arg.parse::<u32>().expect("1 to 256"));
    let mut core = core();
    let receives = Pool::of_strides(CAPSULE_BYTES + IN_CAPSULE_BYTES, 256).expect("receives");
    let mut admin = Link::open(&mut core, &receives);
    let cntlid = admin.connect(&mut core, 0, 0xffff);
    admin.receive(&mut core, Sqe::property_set(0, false, CC, 1 | 6 << 16 | 4 << 20), 0);
    admin.turn(&mut core);
    let mut io = Link::open(&mut core, &receives);
    io.connect(&mut core, 1, cntlid);
    (io.work, io.completions) = (0, 0);
    let mut random = 0x2545_f491_4f6c_dd1du64;
    let mut left = total;
    while left > 0 {
        for cid in 0..depth {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            if is_write {
                let sqe = Sqe::write(cid, 1, random % BLOCKS, 1, false).with_sgl(Sgl::in_capsule(4096));
                io.receive(&mut core, sqe, 4096);
            } else {
                let sgl = Sgl::keyed(random, 4096 * pages, 0x77, true);
                let first = random % (BLOCKS / u64::from(pages)) * u64::from(pages);
                io.receive(&mut core, Sqe::read(cid, 1, first, pages).with_sgl(sgl), 0);
            }
        }
        core.set_time(Nanos(left), 0);
        io.turn(&mut core);
        left = left.saturating_sub(u64::from(depth));
    }
    println!("{total} commands, {} work requests, {} completions", io.work, io.completions);
}
