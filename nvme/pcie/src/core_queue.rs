//! [`CoreQueue`]: state of one core's queue pair, shared by the core and the drive's manager.
//!
//! The manager writes the *word*: a [`QueueCommand`], its epoch and the tick. The core applies a changed word
//! in its next poll and answers by storing the same word. A poll loads the word once.

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

/// Command of the manager to a core about its queue pair. `docs/nvme.md` describes the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueCommand {
    /// Queue all requests: the core has no queue pair yet.
    Wait,
    /// Normal operation.
    Go,
    /// Write no doorbell and read no completion.
    Stop,
    /// Queue the commands in flight for another submission and take the new [`Setup`], if there is one. The
    /// drive has none of the core's commands.
    Rewind,
    /// Fail all requests with `Gone` and drop the queue: the drive was replaced, is not supported, is closed,
    /// or no longer has the namespace. The drive has none of the core's commands.
    Gone,
    /// Submit the commands that were in flight before the reset again, and the remaining blocks of begun
    /// requests. Begin no new request.
    Replay,
    /// Fail all requests with `Internal` and drop the queue. Reasons: the drive is away for longer than
    /// `return_timeout`, its removal was requested, the core was left behind, or a sharer has no host. The
    /// drive has none of the core's commands.
    Absent,
}

