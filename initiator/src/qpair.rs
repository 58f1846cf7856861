//! A queue pair: commands out under tickets, completions in, over one connection.
//!
//! ```text
//!            submit                     completion                    taken
//!   free ─────────────> Waiting ───────────────────────> Done ──────────────────> free
//!                            (or the link ends: lost)
//! ```
//! A command's entry is its CID and its generation its age, so that a ticket of yesterday names nothing. A
//! completion is found by its ticket, or in the order of arrival.

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

/// How long a wait polls before it sleeps on the socket: a few round trips of a fast target, in which most
/// commands end.
const SPIN: Nanos = Nanos::from_us(50);

/// The name of one command of one queue, until its completion is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(Slot);

impl Ticket {
    /// A small number, unique among the commands of the queue that are not taken yet, and below the queue's
    /// depth: for tables of the caller.
    #[inline]
    #[must_use]
    pub fn index(self) -> usize {
        self.0.index()
    }
}

/// Why a command did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The target's answer; or its data was damaged on the way (`COMMAND_TRANSIENT_TRANSPORT_ERROR`).
    #[error("{0}")]
    Status(Status),
    /// The connection ended before the answer. The command may or may not have been executed.
    #[error("the connection ended before the answer")]
    Lost,
}

/// How a command ended.
#[derive(Debug)]
pub struct Completion {
    /// Which command; its ticket is used up.
    pub ticket: Ticket,
    /// Whether it succeeded, and why not.
    pub result: Result<(), Failure>,
    /// The completion entry; made up where a success was folded into its data, or the connection ended.
    pub cqe: Cqe,
    /// The buffer that was submitted with it; filled, if it was a read and succeeded.
    pub buf: Option<Buf>,
}

/// Why a command was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// As many commands are outstanding (or done and not taken) as the queue holds: take completions first.
    #[error("the queue is full")]
    Full,
    /// The connection ended, or is ending.
    #[error("the connection has ended")]
    Down,
    /// The buffer is no number of whole blocks, or the number is not one that a command can have.
    #[error("{bytes} bytes are not 1 to 65536 whole blocks of {block_bytes}")]
    Length {
        /// Its length.
        bytes: usize,
        /// Bytes of a block.
        block_bytes: u32,
    },
    /// More than the controller moves in one command.
    #[error("{bytes} bytes in one command, the controller allows {allowed}")]
    TooLong {
        /// What was asked for.
        bytes: usize,
        /// MDTS.
        allowed: u32,
    },
    /// The buffer is in more pieces than a command of this queue can name (RDMA).
    #[error("a buffer in {pieces} pieces, a command of this controller names {allowed}")]
    Pieces {
        /// As many as it takes.
        pieces: usize,
        /// As many as the controller allows.
        allowed: usize,
    },
    /// The buffer cannot be registered with the device (RDMA): the process may not pin so much, or the device
    /// has no room.
    #[error("the buffer cannot be registered with the RDMA device: {}", reason(*errno))]
    Register {
        /// The system's reason.
        errno: i32,
    },
    /// A command has 1 to 256 ranges, and its buffer has room for them.
    #[error("{count} ranges in a buffer for {room}; 1 to 256 are allowed")]
    Ranges {
        /// How many there are.
        count: usize,
        /// What the buffer holds.
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

/// A command that was not taken, with its buffer.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct Refused {
    /// Why not.
    pub why: Refusal,
    /// What it came with.
    pub buf: Option<Buf>,
}

impl Refused {
    #[cold]
    pub(crate) fn new(why: Refusal, buf: Option<Buf>) -> Refused {
        Refused { why, buf }
    }
}

/// Why a wait ended without a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// The time is over; the command is outstanding still.
    #[error("no completion in {0:?}")]
    TimedOut(Duration),
    /// There is no such command: its completion was taken.
    #[error("there is nothing to wait for")]
    Nothing,
}

