//! Which key opens which memory: all that is registered with one device, as one core looks it up.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use spindle_rdma_verbs::{Access, Device, MemoryRegion, VerbsError};
use spindle_reactor::mem::Area;

/// A device, and what is registered with it: shared by all cores, so that memory they share is registered
/// once.
#[derive(Debug)]
pub struct SharedDevice {
    device: Arc<Device>,
    regions: Mutex<Vec<Weak<MemoryRegion>>>,
}

impl SharedDevice {
    /// All RDMA devices of the machine.
    ///
    /// # Errors
    /// [`VerbsError`] when there are devices that cannot be opened.
    pub fn all() -> Result<Vec<Arc<SharedDevice>>, VerbsError> {
        let share = |device| Arc::new(SharedDevice { device, regions: Mutex::new(Vec::new()) });
        Ok(Device::all()?.into_iter().map(share).collect())
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The registration of an area: an earlier one, or a new one.
    ///
    /// # Errors
    /// [`VerbsError`], most often because a process may not lock so much memory (`ulimit -l`).
    pub fn register(&self, area: &Area) -> Result<Arc<MemoryRegion>, VerbsError> {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        regions.retain(|region| region.strong_count() > 0);
        let base = area.base().as_ptr() as usize;
        let known = regions.iter().filter_map(Weak::upgrade);
        if let Some(region) = known.into_iter().find(|region| region.base() == base) {
            return Ok(region);
        }
        let access = if area.is_writable() { Access::LOCAL_WRITE } else { Access::LOCAL_READ };
        let region = Arc::new(self.device.register(area.clone(), access)?);
        regions.push(Arc::downgrade(&region));
        Ok(region)
    }
}

#[derive(Debug)]
struct Range {
    start: usize,
    end: usize,
    key: u32,
    /// Of a disk, which may go.
    is_disk: bool,
    _region: Arc<MemoryRegion>,
}

/// One core's view of what is registered with one device.
#[derive(Debug, Default)]
pub(super) struct KeyTable {
    ranges: Vec<Range>,
    /// Where the last answer was found: a core moves data of few regions.
    last: Cell<usize>,
}

impl KeyTable {
    pub(super) fn add(&mut self, region: Arc<MemoryRegion>, is_disk: bool) {
        let start = region.base();
        let range =
            Range { start, end: start + region.bytes(), key: region.local_key(), is_disk, _region: region };
        if self.ranges.iter().all(|known| known.start != start) {
            self.ranges.push(range);
        }
    }

    /// Forget the memory of disks that are not in `keep`.
    pub(super) fn retain_disks(&mut self, keep: &[Area]) {
        self.last.set(0);
        self.ranges.retain(|range| {
            !range.is_disk || keep.iter().any(|area| area.base().as_ptr() as usize == range.start)
        });
    }

    /// The key of memory that is registered as a whole; `None` for memory that is not.
    #[inline]
    pub(super) fn key(&self, memory: &[u8]) -> Option<u32> {
        let start = memory.as_ptr() as usize;
        let end = start + memory.len();
        let is_in = |range: &&Range| range.start <= start && end <= range.end;
        if let Some(range) = self.ranges.get(self.last.get()).filter(is_in) {
            return Some(range.key);
        }
        let at = self.ranges.iter().position(|range| is_in(&range))?;
        self.last.set(at);
        self.ranges.get(at).map(|range| range.key)
    }
}
