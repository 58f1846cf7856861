//! [`CompareAndWriteQueue`]: a core's compare-and-writes and its place at the guard.
//!
//! ```text
//!   queued ── the guard is free: hold ──> Clearing ── no other write to the block in flight ──> Reading
//!   Reading ── differs, or an error ──> finish
//!      └─ equal ──> Writing ──> finish
//! ```
//!
//! What is expected is copied out, one block, and the block is read into its buffer: a pair takes no third
//! buffer. Were it to wait for one, pairs could take the whole pool and wait for each other without end.
//!
//! The guard is held from Clearing to the end.

use std::collections::VecDeque;
use std::sync::Arc;

use spindle_reactor::mem::Buf;

use super::guard::{GuardParticipant, Hold};
use crate::{BlockRange, Owner, Token};

/// The largest block, in bytes.
pub const BLOCK_BYTES_MAX: usize = 4096;

/// Where the one that holds the guard is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Writes to the block that began before are still in flight.
    Clearing,
    /// The block is being read.
    Reading,
    /// The block was as expected and is being written.
    Writing,
}

/// A compare-and-write of one block.
#[derive(Debug)]
pub struct CompareAndWrite {
    /// Given to `submit`.
    pub token: Token,
    /// One block.
    pub range: BlockRange,
    /// What is expected. `None` from Reading on: its buffer is the one to read into.
    expected: Option<Buf>,
    /// `None` while the disk has it.
    pub data: Option<Buf>,
    /// The caller's time of its submission.
    pub since: u32,
}

impl CompareAndWrite {
    /// `expected` and `data` are one block long.
    #[must_use]
    pub fn new(token: Token, range: BlockRange, expected: Buf, data: Buf, since: u32) -> CompareAndWrite {
        CompareAndWrite { token, range, expected: Some(expected), data: Some(data), since }
    }
}

struct Active {
    pair: CompareAndWrite,
    phase: Phase,
    /// Its submitter is gone: the block is not written.
    is_cancelled: bool,
    hold: Hold,
}

/// See the module. Dropped when nothing of it is in flight.
pub struct CompareAndWriteQueue {
    participant: Arc<GuardParticipant>,
    /// The one that holds the guard.
    active: Option<Active>,
    queue: VecDeque<CompareAndWrite>,
    /// What the active one expects, of as many bytes as a block has.
    expected: Box<[u8; BLOCK_BYTES_MAX]>,
}

impl CompareAndWriteQueue {
    /// An empty one.
    #[must_use]
    pub fn new(participant: GuardParticipant) -> CompareAndWriteQueue {
        CompareAndWriteQueue {
            participant: Arc::new(participant),
            active: None,
            queue: VecDeque::with_capacity(16),
            expected: Box::new([0; BLOCK_BYTES_MAX]),
        }
    }

    /// The core's place at the guard.
    #[inline]
    #[must_use]
    pub fn participant(&self) -> &Arc<GuardParticipant> {
        &self.participant
    }

    /// Queue one.
    pub fn push(&mut self, pair: CompareAndWrite) {
        self.queue.push_back(pair);
    }

    /// Compare-and-writes that have not ended.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.queue.len() + usize::from(self.active.is_some())
    }

    /// True when there is none.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the active one is.
    #[must_use]
    pub fn phase(&self) -> Option<Phase> {
        self.active.as_ref().map(|active| active.phase)
    }

    /// Have the next one hold the guard, if no other holds it.
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

    /// Give up the guard of one that is still Clearing: it is the next in the queue again.
    pub fn stand_back(&mut self) {
        if self.phase() == Some(Phase::Clearing)
            && let Some(Active { pair, hold, .. }) = self.active.take()
        {
            self.participant.release(hold);
            self.queue.push_front(pair);
        }
    }

    /// What to read into which buffer, once no other write to the block is in flight on any core.
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

    /// The block was read. The data that is to be written when it is as expected; `None`: it is not.
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

    /// The active one has ended: the guard goes. `data`: what was to be written, where the disk had it.
    pub fn finish(&mut self, data: Option<Buf>) -> Option<CompareAndWrite> {
        let Active { mut pair, hold, .. } = self.active.take()?;
        self.participant.release(hold);
        pair.data = data.or(pair.data);
        Some(pair)
    }

    /// Take out the first for which `is_over` says so, of those of which the disk has nothing.
    pub fn take_where(&mut self, is_over: impl Fn(&CompareAndWrite) -> bool) -> Option<CompareAndWrite> {
        let is_clearing = |active: &Active| active.phase == Phase::Clearing && is_over(&active.pair);
        if self.active.as_ref().is_some_and(is_clearing) {
            return self.finish(None);
        }
        let at = self.queue.iter().position(is_over)?;
        self.queue.remove(at)
    }

    /// The submitter `owner` is gone. True when the active one is its: it ends without a write.
    pub fn cancel_active(&mut self, owner: Owner) -> bool {
        let Some(active) = self.active.as_mut().filter(|it| it.pair.token.owner() == owner) else {
            return false;
        };
        active.is_cancelled = true;
        true
    }

    /// The active one's submitter is gone.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.active.as_ref().is_some_and(|active| active.is_cancelled)
    }

    /// The hold of the active one, which does not end here: see [`GuardParticipant::release`].
    pub fn take_hold(&mut self) -> Option<Hold> {
        self.active.take().map(|active| active.hold)
    }
}

impl Drop for CompareAndWriteQueue {
    fn drop(&mut self) {
        self.finish(None);
    }
}
