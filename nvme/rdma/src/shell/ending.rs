//! Time at which an ended queue pair is destroyed, and the count of shared receives that may be lost with it.
//!
//! The work requests of an ended queue pair complete as flushed. Receives that the queue pair has consumed
//! from a shared queue complete too, but their count is unknown. The device reports
//! `IBV_EVENT_QP_LAST_WQE_REACHED` when all have completed. InfiniBand 1.4, 10.3.1, requires to wait for that
//! event, then to poll the completions, then to destroy the queue pair.
//!
//! Some devices do not report the event: soft-RoCE of older kernels and some iWARP drivers. So the wait is
//! bounded. The bound is short once a wait has timed out on a device without any report so far.

use spindle_reactor::clock::Nanos;

/// Maximum time for posted work to complete and for the event to arrive. After that the queue pair is
/// destroyed in any case.
const BOUND: Nanos = Nanos::from_secs(1);
/// Maximum time for the event on a device that is known not to report it.
pub(super) const SHORT_BOUND: Nanos = Nanos::from_ms(50);

/// Whether a device reports IBV_EVENT_QP_LAST_WQE_REACHED, as observed so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum DrainReporting {
    #[default]
    Unknown,
    Yes,
    /// No report so far, and one wait timed out.
    Never,
}

impl DrainReporting {
    pub(super) fn on_report(&mut self) {
        *self = DrainReporting::Yes;
    }

    /// Records a wait that ended without the event. Returns true if it is the first such wait and there was
    /// no report before: the caller logs it.
    pub(super) fn on_timeout(&mut self) -> bool {
        let is_news = *self == DrainReporting::Unknown;
        if is_news {
            *self = DrainReporting::Never;
        }
        is_news
    }
}

/// Deadlines of a queue pair in the error state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ending {
    /// Time at which the queue pair is destroyed in any case.
    deadline: Nanos,
    /// Time from which the queue pair is destroyed without the event, once its posted work has completed.
    report_deadline: Nanos,
}

/// Progress of a queue pair's end.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct End {
    /// Set when the queue pair was set to the error state.
    pub(super) ending: Option<Ending>,
    /// The device has reported IBV_EVENT_QP_LAST_WQE_REACHED.
    pub(super) is_drained: bool,
}

impl End {
    /// Records the event. Returns true if the queue pair is being ended.
    pub(super) fn drain(&mut self) -> bool {
        self.is_drained = true;
        self.ending.is_some()
    }
}

/// State of a queue pair that is being ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EndState {
    /// Work requests of the send queue without a completion.
    pub(super) posted: u32,
    /// Maximum slots of the shared queue that the queue pair has consumed; 0 with its own receive queue.
    pub(super) shared_slots: u32,
    /// The event was reported.
    pub(super) is_drained: bool,
    /// Device or completion queue failed: no completion or event will follow.
    pub(super) is_dead: bool,
    pub(super) is_soft_roce: bool,
}

impl Ending {
    pub(super) fn begin(now: Nanos, reporting: DrainReporting) -> Ending {
        let bound = if reporting == DrainReporting::Never { SHORT_BOUND } else { BOUND };
        Ending { deadline: now + BOUND, report_deadline: now + bound }
    }

    pub(super) fn is_over(self, state: &EndState, now: Nanos) -> bool {
        if now >= self.deadline {
            return true;
        }
        state.posted == 0 && (!state.awaits_report() || now >= self.report_deadline)
    }
}

impl EndState {
    /// Returns true while the event is still expected.
    pub(super) fn awaits_report(&self) -> bool {
        self.shared_slots > 0 && !self.is_drained && !self.is_dead
    }

    /// Returns the maximum count of shared receives that are lost if the queue pair is destroyed now.
    pub(super) fn lost_receives(&self) -> u32 {
        if self.shared_slots == 0 {
            0
        } else if self.is_dead {
            // Completions of consumed receives may have been lost.
            self.shared_slots
        } else if self.is_soft_roce {
            // All consumed receives have completed, except the receive of a partly received message. The
            // responder of soft-RoCE drops that one in the error state, with or without the event
            // (`flush_recv_queue`).
            1
        } else if self.is_drained {
            0
        } else {
            self.shared_slots
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEEN: EndState =
        EndState { posted: 0, shared_slots: 128, is_drained: false, is_dead: false, is_soft_roce: false };

    fn at(ms: u64) -> Nanos {
        Nanos::from_secs(5) + Nanos::from_ms(ms)
    }

    #[test]
    fn a_queue_pair_with_shared_receives_waits_for_the_last_of_them() {
        let ending = Ending::begin(at(0), DrainReporting::Unknown);
        assert!(!ending.is_over(&SEEN, at(0)), "nothing posted, but the device may hold receives");
        assert!(!ending.is_over(&SEEN, at(999)));
        assert!(ending.is_over(&SEEN, at(1000)), "a device that does not tell");
        let told = EndState { is_drained: true, ..SEEN };
        assert!(ending.is_over(&told, at(1)));
        assert!(!ending.is_over(&EndState { posted: 1, ..told }, at(999)), "its own work is still to come");
        assert!(ending.is_over(&EndState { posted: 1, ..told }, at(1000)));
        assert!(ending.is_over(&EndState { shared_slots: 0, ..SEEN }, at(0)), "its own go with it");
        assert!(ending.is_over(&EndState { is_dead: true, ..SEEN }, at(0)), "a dead device tells nothing");
    }

    #[test]
    fn a_device_that_never_tells_is_waited_for_once_and_then_for_a_moment() {
        let mut reporting = DrainReporting::default();
        assert!(SEEN.awaits_report());
        assert!(reporting.on_timeout() && !reporting.on_timeout(), "said once");
        let ending = Ending::begin(at(0), reporting);
        assert!(!ending.is_over(&SEEN, at(49)) && ending.is_over(&SEEN, at(50)));
        assert!(!ending.is_over(&EndState { posted: 1, ..SEEN }, at(999)), "its own work has its time");
        // A late report ends the short wait, and a later missing report does not bring it back.
        reporting.on_report();
        assert!(!reporting.on_timeout());
        assert!(!Ending::begin(at(0), reporting).is_over(&SEEN, at(999)));
        assert!(
            !EndState { is_drained: true, ..SEEN }.awaits_report()
                && !EndState { is_dead: true, ..SEEN }.awaits_report()
        );
    }

    #[test]
    fn what_may_be_lost_is_nothing_when_the_device_has_told() {
        assert_eq!(EndState { is_drained: true, ..SEEN }.lost_receives(), 0);
        assert_eq!(SEEN.lost_receives(), 128, "all that the host may have sent");
        assert_eq!(EndState { is_drained: true, is_dead: true, ..SEEN }.lost_receives(), 128);
        assert_eq!(EndState { is_drained: true, is_soft_roce: true, ..SEEN }.lost_receives(), 1);
        assert_eq!(EndState { shared_slots: 0, ..SEEN }.lost_receives(), 0);
    }
}
