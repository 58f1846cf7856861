//! State and methods common to both ends of a connection: receiving, sending, protocol violations and close.

use std::io::IoSliceMut;

use arrayvec::ArrayVec;
use nvme_spec::tcp::{DIGEST_BYTES, PduType, TERM_REQ_DATA_BYTES_MAX, TermReq};
use nvme_spec::zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};
use spindle_nvme_transport::host;
use spindle_reactor::clock::Nanos;
use spindle_reactor::net::{Received, Socket};

use crate::frame::{Agreed, Frame, check_header_digest, check_terminate};
use crate::inbox::{Expectation, Inbox, RxBatch};
use crate::lifetime::Lifetime;
use crate::outbox::Outbox;
use crate::payload::{DIRECT_PAYLOAD_MIN, Filled, Payload};
use crate::violation::Violation;

/// Methods of both connection types that use their field `wire`, and what each does when no more bytes are
/// received (`end_transfers`) and when nothing is sent any more either (`abort`).
macro_rules! stream_methods {
    () => {
        /// Loads a filled batch. `next_event` reads its bytes.
        ///
        /// # Panics
        /// If the previous batch has unread bytes and was not unloaded.
        #[inline]
        pub fn load(&mut self, batch: RxBatch) {
            self.wire.inbox.load(batch);
        }

        /// Returns the batch, cleared. While open, the connection keeps a copy of the unread bytes.
        #[inline]
        pub fn unload(&mut self) -> RxBatch {
            self.wire.unload()
        }

        /// Appends the unfilled part of the buffer of the payload being received, as much as fits in `out`,
        /// for the socket to read into directly. Returns the length appended in bytes. 0: there is no
        /// payload, it is shorter than `payload_min`, less than 8 KiB of it is missing, or unread bytes
        /// precede it. To be called only while no batch is loaded.
        #[inline]
        pub fn direct_target<'a, const N: usize>(
            &'a mut self,
            out: &mut ArrayVec<IoSliceMut<'a>, N>,
            payload_min: usize,
        ) -> usize {
            self.wire.direct_target(out, payload_min)
        }

        /// Records that the socket wrote `count` bytes to the memory returned by [`Conn::direct_target`].
        ///
        /// # Panics
        /// If `count` is greater than the missing bytes of the payload.
        #[inline]
        pub fn received_direct(&mut self, count: usize) {
            self.wire.received_direct(count);
        }

        /// Returns true if PDUs are queued to be sent.
        #[inline]
        #[must_use]
        pub fn wants_send(&self) -> bool {
            !self.wire.outbox.is_empty()
        }

        /// Appends unsent pieces of queued PDUs, in order, until `out` is full. Returns the bytes appended.
        #[inline]
        pub fn send_pieces<'a, const N: usize>(&'a self, out: &mut ArrayVec<IoSlice<'a>, N>) -> usize {
            self.wire.outbox.pieces(out)
        }

        /// Sends queued PDUs by one `sendmsg`. Returns the result, and true if the socket is full.
        #[inline]
        pub fn send_to(&mut self, socket: &Socket) -> (Sent, bool) {
            let (sent, bytes) = self.wire.outbox.send_to(socket);
            let is_full = match sent {
                Sent::Bytes(count) => {
                    self.sent(count);
                    count < bytes
                }
                Sent::Full => true,
                Sent::Failed(_) => false,
            };
            (sent, is_full)
        }

        /// Receives once: into the payload being received and a small part of `batch`, or into `batch` alone.
        /// [`Conn::load`] follows. Returns the result, and true if all bytes came: there may be more.
        #[inline]
        pub fn receive_from(&mut self, socket: &Socket, batch: &mut RxBatch) -> (Received, bool) {
            self.wire.receive_from(socket, batch)
        }

        /// Returns the phase, from which the shell derives the state of the socket.
        #[inline]
        #[must_use]
        pub fn phase(&self) -> Phase {
            self.wire.lifetime.phase()
        }

        /// Returns when [`Conn::on_time`] must be called. Zero: at once; `None`: no time-out runs.
        #[must_use]
        pub fn deadline(&self) -> Option<Nanos> {
            self.wire.lifetime.deadline()
        }

        /// Closes the connection if [`Conn::deadline`] has passed; while it is open, with
        /// [`Violation::InitializeTimeout`]. A deadline of zero becomes `now` plus `close_timeout`.
        pub fn on_time(&mut self, now: Nanos) {
            if self.wire.lifetime.has_expired(now) {
                if self.phase() == Phase::Open {
                    self.wire.violation.get_or_insert(Violation::InitializeTimeout);
                }
                self.abort(CloseCause::Violation(Violation::InitializeTimeout));
            }
        }

        /// Handles the peer's shutdown of its sending side: no more bytes will arrive. Closes the connection,
        /// except that a draining one sends its queued PDUs first.
        pub fn on_peer_closed(&mut self) {
            self.wire.lifetime.peer_closed();
            if self.phase() == Phase::Closed {
                self.abort(CloseCause::ByPeer);
            }
        }

        /// Closes the connection without sending, as the socket failed (refused, reset, broken pipe).
        pub fn on_reset(&mut self) {
            self.abort(CloseCause::Failed);
        }

        #[cold]
        fn violate(&mut self, violation: Violation) {
            self.end_transfers(CloseCause::Violation(violation));
            self.wire.violate(violation, TERM_REQ, None);
            if self.phase() == Phase::Closed {
                self.abort(CloseCause::Violation(violation));
            }
        }

        /// Returns the first protocol violation of the connection, for the log. `None`: there was none, or it
        /// was returned before.
        pub fn take_violation(&mut self) -> Option<Violation> {
            self.wire.violation.take()
        }
    };
}
pub(crate) use stream_methods;

