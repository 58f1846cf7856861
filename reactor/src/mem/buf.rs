//! [`Buf`]: an owned handle to memory of a pool, a RAM disk, a cache or the heap, or to the static zeroes, in
//! one segment or several.
//!
//! A `Buf` is *writable* (no other handle has its bytes) or *shared* (its bytes do not change: pinned frames,
//! or zeroes). A `Buf` is moved along with its request; the drop frees the memory. Its length is the
//! requested one; the memory behind it may be longer.
//!
//! UNSAFETY: turns addresses of a region into slices; a buffer's origin keeps them exclusive or immutable.
#![expect(unsafe_code, reason = "slices over arena memory")]

use std::cell::RefCell;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;

use super::area::Area;
use super::cache::CacheCore;
use super::frames::{FrameCore, PagePosition};
use super::pool::PoolCore;
use super::seals::{Reference, SealedFrames};
use super::shares::Holder;
use super::unmaps::unmaps;

/// Maximum number of segments of the buffer of one transfer: 512 frames of 4 KiB (2 MiB), and one more for
/// each unaligned end.
pub const SEGMENTS_MAX: usize = 514;

#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    pub(super) addr: NonNull<u8>,
    pub(super) bytes: u32,
}

impl Segment {
    fn as_slice(&self) -> &[u8] {
        // SAFETY: a segment lies inside of the region of its origin, which the Buf keeps alive (or is static
        // or on the heap). Shared segments are never written while pinned, writable ones only through `&mut
        // Buf`.
        unsafe { std::slice::from_raw_parts(self.addr.as_ptr(), self.bytes as usize) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above; called for writable buffers only, and such a buffer is the only handle to its
        // memory.
        unsafe { std::slice::from_raw_parts_mut(self.addr.as_ptr(), self.bytes as usize) }
    }
}

/// Segments after the first. Boxed, so that a handle with one segment stays small.
pub(super) struct Tail(pub(super) Vec<Segment>);

impl Tail {
    pub(super) fn with_capacity(segments: usize) -> Tail {
        Tail(Vec::with_capacity(segments))
    }
}

/// Recycled boxes for the tails of buffers.
pub(super) struct Tails {
    #[expect(clippy::vec_box, reason = "the box itself is what is recycled")]
    boxes: RefCell<Vec<Box<Tail>>>,
    /// Capacity of a new box, in segments.
    segments: usize,
}

impl Tails {
    /// Creates `boxes` boxes of `segments` segments each; more are allocated as needed.
    pub(super) fn new(boxes: usize, segments: usize) -> Tails {
        let boxes = (0..boxes).map(|_| Box::new(Tail::with_capacity(segments))).collect();
        Tails { boxes: RefCell::new(boxes), segments }
    }

    pub(super) fn take(&self) -> Box<Tail> {
        self.boxes.borrow_mut().pop().unwrap_or_else(|| Box::new(Tail::with_capacity(self.segments)))
    }

    pub(super) fn put(&self, mut tail: Box<Tail>) {
        tail.0.clear();
        self.boxes.borrow_mut().push(tail);
    }
}

/// Collects the segments of a buffer of frames, and joins segments that are adjacent in memory.
pub(super) struct Builder<'a> {
    tails: &'a Tails,
    head: Option<Segment>,
    tail: Option<Box<Tail>>,
    bytes: u32,
}

impl Builder<'_> {
    #[inline]
    pub(super) fn new(tails: &Tails) -> Builder<'_> {
        Builder { tails, head: None, tail: None, bytes: 0 }
    }

    /// Adds a segment, joined with the last one if it follows directly in memory. (No frame follows the
    /// static zeroes in memory: frame 0 of a store is never allocated.)
    #[inline]
    pub(super) fn push(&mut self, segment: Segment) {
        self.add(segment, |last| {
            let is_beside = last.end() == segment.addr.as_ptr() as usize;
            is_beside.then(|| Segment { bytes: last.bytes + segment.bytes, ..*last })
        });
    }

    /// Adds `bytes` of zeroes. All zeroes begin at one address, so consecutive zeroes become one longer
    /// segment, up to [`ZEROES_BYTES`].
    #[inline]
    pub(super) fn push_zeroes(&mut self, bytes: u32) {
        self.add(zeroes(bytes), |last| {
            let is_room = last.is_zeroes() && last.bytes + bytes <= ZEROES_BYTES;
            is_room.then(|| zeroes(last.bytes + bytes))
        });
    }

    /// Joins `segment` with the last one, or adds it as a new one. `join` returns the last segment extended
    /// by `segment`, or `None` if the two cannot be joined.
    #[inline]
    fn add(&mut self, segment: Segment, join: impl FnOnce(&Segment) -> Option<Segment>) {
        self.bytes += segment.bytes;
        let Some(head) = &mut self.head else {
            self.head = Some(segment);
            return;
        };
        let last = self.tail.as_mut().and_then(|tail| tail.0.last_mut()).unwrap_or(head);
        match join(last) {
            Some(joined) => *last = joined,
            None => self.tail.get_or_insert_with(|| self.tails.take()).0.push(segment),
        }
    }

    #[inline]
    pub(super) fn build(self, origin: Origin, is_writable: bool) -> Buf {
        match self.head {
            Some(head) => Buf { head, tail: self.tail, bytes: self.bytes, is_writable, origin },
            None => Buf::zeroes(0),
        }
    }
}

