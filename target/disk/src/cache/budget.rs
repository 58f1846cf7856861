//! [`Budget`]: limits the time that a core spends on pages that enter the cache.
//!
//! To enter a page costs more than to find one: a frame is taken from another page, and three tables change.
//! While a cache is cold, or smaller than what is read, every read would pay for that and few would gain. So
//! a core spends at most 1 / [`SHARE`] of its time on it. What is beyond passes around the cache, at the
//! speed of the disk. Written pages that stay have a budget of the same size. Read-ahead is not limited: it
//! saves more commands than it costs.
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

    #[inline]
    pub(super) fn spend(&mut self, pages: u64, now: Nanos) {
        if let Some(used_until) = &mut self.used_until {
            *used_until = (*used_until).max(now.as_u64()) + INTERVAL * pages;
        }
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
    fn a_core_that_always_misses_spends_its_budget_and_rare_misses_all_enter() {
        let each_second = 1_000_000_000 / INTERVAL;
        for (pages, period) in [(1, 5_000), (32, 50_000), (128, 100_000)] {
            let entered = entered(Budget::new(true), pages, period);
            let most = each_second + BURST_PAGES + pages;
            assert!((each_second..=most).contains(&entered), "{pages}: {entered} of {most}");
        }
        assert_eq!(entered(Budget::new(true), 1, 2 * INTERVAL), 500_000_000 / INTERVAL);
        assert_eq!(entered(Budget::new(false), 32, 50_000), 20_000 * 32);
    }
}
