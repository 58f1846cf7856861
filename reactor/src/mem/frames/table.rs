//! [`Table`]: the pages of a RAM disk, their frames, pins and seals: all steps that several cores may take at
//! once. Generic over its atomics: `tests/weak.rs` runs it under a model checker of weak memory.
//!
//! With seals, a frame is sealed after the table names it, and its seal is broken before the table names
//! another frame, so before that write is acknowledged: see [`Seals`]. A frame whose seal was broken leaves
//! the table for certain. Without seals none of this is executed.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use super::{NONE, PIN};
use crate::mem::atomic::{AtomicCount, AtomicWord};
use crate::mem::seals::{Reference, Seals};

/// An entry of the table: frame index (low 32 bits), count of pins taken through this entry (high 32 bits).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry(u64);

impl Entry {
    #[inline]
    pub(super) fn of(frame: u32) -> Entry {
        Entry(u64::from(frame))
    }

    #[inline]
    pub(super) fn pinned(self) -> Entry {
        Entry(self.0 + PIN)
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
    pub(super) fn frame(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    pub(super) fn pins(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

pub(super) struct Table<W = AtomicU64, C = AtomicI32> {
    entries: Box<[W]>,
    /// Indexed by frame: pins of a frame that is no longer in the table. See [`super`].
    detached_pins: Box<[C]>,
    /// `None`: no reader is without a pin.
    seals: Option<Seals<W>>,
}

impl<W: AtomicWord, C: AtomicCount> Table<W, C> {
    pub(super) fn new(pages: u64, frames: u32, seals: Option<Seals<W>>) -> Table<W, C> {
        Table {
            entries: (0..pages).map(|_| W::new(u64::from(NONE))).collect(),
            detached_pins: (0..frames).map(|_| C::zero()).collect(),
            seals,
        }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The word of a page's entry, for a prefetch.
    #[inline]
    pub(super) fn word(&self, page: usize) -> Option<&W> {
        self.entries.get(page)
    }

    #[inline]
    pub(super) fn load(&self, page: usize, order: Ordering) -> Entry {
        Entry(self.entries[page].load(order))
    }

    #[inline]
    pub(super) fn seals(&self) -> Option<&Seals<W>> {
        self.seals.as_ref()
    }

    /// Pins the frame of `page` and returns its index; `NONE` when the page has no frame.
    #[inline]
    pub(super) fn pin(&self, page: usize) -> u32 {
        let entry = &self.entries[page];
        let mut seen = entry.load(Ordering::Relaxed);
        while Entry(seen).frame() != NONE {
            // Acquire: the bytes were written before the frame was swapped in.
            match entry.exchange_ordered(seen, seen + PIN, (Ordering::Acquire, Ordering::Relaxed)) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        Entry(seen).frame()
    }

    /// Drops a pin on `frame`, taken while `frame` was in the entry of `page`. Returns true when the frame is
    /// detached and has no pin left, so it is free.
    #[inline]
    pub(super) fn unpin(&self, page: usize, frame: u32) -> bool {
        let entry = &self.entries[page];
        let mut seen = entry.load(Ordering::Relaxed);
        while Entry(seen).frame() == frame {
            debug_assert!(Entry(seen).pins() > 0, "a pin was dropped twice");
            // Release: reads of the bytes come before any use of the frame by the thread that frees it.
            match entry.exchange_ordered(seen, seen - PIN, (Ordering::Release, Ordering::Relaxed)) {
                Ok(_) => return false,
                Err(now) => seen = now,
            }
        }
        self.add_detached_pins(frame, -1)
    }

    /// Adds the pins of `old` to the detached pins of its frame. The caller has taken `old` out of the table
    /// with acquire ordering. Returns true when `old` has a frame without a pin: the frame is free.
    #[inline]
    pub(super) fn retire(&self, old: Entry) -> bool {
        if old.frame() == NONE {
            return false;
        }
        old.pins() == 0 || self.add_detached_pins(old.frame(), i32::try_from(old.pins()).unwrap_or(i32::MAX))
    }

    /// Adds `change` to the pins of a frame that is not in the table. Returns true when the sum is 0.
    #[cold]
    fn add_detached_pins(&self, frame: u32, change: i32) -> bool {
        let before = self.detached_pins[frame as usize].fetch_add(change, Ordering::AcqRel);
        before + change == 0
    }

    /// Puts `new` into the entry of `page`, seals its frame, which the caller owns, and returns the replaced
    /// entry. `put` gets a frame that is free afterwards and was not in the replaced entry.
    #[inline]
    pub(super) fn swap(&self, page: usize, new: Entry, put: impl FnMut(u32)) -> Entry {
        match &self.seals {
            None => Entry(self.entries[page].swap(new.0, Ordering::SeqCst)),
            Some(seals) => self.swap_sealed(seals, page, new, put),
        }
    }

    /// A swap that breaks the old seal first needs a pin: without one, the frame could leave the table after
    /// that, and come back with other bytes and another seal before the swap.
    #[cold]
    fn swap_sealed(&self, seals: &Seals<W>, page: usize, new: Entry, mut put: impl FnMut(u32)) -> Entry {
        let seal = seals.load(new.frame());
        loop {
            let frame = self.pin(page);
            if frame != NONE {
                seals.break_seal(frame);
            }
            if let Some(old) = self.exchange_unsealed(page, frame, new) {
                if new.frame() != NONE {
                    seals.seal(new.frame(), seal, page as u64);
                }
                // The pin of this call has left the table with the entry.
                return if frame == NONE { old } else { Entry(old.0 - PIN) };
            }
            if frame != NONE && self.unpin(page, frame) {
                put(frame);
            }
        }
    }

    /// Puts `frame`, which the caller owns, into the entry of `page` if the entry contains `old`, which the
    /// caller has pinned (or `NONE`). Seals `frame`. Returns the replaced entry, else `None`.
    pub(super) fn exchange(&self, page: usize, old: u32, frame: u32) -> Option<Entry> {
        let Some(seals) = &self.seals else { return self.exchange_unsealed(page, old, Entry::of(frame)) };
        let seal = seals.load(frame);
        if old != NONE {
            // Not in vain: another thread has replaced `old` if this one does not.
            seals.break_seal(old);
        }
        let before = self.exchange_unsealed(page, old, Entry::of(frame))?;
        seals.seal(frame, seal, page as u64);
        Some(before)
    }

    fn exchange_unsealed(&self, page: usize, old: u32, new: Entry) -> Option<Entry> {
        let entry = &self.entries[page];
        let mut seen = entry.load(Ordering::Relaxed);
        while Entry(seen).frame() == old {
            match entry.exchange_ordered(seen, new.0, (Ordering::SeqCst, Ordering::Relaxed)) {
                Ok(_) => return Some(Entry(seen)),
                Err(now) => seen = now,
            }
        }
        None
    }

    /// Puts `place`, which the caller owns, into the entry of `page` if that is still `here`, whose frame the
    /// caller has pinned, and seals it. Returns false when the entry is another.
    #[inline]
    pub(super) fn settle(&self, page: usize, here: Entry, place: u32) -> bool {
        match &self.seals {
            None => self.settle_unsealed(page, here, place),
            Some(seals) => self.settle_sealed(seals, page, here, place),
        }
    }

    #[inline]
    fn settle_unsealed(&self, page: usize, here: Entry, place: u32) -> bool {
        let orders = (Ordering::AcqRel, Ordering::Relaxed);
        self.entries[page].exchange_ordered(here.0, Entry::of(place).0, orders).is_ok()
    }

    #[cold]
    fn settle_sealed(&self, seals: &Seals<W>, page: usize, here: Entry, place: u32) -> bool {
        let seal = seals.load(place);
        seals.break_seal(here.frame());
        let is_settled = self.settle_unsealed(page, here, place);
        if is_settled {
            seals.seal(place, seal, page as u64);
        }
        is_settled
    }

    /// The reference to a frame with `page`; `None` without seals, or if its seal is broken.
    #[inline]
    pub(super) fn reference(&self, frame: u32, page: u64) -> Option<Reference> {
        self.seals.as_ref()?.reference(frame, page)
    }
}

#[cfg(test)]
impl Table {
    /// Pins of all frames, detached ones too, without their signs.
    pub(super) fn detached(&self) -> impl Iterator<Item = i32> {
        self.detached_pins.iter().map(|pins| pins.load(Ordering::Relaxed))
    }
}
