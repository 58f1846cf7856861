//! [`RemoteChannel`]: one core's handle on a remote disk, with an I/O queue of its own.
//!
//! ```text
//!   Away ── an association is up ──> Opening ── connected ──> Up ── lost, or another association ──> Away
//!     ^                                 │ refused                                                     │
//!     └─────────────────────────────────┴── the manager is notified ──────────────────────────────────┘
//! ```
//! Lost commands are sent again in order of submission. A lost write that was cancelled is not sent again:
//! its [`Done`] is returned when the lost association is over.

use std::collections::VecDeque;
use std::sync::Arc;

use spindle_nvme_initiator::nvme_spec::Sqe;
use spindle_nvme_initiator::nvme_spec::cluster::READ_AND_REGISTER;
use spindle_nvme_initiator::nvme_spec::status::Status;
use spindle_nvme_initiator::{Failure, OptimisticOptions, Options, Refusal, Refused};
use spindle_reactor::clock::{Clock, Nanos};
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_target_card::Fill;
use spindle_target_disk::{
    Abilities, BlockRange, ChannelContext, DiskChannel, DiskError, Done, Geometry, IoRequest, Op, OpenError,
    Owner, Sender, Token,
};

use crate::attach::Attach;
use crate::far::{Far, FarCompletion, FarQueue};
use crate::ledger::NEWEST;
use crate::request::{CoherentFill, Piece, PieceError, PieceParams, Request};
use crate::shared::View;
use crate::{RemoteDisk, Users};

/// Bounce buffers for pieces of long commands; 128 KiB is a common MDTS.
const BOUNCE: ZoneSpec = ZoneSpec { buffer_bytes: 128 << 10, count: 4 };
/// Buffers for Connect data and for the ranges of Dataset Management.
const SMALL: ZoneSpec = ZoneSpec { buffer_bytes: 4096, count: 16 };
/// Period of polling an idle queue and of checking waiting commands.
const CHECK_PERIOD: Nanos = Nanos::from_ms(1);
/// Period of checking the deadlines of outstanding commands.
const SCAN_PERIOD: Nanos = Nanos::from_ms(100);

impl RemoteDisk {
    /// Returns the bytes of memory of each core's handle: bounce buffers, small buffers and the receive
    /// batch; for optimistic reads the directory, and the seals of `depth` commands.
    #[must_use]
    pub fn core_bytes(optimistic: Option<&OptimisticOptions>, depth: u16) -> usize {
        let zone = |zone: ZoneSpec| zone.buffer_bytes as usize * zone.count as usize;
        let attached = optimistic.map_or(0, |options| options.queue_bytes(depth));
        zone(BOUNCE) + zone(SMALL) + Options::default().batch_bytes + attached
    }
}

enum Link<F: Far> {
    Away,
    Opening(Box<F::Opening>, u64),
    Up(Box<F::Queue>, u64),
}

pub(crate) struct RemoteChannel<F: Far> {
    handle: usize,
    qid: u16,
    depth: u16,
    pool: Pool,
    link: Link<F>,
    /// `None`: optimistic reads are not configured.
    attach: Option<Box<Attach<F>>>,
    limits: PieceParams,
    /// Copy of the shared state at `version`.
    view: View,
    version: u64,
    /// Commands to send, in order of submission.
    waiting: VecDeque<Request>,
    /// Commands that wait for an entry of the ledger.
    blocked: Vec<Request>,
    /// Outstanding commands, by index in the queue.
    sent: Vec<Option<Request>>,
    sent_count: usize,
    /// Commands in `sent` whose [`Done`] was returned before the far target's answer.
    answered_count: usize,
    /// Lost writes that were cancelled: the far target may still execute them.
    orphans: Vec<Request>,
    ready: VecDeque<Done>,
    numbers: u64,
    now: Nanos,
    next_look: Nanos,
    next_check: Nanos,
    next_scan: Nanos,
    /// A command was not answered for twice the timeout: the next turn abandons the queue.
    is_stuck: bool,
    /// Association for which a refused command was logged.
    logged_association: u64,
    /// A failed connect of the I/O queue was logged, and no connect has succeeded since.
    is_refusal_logged: bool,
    /// Last field, so dropped after `link`: the association ends after the queue.
    shared: Arc<Users<F>>,
}

