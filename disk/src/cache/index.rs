//! [`Index`]: in which frame a page is. Its memory follows the cache's size, not the disk's.
//!
//! ```text
//!   bucket, 64 bytes:  control | 7 entries of tag (32), frame + 1 (32)
//!   control:           write sequence (40) | writes in flight (24), of pages whose first bucket this is
//! ```
//!
//! A page is in one of two buckets. An entry is believed only after its frame is pinned and has the page.
//!
//! Why no stale page is found, in terms of one page's control word, whose changes have one order:
//!
//! - A writer adds itself to the control word, *then* scans the buckets and invalidates what it finds, and
//!   only then changes the disk. A filler stores its entry, *then* adds 0 to the control word, and reads
//!   the disk only after that. Either the filler's addition comes later, so that it sees the writer and
//!   dooms its own frame; or the writer's comes later, so that it sees the entry and dooms the frame. A
//!   writer that has ended before the filler's addition had changed the disk before the filler reads it.
//! - The addition of 0 is what makes acquire and release enough: two additions to one word are ordered, a
//!   store and a load of another word are not.
//! - A writer that publishes its own page does the same, and dooms it unless it was the only writer all
//!   the time: one write in flight, and the sequence its own.
//! - An entry is removed before its frame can be free, by who invalidated the frame and still has it
//!   pinned, or by its filler. So at most one entry names a frame.
//!
//! Insertions of one page exclude each other by the lock of its shard (`shared.rs`). Finding and
//! invalidating take no lock.

use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::mem::{AtomicWord, Filling, FrameWords, Invalidated, Look, Pin, prefetch};

/// Entries of a bucket.
const ENTRIES: usize = 7;
/// One write in flight.
const WRITE: u64 = 1;
const WRITES: u64 = (1 << 24) - 1;
/// The next write.
const SEQUENCE: u64 = 1 << 24;

/// No frame has this number.
pub const NO_FRAME: u32 = u32::MAX;

/// One line of the processor's cache.
#[repr(C, align(64))]
struct Bucket<W> {
    control: W,
    entries: [W; ENTRIES],
}

/// Where a page is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageBuckets {
    page: u64,
    first: u32,
    second: u32,
}

impl PageBuckets {
    /// Which page.
    pub fn page(&self) -> u64 {
        self.page
    }

    /// A number below `count`, the same for all that have the same first bucket.
    pub fn part(&self, count: u32) -> u32 {
        self.first % count
    }

    fn entry(&self, frame: u32) -> u64 {
        (self.page & 0xffff_ffff) << 32 | (u64::from(frame) + 1)
    }
}

/// What a page is now.
pub enum Found<'a, W: AtomicWord> {
    /// In a frame, pinned.
    Present(Pin<'a, W>),
    /// Being filled by somebody.
    Filling,
    /// Not in the cache.
    Missing,
}

/// A write of a page that is in flight; see [`Index::begin_write`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// No other was in flight when it began.
    pub is_alone: bool,
    /// The hits of the page, when it was in the cache: see [`FrameWords::heat`].
    pub heat: Option<u8>,
    sequence: u64,
}

/// What came of [`Index::insert`].
#[derive(Debug, PartialEq, Eq)]
pub enum Inserted {
    /// It will be published unless it is doomed from now on.
    Clean,
    /// A write is in flight: the frame is doomed and its entry removed.
    Doomed,
    /// Both buckets are full: there is no entry.
    Full,
}

/// Which page is in which frame. See the module.
pub struct Index<W = AtomicU64> {
    buckets: Box<[Bucket<W>]>,
}

