//! Phases of a connection and their deadlines.
//!
//! ```text
//!           drain (close, violation)         all is sent              peer closed, or deadline
//!   Open ─────────────────────────> Draining ────────────> HalfClosed ──────────────────────────> Closed
//!     │                                └─ sent after the peer closed, or deadline ───────────────────^
//!     └─ peer closed, TermReq of the peer, ICReq or ICResp missing at the deadline ──────────────────^
//! ```
//! A reset of the socket, or an abort, closes from any phase.

use spindle_reactor::clock::Nanos;

/// Phase of a connection, with the action of its shell on the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Receive and send.
    Open,
    /// Send what is queued; received bytes are discarded.
    Draining,
    /// Everything is sent: shut down the sending side, discard received bytes until the peer closes or the
    /// close timeout has passed.
    HalfClosed,
    /// Close the socket.
    Closed,
}

#[derive(Debug)]
pub(crate) struct Lifetime {
    phase: Phase,
    /// Zero: the next `on_time` sets it to its time plus `close_timeout`, because `drain` has no clock.
    deadline: Option<Nanos>,
    close_timeout: Nanos,
    has_peer_closed: bool,
}

impl Lifetime {
    /// Begins in phase `Open`; `initialized` must be called before `deadline`.
    pub(crate) fn new(deadline: Nanos, close_timeout: Nanos) -> Self {
        Lifetime { phase: Phase::Open, deadline: Some(deadline), close_timeout, has_peer_closed: false }
    }

    #[inline]
    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// Time at which `on_time` must be called; zero: at once.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.deadline
    }

    /// ICReq or ICResp arrived in time: no deadline runs.
    pub(crate) fn initialized(&mut self) {
        assert_eq!(self.phase, Phase::Open);
        self.deadline = None;
    }

    /// Stops receiving; queued PDUs are still sent.
    pub(crate) fn drain(&mut self) {
        assert_eq!(self.phase, Phase::Open);
        self.phase = Phase::Draining;
        self.deadline = Some(Nanos::ZERO);
    }

    /// All queued PDUs were sent.
    pub(crate) fn drained(&mut self) {
        match self.phase {
            Phase::Draining if self.has_peer_closed => self.close(),
            Phase::Draining => self.phase = Phase::HalfClosed,
            Phase::Open | Phase::HalfClosed | Phase::Closed => {}
        }
    }

    /// The peer shut down its sending side.
    pub(crate) fn peer_closed(&mut self) {
        self.has_peer_closed = true;
        match self.phase {
            Phase::Open | Phase::HalfClosed => self.close(),
            Phase::Draining | Phase::Closed => {}
        }
    }

    pub(crate) fn close(&mut self) {
        self.phase = Phase::Closed;
        self.deadline = None;
    }

    /// True if the deadline has passed: the caller closes the connection. A deadline of zero becomes `now`
    /// plus the close timeout.
    #[must_use]
    pub(crate) fn has_expired(&mut self, now: Nanos) -> bool {
        match self.deadline {
            Some(Nanos::ZERO) => {
                self.deadline = Some(now + self.close_timeout);
                false
            }
            Some(deadline) => now >= deadline,
            None => false,
        }
    }
}
