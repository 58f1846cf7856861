//! The rules of the cache, one by one, over a disk whose completions the test holds.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pool};

use super::held::{Control, HeldDisk};
use super::{CachedDisk, PolicyKind, spec};
use crate::cache::CacheCounts;
use crate::testing::pool;
use crate::{
    BlockRange, ChannelContext, Disk, DiskChannel, DiskError, Done, IoRequest, Op, Owner, Prepared, Token,
};

pub(super) const PAGE: usize = 4096;

/// One core's handle on a cached disk of 512-byte blocks.
pub(super) struct Rig {
    pub(super) disk: Box<dyn DiskChannel>,
    pub(super) source: Arc<CachedDisk>,
    pub(super) control: Arc<Control>,
    pool: Pool,
    pub(super) done: Vec<Done>,
}

/// A read of these bytes.
pub(super) fn read(at: usize, bytes: usize) -> IoRequest {
    IoRequest::new(Op::Read, range(at, bytes))
}

pub(super) fn range(at: usize, bytes: usize) -> BlockRange {
    BlockRange { lba: at as u64 / 512, blocks: u32::try_from(bytes / 512).expect("small") }
}

impl Rig {
    pub(super) fn new(disk_bytes: usize, cache_bytes: u64) -> Rig {
        let (inner, control) = HeldDisk::create(512, disk_bytes);
        let source = CachedDisk::new(inner, Some(&spec(cache_bytes, PolicyKind::S3Fifo))).expect("a cache");
        Rig::on(source, control)
    }

    /// Without a cache, so far.
    pub(super) fn without(disk_bytes: usize) -> Rig {
        let (inner, control) = HeldDisk::create(512, disk_bytes);
        Rig::on(CachedDisk::new(inner, None).expect("a disk"), control)
    }

    pub(super) fn on(source: Arc<CachedDisk>, control: Arc<Control>) -> Rig {
        let pool = pool();
        let context = ChannelContext { core: 0, pool: pool.clone(), depth: 64 };
        let disk = source.open(&context).expect("opens");
        Rig { disk, source, control, pool, done: Vec::with_capacity(64) }
    }

    /// Another core's handle on the same disk.
    pub(super) fn other(&self) -> Rig {
        Rig::on(Arc::clone(&self.source), Arc::clone(&self.control))
    }

    /// Begin a read; the data of one that is answered at once.
    pub(super) fn begin(&mut self, token: u64, request: IoRequest) -> Option<Buf> {
        match self.disk.prepare(&request, None) {
            Prepared::Ready(data) => return Some(data),
            Prepared::Later => assert!(self.disk.submit(Token(token), &request, None).is_none()),
            Prepared::Pool => {
                let buf = Buf::heap(request.range.blocks * 512);
                assert!(self.disk.submit(Token(token), &request, Some(buf)).is_none());
            }
            Prepared::Fill(_) | Prepared::Wait => panic!("no answer of a cache"),
        }
        None
    }

    /// Begin a write of this byte.
    pub(super) fn write(&mut self, token: u64, at: usize, bytes: usize, byte: u8) {
        let len = u32::try_from(bytes).expect("small");
        let mut buf = self.pool.take(len).unwrap_or_else(|| Buf::heap(len));
        buf.copy_in(0, &vec![byte; bytes]);
        let request = IoRequest::new(Op::Write { fua: false }, range(at, bytes));
        assert!(self.disk.submit(Token(token), &request, Some(buf)).is_none());
    }

    pub(super) fn poll(&mut self) -> usize {
        self.disk.poll(Nanos::ZERO, &mut self.done);
        self.done.len()
    }

    /// The end of a command.
    pub(super) fn wait(&mut self, token: u64) -> Done {
        for _ in 0..10_000 {
            if let Some(at) = self.done.iter().position(|done| done.token == Token(token)) {
                return self.done.remove(at);
            }
            self.poll();
        }
        panic!("{token} does not end")
    }

    /// A read, to its end.
    pub(super) fn data(&mut self, at: usize, bytes: usize) -> Vec<u8> {
        let buf = match self.begin(99, read(at, bytes)) {
            Some(buf) => buf,
            None => self.wait(99).buf.expect("the data of a read"),
        };
        buf.segments().flatten().copied().collect()
    }

