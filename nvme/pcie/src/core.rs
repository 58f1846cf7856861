//! [`NvmeCore`]: one core's handle on a namespace: a queue pair, and the requests that are under way on it.
//!
//! ```text
//!   submit ─> Request ─> command(s) at the queue's tail      no room: pending, in order
//!   poll: the order's word; what waits; one doorbell; completions ─> Done; what waits; the doorbell
//!
//!   a command that failed for a while: again, a tick later, 3 times
//!   Rewind: every command in flight goes into `again`        Gone, Absent: every request ends with an error
//!   Replay: those are given to the drive again, before anything that came later, on any core
//! ```
//!
//! Nothing here waits, allocates in steady state, or reads a clock.

mod apart;
mod compare_and_write;
mod forget;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_disk::guard;
use spindle_disk::{Abilities, BlockRange, Disk, DiskError, Done, Geometry, IoRequest, Op, Owner, Token};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::{Slab, Slot};

use crate::commands::Commands;
use crate::core_queue::{CoreQueue, QueueCommand, QueueEpoch, Setup};
use crate::entry::{Task, entry};
use crate::queue::Completion;
use crate::rules::{Deallocating, Namespace, Rules, disk_error, is_passing};
use crate::shared::Shared;
use crate::shared_queue::SharedQueue;

use compare_and_write::GuardView;
pub(crate) use compare_and_write::Left;

/// How often a command is given to the drive again.
const TRIES_MAX: u8 = 3;

/// What the disk was asked for.
pub(crate) struct Request {
    token: Token,
    pub(crate) task: Task,
    /// What no command was made of yet; it ends where all of it does, but of one that has failed.
    left: BlockRange,
    /// First block of all of it. Of a flush: how many changes were acknowledged when it came.
    pub(crate) lba: u64,
    pub(crate) buf: Option<Buf>,
    /// Commands made and not ended.
    outstanding: u32,
    result: Result<(), DiskError>,
}

/// A part of a request that one command does.
#[derive(Clone, Copy)]
struct Part {
    request: Slot,
    range: BlockRange,
    /// How often it was given to the drive.
    tries: u8,
}

/// One core's handle. See the module.
pub(crate) struct NvmeCore {
    core_queue: Arc<CoreQueue>,
    shared: Arc<Shared>,
    namespace: Arc<Namespace>,
    /// Those of the start; a `setup` has its own.
    rules: Rules,
    /// The last word that was obeyed.
    word: QueueEpoch,
    /// From the first `Rewind` to `Gone`.
    setup: Option<Setup>,
    /// Commands that the drive may have of this core's own: none unless the order is `Go`, and none from one
    /// poll to the next where cores without a queue of their own work with this one's, or where the guard is
    /// in the way: see there.
    limit: usize,
    guard: GuardView,
    shared_queue: Option<Box<SharedQueue>>,
    /// Of sharers that have all gone: the identifiers of their commands go on from there, so that a late
    /// completion of one of theirs ends none of the next sharer's.
    shared_queue_gone: Option<Box<SharedQueue>>,
    commands: Commands,
    requests: Slab<Request>,
    /// Requests of several commands that are begun at once.
    requests_max: usize,
    /// Not begun, in order.
    pending: VecDeque<Request>,
    /// Begun, with blocks left for which there was no command.
    partial: VecDeque<Slot>,
    /// To be given to the drive again, not before the tick.
    again: VecDeque<(u32, Part)>,
    /// Ended, not told.
    ready: VecDeque<Done>,
    /// Changes that were acknowledged and that a loss of power may undo, and how many of them were flushed
    /// since.
    changes: u64,
    flushed: u64,
    /// Losses that a flush of this core has told of.
    losses_told: u64,
}

