//! The pin-down cache: registrations of memory with a device, kept for the next command that uses the memory.
//!
//! Registering pins pages and fills the device's table: tens of microseconds, far more than a small command.
//! Callers use the same buffers over and over, so a registration stays after its use (Goglin 3.2), the least
//! recently used ones are given up when too much is pinned, and giving up is done some at a time, off the
//! commands' way (PVFS 5.4).
//!
//! ```text
//!            miss                  release                 over a limit, invalidated          tidy
//!   ────> registered, in use <───────────────> idle ──────────────────────────────> parked ───────> gone
//!                       │          hit           (LRU)                                ^
//!                       └── invalidated, shadowed: in use, not found any more ────────┘ release
//! ```
//! **Lookup.** A registration serves every range that it covers. None that can be found covers another: a new
//! one takes those that it covers out of the map. So their ends ascend with their beginnings, and of all that
//! begin before a range the last reaches farthest: one step in an ordered map decides.
//!
//! **Truth.** A registration names the pages that lay at an address when it was made. When memory is
//! unmapped and mapped anew, the device would still reach the old pages. Who unmaps tells it
//! ([`Cache::invalidate`]); a registration that keeps its memory mapped (`Registrar::Memory`) cannot become
//! wrong, but would pin what its owner has let go.
//!
//! **What it does not do.** It knows no verbs ([`Registrar`] does) and no threads: one cache a device and
//! thread. A key that is kept lets the other side reach the memory after its command, too: that is the price
//! of not registering anew.
//!
//! **Limits** are for what is kept, not for what is in use: commands that are outstanding may hold more.

use std::collections::BTreeMap;
use std::collections::VecDeque;

use spindle_reactor::slab::{SLAB_ENTRIES_MAX, Slab, Slot};

/// Registrations are of whole pages: a device pins no less, and neighbours in a page share it.
const PAGE: usize = 4096;

/// Who registers memory with a device; with verbs, or in a test without.
pub trait Registrar {
    /// A registration. Dropping it deregisters.
    type Region;
    /// Whatever keeps the memory where it is.
    type Memory;
    /// Why it failed.
    type Error;

    /// Register whole pages of it. `is_writable`: the device may write to them, too.
    ///
    /// # Errors
    /// The device's, or the system's (too much is pinned).
    fn register(
        &mut self,
        memory: &Self::Memory,
        address: usize,
        bytes: usize,
        is_writable: bool,
    ) -> Result<Self::Region, Self::Error>;

    /// The local and the remote key.
    fn keys(region: &Self::Region) -> (u32, u32);
}

/// How much is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes. 1 GiB: the working buffers of a large application; below what most systems let one pin.
    pub bytes: usize,
    /// Most registrations. 1024: what the tables of small devices hold with ease.
    pub entries: usize,
    /// Registrations that are given up together.
    pub batch: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { bytes: 1 << 30, entries: 1024, batch: 32 }
    }
}

/// A use of a registration; it is given back by [`Cache::release`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// Its name.
    pub slot: Slot,
    /// Local key.
    pub local_key: u32,
    /// Remote key.
    pub remote_key: u32,
}

/// Why a range could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CacheError<E> {
    /// The registrar's reason, after all that was idle had been given up.
    #[error(transparent)]
    Register(E),
    /// More registrations are in use than can be.
    #[error("{SLAB_ENTRIES_MAX} registrations are in use")]
    Full,
    /// The range ends behind the end of the address space.
    #[error("no such range of addresses")]
    Range,
}

#[derive(Debug)]
struct Entry<R> {
    region: R,
    start: usize,
    end: usize,
    is_writable: bool,
    users: u32,
    /// It can be found.
    is_mapped: bool,
    /// Neighbours among those that are idle, the older and the newer.
    older: Option<Slot>,
    newer: Option<Slot>,
}

