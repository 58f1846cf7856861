//! The way of tags from the thread that takes requests to the one that sends replies: a bounded ring with one
//! thread at each end.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::Thread;

/// Alone on its cache lines (two: processors fetch them in pairs).
#[derive(Default)]
#[repr(align(128))]
struct Line<T>(T);

/// The ring. One thread pushes and another takes; a second one at either end loses or repeats tags.
pub(super) struct Ring {
    slots: Vec<AtomicU64>,
    taken: Line<AtomicUsize>,
    pushed: Line<AtomicUsize>,
    closed: Line<AtomicBool>,
}

impl Ring {
    pub(super) fn new(slots: usize) -> Ring {
        Ring {
            slots: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            taken: Line::default(),
            pushed: Line::default(),
            closed: Line::default(),
        }
    }

    /// False: it is full.
    pub(super) fn push(&self, tag: u64) -> bool {
        let pushed = self.pushed.0.load(Ordering::Relaxed);
        if pushed - self.taken.0.load(Ordering::Acquire) == self.slots.len() {
            return false;
        }
        self.slots[pushed % self.slots.len()].store(tag, Ordering::Relaxed);
        self.pushed.0.store(pushed + 1, Ordering::Release);
        true
    }

    /// All that is there replaces `tags`.
    pub(super) fn take(&self, tags: &mut Vec<u64>) {
        let (taken, pushed) = (self.taken.0.load(Ordering::Relaxed), self.pushed.0.load(Ordering::Acquire));
        tags.clear();
        tags.extend((taken..pushed).map(|at| self.slots[at % self.slots.len()].load(Ordering::Relaxed)));
        self.taken.0.store(pushed, Ordering::Release);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.0.load(Ordering::Acquire)
    }

    /// Closes the ring when it is dropped, which a panic does too, and wakes `sleeper`.
    pub(super) fn closing(&self, sleeper: Option<Thread>) -> Closing<'_> {
        Closing { ring: self, sleeper }
    }
}

/// One end of a ring.
pub(super) struct Closing<'a> {
    ring: &'a Ring,
    sleeper: Option<Thread>,
}

impl Closing<'_> {
    /// What was pushed before is seen by the sleeper, also when it is only about to sleep.
    pub(super) fn wake(&self) {
        self.sleeper.iter().for_each(Thread::unpark);
    }
}

impl Drop for Closing<'_> {
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
        drop(ring.closing(None));
        assert!(ring.is_closed());
    }
}