    pub(super) fn counts(&self) -> CacheCounts {
        self.source.counts()
    }

    pub(super) fn reads(&self) -> u64 {
        self.control.reads.load(SeqCst)
    }

    /// At rest, without a cache.
    pub(super) fn assert_plain(&mut self) {
        self.done.clear();
        self.poll();
        assert_eq!(self.disk.in_flight(), 0);
        assert!(self.source.cache().is_none());
        assert_eq!(self.pool.free_bytes(), pool().free_bytes(), "a buffer is left over");
    }

    /// At rest each frame is free or found.
    pub(super) fn assert_at_rest(&mut self) {
        self.done.clear();
        self.poll();
        assert_eq!(self.disk.in_flight(), 0);
        let shared = self.source.shared();
        let words = shared.words();
        let [_, filling, present, detached] = words.census();
        assert_eq!((filling, detached), (0, 0), "frames are left over");
        assert_eq!(self.source.shared().index.len(), present as usize, "entries and frames differ");
        assert!((0..words.len()).all(|frame| !words.is_pinned(frame)), "a pin is left over");
        assert_eq!(self.pool.free_bytes(), pool().free_bytes(), "a buffer is left over");
    }
}

#[test]
fn a_page_is_read_once_and_then_found() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    assert_eq!(rig.data(3 * PAGE + 512, 1024), [3; 1024]);
    assert_eq!(rig.reads(), 1);
    assert_eq!(rig.data(3 * PAGE, PAGE), [3; PAGE]);
    assert_eq!(rig.data(4 * PAGE - 512, 512), [3; 512]);
    assert_eq!(rig.reads(), 1);
    // Two of four pages are there: what is missing is read, in one piece where it is in a row.
    assert_eq!(rig.data(5 * PAGE, 512), [5; 512]);
    let across: Vec<u8> = (2..7_u8).flat_map(|page| [page; PAGE]).skip(512).collect();
    assert_eq!(rig.data(2 * PAGE + 512, 5 * PAGE - 512), across);
    assert_eq!(rig.reads(), 2 + 3);
    let counts = rig.counts();
    assert_eq!((counts.hits, counts.misses, counts.passed), (2 + 2, 2 + 3, 0));
    rig.assert_at_rest();
}

#[test]
fn what_is_read_once_is_answered_where_it_is_there_and_passes_by_otherwise() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    rig.data(0, PAGE);
    let once = |at, bytes| IoRequest { hints: 0x36, ..read(at, bytes) };
    let hit = rig.begin(1, once(512, 512)).expect("it is there");
    assert!(hit.equals_at(0, &[0; 512]));
    for at in [PAGE, PAGE, 0] {
        assert!(rig.begin(2, once(at, 2 * PAGE)).is_none());
        assert_eq!(rig.wait(2).result, Ok(()));
    }
    drop(hit);
    assert_eq!((rig.reads(), rig.source.shared().index.len()), (4, 1));
    let words = rig.source.shared();
    let heat = || (0..256).filter_map(|frame| words.words().heat(frame)).max();
    assert_eq!(heat(), Some(0), "it is no hit for the policy");
    drop(rig.begin(1, read(PAGE, 2 * PAGE)));
    rig.wait(1);
    let before = (heat(), rig.reads());
    for at in [0, PAGE, 0] {
        assert!(rig.begin(1, once(at, 2 * PAGE)).is_some(), "two pages that are there");
    }
    (0..20).for_each(|_| _ = rig.poll());
    assert_eq!((heat(), rig.reads()), before, "nor does it read ahead");
    assert_eq!(words.index.len(), 3);
    // Reserved values, and all others, say nothing of that.
    for (page, hints) in [(5, 7), (8, 0x0f), (11, 0x46 & !6)] {
        assert!(rig.begin(3, IoRequest { hints, ..read(page * PAGE, PAGE) }).is_none());
        assert_eq!(rig.wait(3).result, Ok(()));
    }
    assert_eq!(rig.source.shared().index.len(), 6);
    rig.assert_at_rest();
}