/// See the module.
#[derive(Debug)]
pub struct Cache<G: Registrar> {
    registrar: G,
    limits: Limits,
    entries: Slab<Entry<G::Region>>,
    /// By their beginning: of memory that may be written, and of memory that may not.
    maps: [BTreeMap<usize, Slot>; 2],
    /// Ends of the list of idle ones.
    oldest: Option<Slot>,
    newest: Option<Slot>,
    /// Bytes of all that are not parked.
    bytes: usize,
    parked: VecDeque<G::Region>,
}

impl<G: Registrar> Cache<G> {
    /// An empty cache.
    #[must_use]
    pub fn new(registrar: G, limits: Limits) -> Cache<G> {
        Cache {
            registrar,
            limits,
            entries: Slab::with_capacity(SLAB_ENTRIES_MAX),
            maps: [BTreeMap::new(), BTreeMap::new()],
            oldest: None,
            newest: None,
            bytes: 0,
            parked: VecDeque::with_capacity(limits.batch * 2),
        }
    }

    /// A registration that covers the range: one that is there, or a new one of `memory`. `is_writable` is a
    /// property of the memory, not of the command.
    #[inline]
    pub fn acquire(
        &mut self,
        address: usize,
        bytes: usize,
        is_writable: bool,
        memory: impl FnOnce() -> G::Memory,
    ) -> Result<Lease, CacheError<G::Error>> {
        let end = address.checked_add(bytes).ok_or(CacheError::Range)?;
        let found = self.maps[usize::from(is_writable)].range(..=address).next_back().map(|(_, slot)| *slot);
        if let Some(slot) = found
            && let Some(entry) = self.entries.get_mut(slot)
            && end <= entry.end
        {
            entry.users += 1;
            let is_first = entry.users == 1;
            let (local_key, remote_key) = G::keys(&entry.region);
            if is_first {
                self.unlink(slot);
            }
            return Ok(Lease { slot, local_key, remote_key });
        }
        self.register(&memory(), address, end, is_writable)
    }

    #[cold]
    fn register(
        &mut self,
        memory: &G::Memory,
        address: usize,
        end: usize,
        is_writable: bool,
    ) -> Result<Lease, CacheError<G::Error>> {
        let start = address & !(PAGE - 1);
        let end = end.checked_next_multiple_of(PAGE).ok_or(CacheError::Range)?;
        let bytes = end - start;
        if self.entries.is_full() && self.oldest.is_none() {
            return Err(CacheError::Full);
        }
        self.make_room(bytes);
        let region = match self.registrar.register(memory, start, bytes, is_writable) {
            Ok(region) => region,
            Err(_) => {
                // Perhaps too much is pinned: what is not needed goes first.
                while self.evict() {}
                self.deregister(usize::MAX);
                self.registrar.register(memory, start, bytes, is_writable).map_err(CacheError::Register)?
            }
        };
        self.bytes += bytes;
        self.hide_covered(start, end, is_writable);
        let (local_key, remote_key) = G::keys(&region);
        let entry =
            Entry { region, start, end, is_writable, users: 1, is_mapped: true, older: None, newer: None };
        let slot = self.entries.insert(entry).map_err(|_| CacheError::Full)?;
        self.maps[usize::from(is_writable)].insert(start, slot);
        Ok(Lease { slot, local_key, remote_key })
    }

    /// Those that a new one covers are not found any more.
    fn hide_covered(&mut self, start: usize, end: usize, is_writable: bool) {
        loop {
            let map = &self.maps[usize::from(is_writable)];
            let found = map.range(start..end).next().map(|(_, slot)| *slot);
            // Ends ascend: where the first is not covered, none is.
            let Some(slot) = found.filter(|slot| self.entries.get(*slot).is_some_and(|it| it.end <= end))
            else {
                return;
            };
            self.hide(slot);
        }
    }

