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
//!       the old frame had no pins: free.    It had n: `leftover` of the frame + n, free when that is 0
//!   read: entry's pins + 1 ... drop: entry's pins - 1, or `leftover` of ours - 1 when it has another frame
//!   free -> this core's list -> spill to all cores
//! ```
//!
//! Why the pins are in the entry: a read that meets no write touches one cache line of the tables, not two,
//! and the tables of a large disk are in no cache. `leftover` may be below 0 between the writer's swap and
//! its addition; it is 0 again exactly when all pins are dropped and the writer has added them, and who
//! brings it to 0 frees the frame. A frame that is pinned is never free, so it cannot come back to its page
//! while a pin remembers it there.
//!
//! Limits: 2^32 - 1 frames (16 TiB). Running out of frames is a state of the writer (`take` says `None`), not
//! an error. UNSAFETY: hands out slices of frames; the pins above are the proof that they are exclusive or
//! immutable.
#![expect(unsafe_code, reason = "shares frames between cores by reference count")]

use std::cell::RefCell;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering, fence};

use crossbeam_queue::ArrayQueue;

use super::area::Area;
use super::buf::{Buf, Home, Segment, Tail, ZEROES_BYTES, zeroes};
use super::copies::note_copied;
use super::prefetch::prefetch;
use super::region::{Pages, Region, RegionError};

/// Bytes of a frame.
pub const FRAME_BYTES: u32 = 4096;
const FRAME: u64 = FRAME_BYTES as u64;
/// No frame: the page reads as zeroes. Frame 0 is never handed out.
const NONE: u32 = 0;
/// One pin, in an entry of the table.
const PIN: u64 = 1 << 32;
/// Fresh frames that a core takes at a time, so that sequential writes lie side by side: 2 MiB, a huge page.
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
    leftover: Box<[AtomicI32]>,
    spill: ArrayQueue<u32>,
    /// Frames beyond one for each page.
    surplus: u32,
    /// Free frames that a core may keep before it spills half of them to the others. All cores together keep
    /// a quarter of the surplus, so that one which idles on free frames never keeps another's writes waiting.
    hoard_max: AtomicU32,
    cores: AtomicU32,
    fresh: AtomicU32,
    pages_used: AtomicU64,
}

/// Where on the disk a buffer's first byte is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) page: u32,
    pub(super) skip: u16,
}

impl Place {
    #[inline]
    fn of(offset: u64) -> Place {
        // Neither fails: pages are fewer than frames, which are at most 2^32 - 1.
        Place {
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
        let pages_count = capacity_bytes.div_ceil(FRAME);
        let frames =
            pages_count.saturating_add(slack_bytes.div_ceil(FRAME)).saturating_add(u64::from(FRESH_BATCH));
        let bytes = usize::try_from(frames.saturating_mul(FRAME)).unwrap_or(usize::MAX);
        let too_many = u32::try_from(frames).is_err();
        let region = Arc::new(Region::map(if too_many { usize::MAX >> 8 } else { bytes }, pages)?);
        let frames = u32::try_from(frames).unwrap_or(u32::MAX);
        Ok(Arc::new(FrameStore {
            region,
            frames,
            table: (0..pages_count).map(|_| AtomicU64::new(u64::from(NONE))).collect(),
            leftover: (0..frames).map(|_| AtomicI32::new(0)).collect(),
            spill: ArrayQueue::new(frames as usize),
            surplus: frames - u32::try_from(pages_count).unwrap_or(frames),
            hoard_max: AtomicU32::new(HOARD_MAX),
            cores: AtomicU32::new(0),
            fresh: AtomicU32::new(1),
            pages_used: AtomicU64::new(0),
        }))
    }

    /// Bytes of address space and tables that a store of this shape takes, when every page is written.
    #[must_use]
    pub fn bytes_for(capacity_bytes: u64, slack_bytes: u64) -> u64 {
        let pages = capacity_bytes.div_ceil(FRAME);
        let frames = pages + slack_bytes.div_ceil(FRAME) + u64::from(FRESH_BATCH);
        frames * FRAME + pages * 8 + frames * 4 + frames * 16
    }

    /// How much is in use now.
    #[must_use]
    pub fn usage(&self) -> FrameUse {
        FrameUse { pages_used: self.pages_used.load(Ordering::Relaxed), pages: self.table.len() as u64 }
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
            tails: RefCell::new(Vec::new()),
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

    /// The frame of `old` is no longer in the table; true when nobody has a pin on it and it is free. The
    /// caller took it out with acquire ordering.
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
        let before = self.leftover[frame as usize].fetch_add(change, Ordering::Release);
        if before + change != 0 {
            return false;
        }
        fence(Ordering::Acquire);
        true
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
    /// Boxes for buffers of several segments, used again and again.
    #[expect(clippy::vec_box, reason = "the box itself is what is recycled")]
    tails: RefCell<Vec<Box<Tail>>>,
}

impl Drop for FrameCore {
    fn drop(&mut self) {
        self.free.get_mut().drain(..).for_each(|frame| self.store.spill_one(frame));
        self.store.share_out(self.store.cores.fetch_sub(1, Ordering::Relaxed) - 1);
    }
}

/// Collects segments, joining those that lie side by side.
struct Builder<'a> {
    core: &'a FrameCore,
    head: Option<Segment>,
    tail: Option<Box<Tail>>,
}

impl Builder<'_> {
    /// The segment so far, if any, that the next may be joined to.
    fn last(&mut self) -> Option<&mut Segment> {
        let head = self.head.as_mut()?;
        Some(self.tail.as_mut().and_then(|tail| tail.0.last_mut()).unwrap_or(head))
    }

