//! A queue pair over one connection: commands are submitted under tickets and completed.
//!
//! ```text
//!            submit                     completion                    taken
//!   free ─────────────> Waiting ───────────────────────> Done ──────────────────> free
//!                            (or the link ends: lost)
//! ```
//! The index of a command's slab entry is its CID; the entry's generation invalidates old tickets. A
//! completion is taken by its ticket, or in the order of arrival.

use std::collections::VecDeque;
use std::time::Duration;

use nvme_spec::status::Status;
use nvme_spec::{Cqe, Sqe};
use spindle_reactor::clock::{Clock, Nanos};
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::{Slab, Slot};
use spindle_tcp::RxBatch;
use spindle_transport::host::{self, HostData};

use crate::error::Loss;
use crate::link::{Link, LinkEvent};

/// Time that a wait polls before it sleeps on the socket: a few round trips of a fast target, in which most
/// commands complete.
const SPIN: Nanos = Nanos::from_us(50);

/// Identifies a command of a queue until its completion is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(Slot);

impl Ticket {
    /// Number below the queue's depth, unique among the commands whose completion is not taken yet: an index
    /// for the caller's tables.
    #[inline]
    #[must_use]
    pub fn index(self) -> usize {
        self.0.index()
    }
}

/// Error of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Status of the target; or `COMMAND_TRANSIENT_TRANSPORT_ERROR` for a data digest error.
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
    /// The error is the target's status or the loss of the connection.
    pub result: Result<(), Failure>,
    /// Completion queue entry. Synthesized for a C2HData with SUCCESS, and after the end of the connection.
    pub cqe: Cqe,
    /// The buffer submitted with the command; filled after a successful read.
    pub buf: Option<Buf>,
}

/// Why a command was refused by [`IoQueue`](crate::IoQueue).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The queue has as many commands as its depth, including completed ones that were not taken.
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
    /// Registration with the RDMA device failed: the limit on locked memory is reached, or the device has no
    /// free resources.
    #[error("the buffer cannot be registered with the RDMA device: {}", reason(*errno))]
    Register {
        /// Error number of `ibv_reg_mr`.
        errno: i32,
    },
    /// The number of ranges is not 1 to 256, or exceeds the buffer.
    #[error("{count} ranges in a buffer for {room}; 1 to 256 are allowed")]
    Ranges {
        /// Number of ranges.
        count: usize,
        /// Ranges that fit in the buffer.
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
    /// Reason.
    pub why: Refusal,
    /// The buffer submitted with the command.
    pub buf: Option<Buf>,
}

impl Refused {
    #[cold]
    pub(crate) fn new(why: Refusal, buf: Option<Buf>) -> Refused {
        Refused { why, buf }
    }
}

/// Why a wait returned without a completion.
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

