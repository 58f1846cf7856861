//! [`CoreQueue`]: state of one queue pair that a core and the drive's manager share.
//!
//! The manager writes the *word* (a [`QueueCommand`], its epoch and the tick). The core applies it in its
//! next poll and answers by storing the same word. In steady state the core loads the word once a turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use spindle_reactor::affinity::current_node;
use spindle_reactor::lock::Lock;
use spindle_reactor::mem::Area;

use crate::core::OrphanedGuard;
use crate::fronts::{CacheArea, Fronts};
use crate::function::Mapping;
use crate::pointers::Pointers;
use crate::queue::QueuePair;
use crate::rules::Rules;
use crate::shared_queue::Sharer;

/// What a core may do with its queue pair. `docs/nvme.md` has the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueCommand {
    /// Requests wait: there are no queues yet.
    Wait,
    /// Normal operation.
    Go,
    /// Write no doorbell and read no completion.
    Stop,
    /// The drive reaches no memory: queue the commands in flight for another submission and take the new
    /// [`Setup`], if there is one.
    Rewind,
    /// Fail all requests with `Gone`, drop the queue: the drive was replaced, does not fit, is closed, or has
    /// no such namespace any more. The drive has none of the core's commands.
    Gone,
    /// Submit the commands that were in flight before the reset again, and the remaining blocks of requests
    /// that had begun. Begin no request.
    Replay,
    /// Fail all requests with `Internal`, drop the queue: the drive is away for longer than `return_timeout`
    /// or its removal was requested, or the core was left behind or, as a sharer, has no host. The drive has
    /// none of the core's commands.
    Absent,
}

/// Command (3 bits), epoch (29 bits), manager tick (32 bits).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CommandWord(u64);

impl CommandWord {
    /// Initial word of every core queue: [`QueueCommand::Wait`], epoch 0, tick 0.
    pub(crate) const INITIAL: CommandWord = CommandWord(0);
    const COMMAND_BITS: u32 = 3;

