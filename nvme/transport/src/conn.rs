//! The interface between the request machine and a connection: calls and events.
//!
//! A connection stays on one core from accept to close. Its shell (sockets, verbs, the simulator) passes
//! received bytes or completions to the connection and sends the data that the connection queues. The queue
//! pair takes the connection's events and calls `fetch` and `reply`:
//!
//! ```text
//!   next_event -> Command ── fetch(slot, buf) ──> in-capsule copy | R2T + H2CData | RDMA READ ── Fetched ─┐
//!                    │                                                                                   v
//!                    └───────────── no data from the host ────────────────────────────────────────> execute
//!   Sent <── bytes left / send completed <── C2HData + CapsuleResp | RDMA WRITE + SEND <── reply(slot, ...)
//!   Closed: last event, after every buffer was dropped
//! ```
//!
//! A transport checks the PDU or capsule, and the type and length of the SGL. The request machine checks
//! opcode, namespace, range, and that the length fits the command.

use crate::RequestId;
use nvme_spec::cqe::Cqe;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_reactor::mem::Buf;

/// Location and length of a command's data, from its SGL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataPointer {
    /// No data: the SGL descriptor has length 0.
    None,
    /// In the command capsule: received with the command, without R2T or RDMA READ.
    InCapsule {
        /// Length in bytes.
        bytes: u32,
    },
    /// In the host's memory; transferred by R2T, H2CData and C2HData (TCP), or by RDMA READ and WRITE.
    Host {
        /// Length in bytes.
        bytes: u32,
    },
}

impl DataPointer {
    /// Returns the length in bytes; 0 for [`DataPointer::None`].
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
    /// A command capsule arrived. TCP: after a command with [`DataPointer::InCapsule`], the next `Command`
    /// follows only after `fetch`, `take_in_capsule`, `stash_capsule`, `reply` or `ignore`. The reason: in
    /// the stream, the in-capsule data precedes the next command.
    Command {
        /// The SQE as received; the transport has checked only PSDT and the SGL.
        sqe: Sqe,
        /// Location and length of the data. `Err`: the SGL is not allowed. The command fails with this
        /// status, and the connection stays open.
        data: Result<DataPointer, Status>,
    },
    /// A `fetch` has ended: all data was received.
    Fetched {
        /// Request given to `fetch`.
        slot: RequestId,
        /// The buffer given to `fetch`, filled; damaged if `result` is `Err`.
        buf: Buf,
        /// `Err`: the data digest is wrong. The command fails with it; the connection stays open.
        result: Result<(), Status>,
    },
    /// A `fetch_part` has ended: all data of the part was received.
    FetchedPart {
        /// Request given to `fetch_part`.
        slot: RequestId,
        /// Offset of the part in the command's data, in bytes.
        offset: u32,
        /// The buffer given to `fetch_part`, filled; damaged if `result` is `Err`.
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
    /// The reply and its data were sent. TCP: the socket has accepted all bytes. RDMA: the SEND has
    /// completed. The transport no longer refers to the request, and no `SentPart` of the request follows.
    /// Replies with [`FAST_PATH`] have no such event: [`Transport::take_fast_path_sent`] counts them.
    Sent {
        /// [`Reply::slot`] of the reply.
        slot: RequestId,
    },
    /// The connection has closed and has dropped all its buffers. Reported once, as the last event.
    Closed,
}

/// Reason for which the queue pair closes a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    /// The host sent Disconnect; its reply is sent before the close.
    Disconnect,
    /// The controller was reset or shut down, or has ended. A controller ends when its admin connection
    /// closes, its host is no longer allowed, or the host has ended its former associations.
    ControllerGone,
    /// The keep-alive timer of the controller expired.
    KeepAliveExpired,
    /// The host has more commands outstanding than its queue has entries, does not send the data of its
    /// commands, or does not read its replies.
    HostError,
    /// Connect did not succeed in time after accept, or the controller was not enabled (CC.EN = 1) in time
    /// after Connect, a reset or a shutdown.
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
            CloseReason::Shutdown => "the target is shutting down",
        })
    }
}

/// Slot of replies to commands without an entry in the request slab (fast path). Differs from the slot of
/// every request: no slot has generation 0.
pub const FAST_PATH: RequestId = RequestId::from_wire(0);

/// A completion for the host, with the data of a read.
#[derive(Debug)]
pub struct Reply {
    /// The request, repeated in [`Event::Sent`]. [`FAST_PATH`]: a sent reply is only counted.
    pub slot: RequestId,
    /// The caller sets CID and SQHD. The entry is sent unchanged or omitted (`may_omit_cqe`).
    pub cqe: Cqe,
    /// Data for the host: exactly as long as the command's SGL, and only with status success. `None`: no
    /// data, or [`Transport::send_part`] has sent the data.
    pub data: Option<Buf>,
    /// The host disabled SQ flow control, so TCP may replace a CQE with status success and result 0 by the
    /// SUCCESS flag of C2HData. RDMA sends every CQE.
    pub may_omit_cqe: bool,
}