impl NvmeCore {
    pub(crate) fn new(
        core_queue: Arc<CoreQueue>,
        shared: Arc<Shared>,
        namespace: Arc<Namespace>,
        rules: Rules,
        place: guard::GuardParticipant,
    ) -> NvmeCore {
        let depth = core_queue.depth as usize;
        NvmeCore {
            // Not what is ordered now: the manager knows the core queue already, and that may still be to do.
            word: QueueEpoch::FIRST,
            // A loss that no core was told of yet is told to this one as well.
            losses_told: shared.losses_told.load(Ordering::Relaxed),
            shared,
            namespace,
            rules,
            setup: None,
            limit: 0,
            guard: GuardView::new(place),
            shared_queue: None,
            shared_queue_gone: None,
            commands: Commands::with_capacity(core_queue.depth),
            // As many as may be begun, those that were a command's alone and became requests again, and a
            // compare-and-write.
            requests: Slab::with_capacity(2 * depth + 1),
            requests_max: depth,
            pending: VecDeque::with_capacity(depth),
            partial: VecDeque::with_capacity(depth),
            again: VecDeque::with_capacity(depth),
            ready: VecDeque::with_capacity(2 * depth),
            core_queue,
            changes: 0,
            flushed: 0,
        }
    }

    /// The drive may have one more command.
    #[inline]
    fn has_room(&self) -> bool {
        self.commands.len() < self.limit
    }