/// A command's entry.
#[derive(Debug)]
enum Entry {
    /// Outstanding.
    Waiting,
    /// Over, and not taken.
    Done(Result<(), Failure>, Cqe, Option<Buf>),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Qpair {
    pub(crate) link: Link,
    entries: Slab<Entry>,
    /// Done commands in the order of their completion; some of them may have been taken by their ticket.
    ready: VecDeque<Slot>,
    /// Commands that are `Waiting`.
    outstanding: usize,
    /// A batch of its own, for a queue that is not polled in a set.
    batch: RxBatch,
    batch_bytes: usize,
    /// When a command was last completed; zero: not since the first of those that are outstanding, whose time
    /// was not read.
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

    /// Queue a command; its CID is set here. It leaves with the next send or turn.
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
        // There is room: `next_slot` said so.
        let _ = self.entries.insert(Entry::Waiting);
        self.outstanding += 1;
        Ok(Ticket(slot))
    }

    /// Send what is queued.
    #[inline]
    pub(crate) fn send(&mut self) {
        self.link.send();
    }

    /// Send, receive once, note completions. True when anything came.
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
            self.tidy();
        } else if !has_come {
            self.check_silence(now);
        }
        has_come
    }

    /// As [`Qpair::turn`] with its own batch.
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

    /// Forget those of `ready` that were taken by their ticket, before they are more than those that were
    /// not.
    #[inline]
    fn tidy(&mut self) {
        if self.ready.len() > self.entries.capacity() {
            let entries = &self.entries;
            self.ready.retain(|slot| entries.get(*slot).is_some());
        }
    }

    /// Give the connection up when it is silent for too long.
    #[inline]
    pub(crate) fn check_silence(&mut self, now: Nanos) {
        if self.quiet_since == Nanos::ZERO {
            self.quiet_since = now;
        }
        // Sums saturate: without a time-out this is never.
        if now >= self.quiet_since + self.command_timeout && self.outstanding > 0 && self.link.is_open() {
            self.link.fail(Loss::Silent(self.command_timeout.as_duration()));
        }
    }

    /// The next completion in the order of arrival.
    #[inline]
    pub(crate) fn next_completion(&mut self) -> Option<Completion> {
        while let Some(slot) = self.ready.pop_front() {
            if let Some(Entry::Done(result, cqe, buf)) = self.entries.remove(slot) {
                return Some(Completion { ticket: Ticket(slot), result, cqe, buf });
            }
        }
        None
    }

    /// True when the command is over; also when its completion was taken.
    #[inline]
    pub(crate) fn is_done(&self, ticket: Ticket) -> bool {
        !matches!(self.entries.get(ticket.0), Some(Entry::Waiting))
    }

    /// The completion of this command, if it is over and not taken.
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

    /// The completion of this command, once it is there.
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
                // In parts, so that a silent connection is noticed.
                let part = (deadline - now).min(Nanos::from_ms(100));
                self.link.wait_io(part.as_duration(), None);
                now = Clock::now();
            }
        }
        self.take(ticket).ok_or(WaitError::Nothing)
    }

    /// True when [`Qpair::next_completion`] may have something.
    #[inline]
    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Commands without a completion.
    #[inline]
    pub(crate) fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// How many more commands can be queued now.
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

    /// Why the connection ended, once every command has been told.
    #[inline]
    pub(crate) fn loss(&self) -> Option<Loss> {
        self.loss
    }

    /// End the connection; its commands come back as lost.
    pub(crate) fn close(&mut self) {
        self.link.close();
    }

    /// End the connection without a word.
    pub(crate) fn fail(&mut self, loss: Loss) {
        self.link.fail(loss);
    }
}

fn reason(errno: i32) -> std::io::Error {
    std::io::Error::from_raw_os_error(errno)
}

/// A slot's index is the command's CID. (Slabs have at most 65,535 entries.)
#[inline]
fn cid_of(slot: Slot) -> u16 {
    u16::try_from(slot.index()).unwrap_or(u16::MAX)
}
