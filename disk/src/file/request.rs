//! [`Request`]: one command on its way through the ring, in one step or several.
//!
//! ```text
//!   Read, Write ── Transfer ──────────────────────────────────────────────> Done
//!   Flush ──────── Sync ──────────────────────────────────────────────────> Done
//!   Deallocate ─── Zeroing(Punch) ─┐ piece after piece
//!   WriteZeroes ── Zeroing(Range) ─┼────────────────── fua ── Sync ───────> Done
//!                  Zeroing(Write) ─┘ without fua ─────────────────────────> Done
//!                  Punch -> Range -> Write where the file does not know the better way
//! ```

use std::io;
use std::sync::atomic::Ordering;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use spindle_reactor::mem::Buf;

use super::Shared;
use crate::{BlockRange, Op, Token};

/// Bytes punched or zeroed in one call: a file system locks the file meanwhile, and others want to have their
/// turn.
pub(super) const PIECE_BYTES: u64 = 1 << 30;
/// Bytes of zeroes in one write: long enough to be fast, and one piece of a [`Buf`].
pub(super) const WRITE_PIECE_BYTES: u64 = 1 << 20;

/// How a range becomes zeroes, the better first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// A hole: the space goes back.
    Punch,
    /// The file system knows that it is zero; the space stays.
    Range,
    /// Zeroes are written.
    Write,
}

impl Way {
    /// The best way that the file has not refused.
    pub(super) fn best(shared: &Shared, gives_back: bool) -> Way {
        if gives_back && shared.can_punch.load(Ordering::Relaxed) {
            Way::Punch
        } else if shared.can_zero_range.load(Ordering::Relaxed) {
            Way::Range
        } else {
            Way::Write
        }
    }

    /// The file refused this way: it is not tried again. The next one.
    pub(super) fn refused(self, shared: &Shared) -> Option<Way> {
        match self {
            Way::Punch => shared.can_punch.store(false, Ordering::Relaxed),
            Way::Range => shared.can_zero_range.store(false, Ordering::Relaxed),
            Way::Write => return None,
        }
        Some(Way::best(shared, false))
    }

    /// This range cannot be done so, as one that does not end at the device's own blocks, which may be larger
    /// than the disk's where I/O goes through the page cache. The next way, for this one alone.
    pub(super) fn humbler(self) -> Option<Way> {
        match self {
            Way::Punch => Some(Way::Range),
            Way::Range => Some(Way::Write),
            Way::Write => None,
        }
    }

    /// Flags of fallocate; `None` for the way without it.
    pub(super) fn flags(self) -> Option<FallocateFlags> {
        match self {
            Way::Punch => Some(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE),
            Way::Range => Some(FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE),
            Way::Write => None,
        }
    }
}

/// Bytes `at .. end` that are still to be zeroed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Zeroing {
    pub(super) way: Way,
    pub(super) at: u64,
    pub(super) end: u64,
}

impl Zeroing {
    /// Bytes of the next piece.
    pub(super) fn piece_bytes(&self) -> u64 {
        let most = if self.way == Way::Write { WRITE_PIECE_BYTES } else { PIECE_BYTES };
        most.min(self.end - self.at)
    }
}

/// What the ring does for a request now.
#[derive(Debug, Clone, Copy)]
pub(super) enum State {
    /// Not begun.
    New,
    Transfer,
    Zeroing(Zeroing),
    Sync,
}

/// True for an error that the page cache keeps for whoever syncs next.
pub(super) fn is_medium_error(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::IO)
}

/// One command.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) token: Token,
    pub(super) op: Op,
    pub(super) range: BlockRange,
    /// Its data, while the ring does not have them.
    pub(super) buf: Option<Buf>,
    pub(super) state: State,
}

impl Request {
    pub(super) fn new(token: Token, op: Op, range: BlockRange, buf: Option<Buf>) -> Request {
        Request { token, op, range, buf, state: State::New }
    }

    /// True when it changes blocks, and so asks at the guard.
    #[inline]
    pub(super) fn is_write(&self) -> bool {
        match self.op {
            Op::Read | Op::Flush => false,
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate => true,
        }
    }

    /// True when it ends with a sync of the file.
    pub(super) fn syncs_last(&self) -> bool {
        matches!(self.op, Op::WriteZeroes { fua: true, .. })
    }

    /// True when `error` may be about bytes that were acknowledged before: any that a sync ends with, and of
    /// a write with FUA those of the medium (others are about the write itself).
    pub(super) fn lost_data(&self, error: &io::Error) -> bool {
        match self.state {
            State::Sync => true,
            State::Transfer => self.is_durable() && is_medium_error(error),
            State::New | State::Zeroing(_) => false,
        }
    }

    /// True when the medium has to have the bytes at the end of it.
    pub(super) fn is_durable(&self) -> bool {
        matches!(self.op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. } | Op::Flush)
    }
}
