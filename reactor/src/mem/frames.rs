//! The frames of a RAM disk, shared by all cores without a lock.
//!
//! A disk is a table of 4 KiB pages. Each entry contains the index of the page's frame and the count of pins
//! on that frame. A page without a frame reads as zeroes. A published frame is never written again. A write
//! fills free frames, then swaps them into the table. Over TCP, data of 8 KiB or more is received straight
//! into the frames. Each page changes in one step: a reader gets the old page or the new one, never a mix. A
//! read pins the frames, and the reply is sent from them. If a page is overwritten meanwhile, its old frame
//! remains until the last pin is dropped.
//!
//! ```text
//!   take (frames of one writer) -> filled -> write: swap into the table
//!       the old frame had no pins: free.    It had n: its `detached_pins` + n, free when that is 0
//!   read: entry's pins + 1 ... drop: entry's pins - 1, or `detached_pins` - 1 if it has another frame
//! ```
//!
//! Each page has a place in the home of its extent of 16 pages ([`extents`]), so a large read needs few
//! segments, whatever the order of earlier writes. A write of whole extents fills spare extents, which become
//! the homes. A smaller write fills small frames, publishes them, and copies each page to its place (4 KiB
//! that are still in the processor's cache). While a reply is sent from the place, the page stays in its
//! small frame. The thread that frees the place moves the page to it (`publish.rs`). Without pins and writes
//! in progress, every page is at its place.
//!
//! ```text
//!   frames:  homes of extents of pages, spare extents | small frames -> this core's list -> spill
//! ```
//!
//! Pins are counted in the entry, so a read without a concurrent write touches one cache line of the tables
//! instead of two. The tables of a large disk do not fit in the processor's caches. `detached_pins` may be
//! negative between the writer's swap and its addition of the old pins. It is 0 again exactly when the writer
//! has added the pins and all of them are dropped. The thread that brings it to 0 frees the frame. A pinned
//! frame is never free, so it cannot be published at the same page again while a pin refers to it there.
//!
//! With [`Seals`], clients read frames by RDMA without a pin: `table.rs` seals a frame once the table names
//! it, and breaks the seal before the table names another.
//!
//! Limits: 2^32 - 1 frames (16 TiB), spare and small ones included. `take` returns `None` when too few frames
//! are free. This is not an error: the request waits.
//! UNSAFETY: makes slices of frames. A frame with a pin is immutable; an unpublished frame has one owner.
#![expect(unsafe_code, reason = "shares frames between cores by reference count")]

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use arrayvec::ArrayVec;
use crossbeam_queue::ArrayQueue;

use super::area::{Area, MemoryWatch};
use super::buf::{Buf, Builder, Origin, Segment, Tail, Tails, note_copied, zeroes};
use super::cpu_cache::{copy_nontemporal, prefetch};
use super::region::{Pages, Region, RegionError};
use super::seals::{Reference, SealedFrames, Seals, next_epoch};
use extents::{EXTENT_PAGES, Extents, Layout};
use table::{Entry, Table};

mod extents;
mod publish;
mod table;

/// Bytes of a frame, and of a page of the disk.
pub const FRAME_BYTES: u32 = 4096;
const FRAME: u64 = FRAME_BYTES as u64;
/// Disk size in bytes from which the place of a page is assumed to be uncached. The value exceeds a core's
/// share of the third-level cache of most processors.
const UNCACHED_BYTES: u64 = 128 << 20;
/// Bytes of one `MADV_POPULATE_WRITE`: a huge page. The call holds the lock of the address space, so a page
/// fault of a polling core may wait for it.
const POPULATE_BYTES: usize = 2 << 20;
/// No frame: the page reads as zeroes. Frame 0 is never allocated.
const NONE: u32 = 0;
/// One pin in an [`Entry`].
const PIN: u64 = 1 << 32;
const EXTENT_BYTES: u64 = EXTENT_PAGES as u64 * FRAME;
/// Maximum number of whole extents in one buffer: 2 MiB. Pages beyond them get small frames.
const EXTENTS_MAX: usize = 32;
/// Maximum number of pages of a buffer outside of its whole extents, at both ends together.
const EDGE_PAGES_MAX: usize = 2 * EXTENT_PAGES as usize;
/// Never-used small frames that a core takes in one step, adjacent in memory: 2 MiB, a huge page. A smaller
/// `hoard_max` reduces the count; a request for more frames raises it.
const FRESH_BATCH: u32 = 512;
/// Largest `FrameStore::hoard_max`, in frames: 8 MiB.
const HOARD_MAX: u32 = 2048;

