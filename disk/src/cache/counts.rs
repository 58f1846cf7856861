//! [`CoreCounts`]: one core's counters of a cache, one set per host.

use std::cell::OnceCell;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

/// Hosts with a smaller number have their own counters. All others count as host 0, with events of no host.
const HOSTS: u16 = 256;
/// Host number of events without a host.
pub(super) const NO_HOST: u16 = 0;

/// A counter that one core increments and any thread reads.
#[derive(Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    #[inline]
    pub(super) fn add(&self, count: u64) {
        // Only one writer, so no atomic read-modify-write is needed.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        #[derive(Default)]
        pub(super) struct Counts { $(pub(super) $name: Count,)* }

        /// Counters of a cache since its creation, for one host or all. In pages of 4 KiB.
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
    /// Pages of reads found in the cache.
    hits,
    /// Pages of reads not found in the cache.
    misses,
    /// Misses of recently evicted pages: a cache of twice the size would have had most of them.
    ghost_hits,
    /// Misses answered by the fill of another read.
    joined,
    /// Pages of reads that passed around the cache: too long, one-time, at the partial page at the end of the
    /// disk, or without a free frame.
    passed,
    /// Pages evicted to make room for others.
    evictions,
    /// Pages read ahead.
    ahead,
    /// Pages read ahead that a host read after they had arrived.
    useful,
    /// Pages read ahead that a host read while the disk was still reading them.
    late,
    /// Pages read ahead that were evicted before a host read them.
    wasted,
    /// Cached pages that were written and entered again with the new data.
    written,
    /// Pages read into a frame and not published because of a concurrent write or drop of all pages.
    doomed,
    /// Reads of sampled pages (`sizes.rs`); counted for no host, as the next three.
    sampled,
    /// Sampled reads that would hit in a cache of half the size.
    half,
    /// Sampled reads that hit in the simulated cache of the current size.
    same,
    /// Sampled reads that would hit in a cache of twice the size.
    twice,
}

/// Counter sets of all cores, with their host numbers.
#[derive(Default)]
pub(super) struct AllCounts(Mutex<Vec<(u16, Arc<Counts>)>>);

impl AllCounts {
    /// Adds a core's counters for a host. Counters of a core that closed the disk are reused.
    fn register(&self, host: u16) -> Arc<Counts> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left = all.iter().find(|(other, counts)| *other == host && Arc::strong_count(counts) == 1);
        if let Some((_, counts)) = left {
            // Makes the former core's counts visible to this one.
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

    /// Sum over all hosts and cores.
    pub(super) fn totals(&self) -> CacheCounts {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut total = CacheCounts::default();
        all.iter().for_each(|(_, counts)| total.add(counts));
        total
    }

    /// Sum over all cores for each host with a nonzero counter, ordered by host number.
    pub(super) fn by_host(&self) -> Vec<(u16, CacheCounts)> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut hosts = std::collections::BTreeMap::<u16, CacheCounts>::new();
        all.iter().for_each(|(host, counts)| hosts.entry(*host).or_default().add(counts));
        hosts.into_iter().filter(|(_, counts)| *counts != CacheCounts::default()).collect()
    }
}

/// Counters for the events of a command.
#[derive(Clone, Copy)]
pub(super) struct HostCounts<'a> {
    /// Counters of the command's host.
    pub(super) host: &'a Counts,
    /// Counters of events without a host.
    pub(super) no_host: &'a Counts,
}

/// One core's counters, by host.
pub(super) struct CoreCounts {
    all: Arc<AllCounts>,
    hosts: Box<[OnceCell<Arc<Counts>>; HOSTS as usize]>,
}

impl CoreCounts {
    pub(super) fn new(all: &Arc<AllCounts>) -> CoreCounts {
        CoreCounts { all: Arc::clone(all), hosts: Box::new([const { OnceCell::new() }; HOSTS as usize]) }
    }

    /// Counters of a host; allocated at its first use.
    #[inline]
    pub(super) fn of(&self, host: u16) -> &Counts {
        let host = if host < HOSTS { host } else { NO_HOST };
        self.hosts[usize::from(host)].get_or_init(|| self.register(host))
    }

    pub(super) fn host_counts(&self, host: u16) -> HostCounts<'_> {
        HostCounts { host: self.of(host), no_host: self.of(NO_HOST) }
    }

    #[cold]
    fn register(&self, host: u16) -> Arc<Counts> {
        self.all.register(host)
    }
}
