//! The controller's end of a connection: implements [`Transport`].
//!
//! The order of a turn, as a shell calls it:
//!
//! ```text
//!   on_time(now)                                     when deadline() has come
//!   load(batch) ; next_event.. (the queue pair) ; unload() -> batch           unless is_paused()
//!   send_pieces(..) ; sent(n)                        while wants_send()
//!   phase()                                          HalfClosed: shut down sending; Closed: close the socket
//! ```
//!
//! Sent comes before what was received after it: a host that reuses a queue entry is never counted twice.

mod capsule_stash;
mod receive;
mod reply;
mod transfers;

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};

use arrayvec::ArrayVec;
use nvme_spec::Sqe;
use nvme_spec::tcp::{ADMIN_IN_CAPSULE_BYTES, DIGEST_BYTES, MAXH2CDATA_MIN, PduType};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;
use spindle_transport::{CloseReason, Event, FAST_PATH, Limits, Reply, Transport};

use crate::inbox::RxBatch;
use crate::lifetime::Phase;
use crate::outbox::{Body, Outbox};
use crate::payload::Payload;
use crate::violation::Violation;
use crate::wire::{Receiving, Stop, Wire, stream_methods};

use capsule_stash::CapsuleStash;
use transfers::{Transfer, TransferTarget, Transfers};

pub use transfers::QUEUE_ENTRIES_MAX;

/// Constants of a connection, from its listener. Every default says why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnConfig {
    /// In-capsule data of commands on I/O queues. 4096: a one-block write needs no round trip. Admin queues
    /// and Fabrics commands always get 8192 (NVMe/TCP 1.0, "Capsules").
    pub in_capsule_bytes: u32,
    /// MAXH2CDATA. 1 MiB: a write of the largest common size comes in one PDU.
    pub max_h2c_data: u32,
    /// Most entries of a queue, up to [`QUEUE_ENTRIES_MAX`]. 256: a queue holds one command less than it has
    /// entries, and 128 commands are a common depth.
    pub queue_entries: u16,
    /// Most bytes that one command moves. 1 MiB.
    pub transfer_bytes: u32,
    /// Header digests are used when the host asks for them.
    pub header_digest: bool,
    /// Data digests are used when the host asks for them.
    pub data_digest: bool,
    /// Time for ICReq to come. 10 s: as long as a Linux host waits for ICResp.
    pub initialize_timeout: Nanos,
    /// Time from the decision to close to the end of the socket. 2 s: a host that reads needs one round trip.
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

/// Longest head: C2HData or R2T with its digest.
const HEAD: usize = 24 + DIGEST_BYTES;
/// Longest tail: data digest, CapsuleResp with its digest.
const TAIL: usize = DIGEST_BYTES + 24 + DIGEST_BYTES;

/// Whose data is being received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// In-capsule data of a request.
    Capsule(Slot),
    /// H2CData of the transfer with this tag.
    H2cData(u16),
    /// In-capsule data of a request that waits for memory.
    Stash(Slot),
}

/// The controller's end of one connection.
#[derive(Debug)]
pub struct Conn {
    wire: Wire<HEAD, TAIL, Option<Slot>, Source>,
    /// Requests whose reply has left, to be told.
    sent: VecDeque<Slot>,
    /// The same of those without a slot: how many.
    left: u32,
    transfers: Transfers,
    stash: CapsuleStash,
    config: ConnConfig,
    /// How the header of a command begins, where there are no digests; see [`Conn::plain_command`].
    plain_header: u64,
    /// Most bytes of in-capsule data now, of a command that is no Fabrics command.
    in_capsule_max: u32,
    /// PDO of the C2HData that this connection sends.
    data_offset: u8,
    is_initialized: bool,
    is_closed_told: bool,
}

/// Queue entries that room is made for at once; beyond it the send queue grows with use, so that idle long
/// queues stay small.
const RESERVE_ENTRIES_MAX: u16 = 128;
/// Replies and R2Ts before Connect has said how long the queue is.
const RESERVE_ENTRIES_FIRST: u16 = 8;

impl Conn {
    /// Most bytes that a connection takes beside itself with a queue of `entries`, all of which were used at
    /// once. What it has received while it waits for memory comes on top: in-capsule data that was set aside.
    #[must_use]
    pub(crate) fn heap_bytes(entries: u16) -> usize {
        let entries = usize::from(entries);
        Outbox::<HEAD, TAIL, Option<Slot>>::bytes_for(entries)
            + entries.next_power_of_two() * size_of::<Slot>()
            + Transfers::bytes_for(entries)
    }

    /// A connection that was just accepted.
    ///
    /// # Panics
    /// When MAXH2CDATA or the queue entries are out of range: the configuration is checked when it is read.
    #[must_use]
    pub fn new(config: ConnConfig, now: Nanos) -> Conn {
        let max = config.max_h2c_data;
        assert!(max >= MAXH2CDATA_MIN && max.is_multiple_of(4), "MAXH2CDATA {max}");
        let mut conn = Conn {
            wire: Wire::new(now + config.initialize_timeout, config.close_timeout),
            sent: VecDeque::new(),
            left: 0,
            transfers: Transfers::new(config.queue_entries),
            stash: CapsuleStash::default(),
            config,
            plain_header: receive::NO_PLAIN_HEADER,
            in_capsule_max: config.in_capsule_bytes.max(ADMIN_IN_CAPSULE_BYTES),
            data_offset: 24,
            is_initialized: false,
            is_closed_told: false,
        };
        conn.set_queue_entries(RESERVE_ENTRIES_FIRST);
        conn
    }

