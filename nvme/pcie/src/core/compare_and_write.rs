//! [`GuardView`]: what a core knows of its namespace's guard, and its compare-and-writes.
//!
//! A drive's own fused commands are not used: few drives have them. The guard (`spindle_disk::guard`) keeps
//! every core's other writes off one block while the core that holds it reads, compares and writes.
//!
//! ```text
//!   queued ─── the guard is free: hold ────> clearing ── every core is clear ──> read ── differs ──> Done
//!                                                                                 └─ equal ── write ──> Done
//! ```
//!
//! A command costs nothing for it. A core looks once a poll whether another guard is published (one load of a
//! word that rarely changes). What it has begun before that it has not answered for; from then on, until the
//! guard goes, it begins nothing between polls (its `limit` is 0, as where it serves sharers) and in a poll
//! nothing that changes the guarded block. It answers when nothing of that kind is begun any more, on the
//! drive or to be repeated there. So the holder of the guard waits for one poll of each core that works.
//!
//! A core that had nothing to do in a poll *rests*: its line at the guard says that nothing is in flight, so
//! no holder waits for it, whether it sleeps or hangs. It begins nothing before it has said that this is over
//! and looked at the guard, in that order.
//!
//! What ends it: a core whose writes do not end, as one that hangs, is waited for twice as long as a command
//! may take; then the compare-and-write fails, and the guard goes. After a reset what was being read or
//! written for it is repeated as any command, with the guard held. One whose submitter is gone is not
//! written. What a core leaves with the drive when it is dropped keeps its place at the guard until the
//! drive's queue is deleted: [`Left`].

use std::sync::Arc;

use spindle_disk::compare_and_write::{BLOCK_BYTES_MAX, CompareAndWrite, CompareAndWriteQueue};
use spindle_disk::guard::{GuardParticipant, Guarded, Hold};
use spindle_disk::{BlockRange, Disk, DiskError, Done, Owner, Token};
use spindle_reactor::mem::Buf;

use super::{NvmeCore, Request};
use crate::core_queue::QueueCommand;
use crate::entry::Task;

/// What a core knows of its namespace's guard, and its compare-and-writes. See the module.
pub(super) struct GuardView {
    pub(super) pairs: CompareAndWriteQueue,
    /// The guard's generation at the last look.
    seen: u64,
    /// The guard that was published then.
    guarded: Option<Guarded>,
    /// Not at rest: commands may be begun.
    is_awake: bool,
}

impl GuardView {
    pub(super) fn new(participant: GuardParticipant) -> GuardView {
        let pairs = CompareAndWriteQueue::new(participant);
        let mut view = GuardView { pairs, seen: 0, guarded: None, is_awake: false };
        view.look();
        view
    }

    fn participant(&self) -> &GuardParticipant {
        self.pairs.participant()
    }

    /// Another guard is published than at the last look, or none any more.
    #[inline]
    pub(super) fn has_changed(&self) -> bool {
        self.participant().generation() != self.seen
    }

    /// The generation first: should another come in between, the next look finds that it has.
    fn look(&mut self) {
        self.seen = self.participant().generation();
        self.guarded = self.participant().guarded();
    }

    /// A turn is a usual one: what comes may be begun as it comes.
    fn is_usual(&self) -> bool {
        self.is_awake && self.guarded.is_none() && self.pairs.is_empty()
    }

    fn wake(&mut self) {
        if !self.is_awake {
            self.is_awake = true;
            self.participant().enter_all();
            self.look();
        }
    }
}

/// How a compare-and-write ends.
fn done(pair: CompareAndWrite, result: Result<(), DiskError>) -> Done {
    Done { token: pair.token, result, buf: pair.data }
}

/// What a core that is dropped leaves at the guard while the drive may still write for it.
pub(crate) struct Left {
    participant: Arc<GuardParticipant>,
    hold: Option<Hold>,
}

impl Drop for Left {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            self.participant.release(hold);
        }
    }
}

