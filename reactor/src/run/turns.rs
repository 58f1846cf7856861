//! [`Turns`]: durations of a core's turns by the parts that had work, readable by other threads.
//!
//! ```text
//!   reactor ── a turn with work has ended ─> Turns::ended ─┬─ all of it ────────────> busy
//!                                                          └─ RECORDED_MIN or more ─> longest of its parts
//! ```
//!
//! The reactor reads the clock at both ends of a turn with work anyway, so recording costs an addition for
//! most turns, and never a system call. The duration includes the time for which the kernel or a hypervisor
//! ran something else on the CPU: hosts wait that long, whatever the cause is.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::Nanos;

/// Minimum duration of the turns that are recorded by their parts.
const RECORDED_MIN: Nanos = Nanos::from_us(50);
/// Minimum duration of long turns, which hosts may notice: they are counted and reported.
pub const LONG: Nanos = Nanos::from_ms(1);
/// Maximum number of parts: mail, descriptors, and pollers. The sixth poller and all later ones are the last
/// part.
const PARTS_MAX: usize = 8;
pub(super) const MAIL: usize = 0;
pub(super) const DESCRIPTORS: usize = 1;
/// Index of the part for the first poller; the others follow.
pub(super) const POLLERS: usize = 2;

/// Set of the parts of a turn that had work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Parts(u8);

impl Parts {
    pub(super) fn add(&mut self, part: usize) {
        self.0 |= 1 << part.min(PARTS_MAX - 1);
    }
}

/// A turn of [`LONG`] or longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LongTurn {
    /// Parts that had work.
    pub parts: Parts,
    /// Duration of the turn.
    pub took: Nanos,
}

/// Durations of a core's turns with work, since its start. Written by its reactor only.
pub struct Turns {
    names: OnceLock<Vec<&'static str>>,
    busy: AtomicU64,
    long: AtomicU64,
    /// Longest turn in nanoseconds, by [`Parts`]; 0 if none took [`RECORDED_MIN`].
    longest: [AtomicU64; 1 << PARTS_MAX],
}

impl Turns {
    pub(super) fn new() -> Turns {
        Turns {
            names: OnceLock::new(),
            busy: AtomicU64::new(0),
            long: AtomicU64::new(0),
            longest: [const { AtomicU64::new(0) }; 1 << PARTS_MAX],
        }
    }

    /// Records a turn with work, from `began` to `now`, and returns it if it took [`LONG`] or longer. Only
    /// the reactor calls this, so no update can be lost.
    #[inline]
    pub(super) fn ended(&self, parts: Parts, began: Nanos, now: Nanos) -> Option<LongTurn> {
        let took = now - began;
        let busy = self.busy.load(Ordering::Relaxed);
        self.busy.store(busy.wrapping_add(took.as_u64()), Ordering::Relaxed);
        if took < RECORDED_MIN { None } else { self.record_parts(parts, took) }
    }

    fn record_parts(&self, parts: Parts, took: Nanos) -> Option<LongTurn> {
        let longest = &self.longest[usize::from(parts.0)];
        if took.as_u64() > longest.load(Ordering::Relaxed) {
            longest.store(took.as_u64(), Ordering::Relaxed);
        }
        if took < LONG {
            return None;
        }
        self.long.fetch_add(1, Ordering::Relaxed);
        Some(LongTurn { parts, took })
    }

    /// Sets the names of the parts: mail, descriptors, and `pollers`, the pollers' names in their order. Only
    /// the first call has an effect.
    pub(super) fn set_names(&self, pollers: impl Iterator<Item = &'static str>) {
        self.names.get_or_init(|| ["mail", "descriptors"].into_iter().chain(pollers).collect());
    }

    /// Returns the total time of turns with work, including time without the CPU.
    #[must_use]
    pub fn busy(&self) -> Nanos {
        Nanos(self.busy.load(Ordering::Relaxed))
    }

    /// Returns the count of turns of [`LONG`] or longer.
    #[must_use]
    pub fn long(&self) -> u64 {
        self.long.load(Ordering::Relaxed)
    }

    /// Returns the longest turn with each set of parts, from 50 us on; the longest first.
    #[must_use]
    pub fn longest(&self) -> Vec<(Parts, Nanos)> {
        let noted = |(parts, took): (u8, &AtomicU64)| {
            let took = Nanos(took.load(Ordering::Relaxed));
            (took > Nanos::ZERO).then_some((Parts(parts), took))
        };
        let mut longest: Vec<_> = (0..=u8::MAX).zip(&self.longest).filter_map(noted).collect();
        longest.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
        longest
    }

    /// Returns the names of `parts`, in the order in which they run. The sixth poller and those after it are
    /// one part: all their names are listed.
    pub fn names(&self, parts: Parts) -> impl Iterator<Item = &'static str> {
        let names = self.names.get().map(Vec::as_slice).unwrap_or_default();
        names
            .iter()
            .enumerate()
            .filter(move |(part, _)| parts.0 & (1 << part.min(&(PARTS_MAX - 1))) != 0)
            .map(|(_, name)| *name)
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turns")
            .field("busy", &self.busy())
            .field("long", &self.long())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(of: &[usize]) -> Parts {
        let mut parts = Parts::default();
        of.iter().for_each(|part| parts.add(*part));
        parts
    }

    #[test]
    fn the_longest_of_each_set_of_parts_is_kept_and_long_ones_are_counted() {
        let turns = Turns::new();
        turns.set_names(["sockets", "requests"].into_iter());
        let (sockets, both) = (parts(&[2]), parts(&[0, 2, 3]));
        let us = Nanos::from_us;
        assert_eq!(turns.ended(sockets, us(0), us(49)), None);
        assert_eq!(turns.ended(sockets, us(100), us(170)), None);
        assert_eq!(turns.ended(sockets, us(200), us(260)), None);
        let long = turns.ended(both, us(1000), us(2500)).expect("it was long");
        assert_eq!(long, LongTurn { parts: both, took: us(1500) });
        assert!(turns.ended(both, us(3000), us(4000)).is_some(), "shorter than the longest, and long");
        assert_eq!(turns.longest(), [(both, us(1500)), (sockets, us(70))]);
        assert_eq!((turns.long(), turns.busy()), (2, us(49 + 70 + 60 + 1500 + 1000)));
        assert_eq!(turns.names(both).collect::<Vec<_>>(), ["mail", "sockets", "requests"]);
    }

    #[test]
    fn pollers_that_are_too_many_are_told_as_one() {
        let turns = Turns::new();
        turns.set_names(["a", "b", "c", "d", "e", "f", "g"].into_iter());
        assert_eq!(turns.names(parts(&[8])).collect::<Vec<_>>(), ["f", "g"]);
    }
}
