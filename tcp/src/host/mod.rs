//! The host's end of a connection: commands in, completions with their data out.
//!
//! ```text
//!   ICReq ─> ICResp ─> Ready ─> submit(sqe, data)
//!     ├─ CapsuleCmd, with the data where it fits      ─> CapsuleResp ───────────────────> Completed
//!     ├─ CapsuleCmd ─> R2T ─> H2CData, H2CData ..     ─> CapsuleResp ───────────────────> Completed
//!     └─ CapsuleCmd ─> C2HData to the caller's buffer ─> CapsuleResp, or SUCCESS flag ──> Completed
//! ```
//! Every submitted command is given back by exactly one `Completed`, with its buffer, also when the
//! connection ends: then with a path error, before `Closed`.
//!
//! A turn is that of the controller's end: `on_time`, `load`, `next_event`.., `unload`, `send_pieces`,
//! `sent`, `phase`.

mod commands;
mod receive;
mod send;

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};

use arrayvec::ArrayVec;
use nvme_spec::Sqe;
use nvme_spec::status::Status;
use nvme_spec::tcp::{ADMIN_IN_CAPSULE_BYTES, DIGEST_BYTES, PduType};
use spindle_reactor::clock::Nanos;
use spindle_transport::host;
pub use spindle_transport::host::{HostData, SubmitError, SubmitErrorKind};

use crate::inbox::RxBatch;
use crate::lifetime::Phase;
use crate::outbox::Body;
use crate::violation::Violation;
use crate::wire::{Receiving, Stop, Wire, stream_methods};

use commands::Commands;

/// What a host wants of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostConfig {
    /// Ask for header digests.
    pub header_digest: bool,
    /// Ask for data digests.
    pub data_digest: bool,
    /// Commands that may be outstanding; CIDs are below it.
    pub queue_entries: u16,
    /// Writes up to this many bytes go in the command's capsule. 8192: what an admin queue takes (NVMe/TCP
    /// 1.0, "Capsules"); an I/O queue takes what IOCCSZ leaves. Fabrics commands may always have 8192.
    pub in_capsule_bytes: u32,
    /// Time for ICResp to come. 10 s, as Linux.
    pub initialize_timeout: Nanos,
    /// Time from the decision to close to the end of the socket.
    pub close_timeout: Nanos,
}

impl Default for HostConfig {
    fn default() -> Self {
        HostConfig {
            header_digest: false,
            data_digest: false,
            queue_entries: 128,
            in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES,
            initialize_timeout: Nanos::from_secs(10),
            close_timeout: Nanos::from_secs(2),
        }
    }
}

/// What happened on a connection. [`HostEvent::Ready`] says that ICResp came; [`Conn::max_h2c_data`] is
/// known.
pub type HostEvent = host::HostEvent<Violation>;
/// Why a connection ended.
pub type CloseCause = host::CloseCause<Violation>;

/// Longest head: CapsuleCmd with its digest.
const HEAD: usize = 72 + DIGEST_BYTES;
/// Longest tail: data digest.
const TAIL: usize = DIGEST_BYTES;

/// Data of a command being received: its CID and the flags of its C2HData.
#[derive(Debug, Clone, Copy)]
struct Incoming {
    cid: u16,
    flags: u8,
}

/// The host's end of one connection.
#[derive(Debug)]
pub struct Conn {
    wire: Wire<HEAD, TAIL, Option<u16>, Incoming>,
    commands: Commands,
    /// Commands that were completed while their data was leaving, and now it has left.
    finished: VecDeque<u16>,
    config: HostConfig,
    /// Of ICResp: most bytes of data in one H2CData.
    max_h2c_data: Option<u32>,
    cause: Option<CloseCause>,
    is_closed_told: bool,
}

impl Conn {
    /// A connection whose socket is connected, or connecting. Its ICReq is queued; [`HostEvent::Ready`]
    /// follows.
    #[must_use]
    pub fn new(config: HostConfig, now: Nanos) -> Conn {
        let entries = usize::from(config.queue_entries);
        let mut conn = Conn {
            wire: Wire::new(now + config.initialize_timeout, config.close_timeout),
            commands: Commands::new(config.queue_entries),
            finished: VecDeque::with_capacity(entries),
            config,
            max_h2c_data: None,
            cause: None,
            is_closed_told: false,
        };
        conn.wire.outbox.reserve(entries + 1);
        conn.queue_initialize();
        conn
    }

    /// MAXH2CDATA, once ICResp has come: most bytes of data in one H2CData.
    #[must_use]
    pub fn max_h2c_data(&self) -> Option<u32> {
        self.max_h2c_data
    }

