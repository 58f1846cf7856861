//! How a connection lives and ends, and by when.
//!
//! ```text
//!           drain (close, violation)        queue is empty            peer closed, or time is up
//!   Open ─────────────────────────> Draining ────────────> HalfClosed ──────────────────────────> Closed
//!     │                                └─ peer was gone, or time is up ──────────────────────────────^
//!     └─ peer closed, reset, abort, ICReq did not come in time ──────────────────────────────────────^
//! ```

use spindle_reactor::clock::Nanos;

/// Where a connection is in its life; what its shell is to do about the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Receive and send.
    Open,
    /// Send what is queued; what is received no longer counts.
    Draining,
    /// Everything has left: shut down the sending half, read and drop until the peer closes.
    HalfClosed,
    /// Close the socket.
    Closed,
}

/// Phase and deadline of one connection.
#[derive(Debug)]
pub(crate) struct Lifetime {
    phase: Phase,
    /// Time zero: to be fixed at the next `on_time`, as what closes a connection does not know the time.
    deadline: Option<Nanos>,
    close_timeout: Nanos,
    peer_is_gone: bool,
}

impl Lifetime {
    /// Open, and to be initialised until `deadline`.
    pub(crate) fn new(deadline: Nanos, close_timeout: Nanos) -> Self {
        Lifetime { phase: Phase::Open, deadline: Some(deadline), close_timeout, peer_is_gone: false }
    }

    #[inline]
    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// When `on_time` is to be called at the latest; time zero means at once.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.deadline
    }

    /// ICReq or ICResp came.
    pub(crate) fn initialized(&mut self) {
        assert_eq!(self.phase, Phase::Open);
        self.deadline = None;
    }

    /// No more is taken from the peer; what is queued leaves.
    pub(crate) fn drain(&mut self) {
        assert_eq!(self.phase, Phase::Open);
        self.phase = Phase::Draining;
        self.deadline = Some(Nanos::ZERO);
    }

    /// The queue is empty.
    pub(crate) fn drained(&mut self) {
        match self.phase {
            Phase::Draining if self.peer_is_gone => self.close(),
            Phase::Draining => self.phase = Phase::HalfClosed,
            Phase::Open | Phase::HalfClosed | Phase::Closed => {}
        }
    }

    /// The peer closed its half.
    pub(crate) fn peer_closed(&mut self) {
        self.peer_is_gone = true;
        match self.phase {
            Phase::Open | Phase::HalfClosed => self.close(),
            Phase::Draining | Phase::Closed => {}
        }
    }

    /// It is over.
    pub(crate) fn close(&mut self) {
        self.phase = Phase::Closed;
        self.deadline = None;
    }

    /// The time; true when it is up, and what then is for the caller.
    #[must_use]
    pub(crate) fn is_up(&mut self, now: Nanos) -> bool {
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
