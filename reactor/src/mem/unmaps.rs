//! [`Unmaps`]: a record of data-path memory that this process unmaps, for caches of registrations.
//!
//! A registration refers to the pages at an address at the time of the registration. Memory that is unmapped,
//! and mapped again for another purpose, has other pages. A cache whose key is the address must therefore
//! drop the range before its next lookup. A range is recorded *before* it is unmapped: by a
//! [`Region`](super::Region) when it is dropped or releases pages, by a pool, and by a heap buffer. The
//! kernel reuses the address only afterwards, so the lookup of the next user finds the record.
//!
//! ```text
//!   any thread:  record(range) ─> munmap    each cache:  lookup ─> watch.visit_new(..) ─> drop those ranges
//!                     └─ count + 1, the last 64 ranges ──────────────────────┘ one load when there are none
//! ```
//!
//! Between `record` and `munmap` no thread may use the range, as with any memory that is about to be freed.
//! While no cache watches, nothing is recorded.
//!
//! Limits: the last 64 ranges are kept. A cache that has missed more than 64 ranges drops all registrations.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Count of ranges that the record keeps.
pub const UNMAPS_KEPT: usize = 64;

/// A record of unmapped ranges. A process has one, [`unmaps`]; tests make their own.
#[derive(Debug)]
pub struct Unmaps {
    watches: AtomicUsize,
    /// Count of ranges recorded so far; modulo [`UNMAPS_KEPT`] the index of the next. Changed under the lock.
    recorded: AtomicU64,
    last: Mutex<[(usize, usize); UNMAPS_KEPT]>,
}

/// Returns the record of this process.
#[must_use]
pub fn unmaps() -> &'static Unmaps {
    static UNMAPS: Unmaps = Unmaps::new();
    &UNMAPS
}

/// Registrations that a cache must drop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewUnmaps {
    /// None: no range was recorded since the last call, or since [`Unmaps::watch`].
    Nothing,
    /// Those in the ranges that were passed to `forget`.
    Ranges,
    /// All: more than [`UNMAPS_KEPT`] ranges were recorded. `forget` was not called.
    Everything,
}

/// One cache's position in the record. Ranges are recorded while any watch exists.
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
    /// Creates a record without ranges and watches.
    #[must_use]
    pub const fn new() -> Unmaps {
        Unmaps {
            watches: AtomicUsize::new(0),
            recorded: AtomicU64::new(0),
            last: Mutex::new([(0, 0); UNMAPS_KEPT]),
        }
    }

    fn lock(&self) -> MutexGuard<'_, [(usize, usize); UNMAPS_KEPT]> {
        // No panic can happen while the array is changed.
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that `bytes` bytes at `address` are about to be unmapped, or their pages to be replaced. Call
    /// it before the change.
    pub fn record(&self, address: usize, bytes: usize) {
        // A cache that registered part of the range has started its watch before that. This thread got the
        // range after the registration, so it sees the count of watches.
        if bytes == 0 || self.watches.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut last = self.lock();
        let recorded = self.recorded.load(Ordering::Relaxed);
        last[ring_index(recorded)] = (address, bytes);
        self.recorded.store(recorded.wrapping_add(1), Ordering::SeqCst);
    }

    /// Starts a watch, for a cache that is empty.
    #[must_use]
    pub fn watch(&self) -> Watch<'_> {
        self.watches.fetch_add(1, Ordering::SeqCst);
        Watch { unmaps: self, seen: self.recorded.load(Ordering::SeqCst) }
    }
}

/// Returns the index in `last` of the range with the sequence number `recorded`.
fn ring_index(recorded: u64) -> usize {
    // The conversion does not fail: the value is below UNMAPS_KEPT.
    usize::try_from(recorded % UNMAPS_KEPT as u64).unwrap_or(0)
}