/// All frames of one disk and the table of its pages.
pub struct FrameStore {
    region: Arc<Region>,
    frames: u32,
    table: Table,
    seals: Option<Area>,
    epoch: u8,
    extents: Extents,
    /// Free small frames that are in no core's list.
    spill: ArrayQueue<u32>,
    /// Index of the first small frame. All frames before it belong to extents.
    small_first: u32,
    /// Count of small frames.
    surplus: u32,
    /// True when pages are copied to their places with non-temporal stores; see `UNCACHED_BYTES`.
    is_uncached: bool,
    /// Maximum number of free small frames in one core's list, at least 1. A longer list is spilled down to
    /// half of that. All lists together may contain a quarter of the small frames, so an idle core's list
    /// does not delay writes of other cores.
    hoard_max: AtomicU32,
    /// Count of handles ([`FrameCore`]).
    cores: AtomicU32,
    /// Index of the first small frame that was never used.
    fresh: AtomicU32,
    pages_used: AtomicU64,
}

/// Position of a buffer's first byte on the disk: page index, and offset in the page in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct PagePosition {
    pub(super) page: u32,
    pub(super) skip: u16,
}

impl PagePosition {
    #[inline]
    fn of(offset: u64) -> PagePosition {
        // Neither conversion fails: the page index is below 2^32 - 1, and the remainder is below 4096.
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

/// Page counts of a disk: pages with data, and all pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameUse {
    /// Pages with a frame: written, and not trimmed or zeroed as a whole since.
    pub pages_used: u64,
    /// Size of the disk in pages of 4 KiB.
    pub pages: u64,
}

/// Error of [`FrameCore::compare_and_write`]: nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwapError {
    /// The bytes on the disk differ from the expected ones.
    Differs,
}

impl FrameStore {
    /// Creates a store for a disk of `capacity_bytes` (rounded up to 4 KiB). `slack_bytes` is the size of
    /// further frames, for writes in flight and for pages that are overwritten while a reply is sent from
    /// them. Only address space is mapped: the kernel allocates memory at the first write of a page. With
    /// `has_seals`, frames can be read without pins: see [`Seals`].
    ///
    /// # Errors
    /// [`RegionError`] when the address space cannot be mapped, or the disk and its slack need more than
    /// `u32::MAX` frames.
    pub fn new(
        capacity_bytes: u64,
        slack_bytes: u64,
        pages: Pages,
        has_seals: bool,
    ) -> Result<Arc<FrameStore>, RegionError> {
        let is_uncached = capacity_bytes >= UNCACHED_BYTES;
        FrameStore::create(capacity_bytes, slack_bytes, pages, is_uncached, has_seals)
    }

