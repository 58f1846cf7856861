//! What both ends of a connection have in common: bytes in, bytes out, and how it ends.

use std::io::IoSliceMut;

use arrayvec::ArrayVec;
use nvme_spec::tcp::{DIGEST_BYTES, PduType, TERM_REQ_DATA_BYTES_MAX, TermReq};
use nvme_spec::zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};
use spindle_reactor::clock::Nanos;

use crate::frame::{Agreed, Frame, check_header_digest, check_terminate};
use crate::inbox::{Inbox, RxBatch};
use crate::lifetime::Lifetime;
use crate::outbox::Outbox;
use crate::payload::{Filled, Payload};
use crate::violation::Violation;

/// What moves the bytes of either end: the methods of both kinds of connection that only use their `wire`.
macro_rules! stream_methods {
    () => {
        /// Take a filled batch; its bytes are read by `next_event`.
        ///
        /// # Panics
        /// When the previous batch was not unloaded.
        #[inline]
        pub fn load(&mut self, batch: RxBatch) {
            self.wire.inbox.load(batch);
        }

        /// Give the batch back, empty. What was not read of it is kept by the connection.
        #[inline]
        pub fn unload(&mut self) -> RxBatch {
            self.wire.unload()
        }

        /// The place of the rest of a payload that is being received, for the socket to read straight into;
        /// 0 bytes when there is none or it is too short to be worth it. Only while no batch is loaded.
        #[inline]
        pub fn direct_target<'a, const N: usize>(
            &'a mut self,
            out: &mut ArrayVec<IoSliceMut<'a>, N>,
        ) -> usize {
            self.wire.direct_target(out)
        }

        /// The socket wrote so many bytes to the place that [`Conn::direct_target`] gave.
        ///
        /// # Panics
        /// When that is more than it gave.
        #[inline]
        pub fn received_direct(&mut self, count: usize) {
            self.wire.received_direct(count);
        }

        /// True when there is something to send.
        #[inline]
        #[must_use]
        pub fn wants_send(&self) -> bool {
            !self.wire.outbox.is_empty()
        }

        /// Appends the pieces of everything that is to be sent, until `out` is full; how many bytes they are.
        #[inline]
        pub fn send_pieces<'a, const N: usize>(&'a self, out: &mut ArrayVec<IoSlice<'a>, N>) -> usize {
            self.wire.outbox.pieces(out)
        }

        /// Where the connection is in its life.
        #[inline]
        #[must_use]
        pub fn phase(&self) -> Phase {
            self.wire.lifetime.phase()
        }

        /// When [`Conn::on_time`] is to be called at the latest.
        #[must_use]
        pub fn deadline(&self) -> Option<Nanos> {
            self.wire.lifetime.deadline()
        }

        /// The rule that the peer broke, once, for the log.
        pub fn take_violation(&mut self) -> Option<Violation> {
            self.wire.violation.take()
        }
    };
}
pub(crate) use stream_methods;

/// In-capsule data that is not decided about yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PendingCapsule {
    /// The command's CID.
    pub(crate) cid: u16,
    /// Where its data is.
    pub(crate) frame: Frame,
}

/// Where the receiving side of a connection is.
///
/// ```text
///   Header ──> PendingCapsule ──> Payload ──> Header      a command with data: fetched,
///     │           └───────> Skip ─────> Header      or not
///     ├────> Payload ─────> Header                  H2CData, C2HData
///     └────> Skip ────────> Header                  data that was not asked for
/// ```
#[derive(Debug)]
pub(crate) enum Receiving<K> {
    /// Between two PDUs, or in a header. Left by a whole header.
    Header,
    /// The command of a capsule was given out, its data stands in the way. Left by `fetch` or `reply`.
    PendingCapsule(PendingCapsule),
    /// Data goes to a buffer. Left by its last byte, and digest.
    Payload(Payload<K>),
    /// So many bytes go nowhere.
    Skip(usize),
}

/// Why a step of the receiving side did not finish.
#[derive(Debug)]
pub(crate) enum Stop {
    /// More bytes, or a decision, must come first.
    Wait,
    /// The peer broke a rule.
    Violation(Violation),
}

impl From<Violation> for Stop {
    #[cold]
    fn from(violation: Violation) -> Stop {
        Stop::Violation(violation)
    }
}

/// One end's bytes. `HEAD` and `TAIL` are the longest head and tail of its PDUs, `Out` names a PDU that has
/// left, `In` the data being received.
#[derive(Debug)]
pub(crate) struct Wire<const HEAD: usize, const TAIL: usize, Out, In> {
    pub(crate) inbox: Inbox,
    pub(crate) receiving: Receiving<In>,
    pub(crate) outbox: Outbox<HEAD, TAIL, Out>,
    pub(crate) agreed: Agreed,
    pub(crate) lifetime: Lifetime,
    /// The first one.
    pub(crate) violation: Option<Violation>,
}

