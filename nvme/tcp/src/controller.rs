//! The controller's end of a connection: implements [`Transport`].
//!
//! Calls of a shell:
//!
//! ```text
//!   on_time(now)                                     once now has reached deadline()
//!   load(batch) ; next_event.. (the queue pair) ; unload() -> batch           unless is_paused()
//!   send_pieces(..) ; sent(n)                        while wants_send()
//!   phase()                                          HalfClosed: shut down sending; Closed: close the socket
//! ```
//!
//! `Sent` precedes all events of bytes received after the send, so a reused queue entry is not counted twice.

mod capsule_stash;
mod receive;
mod reply;
mod transfers;

use spindle_nvme_transport::RequestId;
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};

use arrayvec::ArrayVec;
use nvme_spec::Sqe;
use nvme_spec::fabrics::ADMIN_QUEUE_ENTRIES;
use nvme_spec::tcp::{ADMIN_IN_CAPSULE_BYTES, DIGEST_BYTES, MAXH2CDATA_MIN, PduType};
use spindle_nvme_transport::{CloseReason, Event, FAST_PATH, Limits, Reply, Transport};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_reactor::net::{Received, Sent, Socket};

use crate::inbox::RxBatch;
use crate::lifetime::Phase;
use crate::outbox::{Body, Outbox};
use crate::payload::Payload;
use crate::violation::Violation;
use crate::wire::{CloseCause, Receiving, Stop, Wire, stream_methods};

use capsule_stash::CapsuleStash;
use transfers::{Transfer, TransferTarget, Transfers};

pub use transfers::QUEUE_ENTRIES_MAX;

/// Constants of a connection, from the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnConfig {
    /// Maximum in-capsule data of a command on an I/O queue, in bytes. 4096: a one-block write needs no R2T.
    /// For admin queues and Fabrics commands always at least 8192 (NVMe/TCP 1.0, "Capsules").
    pub in_capsule_bytes: u32,
    /// MAXH2CDATA in bytes. 1 MiB: a write of the largest common size arrives in one PDU.
    pub max_h2c_data: u32,
    /// Maximum entries of an I/O queue, up to [`QUEUE_ENTRIES_MAX`]. 256: a queue has at most one command
    /// less than entries, and 128 commands are a common depth. An admin queue may have
    /// [`ADMIN_QUEUE_ENTRIES`] if that is more.
    pub queue_entries: u16,
    /// Maximum bytes of data of one command (MDTS). 1 MiB, as MAXH2CDATA.
    pub transfer_bytes: u32,
    /// Whether header digests are granted when ICReq requests them.
    pub header_digest: bool,
    /// Whether data digests are granted when ICReq requests them.
    pub data_digest: bool,
    /// Time from accept within which ICReq must arrive. 10 s: as long as a Linux host waits for ICResp.
    pub initialize_timeout: Nanos,
    /// Longest time from the decision to close until the socket is closed, counted from the first
    /// [`Conn::on_time`] after the decision. 2 s: a host that reads needs one round trip.
    pub close_timeout: Nanos,
}

impl Default for ConnConfig {
    fn default() -> Self {
        ConnConfig {
            in_capsule_bytes: 4096,
            max_h2c_data: 1 << 20,
            queue_entries: 256,
            transfer_bytes: 1 << 20,
            header_digest: true,
            data_digest: true,
            initialize_timeout: Nanos::from_secs(10),
            close_timeout: Nanos::from_secs(2),
        }
    }
}

const TERM_REQ: PduType = PduType::C2H_TERM_REQ;
/// Longest head: C2HData or R2T with its digest.
const HEAD: usize = 24 + DIGEST_BYTES;
/// Longest tail: data digest, CapsuleResp with its digest.
const TAIL: usize = DIGEST_BYTES + 24 + DIGEST_BYTES;

/// Origin of the data being received, and the request or transfer to which it belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// In-capsule data of a request, received into its buffer.
    Capsule(RequestId),
    /// H2CData of the transfer with this TTAG.
    H2cData(u16),
    /// In-capsule data of a request that waits for memory, received into the capsule stash.
    Stash(RequestId),
}

/// The controller's end of one connection.
#[derive(Debug)]
pub struct Conn {
    wire: Wire<HEAD, TAIL, Option<RequestId>, Source>,
    /// Requests whose reply was sent and whose `Sent` event is pending.
    sent: VecDeque<RequestId>,
    /// Replies with [`FAST_PATH`] sent since the last `take_fast_path_sent`.
    fast_path_sent: u32,
    transfers: Transfers,
    stash: CapsuleStash,
    config: ConnConfig,
    /// First bytes of a command header without digests, for [`Conn::plain_command`]. `NO_PLAIN_HEADER` before
    /// ICReq and with digests.
    plain_header: u64,
    /// Maximum bytes of in-capsule data of a command other than a Fabrics command; changed by Connect.
    in_capsule_max: u32,
    /// PDO of the C2HData that this connection sends, in bytes.
    data_offset: u8,
    is_initialized: bool,
    is_closed_reported: bool,
}

