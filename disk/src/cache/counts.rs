//! [`CoreCounts`]: one core's counters of a cache, a set of them for each host.

use std::cell::OnceCell;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

/// Hosts that are counted apart: those with a smaller number. The rest is counted as host 0, together with
/// what no host has asked for.
const HOSTS: u16 = 256;
/// No host.
pub(super) const NOBODY: u16 = 0;

/// A counter that one core adds to and anybody reads.
#[derive(Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    #[inline]
    pub(super) fn add(&self, count: u64) {
        // One writer: no read-modify-write is needed.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// One core's counters of one host.
        #[derive(Default)]
        pub(super) struct Counts { $(pub(super) $name: Count,)* }

        /// What a cache has done since it was made, for one host or for all. Pages are of 4 KiB.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct CacheCounts { $($(#[$doc])* pub $name: u64,)* }

        impl CacheCounts {
            fn add(&mut self, counts: &Counts) {
                $(self.$name = self.$name.wrapping_add(counts.$name.get());)*
            }
        }
    };
}

counts! {
    /// Pages of reads that were found.
    hits,
    /// Pages of reads that were not found.
    misses,
    /// Of the misses, pages that were evicted not long ago: a cache of twice the size had most of them.
    ghost_hits,
    /// Of the misses, pages that another read was just filling.
    joined,
    /// Pages that were read around the cache: too long a read, or no frame free.
    passed,
    /// Pages that made place for others.
    evictions,
    /// Pages that were read ahead.
    ahead,
    /// Of those, pages that were asked for while they were in the cache.
    useful,
    /// Of those, pages that were asked for while they were being read.
    late,
    /// Of those, pages that were evicted before a host asked for them.
    wasted,
    /// Pages that were in the cache and are in it with what was written to them.
    written,
    /// Pages that were read into a frame and not kept, because a write came.
    doomed,
    /// Of the pages of reads, those of pages of the sample (`sizes.rs`). Of no host.
    sampled,
    /// Of those, what a cache of half the size would have had.
    half,
    /// What one of this size has, by the same reckoning.
    same,
    /// What one of twice the size would have had.
    twice,
}

/// The counters of all cores.
#[derive(Default)]
pub(super) struct AllCounts(Mutex<Vec<(u16, Arc<Counts>)>>);

impl AllCounts {
    /// Those of a core for a host. Those that a core has left behind are gone on with.
    fn enter(&self, host: u16) -> Arc<Counts> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left = all.iter().find(|(other, counts)| *other == host && Arc::strong_count(counts) == 1);
        if let Some((_, counts)) = left {
            // What the other core has counted is seen by this one.
            fence(Ordering::Acquire);
            return Arc::clone(counts);
        }
        let counts = Arc::new(Counts::default());
        all.push((host, Arc::clone(&counts)));
        counts
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// All together.
    pub(super) fn totals(&self) -> CacheCounts {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut total = CacheCounts::default();
        all.iter().for_each(|(_, counts)| total.add(counts));
        total
    }

    /// Of each host that has used the cache, in the order of their numbers.
    pub(super) fn by_host(&self) -> Vec<(u16, CacheCounts)> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut hosts = std::collections::BTreeMap::<u16, CacheCounts>::new();
        all.iter().for_each(|(host, counts)| hosts.entry(*host).or_default().add(counts));
        hosts.into_iter().filter(|(_, counts)| *counts != CacheCounts::default()).collect()
    }
}

/// Where something is counted.
#[derive(Clone, Copy)]
pub(super) struct Whose<'a> {
    /// The host that it is done for.
    pub(super) host: &'a Counts,
    /// What is known of no host.
    pub(super) nobody: &'a Counts,
}

/// One core's counters. See the module.
pub(super) struct CoreCounts {
    all: Arc<AllCounts>,
    hosts: Box<[OnceCell<Arc<Counts>>; HOSTS as usize]>,
}

impl CoreCounts {
    pub(super) fn new(all: &Arc<AllCounts>) -> CoreCounts {
        CoreCounts { all: Arc::clone(all), hosts: Box::new([const { OnceCell::new() }; HOSTS as usize]) }
    }

    /// Those of a host. Memory is taken when it is met first.
    #[inline]
    pub(super) fn of(&self, host: u16) -> &Counts {
        let host = if host < HOSTS { host } else { NOBODY };
        self.hosts[usize::from(host)].get_or_init(|| self.enter(host))
    }

    pub(super) fn whose(&self, host: u16) -> Whose<'_> {
        Whose { host: self.of(host), nobody: self.of(NOBODY) }
    }

    #[cold]
    fn enter(&self, host: u16) -> Arc<Counts> {
        self.all.enter(host)
    }
}
