//! [`Directory`]: which member may have which extent of a disk, and which extents are being written.
//!
//! Why a member keeps no page that a write makes old. Register and a write each change one word, then read
//! the other's, by additions and exchanges that acquire and release:
//!
//! ```text
//!   Register   registered[extent] |= member     then writing[extent] + 0: a write in flight?
//!   write      writing[extent] += 1             then registered[extent] + 0: which members?
//! ```
//!
//! If the write's addition to `registered` comes first, Register acquires it, and so sees `writing`: the
//! member may not keep what it reads. If Register's change comes first, the write sees the member and tells
//! it. `writing` is lowered only after the disk has ended the write: what a member reads after a Register
//! that saw none is the data of the write or newer.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use nvme_spec::cluster::extent_shift;
use spindle_reactor::mem::AtomicWord;

/// Most pages of a write that is counted by extents: 4 MiB. A longer one enters its range.
pub const SHORT_PAGES_MAX: u64 = 1024;
/// Counters of [`Directory::writing`], for all extents. Extents that share one are refused to members too
/// often, and nothing else.
const COUNTERS: u64 = 1 << 16;
/// Most writes of more than [`SHORT_PAGES_MAX`] pages at a time.
const LONG_MAX: usize = 8;
/// Empty entry of `long`: the first extent is after the last.
const NONE: u64 = u32::MAX as u64;
/// Extents that one step of a long write or of [`Directory::step_clear`] looks at: some tens of microseconds.
const EXTENTS_A_STEP: u64 = 2048;

/// Which member may have which extent. See the module.
pub struct Directory<W = AtomicU64> {
    /// log2 of the pages of an extent.
    shift: u32,
    /// By extent: a bit for each member.
    registered: Box<[W]>,
    /// By hash of the extent: short writes in flight.
    writing: Box<[W]>,
    /// Number of entries of `long` in use. Raised after the entry is stored.
    long_count: W,
    /// Ranges of long writes in flight: last extent (upper 32 bits) and first (lower 32 bits), or [`NONE`].
    long: Box<[W]>,
}

/// Place of a long write, until [`Directory::end_long`].
#[derive(Debug)]
pub struct LongWrite(usize);

impl<W: AtomicWord> Directory<W> {
    /// Returns a directory for a disk with `pages` pages, in which no member has an extent.
    #[must_use]
    pub fn new(pages: u64) -> Directory<W> {
        Directory::with_counters(pages, COUNTERS)
    }

    pub(crate) fn with_counters(pages: u64, counters: u64) -> Directory<W> {
        let shift = extent_shift(pages);
        let words = |count: u64, value| (0..count).map(|_| W::new(value)).collect();
        Directory {
            shift,
            registered: words(pages.div_ceil(1 << shift), 0),
            writing: words(counters, 0),
            long_count: W::new(0),
            long: words(LONG_MAX as u64, NONE),
        }
    }

    /// Returns log2 of the pages of an extent.
    #[must_use]
    pub fn shift(&self) -> u32 {
        self.shift
    }

    /// Returns the bytes of memory of a directory for a disk with `pages` pages.
    #[must_use]
    pub fn bytes_for(pages: u64) -> u64 {
        (pages.div_ceil(1 << extent_shift(pages)) + COUNTERS) * 8
    }

    /// Returns the extents of `pages` that are in the table.
    fn extents(&self, pages: &Range<u64>) -> Range<u64> {
        let count = self.registered.len() as u64;
        (pages.start >> self.shift).min(count)..pages.end.div_ceil(1 << self.shift).min(count)
    }

    fn registered(&self, extent: u64) -> Option<&W> {
        self.registered.get(usize::try_from(extent).ok()?)
    }

    fn counter(&self, extent: u64) -> &W {
        let hash = extent.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        // Below the length, which fits.
        &self.writing[usize::try_from(hash % self.writing.len() as u64).unwrap_or(0)]
    }

    /// Registers the extents of `pages` for `member`. Returns true if all are in the table and no write of
    /// them is in flight. After false the member may not keep what it reads; its registration stays and costs
    /// notices.
    pub fn register(&self, pages: &Range<u64>, member: u8) -> bool {
        let extents = self.extents(pages);
        let bit = 1 << member;
        for word in extents.clone().filter_map(|extent| self.registered(extent)) {
            let mut value = word.fetch_add(0, Ordering::AcqRel);
            while value & bit == 0 {
                value = word.exchange(value, value | bit).err().unwrap_or(value | bit);
            }
        }
        let is_written = |extent| self.counter(extent).fetch_add(0, Ordering::AcqRel) > 0;
        let is_all = pages.end.div_ceil(1 << self.shift) == extents.end;
        is_all && !extents.clone().any(is_written) && !self.has_long(&extents)
    }

