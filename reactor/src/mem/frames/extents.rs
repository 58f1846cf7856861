//! Placement of the pages of a RAM disk: extents of 16 pages, and the extents of frames that are their homes.
//!
//! Purpose: a large read has few segments, whatever the order of earlier writes. A reply gathered from 32
//! scattered pages of 4 KiB reaches 0.65 to 0.75 of the rate of one segment. RDMA needs 32 scatter entries.
//!
//! ```text
//!   pages    | extent 0: 16 pages | extent 1 | ...          homes[x]: the extent of frames of extent x
//!   frames   | home | home | ... | spare | spare | ... | small frames |
//!
//!   homes[x] = E      word[E] = generation | claimed | owner x | free places (one bit each)
//!   spare: on the stack, or taken by one writer, or no longer a home and not all free yet
//! ```
//!
//! An *extent* is 16 adjacent pages of the disk (64 KiB), or 16 adjacent frames. Each extent of pages has one
//! extent of frames as its *home*, in which each page has its own *place*. At first, homes are in the order
//! of the disk. All other extents of frames are *spare*.
//!
//! - A write fills a spare extent for each whole extent in it. Publishing makes that extent the home. The old
//!   home becomes spare when its last frame is free. Nothing is copied. If all of the home is free (never
//!   written, or trimmed), the write fills the home itself. A write uses spare extents in ascending order, so
//!   they are mostly adjacent.
//! - Any other page of a write fills a small frame (a frame of a spare extent when no small one is left). The
//!   frame is published, then copied to the page's place. The place is free after the first swap unless a
//!   reply is being sent from it. A second swap publishes the place if the page has not changed meanwhile.
//!   The small frame is then free for the next write and still in the first-level cache. See `publish.rs`.
//! - While a reply is sent from the place, the page stays in its small frame. The thread that frees the
//!   place, by the last unpin or by dropping a buffer, moves the page to it.
//! - A thread that sets the free bit of a place reads the table afterwards. A thread that publishes a page
//!   elsewhere reads the bit afterwards. So at least one of the two sees both changes. *Without pins and
//!   writers in progress every page is at its place*; the tests in `tests/homes.rs` check this after every
//!   stress test.
//! - A move pins the page's frame, copies it, and compare-and-swaps the entry. An entry that still contains
//!   the pinned frame has the same bytes. A frame in the table is never written, not even by a move. `homes`
//!   contains the intended places; only the table contains the current frame of a page.
//!
//! A place whose bit is set belongs to no thread; the thread that clears the bit owns the place. A whole
//! extent is taken by clearing all 16 bits in one step, which also changes its generation. A thread that
//! compares with an older state fails.
//!
//! Result, without pins: a read of 128 KiB has 1 segment, or 2 after large writes have moved extents; a read
//! of 1 MiB has at most 16. An unaligned read has one more.
//!
//! Costs:
//!
//! - A write of less than an extent is copied once more within the disk: 60 ns from the first-level cache,
//!   plus the cache misses of the place. From 128 MiB on (`UNCACHED_BYTES`) the place is hardly ever cached,
//!   so the copy uses non-temporal stores. They take half the time for an uncached place, and 200 ns more for
//!   a cached one.
//! - Half of a disk's slack is spare extents, half small frames. One 4 KiB page pinned by a slow reader keeps
//!   the old home, 64 KiB, from becoming spare. Without a spare extent a large write takes small frames.
//!   `spindle check` prints the sum; memory becomes resident at the first access.
//!
//! Rejected alternatives:
//!
//! - Fixed places, with spare memory for pages outside of their places: large overwrites are copied once the
//!   spare memory is used up.
//! - Moving pages when a large read finds them outside of their places: the first read after random writes
//!   has half the rate, and a page whose place is taken needs two copies.
//! - Two places for each page, used alternately: twice the memory.
//! - Larger extents: 64 KiB writes are copied, and pins keep more memory. Smaller: 1 MiB in 32 segments.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{FRAME, FRESH_BATCH};