impl Watch<'_> {
    /// Passes to `forget` each range that was recorded since the last call, the oldest first, unless they are
    /// too many ([`NewUnmaps::Everything`]). Call it before each lookup: one load when there are none.
    #[inline]
    pub fn visit_new(&mut self, forget: impl FnMut(Range<usize>)) -> NewUnmaps {
        if self.unmaps.recorded.load(Ordering::SeqCst) == self.seen {
            return NewUnmaps::Nothing;
        }
        self.read(forget)
    }

    #[cold]
    fn read(&mut self, mut forget: impl FnMut(Range<usize>)) -> NewUnmaps {
        // A copy, as `forget` may drop memory and so call `record`, which takes the lock.
        let (last, recorded) = {
            let last = self.unmaps.lock();
            (*last, self.unmaps.recorded.load(Ordering::Relaxed))
        };
        let seen = std::mem::replace(&mut self.seen, recorded);
        if recorded.wrapping_sub(seen) > UNMAPS_KEPT as u64 {
            return NewUnmaps::Everything;
        }
        for number in 0..recorded.wrapping_sub(seen) {
            let (address, bytes) = last[ring_index(seen.wrapping_add(number))];
            forget(address..address.saturating_add(bytes));
        }
        NewUnmaps::Ranges
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

    fn all(watch: &mut Watch<'_>) -> (NewUnmaps, Vec<(usize, usize)>) {
        let mut ranges = Vec::new();
        let news = watch.visit_new(|range| ranges.push((range.start, range.end)));
        (news, ranges)
    }

    #[test]
    fn each_watch_is_told_once_of_what_came_after_it_began() {
        let unmaps = Unmaps::new();
        unmaps.record(4096, 4096);
        let mut first = unmaps.watch();
        unmaps.record(8192, 4096);
        unmaps.record(0, 0);
        let mut second = unmaps.watch();
        unmaps.record(65536, 8192);
        assert_eq!(all(&mut first), (NewUnmaps::Ranges, vec![(8192, 12288), (65536, 73728)]));
        assert_eq!(all(&mut second), (NewUnmaps::Ranges, vec![(65536, 73728)]));
        assert_eq!((all(&mut first), all(&mut second).0), ((NewUnmaps::Nothing, vec![]), NewUnmaps::Nothing));
    }

    #[test]
    fn who_falls_behind_forgets_everything_and_goes_on() {
        let unmaps = Unmaps::new();
        let mut watch = unmaps.watch();
        (0..UNMAPS_KEPT).for_each(|at| unmaps.record(at * 4096, 4096));
        assert_eq!(all(&mut watch).1.len(), UNMAPS_KEPT);
        (0..=UNMAPS_KEPT).for_each(|at| unmaps.record(at * 4096, 4096));
        assert_eq!(all(&mut watch), (NewUnmaps::Everything, vec![]));
        unmaps.record(4096, 1);
        assert_eq!(all(&mut watch), (NewUnmaps::Ranges, vec![(4096, 4097)]));
    }

    #[test]
    fn what_a_cache_drops_while_it_forgets_is_told_the_next_time() {
        let unmaps = Unmaps::new();
        let mut watch = unmaps.watch();
        unmaps.record(4096, 4096);
        let mut seen = Vec::new();
        assert_eq!(
            watch.visit_new(|range| {
                unmaps.record(8192, 4096);
                seen.push(range);
            }),
            NewUnmaps::Ranges
        );
        assert_eq!((seen.len(), all(&mut watch).1), (1, vec![(8192, 12288)]));
    }

    #[test]
    fn a_region_tells_of_its_end_and_of_pages_that_it_gives_back() {
        let mut watch = unmaps().watch();
        let mut is_told = |range: Range<usize>| {
            let mut found = false;
            // Other tests drop regions, too.
            found |= watch.visit_new(|told| found |= told == range) == NewUnmaps::Everything;
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

    /// One thread unmaps and maps anew; the other must never find a registration of the old memory. The
    /// threads send each other the places: only the thread that has received a place uses it.
    #[test]
    fn memory_in_a_place_that_was_unmapped_is_never_taken_for_the_old() {
        // With more than UNMAPS_KEPT places, all lookups may miss on a busy machine.
        go_round(100);
        assert!(go_round(UNMAPS_KEPT / 2) > 0, "nothing was ever found");
    }

    /// Number of cache hits of the user in all rounds over `places` places.
    fn go_round(places: usize) -> u32 {
        const ROUNDS: u64 = 4000;
        let unmaps = Unmaps::new();
        let (to_user, from_owner) = mpsc::channel();
        let (to_owner, from_user) = mpsc::channel();
        let mut watch = unmaps.watch();
        let mut hits = 0;
        // Each place, and the incarnation of the memory that is mapped there.
        (0..places).for_each(|place| to_owner.send((place, 0_u64)).expect("room"));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Dropped at the end, which ends the loop of the other thread.
                let (to_user, from_user) = (to_user, from_user);
                for round in 0..ROUNDS {
                    let (place, incarnation) = from_user.recv().expect("the other lives");
                    let is_kept = round % 3 == 0;
                    if !is_kept {
                        unmaps.record(place * 4096, 4096);
                    }
                    to_user.send((place, incarnation + u64::from(!is_kept))).expect("the other lives");
                }
            });
            let mut cache = vec![None; places];
            for (place, incarnation) in from_owner {
                if watch.visit_new(|range| cache[range.start / 4096] = None) == NewUnmaps::Everything {
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
