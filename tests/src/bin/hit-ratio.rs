//! The share of pages that a cache finds, over a trace: for `scripts/compare/hit-ratio`.
//!
//! `hit-ratio TRACE POLICY FRAMES`: TRACE has page numbers, 8 bytes each, least significant first; the
//! highest bit marks a write of the page. POLICY is `s3-fifo` or `lru`. One core reads and writes page by
//! page through the cache of the product, over a disk without a medium. Prints how many were found.
#![forbid(unsafe_code)]

use std::sync::Arc;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_target_disk::{
    BlockRange, CacheSpec, CachedDisk, CoreContext, DiskSource, IoRequest, Op, PolicyKind, Prepared, Token,
};
use spindle_tests::blank::Blank;

/// Marks a write.
const WRITE: u64 = 1 << 63;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [trace, policy, frames] = &args[..] else { panic!("hit-ratio TRACE POLICY FRAMES") };
    let trace = std::fs::read(trace).expect("a trace");
    let frames: u64 = frames.parse().expect("a number of frames");
    let policy = if policy == "lru" { PolicyKind::Lru } else { PolicyKind::S3Fifo };
    let spec = CacheSpec::new(frames * 4096, policy, Pages::Base);
    let disk = CachedDisk::new(Arc::new(Blank { blocks: 1 << 40 }), Some(&spec)).expect("a cache");
    let zone = ZoneSpec { buffer_bytes: 4096, count: 1 };
    let pool = Pool::new(&[zone], Pages::Base).expect("a pool");
    let mut core = disk.open(&CoreContext { core: 0, pool: pool.clone(), depth: 1 }).expect("a core");
    let mut done = Vec::with_capacity(1);
    for page in trace.chunks_exact(8) {
        let page = u64::from_le_bytes(page.try_into().expect("8 bytes"));
        let (lba, is_write) = (page & !WRITE, page & WRITE != 0);
        let op = if is_write { Op::Write { fua: false } } else { Op::Read };
        let request = IoRequest::new(op, BlockRange { lba, blocks: 1 });
        let buf = match core.prepare(&request, None) {
            _ if is_write => pool.take(4096),
            Prepared::Ready(_data) => continue,
            Prepared::Later => None,
            Prepared::Pool => pool.take(4096),
            Prepared::Fill(_) | Prepared::Wait => panic!("no answer of a cache"),
        };
        done.extend(core.submit(Token(lba), &request, buf));
        core.poll(Nanos::ZERO, &mut done);
        assert!(done.pop().is_some_and(|done| done.result.is_ok()));
    }
    println!("{}", disk.counts().hits);
}