    fn create(
        capacity_bytes: u64,
        slack_bytes: u64,
        pages: Pages,
        is_uncached: bool,
        has_seals: bool,
    ) -> Result<Arc<FrameStore>, RegionError> {
        let pages_count = capacity_bytes.div_ceil(FRAME);
        let Layout { homes, spares, small } = Layout::of(capacity_bytes, slack_bytes);
        let frames =
            (1 + homes).saturating_add(spares).saturating_mul(u64::from(EXTENT_PAGES)).saturating_add(small);
        let bytes = usize::try_from(frames.saturating_mul(FRAME)).unwrap_or(usize::MAX);
        let too_many = u32::try_from(frames).is_err();
        let region = Arc::new(Region::map(if too_many { usize::MAX >> 8 } else { bytes }, pages)?);
        let frames = u32::try_from(frames).unwrap_or(u32::MAX);
        // No conversion fails: each count is at most `frames`.
        let [homes, spares, surplus] = [homes, spares, small].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        let extents = Extents::new(homes, spares);
        let small_first = extents.frames();
        let (words, seals) = if has_seals { Some(Seals::map(frames)?) } else { None }.unzip();
        Ok(Arc::new(FrameStore {
            region,
            frames,
            extents,
            table: Table::new(pages_count, frames, words),
            seals,
            epoch: next_epoch(),
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

    /// Returns the bytes of all frames and tables of a store of this size. Resident once all were used.
    #[must_use]
    pub fn bytes_for(capacity_bytes: u64, slack_bytes: u64, has_seals: bool) -> u64 {
        let Layout { homes, spares, small } = Layout::of(capacity_bytes, slack_bytes);
        let frames = (1 + homes + spares) * u64::from(EXTENT_PAGES) + small;
        let each = 4 + 8 * u64::from(has_seals);
        let tables = capacity_bytes.div_ceil(FRAME) * 8 + frames * each + small * 16;
        frames * FRAME + tables + Extents::bytes_for(homes, spares)
    }

    /// Returns the count of pages in use now, and of all pages.
    #[must_use]
    pub fn usage(&self) -> FrameUse {
        FrameUse { pages_used: self.pages_used.load(Ordering::Relaxed), pages: self.table.len() as u64 }
    }

    /// Allocates up to 2 MiB of the frames' memory from `offset` on, in bytes from its start, now instead of
    /// at the first write. Returns the offset of the next portion; `None` after the last.
    ///
    /// # Errors
    /// The error of madvise(2) with `MADV_POPULATE_WRITE`.
    pub fn populate(&self, offset: usize) -> std::io::Result<Option<usize>> {
        let bytes = self.region.bytes().saturating_sub(offset).min(POPULATE_BYTES);
        self.region.populate(offset.min(self.region.bytes()), bytes)?;
        let next = offset.saturating_add(bytes);
        Ok((next < self.region.bytes()).then_some(next))
    }

    /// Returns the kind of memory pages in use. It may differ from the requested kind.
    #[must_use]
    pub fn pages(&self) -> Pages {
        self.region.pages()
    }

    /// Returns a watch of the frames' memory, for the time after the disk's removal.
    #[must_use]
    pub fn memory_watch(&self) -> MemoryWatch {
        MemoryWatch::of(&self.region)
    }

    /// Returns true if the frames have seals.
    #[must_use]
    pub fn has_seals(&self) -> bool {
        self.seals.is_some()
    }

    /// Ends reads without pins: no frame is sealed from now on. Called when the disk is removed.
    pub fn stop_seals(&self) {
        if let Some(seals) = self.table.seals() {
            seals.stop();
        }
    }

    /// Creates a handle for one core, with its own list of free frames.
    #[must_use]
    pub fn core(self: &Arc<Self>) -> Rc<FrameCore> {
        self.update_hoard_max(self.cores.fetch_add(1, Ordering::Relaxed) + 1);
        Rc::new(FrameCore {
            store: Arc::clone(self),
            free: RefCell::new(Vec::with_capacity((HOARD_MAX + FRESH_BATCH) as usize + super::SEGMENTS_MAX)),
            partial_extent: Cell::new((0, 0)),
            tails: Tails::new(0, super::SEGMENTS_MAX),
        })
    }

    /// Recomputes `hoard_max` for `cores` handles. Two concurrent calls may leave the value of the
    /// earlier call until the next call.
    fn update_hoard_max(&self, cores: u32) {
        let each = self.surplus / (4 * cores.max(1));
        self.hoard_max.store(each.clamp(1, HOARD_MAX), Ordering::Relaxed);
    }

    fn addr(&self, frame: u32) -> NonNull<u8> {
        // SAFETY: every frame index is below `frames`, for which the region was mapped; `self` keeps it
        // mapped.
        unsafe { self.region.base().add(frame as usize * FRAME_BYTES as usize) }
    }

    /// Returns the bytes `skip .. skip + step` of a frame as a segment.
    #[inline]
    fn piece(&self, frame: u32, skip: u32, step: u32) -> Segment {
        // SAFETY: `skip` is below the frame's length, so the address is inside of the frame.
        Segment { addr: unsafe { self.addr(frame).add(skip as usize) }, bytes: step }
    }

    /// Returns the frame in which a segment begins. `None` for zeroes, which lie outside of the region, and
    /// for an empty segment.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "frames of the region are counted in 32 bits")]
    fn first_frame(&self, segment: Segment) -> Option<u32> {
        let start = (segment.addr.as_ptr() as usize).wrapping_sub(self.region.base().as_ptr() as usize);
        let is_here = start < self.region.bytes() && segment.bytes > 0;
        is_here.then_some((start / FRAME_BYTES as usize) as u32)
    }

    /// Returns the frames that a segment touches; none where [`FrameStore::first_frame`] returns `None`.
    #[inline]
    fn frames_of(&self, segment: Segment) -> std::ops::Range<u32> {
        let Some(first) = self.first_frame(segment) else { return 0..0 };
        let skip = segment.addr.as_ptr() as usize as u64 % FRAME;
        // The conversion does not fail: the count is at most the frames of the region.
        let count = u32::try_from((skip + u64::from(segment.bytes)).div_ceil(FRAME)).unwrap_or(0);
        first..first + count
    }

    /// Returns the bytes of `frame`, which the caller has pinned or owns.
    fn bytes_of(&self, frame: u32) -> &[u8] {
        // SAFETY: the caller has pinned the frame or owns it, and a published frame is never written; `self`
        // keeps the region mapped.
        unsafe { std::slice::from_raw_parts(self.addr(frame).as_ptr(), FRAME_BYTES as usize) }
    }

    /// Copies frame `from` to `to`, which only the caller uses.
    #[inline]
    fn copy_frame(&self, from: u32, to: u32) {
        debug_assert_ne!(from, to, "a frame is not copied to itself");
        note_copied(FRAME_BYTES as usize);
        let (from, to) = (self.addr(from).as_ptr(), self.addr(to).as_ptr());
        let bytes = FRAME_BYTES as usize;
        // SAFETY: two different frames of the region, whole and aligned to pages. `from` is pinned, so
        // nothing writes it; `to` is owned by the caller and not in the table, so nothing else reads or
        // writes it.
        unsafe {
            if self.is_uncached {
                copy_nontemporal(from, to, bytes);
            } else {
                std::ptr::copy_nonoverlapping(from, to, bytes);
            }
        }
    }

    /// Copies `old` to `frame`, which only the caller uses, except for the bytes `skip .. skip + step`.
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

impl SealedFrames for FrameStore {
    /// From this call on, none of the memory is released to the kernel.
    fn area(&self) -> Area {
        Area::of(&self.region)
    }

    fn seals_area(&self) -> Option<Area> {
        self.seals.clone()
    }

    fn frames(&self) -> u32 {
        self.frames
    }

    fn epoch(&self) -> u8 {
        self.epoch
    }

    fn is_open(&self) -> bool {
        self.table.seals().is_some_and(Seals::is_open)
    }

    fn close(&self) {
        self.table.seals().into_iter().for_each(Seals::close);
    }

    fn seal_of(&self, frame: u32) -> u64 {
        self.table.seals().map_or(0, |seals| seals.load(frame))
    }
}

impl Drop for FrameStore {
    fn drop(&mut self) {
        self.region.abandon();
    }
}

/// One core's handle on a [`FrameStore`]: its own list of free frames.
pub struct FrameCore {
    store: Arc<FrameStore>,
    free: RefCell<Vec<u32>>,
    /// Unused frames of a spare extent that [`FrameCore::partial_frames`] has begun to use: first index, and
    /// end (exclusive). Equal values: none.
    partial_extent: Cell<(u32, u32)>,
    tails: Tails,
}

impl Drop for FrameCore {
    fn drop(&mut self) {
        let (first, end) = self.partial_extent.take();
        self.put_frames(first..end);
        self.free.get_mut().drain(..).for_each(|frame| self.store.spill_one(frame));
        self.store.update_hoard_max(self.store.cores.fetch_sub(1, Ordering::Relaxed) - 1);
    }
}

impl FrameCore {
    /// Returns the store that all cores share.
    #[must_use]
    pub fn store(&self) -> &Arc<FrameStore> {
        &self.store
    }

    fn assert_in_range(&self, offset: u64, bytes: u32) {
        let end = offset.checked_add(u64::from(bytes));
        assert!(
            end.is_some_and(|end| end <= self.store.table.len() as u64 * FRAME),
            "{bytes} bytes at {offset} are outside of the disk; the caller checks the range"
        );
    }

    /// Returns the pages of `offset .. offset + bytes` as `(page index, first byte in it, bytes in it)`.
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
            // Neither conversion fails: both values are at most 4096.
            Some((page, u32::try_from(skip).unwrap_or(0), u32::try_from(step).unwrap_or(0)))
        })
    }

    /// Returns a shared buffer of `offset .. offset + bytes` that pins the frames; nothing is copied.
    ///
    /// # Panics
    /// When the range is outside of the disk.
    #[inline]
    #[must_use]
    pub fn read(self: &Rc<Self>, offset: u64, bytes: u32) -> Buf {
        self.assert_in_range(offset, bytes);
        let position = PagePosition::of(offset);
        // Common case: bytes of one page.
        if bytes > 0 && bytes <= FRAME_BYTES - u32::from(position.skip) {
            let frame = self.store.table.pin(position.page as usize);
            let is_written = frame != NONE;
            let skip = u32::from(position.skip);
            let head = if is_written { self.store.piece(frame, skip, bytes) } else { zeroes(bytes) };
            return Buf { head, tail: None, bytes, is_writable: false, origin: self.origin(position) };
        }
        let mut builder = Builder::new(&self.tails);
        for (page, skip, step) in Self::pages(offset, bytes) {
            let frame = self.store.table.pin(page);
            if frame == NONE {
                builder.push_zeroes(step);
            } else {
                builder.push(self.store.piece(frame, skip, step));
            }
        }
        builder.build(self.origin(position), false)
    }

    /// Prefetches the table entry of the page at `offset`; no effect beyond the end of the disk.
    #[inline]
    pub fn prefetch_entry(&self, offset: u64) {
        self.prefetch_page(usize::try_from(offset / FRAME).unwrap_or(usize::MAX));
    }

    #[inline]
    fn prefetch_page(&self, page: usize) {
        if let Some(entry) = self.store.table.word(page) {
            prefetch(entry);
        }
    }

    /// Returns the reference to the page at `position`, for a shared buffer of this handle whose only segment
    /// is `segment`. `None`: it is no whole page, the page has no frame, or its seal is broken.
    #[inline]
    pub(super) fn reference(&self, position: PagePosition, segment: Segment) -> Option<(Reference, u8)> {
        if position.skip != 0 || segment.bytes != FRAME_BYTES {
            return None;
        }
        let frame = self.store.first_frame(segment)?;
        Some((self.store.table.reference(frame, u64::from(position.page))?, self.store.epoch))
    }

    fn origin(self: &Rc<Self>, position: PagePosition) -> Origin {
        Origin::Frames(Rc::clone(self), position.page, position.skip)
    }

    /// Returns a writable buffer of free frames for `offset .. offset + bytes`. The caller fills it and
    /// passes it to [`FrameCore::write`] or [`FrameCore::compare_and_write`] with the same offset. `None`
    /// when too few frames are free: the request waits.
    ///
    /// # Panics
    /// When the range is outside of the disk.
    #[inline]
    #[must_use]
    pub fn take(self: &Rc<Self>, offset: u64, bytes: u32) -> Option<Buf> {
        self.assert_in_range(offset, bytes);
        let position = PagePosition::of(offset);
        let mut free = self.free.borrow_mut();
        // Common case: bytes of one page, and a free frame in this core's list.
        if bytes > 0
            && bytes <= FRAME_BYTES - u32::from(position.skip)
            && let Some(frame) = free.pop()
        {
            self.prefetch_page(position.page as usize);
            let head = self.store.piece(frame, u32::from(position.skip), bytes);
            return Some(Buf { head, tail: None, bytes, is_writable: true, origin: self.origin(position) });
        }
        let count = Self::pages(offset, bytes).count();
        if count >= EXTENT_PAGES as usize {
            drop(free);
            return self.take_extents(offset, bytes, count);
        }
        if free.len() < count && !self.refill(&mut free, count) {
            drop(free);
            return self.take_partial(offset, bytes, count);
        }
        let mut builder = Builder::new(&self.tails);
        let start = free.len() - count;
        for ((page, skip, step), frame) in Self::pages(offset, bytes).zip(free.drain(start..)) {
            // Prepares for `write`, which changes this entry once the frame is filled.
            self.prefetch_page(page);
            builder.push(self.store.piece(frame, skip, step));
        }
        drop(free);
        Some(builder.build(self.origin(PagePosition::of(offset)), true))
    }

    /// Implements [`FrameCore::take`] for fewer than 16 pages, with frames of spare extents. Called when too
    /// few small frames are free. `count` is the count of pages.
    #[cold]
    fn take_partial(self: &Rc<Self>, offset: u64, bytes: u32, count: usize) -> Option<Buf> {
        let frames = self.partial_frames(count)?;
        let mut builder = Builder::new(&self.tails);
        for ((_, skip, step), frame) in Self::pages(offset, bytes).zip(frames) {
            builder.push(self.store.piece(frame, skip, step));
        }
        Some(builder.build(self.origin(PagePosition::of(offset)), true))
    }

    /// Takes `count` frames of spare extents, for pages outside of whole extents. `None` when fewer are free,
    /// or `count` exceeds `EDGE_PAGES_MAX`. An extent is spare again once all of its frames are free.
    fn partial_frames(&self, count: usize) -> Option<ArrayVec<u32, EDGE_PAGES_MAX>> {
        let mut frames = ArrayVec::new();
        let (mut first, mut end) = self.partial_extent.get();
        while frames.len() < count && !frames.is_full() {
            if first == end {
                let Some(extent) = self.store.extents.pop() else { break };
                (first, end) = (extent * EXTENT_PAGES, (extent + 1) * EXTENT_PAGES);
            }
            frames.push(first);
            first += 1;
        }
        self.partial_extent.set((first, end));
        if frames.len() < count {
            frames.drain(..).for_each(|frame| self.put_frame(frame));
            return None;
        }
        Some(frames)
    }

    /// Returns the bytes of frames that are free for writes, approximately. Not included: free frames in
    /// other cores' lists, unused frames of a spare extent for small writes, and places of unwritten pages.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        let store = &self.store;
        let fresh = store.frames.saturating_sub(store.fresh.load(Ordering::Relaxed));
        let small = u64::from(fresh) + (store.spill.len() + self.free.borrow().len()) as u64;
        (small + store.extents.spare_frames()) * FRAME
    }

    /// Implements [`FrameCore::take`] for at least 16 pages. Each whole extent in the range gets its own home
    /// if all of that is free, else a spare extent, else small frames. `pages` is the count of pages.
    fn take_extents(self: &Rc<Self>, offset: u64, bytes: u32, pages: usize) -> Option<Buf> {
        let store = &self.store;
        let first = offset.div_ceil(EXTENT_BYTES);
        let end = ((offset + u64::from(bytes)) / EXTENT_BYTES).min(first + EXTENTS_MAX as u64);
        let mut extents = ArrayVec::<u32, EXTENTS_MAX>::new();
        let mut spares = ArrayVec::<u32, EXTENTS_MAX>::new();
        for x in first..end {
            // The conversion does not fail: extents of pages are fewer than 2^28. A home that is completely
            // free is filled in place.
            let home = u32::try_from(x).ok().and_then(|x| store.extents.claim_home(x));
            extents.push(home.unwrap_or(0));
            if home.is_none() {
                spares.extend(store.extents.pop());
            }
        }
        // Descending, as extents are popped from the end: they are used in ascending order, and adjacent ones
        // form one segment.
        spares.sort_unstable_by(|a, b| b.cmp(a));
        for extent in extents.iter_mut().filter(|extent| **extent == 0) {
            *extent = spares.pop().unwrap_or(0);
        }
        let whole = extents.iter().filter(|extent| **extent != 0).count();
        let count = pages - whole * EXTENT_PAGES as usize;
        let mut free = self.free.borrow_mut();
        let mut partial = ArrayVec::new();
        if free.len() < count && !self.refill(&mut free, count) {
            drop(free);
            // For pages at the ends only: `is_whole` could mistake such frames for a whole extent.
            match if whole == extents.len() { self.partial_frames(count) } else { None } {
                Some(frames) => partial = frames,
                None => {
                    extents.iter().filter(|extent| **extent != 0).for_each(|extent| self.put_extent(*extent));
                    return None;
                }
            }
            free = self.free.borrow_mut();
        }
        let is_partial = !partial.is_empty();
        let mut builder = Builder::new(&self.tails);
        let left = if is_partial { free.len() } else { free.len() - count };
        let mut ends = if is_partial { 0 } else { left };
        for (page, skip, step) in Self::pages(offset, bytes) {
            self.prefetch_page(page);
            let (x, place) = (page as u64 / u64::from(EXTENT_PAGES), page as u64 % u64::from(EXTENT_PAGES));
            let at = x.checked_sub(first).and_then(|at| usize::try_from(at).ok());
            let frame = match at.and_then(|at| extents.get(at)) {
                // The conversion does not fail: `place` is below EXTENT_PAGES.
                Some(&extent) if extent != 0 => extent * EXTENT_PAGES + u32::try_from(place).unwrap_or(0),
                _ => {
                    ends += 1;
                    if is_partial { partial[ends - 1] } else { free[ends - 1] }
                }
            };
            builder.push(store.piece(frame, skip, step));
        }
        free.truncate(left);
        drop(free);
        Some(builder.build(self.origin(PagePosition::of(offset)), true))
    }

    /// Extends the list `free` to at least `count` frames: from the spill queue, then with never-used frames.
    /// Returns false when there are too few; the frames found so far stay in the list, up to `hoard_max`.
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
                // Too few frames. Those above the bound are spilled, or two cores could wait for each other's
                // frames.
                self.trim(free);
                return false;
            };
            let end = first.saturating_add(batch).min(self.store.frames);
            // Inserted at the front. The list is used from its end, so frames that are still in the
            // processor's cache are reused first.
            free.splice(0..0, first..end);
        }
        true
    }

    /// Adds a free small frame to this core's list. A list above `hoard_max` is spilled down to half of that,
    /// so other cores can use the frames.
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
        if self.store.table.unpin(page, frame) {
            self.put_frame(frame);
        }
    }

    /// Frees the frames of a segment if its buffer was writable; otherwise drops their pins. The first byte
    /// of the segment is at `offset` of the disk.
    #[inline]
    fn give_back_segment(&self, offset: u64, segment: Segment, is_writable: bool) {
        let frames = self.store.frames_of(segment);
        if is_writable {
            return self.put_frames(frames); // never published: no other core has seen them
        }
        let pages = usize::try_from(offset / FRAME).unwrap_or(usize::MAX)..;
        pages.zip(frames).for_each(|(page, frame)| self.unpin(page, frame));
    }

    /// Frees or unpins the frames of a dropped buffer whose first byte is at `position` of the disk.
    #[inline]
    pub(super) fn give_back(
        &self,
        position: PagePosition,
        head: Segment,
        tail: Option<Box<Tail>>,
        is_writable: bool,
    ) {
        // Common case: a pin on one page.
        if tail.is_none() && !is_writable && u32::from(position.skip) + head.bytes <= FRAME_BYTES {
            if let Some(frame) = self.store.first_frame(head) {
                self.unpin(position.page as usize, frame);
            }
            return;
        }
        self.give_back_segment(position.offset(), head, is_writable);
        if let Some(tail) = tail {
            let mut at = position.offset() + u64::from(head.bytes);
            for segment in tail.0.iter().copied() {
                self.give_back_segment(at, segment, is_writable);
                at += u64::from(segment.bytes);
            }
            self.tails.put(tail);
        }
    }

    /// Frees or unpins the frames of `whole` behind those of `kept`, when a buffer of one segment is
    /// truncated to its beginning `kept`. The drop of the buffer does the same for the other frames.
    pub(super) fn give_back_cut(
        &self,
        position: PagePosition,
        whole: Segment,
        kept: Segment,
        is_writable: bool,
    ) {
        let kept_frames = self.store.frames_of(kept).len() as u64;
        let cut = kept_frames * FRAME - if kept_frames > 0 { u64::from(position.skip) } else { 0 };
        let bytes = u64::from(whole.bytes).saturating_sub(cut);
        let Ok(bytes) = u32::try_from(bytes) else { return };
        // SAFETY: `bytes` is at most `whole.bytes`, so the address is inside of `whole` or at its end.
        let addr = unsafe { whole.addr.add(whole.bytes as usize - bytes as usize) };
        self.give_back_segment(position.offset() + cut, Segment { addr, bytes }, is_writable);
    }
}

#[cfg(test)]
mod tests;
