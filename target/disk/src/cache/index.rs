//! [`Index`]: hash table from page to frame. The table's size depends on the cache's size, not on the disk's.
//!
//! ```text
//!   bucket, 64 bytes:  control | 7 entries of tag (32), frame + 1 (32)
//!   control:           write sequence (32) | entries in second buckets (8) | writes in flight (24), of
//!                      pages whose first bucket this is
//! ```
//!
//! A page has two candidate buckets. An entry is valid only if its frame, once pinned, contains the page.
//! The second is looked up only if the first one's control word counts entries in second buckets. The count
//! is raised before such an entry is stored, and lowered after it is removed: it is never too low.
//!
//! Why no stale page is found. The control word of a page is in its first bucket. All changes of this word
//! are totally ordered:
//!
//! - A writer adds 1 to the writes in flight, *then* invalidates the frames of the page in both buckets, and
//!   only then changes the disk. A filler stores its entry, *then* adds 0 to the control word, and only then
//!   reads the disk. If the filler adds later, the filler sees the writer and dooms its own frame. If the
//!   writer adds later, the writer sees the entry and dooms the frame. If the writer has ended before the
//!   filler's addition, the disk was changed before the filler reads it.
//! - Because of the addition of 0, acquire and release suffice. Two additions to one word are ordered; a
//!   store to one word and a load of another are not.
//! - A writer that publishes its own page is a filler too. The writer dooms the frame unless it was the only
//!   writer throughout: one write in flight, and an unchanged sequence.
//! - A thread that invalidates or evicts a frame breaks its seal before it removes the entry, and a writer
//!   breaks the seal of each entry that it finds. So no seal of the page is left when the disk changes.
//! - An entry is removed before its frame is freed. The core that invalidated or evicted the frame removes it
//!   under a pin, or the frame's filler does. So at most one entry refers to a frame.
//!
//! The lock of a page's shard (`shared.rs`) serializes insertions of the page. [`Index::find`] and
//! [`Index::invalidate`] take no lock.

use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::mem::{AtomicWord, Filling, FrameWords, Invalidated, Lookup, Pin, prefetch};

/// Entries of a bucket.
const ENTRIES: usize = 7;
/// One write in the field "writes in flight" (24 bits) of a control word.
const WRITE: u64 = 1;
const WRITES: u64 = (1 << 24) - 1;
/// One entry in the field "entries in second buckets" (8 bits) of a control word.
const SECOND: u64 = 1 << 24;
const SECONDS: u64 = 0xff << 24;
/// One step of the field "write sequence" (32 bits) of a control word.
const SEQUENCE: u64 = 1 << 32;

/// Frame index that stands for no frame.
pub const NO_FRAME: u32 = u32::MAX;

/// Hash bucket, one 64-byte cache line: a control word and 7 entries.
#[repr(C, align(64))]
struct Bucket<W> {
    control: W,
    entries: [W; ENTRIES],
}

/// A page and the indices of its two candidate buckets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageBuckets {
    page: u64,
    first: u32,
    second: u32,
}

impl PageBuckets {
    /// Returns the index of the page on the disk, in units of 4 KiB.
    pub fn page(&self) -> u64 {
        self.page
    }

    /// Returns the shard of the page, below `count`. Pages with one first bucket have one shard.
    pub fn part(&self, count: u32) -> u32 {
        self.first % count
    }

    fn entry(&self, frame: u32) -> u64 {
        (self.page & 0xffff_ffff) << 32 | (u64::from(frame) + 1)
    }
}

/// A page and its first candidate bucket, in which 98 % of the pages are.
#[derive(Debug, Clone, Copy)]
pub struct FirstBucket {
    page: u64,
    at: u32,
}

impl FirstBucket {
    /// Returns the index of the page on the disk, in units of 4 KiB.
    pub fn page(self) -> u64 {
        self.page
    }
}

/// Result of [`Index::find`].
pub enum Found<'a, W: AtomicWord> {
    /// The page is in the cache; its frame is pinned.
    Present(Pin<'a, W>),
    /// A frame is being filled with the page, for another read or by a write.
    Filling,
    /// The page is not in the cache.
    Missing,
}

/// The frame and the [`FrameWords::heat`] of a page that was invalidated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Was {
    pub frame: u32,
    pub heat: u8,
}

