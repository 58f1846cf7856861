//! [`RetiredMemory`]: memory of RAM disks and caches that a reload or change has removed and that is not
//! given back yet. Commands in flight, registrations with devices and optimistic connections keep it for a
//! while.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use spindle_reactor::mem::{MemoryWatch, ResidentBytes};
use spindle_target::snapshot::Snapshot;

/// Longest wait of a reload or change for retired memory, if that is all that it lacks. Over RDMA the memory
/// of an idle disk is given back in about a second.
pub const RETIRED_MAX: Duration = Duration::from_secs(5);
/// Period at which it looks again.
const CHECK_PERIOD: Duration = Duration::from_millis(50);

/// Watches of the retired memory. See the module.
#[derive(Default)]
pub struct RetiredMemory(Vec<MemoryWatch>);

/// Returns watches of the memory of all disks of `snapshot`, their caches included.
pub fn memory_of(snapshot: &Snapshot) -> Vec<MemoryWatch> {
    snapshot.disks.iter().flatten().filter_map(|disk| disk.memory_watch()).collect()
}

impl RetiredMemory {
    /// Adds the memory of `before` that is not in `now`.
    pub fn add(&mut self, before: Vec<MemoryWatch>, now: &[MemoryWatch]) {
        let now: HashSet<_> = now.iter().map(MemoryWatch::key).collect();
        self.0.extend(before.into_iter().filter(|it| !now.contains(&it.key())));
    }

    /// Returns what is still in memory.
    pub fn resident(&mut self) -> ResidentBytes {
        let mut sum = ResidentBytes::default();
        self.0.retain(|watch| {
            let Some(resident) = watch.resident() else { return false };
            sum.ordinary = sum.ordinary.saturating_add(resident.ordinary);
            sum.huge = sum.huge.saturating_add(resident.huge);
            true
        });
        sum
    }

    /// Calls `read`, which validates a configuration beside the retired memory. If it fails for that memory
    /// only, tries again until the memory is given back, for `wait_max` at most.
    pub fn validate_beside<T, E>(
        &mut self,
        wait_max: Duration,
        mut read: impl FnMut(ResidentBytes) -> Result<T, E>,
    ) -> Result<T, E> {
        let give_up = Instant::now() + wait_max;
        loop {
            let retired = self.resident();
            let result = read(retired);
            let has_no_part = retired == ResidentBytes::default();
            if result.is_ok() || has_no_part || read(ResidentBytes::default()).is_err() {
                return result;
            }
            if Instant::now() >= give_up {
                return result;
            }
            std::thread::park_timeout(CHECK_PERIOD);
        }
    }
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mem::{Area, FrameStore, Pages, SealedFrames};

    use super::*;

    const BYTES: u64 = 8 << 20;

    /// The memory of a disk that is removed, kept by a registration.
    fn retired() -> (RetiredMemory, Area) {
        let store = FrameStore::new(BYTES, 0, Pages::Base, false).expect("memory");
        let mut next = Some(0);
        while let Some(offset) = next {
            next = store.populate(offset).expect("memory");
        }
        let mut retired = RetiredMemory::default();
        retired.add(vec![store.memory_watch()], &[store.memory_watch()]);
        assert_eq!(retired.resident(), ResidentBytes::default(), "the disk stays");
        retired.add(vec![store.memory_watch()], &[]);
        (retired, store.area())
    }

    fn fits(retired: ResidentBytes) -> Result<(), u64> {
        if retired.ordinary < BYTES { Ok(()) } else { Err(retired.ordinary) }
    }

    #[test]
    fn a_change_waits_for_the_memory_of_removed_disks() {
        let (mut retired, area) = retired();
        let (mut area, mut calls) = (Some(area), 0);
        let result = retired.validate_beside(Duration::from_secs(60), |beside| {
            calls += 1;
            // The fourth call is the second attempt's, without retired memory.
            let result = fits(beside);
            drop((calls == 4).then(|| area.take()));
            result
        });
        assert_eq!((result, calls), (Ok(()), 5));
        assert!(retired.0.is_empty());
    }

    #[test]
    fn a_change_that_does_not_fit_beside_it_in_time_is_refused_and_others_at_once() {
        let (mut retired, _area) = retired();
        let result = retired.validate_beside(Duration::ZERO, fits);
        assert!(result.is_err_and(|bytes| bytes >= BYTES));
        let mut calls = 0;
        let result: Result<(), _> = retired.validate_beside(Duration::from_secs(60), |_| {
            calls += 1;
            Err("a name that is wrong")
        });
        assert_eq!((result, calls), (Err("a name that is wrong"), 2));
    }
}
