//! [`Table`]: the DMA mappings of a container.
//!
//! All drives of a process share one container, so an area that several drives map (each core's pool) is
//! mapped and pinned once. The first mapping allocates an IOVA; the others share it.

use std::collections::BTreeMap;
use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;

use spindle_reactor::lock::Lock;
use spindle_reactor::mem::Area;

use super::iova::IovaSpace;
use crate::dma::Iova;
use crate::function::Mapping;

/// Executes mappings. Implemented by the kernel's container and by a test double.
pub(super) trait Iommu: Send + Sync {
    /// Maps an area at `iova`, for all drives.
    fn map(&self, iova: u64, area: &Area) -> io::Result<()>;

    fn unmap(&self, iova: u64, bytes: usize) -> io::Result<()>;
}

pub(super) struct Table<I> {
    iommu: I,
    state: Lock<IovaTableState>,
}

struct IovaTableState {
    space: IovaSpace,
    /// Mapped areas by address and length in bytes.
    areas: BTreeMap<(usize, usize), MappedArea>,
}

struct MappedArea {
    iova: u64,
    /// Number of [`Mapped`] values. 0 if unmapping failed. The entry then stays, so that neither its IOVA nor
    /// its memory is reused.
    uses: usize,
    _area: Area,
}

impl<I: Iommu + 'static> Table<I> {
    pub(super) fn new(iommu: I) -> Arc<Table<I>> {
        let state = IovaTableState { space: IovaSpace::new(), areas: BTreeMap::new() };
        Arc::new(Table { iommu, state: Lock::new(state) })
    }

    pub(super) fn iommu(&self) -> &I {
        &self.iommu
    }

    pub(super) fn set_ranges(&self, ranges: Vec<RangeInclusive<u64>>) {
        self.state.lock().space.set_ranges(ranges);
    }

    /// Closes the container's last group with `close`; the kernel then removes all mappings. `close` runs
    /// under the lock, so that nothing is unmapped meanwhile. Later drops of [`Mapped`] have no effect.
    pub(super) fn detach(&self, close: impl FnOnce()) {
        let mut state = self.state.lock();
        close();
        let forgotten = std::mem::take(&mut state.areas);
        drop(state);
        drop(forgotten);
    }

    /// Maps an area until the result is dropped.
    ///
    /// # Errors
    /// The system's error; no IOVA range is free; or an earlier mapping of the area was not removed.
    pub(super) fn map(self: &Arc<Self>, area: &Area) -> io::Result<Mapped<I>> {
        let key = (area.base().addr().get(), area.bytes());
        let mut state = self.state.lock();
        if let Some(mapped) = state.areas.get_mut(&key)
            && mapped.uses > 0
        {
            mapped.uses += 1;
            return Ok(Mapped { table: Arc::clone(self), key, iova: mapped.iova });
        }
        if state.areas.contains_key(&key) {
            return Err(io::Error::other("it is still mapped: an earlier unmap failed"));
        }
        let Some(iova) = state.space.allocate(key.1 as u64) else {
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, "the IOMMU has no addresses left"));
        };
        if let Err(error) = self.iommu.map(iova, area) {
            state.space.free(iova);
            return Err(error);
        }
        state.areas.insert(key, MappedArea { iova, uses: 1, _area: area.clone() });
        Ok(Mapped { table: Arc::clone(self), key, iova })
    }

    fn unmap(&self, key: (usize, usize)) {
        let mut state = self.state.lock();
        // The entry is missing after `detach`.
        let Some(mapped) = state.areas.get_mut(&key) else { return };
        mapped.uses = mapped.uses.saturating_sub(1);
        if mapped.uses > 0 {
            return;
        }
        let iova = mapped.iova;
        match self.iommu.unmap(iova, key.1) {
            Ok(()) => {
                state.space.free(iova);
                state.areas.remove(&key);
            }
            Err(error) => {
                tracing::error!(
                    %error,
                    iova,
                    bytes = key.1,
                    "cannot unmap memory from the IOMMU: it stays mapped and allocated"
                );
            }
        }
    }
}

/// One use of a mapped area. Keeps the container's table alive, not the drive.
pub(super) struct Mapped<I: Iommu + 'static> {
    table: Arc<Table<I>>,
    key: (usize, usize),
    iova: u64,
}

impl<I: Iommu> Mapping for Mapped<I> {
    fn iova(&self) -> Iova {
        Iova(self.iova)
    }
}

