//! Counters that hosts and operators read: one line of memory per core, so that counting is an uncontended
//! add.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What one core did to one namespace.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct IoCounters {
    /// Blocks of 512 bytes read.
    pub units_read: AtomicU64,
    /// Blocks of 512 bytes written.
    pub units_written: AtomicU64,
    /// Read commands completed (Read, Compare, Verify and Copy's reads are counted as the SMART log asks).
    pub reads: AtomicU64,
    /// Write commands completed.
    pub writes: AtomicU64,
    /// Commands that ended with a media status.
    pub media_errors: AtomicU64,
    /// Nanoseconds of turns in which commands were done or were at the disk.
    pub busy_ns: AtomicU64,
    /// The core looks in each turn whether it is busy.
    pub(crate) is_watched: AtomicBool,
}

/// Adds without an atomic read-modify-write: each line has one writer, its core.
#[inline]
pub fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

/// Of all cores: the sum, but for `busy_ns`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoTotals {
    /// See [`IoCounters`].
    pub units_read: u64,
    /// See [`IoCounters`].
    pub units_written: u64,
    /// See [`IoCounters`].
    pub reads: u64,
    /// See [`IoCounters`].
    pub writes: u64,
    /// See [`IoCounters`].
    pub media_errors: u64,
    /// See [`IoCounters`]. That of the busiest core: others may have been busy at the same time.
    pub busy_ns: u64,
}

impl IoTotals {
    /// Of both, which are busy at the same time.
    #[must_use]
    pub fn with(self, other: IoTotals) -> IoTotals {
        IoTotals {
            units_read: self.units_read.saturating_add(other.units_read),
            units_written: self.units_written.saturating_add(other.units_written),
            reads: self.reads.saturating_add(other.reads),
            writes: self.writes.saturating_add(other.writes),
            media_errors: self.media_errors.saturating_add(other.media_errors),
            busy_ns: self.busy_ns.max(other.busy_ns),
        }
    }
}

/// A namespace's counters, one set per core.
#[derive(Debug)]
pub struct NamespaceCounters {
    cores: Box<[IoCounters]>,
}

impl NamespaceCounters {
    /// All zero, for `cores` cores.
    #[must_use]
    pub fn new(cores: usize) -> NamespaceCounters {
        NamespaceCounters { cores: (0..cores.max(1)).map(|_| IoCounters::default()).collect() }
    }

    /// One core's own. A core beyond those there are shares the last.
    #[inline]
    #[must_use]
    pub fn core(&self, core: usize) -> &IoCounters {
        &self.cores[core.min(self.cores.len() - 1)]
    }

    /// What each core has done, in their order.
    pub fn by_core(&self) -> impl Iterator<Item = IoTotals> {
        self.cores.iter().map(|core| IoTotals {
            units_read: core.units_read.load(Ordering::Relaxed),
            units_written: core.units_written.load(Ordering::Relaxed),
            reads: core.reads.load(Ordering::Relaxed),
            writes: core.writes.load(Ordering::Relaxed),
            media_errors: core.media_errors.load(Ordering::Relaxed),
            busy_ns: core.busy_ns.load(Ordering::Relaxed),
        })
    }

    /// Of all cores.
    #[must_use]
    pub fn totals(&self) -> IoTotals {
        self.by_core().fold(IoTotals::default(), IoTotals::with)
    }
}
