//! [`CacheFrames`]: the frames of a cache, 4 KiB each, shared by all cores. [`CacheCore`]: one core's handle,
//! which makes buffers of frames.
//!
//! A shared [`Buf`] of frames has a pin on each frame, and its bytes are sent from the frames. A writable
//! `Buf` owns the right to write its frames ([`Filling`]); a disk reads pages into them. If a writable `Buf`
//! is dropped instead of passed to [`CacheCore::take_back`], its doomed frames become free. Its other frames
//! become free once they are invalidated: until then an index may still contain them.
//!
//! The index above (`spindle_target_disk::cache`) maps pages to frames.
//! UNSAFETY: makes segments of a region; [`FrameWords`] excludes writes of a frame during other accesses.
#![expect(unsafe_code, reason = "cuts a region into frames")]

mod words;

use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use super::area::{Area, MemoryWatch};
use super::buf::{Buf, Builder, Origin, Segment, Tail, Tails};
use super::frames::FRAME_BYTES;
use super::region::{Pages, Region, RegionError};
use super::seals::{Reference, SealedFrames, Seals, next_epoch};

pub use words::{Filling, FrameWords, HEAT_MAX, Invalidated, KeptPin, Lookup, Pin, Shard};

/// Initial capacity of a buffer's tail, the list of its segments after the first. A tail that grows keeps its
/// capacity when it is reused.
const TAIL_SEGMENTS: usize = 32;
const FRAME: usize = FRAME_BYTES as usize;
/// Frames that one step of [`CacheMemory`] makes resident: 2 MiB, which the kernel zeroes in 0.2 to 1 ms.
const STEP_FRAMES: u32 = 512;

/// The frames of one cache. See the module.
pub struct CacheFrames {
    region: Arc<Region>,
    words: FrameWords,
    seals: Option<Area>,
    epoch: u8,
}

impl CacheFrames {
    /// Creates `shards` times `shard_frames` free frames. Returns them, and the right to allocate frames of
    /// each shard. Only address space is mapped: the kernel allocates memory when a frame is first filled.
    /// With `has_seals`, frames can be read without pins: see [`Seals`].
    ///
    /// # Errors
    /// [`RegionError`] when the address space cannot be mapped.
    ///
    /// # Panics
    /// As [`FrameWords::new`].
    pub fn new(
        shards: u32,
        shard_frames: u32,
        pages: Pages,
        has_seals: bool,
    ) -> Result<(Arc<CacheFrames>, Vec<Shard>), RegionError> {
        let (frames, rights) = CacheFrames::map(shards, shard_frames, pages, has_seals)?;
        Ok((Arc::new(frames), rights))
    }

    /// As [`CacheFrames::new`], but no frame can be allocated until [`CacheMemory::step`] has made its memory
    /// resident. So no data core waits while the kernel zeroes a page.
    ///
    /// # Errors
    /// [`RegionError`] when the address space cannot be mapped.
    ///
    /// # Panics
    /// As [`FrameWords::new`].
    pub fn withheld(
        shards: u32,
        shard_frames: u32,
        pages: Pages,
        has_seals: bool,
    ) -> Result<(Arc<CacheFrames>, Vec<Shard>, CacheMemory), RegionError> {
        let (mut frames, rights) = CacheFrames::map(shards, shard_frames, pages, has_seals)?;
        frames.words.withhold_all();
        let frames = Arc::new(frames);
        let memory = CacheMemory { frames: Arc::downgrade(&frames), next: 0, error: None };
        Ok((frames, rights, memory))
    }

    fn map(
        shards: u32,
        shard_frames: u32,
        pages: Pages,
        has_seals: bool,
    ) -> Result<(CacheFrames, Vec<Shard>), RegionError> {
        let frames = shards.saturating_mul(shard_frames);
        let (words, area) = if has_seals { Some(Seals::map(frames)?) } else { None }.unzip();
        let (words, rights) = FrameWords::new(shards, shard_frames, words);
        let region = Arc::new(Region::map(words.len() as usize * FRAME, pages)?);
        let epoch = next_epoch();
        Ok((CacheFrames { region, words, seals: area, epoch }, rights))
    }

    /// Returns the state words of the frames.
    #[inline]
    #[must_use]
    pub fn words(&self) -> &FrameWords {
        &self.words
    }

    /// Returns a watch of the frames' memory, for the time after the cache's removal.
    #[must_use]
    pub fn memory_watch(&self) -> MemoryWatch {
        MemoryWatch::of(&self.region)
    }

    /// Creates a handle for one core, with `buffers` preallocated tails for buffers of several segments. More
    /// are allocated as needed.
    #[must_use]
    pub fn core(self: &Arc<Self>, buffers: usize) -> Rc<CacheCore> {
        Rc::new(CacheCore { frames: Arc::clone(self), tails: Tails::new(buffers, TAIL_SEGMENTS) })
    }

