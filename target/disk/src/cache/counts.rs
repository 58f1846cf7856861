//! Counters of a cache: [`CoreCounts`], one core's set per host; [`AllCounts`], the sets of all cores;
//! [`CacheCounts`], their totals.

use std::cell::OnceCell;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

/// Hosts with a smaller index have their own counters. All other hosts share the counters of [`NO_HOST`].
const HOSTS: u16 = 256;
/// Host index of events without a host.
pub(super) const NO_HOST: u16 = 0;

/// A counter that one core increments and any thread reads.
#[derive(Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    #[inline]
    pub(super) fn add(&self, count: u64) {
        // The counter has one writer, so no atomic read-modify-write is needed.
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

        /// Counters of a cache since its creation, for one host or for all. The unit is a page of 4 KiB.
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
    /// Misses of recently evicted pages. A cache of twice the size would have contained most of these pages.
    ghost_hits,
    /// Missing pages that another command filled while the read waited.
    joined,
    /// Pages of reads that passed around the cache: too long, one-time with a missing page, touching a
    /// partial page at the end of the disk, or without an available frame.
    passed,
    /// Pages of reads that passed around the cache because a page was missing and the core's budget for pages
    /// that enter was spent.
    over_budget,
    /// Pages evicted to make room for others.
    evictions,
    /// Pages entered for a read-ahead.
    ahead,
    /// Pages read ahead that a host read first after the disk had returned them.
    useful,
    /// Pages read ahead for which a host's read had to wait.
    late,
    /// Pages read ahead that were evicted before a host read them; counted for no host.
    wasted,
    /// Cached pages that were written and entered again with the new data; counted for no host.
    written,
    /// Pages read into a frame and not published, after a write that overlapped, or a drop of all pages.
    doomed,
    /// Reads of sampled pages (`sizes.rs`). This counter and the next three are counted for no host.
    sampled,
    /// Sampled reads that would hit in a cache of half the size.
    half,
    /// Sampled reads that hit in the simulated cache of the current size.
    same,
    /// Sampled reads that would hit in a cache of twice the size.
    twice,
}

/// Counter sets of all cores, each with its host index.
#[derive(Default)]
pub(super) struct AllCounts(Mutex<Vec<(u16, Arc<Counts>)>>);

impl AllCounts {
    /// Returns counters of a core for a host: new counters, or counters of a core that has closed the disk.
    fn register(&self, host: u16) -> Arc<Counts> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left = all.iter().find(|(other, counts)| *other == host && Arc::strong_count(counts) == 1);
        if let Some((_, counts)) = left {
            // Makes the former core's counts visible to this core.
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

    /// Returns the sums over all hosts and cores.
    pub(super) fn totals(&self) -> CacheCounts {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut total = CacheCounts::default();
        all.iter().for_each(|(_, counts)| total.add(counts));
        total
    }

    /// Returns the sums over all cores for each host with a nonzero counter, by ascending host index.
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

    /// Returns the counters of a host; allocates them at the first call.
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