    /// How many commands are outstanding.
    #[inline]
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.commands.outstanding
    }

    stream_methods!();

    /// The first `count` bytes of [`Conn::send_pieces`] have left.
    ///
    /// # Panics
    /// When there were fewer.
    #[inline]
    pub fn sent(&mut self, count: usize) {
        let mut left = count;
        while let Some(pdu) = self.wire.outbox.advance(&mut left) {
            let (key, body) = (pdu.key, std::mem::replace(&mut pdu.body, Body::None));
            if let (Some(cid), Body::Buf(buf)) = (key, body) {
                self.data_left(cid, buf);
            }
        }
        assert_eq!(left, 0, "more was sent than there is");
        if self.wire.outbox.is_empty() {
            self.wire.lifetime.drained();
        }
    }

    /// The time.
    pub fn on_time(&mut self, now: Nanos) {
        if self.wire.lifetime.is_up(now) {
            if self.phase() == Phase::Open {
                self.wire.violation.get_or_insert(Violation::InitializeTimeout);
            }
            self.abort(CloseCause::Violation(Violation::InitializeTimeout));
        }
    }

    /// The controller closed its sending half: there is nothing more to read.
    pub fn on_peer_closed(&mut self) {
        self.cause.get_or_insert(CloseCause::ByPeer);
        self.wire.lifetime.peer_closed();
        if self.phase() == Phase::Closed {
            self.abort(CloseCause::ByPeer);
        }
    }

    /// The socket failed (refused, reset, broken pipe): nothing can be sent or read any more.
    pub fn on_reset(&mut self) {
        self.abort(CloseCause::Failed);
    }

    /// End it now: nothing is sent any more, every buffer goes back to its command.
    fn abort(&mut self, cause: CloseCause) {
        self.cause.get_or_insert(cause);
        self.keep_incoming();
        self.wire.inbox.clear();
        self.wire.outbox.clear(|key, body| {
            if let (Some(cid), Body::Buf(buf)) = (key, body) {
                self.commands.keep(*cid, buf);
            }
        });
        self.wire.lifetime.close();
    }

    /// The buffer of a payload that will not become whole goes back to its command.
    fn keep_incoming(&mut self) {
        if let Receiving::Payload(payload) = std::mem::replace(&mut self.wire.receiving, Receiving::Header) {
            self.commands.keep(payload.key.cid, payload.buf);
        }
    }

    #[cold]
    fn violate(&mut self, violation: Violation) {
        self.cause.get_or_insert(CloseCause::Violation(violation));
        self.keep_incoming();
        self.wire.violate(violation, PduType::H2C_TERM_REQ, None);
        if self.phase() == Phase::Closed {
            self.abort(CloseCause::Violation(violation));
        }
    }

    /// Once closed: the commands that are left, one by one, then `Closed`.
    #[cold]
    fn last_event(&mut self) -> Option<HostEvent> {
        if self.phase() != Phase::Closed || self.is_closed_told {
            return None;
        }
        if let Some(event) = self.commands.take_any(Status::HOST_PATHING_ERROR) {
            return Some(event);
        }
        self.is_closed_told = true;
        Some(HostEvent::Closed { why: self.cause.unwrap_or(CloseCause::ByPeer) })
    }

    /// Queue a command. Its CID is the caller's choice below the queue's entries; its data pointer is set
    /// here: in the capsule where the data fits, else by R2T or C2HData (NVMe/TCP 1.0, "Data Transfers").
    ///
    /// # Errors
    /// [`SubmitError`] gives the data back when the command cannot be taken.
    #[inline]
    pub fn submit(&mut self, sqe: Sqe, data: HostData) -> Result<(), SubmitError> {
        if !self.is_open() {
            return Err(SubmitError { kind: SubmitErrorKind::Closed, data });
        }
        self.queue_command(sqe, data)
    }

    /// What happened next. `None`: nothing more until something came or left.
    #[inline]
    pub fn next_event(&mut self) -> Option<HostEvent> {
        if let Some(cid) = self.finished.pop_front() {
            return self.commands.take_ended(cid);
        }
        if !self.wire.lifetime.is_open() {
            return self.last_event();
        }
        loop {
            match self.step() {
                Ok(None) => {}
                Ok(event) => return event,
                Err(Stop::Wait) => return None,
                Err(Stop::Violation(violation)) => {
                    self.violate(violation);
                    return self.last_event();
                }
            }
        }
    }

    /// True while commands can be submitted.
    #[inline]
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.wire.lifetime.is_open() && self.max_h2c_data.is_some()
    }

    /// End the connection: what is queued leaves first, and [`HostEvent::Closed`] follows.
    pub fn close(&mut self) {
        if self.wire.lifetime.is_open() {
            self.cause.get_or_insert(CloseCause::Requested);
            self.keep_incoming();
            self.wire.drain();
        }
    }

    /// The controller takes so many bytes of data in a command's capsule from now on (IOCCSZ x 16 - 64 of
    /// Identify Controller).
    pub fn set_in_capsule_bytes(&mut self, in_capsule_bytes: u32) {
        self.config.in_capsule_bytes = in_capsule_bytes;
    }
}