#[test]
fn misses_of_one_page_are_one_read() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    let mut other = rig.other();
    rig.control.holds_reads.store(true, SeqCst);
    for token in 0..32 {
        assert!(rig.begin(token, read(2 * PAGE, PAGE)).is_none());
        assert!(other.begin(token, read(2 * PAGE + 512, 512)).is_none());
    }
    for _ in 0..100 {
        assert_eq!((rig.poll(), other.poll()), (0, 0));
    }
    assert_eq!(rig.reads(), 1);
    rig.control.holds_reads.store(false, SeqCst);
    for token in 0..32 {
        let data = [rig.wait(token), other.wait(token)].map(|done| done.buf.expect("data"));
        assert!(data[0].equals_at(0, &[2; PAGE]) && data[1].equals_at(0, &[2; 512]));
    }
    assert_eq!((rig.reads(), rig.counts().joined), (1, 63));
    other.assert_at_rest();
    rig.assert_at_rest();
}

#[test]
fn a_fill_is_not_published_when_a_write_begins_after_it() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    rig.control.holds_reads.store(true, SeqCst);
    assert!(rig.begin(1, read(PAGE, PAGE)).is_none());
    rig.write(2, PAGE + 512, 512, 0xee);
    assert_eq!(rig.wait(2).result, Ok(()));
    // The write is acknowledged: a read that begins now finds neither the old page nor waits for it.
    rig.control.holds_reads.store(false, SeqCst);
    let old = rig.wait(1).buf.expect("the data of before the write");
    assert!(old.equals_at(0, &[1; PAGE]), "a read that began before may have it");
    let new = rig.data(PAGE, PAGE);
    assert!(new[..512] == [1; 512] && new[512..1024] == [0xee; 512], "the write is seen");
    assert_eq!((rig.reads(), rig.counts().doomed), (2, 1));
    drop(old);
    rig.assert_at_rest();
}

#[test]
fn a_fill_that_begins_during_a_write_is_not_published() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    let mut writer = rig.other();
    rig.control.holds_writes.store(true, SeqCst);
    writer.write(1, PAGE, PAGE, 0xee);
    writer.poll();
    rig.data(PAGE, PAGE);
    rig.data(PAGE, PAGE);
    assert_eq!((rig.reads(), rig.counts().doomed), (2, 2), "each of them asks the disk");
    rig.control.holds_writes.store(false, SeqCst);
    assert_eq!(writer.wait(1).result, Ok(()));
    assert_eq!(rig.data(PAGE, PAGE), [0xee; PAGE]);
    assert_eq!(rig.data(PAGE, PAGE), [0xee; PAGE]);
    assert_eq!(rig.reads(), 3);
    rig.assert_at_rest();
}

#[test]
fn a_write_of_a_part_drops_the_page_and_leaves_those_who_have_it_alone() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    rig.data(PAGE, 3 * PAGE);
    let old = rig.begin(1, read(PAGE, PAGE)).expect("a hit");
    rig.write(2, 2 * PAGE - 512, 1024, 0xee);
    assert_eq!(rig.wait(2).result, Ok(()));
    assert!(old.equals_at(0, &[1; PAGE]));
    let bytes = [vec![1; PAGE - 512], vec![0xee; 1024], vec![2; PAGE - 512], vec![3; PAGE]].concat();
    assert_eq!(rig.data(PAGE, 3 * PAGE), bytes);
    assert_eq!(rig.reads(), 2, "page 3 was still there");
    drop(old);
    rig.assert_at_rest();
}

#[test]
fn a_long_zeroing_drops_what_it_covers_and_nothing_else() {
    let mut rig = Rig::new(2048 * PAGE, 16 << 20);
    for page in 0..2048 {
        rig.data(page * PAGE, 512);
    }
    assert!(rig.source.cache().expect("a cache").used_bytes > 1900 * 4096);
    let zeroes = IoRequest::new(Op::WriteZeroes { deallocate: true, fua: false }, range(512, 1500 * PAGE));
    assert!(rig.disk.submit(Token(1), &zeroes, None).is_none());
    let before = rig.reads();
    assert_eq!(rig.wait(1).result, Ok(()));
    assert_eq!(rig.data(512, PAGE - 512), [0; PAGE - 512]);
    assert_eq!(rig.data(0, 512), [0; 512]);
    assert_eq!(rig.data(1500 * PAGE, 1024), [[0; 512], [1500_usize.to_le_bytes()[0]; 512]].concat());
    assert_eq!(rig.reads() - before, 2, "two pages are read anew, each once");
    rig.assert_at_rest();
}

