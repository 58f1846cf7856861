//! Types of the host's end of a connection, for any transport: command data, events and errors.
//!
//! ```text
//!   submit(sqe, HostData) ─> the wire ─> Completed, with its buffer ─> .. ─> Closed, last
//! ```
//! Every accepted command ends with exactly one `Completed`, also when the connection ends.

use nvme_spec::Cqe;
use nvme_spec::status::Status;
use spindle_reactor::mem::Buf;

/// A command's data. `B` is the transport's buffer type: plain, or with the memory keys for the controller.
#[derive(Debug)]
pub enum HostData<B = Buf> {
    /// The command transfers no data.
    None,
    /// The whole buffer is sent to the controller.
    ToController(B),
    /// The controller fills the whole buffer if the command succeeds.
    FromController(B),
}

impl<B> HostData<B> {
    /// Returns the buffer of either direction; `None` for a command without data.
    #[inline]
    pub fn into_buffer(self) -> Option<B> {
        match self {
            HostData::None => None,
            HostData::ToController(buffer) | HostData::FromController(buffer) => Some(buffer),
        }
    }

    /// Converts the buffer and keeps the direction.
    #[inline]
    pub fn map<C>(self, change: impl FnOnce(B) -> C) -> HostData<C> {
        match self {
            HostData::None => HostData::None,
            HostData::ToController(buffer) => HostData::ToController(change(buffer)),
            HostData::FromController(buffer) => HostData::FromController(change(buffer)),
        }
    }
}

/// Reason for which a command was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubmitErrorKind {
    /// The connection is not initialised yet, or is closing or closed.
    Closed,
    /// The CID is outstanding, or is not below the number of queue entries.
    Cid,
    /// The buffer needs more SGL descriptors than a command may have (RDMA).
    Pieces {
        /// Descriptors that the buffer needs.
        pieces: usize,
        /// Most descriptors of a command: limited by MSDBD and by the in-capsule size.
        allowed: usize,
    },
}

/// A command that was not accepted, with its data.
#[derive(Debug)]
pub struct SubmitError<B = Buf> {
    /// Cause of the refusal.
    pub kind: SubmitErrorKind,
    /// Data passed to `submit`, returned to the caller.
    pub data: HostData<B>,
}

/// Reason for which a connection ended. `V` is the transport's type of protocol violations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseCause<V> {
    /// The host ended the connection.
    Requested,
    /// The controller or the network closed the connection.
    ByPeer,
    /// The socket failed, or an RDMA work request: rejected or not acknowledged by the controller.
    Failed,
    /// The host's RDMA device failed, or completed a work request that was not posted.
    Device,
    /// The controller violated the protocol, did not answer ICReq in time, or reported a violation by this
    /// host.
    Violation(V),
}

/// An event of a host's connection.
#[derive(Debug)]
pub enum HostEvent<V, B = Buf> {
    /// ICResp arrived; commands can be submitted. Not used by RDMA, whose `Conn` begins established.
    Ready,
    /// A command has ended.
    Completed {
        /// The command's CID, free for reuse.
        cid: u16,
        /// The completion; made locally if it was omitted (C2HData SUCCESS) or the connection ended.
        cqe: Cqe,
        /// The submitted buffer; filled by a read with `result` `Ok`. `None`: the command has no data.
        buf: Option<B>,
        /// `Ok`: the command succeeded and its data is complete and undamaged. `Err`: the status of `cqe`, or
        /// Transient Transport Error for damaged data.
        result: Result<(), Status>,
    },
    /// The connection has closed. Reported once, as the last event.
    Closed {
        /// First cause of the close.
        why: CloseCause<V>,
    },
}