impl NvmeCore {
    /// See [`Disk::compare_and_write`].
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
        let error = if let Some(error) = self.absence() {
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

    /// Commands that may be begun between polls: none where a turn is not the usual one.
    pub(super) fn limit_between(&self) -> usize {
        let is_usual =
            self.word.order() == QueueCommand::Go && self.shared_queue.is_none() && self.guard.is_usual();
        let depth = self.setup.as_ref().map_or(0, |setup| setup.queue.layout().depth());
        if is_usual { usize::from(depth) } else { 0 }
    }

    /// Another guard is published, or none any more.
    #[cold]
    #[inline(never)]
    pub(super) fn look_at_guard(&mut self) {
        self.guard.look();
        self.limit = self.limit_between();
    }

    /// A command has come, which may be begun at once although the core was at rest.
    pub(super) fn wake_for_command(&mut self) {
        if !self.guard.is_awake && self.word.order() == QueueCommand::Go {
            self.guard.wake();
            self.limit = self.limit_between();
        }
    }

    /// Nothing is begun or waits.
    fn is_idle(&self) -> bool {
        self.commands.len() == 0
            && self.requests.is_empty()
            && self.pending.is_empty()
            && self.guard.pairs.is_empty()
    }

    /// No holder has to wait for this core, if there is nothing to wait for.
    #[cold]
    #[inline(never)]
    pub(super) fn rest(&mut self) {
        if self.guard.is_awake && self.is_idle() {
            self.guard.is_awake = false;
            self.guard.participant().leave();
            self.limit = 0;
        }
    }

    /// Says that nothing that was begun here changes the guarded block, when that is so.
    pub(super) fn answer_guard(&mut self) {
        let is_new = |guarded: &Guarded| !self.guard.participant().has_answered(*guarded);
        let Some(guarded) = self.guard.guarded.filter(is_new) else { return };
        let mut whole = self.commands.iter().filter(|command| command.request.is_none());
        let is_changing = whole.any(|command| Task::Op(command.op).changes() && guarded.is_in(command.range))
            || self.requests.iter().any(|(_, request)| request.is_kept_off(guarded));
        if !is_changing {
            self.guard.participant().answer(guarded);
        }
    }

    /// The core may begin something in this turn.
    pub(super) fn wake_for_turn(&mut self) -> bool {
        if !self.guard.is_awake && !self.is_idle() {
            self.guard.wake();
        }
        self.guard.is_awake
    }

    /// Begin what waits, as far as there is room and the guard lets it.
    pub(super) fn step_apart(&mut self) {
        let Some(guarded) = self.guard.guarded else { return self.step_waiting() };
        if !self.step_begun() {
            return;
        }
        // All the way round: the others keep their order.
        for _ in 0..self.pending.len() {
            let Some(request) = self.pending.pop_front() else { break };
            let has_room = self.requests.len() < self.requests_max && self.has_room();
            if has_room && !request.is_kept_off(guarded) {
                self.begin(request);
            } else {
                self.pending.push_back(request);
            }
        }
    }

    /// The next step of a compare-and-write of which the drive has nothing.
    pub(super) fn step_compare_and_write(&mut self) {
        if self.guard.pairs.is_empty() {
            return;
        }
        self.guard.pairs.hold_next();
        if let Some(read) = self.guard.pairs.begin_read() {
            let done = self.start_compare_and_write(false, read);
            return self.ready.extend(done);
        }
        // A write that has to be aborted, and one that costs a reset, have ended by then.
        let (now, most) = (self.word.tick(), self.shared.limits().command_ticks.saturating_mul(2));
        let is_over = |pair: &CompareAndWrite| now.wrapping_sub(pair.since) > most;
        while let Some(pair) = self.guard.pairs.take_where(is_over) {
            let (drive, core) = (&self.shared.address, self.core_queue.core);
            tracing::warn!(%drive, core, "a compare-and-write fails: writes to its block do not end");
            self.ready.push_back(done(pair, Err(DiskError::Internal)));
        }
    }

    /// The block is to be read or written, before anything else.
    fn start_compare_and_write(
        &mut self,
        is_write: bool,
        (token, range, buf): (Token, BlockRange, Buf),
    ) -> Option<Done> {
        let (task, lba, buf) = (Task::CompareAndWrite { is_write }, range.lba, Some(buf));
        let request = Request { token, task, left: range, lba, buf, outstanding: 0, result: Ok(()) };
        match self.requests.insert(request) {
            Ok(slot) => {
                self.partial.push_front(slot);
                None
            }
            // There is room for it, by their numbers.
            Err(_) => self.finish_compare_and_write(None, Err(DiskError::Internal)),
        }
    }

    /// The block was read or written, or not.
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
        // What a drive says of a read or a write is not what we say of the pair.
        let is_strange = result == Err(DiskError::CompareDiffers);
        let result = if is_strange { Err(DiskError::Internal) } else { result };
        self.finish_compare_and_write(request.buf.filter(|_| is_write), result)
    }

    /// The active one has ended: the guard goes.
    fn finish_compare_and_write(&mut self, data: Option<Buf>, result: Result<(), DiskError>) -> Option<Done> {
        self.guard.pairs.finish(data).map(|pair| done(pair, result))
    }

    /// Those of which the drive has nothing end so: all, or those of `owner`.
    pub(super) fn end_compare_and_writes(&mut self, owner: Option<Owner>, error: DiskError) {
        let is_over = |pair: &CompareAndWrite| owner.is_none_or(|owner| pair.token.owner() == owner);
        while let Some(pair) = self.guard.pairs.take_where(is_over) {
            self.ready.push_back(done(pair, Err(error)));
        }
    }

    /// The core is dropped with commands at the drive.
    pub(super) fn leave_at_guard(&mut self) {
        let (participant, hold) = (Arc::clone(self.guard.pairs.participant()), self.guard.pairs.take_hold());
        self.core_queue.keep(Left { participant, hold });
    }
}

impl Request {
    /// It changes the guarded block, and is not what the guard is for.
    fn is_kept_off(&self, guarded: Guarded) -> bool {
        if !self.task.changes() {
            return false;
        }
        // What is left ends where all of it does, also when nothing is.
        let blocks = (self.left.lba + u64::from(self.left.blocks)).saturating_sub(self.lba);
        guarded.is_in(BlockRange { lba: self.lba, blocks: u32::try_from(blocks).unwrap_or(u32::MAX) })
    }
}
