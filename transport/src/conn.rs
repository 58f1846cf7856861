//! The interface between the request machine and a connection: calls and events.
//!
//! A connection stays on one core from accept to close. Its shell (sockets, verbs, the simulator) passes
//! received bytes or completions in and sends what the connection queues. The queue pair takes its events
//! and calls `fetch` and `reply`:
//!
//! ```text
//!   next_event -> Command ── fetch(slot, buf) ──> in-capsule copy | R2T + H2CData | RDMA READ ── Fetched ─┐
//!                    │                                                                                   v
//!                    └───────────── no data from the host ────────────────────────────────────────> execute
//!   Sent <── bytes left / send completed <── C2HData + CapsuleResp | RDMA WRITE + SEND <── reply(slot, ...)
//!   Closed: last event, after every buffer was dropped
//! ```
//!
//! A transport checks the PDU or capsule, and that the transport allows the kind and length of the SGL. The
//! request machine checks opcode, namespace, range, and that the length fits the command.

use crate::RequestId;
use nvme_spec::cqe::Cqe;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_reactor::mem::Buf;

/// Location and length of a command's data, from its SGL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataPointer {
    /// No data: no SGL descriptor, or one of length 0.
    None,
    /// In the command capsule: received with the command, without R2T or RDMA READ.
    InCapsule {
        /// Length in bytes.
        bytes: u32,
    },
    /// In the host's memory; the transport moves it (R2T and C2HData, or RDMA READ and WRITE).
    Host {
        /// Length in bytes.
        bytes: u32,
    },
}

impl DataPointer {
    /// Length in bytes; 0 for [`DataPointer::None`].
    #[must_use]
    pub fn bytes(self) -> u32 {
        match self {
            DataPointer::None => 0,
            DataPointer::InCapsule { bytes } | DataPointer::Host { bytes } => bytes,
        }
    }
}

/// An event of a connection, returned by [`Transport::next_event`].
#[derive(Debug)]
pub enum Event {
    /// A command capsule arrived. With in-capsule data the next command follows only after `fetch`,
    /// `take_in_capsule`, `stash_capsule`, `reply` or `ignore`, as the data precedes it in the stream.
    Command {
        /// As received; the transport has checked only its SGL.
        sqe: Sqe,
        /// Where its data is; `Err`: the status with which the command fails, because its SGL is not
        /// allowed. The connection stays open.
        data: Result<DataPointer, Status>,
    },
    /// A `fetch` has ended: `buf` has all data.
    Fetched {
        /// Request given to `fetch`.
        slot: RequestId,
        /// The buffer given to `fetch`, filled.
        buf: Buf,
        /// `Err`: the data digest is wrong; the command fails with this status, the connection stays open.
        result: Result<(), Status>,
    },
    /// A `fetch_part` has ended: `buf` has all data of the part.
    FetchedPart {
        /// Request given to `fetch_part`.
        slot: RequestId,
        /// Offset of the part in the command's data, in bytes.
        offset: u32,
        /// The buffer given to `fetch_part`, filled.
        buf: Buf,
        /// As in [`Event::Fetched`].
        result: Result<(), Status>,
    },
    /// A part given to `send_part` was sent. All parts of a command precede its `Sent`. When the connection
    /// ends, pending `SentPart` events are dropped with their buffers; a `Sent` may still follow.
    SentPart {
        /// Request given to `send_part`.
        slot: RequestId,
        /// Offset of the part in the command's data, in bytes.
        offset: u32,
        /// The buffer given to `send_part`.
        buf: Buf,
    },
    /// The reply and its data were sent; the transport no longer refers to the request, and no `SentPart` of
    /// it follows. Replies with [`FAST_PATH`] have no such event: [`Transport::take_fast_path_sent`] counts
    /// them.
    Sent {
        /// [`Reply::slot`] of the reply.
        slot: RequestId,
    },
    /// The connection has closed and has dropped all its buffers. Comes once, as the last event.
    Closed,
}

/// Why the queue pair closes a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    /// The host sent Disconnect; its reply is sent before the close.
    Disconnect,
    /// The controller was reset, shut down or deleted.
    ControllerGone,
    /// The controller's Keep Alive Timer reached KATO.
    KeepAliveExpired,
    /// The host violated a rule of the queue (more commands than entries, a command before Connect, ...).
    HostError,
    /// No Connect arrived in time after accept, or no CC.EN = 1 in time after an admin queue's Connect.
    ConnectTimeout,
    /// The target process is shutting down.
    Shutdown,
}

impl std::fmt::Display for CloseReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            CloseReason::Disconnect => "the host disconnected",
            CloseReason::ControllerGone => "the controller was reset or shut down",
            CloseReason::KeepAliveExpired => "keep alive expired",
            CloseReason::HostError => "the host broke a rule of the queue",
            CloseReason::ConnectTimeout => "no Connect in time",
            CloseReason::Shutdown => "the appliance is shutting down",
        })
    }
}

/// Slot of replies to commands that never entered the request slab (fast path). Equals no request's slot,
/// because no slot has generation 0.
pub const FAST_PATH: RequestId = RequestId::from_wire(0);

