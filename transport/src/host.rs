//! The host's end of a connection, over any transport: what goes in and what comes out.
//!
//! ```text
//!   submit(sqe, HostData) ─> the wire ─> Completed, with its buffer ─> .. ─> Closed, last
//! ```
//! Every command that is taken is given back by exactly one `Completed`, also when the connection ends.

use nvme_spec::Cqe;
use nvme_spec::status::Status;
use spindle_reactor::mem::Buf;

/// A command's data. `B` is a buffer as the transport needs it: plain, or with the keys that name it to the
/// other side.
#[derive(Debug)]
pub enum HostData<B = Buf> {
    /// The command moves none.
    None,
    /// All of this goes to the controller.
    ToController(B),
    /// The controller fills all of this.
    FromController(B),
}

impl<B> HostData<B> {
    /// The buffer, whichever way it goes.
    #[inline]
    pub fn into_buffer(self) -> Option<B> {
        match self {
            HostData::None => None,
            HostData::ToController(buffer) | HostData::FromController(buffer) => Some(buffer),
        }
    }

    /// The same with another kind of buffer.
    #[inline]
    pub fn map<C>(self, change: impl FnOnce(B) -> C) -> HostData<C> {
        match self {
            HostData::None => HostData::None,
            HostData::ToController(buffer) => HostData::ToController(change(buffer)),
            HostData::FromController(buffer) => HostData::FromController(change(buffer)),
        }
    }
}

/// Why a command was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubmitErrorKind {
    /// The connection is not initialised yet, or not open any more.
    Closed,
    /// The CID is outstanding, or not below the queue's entries.
    Cid,
    /// The buffer is in more pieces than a command can name.
    Pieces {
        /// As many as it takes.
        pieces: usize,
        /// As many as the controller allows.
        allowed: usize,
    },
}

/// The connection cannot take the command now. Its data is given back.
#[derive(Debug)]
pub struct SubmitError<B = Buf> {
    /// Why not.
    pub kind: SubmitErrorKind,
    /// The command's data.
    pub data: HostData<B>,
}

/// Why a connection ended. `V` is a rule of the transport that the controller broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseCause<V> {
    /// The connection's `close` was called.
    Requested,
    /// The controller, or the network, closed the connection.
    ByPeer,
    /// What carries it failed: the socket, or a work request that the controller did not answer or refused.
    Failed,
    /// Our own device failed, or completed what was not posted.
    Device,
    /// The controller broke a rule, did not answer in time, or said that we did.
    Violation(V),
}

/// What happened on a connection.
#[derive(Debug)]
pub enum HostEvent<V, B = Buf> {
    /// Commands can be submitted. Not told where the connection is established before there is a `Conn`.
    Ready,
    /// A command is over.
    Completed {
        /// Its CID, which is free again.
        cid: u16,
        /// Its completion; made up where the controller omitted it (C2HData SUCCESS) or the connection ended
        /// first.
        cqe: Cqe,
        /// The data that was submitted with it; filled, if the result says so.
        buf: Option<B>,
        /// `Ok` when the command succeeded and its data is whole.
        result: Result<(), Status>,
    },
    /// The connection is gone. Comes once, last.
    Closed {
        /// Its cause.
        why: CloseCause<V>,
    },
}
