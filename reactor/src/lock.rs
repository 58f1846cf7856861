//! [`Lock`]: a mutex. With the feature `count-locks` it counts how often each thread locks, for tests that
//! assert that the data path takes no lock.
//!
//! A panic does not poison the mutex: the thread that has locked it must keep the value consistent between
//! any two statements that can panic. Not for the data path.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

#[cfg(feature = "count-locks")]
thread_local! {
    static TAKEN: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Returns the count of calls of [`Lock::lock`] by the calling thread.
#[cfg(feature = "count-locks")]
#[must_use]
pub fn locks_taken() -> u64 {
    TAKEN.with(std::cell::Cell::get)
}

/// A mutex that no panic poisons.
#[derive(Debug, Default)]
pub struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    /// Creates an unlocked mutex.
    pub const fn new(value: T) -> Lock<T> {
        Lock(Mutex::new(value))
    }

    /// Locks the mutex; blocks while another thread holds it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        #[cfg(feature = "count-locks")]
        TAKEN.with(|taken| taken.set(taken.get() + 1));
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the mutex if it is free; otherwise returns `None`. `locks_taken` does not count this call.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_had_by_one_and_outlives_a_panic() {
        let lock = Lock::new(1);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            *lock.lock() += 1;
            let _guard = lock.lock();
            panic!("as asked");
        }));
        assert!(panicked.is_err());
        let guard = lock.lock();
        assert_eq!(*guard, 2);
        assert!(lock.try_lock().is_none());
        drop(guard);
        assert_eq!(lock.try_lock().map(|guard| *guard), Some(2));
    }

    #[cfg(feature = "count-locks")]
    #[test]
    fn each_use_counts_for_the_thread_that_took_it() {
        let lock = Lock::new(());
        let before = locks_taken();
        drop(lock.lock());
        std::thread::scope(|scope| drop(scope.spawn(|| drop(lock.lock())).join()));
        assert_eq!(locks_taken() - before, 1);
    }
}
