//! A queue pair over one connection. A [`Ticket`] identifies a command until its completion is taken.
//!
//! ```text
//!            submit                     completion                    taken
//!   free ─────────────> Waiting ───────────────────────> Done ──────────────────> free
//!                            (or the link ends: lost)
//! ```
//! The index of a command's slab entry is its CID; the entry's generation invalidates old tickets. A
//! completion is taken by its ticket or in the order of arrival.

use std::collections::VecDeque;
use std::time::Duration;

use nvme_spec::status::Status;
use nvme_spec::{Cqe, Sqe};
use spindle_nvme_optimistic::client::{Attached, OptimisticCounts, Outcome, PageRange, RdmaReader};
use spindle_nvme_tcp::RxBatch;
use spindle_nvme_transport::host::{self, HostData};
use spindle_reactor::clock::{Clock, Nanos};
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::{Slab, Slot};

use crate::error::Loss;
use crate::link::{Link, LinkEvent};

/// Polling time of a wait before it sleeps: a few round trips of a fast target.
const SPIN: Nanos = Nanos::from_us(50);

/// Status of an optimistic read whose ordinary read the connection has refused. The host may retry it.
const REPEAT_REFUSED: Status = Status::COMMAND_TRANSIENT_TRANSPORT_ERROR;

/// Identifies a command of a queue until its completion is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(Slot);

impl Ticket {
    /// Returns an index below the queue's depth, unique among commands whose completion was not taken.
    #[inline]
    #[must_use]
    pub fn index(self) -> usize {
        self.0.index()
    }
}

/// Error of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Status of the target; `COMMAND_TRANSIENT_TRANSPORT_ERROR` for a data digest error.
    #[error("{0}")]
    Status(Status),
    /// The connection ended before the answer. The command may or may not have been executed.
    #[error("the connection ended before the answer")]
    Lost,
}

/// Completion of a command.
#[derive(Debug)]
pub struct Completion {
    /// Ticket of the command; no longer valid.
    pub ticket: Ticket,
    /// `Err`: the target's status, or the loss of the connection.
    pub result: Result<(), Failure>,
    /// Completion queue entry; this host's own for a C2HData with SUCCESS, and after the connection's end.
    pub cqe: Cqe,
    /// The command's buffer; filled after a successful read. `None`: the command has no data.
    pub buf: Option<Buf>,
}

/// Reason for which [`IoQueue`](crate::IoQueue) refused a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The queue has as many commands as its depth, including completed commands that were not taken. A
    /// compare-and-write needs two free entries.
    #[error("the queue is full")]
    Full,
    /// The connection has ended or is closing.
    #[error("the connection has ended")]
    Down,
    /// The buffer or range is not 1 to 65,536 whole blocks, or the buffers of a compare-and-write differ in
    /// length.
    #[error("{bytes} bytes are not 1 to 65536 whole blocks of {block_bytes}")]
    Length {
        /// Length of the buffer or range in bytes.
        bytes: usize,
        /// Bytes of a logical block.
        block_bytes: u32,
    },
    /// The buffer exceeds the largest transfer of the controller.
    #[error("{bytes} bytes in one command, the controller allows {allowed}")]
    TooLong {
        /// Length of the buffer in bytes.
        bytes: usize,
        /// MDTS in bytes.
        allowed: u32,
    },
    /// The buffer has more segments than a command's SGL descriptors can address (RDMA).
    #[error("a buffer in {pieces} pieces, a command of this controller names {allowed}")]
    Pieces {
        /// Segments of the buffer.
        pieces: usize,
        /// Most SGL descriptors of a command.
        allowed: usize,
    },
    /// The buffer could not be registered with the RDMA device: the limit on locked memory is reached, the
    /// device or the registration cache has no free entry, or the buffer is heap memory.
    #[error("the buffer cannot be registered with the RDMA device: {}", reason(*errno))]
    Register {
        /// Error number of `ibv_reg_mr`. ENOMEM also: the cache has no free entry. EFAULT: heap memory.
        errno: i32,
    },
    /// There are not 1 to 256 ranges, they do not fit in the buffer, or the buffer is not writable.
    #[error("{count} ranges in a buffer for {room}; 1 to 256 are allowed")]
    Ranges {
        /// Number of ranges.
        count: usize,
        /// Ranges that fit in the buffer; 0 if it is not writable.
        room: usize,
    },
}