impl<F: Far> RemoteChannel<F> {
    pub(crate) fn new(
        shared: Arc<Users<F>>,
        context: &ChannelContext,
    ) -> Result<RemoteChannel<F>, OpenError> {
        let pool = Pool::new(&[SMALL, BOUNCE], Pages::Base).map_err(|error| {
            let verb = "allocate memory for pieces of long commands";
            OpenError::system(&shared.name, verb, std::io::Error::other(error.to_string()))
        })?;
        let view = shared.view();
        let block_bytes = view.shape.geometry.block_bytes;
        let limits = PieceParams {
            nsid: shared.spec.nsid,
            block_bytes,
            data_blocks_max: 1,
            bounce_blocks: BOUNCE.buffer_bytes / block_bytes,
            must_fua: false,
        };
        let depth = shared.spec.depth;
        let qid = u16::try_from(context.core + 1).unwrap_or(u16::MAX);
        // Differs between hosts and cores, so that they do not attach in step.
        let seed = shared
            .spec
            .target
            .host
            .id
            .iter()
            .fold(u64::from(qid), |seed, byte| seed.wrapping_mul(31).wrapping_add((*byte).into()));
        let optimistic = shared.spec.optimistic.as_ref();
        let attach = optimistic.map(|_| Box::new(Attach::new(shared.add_counts(), seed)));
        Ok(RemoteChannel {
            handle: shared.open(),
            attach,
            qid,
            depth,
            pool,
            link: Link::Away,
            limits,
            view,
            version: 0,
            waiting: VecDeque::with_capacity(2 * context.depth as usize),
            blocked: Vec::new(),
            sent: (0..depth).map(|_| None).collect(),
            sent_count: 0,
            answered_count: 0,
            orphans: Vec::new(),
            ready: VecDeque::with_capacity(2 * context.depth as usize),
            numbers: 0,
            now: Clock::now(),
            next_look: Nanos::ZERO,
            next_check: Nanos::ZERO,
            next_scan: Nanos::ZERO,
            is_stuck: false,
            logged_association: 0,
            is_refusal_logged: false,
            shared,
        })
    }

    /// Copies the shared state after a change.
    #[cold]
    fn refresh(&mut self) {
        // The version is loaded first: a change between the two loads causes one more refresh.
        self.version = self.shared.version();
        self.view = self.shared.view();
        self.limits.must_fua = self.view.shape.must_fua;
        self.next_check = Nanos::ZERO;
    }

    /// Advances the connection of the I/O queue, or abandons a queue that is stuck or of another association.
    /// Returns true when a connect was begun.
    fn step_link(&mut self, now: Nanos) -> bool {
        match &mut self.link {
            Link::Up(queue, number) => {
                if std::mem::take(&mut self.is_stuck) || *number != self.view.number {
                    queue.abandon();
                } else if self.view.may_attach
                    && let Some(attach) = &mut self.attach
                    && now >= attach.next()
                {
                    attach.step(queue, (&self.shared, self.handle), *number, now);
                }
                false
            }
            Link::Away if self.view.number == 0 => false,
            Link::Away => {
                // `None` when a core has lost its queue: the manager is ending the association.
                let Some((number, association)) = self.shared.association() else { return false };
                self.begin(number, &association, now);
                true
            }
            Link::Opening(opening, number) => {
                let number = *number;
                match F::step(opening, now) {
                    Ok(None) if number == self.view.number => {}
                    Ok(None) => self.link = Link::Away,
                    Ok(Some(queue)) => self.on_up(queue, number),
                    Err(error) => self.on_refused(number, &error),
                }
                false
            }
        }
    }

    fn begin(&mut self, number: u64, association: &Arc<F>, now: Nanos) {
        let depth = self.depth.min(association.depth_max());
        match association.begin(&self.pool, self.qid, depth, now) {
            Ok(opening) => self.link = Link::Opening(Box::new(opening), number),
            Err(error) => self.on_refused(number, &error),
        }
    }

    #[cold]
    fn on_refused(&mut self, number: u64, error: &spindle_nvme_initiator::Error) {
        // Logged once: attempts continue without limit.
        if !std::mem::replace(&mut self.is_refusal_logged, true) {
            let disk = &self.shared.name;
            tracing::warn!(disk, qid = self.qid, "cannot connect an I/O queue: {error}");
        }
        self.link = Link::Away;
        self.shared.on_lost(number);
    }

