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
    /// The shell receives and sends.
    Open,
    /// The shell sends the queued PDUs; received bytes are discarded.
    Draining,
    /// All PDUs are sent: the shell shuts down the sending side. Received bytes are discarded until the peer
    /// closes or the close timeout has passed.
    HalfClosed,
    /// The shell closes the socket.
    Closed,
}

#[derive(Debug)]
pub(crate) struct Lifetime {
    phase: Phase,
    /// Time at which the connection closes. Zero: the next `on_time` sets the deadline to its time plus
    /// `close_timeout`, because `drain` has no clock.
    deadline: Option<Nanos>,
    close_timeout: Nanos,
    has_peer_closed: bool,
}

impl Lifetime {
    /// Creates the state in phase `Open`. `initialized` must be called before `deadline`.
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

    /// Returns the time at which `on_time` must be called. Zero: at once; `None`: no call is needed.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.deadline
    }

    /// Clears the deadline, as ICReq or ICResp has arrived.
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

    /// Ends the draining after all queued PDUs were sent: `Draining` becomes `HalfClosed`, or `Closed` if the
    /// peer has closed.
    pub(crate) fn drained(&mut self) {
        match self.phase {
            Phase::Draining if self.has_peer_closed => self.close(),
            Phase::Draining => self.phase = Phase::HalfClosed,
            Phase::Open | Phase::HalfClosed | Phase::Closed => {}
        }
    }

    /// Handles the peer's shutdown of its sending side: closes the connection unless it is draining.
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

    /// Returns true if the deadline has passed: the caller must close the connection. A deadline of zero
    /// becomes `now` plus the close timeout.
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
