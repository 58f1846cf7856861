//! [`Agent`]: what the cores of a member know: the lease, and the state of each extent.
//!
//! ```text
//!   no lease         reads pass around the cache
//!   extent not Set   a fill is a Read and Register; with KEEP it makes the extent Set and keeps its pages
//!   extent Set       fills and written pages stay in the cache, unless the target has told of a write since
//! ```
//!
//! A page that the agent writes itself stays only if it was in the cache, so its extent was Set. If the
//! membership ends meanwhile, all pages are dropped, and so the page does not stay: no state is looked at
//! for a write.
//!
//! A page that may not be kept is dropped as by a write of another host that has ended ([`CachedPages`]): a
//! fill of it that is in progress is not published.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use nvme_spec::cluster::{PAGE_SHIFT, extent_shift};
use spindle_reactor::clock::Nanos;
use spindle_reactor::lock::Lock;

/// Extents of a word: two bits each.
const EXTENTS_A_WORD: u64 = 32;
/// State of an extent: the member may not keep its pages, and may.
const NONE: u64 = 0;
const SET: u64 = 1;

/// A write of another host that a cache was told of, until its end.
#[derive(Debug, PartialEq, Eq)]
pub enum ForeignWrite {
    /// Each page is announced.
    Pages(Range<u64>),
    /// The pages are announced by the range at this index.
    Swept(usize),
    /// No page of the cache is kept meanwhile.
    All,
}

/// The cache in front of the disk of a member.
pub trait CachedPages: Send + Sync {
    /// Drops the pages. Until [`CachedPages::end_foreign`] it keeps nothing of them. Does not wait.
    fn begin_foreign(&self, pages: Range<u64>) -> ForeignWrite;

    /// Ends a write of [`CachedPages::begin_foreign`].
    fn end_foreign(&self, write: ForeignWrite);

    /// Drops all pages, and keeps none of the fills in progress.
    fn drop_all(&self);
}

/// State that the manager's thread and the cores share. See the module.
pub struct Agent {
    /// End of the lease, on the clock of `clock`; 0: there is none.
    lease_until: AtomicU64,
    /// Number of begins and ends of memberships. Odd: the agent is a member.
    changes: AtomicU64,
    /// log2 of the pages of an extent.
    shift: u32,
    states: Box<[AtomicU64]>,
    /// Held while extents become Set, and while a membership ends: no extent becomes Set by an answer of a
    /// former membership.
    change: Lock<()>,
    cache: OnceLock<Weak<dyn CachedPages>>,
    clock: Box<dyn Fn() -> Nanos + Send + Sync>,
}

/// How the pages of a fill are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// By Read: their extents are Set.
    Set,
    /// By Read and Register, in the membership with this number.
    Registers(u64),
    /// By Read: the agent is no member. The pages are not kept.
    Plain,
}

impl Agent {
    /// Creates the state for a disk of `bytes` bytes. `clock`: the time, also while the machine is suspended.
    #[must_use]
    pub fn new(bytes: u64, clock: Box<dyn Fn() -> Nanos + Send + Sync>) -> Arc<Agent> {
        let pages = bytes.div_ceil(1 << PAGE_SHIFT);
        let shift = extent_shift(pages);
        let words = pages.div_ceil(1 << shift).div_ceil(EXTENTS_A_WORD);
        Arc::new(Agent {
            lease_until: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            shift,
            states: (0..words).map(|_| AtomicU64::new(0)).collect(),
            change: Lock::new(()),
            cache: OnceLock::new(),
            clock,
        })
    }

    /// Returns the bytes of memory for a disk of `bytes` bytes.
    #[must_use]
    pub fn memory_bytes(bytes: u64) -> u64 {
        let pages = bytes.div_ceil(1 << PAGE_SHIFT);
        pages.div_ceil(1 << extent_shift(pages)).div_ceil(EXTENTS_A_WORD) * 8
    }

    /// Sets the cache in front of the disk. The first call counts.
    pub fn set_cache(&self, cache: Weak<dyn CachedPages>) {
        let _ = self.cache.set(cache);
    }

