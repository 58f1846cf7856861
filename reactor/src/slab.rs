//! A slab of fixed capacity with generation-checked slots.
//!
//! What it is: a table of `capacity` entries. The memory is allocated once; an entry is touched at its first
//! use. A [`Slot`] identifies an entry *and* the generation of its value. Removing a value changes the
//! generation, so that a slot used too late (by a peer, a device, a timer) finds nothing.
//!
//! ```text
//!   Slot = 0 (1) | generation (15) | index (16)
//!   free list: last freed -> ... -> first freed (warm entries first)
//! ```
//!
//! What it does not do: it never grows, and never returns a value without checking the generation.
//!
//! Limits: 65535 entries; the generation repeats after 32767 uses of one entry. Generation 0 is never used,
//! so `Slot::from_wire(0)` is always stale. The highest bit is free for a user of the encoded slot: a layer
//! of a disk marks its own commands by it.

use std::fmt;

/// Largest capacity of a slab.
pub const SLAB_ENTRIES_MAX: usize = 65_535;

const GENERATION_MAX: u16 = 0x7fff;

/// End of the free list.
const END: u16 = u16::MAX;

/// Identifier of an entry of a [`Slab`] and of one of its values: index and generation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot {
    generation: u16,
    index: u16,
}

impl Slot {
    /// Returns the index of the entry. At most one of an index's slots is valid.
    #[inline]
    #[must_use]
    pub const fn index(self) -> usize {
        self.index as usize
    }

    /// Encodes the slot in 32 bits, for a field that a peer or device echoes. Bit 31 of a slab's slot is 0.
    #[inline]
    #[must_use]
    pub const fn to_wire(self) -> u32 {
        (self.generation as u32) << 16 | self.index as u32
    }

    /// Decodes 32 bits of any origin, for example of a peer. The slab finds no value for a stale slot.
    #[inline]
    #[must_use]
    pub const fn from_wire(wire: u32) -> Slot {
        let [a, b, c, d] = wire.to_le_bytes();
        Slot { generation: u16::from_le_bytes([c, d]), index: u16::from_le_bytes([a, b]) }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({}#{})", self.index, self.generation)
    }
}

struct Entry<T> {
    value: Option<T>,
    generation: u16,
    /// Next entry of the free list, while this one is free.
    next: u16,
}

/// A table of fixed capacity. See the module.
pub struct Slab<T> {
    /// Entries that were used at least once. Memory for all is reserved but untouched, so that a long queue
    /// with few commands uses as much memory as a short one.
    entries: Vec<Entry<T>>,
    capacity: u16,
    free: u16,
    len: u16,
}

impl<T> Slab<T> {
    /// Creates an empty slab for `n` values. Allocates the memory for all of them; no other method allocates.
    ///
    /// # Panics
    /// When `n` is above [`SLAB_ENTRIES_MAX`].
    #[must_use]
    pub fn with_capacity(n: usize) -> Slab<T> {
        assert!(n <= SLAB_ENTRIES_MAX, "a slab of {n} entries; at most {SLAB_ENTRIES_MAX}");
        let capacity = u16::try_from(n).unwrap_or(u16::MAX);
        Slab { entries: Vec::with_capacity(n), capacity, free: END, len: 0 }
    }

    /// Creates a slab for `n` values with `value` in entry 0 under `slot`, which another slab returned.
    /// `None` when `slot` is not of entry 0, has generation 0, or `n` is 0.
    ///
    /// # Panics
    /// When `n` is above [`SLAB_ENTRIES_MAX`].
    #[must_use]
    pub fn with_first(n: usize, slot: Slot, value: T) -> Option<Slab<T>> {
        let mut slab = Slab::with_capacity(n);
        if slot.index != 0 || slot.generation == 0 || n == 0 {
            return None;
        }
        slab.entries.push(Entry { value: Some(value), generation: slot.generation, next: END });
        slab.len = 1;
        Some(slab)
    }

    /// Returns the bytes of memory of `n` entries.
    #[must_use]
    pub const fn bytes_for(n: usize) -> usize {
        n * size_of::<Entry<T>>()
    }

    /// Puts `value` into a free entry.
    ///
    /// # Errors
    /// Returns `value` when the slab is full.
    #[inline]
    pub fn insert(&mut self, value: T) -> Result<Slot, T> {
        let index = self.free;
        let Some(entry) = self.entries.get_mut(usize::from(index)) else { return self.insert_fresh(value) };
        self.free = entry.next;
        entry.value = Some(value);
        self.len += 1;
        Ok(Slot { generation: entry.generation, index })
    }