impl<const HEAD: usize, const TAIL: usize, Out: Default, In> Wire<HEAD, TAIL, Out, In> {
    pub(crate) fn new(initialize_by: Nanos, close_timeout: Nanos) -> Self {
        Wire {
            inbox: Inbox::default(),
            receiving: Receiving::Header,
            outbox: Outbox::default(),
            agreed: Agreed::NOTHING,
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

    /// See [`Payload::direct_target`]; nothing while earlier bytes are still to be read.
    pub(crate) fn direct_target<'a, const N: usize>(
        &'a mut self,
        out: &mut ArrayVec<IoSliceMut<'a>, N>,
    ) -> usize {
        match &mut self.receiving {
            Receiving::Payload(payload) if self.inbox.stashed() == 0 => payload.direct_target(out),
            Receiving::Payload(_) | Receiving::Header | Receiving::PendingCapsule(_) | Receiving::Skip(_) => {
                0
            }
        }
    }

    /// See [`Payload::received_direct`].
    pub(crate) fn received_direct(&mut self, count: usize) {
        match &mut self.receiving {
            Receiving::Payload(payload) => payload.received_direct(count),
            Receiving::Header | Receiving::PendingCapsule(_) | Receiving::Skip(_) => {
                assert_eq!(count, 0, "nothing was asked for");
            }
        }
    }

    /// The whole header of the PDU at hand, with its digest checked, as a wire structure.
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
        // Cannot fail: alignment is 1, and the frame has at least this header.
        let (header, _) = T::ref_from_prefix(bytes).map_err(|_| Stop::Wait)?;
        Ok(*header)
    }

    /// Go on with a skip; true when it is over.
    pub(crate) fn skip(&mut self) -> bool {
        let Receiving::Skip(left) = &mut self.receiving else { return true };
        *left -= self.inbox.skip(*left);
        if *left > 0 {
            return false;
        }
        self.receiving = Receiving::Header;
        true
    }

    /// Skip data with this frame, of which the header was consumed.
    pub(crate) fn skip_data(&mut self, frame: &Frame) {
        let digest = if frame.data_digest { DIGEST_BYTES } else { 0 };
        self.receiving = Receiving::Skip(frame.data_bytes as usize + digest);
    }

    /// What is left of the payload goes nowhere, its buffer is dropped; where it would have ended in the
    /// buffer.
    #[cold]
    pub(crate) fn skip_payload(&mut self) -> Option<u32> {
        let Receiving::Payload(payload) = &self.receiving else { return None };
        let (left, end) = (payload.left(), payload.end());
        self.receiving = Receiving::Skip(left);
        Some(end)
    }

    /// True when a payload is here and only its event is missing.
    #[inline]
    pub(crate) fn is_payload_whole(&self) -> bool {
        matches!(&self.receiving, Receiving::Payload(payload) if payload.is_whole())
    }

    /// Take what is here of a payload.
    #[inline]
    pub(crate) fn copy_payload(&mut self) {
        if let Receiving::Payload(payload) = &mut self.receiving {
            payload.copy(&mut self.inbox);
        }
    }

    /// Go on with a payload; when it is whole, it is taken out.
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

    /// A terminate request of the peer, as the violation that it is.
    pub(crate) fn terminated(&mut self) -> Stop {
        let Some(term) = self.inbox.peek_as::<TermReq>() else { return Stop::Wait };
        let violation = match check_terminate(&term.header) {
            Ok(()) => Violation::TerminatedByPeer { fes: term.fes(), fei: term.fei() },
            Err(violation) => violation,
        };
        Stop::Violation(violation)
    }

    /// The peer broke a rule: receive no more, send what is queued and then a terminate request of this type.
    #[cold]
    pub(crate) fn violate(&mut self, violation: Violation, pdu_type: PduType, key: Out) {
        self.violation.get_or_insert(violation);
        let Some((fes, fei, header_bytes)) = violation.report() else {
            self.lifetime.close();
            return;
        };
        let wrong = self.inbox.peek(header_bytes).unwrap_or_default();
        let wrong = &wrong[..wrong.len().min(TERM_REQ_DATA_BYTES_MAX)];
        let count = u32::try_from(wrong.len()).unwrap_or(0);
        let term = TermReq::new(pdu_type, fes, fei, count);
        let bytes = [term.as_bytes(), wrong].concat().into_boxed_slice();
        self.outbox.push_bytes(bytes, key);
        self.drain();
    }

    /// Receive no more; send what is queued, then close.
    pub(crate) fn drain(&mut self) {
        self.inbox.clear();
        self.receiving = Receiving::Header;
        self.lifetime.drain();
        if self.outbox.is_empty() {
            self.lifetime.drained();
        }
    }
}