impl From<host::SubmitErrorKind> for Refusal {
    fn from(why: host::SubmitErrorKind) -> Refusal {
        match why {
            host::SubmitErrorKind::Closed => Refusal::Down,
            host::SubmitErrorKind::Cid => Refusal::Full,
            host::SubmitErrorKind::Pieces { pieces, allowed } => Refusal::Pieces { pieces, allowed },
        }
    }
}

/// A refused command, with its buffer.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct Refused {
    /// Reason of the refusal.
    pub why: Refusal,
    /// The buffer submitted with the command; `None`: the command has no data.
    pub buf: Option<Buf>,
}

impl Refused {
    #[cold]
    pub(crate) fn new(why: Refusal, buf: Option<Buf>) -> Refused {
        Refused { why, buf }
    }
}

/// Reason for which a wait returned without a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// The timeout has passed; the command is still outstanding.
    #[error("no completion in {0:?}")]
    TimedOut(Duration),
    /// The ticket is not valid: its completion was taken.
    #[error("there is nothing to wait for")]
    Nothing,
}

#[derive(Debug)]
enum Entry {
    Waiting,
    /// Completed, and not taken yet.
    Done(Result<(), Failure>, Cqe, Option<Buf>),
}

#[derive(Debug)]
pub(crate) struct Qpair {
    pub(crate) link: Link,
    entries: Slab<Entry>,
    /// Slots of completed commands in order of arrival. Commands that were taken by ticket may remain here.
    ready: VecDeque<Slot>,
    /// Number of commands that are `Waiting`.
    outstanding: usize,
    /// Receive batch of a queue outside a [`QueueSet`](crate::QueueSet).
    batch: RxBatch,
    batch_bytes: usize,
    /// Time of the last completion, or of the first check after the queue was idle. Zero until that check.
    quiet_since: Nanos,
    command_timeout: Nanos,
    loss: Option<Loss>,
    /// Optimistic reads; `None`: the queue is not attached. `outstanding` leaves out Get References.
    attached: Option<Box<Attached<RdmaReader>>>,
}

impl Qpair {
    pub(crate) fn new(link: Link, depth: u16, options: &crate::options::Options) -> Qpair {
        let entries = usize::from(depth);
        Qpair {
            link,
            entries: Slab::with_capacity(entries),
            ready: VecDeque::with_capacity(2 * entries),
            outstanding: 0,
            batch: RxBatch::default(),
            batch_bytes: options.batch_bytes.max(4096),
            quiet_since: Nanos::ZERO,
            command_timeout: options.command_timeout.map_or(Nanos::MAX, Nanos::from),
            loss: None,
            attached: None,
        }
    }

    /// Attaches the queue: reads are optimistic where possible. Ends the connection before, if there is one;
    /// its reads in flight become ordinary reads.
    pub(crate) fn attach(&mut self, mut attached: Attached<RdmaReader>, now: Nanos) {
        if let Some(former) = &mut self.attached {
            former.end();
            self.poll_attached(now);
        }
        if let Some(former) = &self.attached {
            attached.replace(former);
        }
        self.attached = Some(Box::new(attached));
    }

    /// Returns the slot of the caller's next command; `None`: the queue is full. An attached queue keeps one
    /// slot for its own command.
    #[inline]
    fn next_slot(&self) -> Option<Slot> {
        if self.attached.is_some() && self.room() == 0 {
            return None;
        }
        self.entries.next_slot()
    }

    /// Queues a Get References if one is due and none is outstanding.
    #[cold]
    fn ask_references(&mut self) {
        let Qpair { link, entries, attached: Some(attached), .. } = self else { return };
        let Some(slot) = entries.next_slot().filter(|_| link.is_open()) else { return };
        let is_sent = attached.ask(slot, |mut sqe, buf| {
            sqe.cid.set(cid_of(slot));
            link.submit(sqe, HostData::FromController(buf)).is_ok()
        });
        if is_sent {
            let _ = entries.insert(Entry::Waiting);
            if self.ordinary() == 1 {
                self.quiet_since = Nanos::ZERO;
            }
        }
    }