    #[cold]
    fn on_up(&mut self, queue: F::Queue, number: u64) {
        let blocks = queue.transfer_bytes_max() / self.limits.block_bytes;
        self.limits.data_blocks_max = blocks.clamp(1, 1 << 16);
        self.link = Link::Up(Box::new(queue), number);
        self.shared.on_up(self.handle, number);
        if std::mem::take(&mut self.is_refusal_logged) {
            tracing::info!(disk = self.shared.name, qid = self.qid, "the I/O queue is connected");
        }
    }

    /// Submits waiting commands to the queue, up to its depth. Commands that the ledger blocks move to
    /// `blocked`. Returns true when a command was submitted or refused by the queue.
    fn send(&mut self) -> bool {
        let mut has_worked = false;
        while let Link::Up(queue, number) = &mut self.link
            && self.view.number == *number
            && self.view.may_send
            && queue.room() > 0
            && queue.is_up()
            && let Some(mut request) = self.waiting.pop_front()
        {
            if self.view.has_entries && is_blocked(&self.shared, &request, self.now) {
                self.blocked.push(request);
                continue;
            }
            let offset = request.next_offset(self.limits);
            let Piece { mut sqe, data } = match request.next(self.limits, &self.pool) {
                Ok(piece) => piece,
                Err(PieceError::Buffer) => {
                    self.waiting.push_front(request);
                    break; // retried when a piece has ended and freed its buffer
                }
                Err(PieceError::Data) => {
                    let (disk, op) = (&self.shared.name, request.op);
                    tracing::error!(disk, "a command without its data: {op:?}");
                    self.end(request, Err(DiskError::Internal));
                    continue;
                }
            };
            has_worked = true;
            if request.fill.is_some() {
                begin_piece(&self.shared, &mut request, self.limits, &mut sqe);
            }
            match queue.submit(sqe, offset, data) {
                Ok(index) => {
                    request.is_outstanding = true;
                    self.sent[index] = Some(request);
                    self.sent_count += 1;
                }
                Err(refused) => {
                    if !self.on_not_taken(request, refused) {
                        break;
                    }
                }
            }
        }
        has_worked
    }

    /// Handles a command that the queue refuses. Returns true when the next command may be accepted.
    #[cold]
    fn on_not_taken(&mut self, mut request: Request, refused: Refused) -> bool {
        let is_own = !request.is_bounced;
        request.take_back(refused.buf);
        match refused.why {
            Refusal::Down | Refusal::Full => {
                self.waiting.push_front(request);
                return false;
            }
            Refusal::Pieces { .. } if is_own => {
                request.must_bounce = true;
                self.waiting.push_front(request);
            }
            why @ (Refusal::Pieces { .. }
            | Refusal::Length { .. }
            | Refusal::TooLong { .. }
            | Refusal::Register { .. }
            | Refusal::Ranges { .. }) => {
                // Logged once per association: further commands will probably fail in the same way.
                if std::mem::replace(&mut self.logged_association, self.view.number) != self.view.number {
                    tracing::warn!(disk = self.shared.name, "cannot send a command: {why}");
                }
                self.end(request, Err(DiskError::Internal));
            }
        }
        true
    }

    /// Handles completions of the far target and the loss of the queue. Returns true when there was any work.
    fn receive(&mut self, now: Nanos) -> bool {
        let Link::Up(queue, _) = &mut self.link else { return false };
        if self.sent_count == 0 && queue.is_up() && now < self.next_look {
            return false;
        }
        self.next_look = now + CHECK_PERIOD;
        let mut has_come = queue.poll(now);
        while let Link::Up(queue, _) = &mut self.link
            && let Some(completion) = queue.next_completion()
        {
            has_come = true;
            self.on_completion(completion);
        }
        if has_come && let (Link::Up(queue, _), Some(attach)) = (&self.link, &self.attach) {
            attach.count(queue);
        }
        if let Link::Up(queue, number) = &self.link
            && let Some(loss) = queue.loss()
        {
            let number = *number;
            let disk = &self.shared.name;
            tracing::debug!(disk, qid = self.qid, "the I/O queue is lost: {loss}");
            self.link = Link::Away;
            if let Some(attach) = &mut self.attach {
                attach.on_queue_lost(now);
            }
            self.on_queue_lost(number, now);
            has_come = true;
        }
        has_come
    }