/// Page by page where the write has few pages of what the cache has, frame by frame where it has many.
#[test]
fn a_fill_during_a_long_write_is_kept_where_that_does_not_change_the_page() {
    for cache in [4 << 20, 64 << 20] {
        let mut rig = Rig::new(8192 * PAGE, cache);
        (0..40).for_each(|page| _ = rig.data((4085 + page) * PAGE, PAGE));
        rig.control.holds_writes.store(true, SeqCst);
        let zeroes = IoRequest::new(Op::WriteZeroes { deallocate: true, fua: false }, range(0, 4096 * PAGE));
        assert!(rig.disk.submit(Token(1), &zeroes, None).is_none());
        (0..200).for_each(|_| _ = rig.poll());
        assert_eq!(rig.source.shared().index.len(), 29, "what it changes is dropped when the disk has it");
        let before = rig.reads();
        for _ in 0..2 {
            assert_eq!(rig.data(4095 * PAGE, PAGE), [0; PAGE], "its last page");
            assert_eq!(rig.data(6000 * PAGE, PAGE), [6000_usize.to_le_bytes()[0]; PAGE]);
        }
        assert_eq!(rig.reads() - before, 3, "the page beside it is read once");
        rig.control.holds_writes.store(false, SeqCst);
        assert_eq!(rig.wait(1).result, Ok(()));
        rig.data(4095 * PAGE, PAGE);
        rig.data(4095 * PAGE, PAGE);
        assert_eq!(rig.reads() - before, 4, "afterwards it is entered");
        rig.assert_at_rest();
    }
}

#[test]
fn long_writes_beyond_those_that_the_cache_knows_wait() {
    let mut rig = Rig::new(2048 * PAGE, 1 << 20);
    let mut other = rig.other();
    rig.control.holds_writes.store(true, SeqCst);
    let zeroes = IoRequest::new(Op::WriteZeroes { deallocate: true, fua: false }, range(0, 2048 * PAGE));
    for token in 0..33 {
        assert!(rig.disk.submit(Token(token), &zeroes, None).is_none());
    }
    assert!(other.disk.submit(Token(40), &zeroes, None).is_none());
    (0..100).for_each(|_| _ = rig.poll());
    (0..100).for_each(|_| _ = other.poll());
    assert_eq!(rig.data(PAGE, PAGE), [0; PAGE]);
    assert_eq!(other.disk.cancel_owner(Owner(0)), 1);
    assert_eq!(other.wait(40).result, Err(DiskError::Cancelled), "it is not begun");
    rig.control.holds_writes.store(false, SeqCst);
    (0..33).for_each(|token| assert_eq!(rig.wait(token).result, Ok(())));
    rig.data(PAGE, PAGE);
    assert_eq!(rig.source.shared().index.len(), 1, "no range is left over");
    other.assert_at_rest();
    rig.assert_at_rest();
}

/// A read of another target that is not answered in time: its buffer comes back later, unseen.
#[test]
fn frames_of_a_lost_piece_are_free_once_it_is_dropped_before_the_other_piece_ends() {
    let mut rig = Rig::new(128 * PAGE, 1 << 20);
    rig.data(PAGE, PAGE);
    rig.control.loses.store(1, SeqCst);
    rig.control.holds_page.store(2, SeqCst);
    // Page 1 is there: two pieces.
    assert!(rig.begin(1, read(0, 3 * PAGE)).is_none());
    (0..4).for_each(|_| _ = rig.poll());
    rig.control.drops.store(true, SeqCst);
    (0..4).for_each(|_| _ = rig.poll());
    rig.control.holds_page.store(0, SeqCst);
    assert_eq!(rig.wait(1).result, Err(DiskError::Gone));
    let data = rig.data(0, 3 * PAGE);
    assert!(data.chunks(PAGE).zip(0_u8..).all(|(page, byte)| page == [byte; PAGE]));
    rig.assert_at_rest();
}

