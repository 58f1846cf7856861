//! [`Swap`]: a compare-and-write on its way, and [`Gate`], the core's place at the guard.
//!
//! ```text
//!   queued ── memory to read into, nobody else compares ──> Clearing
//!   Clearing ── no write to the block in flight ──> Reading ── differs, or an error ──> Done
//!                                                      └── equal ──> Writing ─────────> Done
//! ```
//!
//! The guard is held from Clearing to the end. The write is durable at once (the interface has no FUA here).

use std::collections::VecDeque;

use spindle_reactor::mem::{Buf, Pool};

use super::guard::{Hold, Member};
use crate::{BlockRange, Token};

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
    pub(super) expected: Buf,
    /// `None` while the medium has it.
    pub(super) data: Option<Buf>,
}

/// The one that holds the guard.
pub(super) struct ActiveSwap {
    pub(super) swap: Swap,
    pub(super) state: SwapState,
    /// To read into; `None` while the medium has it.
    pub(super) scratch: Option<Buf>,
    hold: Hold,
}

/// This core's compare-and-writes and its place at the guard. Dropped after the medium, when nothing is in
/// flight.
pub(super) struct Gate {
    pub(super) member: Member,
    pub(super) active: Option<ActiveSwap>,
    queue: VecDeque<Swap>,
}

impl Gate {
    pub(super) fn new(member: Member) -> Gate {
        Gate { member, active: None, queue: VecDeque::with_capacity(16) }
    }

    pub(super) fn push(&mut self, swap: Swap) {
        self.queue.push_back(swap);
    }

    /// Compare-and-writes that have not ended.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.queue.len() + usize::from(self.active.is_some())
    }

    /// Lets the next one hold the guard, when there is memory to read into and nobody else holds it.
    pub(super) fn step_queued(&mut self, pool: &Pool) {
        if self.active.is_some() {
            return;
        }
        let Some(next) = self.queue.front() else { return };
        // Memory first: nobody waits for memory with the guard in hand.
        let bytes = u32::try_from(next.expected.len()).unwrap_or(u32::MAX);
        let Some(scratch) = pool.take_contiguous(bytes) else { return };
        let Some(hold) = self.member.try_hold(next.range.lba) else { return };
        let scratch = Some(scratch);
        self.active =
            self.queue.pop_front().map(|swap| ActiveSwap { swap, state: SwapState::Clearing, scratch, hold });
    }

    /// The buffer and the block to read, when no other write to the block is in flight any more.
    pub(super) fn step_clearing(&mut self) -> Option<(BlockRange, Buf)> {
        let active = self.active.as_mut().filter(|active| active.state == SwapState::Clearing)?;
        if !self.member.is_clear(&mut active.hold) {
            return None;
        }
        active.state = SwapState::Reading;
        active.scratch.take().map(|scratch| (active.swap.range, scratch))
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
