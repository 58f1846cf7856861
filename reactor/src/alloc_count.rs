//! [`CountingAllocator`]: counts the allocations of each thread, for tests that assert that the data path
//! makes none.
//!
//! ```
//! use spindle_reactor::alloc_count::{CountingAllocator, allocations_here};
//!
//! #[global_allocator]
//! static ALLOCATOR: CountingAllocator = CountingAllocator;
//!
//! let before = allocations_here();
//! let boxed = Box::new(1);
//! assert_eq!(allocations_here() - before, 1);
//! # drop(boxed);
//! ```
//!
//! UNSAFETY: implements `GlobalAlloc` by passing every call to the system's allocator.
#![expect(unsafe_code, reason = "implements GlobalAlloc")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    // Const and without a destructor: using it neither allocates nor fails at a thread's end.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator with a count of allocations for each thread. A reallocation counts as an
/// allocation, also in place; a deallocation does not count.
#[derive(Debug, Clone, Copy, Default)]
pub struct CountingAllocator;

/// Returns the count of allocations of the calling thread; 0 without [`CountingAllocator`].
#[must_use]
pub fn allocations_here() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

fn count() {
    ALLOCATIONS.with(|allocations| allocations.set(allocations.get() + 1));
}

// SAFETY: every call is passed to `System` unchanged; counting touches a thread-local integer only.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `GlobalAlloc`, and the arguments are unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `GlobalAlloc`, and the arguments are unchanged.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `GlobalAlloc`, and the arguments are unchanged.
        unsafe { System.realloc(old, layout, bytes) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `GlobalAlloc`, and the arguments are unchanged.
        unsafe { System.dealloc(old, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The global allocator of this crate's tests is set in lib.rs.

    #[test]
    fn each_thread_counts_its_own_allocations() {
        let before = allocations_here();
        let mut vec = Vec::<u8>::with_capacity(1);
        vec.reserve_exact(100);
        assert_eq!(allocations_here() - before, 2);
        let there = std::thread::spawn(|| {
            let before = allocations_here();
            drop(vec![0u8; 10]);
            allocations_here() - before
        });
        assert_eq!(there.join().expect("thread"), 1);
    }
}
