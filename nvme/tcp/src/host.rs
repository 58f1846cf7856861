//! The host's end of a connection: sends commands, and returns completions with the data buffers.
//!
//! ```text
//!   ICReq ─> ICResp ─> Ready ─> submit(sqe, data)
//!     ├─ CapsuleCmd, with in-capsule data if it fits  ─> CapsuleResp ───────────────────> Completed
//!     ├─ CapsuleCmd ─> R2T ─> H2CData, H2CData ..     ─> CapsuleResp ───────────────────> Completed
//!     └─ CapsuleCmd ─> C2HData to the caller's buffer ─> CapsuleResp, or SUCCESS flag ──> Completed
//! ```
//! Every submitted command ends with exactly one `Completed`, which contains its buffer. When the connection
//! ends, commands without a completion end with Host Pathing Error before `Closed`.
//!
//! The caller makes the same calls per turn as at the controller's end: `on_time`, `load`, `next_event`..,
//! `unload`, `send_pieces`, `sent`, `phase`.

mod commands;
mod receive;
mod send;

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};

use arrayvec::ArrayVec;
use nvme_spec::Sqe;
use nvme_spec::status::Status;
use nvme_spec::tcp::{ADMIN_IN_CAPSULE_BYTES, DIGEST_BYTES, PduType};
use spindle_nvme_transport::host;
pub use spindle_nvme_transport::host::{HostData, SubmitError, SubmitErrorKind};
use spindle_reactor::clock::Nanos;
use spindle_reactor::net::{Received, Sent, Socket};

use crate::inbox::RxBatch;
use crate::lifetime::Phase;
use crate::outbox::Body;
use crate::violation::Violation;
pub use crate::wire::CloseCause;
use crate::wire::{Receiving, Stop, Wire, stream_methods};

use commands::Commands;

/// Parameters of a host's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostConfig {
    /// Whether ICReq requests header digests. The connection ends if ICResp differs.
    pub header_digest: bool,
    /// Whether ICReq requests data digests. The connection ends if ICResp differs.
    pub data_digest: bool,
    /// Maximum outstanding commands; every CID is less than this.
    pub queue_entries: u16,
    /// Maximum in-capsule data of a command in bytes. 8192: the value of admin queues (NVMe/TCP 1.0,
    /// "Capsules"). For an I/O queue IOCCSZ x 16 - 64. Fabrics commands may always have 8192.
    pub in_capsule_bytes: u32,
    /// Time from creation within which ICResp must arrive. 10 s, as Linux.
    pub initialize_timeout: Nanos,
    /// Longest time from the decision to close until the socket is closed, counted from the first
    /// [`Conn::on_time`] after the decision.
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

/// Event of a TCP connection. After [`HostEvent::Ready`] (ICResp) [`Conn::max_h2c_data`] is known.
pub type HostEvent = host::HostEvent<Violation>;

const TERM_REQ: PduType = PduType::H2C_TERM_REQ;
/// Longest head: CapsuleCmd with its digest.
const HEAD: usize = 72 + DIGEST_BYTES;
/// Longest tail: data digest.
const TAIL: usize = DIGEST_BYTES;

/// C2HData being received: CID of its command, and FLAGS of the PDU.
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
    /// CIDs whose completion arrived before their data was completely sent. The data is sent now, and
    /// `Completed` is pending.
    finished: VecDeque<u16>,
    config: HostConfig,
    /// MAXH2CDATA of ICResp in bytes; `None` before ICResp.
    max_h2c_data: Option<u32>,
    cause: Option<CloseCause>,
    is_closed_reported: bool,
}