/// Spreads the bits of a page number: each bit of it reaches both halves of the hash.
#[inline]
pub(super) fn mix(page: u64) -> u64 {
    let z = page.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (z ^ (z >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

impl<W: AtomicWord> Index<W> {
    /// For as many frames.
    pub fn new(frames: u32) -> Index<W> {
        let bucket = |_| Bucket { control: W::new(0), entries: std::array::from_fn(|_| W::new(0)) };
        Index { buckets: (0..Self::buckets_for(frames)).map(bucket).collect() }
    }

    /// 3 of 7 entries in use: then both buckets of a page are full 6 times in ten thousand (with 4 of 7, 70),
    /// and 98 of a hundred pages are in their first.
    fn buckets_for(frames: u32) -> u32 {
        frames / 3 + 1
    }

    /// Bytes that an index for so many frames takes.
    pub fn bytes_for(frames: u32) -> u64 {
        u64::from(Self::buckets_for(frames)) * 64
    }

    /// Where to look for a page.
    #[inline]
    pub fn buckets(&self, page: u64) -> PageBuckets {
        let hash = mix(page);
        let count = self.buckets.len() as u64;
        // Below `count`, which is 32 bits.
        let scale = |bits: u64| (((bits & 0xffff_ffff) * count) >> 32) as u32;
        PageBuckets { page, first: scale(hash >> 32), second: scale(hash) }
    }

    /// Have the page's first bucket in the processor's cache soon.
    #[inline]
    pub fn expect(&self, buckets: PageBuckets) {
        if let Some(bucket) = self.buckets.get(buckets.first as usize) {
            prefetch(bucket);
        }
    }

    fn both(&self, buckets: PageBuckets) -> impl Iterator<Item = &Bucket<W>> {
        // Of a page whose two buckets are one, that one twice: it does no harm.
        [buckets.first, buckets.second].into_iter().filter_map(|at| self.buckets.get(at as usize))
    }

    /// The frame that a page is probably in, from its first bucket. To be believed only once it is pinned and
    /// has the page. [`NO_FRAME`]: it is looked for everywhere.
    #[inline]
    pub fn guess(&self, buckets: PageBuckets) -> u32 {
        let Some(bucket) = self.buckets.get(buckets.first as usize) else { return NO_FRAME };
        let tag = buckets.page << 32;
        // An entry of this tag is less than any other without the tag. All of them are looked at: a branch
        // that is often predicted wrongly takes longer.
        let entries = bucket.entries.iter().map(|slot| slot.load(Ordering::Acquire) ^ tag);
        // Without one it is some other page's frame, which is then not believed.
        frame_of(entries.fold(u64::MAX, u64::min))
    }

    /// The frame of a page that is in the cache, pinned. `guess`: where it is looked for first; a frame that
    /// has the page is the right one, from wherever its number comes.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call moves the pin through memory")]
    pub fn hit<'a>(&self, words: &'a FrameWords<W>, page: u64, guess: u32) -> Option<Pin<'a, W>> {
        if let Look::Present(pin) = words.look(guess, page) {
            return Some(pin);
        }
        match self.find(words, self.buckets(page)) {
            Found::Present(pin) => Some(pin),
            Found::Filling | Found::Missing => None,
        }
    }

    /// Look for a page everywhere it can be, and pin its frame.
    pub fn find<'a>(&self, words: &'a FrameWords<W>, buckets: PageBuckets) -> Found<'a, W> {
        let tag = buckets.page & 0xffff_ffff;
        let mut found = Found::Missing;
        for bucket in self.both(buckets) {
            for slot in &bucket.entries {
                let entry = slot.load(Ordering::Acquire);
                if entry >> 32 != tag || entry & 0xffff_ffff == 0 {
                    continue;
                }
                match words.look(frame_of(entry), buckets.page) {
                    Look::Present(pin) => return Found::Present(pin),
                    // A doomed frame that is looked at before its state changes; a Present one may follow.
                    Look::Filling(_pin) => found = Found::Filling,
                    Look::Other => {}
                }
            }
        }
        found
    }

    /// Enter a frame that is to be filled. The caller has the lock of the page's shard, and has not found the
    /// page since it took that. `write`: it is the writer's own page, which no other write may have changed.
    pub fn insert(
        &self,
        words: &FrameWords<W>,
        buckets: PageBuckets,
        filling: &Filling<'_, W>,
        write: Option<Write>,
    ) -> Inserted {
        let entry = buckets.entry(filling.frame());
        let is_free = |slot: &&W| slot.load(Ordering::Relaxed) == 0;
        let is_stored = self.slots(buckets).filter(is_free).any(|slot| slot.exchange(0, entry).is_ok());
        if !is_stored {
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

    /// Where an entry for this page can be made, the better first: in the page's first bucket.
    fn slots(&self, buckets: PageBuckets) -> impl Iterator<Item = &W> {
        self.both(buckets).flat_map(|bucket| &bucket.entries)
    }

    fn control(&self, buckets: PageBuckets) -> &W {
        &self.buckets[buckets.first as usize].control
    }

    /// Take out the entry of a frame. The caller has the frame pinned or fills it.
    pub fn remove(&self, words: &FrameWords<W>, buckets: PageBuckets, frame: u32) {
        debug_assert!(frame < words.len());
        let entry = buckets.entry(frame);
        for bucket in self.both(buckets) {
            for slot in &bucket.entries {
                if slot.load(Ordering::Relaxed) == entry && slot.exchange(entry, 0).is_ok() {
                    return;
                }
            }
        }
    }

    /// A write of the page begins: from now on nothing of before is found, and nothing that is being
    /// filled will be. To be called before the disk is given the write; [`Index::end_write`] after it has
    /// ended, before it is acknowledged.
    pub fn begin_write(&self, words: &FrameWords<W>, buckets: PageBuckets) -> Write {
        let before = self.control(buckets).fetch_add(WRITE + SEQUENCE, Ordering::AcqRel);
        let heat = self.invalidate(words, buckets);
        let sequence = before.wrapping_add(WRITE + SEQUENCE) / SEQUENCE;
        Write { is_alone: before & WRITES == 0, heat, sequence }
    }

    /// The end of a write.
    pub fn end_write(&self, buckets: PageBuckets) {
        let before = self.control(buckets).fetch_add(WRITE.wrapping_neg(), Ordering::AcqRel);
        debug_assert!(before & WRITES != 0, "a write ends that has not begun");
    }

    /// A write that has been made known otherwise is to change the page: nothing of before is found from now
    /// on, and who enters the page after this sees what the caller did before it.
    pub fn sweep_page(&self, words: &FrameWords<W>, buckets: PageBuckets) {
        self.control(buckets).fetch_add(SEQUENCE, Ordering::AcqRel);
        self.invalidate(words, buckets);
    }

    /// Drop what there is of the page. Its hits, when it could be found until now.
    pub fn invalidate(&self, words: &FrameWords<W>, buckets: PageBuckets) -> Option<u8> {
        let mut found = None;
        let tag = buckets.page & 0xffff_ffff;
        for bucket in self.both(buckets) {
            for slot in &bucket.entries {
                let entry = slot.load(Ordering::Acquire);
                if entry >> 32 != tag || entry & 0xffff_ffff == 0 {
                    continue;
                }
                let frame = frame_of(entry);
                let (Look::Present(pin) | Look::Filling(pin)) = words.look(frame, buckets.page) else {
                    continue;
                };
                let heat = words.heat(frame);
                match pin.invalidate() {
                    Invalidated::Detached => {
                        found = heat.or(Some(0));
                        self.remove(words, buckets, frame);
                    }
                    Invalidated::Doomed => self.remove(words, buckets, frame),
                    Invalidated::Before => {}
                }
            }
        }
        found
    }

    /// Entries in use.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        let slots = self.buckets.iter().flat_map(|bucket| &bucket.entries);
        slots.filter(|slot| slot.load(Ordering::Relaxed) != 0).count()
    }
}

/// The frame of an entry; [`NO_FRAME`] of an empty one.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the lower 32 bits are wanted")]
fn frame_of(entry: u64) -> u32 {
    (entry as u32).wrapping_sub(1)
}