    /// Do what the manager says.
    #[cold]
    fn obey(&mut self, word: QueueEpoch) {
        let is_new = word.answer() != self.word.answer();
        self.word = word;
        if is_new {
            match word.order() {
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
                    self.take_back(DiskError::Internal);
                    self.guard.pairs.stand_back();
                    self.setup = self.core_queue.take_setup();
                    self.core_queue.set_replaying(!self.again.is_empty() || !self.partial.is_empty());
                }
                QueueCommand::Replay => self.limit = 0,
                QueueCommand::Gone => self.let_go(DiskError::Gone),
                QueueCommand::Absent => self.let_go(DiskError::Internal),
            }
        }
        // Also of a tick: the manager sees by it that the core does not hang.
        self.core_queue.answer(word);
        self.take_sharers();
        if self.commands.len() > 0 && matches!(word.order(), QueueCommand::Go | QueueCommand::Replay) {
            self.check_time();
        }
    }

    /// The drive is not there: everything ends so.
    fn let_go(&mut self, error: DiskError) {
        self.limit = 0;
        self.note_loss();
        self.shared_queue = None;
        self.take_back(error);
        self.setup = None;
        self.end_all(error);
        self.core_queue.set_replaying(false);
    }

    /// What this core has acknowledged and not flushed may be lost: the next flush of each core fails.
    fn note_loss(&mut self) {
        let is_unsafe = self.changes != self.flushed && self.rules().has_volatile_cache;
        if is_unsafe && self.shared.may_lose_cache.load(Ordering::Relaxed) {
            self.flushed = self.changes;
            let before = self.shared.losses.fetch_add(1, Ordering::Relaxed);
            if before == self.shared.losses_told.load(Ordering::Relaxed) {
                tracing::error!(drive = %self.shared.address, "what was not flushed may be lost: the next \
                    flush of each core fails");
            }
        }
    }

    /// A flush has succeeded as far as the drive knows.
    #[cold]
    fn end_flush(&mut self, changes: u64) -> Result<(), DiskError> {
        self.flushed = self.flushed.max(changes);
        let losses = self.shared.losses.load(Ordering::Relaxed);
        if losses == self.losses_told {
            return Ok(());
        }
        self.losses_told = losses;
        self.shared.losses_told.fetch_max(losses, Ordering::Relaxed);
        Err(DiskError::MediaWrite)
    }

    /// What took too long is to be aborted; what the Abort did not end either costs a reset.
    fn check_time(&mut self) {
        let (now, limits) = (self.word.tick(), self.shared.limits());
        for (cid, command) in self.commands.iter_mut() {
            let age = now.wrapping_sub(command.tick);
            if age > limits.command_ticks && !command.is_abort_asked {
                command.is_abort_asked = true;
                self.core_queue.ask_abort(cid);
            } else if age > limits.command_ticks.saturating_add(limits.abort_ticks) {
                self.core_queue.ask_reset();
            }
        }
    }

    /// The drive reaches no memory: nothing is in flight any more.
    fn take_back(&mut self, error: DiskError) {
        for slot in 0..self.commands.slots() {
            if let Some(part) = self.commands.cid_at(slot).and_then(|cid| self.take_part(cid)) {
                self.try_again(part, error);
            }
        }
    }

    /// What a command was for; the drive has it no more. One that was a whole request is a part of one now.
    fn take_part(&mut self, cid: u16) -> Option<Part> {
        let command = self.commands.find(cid)?;
        let (range, tries) = (command.range, command.tries);
        let request = match command.request {
            Some(request) => request,
            None => {
                let left = BlockRange { lba: range.lba + u64::from(range.blocks), blocks: 0 };
                let (token, task, buf) = (command.token, Task::Op(command.op), command.buf.take());
                let request =
                    Request { token, task, left, lba: range.lba, buf, outstanding: 1, result: Ok(()) };
                match self.requests.insert(request) {
                    Ok(slot) => slot,
                    Err(request) => {
                        // There is room for all, by their numbers.
                        self.ready.push_back(ended(request, Err(DiskError::Internal)));
                        self.commands.release(cid);
                        return None;
                    }
                }
            }
        };
        self.commands.release(cid);
        Some(Part { request, range, tries })
    }

    /// Everything ends so.
    fn end_all(&mut self, error: DiskError) {
        self.again.clear();
        self.partial.clear();
        for index in 0..self.requests.capacity() {
            let Some(request) = self.requests.slot_at(index).and_then(|slot| self.requests.remove(slot))
            else {
                continue;
            };
            let done = self.tell(request, Err(error));
            self.ready.extend(done);
        }
        self.end_compare_and_writes(None, error);
        let waiting = self.pending.drain(..).map(|request| ended(request, Err(error)));
        self.ready.extend(waiting);
    }

    /// Commands for a request that was not begun, as many as there is room for.
    #[inline]
    fn begin(&mut self, request: Request) {
        let Ok(slot) = self.requests.insert(request) else { panic!("begun without room") };
        if !self.make_commands(slot) {
            self.partial.push_back(slot);
        }
    }

    /// Commands for what is left of a request. False when there was no room for all of it.
    #[inline]
    fn make_commands(&mut self, slot: Slot) -> bool {
        loop {
            let has_room = self.has_room();
            let (Some(setup), Some(request)) = (&self.setup, self.requests.get_mut(slot)) else {
                return true;
            };
            let is_flush = request.task == Task::Op(Op::Flush);
            if request.left.blocks == 0 && !is_flush {
                return true;
            }
            if !has_room {
                return false;
            }
            let left = request.left;
            let blocks = request.task.piece_blocks(&setup.rules, left).max(1).min(left.blocks);
            request.left = BlockRange { lba: left.lba + u64::from(blocks), blocks: left.blocks - blocks };
            request.outstanding += 1;
            let part = Part { request: slot, range: BlockRange { lba: left.lba, blocks }, tries: 1 };
            self.start(part);
            if is_flush {
                return true;
            }
        }
    }

    /// Give a part to the drive; the caller has looked for room.
    fn start(&mut self, part: Part) {
        let (Some(setup), Some(request)) = (&mut self.setup, self.requests.get(part.request)) else { return };
        let Some((cid, command)) = self.commands.claim() else { panic!("started without room") };
        (command.request, command.range, command.tries) = (Some(part.request), part.range, part.tries);
        (command.tick, command.is_abort_asked) = (self.word.tick(), false);
        let sqe = entry(setup, request, part.range, cid);
        // It may lie in memory that came since the core has looked.
        let sqe = match sqe {
            None if setup.pointers.others.renew() => entry(setup, request, part.range, cid),
            sqe => sqe,
        };
        match sqe {
            Some(sqe) => {
                self.shared.offloaded.count(request.task);
                setup.queue.push(sqe);
            }
            None => self.refuse(cid),
        }
    }

    /// As much of a part as is one command now: it was cut by what the drive allowed then.
    fn start_piece(&mut self, due: u32, part: Part) {
        let (Some(setup), Some(request)) = (&self.setup, self.requests.get_mut(part.request)) else { return };
        let BlockRange { lba, blocks } = part.range;
        let piece = request.task.piece_blocks(&setup.rules, part.range).max(1);
        if piece >= blocks {
            return self.start(part);
        }
        request.outstanding += 1;
        let rest = BlockRange { lba: lba + u64::from(piece), blocks: blocks - piece };
        self.again.push_front((due, Part { range: rest, ..part }));
        self.start(Part { range: BlockRange { lba, blocks: piece }, ..part });
    }

    /// All of a request in one command that needs no list; false, and nothing is done, where it does not fit
    /// one.
    #[inline]
    fn start_whole(&mut self, token: Token, request: &IoRequest, buf: &mut Option<Buf>) -> bool {
        self.start_at::<false>(token, request, buf) || self.start_in_cache(token, request, buf)
    }

    /// The same with data in a cache's memory. Apart, so that commands of the pool pay nothing for it.
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
        let (is_read, fua, is_change) = match request.op {
            Op::Read => (true, false, false),
            Op::Write { fua } => (false, fua, !fua),
            Op::Flush | Op::WriteZeroes { .. } | Op::Deallocate | Op::Compare | Op::Verify => return false,
        };
        let is_clear = self.pending.is_empty() && self.partial.is_empty() && self.again.is_empty();
        if !self.has_room() || !is_clear || self.requests.len() >= self.requests_max {
            return false;
        }
        let (Some(setup), Some(data)) = (&mut self.setup, &*buf) else { return false };
        let rules = &setup.rules;
        let range = request.range;
        if !rules.is_one_piece(range) {
            return false;
        }
        let (pointers, bytes) = (&setup.pointers, (range.blocks as usize) << rules.shift);
        let pages = if IS_IN_CACHE { pointers.other_pages(data, bytes) } else { pointers.pages(data, bytes) };
        let Some(prps) = pages else { return false };
        let nsid = rules.nsid;
        let Some((cid, command)) = self.commands.claim() else { return false };
        (command.request, command.token, command.op, command.range) = (None, token, request.op, range);
        (command.tries, command.tick, command.is_abort_asked) = (1, self.word.tick(), false);
        command.is_change = is_change;
        command.buf = buf.take();
        let sqe = if is_read {
            Sqe::read(cid, nsid, range.lba, range.blocks)
        } else {
            Sqe::write(cid, nsid, range.lba, range.blocks, fua)
        };
        setup.queue.push(sqe.with_prp(prps.0, prps.1));
        true
    }

    /// The data lies where the drive cannot be told of, or the drive lacks now what it had when the request
    /// came.
    #[cold]
    fn refuse(&mut self, cid: u16) {
        let Some(part) = self.take_part(cid) else { return };
        let error = match self.requests.get(part.request).map(|request| request.task) {
            Some(Task::Op(Op::Deallocate) | Task::Hint) => DiskError::NotSupported,
            _ => DiskError::Internal,
        };
        if let Some(done) = self.end_part(part.request, Err(error)) {
            self.ready.push_back(done);
        }
    }

    /// A part has ended; the request with it, when it was the last.
    #[inline]
    fn end_part(&mut self, slot: Slot, result: Result<(), DiskError>) -> Option<Done> {
        let request = self.requests.get_mut(slot)?;
        request.outstanding -= 1;
        if let Err(error) = result {
            request.left.blocks = 0;
            if request.result.is_ok() {
                request.result = Err(error);
            }
        }
        if request.outstanding > 0 || request.left.blocks > 0 {
            return None;
        }
        let request = self.requests.remove(slot)?;
        let mut result = request.result;
        if result.is_ok() {
            if request.task == Task::Op(Op::Flush) {
                result = self.end_flush(request.lba);
            }
            self.changes += u64::from(request.task.is_change());
        }
        self.tell(request, result)
    }

    /// What its submitter hears of it now.
    #[inline]
    fn tell(&mut self, request: Request, result: Result<(), DiskError>) -> Option<Done> {
        match request.task {
            Task::CompareAndWrite { is_write } => self.end_compare_and_write(request, is_write, result),
            Task::Op(_) | Task::Hint | Task::Copy { .. } => Some(ended(request, result)),
        }
    }

    /// Once more, unless it was tried often enough, or its request has failed.
    fn try_again(&mut self, part: Part, error: DiskError) {
        let over = self.requests.get(part.request).and_then(|request| request.result.err());
        if let Some(error) = over {
            if let Some(done) = self.end_part(part.request, Err(error)) {
                self.ready.push_back(done);
            }
            return;
        }
        if part.tries > TRIES_MAX {
            self.shared.failures.fetch_add(1, Ordering::Relaxed);
            if let Some(done) = self.end_part(part.request, Err(error)) {
                self.ready.push_back(done);
            }
            return;
        }
        let due = self.word.tick().wrapping_add(1);
        self.again.push_back((due, Part { tries: part.tries + 1, ..part }));
    }

    /// All that the drive has told, as far as there is room in `done`; how much it was.
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
                // A drive that writes them without end does not keep the core.
                if count >= usize::from(setup.queue.layout().cq_entries) {
                    break;
                }
                continue;
            };
            if command.request.is_none() && completion.status.is_success() {
                self.changes += u64::from(command.is_change);
                done.push(Done { token: command.token, result: Ok(()), buf: command.buf.take() });
                self.commands.release(completion.cid);
            } else {
                self.on_part(completion, done);
            }
        }
        count
    }

    /// A command has ended that is a part of a request, or has failed.
    #[inline(never)]
    fn on_part(&mut self, completion: Completion, done: &mut Vec<Done>) {
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
        if is_passing(status) {
            self.try_again(part, error);
            return None;
        }
        if self.setup.as_mut().is_some_and(|setup| setup.rules.fall_back(task, status.code())) {
            self.try_again(part, error);
            return None;
        }
        if status.code() == Status::INVALID_OPCODE
            && let Some(setup) = &mut self.setup
        {
            // What ONCS says is not so: it is not asked again before its next start.
            setup.rules.forget(task);
        }
        self.shared.failures.fetch_add(1, Ordering::Relaxed);
        self.end_part(part.request, Err(error))
    }

    /// What the drive had already, as far as there is room. False when there was no room for all.
    #[inline]
    fn step_begun(&mut self) -> bool {
        if !self.again.is_empty() {
            self.step_again();
        }
        while let Some(slot) = self.partial.front().copied() {
            if !self.make_commands(slot) {
                return false;
            }
            self.partial.pop_front();
        }
        true
    }

    /// Begin what waits, as far as there is room: what the drive had already first.
    #[inline]
    fn step_waiting(&mut self) {
        if !self.step_begun() {
            return;
        }
        while !self.pending.is_empty() && self.requests.len() < self.requests_max && self.has_room() {
            let Some(request) = self.pending.pop_front() else { break };
            self.begin(request);
        }
    }

    #[cold]
    fn step_again(&mut self) {
        for _ in 0..self.again.len() {
            if !self.has_room() {
                return;
            }
            let Some((due, part)) = self.again.pop_front() else { return };
            // Due: the time is behind it by less than half of all ticks.
            if self.word.tick().wrapping_sub(due) > u32::MAX / 2 {
                self.again.push_back((due, part));
                continue;
            }
            // One of a request that has failed meanwhile is not worth it.
            match self.requests.get(part.request).map(|request| request.result) {
                Some(Ok(())) => self.start_piece(due, part),
                Some(Err(error)) => {
                    if let Some(done) = self.end_part(part.request, Err(error)) {
                        self.ready.push_back(done);
                    }
                }
                None => {}
            }
        }
    }
}