    /// Returns true if a long write of one of these extents is in flight.
    fn has_long(&self, extents: &Range<u64>) -> bool {
        if self.long_count.fetch_add(0, Ordering::AcqRel) == 0 {
            return false;
        }
        let overlaps = |range: &W| {
            let range = range.load(Ordering::Acquire);
            (range & NONE) < extents.end && extents.start <= range >> 32
        };
        self.long.iter().any(overlaps)
    }

    /// Removes the registration of one extent for `member`.
    pub fn release(&self, extent: u64, member: u8) {
        if let Some(word) = self.registered(extent) {
            clear_bit(word, 1 << member);
        }
    }

    /// Begins a write of at most [`SHORT_PAGES_MAX`] pages. Returns the members that have one of its extents.
    #[inline]
    pub fn begin_short(&self, pages: &Range<u64>) -> u64 {
        let extents = self.extents(pages);
        for extent in extents.clone() {
            self.counter(extent).fetch_add(1, Ordering::AcqRel);
        }
        self.members(extents)
    }

    /// Ends a write of [`Directory::begin_short`], after the disk has ended it.
    #[inline]
    pub fn end_short(&self, pages: &Range<u64>) {
        for extent in self.extents(pages) {
            let before = self.counter(extent).fetch_add(1_u64.wrapping_neg(), Ordering::AcqRel);
            debug_assert!(before > 0, "a write ends that has not begun");
        }
    }

    /// Begins a longer write. `None`: [`LONG_MAX`] are in flight, retry later. The caller gets the members
    /// by [`Directory::step_members`].
    pub fn begin_long(&self, pages: &Range<u64>) -> Option<LongWrite> {
        let extents = self.extents(pages);
        let last = extents.end.saturating_sub(1).max(extents.start);
        let word = last << 32 | extents.start;
        let at = self.long.iter().position(|range| range.exchange(NONE, word).is_ok())?;
        self.long_count.fetch_add(1, Ordering::AcqRel);
        Some(LongWrite(at))
    }

    /// Ends a write of [`Directory::begin_long`], after the disk has ended it.
    pub fn end_long(&self, long: &LongWrite) {
        self.long[long.0].store(NONE, Ordering::Release);
        self.long_count.fetch_add(1_u64.wrapping_neg(), Ordering::AcqRel);
    }

    /// Returns the members that have one of the next extents of `pages`, from `next` extents after the first
    /// on, and advances `next`; the second value is true when that were the last.
    pub fn step_members(&self, pages: &Range<u64>, next: &mut u64) -> (u64, bool) {
        let extents = self.extents(pages);
        let begin = extents.start.saturating_add(*next).min(extents.end);
        let end = begin.saturating_add(EXTENTS_A_STEP).min(extents.end);
        *next = end - extents.start;
        (self.members(begin..end), end == extents.end)
    }

    #[inline]
    fn members(&self, extents: Range<u64>) -> u64 {
        let words = extents.filter_map(|extent| self.registered(extent));
        words.fold(0, |members, word| members | word.fetch_add(0, Ordering::AcqRel))
    }

    /// Removes the registrations of `members` from the next extents, and advances `next`. Returns true when
    /// those were the last.
    pub fn step_clear(&self, members: u64, next: &mut u64) -> bool {
        let count = self.registered.len() as u64;
        let end = next.saturating_add(EXTENTS_A_STEP).min(count);
        for word in (*next..end).filter_map(|extent| self.registered(extent)) {
            if word.load(Ordering::Acquire) & members != 0 {
                clear_bit(word, members);
            }
        }
        *next = end;
        end == count
    }
}

fn clear_bit<W: AtomicWord>(word: &W, bits: u64) {
    let mut value = word.fetch_add(0, Ordering::AcqRel);
    while value & bits != 0 {
        value = word.exchange(value, value & !bits).err().unwrap_or(value & !bits);
    }
}

#[cfg(test)]
mod tests;