/// Cause of the end of a TCP connection, with the [`Violation`] if there was one.
pub type CloseCause = host::CloseCause<Violation>;

/// Bytes of the batch that a direct receive may fill after its payload: the next header, and little data that
/// must be copied.
const AFTER_DIRECT_BYTES: usize = 2048;
/// Maximum pieces of a buffer that one direct receive fills: 256 KiB if no two pages are adjacent, else more.
const DIRECT_PIECES_MAX: usize = 64;

/// A command whose in-capsule data is next in the stream and has no destination yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PendingCapsule {
    pub(crate) cid: u16,
    pub(crate) frame: Frame,
}

/// State of the receiving side of a connection.
///
/// ```text
///   Header ──> PendingCapsule ──> Payload ──> Header      command with data: fetch, stash_capsule
///     │              ├──────────> Skip ─────> Header      reply, ignore
///     │              └──────────────────────> Header      take_in_capsule
///     ├──────────────────────────> Payload ──> Header     H2CData, C2HData
///     └──────────────────────────> Skip ─────> Header     data of a command that failed or was aborted
/// ```
#[derive(Debug)]
pub(crate) enum Receiving<K> {
    /// Between two PDUs or within a header. Ends when the header is complete.
    Header,
    /// The event of a command was returned; its in-capsule data is unread. Ended by `fetch`,
    /// `take_in_capsule`, `stash_capsule`, `reply` or `ignore`.
    PendingCapsule(PendingCapsule),
    /// Data is received into a buffer. Ends when the data and its digest are complete.
    Payload(Payload<K>),
    /// This many bytes, data and digest, are discarded.
    Skip(usize),
}

/// Reason for which a step of the receiving side stopped.
#[derive(Debug)]
pub(crate) enum Stop {
    /// More bytes, or a call that ends the pending capsule, must come first.
    Wait,
    /// The peer violated the protocol; the connection ends.
    Violation(Violation),
}

impl From<Violation> for Stop {
    #[cold]
    fn from(violation: Violation) -> Stop {
        Stop::Violation(violation)
    }
}

/// Stream state of one end. `HEAD` and `TAIL` are the longest head and tail of its PDUs in bytes. `Out` is
/// the key of a queued PDU, `In` the key of the payload being received.
#[derive(Debug)]
pub(crate) struct Wire<const HEAD: usize, const TAIL: usize, Out, In> {
    pub(crate) inbox: Inbox,
    pub(crate) receiving: Receiving<In>,
    expects: Expectation,
    pub(crate) outbox: Outbox<HEAD, TAIL, Out>,
    pub(crate) agreed: Agreed,
    pub(crate) lifetime: Lifetime,
    /// The first violation of the peer; later ones are not recorded.
    pub(crate) violation: Option<Violation>,
}