    #[inline]
    fn piece(&self, frame: u32, skip: u32, bytes: u32) -> Segment {
        let at = frame as usize * FRAME + skip as usize;
        assert!(skip <= FRAME_BYTES && bytes <= FRAME_BYTES - skip && at < self.region.bytes());
        // SAFETY: `at` is inside of the region (asserted). So are all bytes of its frame, as the region
        // consists of whole frames.
        Segment { addr: unsafe { self.region.base().add(at) }, bytes }
    }

    /// Returns the frames that a segment of this region touches.
    #[inline]
    fn frames_of(&self, segment: Segment) -> Range<u32> {
        let at = segment.addr.as_ptr().addr() - self.region.base().as_ptr().addr();
        let frame = |at: usize| u32::try_from(at / FRAME).unwrap_or(u32::MAX);
        frame(at)..frame(at + segment.bytes as usize + FRAME - 1)
    }
}

impl Drop for CacheFrames {
    fn drop(&mut self) {
        self.region.abandon();
    }
}

impl SealedFrames for CacheFrames {
    fn area(&self) -> Area {
        Area::of(&self.region)
    }

    fn seals_area(&self) -> Option<Area> {
        self.seals.clone()
    }

    fn frames(&self) -> u32 {
        self.words.len()
    }

    fn epoch(&self) -> u8 {
        self.epoch
    }

    fn is_open(&self) -> bool {
        self.words.seals().is_some_and(Seals::is_open)
    }

    fn close(&self) {
        self.words.close_seals();
    }

    fn seal_of(&self, frame: u32) -> u64 {
        self.words.seals().map_or(0, |seals| seals.load(frame))
    }
}

/// Makes the memory of withheld frames resident, for a thread that is no data core.
pub struct CacheMemory {
    /// A weak reference, so that the thread does not keep the memory of a removed cache.
    frames: Weak<CacheFrames>,
    /// Number of steps taken.
    next: u32,
    error: Option<io::Error>,
}

impl CacheMemory {
    /// Makes the next 2 MiB resident and their frames free. The steps take turns between the shards, because
    /// the pages of a shard use only its frames. If the kernel has no memory or no such call (before Linux
    /// 5.14), the frames become free all the same, and a data core touches them first: see
    /// [`CacheMemory::error`]. Returns false when all frames are free or the cache is gone.
    pub fn step(&mut self) -> bool {
        let Some(frames) = self.frames.upgrade() else { return false };
        let (words, shard_frames) = (&frames.words, frames.words.shard_frames());
        let shards = words.len() / shard_frames;
        let (shard, at) = (self.next % shards, u64::from(self.next / shards) * u64::from(STEP_FRAMES));
        let Some(at) = u32::try_from(at).ok().filter(|at| *at < shard_frames) else { return false };
        self.next += 1;
        let first = shard * shard_frames + at;
        let count = STEP_FRAMES.min(shard_frames - at);
        let populated = frames.region.populate(first as usize * FRAME, count as usize * FRAME);
        self.error = self.error.take().or(populated.err());
        words.give(first..first + count);
        true
    }

    /// Returns the first error of the kernel, if not all of the memory of the steps so far is resident.
    #[must_use]
    pub fn error(&self) -> Option<&io::Error> {
        self.error.as_ref()
    }
}

/// One core's handle on the frames of a cache.
pub struct CacheCore {
    frames: Arc<CacheFrames>,
    tails: Tails,
}

impl CacheCore {
    /// Returns the frames that all cores share.
    #[inline]
    #[must_use]
    pub fn frames(&self) -> &Arc<CacheFrames> {
        &self.frames
    }

    /// Returns a shared buffer of `bytes` of a pinned page, from byte `skip` on. It owns the pin.
    ///
    /// # Panics
    /// When `skip + bytes` is more than a page, or `pin` is of another cache.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call moves the buffer through memory")]
    #[must_use]
    pub fn page_buf(self: &Rc<Self>, pin: Pin<'_>, skip: u32, bytes: u32) -> Buf {
        let head = self.frames.piece(self.keep_pin(pin), skip, bytes);
        Buf { head, tail: None, bytes, is_writable: false, origin: Origin::Cache(Rc::clone(self)) }
    }