    #[inline]
    fn push(&mut self, segment: Segment) {
        let core = self.core;
        match self.last() {
            None => self.head = Some(segment),
            // Frames that lie side by side. (The zeroes end where no frame begins: frame 0 is never handed
            // out.)
            Some(last) if last.end() == segment.addr.as_ptr() as usize => last.bytes += segment.bytes,
            Some(_) => self.tail.get_or_insert_with(|| core.take_tail()).0.push(segment),
        }
    }

    /// Zeroes all begin at one address, so a run of them is one longer segment.
    #[inline]
    fn push_zeroes(&mut self, bytes: u32) {
        let core = self.core;
        match self.last() {
            None => self.head = Some(zeroes(bytes)),
            Some(last) if last.is_zeroes() && last.bytes + bytes <= ZEROES_BYTES => {
                *last = zeroes(last.bytes + bytes)
            }
            Some(_) => self.tail.get_or_insert_with(|| core.take_tail()).0.push(zeroes(bytes)),
        }
    }
}

impl FrameCore {
    /// The store behind it.
    #[must_use]
    pub fn store(&self) -> &Arc<FrameStore> {
        &self.store
    }

    fn take_tail(&self) -> Box<Tail> {
        self.tails.borrow_mut().pop().unwrap_or_else(|| Box::new(Tail::with_capacity(super::SEGMENTS_MAX)))
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
        let mut builder = Builder { core: self, head: None, tail: None };
        for (page, skip, step) in Self::pages(offset, bytes) {
            let frame = self.store.pin(page);
            if frame == NONE {
                builder.push_zeroes(step);
            } else {
                // SAFETY: `skip` is below the frame's length.
                let addr = unsafe { self.store.addr(frame).add(skip as usize) };
                builder.push(Segment { addr, bytes: step });
            }
        }
        self.finish(builder, offset, bytes, false)
    }

