//! [`Seals`]: one word for each frame of a cache or of a RAM disk, for readers without pins: clients that
//! read frame and seal by RDMA. [`SealedFrames`]: the frames with their seals, of either kind.
//!
//! ```text
//!   seal:  generation (24) | page (40)      odd generation: sealed
//! ```
//!
//! While the seal of a frame is `(g, p)` with an odd `g`, the frame contains the newest content of page `p`.
//! Each change of the seal increases the generation, so `(g, p)` names one content until the generation has
//! wrapped. A client that finds the seal of its reference, and bytes with the checksum of its reference, has
//! read that content.
//!
//! In a cache:
//!
//! - A filler loads the seal, *then* the state of the frame, which must be Filling, *then* exchanges the
//!   seal. Only then is the frame Present. If the frame is Doomed instead, the filler changes the seal again
//!   before it removes the index entry: the thread that doomed it may not have changed the seal yet, and a
//!   later writer finds no entry.
//! - A thread that invalidates or evicts a frame changes its state, *then* the seal, and *then* removes the
//!   index entry. A filler that loads the seal before that change fails to exchange it; one that loads it
//!   after that sees the state.
//! - A writer changes the seals of all frames that the index names for its page, whatever their state:
//!   another thread that has invalidated the frame may not have changed the seal yet.
//!
//! In a RAM disk (`frames/table.rs`):
//!
//! - A thread that publishes a frame loads the seal while it owns the frame, *then* puts the frame into the
//!   table, *then* exchanges the seal.
//! - A thread that takes a frame out of the table pins it, *then* changes the seal, *then* changes the table.
//!   The exchange of a publisher that is still on its way then fails. With the pin, the frame cannot come
//!   back to the table under another seal in between.
//!
//! UNSAFETY: a slice of a memory mapping or an allocation that the same value owns.
#![expect(unsafe_code, reason = "the words lie in memory that can be registered with a device")]

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use super::area::Area;
use super::atomic::AtomicWord;
use super::region::{Pages, Region, RegionError};

const PAGE_BITS: u32 = 40;
const PAGES: u64 = 1 << PAGE_BITS;
const GENERATION: u64 = PAGES;
const IS_SEALED: u64 = GENERATION;

static EPOCHS: AtomicU8 = AtomicU8::new(1);

/// Returns the number of the next cache or RAM disk of the process; it wraps.
pub(super) fn next_epoch() -> u8 {
    EPOCHS.fetch_add(1, Ordering::Relaxed)
}

/// Frames of 4 KiB of a cache or RAM disk, and their seals, which clients read without the target's CPU.
pub trait SealedFrames: Send + Sync {
    /// Returns the memory of the frames, for registration with a device.
    fn area(&self) -> Area;

    /// Returns the memory of the seals, 8 bytes (little endian on x86-64) for each frame, if there are any.
    fn seals_area(&self) -> Option<Area>;

    /// Returns the count of frames.
    fn frames(&self) -> u32;

    /// Returns the number of the cache or RAM disk in the process, which wraps. It distinguishes references
    /// to a cache from those to the cache before it.
    fn epoch(&self) -> u8;

    /// Returns false after the cache or RAM disk was removed or replaced, and without seals.
    fn is_open(&self) -> bool;

    /// Breaks all seals, and seals no frame from now on. Takes milliseconds for a large cache.
    fn close(&self);

    /// Returns the seal of a frame; 0 if there is no such frame.
    fn seal_of(&self, frame: u32) -> u64;

    /// Copies bytes of a frame without a pin, as a device does for a client's READ. Only for a simulator in
    /// one thread: another thread may write to the frame meanwhile.
    ///
    /// # Panics
    /// When the bytes are not within the frame, or there is no such frame.
    #[cfg(feature = "device-reads")]
    fn device_read(&self, frame: u32, offset: usize, into: &mut [u8]) {
        const FRAME: usize = super::FRAME_BYTES as usize;
        assert!(frame < self.frames() && offset + into.len() <= FRAME, "outside of a frame");
        let area = self.area();
        let at = frame as usize * FRAME + offset;
        assert!(at + into.len() <= area.bytes(), "outside of the frames");
        // SAFETY: `at` and the bytes behind it are inside of the area (asserted), and the caller has no other
        // thread.
        let bytes = unsafe { area.base().add(at) }.as_ptr();
        for (index, byte) in into.iter_mut().enumerate() {
            // SAFETY: as above; volatile, as a device's access is none of this program's.
            *byte = unsafe { bytes.add(index).read_volatile() };
        }
    }
}

/// Names the content of a frame, for a reader without a pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reference {
    /// Index of the frame.
    pub frame: u32,
    /// Odd, below 2^24.
    pub generation: u32,
}

