//! Table of open R2Ts by TTAG: the H2CData expected from the host, and its destination.
//!
//! TTAG is `generation | index`. The generation changes with each use of an entry and repeats after at least
//! 15 uses. Until then an H2CData with the TTAG of a finished transfer is detected. `controller::receive`
//! checks command, state, offset and length.

use spindle_nvme_transport::RequestId;
use spindle_reactor::mem::Buf;

/// A command with an open R2T.
#[derive(Debug)]
pub(super) struct Transfer {
    /// Request that called `fetch`.
    pub(super) slot: RequestId,
    pub(super) cid: u16,
    /// An H2CData of this transfer had a wrong data digest.
    pub(super) is_damaged: bool,
    /// Bytes received or discarded so far; the next H2CData must have this offset.
    pub(super) received: u32,
    /// Length of the transfer in bytes (R2TL).
    pub(super) bytes: u32,
    pub(super) target: TransferTarget,
}

/// Destination of a transfer's data.
#[derive(Debug)]
pub(super) enum TransferTarget {
    /// The request's buffer; no H2CData is being received.
    Buffer(Buf),
    /// An H2CData is being received; its payload has the buffer.
    Receiving,
    /// The command was aborted; data that the host still sends is discarded.
    Discard,
}

/// Maximum entries of a queue: at most 12 of the 16 bits of a TTAG are the index, at least 4 the generation.
pub const QUEUE_ENTRIES_MAX: u16 = 4096;

#[derive(Debug)]
struct Entry {
    transfer: Option<Transfer>,
    generation: u16,
}

/// Table of open R2Ts. Grows to the largest number of transfers open at once, at most the count of queue
/// entries rounded up to a power of two.
#[derive(Debug)]
pub(super) struct Transfers {
    entries: Vec<Entry>,
    free: Vec<u16>,
    index_bits: u32,
}

impl Transfers {
    /// Returns the maximum heap memory in bytes after `count` transfers were open at once.
    pub(super) const fn bytes_for(count: usize) -> usize {
        count.next_power_of_two() * (size_of::<Entry>() + size_of::<u16>())
    }

    /// Creates a table for `entries_max` open transfers, rounded up to a power of two.
    ///
    /// # Panics
    /// If `entries_max` is greater than [`QUEUE_ENTRIES_MAX`].
    pub(super) fn new(entries_max: u16) -> Self {
        assert!(entries_max <= QUEUE_ENTRIES_MAX, "{entries_max} queue entries, at most {QUEUE_ENTRIES_MAX}");
        let index_bits = u16::BITS - entries_max.max(2).saturating_sub(1).leading_zeros();
        Transfers { entries: Vec::new(), free: Vec::new(), index_bits }
    }

    fn tag(&self, index: u16, generation: u16) -> u16 {
        generation << self.index_bits | index
    }

    /// Returns the generation after `generation`. Skips generation 0, so that TTAG 0 is always stale.
    fn next_generation(&self, generation: u16) -> u16 {
        match (generation + 1) & (u16::MAX >> self.index_bits) {
            0 => 1,
            next => next,
        }
    }

    /// Adds a transfer and returns its TTAG. `None`: all entries are in use.
    pub(super) fn insert(&mut self, transfer: Transfer) -> Option<u16> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => self.add_entry()?,
        };
        let entry = &mut self.entries[usize::from(index)];
        entry.transfer = Some(transfer);
        let generation = entry.generation;
        Some(self.tag(index, generation))
    }

    fn add_entry(&mut self) -> Option<u16> {
        let index = u16::try_from(self.entries.len()).ok()?;
        if u32::from(index) >= 1 << self.index_bits {
            return None;
        }
        self.entries.push(Entry { transfer: None, generation: 1 });
        Some(index)
    }

    /// Returns the transfer of a TTAG; `None` if the TTAG is stale or was never used.
    #[inline]
    pub(super) fn get_mut(&mut self, ttag: u16) -> Option<&mut Transfer> {
        let index = self.index(ttag)?;
        self.entries[index].transfer.as_mut()
    }

    /// Returns the TTAG of the request's transfer; `None` if there is none or its data is being discarded.
    #[cold]
    pub(super) fn tag_of(&self, slot: RequestId) -> Option<u16> {
        let is_match = |entry: &Entry| {
            let is_of_slot = |transfer: &Transfer| {
                transfer.slot == slot && !matches!(transfer.target, TransferTarget::Discard)
            };
            entry.transfer.as_ref().is_some_and(is_of_slot)
        };
        let at = self.entries.iter().position(is_match)?;
        Some(self.tag(u16::try_from(at).ok()?, self.entries[at].generation))
    }

    /// Removes a transfer and makes its TTAG stale. `None`: the TTAG was stale or never used.
    pub(super) fn remove(&mut self, ttag: u16) -> Option<Transfer> {
        let index = self.index(ttag)?;
        let next = self.next_generation(self.entries[index].generation);
        let entry = &mut self.entries[index];
        let transfer = entry.transfer.take()?;
        entry.generation = next;
        self.free.push(u16::try_from(index).unwrap_or(u16::MAX));
        Some(transfer)
    }

    /// Removes all transfers, drops their buffers, and frees the table's memory.
    pub(super) fn clear(&mut self) {
        self.entries = Vec::new();
        self.free = Vec::new();
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Returns the index of the TTAG's entry. `None`: there is no such entry, or the generations differ.
    #[inline]
    fn index(&self, ttag: u16) -> Option<usize> {
        let index = ttag & !(u16::MAX << self.index_bits);
        let entry = self.entries.get(usize::from(index))?;
        (self.tag(index, entry.generation) == ttag).then_some(usize::from(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer(cid: u16) -> Transfer {
        Transfer {
            slot: RequestId::from_wire(0),
            cid,
            is_damaged: false,
            received: 0,
            bytes: 1,
            target: TransferTarget::Receiving,
        }
    }

    #[test]
    fn a_tag_names_one_use_of_one_entry_until_generations_come_round() {
        for entries in [1, 2, 3, 128, 129, 1024, QUEUE_ENTRIES_MAX] {
            let mut transfers = Transfers::new(entries);
            let first = transfers.insert(transfer(7)).expect("room");
            assert_eq!(transfers.get_mut(first).map(|transfer| transfer.cid), Some(7));
            assert!(transfers.get_mut(0).is_none());
            assert_eq!(transfers.remove(first).map(|transfer| transfer.cid), Some(7));
            assert!(transfers.get_mut(first).is_none() && transfers.remove(first).is_none());
            let generations = u16::MAX >> transfers.index_bits;
            assert!(generations >= 15);
            for _ in 1..generations {
                let tag = transfers.insert(transfer(9)).expect("room");
                assert!(tag != first && tag != 0);
                transfers.remove(tag);
            }
            assert_eq!(transfers.insert(transfer(9)), Some(first));
        }
    }

    #[test]
    fn live_tags_are_unique_and_all_others_are_stale() {
        let mut transfers = Transfers::new(100);
        let tags: Vec<u16> = (0..128).map_while(|cid| transfers.insert(transfer(cid))).collect();
        assert_eq!((tags.len(), transfers.len()), (128, 128));
        assert_eq!(transfers.insert(transfer(128)), None, "full");
        for tag in 0..=u16::MAX {
            let cid = transfers.get_mut(tag).map(|transfer| usize::from(transfer.cid));
            assert_eq!(cid, tags.iter().position(|known| *known == tag), "{tag:#x}");
        }
        transfers.clear();
        assert!(tags.iter().all(|tag| transfers.get_mut(*tag).is_none()));
    }
}
