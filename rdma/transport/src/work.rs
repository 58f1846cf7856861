//! What a connection asks of its queue pair, and what comes back: the same words for both ends.
//!
//! A connection never sees an address or a key of this machine. It names a *chain*, a slot that owns the
//! buffer until the last of its work requests has completed, and a span of that buffer; the code that carries
//! the work out (the shell with verbs, the simulator with copies) asks the connection for the buffer.

use spindle_reactor::slab::Slot;

/// Memory of the other side that a remote key opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// Address there.
    pub address: u64,
    /// Remote key.
    pub key: u32,
}

/// A part of the chain's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub offset: u32,
    /// Bytes; 0: no buffer takes part.
    pub bytes: u32,
}

/// Longest head of a SEND: a submission queue entry. A completion queue entry is 16 bytes.
pub const HEAD_BYTES_MAX: usize = 64;

/// One work request for the send queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// RDMA READ from the other side into the span.
    Read {
        /// Into here. At most as many segments as the device gathers.
        local: Span,
        /// From there.
        remote: Remote,
    },
    /// RDMA WRITE of the span to the other side. Of no bytes: nothing is moved, and the other side's address
    /// and key say nothing.
    Write {
        /// From here. At most as many segments as the device gathers.
        local: Span,
        /// To there.
        remote: Remote,
    },
    /// SEND of a head, and behind it of the span (in-capsule data).
    Send {
        /// The head's bytes.
        head: [u8; HEAD_BYTES_MAX],
        /// How many of them.
        head_bytes: u8,
        /// In-capsule data; of a controller always empty.
        local: Span,
        /// A remote key to be invalidated with it.
        invalidate: Option<u32>,
    },
}

/// A work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Whose it is. Comes back with its completion.
    pub chain: Slot,
    /// It has a completion of its own. Without, it completes with the next that has; a failure is told in any
    /// case.
    pub is_signalled: bool,
    /// What to do.
    pub op: Op,
}

/// A work request of the send queue is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// As in the work request.
    pub chain: Slot,
    /// As in the work request.
    pub is_signalled: bool,
    /// It did what was asked. Otherwise the queue pair is in its error state, and all that follow fail too.
    pub is_ok: bool,
}