/// An announced write of a page, see [`Index::begin_write`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// At its begin, no other write of a page with the same first bucket was in flight.
    pub is_alone: bool,
    /// Where the page was, if it was in the cache.
    pub was: Option<Was>,
    sequence: u64,
}

/// Result of [`Index::insert`].
#[derive(Debug, PartialEq, Eq)]
pub enum Inserted {
    /// The page is entered. The frame can be published unless a later write dooms it.
    Clean,
    /// A write conflicts: the frame is doomed and has no entry.
    Doomed,
    /// Both buckets are full: the page has no entry.
    Full,
}

/// Hash table from page to frame. See the module.
pub struct Index<W = AtomicU64> {
    buckets: Box<[Bucket<W>]>,
}

/// Returns a hash of a page index. Each bit of the index affects both halves of the hash.
#[inline]
pub(super) fn mix(page: u64) -> u64 {
    let z = page.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (z ^ (z >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

impl<W: AtomicWord> Index<W> {
    /// Returns an empty index for a cache of `frames` frames.
    pub fn new(frames: u32) -> Index<W> {
        let bucket = |_| Bucket { control: W::new(0), entries: std::array::from_fn(|_| W::new(0)) };
        Index { buckets: (0..Self::buckets_for(frames)).map(bucket).collect() }
    }

    /// Returns the number of buckets. With 3 of 7 entries in use, both buckets of a page are full with
    /// probability 6e-4, with 4 of 7 70e-4. 98 % of the pages are in their first bucket.
    fn buckets_for(frames: u32) -> u32 {
        frames / 3 + 1
    }

    /// Returns the bytes of memory of an index for `frames` frames.
    pub fn bytes_for(frames: u32) -> u64 {
        u64::from(Self::buckets_for(frames)) * 64
    }

    /// Returns the two candidate buckets of a page; they may be the same bucket.
    #[inline]
    pub fn buckets(&self, page: u64) -> PageBuckets {
        let hash = mix(page);
        PageBuckets { page, first: self.scale(hash >> 32), second: self.scale(hash) }
    }

    /// Returns the first candidate bucket of a page.
    #[inline]
    pub fn first_bucket(&self, page: u64) -> FirstBucket {
        FirstBucket { page, at: self.scale(mix(page) >> 32) }
    }

    /// Returns the bucket for the lower 32 bits of a hash.
    #[inline]
    fn scale(&self, hash: u64) -> u32 {
        // The result is below the count of buckets, which has 32 bits.
        (((hash & 0xffff_ffff) * self.buckets.len() as u64) >> 32) as u32
    }

    /// Prefetches the bucket into the processor's cache.
    #[inline]
    pub fn prefetch(&self, first: FirstBucket) {
        self.buckets.get(first.at as usize).into_iter().for_each(prefetch);
    }

    fn both_buckets(&self, buckets: PageBuckets) -> impl Iterator<Item = &Bucket<W>> {
        let count = if buckets.first == buckets.second { 1 } else { 2 };
        let both = [buckets.first, buckets.second].into_iter().take(count);
        both.filter_map(|at| self.buckets.get(at as usize))
    }

    /// Returns the frame that probably contains the page, from the first bucket only; [`NO_FRAME`] if no
    /// entry has its tag. The guess is valid only if the frame, once pinned, contains the page. Otherwise,
    /// and after [`NO_FRAME`], the caller must search both buckets.
    #[inline]
    pub fn guess(&self, first: FirstBucket) -> u32 {
        let Some(bucket) = self.buckets.get(first.at as usize) else { return NO_FRAME };
        let tag = first.page << 32;
        // After the XOR with the tag, an entry with this tag is below 2^32, and every other is larger.
        // Exception: for tag 0 an empty entry is 0, which results in `NO_FRAME`. The loop visits all entries,
        // because a branch that is hard to predict costs more.
        let entries = bucket.entries.iter().map(|slot| slot.load(Ordering::Acquire) ^ tag);
        let nearest = entries.fold(u64::MAX, u64::min);
        // To look up another page's frame costs two atomic operations.
        if nearest >> 32 == 0 { frame_of(nearest) } else { NO_FRAME }
    }

    /// As [`Index::find`]. Looks up the frame `guess` first, from any source: the pin verifies it.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call moves the pin through memory")]
    pub fn hit<'a>(&self, words: &'a FrameWords<W>, page: u64, guess: u32) -> Found<'a, W> {
        if let Lookup::Present(pin) = words.lookup(guess, page) {
            return Found::Present(pin);
        }
        self.find(words, self.buckets(page))
    }

    /// Searches both buckets for a page, and pins its frame if the page is present.
    pub fn find<'a>(&self, words: &'a FrameWords<W>, buckets: PageBuckets) -> Found<'a, W> {
        let tag = buckets.page & 0xffff_ffff;
        let mut found = Found::Missing;
        for (at, bucket) in self.both_buckets(buckets).enumerate() {
            let entries = bucket.entries.each_ref().map(|slot| slot.load(Ordering::Acquire));
            // The entries are compared without a branch first. A bucket without the tag is the common case of
            // a miss, and seven branches cost more.
            let nearest = entries.iter().map(|entry| entry ^ tag << 32).fold(u64::MAX, u64::min);
            for entry in entries.into_iter().filter(|_| nearest >> 32 == 0) {
                if entry >> 32 != tag || entry & 0xffff_ffff == 0 {
                    continue;
                }
                match words.lookup(frame_of(entry), buckets.page) {
                    Lookup::Present(pin) => return Found::Present(pin),
                    // The frame may be doomed, and another frame with the page Present by now.
                    Lookup::Filling(_pin) => found = Found::Filling,
                    Lookup::Other => {}
                }
            }
            if at == 0 && bucket.control.load(Ordering::Acquire) & SECONDS == 0 {
                break;
            }
        }
        found
    }

    /// Adds an entry for a frame that is being filled. The caller holds the lock of the page's shard and has
    /// not found the page under that lock. Dooms the frame if a write of a page with the same first bucket is
    /// in flight. `write`: the caller's own write of the page, which is still announced. With `write`, the
    /// frame is doomed only if another such write is in flight or has begun since.
    pub fn insert(
        &self,
        words: &FrameWords<W>,
        buckets: PageBuckets,
        filling: &Filling<'_, W>,
        write: Option<Write>,
    ) -> Inserted {
        let entry = buckets.entry(filling.frame());
        if !self.store(buckets, entry) {
            return Inserted::Full;
        }
        let control = self.control(buckets).fetch_add(0, Ordering::AcqRel);
        let is_clean = match write {
            None => control & WRITES == 0,
            Some(write) => control & WRITES == WRITE && control / SEQUENCE == write.sequence,
        };
        if is_clean {
            return Inserted::Clean;
        }
        filling.doom();
        self.remove(words, buckets, filling.frame());
        Inserted::Doomed
    }

    /// Stores an entry in a free place of one of the buckets. The caller holds the lock of the page's shard,
    /// so no other thread raises the count of the first bucket.
    fn store(&self, buckets: PageBuckets, entry: u64) -> bool {
        let store = |bucket: &Bucket<W>| {
            let is_free = |slot: &&W| slot.load(Ordering::Relaxed) == 0;
            bucket.entries.iter().filter(is_free).any(|slot| slot.exchange(0, entry).is_ok())
        };
        let mut both = self.both_buckets(buckets);
        if both.next().is_some_and(store) {
            return true;
        }
        let control = self.control(buckets);
        let Some(second) = both.next().filter(|_| control.load(Ordering::Relaxed) & SECONDS != SECONDS)
        else {
            return false;
        };
        control.fetch_add(SECOND, Ordering::AcqRel);
        let is_stored = store(second);
        if !is_stored {
            control.fetch_add(SECOND.wrapping_neg(), Ordering::AcqRel);
        }
        is_stored
    }

    fn control(&self, buckets: PageBuckets) -> &W {
        &self.buckets[buckets.first as usize].control
    }

    /// Removes the page's entry for a frame that the caller pins or fills. No effect without such an entry.
    pub fn remove(&self, words: &FrameWords<W>, buckets: PageBuckets, frame: u32) {
        debug_assert!(frame < words.len());
        let entry = buckets.entry(frame);
        for (at, bucket) in self.both_buckets(buckets).enumerate() {
            for slot in &bucket.entries {
                if slot.load(Ordering::Relaxed) == entry && slot.exchange(entry, 0).is_ok() {
                    if at == 1 {
                        self.control(buckets).fetch_add(SECOND.wrapping_neg(), Ordering::AcqRel);
                    }
                    return;
                }
            }
        }
    }

    /// Announces a write of the page: removes the page from the cache and dooms its fills in progress. Fills
    /// that begin later are doomed until [`Index::end_write`]. Called before the write is submitted to the
    /// disk. The caller calls [`Index::end_write`] after the write has ended and before it is acknowledged.
    pub fn begin_write(&self, words: &FrameWords<W>, buckets: PageBuckets) -> Write {
        let before = self.control(buckets).fetch_add(WRITE + SEQUENCE, Ordering::AcqRel);
        let was = self.invalidate_in(words, buckets, before & SECONDS != 0);
        let sequence = before.wrapping_add(WRITE + SEQUENCE) / SEQUENCE;
        Write { is_alone: before & WRITES == 0, was, sequence }
    }

    /// Ends a write announced by [`Index::begin_write`].
    pub fn end_write(&self, buckets: PageBuckets) {
        let before = self.control(buckets).fetch_add(WRITE.wrapping_neg(), Ordering::AcqRel);
        debug_assert!(before & WRITES != 0, "a write ends that has not begun");
    }

    /// Removes the page from the cache for a write that [`super::sweeps`] announces. The addition to the
    /// control word orders the sweep before later fills: a fill entered later sees the caller's sweep range.
    pub fn sweep_page(&self, words: &FrameWords<W>, buckets: PageBuckets) {
        self.control(buckets).fetch_add(SEQUENCE, Ordering::AcqRel);
        self.invalidate(words, buckets);
    }

    /// Invalidates the page's frames and removes their entries. Returns where a present page was.
    pub fn invalidate(&self, words: &FrameWords<W>, buckets: PageBuckets) -> Option<Was> {
        self.invalidate_in(words, buckets, true)
    }

    /// As [`Index::invalidate`]. `has_second`: the second bucket is searched, too. False only after a
    /// read-modify-write of the control word that has found no entry in second buckets: a load may be old.
    fn invalidate_in(&self, words: &FrameWords<W>, buckets: PageBuckets, has_second: bool) -> Option<Was> {
        let mut found = None;
        let tag = buckets.page & 0xffff_ffff;
        for bucket in self.both_buckets(buckets).take(if has_second { 2 } else { 1 }) {
            for slot in &bucket.entries {
                let entry = slot.load(Ordering::Acquire);
                if entry >> 32 != tag || entry & 0xffff_ffff == 0 {
                    continue;
                }
                let frame = frame_of(entry);
                let (Lookup::Present(pin) | Lookup::Filling(pin)) = words.lookup(frame, buckets.page) else {
                    // Another thread has invalidated the frame, and may not have broken its seal yet.
                    words.break_seal(frame);
                    continue;
                };
                let heat = words.heat(frame);
                match pin.invalidate() {
                    Invalidated::Detached => {
                        found = Some(Was { frame, heat: heat.unwrap_or(0) });
                        self.remove(words, buckets, frame);
                    }
                    Invalidated::Doomed => self.remove(words, buckets, frame),
                    Invalidated::AlreadyInvalid => {}
                }
            }
        }
        found
    }

    /// Fills the first bucket of a page with entries for no frame, so that the page is entered in its second.
    /// Returns the count of entries.
    #[cfg(test)]
    pub fn fill_first_bucket(&self, buckets: PageBuckets) -> usize {
        let entry = |at: usize| 0xffff_0000_ffff_0000 + at as u64;
        let is_free = |(at, slot): &(usize, &W)| slot.exchange(0, entry(*at)).is_ok();
        self.buckets[buckets.first as usize].entries.iter().enumerate().filter(is_free).count()
    }

    /// Returns true if both buckets of a page are the same.
    #[cfg(test)]
    pub fn is_single(&self, buckets: PageBuckets) -> bool {
        buckets.first == buckets.second
    }

    /// Returns the fields of the control word of a page: write sequence, entries in second buckets, writes.
    #[cfg(test)]
    pub fn control_of(&self, buckets: PageBuckets) -> (u64, u64, u64) {
        let control = self.control(buckets).load(Ordering::Acquire);
        (control / SEQUENCE, (control & SECONDS) / SECOND, control & WRITES)
    }

    /// Returns the number of entries in use.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        let slots = self.buckets.iter().flat_map(|bucket| &bucket.entries);
        slots.filter(|slot| slot.load(Ordering::Relaxed) != 0).count()
    }
}

/// Returns the frame index of an entry; [`NO_FRAME`] for an empty entry.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the lower 32 bits are wanted")]
fn frame_of(entry: u64) -> u32 {
    (entry as u32).wrapping_sub(1)
}
