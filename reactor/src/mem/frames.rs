//! The frames of a RAM disk, shared by all cores without a lock.
//!
//! A disk is a table of 4 KiB pages; each entry names the frame that holds the page, or none (it reads as
//! zeroes), and counts the pins on it. A published frame is never written again: a write fills fresh frames,
//! straight from the socket, and then swaps them into the table, so every page changes in one step and a
//! reader has either the old or the new one, whole. A read pins the frames and is sent from where they lie; a
//! page that is overwritten meanwhile lives on in its old frame until the last pin is dropped.
//!
//! ```text
//!   take (fresh, ours alone) -> filled by fetch -> write: swap into the table
//!       the old frame had no pins: free.    It had n: its `detached_pins` + n, free when that is 0
//!   read: entry's pins + 1 ... drop: entry's pins - 1, or our `detached_pins` - 1 if it has another frame
//! ```
//!
//! Pages lie where they belong: each has a place in the home of its extent of 16 pages ([`extents`]), so that
//! large reads are few pieces whatever was written before. A write of whole extents fills spare ones, which
//! become the homes. A smaller one fills small frames, publishes them, and moves each page from there to its
//! place, which is a copy of 4 KiB that is in the cache. While replies are sent from that place the page
//! stays where it is; who frees a place brings its page home (`publish.rs`). When nothing is going on, every
//! page is at home.
//!
//! ```text
//!   frames:  homes of extents of pages, spare extents | small frames -> this core's list -> spill
//! ```
//!
//! Why the pins are in the entry: a read that meets no write touches one cache line of the tables, not two,
//! and the tables of a large disk are in no cache. `detached_pins` may be below 0 between the writer's swap
//! and its addition; it is 0 again exactly when all pins are dropped and the writer has added them, and who
//! brings it to 0 frees the frame. A frame that is pinned is never free, so it cannot come back to its page
//! while a pin remembers it there.
//!
//! Limits: 2^32 - 1 frames (16 TiB). Running out of frames is a state of the writer (`take` says `None`), not
//! an error. UNSAFETY: hands out slices of frames; the pins above are the proof that they are exclusive or
//! immutable.
#![expect(unsafe_code, reason = "shares frames between cores by reference count")]

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering, fence};

use arrayvec::ArrayVec;
use crossbeam_queue::ArrayQueue;

use super::area::Area;
use super::buf::{Buf, Builder, Home, Segment, Tail, Tails, note_copied, zeroes};
use super::cpu_cache::{copy_nontemporal, prefetch};
use super::region::{Pages, Region, RegionError};
use extents::{EXTENT_PAGES, Extents, Layout};

mod extents;
mod publish;

/// Bytes of a frame.
pub const FRAME_BYTES: u32 = 4096;
const FRAME: u64 = FRAME_BYTES as u64;
/// Bytes of a disk from which on a page that is written is most likely in no cache: more than a core's
/// share of the third cache of most processors.
const UNCACHED_BYTES: u64 = 128 << 20;
/// Bytes of one `MADV_POPULATE_WRITE`: a huge page. It holds the lock of the address space meanwhile, for
/// which a page fault of a polling core may have to wait.
const POPULATE_BYTES: usize = 2 << 20;
/// No frame: the page reads as zeroes. Frame 0 is never handed out.
const NONE: u32 = 0;
/// One pin, in an entry of the table.
const PIN: u64 = 1 << 32;
const EXTENT_BYTES: u64 = EXTENT_PAGES as u64 * FRAME;
/// Most whole extents in one buffer: 2 MiB. What is longer gets small frames for the rest.
const EXTENTS_MAX: usize = 32;
/// Most pages at both ends of a buffer that are no whole extent.
const RAGGED_MAX: usize = 2 * EXTENT_PAGES as usize;
/// Fresh small frames that a core takes at a time, so that they lie side by side: 2 MiB, a huge page.
const FRESH_BATCH: u32 = 512;
/// Free frames that a core keeps at most, see `FrameStore::hoard_max`.
const HOARD_MAX: u32 = 2048;

/// An entry of the table: the frame, and above it how many pins were taken on it here.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Entry(u64);

