//! [`Area`]: memory that a device may be given, and that stays where it is for as long as the area lives.

use std::ptr::NonNull;
use std::sync::Arc;

use super::buf::{ZEROES_BYTES, zeroes};
use super::region::{PageSizes, Pages, Region, RegionError};

/// A contiguous piece of memory, kept mapped, and its pages kept in place.
///
/// The code that registers memory with a device takes an area of it and drops it after the registration.
#[derive(Debug, Clone)]
pub struct Area {
    keep: Option<Arc<Region>>,
}

impl Area {
    /// Zeroed memory of its own, at least `bytes` rounded up to pages: for queues that a device and its
    /// driver share. From the memory node that is given, if that has any.
    pub fn of_pages(bytes: usize, node: Option<u32>) -> Result<Area, RegionError> {
        let region = Region::map_pages(bytes)?;
        if let Some(node) = node {
            region.prefer_node(node);
        }
        Ok(Area::of(&Arc::new(region)))
    }

    /// Zeroed memory of its own, at least `bytes`, aligned to 2 MiB.
    pub fn map(bytes: usize, pages: Pages) -> Result<Area, RegionError> {
        Ok(Area::of(&Arc::new(Region::map(bytes, pages)?)))
    }

    /// All of a region. Its pages are not given back to the kernel any more.
    pub(super) fn of(region: &Arc<Region>) -> Area {
        region.set_registered();
        Area { keep: Some(Arc::clone(region)) }
    }

    /// The zeroes that null disks and unwritten blocks read as.
    #[must_use]
    pub fn zeroes() -> Area {
        Area { keep: None }
    }

    /// The first byte.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        match &self.keep {
            Some(region) => region.base(),
            None => zeroes(ZEROES_BYTES).addr,
        }
    }

    /// How many bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.keep {
            Some(region) => region.bytes(),
            None => ZEROES_BYTES as usize,
        }
    }

    /// Have all of it on the pages that it asked for, as well as the kernel can, before a device takes it.
    /// Not on a reactor core: it takes seconds for a large area.
    #[must_use]
    pub fn settle(&self) -> PageSizes {
        self.keep.as_ref().map_or(PageSizes::Base, |region| region.settle())
    }

    /// A device may write to it.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.keep.is_some()
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
