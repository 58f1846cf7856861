//! [`Shares`]: what each owner holds of a pool, in bytes.
//!
//! The rule that comes of it is [`Share`](super::Share)'s. An owner is an entry of a slab, as a connection
//! is. What one leaves behind when it goes (a disk may still have its buffers) is not held against the next
//! of that entry.

use std::cell::{Cell, RefCell};

use crate::slab::Slot;

/// Who is charged for a buffer. One without an entry in the table is not charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner(pub(super) Slot);

impl Owner {
    /// No slab has such an entry.
    pub(super) const NOBODY: Owner = Owner(Slot::from_wire(u16::MAX as u32));
}

/// What the last owner of an entry holds.
#[derive(Clone, Copy)]
struct Held {
    owner: Owner,
    bytes: u64,
}

/// Bytes that each owner holds.
#[derive(Default)]
pub(super) struct Shares(RefCell<Vec<Cell<Held>>>);

impl Shares {
    /// Entries are only ever added: what is held is counted.
    pub(super) fn set_owners(&self, owners: usize) {
        let mut table = self.0.borrow_mut();
        if owners > table.len() {
            table.resize(owners, Cell::new(Held { owner: Owner::NOBODY, bytes: 0 }));
        }
    }

    #[inline]
    pub(super) fn held(&self, owner: Owner) -> u64 {
        let held = self.0.borrow().get(owner.0.index()).map(Cell::get);
        held.filter(|held| held.owner == owner).map_or(0, |held| held.bytes)
    }

    #[inline]
    pub(super) fn take(&self, owner: Owner, bytes: u64) {
        if let Some(entry) = self.0.borrow().get(owner.0.index()) {
            let held = entry.get();
            let before = if held.owner == owner { held.bytes } else { 0 };
            entry.set(Held { owner, bytes: before + bytes });
        }
    }

    #[inline]
    pub(super) fn give_back(&self, owner: Owner, bytes: u64) {
        let table = self.0.borrow();
        let Some(entry) = table.get(owner.0.index()) else { return };
        let held = entry.get();
        if held.owner == owner {
            debug_assert!(held.bytes >= bytes, "given back twice, or taken before there was a table");
            entry.set(Held { owner, bytes: held.bytes.saturating_sub(bytes) });
        }
    }
}

/// Bytes of the table for each owner.
pub const SHARE_BYTES: usize = size_of::<Held>();