    pub(crate) fn cache(&self) -> Option<Arc<dyn CachedPages>> {
        self.cache.get()?.upgrade()
    }

    /// Returns log2 of the pages of an extent.
    #[must_use]
    pub fn extent_shift(&self) -> u32 {
        self.shift
    }

    /// Returns the time.
    #[must_use]
    pub fn now(&self) -> Nanos {
        (self.clock)()
    }

    /// Returns true while the agent has a lease: what is in the cache may be read. Reads the clock.
    #[inline]
    #[must_use]
    pub fn has_lease(&self) -> bool {
        let until = self.lease_until.load(Ordering::Acquire);
        until != 0 && (self.clock)().0 < until
    }

    /// Returns true while the agent is a member.
    #[must_use]
    pub fn is_member(&self) -> bool {
        self.changes.load(Ordering::Acquire) % 2 == 1
    }

    /// The agent has joined.
    pub(crate) fn begin(&self) {
        let _change = self.change.lock();
        let before = self.changes.fetch_add(1, Ordering::AcqRel);
        debug_assert!(before.is_multiple_of(2), "the agent has joined twice");
    }

    /// Extends the lease to `until`. The caller also calls [`Agent::end`]: it is not called after that.
    pub(crate) fn extend_lease(&self, until: Nanos) {
        self.lease_until.fetch_max(until.0, Ordering::AcqRel);
    }

    /// The membership has ended: no lease, no extent is Set, and the cache is empty.
    pub(crate) fn end(&self) {
        let change = self.change.lock();
        self.lease_until.store(0, Ordering::Release);
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.states.iter().for_each(|word| word.store(NONE, Ordering::Release));
        drop(change);
        if let Some(cache) = self.cache() {
            cache.drop_all();
        }
    }

    fn extents(&self, pages: &Range<u64>) -> Range<u64> {
        pages.start >> self.shift..pages.end.div_ceil(1 << self.shift)
    }

    /// Word of an extent, and the position of its bits.
    fn word(&self, extent: u64) -> Option<(&AtomicU64, u64)> {
        let word = self.states.get(usize::try_from(extent / EXTENTS_A_WORD).ok()?)?;
        Some((word, extent % EXTENTS_A_WORD * 2))
    }

    /// Returns true if all extents of `pages` are Set.
    #[inline]
    #[must_use]
    pub fn is_set(&self, pages: &Range<u64>) -> bool {
        self.extents(pages).all(|extent| {
            self.word(extent).is_some_and(|(word, at)| word.load(Ordering::Acquire) >> at & 3 == SET)
        })
    }

    /// Returns how to read pages whose frames are entered already.
    #[must_use]
    pub fn begin_fill(&self, pages: &Range<u64>) -> Fill {
        let changes = self.changes.load(Ordering::Acquire);
        if changes.is_multiple_of(2) {
            Fill::Plain
        } else if self.is_set(pages) {
            Fill::Set
        } else {
            Fill::Registers(changes)
        }
    }

    /// Returns true if the pages that were read may be kept. `keeps`: KEEP of a Read and Register.
    #[must_use]
    pub fn end_fill(&self, fill: Fill, pages: &Range<u64>, keeps: bool) -> bool {
        match fill {
            Fill::Set => true,
            Fill::Plain => false,
            Fill::Registers(membership) => keeps && self.set(pages, membership),
        }
    }

    /// Makes the extents Set, unless the membership with this number has ended.
    fn set(&self, pages: &Range<u64>, membership: u64) -> bool {
        let _change = self.change.lock();
        if self.changes.load(Ordering::Acquire) != membership {
            return false;
        }
        self.extents(pages).all(|extent| {
            let Some((word, at)) = self.word(extent) else { return false };
            word.fetch_or(SET << at, Ordering::AcqRel);
            true
        })
    }

    /// Drops pages that may not be kept: a fill of them in progress is not published.
    pub fn drop_pages(&self, pages: Range<u64>) {
        if let Some(cache) = self.cache() {
            let write = cache.begin_foreign(pages);
            cache.end_foreign(write);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
