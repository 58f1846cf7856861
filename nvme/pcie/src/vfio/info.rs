//! VFIO's region and IOMMU information: a structure, followed by a chain of capabilities.

use std::ops::RangeInclusive;

use vfio_bindings::bindings::vfio::{
    VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE, VFIO_REGION_INFO_CAP_SPARSE_MMAP, VFIO_REGION_INFO_FLAG_MMAP,
};

/// Result of an ioctl with a structure and optional capabilities.
pub(super) struct Info<T> {
    /// The structure at the beginning of the result.
    pub(super) head: T,
    /// The whole result including `head`; may be empty if there are no capabilities.
    pub(super) bytes: Vec<u8>,
    /// Offset of the first capability in `bytes`; 0 for none.
    pub(super) first: u32,
}

impl<T> Info<T> {
    /// Returns the bytes from the header of capability `id`. `None`: it is missing or the chain is broken.
    fn capability(&self, id: u32) -> Option<&[u8]> {
        let mut at = usize::try_from(self.first).ok()?;
        while at > 0 {
            let here = self.bytes.get(at..)?;
            let (found, next) = (u16_at(here, 0)?, usize::try_from(u32_at(here, 4)?).ok()?);
            if u32::from(found) == id {
                return Some(here);
            }
            // Only larger offsets are followed, so that the loop ends.
            at = next.checked_sub(at).filter(|step| *step > 0).map_or(0, |_| next);
        }
        None
    }

    /// Returns the pairs of 64-bit values from offset 16 of a capability. The 32-bit word at offset 8 is the
    /// number of pairs. Returns `None` if the capability is missing.
    fn pairs(&self, id: u32) -> Option<Vec<(u64, u64)>> {
        let here = self.capability(id)?;
        let count = usize::try_from(u32_at(here, 8)?).ok()?;
        let pair = |at: usize| Some((u64_at(here, at)?, u64_at(here, at.checked_add(8)?)?));
        // Stops at the end of the result, even if the count is larger.
        Some((0..count).map_while(|index| pair(index.checked_mul(16)?.checked_add(16)?)).collect())
    }
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes_at(bytes, at).map(u16::from_ne_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes_at(bytes, at).map(u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes_at(bytes, at).map(u64::from_ne_bytes)
}

/// Returns the valid IOVA ranges of the IOMMU; `None` if the kernel does not report them.
pub(super) fn iova_ranges<T>(info: &Info<T>) -> Option<Vec<RangeInclusive<u64>>> {
    let pairs = info.pairs(VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE)?;
    Some(pairs.into_iter().map(|(first, last)| first..=last).collect())
}

/// Returns the bytes that can be mapped from the beginning of a region; 0 if it cannot be mapped.
///
/// The result is less than the region if the region has a hole: kernels before 4.16 do not map the page with
/// the MSI-X table. In drives with that table in BAR 0, the registers and doorbells are before the table.
pub(super) fn mappable_bytes<T>(info: &Info<T>, flags: u32, bytes: u64) -> u64 {
    if flags & VFIO_REGION_INFO_FLAG_MMAP == 0 {
        return 0;
    }
    match info.pairs(VFIO_REGION_INFO_CAP_SPARSE_MMAP) {
        Some(areas) => {
            areas.iter().find(|(offset, _)| *offset == 0).map_or(0, |(_, length)| bytes.min(*length))
        }
        None => bytes,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A capability: its header, a count, pairs.
    fn capability(id: u16, next: u32, pairs: &[(u64, u64)]) -> Vec<u8> {
        let count = u32::try_from(pairs.len()).expect("few");
        let mut bytes = [id.to_ne_bytes(), 1_u16.to_ne_bytes()].concat();
        bytes.extend([next.to_ne_bytes(), count.to_ne_bytes(), 0_u32.to_ne_bytes()].concat());
        pairs.iter().for_each(|(a, b)| bytes.extend([a.to_ne_bytes(), b.to_ne_bytes()].concat()));
        bytes
    }

    fn info(parts: &[Vec<u8>], first: u32) -> Info<()> {
        Info { head: (), bytes: [vec![0xff; 24], parts.concat()].concat(), first }
    }

    #[test]
    fn ranges_are_found_behind_other_capabilities() {
        let told = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];
        let info = info(&[capability(2, 24 + 16, &[]), capability(1, 0, &told)], 24);
        assert_eq!(iova_ranges(&info), Some(RANGES.to_vec()));
    }
    const RANGES: [RangeInclusive<u64>; 2] = super::super::iova::RANGES_DEFAULT;

    #[test]
    fn no_capability_is_no_ranges_and_a_broken_chain_ends() {
        assert_eq!(iova_ranges(&info(&[], 0)), None);
        assert_eq!(iova_ranges(&info(&[], 999)), None);
        // One that names itself, and one that names an earlier one.
        assert_eq!(iova_ranges(&info(&[capability(2, 24, &[])], 24)), None);
        assert_eq!(iova_ranges(&info(&[capability(2, 40, &[]), capability(3, 24, &[])], 24)), None);
        // More pairs than there are bytes.
        let mut short = capability(1, 0, &[(5, 6)]);
        short[8] = 200;
        assert_eq!(iova_ranges(&info(&[short], 24)), Some(vec![5..=6]));
    }

    #[test]
    fn a_region_is_mapped_up_to_its_first_hole() {
        const MMAP: u32 = VFIO_REGION_INFO_FLAG_MMAP;
        let whole = info(&[], 0);
        assert_eq!(mappable_bytes(&whole, MMAP, 0x4000), 0x4000);
        assert_eq!(mappable_bytes(&whole, 0, 0x4000), 0);
        // MSIX_MAPPABLE only: no hole.
        assert_eq!(mappable_bytes(&info(&[capability(3, 0, &[])], 24), MMAP, 0x4000), 0x4000);
        let holed = info(&[capability(1, 0, &[(0x3000, 0x1000), (0, 0x2000)])], 24);
        assert_eq!(mappable_bytes(&holed, MMAP, 0x4000), 0x2000);
        let headless = info(&[capability(1, 0, &[(0x3000, 0x1000)])], 24);
        assert_eq!(mappable_bytes(&headless, MMAP, 0x4000), 0);
        let beyond = info(&[capability(1, 0, &[(0, u64::MAX)])], 24);
        assert_eq!(mappable_bytes(&beyond, MMAP, 0x4000), 0x4000);
    }

    proptest! {
        #[test]
        fn no_answer_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), first in 0..220_u32) {
            let info = Info { head: (), bytes, first };
            let _ = iova_ranges(&info);
            prop_assert!(mappable_bytes(&info, VFIO_REGION_INFO_FLAG_MMAP, 0x4000) <= 0x4000);
        }
    }
}