/// Maximum queue entries for which memory is reserved at Connect. A longer send queue grows with use, so that
/// an idle connection stays small.
const RESERVE_ENTRIES_MAX: u16 = 128;
/// Queue entries for which memory is reserved at accept, before Connect sets the queue size.
const RESERVE_ENTRIES_FIRST: u16 = 8;

impl Conn {
    /// Returns the maximum heap memory in bytes of a connection with a queue of `entries` (8 or more).
    /// Without the capsule stash and the carry of the inbox.
    #[must_use]
    pub(crate) fn heap_bytes(entries: u16) -> usize {
        let entries = usize::from(entries);
        Outbox::<HEAD, TAIL, Option<RequestId>>::bytes_for(entries)
            + entries.next_power_of_two() * size_of::<RequestId>()
            + Transfers::bytes_for(entries)
    }

    /// Creates a connection that was accepted at `now` and waits for ICReq.
    ///
    /// # Panics
    /// If MAXH2CDATA is less than 4096 or not a multiple of 4, or the queue has more than
    /// [`QUEUE_ENTRIES_MAX`] entries. The configuration was validated when read.
    #[must_use]
    pub fn new(config: ConnConfig, now: Nanos) -> Conn {
        let max = config.max_h2c_data;
        assert!(max >= MAXH2CDATA_MIN && max.is_multiple_of(4), "MAXH2CDATA {max}");
        let mut conn = Conn {
            wire: Wire::new(now + config.initialize_timeout, config.close_timeout),
            sent: VecDeque::new(),
            fast_path_sent: 0,
            // Connect decides which kind of queue it is.
            transfers: Transfers::new(config.queue_entries.max(ADMIN_QUEUE_ENTRIES)),
            stash: CapsuleStash::default(),
            config,
            plain_header: receive::NO_PLAIN_HEADER,
            in_capsule_max: config.in_capsule_bytes.max(ADMIN_IN_CAPSULE_BYTES),
            data_offset: 24,
            is_initialized: false,
            is_closed_reported: false,
        };
        conn.set_queue_entries(RESERVE_ENTRIES_FIRST);
        conn
    }

    stream_methods!();

    /// True while a command with in-capsule data is pending; the shell must not read the socket then.
    #[inline]
    #[must_use]
    pub fn is_paused(&self) -> bool {
        matches!(self.wire.receiving, Receiving::PendingCapsule(_))
    }

    /// Returns true while the host's data of a write is fetched by R2T.
    #[inline]
    #[must_use]
    pub fn is_fetching(&self) -> bool {
        self.transfers.len() > 0
    }

    /// Returns true if events may exist without a new batch: bytes of an earlier batch are unread, or a
    /// `fetch` has all its data. To be checked after a `fetch` or `reply` that ended a pause.
    #[inline]
    #[must_use]
    pub fn has_unread(&self) -> bool {
        self.wire.inbox.carried() > 0 || self.wire.is_payload_whole() || self.stash.has_fetched()
    }

    /// Removes the first `count` bytes of [`Conn::send_pieces`] from the queue, as the socket has accepted
    /// them. Drops buffers that are completely sent.
    ///
    /// # Panics
    /// If `count` is greater than the bytes queued.
    #[inline]
    pub fn sent(&mut self, count: usize) {
        let mut remaining = count;
        while let Some(pdu) = self.wire.outbox.advance(&mut remaining) {
            pdu.body = Body::None;
            match pdu.key {
                Some(FAST_PATH) => self.fast_path_sent += 1,
                Some(slot) => self.sent.push_back(slot),
                None => {}
            }
        }
        assert_eq!(remaining, 0, "more was sent than there is");
        if self.wire.outbox.is_empty() {
            self.wire.lifetime.drained();
        }
    }

    /// Returns the counts of unsent PDUs and of open R2Ts, and the unread bytes kept from earlier batches.
    #[must_use]
    pub fn in_flight(&self) -> (usize, usize, usize) {
        (self.wire.outbox.len(), self.transfers.len(), self.wire.inbox.carried())
    }

    /// Closes the connection without sending the queued PDUs, and drops all buffers.
    fn abort(&mut self, cause: CloseCause) {
        self.end_transfers(cause);
        self.wire.outbox.clear(|_, _| ());
        self.wire.close();
    }

    /// Drops the buffers of transfers. A controller does not report the cause.
    fn end_transfers(&mut self, _cause: CloseCause) {
        self.transfers.clear();
        self.stash = CapsuleStash::default();
    }

    /// Returns the next event of the stash or of received bytes, in any phase; `Closed` at the end.
    #[inline(never)]
    fn next_received(&mut self) -> Option<Event> {
        if let Some(fetched) = self.stash.next_fetched() {
            return Some(fetched);
        }
        while self.wire.lifetime.is_open() {
            match self.step() {
                Ok(None) => {}
                Ok(event) => return event,
                Err(Stop::Wait) => return None,
                Err(Stop::Violation(violation)) => self.violate(violation),
            }
        }
        self.last_event()
    }

