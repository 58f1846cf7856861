//! [`NvmeChannel`]: one core's handle on a namespace, with a queue pair and the requests in progress.
//!
//! ```text
//!   submit, core awake, nothing waits, Read or Write of one command with at most two PRP entries:
//!       start_at: entry at the queue's tail, no Request
//!   submit, any other case:
//!       Request ─> entries at the queue's tail; above `limit`: pending, in order of submission
//!   poll: command word; retries, partial, pending; one doorbell; completions ─> Done; the same; doorbell
//!
//!   transient failure: submitted again a tick later, at most 3 times
//!   Rewind: commands in flight move to `retries`              Gone, Absent: every request fails
//!   Replay: those commands are submitted again, before newer requests of any core
//! ```
//!
//! The doorbell is written in `poll` only. Nothing blocks, reads a clock, or allocates in steady state.

mod cancel;
mod compare_and_write;
mod slow_poll;
mod submit;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::{Slab, Slot};
use spindle_target_disk::guard;
use spindle_target_disk::{
    Abilities, BlockRange, DiskChannel, DiskError, Done, Geometry, IoRequest, Op, Owner, Token,
};

use crate::commands::Commands;
use crate::core_queue::{CommandWord, CoreQueue, QueueCommand, Setup};
use crate::entry::{Task, make_entry};
use crate::queue::Completion;
use crate::rules::{Deallocating, Namespace, Rules, disk_error, is_transient};
use crate::shared::DriveShared;
use crate::shared_queue::SharedQueue;

use compare_and_write::GuardView;
pub(crate) use compare_and_write::OrphanedGuard;

const RETRIES_MAX: u8 = 3;

/// A disk operation in progress, executed by one or more NVMe commands.
pub(crate) struct Request {
    token: Token,
    pub(crate) task: Task,
    /// Blocks that have no NVMe command yet, at the end of the request's range. After a failure or a
    /// cancellation, `blocks` is 0 and `lba` is the first block that never had a command.
    remaining: BlockRange,
    /// First block of the range. For a flush, the value of `NvmeChannel::changes` at its submission.
    pub(crate) lba: u64,
    pub(crate) buf: Option<Buf>,
    /// Number of NVMe commands of this request that are at the drive or in `retries`.
    outstanding: u32,
    result: Result<(), DiskError>,
}

/// The part of a request that one NVMe command executes.
#[derive(Clone, Copy)]
struct Part {
    request: Slot,
    range: BlockRange,
    /// Number of submissions to the drive. In `retries`, the next submission is included.
    tries: u8,
}

pub(crate) struct NvmeChannel {
    core_queue: Arc<CoreQueue>,
    shared: Arc<DriveShared>,
    namespace: Arc<Namespace>,
    /// Rules at the creation of the disk, used while `setup` is `None`.
    rules: Rules,
    /// Last command word that this core applied.
    word: CommandWord,
    /// Queue pair of this core. `None` before the first `Rewind`, after a `Rewind` without a queue, and after
    /// `Gone` or `Absent`.
    setup: Option<Setup>,
    /// Maximum number of this core's commands at the drive, without those of sharers. 0 between polls if the
    /// core is at rest or has sharers or compare-and-writes; 0 under a guard or without `Go`.
    limit: usize,
    guard: GuardView,
    shared_queue: Option<Box<SharedQueue>>,
    /// The former `shared_queue`, kept after its last sharer closed. Reuse continues the CID generations, so
    /// that a late completion matches no command of a new sharer.
    idle_shared_queue: Option<Box<SharedQueue>>,
    commands: Commands,
    requests: Slab<Request>,
    /// A new request begins only while `requests` has fewer entries than this.
    requests_max: usize,
    /// Requests without any NVMe command, in order of submission.
    pending: VecDeque<Request>,
    /// Begun requests with blocks that have no NVMe command yet, in order of submission. The read or write of
    /// a compare-and-write is inserted at the front.
    partial: VecDeque<Slot>,
    /// Parts to submit again, each with the first tick at which it may be submitted.
    retries: VecDeque<(u32, Part)>,
    finished: VecDeque<Done>,
    /// Number of completed writes, zeroings, deallocations and copies without FUA. A power loss may undo them
    /// until a flush.
    changes: u64,
    flushed: u64,
    /// Value of `DriveShared::losses` at this core's last flush that reported a loss; at first
    /// `DriveShared::losses_reported`.
    losses_reported: u64,
}

