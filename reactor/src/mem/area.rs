//! [`Area`]: memory for registration with a device. The memory stays mapped as long as the area exists. Its
//! pages are never released to the kernel before the memory is unmapped.

use std::ptr::NonNull;
use std::sync::Arc;

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

    /// Returns true when a device may write to the area: false for [`Area::zeroes`] only.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.region.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_area_of_its_own_is_writable_and_stays_mapped() {
        let area = Area::map(5000, Pages::Base).expect("maps");
        let (again, base) = (area.clone(), area.base());
        drop(area);
        assert!(again.is_writable() && again.bytes() >= 5000 && again.base() == base);
    }
}