impl Entry {
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
    fn frame(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    fn pins(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// All frames of one disk and the table of its pages.
pub struct FrameStore {
    region: Arc<Region>,
    frames: u32,
    /// An [`Entry`] for each page.
    table: Box<[AtomicU64]>,
    /// Pins of frames that are no longer in the table; see the module.
    detached_pins: Box<[AtomicI32]>,
    extents: Extents,
    /// Small frames that are free and that no core keeps.
    spill: ArrayQueue<u32>,
    /// The first frame that belongs to no extent: a small one.
    small_first: u32,
    /// How many of them.
    surplus: u32,
    /// A page that is written is most likely in no cache.
    is_uncached: bool,
    /// Free frames that a core may keep before it spills half of them to the others. All cores together keep
    /// a quarter of the surplus, so that one which idles on free frames never keeps another's writes waiting.
    hoard_max: AtomicU32,
    cores: AtomicU32,
    fresh: AtomicU32,
    pages_used: AtomicU64,
}

/// Where on the disk a buffer's first byte is.
#[derive(Debug, Clone, Copy)]
pub(super) struct PagePosition {
    pub(super) page: u32,
    pub(super) skip: u16,
}

impl PagePosition {
    #[inline]
    fn of(offset: u64) -> PagePosition {
        // Neither fails: pages are fewer than frames, which are at most 2^32 - 1.
        PagePosition {
            page: u32::try_from(offset / FRAME).unwrap_or(u32::MAX),
            skip: u16::try_from(offset % FRAME).unwrap_or(0),
        }
    }

    #[inline]
    fn offset(self) -> u64 {
        u64::from(self.page) * FRAME + u64::from(self.skip)
    }
}

/// How much of a store is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameUse {
    /// Pages that hold data.
    pub pages_used: u64,
    /// Pages of the disk.
    pub pages: u64,
}

/// Why a compare-and-swap did not happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwapError {
    /// The bytes on the disk are others than those expected.
    Differs,
}

impl FrameStore {
    /// A store for a disk of `capacity_bytes` (rounded up to 4 KiB), with `slack_bytes` of frames for writes
    /// in flight and for pages that were overwritten while a reply is being sent. Address space only: memory
    /// is taken at the first write of a page.
    ///
    /// # Errors
    /// [`RegionError`] when the address space cannot be mapped or the disk has more than 2^32 - 2 frames.
    pub fn new(capacity_bytes: u64, slack_bytes: u64, pages: Pages) -> Result<Arc<FrameStore>, RegionError> {
        let is_uncached = capacity_bytes >= UNCACHED_BYTES;
        FrameStore::made(capacity_bytes, slack_bytes, pages, is_uncached)
    }

    fn made(
        capacity_bytes: u64,
        slack_bytes: u64,
        pages: Pages,
        is_uncached: bool,
    ) -> Result<Arc<FrameStore>, RegionError> {
        let pages_count = capacity_bytes.div_ceil(FRAME);
        let Layout { homes, spares, small } = Layout::of(capacity_bytes, slack_bytes);
        let frames =
            (1 + homes).saturating_add(spares).saturating_mul(u64::from(EXTENT_PAGES)).saturating_add(small);
        let bytes = usize::try_from(frames.saturating_mul(FRAME)).unwrap_or(usize::MAX);
        let too_many = u32::try_from(frames).is_err();
        let region = Arc::new(Region::map(if too_many { usize::MAX >> 8 } else { bytes }, pages)?);
        let frames = u32::try_from(frames).unwrap_or(u32::MAX);
        // All of them are parts of `frames`.
        let [homes, spares, surplus] = [homes, spares, small].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        let extents = Extents::new(homes, spares);
        let small_first = extents.frames();
        Ok(Arc::new(FrameStore {
            region,
            frames,
            extents,
            table: (0..pages_count).map(|_| AtomicU64::new(u64::from(NONE))).collect(),
            detached_pins: (0..frames).map(|_| AtomicI32::new(0)).collect(),
            spill: ArrayQueue::new(surplus as usize),
            small_first,
            surplus,
            is_uncached,
            hoard_max: AtomicU32::new(HOARD_MAX),
            cores: AtomicU32::new(0),
            fresh: AtomicU32::new(small_first),
            pages_used: AtomicU64::new(0),
        }))
    }