fn ended(request: Request, result: Result<(), DiskError>) -> Done {
    Done { token: request.token, result, buf: request.buf }
}

impl Disk for NvmeCore {
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
            && !self.rules().zeroes_of(range.blocks);
        self.submit_other(token, if is_hint { Task::Hint } else { Task::Op(op) }, range, buf)
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
            self.obey(word);
        }
        if self.guard.has_changed() {
            self.look_at_guard();
        }
        while done.len() < done.capacity() {
            let Some(ready) = self.ready.pop_front() else { break };
            done.push(ready);
        }
        if self.limit == 0 {
            return self.poll_apart(done);
        }
        self.step_waiting();
        let mut is_busy = self.commands.len() > 0;
        if let Some(setup) = &mut self.setup {
            setup.queue.ring();
        }
        let count = self.take_completions(done);
        if count > 0 {
            is_busy = true;
            self.step_waiting();
            if let Some(setup) = &mut self.setup {
                setup.queue.acknowledge();
                setup.queue.ring();
            }
        }
        is_busy |= !self.ready.is_empty();
        if !is_busy {
            self.rest();
        }
        is_busy
    }

    fn cancel_owner(&mut self, owner: Owner) -> usize {
        self.forget_all(owner)
    }

    /// More than that where a request is several commands: none is what counts.
    #[inline]
    fn in_flight(&self) -> usize {
        self.commands.len()
            + self.requests.len()
            + self.pending.len()
            + self.ready.len()
            + self.guard.pairs.len()
    }
}

