//! [`Device`]: the modelled device of a delay layer. Commands reserve its time. Shared by all cores, no lock.

use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::clock::Nanos;

use super::DelaySpec;
use crate::BlockRange;

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Work {
    /// Bytes transferred.
    bytes: u64,
    /// Ranges to which the head moves, in order: first byte, and the byte after the last.
    stops: [Option<(u64, u64)>; 2],
}

impl Work {
    /// Returns the work of a transfer of one range. `shift`: log2 of the block size.
    pub(super) fn at(range: BlockRange, shift: u32) -> Work {
        let (begin, bytes) = (range.offset(shift), range.bytes(shift));
        Work { bytes, stops: [Some((begin, begin.saturating_add(bytes))), None] }
    }

    /// Adds a second transfer of the same bytes, without a further seek.
    pub(super) fn twice(self) -> Work {
        Work { bytes: self.bytes.saturating_mul(2), ..self }
    }

    /// Adds a seek to `range` and the transfer of its bytes.
    pub(super) fn and_then(self, range: BlockRange, shift: u32) -> Work {
        let next = Work::at(range, shift);
        Work {
            bytes: self.bytes.saturating_add(next.bytes),
            stops: [self.stops[0].or(next.stops[0]), next.stops[0]],
        }
    }
}

/// Device time reserved for a command.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reservation {
    /// Time at which the device finishes the command.
    end: Nanos,
    /// Duration of the command's work, which ends at `end`.
    time: Nanos,
}

/// A modelled device. Relaxed ordering suffices, because the atomics guard no other memory.
pub(super) struct Device {
    spec: DelaySpec,
    /// End of the last reservation, in nanoseconds of the cores' clock.
    busy_until: AtomicU64,
    /// Position of the head: the byte after the last range transferred.
    head: AtomicU64,
}

impl Device {
    pub(super) fn new(spec: DelaySpec) -> Device {
        Device { spec, busy_until: AtomicU64::new(0), head: AtomicU64::new(0) }
    }

    /// Reserves device time for a command submitted at `now`, after all earlier reservations. `capacity`:
    /// bytes of the disk. Without `bandwidth` and `seek`, the reservation is empty.
    pub(super) fn reserve(&self, now: Nanos, work: &Work, capacity: u64) -> Reservation {
        if self.spec.bandwidth.is_none() && self.spec.seek == Nanos::ZERO {
            return Reservation { end: now, time: Nanos::ZERO };
        }
        let time = self.travel(work, capacity) + self.transfer(work.bytes);
        let after = |busy: u64| Nanos(busy.max(now.0)) + time;
        let mut busy = self.busy_until.load(Ordering::Relaxed);
        loop {
            let end = after(busy);
            let swapped =
                self.busy_until.compare_exchange_weak(busy, end.0, Ordering::Relaxed, Ordering::Relaxed);
            match swapped {
                Ok(_) => return Reservation { end, time },
                Err(other) => busy = other,
            }
        }
    }

    /// Frees the remaining device time of a cancelled command, for later reservations.
    pub(super) fn give_back(&self, reservation: Reservation, now: Nanos) {
        let left = (reservation.end - now).min(reservation.time);
        let less = |busy: u64| Some(busy.saturating_sub(left.0));
        // `less` always returns `Some`.
        let _ = self.busy_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Returns the time at which the command is due: the end of its device time plus the latency.
    pub(super) fn due(&self, reservation: Reservation) -> Nanos {
        reservation.end + self.spec.latency
    }

    fn transfer(&self, bytes: u64) -> Nanos {
        let Some(bandwidth) = self.spec.bandwidth else { return Nanos::ZERO };
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(bandwidth.max(1));
        Nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Moves the head over the ranges. Returns the sum of the seek times.
    fn travel(&self, work: &Work, capacity: u64) -> Nanos {
        if self.spec.seek == Nanos::ZERO {
            return Nanos::ZERO;
        }
        let seeks = work.stops.iter().flatten().map(|(begin, end)| {
            let head = self.head.swap(*end, Ordering::Relaxed);
            seek_time(self.spec.seek, head.abs_diff(*begin), capacity)
        });
        seeks.fold(Nanos::ZERO, |sum, seek| sum + seek)
    }
}

/// Returns `whole * sqrt(distance / capacity)`, rounded down. A longer distance counts as the capacity.
fn seek_time(whole: Nanos, distance: u64, capacity: u64) -> Nanos {
    const ROOT_BITS: u32 = 31;
    let distance = u128::from(distance.min(capacity));
    let share = (distance << (2 * ROOT_BITS)) / u128::from(capacity.max(1));
    // The share is at most 2^62, and its root at most 2^31.
    let root = u64::try_from(share).unwrap_or(u64::MAX).isqrt();
    let nanos = (u128::from(whole.0) * u128::from(root)) >> ROOT_BITS;
    Nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seek_takes_the_root_of_its_share_of_the_disk() {
        let time = |distance, capacity| seek_time(Nanos::from_us(1_000_000), distance, capacity).0;
        assert_eq!(time(0, 1 << 30), 0);
        assert_eq!(time(1 << 30, 1 << 30), 1_000_000_000);
        assert_eq!(time(1 << 28, 1 << 30), 500_000_000);
        assert_eq!(time(1 << 60, 1 << 62), 500_000_000);
        // A disk that has shrunk, and one that is empty.
        assert_eq!((time(u64::MAX, 1 << 62), time(7, 0)), (1_000_000_000, 0));
        // A seek over one block of the largest disk takes time.
        assert!((1..1000).contains(&time(512, 1 << 62)), "{}", time(512, 1 << 62));
    }

    #[test]
    fn the_longest_times_end_no_later_than_never() {
        let slowest = DelaySpec { bandwidth: Some(1), seek: Nanos::MAX, latency: Nanos::MAX };
        let device = Device::new(slowest);
        let range = BlockRange { lba: 1 << 50, blocks: u32::MAX };
        let work = Work::at(range, 12).twice().and_then(range, 12);
        let turns: Vec<Reservation> = (0..3).map(|_| device.reserve(Nanos(7), &work, 1 << 62)).collect();
        assert_eq!(turns.last().map(|reservation| device.due(*reservation)), Some(Nanos::MAX));
        turns.into_iter().for_each(|reservation| device.give_back(reservation, Nanos::MAX));
    }
}
