//! [`RemoteCore`]: one core's handle on a remote disk, with an I/O queue of its own.
//!
//! ```text
//!   Away ── an association is up ──> Opening ── connected ──> Up ── lost, or another association ──> Away
//!     ^                                 │ refused                                                     │
//!     └─────────────────────────────────┴── the manager hears of it ──────────────────────────────────┘
//! ```
//! What was lost is sent again in its order, before what came after it. A lost command whose submitter is
//! gone is not sent again: it ends when the next queue is connected, since then the far target has ended
//! whatever it had of it. Where no queue is connected, it ends after [`ORPHANED`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use spindle_disk::{
    Abilities, BlockRange, CoreContext, Disk, DiskError, Done, Geometry, Op, OpenError, Owner, Token,
};
use spindle_initiator::nvme_spec::status::Status;
use spindle_initiator::{Association, Completion, Failure, IoQueue, Opening, Options, Why};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};

use crate::request::{Lack, Limits, Piece, Request, Task};
use crate::status::is_unsupported;
use crate::{PATIENCE, Users};

/// Buffers of pieces, and their size: an MDTS that is common.
const BOUNCE: ZoneSpec = ZoneSpec { buffer_bytes: 128 << 10, count: 4 };
/// Buffers for Connect and for the ranges of Dataset Management.
const SMALL: ZoneSpec = ZoneSpec { buffer_bytes: 4096, count: 16 };
/// How often an idle queue is polled, and waiting commands are checked for their end of time.
const LOOK_PERIOD: Nanos = Nanos::from_ms(1);
/// The far target has ended an association that is silent for as long: some keep-alive time-outs.
const ORPHANED: Nanos = Nanos::from_secs(30);

/// Bytes that a core's handle has for long commands, for Connect and for what it receives.
pub(crate) fn core_bytes() -> usize {
    let zone = |zone: ZoneSpec| zone.buffer_bytes as usize * zone.count as usize;
    zone(BOUNCE) + zone(SMALL) + Options::default().batch_bytes
}

enum Link {
    Away,
    Opening(Box<Opening>, u64),
    Up(Box<IoQueue>, u64),
}

/// See the module.
pub(crate) struct RemoteCore {
    qid: u16,
    depth: u16,
    pool: Pool,
    link: Link,
    limits: Limits,
    /// To be sent, in their order.
    waiting: VecDeque<Request>,
    /// With the far target, by the index of their tickets.
    sent: Vec<Option<Request>>,
    sent_count: usize,
    /// Lost commands whose submitter is gone: they may be done by the far target still.
    orphans: Vec<Request>,
    ready: VecDeque<Done>,
    numbers: u64,
    next_look: Nanos,
    /// When commands that wait for the far target are looked at next.
    next_give_up: Nanos,
    /// The queue is up, but commands wait until the manager has checked which disk this is.
    is_unverified: bool,
    /// The association for which a command that could not be sent was told.
    told: u64,
    /// That the I/O queue cannot be connected was told.
    is_refusal_told: bool,
    /// The last: the association ends when the queue has.
    shared: Arc<Users>,
}

impl RemoteCore {
    pub(crate) fn new(shared: Arc<Users>, context: &CoreContext) -> Result<RemoteCore, OpenError> {
        let pool = Pool::new(&[SMALL, BOUNCE], Pages::Base).map_err(|error| OpenError::System {
            disk: shared.name.clone(),
            verb: "take memory for pieces of long commands".to_owned(),
            source: std::io::Error::other(error.to_string()),
        })?;
        let block_bytes = shared.geometry.block_bytes;
        let limits = Limits {
            nsid: shared.spec.nsid,
            block_bytes,
            data_blocks_max: 1,
            bounce_blocks: BOUNCE.buffer_bytes / block_bytes,
        };
        let depth = shared.spec.depth;
        let qid = u16::try_from(context.core + 1).unwrap_or(u16::MAX);
        Ok(RemoteCore {
            qid,
            depth,
            pool,
            link: Link::Away,
            limits,
            waiting: VecDeque::with_capacity(2 * context.depth as usize),
            sent: (0..depth).map(|_| None).collect(),
            sent_count: 0,
            orphans: Vec::new(),
            ready: VecDeque::with_capacity(2 * context.depth as usize),
            numbers: 0,
            next_look: Nanos::ZERO,
            next_give_up: Nanos::ZERO,
            is_unverified: false,
            told: 0,
            is_refusal_told: false,
            shared,
        })
    }

