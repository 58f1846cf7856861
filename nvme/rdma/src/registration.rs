//! The pin-down cache: memory registrations that are kept for later commands with the same memory.
//!
//! Registration pins pages and fills the device's translation table: tens of microseconds, far more than a
//! small command. Applications reuse buffers, so a registration is kept after its use (Goglin 3.2). When the
//! limits are exceeded, the least recently used are dropped, in batches off the data path (PVFS 5.4).
//!
//! ```text
//!            miss                  release                 over a limit, invalidated          tidy
//!   ────> registered, in use <───────────────> idle ──────────────────────────────> parked ─> deregistered
//!                       │          hit           (LRU)                                ^
//!                       └── invalidated or covered: in use, not in the map ───────────┘ release
//! ```
//! **Lookup.** A registration serves every range that it covers. A new registration removes those that it
//! covers from the map, so no mapped registration covers another. Therefore ends ascend with starts: of the
//! registrations that start at or before an address, the last one has the highest end. One lookup suffices.
//!
//! **Validity.** A registration refers to the pages that were mapped when it was made. If memory is unmapped
//! and mapped again, the device would access the old pages. The code that unmaps memory must call
//! [`Cache::invalidate`]. A registration that keeps its memory mapped (`Registrar::Memory`) stays valid, but
//! pins memory that its owner has released.
//!
//! **Scope.** The cache calls no verbs ([`Registrar`] does) and uses no threads: one cache per device and
//! thread. The peer can use a kept remote key after its command. That is the cost of not registering for each
//! command.
//!
//! **Limits** count all registrations that are not parked. Only idle registrations are dropped, so
//! registrations in use by outstanding commands may exceed the limits.

mod buffers;
mod domains;

use std::collections::BTreeMap;
use std::collections::VecDeque;

use spindle_reactor::slab::{SLAB_ENTRIES_MAX, Slab, Slot};

pub use buffers::Registrations;
pub use domains::domain_of;

/// Granularity of registrations in bytes. Devices pin whole pages; buffers in one page share a registration.
const PAGE: usize = 4096;

/// Registers memory with a device; tests implement it without verbs.
pub trait Registrar {
    /// A memory registration. Its drop deregisters the memory.
    type Region;
    /// A handle that keeps the memory mapped.
    type Memory;
    /// Error of [`Registrar::register`].
    type Error;

    /// Registers `bytes` from `address`, both multiples of 4096. `is_writable`: the device may also write.
    ///
    /// # Errors
    /// The device refuses, or the process exceeds its limit of locked memory.
    fn register(
        &mut self,
        memory: &Self::Memory,
        address: usize,
        bytes: usize,
        is_writable: bool,
    ) -> Result<Self::Region, Self::Error>;

    /// Returns the local key and the remote key.
    fn keys(region: &Self::Region) -> (u32, u32);
}

/// Limits of a cache. Above these, idle registrations are dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum registered bytes. The default is 1 GiB: the working buffers of a large application, below the
    /// locked-memory limit of most systems.
    pub bytes: usize,
    /// Maximum registrations. The default is 1024, well below the limits of small devices.
    pub entries: usize,
    /// Count of registrations deregistered in one batch; 0 counts as 1.
    pub batch: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { bytes: 1 << 30, entries: 1024, batch: 32 }
    }
}

/// One use of a registration, which [`Cache::release`] ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// The registration, for [`Cache::release`].
    pub slot: Slot,
    /// Key for this host's own work requests.
    pub local_key: u32,
    /// Key for the peer's READs and WRITEs.
    pub remote_key: u32,
}

/// Error of [`Cache::acquire`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CacheError<E> {
    /// Registration failed, even after all idle registrations were dropped.
    #[error(transparent)]
    Register(E),
    /// The table of registrations is full and none is idle.
    #[error("{SLAB_ENTRIES_MAX} registrations are in use")]
    Full,
    /// The range, extended to whole pages, exceeds the address space.
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
    /// The entry is in the map, so that lookups can find it.
    is_mapped: bool,
    /// Next older registration in the list of idle registrations.
    older: Option<Slot>,
    /// Next newer registration in the list of idle registrations.
    newer: Option<Slot>,
}