impl NvmeChannel {
    pub(crate) fn new(
        core_queue: Arc<CoreQueue>,
        shared: Arc<DriveShared>,
        namespace: Arc<Namespace>,
        rules: Rules,
        participant: guard::GuardParticipant,
    ) -> NvmeChannel {
        let depth = core_queue.depth as usize;
        NvmeChannel {
            // Not the current word: the manager may have published a command, which this core must apply.
            word: CommandWord::INITIAL,
            // A loss that no flush has reported yet fails this core's first flush as well.
            losses_reported: shared.losses_reported.load(Ordering::Relaxed),
            shared,
            namespace,
            rules,
            setup: None,
            limit: 0,
            guard: GuardView::new(participant),
            shared_queue: None,
            idle_shared_queue: None,
            commands: Commands::with_capacity(core_queue.depth),
            // Slots for new requests, whole-request commands that become requests, and one compare-and-write.
            requests: Slab::with_capacity(2 * depth + 1),
            requests_max: depth,
            pending: VecDeque::with_capacity(depth),
            partial: VecDeque::with_capacity(depth),
            retries: VecDeque::with_capacity(depth),
            finished: VecDeque::with_capacity(2 * depth),
            core_queue,
            changes: 0,
            flushed: 0,
        }
    }

    #[inline]
    fn has_room(&self) -> bool {
        self.commands.len() < self.limit
    }

    #[cold]
    fn apply_word(&mut self, word: CommandWord) {
        let is_new = word.command_and_epoch() != self.word.command_and_epoch();
        self.word = word;
        if is_new {
            match word.queue_command() {
                QueueCommand::Wait => {}
                QueueCommand::Go => self.limit = self.limit_between(),
                QueueCommand::Stop => {
                    self.limit = 0;
                    self.note_loss();
                }
                QueueCommand::Rewind => {
                    self.limit = 0;
                    self.note_loss();
                    self.shared_queue = None;
                    self.reclaim_commands(DiskError::Internal);
                    self.guard.pairs.stand_back();
                    self.setup = self.core_queue.take_setup();
                    self.core_queue.set_replaying(!self.retries.is_empty() || !self.partial.is_empty());
                }
                QueueCommand::Replay => self.limit = 0,
                QueueCommand::Gone => self.fail_all(DiskError::Gone),
                QueueCommand::Absent => self.fail_all(DiskError::Internal),
            }
        }
        // Answers also if only the tick changed: the manager treats a core without answers as hung.
        self.core_queue.answer(word);
        self.take_sharers();
        if self.commands.len() > 0 && matches!(word.queue_command(), QueueCommand::Go | QueueCommand::Replay)
        {
            self.check_timeouts();
        }
    }

    /// Ends all requests with `error` and drops the queue. The drive must have none of this core's commands.
    fn fail_all(&mut self, error: DiskError) {
        self.limit = 0;
        self.note_loss();
        self.shared_queue = None;
        self.reclaim_commands(error);
        self.setup = None;
        self.fail_requests(error);
        self.core_queue.set_replaying(false);
    }

    /// Records a loss if this core has acknowledged, unflushed writes and the drive may have lost its
    /// volatile write cache. After a recorded loss, the next flush of each core fails.
    fn note_loss(&mut self) {
        let is_unsafe = self.changes != self.flushed && self.rules().has_volatile_cache;
        if is_unsafe && self.shared.may_lose_cache.load(Ordering::Relaxed) {
            self.flushed = self.changes;
            let before = self.shared.losses.fetch_add(1, Ordering::Relaxed);
            if before == self.shared.losses_reported.load(Ordering::Relaxed) {
                tracing::error!(drive = %self.shared.address, "unflushed writes may be lost: the next flush \
                    of each core fails");
            }
        }
    }