    pub(crate) fn queue_command(self) -> QueueCommand {
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

    /// The low 32 bits, which a core's answer must match.
    pub(crate) const fn command_and_epoch(self) -> u32 {
        let [a, b, c, d, ..] = self.0.to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    /// Time in ticks of [`TICK_MS`](crate::shared::TICK_MS).
    pub(crate) fn tick(self) -> u32 {
        let [.., e, f, g, h] = self.0.to_le_bytes();
        u32::from_le_bytes([e, f, g, h])
    }

    fn next(self, command: QueueCommand) -> CommandWord {
        let epoch = self.command_and_epoch() >> Self::COMMAND_BITS;
        let low = epoch.wrapping_add(1) << Self::COMMAND_BITS | command as u32;
        CommandWord(u64::from(low) | u64::from(self.tick()) << 32)
    }

    fn with_tick(self, tick: u32) -> CommandWord {
        CommandWord(u64::from(self.command_and_epoch()) | u64::from(tick) << 32)
    }
}

/// The queue that a core takes with [`QueueCommand::Rewind`].
pub(crate) struct Setup {
    pub(crate) queue: QueuePair,
    pub(crate) pointers: Pointers,
    pub(crate) rules: Rules,
}

/// State of one core's queue pair. `word` and `answered` have two cache lines each, as processors fetch lines
/// in pairs.
pub(crate) struct CoreQueue {
    /// Written by the manager only.
    word: Padded<AtomicU64>,
    /// The last word that the core applied. Written by the core only.
    answered: Padded<AtomicU64>,
    /// The core has dropped its handle.
    is_closed: AtomicBool,
    /// A command did not end after its Abort: the manager resets the controller.
    reset_requested: AtomicBool,
    /// The core still repeats commands that were in flight before a reset.
    is_replaying: AtomicBool,
    /// CIDs of commands to abort.
    aborts: Lock<Vec<u16>>,
    setup: Lock<Option<Setup>>,
    /// Sharers that the core has not added to its `SharedQueue` yet.
    sharers: Lock<Vec<Sharer>>,
    has_sharers: AtomicBool,
    /// Host cores with a [`Sharer`] of this queue: at most one, plus hosts that hang since an earlier
    /// assignment.
    hosts: AtomicU32,
    /// Guard participation of a core that was dropped with commands in flight, until its queue is deleted.
    orphaned_guard: Lock<Option<OrphanedGuard>>,
    /// Cache memory that commands of a dropped core may still access, until its queue is deleted.
    orphaned_memory: Lock<Vec<Arc<CacheArea>>>,
    /// Mapping of `pool` from when the core opened the disk, if the drive was open; the manager takes it.
    mapping: Lock<Option<Box<dyn Mapping>>>,
    pub(crate) nsid: u32,
    /// Requested number of commands in flight.
    pub(crate) depth: u32,
    /// Memory of the core's buffers.
    pub(crate) pool: Area,
    /// Memory of the cache in front of the namespace.
    pub(crate) fronts: Arc<Fronts>,
    /// Core number, for logs and for choosing a sharer's host.
    pub(crate) core: usize,
    /// NUMA node of the core; `None` if unknown.
    pub(crate) node: Option<u32>,
}

#[repr(align(128))]
struct Padded<T>(T);

impl CoreQueue {
    /// Called on the core's thread, whose NUMA node it records.
    pub(crate) fn new(
        core: usize,
        nsid: u32,
        depth: u32,
        pool: Area,
        mapping: Option<Box<dyn Mapping>>,
    ) -> CoreQueue {
        CoreQueue {
            word: Padded(AtomicU64::new(CommandWord::INITIAL.0)),
            answered: Padded(AtomicU64::new(CommandWord::INITIAL.0)),
            is_closed: AtomicBool::new(false),
            reset_requested: AtomicBool::new(false),
            is_replaying: AtomicBool::new(false),
            aborts: Lock::new(Vec::new()),
            setup: Lock::new(None),
            sharers: Lock::new(Vec::new()),
            has_sharers: AtomicBool::new(false),
            hosts: AtomicU32::new(0),
            orphaned_guard: Lock::new(None),
            orphaned_memory: Lock::default(),
            mapping: Lock::new(mapping),
            nsid,
            depth,
            pool,
            fronts: Arc::default(),
            core,
            node: current_node(),
        }
    }

    pub(crate) fn with_fronts(self, fronts: Arc<Fronts>) -> CoreQueue {
        CoreQueue { fronts, ..self }
    }

    #[inline]
    pub(crate) fn word(&self) -> CommandWord {
        CommandWord(self.word.0.load(Ordering::Acquire))
    }

    /// Called by the core once it has applied `word`.
    pub(crate) fn answer(&self, word: CommandWord) {
        self.answered.0.store(word.0, Ordering::Release);
    }

    /// Publishes the next queue command. Only the manager calls this and [`CoreQueue::set_tick`].
    pub(crate) fn set_queue_command(&self, command: QueueCommand) {
        self.word.0.store(self.word().next(command).0, Ordering::Release);
    }

    pub(crate) fn set_tick(&self, tick: u32) {
        self.word.0.store(self.word().with_tick(tick).0, Ordering::Release);
    }

    /// True if the core has applied the last queue command or is closed.
    pub(crate) fn has_answered(&self) -> bool {
        self.is_closed() || self.answered().command_and_epoch() == self.word().command_and_epoch()
    }

    /// True if the core is open and its last answer is more than `ticks` ticks behind the manager's word.
    pub(crate) fn is_unresponsive(&self, ticks: u32) -> bool {
        !self.is_closed() && self.word().tick().wrapping_sub(self.answered().tick()) > ticks
    }

    fn answered(&self) -> CommandWord {
        CommandWord(self.answered.0.load(Ordering::Acquire))
    }

    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Keeps the guard participation and cache memory of a dropped core until its queue is deleted.
    pub(crate) fn keep_orphaned(&self, orphaned_guard: OrphanedGuard) {
        *self.orphaned_guard.lock() = Some(orphaned_guard);
        *self.orphaned_memory.lock() = self.fronts.attached();
    }

    /// Drops the cache memory of a dropped core. Called once the drive cannot access it for that core any
    /// more. Memory that has another owner stays mapped.
    pub(crate) fn drop_orphaned_memory(&self) {
        let memory = std::mem::take(&mut *self.orphaned_memory.lock());
        // Unmapping is slow, so it happens outside the lock.
        drop(memory);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Requests an Abort of a command that exceeded its time limit.
    pub(crate) fn request_abort(&self, cid: u16) {
        self.aborts.lock().push(cid);
    }

    pub(crate) fn next_abort(&self) -> Option<u16> {
        self.aborts.lock().pop()
    }

    /// Discards requested Aborts and resets: the queue they were for no longer exists.
    pub(crate) fn clear_requests(&self) {
        self.reset_requested.store(false, Ordering::Relaxed);
        self.aborts.lock().clear();
    }

    /// Requests a controller reset.
    pub(crate) fn request_reset(&self) {
        self.reset_requested.store(true, Ordering::Relaxed);
    }

    /// True once after [`CoreQueue::request_reset`].
    pub(crate) fn take_reset_request(&self) -> bool {
        self.reset_requested.swap(false, Ordering::Relaxed)
    }

    /// Called by the core before it answers [`QueueCommand::Rewind`], [`QueueCommand::Gone`] or
    /// [`QueueCommand::Absent`], and at each poll under [`QueueCommand::Replay`].
    pub(crate) fn set_replaying(&self, is_replaying: bool) {
        self.is_replaying.store(is_replaying, Ordering::Release);
    }

    pub(crate) fn is_replaying(&self) -> bool {
        !self.is_closed() && self.is_replaying.load(Ordering::Acquire)
    }

    /// Assigns a sharer to this core, which adds it when it next applies a changed word under
    /// [`QueueCommand::Go`] or [`QueueCommand::Replay`].
    pub(crate) fn add_sharer(&self, sharer: Sharer) {
        self.sharers.lock().push(sharer);
        self.has_sharers.store(true, Ordering::Release);
    }

    /// Sharers that were assigned since the last call.
    pub(crate) fn take_sharers(&self) -> Vec<Sharer> {
        if !self.has_sharers.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut *self.sharers.lock())
    }

    /// Called when a [`Sharer`] of this queue is created.
    pub(crate) fn add_host(&self) {
        self.hosts.fetch_add(1, Ordering::AcqRel);
    }

    /// Called when a [`Sharer`] of this queue is dropped.
    pub(crate) fn drop_host(&self) {
        self.hosts.fetch_sub(1, Ordering::AcqRel);
    }

    /// True while a host core has a [`Sharer`] of this queue.
    pub(crate) fn is_hosted(&self) -> bool {
        self.hosts.load(Ordering::Acquire) > 0
    }

    /// The pool's mapping; `None` if there was none, and after the first call.
    pub(crate) fn take_mapping(&self) -> Option<Box<dyn Mapping>> {
        self.mapping.lock().take()
    }

    /// Stores the queue for the next [`QueueCommand::Rewind`]; `None` removes one that was not taken.
    pub(crate) fn put_setup(&self, setup: Option<Setup>) {
        *self.setup.lock() = setup;
    }

    pub(crate) fn take_setup(&self) -> Option<Setup> {
        self.setup.lock().take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_order_is_another_word_and_time_changes_no_order() {
        let mut word = CommandWord::INITIAL;
        assert_eq!((word.queue_command(), word.tick()), (QueueCommand::Wait, 0));
        use QueueCommand::{Absent, Go, Gone, Replay, Rewind, Stop, Wait};
        for order in [Rewind, Replay, Go, Stop, Rewind, Absent, Gone, Wait] {
            let next = word.next(order);
            assert_eq!(next.queue_command(), order);
            assert_ne!(next.command_and_epoch(), word.command_and_epoch());
            let later = next.with_tick(u32::MAX);
            assert_eq!((later.command_and_epoch(), later.tick()), (next.command_and_epoch(), u32::MAX));
            word = later;
        }
        let last = CommandWord(u64::from(u32::MAX)).next(QueueCommand::Go);
        assert_eq!(last.command_and_epoch(), QueueCommand::Go as u32);
    }
}
