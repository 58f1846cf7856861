//! [`Counts`]: one core's counters of a cache.

use std::sync::atomic::{AtomicU64, Ordering};

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
        /// One core's counters.
        #[derive(Default)]
        pub(super) struct Counts { $(pub(super) $name: Count,)* }

        /// What a cache has done since it was made. Pages are of 4 KiB.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct CacheCounts { $($(#[$doc])* pub $name: u64,)* }

        impl Counts {
            pub(super) fn read(&self) -> CacheCounts {
                CacheCounts { $($name: self.$name.get(),)* }
            }

            /// Add those of `other`. By one thread at a time.
            pub(super) fn add_all(&self, other: &Counts) {
                $(self.$name.add(other.$name.get());)*
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
    /// Of those, pages that were evicted and that nobody has asked for.
    wasted,
    /// Pages that were in the cache and are in it with what was written to them.
    written,
    /// Pages that were read into a frame and not kept, because a write came.
    doomed,
}