impl<const HEAD: usize, const TAIL: usize, Out: Default, In> Wire<HEAD, TAIL, Out, In> {
    pub(crate) fn new(initialize_by: Nanos, close_timeout: Nanos) -> Self {
        Wire {
            inbox: Inbox::default(),
            receiving: Receiving::Header,
            expects: Expectation::default(),
            outbox: Outbox::default(),
            agreed: Agreed::INITIAL,
            lifetime: Lifetime::new(initialize_by, close_timeout),
            violation: None,
        }
    }

    #[inline]
    pub(crate) fn unload(&mut self) -> RxBatch {
        if !self.lifetime.is_open() {
            self.inbox.clear();
        }
        self.inbox.unload()
    }

    #[inline]
    pub(crate) fn receive_from(&mut self, socket: &Socket, batch: &mut RxBatch) -> (Received, bool) {
        let batch_bytes = self.expects.batch_bytes();
        let mut pieces = ArrayVec::<IoSliceMut<'_>, DIRECT_PIECES_MAX>::new();
        let direct = self.direct_target(&mut pieces, DIRECT_PAYLOAD_MIN);
        let space = batch.space();
        let (received, asked) = if direct == 0 {
            let asked = space.len().min(batch_bytes);
            (socket.recv(&mut space[..asked]), asked)
        } else {
            let behind = space.len().min(AFTER_DIRECT_BYTES);
            // Fails if the payload occupies all pieces: then nothing after the payload is received.
            let has_room = pieces.try_push(IoSliceMut::new(&mut space[..behind])).is_ok();
            (socket.recv_vectored(&mut pieces), direct + if has_room { behind } else { 0 })
        };
        drop(pieces);
        let count = if let Received::Bytes(count) = received { count } else { 0 };
        let is_whole = count > 0 && count == asked;
        if direct > 0 {
            self.expects.on_direct();
            self.received_direct(count.min(direct));
        } else {
            self.expects.on_batch(is_whole);
        }
        batch.filled(count.saturating_sub(direct));
        (received, is_whole)
    }