impl Conn {
    /// Creates a connection over a socket that is connected or connecting. Queues ICReq; [`HostEvent::Ready`]
    /// or [`HostEvent::Closed`] follows.
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
            is_closed_reported: false,
        };
        conn.wire.outbox.reserve(entries + 1);
        conn.queue_initialize();
        conn
    }

    /// Returns MAXH2CDATA, the maximum bytes of data in one H2CData. `None` before ICResp.
    #[must_use]
    pub fn max_h2c_data(&self) -> Option<u32> {
        self.max_h2c_data
    }

    /// Returns the count of submitted commands without a `Completed` event.
    #[inline]
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.commands.outstanding
    }

    stream_methods!();

    /// Removes the first `count` bytes of [`Conn::send_pieces`], which the socket has accepted.
    ///
    /// # Panics
    /// If `count` is greater than the bytes queued.
    #[inline]
    pub fn sent(&mut self, count: usize) {
        let mut remaining = count;
        while let Some(pdu) = self.wire.outbox.advance(&mut remaining) {
            let (key, body) = (pdu.key, std::mem::replace(&mut pdu.body, Body::None));
            if let (Some(cid), Body::Buf(buf)) = (key, body) {
                self.on_data_sent(cid, buf);
            }
        }
        assert_eq!(remaining, 0, "more was sent than there is");
        if self.wire.outbox.is_empty() {
            self.wire.lifetime.drained();
        }
    }

    /// Closes the connection without sending the queued PDUs, and returns all buffers to their commands.
    fn abort(&mut self, cause: CloseCause) {
        self.end_transfers(cause);
        self.wire.outbox.clear(|key, body| {
            if let (Some(cid), Body::Buf(buf)) = (key, body) {
                self.commands.return_buf(*cid, buf);
            }
        });
        self.wire.close();
    }

    /// Ends the payload being received and returns its buffer to its command. Keeps the first cause.
    fn end_transfers(&mut self, cause: CloseCause) {
        self.cause.get_or_insert(cause);
        if let Receiving::Payload(payload) = std::mem::replace(&mut self.wire.receiving, Receiving::Header) {
            self.commands.return_buf(payload.key.cid, payload.buf);
        }
    }

    /// Returns the next event of a closed connection: `Completed` of each outstanding command, then `Closed`
    /// once. `None` in other phases.
    #[cold]
    fn last_event(&mut self) -> Option<HostEvent> {
        if self.phase() != Phase::Closed || self.is_closed_reported {
            return None;
        }
        if let Some(event) = self.commands.end_any(Status::HOST_PATHING_ERROR) {
            return Some(event);
        }
        self.is_closed_reported = true;
        Some(HostEvent::Closed { why: self.cause.unwrap_or(CloseCause::ByPeer) })
    }

    /// Queues a command, and sets its SGL: in-capsule data if it fits, else a transport data block (NVMe/TCP
    /// 1.0, "Data Transfers"). The caller chooses a free CID less than `queue_entries`.
    ///
    /// # Errors
    /// The connection is not open, or the CID is in use or out of range. [`SubmitError`] returns the data.
    #[inline]
    pub fn submit(&mut self, sqe: Sqe, data: HostData) -> Result<(), SubmitError> {
        if !self.is_open() {
            return Err(SubmitError { kind: SubmitErrorKind::Closed, data });
        }
        self.queue_command(sqe, data)
    }

    /// Returns the next event; `None`: there is none now.
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

    /// Returns true between ICResp and the decision to close: commands can be submitted.
    #[inline]
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.wire.lifetime.is_open() && self.max_h2c_data.is_some()
    }

    /// Ends the connection after the queued PDUs are sent, or after `close_timeout`. [`HostEvent::Closed`]
    /// follows. No effect if the end has begun.
    pub fn close(&mut self) {
        if self.wire.lifetime.is_open() {
            self.end_transfers(CloseCause::Requested);
            self.wire.drain();
        }
    }

    /// Sets the maximum in-capsule data of a command in bytes: IOCCSZ x 16 - 64 of Identify Controller.
    pub fn set_in_capsule_bytes(&mut self, in_capsule_bytes: u32) {
        self.config.in_capsule_bytes = in_capsule_bytes;
    }
}