    /// Returns the result of a flush that the drive completed: `MediaWrite` if a loss was recorded that no
    /// flush of this core has reported yet. `changes`: `NvmeChannel::changes` at its submission.
    #[cold]
    fn end_flush(&mut self, changes: u64) -> Result<(), DiskError> {
        self.flushed = self.flushed.max(changes);
        let losses = self.shared.losses.load(Ordering::Relaxed);
        if losses == self.losses_reported {
            return Ok(());
        }
        self.losses_reported = losses;
        self.shared.losses_reported.fetch_max(losses, Ordering::Relaxed);
        Err(DiskError::MediaWrite)
    }

    /// Requests an Abort for each command older than `command_ticks`, and a controller reset if the command
    /// has not ended `abort_ticks` later.
    fn check_timeouts(&mut self) {
        let (now, limits) = (self.word.tick(), self.shared.limits());
        for (cid, command) in self.commands.iter_mut() {
            let age = now.wrapping_sub(command.tick);
            if age > limits.command_ticks && !command.is_abort_requested {
                command.is_abort_requested = true;
                self.core_queue.request_abort(cid);
            } else if age > limits.command_ticks.saturating_add(limits.abort_ticks) {
                self.core_queue.request_reset();
            }
        }
    }

    /// Moves all commands in flight to `retries`. Fails commands without a retry left with `error`, and
    /// commands of a failed request with the request's error. The drive must have none of them.
    fn reclaim_commands(&mut self, error: DiskError) {
        for slot in 0..self.commands.slots() {
            if let Some(part) = self.commands.cid_at(slot).and_then(|cid| self.take_part(cid)) {
                self.retry_later(part, error);
            }
        }
    }

    /// Releases a CID and returns its part; `None` if the CID has no command. A whole-request command becomes
    /// a request with one part.
    fn take_part(&mut self, cid: u16) -> Option<Part> {
        let command = self.commands.find(cid)?;
        let (range, tries) = (command.range, command.tries);
        let request = match command.request {
            Some(request) => request,
            None => {
                let remaining = BlockRange { lba: range.lba + u64::from(range.blocks), blocks: 0 };
                let (token, task, buf) = (command.token, Task::Op(command.op), command.buf.take());
                let request =
                    Request { token, task, remaining, lba: range.lba, buf, outstanding: 1, result: Ok(()) };
                match self.requests.insert(request) {
                    Ok(slot) => slot,
                    Err(request) => {
                        // Does not happen: `requests` has a slot for every command.
                        self.finished.push_back(done_of(request, Err(DiskError::Internal)));
                        self.commands.release(cid);
                        return None;
                    }
                }
            }
        };
        self.commands.release(cid);
        Some(Part { request, range, tries })
    }

    /// Ends every request and compare-and-write with `error`.
    fn fail_requests(&mut self, error: DiskError) {
        self.retries.clear();
        self.partial.clear();
        for index in 0..self.requests.capacity() {
            let Some(request) = self.requests.slot_at(index).and_then(|slot| self.requests.remove(slot))
            else {
                continue;
            };
            let done = self.finish_request(request, Err(error));
            self.finished.extend(done);
        }
        self.end_compare_and_writes(None, error);
        let waiting = self.pending.drain(..).map(|request| done_of(request, Err(error)));
        self.finished.extend(waiting);
    }

    /// Inserts a new request and submits its commands, up to `limit`. Panics if `requests` has no free slot.
    #[inline]
    fn begin_request(&mut self, request: Request) {
        let Ok(slot) = self.requests.insert(request) else { panic!("begun without room") };
        if !self.make_commands(slot) {
            self.partial.push_back(slot);
        }
    }