    stream_methods!();

    /// True while a command with in-capsule data is undecided: the shell does not read the
    /// socket.
    #[inline]
    #[must_use]
    pub fn is_paused(&self) -> bool {
        matches!(self.wire.receiving, Receiving::PendingCapsule(_))
    }

    /// True when there may be events without a new batch: bytes are kept from an earlier one, or `fetch`
    /// found all of its data among them. Ask after a `fetch` or `reply` that ended a pause.
    #[inline]
    #[must_use]
    pub fn has_unread(&self) -> bool {
        self.wire.inbox.stashed() > 0 || self.wire.is_payload_whole() || self.stash.has_fetched()
    }

    /// The first `count` bytes of [`Conn::send_pieces`] have left. Buffers of which the last byte has left
    /// are given back.
    ///
    /// # Panics
    /// When there were fewer.
    #[inline]
    pub fn sent(&mut self, count: usize) {
        let mut left = count;
        while let Some(pdu) = self.wire.outbox.advance(&mut left) {
            pdu.body = Body::None;
            match pdu.key {
                Some(FAST_PATH) => self.left += 1,
                Some(slot) => self.sent.push_back(slot),
                None => {}
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
            self.abort();
        }
    }

    /// The peer closed its sending half: there is nothing more to read.
    pub fn on_peer_closed(&mut self) {
        self.wire.lifetime.peer_closed();
        if self.phase() == Phase::Closed {
            self.abort();
        }
    }

    /// The socket failed (reset, broken pipe): nothing can be sent or read any more.
    pub fn on_reset(&mut self) {
        self.abort();
    }

    /// PDUs that wait to be sent, writes whose data was asked for, and bytes that are kept between batches.
    #[must_use]
    pub fn in_flight(&self) -> (usize, usize, usize) {
        (self.wire.outbox.len(), self.transfers.len(), self.wire.inbox.stashed())
    }

    /// End it now: nothing is sent any more, every buffer is dropped.
    fn abort(&mut self) {
        self.wire.inbox.clear();
        self.wire.receiving = Receiving::Header;
        self.wire.outbox.clear(|_, _| ());
        self.drop_buffers();
        self.wire.lifetime.close();
    }

    /// Drop the buffers of requests.
    fn drop_buffers(&mut self) {
        self.transfers.clear();
        self.stash = CapsuleStash::default();
    }

    #[cold]
    fn violate(&mut self, violation: Violation) {
        self.drop_buffers();
        self.wire.violate(violation, PduType::C2H_TERM_REQ, None);
        if self.phase() == Phase::Closed {
            self.abort();
        }
    }

    /// What comes of received bytes, in any state.
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
        if self.phase() != Phase::Closed || self.is_closed_told {
            return None;
        }
        self.is_closed_told = true;
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
    fn take_left(&mut self) -> u32 {
        std::mem::take(&mut self.left)
    }

    fn fetch(&mut self, slot: Slot, cid: u16, buf: Buf) {
        if !self.wire.lifetime.is_open() {
            return;
        }
        let Some(buf) = self.stash.fetch(slot, buf) else { return };
        match &self.wire.receiving {
            // The length is compared too: a host that has two commands of one CID gets its own data wrong,
            // not us.
            Receiving::PendingCapsule(pending)
                if pending.cid == cid && pending.frame.data_bytes as usize == buf.len() =>
            {
                let payload = Payload::new(Source::Capsule(slot), buf, 0, &pending.frame);
                self.wire.receiving = Receiving::Payload(payload);
                // At once, while it is in the batch: what is left of it there would be copied twice.
                self.wire.copy_payload();
            }
            Receiving::PendingCapsule(_) | Receiving::Header | Receiving::Payload(_) | Receiving::Skip(_) => {
                let bytes = u32::try_from(buf.len()).unwrap_or(u32::MAX);
                let place = TransferTarget::Here(buf);
                self.ask_host(Transfer { slot, cid, is_damaged: false, received: 0, bytes, place });
            }
        }
    }

    fn cancel(&mut self, slot: Slot) -> bool {
        if self.wire.lifetime.is_open() { self.cancel_fetch(slot) } else { false }
    }

    #[inline]
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

    fn stash_capsule(&mut self, slot: Slot, cid: u16) {
        if let Receiving::PendingCapsule(pending) = &self.wire.receiving
            && pending.cid == cid
        {
            let buf = self.stash.begin(slot, pending.frame.data_bytes);
            let payload = Payload::new(Source::Stash(slot), buf, 0, &pending.frame);
            self.wire.receiving = Receiving::Payload(payload);
            self.wire.copy_payload();
        }
    }

    fn end_without_reply(&mut self, slot: Slot) {
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
            // Something is to reach the host first: the reply to Disconnect, the reason of a refusal, what
            // was acknowledged.
            CloseReason::Disconnect
            | CloseReason::ControllerGone
            | CloseReason::HostError
            | CloseReason::Shutdown => {
                if self.wire.lifetime.is_open() {
                    self.drop_buffers();
                    self.wire.drain();
                }
            }
            // The host is gone.
            CloseReason::KeepAliveExpired | CloseReason::ConnectTimeout => self.abort(),
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
