//! [`Gate`]: a core's place at its namespace's guard, and its compare-and-writes.
//!
//! A drive's own fused commands are not used: few drives have them. The guard (`spindle_disk::guard`) keeps
//! every core's other writes off one block while the core that holds it reads, compares and writes.
//!
//! ```text
//!   queued ── nobody else compares: hold ──> clearing ── every core is clear ──> read ── differs ──> Done
//!                                                                                 └─ equal ── write ──> Done
//! ```
//!
//! A command costs nothing for it. A core looks once a poll whether another guard is published (one load of a
//! word that nobody changes). What it has begun before that it has not answered for; from then on, until the
//! guard goes, it begins nothing between polls (its `limit` is 0, as where it serves guests) and in a poll
//! nothing that changes the guarded block. It answers when nothing of that kind is begun any more, on the
//! drive or to be repeated there. So whoever holds the guard waits for one poll of each core that works.
//!
//! A core that had nothing to do in a poll *rests*: its line at the guard says that nothing is in flight, so
//! nobody waits for it, whether it sleeps or hangs. It begins nothing before it has said that this is over
//! and looked at the guard, in that order.
//!
//! What ends it: a core whose writes do not end, as one that hangs, is waited for twice as long as a command
//! may take; then the compare-and-write fails, and the guard goes. After a reset what was being read or
//! written for it is repeated as any command, with the guard held. One whose submitter is gone is not
//! written. What a core leaves with the drive when it is dropped keeps its place at the guard until the
//! drive's queue is deleted: [`Left`].

use std::collections::VecDeque;
use std::sync::Arc;

use spindle_disk::guard::{self, Guarded, Hold};
use spindle_disk::{BlockRange, Disk, DiskError, Done, Owner, Token};
use spindle_reactor::mem::Buf;

use super::{NvmeCore, Request};
use crate::entry::Task;
use crate::member::Order;

/// The largest block.
const BLOCK_BYTES_MAX: usize = 4096;

/// A compare-and-write.
struct Swap {
    token: Token,
    range: BlockRange,
    /// What is expected; its buffer is the one to read into. `None` from the read on.
    expected: Option<Buf>,
    /// `None` while it is being written.
    data: Option<Buf>,
    /// The tick at which it came.
    since: u32,
}

/// See the module.
pub(super) struct Gate {
    place: Arc<guard::Member>,
    /// The guard's generation at the last look.
    seen: u64,
    /// The guard that was published then.
    guarded: Option<Guarded>,
    /// Not at rest: commands may be begun.
    is_awake: bool,
    queue: VecDeque<Swap>,
    /// The one that holds the guard.
    active: Option<(Swap, Hold)>,
    /// What that one expects: a pair takes no third buffer.
    expected: Box<[u8; BLOCK_BYTES_MAX]>,
}

impl Gate {
    pub(super) fn new(place: guard::Member) -> Gate {
        let mut gate = Gate {
            place: Arc::new(place),
            seen: 0,
            guarded: None,
            is_awake: false,
            queue: VecDeque::with_capacity(16),
            active: None,
            expected: Box::new([0; BLOCK_BYTES_MAX]),
        };
        gate.look();
        gate
    }

    /// Another guard is published than at the last look, or none any more.
    #[inline]
    pub(super) fn has_changed(&self) -> bool {
        self.place.generation() != self.seen
    }

    /// The generation first: should another come in between, the next look finds that it has.
    fn look(&mut self) {
        self.seen = self.place.generation();
        self.guarded = self.place.guarded();
    }

    /// A turn is a usual one: what comes may be begun as it comes.
    fn is_usual(&self) -> bool {
        self.is_awake && self.guarded.is_none() && self.len() == 0
    }