    /// Puts `value` into the next entry that was never used. Returns `value` when there is none.
    #[inline(never)]
    fn insert_fresh(&mut self, value: T) -> Result<Slot, T> {
        let Some(slot) = self.fresh_slot() else { return Err(value) };
        self.entries.push(Entry { value: Some(value), generation: slot.generation, next: END });
        self.len += 1;
        Ok(slot)
    }

    fn fresh_slot(&self) -> Option<Slot> {
        let index = u16::try_from(self.entries.len()).ok().filter(|index| *index < self.capacity)?;
        Some(Slot { generation: 1, index })
    }

    /// Returns the slot that the next [`Slab::insert`] returns; `None` when full. For values that contain
    /// their own slot.
    #[inline]
    #[must_use]
    pub fn next_slot(&self) -> Option<Slot> {
        match self.entries.get(usize::from(self.free)) {
            Some(entry) => Some(Slot { generation: entry.generation, index: self.free }),
            None => self.fresh_slot(),
        }
    }

    /// Returns the value; `None` when `slot` is stale.
    #[inline]
    #[must_use]
    pub fn get(&self, slot: Slot) -> Option<&T> {
        let entry = self.entries.get(slot.index())?;
        if entry.generation == slot.generation { entry.value.as_ref() } else { None }
    }

    /// Returns the value as [`Slab::get`] does, mutable.
    #[inline]
    #[must_use]
    pub fn get_mut(&mut self, slot: Slot) -> Option<&mut T> {
        let entry = self.entries.get_mut(slot.index())?;
        if entry.generation == slot.generation { entry.value.as_mut() } else { None }
    }

    /// Returns true when `slot` identifies a value.
    #[inline]
    #[must_use]
    pub fn contains(&self, slot: Slot) -> bool {
        self.get(slot).is_some()
    }

    /// Removes and returns the value; `None` when `slot` is stale. Afterwards `slot` is stale.
    #[inline]
    pub fn remove(&mut self, slot: Slot) -> Option<T> {
        let entry = self.entries.get_mut(slot.index())?;
        if entry.generation != slot.generation {
            return None;
        }
        let value = entry.value.take()?;
        entry.generation = if entry.generation < GENERATION_MAX { entry.generation + 1 } else { 1 };
        entry.next = self.free;
        self.free = slot.index;
        self.len -= 1;
        Some(value)
    }

    /// Returns the slot of the value in entry `index`, if any. For loops that change the slab.
    #[inline]
    #[must_use]
    pub fn slot_at(&self, index: usize) -> Option<Slot> {
        let entry = self.entries.get(index)?;
        entry.value.as_ref()?;
        Some(Slot { generation: entry.generation, index: u16::try_from(index).ok()? })
    }

    /// Returns the count of values.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// Returns true when the slab has no value.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the maximum number of values.
    #[inline]
    #[must_use]
    pub fn capacity(&self) -> usize {
        usize::from(self.capacity)
    }

    /// Returns true when the next insert is refused.
    #[inline]
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.len() == self.capacity()
    }

    /// Returns the values with their slots, in ascending order of index.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, &T)> {
        (0..=u16::MAX).zip(self.entries.iter()).filter_map(|(index, entry)| {
            let slot = Slot { generation: entry.generation, index };
            entry.value.as_ref().map(|value| (slot, value))
        })
    }

    /// Returns the values as [`Slab::iter`] does, mutable.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (Slot, &mut T)> {
        (0..=u16::MAX).zip(self.entries.iter_mut()).filter_map(|(index, entry)| {
            let slot = Slot { generation: entry.generation, index };
            entry.value.as_mut().map(|value| (slot, value))
        })
    }

    /// Returns the slots of all values, in ascending order of index.
    pub fn slots(&self) -> impl Iterator<Item = Slot> {
        self.iter().map(|(slot, _)| slot)
    }
}

