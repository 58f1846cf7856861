//! Which key opens which memory: all that is registered with one device, as one core looks it up.

use std::cell::Cell;
use std::sync::{Arc, Weak};

use spindle_rdma_verbs::{Access, Device, MemoryRegion, VerbsError};
use spindle_reactor::clock::Nanos;
use spindle_reactor::lock::Lock;
use spindle_reactor::mem::Area;

use super::lost::DiskArea;
use super::used::{Marks, settle_one};

/// A device, and what is registered with it: shared by all cores, so that memory they share is registered
/// once.
#[derive(Debug)]
pub struct SharedDevice {
    device: Arc<Device>,
    regions: Lock<Vec<Weak<MemoryRegion>>>,
    marks: Marks,
}

impl SharedDevice {
    pub(super) fn of(device: Arc<Device>) -> Arc<SharedDevice> {
        Arc::new(SharedDevice { device, regions: Lock::new(Vec::new()), marks: Marks::default() })
    }

    /// All RDMA devices of the machine; each time anew, without what others have registered with them.
    pub(super) fn all() -> Result<Vec<Arc<SharedDevice>>, VerbsError> {
        Ok(Device::all()?.into_iter().map(SharedDevice::of).collect())
    }

    pub(super) fn marks(&self) -> &Marks {
        &self.marks
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
        let base = area.base().as_ptr() as usize;
        if let Some(region) = self.known(base) {
            return Ok(region);
        }
        // Not under the lock: it takes seconds for a large disk, and other cores register small areas. Two
        // that register the same at once both may; the first is kept.
        // Hosts' data comes in by READs.
        let read_access = self.device.limits().read_access();
        let access = if area.is_writable() { read_access } else { Access::LOCAL_READ };
        let region = Arc::new(self.device.register(area.clone(), access)?);
        let mut regions = self.regions.lock();
        let known = regions.iter().filter_map(Weak::upgrade).find(|region| region.base() == base);
        if let Some(known) = known {
            drop(regions);
            return Ok(known);
        }
        regions.push(Arc::downgrade(&region));
        Ok(region)
    }

    fn known(&self, base: usize) -> Option<Arc<MemoryRegion>> {
        let mut regions = self.regions.lock();
        regions.retain(|region| region.strong_count() > 0);
        regions.iter().filter_map(Weak::upgrade).find(|region| region.base() == base)
    }
}

/// Disks whose memory is registered with devices: while this is there, a core that registers it finds it
/// done.
#[derive(Debug)]
pub struct RegisteredDisks {
    disks: Vec<DiskArea>,
    _regions: Vec<Arc<MemoryRegion>>,
}

impl RegisteredDisks {
    /// Register the memory of `disks` with those of the devices that are used and still there. Takes seconds
    /// for large disks, so not on a core that serves. What fails is left to the cores, which say so and try
    /// again.
    #[must_use]
    pub fn register(devices: &[Weak<SharedDevice>], disks: Vec<DiskArea>) -> RegisteredDisks {
        let mut regions = Vec::new();
        let devices = devices.iter().filter_map(Weak::upgrade);
        let devices: Vec<_> = devices.filter(|it| it.is_used() && !it.is_left_out()).collect();
        if !devices.is_empty() {
            disks.iter().for_each(|disk| settle_one(&format_args!("disk {}", disk.name), &disk.area));
        }
        for device in devices {
            regions.extend(disks.iter().filter_map(|disk| device.register(&disk.area).ok()));
        }
        RegisteredDisks { disks, _regions: regions }
    }

    /// Which disks they are.
    #[must_use]
    pub fn disks(&self) -> &[DiskArea] {
        &self.disks
    }

    /// Bytes of them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.disks.iter().map(|disk| disk.area.bytes() as u64).sum()
    }
}

/// Longer than a device takes to give a transfer up.
const RETIRED_FOR: Nanos = Nanos::from_secs(30);

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
    /// Of disks that are gone, and since when: their data may still be on the wire.
    retired: Vec<(Range, Option<Nanos>)>,
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
    pub(super) fn retain_disks(&mut self, keep: &[DiskArea]) {
        self.last.set(0);
        let is_gone = |range: &mut Range| {
            range.is_disk && keep.iter().all(|disk| disk.area.base().as_ptr() as usize != range.start)
        };
        self.retired.extend(self.ranges.extract_if(.., is_gone).map(|range| (range, None)));
    }

    /// Let go of memory of disks that have been gone for so long that nothing of theirs is on the wire.
    pub(super) fn purge(&mut self, now: Nanos) {
        self.retired.retain_mut(|(_, since)| now < *since.get_or_insert(now) + RETIRED_FOR);
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
        let Some(at) = self.ranges.iter().position(|range| is_in(&range)) else {
            return self.retired.iter().map(|(range, _)| range).find(is_in).map(|range| range.key);
        };
        self.last.set(at);
        self.ranges.get(at).map(|range| range.key)
    }
}