    /// Compare-and-writes that have not ended.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.queue.len() + usize::from(self.active.is_some())
    }

    fn wake(&mut self) {
        if !self.is_awake {
            self.is_awake = true;
            self.place.enter_all();
            self.look();
        }
    }

    /// Waits for the guard, or for other cores: the drive has nothing of the active one.
    fn is_clearing(&self) -> bool {
        self.active.as_ref().is_some_and(|(swap, _)| swap.expected.is_some())
    }

    /// Lets the next one hold the guard, when nobody else does.
    fn hold(&mut self) {
        if self.active.is_some() {
            return;
        }
        let Some(hold) = self.queue.front().and_then(|next| self.place.try_hold(next.range.lba)) else {
            return;
        };
        if let Some(swap) = self.queue.pop_front() {
            self.active = Some((swap, hold));
        }
    }

    /// The guard goes, and whoever waits for other cores waits in the queue again.
    pub(super) fn stand_back(&mut self) {
        if self.is_clearing()
            && let Some((swap, hold)) = self.active.take()
        {
            self.place.release(hold);
            self.queue.push_front(swap);
        }
    }

    /// What to read, once no other write to the block is in flight on any core.
    fn clear(&mut self) -> Option<(Token, BlockRange, Buf)> {
        let (swap, hold) = self.active.as_mut().filter(|(swap, _)| swap.expected.is_some())?;
        if !self.place.is_clear(hold) {
            return None;
        }
        let expected = swap.expected.take()?;
        let bytes = expected.len().min(BLOCK_BYTES_MAX);
        expected.copy_out(0, self.expected.get_mut(..bytes)?);
        Some((swap.token, swap.range, expected))
    }

    /// It has ended: the guard goes.
    fn finish(&mut self, result: Result<(), DiskError>) -> Option<Done> {
        let (swap, hold) = self.active.take()?;
        self.place.release(hold);
        Some(Done { token: swap.token, result, buf: swap.data })
    }

    /// Ends the first that `is_over` of those of which the drive has nothing.
    fn end_where(&mut self, error: DiskError, is_over: impl Fn(&Swap) -> bool) -> Option<Done> {
        if self.is_clearing() && self.active.as_ref().is_some_and(|(swap, _)| is_over(swap)) {
            return self.finish(Err(error));
        }
        let at = self.queue.iter().position(is_over)?;
        let swap = self.queue.remove(at)?;
        Some(Done { token: swap.token, result: Err(error), buf: swap.data })
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.finish(Err(DiskError::Cancelled));
    }
}

/// What a core that is dropped leaves at the guard while the drive may still write for it.
pub(crate) struct Left {
    place: Arc<guard::Member>,
    hold: Option<Hold>,
}

impl Drop for Left {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            self.place.release(hold);
        }
    }
}

impl NvmeCore {
    /// See [`Disk::compare_and_write`].
    #[cold]
    pub(super) fn submit_swap(
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
        self.gate.queue.push_back(Swap { token, range, expected: Some(expected), data: Some(data), since });
        self.limit = 0;
        None
    }

    /// Commands that may be begun between polls: none where a turn is not the usual one.
    pub(super) fn limit_between(&self) -> usize {
        let is_usual = self.word.order() == Order::Go && self.guests.is_none() && self.gate.is_usual();
        let depth = self.setup.as_ref().map_or(0, |setup| setup.queue.layout().depth());
        if is_usual { usize::from(depth) } else { 0 }
    }

    /// Another guard is published, or none any more.
    #[cold]
    #[inline(never)]
    pub(super) fn look_at_guard(&mut self) {
        self.gate.look();
        self.limit = self.limit_between();
    }

    /// A command has come, which may be begun at once although the core was at rest.
    pub(super) fn wake_for_command(&mut self) {
        if !self.gate.is_awake && self.word.order() == Order::Go {
            self.gate.wake();
            self.limit = self.limit_between();
        }
    }

    /// Nothing is begun or waits.
    fn is_idle(&self) -> bool {
        self.commands.len() == 0
            && self.requests.is_empty()
            && self.pending.is_empty()
            && self.gate.len() == 0
    }

    /// Nobody has to wait for this core, if there is nothing to wait for.
    #[cold]
    #[inline(never)]
    pub(super) fn rest(&mut self) {
        if self.gate.is_awake && self.is_idle() {
            self.gate.is_awake = false;
            self.gate.place.leave();
            self.limit = 0;
        }
    }

