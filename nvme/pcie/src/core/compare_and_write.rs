//! [`GuardView`]: one core's view of its namespace's guard, and its compare-and-writes.
//!
//! Fused commands of the drive are not used, because few drives support them. The guard
//! (`spindle_target_disk::guard`) excludes all other writes of one block, on every core, while its owner
//! reads, compares and writes.
//!
//! ```text
//!   queued ─── guard free: take it ────────> clearing ── all cores answered ───> read ── differs ──> Done
//!                                                                                 └─ equal ── write ──> Done
//! ```
//!
//! Other commands do not pay for the guard. Once in each poll a core checks whether the guard has changed:
//! one load of a word that rarely changes. While a guard is active, the core submits nothing between polls
//! (`limit` is 0, as with sharers). In a poll the core begins no request that changes the guarded block. The
//! core answers the guard once none of its commands and begun requests changes that block. So the guard's
//! owner waits for at least one poll of each working core.
//!
//! A core without work in a poll *rests*: its entry in the guard counts nothing in flight. The guard's owner
//! does not wait for a resting core, whether the core sleeps or hangs. Before its next command the core
//! enters the guard again and then reads the guard, in this order.
//!
//! Limits:
//! - A compare-and-write fails if its read has not begun within twice the time limit of a command, because
//!   writes of other cores or another compare-and-write do not end.
//! - After a reset, the read or write is repeated as any command, and the guard stays taken. Before the read,
//!   the guard is released and taken again.
//! - A compare-and-write that its submitter cancels before the write writes nothing.
//! - A core that is dropped with commands in flight keeps its entry in the guard until the drive's queue is
//!   deleted: [`OrphanedGuard`].

use std::sync::Arc;

use spindle_reactor::mem::Buf;
use spindle_target_disk::compare_and_write::{BLOCK_BYTES_MAX, CompareAndWrite, CompareAndWriteQueue};
use spindle_target_disk::guard::{GuardParticipant, Guarded, Hold};
use spindle_target_disk::{BlockRange, DiskChannel, DiskError, Done, Owner, Token};

use super::{NvmeChannel, Request};
use crate::core_queue::QueueCommand;
use crate::entry::Task;

pub(super) struct GuardView {
    pub(super) pairs: CompareAndWriteQueue,
    /// The guard's generation when `guarded` was read.
    generation: u64,
    /// The guarded block; `None` without a guard.
    guarded: Option<Guarded>,
    /// False while the core is at rest. The core must then call `wake` before it submits.
    is_awake: bool,
}

impl GuardView {
    pub(super) fn new(participant: GuardParticipant) -> GuardView {
        let pairs = CompareAndWriteQueue::new(participant);
        let mut view = GuardView { pairs, generation: 0, guarded: None, is_awake: false };
        view.refresh();
        view
    }

    fn participant(&self) -> &GuardParticipant {
        self.pairs.participant()
    }

    /// Returns true if the guard has changed since `guarded` was read.
    #[inline]
    pub(super) fn has_changed(&self) -> bool {
        self.participant().generation() != self.generation
    }

    /// Reads the guard. The generation is read first: a change in between makes `has_changed` true.
    fn refresh(&mut self) {
        self.generation = self.participant().generation();
        self.guarded = self.participant().guarded();
    }

    /// Returns true if the guard and this core's compare-and-writes allow commands between polls.
    fn is_clear(&self) -> bool {
        self.is_awake && self.guarded.is_none() && self.pairs.is_empty()
    }

    fn wake(&mut self) {
        if !self.is_awake {
            self.is_awake = true;
            self.participant().enter_all();
            self.refresh();
        }
    }
}

fn done(pair: CompareAndWrite, result: Result<(), DiskError>) -> Done {
    Done { token: pair.token, result, buf: pair.data }
}

/// Guard participation of a core that was dropped with commands in flight. Kept until the drive can no longer
/// write for that core.
pub(crate) struct OrphanedGuard {
    participant: Arc<GuardParticipant>,
    hold: Option<Hold>,
}

impl Drop for OrphanedGuard {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            self.participant.release(hold);
        }
    }
}