    /// Returns true while the queue is attached and its optimistic connection has not ended.
    #[inline]
    pub(crate) fn has_optimistic_connection(&self) -> bool {
        self.attached.as_ref().is_some_and(|attached| attached.is_connected())
    }

    /// Returns true when the queue must be polled in every turn, as its socket does not show all completions.
    pub(crate) fn is_polled(&self) -> bool {
        self.attached.is_some() || self.link.socket().is_none()
    }

    /// Returns the counts of optimistic reads; `None`: the queue is not attached.
    pub(crate) fn optimistic_counts(&self) -> Option<OptimisticCounts> {
        self.attached.as_ref().map(|attached| attached.counts())
    }

    /// As [`Qpair::submit`], for a Read into `buf` of the bytes from `offset` on. Optimistic if possible.
    #[inline]
    pub(crate) fn submit_read(&mut self, mut sqe: Sqe, offset: u64, mut buf: Buf) -> Result<Ticket, Refused> {
        let mut pages = None;
        if self.attached.is_some()
            && self.is_up()
            && let Some(slot) = self.next_slot()
            && let Some(attached) = &mut self.attached
        {
            // Not with FUA or protection information.
            let is_plain = sqe.cdw12() >> 16 == 0 && attached.is_connected();
            pages = attached.pages(sqe.nsid(), offset, buf.len()).filter(|_| is_plain);
            sqe.cid.set(cid_of(slot));
            buf = match pages {
                None => buf,
                Some(pages) => match attached.try_read(slot.index(), pages, sqe, buf) {
                    Err(buf) => buf,
                    Ok(()) => {
                        let _ = self.entries.insert(Entry::Waiting);
                        self.outstanding += 1;
                        return Ok(Ticket(slot));
                    }
                },
            };
        }
        self.submit_noted(sqe, HostData::FromController(buf), pages)
    }

    /// Tells the directory of optimistic reads that bytes from `offset` on will change.
    #[inline]
    pub(crate) fn note_write(&mut self, nsid: u32, offset: u64, bytes: usize) {
        if let Some(attached) = &mut self.attached {
            attached.on_write(nsid, offset, bytes);
        }
    }

    /// Takes ended optimistic reads; sends rejected ones as ordinary reads. Returns true if there was any.
    fn poll_attached(&mut self, now: Nanos) -> bool {
        let (had_ordinary, mut has_repeated) = (self.ordinary() > 0, false);
        let Qpair { link, entries, ready, outstanding, attached: Some(attached), .. } = self else {
            return false;
        };
        let has_come = attached.poll(now, |index, outcome| {
            let Some(slot) = entries.slot_at(index) else { return };
            let done = match outcome {
                Outcome::Accepted(buf) => {
                    Entry::Done(Ok(()), Cqe::new(cid_of(slot), Status::SUCCESS), Some(buf))
                }
                Outcome::Repeat(sqe, buf) => match link.submit(sqe, HostData::FromController(buf)) {
                    Ok(()) => {
                        has_repeated = true;
                        return;
                    }
                    Err((why, data)) => {
                        let (status, failure) = if why == Refusal::Down {
                            (Status::HOST_PATHING_ERROR, Failure::Lost)
                        } else {
                            (REPEAT_REFUSED, Failure::Status(REPEAT_REFUSED))
                        };
                        Entry::Done(Err(failure), Cqe::new(cid_of(slot), status), data.into_buffer())
                    }
                },
            };
            if let Some(entry) = entries.get_mut(slot) {
                *entry = done;
                *outstanding -= 1;
                ready.push_back(slot);
            }
        });
        if has_come {
            self.link.send();
            self.remove_taken();
        }
        if has_repeated && !had_ordinary {
            self.quiet_since = Nanos::ZERO;
        }
        has_come
    }

    /// Returns the number of commands outstanding at the target, which the command timeout applies to.
    #[inline]
    fn ordinary(&self) -> usize {
        let (own, optimistic) = self.attached.as_ref().map_or((0, 0), |it| (it.own(), it.in_flight()));
        self.outstanding - optimistic + own
    }