/// Pages of an extent; for larger and smaller ones see "Rejected alternatives" above.
pub(super) const EXTENT_PAGES: u32 = 16;
/// No extent: end of the stack. Extent 0 is never used, as it contains frame 0.
const NO_EXTENT: u32 = 0;
const FREE_ALL: u64 = (1 << EXTENT_PAGES) - 1;
const OWNER_SHIFT: u32 = EXTENT_PAGES;
/// Owner: index of the extent of pages plus 1 (0: none). Pages are fewer than 2^32, so 28 bits are enough.
const OWNER_MASK: u64 = (1 << 28) - 1;
/// The extent is a home that was taken as a whole for a write and is not published yet.
const CLAIMED: u64 = 1 << 44;
/// Added to a state for its next generation; the generation is bits 63:45.
const GENERATION_UNIT: u64 = 1 << 45;

/// Counts of extents and frames of a store.
pub(super) struct Layout {
    /// Extents that are homes of pages.
    pub(super) homes: u64,
    /// Further extents, for large writes: half of the slack.
    pub(super) spares: u64,
    /// Frames of no extent, for smaller writes: the other half of the slack, and one `FRESH_BATCH`.
    pub(super) small: u64,
}

impl Layout {
    pub(super) fn of(capacity_bytes: u64, slack_bytes: u64) -> Layout {
        let extent_bytes = u64::from(EXTENT_PAGES) * FRAME;
        let spares = slack_bytes / 2 / extent_bytes;
        let small = (slack_bytes - spares * extent_bytes).div_ceil(FRAME);
        Layout {
            homes: capacity_bytes.div_ceil(extent_bytes),
            spares,
            small: small.saturating_add(u64::from(FRESH_BATCH)),
        }
    }
}

/// State of an extent of frames: generation, claimed flag, owner, and one bit for each free place.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ExtentState(u64);

impl ExtentState {
    fn free(self) -> u64 {
        self.0 & FREE_ALL
    }

    /// Returns the extent of pages whose home this extent is, or was last. `None` for a spare extent.
    fn owner(self) -> Option<u32> {
        let owner = (self.0 >> OWNER_SHIFT) & OWNER_MASK;
        // Does not fail: 28 bits.
        u32::try_from(owner).ok()?.checked_sub(1)
    }

    /// Returns the state with every place taken, in the next generation.
    fn taken(self) -> ExtentState {
        ExtentState((self.0 & !FREE_ALL).wrapping_add(GENERATION_UNIT))
    }

    fn owned_by(self, owner: Option<u32>) -> ExtentState {
        let owner = owner.map_or(0, |x| u64::from(x) + 1);
        ExtentState(self.0 & !(OWNER_MASK << OWNER_SHIFT) | owner << OWNER_SHIFT)
    }
}

/// State of all extents of a store, and the stack of spare ones.
pub(super) struct Extents {
    /// State of each extent of frames; that of extent 0 is never used.
    words: Box<[AtomicU64]>,
    /// Home of each extent of pages: index of an extent of frames.
    homes: Box<[AtomicU32]>,
    /// For each extent on the stack of spare extents, the one below it.
    below: Box<[AtomicU32]>,
    /// Top of the stack (low 32 bits), and a count of its changes (high 32 bits).
    top: AtomicU64,
    /// Count of extents on the stack; briefly inexact while another thread pushes or pops.
    spare_count: AtomicU32,
    /// Count of homes that were taken for writes which are not published yet.
    claimed_count: AtomicU32,
}

impl Extents {
    pub(super) fn new(homes: u32, spares: u32) -> Extents {
        let all = homes + spares + 1;
        let word = |extent: u32| {
            let is_home = (1..=homes).contains(&extent);
            if is_home { ExtentState(FREE_ALL).owned_by(Some(extent - 1)) } else { ExtentState(0) }
        };
        let extents = Extents {
            words: (0..all).map(|extent| AtomicU64::new(word(extent).0)).collect(),
            homes: (1..=homes).map(AtomicU32::new).collect(),
            below: (0..all).map(|_| AtomicU32::new(NO_EXTENT)).collect(),
            top: AtomicU64::new(u64::from(NO_EXTENT)),
            spare_count: AtomicU32::new(0),
            claimed_count: AtomicU32::new(0),
        };
        // The lowest extent is on top.
        (homes + 1..all).rev().for_each(|extent| extents.push(extent));
        extents
    }

