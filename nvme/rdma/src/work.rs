//! Work requests and completions that connections of both ends exchange with their queue pairs.
//!
//! A connection contains no local addresses and keys. Each work request names a *chain*, which owns a buffer
//! until the last of its work requests has completed, and a span of that buffer. The code that executes the
//! work reads the buffer from the connection: the shell by verbs, the simulator by copying.

use spindle_reactor::slab::Slot;

/// Memory of the peer, accessed with a remote key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// Virtual address at the peer.
    pub address: u64,
    /// Key from the peer's descriptor.
    pub key: u32,
}

/// A contiguous part of a chain's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Offset of the first byte in the buffer.
    pub offset: u32,
    /// Bytes; 0 for a work request without a buffer.
    pub bytes: u32,
}

/// Maximum bytes of the head of a SEND: a submission queue entry. A completion queue entry has 16 bytes.
pub const HEAD_BYTES_MAX: usize = 64;

/// Operation of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// RDMA READ from the peer's memory into a span of the chain's buffer.
    Read {
        /// Destination; its scatter/gather entries are within the device's limit.
        local: Span,
        /// Source at the peer.
        remote: Remote,
    },
    /// RDMA WRITE of a span of the chain's buffer to the peer's memory. Zero bytes use no address and key.
    Write {
        /// Source; its scatter/gather entries are within the device's limit.
        local: Span,
        /// Destination at the peer.
        remote: Remote,
    },
    /// SEND of a queue entry, followed by a span of the chain's buffer (in-capsule data).
    Send {
        /// The queue entry; only the first `head_bytes` are sent.
        head: [u8; HEAD_BYTES_MAX],
        /// 64 for a submission queue entry, 16 for a completion queue entry.
        head_bytes: u8,
        /// In-capsule data; always empty at a controller.
        local: Span,
        /// Remote key of the peer that the SEND invalidates.
        invalidate: Option<u32>,
    },
}

/// A work request for the send queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// The chain to which the work request belongs; returned in the completion.
    pub chain: Slot,
    /// True if the work request generates a completion. A failed work request always generates one. An
    /// unsignalled work request has completed once a later signalled work request has.
    pub is_signalled: bool,
    /// READ, WRITE or SEND, with its operands.
    pub op: Op,
}

/// Completion of a work request of the send queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Chain of the work request.
    pub chain: Slot,
    /// [`Work::is_signalled`] of the work request.
    pub is_signalled: bool,
    /// True on success. False: the queue pair is in the error state, and all later work requests fail too.
    pub is_ok: bool,
}
