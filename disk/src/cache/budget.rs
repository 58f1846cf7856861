//! [`Budget`]: limits the time that a core spends on pages that enter the cache.
//!
//! To enter a page costs more than to find one: a frame is taken from another page, and three tables change.
//! While a cache is cold, or smaller than what is read, every read would pay for that and few would gain. So
//! a core spends at most 1 / [`SHARE`] of its time on it. What is beyond passes around the cache, at the
//! speed of the disk. Written pages that stay have a budget of the same size. Read-ahead is not limited: it
//! saves more commands than it costs.
//!
//! [`Slack`]: there is no limit while the core waits for its disk most of the time, and the disk takes so
//! long that the time to enter a page does not matter beside it.
//!
//! [`Misses`]: a core that finds nothing and has spent its budget does not look for most pages.

use spindle_reactor::clock::Nanos;

/// A core spends at most one part in this many of its time on pages that enter.
const SHARE: u64 = 128;
/// Time to enter a page and to evict another: 700 to 1100 ns, measured with a file disk.
const PAGE_NANOS: u64 = 1000;
/// Most pages that enter without a wait on a core that entered none before: those of two reads of 128 KiB.
const BURST_PAGES: u64 = 64;
/// Time that one page pays for.
const INTERVAL: u64 = PAGE_NANOS * SHARE;
/// A disk is slow if its fastest reads take this many times as long as to enter their pages.
const SLOW_DISK: u64 = 32;
/// Reads of which the fastest counts.
const SLOW_READS: u32 = 32;
/// Time after which the idle time is compared with it.
const IDLE_WINDOW: u64 = 1_000_000;
/// Most that one pair of polls counts as idle. In a longer time the core did other work, or slept.
const IDLE_NANOS_MAX: u64 = 1000;
/// Reads in a row that find nothing, after which a core looks for few pages.
const COLD_READS: u32 = 64;

/// The pages that may enter on one core. See the module.
#[derive(Debug)]
pub(super) struct Budget {
    /// Time until which the pages so far have used the budget, in nanoseconds. `None`: no limit.
    used_until: Option<u64>,
}

impl Budget {
    pub(super) fn new(is_paced: bool) -> Budget {
        Budget { used_until: is_paced.then_some(0) }
    }

    /// Returns true if a page may enter at `now`. More than one may then enter: a read enters all of its
    /// pages, and later reads wait for longer.
    #[inline]
    pub(super) fn is_open(&self, now: Nanos) -> bool {
        self.used_until.is_none_or(|used_until| used_until < now.as_u64() + INTERVAL * BURST_PAGES)
    }

    /// Records that pages have entered.
    #[inline]
    pub(super) fn spend(&mut self, pages: u64, now: Nanos) {
        if let Some(used_until) = &mut self.used_until {
            *used_until = (*used_until).max(now.as_u64()) + INTERVAL * pages;
        }
    }
}

/// Whether a core has time to spare, and how long its disk takes. See the module.
#[derive(Debug, Default)]
pub(super) struct Slack {
    window_from: u64,
    /// Idle time since `window_from`.
    idle: u64,
    /// At least half of the last window was idle.
    is_idle: bool,
    /// Time of the fastest of the last [`SLOW_READS`] reads. 0: not known yet.
    fastest: u64,
    /// Time of the fastest since, and their count.
    newest: (u64, u32),
}

impl Slack {
    /// Records a poll. `idle`: the time since the last one, if the core had nothing to do for this disk.
    #[inline]
    pub(super) fn on_poll(&mut self, now: Nanos, idle: Nanos) {
        self.idle += idle.as_u64().min(IDLE_NANOS_MAX);
        let window = now.as_u64().saturating_sub(self.window_from);
        if window >= IDLE_WINDOW {
            self.is_idle = self.idle >= window / 2;
            (self.window_from, self.idle) = (now.as_u64(), 0);
        }
    }