    /// Towards a queue. True when there was anything to do.
    fn step_link(&mut self, now: Nanos) -> bool {
        match &mut self.link {
            Link::Up(queue, number) => {
                if *number != self.shared.current.load(Ordering::Relaxed) {
                    queue.abandon();
                }
                false
            }
            Link::Away => {
                let Some((number, association)) = self.shared.association() else { return false };
                if self.shared.lost.load(Ordering::Acquire) >= number {
                    return false; // it is about to be ended
                }
                self.begin(number, &association, now);
                true
            }
            Link::Opening(opening, number) => {
                let number = *number;
                match opening.step(now) {
                    Ok(None) if number == self.shared.current.load(Ordering::Relaxed) => {}
                    Ok(None) => self.link = Link::Away,
                    Ok(Some(queue)) => self.on_up(queue, number),
                    Err(error) => self.on_refused(number, &error),
                }
                false
            }
        }
    }

    fn begin(&mut self, number: u64, association: &Arc<Association>, now: Nanos) {
        let depth = self.depth.min(association.depth_max());
        match Opening::begin(association, &self.pool, self.qid, depth, now) {
            Ok(opening) => self.link = Link::Opening(Box::new(opening), number),
            Err(error) => self.on_refused(number, &error),
        }
    }

    #[cold]
    fn on_refused(&mut self, number: u64, error: &spindle_initiator::Error) {
        // Once: attempts go on for as long as it takes.
        if !std::mem::replace(&mut self.is_refusal_told, true) {
            tracing::warn!(disk = self.shared.name, qid = self.qid, "cannot connect an I/O queue: {error}");
        }
        self.link = Link::Away;
        self.shared.on_lost(number);
    }

    #[cold]
    fn on_up(&mut self, queue: IoQueue, number: u64) {
        let blocks = queue.transfer_bytes_max() / self.limits.block_bytes;
        self.limits.data_blocks_max = blocks.clamp(1, 1 << 16);
        self.link = Link::Up(Box::new(queue), number);
        if std::mem::take(&mut self.is_refusal_told) {
            tracing::info!(disk = self.shared.name, qid = self.qid, "the I/O queue is connected");
        }
        // The far target has answered Connect: of what was before it does nothing more.
        self.end_orphans(|_| true);
        for request in &mut self.waiting {
            (request.was_sent, request.waits_since) = (false, None);
        }
    }

    fn end_orphans(&mut self, is_over: impl Fn(&Request) -> bool) {
        for at in (0..self.orphans.len()).rev() {
            if is_over(&self.orphans[at]) {
                let request = self.orphans.swap_remove(at);
                self.ready.push_back(request.end(Err(DiskError::Cancelled)));
            }
        }
    }

    /// Notes whether the manager checks which disk this is (`Shared::unverified`); nothing is sent meanwhile.
    fn note_verified(&mut self) {
        let Link::Up(_, number) = &self.link else { return };
        let is_unverified = self.shared.unverified.load(Ordering::Acquire) == *number;
        if !is_unverified && self.is_unverified {
            for request in &mut self.waiting {
                request.waits_since = None;
            }
        }
        self.is_unverified = is_unverified;
    }