    /// Submits commands for the remaining blocks of a request, or the command of a flush. Returns false if
    /// `limit` is reached before all blocks have a command.
    #[inline]
    fn make_commands(&mut self, slot: Slot) -> bool {
        loop {
            let has_room = self.has_room();
            let (Some(setup), Some(request)) = (&self.setup, self.requests.get_mut(slot)) else {
                return true;
            };
            let is_flush = request.task == Task::Op(Op::Flush);
            if request.remaining.blocks == 0 && !is_flush {
                return true;
            }
            if !has_room {
                return false;
            }
            let remaining = request.remaining;
            let blocks = request.task.piece_blocks(&setup.rules, remaining).max(1).min(remaining.blocks);
            request.remaining =
                BlockRange { lba: remaining.lba + u64::from(blocks), blocks: remaining.blocks - blocks };
            request.outstanding += 1;
            let part = Part { request: slot, range: BlockRange { lba: remaining.lba, blocks }, tries: 1 };
            self.start_command(part);
            if is_flush {
                return true;
            }
        }
    }

    /// Submits one command, or fails the command (`reject`) if no entry can be made. The caller has checked
    /// `has_room`; panics if no CID is free.
    fn start_command(&mut self, part: Part) {
        let (Some(setup), Some(request)) = (&mut self.setup, self.requests.get(part.request)) else { return };
        let Some((cid, command)) = self.commands.claim() else { panic!("started without room") };
        (command.request, command.range, command.tries) = (Some(part.request), part.range, part.tries);
        (command.tick, command.is_abort_requested) = (self.word.tick(), false);
        let sqe = make_entry(setup, request, part.range, cid);
        // An outdated copy of the cache windows translates no address: refresh it and try once more.
        let sqe = match sqe {
            None if setup.pointers.cache_windows.refresh() => make_entry(setup, request, part.range, cid),
            sqe => sqe,
        };
        match sqe {
            Some(sqe) => {
                self.shared.offloaded.count(request.task);
                setup.queue.push(sqe);
            }
            None => self.reject(cid),
        }
    }

    /// Submits a part again. If the drive's limits have shrunk, submits the first piece only and puts the
    /// rest at the front of `retries`.
    fn start_piece(&mut self, due: u32, part: Part) {
        let (Some(setup), Some(request)) = (&self.setup, self.requests.get_mut(part.request)) else { return };
        let BlockRange { lba, blocks } = part.range;
        let piece = request.task.piece_blocks(&setup.rules, part.range).max(1);
        if piece >= blocks {
            return self.start_command(part);
        }
        request.outstanding += 1;
        let rest = BlockRange { lba: lba + u64::from(piece), blocks: blocks - piece };
        self.retries.push_front((due, Part { range: rest, ..part }));
        self.start_command(Part { range: BlockRange { lba, blocks: piece }, ..part });
    }

    /// Submits a Read or Write as one command with at most two PRP entries. Returns false, without effect, if
    /// that is not possible.
    #[inline]
    fn start_whole(&mut self, token: Token, request: &IoRequest, buf: &mut Option<Buf>) -> bool {
        self.start_at::<false>(token, request, buf) || self.start_in_cache(token, request, buf)
    }