    /// Bytes of address space and tables that a store of this shape takes, when every page is written.
    #[must_use]
    pub fn bytes_for(capacity_bytes: u64, slack_bytes: u64) -> u64 {
        let Layout { homes, spares, small } = Layout::of(capacity_bytes, slack_bytes);
        let frames = (1 + homes + spares) * u64::from(EXTENT_PAGES) + small;
        let tables = capacity_bytes.div_ceil(FRAME) * 8 + frames * 4 + small * 16;
        frames * FRAME + tables + Extents::bytes_for(homes, spares)
    }

    /// How much is in use now.
    #[must_use]
    pub fn usage(&self) -> FrameUse {
        FrameUse { pages_used: self.pages_used.load(Ordering::Relaxed), pages: self.table.len() as u64 }
    }

    /// Have the memory at `offset` now instead of at the first write there: a portion of it. Where the next
    /// begins; `None`: that was the last.
    ///
    /// # Errors
    /// The system's: see `madvise(2)`, `MADV_POPULATE_WRITE`.
    pub fn populate(&self, offset: usize) -> std::io::Result<Option<usize>> {
        let bytes = self.region.bytes().saturating_sub(offset).min(POPULATE_BYTES);
        self.region.populate(offset.min(self.region.bytes()), bytes)?;
        let next = offset.saturating_add(bytes);
        Ok((next < self.region.bytes()).then_some(next))
    }

    /// Which pages of memory it got.
    #[must_use]
    pub fn pages(&self) -> Pages {
        self.region.pages()
    }

    /// Its memory, to be registered with a device: from then on all of it is resident.
    #[must_use]
    pub fn area(&self) -> Area {
        Area::of(&self.region)
    }

    /// This core's handle.
    #[must_use]
    pub fn core(self: &Arc<Self>) -> Rc<FrameCore> {
        self.share_out(self.cores.fetch_add(1, Ordering::Relaxed) + 1);
        Rc::new(FrameCore {
            store: Arc::clone(self),
            free: RefCell::new(Vec::with_capacity((HOARD_MAX + FRESH_BATCH) as usize + super::SEGMENTS_MAX)),
            torn: Cell::new((0, 0)),
            tails: Tails::new(0, super::SEGMENTS_MAX),
        })
    }

    /// The number of cores has changed. (When two change it at once, the hoards are off by a core until the
    /// next.)
    fn share_out(&self, cores: u32) {
        let each = self.surplus / (4 * cores.max(1));
        self.hoard_max.store(each.clamp(1, HOARD_MAX), Ordering::Relaxed);
    }

    fn addr(&self, frame: u32) -> NonNull<u8> {
        // SAFETY: frame numbers come from `fresh` and stay below `frames`, for which the region was sized.
        unsafe { self.region.base().add(frame as usize * FRAME_BYTES as usize) }
    }

    /// The bytes `skip .. skip + step` of a frame.
    #[inline]
    fn piece(&self, frame: u32, skip: u32, step: u32) -> Segment {
        // SAFETY: `skip` is below the frame's length.
        Segment { addr: unsafe { self.addr(frame).add(skip as usize) }, bytes: step }
    }

    /// The frame in which a segment begins; none for zeroes, which lie outside of the region, and for no
    /// bytes.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "frames of the region are counted in 32 bits")]
    fn first_frame(&self, segment: Segment) -> Option<u32> {
        let start = (segment.addr.as_ptr() as usize).wrapping_sub(self.region.base().as_ptr() as usize);
        let is_here = start < self.region.bytes() && segment.bytes > 0;
        is_here.then_some((start / FRAME_BYTES as usize) as u32)
    }

    /// Frame numbers that a segment touches; see [`FrameStore::first_frame`].
    #[inline]
    fn frames_of(&self, segment: Segment) -> std::ops::Range<u32> {
        let Some(first) = self.first_frame(segment) else { return 0..0 };
        let skip = segment.addr.as_ptr() as usize as u64 % FRAME;
        // At most the frames of the region.
        let count = u32::try_from((skip + u64::from(segment.bytes)).div_ceil(FRAME)).unwrap_or(0);
        first..first + count
    }