/// Source of a buffer's memory, to which the drop returns it.
pub(super) enum Origin {
    /// Pool, index of the first segment's zone, and the owner that is charged.
    Pool(Rc<PoolCore>, u8, Holder),
    /// RAM disk, page and byte in it at which the buffer begins. (A [`PagePosition`] would take 8 bytes
    /// more.)
    Frames(Rc<FrameCore>, u32, u16),
    /// Frames of a cache. Their indices follow from the addresses of the segments.
    Cache(Rc<CacheCore>),
    Zeroes,
    /// Heap of the process, with the bytes of the allocation.
    Heap(u32),
}

/// Zeroes that never change: the contents of null disks and unwritten pages. The elements are atomics, so
/// that the static lies in `.bss`: no space in the binary, and reads map the kernel's zero page.
#[repr(align(4096))]
struct Zeroes([AtomicU64; ZEROES_BYTES as usize / 8]);
pub(super) const ZEROES_BYTES: u32 = 2 << 20;
static ZEROES: Zeroes = Zeroes([const { AtomicU64::new(0) }; ZEROES_BYTES as usize / 8]);

/// Returns a segment that reads as zeroes, at most [`ZEROES_BYTES`]. All begin at the same address.
pub(super) fn zeroes(bytes: u32) -> Segment {
    assert!(bytes <= ZEROES_BYTES, "more zeroes than there are");
    Segment { addr: NonNull::from(&ZEROES.0).cast(), bytes }
}

impl Segment {
    pub(super) fn end(&self) -> usize {
        self.addr.as_ptr() as usize + self.bytes as usize
    }

    pub(super) fn is_zeroes(&self) -> bool {
        self.addr == NonNull::from(&ZEROES.0).cast()
    }
}

