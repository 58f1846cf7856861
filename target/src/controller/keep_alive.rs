//! The keep-alive timer (Base 2.0 section 3.9), traffic based: any command on any queue counts as traffic.
//!
//! The queues only set a flag in [`ControllerShared`](crate::shared::ControllerShared), which the timer
//! checks once per time-out. So a controller expires between one and two time-outs after its last command,
//! and then only once the cores have received what had arrived when the time-out passed.
//!
//! A stop of this process for a quarter of the time-out starts the time-out again. A machine that was paused
//! may have dropped what hosts sent, and TCP repeats it about as long after the stop as the stop took. With a
//! Keep Alive for each half of the time-out, as of a Linux host, one arrives in time after a shorter stop.

use spindle_reactor::clock::Nanos;

use super::Expired;
use super::limits::{ASSOCIATION_TIMEOUT, KEEP_ALIVE_STEP_MS};

/// Keep-alive and association timer of a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepAlive {
    /// Granted time-out in ms; 0: keep alive is off.
    pub(super) timeout_ms: u32,
    /// Next expiry of the timer; `None`: the timer does not run.
    pub(super) deadline: Option<Nanos>,
    /// The controller is not enabled: `deadline` is that of [`ASSOCIATION_TIMEOUT`], regardless of traffic.
    is_idle: bool,
}

/// Returns the requested time-out rounded up to whole steps of KAS, in ms, at most `u32::MAX`; 0 stays 0.
#[must_use]
pub fn granted_ms(asked_ms: u32) -> u32 {
    asked_ms.div_ceil(KEEP_ALIVE_STEP_MS).saturating_mul(KEEP_ALIVE_STEP_MS)
}

impl KeepAlive {
    /// Creates the timer of a new controller, which is not enabled yet.
    #[must_use]
    pub fn new(timeout_ms: u32, now: Nanos) -> KeepAlive {
        KeepAlive { timeout_ms, deadline: Some(now + ASSOCIATION_TIMEOUT), is_idle: true }
    }

    /// Starts keep alive at `now`, when the controller is enabled.
    pub fn start(&mut self, now: Nanos) {
        self.is_idle = false;
        self.deadline = (self.timeout_ms != 0).then(|| now + Nanos::from_ms(u64::from(self.timeout_ms)));
    }

    /// Stops keep alive and starts [`ASSOCIATION_TIMEOUT`], at a reset or shutdown of the controller.
    pub fn stop(&mut self, now: Nanos) {
        self.is_idle = true;
        self.deadline = Some(now + ASSOCIATION_TIMEOUT);
    }

    /// Sets the granted time-out in ms (0: off); restarts the timer if the controller is enabled.
    pub fn set_timeout_ms(&mut self, timeout_ms: u32, now: Nanos) {
        self.timeout_ms = timeout_ms;
        if !self.is_idle {
            self.start(now);
        }
    }

    /// Checks the timer. `late`: time before `now` in which there was no check. `None`: the timer does not
    /// run, the deadline has not passed, there was traffic, this process was stopped, or not all that arrived
    /// before the deadline has been received. `had_traffic` and `has_received` are called only once the
    /// deadline has passed.
    pub fn tick(
        &mut self,
        now: Nanos,
        late: Nanos,
        mut had_traffic: impl FnMut() -> bool,
        has_received: impl FnOnce(Nanos) -> bool,
    ) -> Option<Expired> {
        let deadline = self.deadline?;
        let period = self.period();
        if late.0 >= period.0 / 4 {
            self.deadline = Some(now + period);
            return None;
        }
        if now < deadline {
            return None;
        }
        // Asked again after `has_received`: traffic may have arrived on another core between the two.
        if !self.is_idle && had_traffic() {
            self.start(now);
            return None;
        }
        if !has_received(deadline) {
            return None;
        }
        if !self.is_idle && had_traffic() {
            self.start(now);
            return None;
        }
        self.deadline = None;
        Some(if self.is_idle {
            Expired::NeverEnabled
        } else {
            Expired::KeepAlive { timeout_ms: self.timeout_ms }
        })
    }

