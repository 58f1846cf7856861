//! [`Request`]: one command on its way through a medium, in one step or several.
//!
//! ```text
//!   Read, Write ── Transfer ────────────────────────────────────────────────────> Done
//!   Flush ──────── Sync ────────────────────────────────────────────────────────> Done
//!   Deallocate ─┬─ Zeroing, piece after piece ──────────────── fua ── Sync ─────> Done
//!   WriteZeroes ┘    a method that the medium refuses: the next  without fua ─────> Done
//! ```

use spindle_reactor::mem::Buf;

use super::ZeroMethod;
use crate::{BlockRange, Op, Token};

/// Bytes of zeroes in one write: long enough to be fast, and one piece of a [`Buf`].
pub(crate) const ZERO_WRITE_BYTES: u64 = 1 << 20;

/// Bytes `at .. end` that are still to be zeroed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Zeroing {
    pub(super) method: ZeroMethod,
    pub(super) at: u64,
    pub(super) end: u64,
}

impl Zeroing {
    /// Bytes of the next piece, of which the medium takes `most`.
    pub(super) fn piece_bytes(&self, most: u64) -> u64 {
        most.min(self.end - self.at)
    }
}

/// What the medium does for a request now.
#[derive(Debug, Clone, Copy)]
pub(crate) enum State {
    /// Not begun.
    New,
    Transfer,
    Zeroing(Zeroing),
    Sync,
}

/// One command.
#[derive(Debug)]
pub(crate) struct Request {
    pub(super) token: Token,
    pub(super) op: Op,
    pub(super) range: BlockRange,
    /// Its data, while the medium does not have them.
    pub(super) buf: Option<Buf>,
    pub(super) state: State,
    /// Its submitter is gone: nothing more is begun for it.
    pub(super) is_forgotten: bool,
}

impl Request {
    pub(super) fn new(token: Token, op: Op, range: BlockRange, buf: Option<Buf>) -> Request {
        Request { token, op, range, buf, state: State::New, is_forgotten: false }
    }

    /// True when it ends with a sync.
    pub(super) fn syncs_last(&self) -> bool {
        matches!(self.op, Op::WriteZeroes { fua: true, .. })
    }

    /// True when the medium has to have the bytes at the end of it.
    pub(crate) fn is_durable(&self) -> bool {
        matches!(self.op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. } | Op::Flush)
    }
}