impl<I: Iommu + 'static> Drop for Mapped<I> {
    fn drop(&mut self) {
        self.table.unmap(self.key);
    }
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mem::Pages;

    use super::super::iova::ALIGN;
    use super::*;

    /// An IOMMU that writes down what it was told, and refuses when it is to.
    #[derive(Default)]
    struct Noted {
        calls: Lock<Vec<(&'static str, u64)>>,
        refuses: Lock<bool>,
    }

    impl Noted {
        fn note(&self, call: &'static str, iova: u64) -> io::Result<()> {
            self.calls.lock().push((call, iova));
            if *self.refuses.lock() { Err(io::Error::from_raw_os_error(libc::ENOMEM)) } else { Ok(()) }
        }
    }

    impl Iommu for Noted {
        fn map(&self, iova: u64, _: &Area) -> io::Result<()> {
            self.note("map", iova)
        }

        fn unmap(&self, iova: u64, _: usize) -> io::Result<()> {
            self.note("unmap", iova)
        }
    }

    fn table() -> Arc<Table<Noted>> {
        let table = Table::new(Noted::default());
        table.set_ranges(vec![0..=(1 << 39) - 1]);
        table
    }

    fn area() -> Area {
        Area::map(1, Pages::Base).expect("memory")
    }

    fn calls(table: &Table<Noted>) -> Vec<(&'static str, u64)> {
        table.iommu.calls.lock().clone()
    }

    #[test]
    fn an_area_that_two_drives_map_is_mapped_once_and_unmapped_with_the_last() {
        let (table, area, other) = (table(), area(), area());
        let first = table.map(&area).expect("maps");
        let second = table.map(&area.clone()).expect("maps");
        let third = table.map(&other).expect("maps");
        assert_eq!((first.iova(), second.iova(), third.iova()), (Iova(ALIGN), Iova(ALIGN), Iova(2 * ALIGN)));
        drop(first);
        assert_eq!(calls(&table), [("map", ALIGN), ("map", 2 * ALIGN)]);
        drop(second);
        drop(third);
        assert_eq!(calls(&table)[2..], [("unmap", ALIGN), ("unmap", 2 * ALIGN)]);
        // And its address is free again.
        assert_eq!(table.map(&other).expect("maps").iova(), Iova(ALIGN));
    }

    #[test]
    fn a_mapping_that_outlives_its_container_is_harmless() {
        let (table, area) = (table(), area());
        let mapping = table.map(&area).expect("maps");
        // A mapping that another thread drops meanwhile waits.
        table.detach(|| assert!(table.state.try_lock().is_none()));
        drop(mapping);
        assert_eq!(calls(&table), [("map", ALIGN)]);
    }

    #[test]
    fn a_mapped_area_stays_though_its_owner_lets_go_and_goes_when_the_drives_have() {
        let (table, area) = (table(), area());
        let mapping = table.map(&area).expect("maps");
        let base = area.base();
        drop(area);
        // Its place is not given to another area, which would then be taken for it.
        assert_ne!(Area::map(1, Pages::Base).expect("memory").base(), base);
        table.detach(|| {});
        assert!(table.state.lock().areas.is_empty());
        drop(mapping);
    }

    #[test]
    fn what_the_system_refuses_leaves_nothing_behind() {
        let (table, area) = (table(), area());
        *table.iommu.refuses.lock() = true;
        let error = table.map(&area).err().expect("is refused");
        assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
        *table.iommu.refuses.lock() = false;
        assert_eq!(table.map(&area).expect("maps").iova(), Iova(ALIGN));
    }

    #[test]
    fn memory_that_cannot_be_unmapped_is_kept_and_its_address_is_given_to_nobody() {
        let (table, area) = (table(), area());
        let mapping = table.map(&area).expect("maps");
        *table.iommu.refuses.lock() = true;
        drop(mapping);
        *table.iommu.refuses.lock() = false;
        assert!(table.map(&area).is_err());
        assert_eq!(table.map(&super::tests::area()).expect("maps").iova(), Iova(2 * ALIGN));
    }

    #[test]
    fn a_table_without_addresses_says_so() {
        let table = Table::new(Noted::default());
        let error = table.map(&area()).err().expect("is refused");
        assert_eq!(error.to_string(), "the IOMMU has no addresses left");
        assert_eq!(calls(&table), []);
    }
}