    fn on_completion(&mut self, completion: FarCompletion) {
        let FarCompletion { index, result, buf, keeps } = completion;
        let Some(mut request) = self.sent.get_mut(index).and_then(Option::take) else { return };
        self.sent_count -= 1;
        self.answered_count -= usize::from(request.is_answered);
        request.is_outstanding = result == Err(Failure::Lost);
        match result {
            Ok(()) => {
                if request.fill.is_some() {
                    end_piece(&self.shared, &mut request, self.limits, keeps);
                }
                self.on_piece(request, buf);
            }
            Err(Failure::Lost) => {
                request.take_back(buf);
                // `on_queue_lost` restores the order when all lost commands have been returned.
                self.waiting.push_back(request);
            }
            Err(Failure::Status(status)) => {
                request.take_back(buf);
                self.on_status(request, status);
            }
        }
    }

    fn on_piece(&mut self, mut request: Request, buf: Option<Buf>) {
        if request.is_answered {
            self.resolve(&request);
        } else if request.on_piece(buf, self.limits) {
            if request.fill.is_some_and(|fill| !fill.may_keep)
                && let Some(agent) = &self.shared.agent
            {
                agent.drop_pages(request.pages(self.limits));
            }
            self.end(request, Ok(()));
        } else if request.is_cancelled {
            self.end(request, Err(DiskError::Cancelled));
        } else {
            self.waiting.push_front(request);
        }
    }

    #[cold]
    fn on_status(&mut self, mut request: Request, status: Status) {
        if request.is_answered {
            self.resolve(&request);
            return;
        }
        if matches!(request.op, Op::WriteZeroes { .. })
            && !request.sends_zeroes
            && is_unsupported(status)
            && !request.is_cancelled
        {
            request.sends_zeroes = true;
            self.waiting.push_front(request);
            return;
        }
        self.end(request, Err(DiskError::of_status(status)));
    }

    /// Resolves the request's ledger entry, if any: the request was answered, or will not be sent again.
    #[inline]
    fn resolve(&self, request: &Request) {
        if let Some(entry) = request.entry {
            self.shared.resolve(entry);
        }
    }

    #[inline]
    fn end(&mut self, request: Request, result: Result<(), DiskError>) {
        self.resolve(&request);
        if request.is_cancelled && request.entry.is_some() {
            // An earlier attempt may still be executed.
            self.orphans.push(request);
            return;
        }
        self.ready.push_back(request.end(result));
    }

    /// Handles the loss of the queue after all its commands were returned; the outstanding ones are at the
    /// end of `waiting`. Records lost writes in the ledger, restores the order and drops answered requests.
    /// Cancelled lost writes become orphans; other cancelled requests end.
    #[cold]
    fn on_queue_lost(&mut self, number: u64, now: Nanos) {
        self.unblock();
        let is_lost = |request: &&mut Request| request.is_outstanding && request.op.is_write();
        self.shared.on_down(self.handle, number, now, self.waiting.iter_mut().filter(is_lost));
        for mut request in std::mem::take(&mut self.waiting) {
            let was_outstanding = std::mem::take(&mut request.is_outstanding);
            if request.is_answered {
                continue;
            }
            if !request.is_cancelled {
                self.waiting.push_back(request);
            } else if was_outstanding && request.op.is_write() {
                self.orphans.push(request);
            } else {
                self.ready.push_back(request.end(Err(DiskError::Cancelled)));
            }
        }
    }

    /// Moves the blocked commands back to `waiting`, in order of submission.
    fn unblock(&mut self) {
        self.waiting.extend(self.blocked.drain(..));
        self.waiting.make_contiguous().sort_unstable_by_key(|request| request.number);
    }

    /// Checks deadlines of commands, and commands that wait for the ledger, at most once per period each.
    fn check(&mut self, now: Nanos) {
        if self.sent_count > 0 && now >= self.next_scan {
            self.scan(now);
        }
        let has_some = !(self.waiting.is_empty() && self.blocked.is_empty() && self.orphans.is_empty());
        if has_some && now >= self.next_check {
            self.next_check = now + CHECK_PERIOD;
            self.check_waiting(now);
        }
    }