impl<T: fmt::Debug> fmt::Debug for Slab<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_slot_is_none() {
        let mut slab = Slab::with_capacity(2);
        let old = slab.insert("old").expect("room");
        assert_eq!(slab.remove(old), Some("old"));
        let new = slab.insert("new").expect("room");
        assert_eq!(old.index(), new.index(), "last freed is first used");
        assert_eq!(slab.get(old), None);
        assert_eq!(slab.get_mut(old), None);
        assert_eq!(slab.remove(old), None);
        assert_eq!(slab.get(new), Some(&"new"));
        assert_eq!(slab.len(), 1);
    }

    #[test]
    fn the_first_value_of_a_new_slab_may_keep_its_name() {
        let mut old = Slab::with_capacity(2);
        let first = old.insert(1).expect("room");
        assert_eq!(old.remove(first), Some(1));
        let kept = old.insert(2).expect("room");
        let second = old.insert(3).expect("room");
        let mut slab = Slab::with_first(2, kept, 2).expect("a first entry");
        assert_eq!((slab.get(kept), slab.get(first), slab.len()), (Some(&2), None, 1));
        let next = slab.insert(4).expect("room");
        assert!(slab.is_full() && slab.insert(5) == Err(5));
        assert_eq!((slab.remove(next), slab.remove(kept), slab.contains(kept)), (Some(4), Some(2), false));
        for (count, slot) in [(2, second), (2, Slot::from_wire(0)), (0, kept)] {
            assert!(Slab::with_first(count, slot, 1).is_none(), "{count} {slot:?}");
        }
    }

    #[test]
    fn a_full_slab_gives_the_value_back() {
        let mut slab = Slab::with_capacity(3);
        let slots: Vec<_> = (0..3).map(|value| slab.insert(value).expect("room")).collect();
        assert!(slab.is_full());
        assert_eq!(slab.next_slot(), None);
        assert_eq!(slab.insert(9), Err(9));
        assert_eq!(slab.remove(slots[1]), Some(1));
        let next = slab.next_slot();
        assert_eq!(slab.insert(9).ok(), next);
        assert_eq!(slab.iter().map(|(_, value)| *value).collect::<Vec<_>>(), [0, 9, 2]);
        assert_eq!(Slab::with_capacity(0).insert(1), Err(1));
    }

    #[test]
    fn entries_are_added_on_first_use_and_the_slab_is_never_reallocated() {
        let mut slab = Slab::with_capacity(100);
        assert_eq!((slab.entries.len(), slab.capacity()), (0, 100));
        let place = slab.entries.as_ptr();
        for value in 0..50 {
            let next = slab.next_slot();
            let slot = slab.insert(value).expect("room");
            assert_eq!(next, Some(slot));
            slab.remove(slot);
        }
        assert_eq!(slab.entries.len(), 1, "the last that was freed is used again");
        while slab.insert(0).is_ok() {}
        assert_eq!((slab.len(), slab.entries.as_ptr()), (100, place));
    }

    #[test]
    fn wire_numbers_of_anybody_are_harmless() {
        let mut slab = Slab::with_capacity(4);
        let slot = slab.insert(7).expect("room");
        assert_eq!(Slot::from_wire(slot.to_wire()), slot);
        for wire in [0, 1, u32::MAX, 0xffff, 0xffff_0000, slot.to_wire() + 1, slot.to_wire() ^ (1 << 31)] {
            assert_eq!(slab.get(Slot::from_wire(wire)), None, "{wire:#x}");
        }
        assert_eq!(slab.get(Slot::from_wire(slot.to_wire())), Some(&7));
    }

    #[test]
    fn the_generation_comes_round_without_zero() {
        let mut slab = Slab::with_capacity(1);
        let first = slab.insert(0u32).expect("room");
        slab.remove(first);
        for round in 1..32_767 {
            let slot = slab.insert(round).expect("room");
            assert_ne!(slot, first);
            assert!(slot.to_wire() != 0 && slot.to_wire() >> 31 == 0, "{slot:?}");
            slab.remove(slot);
        }
        assert_eq!(slab.insert(0).ok(), Some(first));
    }

    #[test]
    fn the_largest_slab_fills_and_empties() {
        let mut slab = Slab::with_capacity(SLAB_ENTRIES_MAX);
        while slab.insert(()).is_ok() {}
        assert_eq!(slab.len(), SLAB_ENTRIES_MAX);
        assert_eq!(slab.slots().count(), SLAB_ENTRIES_MAX);
        for index in 0..slab.capacity() {
            let slot = slab.slot_at(index).expect("occupied");
            slab.remove(slot);
        }
        assert!(slab.is_empty());
        assert_eq!(slab.slot_at(0), None);
        assert_eq!(slab.iter_mut().count(), 0);
    }
}
