//! [`CompareAndWriteQueue`]: a core's compare-and-writes and its guard participation.
//!
//! ```text
//!   queued ── guard is free: hold ──> Clearing ── no other write to the block in flight ──> Reading
//!   Reading ── blocks differ, error, or cancelled ──> finish
//!      └─ blocks are equal ──> Writing ──> finish
//! ```
//!
//! The read of the block reuses the buffer of the expected data, which is copied out before. A
//! compare-and-write thus needs two buffers. With a third, compare-and-writes that wait for a buffer could
//! exhaust the pool and deadlock.
//!
//! The active compare-and-write holds the guard from Clearing to the end.
//! [`CompareAndWriteQueue::stand_back`] releases it in Clearing.

use std::collections::VecDeque;
use std::sync::Arc;

use spindle_reactor::mem::Buf;

use super::guard::{GuardParticipant, Hold};
use crate::{BlockRange, Owner, Token};

/// The largest block, in bytes.
pub const BLOCK_BYTES_MAX: usize = 4096;

/// Progress of the compare-and-write that holds the guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The guard is held. Earlier writes to the block may still be in flight.
    Clearing,
    /// The block is being read.
    Reading,
    /// The block was equal to the expected data and is being written.
    Writing,
}

/// A compare-and-write of one block.
#[derive(Debug)]
pub struct CompareAndWrite {
    /// Token of the command.
    pub token: Token,
    /// Range of one block.
    pub range: BlockRange,
    /// Expected contents of the block. `None` from Reading on: the read of the block uses the buffer.
    expected: Option<Buf>,
    /// New contents of the block; `None` while the medium's driver has the buffer.
    pub data: Option<Buf>,
    /// Time of submission in the caller's unit, for the caller's timeouts.
    pub since: u32,
}

impl CompareAndWrite {
    /// Creates a compare-and-write. `expected` and `data` must be one block long; `since` is the time of
    /// submission in the caller's unit.
    #[must_use]
    pub fn new(token: Token, range: BlockRange, expected: Buf, data: Buf, since: u32) -> CompareAndWrite {
        CompareAndWrite { token, range, expected: Some(expected), data: Some(data), since }
    }
}

struct Active {
    pair: CompareAndWrite,
    phase: Phase,
    /// Cancelled by its submitter: the caller begins no write.
    is_cancelled: bool,
    hold: Hold,
}

/// Compare-and-writes of one core. Must not be dropped while an operation is at the medium.
pub struct CompareAndWriteQueue {
    participant: Arc<GuardParticipant>,
    /// The compare-and-write that holds the guard.
    active: Option<Active>,
    queue: VecDeque<CompareAndWrite>,
    /// Expected contents of the active compare-and-write. Only the first block length is valid.
    expected: Box<[u8; BLOCK_BYTES_MAX]>,
}

impl CompareAndWriteQueue {
    /// Creates an empty queue.
    #[must_use]
    pub fn new(participant: GuardParticipant) -> CompareAndWriteQueue {
        CompareAndWriteQueue {
            participant: Arc::new(participant),
            active: None,
            queue: VecDeque::with_capacity(16),
            expected: Box::new([0; BLOCK_BYTES_MAX]),
        }
    }

    /// Returns the core's guard participation.
    #[inline]
    #[must_use]
    pub fn participant(&self) -> &Arc<GuardParticipant> {
        &self.participant
    }

    /// Appends a compare-and-write.
    pub fn push(&mut self, pair: CompareAndWrite) {
        self.queue.push_back(pair);
    }