    /// Pin the frame that holds `page`; `NONE` when the page is unwritten.
    #[inline]
    fn pin(&self, page: usize) -> u32 {
        let entry = &self.table[page];
        let mut seen = entry.load(Ordering::Relaxed);
        while Entry(seen).frame() != NONE {
            // Acquire: the bytes were written before the frame was swapped in.
            match entry.compare_exchange_weak(seen, seen + PIN, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        Entry(seen).frame()
    }

    /// Drop a pin on `frame` that was taken when it held `page`; true when it was the last and the frame is
    /// free.
    #[inline]
    fn unpin(&self, page: usize, frame: u32) -> bool {
        let entry = &self.table[page];
        let mut seen = entry.load(Ordering::Relaxed);
        while Entry(seen).frame() == frame {
            debug_assert!(Entry(seen).pins() > 0, "a pin was dropped twice");
            // Release: who frees the frame sees that its bytes were read before.
            match entry.compare_exchange_weak(seen, seen - PIN, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return false,
                Err(now) => seen = now,
            }
        }
        self.settle(frame, -1)
    }

    /// The frame of `old` is no longer in the table; true when it has no pin and is free. The caller took it
    /// out with acquire ordering.
    #[inline]
    fn retire(&self, old: Entry) -> bool {
        if old.frame() == NONE {
            return false;
        }
        old.pins() == 0 || self.settle(old.frame(), i32::try_from(old.pins()).unwrap_or(i32::MAX))
    }

    /// Change the pins of a frame that is not in the table; true when none are left.
    #[cold]
    fn settle(&self, frame: u32, change: i32) -> bool {
        let before = self.detached_pins[frame as usize].fetch_add(change, Ordering::Release);
        if before + change != 0 {
            return false;
        }
        fence(Ordering::Acquire);
        true
    }

    /// The bytes of a frame that is not written, for as long as that is so.
    fn bytes_of(&self, frame: u32) -> &[u8] {
        // SAFETY: the callers have it pinned or for themselves, and published frames are not written.
        unsafe { std::slice::from_raw_parts(self.addr(frame).as_ptr(), FRAME_BYTES as usize) }
    }

    /// Copy one frame to another, which is the caller's alone.
    #[inline]
    fn copy_frame(&self, from: u32, to: u32) {
        debug_assert_ne!(from, to, "a frame is not copied to itself");
        note_copied(FRAME_BYTES as usize);
        let (from, to) = (self.addr(from).as_ptr(), self.addr(to).as_ptr());
        let bytes = FRAME_BYTES as usize;
        // SAFETY: two frames of the region, on pages and whole; `from` is pinned, so that it is not written,
        // and `to` is free and in the hands of the caller, so that it is not read.
        unsafe {
            if self.is_uncached {
                copy_nontemporal(from, to, bytes);
            } else {
                std::ptr::copy_nonoverlapping(from, to, bytes);
            }
        }
    }

    /// Fill `frame`, which is the caller's alone, with `old` but for the bytes `skip .. skip + step`.
    fn complete(&self, frame: u32, old: &[u8], skip: usize, step: usize) {
        // SAFETY: the caller's buffer is the only handle to `frame` until it is published.
        let new = unsafe { std::slice::from_raw_parts_mut(self.addr(frame).as_ptr(), FRAME_BYTES as usize) };
        note_copied(new.len() - step);
        new[..skip].copy_from_slice(&old[..skip]);
        new[skip + step..].copy_from_slice(&old[skip + step..]);
    }

    fn spill_one(&self, frame: u32) {
        let is_kept = self.spill.push(frame).is_ok();
        debug_assert!(is_kept, "the spill queue holds every frame there is");
    }
}

/// One core's handle on a [`FrameStore`]: its own list of free frames.
pub struct FrameCore {
    store: Arc<FrameStore>,
    free: RefCell<Vec<u32>>,
    /// What is left of a spare extent of which small writes had frames: the first, and the one behind the
    /// last.
    torn: Cell<(u32, u32)>,
    tails: Tails,
}

impl Drop for FrameCore {
    fn drop(&mut self) {
        let (first, end) = self.torn.take();
        self.put_frames(first..end);
        self.free.get_mut().drain(..).for_each(|frame| self.store.spill_one(frame));
        self.store.share_out(self.store.cores.fetch_sub(1, Ordering::Relaxed) - 1);
    }
}

impl FrameCore {
    /// The store behind it.
    #[must_use]
    pub fn store(&self) -> &Arc<FrameStore> {
        &self.store
    }

    fn check(&self, offset: u64, bytes: u32) {
        let end = offset.checked_add(u64::from(bytes));
        assert!(
            end.is_some_and(|end| end <= self.store.table.len() as u64 * FRAME),
            "{bytes} bytes at {offset} are outside of the disk; the caller checks the range"
        );
    }

    /// Pages of `offset .. offset + bytes` as `(page, first byte in it, bytes in it)`.
    fn pages(offset: u64, bytes: u32) -> impl Iterator<Item = (usize, u32, u32)> {
        let mut at = offset;
        let end = offset + u64::from(bytes);
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let skip = at % FRAME;
            let step = (FRAME - skip).min(end - at);
            let page = usize::try_from(at / FRAME).unwrap_or(usize::MAX);
            at += step;
            // Both are at most 4096.
            Some((page, u32::try_from(skip).unwrap_or(0), u32::try_from(step).unwrap_or(0)))
        })
    }