    /// Returns a shared buffer of consecutive pinned pages, from byte `skip` of the first on. The buffer owns
    /// the pins.
    ///
    /// # Panics
    /// When `bytes` does not end in the last of the pages, or a pin is of another cache.
    pub fn pages_buf<'a>(self: &Rc<Self>, pins: impl Iterator<Item = Pin<'a>>, skip: u32, bytes: u32) -> Buf {
        let (mut pieces, mut skip, mut left) = (Builder::new(&self.tails), skip, bytes);
        for pin in pins {
            let step = left.min(FRAME_BYTES - skip);
            // The drop would not unpin the frame of an empty segment.
            assert!(step > 0, "more pages than bytes");
            pieces.push(self.frames.piece(self.keep_pin(pin), skip, step));
            (skip, left) = (0, left - step);
        }
        assert!(left == 0, "fewer pages than bytes");
        pieces.build(Origin::Cache(Rc::clone(self)), false)
    }

    /// Returns a writable buffer of the whole frames `frames`, in their order. The buffer owns the rights.
    pub fn filling<'a>(self: &Rc<Self>, frames: impl Iterator<Item = Filling<'a>>) -> Buf {
        let mut pieces = Builder::new(&self.tails);
        for filling in frames {
            pieces.push(self.frames.piece(filling.into_frame(), 0, FRAME_BYTES));
        }
        pieces.build(Origin::Cache(Rc::clone(self)), true)
    }

    /// Passes the frames of `buf` to `each`, in order. `buf` is from [`CacheCore::filling`] of this handle.
    ///
    /// # Errors
    /// Returns `buf` when it is not from [`CacheCore::filling`] of this handle.
    pub fn take_back(self: &Rc<Self>, mut buf: Buf, mut each: impl FnMut(Filling<'_>)) -> Result<(), Buf> {
        let is_ours = matches!(&buf.origin, Origin::Cache(core) if Rc::ptr_eq(core, self));
        if !is_ours || !buf.is_writable {
            return Err(buf);
        }
        let words = self.frames.words();
        self.frames.frames_of(buf.head).for_each(|frame| each(words.filling(frame)));
        if let Some(tail) = buf.tail.take() {
            let frames = tail.0.iter().flat_map(|segment| self.frames.frames_of(*segment));
            frames.for_each(|frame| each(words.filling(frame)));
            self.tails.put(tail);
        }
        // The drop of `buf` must not free the frames.
        buf.origin = Origin::Zeroes;
        Ok(())
    }

    /// Returns the reference to the content of a pinned frame and the number of the cache, if `segment` is
    /// the whole frame and its seal is not broken.
    #[inline]
    pub(super) fn reference(&self, segment: Segment) -> Option<(Reference, u8)> {
        let at = segment.addr.as_ptr().addr() - self.frames.region.base().as_ptr().addr();
        if segment.bytes != FRAME_BYTES || !at.is_multiple_of(FRAME) {
            return None;
        }
        let (frame, words) = (u32::try_from(at / FRAME).ok()?, self.frames.words());
        Some((words.seals()?.reference(frame, words.page(frame))?, self.frames.epoch))
    }

    /// Turns `pin` into one that a buffer owns, and returns its frame. Panics for a pin of another cache.
    #[inline]
    fn keep_pin(&self, pin: Pin<'_>) -> u32 {
        let kept = pin.keep();
        assert!(kept.is_of(self.frames.words()), "a pin of another cache does not keep our frame");
        kept.frame()
    }

    /// Unpins the frames of a dropped shared buffer. For a writable buffer see [`Filling::lose`].
    #[inline]
    pub(super) fn give_back(&self, head: Segment, tail: Option<Box<Tail>>, is_writable: bool) {
        let words = self.frames.words();
        if is_writable {
            let tail = tail.iter().flat_map(|tail| tail.0.iter().copied());
            let frames = std::iter::once(head).chain(tail).flat_map(|segment| self.frames.frames_of(segment));
            return frames.for_each(|frame| words.filling(frame).lose());
        }
        // Common case: bytes of one page.
        let at = head.addr.as_ptr().addr() - self.frames.region.base().as_ptr().addr();
        if at % FRAME + head.bytes as usize <= FRAME {
            words.unpin(u32::try_from(at / FRAME).unwrap_or(u32::MAX));
        } else {
            self.frames.frames_of(head).for_each(|frame| words.unpin(frame));
        }
        if let Some(tail) = tail {
            for segment in tail.0.iter().copied() {
                self.frames.frames_of(segment).for_each(|frame| words.unpin(frame));
            }
            self.tails.put(tail);
        }
    }

    /// As [`CacheCore::give_back`] for the frames of `whole` behind those of `kept`, when a buffer of one
    /// segment is truncated to its beginning `kept`.
    pub(super) fn give_back_cut(&self, whole: Segment, kept: Segment, is_writable: bool) {
        let (mut frames, stay) = (self.frames.frames_of(whole), self.frames.frames_of(kept));
        frames.start = if kept.bytes == 0 { frames.start } else { stay.end };
        let words = self.frames.words();
        frames.for_each(|frame| if is_writable { words.filling(frame).lose() } else { words.unpin(frame) });
    }
}

#[cfg(test)]
mod tests;
