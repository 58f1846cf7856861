//! [`CacheFrames`]: the frames of a cache, 4 KiB each, shared by all cores; [`CacheCore`]: one core's
//! buffers of them.
//!
//! A shared [`Buf`] of them holds a pin on each of its frames, and is sent from where the page lies. A
//! writable one holds the right to write them ([`Filling`]): it is what a disk reads a page into. Dropped
//! instead of taken back ([`CacheCore::take_back`]), those of its frames are free that were doomed before;
//! the others are lost, as an index may still name them.
//!
//! Which page is in which frame is the business of an index above (`spindle_disk::cache`).
//! UNSAFETY: makes segments out of a region; who may read and write a frame is the rule of [`FrameWords`].
#![expect(unsafe_code, reason = "cuts a region into frames")]

mod words;

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use super::area::Area;
use super::buf::{Buf, Builder, Home, Segment, Tail, Tails};
use super::frames::FRAME_BYTES;
use super::region::{Pages, Region, RegionError};

pub use words::{AtomicWord, Filling, FrameWords, HEAT_MAX, Invalidated, KeptPin, Look, Pin, Shard};

/// Segments for which a buffer of several has room at first: those of a piece that fills frames. Those of
/// a long read take more memory, once.
const TAIL_SEGMENTS: usize = 32;
const FRAME: usize = FRAME_BYTES as usize;

/// The frames of one cache. See the module.
pub struct CacheFrames {
    region: Arc<Region>,
    words: FrameWords,
}

impl CacheFrames {
    /// `shards` times `shard_frames` frames. Takes address space; memory comes as frames are first filled.
    ///
    /// # Errors
    /// [`RegionError`], with the system's reason.
    ///
    /// # Panics
    /// As [`FrameWords::new`].
    pub fn new(
        shards: u32,
        shard_frames: u32,
        pages: Pages,
    ) -> Result<(Arc<CacheFrames>, Vec<Shard>), RegionError> {
        let (words, rights) = FrameWords::new(shards, shard_frames);
        let region = Arc::new(Region::map(words.len() as usize * FRAME, pages)?);
        Ok((Arc::new(CacheFrames { region, words }), rights))
    }

    /// Their states.
    #[inline]
    #[must_use]
    pub fn words(&self) -> &FrameWords {
        &self.words
    }

    /// Their memory, to be registered with a device.
    #[must_use]
    pub fn area(&self) -> Area {
        Area::of(&self.region)
    }

    /// A core's own handle, ready for so many buffers of several segments at a time. (More are made as
    /// they are needed.)
    #[must_use]
    pub fn core(self: &Arc<Self>, buffers: usize) -> Rc<CacheCore> {
        Rc::new(CacheCore { frames: Arc::clone(self), tails: Tails::new(buffers, TAIL_SEGMENTS) })
    }

    #[inline]
    fn piece(&self, frame: u32, skip: u32, bytes: u32) -> Segment {
        let at = frame as usize * FRAME + skip as usize;
        assert!(skip <= FRAME_BYTES && bytes <= FRAME_BYTES - skip && at < self.region.bytes());
        // SAFETY: inside of the region (asserted): frames lie side by side from its start on.
        Segment { addr: unsafe { self.region.base().add(at) }, bytes }
    }

    /// The frames in which a segment of this region lies.
    #[inline]
    fn frames_of(&self, segment: Segment) -> Range<u32> {
        let at = segment.addr.as_ptr().addr() - self.region.base().as_ptr().addr();
        let frame = |at: usize| u32::try_from(at / FRAME).unwrap_or(u32::MAX);
        frame(at)..frame(at + segment.bytes as usize + FRAME - 1)
    }
}

/// One core's buffers of a cache.
pub struct CacheCore {
    frames: Arc<CacheFrames>,
    tails: Tails,
}

impl CacheCore {
    /// The frames behind it.
    #[inline]
    #[must_use]
    pub fn frames(&self) -> &Arc<CacheFrames> {
        &self.frames
    }

    /// A shared buffer of `bytes` bytes from `skip` on of a page that is pinned.
    ///
    /// # Panics
    /// When they are not inside of a page.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call moves the buffer through memory")]
    #[must_use]
    pub fn one(self: &Rc<Self>, pin: Pin<'_>, skip: u32, bytes: u32) -> Buf {
        let head = self.frames.piece(self.own(pin), skip, bytes);
        Buf { head, tail: None, bytes, is_writable: false, home: Home::Cache(Rc::clone(self)) }
    }

    /// A shared buffer of several pinned pages that follow each other, from byte `skip` of the first on.
    ///
    /// # Panics
    /// When the pages do not have so many bytes.
    pub fn several<'a>(self: &Rc<Self>, pins: impl Iterator<Item = Pin<'a>>, skip: u32, bytes: u32) -> Buf {
        let (mut pieces, mut skip, mut left) = (Builder::new(&self.tails), skip, bytes);
        for pin in pins {
            let step = left.min(FRAME_BYTES - skip);
            // A piece of nothing would not be given back.
            assert!(step > 0, "more pages than bytes");
            pieces.push(self.frames.piece(self.own(pin), skip, step));
            (skip, left) = (0, left - step);
        }
        assert!(left == 0, "fewer pages than bytes");
        pieces.build(Home::Cache(Rc::clone(self)), false)
    }

    /// A writable buffer of whole frames, in this order.
    pub fn filling<'a>(self: &Rc<Self>, frames: impl Iterator<Item = Filling<'a>>) -> Buf {
        let mut pieces = Builder::new(&self.tails);
        for filling in frames {
            pieces.push(self.frames.piece(filling.into_frame(), 0, FRAME_BYTES));
        }
        pieces.build(Home::Cache(Rc::clone(self)), true)
    }

    /// The frames of a buffer that [`CacheCore::filling`] made, in order.
    ///
    /// # Errors
    /// A buffer of something else comes back.
    pub fn take_back(self: &Rc<Self>, mut buf: Buf, mut each: impl FnMut(Filling<'_>)) -> Result<(), Buf> {
        let is_ours = matches!(&buf.home, Home::Cache(core) if Rc::ptr_eq(core, self));
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
        // Nothing is left in it that its drop would give back.
        buf.home = Home::Zeroes;
        Ok(())
    }

    /// The frame of a pin that a buffer holds from now on.
    #[inline]
    fn own(&self, pin: Pin<'_>) -> u32 {
        let kept = pin.keep();
        assert!(kept.is_of(self.frames.words()), "a pin of another cache does not keep our frame");
        kept.frame()
    }

    /// Called by the drop of a buffer.
    #[inline]
    pub(super) fn give_back(&self, head: Segment, tail: Option<Box<Tail>>, is_writable: bool) {
        let words = self.frames.words();
        if is_writable {
            let tail = tail.iter().flat_map(|tail| tail.0.iter().copied());
            let frames = std::iter::once(head).chain(tail).flat_map(|segment| self.frames.frames_of(segment));
            return frames.for_each(|frame| words.drop_filling(frame));
        }
        // The commonest: bytes of one page.
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

    /// Called by the cut of a shared buffer in one segment: `kept` is the beginning of `whole`.
    pub(super) fn give_back_cut(&self, whole: Segment, kept: Segment) {
        let (mut frames, stay) = (self.frames.frames_of(whole), self.frames.frames_of(kept));
        frames.start = if kept.bytes == 0 { frames.start } else { stay.end };
        frames.for_each(|frame| self.frames.words().unpin(frame));
    }
}

#[cfg(test)]
mod tests;