    /// A shared buffer of the bytes on the disk, sent from where they lie.
    ///
    /// # Panics
    /// When the range is outside of the disk.
    #[inline]
    #[must_use]
    pub fn read(self: &Rc<Self>, offset: u64, bytes: u32) -> Buf {
        self.check(offset, bytes);
        let place = PagePosition::of(offset);
        // The commonest by far: bytes of one page.
        if bytes > 0 && bytes <= FRAME_BYTES - u32::from(place.skip) {
            let frame = self.store.pin(place.page as usize);
            let is_written = frame != NONE;
            let skip = u32::from(place.skip);
            let head = if is_written { self.store.piece(frame, skip, bytes) } else { zeroes(bytes) };
            return Buf { head, tail: None, bytes, is_writable: false, home: self.home(place) };
        }
        let mut builder = Builder::new(&self.tails);
        for (page, skip, step) in Self::pages(offset, bytes) {
            let frame = self.store.pin(page);
            if frame == NONE {
                builder.push_zeroes(step);
            } else {
                builder.push(self.store.piece(frame, skip, step));
            }
        }
        builder.build(self.home(place), false)
    }

    /// The page of `offset`, if there is one, is looked up soon.
    #[inline]
    pub fn expect(&self, offset: u64) {
        let page = usize::try_from(offset / FRAME).unwrap_or(usize::MAX);
        if let Some(entry) = self.store.table.get(page) {
            prefetch(entry);
        }
    }

    fn home(self: &Rc<Self>, place: PagePosition) -> Home {
        Home::Frames(Rc::clone(self), place.page, place.skip)
    }

    /// A writable buffer of fresh frames for the bytes of `offset .. offset + bytes`, to be filled and then
    /// handed to [`FrameCore::write`] with the same offset. `None` when no frames are free: the request
    /// waits.
    ///
    /// # Panics
    /// When the range is outside of the disk.
    #[inline]
    #[must_use]
    pub fn take(self: &Rc<Self>, offset: u64, bytes: u32) -> Option<Buf> {
        self.check(offset, bytes);
        let count = Self::pages(offset, bytes).count();
        if count >= EXTENT_PAGES as usize {
            return self.take_extents(offset, bytes, count);
        }
        let mut free = self.free.borrow_mut();
        if free.len() < count && !self.refill(&mut free, count) {
            drop(free);
            return self.take_torn(offset, bytes, count);
        }
        let mut builder = Builder::new(&self.tails);
        let start = free.len() - count;
        for ((page, skip, step), frame) in Self::pages(offset, bytes).zip(free.drain(start..)) {
            // What `write` will change, while the frame is being filled.
            prefetch(&self.store.table[page]);
            builder.push(self.store.piece(frame, skip, step));
        }
        drop(free);
        Some(builder.build(self.home(PagePosition::of(offset)), true))
    }