    fn finish(self: &Rc<Self>, builder: Builder<'_>, offset: u64, bytes: u32, is_writable: bool) -> Buf {
        let Builder { head, tail, .. } = builder;
        match head {
            Some(head) => {
                let Place { page, skip } = Place::of(offset);
                Buf { head, tail, bytes, is_writable, home: Home::Frames(Rc::clone(self), page, skip) }
            }
            None => Buf::zeroes(0),
        }
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
        let mut free = self.free.borrow_mut();
        if free.len() < count && !self.refill(&mut free, count) {
            return None;
        }
        let mut builder = Builder { core: self, head: None, tail: None };
        let start = free.len() - count;
        for ((page, skip, step), frame) in Self::pages(offset, bytes).zip(free.drain(start..)) {
            // What `write` will change, while the frame is being filled.
            prefetch(&self.store.table[page]);
            // SAFETY: `skip` is below the frame's length.
            let addr = unsafe { self.store.addr(frame).add(skip as usize) };
            builder.push(Segment { addr, bytes: step });
        }
        drop(free);
        Some(self.finish(builder, offset, bytes, true))
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

    /// Free frames go here; half of a full list is spilled to the other cores.
    #[inline]
    fn put_frame(&self, frame: u32) {
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
        let pages = usize::try_from(offset / FRAME).unwrap_or(usize::MAX)..;
        for (page, frame) in pages.zip(self.store.frames_of(segment)) {
            if is_writable {
                self.put_frame(frame); // never published: nobody else has seen it
            } else {
                self.unpin(page, frame);
            }
        }
    }

    /// Called by the drop of a buffer that was made for `place`.
    #[inline]
    pub(super) fn give_back(&self, place: Place, head: Segment, tail: Option<Box<Tail>>, is_writable: bool) {
        // The commonest by far: a pin on one page.
        if tail.is_none() && !is_writable && u32::from(place.skip) + head.bytes <= FRAME_BYTES {
            if let Some(frame) = self.store.first_frame(head) {
                self.unpin(place.page as usize, frame);
            }
            return;
        }
        self.give_back_segment(place.offset(), head, is_writable);
        if let Some(mut tail) = tail {
            let mut at = place.offset() + u64::from(head.bytes);
            for segment in tail.0.drain(..) {
                self.give_back_segment(at, segment, is_writable);
                at += u64::from(segment.bytes);
            }
            self.tails.borrow_mut().push(tail);
        }
    }

    /// Called by the cut of a buffer in one segment: `kept`, the beginning of `whole`, is what its drop gives
    /// back.
    pub(super) fn give_back_cut(&self, place: Place, whole: Segment, kept: Segment, is_writable: bool) {
        let kept_frames = self.store.frames_of(kept).len() as u64;
        let cut = kept_frames * FRAME - if kept_frames > 0 { u64::from(place.skip) } else { 0 };
        let bytes = u64::from(whole.bytes).saturating_sub(cut);
        let Ok(bytes) = u32::try_from(bytes) else { return };
        // SAFETY: inside of `whole`, or at its end.
        let addr = unsafe { whole.addr.add(whole.bytes as usize - bytes as usize) };
        self.give_back_segment(place.offset() + cut, Segment { addr, bytes }, is_writable);
    }

    /// Publish `buf`, which [`FrameCore::take`] gave for the same `offset`. Each page changes in one step.
    ///
    /// # Panics
    /// When `buf` is not from this store's `take`, or the range is outside of the disk.
    #[inline]
    pub fn write(self: &Rc<Self>, offset: u64, buf: Buf) {
        let result = self.publish(offset, buf, None);
        debug_assert!(result.is_ok(), "an unconditional write is not refused");
    }

    /// Publish `buf` if the bytes on the disk are `expected` now; the comparison and the change are one step.
    /// For ranges inside of one 4 KiB page.
    ///
    /// # Errors
    /// [`SwapError::Differs`]; nothing has changed then.
    ///
    /// # Panics
    /// When the range crosses a page, or as [`FrameCore::write`].
    pub fn compare_and_write(
        self: &Rc<Self>,
        offset: u64,
        buf: Buf,
        expected: &Buf,
    ) -> Result<(), SwapError> {
        assert!(Self::pages(offset, buf.bytes).count() == 1, "compare-and-write of more than one page");
        assert_eq!(expected.len(), buf.len(), "compared and written bytes are of one length");
        self.publish(offset, buf, Some(expected))
    }

    fn publish(self: &Rc<Self>, offset: u64, mut buf: Buf, expected: Option<&Buf>) -> Result<(), SwapError> {
        self.check(offset, buf.bytes);
        let is_ours =
            buf.is_writable && matches!(&buf.home, Home::Frames(core, ..) if Rc::ptr_eq(core, self));
        assert!(is_ours, "a buffer of another home cannot be published");
        // Then the frames of the buffer and the pages of the range are equally many and cut alike.
        let start = buf.head.addr.as_ptr() as u64;
        assert_eq!(start % FRAME, offset % FRAME, "the buffer was taken for another offset");
        let head = buf.head;
        let tail = buf.tail.take();
        let mut pages = Self::pages(offset, buf.bytes);
        let segments = std::iter::once(head).chain(tail.iter().flat_map(|tail| tail.0.iter().copied()));
        let frames = segments.flat_map(|segment| self.store.frames_of(segment));
        for frame in frames {
            let Some((page, skip, step)) = pages.next() else { break };
            if step == FRAME_BYTES && expected.is_none() {
                self.swap(page, frame);
            } else if let Err(differs) = self.merge(page, frame, skip, step, expected) {
                buf.tail = tail;
                return Err(differs); // dropping `buf` gives the frame back
            }
        }
        if let Some(mut tail) = tail {
            tail.0.clear();
            self.tails.borrow_mut().push(tail);
        }
        // The table owns the frames now.
        buf.head.bytes = 0;
        Ok(())
    }

    #[inline]
    fn swap(&self, page: usize, frame: u32) {
        let old = Entry(self.store.table[page].swap(u64::from(frame), Ordering::AcqRel));
        self.retire(old);
    }

    /// Count that an entry got its first frame, or give back the frame that it had before.
    #[inline]
    fn retire(&self, old: Entry) {
        if old.frame() == NONE {
            self.store.pages_used.fetch_add(1, Ordering::Relaxed);
        } else if self.store.retire(old) {
            self.put_frame(old.frame());
        }
    }

    /// Complete `frame`, of which `skip .. skip + step` is new, with the rest of the page as it is on the
    /// disk, and publish it; begin again when another core changed the page meanwhile.
    fn merge(
        &self,
        page: usize,
        frame: u32,
        skip: u32,
        step: u32,
        expected: Option<&Buf>,
    ) -> Result<(), SwapError> {
        let (skip, step) = (skip as usize, step as usize);
        // SAFETY: the caller's buffer is the only handle to `frame` until it is published.
        let new =
            unsafe { std::slice::from_raw_parts_mut(self.store.addr(frame).as_ptr(), FRAME_BYTES as usize) };
        loop {
            let old = self.store.pin(page);
            let old_bytes: &[u8] = if old == NONE {
                &[0; FRAME_BYTES as usize]
            } else {
                // SAFETY: pinned above, and published frames are not written.
                unsafe { std::slice::from_raw_parts(self.store.addr(old).as_ptr(), FRAME_BYTES as usize) }
            };
            let differs =
                expected.is_some_and(|expected| !expected.equals_at(0, &old_bytes[skip..skip + step]));
            if !differs {
                note_copied(new.len() - step);
                new[..skip].copy_from_slice(&old_bytes[..skip]);
                new[skip + step..].copy_from_slice(&old_bytes[skip + step..]);
            }
            // While `old` is pinned, or there is none, an entry that names it has these bytes.
            let published = if differs { None } else { self.exchange(page, old, frame) };
            if let Some(before) = published {
                self.retire(before);
            }
            if old != NONE {
                self.unpin(page, old);
            }
            if differs {
                return Err(SwapError::Differs);
            }
            if published.is_some() {
                return Ok(());
            }
        }
    }

    /// Put `frame` into the entry, if that has `old` now; the entry as it was.
    fn exchange(&self, page: usize, old: u32, frame: u32) -> Option<Entry> {
        let entry = &self.store.table[page];
        let mut seen = entry.load(Ordering::Relaxed);
        while Entry(seen).frame() == old {
            match entry.compare_exchange_weak(seen, u64::from(frame), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Some(Entry(seen)),
                Err(now) => seen = now,
            }
        }
        None
    }

    /// Make `offset .. offset + bytes` read as zeroes and free the whole pages in it. Pages given back to the
    /// kernel when `is_released`. False when a ragged end found no fresh frame: nothing of it is lost, try
    /// again later.
    ///
    /// # Panics
    /// When the range is outside of the disk.
    #[must_use]
    pub fn zero(self: &Rc<Self>, offset: u64, bytes: u32, is_released: bool) -> bool {
        self.check(offset, bytes);
        let mut run: std::ops::Range<u32> = 0..0;
        for (page, skip, step) in Self::pages(offset, bytes) {
            if step < FRAME_BYTES {
                if Entry(self.store.table[page].load(Ordering::Relaxed)).frame() == NONE {
                    continue;
                }
                // First what was freed: the ragged end may need one of those frames.
                self.release_run(std::mem::take(&mut run));
                let Some(mut buf) = self.take(page as u64 * FRAME + u64::from(skip), step) else {
                    return false;
                };
                buf.clear();
                self.write(page as u64 * FRAME + u64::from(skip), buf);
                continue;
            }
            let before = Entry(self.store.table[page].swap(u64::from(NONE), Ordering::AcqRel));
            let old = before.frame();
            if old == NONE {
                continue;
            }
            self.store.pages_used.fetch_sub(1, Ordering::Relaxed);
            if !self.store.retire(before) {
                continue; // a reply is being sent from it; its pin gives it back
            }
            if is_released {
                // Ours alone until it is put on a list: release whole runs with one call.
                if old == run.end {
                    run.end += 1;
                } else {
                    self.release_run(run);
                    run = old..old + 1;
                }
            } else {
                self.put_frame(old);
            }
        }
        self.release_run(run);
        true
    }

    fn release_run(&self, run: std::ops::Range<u32>) {
        if run.is_empty() {
            return;
        }
        let frame_bytes = FRAME_BYTES as usize;
        self.store.region.release(run.start as usize * frame_bytes, run.len() * frame_bytes);
        run.for_each(|frame| self.put_frame(frame));
    }
}

#[cfg(test)]
mod tests;
