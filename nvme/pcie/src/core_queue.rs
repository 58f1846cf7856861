//! [`CoreQueue`]: what a core and the drive's manager share about one queue pair.
//!
//! The manager writes the *word* (a [`QueueCommand`] with its epoch, and the tick); the core obeys it in its
//! next poll and answers with the same word in `seen`. In steady state the core loads the word once a turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use spindle_reactor::affinity::current_node;
use spindle_reactor::lock::Lock;
use spindle_reactor::mem::Area;

use crate::core::Left;
use crate::fronts::{Attached, Fronts};
use crate::function::Mapping;
use crate::pointers::Pointers;
use crate::queue::QueuePair;
use crate::rules::Rules;
use crate::shared_queue::Sharer;

/// What a core may do with its queue pair. See `docs/nvme.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueCommand {
    /// Nothing yet: requests wait.
    Wait,
    /// Work.
    Go,
    /// Touch nothing of the queue any more.
    Stop,
    /// The drive reaches no memory: take what was in flight back, and the new queue, or, when there is none,
    /// wait without one.
    Rewind,
    /// The drive reaches no memory and is another, or none that fits: end everything, let go of it.
    Gone,
    /// Repeat what was taken back, and begin nothing else.
    Replay,
    /// The drive reaches no memory and has been away for too long: as `Gone`, but it may come back.
    Absent,
}

/// Command (3 bits), epoch (29 bits), manager tick (32 bits).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueEpoch(u64);

impl QueueEpoch {
    /// What every core queue begins with: [`QueueCommand::Wait`].
    pub(crate) const FIRST: QueueEpoch = QueueEpoch(0);
    const ORDER_BITS: u32 = 3;

    pub(crate) fn order(self) -> QueueCommand {
        match self.0 & 7 {
            0 => QueueCommand::Wait,
            1 => QueueCommand::Go,
            2 => QueueCommand::Stop,
            3 => QueueCommand::Rewind,
            5 => QueueCommand::Replay,
            6 => QueueCommand::Absent,
            _ => QueueCommand::Gone,
        }
    }