    /// Calls `start_at` for data in a cache's memory. Not inlined: commands with pool data do not pay for it.
    #[cold]
    #[inline(never)]
    fn start_in_cache(&mut self, token: Token, request: &IoRequest, buf: &mut Option<Buf>) -> bool {
        self.start_at::<true>(token, request, buf)
    }

    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    #[inline(always)]
    fn start_at<const IS_IN_CACHE: bool>(
        &mut self,
        token: Token,
        request: &IoRequest,
        buf: &mut Option<Buf>,
    ) -> bool {
        let (is_read, fua, needs_flush) = match request.op {
            Op::Read => (true, false, false),
            Op::Write { fua } => (false, fua, !fua),
            Op::Flush | Op::WriteZeroes { .. } | Op::Deallocate | Op::Compare | Op::Verify => return false,
        };
        // One test of three lengths.
        let waiting = self.pending.len() | self.partial.len() | self.retries.len();
        if !self.has_room() || waiting != 0 || self.requests.len() >= self.requests_max {
            return false;
        }
        let (Some(setup), Some(data)) = (&mut self.setup, &*buf) else { return false };
        let rules = &setup.rules;
        let range = request.range;
        if !rules.is_one_piece(range) {
            return false;
        }
        let (pointers, bytes) = (&setup.pointers, (range.blocks as usize) << rules.shift);
        let pages = if IS_IN_CACHE { pointers.cache_pages(data, bytes) } else { pointers.pages(data, bytes) };
        let Some(prps) = pages else { return false };
        let nsid = rules.nsid;
        let Some((cid, command)) = self.commands.claim() else { return false };
        (command.request, command.token, command.op, command.range) = (None, token, request.op, range);
        (command.tries, command.tick, command.is_abort_requested) = (1, self.word.tick(), false);
        command.needs_flush = needs_flush;
        command.buf = buf.take();
        let sqe = if is_read {
            Sqe::read(cid, nsid, range.lba, range.blocks)
        } else {
            Sqe::write(cid, nsid, range.lba, range.blocks, fua)
        };
        setup.queue.push(sqe.with_prp(prps.0, prps.1));
        true
    }

    /// Fails a command that has no entry: its buffer is not mapped for the drive or cannot be described, or
    /// the drive no longer supports its operation.
    #[cold]
    fn reject(&mut self, cid: u16) {
        let Some(part) = self.take_part(cid) else { return };
        let error = match self.requests.get(part.request).map(|request| request.task) {
            Some(Task::Op(Op::Deallocate) | Task::DeallocateHint) => DiskError::NotSupported,
            _ => DiskError::Internal,
        };
        if let Some(done) = self.end_part(part.request, Err(error)) {
            self.finished.push_back(done);
        }
    }

    /// Ends a part. If no other part is outstanding and no blocks remain, ends the request and returns its
    /// result.
    #[inline]
    fn end_part(&mut self, slot: Slot, result: Result<(), DiskError>) -> Option<Done> {
        let request = self.requests.get_mut(slot)?;
        request.outstanding -= 1;
        if let Err(error) = result {
            request.remaining.blocks = 0;
            if request.result.is_ok() {
                request.result = Err(error);
            }
        }
        if request.outstanding > 0 || request.remaining.blocks > 0 {
            return None;
        }
        let request = self.requests.remove(slot)?;
        let mut result = request.result;
        if result.is_ok() {
            if request.task == Task::Op(Op::Flush) {
                result = self.end_flush(request.lba);
            }
            self.changes += u64::from(request.task.needs_flush());
        }
        self.finish_request(request, result)
    }

    /// Returns the result of an ended request, or `None` if a compare-and-write continues with its write.
    #[inline]
    fn finish_request(&mut self, request: Request, result: Result<(), DiskError>) -> Option<Done> {
        match request.task {
            Task::CompareAndWrite { is_write } => self.end_compare_and_write(request, is_write, result),
            Task::Op(_) | Task::DeallocateHint | Task::Copy { .. } => Some(done_of(request, result)),
        }
    }

    /// Queues a part for submission from the next tick on. Fails the part with `error` after `RETRIES_MAX`
    /// retries, or with the request's error if the request has failed.
    fn retry_later(&mut self, part: Part, error: DiskError) {
        let over = self.requests.get(part.request).and_then(|request| request.result.err());
        if let Some(error) = over {
            if let Some(done) = self.end_part(part.request, Err(error)) {
                self.finished.push_back(done);
            }
            return;
        }
        if part.tries > RETRIES_MAX {
            self.shared.failures.fetch_add(1, Ordering::Relaxed);
            if let Some(done) = self.end_part(part.request, Err(error)) {
                self.finished.push_back(done);
            }
            return;
        }
        let due = self.word.tick().wrapping_add(1);
        self.retries.push_back((due, Part { tries: part.tries + 1, ..part }));
    }