/// A write to another target that is not answered in time.
#[test]
fn a_page_that_a_failed_write_may_still_change_is_read_and_not_entered() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    rig.control.fails_writes.store(1, SeqCst);
    rig.control.lingers.store(true, SeqCst);
    rig.write(1, PAGE, PAGE, 7);
    assert_eq!(rig.wait(1).result, Err(DiskError::MediaWrite));
    rig.control.bytes.lock().expect("no panic")[PAGE..2 * PAGE].fill(1);
    assert_eq!(rig.data(PAGE, 2 * PAGE)[..PAGE], [1; PAGE]);
    let mut ahead = rig.other();
    (8..12).for_each(|page| _ = ahead.data(page * PAGE, PAGE));
    (0..20).for_each(|_| _ = ahead.poll());
    assert_eq!(rig.source.shared().index.len(), 0);
    // It does.
    rig.control.bytes.lock().expect("no panic")[PAGE..2 * PAGE].fill(7);
    rig.control.lingers.store(false, SeqCst);
    for _ in 0..2 {
        assert_eq!(rig.data(PAGE, PAGE), [7; PAGE]);
    }
    assert_eq!(rig.source.shared().index.len(), 1);
    ahead.assert_at_rest();
    rig.assert_at_rest();
}

#[test]
fn a_page_that_is_pinned_is_not_evicted_and_a_full_cache_is_passed() {
    let mut rig = Rig::new(64 * PAGE, 16 * PAGE as u64);
    let pinned: Vec<Buf> = (0..16)
        .map(|page| {
            rig.data(page * PAGE, PAGE);
            rig.begin(1, read(page * PAGE, PAGE)).expect("a hit")
        })
        .collect();
    assert_eq!(rig.data(40 * PAGE, PAGE), [40; PAGE], "read around the cache");
    assert_eq!(rig.data(40 * PAGE, 4 * PAGE)[..PAGE], [40; PAGE]);
    assert_eq!((rig.counts().passed, rig.counts().evictions), (5, 0));
    for (page, buf) in pinned.iter().enumerate() {
        assert!(buf.equals_at(0, &[page.to_le_bytes()[0]; PAGE]));
    }
    drop(pinned);
    assert_eq!(rig.data(40 * PAGE, PAGE), [40; PAGE]);
    assert_eq!((rig.counts().passed, rig.counts().evictions), (5, 1));
    rig.assert_at_rest();
}

#[test]
fn a_fill_that_fails_is_read_again_as_the_host_asked() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    let mut other = rig.other();
    rig.control.holds_reads.store(true, SeqCst);
    rig.control.fails.store(1, SeqCst);
    assert!(rig.begin(1, read(PAGE + 512, 512)).is_none());
    assert!(other.begin(2, read(PAGE, PAGE)).is_none());
    rig.control.holds_reads.store(false, SeqCst);
    let done = rig.wait(1);
    assert_eq!(done.result, Ok(()), "another block of the page was bad");
    assert!(done.buf.expect("data").equals_at(0, &[1; 512]));
    assert!(other.wait(2).buf.expect("data").equals_at(0, &[1; PAGE]));
    // Bad for good.
    rig.control.fails.store(2, SeqCst);
    assert!(rig.begin(3, read(2 * PAGE, 512)).is_none());
    let done = rig.wait(3);
    assert_eq!(done.result, Err(DiskError::MediaRead));
    drop(done);
    other.assert_at_rest();
    rig.assert_at_rest();
}

#[test]
fn pages_of_a_large_cache_are_counted_once_a_second() {
    let begun = Instant::now();
    for (bytes, is_counted_again) in [(1_u64 << 30, true), ((1 << 30) + (1 << 20), false)] {
        let mut rig = Rig::new(64 * PAGE, bytes);
        let cache = rig.source.shared();
        assert_eq!(cache.present(begun), 0);
        rig.data(0, 2 * PAGE);
        assert_eq!(cache.present(begun + Duration::from_millis(999)), if is_counted_again { 2 } else { 0 });
        assert_eq!(cache.present(begun + Duration::from_secs(1)), 2);
    }
}

#[test]
fn frames_whose_buffer_a_disk_does_not_give_back_are_not_used_until_it_drops_it() {
    let mut rig = Rig::new(64 * PAGE, 16 * PAGE as u64);
    rig.control.loses.store(1, SeqCst);
    assert!(rig.begin(1, read(0, 4 * PAGE)).is_none());
    assert_eq!(rig.wait(1).result, Err(DiskError::Gone), "as without a cache");
    assert_eq!(rig.source.shared().words().census(), [12, 4, 0, 0]);
    for page in 0..64 {
        assert_eq!(rig.data(page * PAGE, 512), [page.to_le_bytes()[0]; 512]);
    }
    assert_eq!(rig.source.shared().words().census(), [0, 4, 12, 0]);
    rig.control.drops.store(true, SeqCst);
    rig.poll();
    assert_eq!(rig.source.shared().words().census(), [4, 0, 12, 0]);
    for page in 0..64 {
        assert_eq!(rig.data(page * PAGE, 512), [page.to_le_bytes()[0]; 512]);
    }
    rig.assert_at_rest();
}

