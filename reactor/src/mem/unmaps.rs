//! [`Unmaps`]: what this process has unmapped, told to caches of registrations.
//!
//! A registration names the pages that lay at an address when it was made. Memory that is unmapped, and
//! mapped anew for something else, has others; a cache that goes by addresses must forget the range before it
//! is asked for it again. So who unmaps says so *before* it does ([`Region`](super::Region) does when it is
//! dropped, and when it gives pages back): the next owner of the address gets it from the kernel after that,
//! and finds the news.
//!
//! ```text
//!   any thread:  tell(range) ─> munmap      each cache:  lookup ─> watch.news(..) ─> forget those ranges
//!                     └─ epoch + 1, the last 64 ranges ──────────────────────┘ one load when there are none
//! ```
//!
//! Between `tell` and `munmap` no thread may use the range, as with any memory that is about to be freed.
//! Without a cache, nothing is kept. Limits: 64 ranges; a cache that falls further behind forgets all.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Ranges that are remembered.
pub const UNMAPS_KEPT: usize = 64;

/// The record. There is one, [`unmaps`]; tests make their own.
#[derive(Debug)]
pub struct Unmaps {
    watches: AtomicUsize,
    /// Ranges told, ever; the low bits name the place of the next. Changed under the lock only.
    told: AtomicU64,
    last: Mutex<[(usize, usize); UNMAPS_KEPT]>,
}

/// The record of this process.
#[must_use]
pub fn unmaps() -> &'static Unmaps {
    static UNMAPS: Unmaps = Unmaps::new();
    &UNMAPS
}

/// What a cache has to forget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// Nothing has been unmapped since the last time.
    Nothing,
    /// The ranges that were given.
    Ranges,
    /// More than is remembered: everything.
    Everything,
}

/// One cache's view of the record: what it has not been told yet. As long as it lives, ranges are recorded.
#[derive(Debug)]
pub struct Watch<'a> {
    unmaps: &'a Unmaps,
    seen: u64,
}

impl Default for Unmaps {
    fn default() -> Self {
        Unmaps::new()
    }
}

impl Unmaps {
    /// An empty record.
    #[must_use]
    pub const fn new() -> Unmaps {
        Unmaps {
            watches: AtomicUsize::new(0),
            told: AtomicU64::new(0),
            last: Mutex::new([(0, 0); UNMAPS_KEPT]),
        }
    }

    fn lock(&self) -> MutexGuard<'_, [(usize, usize); UNMAPS_KEPT]> {
        // What is in it is always whole.
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `bytes` bytes at `address` are about to be unmapped, or their pages to be replaced. To be called
    /// before that, by the code that does it.
    pub fn tell(&self, address: usize, bytes: usize) {
        // A cache that has registered part of the range began to watch before; the thread that frees the
        // range has taken it over from there.
        if bytes == 0 || self.watches.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut last = self.lock();
        let told = self.told.load(Ordering::Relaxed);
        last[place(told)] = (address, bytes);
        self.told.store(told.wrapping_add(1), Ordering::SeqCst);
    }

    /// Begin to watch, for a cache that is empty.
    #[must_use]
    pub fn watch(&self) -> Watch<'_> {
        self.watches.fetch_add(1, Ordering::SeqCst);
        Watch { unmaps: self, seen: self.told.load(Ordering::SeqCst) }
    }
}

/// Where range number `told` is kept.
fn place(told: u64) -> usize {
    // Below UNMAPS_KEPT.
    usize::try_from(told % UNMAPS_KEPT as u64).unwrap_or(0)
}