/// A pin-down cache for one device and thread; see the module documentation.
#[derive(Debug)]
pub struct Cache<G: Registrar> {
    registrar: G,
    limits: Limits,
    entries: Slab<Entry<G::Region>>,
    /// Registrations by start address. Index 0: read-only memory; 1: writable memory.
    maps: [BTreeMap<usize, Slot>; 2],
    /// Least recently used idle registration.
    oldest: Option<Slot>,
    /// Most recently used idle registration.
    newest: Option<Slot>,
    /// Bytes of all registrations that are not parked.
    bytes: usize,
    parked: VecDeque<G::Region>,
}

impl<G: Registrar> Cache<G> {
    /// Creates an empty cache that registers with `registrar`.
    #[must_use]
    pub fn new(registrar: G, limits: Limits) -> Cache<G> {
        // More do not fit into the table: an idle registration then makes room for a new one.
        let limits = Limits { entries: limits.entries.min(SLAB_ENTRIES_MAX), ..limits };
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

    /// Returns a registration that covers `bytes` from `address`: an existing one, or a new one of `memory`,
    /// of whole pages of 4 KiB. [`Cache::release`] must be called for each lease. `is_writable` is a property
    /// of the memory, not of the command.
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
                // The limit of locked memory may be exceeded: drop all idle registrations and retry.
                while self.evict() {}
                self.deregister(usize::MAX);
                self.registrar.register(memory, start, bytes, is_writable).map_err(CacheError::Register)?
            }
        };
        let (local_key, remote_key) = G::keys(&region);
        tracing::trace!(
            address = format_args!("{start:#x}"),
            bytes,
            key = remote_key,
            is_writable,
            "registered memory"
        );
        let entry =
            Entry { region, start, end, is_writable, users: 1, is_mapped: true, older: None, newer: None };
        let slot = self.entries.insert(entry).map_err(|_| CacheError::Full)?;
        self.bytes += bytes;
        self.unmap_covered(start, end, is_writable);
        self.maps[usize::from(is_writable)].insert(start, slot);
        Ok(Lease { slot, local_key, remote_key })
    }

    /// Removes from the map the registrations that `start .. end` covers.
    fn unmap_covered(&mut self, start: usize, end: usize, is_writable: bool) {
        loop {
            let map = &self.maps[usize::from(is_writable)];
            let found = map.range(start..end).next().map(|(_, slot)| *slot);
            // Ends ascend: if the first registration is not covered, none is.
            let Some(slot) = found.filter(|slot| self.entries.get(*slot).is_some_and(|it| it.end <= end))
            else {
                return;
            };
            self.unmap(slot);
        }
    }

    /// Removes a registration from the map, and parks it if it is idle.
    fn unmap(&mut self, slot: Slot) {
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

    /// Ends a use of a registration.
    ///
    /// # Panics
    /// If the registration is not in use: a lease was released twice.
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

    /// Removes the registrations that overlap `bytes` from `address` from the map, as this memory was
    /// unmapped or released. Deregisters the idle ones among them, and all parked registrations, at once.
    /// Registrations in use are parked when they are released.
    pub fn invalidate(&mut self, address: usize, bytes: usize) {
        let end = address.saturating_add(bytes);
        for is_writable in [false, true] {
            loop {
                let map = &self.maps[usize::from(is_writable)];
                let found = map.range(..end).next_back().map(|(_, slot)| *slot);
                // Ends ascend: if the last registration does not overlap the range, none does.
                let Some(slot) =
                    found.filter(|slot| self.entries.get(*slot).is_some_and(|it| it.end > address))
                else {
                    break;
                };
                self.unmap(slot);
            }
        }
        self.deregister(usize::MAX);
    }

    /// Deregisters a batch of parked registrations, if a full batch is parked. To be called once per turn,
    /// after the commands were posted.
    #[inline]
    pub fn tidy(&mut self) {
        if self.parked.len() >= self.limits.batch.max(1) {
            self.deregister(self.limits.batch.max(1));
        }
    }

    /// Evicts least recently used registrations until another one of `bytes` fits into the limits, or none is
    /// idle. 0 bytes: until the limits are met.
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

    /// Evicts the least recently used idle registration. Returns false if there is none.
    fn evict(&mut self) -> bool {
        let Some(slot) = self.oldest else { return false };
        self.unmap(slot);
        true
    }

    /// Removes a registration from the table and queues it for deregistration. The registration must be
    /// unmapped, unused and not in the list of idle ones.
    fn park(&mut self, slot: Slot) {
        let Some(entry) = self.entries.remove(slot) else { return };
        self.bytes -= entry.end - entry.start;
        self.parked.push_back(entry.region);
        // Limits the pinned memory if `tidy` is not called during a burst.
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
