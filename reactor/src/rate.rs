//! [`RateLimit`]: limits log lines that a peer can cause.

use crate::clock::Nanos;

/// A token bucket; each log line takes a token.
#[derive(Debug, Clone)]
pub struct RateLimit {
    /// Time in which one token is refilled; `None`: tokens are never refilled.
    interval: Option<Nanos>,
    burst: u32,
    tokens: u32,
    /// Time up to which tokens were refilled.
    refilled: Nanos,
    suppressed: u64,
}

/// Result of [`RateLimit::allow`] when the line may be logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowed {
    /// Count of lines suppressed since the last allowed one, to be logged with it.
    pub suppressed: u64,
}

impl RateLimit {
    /// Creates a limit of at most `burst` lines at once, and `per_second` lines a second in the long run.
    /// With `per_second` 0, at most `burst` lines are allowed in total.
    #[must_use]
    pub const fn new(per_second: u32, burst: u32) -> RateLimit {
        let interval = match 1_000_000_000u64.checked_div(per_second as u64) {
            Some(nanos) => Some(Nanos(nanos)),
            None => None,
        };
        RateLimit { interval, burst, tokens: burst, refilled: Nanos::ZERO, suppressed: 0 }
    }

    /// Takes a token for a line. Returns `None` when there is none: the line is counted as suppressed.
    pub fn allow(&mut self, now: Nanos) -> Option<Allowed> {
        self.refill(now);
        match self.tokens.checked_sub(1) {
            Some(left) => {
                self.tokens = left;
                Some(Allowed { suppressed: std::mem::take(&mut self.suppressed) })
            }
            None => {
                self.suppressed = self.suppressed.saturating_add(1);
                None
            }
        }
    }

    /// Adds `count` lines that were suppressed for another reason.
    pub fn add_suppressed(&mut self, count: u64) {
        self.suppressed = self.suppressed.saturating_add(count);
    }

    fn refill(&mut self, now: Nanos) {
        let Some(interval) = self.interval else { return };
        let missing = u64::from(self.burst - self.tokens);
        let back = (now - self.refilled).as_u64() / interval.as_u64().max(1);
        if back >= missing {
            self.tokens = self.burst;
            self.refilled = now.max(self.refilled);
        } else {
            self.tokens += u32::try_from(back).unwrap_or(0); // below `missing`, which is a u32
            self.refilled += Nanos(back * interval.as_u64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_then_a_rate_and_the_rest_is_counted() {
        let mut limit = RateLimit::new(2, 3);
        let start = Nanos::from_secs(100);
        let said = (0..10).filter(|_| limit.allow(start).is_some()).count();
        assert_eq!(said, 3);
        assert_eq!(limit.allow(start + Nanos::from_ms(499)), None);
        assert_eq!(limit.allow(start + Nanos::from_ms(500)), Some(Allowed { suppressed: 8 }));
        assert_eq!(limit.allow(start + Nanos::from_ms(999)), None);
        assert_eq!(limit.allow(start + Nanos::from_ms(1000)), Some(Allowed { suppressed: 1 }));
        let later = start + Nanos::from_secs(1000);
        assert_eq!((0..10).filter(|_| limit.allow(later).is_some()).count(), 3, "never more than the burst");
    }

    #[test]
    fn what_was_left_out_elsewhere_is_told_with_the_next() {
        let mut limit = RateLimit::new(1, 1);
        limit.add_suppressed(3);
        assert_eq!(limit.allow(Nanos::from_secs(1)), Some(Allowed { suppressed: 3 }));
        limit.add_suppressed(u64::MAX);
        limit.add_suppressed(1);
        assert_eq!(limit.allow(Nanos::from_secs(2)), Some(Allowed { suppressed: u64::MAX }));
    }

    #[test]
    fn the_long_run_rate_holds_at_any_step() {
        let mut limit = RateLimit::new(7, 1);
        let said = (0..100_000u64).filter(|step| limit.allow(Nanos::from_us(step * 100)).is_some()).count();
        assert!((68..=71).contains(&said), "{said} in 10 s at 7 a second");
    }

    #[test]
    fn a_rate_of_zero_says_the_burst_and_no_more_and_time_may_stand_or_go_back() {
        let mut limit = RateLimit::new(0, 1);
        assert!(limit.allow(Nanos::from_secs(9)).is_some());
        assert!(limit.allow(Nanos::MAX).is_none());
        let mut limit = RateLimit::new(1, 1);
        assert!(limit.allow(Nanos::from_secs(9)).is_some());
        assert!(limit.allow(Nanos::from_secs(3)).is_none());
        assert!(RateLimit::new(u32::MAX, 0).allow(Nanos::MAX).is_none());
    }
}
