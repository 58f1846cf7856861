//! [`Shares`]: what each owner holds of a pool, in bytes.
//!
//! The rule that comes of it is [`Share`](super::Share)'s.

use std::cell::{Cell, RefCell};

/// Who is charged for a buffer: a number below those that the pool was told of, or nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner(u16);

impl Owner {
    pub(super) const NOBODY: Owner = Owner(u16::MAX);

    #[inline]
    pub(super) fn new(index: usize) -> Owner {
        u16::try_from(index).map_or(Owner::NOBODY, Owner)
    }
}

/// Bytes that each owner holds.
#[derive(Default)]
pub(super) struct Shares(RefCell<Vec<Cell<u64>>>);

impl Shares {
    /// Owners are only ever added: what is held is counted.
    pub(super) fn set_owners(&self, owners: usize) {
        let mut held = self.0.borrow_mut();
        if owners > held.len() {
            held.resize(owners, Cell::new(0));
        }
    }

    #[inline]
    pub(super) fn held(&self, owner: Owner) -> u64 {
        self.0.borrow().get(usize::from(owner.0)).map_or(0, Cell::get)
    }

    #[inline]
    pub(super) fn take(&self, owner: Owner, bytes: u64) {
        if let Some(held) = self.0.borrow().get(usize::from(owner.0)) {
            held.set(held.get() + bytes);
        }
    }

    #[inline]
    pub(super) fn give_back(&self, owner: Owner, bytes: u64) {
        if let Some(held) = self.0.borrow().get(usize::from(owner.0)) {
            debug_assert!(held.get() >= bytes, "given back twice, or taken before there were owners");
            held.set(held.get().saturating_sub(bytes));
        }
    }
}
