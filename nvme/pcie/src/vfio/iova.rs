//! [`IovaSpace`]: allocator of I/O virtual addresses of a container.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Alignment of every range, 2 MiB: a huge page of memory can be one page of the IOMMU.
pub(super) const ALIGN: u64 = 2 << 20;

/// Usable ranges if the kernel does not report them (before 5.4): 39 bits as in the narrowest IOMMU, without
/// the MSI window of x86.
pub(super) const RANGES_DEFAULT: [RangeInclusive<u64>; 2] = [0..=0xfedf_ffff, 0xfef0_0000..=(1 << 39) - 1];

/// Allocator of a container's IOVA ranges.
///
/// First fit from the lowest address, so that a drive with a narrower IOMMU can still join later.
pub(super) struct IovaSpace {
    ranges: Vec<RangeInclusive<u64>>,
    /// Allocated ranges without overlap, from first byte (key) to last byte (value).
    used: BTreeMap<u64, u64>,
}

impl IovaSpace {
    pub(super) fn new() -> IovaSpace {
        IovaSpace { ranges: Vec::new(), used: BTreeMap::new() }
    }

    /// Replaces the usable ranges. Allocations stay.
    pub(super) fn set_ranges(&mut self, mut ranges: Vec<RangeInclusive<u64>>) {
        ranges.sort_by_key(|range| *range.start());
        self.ranges = ranges;
    }

    /// Allocates `bytes` at a multiple of [`ALIGN`], never at 0. `None` if no range fits, or for 0 bytes.
    pub(super) fn allocate(&mut self, bytes: u64) -> Option<u64> {
        let start = self.ranges.iter().find_map(|range| self.first_fit(range, bytes))?;
        self.used.insert(start, start + (bytes - 1));
        Some(start)
    }

    pub(super) fn free(&mut self, start: u64) {
        self.used.remove(&start);
    }

    fn first_fit(&self, range: &RangeInclusive<u64>, bytes: u64) -> Option<u64> {
        let length = bytes.checked_sub(1)?;
        let mut start = (*range.start()).max(1).checked_next_multiple_of(ALIGN)?;
        loop {
            let end = start.checked_add(length).filter(|end| end <= range.end())?;
            // Allocations do not overlap, so only the last that begins at or before `end` can conflict.
            match self.used.range(..=end).next_back() {
                Some((_, last)) if *last >= start => {
                    start = last.checked_add(1)?.checked_next_multiple_of(ALIGN)?;
                }
                _ => return Some(start),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn space(ranges: &[RangeInclusive<u64>]) -> IovaSpace {
        let mut space = IovaSpace::new();
        space.set_ranges(ranges.to_vec());
        space
    }

    #[test]
    fn the_lowest_piece_that_fits_is_taken_aligned_and_never_at_zero() {
        let mut space = space(&[0..=(1 << 39) - 1]);
        assert_eq!(space.allocate(5), Some(ALIGN));
        assert_eq!(space.allocate(3 * ALIGN), Some(2 * ALIGN));
        assert_eq!(space.allocate(4096), Some(5 * ALIGN));
        space.free(2 * ALIGN);
        assert_eq!(space.allocate(4 * ALIGN), Some(6 * ALIGN));
        assert_eq!(space.allocate(2 * ALIGN), Some(2 * ALIGN));
    }

    #[test]
    fn the_window_of_interrupts_is_left_out() {
        let mut space = space(&RANGES_DEFAULT);
        // All of the lower range but the huge page at 0.
        let below = (0xfee0_0000 / ALIGN - 1) * ALIGN;
        assert_eq!(space.allocate(below), Some(ALIGN));
        assert_eq!(space.allocate(ALIGN), Some(0xff00_0000));
    }

    #[test]
    fn nothing_is_given_out_where_nothing_fits() {
        assert_eq!(IovaSpace::new().allocate(1), None);
        let mut space = space(&[0..=2 * ALIGN - 1, ALIGN + 7..=u64::MAX]);
        assert_eq!(space.allocate(0), None);
        assert_eq!(space.allocate(u64::MAX), None);
        assert_eq!(space.allocate(ALIGN), Some(ALIGN));
        assert_eq!(space.allocate(u64::MAX - 2 * ALIGN + 1), Some(2 * ALIGN));
        assert_eq!(space.allocate(1), None);
    }

    #[test]
    fn an_area_of_many_gib_lies_where_it_fits_and_its_place_is_used_again() {
        let mut space = space(&RANGES_DEFAULT);
        let pool = space.allocate(64 << 20).expect("room");
        let large = space.allocate(100 << 30).expect("room");
        assert!(pool < large && large >= 0xff00_0000);
        assert_eq!(space.allocate(500 << 30), None, "39 bits");
        space.free(large);
        assert_eq!(space.allocate(200 << 30), Some(large));
    }

    proptest! {
        #[test]
        fn pieces_are_disjoint_aligned_and_inside_of_a_range(
            ranges in prop::collection::vec((0..1_u64 << 30, 0..1_u64 << 30), 0..4),
            steps in prop::collection::vec(
                (any::<bool>(), 1..64_u64 << 20, any::<prop::sample::Index>()),
                1..80,
            ),
        ) {
            let ranges: Vec<_> = ranges.iter().map(|(start, length)| *start..=start + length).collect();
            let mut space = space(&ranges);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (is_new, bytes, which) in steps {
                if !is_new && !held.is_empty() {
                    space.free(held.swap_remove(which.index(held.len())).0);
                    continue;
                }
                let fits = |start: u64| {
                    let end = start + bytes - 1;
                    ranges.iter().any(|range| range.contains(&start) && range.contains(&end))
                        && held.iter().all(|(first, last)| end < *first || start > *last)
                };
                match space.allocate(bytes) {
                    Some(start) => {
                        prop_assert!(start > 0 && start.is_multiple_of(ALIGN) && fits(start));
                        held.push((start, start + bytes - 1));
                    }
                    None => prop_assert!(!(1..1024).any(|page| fits(page * ALIGN)), "{bytes} would fit"),
                }
            }
        }
    }
}