    /// [`FrameCore::take`] of less than an extent when no small frames are left.
    #[cold]
    fn take_torn(self: &Rc<Self>, offset: u64, bytes: u32, count: usize) -> Option<Buf> {
        let frames = self.torn_frames(count)?;
        let mut builder = Builder::new(&self.tails);
        for ((_, skip, step), frame) in Self::pages(offset, bytes).zip(frames) {
            builder.push(self.store.piece(frame, skip, step));
        }
        Some(builder.build(self.home(PagePosition::of(offset)), true))
    }

    /// Frames of spare extents for pages that are no whole extent. Each extent is whole again when all of it
    /// has come back.
    fn torn_frames(&self, count: usize) -> Option<ArrayVec<u32, RAGGED_MAX>> {
        let mut frames = ArrayVec::new();
        let (mut first, mut end) = self.torn.get();
        while frames.len() < count && !frames.is_full() {
            if first == end {
                let Some(extent) = self.store.extents.pop() else { break };
                (first, end) = (extent * EXTENT_PAGES, (extent + 1) * EXTENT_PAGES);
            }
            frames.push(first);
            first += 1;
        }
        self.torn.set((first, end));
        if frames.len() < count {
            frames.drain(..).for_each(|frame| self.put_frame(frame));
            return None;
        }
        Some(frames)
    }

    /// Bytes of frames that are free for writes, nearly: other cores may have some more to themselves. Places
    /// of pages that nothing was written to are not among them.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        let store = &self.store;
        let fresh = store.frames.saturating_sub(store.fresh.load(Ordering::Relaxed));
        let small = u64::from(fresh) + (store.spill.len() + self.free.borrow().len()) as u64;
        (small + store.extents.spare_frames()) * FRAME
    }

    /// [`FrameCore::take`] of what may have whole extents: each of them gets one, while there are any.
    fn take_extents(self: &Rc<Self>, offset: u64, bytes: u32, pages: usize) -> Option<Buf> {
        let store = &self.store;
        let first = offset.div_ceil(EXTENT_BYTES);
        let end = ((offset + u64::from(bytes)) / EXTENT_BYTES).min(first + EXTENTS_MAX as u64);
        let mut extents = ArrayVec::<u32, EXTENTS_MAX>::new();
        let mut spares = ArrayVec::<u32, EXTENTS_MAX>::new();
        for x in first..end {
            // Extents of pages are fewer than 2^28. One that nothing is in can be written where it is.
            let home = u32::try_from(x).ok().and_then(|x| store.extents.claim_home(x));
            extents.push(home.unwrap_or(0));
            if home.is_none() {
                spares.extend(store.extents.pop());
            }
        }
        // In rising order they may lie side by side.
        spares.sort_unstable_by(|a, b| b.cmp(a));
        for extent in extents.iter_mut().filter(|extent| **extent == 0) {
            *extent = spares.pop().unwrap_or(0);
        }
        let whole = extents.iter().filter(|extent| **extent != 0).count();
        let count = pages - whole * EXTENT_PAGES as usize;
        let mut free = self.free.borrow_mut();
        let mut torn = ArrayVec::new();
        if free.len() < count && !self.refill(&mut free, count) {
            drop(free);
            // Only the ends: what begins with an extent of frames would be taken for a whole one.
            match if whole == extents.len() { self.torn_frames(count) } else { None } {
                Some(frames) => torn = frames,
                None => {
                    extents.iter().filter(|extent| **extent != 0).for_each(|extent| self.put_extent(*extent));
                    return None;
                }
            }
            free = self.free.borrow_mut();
        }
        let is_torn = !torn.is_empty();
        let mut builder = Builder::new(&self.tails);
        let left = if is_torn { free.len() } else { free.len() - count };
        let mut ends = if is_torn { 0 } else { left };
        for (page, skip, step) in Self::pages(offset, bytes) {
            prefetch(&store.table[page]);
            let (x, place) = (page as u64 / u64::from(EXTENT_PAGES), page as u64 % u64::from(EXTENT_PAGES));
            let at = x.checked_sub(first).and_then(|at| usize::try_from(at).ok());
            let frame = match at.and_then(|at| extents.get(at)) {
                // Below EXTENT_PAGES.
                Some(&extent) if extent != 0 => extent * EXTENT_PAGES + u32::try_from(place).unwrap_or(0),
                _ => {
                    ends += 1;
                    if is_torn { torn[ends - 1] } else { free[ends - 1] }
                }
            };
            builder.push(store.piece(frame, skip, step));
        }
        free.truncate(left);
        drop(free);
        Some(builder.build(self.home(PagePosition::of(offset)), true))
    }