    /// Queues a command and sets its CID. The next `send` or `turn` sends the command.
    #[inline]
    pub(crate) fn submit(&mut self, sqe: Sqe, data: HostData) -> Result<Ticket, Refused> {
        self.submit_noted(sqe, data, None)
    }

    /// `pages`: those of a Read that could be optimistic.
    #[inline]
    fn submit_noted(
        &mut self,
        mut sqe: Sqe,
        data: HostData,
        pages: Option<PageRange>,
    ) -> Result<Ticket, Refused> {
        let Some(slot) = self.next_slot() else {
            return Err(Refused::new(Refusal::Full, data.into_buffer()));
        };
        sqe.cid.set(cid_of(slot));
        if let Err((why, data)) = self.link.submit(sqe, data) {
            return Err(Refused::new(why, data.into_buffer()));
        }
        if self.ordinary() == 0 {
            self.quiet_since = Nanos::ZERO;
        }
        // Cannot fail: `next_slot` has returned a free slot.
        let _ = self.entries.insert(Entry::Waiting);
        self.outstanding += 1;
        if let Some(attached) = &mut self.attached {
            attached.note(slot.index(), pages);
        }
        Ok(Ticket(slot))
    }

    #[inline]
    pub(crate) fn send(&mut self) {
        self.link.send();
        if let Some(attached) = &mut self.attached {
            attached.send();
        }
    }

    /// Sends queued commands, receives once and collects completions. Returns true when data arrived or the
    /// connection ended; an abort by this host may not count. Returns false after the end was reported.
    #[inline]
    pub(crate) fn turn(&mut self, batch: &mut RxBatch, now: Nanos) -> bool {
        let Qpair { link, entries, ready, outstanding, loss, attached, .. } = self;
        if loss.is_some() {
            return false;
        }
        let mut has_completed = false;
        let mut ended = None;
        let mut has_come = link.turn(batch, now, |event, is_open| match event {
            LinkEvent::Completed { cid, cqe, buf, result } => {
                let Some(slot) = entries.slot_at(usize::from(cid)) else { return };
                let Some(entry) = entries.get_mut(slot) else { return };
                let result = match result {
                    Ok(()) => Ok(()),
                    Err(Status::HOST_PATHING_ERROR) if !is_open => Err(Failure::Lost),
                    Err(status) => Err(Failure::Status(status)),
                };
                if let Some(attached) = attached
                    && attached.on_completed(slot, result.is_ok(), &cqe, buf.as_ref())
                {
                    entries.remove(slot);
                    return;
                }
                *entry = Entry::Done(result, cqe, buf);
                *outstanding -= 1;
                has_completed = true;
                ready.push_back(slot);
            }
            LinkEvent::Closed(why) => ended = Some(why),
        });
        if let (Some(attached), true) = (attached, ended.is_some()) {
            attached.end();
        }
        // Before `loss` is set: reads that are repeated now are lost.
        has_come |= self.poll_attached(now);
        if ended.is_some() {
            self.loss = ended;
        } else if self.attached.is_some() {
            self.ask_references();
        }
        if has_completed {
            self.quiet_since = now;
            self.remove_taken();
        } else if !has_come {
            self.check_timeout(now);
        }
        has_come
    }

    /// Runs [`Qpair::turn`] with the queue's own batch, which the first call allocates.
    #[inline]
    pub(crate) fn poll(&mut self, now: Nanos) -> bool {
        if self.batch.capacity() == 0 && self.link.wants_batch() {
            self.batch = RxBatch::new(self.batch_bytes);
        }
        let mut batch = std::mem::take(&mut self.batch);
        let has_come = self.turn(&mut batch, now);
        self.batch = batch;
        has_come
    }

    /// Removes taken commands from `ready` once its length exceeds the depth, to bound its length.
    #[inline]
    fn remove_taken(&mut self) {
        if self.ready.len() > self.entries.capacity() {
            let entries = &self.entries;
            self.ready.retain(|slot| entries.get(*slot).is_some());
        }
    }

