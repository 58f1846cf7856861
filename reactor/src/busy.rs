//! [`Busy`]: how much of its time a polling core works, although it always burns all of it.

use crate::clock::Nanos;

/// Pieces that the last second is kept in.
const SLICES: usize = 8;
const SLICE: Nanos = Nanos(1_000_000_000 / SLICES as u64);

/// Counts the busy share of a loop over about the last second.
#[derive(Debug, Clone)]
pub struct Busy {
    last: Nanos,
    slice_start: Nanos,
    /// Busy nanoseconds in the running slice.
    busy: u64,
    /// Busy nanoseconds in those before.
    past: [u64; SLICES],
    at: usize,
    /// Busy nanoseconds since the start.
    total: u64,
}

impl Busy {
    /// A loop that begins at `now`.
    #[must_use]
    pub const fn new(now: Nanos) -> Busy {
        Busy { last: now, slice_start: now, busy: 0, past: [0; SLICES], at: 0, total: 0 }
    }

    /// A turn ended at `now`; it found something to do or not. The time since the turn before is its.
    #[inline]
    pub fn turn(&mut self, is_busy: bool, now: Nanos) {
        if now - self.slice_start >= SLICE {
            self.turn_across(is_busy, now);
        } else if is_busy {
            self.work(now);
        }
        self.last = self.last.max(now);
    }

    #[inline]
    fn work(&mut self, until: Nanos) {
        let span = (until - self.last).as_u64();
        self.busy += span;
        self.total = self.total.saturating_add(span);
    }

    /// A turn that ends in a later slice is shared out among the slices it was in.
    #[cold]
    fn turn_across(&mut self, is_busy: bool, now: Nanos) {
        // Far behind (a core that slept): the slices in between are all alike, and only the last few are
        // kept.
        let far = Nanos(SLICE.as_u64() * (SLICES as u64 + 1));
        if now - self.slice_start > far + SLICE {
            let skip_to = now - far;
            if is_busy {
                self.total = self.total.saturating_add((skip_to - self.last).as_u64());
            }
            self.past = [if is_busy { SLICE.as_u64() } else { 0 }; SLICES];
            (self.slice_start, self.last, self.busy) = (skip_to, self.last.max(skip_to), 0);
        }
        while now - self.slice_start >= SLICE {
            let end = self.slice_start + SLICE;
            if is_busy {
                self.work(end);
            }
            self.last = self.last.max(end);
            self.past[self.at] = std::mem::take(&mut self.busy);
            self.at = (self.at + 1) % SLICES;
            self.slice_start = end;
        }
        if is_busy {
            self.work(now);
        }
    }

    /// Share of the last second, in whole slices of an eighth, that was busy: 0 to 1000.
    #[must_use]
    pub fn share_permille(&self) -> u32 {
        let busy: u64 = self.past.iter().sum();
        u32::try_from(busy / (SLICE.as_u64() * SLICES as u64 / 1000)).unwrap_or(1000).min(1000)
    }

    /// The same from 0 to 1.
    #[must_use]
    pub fn share(&self) -> f64 {
        f64::from(self.share_permille()) / 1000.0
    }

    /// Busy time since the start.
    #[must_use]
    pub fn total(&self) -> Nanos {
        Nanos(self.total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Turns of `step` until `end`, of which those that `is_busy` says are busy.
    fn run(busy: &mut Busy, end: Nanos, step: Nanos, is_busy: impl Fn(u64) -> bool) {
        for turn in 0.. {
            let now = busy.last + step;
            if now > end {
                break;
            }
            busy.turn(is_busy(turn), now);
        }
    }

    #[test]
    fn the_share_is_that_of_the_last_second() {
        let start = Nanos::from_secs(50);
        let mut busy = Busy::new(start);
        assert_eq!(busy.share_permille(), 0);
        run(&mut busy, start + Nanos::from_secs(3), Nanos::from_us(10), |turn| turn % 4 == 0);
        assert!((248..=252).contains(&busy.share_permille()), "{}", busy.share_permille());
        run(&mut busy, start + Nanos::from_secs(6), Nanos::from_us(10), |_| true);
        assert_eq!(busy.share_permille(), 1000);
        run(&mut busy, start + Nanos::from_secs(9), Nanos::from_us(10), |_| false);
        assert_eq!(busy.share_permille(), 0);
        assert!((3700..=3800).contains(&busy.total().as_ms()), "{}", busy.total());
    }

    #[test]
    fn turns_longer_than_slices_and_long_sleeps_count_in_full() {
        let mut busy = Busy::new(Nanos::ZERO);
        busy.turn(true, Nanos::from_ms(500));
        busy.turn(false, Nanos::from_secs(1));
        assert_eq!((busy.share_permille(), busy.total()), (500, Nanos::from_ms(500)));
        busy.turn(false, Nanos::from_secs(100));
        assert_eq!((busy.share_permille(), busy.total()), (0, Nanos::from_ms(500)));
        busy.turn(true, Nanos::from_secs(200));
        assert_eq!((busy.share(), busy.total()), (1.0, Nanos::from_ms(100_500)));
        busy.turn(true, Nanos::from_secs(199));
        assert_eq!(busy.total(), Nanos::from_ms(100_500), "time that goes back counts as none");
    }
}
