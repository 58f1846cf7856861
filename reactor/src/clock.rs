//! Time: [`Nanos`] since an unspecified start for deadlines and latencies, and the wall clock for logs.
//!
//! Protocol code takes a `Nanos` as an argument and never reads the clock: a simulator supplies the time.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// A point in monotonic time, or a span of it, in nanoseconds. Sums and differences saturate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Nanos(pub u64);

impl Nanos {
    /// The start of the clock, or an empty span.
    pub const ZERO: Nanos = Nanos(0);
    /// The latest time: a deadline that never passes.
    pub const MAX: Nanos = Nanos(u64::MAX);

    /// Converts microseconds; saturates.
    #[must_use]
    pub const fn from_us(us: u64) -> Nanos {
        Nanos(us.saturating_mul(1_000))
    }

    /// Converts milliseconds; saturates.
    #[must_use]
    pub const fn from_ms(ms: u64) -> Nanos {
        Nanos(ms.saturating_mul(1_000_000))
    }

    /// Converts seconds; saturates.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Nanos {
        Nanos(secs.saturating_mul(1_000_000_000))
    }

    /// Returns the nanoseconds.
    #[must_use]
    pub const fn as_u64(self) -> u64 {
        self.0
    }

    /// Returns whole microseconds, rounded down.
    #[must_use]
    pub const fn as_us(self) -> u64 {
        self.0 / 1_000
    }

    /// Returns whole milliseconds, rounded down.
    #[must_use]
    pub const fn as_ms(self) -> u64 {
        self.0 / 1_000_000
    }

    /// Converts to a [`Duration`], exactly.
    #[must_use]
    pub const fn as_duration(self) -> Duration {
        Duration::from_nanos(self.0)
    }
}

impl From<Duration> for Nanos {
    fn from(duration: Duration) -> Nanos {
        Nanos(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl Add for Nanos {
    type Output = Nanos;
    #[inline]
    fn add(self, other: Nanos) -> Nanos {
        Nanos(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Nanos {
    #[inline]
    fn add_assign(&mut self, other: Nanos) {
        *self = *self + other;
    }
}

impl Sub for Nanos {
    type Output = Nanos;
    #[inline]
    fn sub(self, other: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.as_duration(), f)
    }
}

/// The monotonic clock of the system (`CLOCK_MONOTONIC`).
#[derive(Debug, Clone, Copy, Default)]
pub struct Clock;

impl Clock {
    /// Returns the current time. Takes about 20 ns where the kernel offers the clock without a system call
    /// (vDSO). The data path reads the clock per turn, not per command.
    #[inline]
    #[must_use]
    pub fn now() -> Nanos {
        let now = clock_gettime(ClockId::Monotonic);
        let secs = u64::try_from(now.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
        Nanos::from_secs(secs) + Nanos(nanos)
    }
}

impl Clock {
    /// Returns the time since the machine's boot, in which it was suspended too (`CLOCK_BOOTTIME`): for
    /// leases. Takes as long as [`Clock::now`].
    #[inline]
    #[must_use]
    pub fn boot() -> Nanos {
        let now = clock_gettime(ClockId::Boottime);
        let secs = u64::try_from(now.tv_sec).unwrap_or(0);
        Nanos::from_secs(secs) + Nanos(u64::try_from(now.tv_nsec).unwrap_or(0))
    }
}

/// Returns the milliseconds since 1970-01-01 UTC, as in NVMe timestamps; 0 when the clock is before that.
#[must_use]
pub fn wall_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_differences_saturate() {
        assert_eq!(Nanos(1) - Nanos(2), Nanos::ZERO);
        assert_eq!(Nanos::MAX + Nanos(1), Nanos::MAX);
        assert_eq!(Nanos::from_secs(u64::MAX), Nanos::MAX);
        assert_eq!(Nanos::from(Duration::MAX), Nanos::MAX);
    }

    #[test]
    fn units_convert_rounding_down() {
        assert_eq!(Nanos::from_secs(2), Nanos::from_ms(2_000));
        assert_eq!(Nanos::from_ms(2), Nanos::from_us(2_000));
        assert_eq!((Nanos(1_999_999).as_us(), Nanos(1_999_999).as_ms(), Nanos(7).as_u64()), (1_999, 1, 7));
        assert_eq!(Nanos(1_500).to_string(), "1.5µs");
    }

    #[test]
    fn the_clock_never_goes_back_and_the_wall_is_past_2020() {
        let mut last = Clock::now();
        for _ in 0..1000 {
            let now = Clock::now();
            assert!(now >= last);
            last = now;
        }
        assert!(wall_ms() > 1_577_836_800_000);
    }
}