impl NvmeCore {
    /// What is not one command now.
    #[inline(never)]
    fn submit_other(
        &mut self,
        token: Token,
        task: Task,
        range: BlockRange,
        buf: Option<Buf>,
    ) -> Option<Done> {
        let lba = if task == Task::Op(Op::Flush) { self.changes } else { range.lba };
        let request = Request { token, task, left: range, lba, buf, outstanding: 0, result: Ok(()) };
        if let Some(result) = self.immediate_result(&request) {
            return Some(ended(request, result));
        }
        // The guard is looked at, if it was not because nothing was there to do.
        self.wake_for_command();
        let is_next = self.pending.is_empty() && self.partial.is_empty();
        if is_next && self.requests.len() < self.requests_max && self.has_room() {
            self.begin(request);
        } else {
            self.pending.push_back(request);
        }
        None
    }

    #[inline]
    fn rules(&self) -> &Rules {
        self.setup.as_ref().map_or(&self.rules, |setup| &setup.rules)
    }

    /// Why nothing is begun.
    #[inline]
    fn absence(&self) -> Option<DiskError> {
        match self.word.order() {
            QueueCommand::Gone => Some(DiskError::Gone),
            QueueCommand::Absent => Some(DiskError::Internal),
            QueueCommand::Wait
            | QueueCommand::Go
            | QueueCommand::Stop
            | QueueCommand::Rewind
            | QueueCommand::Replay => None,
        }
    }