/// A completion for the host, with the data of a read.
#[derive(Debug)]
pub struct Reply {
    /// The request, repeated in [`Event::Sent`]; [`FAST_PATH`]: the reply is only counted when sent.
    pub slot: RequestId,
    /// Sent unchanged, with the CID and SQHD set by the caller.
    pub cqe: Cqe,
    /// Data for the host, exactly as long as the command's SGL. Only with a status of success.
    pub data: Option<Buf>,
    /// The host disabled SQ flow control, so TCP may replace a success CQE by the C2HData SUCCESS flag.
    pub may_omit_cqe: bool,
}

/// Limits of a connection, from the configuration of its listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of in-capsule data of a command on an I/O queue; determines IOCCSZ.
    pub in_capsule_bytes: u32,
    /// Most entries of its queue.
    pub queue_entries: u16,
    /// Most bytes of data of one command (MDTS).
    pub transfer_bytes: u32,
}

/// One connection; it carries one NVMe queue pair.
pub trait Transport {
    /// The next event, in order. `None`: none until the shell receives or sends something.
    fn next_event(&mut self) -> Option<Event>;

    /// Number of replies with [`FAST_PATH`] sent since the last call.
    fn take_fast_path_sent(&mut self) -> u32;

    /// Assigns request `slot` to the command of the last event. Not called for a command that is answered
    /// with [`FAST_PATH`].
    #[inline]
    fn set_slot(&mut self, _slot: RequestId) {}

    /// Reads the host's data of request `slot` (command identifier `cid`) into `buf`, whose length equals
    /// that of the data. `Fetched` or `Closed` follows. At most one call per command; commands in any order.
    fn fetch(&mut self, slot: RequestId, cid: u16, buf: Buf);

    /// Cancels the `fetch` of an aborted command. True: the buffer is dropped, no `Fetched` follows, and data
    /// that the host still sends is discarded. False: a device may be writing to the buffer; `Fetched`
    /// follows soon, whatever the host does.
    fn cancel(&mut self, _slot: RequestId) -> bool {
        false
    }

    /// True if [`Transport::fetch_part`] and [`Transport::send_part`] are implemented.
    fn moves_parts(&self) -> bool {
        false
    }

    /// Reads `buf.len()` bytes from `offset` of the host's data. `FetchedPart` or `Closed` follows. Used
    /// instead of `fetch` for [`DataPointer::Host`]; the command is replied to after all its parts.
    fn fetch_part(&mut self, _slot: RequestId, _cid: u16, _offset: u32, _buf: Buf) {}

    /// Sends `buf` as the part at `offset` of the data for the host. `SentPart` or `Closed` follows. The
    /// reply, without data, may be queued before that: it reaches the host after all parts.
    fn send_part(&mut self, _slot: RequestId, _cid: u16, _offset: u32, _buf: Buf) {}

    /// Copies the in-capsule data of the last command into `buf`, whose length equals that of the data. True:
    /// copied, and no `Fetched` follows. False: nothing has changed, and `fetch` reads it, because it is not
    /// contiguous in the batch or has a digest.
    fn take_in_capsule(&mut self, _buf: &mut Buf) -> bool {
        false
    }

    /// The SQE after the next one, if its bytes have been received, so that the memory for its data can be
    /// prefetched: two dependent accesses, about the time of two commands. Not validated: the bytes may be
    /// something else.
    fn peek_command(&self) -> Option<&Sqe> {
        None
    }

    /// Copies the in-capsule data of the last command, request `slot` (command identifier `cid`), out of the
    /// stream. The command waits for memory, and the bytes after its capsule may be the data of commands that
    /// occupy this memory. `fetch` or `reply` follows later.
    fn stash_capsule(&mut self, _slot: RequestId, _cid: u16) {}

    /// Ends request `slot` without a reply; no `Sent` follows. Not for a request with data in transfer.
    fn end_without_reply(&mut self, _slot: RequestId) {}

    /// Drops the last command without a reply: its in-capsule data is discarded, and the next event follows.
    fn ignore(&mut self) {}

    /// Queues a completion. In-capsule data that was not fetched is discarded. `Sent` or `Closed` follows.
    fn reply(&mut self, reply: Reply);

    /// Bytes of data for the host that are not sent yet. Used to detect a host that does not read.
    fn unsent_bytes(&self) -> u64 {
        0
    }

    /// Ends the connection; `Closed` follows. Queued replies are still sent, except when the host is
    /// presumed lost ([`CloseReason::KeepAliveExpired`], [`CloseReason::ConnectTimeout`]).
    fn close(&mut self, reason: CloseReason);

    /// Sets the number of queue entries, once Connect has fixed it.
    fn set_queue_entries(&mut self, _entries: u16) {}

    /// The limits from the listener's configuration.
    fn limits(&self) -> Limits;
}

/// A connection type of a core that can contain a `C`: an enum over the transports of the core, or `C` alone.
///
/// A shell handles only the connections of its own transport.
pub trait Holds<C>: Transport {
    /// Converts a connection of this transport.
    fn wrap(conn: C) -> Self;
    /// The connection of this transport; `None` for one of another transport.
    fn held(&mut self) -> Option<&mut C>;
}

impl<T: Transport> Holds<T> for T {
    #[inline]
    fn wrap(conn: T) -> T {
        conn
    }

    #[inline]
    fn held(&mut self) -> Option<&mut T> {
        Some(self)
    }
}