    #[cold]
    fn last_event(&mut self) -> Option<Event> {
        if self.phase() != Phase::Closed || self.is_closed_reported {
            return None;
        }
        self.is_closed_reported = true;
        Some(Event::Closed)
    }
}

impl Transport for Conn {
    #[inline]
    fn next_event(&mut self) -> Option<Event> {
        if let Some(slot) = self.sent.pop_front() {
            return Some(Event::Sent { slot });
        }
        if let Some(event) = self.plain_fetched() {
            return Some(event);
        }
        if let Some(event) = self.plain_command() {
            return Some(event);
        }
        self.next_received()
    }

    #[inline]
    fn take_fast_path_sent(&mut self) -> u32 {
        std::mem::take(&mut self.fast_path_sent)
    }

    fn fetch(&mut self, slot: RequestId, cid: u16, buf: Buf) {
        if !self.wire.lifetime.is_open() {
            return;
        }
        let Some(buf) = self.stash.fetch(slot, buf) else { return };
        match &self.wire.receiving {
            // The lengths are compared because a host may use one CID for two commands at once.
            Receiving::PendingCapsule(pending)
                if pending.cid == cid && pending.frame.data_bytes as usize == buf.len() =>
            {
                let payload = Payload::new(Source::Capsule(slot), buf, 0, &pending.frame);
                self.wire.receiving = Receiving::Payload(payload);
                // Copied now, from the batch: `unload` would copy the data to the carry first.
                self.wire.copy_payload();
            }
            Receiving::PendingCapsule(_) | Receiving::Header | Receiving::Payload(_) | Receiving::Skip(_) => {
                let bytes = u32::try_from(buf.len()).unwrap_or(u32::MAX);
                let target = TransferTarget::Buffer(buf);
                self.queue_r2t(Transfer { slot, cid, is_damaged: false, received: 0, bytes, target });
            }
        }
    }

    fn cancel(&mut self, slot: RequestId) -> bool {
        if self.wire.lifetime.is_open() { self.cancel_fetch(slot) } else { false }
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    fn take_in_capsule(&mut self, buf: &mut Buf) -> bool {
        let Receiving::PendingCapsule(pending) = &self.wire.receiving else { return false };
        let is_plain = !pending.frame.data_digest && pending.frame.data_bytes as usize == buf.len();
        if !is_plain || !self.wire.inbox.copy_whole_to(buf) {
            return false;
        }
        self.wire.receiving = Receiving::Header;
        true
    }

    #[inline]
    fn peek_command(&self) -> Option<&Sqe> {
        self.peek_sqe()
    }

    fn stash_capsule(&mut self, slot: RequestId, cid: u16) {
        if let Receiving::PendingCapsule(pending) = &self.wire.receiving
            && pending.cid == cid
        {
            let buf = self.stash.begin(slot, pending.frame.data_bytes);
            let payload = Payload::new(Source::Stash(slot), buf, 0, &pending.frame);
            self.wire.receiving = Receiving::Payload(payload);
            self.wire.copy_payload();
        }
    }

    fn end_without_reply(&mut self, slot: RequestId) {
        self.stash.discard(slot);
    }

    fn ignore(&mut self) {
        if let Receiving::PendingCapsule(pending) = &self.wire.receiving {
            let frame = pending.frame;
            self.wire.skip_data(&frame);
        }
    }

    #[inline]
    fn reply(&mut self, reply: Reply) {
        if !self.wire.lifetime.is_open() {
            return;
        }
        if let Receiving::PendingCapsule(pending) = &self.wire.receiving
            && pending.cid == reply.cqe.cid()
        {
            let frame = pending.frame;
            self.wire.skip_data(&frame);
        }
        self.stash.discard(reply.slot);
        self.queue_reply(reply);
    }

    fn unsent_bytes(&self) -> u64 {
        self.wire.outbox.unsent_bytes()
    }

    fn close(&mut self, reason: CloseReason) {
        match reason {
            // Queued replies are sent first: to Disconnect, a refusal, completions of commands.
            CloseReason::Disconnect
            | CloseReason::ControllerGone
            | CloseReason::HostError
            | CloseReason::Shutdown => {
                if self.wire.lifetime.is_open() {
                    self.end_transfers(CloseCause::Requested);
                    self.wire.drain();
                }
            }
            // The host does not respond.
            CloseReason::KeepAliveExpired | CloseReason::ConnectTimeout => self.abort(CloseCause::Requested),
        }
    }

    fn set_queue_entries(&mut self, entries: u16) {
        let count = usize::from(entries.min(RESERVE_ENTRIES_MAX));
        self.wire.outbox.reserve(count);
        self.sent.reserve(count.saturating_sub(self.sent.len()));
    }

    fn limits(&self) -> Limits {
        Limits {
            in_capsule_bytes: self.config.in_capsule_bytes,
            queue_entries: self.config.queue_entries,
            transfer_bytes: self.config.transfer_bytes,
        }
    }
}