/// Queue command (3 bits), epoch (29 bits) and manager tick (32 bits), from the lowest bit.
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

    /// Returns the low 32 bits, which a core's answer must match.
    pub(crate) const fn command_and_epoch(self) -> u32 {
        let [a, b, c, d, ..] = self.0.to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    /// Returns the manager's time in ticks of [`TICK_MS`](crate::shared::TICK_MS). The tick wraps.
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

/// Queue pair, data pointers and rules that a core takes with [`QueueCommand::Rewind`].
pub(crate) struct Setup {
    pub(crate) queue: QueuePair,
    pub(crate) pointers: Pointers,
    pub(crate) rules: Rules,
}

/// State of one core's queue pair. `word` and `answered` occupy 128 bytes each, because processors fetch
/// 64-byte cache lines in pairs.
pub(crate) struct CoreQueue {
    /// Written by the manager only.
    word: Padded<AtomicU64>,
    /// The last word that the core applied. Written by the core only.
    answered: Padded<AtomicU64>,
    /// The core has dropped its handle.
    is_closed: AtomicBool,
    /// The core has requested a controller reset: a command did not end after its Abort.
    reset_requested: AtomicBool,
    /// The core still has commands from before a reset, or remaining blocks of requests begun before.
    is_replaying: AtomicBool,
    aborts: Lock<Vec<u16>>,
    setup: Lock<Option<Setup>>,
    /// Sharers that the core has not added to its `SharedQueue` yet.
    sharers: Lock<Vec<Sharer>>,
    has_sharers: AtomicBool,
    /// Number of cores with a [`Sharer`] of this queue: the current host, and former hosts that hang.
    hosts: AtomicU32,
    /// Guard participation of a core that was dropped with commands in flight, until its queue is deleted.
    orphaned_guard: Lock<Option<OrphanedGuard>>,
    /// Cache memory that commands of a dropped core may still access, until its queue is deleted.
    orphaned_memory: Lock<Vec<Arc<CacheArea>>>,
    /// Mapping of `pool`, made when the core opened the disk. `None` if the drive was not open, and after the
    /// manager took the mapping.
    mapping: Lock<Option<Box<dyn Mapping>>>,
    pub(crate) nsid: u32,
    /// Requested maximum number of commands in flight.
    pub(crate) depth: u32,
    pub(crate) pool: Area,
    pub(crate) fronts: Arc<Fronts>,
    /// Index of the core, for logs and for the choice of a sharer's host.
    pub(crate) core: usize,
    /// NUMA node of the core; `None` if unknown.
    pub(crate) node: Option<u32>,
}

#[repr(align(128))]
struct Padded<T>(T);

impl CoreQueue {
    /// Creates a core queue with the initial word. Called on the core's thread, whose NUMA node it records.
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

    /// Stores the core's answer. Called by the core once it has applied `word`.
    pub(crate) fn answer(&self, word: CommandWord) {
        self.answered.0.store(word.0, Ordering::Release);
    }

    /// Publishes a queue command with the next epoch. Only for the manager.
    pub(crate) fn set_queue_command(&self, command: QueueCommand) {
        self.word.0.store(self.word().next(command).0, Ordering::Release);
    }

    pub(crate) fn set_tick(&self, tick: u32) {
        self.word.0.store(self.word().with_tick(tick).0, Ordering::Release);
    }

    /// Returns true if the core has applied the last queue command or is closed.
    pub(crate) fn has_answered(&self) -> bool {
        self.is_closed() || self.answered().command_and_epoch() == self.word().command_and_epoch()
    }

    /// Returns true if the core is open and its last answer is over `ticks` ticks behind the manager's word.
    pub(crate) fn is_unresponsive(&self, ticks: u32) -> bool {
        !self.is_closed() && self.word().tick().wrapping_sub(self.answered().tick()) > ticks
    }

    fn answered(&self) -> CommandWord {
        CommandWord(self.answered.0.load(Ordering::Acquire))
    }

    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Stores the guard participation and the cache memory of a dropped core until its queue is deleted.
    pub(crate) fn keep_orphaned(&self, orphaned_guard: OrphanedGuard) {
        *self.orphaned_guard.lock() = Some(orphaned_guard);
        *self.orphaned_memory.lock() = self.fronts.attached();
    }

    /// Drops the cache memory of a dropped core. Called once the drive has none of the core's commands.
    /// Memory with another owner stays mapped.
    pub(crate) fn drop_orphaned_memory(&self) {
        let memory = std::mem::take(&mut *self.orphaned_memory.lock());
        // Outside the lock: unmapping is slow.
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

    /// Discards the requested Aborts and the requested reset.
    pub(crate) fn clear_requests(&self) {
        self.reset_requested.store(false, Ordering::Relaxed);
        self.aborts.lock().clear();
    }

    pub(crate) fn request_reset(&self) {
        self.reset_requested.store(true, Ordering::Relaxed);
    }

    /// Returns whether a reset was requested, and clears the request.
    pub(crate) fn take_reset_request(&self) -> bool {
        self.reset_requested.swap(false, Ordering::Relaxed)
    }

    /// Sets whether the core still has commands or blocks to submit again. Called by the core before it
    /// answers [`QueueCommand::Rewind`], [`QueueCommand::Gone`] or [`QueueCommand::Absent`], and at each poll
    /// under [`QueueCommand::Replay`].
    pub(crate) fn set_replaying(&self, is_replaying: bool) {
        self.is_replaying.store(is_replaying, Ordering::Release);
    }

    pub(crate) fn is_replaying(&self) -> bool {
        !self.is_closed() && self.is_replaying.load(Ordering::Acquire)
    }

    /// Assigns a sharer to this core. The core adds the sharer when it next applies a changed word under
    /// [`QueueCommand::Go`] or [`QueueCommand::Replay`].
    pub(crate) fn add_sharer(&self, sharer: Sharer) {
        self.sharers.lock().push(sharer);
        self.has_sharers.store(true, Ordering::Release);
    }

    /// Returns the sharers that were assigned since the last call.
    pub(crate) fn take_sharers(&self) -> Vec<Sharer> {
        if !self.has_sharers.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut *self.sharers.lock())
    }

    /// Counts one more host core. Called when a [`Sharer`] of this queue is created.
    pub(crate) fn add_host(&self) {
        self.hosts.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts one host core less. Called when a [`Sharer`] of this queue is dropped.
    pub(crate) fn drop_host(&self) {
        self.hosts.fetch_sub(1, Ordering::AcqRel);
    }

    /// Returns true while a host core has a [`Sharer`] of this queue.
    pub(crate) fn is_hosted(&self) -> bool {
        self.hosts.load(Ordering::Acquire) > 0
    }

    /// Takes the pool's mapping; `None` if the drive was not open, and after the first call.
    pub(crate) fn take_mapping(&self) -> Option<Box<dyn Mapping>> {
        self.mapping.lock().take()
    }

    /// Stores the setup for the next [`QueueCommand::Rewind`]. `None` removes one that the core did not take.
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
