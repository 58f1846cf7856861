//! The keep-alive timer (Base 2.0 section 3.9), traffic based: any command on any queue counts as traffic.
//!
//! The queues only set a flag in [`ControllerShared`](crate::shared::ControllerShared), which the timer
//! checks once per time-out. So a controller expires between one and two time-outs after its last command, or
//! later if this process was stopped meanwhile.

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

    /// Checks the timer. `None`: the timer does not run, the deadline has not passed, there was traffic, or
    /// this process was stopped. `had_traffic` is called only once the deadline has passed.
    pub fn tick(&mut self, now: Nanos, had_traffic: impl FnOnce() -> bool) -> Option<Expired> {
        let deadline = self.deadline.filter(|deadline| *deadline <= now)?;
        if self.is_idle {
            self.deadline = None;
            return Some(Expired::NeverEnabled);
        }
        // A check that is late by half a time-out means that the process was stopped (a paused machine, a
        // debugger). Commands that hosts sent meanwhile have not been received yet, so the timer starts
        // again.
        let was_asleep = now - deadline >= Nanos::from_ms(u64::from(self.timeout_ms) / 2);
        if had_traffic() || was_asleep {
            self.start(now);
            return None;
        }
        self.deadline = None;
        Some(Expired::KeepAlive { timeout_ms: self.timeout_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(timer.tick(S(5), || panic!("asked too early")), None);
        assert_eq!(timer.tick(S(7), || false), SILENT);
        assert_eq!((timer.tick(S(60), || false), timer.deadline), (None, None));
    }

    #[test]
    fn any_traffic_within_the_period_keeps_it_alive() {
        let mut timer = KeepAlive::new(5000, S(0));
        timer.start(S(0));
        assert_eq!((timer.tick(S(5), || true), timer.deadline), (None, Some(S(10))));
        assert_eq!(timer.tick(S(10), || false), SILENT);
    }

    #[test]
    fn a_host_is_not_given_up_for_the_time_in_which_this_process_slept() {
        let mut timer = KeepAlive::new(5000, S(0));
        timer.start(S(0));
        assert_eq!((timer.tick(S(100), || false), timer.deadline), (None, Some(S(105))));
        assert_eq!(timer.tick(S(105), || false), SILENT);
        timer.start(S(200));
        assert_eq!((timer.tick(S(300), || true), timer.deadline), (None, Some(S(305))));
    }

    #[test]
    fn a_timeout_of_zero_never_expires_an_enabled_controller() {
        let mut timer = KeepAlive::new(0, S(0));
        timer.start(S(0));
        assert_eq!((timer.tick(S(1_000_000), || false), timer.deadline), (None, None));
    }

    #[test]
    fn a_controller_that_is_not_enabled_is_given_up_in_the_end() {
        let mut timer = KeepAlive::new(0, S(0));
        assert_eq!(timer.tick(S(119), || true), None);
        assert_eq!(timer.tick(S(120), || true), Some(Expired::NeverEnabled));
        timer.start(S(200));
        timer.stop(S(300));
        assert_eq!(timer.deadline, Some(S(420)));
        timer.set_timeout_ms(1000, S(310));
        assert_eq!((timer.deadline, timer.timeout_ms), (Some(S(420)), 1000));
    }
}