    /// Give the queue as much as it takes.
    fn send(&mut self) -> bool {
        let Link::Up(queue, number) = &mut self.link else { return false };
        if self.is_unverified {
            return false;
        }
        let mut has_worked = false;
        while queue.room() > 0
            && queue.is_up()
            && let Some(mut request) = self.waiting.pop_front()
        {
            let Piece { sqe, data } = match request.next(self.limits, &self.pool) {
                Ok(piece) => piece,
                Err(Lack::Buffer) => {
                    self.waiting.push_front(request);
                    break; // a piece that ends gives its buffer back
                }
                Err(Lack::Data) => {
                    tracing::error!(
                        disk = self.shared.name,
                        "a command without its data: {:?}",
                        request.task
                    );
                    self.ready.push_back(request.end(Err(DiskError::Internal)));
                    continue;
                }
            };
            has_worked = true;
            match queue.submit(sqe, data) {
                Ok(ticket) => {
                    self.sent[ticket.index()] = Some(request);
                    self.sent_count += 1;
                }
                Err(refused) => {
                    request.take_back(refused.buf);
                    if matches!(refused.why, Why::Down | Why::Full) {
                        self.waiting.push_front(request);
                        break;
                    }
                    // Once for each association: the next command will not fare better.
                    if std::mem::replace(&mut self.told, *number) != *number {
                        tracing::warn!(disk = self.shared.name, "cannot send a command: {}", refused.why);
                    }
                    self.ready.push_back(request.end(Err(DiskError::Internal)));
                }
            }
        }
        has_worked
    }

    /// Take what the far target has answered. True when there was any.
    fn receive(&mut self, now: Nanos) -> bool {
        let Link::Up(queue, _) = &mut self.link else { return false };
        if self.sent_count == 0 && queue.is_up() && now < self.next_look {
            return false;
        }
        self.next_look = now + LOOK_PERIOD;
        let mut has_come = queue.poll(now);
        while let Link::Up(queue, _) = &mut self.link
            && let Some(completion) = queue.next_completion()
        {
            has_come = true;
            self.on_completion(completion);
        }
        if let Link::Up(queue, number) = &self.link
            && let Some(loss) = queue.loss()
        {
            let number = *number;
            tracing::debug!(disk = self.shared.name, qid = self.qid, "the I/O queue is lost: {loss}");
            self.link = Link::Away;
            self.on_away(number, now);
            has_come = true;
        }
        has_come
    }

    fn on_completion(&mut self, completion: Completion) {
        let Completion { ticket, result, buf, .. } = completion;
        let Some(mut request) = self.sent.get_mut(ticket.index()).and_then(Option::take) else { return };
        self.sent_count -= 1;
        match result {
            Ok(()) => self.on_piece(request, buf),
            Err(Failure::Lost) => {
                request.take_back(buf);
                request.was_sent = true;
                // It is put in its place when all have come back.
                self.waiting.push_back(request);
            }
            Err(Failure::Status(status)) => {
                request.take_back(buf);
                self.on_status(request, status);
            }
        }
    }

    fn on_piece(&mut self, mut request: Request, buf: Option<Buf>) {
        if request.on_piece(buf, self.limits) {
            self.ready.push_back(request.end(Ok(())));
        } else if request.is_forgotten {
            self.ready.push_back(request.end(Err(DiskError::Cancelled)));
        } else {
            self.waiting.push_front(request);
        }
    }

    #[cold]
    fn on_status(&mut self, mut request: Request, status: Status) {
        if let Task::Zeroes { fua, .. } = request.task
            && is_unsupported(status)
            && !request.is_forgotten
        {
            request.task = Task::ZeroData { fua };
            self.waiting.push_front(request);
            return;
        }
        self.ready.push_back(request.end(Err(DiskError::of_status(status))));
    }

    /// The queue is gone, and everything has come back from it.
    #[cold]
    fn on_away(&mut self, number: u64, now: Nanos) {
        self.waiting.make_contiguous().sort_by_key(|request| request.number);
        for request in &mut self.waiting {
            request.waits_since.get_or_insert(now);
        }
        for at in (0..self.waiting.len()).rev() {
            if self.waiting[at].is_forgotten {
                self.orphans.extend(self.waiting.remove(at));
            }
        }
        self.shared.on_lost(number);
    }

