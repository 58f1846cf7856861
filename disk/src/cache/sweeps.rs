//! [`Sweeps`]: the pages of long writes, which do not announce each of their pages until they end.
//!
//! ```text
//!   begin    the range is entered, then counted
//!   step     what the cache has of it is dropped: page by page, or frame by frame where that is less
//!   (the disk changes the blocks)
//!   end      the range is free again
//! ```
//!
//! Who enters a page looks at the ranges afterwards, and dooms its frame if one covers the page. Why a range
//! is seen by who was not seen: [`Index::sweep_page`] adds to the page's control word, to which the other
//! adds after its entry; a sweep by frames adds to each frame's word, to which the other has added before.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::mem::{AtomicWord, FrameWords, Invalidated};

use super::index::Index;

/// Long writes that the inner disk has at once; more wait.
pub(super) const RANGES: usize = 32;
/// Pages of a unit, 4 MiB: a range is one word, so that it is read in one step. It is rounded outwards.
const UNIT_SHIFT: u32 = 10;
/// No range: its first unit is after its last.
const NONE: u64 = u32::MAX as u64;
/// The next sweep, in [`Sweeps::count`].
const SWEEP: u64 = 1 << 32;
/// Pages that are dropped in one step: two or three lines of memory each, some microseconds.
const PAGES_A_STEP: u64 = 64;
/// Frames that are looked at in one step: their words lie side by side.
const FRAMES_A_STEP: u32 = 1024;

/// Ranges of pages that are not to be published now. See the module.
pub(super) struct Sweeps<W = AtomicU64> {
    /// How many there are (lower 32 bits), and how many there have been.
    count: W,
    /// Of [`Sweeps::everything`], which waits for nothing.
    all: W,
    /// Last unit (upper half) and first unit, or [`NONE`].
    ranges: Box<[W]>,
}

/// One of them. It is to be given back: [`Sweeps::end`].
#[derive(Debug)]
pub(super) struct Sweep {
    pages: Range<u64>,
    /// In [`Sweeps::ranges`].
    at: usize,
    /// The page or frame that is next.
    next: u64,
}

fn unit(page: u64) -> u64 {
    // A disk of more than 16 PiB has the rest in its last unit.
    (page >> UNIT_SHIFT).min(u64::from(u32::MAX))
}

impl<W: AtomicWord> Sweeps<W> {
    /// For so many ranges at once.
    pub(super) fn new(ranges: usize) -> Sweeps<W> {
        let ranges = (0..ranges).map(|_| W::new(NONE)).collect();
        Sweeps { count: W::new(0), all: W::new(0), ranges }
    }

    /// Changes whenever one begins; `None` while there is any.
    pub(super) fn seen(&self) -> Option<u64> {
        let count = self.count.load(Ordering::Acquire);
        count.is_multiple_of(SWEEP).then_some(count)
    }

    /// This page is not to be published.
    pub(super) fn covers(&self, page: u64) -> bool {
        if self.seen().is_some() {
            return false;
        }
        let unit = unit(page);
        let covers = |range: &W| {
            let range = range.load(Ordering::Acquire);
            (range % SWEEP..=range / SWEEP).contains(&unit)
        };
        self.all.load(Ordering::Acquire) > 0 || self.ranges.iter().any(covers)
    }

    /// `None`: there are too many; ask again. `pages` is not empty.
    pub(super) fn begin(&self, pages: Range<u64>) -> Option<Sweep> {
        let word = unit(pages.end.saturating_sub(1)) * SWEEP + unit(pages.start);
        let at = self.ranges.iter().position(|range| range.exchange(NONE, word).is_ok())?;
        self.count.fetch_add(SWEEP + 1, Ordering::AcqRel);
        Some(Sweep { pages, at, next: 0 })
    }

    /// Drop some of what there is. True: that was the last.
    pub(super) fn step(&self, sweep: &mut Sweep, index: &Index<W>, words: &FrameWords<W>) -> bool {
        let count = sweep.pages.end - sweep.pages.start;
        let first = sweep.next;
        // A page costs as much as some frames.
        if count < u64::from(words.len()) / 8 {
            sweep.next = (first + PAGES_A_STEP).min(count);
            (first..sweep.next).for_each(|at| index.sweep_page(words, index.buckets(sweep.pages.start + at)));
            return sweep.next == count;
        }
        let first = u32::try_from(first).unwrap_or(u32::MAX);
        let end = first.saturating_add(FRAMES_A_STEP).min(words.len());
        sweep.next = end.into();
        drop_frames(first..end, &sweep.pages, index, words);
        end == words.len()
    }

    /// The write has ended, or will not be done.
    pub(super) fn end(&self, sweep: &Sweep) {
        self.ranges[sweep.at].store(NONE, Ordering::Release);
        self.count.fetch_add(1_u64.wrapping_neg(), Ordering::AcqRel);
    }

    /// Drop all there is, and what is being filled.
    pub(super) fn everything(&self, index: &Index<W>, words: &FrameWords<W>) {
        self.all.fetch_add(1, Ordering::AcqRel);
        self.count.fetch_add(SWEEP + 1, Ordering::AcqRel);
        drop_frames(0..words.len(), &(0..u64::MAX), index, words);
        self.all.fetch_add(1_u64.wrapping_neg(), Ordering::AcqRel);
        self.count.fetch_add(1_u64.wrapping_neg(), Ordering::AcqRel);
    }
}

fn drop_frames<W: AtomicWord>(
    frames: Range<u32>,
    pages: &Range<u64>,
    index: &Index<W>,
    words: &FrameWords<W>,
) {
    for frame in frames {
        // The pin is an addition to the word: who allocates the frame later sees the sweep.
        let Some(pin) = words.pin(frame) else { continue };
        let page = pin.page();
        if pages.contains(&page) && pin.invalidate() != Invalidated::Before {
            index.remove(words, index.buckets(page), frame);
        }
    }
}
