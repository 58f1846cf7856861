//! [`Stack`]: the layers over a disk.

use std::sync::Arc;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Pages;
use spindle_target_disk::delay::DelaySpec;
use spindle_target_disk::{CacheSpec, CachedDisk, DelayDisk, Disk, FaultDisk, PolicyKind};

/// Layers over a disk, the uppermost first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stack {
    /// None.
    Plain,
    /// The delay layer, with 2 ms.
    Delay,
    /// The fault layer, without faults.
    Fault,
    /// A cache of 64 KiB, smaller than the disk.
    Cache,
    /// A cache that is removed, added and replaced while commands are in flight.
    Switched,
    /// A cache over the delay layer.
    CacheOverDelay,
    /// The delay layer over a cache.
    DelayOverCache,
}

/// What a stack is made of.
pub(crate) struct Layers {
    pub(crate) source: Arc<dyn Disk>,
    /// The cache to switch.
    pub(crate) switched: Option<Arc<dyn Disk>>,
}

pub(crate) const DELAY: Nanos = Nanos::from_ms(2);

/// Caches of a [`Stack::Switched`] disk, one after another.
pub(crate) const CACHES: [Option<u64>; 3] = [None, Some(64 << 10), Some(128 << 10)];

pub(crate) fn cache(bytes: u64) -> CacheSpec {
    CacheSpec::new(bytes, PolicyKind::S3Fifo, Pages::Base)
}

impl Stack {
    /// All stacks.
    pub const ALL: [Stack; 7] = [
        Stack::Plain,
        Stack::Delay,
        Stack::Fault,
        Stack::Cache,
        Stack::Switched,
        Stack::CacheOverDelay,
        Stack::DelayOverCache,
    ];

    /// Returns true if a cache answers reads.
    pub(crate) fn has_cache(self) -> bool {
        matches!(self, Stack::Cache | Stack::Switched | Stack::CacheOverDelay | Stack::DelayOverCache)
    }

    pub(crate) fn over(self, disk: Arc<dyn Disk>) -> Layers {
        let delayed = |disk| {
            DelayDisk::new(disk, &DelaySpec { latency: DELAY, ..DelaySpec::default() }).expect("a delay")
        };
        let cached = |disk| CachedDisk::new(disk, Some(&cache(64 << 10))).expect("a cache");
        let (source, switched): (Arc<dyn Disk>, Option<Arc<dyn Disk>>) = match self {
            Stack::Plain => (disk, None),
            Stack::Delay => (delayed(disk), None),
            Stack::Fault => (FaultDisk::new(disk, 1).0, None),
            Stack::Cache => (cached(disk), None),
            Stack::Switched => {
                let cached = cached(disk);
                (Arc::clone(&cached) as Arc<dyn Disk>, Some(cached))
            }
            Stack::CacheOverDelay => (cached(delayed(disk)), None),
            Stack::DelayOverCache => (delayed(cached(disk)), None),
        };
        Layers { source, switched }
    }
}
