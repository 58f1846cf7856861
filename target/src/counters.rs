//! Statistics that hosts and operators read. The counters of each core and namespace have their own cache
//! lines, so that counting is an uncontended add.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counters of one core for one namespace; only that core writes them.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct IoCounters {
    /// Units of 512 bytes of the commands in `reads`.
    pub units_read: AtomicU64,
    /// Units of 512 bytes of the commands in `writes`.
    pub units_written: AtomicU64,
    /// Read, Compare and Verify commands that succeeded.
    pub reads: AtomicU64,
    /// Write commands that succeeded.
    pub writes: AtomicU64,
    /// Units of 512 bytes of the ranges of the commands in `unmaps`.
    pub units_unmapped: AtomicU64,
    /// Deallocate commands that succeeded, of disks that deallocate.
    pub unmaps: AtomicU64,
    /// Media errors of the disk: one per failed command, or per failed piece of a bulk transfer.
    pub media_errors: AtomicU64,
    /// Nanoseconds of turns in which commands completed or the disk had commands of this core.
    pub busy_ns: AtomicU64,
    /// The namespace is in the core's list of active namespaces (`busy`).
    pub(crate) is_active: AtomicBool,
}

/// Adds `n`, wrapping, without an atomic read-modify-write: only the counter's core may call this function.
#[inline]
pub fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

/// Values of [`IoCounters`], of one core or of several together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoTotals {
    /// Sum of [`IoCounters::units_read`].
    pub units_read: u64,
    /// Sum of [`IoCounters::units_written`].
    pub units_written: u64,
    /// Sum of [`IoCounters::reads`].
    pub reads: u64,
    /// Sum of [`IoCounters::writes`].
    pub writes: u64,
    /// Sum of [`IoCounters::units_unmapped`].
    pub units_unmapped: u64,
    /// Sum of [`IoCounters::unmaps`].
    pub unmaps: u64,
    /// Sum of [`IoCounters::media_errors`].
    pub media_errors: u64,
    /// [`IoCounters::busy_ns`]; of several cores the largest value, since cores may be busy at the same time.
    pub busy_ns: u64,
}

impl IoTotals {
    /// Adds the counters of both, saturating, and takes the larger `busy_ns`.
    #[must_use]
    pub fn merged_with(self, other: IoTotals) -> IoTotals {
        IoTotals {
            units_read: self.units_read.saturating_add(other.units_read),
            units_written: self.units_written.saturating_add(other.units_written),
            reads: self.reads.saturating_add(other.reads),
            writes: self.writes.saturating_add(other.writes),
            units_unmapped: self.units_unmapped.saturating_add(other.units_unmapped),
            unmaps: self.unmaps.saturating_add(other.unmaps),
            media_errors: self.media_errors.saturating_add(other.media_errors),
            busy_ns: self.busy_ns.max(other.busy_ns),
        }
    }
}

/// Counters of a namespace, one set per core.
#[derive(Debug)]
pub struct NamespaceCounters {
    cores: Box<[IoCounters]>,
}

impl NamespaceCounters {
    /// Creates counters for `cores` cores, at least one, all zero.
    #[must_use]
    pub fn new(cores: usize) -> NamespaceCounters {
        NamespaceCounters { cores: (0..cores.max(1)).map(|_| IoCounters::default()).collect() }
    }

    /// Counters of one core. A core beyond the last shares the last set.
    #[inline]
    #[must_use]
    pub fn core(&self, core: usize) -> &IoCounters {
        &self.cores[core.min(self.cores.len() - 1)]
    }

    /// Current values of each core, in order.
    pub fn by_core(&self) -> impl Iterator<Item = IoTotals> {
        self.cores.iter().map(|core| IoTotals {
            units_read: core.units_read.load(Ordering::Relaxed),
            units_written: core.units_written.load(Ordering::Relaxed),
            reads: core.reads.load(Ordering::Relaxed),
            writes: core.writes.load(Ordering::Relaxed),
            units_unmapped: core.units_unmapped.load(Ordering::Relaxed),
            unmaps: core.unmaps.load(Ordering::Relaxed),
            media_errors: core.media_errors.load(Ordering::Relaxed),
            busy_ns: core.busy_ns.load(Ordering::Relaxed),
        })
    }

    /// Current values of all cores together.
    #[must_use]
    pub fn totals(&self) -> IoTotals {
        self.by_core().fold(IoTotals::default(), IoTotals::merged_with)
    }
}