    /// What has waited for too long fails.
    #[cold]
    fn give_up(&mut self, now: Nanos) {
        if now < self.next_give_up {
            return;
        }
        self.next_give_up = now + LOOK_PERIOD;
        for request in &mut self.waiting {
            request.waits_since.get_or_insert(now);
        }
        let is_over = |request: &Request, time| request.waits_since.is_some_and(|since| now >= since + time);
        while self.waiting.front().is_some_and(|request| is_over(request, PATIENCE))
            && let Some(request) = self.waiting.pop_front()
        {
            self.ready.push_back(request.end(Err(DiskError::Internal)));
        }
        self.end_orphans(|request| is_over(request, ORPHANED));
    }

    /// Zeroes as the far target can.
    fn task(&self, op: Op) -> Task {
        if let Op::WriteZeroes { fua, .. } = op
            && !self.shared.abilities.write_zeroes()
        {
            return Task::ZeroData { fua };
        }
        Task::from(op)
    }

    /// Why a command ends before it begins.
    fn refusal(&self, op: Op, has_data: bool) -> Option<DiskError> {
        let has = self.shared.abilities;
        let is_supported = match op {
            Op::Compare => has.compare(),
            Op::Verify => has.verify(),
            Op::Deallocate => has.dataset_management(),
            Op::Read | Op::Write { .. } | Op::WriteZeroes { .. } | Op::Flush => true,
        };
        let is_write = matches!(op, Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate);
        if is_write && self.shared.geometry.is_read_only {
            Some(DiskError::WriteProtected)
        } else if !is_supported {
            Some(DiskError::NotSupported)
        } else {
            let wants_data = matches!(op, Op::Read | Op::Write { .. } | Op::Compare);
            (wants_data && !has_data).then_some(DiskError::Internal)
        }
    }
}

impl Disk for RemoteCore {
    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    fn submit(&mut self, token: Token, op: Op, range: BlockRange, buf: Option<Buf>) -> Option<Done> {
        if let Some(error) = self.refusal(op, buf.is_some()) {
            return Some(Done { token, result: Err(error), buf });
        }
        self.numbers += 1;
        self.waiting.push_back(Request::new(token, self.task(op), range, buf, self.numbers));
        None
    }

    fn abilities(&self) -> Abilities {
        let has = self.shared.abilities;
        Abilities { compare: has.compare(), verify: has.verify(), copy: false }
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool {
        let mut has_worked = self.step_link(now);
        has_worked |= self.receive(now);
        self.note_verified();
        if self.is_unverified || !matches!(self.link, Link::Up(..)) {
            self.give_up(now);
        }
        has_worked |= self.send();
        if let Link::Up(queue, _) = &mut self.link {
            queue.send();
        }
        while done.len() < done.capacity()
            && let Some(ready) = self.ready.pop_front()
        {
            has_worked = true;
            done.push(ready);
        }
        has_worked
    }

    fn forget(&mut self, owner: Owner) -> usize {
        let own = |token: Token| token.owner() == owner;
        for at in (0..self.waiting.len()).rev() {
            if own(self.waiting[at].token)
                && let Some(request) = self.waiting.remove(at)
            {
                if request.was_sent {
                    self.orphans.push(request);
                } else {
                    self.ready.push_back(request.end(Err(DiskError::Cancelled)));
                }
            }
        }
        let mut count = self.ready.iter().filter(|done| own(done.token)).count();
        count += self.orphans.iter().filter(|request| own(request.token)).count();
        for request in self.sent.iter_mut().flatten().filter(|request| own(request.token)) {
            request.is_forgotten = true;
            count += 1;
        }
        count
    }

    fn in_flight(&self) -> usize {
        self.waiting.len() + self.sent_count + self.orphans.len() + self.ready.len()
    }
}
