//! The R2Ts that are out: which H2CData may come, and whose data it is.
//!
//! TTAG is a name with an age: `generation | index`. What a host sends back is looked up, never indexed by
//! (STYLE 3, Identity); `controller::receive` checks tag, command, state, offset and length together, once.

use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;

/// A write whose data was asked for.
#[derive(Debug)]
pub(super) struct Transfer {
    /// The request.
    pub(super) slot: Slot,
    /// CID of the command.
    pub(super) cid: u16,
    /// Some of the data was damaged on its way.
    pub(super) is_damaged: bool,
    /// Bytes received, in order.
    pub(super) received: u32,
    /// Bytes that were asked for.
    pub(super) bytes: u32,
    pub(super) place: TransferTarget,
}

/// Where the data of a transfer goes.
#[derive(Debug)]
pub(super) enum TransferTarget {
    /// Into this buffer.
    Here(Buf),
    /// An H2CData is being received into the buffer.
    Filling,
    /// Nowhere: the command was aborted and answered, and what its host still sends is taken in and dropped.
    Nowhere,
}

/// Most entries of a queue: 12 of the 16 bits of a TTAG name the entry, at least 4 are its age.
pub const QUEUE_ENTRIES_MAX: u16 = 4096;

#[derive(Debug)]
struct Entry {
    transfer: Option<Transfer>,
    generation: u16,
}

/// The table. It grows to as many transfers as were ever out at once, at most the queue's entries.
#[derive(Debug)]
pub(super) struct Transfers {
    entries: Vec<Entry>,
    free: Vec<u16>,
    index_bits: u32,
}

impl Transfers {
    /// Bytes of a table that has held `count` transfers at once.
    pub(super) const fn bytes_for(count: usize) -> usize {
        count.next_power_of_two() * (size_of::<Entry>() + size_of::<u16>())
    }

    /// For at most `entries_max` transfers at once.
    ///
    /// # Panics
    /// When that is more than [`QUEUE_ENTRIES_MAX`].
    pub(super) fn new(entries_max: u16) -> Self {
        assert!(entries_max <= QUEUE_ENTRIES_MAX, "{entries_max} queue entries, at most {QUEUE_ENTRIES_MAX}");
        let index_bits = u16::BITS - entries_max.max(2).saturating_sub(1).leading_zeros();
        Transfers { entries: Vec::new(), free: Vec::new(), index_bits }
    }

    fn tag(&self, index: u16, generation: u16) -> u16 {
        generation << self.index_bits | index
    }

    /// The generation after this one: never 0, so that a tag of 0 is always stale.
    fn next_generation(&self, generation: u16) -> u16 {
        match (generation + 1) & (u16::MAX >> self.index_bits) {
            0 => 1,
            next => next,
        }
    }

    /// Put a transfer in; its TTAG. `None` when all entries are in use.
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

    /// The transfer with this tag, if there is one.
    #[inline]
    pub(super) fn get_mut(&mut self, ttag: u16) -> Option<&mut Transfer> {
        let index = self.index(ttag)?;
        self.entries[index].transfer.as_mut()
    }

    /// The tag of the transfer of this request.
    #[cold]
    pub(super) fn tag_of(&self, slot: Slot) -> Option<u16> {
        let is_it = |entry: &Entry| {
            let wanted = |transfer: &Transfer| {
                transfer.slot == slot && !matches!(transfer.place, TransferTarget::Nowhere)
            };
            entry.transfer.as_ref().is_some_and(wanted)
        };
        let at = self.entries.iter().position(is_it)?;
        Some(self.tag(u16::try_from(at).ok()?, self.entries[at].generation))
    }

    /// Take the transfer with this tag out; the tag is stale from now on.
    pub(super) fn remove(&mut self, ttag: u16) -> Option<Transfer> {
        let index = self.index(ttag)?;
        let next = self.next_generation(self.entries[index].generation);
        let entry = &mut self.entries[index];
        let transfer = entry.transfer.take()?;
        entry.generation = next;
        self.free.push(u16::try_from(index).unwrap_or(u16::MAX));
        Some(transfer)
    }

    /// Forget them all, and their buffers.
    pub(super) fn clear(&mut self) {
        self.entries = Vec::new();
        self.free = Vec::new();
    }

    /// How many are out.
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Where a tag's entry is, if the tag is of its generation.
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
            slot: Slot::from_wire(0),
            cid,
            is_damaged: false,
            received: 0,
            bytes: 1,
            place: TransferTarget::Filling,
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
    fn as_many_tags_as_entries_are_unique_and_every_other_is_stale() {
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