    fn period(&self) -> Nanos {
        if self.is_idle { ASSOCIATION_TIMEOUT } else { Nanos::from_ms(u64::from(self.timeout_ms)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl KeepAlive {
        /// In time, with all received.
        fn check(&mut self, now: Nanos, had_traffic: impl FnMut() -> bool) -> Option<Expired> {
            self.tick(now, Nanos::ZERO, had_traffic, |_| true)
        }
    }

    const S: fn(u64) -> Nanos = Nanos::from_secs;
    const SILENT: Option<Expired> = Some(Expired::KeepAlive { timeout_ms: 5000 });

    #[test]
    fn a_timeout_is_rounded_up_to_whole_steps() {
        assert_eq!([0, 1, 999, 1000, 1001, 5000].map(granted_ms), [0, 1000, 1000, 1000, 2000, 5000]);
        assert!(granted_ms(u32::MAX) > u32::MAX - 1000);
    }

    #[test]
    fn silence_for_a_whole_timeout_expires_once() {
        let mut timer = KeepAlive::new(5000, S(0));
        timer.start(S(1));
        assert_eq!(timer.deadline, Some(S(6)));
        assert_eq!(timer.check(S(5), || panic!("asked too early")), None);
        assert_eq!(timer.check(S(7), || false), SILENT);
        assert_eq!((timer.check(S(60), || false), timer.deadline), (None, None));
    }

    #[test]
    fn any_traffic_within_the_period_keeps_it_alive() {
        let mut timer = KeepAlive::new(5000, S(0));
        timer.start(S(0));
        assert_eq!((timer.check(S(5), || true), timer.deadline), (None, Some(S(10))));
        assert_eq!(timer.check(S(10), || false), SILENT);
    }

    #[test]
    fn a_host_is_not_given_up_for_the_time_in_which_this_process_slept() {
        let mut timer = KeepAlive::new(5000, S(0));
        timer.start(S(0));
        let stopped = |timer: &mut KeepAlive, now, late| timer.tick(now, late, || false, |_| true);
        assert_eq!((stopped(&mut timer, S(100), S(95)), timer.deadline), (None, Some(S(105))));
        // Also when the time-out did not pass meanwhile.
        let quarter = Nanos::from_ms(1250);
        assert_eq!((stopped(&mut timer, S(103), quarter), timer.deadline), (None, Some(S(108))));
        assert_eq!(stopped(&mut timer, S(108), Nanos::from_ms(1249)), SILENT);
        let mut fresh = KeepAlive::new(5000, S(0));
        assert_eq!((stopped(&mut fresh, S(120), S(30)), fresh.deadline), (None, Some(S(240))));
    }

    #[test]
    fn a_timeout_ends_nothing_before_all_that_had_arrived_was_received() {
        let mut timer = KeepAlive::new(5000, S(0));
        timer.start(S(0));
        let on = |timer: &mut KeepAlive, now, traffic: [bool; 2], has_received| {
            let mut traffic = traffic.into_iter();
            let asked = |at| {
                assert_eq!(at, S(5));
                has_received
            };
            timer.tick(now, Nanos::ZERO, || traffic.next().expect("asked twice at most"), asked)
        };
        assert_eq!(on(&mut timer, S(5), [false, true], false), None);
        assert_eq!((on(&mut timer, S(5000), [false, true], false), timer.deadline), (None, Some(S(5))));
        let mut other = timer;
        assert_eq!((on(&mut other, S(6), [false, true], true), other.deadline), (None, Some(S(11))));
        assert_eq!(on(&mut timer, S(6), [false, false], true), SILENT);
        let mut fresh = KeepAlive::new(0, S(0));
        let ask = |has_received| move |_| has_received;
        assert_eq!(fresh.tick(S(120), Nanos::ZERO, || true, ask(false)), None);
        assert_eq!(fresh.tick(S(121), Nanos::ZERO, || true, ask(true)), Some(Expired::NeverEnabled));
    }

    #[test]
    fn a_timeout_of_zero_never_expires_an_enabled_controller() {
        let mut timer = KeepAlive::new(0, S(0));
        timer.start(S(0));
        assert_eq!((timer.check(S(1_000_000), || false), timer.deadline), (None, None));
    }

    #[test]
    fn a_controller_that_is_not_enabled_is_given_up_in_the_end() {
        let mut timer = KeepAlive::new(0, S(0));
        assert_eq!(timer.check(S(119), || true), None);
        assert_eq!(timer.check(S(120), || true), Some(Expired::NeverEnabled));
        timer.start(S(200));
        timer.stop(S(300));
        assert_eq!(timer.deadline, Some(S(420)));
        timer.set_timeout_ms(1000, S(310));
        assert_eq!((timer.deadline, timer.timeout_ms), (Some(S(420)), 1000));
    }
}
