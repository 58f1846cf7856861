//! Bounded single-producer, single-consumer ring: tags from the thread that receives requests to the thread
//! that sends replies.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::Thread;

/// Aligned to two cache lines, which the adjacent-line prefetcher of x86 fetches as a pair: no false sharing.
#[derive(Default)]
#[repr(align(128))]
struct CacheAligned<T>(T);

/// Only one thread may call `push`, and only one thread may call `take`: otherwise tags are lost or repeated.
pub(super) struct Ring {
    slots: Vec<AtomicU64>,
    taken: CacheAligned<AtomicUsize>,
    pushed: CacheAligned<AtomicUsize>,
    closed: CacheAligned<AtomicBool>,
}

impl Ring {
    pub(super) fn new(slots: usize) -> Ring {
        Ring {
            slots: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            taken: CacheAligned::default(),
            pushed: CacheAligned::default(),
            closed: CacheAligned::default(),
        }
    }

    /// Appends a tag. False: the ring is full.
    pub(super) fn push(&self, tag: u64) -> bool {
        let pushed = self.pushed.0.load(Ordering::Relaxed);
        if pushed - self.taken.0.load(Ordering::Acquire) == self.slots.len() {
            return false;
        }
        self.slots[pushed % self.slots.len()].store(tag, Ordering::Relaxed);
        self.pushed.0.store(pushed + 1, Ordering::Release);
        true
    }

    /// Removes all tags from the ring and replaces `tags` by them, oldest first.
    pub(super) fn take(&self, tags: &mut Vec<u64>) {
        let (taken, pushed) = (self.taken.0.load(Ordering::Relaxed), self.pushed.0.load(Ordering::Acquire));
        tags.clear();
        tags.extend((taken..pushed).map(|at| self.slots[at % self.slots.len()].load(Ordering::Relaxed)));
        self.taken.0.store(pushed, Ordering::Release);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.0.load(Ordering::Acquire)
    }

    /// Returns a guard that closes the ring and wakes `sleeper` when dropped, also by a panic.
    pub(super) fn close_on_drop(&self, sleeper: Option<Thread>) -> CloseOnDrop<'_> {
        CloseOnDrop { ring: self, sleeper }
    }
}

/// Guard of a thread that uses a ring. Its drop closes the ring, so that the other thread ends too.
pub(super) struct CloseOnDrop<'a> {
    ring: &'a Ring,
    sleeper: Option<Thread>,
}

impl CloseOnDrop<'_> {
    /// Unparks the sleeper, if any. If the sleeper is not parked yet, its next park returns at once: no push
    /// is missed.
    pub(super) fn wake(&self) {
        self.sleeper.iter().for_each(Thread::unpark);
    }
}

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.ring.closed.0.store(true, Ordering::Release);
        self.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_takes_what_it_has_room_for_and_gives_it_back_in_order() {
        let (ring, mut tags) = (Ring::new(3), Vec::new());
        for round in 0..5 {
            let pushed = [round, round + 1, round + 2];
            assert!(pushed.iter().all(|tag| ring.push(*tag)) && !ring.push(9));
            ring.take(&mut tags);
            assert_eq!(tags, pushed);
        }
        ring.take(&mut tags);
        assert!(tags.is_empty() && !ring.is_closed());
        drop(ring.close_on_drop(None));
        assert!(ring.is_closed());
    }
}