    /// What ends before it begins.
    #[inline]
    fn immediate_result(&self, request: &Request) -> Option<Result<(), DiskError>> {
        if let Some(error) = self.absence() {
            return Some(Err(error));
        }
        let (is_empty, rules) = (request.left.blocks == 0, self.rules());
        let does = rules.abilities();
        match request.task {
            Task::Op(Op::Flush) => (!rules.has_volatile_cache).then_some(Ok(())),
            Task::Op(Op::Compare) if !does.compare => Some(Err(DiskError::NotSupported)),
            Task::Op(Op::Verify) if !does.verify => Some(Err(DiskError::NotSupported)),
            Task::Copy { .. } if !does.copy => Some(Err(DiskError::NotSupported)),
            Task::Op(Op::Read | Op::Write { .. } | Op::Compare) => {
                (is_empty || request.buf.is_none()).then_some(Err(DiskError::Internal))
            }
            Task::Op(Op::Deallocate) if !is_empty && rules.deallocating == Deallocating::No => {
                Some(Err(DiskError::NotSupported))
            }
            Task::Op(Op::WriteZeroes { .. } | Op::Deallocate | Op::Verify)
            | Task::Hint
            | Task::CompareAndWrite { .. }
            | Task::Copy { .. } => is_empty.then_some(Ok(())),
        }
    }
}

impl Drop for NvmeCore {
    /// What the drive still has must not be given to anybody else: it is never given back.
    fn drop(&mut self) {
        if self.commands.len() > 0 {
            let (commands, core) = (self.commands.len(), self.core_queue.core);
            tracing::warn!(drive = %self.shared.address, core, commands, "closed with commands in flight; \
                their buffers are kept from use until the process ends");
            self.leave_at_guard();
            self.commands.iter_mut().for_each(|(_, command)| std::mem::forget(command.buf.take()));
            for index in 0..self.requests.capacity() {
                let slot = self.requests.slot_at(index);
                if let Some(request) = slot.and_then(|slot| self.requests.remove(slot)) {
                    std::mem::forget(request.buf);
                }
            }
        }
        self.setup = None;
        // First: a manager that finds the sharers free then sees that this core is gone too, and deletes its
        // queue pair before it lets go of their memory.
        self.core_queue.close();
        self.shared_queue = None;
    }
}