    /// It is not found any more; and it goes, unless it is in use.
    fn hide(&mut self, slot: Slot) {
        let Some(entry) = self.entries.get_mut(slot) else { return };
        if std::mem::take(&mut entry.is_mapped) {
            let (start, is_writable, users) = (entry.start, entry.is_writable, entry.users);
            self.maps[usize::from(is_writable)].remove(&start);
            if users == 0 {
                self.unlink(slot);
                self.park(slot);
            }
        }
    }

    /// A use is over.
    ///
    /// # Panics
    /// When it was over already: a bug of the caller.
    #[inline]
    pub fn release(&mut self, slot: Slot) {
        let entry = self.entries.get_mut(slot).expect("a lease is released once");
        assert!(entry.users > 0, "a lease is released once");
        entry.users -= 1;
        if entry.users > 0 {
            return;
        }
        if !entry.is_mapped {
            return self.park(slot);
        }
        self.link_newest(slot);
        if self.bytes > self.limits.bytes || self.entries.len() > self.limits.entries {
            self.make_room(0);
        }
    }

    /// The memory of this range was unmapped, or let go: no registration of it is found any more, and those
    /// that are not in use are given up at once.
    pub fn invalidate(&mut self, address: usize, bytes: usize) {
        let end = address.saturating_add(bytes);
        for is_writable in [false, true] {
            loop {
                let map = &self.maps[usize::from(is_writable)];
                let found = map.range(..end).next_back().map(|(_, slot)| *slot);
                // Ends ascend: where the last does not reach into the range, none does.
                let Some(slot) =
                    found.filter(|slot| self.entries.get(*slot).is_some_and(|it| it.end > address))
                else {
                    break;
                };
                self.hide(slot);
            }
        }
        self.deregister(usize::MAX);
    }

    /// Give up what is parked, if that is a batch. Once a turn, when the commands are on their way.
    #[inline]
    pub fn tidy(&mut self) {
        if self.parked.len() >= self.limits.batch.max(1) {
            self.deregister(self.limits.batch.max(1));
        }
    }

    /// Let the least recently used go until so many more bytes fit.
    fn make_room(&mut self, bytes: usize) {
        let more = usize::from(bytes > 0);
        while self.bytes.saturating_add(bytes) > self.limits.bytes
            || self.entries.len() + more > self.limits.entries
        {
            if !self.evict() {
                return;
            }
        }
    }

    /// Let the least recently used go. False when none is idle.
    fn evict(&mut self) -> bool {
        let Some(slot) = self.oldest else { return false };
        self.hide(slot);
        true
    }

    /// It is neither found nor in use nor in the list.
    fn park(&mut self, slot: Slot) {
        let Some(entry) = self.entries.remove(slot) else { return };
        self.bytes -= entry.end - entry.start;
        self.parked.push_back(entry.region);
        // A burst that never comes to its tidy must not pin without bound.
        if self.parked.len() >= self.limits.batch.max(1) * 4 {
            self.deregister(self.limits.batch.max(1));
        }
    }

    fn deregister(&mut self, count: usize) {
        self.parked.drain(..count.min(self.parked.len()));
    }

    fn link_newest(&mut self, slot: Slot) {
        let before = self.newest.replace(slot);
        if let Some(entry) = self.entries.get_mut(slot) {
            (entry.older, entry.newer) = (before, None);
        }
        match before.and_then(|before| self.entries.get_mut(before)) {
            Some(before) => before.newer = Some(slot),
            None => self.oldest = Some(slot),
        }
    }

    fn unlink(&mut self, slot: Slot) {
        let Some(entry) = self.entries.get_mut(slot) else { return };
        let (older, newer) = (entry.older.take(), entry.newer.take());
        match older.and_then(|older| self.entries.get_mut(older)) {
            Some(entry) => entry.newer = newer,
            None => self.oldest = newer,
        }
        match newer.and_then(|newer| self.entries.get_mut(newer)) {
            Some(entry) => entry.older = older,
            None => self.newest = older,
        }
    }
}

#[cfg(test)]
mod tests;