    /// Returns the number of compare-and-writes that have not ended, including the active one.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.queue.len() + usize::from(self.active.is_some())
    }

    /// Returns true if all compare-and-writes have ended.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the phase of the active compare-and-write; `None`: none is active.
    #[must_use]
    pub fn phase(&self) -> Option<Phase> {
        self.active.as_ref().map(|active| active.phase)
    }

    /// Takes the guard for the next compare-and-write. No effect if one is active or another core holds it.
    pub fn hold_next(&mut self) {
        if self.active.is_some() {
            return;
        }
        let Some(hold) = self.queue.front().and_then(|next| self.participant.try_hold(next.range.lba)) else {
            return;
        };
        if let Some(pair) = self.queue.pop_front() {
            self.active = Some(Active { pair, phase: Phase::Clearing, is_cancelled: false, hold });
        }
    }

    /// Releases the guard of a compare-and-write in Clearing, and returns the compare-and-write to the head
    /// of the queue. No effect in other phases.
    pub fn stand_back(&mut self) {
        if self.phase() == Some(Phase::Clearing)
            && let Some(Active { pair, hold, .. }) = self.active.take()
        {
            self.participant.release(hold);
            self.queue.push_front(pair);
        }
    }

    /// Begins Reading: returns the token, range and buffer for the read of the block. `None` in other phases
    /// than Clearing, and while a write to the block is in flight on any core.
    pub fn begin_read(&mut self) -> Option<(Token, BlockRange, Buf)> {
        let active = self.active.as_mut().filter(|active| active.phase == Phase::Clearing)?;
        if !self.participant.is_clear(&mut active.hold) {
            return None;
        }
        let expected = active.pair.expected.take()?;
        let bytes = expected.len().min(BLOCK_BYTES_MAX);
        expected.copy_out(0, &mut self.expected[..bytes]);
        active.phase = Phase::Reading;
        Some((active.pair.token, active.pair.range, expected))
    }

    /// Compares the block `read` with the expected data. If both are equal, begins Writing: returns the
    /// token, range and data of the write. `None` if the blocks differ, and in other phases than Reading.
    pub fn begin_write(&mut self, read: &Buf) -> Option<(Token, BlockRange, Buf)> {
        let active = self.active.as_mut().filter(|active| active.phase == Phase::Reading)?;
        let expected = self.expected.get(..read.len())?;
        if !read.equals_at(0, expected) {
            return None;
        }
        active.phase = Phase::Writing;
        let data = active.pair.data.take()?;
        Some((active.pair.token, active.pair.range, data))
    }

    /// Ends the active compare-and-write, releases the guard and returns the compare-and-write; `None`: none
    /// is active. `data`: the buffer of the write, if the write has ended.
    pub fn finish(&mut self, data: Option<Buf>) -> Option<CompareAndWrite> {
        let Active { mut pair, hold, .. } = self.active.take()?;
        self.participant.release(hold);
        pair.data = data.or(pair.data);
        Some(pair)
    }

    /// Removes and returns the first compare-and-write that satisfies `is_over` and has no operation at the
    /// medium. Releases the guard if the removed compare-and-write holds it.
    pub fn take_where(&mut self, is_over: impl Fn(&CompareAndWrite) -> bool) -> Option<CompareAndWrite> {
        let is_clearing = |active: &Active| active.phase == Phase::Clearing && is_over(&active.pair);
        if self.active.as_ref().is_some_and(is_clearing) {
            return self.finish(None);
        }
        let at = self.queue.iter().position(is_over)?;
        self.queue.remove(at)
    }

    /// Marks the active compare-and-write as cancelled and returns true, if it belongs to `owner`. A write
    /// that has begun completes.
    pub fn cancel_active(&mut self, owner: Owner) -> bool {
        let Some(active) = self.active.as_mut().filter(|it| it.pair.token.owner() == owner) else {
            return false;
        };
        active.is_cancelled = true;
        true
    }

    /// Returns true if the active compare-and-write is marked as cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.active.as_ref().is_some_and(|active| active.is_cancelled)
    }

    /// Removes the active compare-and-write and returns its hold, which the caller passes to
    /// [`GuardParticipant::release`].
    pub fn take_hold(&mut self) -> Option<Hold> {
        self.active.take().map(|active| active.hold)
    }
}

impl Drop for CompareAndWriteQueue {
    fn drop(&mut self) {
        self.finish(None);
    }
}
