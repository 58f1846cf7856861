//! Nothing allocates once a disk is warm.

use std::time::{Duration, Instant};

use spindle_reactor::alloc_count::allocations_here;
use spindle_reactor::clock::{Clock, Nanos};
use spindle_reactor::mem::{Buf, Pages};

use super::{TempPath, pool};
use crate::{
    BlockRange, ChannelContext, DelayDisk, DelaySpec, Disk, DiskChannel, Done, FileDisk, FileSpec, IoRequest,
    NullDisk, NullSpec, Op, Prepared, RamDisk, RamSpec, Token,
};

const DEPTH: u64 = 16;
/// Timeout of a round.
const TIME_MAX: Duration = Duration::from_secs(60);

/// Submits 16 commands of several kinds and waits for all completions.
fn round(disk: &mut dyn DiskChannel, context: &ChannelContext, done: &mut Vec<Done>, blocks: u32) {
    let mut left = DEPTH;
    for token in 0..DEPTH {
        let range = BlockRange { lba: token * u64::from(blocks), blocks };
        let op = match token % 8 {
            0..=2 => Op::Write { fua: false },
            3 => Op::WriteZeroes { deallocate: true, fua: false },
            4 => Op::Flush,
            _ => Op::Read,
        };
        let request = IoRequest::new(op, range);
        let has_data = matches!(op, Op::Read | Op::Write { .. });
        let buf: Option<Buf> = match has_data.then(|| disk.prepare(&request, None)) {
            Some(Prepared::Pool) => context.pool.take(blocks * 512),
            Some(Prepared::Ready(buf)) => {
                // A disk that reads in place gets the buffer with `submit`; on a cache hit the read has
                // ended.
                if !disk.abilities().reads_in_place {
                    left -= 1;
                    continue;
                }
                Some(buf)
            }
            Some(Prepared::Fill(buf)) => Some(buf),
            Some(Prepared::Later | Prepared::Wait) | None => None,
        };
        left -= u64::from(disk.submit(Token(token), &request, buf).is_some());
    }
    // A flush of a file may be slow.
    let begun = Instant::now();
    while left > 0 && begun.elapsed() < TIME_MAX {
        disk.poll(Clock::now(), done);
        left -= done.len() as u64;
        done.clear();
        std::thread::yield_now();
    }
    assert_eq!(left, 0, "all ended");
}

pub(crate) fn check(source: &dyn Disk, rounds: u32) {
    let context = ChannelContext { core: 0, pool: pool(), depth: 32 };
    let mut disk = source.open(&context).expect("opens");
    let mut done = Vec::with_capacity(32);
    for blocks in [1, 8, 100] {
        (0..4).for_each(|_| round(&mut *disk, &context, &mut done, blocks));
    }
    let before = allocations_here();
    for blocks in [1, 8, 100] {
        (0..rounds).for_each(|_| round(&mut *disk, &context, &mut done, blocks));
    }
    assert_eq!(allocations_here() - before, 0, "{}", source.kind());
}

#[test]
fn a_warm_disk_allocates_nothing() {
    let bytes = 4 << 20;
    let ram = || {
        RamDisk::new("r", RamSpec { bytes, block_bytes: 512, pages: Pages::Base, has_seals: false })
            .expect("ram disk")
    };
    check(&*ram(), 50);
    let (latency, seek) = (Nanos::from_us(20), Nanos::from_us(5));
    let slow = DelaySpec { latency, seek, bandwidth: Some(1 << 40) };
    check(&*DelayDisk::new(ram(), &slow).expect("slow"), 50);
    check(&*NullDisk::new("n", NullSpec { bytes, block_bytes: 512 }).expect("null disk"), 50);
    let at = TempPath::new();
    let spec = FileSpec { create_bytes: Some(bytes), ..FileSpec::new(at.path(), 512) };
    check(&*FileDisk::new("f", &spec).expect("file disk"), 5);
}
