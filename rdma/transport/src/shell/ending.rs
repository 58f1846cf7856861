//! When a queue pair that is ended may be destroyed, and what it may take along.
//!
//! Its work requests complete as flushed. Receives that it has taken from a shared queue complete too, but
//! nothing says which are its own: the device says when they all have (`IBV_EVENT_QP_LAST_WQE_REACHED`;
//! InfiniBand 1.4, 10.3.1, asks to wait for that, then to take the completions, then to destroy it).
//!
//! Not every device tells: soft-RoCE of older kernels and some iWARP drivers do not. So the wait has a bound,
//! and it is short where a device that has never told one has let a whole one pass.

use spindle_reactor::clock::Nanos;

/// Time for what is posted to complete, and for the event; after it the queue pair is destroyed in any case.
const BOUND: Nanos = Nanos::from_secs(1);
/// Time for the event on a device that has never told one.
pub(super) const SHORT_BOUND: Nanos = Nanos::from_ms(50);

/// Whether a device tells when a queue pair has taken its last shared receive, as far as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Tells {
    #[default]
    Unknown,
    Yes,
    /// A wait was in vain.
    Never,
}

impl Tells {
    pub(super) fn on_told(&mut self) {
        *self = Tells::Yes;
    }

    /// True: that is news.
    pub(super) fn on_vain(&mut self) -> bool {
        let is_news = *self == Tells::Unknown;
        if is_news {
            *self = Tells::Never;
        }
        is_news
    }
}

/// A queue pair that is being ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ending {
    /// When it is destroyed in any case,
    by: Nanos,
    /// and when even though the event has not come.
    drained_by: Nanos,
}

/// The end of a connection's queue pair, as far as it has come.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct End {
    /// It is being ended.
    pub(super) ending: Option<Ending>,
    /// It has taken its last shared receive, as the device says.
    pub(super) is_drained: bool,
}

impl End {
    /// The event has come. True: it is waited for.
    pub(super) fn drain(&mut self) -> bool {
        self.is_drained = true;
        self.ending.is_some()
    }
}

/// What there is to know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen {
    /// Work requests of its own that have not completed.
    pub(super) posted: u32,
    /// Slots of the shared queue that it may have taken; 0: it has its own.
    pub(super) shared_slots: u32,
    /// The event has come.
    pub(super) is_drained: bool,
    /// Device or completion queue have failed: nothing comes any more.
    pub(super) is_dead: bool,
    /// The device is the kernel's software.
    pub(super) is_soft_roce: bool,
}

impl Ending {
    pub(super) fn begin(now: Nanos, tells: Tells) -> Ending {
        let bound = if tells == Tells::Never { SHORT_BOUND } else { BOUND };
        Ending { by: now + BOUND, drained_by: now + bound }
    }

    pub(super) fn is_over(self, seen: &Seen, now: Nanos) -> bool {
        if now >= self.by {
            return true;
        }
        seen.posted == 0 && (!seen.waits() || now >= self.drained_by)
    }
}

impl Seen {
    /// The event is to come. Destroyed now, it has waited in vain.
    pub(super) fn waits(&self) -> bool {
        self.shared_slots > 0 && !self.is_drained && !self.is_dead
    }

    /// It is destroyed now. Receives that may never come back.
    pub(super) fn lost(&self) -> u32 {
        if self.shared_slots == 0 {
            0
        } else if self.is_dead {
            // Completions may have been lost.
            self.shared_slots
        } else if self.is_soft_roce {
            // What was taken has completed by now, but for the one of a message that had arrived in part: its
            // responder drops that in the error state, event or not (`flush_recv_queue`).
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

    const SEEN: Seen =
        Seen { posted: 0, shared_slots: 128, is_drained: false, is_dead: false, is_soft_roce: false };

    fn at(ms: u64) -> Nanos {
        Nanos::from_secs(5) + Nanos::from_ms(ms)
    }

    #[test]
    fn a_queue_pair_with_shared_receives_waits_for_the_last_of_them() {
        let ending = Ending::begin(at(0), Tells::Unknown);
        assert!(!ending.is_over(&SEEN, at(0)), "nothing posted, but the device may hold receives");
        assert!(!ending.is_over(&SEEN, at(999)));
        assert!(ending.is_over(&SEEN, at(1000)), "a device that does not tell");
        let told = Seen { is_drained: true, ..SEEN };
        assert!(ending.is_over(&told, at(1)));
        assert!(!ending.is_over(&Seen { posted: 1, ..told }, at(999)), "its own work is still to come");
        assert!(ending.is_over(&Seen { posted: 1, ..told }, at(1000)));
        assert!(ending.is_over(&Seen { shared_slots: 0, ..SEEN }, at(0)), "its own go with it");
        assert!(ending.is_over(&Seen { is_dead: true, ..SEEN }, at(0)), "a dead device tells nothing");
    }

    #[test]
    fn a_device_that_never_tells_is_waited_for_once_and_then_for_a_moment() {
        let mut tells = Tells::default();
        assert!(SEEN.waits());
        assert!(tells.on_vain() && !tells.on_vain(), "said once");
        let ending = Ending::begin(at(0), tells);
        assert!(!ending.is_over(&SEEN, at(49)) && ending.is_over(&SEEN, at(50)));
        assert!(!ending.is_over(&Seen { posted: 1, ..SEEN }, at(999)), "its own work has its time");
        // It does, after all; and one that has told is not given up for one that it kept to itself.
        tells.on_told();
        assert!(!tells.on_vain());
        assert!(!Ending::begin(at(0), tells).is_over(&SEEN, at(999)));
        assert!(!Seen { is_drained: true, ..SEEN }.waits() && !Seen { is_dead: true, ..SEEN }.waits());
    }

    #[test]
    fn what_may_be_lost_is_nothing_when_the_device_has_told() {
        assert_eq!(Seen { is_drained: true, ..SEEN }.lost(), 0);
        assert_eq!(SEEN.lost(), 128, "all that the host may have sent");
        assert_eq!(Seen { is_drained: true, is_dead: true, ..SEEN }.lost(), 128);
        assert_eq!(Seen { is_drained: true, is_soft_roce: true, ..SEEN }.lost(), 1);
        assert_eq!(Seen { shared_slots: 0, ..SEEN }.lost(), 0);
    }
}
