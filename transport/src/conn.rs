//! The interface between the request machine and a connection: its verbs and its events.
//!
//! A connection lives on one core from accept to close. Its shell (sockets, verbs, the simulator) feeds it
//! and empties it; the queue pair only asks it for events and tells it what to fetch and what to reply:
//!
//! ```text
//!   next_event -> Command ── fetch(slot, buf) ──> in-capsule copy | R2T + H2CData | RDMA READ ── Fetched ─┐
//!                    │                                                                                   v
//!                    └───────────── no data from the host ────────────────────────────────────────> execute
//!   Sent <── bytes left / send completed <── C2HData + CapsuleResp | RDMA WRITE + SEND <── reply(slot, ...)
//!   Closed: last event, when every buffer is back
//! ```
//!
//! What a transport checks: the PDU or capsule itself and that the SGL is of a kind and length that the
//! transport allows. What it does not: opcode, namespace, range, or that the length fits the command
//! (the request machine does).

use nvme_spec::cqe::Cqe;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;

/// Where a command's data is, as its SGL says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataPointer {
    /// The command carries no data pointer, or one of length 0.
    None,
    /// In the command capsule; already on this side.
    InCapsule {
        /// Length in bytes.
        bytes: u32,
    },
    /// At the host; moved by the transport.
    Host {
        /// Length in bytes.
        bytes: u32,
    },
}

impl DataPointer {
    /// Length in bytes, 0 for none.
    #[must_use]
    pub fn bytes(self) -> u32 {
        match self {
            DataPointer::None => 0,
            DataPointer::InCapsule { bytes } | DataPointer::Host { bytes } => bytes,
        }
    }
}

/// What happened on a connection.
#[derive(Debug)]
pub enum Event {
    /// A command capsule arrived. The next event comes only after the command was answered by `fetch`,
    /// `reply` or `stash_capsule` if it has in-capsule data (the payload stands in the way); without, at
    /// once.
    Command {
        /// The submission queue entry.
        sqe: Sqe,
        /// Where its data is, or the status with which the command fails (an SGL of the wrong kind: the
        /// connection goes on).
        data: Result<DataPointer, Status>,
    },
    /// All data that `fetch` asked for has arrived in `buf`.
    Fetched {
        /// The request.
        slot: Slot,
        /// Its buffer, filled.
        buf: Buf,
        /// `Err`: the data is damaged (data digest); the command fails with this status, the connection goes
        /// on.
        result: Result<(), Status>,
    },
    /// All data that `fetch_part` asked for has arrived in `buf`.
    FetchedPart {
        /// The request.
        slot: Slot,
        /// Where it belongs in the command's data.
        offset: u32,
        /// Its buffer, filled.
        buf: Buf,
        /// As of `Fetched`.
        result: Result<(), Status>,
    },
    /// What `send_part` was given has left. All of a command's come before its `Sent`, and none after it.
    /// Once the connection ends (by [`Transport::close`] or by itself) those that were not told yet are
    /// dropped with their buffers; a `Sent` may still come.
    SentPart {
        /// The request.
        slot: Slot,
        /// Where it belongs in the command's data.
        offset: u32,
        /// Its buffer, back.
        buf: Buf,
    },
    /// The reply and its data have left; nothing of the request is referred to any more, and no `SentPart` of
    /// it follows. Not of one under [`FAST_PATH`]: those are counted ([`Transport::take_left`]).
    Sent {
        /// The request.
        slot: Slot,
    },
    /// The connection is gone and every buffer that it held has been dropped. Comes once, last.
    Closed,
}

/// Why the queue pair closes a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    /// The host said Disconnect, and the reply is to leave first.
    Disconnect,
    /// The controller was reset, shut down or deleted.
    ControllerGone,
    /// Keep Alive Timeout expired.
    KeepAliveExpired,
    /// The host broke a rule of the queue (more commands than entries, a command before Connect, ...).
    HostError,
    /// Connect did not come in time.
    ConnectTimeout,
    /// The appliance is shutting down.
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

/// Names a reply whose request needed no place of its own: it was answered as it came. Never a request's
/// slot, because no slot has generation 0.
pub const FAST_PATH: Slot = Slot::from_wire(0);

/// A completion to be sent.
#[derive(Debug)]
pub struct Reply {
    /// The request, named again by `Sent`; or [`FAST_PATH`], and it is counted when it has left.
    pub slot: Slot,
    /// The completion queue entry.
    pub cqe: Cqe,
    /// Data for the host, exactly as long as the command asked for. Only with a status of success.
    pub data: Option<Buf>,
    /// The host turned SQ flow control off, so a success may be folded into the data (TCP: C2HData SUCCESS).
    pub may_omit_cqe: bool,
}