impl Watch<'_> {
    /// Gives `forget` each range that was told since the last call, the oldest first. To be called before
    /// each lookup: one load when there are none.
    #[inline]
    pub fn news(&mut self, forget: impl FnMut(Range<usize>)) -> News {
        if self.unmaps.told.load(Ordering::SeqCst) == self.seen {
            return News::Nothing;
        }
        self.read(forget)
    }

    #[cold]
    fn read(&mut self, mut forget: impl FnMut(Range<usize>)) -> News {
        // A copy: what `forget` does (it may drop memory, and tell) is not done under the lock.
        let (last, told) = {
            let last = self.unmaps.lock();
            (*last, self.unmaps.told.load(Ordering::Relaxed))
        };
        let seen = std::mem::replace(&mut self.seen, told);
        if told.wrapping_sub(seen) > UNMAPS_KEPT as u64 {
            return News::Everything;
        }
        for number in 0..told.wrapping_sub(seen) {
            let (address, bytes) = last[place(seen.wrapping_add(number))];
            forget(address..address.saturating_add(bytes));
        }
        News::Ranges
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.unmaps.watches.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::mem::{Pages, Region};

    fn all(watch: &mut Watch<'_>) -> (News, Vec<(usize, usize)>) {
        let mut ranges = Vec::new();
        let news = watch.news(|range| ranges.push((range.start, range.end)));
        (news, ranges)
    }

    #[test]
    fn each_watch_is_told_once_of_what_came_after_it_began() {
        let unmaps = Unmaps::new();
        unmaps.tell(4096, 4096);
        let mut first = unmaps.watch();
        unmaps.tell(8192, 4096);
        unmaps.tell(0, 0);
        let mut second = unmaps.watch();
        unmaps.tell(65536, 8192);
        assert_eq!(all(&mut first), (News::Ranges, vec![(8192, 12288), (65536, 73728)]));
        assert_eq!(all(&mut second), (News::Ranges, vec![(65536, 73728)]));
        assert_eq!((all(&mut first), all(&mut second).0), ((News::Nothing, vec![]), News::Nothing));
    }

    #[test]
    fn who_falls_behind_forgets_everything_and_goes_on() {
        let unmaps = Unmaps::new();
        let mut watch = unmaps.watch();
        (0..UNMAPS_KEPT).for_each(|at| unmaps.tell(at * 4096, 4096));
        assert_eq!(all(&mut watch).1.len(), UNMAPS_KEPT);
        (0..=UNMAPS_KEPT).for_each(|at| unmaps.tell(at * 4096, 4096));
        assert_eq!(all(&mut watch), (News::Everything, vec![]));
        unmaps.tell(4096, 1);
        assert_eq!(all(&mut watch), (News::Ranges, vec![(4096, 4097)]));
    }

    #[test]
    fn what_a_cache_drops_while_it_forgets_is_told_the_next_time() {
        let unmaps = Unmaps::new();
        let mut watch = unmaps.watch();
        unmaps.tell(4096, 4096);
        let mut seen = Vec::new();
        assert_eq!(
            watch.news(|range| {
                unmaps.tell(8192, 4096);
                seen.push(range);
            }),
            News::Ranges
        );
        assert_eq!((seen.len(), all(&mut watch).1), (1, vec![(8192, 12288)]));
    }

    #[test]
    fn a_region_tells_of_its_end_and_of_pages_that_it_gives_back() {
        let mut watch = unmaps().watch();
        let mut is_told = |range: Range<usize>| {
            let mut found = false;
            // Other tests drop regions, too.
            found |= watch.news(|told| found |= told == range) == News::Everything;
            found
        };
        let region = Region::map(1, Pages::Base).expect("maps");
        let base = region.base().as_ptr().addr();
        region.release(4096, 8192);
        assert!(is_told(base + 4096..base + 12288));
        assert!(!is_told(base..base + region.bytes()));
        let bytes = region.bytes();
        drop(region);
        assert!(is_told(base..base + bytes));
    }

    /// One thread unmaps and maps anew, the other must never go by what it knew of the old memory. Who has
    /// a place at a time may use it: it goes from hand to hand.
    #[test]
    fn memory_in_a_place_that_was_unmapped_is_never_taken_for_the_old() {
        // With more places than what is kept of the past the user may always be too late, on a busy machine.
        go_round(100);
        assert!(go_round(UNMAPS_KEPT / 2) > 0, "nothing was ever found");
    }

    /// How often the user found what it knew, in all rounds over so many places.
    fn go_round(places: usize) -> u32 {
        const ROUNDS: u64 = 4000;
        let unmaps = Unmaps::new();
        let (to_user, from_owner) = mpsc::channel();
        let (to_owner, from_user) = mpsc::channel();
        let mut watch = unmaps.watch();
        let mut hits = 0;
        // Places, and which incarnation of memory is mapped there.
        (0..places).for_each(|place| to_owner.send((place, 0_u64)).expect("room"));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Dropped at the end, and with it the other's loop.
                let (to_user, from_user) = (to_user, from_user);
                for round in 0..ROUNDS {
                    let (place, incarnation) = from_user.recv().expect("the other lives");
                    let is_kept = round % 3 == 0;
                    if !is_kept {
                        unmaps.tell(place * 4096, 4096);
                    }
                    to_user.send((place, incarnation + u64::from(!is_kept))).expect("the other lives");
                }
            });
            let mut cache = vec![None; places];
            for (place, incarnation) in from_owner {
                if watch.news(|range| cache[range.start / 4096] = None) == News::Everything {
                    cache.fill(None);
                }
                hits += u32::from(cache[place].is_some());
                let found = *cache[place].get_or_insert(incarnation);
                assert_eq!(found, incarnation, "a registration of the old memory was found");
                let _ = to_owner.send((place, incarnation));
            }
        });
        hits
    }
}