/// A queue pair. See the module.
#[derive(Debug)]
pub(crate) struct Qpair {
    pub(crate) link: Link,
    entries: Slab<Entry>,
    /// Completed commands in order of arrival; some may have been taken by their ticket.
    ready: VecDeque<Slot>,
    /// Commands that are `Waiting`.
    outstanding: usize,
    /// Receive batch of a queue outside a [`QueueSet`](crate::QueueSet).
    batch: RxBatch,
    batch_bytes: usize,
    /// Time of the last completion, or of the first check after the queue was idle; zero until that check.
    quiet_since: Nanos,
    command_timeout: Nanos,
    loss: Option<Loss>,
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
        }
    }

    /// Queues a command and sets its CID. Sent by the next `send` or `turn`.
    #[inline]
    pub(crate) fn submit(&mut self, mut sqe: Sqe, data: HostData) -> Result<Ticket, Refused> {
        let Some(slot) = self.entries.next_slot() else {
            return Err(Refused::new(Refusal::Full, data.into_buffer()));
        };
        sqe.cid.set(cid_of(slot));
        if let Err((why, data)) = self.link.submit(sqe, data) {
            return Err(Refused::new(why, data.into_buffer()));
        }
        if self.outstanding == 0 {
            self.quiet_since = Nanos::ZERO;
        }
        // Cannot fail: `next_slot` has returned a free slot.
        let _ = self.entries.insert(Entry::Waiting);
        self.outstanding += 1;
        Ok(Ticket(slot))
    }

    #[inline]
    pub(crate) fn send(&mut self) {
        self.link.send();
    }

    /// Sends, receives once and collects completions. True when anything arrived or the connection ended.
    #[inline]
    pub(crate) fn turn(&mut self, batch: &mut RxBatch, now: Nanos) -> bool {
        let Qpair { link, entries, ready, outstanding, loss, .. } = self;
        if loss.is_some() {
            return false;
        }
        let before = *outstanding;
        let mut ended = None;
        let has_come = link.turn(batch, now, |event, is_open| match event {
            LinkEvent::Completed { cid, cqe, buf, result } => {
                let Some(slot) = entries.slot_at(usize::from(cid)) else { return };
                let Some(entry) = entries.get_mut(slot) else { return };
                let result = match result {
                    Ok(()) => Ok(()),
                    Err(Status::HOST_PATHING_ERROR) if !is_open => Err(Failure::Lost),
                    Err(status) => Err(Failure::Status(status)),
                };
                *entry = Entry::Done(result, cqe, buf);
                *outstanding -= 1;
                ready.push_back(slot);
            }
            LinkEvent::Closed(why) => ended = Some(why),
        });
        if ended.is_some() {
            *loss = ended;
        }
        if *outstanding < before {
            self.quiet_since = now;
            self.remove_taken();
        } else if !has_come {
            self.check_timeout(now);
        }
        has_come
    }

    /// As [`Qpair::turn`], with the queue's own batch.
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

    /// Removes taken commands from `ready`, to bound its length.
    #[inline]
    fn remove_taken(&mut self) {
        if self.ready.len() > self.entries.capacity() {
            let entries = &self.entries;
            self.ready.retain(|slot| entries.get(*slot).is_some());
        }
    }

    /// Fails the connection when no command has completed within the command timeout.
    #[inline]
    pub(crate) fn check_timeout(&mut self, now: Nanos) {
        if self.quiet_since == Nanos::ZERO {
            self.quiet_since = now;
        }
        // Additions saturate: never true without a timeout.
        if now >= self.quiet_since + self.command_timeout && self.outstanding > 0 && self.link.is_open() {
            self.link.fail(Loss::Silent(self.command_timeout.as_duration()));
        }
    }

    /// Takes the next completion in order of arrival.
    #[inline]
    pub(crate) fn next_completion(&mut self) -> Option<Completion> {
        while let Some(slot) = self.ready.pop_front() {
            if let Some(Entry::Done(result, cqe, buf)) = self.entries.remove(slot) {
                return Some(Completion { ticket: Ticket(slot), result, cqe, buf });
            }
        }
        None
    }

    /// True when the command has completed, also after its completion was taken.
    #[inline]
    pub(crate) fn is_done(&self, ticket: Ticket) -> bool {
        !matches!(self.entries.get(ticket.0), Some(Entry::Waiting))
    }

    /// Takes the completion of this command, if it has completed.
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

    /// Waits for the completion of this command.
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
            if now - active >= SPIN {
                // At most 100 ms at a time, so that `check_timeout` runs.
                let part = (deadline - now).min(Nanos::from_ms(100));
                self.link.wait_io(part.as_duration(), None);
                now = Clock::now();
            }
        }
        self.take(ticket).ok_or(WaitError::Nothing)
    }

    /// True when [`Qpair::next_completion`] may return a completion.
    #[inline]
    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Number of commands without a completion.
    #[inline]
    pub(crate) fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Number of commands that can be queued now.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.entries.capacity() - self.entries.len()
    }

    pub(crate) fn depth(&self) -> usize {
        self.entries.capacity()
    }

    pub(crate) fn is_up(&self) -> bool {
        self.loss.is_none() && self.link.is_open()
    }

    /// Reason of the end of the connection, once every command has completed.
    #[inline]
    pub(crate) fn loss(&self) -> Option<Loss> {
        self.loss
    }

    /// Closes the connection; outstanding commands complete as lost.
    pub(crate) fn close(&mut self) {
        self.link.close();
    }

    /// Aborts the connection.
    pub(crate) fn fail(&mut self, loss: Loss) {
        self.link.fail(loss);
    }
}

fn reason(errno: i32) -> std::io::Error {
    std::io::Error::from_raw_os_error(errno)
}

/// The CID is the slot's index. A slab has at most 65,535 entries.
#[inline]
fn cid_of(slot: Slot) -> u16 {
    u16::try_from(slot.index()).unwrap_or(u16::MAX)
}