/// What a connection can carry; constants of its listener, agreed with the host at set-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of in-capsule data of a command on an I/O queue.
    pub in_capsule_bytes: u32,
    /// Most commands that a queue may have outstanding.
    pub queue_entries: u16,
    /// Most bytes that one command moves (MDTS).
    pub transfer_bytes: u32,
}

/// One connection, which is one queue pair.
pub trait Transport {
    /// The next event, in order. `None`: nothing more until the shell has fed it.
    fn next_event(&mut self) -> Option<Event>;

    /// How many replies under [`FAST_PATH`] have left since it was asked last.
    fn take_left(&mut self) -> u32;

    /// The command whose event came last is request `slot` from now on. Not told of one that is answered as
    /// it comes, under [`FAST_PATH`].
    #[inline]
    fn set_slot(&mut self, _slot: Slot) {}

    /// Bring the host's data of request `slot` (command identifier `cid`) into `buf`, which is exactly as
    /// long. `Fetched` follows, or `Closed`. Called at most once for a command, in any order among commands.
    fn fetch(&mut self, slot: Slot, cid: u16, buf: Buf);

    /// The data that `fetch` asked for is not wanted any more, because the command was aborted. True: its
    /// buffer is given back, no `Fetched` follows, and what the host still sends of it goes nowhere. False: a
    /// device may be writing to the buffer; `Fetched` follows soon, whatever the host does.
    fn cancel(&mut self, _slot: Slot) -> bool {
        false
    }

    /// It can move a command's data in parts: [`Transport::fetch_part`], [`Transport::send_part`].
    fn moves_parts(&self) -> bool {
        false
    }

    /// Bring the part at `offset` of the host's data, as long as `buf`. `FetchedPart` follows, or `Closed`.
    /// In place of `fetch`, for a command whose data is at the host; its reply comes after all of its parts.
    fn fetch_part(&mut self, _slot: Slot, _cid: u16, _offset: u32, _buf: Buf) {}

    /// Send the part at `offset` of the data for the host, as long as `buf`. `SentPart` follows, or `Closed`.
    /// The command's reply, without data, may follow at once: it reaches the host after all of its parts.
    fn send_part(&mut self, _slot: Slot, _cid: u16, _offset: u32, _buf: Buf) {}

    /// Copy the in-capsule data of the command whose event came last into `buf`, which is exactly as long, if
    /// all of it is here and in order. False: nothing has changed, and `fetch` brings it. No `Fetched`
    /// follows.
    fn take_in_capsule(&mut self, _buf: &mut Buf) -> bool {
        false
    }

    /// The bytes where the queue entry of the second next command would be, if they are here: that one, as
    /// two dependent fetches from memory take as long as two commands. Unchecked: they may be of something
    /// else.
    fn peek_command(&self) -> Option<&Sqe> {
        None
    }

    /// The command whose event came last, request `slot` (command identifier `cid`), waits for memory: its
    /// in-capsule data is not to stand in the way of what comes behind it, because that may be the data of
    /// commands that hold the memory. `fetch` or `reply` follows some time.
    fn stash_capsule(&mut self, _slot: Slot, _cid: u16) {}

    /// Request `slot` is over without an answer; no `Sent` follows. Only of one without data under way.
    fn end_without_reply(&mut self, _slot: Slot) {}

    /// The command whose event came last is not taken, and gets no answer: its in-capsule data goes nowhere,
    /// and what is behind it comes.
    fn ignore(&mut self) {}

    /// Send a completion. In-capsule data that was not fetched is skipped. `Sent` follows, or `Closed`.
    fn reply(&mut self, reply: Reply);

    /// Bytes of data for the host that wait to leave. Asked now and then, of a host that does not read.
    fn unsent_bytes(&self) -> u64 {
        0
    }

    /// End the connection: what was replied leaves first where `reason` says so; then `Closed` follows.
    fn close(&mut self, reason: CloseReason);

    /// How many commands the queue pair may hold; told once Connect has fixed the queue's size.
    fn set_queue_entries(&mut self, _entries: u16) {}

    /// What the connection can carry.
    fn limits(&self) -> Limits;
}

/// A connection of several kinds, as a core has it that serves more than one transport; or of one kind alone.
///
/// A shell works with the connections of its own kind, whatever else is on the core.
pub trait Holds<C>: Transport {
    /// A connection of this kind.
    fn wrap(conn: C) -> Self;
    /// The connection, if it is of this kind.
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