#[cfg(feature = "count-copies")]
thread_local! {
    static COPIED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Returns the bytes of data that the calling thread has copied, for tests that assert that a path copies
/// none. Counted are [`Buf::copy_in`], [`Buf::copy_out`] and [`note_copied`]. Headers are not data.
#[cfg(feature = "count-copies")]
#[must_use]
pub fn copied_bytes() -> u64 {
    COPIED.with(std::cell::Cell::get)
}

/// Counts `bytes` of data copied by code outside of [`Buf`]. No effect without the feature `count-copies`.
#[inline(always)]
pub fn note_copied(bytes: usize) {
    #[cfg(feature = "count-copies")]
    COPIED.with(|copied| copied.set(copied.get() + bytes as u64));
    #[cfg(not(feature = "count-copies"))]
    let _ = bytes;
}

/// An owned handle to data-path memory. See the module.
pub struct Buf {
    pub(super) head: Segment,
    /// Segments after the first; the origin recycles the box.
    pub(super) tail: Option<Box<Tail>>,
    pub(super) bytes: u32,
    pub(super) is_writable: bool,
    pub(super) origin: Origin,
}

impl Buf {
    /// Returns a shared buffer of `bytes` zeroes. Allocates only above 2 MiB, for a list of segments.
    #[must_use]
    pub fn zeroes(bytes: u32) -> Buf {
        let head = zeroes(bytes.min(ZEROES_BYTES));
        let mut left = bytes - head.bytes;
        let mut tail = None;
        while left > 0 {
            let segment = zeroes(left.min(ZEROES_BYTES));
            tail.get_or_insert_with(|| Box::new(Tail::with_capacity(32))).0.push(segment);
            left -= segment.bytes;
        }
        Buf { head, tail, bytes, is_writable: false, origin: Origin::Zeroes }
    }

    /// Returns a writable buffer of zeroes on the heap, for data that must be received while every pool is
    /// empty. The memory is never registered with a device.
    ///
    /// # Panics
    /// When `bytes` is 0.
    #[must_use]
    pub fn heap(bytes: u32) -> Buf {
        assert!(bytes > 0, "a buffer of nothing");
        let memory = Box::leak(vec![0_u8; bytes as usize].into_boxed_slice());
        let head = Segment { addr: NonNull::from(memory).cast(), bytes };
        Buf { head, tail: None, bytes, is_writable: true, origin: Origin::Heap(bytes) }
    }

    /// Returns the length in bytes; a pool's buffer may have more memory.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes as usize
    }

    /// Returns true when the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns true when this is the only handle to the bytes, so that they may be changed.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Returns the segments in order, without empty ones after the first.
    pub fn segments(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(&self.head)
            .chain(self.tail.iter().flat_map(|tail| tail.0.iter()).filter(|segment| segment.bytes > 0))
            .map(Segment::as_slice)
    }

    /// Returns the segments as [`Buf::segments`] does, mutable.
    ///
    /// # Panics
    /// When the buffer is shared; see [`Buf::is_writable`].
    pub fn segments_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        assert!(self.is_writable, "a shared buffer is not written");
        std::iter::once(&mut self.head)
            .chain(
                self.tail.iter_mut().flat_map(|tail| tail.0.iter_mut()).filter(|segment| segment.bytes > 0),
            )
            .map(Segment::as_mut_slice)
    }

    /// Returns all bytes as one slice; `None` when the buffer has several segments ([`Buf::is_contiguous`]).
    #[must_use]
    pub fn as_slice(&self) -> Option<&[u8]> {
        self.tail.is_none().then(|| self.head.as_slice())
    }

    /// Returns the slice of [`Buf::as_slice`], mutable; `None` also when the buffer is shared.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        (self.tail.is_none() && self.is_writable).then(|| self.head.as_mut_slice())
    }

    /// Copies `from` to the bytes at `offset`.
    ///
    /// # Panics
    /// When `from` does not fit or the buffer is shared.
    #[inline]
    pub fn copy_in(&mut self, offset: usize, from: &[u8]) {
        assert!(
            offset.checked_add(from.len()).is_some_and(|end| end <= self.len()),
            "copy past the buffer's end"
        );
        note_copied(from.len());
        if self.tail.is_none() && self.is_writable {
            self.head.as_mut_slice()[offset..offset + from.len()].copy_from_slice(from);
            return;
        }
        let mut skip = offset;
        let mut from = from;
        for segment in self.segments_mut() {
            if from.is_empty() {
                break;
            }
            if skip >= segment.len() {
                skip -= segment.len();
                continue;
            }
            let step = from.len().min(segment.len() - skip);
            let (now, later) = from.split_at(step);
            segment[skip..skip + step].copy_from_slice(now);
            from = later;
            skip = 0;
        }
    }

    /// Copies the bytes from `offset` on to `to`, as many as `to` has.
    ///
    /// # Panics
    /// When the buffer ends before `offset + to.len()`.
    #[inline]
    pub fn copy_out(&self, offset: usize, to: &mut [u8]) {
        assert!(
            offset.checked_add(to.len()).is_some_and(|end| end <= self.len()),
            "copy past the buffer's end"
        );
        note_copied(to.len());
        let mut at = 0;
        self.visit(offset, to.len(), |piece| {
            to[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        });
    }

    /// Calls `piece` with each contiguous part of `offset .. offset + bytes`, in order.
    ///
    /// # Panics
    /// When the buffer ends before `offset + bytes`.
    #[inline]
    pub fn visit(&self, offset: usize, bytes: usize, mut piece: impl FnMut(&[u8])) {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.len()),
            "visit past the buffer's end"
        );
        let (mut skip, mut left) = (offset, bytes);
        for segment in self.segments() {
            if left == 0 {
                break;
            }
            if skip >= segment.len() {
                skip -= segment.len();
                continue;
            }
            let step = left.min(segment.len() - skip);
            piece(&segment[skip..skip + step]);
            left -= step;
            skip = 0;
        }
    }

    /// Returns true when the bytes of `offset .. offset + other.len()` equal `other`.
    ///
    /// # Panics
    /// When the buffer ends before `offset + other.len()`.
    #[must_use]
    pub fn equals_at(&self, offset: usize, other: &[u8]) -> bool {
        let mut at = 0;
        let mut same = true;
        self.visit(offset, other.len(), |piece| {
            same &= piece == &other[at..at + piece.len()];
            at += piece.len();
        });
        same
    }

    /// Fills the buffer with zeroes.
    ///
    /// # Panics
    /// When the buffer is shared.
    pub fn clear(&mut self) {
        self.segments_mut().for_each(|segment| segment.fill(0));
    }

    /// Shortens the buffer to `bytes`. Frames of a RAM disk behind the new end are freed or unpinned at once;
    /// so are those of a shared buffer of a cache. Those of a writable buffer of a cache are treated as at
    /// its drop. The drop frees a pool's memory.
    ///
    /// # Panics
    /// When the buffer is shorter than `bytes`, or has several segments and is not of a pool.
    pub fn truncate(&mut self, bytes: usize) {
        assert!(bytes <= self.len(), "truncate to {bytes} of {}", self.len());
        let short = u32::try_from(bytes).unwrap_or(self.bytes);
        if matches!(self.origin, Origin::Pool(..)) {
            return self.set_len(short);
        }
        assert!(self.tail.is_none(), "truncate of several segments");
        let whole = self.head;
        self.bytes = short;
        self.head.bytes = self.bytes;
        match &self.origin {
            Origin::Frames(frames, page, skip) => {
                frames.give_back_cut(
                    PagePosition { page: *page, skip: *skip },
                    whole,
                    self.head,
                    self.is_writable,
                );
            }
            Origin::Cache(cache) => cache.give_back_cut(whole, self.head, self.is_writable),
            Origin::Pool(..) | Origin::Zeroes | Origin::Heap(_) => {}
        }
    }

    /// Sets the length of a pool's buffer. The maximum is the sum of the zone buffers that it consists of,
    /// which may exceed the requested length. Length 0 gives back the memory of any other buffer.
    ///
    /// # Panics
    /// When `bytes` exceeds the maximum; for a buffer that is not of a pool, when `bytes` is not 0.
    pub fn set_len(&mut self, bytes: u32) {
        let mut left = bytes;
        if let Origin::Pool(pool, ..) = &self.origin {
            let tail = self.tail.iter_mut().flat_map(|tail| tail.0.iter_mut());
            for segment in std::iter::once(&mut self.head).chain(tail) {
                segment.bytes = left.min(pool.buffer_bytes(segment.addr));
                left -= segment.bytes;
            }
        }
        assert!(left == 0, "a length of {bytes} is {left} more than the buffer has");
        match &self.origin {
            Origin::Pool(..) => self.bytes = bytes,
            // A drop of it without its length would not know its frames.
            Origin::Frames(..) | Origin::Cache(_) | Origin::Zeroes | Origin::Heap(_) => {
                *self = Buf::zeroes(0)
            }
        }
    }

    /// Appends `bytes` zeroes, which take no memory of the pool, to a pool's buffer or to an empty one. The
    /// buffer is then only read: not writable, and not for [`Buf::set_len`] and [`Buf::truncate`].
    ///
    /// # Panics
    /// When the memory is of something else.
    pub fn append_zeroes(&mut self, bytes: u32) {
        let Origin::Pool(pool, ..) = &self.origin else {
            assert!(self.is_empty(), "zeroes behind memory that is not of a pool");
            *self = Buf::zeroes(bytes);
            return;
        };
        let tail = self.tail.get_or_insert_with(|| pool.take_tail());
        let mut left = bytes;
        while left > 0 {
            let segment = zeroes(left.min(ZEROES_BYTES));
            left -= segment.bytes;
            tail.0.push(segment);
        }
        self.bytes += bytes;
        self.is_writable = false;
    }

    /// Returns the address of the first byte, and the index of its zone in the pool, for I/O with registered
    /// memory. The index is `None` when the buffer is not of a pool.
    pub(crate) fn device_target(&mut self) -> (NonNull<u8>, Option<u8>) {
        let zone = match &self.origin {
            Origin::Pool(_, zone, _) => Some(*zone),
            Origin::Frames(..) | Origin::Cache(_) | Origin::Zeroes | Origin::Heap(_) => None,
        };
        (self.head.addr, zone)
    }

    /// Returns the bytes from `offset` on that lie in at most `segments_max` segments (at least 1).
    #[must_use]
    pub fn span(&self, offset: usize, segments_max: usize) -> usize {
        if self.tail.is_none() {
            return self.len().saturating_sub(offset);
        }
        let (mut skip, mut bytes, mut left) = (offset, 0, segments_max);
        for segment in self.segments() {
            if skip >= segment.len() {
                skip -= segment.len();
                continue;
            }
            if left == 0 {
                break;
            }
            bytes += segment.len() - skip;
            skip = 0;
            left -= 1;
        }
        bytes
    }

    /// Returns the reference to the content of a whole page of a cache or RAM disk, for clients that read it
    /// without the target's CPU. `None`: this is no shared buffer of exactly one page of a disk with seals,
    /// or the page has changed since.
    #[inline]
    #[must_use]
    pub fn page_reference(&self) -> Option<(Reference, u8)> {
        match &self.origin {
            Origin::Cache(core) if !self.is_writable && self.tail.is_none() => core.reference(self.head),
            Origin::Frames(core, page, skip) if !self.is_writable && self.tail.is_none() => {
                core.reference(PagePosition { page: *page, skip: *skip }, self.head)
            }
            Origin::Cache(_) | Origin::Pool(..) | Origin::Frames(..) | Origin::Zeroes | Origin::Heap(_) => {
                None
            }
        }
    }

    /// Returns the memory in which the buffer lies, for registration with a device. Segments of unwritten
    /// pages of a RAM disk lie in [`Area::zeroes`] instead. `None` on the heap, which is never registered.
    #[must_use]
    pub fn area(&self) -> Option<Area> {
        match &self.origin {
            Origin::Pool(pool, ..) => Some(pool.area()),
            Origin::Frames(frames, ..) => Some(frames.store().area()),
            Origin::Cache(cache) => Some(cache.frames().area()),
            Origin::Zeroes => Some(Area::zeroes()),
            Origin::Heap(_) => None,
        }
    }

    /// Returns true when the buffer was made with one segment. Returns false when it had more, even if
    /// [`Buf::set_len`] has emptied them.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.tail.is_none()
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let segments = 1 + self.tail.as_ref().map_or(0, |tail| tail.0.len());
        write!(
            f,
            "Buf({} bytes in {segments}, {})",
            self.bytes,
            if self.is_writable { "writable" } else { "shared" }
        )
    }
}

