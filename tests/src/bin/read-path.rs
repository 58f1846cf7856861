//! The target's whole user-space path of a 4 KiB random read or write, without sockets: for counting
//! instructions.
//!
//! `read-path N [DEPTH [read | write | hit | uncached | miss]]` (hit: a read that a cache answers; uncached:
//! one of a disk that uses the pool; miss: the same with a cold cache in front): bytes of DEPTH commands,
//! writes with their data, are given to the connection as one receive would, replies are taken from it as one
//! `sendmsg` would, N commands in all. The instructions of a run with 2 N less those of one with N, by N, are
//! those of one read: `scripts/instructions` does that with callgrind.
#![forbid(unsafe_code)]

use std::hint::black_box;
use std::io::IoSlice;
use std::sync::Arc;

use arrayvec::ArrayVec;
use nvme_spec::Sqe;
use nvme_spec::tcp::{CapsuleCmd, Extent};
use nvme_spec::zerocopy::IntoBytes;
use spindle_nvme_tcp::RxBatch;
use spindle_nvme_transport::Connections;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_target_disk::{
    BlockRange, CacheSpec, CachedDisk, CoreContext, DiskSource, IoRequest, Op, PolicyKind, Prepared, Token,
};
use spindle_tests::blank::Blank;
use spindle_tests::direct::Direct;

const BLOCKS: u64 = 65_536;

/// A disk with a cache in which all of it is.
fn cached() -> Arc<dyn DiskSource> {
    let spec = CacheSpec::new(BLOCKS * 4096 * 11 / 10, PolicyKind::S3Fifo, Pages::Transparent);
    let disk = CachedDisk::new(Arc::new(Blank { blocks: BLOCKS }), Some(&spec)).expect("a cache");
    let zone = ZoneSpec { buffer_bytes: 4096, count: 1 };
    let pool = Pool::new(&[zone], Pages::Base).expect("a pool");
    let mut core = disk.open(&CoreContext { core: 0, pool, depth: 1 }).expect("a core");
    let mut done = Vec::with_capacity(1);
    for lba in 0..BLOCKS {
        let request = IoRequest::new(Op::Read, BlockRange { lba, blocks: 1 });
        assert!(matches!(core.prepare(&request, None), Prepared::Later));
        let ended = core.submit(Token(lba), &request, None);
        core.poll(Nanos::ZERO, &mut done);
        assert!(ended.or_else(|| done.pop()).is_some_and(|done| done.result.is_ok()));
    }
    drop(core);
    disk
}

/// A disk that uses the pool, without a cache, or with one that nearly each read passes around.
fn on_pool(has_cache: bool) -> Arc<dyn DiskSource> {
    let spec = CacheSpec::new(BLOCKS * 4096 / 2, PolicyKind::S3Fifo, Pages::Transparent);
    let spec = CacheSpec { is_paced: true, read_ahead: 256 << 10, ..spec };
    CachedDisk::new(Arc::new(Blank { blocks: BLOCKS }), has_cache.then_some(&spec)).expect("a disk")
}

fn main() {
    let mut args = std::env::args().skip(1);
    let mut number = |default| args.next().map_or(default, |arg| arg.parse::<u64>().expect("a number"));
    let total = number(100_000);
    let depth = u16::try_from(number(32)).expect("up to 127");
    let kind = args.next().unwrap_or_default();
    let is_write = kind == "write";
    let mut direct = match &*kind {
        "hit" => Direct::on(&cached()),
        "uncached" | "miss" => Direct::on(&on_pool(kind == "miss")),
        _ => Direct::new(BLOCKS * 4096, 4096),
    };
    let mut commands: Vec<u8> = Vec::new();
    let mut random = 0x2545_f491_4f6c_dd1du64;
    let mut left = total;
    let mut batch = Some(RxBatch::new(256 << 10));
    let mut bytes_out = 0;
    while left > 0 {
        commands.clear();
        for cid in 0..depth {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            if is_write {
                let mut sqe = Sqe::write(cid, 1, random % BLOCKS, 1, false);
                sqe.sgl = nvme_spec::Sgl::in_capsule(4096);
                let extent = Extent { pdo: 72, plen: 72 + 4096 };
                commands.extend_from_slice(CapsuleCmd::new(sqe, 0, extent).as_bytes());
                commands.resize(commands.len() + 4096, 7);
            } else {
                let mut sqe = Sqe::read(cid, 1, random % BLOCKS, 1);
                sqe.sgl = nvme_spec::Sgl::transport(4096);
                commands.extend_from_slice(CapsuleCmd::new(sqe, 0, Extent { pdo: 0, plen: 72 }).as_bytes());
            }
        }
        let mut full = batch.take().expect("given back");
        full.extend(&commands);
        let (core, id) = (&mut direct.core, direct.io);
        core.transport(id).expect("open").load(full);
        core.step(id);
        let conn = core.transport(id).expect("open");
        batch = Some(conn.unload());
        while conn.wants_send() {
            let count = {
                let mut pieces = ArrayVec::<IoSlice<'_>, 1024>::new();
                let count = conn.send_pieces(&mut pieces);
                black_box(&pieces);
                count
            };
            conn.sent(count);
            bytes_out += count;
        }
        core.step_sent(id);
        core.set_time(Nanos(left), 0);
        core.poll();
        while core.next_send_ready().is_some() {}
        left = left.saturating_sub(u64::from(depth));
    }
    println!("{total} commands, {bytes_out} bytes out");
}