    /// Handles completions until the queue is empty or `done` reaches its capacity. A stray completion ends
    /// the loop after `cq_entries` completions. Returns their number, with sharers' and strays.
    #[inline]
    fn take_completions(&mut self, done: &mut Vec<Done>) -> usize {
        let mut count = 0;
        while done.len() < done.capacity() {
            let Some(setup) = &mut self.setup else { break };
            let Some(completion) = setup.queue.pop() else { break };
            count += 1;
            let is_ours = setup.queue.qid() == completion.sqid;
            let Some(command) = self.commands.find(completion.cid).filter(|_| is_ours) else {
                let Completion { cid, result, status, .. } = completion;
                if is_ours
                    && self.shared_queue.as_mut().is_some_and(|shared| shared.complete(cid, result, status))
                {
                    continue;
                }
                self.shared.strays.fetch_add(1, Ordering::Relaxed);
                // Bounds the loop against a drive that posts invalid completions without end.
                if count >= usize::from(setup.queue.layout().cq_entries) {
                    break;
                }
                continue;
            };
            if command.request.is_none() && completion.status.is_success() {
                self.changes += u64::from(command.needs_flush);
                done.push(Done { token: command.token, result: Ok(()), buf: command.buf.take() });
                self.commands.release(completion.cid);
            } else {
                self.on_part_completion(completion, done);
            }
        }
        count
    }

    /// Handles the completion of a command that failed or that is a part of a request.
    #[inline(never)]
    fn on_part_completion(&mut self, completion: Completion, done: &mut Vec<Done>) {
        let Some(part) = self.take_part(completion.cid) else { return };
        done.extend(if completion.status.is_success() {
            self.end_part(part.request, Ok(()))
        } else {
            self.on_failure(part, completion)
        });
    }

    #[cold]
    fn on_failure(&mut self, part: Part, completion: Completion) -> Option<Done> {
        let status = completion.status;
        let task = self.requests.get(part.request)?.task;
        let error = disk_error(status);
        if is_transient(status) {
            self.retry_later(part, error);
            return None;
        }
        if self.setup.as_mut().is_some_and(|setup| setup.rules.fall_back(task, status.code())) {
            self.retry_later(part, error);
            return None;
        }
        if status.code() == Status::INVALID_OPCODE
            && let Some(setup) = &mut self.setup
        {
            // The drive lacks a command that ONCS reports. It is not submitted again before the next `Setup`.
            setup.rules.disable(task);
        }
        self.shared.failures.fetch_add(1, Ordering::Relaxed);
        self.end_part(part.request, Err(error))
    }

    /// Submits retries, then the remaining blocks of begun requests. Returns false if `limit` is reached
    /// before all these blocks have a command.
    #[inline]
    fn submit_begun(&mut self) -> bool {
        if !self.retries.is_empty() {
            self.submit_retries();
        }
        while let Some(slot) = self.partial.front().copied() {
            if !self.make_commands(slot) {
                return false;
            }
            self.partial.pop_front();
        }
        true
    }

    /// Submits retries, begun requests and pending requests, in this order, up to `limit`.
    #[inline]
    fn submit_waiting(&mut self) {
        if !self.submit_begun() {
            return;
        }
        while !self.pending.is_empty() && self.requests.len() < self.requests_max && self.has_room() {
            let Some(request) = self.pending.pop_front() else { break };
            self.begin_request(request);
        }
    }

    #[cold]
    fn submit_retries(&mut self) {
        for _ in 0..self.retries.len() {
            if !self.has_room() {
                return;
            }
            let Some((due, part)) = self.retries.pop_front() else { return };
            // A difference above half the range means that `due` is in the future: ticks wrap.
            if self.word.tick().wrapping_sub(due) > u32::MAX / 2 {
                self.retries.push_back((due, part));
                continue;
            }
            // A part of a failed request is not submitted again.
            match self.requests.get(part.request).map(|request| request.result) {
                Some(Ok(())) => self.start_piece(due, part),
                Some(Err(error)) => {
                    if let Some(done) = self.end_part(part.request, Err(error)) {
                        self.finished.push_back(done);
                    }
                }
                None => {}
            }
        }
    }
}