impl Drop for Buf {
    #[inline]
    fn drop(&mut self) {
        let tail = self.tail.take();
        match &self.origin {
            Origin::Pool(pool, zone, owner) => pool.put(*zone, self.head.addr, tail, *owner),
            Origin::Frames(frames, page, skip) => {
                frames.give_back(
                    PagePosition { page: *page, skip: *skip },
                    self.head,
                    tail,
                    self.is_writable,
                );
            }
            Origin::Cache(cache) => {
                // `truncate` to 0 bytes has unpinned the frames of a shared buffer.
                if self.bytes > 0 {
                    cache.give_back(self.head, tail, self.is_writable);
                }
            }
            Origin::Zeroes => {}
            Origin::Heap(bytes) => {
                let memory = std::ptr::slice_from_raw_parts_mut(self.head.addr.as_ptr(), *bytes as usize);
                // Recorded first, as the allocator may unmap the memory.
                unmaps().record(self.head.addr.as_ptr().addr(), *bytes as usize);
                // SAFETY: `heap` leaked exactly this slice, and this is the only handle to it.
                drop(unsafe { Box::from_raw(memory) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_read_as_zeroes_at_any_length() {
        for bytes in [0, 1, 512, 65_536, 1 << 20, 2 << 20, (2 << 20) + 1, 7 << 20] {
            let buf = Buf::zeroes(bytes);
            assert_eq!(buf.segments().map(<[u8]>::len).sum::<usize>(), bytes as usize);
            assert!(buf.segments().all(|segment| segment.iter().all(|byte| *byte == 0)));
            assert!(!buf.is_writable());
            assert_eq!(buf.is_contiguous(), bytes <= 2 << 20);
        }
    }

    #[test]
    fn a_buffer_of_the_heap_is_zero_writable_and_whole() {
        let mut buf = Buf::heap(5000);
        assert!(buf.equals_at(0, &[0; 5000]) && buf.is_writable() && buf.is_contiguous());
        buf.copy_in(4000, &[7; 1000]);
        assert!(buf.equals_at(4000, &[7; 1000]));
        buf.truncate(10);
        assert_eq!(buf.len(), 10);
    }

    #[test]
    fn a_hot_handle_stays_small() {
        assert_eq!(size_of::<Buf>(), 48);
    }
}