    /// Command and epoch: what is answered.
    pub(crate) const fn answer(self) -> u32 {
        let [a, b, c, d, ..] = self.0.to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    /// The time, in ticks.
    pub(crate) fn tick(self) -> u32 {
        let [.., e, f, g, h] = self.0.to_le_bytes();
        u32::from_le_bytes([e, f, g, h])
    }

    fn next(self, order: QueueCommand) -> QueueEpoch {
        let epoch = self.answer() >> Self::ORDER_BITS;
        let low = epoch.wrapping_add(1) << Self::ORDER_BITS | order as u32;
        QueueEpoch(u64::from(low) | u64::from(self.tick()) << 32)
    }

    fn at(self, tick: u32) -> QueueEpoch {
        QueueEpoch(u64::from(self.answer()) | u64::from(tick) << 32)
    }
}

/// What a core gets with [`QueueCommand::Rewind`].
pub(crate) struct Setup {
    pub(crate) queue: QueuePair,
    pub(crate) pointers: Pointers,
    pub(crate) rules: Rules,
}

/// One core's queue pair. Each half has cache lines of its own (two: processors fetch them in pairs).
pub(crate) struct CoreQueue {
    /// By the manager.
    word: Padded<AtomicU64>,
    /// By the core: the last word that it has obeyed.
    seen: Padded<AtomicU64>,
    /// The core has dropped its handle, with nothing in flight that it would miss.
    is_closed: AtomicBool,
    /// A command was not ended by its Abort either.
    wants_reset: AtomicBool,
    /// The core has something to repeat that was with the drive before it was reset.
    is_replaying: AtomicBool,
    /// Commands, by CID, that took too long.
    aborts: Lock<Vec<u16>>,
    setup: Lock<Option<Setup>>,
    /// Cores that are to use this one's queue, and that it has not taken over yet.
    sharers: Lock<Vec<Sharer>>,
    has_sharers: AtomicBool,
    /// Cores that have its queue pair in hand: one at most, and those that hang from a time before.
    hosts: AtomicU32,
    /// Of a core that was dropped while the drive had commands of it: until its queue is deleted.
    left: Lock<Option<Left>>,
    /// The same: memory that those commands may use.
    left_memory: Lock<Vec<Arc<Attached>>>,
    /// The pool's, of the function that was open when the core opened the disk.
    mapping: Lock<Option<Box<dyn Mapping>>>,
    /// The namespace.
    pub(crate) nsid: u32,
    /// Commands in flight that the core would like.
    pub(crate) depth: u32,
    /// The core's pool.
    pub(crate) pool: Area,
    /// What stands in front of the namespace.
    pub(crate) fronts: Arc<Fronts>,
    /// Core, for messages.
    pub(crate) core: usize,
    /// The core's memory node.
    pub(crate) node: Option<u32>,
}

#[repr(align(128))]
struct Padded<T>(T);

impl CoreQueue {
    /// On the core's thread.
    pub(crate) fn new(
        core: usize,
        nsid: u32,
        depth: u32,
        pool: Area,
        mapping: Option<Box<dyn Mapping>>,
    ) -> CoreQueue {
        CoreQueue {
            word: Padded(AtomicU64::new(QueueEpoch::FIRST.0)),
            seen: Padded(AtomicU64::new(QueueEpoch::FIRST.0)),
            is_closed: AtomicBool::new(false),
            wants_reset: AtomicBool::new(false),
            is_replaying: AtomicBool::new(false),
            aborts: Lock::new(Vec::new()),
            setup: Lock::new(None),
            sharers: Lock::new(Vec::new()),
            has_sharers: AtomicBool::new(false),
            hosts: AtomicU32::new(0),
            left: Lock::new(None),
            left_memory: Lock::default(),
            mapping: Lock::new(mapping),
            nsid,
            depth,
            pool,
            fronts: Arc::default(),
            core,
            node: current_node(),
        }
    }

    /// The same with what stands in front of the namespace.
    pub(crate) fn with_fronts(self, fronts: Arc<Fronts>) -> CoreQueue {
        CoreQueue { fronts, ..self }
    }

    /// What is ordered now.
    #[inline]
    pub(crate) fn word(&self) -> QueueEpoch {
        QueueEpoch(self.word.0.load(Ordering::Acquire))
    }

    /// The core did what `word` says, and knows its time.
    pub(crate) fn answer(&self, word: QueueEpoch) {
        self.seen.0.store(word.0, Ordering::Release);
    }

    /// The manager's next order. Only the manager calls this and [`CoreQueue::set_tick`].
    pub(crate) fn order(&self, order: QueueCommand) {
        self.word.0.store(self.word().next(order).0, Ordering::Release);
    }

    /// The time.
    pub(crate) fn set_tick(&self, tick: u32) {
        self.word.0.store(self.word().at(tick).0, Ordering::Release);
    }

    /// The core has done what was ordered last, or there is no core any more.
    pub(crate) fn has_answered(&self) -> bool {
        self.is_closed() || self.seen().answer() == self.word().answer()
    }

    /// The core is there, and has not looked at the time for more than `ticks`.
    pub(crate) fn is_behind(&self, ticks: u32) -> bool {
        !self.is_closed() && self.word().tick().wrapping_sub(self.seen().tick()) > ticks
    }

    fn seen(&self) -> QueueEpoch {
        QueueEpoch(self.seen.0.load(Ordering::Acquire))
    }

    /// The core is gone.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// For as long as the manager knows the core_queue: the drive may still do what the core has left with
    /// it.
    pub(crate) fn keep(&self, left: Left) {
        *self.left.lock() = Some(left);
        *self.left_memory.lock() = self.fronts.attached();
    }