    pub(super) fn bytes_for(homes: u64, spares: u64) -> u64 {
        homes * 4 + (homes + spares + 1) * 12
    }

    /// Returns the count of frames in all extents, extent 0 included: the index of the first small frame.
    pub(super) fn frames(&self) -> u32 {
        u32::try_from(self.words.len()).map_or(u32::MAX, |extents| extents.saturating_mul(EXTENT_PAGES))
    }

    /// Returns the frame index of the place of `page` in its home.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "a page's place in its extent")]
    pub(super) fn place_of(&self, page: usize) -> u32 {
        let home = self.homes[page / EXTENT_PAGES as usize].load(Ordering::SeqCst);
        home * EXTENT_PAGES + (page as u32) % EXTENT_PAGES
    }

    /// Takes the place of `page` in its home if it is free, and returns its frame index. `None` when the
    /// place is taken or the home has changed.
    pub(super) fn claim(&self, page: usize) -> Option<u32> {
        let frame = self.place_of(page);
        let (word, bit) = (&self.words[(frame / EXTENT_PAGES) as usize], 1 << (frame % EXTENT_PAGES));
        let owner = u32::try_from(page / EXTENT_PAGES as usize).ok();
        let mut seen = word.load(Ordering::SeqCst);
        while seen & bit != 0 && ExtentState(seen).owner() == owner {
            match word.compare_exchange_weak(seen, seen & !bit, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Some(frame),
                Err(now) => seen = now,
            }
        }
        None
    }

