//! [`Swap`]: a compare-and-write on its way, and [`Gate`], the core's place at the guard.
//!
//! ```text
//!   queued ── the guard is free ──> Clearing
//!   Clearing ── no write to the block in flight ──> Reading ── differs, or an error ──> Done
//!                                                      └── equal ──> Writing ─────────> Done
//! ```
//!
//! What is expected is copied out, one block, and the block is read into its buffer: a pair takes no third
//! buffer. Were it to wait for one, pairs could take the whole pool and wait for each other without end.
//!
//! The guard is held from Clearing to the end. The write is durable at once (the interface has no FUA here).

use std::collections::VecDeque;

use spindle_reactor::mem::Buf;

use super::guard::{Hold, Member};
use crate::{BlockRange, Owner, Token};

/// Where the one that holds the guard is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SwapState {
    /// Writes to the block that began before are still in flight.
    Clearing,
    /// The block is being read.
    Reading,
    /// The block was as expected and is being written.
    Writing,
}

/// A compare-and-write.
#[derive(Debug)]
pub(super) struct Swap {
    pub(super) token: Token,
    pub(super) range: BlockRange,
    /// What is expected. From Clearing on its buffer is the one to read into, and `Gate` has the bytes.
    pub(super) expected: Option<Buf>,
    /// `None` while the medium has it.
    pub(super) data: Option<Buf>,
}

/// The one that holds the guard.
pub(super) struct ActiveSwap {
    pub(super) swap: Swap,
    pub(super) state: SwapState,
    /// Its submitter is gone: the block is not written.
    pub(super) is_forgotten: bool,
    hold: Hold,
}

/// This core's compare-and-writes and its place at the guard. Dropped after the medium, when nothing is in
/// flight.
pub(super) struct Gate {
    pub(super) member: Member,
    pub(super) active: Option<ActiveSwap>,
    queue: VecDeque<Swap>,
    /// What the active one expects, of as many bytes as a block has.
    expected: Box<[u8; BLOCK_BYTES_MAX]>,
}

/// The largest block.
const BLOCK_BYTES_MAX: usize = 4096;

impl Gate {
    pub(super) fn new(member: Member) -> Gate {
        let expected = Box::new([0; BLOCK_BYTES_MAX]);
        Gate { member, active: None, queue: VecDeque::with_capacity(16), expected }
    }

    /// The block that was read is what the active one expects.
    pub(super) fn is_expected(&self, read: &Buf) -> bool {
        self.expected.get(..read.len()).is_some_and(|expected| read.equals_at(0, expected))
    }

    pub(super) fn push(&mut self, swap: Swap) {
        self.queue.push_back(swap);
    }

    /// Compare-and-writes that have not ended.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.queue.len() + usize::from(self.active.is_some())
    }

    /// Starts the next compare-and-write if the guard of its block is free.
    pub(super) fn step_queued(&mut self) {
        if self.active.is_some() {
            return;
        }
        let Some(next) = self.queue.front() else { return };
        let Some(hold) = self.member.try_hold(next.range.lba) else { return };
        let Some(swap) = self.queue.pop_front() else { return };
        if let Some(expected) = &swap.expected {
            let bytes = expected.len().min(BLOCK_BYTES_MAX);
            expected.copy_out(0, &mut self.expected[..bytes]);
        }
        self.active = Some(ActiveSwap { swap, state: SwapState::Clearing, is_forgotten: false, hold });
    }

    /// The buffer and the block to read, when no other write to the block is in flight any more.
    pub(super) fn step_clearing(&mut self) -> Option<(BlockRange, Buf)> {
        let active = self.active.as_mut().filter(|active| active.state == SwapState::Clearing)?;
        if !self.member.is_clear(&mut active.hold) {
            return None;
        }
        active.state = SwapState::Reading;
        active.swap.expected.take().map(|scratch| (active.swap.range, scratch))
    }

    /// Those of `owner` of which the medium has nothing, given up.
    pub(super) fn forget_queued(&mut self, owner: Owner) -> Vec<Swap> {
        let is_own = |swap: &Swap| swap.token.owner() == owner;
        let is_clearing = |active: &ActiveSwap| active.state == SwapState::Clearing && is_own(&active.swap);
        let active = if self.active.as_ref().is_some_and(is_clearing) { self.finish() } else { None };
        let (own, others): (Vec<Swap>, Vec<Swap>) = self.queue.drain(..).partition(is_own);
        self.queue.extend(others);
        active.into_iter().chain(own).collect()
    }

    /// All of them, given up.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Swap> {
        self.finish().into_iter().chain(self.queue.drain(..))
    }

    /// It has ended: the guard goes.
    pub(super) fn finish(&mut self) -> Option<Swap> {
        let ActiveSwap { swap, hold, .. } = self.active.take()?;
        self.member.release(hold);
        Some(swap)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.finish();
    }
}