/// The disk drops the buffer before it tells the end of the read.
#[test]
fn frames_of_a_buffer_that_is_dropped_before_its_end_is_told_are_free() {
    for disk_goes in [false, true] {
        let mut rig = Rig::new(64 * PAGE, 16 * PAGE as u64);
        rig.control.loses.store(1, SeqCst);
        rig.control.drops_first.store(true, SeqCst);
        assert!(rig.begin(1, read(0, 4 * PAGE)).is_none());
        assert!(rig.other().begin(2, read(PAGE, PAGE)).is_none(), "it waits for the fill");
        if disk_goes {
            rig.disk = rig.source.open(&ChannelContext { core: 0, pool: pool(), depth: 64 }).expect("opens");
        } else {
            assert_eq!(rig.wait(1).result, Err(DiskError::Gone));
        }
        assert_eq!(rig.source.shared().words().census(), [16, 0, 0, 0]);
        assert_eq!(rig.data(PAGE, PAGE), [1; PAGE]);
        rig.assert_at_rest();
    }
}

#[test]
fn a_submitter_that_goes_does_not_end_a_fill_for_others() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    let owned = |owner: u64, token: u64| owner << 32 | token;
    rig.control.holds_reads.store(true, SeqCst);
    rig.control.holds_writes.store(true, SeqCst);
    assert!(rig.begin(owned(1, 1), read(PAGE, PAGE)).is_none());
    assert!(rig.begin(owned(2, 1), read(PAGE, PAGE)).is_none());
    rig.write(owned(1, 2), 8 * PAGE, PAGE, 9);
    assert_eq!(rig.disk.cancel_owner(Owner(1)), 2);
    assert_eq!(rig.wait(owned(1, 1)).result, Err(DiskError::Cancelled));
    rig.control.holds_writes.store(false, SeqCst);
    rig.control.holds_reads.store(false, SeqCst);
    assert_eq!(rig.wait(owned(1, 2)).token.owner(), Owner(1));
    assert!(rig.wait(owned(2, 1)).buf.expect("data").equals_at(0, &[1; PAGE]));
    assert_eq!(rig.reads(), 1);
    rig.assert_at_rest();
}

#[test]
fn what_is_prepared_and_not_submitted_is_given_up() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    for _ in 0..3 {
        assert!(matches!(rig.disk.prepare(&read(0, 4 * PAGE), None), Prepared::Later));
    }
    rig.assert_at_rest();
    // A read that was not asked for brings its data all the same.
    assert!(rig.disk.submit(Token(5), &read(PAGE, PAGE), None).is_none());
    assert!(rig.wait(5).buf.expect("data").equals_at(0, &[1; PAGE]));
    rig.assert_at_rest();
}

#[test]
fn a_handle_that_is_dropped_leaves_no_write_and_no_sweep_behind() {
    let mut rig = Rig::new(2048 * PAGE, 1 << 20);
    let mut other = rig.other();
    rig.control.holds_writes.store(true, SeqCst);
    other.write(1, PAGE, PAGE, 7);
    let zeroes = IoRequest::new(Op::Deallocate, range(8 * PAGE, 2000 * PAGE));
    assert!(other.disk.submit(Token(2), &zeroes, None).is_none());
    drop(other);
    assert_eq!(rig.data(PAGE, PAGE), [7; PAGE]);
    assert_eq!(rig.data(PAGE, PAGE), [7; PAGE]);
    assert_eq!(rig.reads(), 1, "it is published");
    rig.assert_at_rest();
}