    /// Takes the home of `x` as a whole for a write, if all of it is free. Returns the index of the home.
    pub(super) fn claim_home(&self, x: u32) -> Option<u32> {
        let home = self.homes[x as usize].load(Ordering::SeqCst);
        let word = &self.words[home as usize];
        let seen = ExtentState(word.load(Ordering::SeqCst));
        let is_free = seen.free() == FREE_ALL && seen.owner() == Some(x);
        let claimed = seen.taken().0 | CLAIMED;
        let is_taken =
            is_free && word.compare_exchange(seen.0, claimed, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        if is_taken {
            self.claimed_count.fetch_add(1, Ordering::Relaxed);
        }
        is_taken.then_some(home)
    }

    /// Returns the count of frames of spare extents minus those of claimed homes. Until a claimed home is
    /// published, other writes to its pages need spare frames. Approximate: other cores change both.
    pub(super) fn spare_frames(&self) -> u64 {
        let [spare, claimed] = [&self.spare_count, &self.claimed_count].map(|n| n.load(Ordering::Relaxed));
        u64::from(spare.saturating_sub(claimed)) * u64::from(EXTENT_PAGES)
    }

    /// Clears the claimed flag if it is set. Called when a claimed home is published or freed. The caller
    /// still owns places of the home, so no other thread can claim it.
    pub(super) fn end_claim(&self, extent: u32) {
        if self.words[extent as usize].fetch_and(!CLAIMED, Ordering::SeqCst) & CLAIMED != 0 {
            self.claimed_count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Frees the places `free` (bits) of `extent`. Returns the extent of pages whose home `extent` is, if
    /// any. An extent that is not a home and completely free becomes spare.
    pub(super) fn put(&self, extent: u32, free: u64) -> Option<u32> {
        let word = &self.words[extent as usize];
        // The claim ends before the places are freed. Afterwards another thread may claim the home and set
        // the flag. Until then the caller owns places of the home, so no thread can claim it.
        if word.load(Ordering::Relaxed) & CLAIMED != 0 {
            self.end_claim(extent);
        }
        let before = word.fetch_or(free, Ordering::SeqCst);
        debug_assert!(before & free == 0, "a frame was given back twice");
        let owner = ExtentState(before).owner().filter(|x| self.is_home(extent, *x));
        if owner.is_none() && (before | free) & FREE_ALL == FREE_ALL {
            self.push_if_spare(extent);
        }
        owner
    }

    fn is_home(&self, extent: u32, x: u32) -> bool {
        self.homes[x as usize].load(Ordering::SeqCst) == extent
    }

    /// Makes `extent` the home of `x`. The caller owns all frames of `extent`. The old home becomes spare
    /// when it is completely free.
    pub(super) fn set_home(&self, extent: u32, x: u32) {
        self.end_claim(extent);
        let word = &self.words[extent as usize];
        let seen = ExtentState(word.load(Ordering::Relaxed));
        debug_assert!(seen.free() == 0, "a home that is not whole");
        word.store(seen.owned_by(Some(x)).0, Ordering::SeqCst);
        let old = self.homes[x as usize].swap(extent, Ordering::SeqCst);
        if old != extent {
            self.push_if_spare(old);
        }
    }

    /// Pushes an extent onto the stack if all of it is free and it is not a home. The thread that frees the
    /// last place checks afterwards whether the extent is a home. The thread that replaces a home checks its
    /// places afterwards. So at least one of them finds both conditions true.
    fn push_if_spare(&self, extent: u32) {
        let word = &self.words[extent as usize];
        let seen = ExtentState(word.load(Ordering::SeqCst));
        if seen.free() != FREE_ALL || seen.owner().is_some_and(|x| self.is_home(extent, x)) {
            return;
        }
        let taken = seen.taken().owned_by(None);
        if word.compare_exchange(seen.0, taken.0, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            self.push(extent);
        }
    }

    fn push(&self, extent: u32) {
        self.spare_count.fetch_add(1, Ordering::Relaxed);
        let mut top = self.top.load(Ordering::Relaxed);
        loop {
            self.below[extent as usize].store(extent_of(top), Ordering::Relaxed);
            // The thread that pops `extent` must see `below`. This thread's reads of the frames must come
            // before the pop.
            match self.top.compare_exchange_weak(
                top,
                next_top(top, extent),
                Ordering::SeqCst,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
    }

    /// Takes a spare extent; `None` when there is none.
    pub(super) fn pop(&self) -> Option<u32> {
        let mut top = self.top.load(Ordering::Acquire);
        while extent_of(top) != NO_EXTENT {
            let below = self.below[extent_of(top) as usize].load(Ordering::Relaxed);
            match self.top.compare_exchange_weak(
                top,
                next_top(top, below),
                Ordering::SeqCst,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    self.spare_count.fetch_sub(1, Ordering::Relaxed);
                    return Some(extent_of(top));
                }
                Err(now) => top = now,
            }
        }
        None
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half")]
fn extent_of(top: u64) -> u32 {
    top as u32
}

/// Returns the next value of `top`. The count protects against ABA: an extent that was popped and pushed
/// again is not mistaken for the earlier top.
fn next_top(top: u64, extent: u32) -> u64 {
    (top >> 32).wrapping_add(1) << 32 | u64::from(extent)
}

#[cfg(test)]
impl Extents {
    /// Free places of all extents; exact when no other thread uses the store.
    pub(super) fn free_places(&self) -> u32 {
        self.words.iter().map(|word| ExtentState(word.load(Ordering::SeqCst)).free().count_ones()).sum()
    }

    /// Number of homes, and of spare extents when none is in use.
    pub(super) fn counts(&self) -> (u32, u32) {
        let [homes, all] = [self.homes.len(), self.words.len()].map(|n| u32::try_from(n).expect("few"));
        (homes, all - 1 - homes)
    }

    /// Number of claimed homes: by the counter, and by the state words.
    pub(super) fn claimed(&self) -> (u32, usize) {
        let is_claimed = |word: &&AtomicU64| word.load(Ordering::SeqCst) & CLAIMED != 0;
        (self.claimed_count.load(Ordering::SeqCst), self.words.iter().filter(is_claimed).count())
    }

    /// Number of spare extents: takes all off the stack, and puts them back.
    pub(super) fn spares(&self) -> u32 {
        let all: Vec<u32> = std::iter::from_fn(|| self.pop()).collect();
        all.iter().rev().for_each(|extent| self.push(*extent));
        u32::try_from(all.len()).expect("few")
    }
}