    #[cold]
    fn check_waiting(&mut self, now: Nanos) {
        self.unblock();
        for at in (0..self.waiting.len()).rev() {
            if now >= self.waiting[at].deadline
                && let Some(request) = self.waiting.remove(at)
            {
                self.end(request, Err(DiskError::Internal));
            }
        }
        if self.orphans.is_empty() {
            return;
        }
        let orphans = std::mem::take(&mut self.orphans);
        let (over, left) = self.shared.with_ledger(now, |ledger| {
            let is_over = |request: &Request| request.entry.is_none_or(|entry| ledger.is_over(entry));
            orphans.into_iter().partition::<Vec<_>, _>(is_over)
        });
        self.orphans = left;
        self.ready.extend(over.into_iter().map(|request| request.end(Err(DiskError::Cancelled))));
    }

    /// Fails outstanding commands past their deadline, although the far target may still execute them. Sets
    /// `is_stuck` if the far target does not answer such a command for a further timeout.
    #[cold]
    fn scan(&mut self, now: Nanos) {
        self.next_scan = now + SCAN_PERIOD;
        let command_timeout = self.shared.command_timeout;
        for request in self.sent.iter_mut().flatten().filter(|request| now >= request.deadline) {
            if request.is_answered {
                self.is_stuck |= now >= request.deadline + command_timeout;
                continue;
            }
            if request.op.is_write() {
                self.shared.record_overdue(request);
            }
            let error = if request.is_cancelled { DiskError::Cancelled } else { DiskError::Internal };
            self.ready.push_back(request.answer(Err(error)));
            self.answered_count += 1;
        }
        if self.is_stuck {
            // The next turn abandons the queue, which ends the association for all cores.
            let (disk, time) = (&self.shared.name, command_timeout.as_duration());
            tracing::warn!(disk, qid = self.qid, "no response to a command in twice {time:?}");
        }
    }

    /// Returns the error of a command that must not begin: the disk is write-protected, the far target does
    /// not support the command, or its data is missing. `None`: the command may begin.
    fn refusal(&self, op: Op, has_data: bool) -> Option<DiskError> {
        let has = self.shared.abilities;
        let is_supported = match op {
            Op::Compare => has.compare(),
            Op::Verify => has.verify(),
            Op::Deallocate => has.dataset_management(),
            Op::Read | Op::Write { .. } | Op::WriteZeroes { .. } | Op::Flush => true,
        };
        if op.is_write() && self.view.shape.geometry.is_read_only {
            Some(DiskError::WriteProtected)
        } else if !is_supported {
            Some(DiskError::NotSupported)
        } else {
            let wants_data = matches!(op, Op::Read | Op::Write { .. } | Op::Compare);
            (wants_data && !has_data).then_some(DiskError::Internal)
        }
    }
}

/// Chooses the command of a fill: Read, or Read and Register.
fn begin_piece<F: Far>(shared: &Users<F>, request: &mut Request, limits: PieceParams, sqe: &mut Sqe) {
    let pages = request.piece_pages(limits);
    let (Some(agent), Some(fill)) = (&shared.agent, &mut request.fill) else { return };
    fill.piece = agent.begin_fill(&pages);
    if matches!(fill.piece, Fill::Registers(_)) {
        sqe.opcode = READ_AND_REGISTER.0;
    }
}

/// Handles the answer to a command of [`begin_piece`].
fn end_piece<F: Far>(shared: &Users<F>, request: &mut Request, limits: PieceParams, keeps: bool) {
    let pages = request.piece_pages(limits);
    if let (Some(agent), Some(fill)) = (&shared.agent, &mut request.fill) {
        fill.may_keep &= agent.end_fill(fill.piece, &pages, keeps);
    }
}

/// Returns true for a status by which the far target refuses a command or its length.
pub(crate) fn is_unsupported(status: Status) -> bool {
    let unsupported = [Status::INVALID_OPCODE, Status::INVALID_FIELD, Status::COMMAND_SIZE_LIMIT_EXCEEDED];
    unsupported.contains(&status.code())
}

