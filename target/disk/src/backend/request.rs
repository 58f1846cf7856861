//! [`Request`]: a command, and the state of the backend operations that execute the command.
//!
//! ```text
//!   Read, Write ── Transfer ────────────────────────────────────────────────────> Done
//!   Flush ──────── Sync ────────────────────────────────────────────────────────> Done
//!   Deallocate ─┬─ Zeroing, piece after piece ──────────────── fua ── Sync ─────> Done
//!   WriteZeroes ┘    medium refuses the method: the next method  without fua ─────> Done
//! ```

use spindle_reactor::mem::Buf;

use super::ZeroMethod;
use crate::{BlockRange, Op, Token};

/// Most bytes of zeroes in one write. Enough for full bandwidth; a [`Buf`] of so many zeroes has one segment.
pub(crate) const ZERO_WRITE_BYTES: u64 = 1 << 20;

/// Progress of a zeroing: the bytes `at .. end` of the disk remain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Zeroing {
    pub(super) method: ZeroMethod,
    pub(super) at: u64,
    pub(super) end: u64,
}

impl Zeroing {
    /// Returns the bytes of the next piece, at most `most`; 0 at the end.
    pub(super) fn piece_bytes(&self, most: u64) -> u64 {
        most.min(self.end - self.at)
    }
}

/// Backend operation that a request waits for. `New`: no operation has begun.
#[derive(Debug, Clone, Copy)]
pub(crate) enum BackendState {
    New,
    Transfer,
    Zeroing(Zeroing),
    Sync,
}

#[derive(Debug)]
pub(crate) struct Request {
    pub(super) token: Token,
    pub(super) op: Op,
    pub(super) range: BlockRange,
    /// Buffer of a Read or Write; `None` while the backend has it.
    pub(super) buf: Option<Buf>,
    pub(super) state: BackendState,
    /// Cancelled by its submitter: no further operation is begun, and the request ends with `Cancelled`.
    pub(super) is_cancelled: bool,
}

impl Request {
    pub(super) fn new(token: Token, op: Op, range: BlockRange, buf: Option<Buf>) -> Request {
        Request { token, op, range, buf, state: BackendState::New, is_cancelled: false }
    }

    /// Returns true for a zeroing whose last operation is a sync.
    pub(super) fn syncs_last(&self) -> bool {
        matches!(self.op, Op::WriteZeroes { fua: true, .. })
    }

    /// Returns true if the request must be durable when it ends: Flush, and writes and zeroings with FUA.
    pub(crate) fn is_durable(&self) -> bool {
        matches!(self.op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. } | Op::Flush)
    }
}