    /// As [`Payload::direct_target`]; 0 without a payload, and while the carry has unread bytes, which
    /// precede those of the socket.
    pub(crate) fn direct_target<'a, const N: usize>(
        &'a mut self,
        out: &mut ArrayVec<IoSliceMut<'a>, N>,
        payload_min: usize,
    ) -> usize {
        match &mut self.receiving {
            Receiving::Payload(payload) if self.inbox.carried() == 0 => {
                payload.direct_target(out, payload_min)
            }
            Receiving::Payload(_) | Receiving::Header | Receiving::PendingCapsule(_) | Receiving::Skip(_) => {
                0
            }
        }
    }

    pub(crate) fn received_direct(&mut self, count: usize) {
        match &mut self.receiving {
            Receiving::Payload(payload) => payload.received_direct(count),
            Receiving::Header | Receiving::PendingCapsule(_) | Receiving::Skip(_) => {
                assert_eq!(count, 0, "nothing was asked for");
            }
        }
    }

    /// Checks the digest of the next PDU's header, if there is one, and returns a copy of the header.
    /// `Stop::Wait`: the header is incomplete.
    #[inline]
    pub(crate) fn header<T>(&mut self, pdu_type: PduType, frame: &Frame) -> Result<T, Stop>
    where
        T: FromBytes + KnownLayout + Immutable + Copy,
    {
        let has_digest = self.agreed.header_digest;
        let Some(bytes) = self.inbox.peek(frame.header_bytes as usize) else { return Err(Stop::Wait) };
        if has_digest {
            check_header_digest(pdu_type, bytes, size_of::<T>())?;
        }
        // Cannot fail: `T` has alignment 1, and `header_bytes` is at least its size.
        let (header, _) = T::ref_from_prefix(bytes).map_err(|_| Stop::Wait)?;
        Ok(*header)
    }

    /// Discards received bytes of a skip. Returns true when the skip is complete.
    pub(crate) fn skip(&mut self) -> bool {
        let Receiving::Skip(remaining) = &mut self.receiving else { return true };
        *remaining -= self.inbox.skip(*remaining);
        if *remaining > 0 {
            return false;
        }
        self.receiving = Receiving::Header;
        true
    }

    /// Starts to discard the data and digest of a PDU whose header was consumed.
    pub(crate) fn skip_data(&mut self, frame: &Frame) {
        let digest = if frame.data_digest { DIGEST_BYTES } else { 0 };
        self.receiving = Receiving::Skip(frame.data_bytes as usize + digest);
    }

    /// Drops the buffer of the payload being received and starts to discard the remaining bytes. Returns the
    /// offset at which the payload would have ended in the buffer; `None`: no payload is being received.
    #[cold]
    pub(crate) fn skip_payload(&mut self) -> Option<u32> {
        let Receiving::Payload(payload) = &self.receiving else { return None };
        let (remaining, end) = (payload.remaining_bytes(), payload.end());
        self.receiving = Receiving::Skip(remaining);
        Some(end)
    }

    /// Returns true if all data of a payload without digest was received, and its event is pending.
    #[inline]
    pub(crate) fn is_payload_whole(&self) -> bool {
        matches!(&self.receiving, Receiving::Payload(payload) if payload.is_whole())
    }

    /// Copies the received bytes of the payload, without its digest, into its buffer.
    #[inline]
    pub(crate) fn copy_payload(&mut self) {
        if let Receiving::Payload(payload) = &mut self.receiving {
            payload.copy(&mut self.inbox);
        }
    }

    /// Continues the payload. `Some`: the payload is complete, and a header is received next.
    #[inline]
    pub(crate) fn fill(&mut self) -> Option<(Payload<In>, Filled)> {
        let Receiving::Payload(payload) = &mut self.receiving else { return None };
        let filled = payload.fill(&mut self.inbox);
        if filled == Filled::Partly {
            return None;
        }
        match std::mem::replace(&mut self.receiving, Receiving::Header) {
            Receiving::Payload(payload) => Some((payload, filled)),
            Receiving::Header | Receiving::PendingCapsule(_) | Receiving::Skip(_) => None,
        }
    }

    /// Returns the violation for a terminate request of the peer; `Stop::Wait` if its header is incomplete.
    pub(crate) fn terminated(&mut self) -> Stop {
        let Some(term) = self.inbox.peek_as::<TermReq>() else { return Stop::Wait };
        let violation = match check_terminate(&term.header) {
            Ok(()) => Violation::TerminatedByPeer { fes: term.fes(), fei: term.fei() },
            Err(violation) => violation,
        };
        Stop::Violation(violation)
    }

    /// Ends the connection after a violation: stops receiving and queues a terminate request of `pdu_type`
    /// after the PDUs already queued. `key`: key of the terminate request in the outbox. A violation without
    /// a terminate request closes the connection at once.
    #[cold]
    pub(crate) fn violate(&mut self, violation: Violation, pdu_type: PduType, key: Out) {
        self.violation.get_or_insert(violation);
        let Some((fes, fei, header_bytes)) = violation.terminate_fields() else {
            self.lifetime.close();
            return;
        };
        let header = self.inbox.peek(header_bytes).unwrap_or_default();
        let header = &header[..header.len().min(TERM_REQ_DATA_BYTES_MAX)];
        let count = u32::try_from(header.len()).unwrap_or(0);
        let term = TermReq::new(pdu_type, fes, fei, count);
        let bytes = [term.as_bytes(), header].concat().into_boxed_slice();
        self.outbox.push_bytes(bytes, key);
        self.drain();
    }

    /// Closes the connection without sending. The caller empties the outbox.
    pub(crate) fn close(&mut self) {
        self.inbox.clear();
        self.receiving = Receiving::Header;
        self.lifetime.close();
    }

    /// Stops receiving. The sending side is shut down after the queued PDUs were sent.
    pub(crate) fn drain(&mut self) {
        self.inbox.clear();
        self.receiving = Receiving::Header;
        self.lifetime.drain();
        if self.outbox.is_empty() {
            self.lifetime.drained();
        }
    }
}