/// Returns true when an entry of the ledger blocks the request, maybe its own; false for a Flush, which has
/// no block range.
#[cold]
fn is_blocked<F: Far>(shared: &Users<F>, request: &Request, now: Nanos) -> bool {
    if request.op == Op::Flush {
        return false;
    }
    let (id, is_write) = (request.entry.unwrap_or(NEWEST), request.op.is_write());
    // Of a disk that other hosts write to, the first try must not land on a newer write of theirs: the
    // second is not answered before the association of the first is over.
    let is_shared = shared.agent.is_some();
    shared.with_ledger(now, |ledger| {
        ledger.is_blocked(id, request.range, is_write) || is_shared && ledger.may_land(id)
    })
}

impl<F: Far> DiskChannel for RemoteChannel<F> {
    fn geometry(&self) -> Geometry {
        self.view.shape.geometry
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        let IoRequest { op, range, hints, sender, waited, .. } = *request;
        // A layer kept the command for the whole `command_timeout`.
        let is_late = waited.time() >= self.shared.command_timeout;
        let late = is_late.then_some(DiskError::Internal);
        if let Some(error) = self.refusal(op, buf.is_some()).or(late) {
            return Some(Done { token, result: Err(error), buf });
        }
        self.numbers += 1;
        let deadline = self.now + (self.shared.command_timeout - waited.time());
        let mut request = Request::new(token, op, range, buf, self.numbers, deadline);
        request.hints = hints;
        request.sends_zeroes = !self.shared.abilities.write_zeroes();
        if sender == Sender::FILL && self.shared.agent.is_some() {
            request.fill = Some(CoherentFill { piece: Fill::Plain, may_keep: true });
        }
        self.waiting.push_back(request);
        None
    }

    fn abilities(&self) -> Abilities {
        let has = self.shared.abilities;
        Abilities { compare: has.compare(), verify: has.verify(), ..Abilities::default() }
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool {
        self.now = now;
        if self.version != self.shared.version() {
            self.refresh();
        }
        let mut has_worked = self.step_link(now);
        has_worked |= self.receive(now);
        self.check(now);
        has_worked |= self.send();
        if let Link::Up(queue, _) = &mut self.link {
            queue.send();
        }
        has_worked |= !self.ready.is_empty();
        Done::give(&mut self.ready, done);
        has_worked
    }

    fn may_still_write(&self, range: BlockRange) -> bool {
        // Another core may have added an entry after `view` was copied.
        (self.view.has_entries || self.version != self.shared.version())
            && self.shared.with_ledger(self.now, |ledger| ledger.is_blocked(NEWEST, range, true))
    }

    fn cancel_owner(&mut self, owner: Owner) -> usize {
        let own = |token: Token| token.owner() == owner;
        self.unblock();
        for at in (0..self.waiting.len()).rev() {
            if own(self.waiting[at].token)
                && let Some(request) = self.waiting.remove(at)
            {
                self.resolve(&request);
                if request.entry.is_some() {
                    self.orphans.push(request);
                } else {
                    self.ready.push_back(request.end(Err(DiskError::Cancelled)));
                }
            }
        }
        let mut count = Done::count_of(owner, &self.ready);
        count += self.orphans.iter().filter(|request| own(request.token)).count();
        let sent = self.sent.iter_mut().flatten().filter(|request| !request.is_answered);
        for request in sent.filter(|request| own(request.token)) {
            request.is_cancelled = true;
            count += 1;
        }
        count
    }

    /// Returns the number of commands in flight, without those whose [`Done`] preceded the answer.
    fn in_flight(&self) -> usize {
        let own = self.waiting.len() + self.blocked.len() + self.orphans.len() + self.ready.len();
        own + self.sent_count - self.answered_count
    }
}

impl<F: Far> Drop for RemoteChannel<F> {
    fn drop(&mut self) {
        let number = if let Link::Up(_, number) = &self.link { *number } else { 0 };
        let writes = self.sent.iter().flatten().filter(|request| request.op.is_write());
        let sent = writes.map(|request| (request.entry, request.range));
        let others = self.waiting.iter().chain(&self.blocked);
        let live = others.filter_map(|request| request.entry);
        self.shared.close(self.handle, number, self.now, sent, live);
    }
}