impl Reference {
    /// The seal of the frame while it contains `page` (below 2^40).
    #[must_use]
    pub fn seal(&self, page: u64) -> u64 {
        u64::from(self.generation) << PAGE_BITS | (page % PAGES)
    }
}

/// The seals of all frames of a cache or RAM disk. See the module.
pub struct Seals<W = AtomicU64> {
    first: NonNull<W>,
    len: usize,
    /// False: no frame is sealed any more.
    is_open: AtomicBool,
    /// Memory of the words.
    _memory: Box<dyn Any + Send + Sync>,
}

// SAFETY: the words are atomics, which all threads share, in memory that belongs to this value.
unsafe impl<W: AtomicWord> Send for Seals<W> {}
// SAFETY: as for `Send`.
unsafe impl<W: AtomicWord> Sync for Seals<W> {}

impl Seals<AtomicU64> {
    /// Broken seals for `frames` frames, and their memory, for registration with a device.
    ///
    /// # Errors
    /// [`RegionError`] when the address space cannot be mapped.
    pub(super) fn map(frames: u32) -> Result<(Seals, Area), RegionError> {
        let len = frames as usize;
        let region = Arc::new(Region::map(len * size_of::<AtomicU64>(), Pages::Base)?);
        let area = Area::of(&region);
        let (first, is_open) = (region.base().cast(), AtomicBool::new(true));
        Ok((Seals { first, len, is_open, _memory: Box::new(region) }, area))
    }
}

impl<W: AtomicWord + 'static> Seals<W> {
    /// Broken seals for `frames` frames, in memory that is not for a device.
    #[must_use]
    pub fn new(frames: u32) -> Seals<W> {
        let words: Arc<[W]> = (0..frames).map(|_| W::new(0)).collect();
        let (first, len) = (NonNull::from(&*words).cast(), words.len());
        Seals { first, len, is_open: AtomicBool::new(true), _memory: Box::new(words) }
    }
}

impl<W: AtomicWord> Seals<W> {
    #[inline]
    fn word(&self, frame: u32) -> Option<&W> {
        // SAFETY: `first` points to `len` initialised words, which live as long as `self`; a mapping is
        // zeroed, which is an initial value of an atomic word.
        let words = unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) };
        words.get(frame as usize)
    }

    /// Returns false after the seals were closed, when the cache or RAM disk is removed or replaced.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    /// The seal of a frame; 0 if there is no such frame.
    #[must_use]
    pub fn load(&self, frame: u32) -> u64 {
        self.word(frame).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Seals a frame for `page`, unless the seal is not `before` any more, or the seals are closed. `before`
    /// was loaded as the module says.
    pub(super) fn seal(&self, frame: u32, before: u64, page: u64) {
        let Some(word) = self.word(frame).filter(|_| page < PAGES) else { return };
        if !self.is_open.load(Ordering::Acquire) {
            return;
        }
        debug_assert_eq!(before & IS_SEALED, 0, "the seal of a frame that is filled is broken");
        let generation = before - before % GENERATION;
        // Fails if the seal was broken again meanwhile: the frame stays without a seal, or was doomed.
        let _ = word.exchange(before, generation.wrapping_add(GENERATION) + page);
    }

    /// Breaks the seal of a frame. The generation changes also if the seal is broken already, so that a
    /// filler that has loaded it cannot seal the frame.
    pub(super) fn break_seal(&self, frame: u32) {
        let Some(word) = self.word(frame) else { return };
        let mut before = word.load(Ordering::Relaxed);
        loop {
            let step = if before & IS_SEALED == 0 { 2 * GENERATION } else { GENERATION };
            match word.exchange(before, before.wrapping_add(step)) {
                Ok(_) => return,
                Err(now) => before = now,
            }
        }
    }

    /// Seals no frame from now on. Frames that are sealed remain so until their page changes.
    pub(super) fn stop(&self) {
        self.is_open.store(false, Ordering::Release);
    }

    /// Breaks all seals, and seals no frame from now on. Takes milliseconds for a large cache.
    pub(super) fn close(&self) {
        self.stop();
        (0..u32::try_from(self.len).unwrap_or(u32::MAX)).for_each(|frame| self.break_seal(frame));
    }

    /// The reference to a frame that contains `page`; `None` if its seal is broken.
    #[inline]
    pub(super) fn reference(&self, frame: u32, page: u64) -> Option<Reference> {
        let seal = self.load(frame);
        let is_ours = seal & IS_SEALED != 0 && seal % PAGES == page;
        let generation = u32::try_from(seal >> PAGE_BITS).unwrap_or(0);
        is_ours.then_some(Reference { frame, generation })
    }
}