    /// The drive has nothing any more of what the core has left with it. Memory that others use, a cache that
    /// other cores fill, stays mapped: the last that keeps it unmaps it.
    pub(crate) fn drop_left(&self) {
        let left = std::mem::take(&mut *self.left_memory.lock());
        // Not under the lock: to unmap takes long.
        drop(left);
    }

    /// True when the core is gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// A command takes too long: it is to be aborted.
    pub(crate) fn ask_abort(&self, cid: u16) {
        self.aborts.lock().push(cid);
    }

    /// The next command to abort.
    pub(crate) fn next_abort(&self) -> Option<u16> {
        self.aborts.lock().pop()
    }

    /// Nothing that was asked for holds any more: the controller was reset.
    pub(crate) fn forget_asked(&self) {
        self.wants_reset.store(false, Ordering::Relaxed);
        self.aborts.lock().clear();
    }

    /// Aborting did not help.
    pub(crate) fn ask_reset(&self) {
        self.wants_reset.store(true, Ordering::Relaxed);
    }

    /// True, once, when a reset was asked for.
    pub(crate) fn take_reset(&self) -> bool {
        self.wants_reset.swap(false, Ordering::Relaxed)
    }

    /// By the core, before it answers [`QueueCommand::Rewind`] and when it has done [`QueueCommand::Replay`].
    pub(crate) fn set_replaying(&self, is_replaying: bool) {
        self.is_replaying.store(is_replaying, Ordering::Release);
    }

    /// It has something to repeat.
    pub(crate) fn is_replaying(&self) -> bool {
        !self.is_closed() && self.is_replaying.load(Ordering::Acquire)
    }

    /// The core is to serve another one's queue pair, from its next look at the time on.
    pub(crate) fn add_sharer(&self, sharer: Sharer) {
        self.sharers.lock().push(sharer);
        self.has_sharers.store(true, Ordering::Release);
    }

    /// Those that were added since.
    pub(crate) fn take_sharers(&self) -> Vec<Sharer> {
        if !self.has_sharers.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut *self.sharers.lock())
    }

    /// By the host's end of its queue pair, when that begins.
    pub(crate) fn add_host(&self) {
        self.hosts.fetch_add(1, Ordering::AcqRel);
    }

    /// And when it ends.
    pub(crate) fn drop_host(&self) {
        self.hosts.fetch_sub(1, Ordering::AcqRel);
    }

    /// Another core has its queue pair in hand.
    pub(crate) fn is_hosted(&self) -> bool {
        self.hosts.load(Ordering::Acquire) > 0
    }

    /// The pool's mapping, once.
    pub(crate) fn take_mapping(&self) -> Option<Box<dyn Mapping>> {
        self.mapping.lock().take()
    }

    /// For the next [`QueueCommand::Rewind`].
    pub(crate) fn put_setup(&self, setup: Option<Setup>) {
        *self.setup.lock() = setup;
    }

    /// What was put.
    pub(crate) fn take_setup(&self) -> Option<Setup> {
        self.setup.lock().take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_order_is_another_word_and_time_changes_no_order() {
        let mut word = QueueEpoch::FIRST;
        assert_eq!((word.order(), word.tick()), (QueueCommand::Wait, 0));
        use QueueCommand::{Absent, Go, Gone, Replay, Rewind, Stop, Wait};
        for order in [Rewind, Replay, Go, Stop, Rewind, Absent, Gone, Wait] {
            let next = word.next(order);
            assert_eq!(next.order(), order);
            assert_ne!(next.answer(), word.answer());
            let later = next.at(u32::MAX);
            assert_eq!((later.answer(), later.tick()), (next.answer(), u32::MAX));
            word = later;
        }
        let last = QueueEpoch(u64::from(u32::MAX)).next(QueueCommand::Go);
        assert_eq!(last.answer(), QueueCommand::Go as u32);
    }
}