    /// Fails the connection when commands are outstanding and none has completed within the command timeout.
    #[inline]
    pub(crate) fn check_timeout(&mut self, now: Nanos) {
        if self.quiet_since == Nanos::ZERO {
            self.quiet_since = now;
        }
        // The addition saturates, so the condition is never true without a timeout.
        if now >= self.quiet_since + self.command_timeout && self.ordinary() > 0 && self.link.is_open() {
            self.link.fail(Loss::Silent(self.command_timeout.as_duration()));
        }
    }

    /// Takes the next completion in order of arrival; `None`: no completion was collected.
    #[inline]
    pub(crate) fn next_completion(&mut self) -> Option<Completion> {
        while let Some(slot) = self.ready.pop_front() {
            if let Some(Entry::Done(result, cqe, buf)) = self.entries.remove(slot) {
                return Some(Completion { ticket: Ticket(slot), result, cqe, buf });
            }
        }
        None
    }

    /// Returns true when the command has completed, also after its completion was taken.
    #[inline]
    pub(crate) fn is_done(&self, ticket: Ticket) -> bool {
        !matches!(self.entries.get(ticket.0), Some(Entry::Waiting))
    }

    /// Takes the completion of this command; `None`: it has not completed, or was taken.
    #[inline]
    pub(crate) fn take(&mut self, ticket: Ticket) -> Option<Completion> {
        if !matches!(self.entries.get(ticket.0), Some(Entry::Done(..))) {
            return None;
        }
        if self.ready.front() == Some(&ticket.0) {
            self.ready.pop_front();
        }
        match self.entries.remove(ticket.0) {
            Some(Entry::Done(result, cqe, buf)) => Some(Completion { ticket, result, cqe, buf }),
            Some(Entry::Waiting) | None => None,
        }
    }

    /// Polls, then sleeps, until this command has completed, and takes its completion. Fails after `timeout`,
    /// or if the completion was taken before.
    pub(crate) fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Completion, WaitError> {
        let mut now = Clock::now();
        let deadline = now + Nanos::from(timeout);
        let mut active = now;
        while !self.is_done(ticket) {
            if self.poll(now) {
                active = now;
                continue;
            }
            if self.is_done(ticket) {
                break;
            }
            now = Clock::now();
            if now >= deadline {
                return Err(WaitError::TimedOut(timeout));
            }
            // The sleep does not end at the completion of an optimistic read.
            let is_optimistic = self.attached.as_ref().is_some_and(|it| it.in_flight() > 0);
            if now - active >= SPIN && !is_optimistic {
                // Sleeps at most 100 ms at a time, so that `check_timeout` runs.
                let part = (deadline - now).min(Nanos::from_ms(100));
                self.link.wait_io(part.as_duration(), None);
                now = Clock::now();
            }
        }
        self.take(ticket).ok_or(WaitError::Nothing)
    }

    /// Returns true when [`Qpair::next_completion`] may return a completion.
    #[inline]
    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    #[inline]
    pub(crate) fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Returns the number of commands that can be queued now.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        let kept = self.attached.as_ref().map_or(0, |attached| attached.kept());
        (self.entries.capacity() - self.entries.len()).saturating_sub(kept)
    }

    pub(crate) fn depth(&self) -> usize {
        self.entries.capacity()
    }

    pub(crate) fn is_up(&self) -> bool {
        self.loss.is_none() && self.link.is_open()
    }

    /// Returns the reason of the end of the connection, once every command has completed; `None` before.
    #[inline]
    pub(crate) fn loss(&self) -> Option<Loss> {
        self.loss
    }

    /// Closes the connection (TCP: after sending queued commands). Outstanding commands complete as lost.
    pub(crate) fn close(&mut self) {
        self.link.close();
    }

    /// Aborts the connection; the next turn completes outstanding commands as lost.
    pub(crate) fn fail(&mut self, loss: Loss) {
        self.link.fail(loss);
    }
}

fn reason(errno: i32) -> std::io::Error {
    std::io::Error::from_raw_os_error(errno)
}

/// Returns the CID of a command, which is the index of its slot. A slab has at most 65,535 entries.
#[inline]
fn cid_of(slot: Slot) -> u16 {
    u16::try_from(slot.index()).unwrap_or(u16::MAX)
}