/// Limits of a connection, from the configuration of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of in-capsule data of a command on an I/O queue; determines IOCCSZ.
    pub in_capsule_bytes: u32,
    /// Most entries of the connection's queue. An admin queue may have
    /// [`ADMIN_QUEUE_ENTRIES`](nvme_spec::fabrics::ADMIN_QUEUE_ENTRIES) if that is more.
    pub queue_entries: u16,
    /// Most bytes of data of one command (MDTS).
    pub transfer_bytes: u32,
}

/// One connection, which carries one NVMe queue pair.
pub trait Transport {
    /// Returns the next event; `None`: no event now. Events result from the shell's receives and sends, and
    /// from calls such as `fetch` and `close`.
    fn next_event(&mut self) -> Option<Event>;

    /// Returns the number of replies with [`FAST_PATH`] that were sent since the last call.
    fn take_fast_path_sent(&mut self) -> u32;

    /// Assigns request `slot` to the command of the last [`Event::Command`]. Not called for a command that is
    /// answered with [`FAST_PATH`].
    #[inline]
    fn set_slot(&mut self, _slot: RequestId) {}

    /// Reads the host's data of request `slot` (command identifier `cid`) into `buf`, whose length equals
    /// that of the data. `Fetched` or `Closed` follows, unless `cancel` returns true. Called at most once per
    /// command, in any order of commands.
    fn fetch(&mut self, slot: RequestId, cid: u16, buf: Buf);

    /// Cancels the `fetch` of request `slot`. True: the buffer is dropped, no `Fetched` follows, and data
    /// that the host still sends is discarded. False: `Fetched` or `Closed` follows without further action of
    /// the host; over RDMA a READ may be writing to the buffer.
    fn cancel(&mut self, _slot: RequestId) -> bool {
        false
    }

    /// Returns true if [`Transport::fetch_part`] and [`Transport::send_part`] are implemented.
    fn moves_parts(&self) -> bool {
        false
    }

    /// Reads `buf.len()` bytes from `offset` of the host's data into `buf`. `FetchedPart` or `Closed`
    /// follows. Used instead of `fetch` for [`DataPointer::Host`]. The reply follows all parts.
    fn fetch_part(&mut self, _slot: RequestId, _cid: u16, _offset: u32, _buf: Buf) {}

    /// Sends `buf` as the part at `offset` of the data for the host. `SentPart` or `Closed` follows. The
    /// reply, without data, may be queued before `SentPart`; it reaches the host after all parts.
    fn send_part(&mut self, _slot: RequestId, _cid: u16, _offset: u32, _buf: Buf) {}

    /// Copies the in-capsule data of the last command into `buf`, whose length equals that of the data. True:
    /// the data was copied, and no `Fetched` follows. False: nothing has changed, and `fetch` reads the data.
    /// TCP returns false if the data has a digest or is not complete in the batch.
    fn take_in_capsule(&mut self, _buf: &mut Buf) -> bool {
        false
    }

    /// Returns the SQE of the command after the next (TCP), so that the memory for its data can be
    /// prefetched. Such a prefetch is two dependent accesses and takes about the time of two commands. The
    /// bytes are not validated and may not be an SQE. `None`: not received yet, or not supported.
    fn peek_command(&self) -> Option<&Sqe> {
        None
    }

    /// Copies the in-capsule data of the last command, request `slot` (command identifier `cid`), out of the
    /// stream (TCP). Used when the command waits for memory: the bytes after its capsule may be data of the
    /// commands that occupy this memory. `fetch`, `reply` or `end_without_reply` follows later.
    fn stash_capsule(&mut self, _slot: RequestId, _cid: u16) {}

    /// Ends request `slot` without a reply; no `Sent` follows. Not while its data is in transfer.
    fn end_without_reply(&mut self, _slot: RequestId) {}

    /// Drops the last command without a reply and discards its in-capsule data. The next event follows.
    fn ignore(&mut self) {}

    /// Queues a completion with its data and discards in-capsule data that was not fetched. `Sent` (not with
    /// [`FAST_PATH`]) or `Closed` follows.
    fn reply(&mut self, reply: Reply);

    /// Returns the data bytes of replies not completely sent, to detect a host that does not read.
    fn unsent_bytes(&self) -> u64 {
        0
    }

    /// Ends the connection; `Closed` follows. Queued replies are still sent within the close timeout, except
    /// when the host is presumed lost ([`CloseReason::KeepAliveExpired`], [`CloseReason::ConnectTimeout`]).
    fn close(&mut self, reason: CloseReason);

    /// Sets the number of queue entries, after Connect has determined it.
    fn set_queue_entries(&mut self, _entries: u16) {}

    /// Returns the limits of the connection, from the configuration.
    fn limits(&self) -> Limits;
}

/// A connection type of a core that can contain a `C`: an enum over the transports of the core, or `C` alone.
/// A shell handles only the connections of its own transport.
pub trait Holds<C>: Transport {
    /// Converts a connection of one transport to the connection type of the core.
    fn wrap(conn: C) -> Self;
    /// Returns the contained `C`; `None` for a connection of another transport.
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