    /// Records the time of a read of the disk that fills frames.
    pub(super) fn on_read(&mut self, time: Nanos) {
        let (fastest, count) = self.newest;
        self.newest = match count {
            0 => (time.as_u64(), 1),
            _ => (fastest.min(time.as_u64()), count + 1),
        };
        if self.newest.1 == SLOW_READS {
            self.fastest = self.newest.0;
            self.newest.1 = 0;
        }
    }

    /// Returns true if `pages` pages may enter without a limit.
    #[inline]
    pub(super) fn is_free(&self, pages: u64) -> bool {
        self.is_idle && self.fastest >= pages * PAGE_NANOS * SLOW_DISK
    }
}

/// The reads of one core since the last that found a page in the cache.
#[derive(Debug, Default)]
pub(super) struct Misses(u32);

impl Misses {
    #[inline]
    pub(super) fn on_read(&mut self, has_found: bool) {
        self.0 = if has_found { 0 } else { self.0.checked_add(1).unwrap_or(COLD_READS) };
    }

    /// Returns true once the last [`COLD_READS`] reads have found nothing.
    #[inline]
    pub(super) fn are_many(&self) -> bool {
        self.0 >= COLD_READS
    }

    /// Returns true for three reads in four, which are not looked up. Those that are follow each other, 16 at
    /// a time, so that streams and strides are detected among them.
    pub(super) fn skip(&self) -> bool {
        self.0 % 64 >= 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads of `pages` pages, one every `period`, for a second. Returns the pages that enter.
    fn entered(mut budget: Budget, pages: u64, period: u64) -> u64 {
        let times = (0..1_000_000_000 / period).map(|at| Nanos(5_000_000_000 + at * period));
        let enter = |now: &Nanos| {
            let is_open = budget.is_open(*now);
            if is_open {
                budget.spend(pages, *now);
            }
            is_open
        };
        times.filter(enter).count() as u64 * pages
    }

    #[test]
    fn a_core_that_misses_in_each_read_spends_its_share_and_one_that_misses_seldom_enters_all() {
        let each_second = 1_000_000_000 / INTERVAL;
        for (pages, period) in [(1, 5_000), (32, 50_000), (128, 100_000)] {
            let entered = entered(Budget::new(true), pages, period);
            let most = each_second + BURST_PAGES + pages;
            assert!((each_second..=most).contains(&entered), "{pages}: {entered} of {most}");
        }
        assert_eq!(entered(Budget::new(true), 1, 2 * INTERVAL), 500_000_000 / INTERVAL);
        assert_eq!(entered(Budget::new(false), 32, 50_000), 20_000 * 32);
    }

    /// Polls each 500 ns for two windows, of which one in `busy` has work.
    fn polled(slack: &mut Slack, from: u64, busy: u64) {
        for at in 0..2 * IDLE_WINDOW / 500 {
            let idle = if at % busy == 0 { Nanos::ZERO } else { Nanos(500) };
            slack.on_poll(Nanos(from + at * 500), idle);
        }
    }

    #[test]
    fn an_idle_core_with_a_slow_disk_has_no_limit() {
        let read = |time: u64| {
            let mut slack = Slack::default();
            (0..SLOW_READS).for_each(|_| slack.on_read(Nanos(time)));
            slack
        };
        let mut slack = read(80_000);
        assert!(!slack.is_free(1), "it is not known to be idle");
        polled(&mut slack, 7_000_000, 4);
        assert!(slack.is_free(1) && slack.is_free(2) && !slack.is_free(3));
        polled(&mut slack, 9_000_000, 1);
        assert!(!slack.is_free(1), "it is busy");
        // One fast read of many is enough: the others waited in a queue.
        let mut slack = read(80_000);
        polled(&mut slack, 7_000_000, 4);
        (0..SLOW_READS).for_each(|at| slack.on_read(Nanos(if at == 7 { 5_000 } else { 80_000 })));
        assert!(!slack.is_free(1));
        // Long times between polls are sleep, or work for others.
        let mut slack = read(80_000);
        (0..100).for_each(|at| slack.on_poll(Nanos(7_000_000 + at * 100_000), Nanos(100_000)));
        assert!(!slack.is_free(1));
    }
}