    /// Says that nothing that was begun here changes the guarded block, when that is so.
    pub(super) fn answer_guard(&mut self) {
        let Some(guarded) = self.gate.guarded.filter(|guarded| !self.gate.place.has_answered(*guarded))
        else {
            return;
        };
        let mut whole = self.commands.iter().filter(|command| command.request.is_none());
        let is_changing = whole.any(|command| Task::Op(command.op).changes() && guarded.is_in(command.range))
            || self.requests.iter().any(|(_, request)| request.is_kept_off(guarded));
        if !is_changing {
            self.gate.place.answer(guarded);
        }
    }

    /// The core may begin something in this turn.
    pub(super) fn wake_for_turn(&mut self) -> bool {
        if !self.gate.is_awake && !self.is_idle() {
            self.gate.wake();
        }
        self.gate.is_awake
    }

    /// Begin what waits, as far as there is room and the guard lets it.
    pub(super) fn step_apart(&mut self) {
        let Some(guarded) = self.gate.guarded else { return self.step_waiting() };
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
    pub(super) fn step_swap(&mut self) {
        if self.gate.len() == 0 {
            return;
        }
        self.gate.hold();
        if let Some((token, range, buf)) = self.gate.clear() {
            let done = self.start_swap(token, Task::Swap { is_write: false }, range, buf);
            return self.ready.extend(done);
        }
        // A write that has to be aborted, and one that costs a reset, have ended by then.
        let (now, most) = (self.word.tick(), self.shared.limits().command_ticks.saturating_mul(2));
        let is_over = |swap: &Swap| now.wrapping_sub(swap.since) > most;
        while let Some(done) = self.gate.end_where(DiskError::Internal, is_over) {
            let (drive, core) = (&self.shared.address, self.member.core);
            tracing::warn!(%drive, core, "a compare-and-write fails: writes to its block do not end");
            self.ready.push_back(done);
        }
    }

    /// The block is to be read or written, before anything else.
    fn start_swap(&mut self, token: Token, task: Task, range: BlockRange, buf: Buf) -> Option<Done> {
        let (lba, buf) = (range.lba, Some(buf));
        let request = Request { token, task, left: range, lba, buf, outstanding: 0, result: Ok(()) };
        match self.requests.insert(request) {
            Ok(slot) => {
                self.partial.push_front(slot);
                None
            }
            // There is room for it, by their numbers.
            Err(_) => self.gate.finish(Err(DiskError::Internal)),
        }
    }

    /// The block was read or written, or not.
    #[cold]
    pub(super) fn end_swap(
        &mut self,
        request: Request,
        is_write: bool,
        result: Result<(), DiskError>,
    ) -> Option<Done> {
        let (swap, _) = self.gate.active.as_mut()?;
        if is_write {
            swap.data = request.buf;
        } else if let (Ok(()), Some(read)) = (result, &request.buf) {
            let expected = self.gate.expected.get(..read.len());
            if !expected.is_some_and(|expected| read.equals_at(0, expected)) {
                return self.gate.finish(Err(DiskError::CompareDiffers));
            }
            let (token, range) = (swap.token, swap.range);
            let Some(data) = swap.data.take() else { return self.gate.finish(Err(DiskError::Internal)) };
            return self.start_swap(token, Task::Swap { is_write: true }, range, data);
        }
        // What a drive says of a read or a write is not what we say of the pair.
        let is_strange = result == Err(DiskError::CompareDiffers);
        self.gate.finish(if is_strange { Err(DiskError::Internal) } else { result })
    }

    /// Those of which the drive has nothing end so: all, or those of `owner`.
    pub(super) fn end_swaps(&mut self, owner: Option<Owner>, error: DiskError) {
        let is_over = |swap: &Swap| owner.is_none_or(|owner| swap.token.owner() == owner);
        while let Some(done) = self.gate.end_where(error, is_over) {
            self.ready.push_back(done);
        }
    }

    /// The core is dropped with commands at the drive.
    pub(super) fn leave_at_guard(&mut self) {
        let hold = self.gate.active.take().map(|(_, hold)| hold);
        self.member.keep(Left { place: Arc::clone(&self.gate.place), hold });
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