    /// Fill the list to at least `count` from what other cores spilled, then from frames never used.
    #[cold]
    fn refill(&self, free: &mut Vec<u32>, count: usize) -> bool {
        while free.len() < count {
            if let Some(frame) = self.store.spill.pop() {
                free.push(frame);
                continue;
            }
            let hoard_max = self.store.hoard_max.load(Ordering::Relaxed);
            let batch = FRESH_BATCH.min(hoard_max).max(u32::try_from(count).unwrap_or(FRESH_BATCH));
            let taken = self.store.fresh.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |fresh| {
                let next = fresh.saturating_add(batch).min(self.store.frames);
                (next > fresh).then_some(next)
            });
            let Ok(first) = taken else {
                // Not enough. What was collected goes back, or two cores might wait for each other's.
                self.trim(free);
                return false;
            };
            let end = first.saturating_add(batch).min(self.store.frames);
            // At the front: they lie side by side and are taken from the end, last in first out.
            free.splice(0..0, first..end);
        }
        true
    }

    /// Free small frames go here; half of a full list is spilled to the other cores.
    #[inline]
    fn put_small(&self, frame: u32) {
        let mut free = self.free.borrow_mut();
        free.push(frame);
        self.trim(&mut free);
    }

    #[inline]
    fn trim(&self, free: &mut Vec<u32>) {
        let hoard_max = self.store.hoard_max.load(Ordering::Relaxed) as usize;
        if free.len() > hoard_max {
            free.drain(..free.len() - hoard_max / 2).for_each(|frame| self.store.spill_one(frame));
        }
    }

    #[inline]
    fn unpin(&self, page: usize, frame: u32) {
        if self.store.unpin(page, frame) {
            self.put_frame(frame);
        }
    }

    /// Give back the frames of a segment whose first byte is at `offset` of the disk.
    #[inline]
    fn give_back_segment(&self, offset: u64, segment: Segment, is_writable: bool) {
        let frames = self.store.frames_of(segment);
        if is_writable {
            return self.put_frames(frames); // never published: no other core has seen them
        }
        let pages = usize::try_from(offset / FRAME).unwrap_or(usize::MAX)..;
        pages.zip(frames).for_each(|(page, frame)| self.unpin(page, frame));
    }

    /// Called by the drop of a buffer that was made for `place`.
    #[inline]
    pub(super) fn give_back(
        &self,
        place: PagePosition,
        head: Segment,
        tail: Option<Box<Tail>>,
        is_writable: bool,
    ) {
        // The commonest by far: a pin on one page.
        if tail.is_none() && !is_writable && u32::from(place.skip) + head.bytes <= FRAME_BYTES {
            if let Some(frame) = self.store.first_frame(head) {
                self.unpin(place.page as usize, frame);
            }
            return;
        }
        self.give_back_segment(place.offset(), head, is_writable);
        if let Some(tail) = tail {
            let mut at = place.offset() + u64::from(head.bytes);
            for segment in tail.0.iter().copied() {
                self.give_back_segment(at, segment, is_writable);
                at += u64::from(segment.bytes);
            }
            self.tails.put(tail);
        }
    }

    /// Called by the cut of a buffer in one segment: `kept`, the beginning of `whole`, is what its drop gives
    /// back.
    pub(super) fn give_back_cut(
        &self,
        place: PagePosition,
        whole: Segment,
        kept: Segment,
        is_writable: bool,
    ) {
        let kept_frames = self.store.frames_of(kept).len() as u64;
        let cut = kept_frames * FRAME - if kept_frames > 0 { u64::from(place.skip) } else { 0 };
        let bytes = u64::from(whole.bytes).saturating_sub(cut);
        let Ok(bytes) = u32::try_from(bytes) else { return };
        // SAFETY: inside of `whole`, or at its end.
        let addr = unsafe { whole.addr.add(whole.bytes as usize - bytes as usize) };
        self.give_back_segment(place.offset() + cut, Segment { addr, bytes }, is_writable);
    }
}

#[cfg(test)]
mod tests;