#[test]
fn a_partial_last_page_is_not_cached_and_long_reads_pass_around_the_cache() {
    let mut rig = Rig::new(256 * PAGE + 512, 2 << 20);
    for _ in 0..2 {
        assert_eq!(rig.data(256 * PAGE, 512), [0; 512]);
        assert_eq!(rig.data(255 * PAGE, PAGE + 512)[..PAGE], [255; PAGE]);
        rig.data(0, 129 * PAGE);
    }
    assert_eq!((rig.source.cache().expect("a cache").used_bytes, rig.reads()), (0, 6));
    rig.data(0, 128 * PAGE);
    rig.data(128 * PAGE, PAGE);
    let before = rig.reads();
    let data = rig.data(0, 129 * PAGE);
    assert!(data.chunks(PAGE).zip(0_u8..).all(|(page, byte)| page == [byte; PAGE]));
    assert_eq!(rig.reads(), before, "a long read is answered where all of it is there");
    rig.assert_at_rest();
}

#[test]
fn a_resize_drops_the_contents() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    rig.data(0, PAGE);
    rig.source.resize(16 * PAGE as u64).expect("the same size");
    rig.data(0, PAGE);
    assert_eq!(rig.reads(), 2);
    rig.assert_at_rest();
}

/// A page whose buckets are full is not entered, and nothing of the control word changes. Both buckets of
/// page 0 are always the same.
#[test]
fn a_page_whose_buckets_are_full_is_not_entered() {
    let mut rig = Rig::new(1024 * PAGE, 16 << 20);
    let source = Arc::clone(&rig.source);
    let shared = source.shared();
    for page in [0, 1] {
        let buckets = shared.index.buckets(page);
        assert_eq!(shared.index.is_single(buckets), page == 0);
        let before = shared.index.control_of(buckets);
        let others = shared.index.fill_first_bucket(buckets);
        assert_eq!(others, 7);
        for _ in 0..3 {
            let at = usize::try_from(page).expect("small") * PAGE;
            assert_eq!(rig.data(at, PAGE), [page.to_le_bytes()[0]; PAGE]);
        }
        let (sequence, seconds, writes) = shared.index.control_of(buckets);
        assert_eq!((sequence, writes), (before.0, before.2), "page {page}");
        assert_eq!(seconds, page, "page 1 is in its second bucket, page 0 has none");
    }
    let counts = rig.counts();
    assert_eq!((counts.hits, counts.misses, counts.passed), (2, 1, 3));
}

/// What had no room in a poll is given in the next, before what the disk has.
#[test]
fn completions_of_the_cache_do_not_wait_for_room_behind_those_of_the_disk() {
    let mut rig = Rig::new(1024 * PAGE, 4 << 20);
    rig.done = Vec::with_capacity(1);
    rig.control.holds_reads.store(true, SeqCst);
    assert!(rig.begin(1, read(0, PAGE)).is_none());
    assert!(rig.begin(2, read(0, PAGE)).is_none());
    rig.control.holds_reads.store(false, SeqCst);
    // Each poll has one read of the disk that passes around, and no room for more.
    let mut ended = Vec::new();
    for token in 10..40 {
        let request = read(usize::try_from(token).expect("small") * PAGE, PAGE);
        let buf = Buf::heap(u32::try_from(PAGE).expect("small"));
        assert!(rig.disk.submit(Token(token), &request, Some(buf)).is_none());
        rig.poll();
        ended.extend(rig.done.drain(..).map(|done| done.token.0));
    }
    assert!(ended.contains(&1) && ended.contains(&2), "{ended:?}");
}

/// What fills pages, what passes around the cache and what is written end in the order in which the inner
/// disk ends them.
#[test]
fn commands_end_in_the_order_of_the_inner_disk() {
    let mut rig = Rig::new(256 * PAGE, 64 * PAGE as u64);
    let once = |request| IoRequest { hints: 6, ..request };
    for round in 0..4 {
        for token in 0..12 {
            let at = usize::try_from(round * 12 + token).expect("small") * 4 * PAGE;
            match token % 3 {
                0 => assert!(rig.begin(token, read(at, PAGE)).is_none()),
                1 => assert!(rig.begin(token, once(read(at, PAGE))).is_none()),
                _ => rig.write(token, at, PAGE, 7),
            }
        }
        rig.poll();
        let ended: Vec<u64> = rig.done.drain(..).map(|done| done.token.0).collect();
        assert_eq!(ended, (0..12).collect::<Vec<_>>());
    }
    rig.assert_at_rest();
}
