//! [`Area`]: memory for registration with a device. The memory stays mapped as long as the area exists. Its
//! pages are never released to the kernel before the memory is unmapped.

use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use super::buf::{ZEROES_BYTES, zeroes};
use super::region::{PageSizes, Pages, Region, RegionError};

/// Memory of contiguous addresses that stays mapped and whose pages are not released to the kernel.
///
/// The code that registers memory with a device keeps an area of it until the registration has ended.
#[derive(Debug, Clone)]
pub struct Area {
    region: Option<Arc<Region>>,
}

impl Area {
    /// Maps new zeroed memory of `bytes`, rounded up to base pages, for queues that a device and its driver
    /// share. The pages come from memory node `node` if that has free memory; with `None`, the kernel
    /// chooses. Fails with the error of mmap(2).
    pub fn of_pages(bytes: usize, node: Option<u32>) -> Result<Area, RegionError> {
        let region = Region::map_pages(bytes)?;
        if let Some(node) = node {
            region.prefer_node(node);
        }
        Ok(Area::of(&Arc::new(region)))
    }

    /// Maps new zeroed memory of `bytes`, rounded up and aligned to 2 MiB. Fails with the error of mmap(2).
    pub fn map(bytes: usize, pages: Pages) -> Result<Area, RegionError> {
        Ok(Area::of(&Arc::new(Region::map(bytes, pages)?)))
    }

    /// Returns an area of all of `region`. From now on none of its pages is released to the kernel, even
    /// after the area is dropped.
    pub(super) fn of(region: &Arc<Region>) -> Area {
        region.set_registered();
        Area { region: Some(Arc::clone(region)) }
    }

    /// Returns the area of the static zeroes, the contents of null disks and unwritten pages.
    #[must_use]
    pub fn zeroes() -> Area {
        Area { region: None }
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        match &self.region {
            Some(region) => region.base(),
            None => zeroes(ZEROES_BYTES).addr,
        }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.region {
            Some(region) => region.bytes(),
            None => ZEROES_BYTES as usize,
        }
    }

    /// Moves memory that was mapped with [`Pages::Transparent`] to huge pages, as far as the kernel can.
    /// Returns the sizes of the area's pages. Call it before registration, and never on a reactor core: it
    /// takes seconds for a large area.
    #[must_use]
    pub fn collapse_to_huge(&self) -> PageSizes {
        self.region.as_ref().map_or(PageSizes::Base, |region| region.collapse_to_huge())
    }

    /// Returns false once the RAM disk or cache of this memory is dropped, and with it all buffers: no
    /// transfer can name the memory any more, and only registrations keep it mapped.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        self.region.as_ref().is_none_or(|region| !region.is_abandoned())
    }

    /// Returns true when a device may write to the area: false for [`Area::zeroes`] only.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.region.is_some()
    }
}

/// Bytes in memory, by the kind of their pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResidentBytes {
    /// On base pages and transparent huge pages.
    pub ordinary: u64,
    /// On reserved huge pages.
    pub huge: u64,
}

/// Tells how much of the memory of a RAM disk or cache is left after its removal. Keeps none of it.
#[derive(Debug, Clone)]
pub struct MemoryWatch(Weak<Region>);

impl MemoryWatch {
    pub(super) fn of(region: &Arc<Region>) -> MemoryWatch {
        MemoryWatch(Arc::downgrade(region))
    }

    /// Returns a number that no other memory has while this watch exists.
    #[must_use]
    pub fn key(&self) -> usize {
        self.0.as_ptr().addr()
    }

    /// Returns the bytes that are in memory now; `None` once the memory is unmapped. Takes milliseconds for
    /// a large disk: never call it on a reactor core.
    #[must_use]
    pub fn resident(&self) -> Option<ResidentBytes> {
        let region = self.0.upgrade()?;
        let bytes = region.resident_bytes() as u64;
        Some(match region.pages() {
            Pages::Huge => ResidentBytes { huge: bytes, ordinary: 0 },
            Pages::Base | Pages::Transparent => ResidentBytes { ordinary: bytes, huge: 0 },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CacheFrames, FrameStore, SealedFrames};
    use super::*;

    #[test]
    fn memory_is_in_use_until_its_last_buffer_is_dropped_and_watched_until_deregistered() {
        let disk = FrameStore::new(1 << 20, 1 << 20, Pages::Base, false).expect("memory");
        let (area, watch) = (disk.area(), disk.memory_watch());
        let core = disk.core();
        let buf = core.take(0, 4096).expect("a frame");
        drop((disk, core));
        assert!(area.is_in_use(), "a buffer is left, which a transfer may name");
        drop(buf);
        assert!(!area.is_in_use());
        let left = watch.resident().expect("a registration keeps it");
        assert!(left.huge == 0 && left.ordinary < 1 << 20, "{left:?}");
        drop(area);
        assert_eq!(watch.resident(), None);

        let (cache, _) = CacheFrames::new(1, 16, Pages::Base, true).expect("memory");
        let area = cache.area();
        assert!(area.is_in_use());
        drop(cache);
        assert!(!area.is_in_use() && Area::zeroes().is_in_use());
    }

    #[test]
    fn an_area_of_its_own_is_writable_and_stays_mapped() {
        let area = Area::map(5000, Pages::Base).expect("maps");
        let (again, base) = (area.clone(), area.base());
        drop(area);
        assert!(again.is_writable() && again.bytes() >= 5000 && again.base() == base);
    }
}