impl NvmeChannel {
    #[cold]
    pub(super) fn submit_compare_and_write(
        &mut self,
        token: Token,
        range: BlockRange,
        expected: Buf,
        data: Buf,
    ) -> Option<Done> {
        let bytes = 1 << self.rules().shift;
        let is_one_block = range.blocks == 1 && expected.len() == bytes && data.len() == bytes;
        let error = if let Some(error) = self.absence_error() {
            Some(error)
        } else if !self.geometry().can_compare_and_write {
            Some(DiskError::WriteProtected)
        } else if !is_one_block || bytes > BLOCK_BYTES_MAX {
            Some(DiskError::Internal)
        } else {
            None
        };
        if let Some(error) = error {
            return Some(Done { token, result: Err(error), buf: Some(data) });
        }
        let since = self.word.tick();
        self.guard.pairs.push(CompareAndWrite::new(token, range, expected, data, since));
        self.limit = 0;
        None
    }

    /// Returns `limit` for the time between polls: 0 unless the queue command is `Go`, there are no sharers,
    /// and the guard is clear.
    pub(super) fn limit_between(&self) -> usize {
        let is_clear = self.word.queue_command() == QueueCommand::Go
            && self.shared_queue.is_none()
            && self.guard.is_clear();
        let depth = self.setup.as_ref().map_or(0, |setup| setup.queue.layout().depth());
        if is_clear { usize::from(depth) } else { 0 }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn refresh_guard(&mut self) {
        self.guard.refresh();
        self.limit = self.limit_between();
    }

    /// Ends the rest of a core under `Go`, so that the request being submitted can start in this turn.
    pub(super) fn wake_for_command(&mut self) {
        if !self.guard.is_awake && self.word.queue_command() == QueueCommand::Go {
            self.guard.wake();
            self.limit = self.limit_between();
        }
    }

    fn is_idle(&self) -> bool {
        self.commands.len() == 0
            && self.requests.is_empty()
            && self.pending.is_empty()
            && self.guard.pairs.is_empty()
    }

    /// Leaves the guard if the core is idle, so that the guard's owner does not wait for the core.
    #[cold]
    #[inline(never)]
    pub(super) fn rest(&mut self) {
        if self.guard.is_awake && self.is_idle() {
            self.guard.is_awake = false;
            self.guard.participant().leave();
            self.limit = 0;
        }
    }

    /// Answers the guard once no command or begun request of this core changes the guarded block.
    pub(super) fn answer_guard(&mut self) {
        let is_new = |guarded: &Guarded| !self.guard.participant().has_answered(*guarded);
        let Some(guarded) = self.guard.guarded.filter(is_new) else { return };
        let mut whole = self.commands.iter().filter(|command| command.request.is_none());
        let is_changing = whole
            .any(|command| Task::Op(command.op).changes_blocks() && guarded.is_in(command.range))
            || self.requests.iter().any(|(_, request)| request.conflicts_with(guarded));
        if !is_changing {
            self.guard.participant().answer(guarded);
        }
    }

    /// Ends the rest of a core that has requests. Returns whether the core is awake.
    pub(super) fn wake_for_turn(&mut self) -> bool {
        if !self.guard.is_awake && !self.is_idle() {
            self.guard.wake();
        }
        self.guard.is_awake
    }

    /// As `submit_waiting`, but skips pending requests that change the guarded block.
    pub(super) fn submit_guarded(&mut self) {
        let Some(guarded) = self.guard.guarded else { return self.submit_waiting() };
        if !self.submit_begun() {
            return;
        }
        // Visits every entry once, so that the skipped requests keep their order.
        for _ in 0..self.pending.len() {
            let Some(request) = self.pending.pop_front() else { break };
            let has_room = self.requests.len() < self.requests_max && self.has_room();
            if has_room && !request.conflicts_with(guarded) {
                self.begin_request(request);
            } else {
                self.pending.push_back(request);
            }
        }
    }

    /// Takes the guard for the next compare-and-write, and starts the read once no other core writes to the
    /// block. Otherwise fails compare-and-writes that have waited for twice the time limit of a command.
    pub(super) fn step_compare_and_write(&mut self) {
        if self.guard.pairs.is_empty() {
            return;
        }
        self.guard.pairs.hold_next();
        if let Some(read) = self.guard.pairs.begin_read() {
            let done = self.start_compare_and_write(false, read);
            return self.finished.extend(done);
        }
        // Twice the limit, because a write may end only after its Abort or a reset.
        let (now, most) = (self.word.tick(), self.shared.limits().command_ticks.saturating_mul(2));
        let is_over = |pair: &CompareAndWrite| now.wrapping_sub(pair.since) > most;
        while let Some(pair) = self.guard.pairs.take_where(is_over) {
            let (drive, core) = (&self.shared.address, self.core_queue.core);
            tracing::warn!(%drive, core, "compare-and-write failed: earlier writes to its block do not end");
            self.finished.push_back(done(pair, Err(DiskError::Internal)));
        }
    }

    /// Queues the active compare-and-write's read (`is_write`: write) ahead of all requests with blocks left.
    fn start_compare_and_write(
        &mut self,
        is_write: bool,
        (token, range, buf): (Token, BlockRange, Buf),
    ) -> Option<Done> {
        let (task, lba, buf) = (Task::CompareAndWrite { is_write }, range.lba, Some(buf));
        let request = Request { token, task, remaining: range, lba, buf, outstanding: 0, result: Ok(()) };
        match self.requests.insert(request) {
            Ok(slot) => {
                self.partial.push_front(slot);
                None
            }
            // Does not happen: `requests` has one slot for the active compare-and-write.
            Err(_) => self.finish_compare_and_write(None, Err(DiskError::Internal)),
        }
    }

    /// Continues a compare-and-write after its read: starts the write, or ends with `CompareDiffers`. After
    /// the write or a failure, ends the compare-and-write.
    #[cold]
    pub(super) fn end_compare_and_write(
        &mut self,
        request: Request,
        is_write: bool,
        result: Result<(), DiskError>,
    ) -> Option<Done> {
        if let (false, Ok(()), Some(read)) = (is_write, result, &request.buf) {
            return match self.guard.pairs.begin_write(read) {
                Some(write) => self.start_compare_and_write(true, write),
                None => self.finish_compare_and_write(None, Err(DiskError::CompareDiffers)),
            };
        }
        // A drive's Compare Failure for a plain read or write must not be reported as a difference.
        let is_strange = result == Err(DiskError::CompareDiffers);
        let result = if is_strange { Err(DiskError::Internal) } else { result };
        self.finish_compare_and_write(request.buf.filter(|_| is_write), result)
    }

    /// Ends the active compare-and-write and releases the guard.
    fn finish_compare_and_write(&mut self, data: Option<Buf>, result: Result<(), DiskError>) -> Option<Done> {
        self.guard.pairs.finish(data).map(|pair| done(pair, result))
    }

    /// Ends with `error` all compare-and-writes whose read has not begun. With `owner`, only its own.
    pub(super) fn end_compare_and_writes(&mut self, owner: Option<Owner>, error: DiskError) {
        let is_over = |pair: &CompareAndWrite| owner.is_none_or(|owner| pair.token.owner() == owner);
        while let Some(pair) = self.guard.pairs.take_where(is_over) {
            self.finished.push_back(done(pair, Err(error)));
        }
    }

    /// Hands the guard participation of a core that is dropped with commands in flight to the core queue.
    pub(super) fn hand_over_guard(&mut self) {
        let (participant, hold) = (Arc::clone(self.guard.pairs.participant()), self.guard.pairs.take_hold());
        self.core_queue.keep_orphaned(OrphanedGuard { participant, hold });
    }
}

impl Request {
    /// Returns true if the request changes the guarded block and is not the guard's own write.
    fn conflicts_with(&self, guarded: Guarded) -> bool {
        if !self.task.changes_blocks() {
            return false;
        }
        // `remaining` ends where the request ends; after a failure, where the blocks with a command end.
        let blocks = (self.remaining.lba + u64::from(self.remaining.blocks)).saturating_sub(self.lba);
        guarded.is_in(BlockRange { lba: self.lba, blocks: u32::try_from(blocks).unwrap_or(u32::MAX) })
    }
}
