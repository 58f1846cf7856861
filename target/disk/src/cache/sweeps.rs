//! [`Sweeps`]: the ranges of long writes, which announce one range instead of each page.
//!
//! ```text
//!   begin    enters the range, then counts the sweep
//!   step     drops cached pages of the range: page by page, or frame by frame if that is cheaper
//!   (the disk changes the blocks)
//!   end      removes the range
//! ```
//!
//! A fill checks the ranges after it has entered its page, and dooms its frame if a range covers the page. A
//! fill that the sweep misses sees the range. A sweep by pages adds to the page's control word
//! ([`Index::sweep_page`]), and the fill adds to this word after its entry. A sweep by frames adds to each
//! frame's word, and the fill changes this word when it allocates the frame.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::mem::{AtomicWord, FrameWords, Invalidated};

use super::index::Index;

/// Most concurrent sweeps of a cache. Further long writes wait.
pub(super) const RANGES: usize = 32;
/// log2 of the pages of a unit of 4 MiB. Ranges are rounded outwards to units. A range then fits in one word,
/// which is read atomically.
const UNIT_SHIFT: u32 = 10;
/// Empty entry of `ranges`: the first unit is after the last.
const NONE: u64 = u32::MAX as u64;
/// 1 in the upper half of a word: of [`Sweeps::count`], or of an entry of [`Sweeps::ranges`].
const SWEEP: u64 = 1 << 32;
/// Pages dropped per step. Each page touches two or three cache lines, so a step takes some microseconds.
const PAGES_A_STEP: u64 = 64;
/// Frames examined per step. The words of these frames are contiguous.
const FRAMES_A_STEP: u32 = 1024;

/// Ranges of pages whose fills must not be published now. See the module.
pub(super) struct Sweeps<W = AtomicU64> {
    /// Lower 32 bits: sweeps in progress. Upper 32 bits: sweeps begun so far. Those of
    /// [`Sweeps::begin_all`] count as sweeps.
    count: W,
    /// Number of sweeps of [`Sweeps::begin_all`] in progress.
    all: W,
    /// Entries: last unit (upper 32 bits) and first unit (lower 32 bits), or [`NONE`].
    ranges: Box<[W]>,
}

/// A sweep in progress. The owner must call [`Sweeps::end`].
#[derive(Debug)]
pub(super) struct Sweep {
    pages: Range<u64>,
    /// Index in [`Sweeps::ranges`].
    pub(super) at: usize,
    /// Next page to drop (relative to the range), or next frame to examine.
    next: u64,
}

fn unit(page: u64) -> u64 {
    // The last unit contains all pages beyond 16 PiB.
    (page >> UNIT_SHIFT).min(u64::from(u32::MAX))
}

impl<W: AtomicWord> Sweeps<W> {
    /// Returns an empty table for at most `ranges` concurrent sweeps.
    pub(super) fn new(ranges: usize) -> Sweeps<W> {
        let ranges = (0..ranges).map(|_| W::new(NONE)).collect();
        Sweeps { count: W::new(0), all: W::new(0), ranges }
    }

    /// Returns a number that changes with each sweep begun; `None` while a sweep is in progress.
    pub(super) fn idle_count(&self) -> Option<u64> {
        let count = self.count.load(Ordering::Acquire);
        count.is_multiple_of(SWEEP).then_some(count)
    }

    /// Returns true if a sweep in progress covers the page or another page of its unit.
    pub(super) fn covers(&self, page: u64) -> bool {
        if self.idle_count().is_some() {
            return false;
        }
        let unit = unit(page);
        let covers = |range: &W| {
            let range = range.load(Ordering::Acquire);
            (range % SWEEP..=range / SWEEP).contains(&unit)
        };
        self.all.load(Ordering::Acquire) > 0 || self.ranges.iter().any(covers)
    }

    /// Begins a sweep of a non-empty range. `None`: all of `ranges` are in use, retry later.
    pub(super) fn begin(&self, pages: Range<u64>) -> Option<Sweep> {
        let word = unit(pages.end.saturating_sub(1)) * SWEEP + unit(pages.start);
        let at = self.ranges.iter().position(|range| range.exchange(NONE, word).is_ok())?;
        self.count.fetch_add(SWEEP + 1, Ordering::AcqRel);
        Some(Sweep { pages, at, next: 0 })
    }

    /// Drops at most [`PAGES_A_STEP`] pages, or the pages of at most [`FRAMES_A_STEP`] frames. Returns true
    /// if the range is done.
    pub(super) fn step(&self, sweep: &mut Sweep, index: &Index<W>, words: &FrameWords<W>) -> bool {
        let count = sweep.pages.end - sweep.pages.start;
        let first = sweep.next;
        // Dropping one page costs as much as examining about 8 frames.
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

    /// Ends a sweep and frees its range. Called after the write has ended or was cancelled.
    pub(super) fn end(&self, sweep: &Sweep) {
        self.end_at(sweep.at);
    }

    /// As [`Sweeps::end`], by [`Sweep::at`].
    pub(super) fn end_at(&self, at: usize) {
        self.ranges[at].store(NONE, Ordering::Release);
        self.count.fetch_add(1_u64.wrapping_neg(), Ordering::AcqRel);
    }

    /// Drops all pages and dooms all fills in progress.
    pub(super) fn drop_all(&self, index: &Index<W>, words: &FrameWords<W>) {
        self.begin_all(&(0..u64::MAX), index, words);
        self.end_all();
    }

    /// Drops `pages`. Until [`Sweeps::end_all`] no fill of any page is published.
    pub(super) fn begin_all(&self, pages: &Range<u64>, index: &Index<W>, words: &FrameWords<W>) {
        self.all.fetch_add(1, Ordering::AcqRel);
        self.count.fetch_add(SWEEP + 1, Ordering::AcqRel);
        drop_frames(0..words.len(), pages, index, words);
    }

    /// Ends a sweep of [`Sweeps::begin_all`].
    pub(super) fn end_all(&self) {
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
        // The pin adds to the frame's word, so a later allocation of the frame sees the sweep's range.
        let Some(pin) = words.pin(frame) else { continue };
        let page = pin.page();
        if pages.contains(&page) && pin.invalidate() != Invalidated::AlreadyInvalid {
            index.remove(words, index.buckets(page), frame);
        }
    }
}
