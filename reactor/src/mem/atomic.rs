//! The atomics of frames and caches as traits, so that a model checker of weak memory can run their code.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// An atomic 64-bit word: the standard library's, or that of a model checker.
pub trait AtomicWord: Send + Sync {
    /// Creates a word with this initial value.
    fn new(value: u64) -> Self;
    /// See [`AtomicU64::load`].
    fn load(&self, order: Ordering) -> u64;
    /// See [`AtomicU64::store`].
    fn store(&self, value: u64, order: Ordering);
    /// See [`AtomicU64::swap`].
    fn swap(&self, value: u64, order: Ordering) -> u64;
    /// See [`AtomicU64::fetch_add`].
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
    /// Compares and exchanges, see [`AtomicU64::compare_exchange`]. Returns the previous value.
    ///
    /// # Errors
    /// The value of the word when it differs from `current`.
    fn exchange_ordered(&self, current: u64, new: u64, orders: (Ordering, Ordering)) -> Result<u64, u64>;

    /// [`AtomicWord::exchange_ordered`] with [`Ordering::AcqRel`], on failure [`Ordering::Acquire`].
    ///
    /// # Errors
    /// The value of the word when it differs from `current`.
    #[inline]
    fn exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.exchange_ordered(current, new, (Ordering::AcqRel, Ordering::Acquire))
    }
}

impl AtomicWord for AtomicU64 {
    #[inline]
    fn new(value: u64) -> Self {
        AtomicU64::new(value)
    }

    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        AtomicU64::load(self, order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        AtomicU64::store(self, value, order);
    }

    #[inline]
    fn swap(&self, value: u64, order: Ordering) -> u64 {
        AtomicU64::swap(self, value, order)
    }

    #[inline]
    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        AtomicU64::fetch_add(self, value, order)
    }

    #[inline]
    fn exchange_ordered(&self, current: u64, new: u64, orders: (Ordering, Ordering)) -> Result<u64, u64> {
        self.compare_exchange(current, new, orders.0, orders.1)
    }
}

/// An atomic 32-bit count, as [`AtomicWord`].
pub trait AtomicCount: Send + Sync {
    /// Creates a count of 0.
    fn zero() -> Self;
    /// See [`AtomicI32::fetch_add`].
    fn fetch_add(&self, change: i32, order: Ordering) -> i32;
}

impl AtomicCount for AtomicI32 {
    #[inline]
    fn zero() -> Self {
        AtomicI32::new(0)
    }

    #[inline]
    fn fetch_add(&self, change: i32, order: Ordering) -> i32 {
        AtomicI32::fetch_add(self, change, order)
    }
}
