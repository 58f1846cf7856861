//! Exponential backoff with an upper bound and jitter, so that many hosts that lost one target do not
//! reconnect in step. The backoff returns to the shortest wait only after a connection that lasted. So a
//! target that accepts every connection and drops it at once causes no bursts.

use std::time::Duration;

/// Computes the waits between connection attempts. It neither sleeps nor reads a clock.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    /// Number of doublings so far.
    doublings: u32,
    random: u64,
}

impl Backoff {
    /// Creates a backoff whose upper bound of the waits starts at `first` and doubles up to `longest`. Equal
    /// seeds give equal waits.
    #[must_use]
    pub fn new(first: Duration, longest: Duration, seed: u64) -> Backoff {
        // xorshift needs a nonzero state.
        Backoff { first, longest: longest.max(first), doublings: 0, random: seed | 1 }
    }

    /// Returns the wait before the next attempt: random, from half of the current upper bound to all of it.
    /// Doubles the bound.
    pub fn next_wait(&mut self) -> Duration {
        let factor = 1u32.checked_shl(self.doublings).unwrap_or(u32::MAX);
        self.doublings = self.doublings.saturating_add(1);
        let whole = self.first.saturating_mul(factor).min(self.longest);
        let half = whole / 2;
        let range = u64::try_from((whole - half).as_nanos()).unwrap_or(u64::MAX);
        let part = (u128::from(self.step()) * u128::from(range)) >> 64;
        half + Duration::from_nanos(u64::try_from(part).unwrap_or(range))
    }

    /// Reports that a connection was up for `time`. If that is at least the longest wait, the backoff returns
    /// to the shortest wait.
    pub fn lasted(&mut self, time: Duration) {
        if time >= self.longest {
            self.doublings = 0;
        }
    }

    /// Advances the generator (xorshift64*) and returns the next random value.
    fn step(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn waits_double_up_to_the_longest() {
        let mut backoff = Backoff::new(MS(100), MS(1000), 7);
        for whole in [100, 200, 400, 800, 1000, 1000, 1000, 1000] {
            let wait = backoff.next_wait();
            assert!((MS(whole) / 2..=MS(whole)).contains(&wait), "{wait:?} of {whole} ms");
        }
    }

    #[test]
    fn only_a_connection_that_lasts_begins_again_with_the_shortest() {
        let mut backoff = Backoff::new(MS(100), MS(1000), 7);
        for _ in 0..3 {
            backoff.next_wait();
        }
        backoff.lasted(MS(999));
        assert!(backoff.next_wait() >= MS(400), "the fourth in a row");
        backoff.lasted(MS(1000));
        assert!(backoff.next_wait() <= MS(100));
    }

    #[test]
    fn hosts_with_different_seeds_do_not_come_back_in_step() {
        let wait = |seed| Backoff::new(MS(1000), MS(1000), seed).next_wait();
        let mut waits: Vec<Duration> = (0..100).map(|seed| wait(2 * seed + 1)).collect();
        assert_eq!(wait(41), wait(41), "one seed, one sequence");
        waits.sort_unstable();
        waits.dedup();
        assert!(waits.len() > 95, "{} different waits of 100", waits.len());
    }

    #[test]
    fn no_number_of_attempts_overflows() {
        let mut backoff = Backoff::new(Duration::MAX, Duration::MAX, 0);
        assert!((0..100).all(|_| backoff.next_wait() >= Duration::MAX / 2));
    }
}