fn done_of(request: Request, result: Result<(), DiskError>) -> Done {
    Done { token: request.token, result, buf: request.buf }
}

impl DiskChannel for NvmeChannel {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.namespace.geometry(self.rules())
    }

    fn submit(&mut self, token: Token, request: &IoRequest, mut buf: Option<Buf>) -> Option<Done> {
        if self.start_whole(token, request, &mut buf) {
            return None;
        }
        let IoRequest { op, range, .. } = *request;
        let is_hint = op == Op::Deallocate
            && self.rules().deallocating == Deallocating::WriteZeroes
            && !self.rules().may_deallocate_by_zeroes(range.blocks);
        self.submit_other(token, if is_hint { Task::DeallocateHint } else { Task::Op(op) }, range, buf)
    }

    fn abilities(&self) -> Abilities {
        self.rules().abilities()
    }

    fn copy(&mut self, token: Token, from: BlockRange, to: u64, fua: bool) -> Option<Done> {
        let range = BlockRange { lba: to, blocks: from.blocks };
        self.submit_other(token, Task::Copy { from: from.lba, fua }, range, None)
    }

    fn compare_and_write(
        &mut self,
        token: Token,
        range: BlockRange,
        expected: Buf,
        data: Buf,
    ) -> Option<Done> {
        self.submit_compare_and_write(token, range, expected, data)
    }

    fn poll(&mut self, _now: Nanos, done: &mut Vec<Done>) -> bool {
        let word = self.core_queue.word();
        if word != self.word {
            self.apply_word(word);
        }
        if self.guard.has_changed() {
            self.refresh_guard();
        }
        while done.len() < done.capacity() {
            let Some(finished) = self.finished.pop_front() else { break };
            done.push(finished);
        }
        if self.limit == 0 {
            return self.poll_slow(done);
        }
        self.submit_waiting();
        let mut is_busy = self.commands.len() > 0;
        if let Some(setup) = &mut self.setup {
            setup.queue.ring();
        }
        let count = self.take_completions(done);
        if count > 0 {
            is_busy = true;
            self.submit_waiting();
            if let Some(setup) = &mut self.setup {
                setup.queue.acknowledge();
                setup.queue.ring();
            }
        }
        is_busy |= !self.finished.is_empty();
        if !is_busy {
            self.rest();
        }
        is_busy
    }

    fn cancel_owner(&mut self, owner: Owner) -> usize {
        self.cancel_requests(owner)
    }

    /// May count a request more than once; only 0 is exact.
    #[inline]
    fn in_flight(&self) -> usize {
        self.commands.len()
            + self.requests.len()
            + self.pending.len()
            + self.finished.len()
            + self.guard.pairs.len()
    }
}

impl Drop for NvmeChannel {
    /// Closes the core queue. With commands in flight, leaks the buffers of all begun requests, because the
    /// drive may still access them.
    fn drop(&mut self) {
        if self.commands.len() > 0 {
            let (commands, core) = (self.commands.len(), self.core_queue.core);
            tracing::warn!(drive = %self.shared.address, core, commands, "closed with commands in flight; \
                their buffers are not reused until the process ends");
            self.hand_over_guard();
            self.commands.iter_mut().for_each(|(_, command)| std::mem::forget(command.buf.take()));
            for index in 0..self.requests.capacity() {
                let slot = self.requests.slot_at(index);
                if let Some(request) = slot.and_then(|slot| self.requests.remove(slot)) {
                    std::mem::forget(request.buf);
                }
            }
        }
        self.setup = None;
        // Closed before the sharers are released. A manager that finds the sharers released then also finds
        // this core closed. The manager deletes this core's queue pair before it frees the sharers' memory.
        self.core_queue.close();
        self.shared_queue = None;
    }
}
