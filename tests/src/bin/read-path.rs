//! The target's whole user-space path of a 4 KiB random read or write, without sockets: for counting
//! instructions.
//!
//! `read-path N [DEPTH [KIND]]`: bytes of DEPTH commands, writes with their data, are given to the
//! connection as one receive would, replies are taken from it as one `sendmsg` would, N commands in all.
//! The instructions of a run with 2 N less those of one with N, by N, are those of one command:
//! `scripts/instructions` does that with callgrind.
//!
//! | kind | disk |
//! |---|---|
//! | `read`, `write` | a RAM disk |
//! | `hit` | a cache with all pages of the disk |
//! | `uncached` | [`Blank`], which uses the pool and ends commands in `submit` |
//! | `miss` | the same with a cold cache in front |
//! | `file-read`, `file-write` | [`BlankFile`], whose commands end in a poll, with a cold cache in front |
//!
//! `file-read` and `file-write` have the layers of a file with a cache: `CachedChannel`, `CoreCache` and
//! `BackendChannel`, which keeps each command until the poll of the turn ends it, as it does for a file in
//! the page cache. The replies are sent after the poll. In `miss` there is no `BackendChannel`, and time
//! stands still: the cache's budget is spent after 64 pages, and nearly every later read passes around it. In
//! `file-read` time passes, and one read in 64 enters its page. What the ring of a file does in user space
//! is not counted.
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
    BlankFile, BlockRange, CacheSpec, CachedDisk, ChannelContext, Disk, IoRequest, Op, PolicyKind, Prepared,
    Token,
};
use spindle_tests::blank::Blank;
use spindle_tests::direct::Direct;

const BLOCKS: u64 = 65_536;
/// Time of a command of a file: a core executes some 500,000 in a second. A paced cache needs it: a page
/// enters each 128 us.
const FILE_NANOS: u64 = 2000;

/// A disk with a cache in which all of it is.
fn cached() -> Arc<dyn Disk> {
    let spec = CacheSpec::new(BLOCKS * 4096 * 11 / 10, PolicyKind::S3Fifo, Pages::Transparent);
    let disk = CachedDisk::new(Arc::new(Blank { blocks: BLOCKS }), Some(&spec)).expect("a cache");
    let zone = ZoneSpec { buffer_bytes: 4096, count: 1 };
    let pool = Pool::new(&[zone], Pages::Base).expect("a pool");
    let mut core = disk.open(&ChannelContext { core: 0, pool, depth: 1 }).expect("a core");
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

/// The disk with a cold cache of half of it, as a configuration makes it, but without the thread that makes
/// the memory resident: its instructions would be counted, and the core's do not depend on it.
fn cold(disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
    let spec = CacheSpec::new(BLOCKS * 4096 / 2, PolicyKind::S3Fifo, Pages::Transparent);
    let spec = CacheSpec { is_paced: true, read_ahead: 256 << 10, ..spec };
    CachedDisk::new(disk, Some(&spec)).expect("a cache")
}

/// A target with the disk of a kind.
fn target(kind: &str) -> Direct {
    let blank = Arc::new(Blank { blocks: BLOCKS });
    match kind {
        "" | "read" | "write" => Direct::new(BLOCKS * 4096, 4096),
        "hit" => Direct::on(&cached()),
        "uncached" => Direct::on(&(CachedDisk::new(blank, None).expect("a disk") as Arc<dyn Disk>)),
        "miss" => Direct::on(&cold(blank)),
        "file-read" | "file-write" => Direct::on(&cold(BlankFile::new(BLOCKS))),
        other => panic!("{other:?} is no kind"),
    }
}

/// Takes what the connection wants to send. Returns its bytes.
fn send(direct: &mut Direct) -> usize {
    let conn = direct.core.transport(direct.io).expect("open");
    let mut bytes = 0;
    while conn.wants_send() {
        let count = {
            let mut pieces = ArrayVec::<IoSlice<'_>, 1024>::new();
            let count = conn.send_pieces(&mut pieces);
            black_box(&pieces);
            count
        };
        conn.sent(count);
        bytes += count;
    }
    direct.core.step(direct.io);
    bytes
}

fn main() {
    let mut args = std::env::args().skip(1);
    let mut number = |default| args.next().map_or(default, |arg| arg.parse::<u64>().expect("a number"));
    let total = number(100_000);
    let depth = u16::try_from(number(32)).expect("up to 127");
    let kind = args.next().unwrap_or_default();
    let is_write = kind.ends_with("write");
    let is_file = kind.starts_with("file-");
    let mut direct = target(&kind);
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
        core.step_deferred(id);
        batch = Some(core.transport(id).expect("open").unload());
        if !is_file {
            bytes_out += send(&mut direct);
        }
        let now = if is_file { (total - left) * FILE_NANOS } else { left };
        direct.core.set_time(Nanos(now), 0);
        direct.core.poll();
        while direct.core.next_send_ready().is_some() {
            // The other kinds have nothing left to send.
            if is_file {
                bytes_out += send(&mut direct);
            }
        }
        left = left.saturating_sub(u64::from(depth));
    }
    println!("{total} commands, {bytes_out} bytes out");
}
