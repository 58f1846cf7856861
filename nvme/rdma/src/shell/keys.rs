//! Devices that all cores share ([`SharedDevice`]), the list of these ([`KnownDevices`]), and one core's
//! lookup of the local key of an address (`KeyTable`).

use std::cell::Cell;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use spindle_rdma::{Access, CmId, Device, DeviceLimits, MemoryRegion, RegisterPermit, VerbsError};
use spindle_reactor::lock::Lock;
use spindle_reactor::mem::Area;

use super::registrar::SharedRegion;

/// A registration of all of an area; its drop deregisters the memory. Tests implement it without libibverbs.
pub trait Registered: Debug + Send + Sync + 'static {
    /// Returns the memory.
    fn area(&self) -> &Area;

    /// Returns the local key.
    fn local_key(&self) -> u32;
}

impl Registered for MemoryRegion {
    fn area(&self) -> &Area {
        MemoryRegion::area(self)
    }

    fn local_key(&self) -> u32 {
        MemoryRegion::local_key(self)
    }
}

/// The operations of a device that registration needs; tests implement them without libibverbs.
pub trait Registers: Debug + Send + Sync + Sized + 'static {
    /// A registration.
    type Region: Registered;

    /// Returns the name as in /sys/class/infiniband, for the log.
    fn name(&self) -> &str;

    /// Returns the limits of the device. [`DeviceLimits::read_access`] determines the access flags.
    fn limits(&self) -> &DeviceLimits;

    /// Returns the serial number, unique in the process.
    fn serial(&self) -> u64;

    /// Registers all of `area`. The drop of the region deregisters it.
    fn register(
        self: &Arc<Self>,
        permit: &RegisterPermit,
        area: Area,
        access: Access,
    ) -> Result<Self::Region, VerbsError>;

    /// Returns true while the kernel lists the device.
    fn is_listed(&self) -> bool;

    /// Marks the device as lost. Returns true on the first call only.
    fn set_lost(&self) -> bool;

    /// Returns true after [`Registers::set_lost`].
    fn is_lost(&self) -> bool;
}

impl Registers for Device {
    type Region = MemoryRegion;

    fn name(&self) -> &str {
        Device::name(self)
    }

    fn limits(&self) -> &DeviceLimits {
        Device::limits(self)
    }

    fn serial(&self) -> u64 {
        Device::serial(self)
    }

    fn register(
        self: &Arc<Self>,
        permit: &RegisterPermit,
        area: Area,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        Device::register(self, permit, area, access)
    }

    fn is_listed(&self) -> bool {
        Device::is_listed(self)
    }

    fn set_lost(&self) -> bool {
        Device::set_lost(self)
    }

    fn is_lost(&self) -> bool {
        Device::is_lost(self)
    }
}

/// A device, shared by all cores and the registrar.
#[derive(Debug)]
pub struct SharedDevice<D: Registers = Device> {
    device: Arc<D>,
    is_used: AtomicBool,
    /// A listener is bound to this device, so the start fails if a pool cannot be registered with it.
    is_needed: AtomicBool,
}

impl<D: Registers> SharedDevice<D> {
    pub(super) fn of(device: Arc<D>) -> Arc<SharedDevice<D>> {
        Arc::new(SharedDevice { device, is_used: AtomicBool::default(), is_needed: AtomicBool::default() })
    }

    /// Returns the RDMA device, which stays open while a reference to it exists.
    #[must_use]
    pub fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// Returns true if memory is registered with the device and cores create queues on it.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Relaxed)
    }

    /// Marks the device as used. The first call logs a warning for an iWARP device.
    pub(super) fn set_used(&self) {
        if !self.is_used.swap(true, Ordering::Relaxed) && self.device.limits().is_iwarp {
            let device = self.device.name();
            tracing::warn!(
                device,
                "iWARP: hosts that connect over this device are able to write to all data in memory"
            );
        }
    }

    pub(super) fn is_needed(&self) -> bool {
        self.is_needed.load(Ordering::Relaxed)
    }

    pub(super) fn set_needed(&self) {
        self.is_needed.store(true, Ordering::Relaxed);
    }

    /// Marks the device as lost. Returns true on the first call only, which logs the loss of a used device.
    pub(super) fn set_lost(&self) -> bool {
        let is_first = self.device.set_lost();
        if is_first && self.is_used() {
            let device = self.device.name();
            tracing::error!(
                device,
                "RDMA device gone: its connections end; it is used again when it returns"
            );
        }
        is_first
    }

    /// Registers an area. Writable memory is registered as a destination of READs, which fetch the data of
    /// writes.
    pub(super) fn register(&self, permit: &RegisterPermit, area: &Area) -> Result<D::Region, VerbsError> {
        let read_access = self.device.limits().read_access();
        let access = if area.is_writable() { read_access } else { Access::LOCAL_READ };
        self.device.register(permit, area.clone(), access)
    }
}

/// The devices that were found at the start or later. Contains weak references: the registrar and the cores
/// own the devices.
#[derive(Debug)]
pub struct KnownDevices<D: Registers = Device>(Arc<Lock<Vec<Weak<SharedDevice<D>>>>>);

impl<D: Registers> Clone for KnownDevices<D> {
    fn clone(&self) -> Self {
        KnownDevices(Arc::clone(&self.0))
    }
}

impl<D: Registers> KnownDevices<D> {
    /// Creates a list of `devices`, which may be empty.
    #[must_use]
    pub fn new(devices: &[Arc<SharedDevice<D>>]) -> KnownDevices<D> {
        KnownDevices(Arc::new(Lock::new(devices.iter().map(Arc::downgrade).collect())))
    }

    /// Adds a device. Removes closed devices.
    pub(super) fn add(&self, device: &Arc<SharedDevice<D>>) {
        let mut known = self.0.lock();
        known.retain(|it| it.strong_count() > 0);
        known.push(Arc::downgrade(device));
    }

    /// Returns the devices that are not lost.
    fn present(&self) -> impl Iterator<Item = Arc<SharedDevice<D>>> {
        // Not under the lock: dropping the last reference closes the device.
        let known = self.0.lock().clone();
        known.into_iter().filter_map(|it| it.upgrade()).filter(|it| !it.device().is_lost())
    }

    /// Returns true if a device is used.
    pub(super) fn is_any_used(&self) -> bool {
        self.present().any(|it| it.is_used())
    }

    #[cfg(test)]
    pub(super) fn use_all(&self) {
        self.present().for_each(|it| it.set_used());
    }
}

impl KnownDevices<Device> {
    fn find(&self, id: &CmId) -> Option<Arc<SharedDevice>> {
        self.present().find(|it| it.device().is_of(id))
    }

    /// Returns the device to which `id` is bound; `None` if it is not known or lost.
    #[must_use]
    pub fn device_of(&self, id: &CmId) -> Option<Arc<Device>> {
        self.find(id).map(|it| Arc::clone(it.device()))
    }

    /// Marks the device to which `id` is bound as used, for the registrar. Returns false if it is not known
    /// or lost.
    pub(super) fn use_device_of(&self, id: &CmId) -> bool {
        self.find(id).inspect(|it| it.set_used()).is_some()
    }
}

#[derive(Debug)]
struct Range<R> {
    start: usize,
    end: usize,
    key: u32,
    region: Arc<R>,
}

/// One core's table of the memory registered with one device.
#[derive(Debug)]
pub(super) struct KeyTable<R = MemoryRegion> {
    ranges: Vec<Range<R>>,
    /// Ranges of removed disks: commands that have begun may still use them.
    retired: Vec<Range<R>>,
    /// Index of the range that matched last. Most lookups match the same range again.
    last: Cell<usize>,
}

impl<R: Registered> KeyTable<R> {
    pub(super) fn new(regions: Vec<SharedRegion<R>>) -> Self {
        let mut table = KeyTable { ranges: Vec::new(), retired: Vec::new(), last: Cell::new(0) };
        table.set(regions);
        table
    }

    /// Replaces the registrations. Retires the memory that is not in `regions`.
    pub(super) fn set(&mut self, regions: Vec<SharedRegion<R>>) {
        self.last.set(0);
        let is_gone = |range: &mut Range<R>| regions.iter().all(|it| it.base() != range.start);
        self.retired.extend(self.ranges.extract_if(.., is_gone));
        for it in regions {
            let start = it.base();
            if self.ranges.iter().all(|known| known.start != start) {
                let (end, key) = (start + it.region.area().bytes(), it.region.local_key());
                self.ranges.push(Range { start, end, key, region: it.region });
            }
        }
    }

    /// Drops the registrations of retired memory that nothing uses any more. A transfer in flight keeps the
    /// buffer that it names, on whichever core, until its last work request has completed or its queue pair
    /// is destroyed, and the buffer keeps the disk's memory in use. So no time-out is needed.
    pub(super) fn drop_unused(&mut self) {
        self.retired.retain(|range| range.region.area().is_in_use());
    }

    /// Returns the local key of memory that lies within one registration, retired ones included; `None` if
    /// there is no such registration.
    #[inline]
    pub(super) fn key(&self, memory: &[u8]) -> Option<u32> {
        let start = memory.as_ptr() as usize;
        let end = start + memory.len();
        let is_in = |range: &&Range<R>| range.start <= start && end <= range.end;
        if let Some(range) = self.ranges.get(self.last.get()).filter(is_in) {
            return Some(range.key);
        }
        let Some(at) = self.ranges.iter().position(|range| is_in(&range)) else {
            return self.retired.iter().find(is_in).map(|range| range.key);
        };
        self.last.set(at);
        self.ranges.get(at).map(|range| range.key)
    }
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mem::{FrameStore, Pages, SealedFrames};

    use super::*;
    use crate::shell::fake::{Fake, FakeRegion, fake, fake_iwarp};

    fn region(shared: &SharedDevice<Fake>, area: &Area, is_disk: bool) -> SharedRegion<FakeRegion> {
        let permit = RegisterPermit::of_blocking_thread();
        let region = Arc::new(shared.register(&permit, area).expect("registered"));
        SharedRegion { region, is_disk }
    }

    #[test]
    fn memory_is_registered_with_the_access_that_the_device_needs_for_reads() {
        let own = Area::map(1, Pages::Base).expect("memory");
        let remote = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        for (device, expected) in [(fake("ib"), Access::LOCAL_WRITE), (fake_iwarp("iw"), remote)] {
            let shared = SharedDevice::of(device);
            for area in [&own, &Area::zeroes()] {
                region(&shared, area, false);
            }
            let asked: Vec<_> = shared.device().registrations().iter().map(|it| it.access).collect();
            assert_eq!(asked, [expected, Access::LOCAL_READ], "the zeroes are only read");
        }
    }

    /// The memory of a RAM disk, and its registration in the tables of two cores.
    #[test]
    fn a_removed_disk_keeps_its_registration_while_a_transfer_names_its_memory() {
        let shared = SharedDevice::of(fake("ib"));
        let store = FrameStore::new(1 << 20, 1 << 20, Pages::Base, false).expect("memory");
        let disk = region(&shared, &store.area(), true);
        let mut tables = [(); 2].map(|()| KeyTable::new(vec![disk.clone()]));
        // What a chain has of a read whose WRITE is posted; the core has closed the disk.
        let core = store.core();
        let in_flight = core.take(0, 4096).expect("a frame");
        tables.iter_mut().for_each(|table| table.set(Vec::new()));
        drop((store, core));
        for table in &mut tables {
            table.drop_unused();
            assert!(table.key(in_flight.as_slice().expect("one segment")).is_some(), "it finds its key");
        }
        assert_eq!(Arc::strong_count(&disk.region), 3);
        drop(in_flight);
        for (table, left) in tables.iter_mut().zip([2, 1]) {
            table.drop_unused();
            assert_eq!(Arc::strong_count(&disk.region), left);
        }
    }

    #[test]
    fn a_table_has_the_registrations_that_it_was_given_last_and_the_retired_ones() {
        let shared = SharedDevice::of(fake("ib"));
        let areas = [(); 3].map(|()| Area::map(1, Pages::Base).expect("memory"));
        let [pool, first, second] = [0, 1, 2].map(|at| region(&shared, &areas[at], at > 0));
        let mut table = KeyTable::new(vec![pool.clone(), first.clone()]);
        table.set(vec![pool.clone(), second.clone()]);
        assert_eq!((table.ranges.len(), table.retired.len()), (2, 1));
        table.set(vec![pool, second.clone(), first]);
        assert_eq!((table.ranges.len(), table.retired.len()), (3, 1), "a disk that is added again");
        assert_eq!(Arc::strong_count(&second.region), 2, "known ones are not added twice");
    }

    #[test]
    fn the_list_keeps_no_device_and_has_none_that_is_lost() {
        let [first, late] = ["first", "late"].map(|name| SharedDevice::of(fake(name)));
        let known = KnownDevices::new(std::slice::from_ref(&first));
        first.set_used();
        assert!(known.is_any_used());
        first.set_lost();
        assert!(!known.is_any_used());
        drop(first);
        known.add(&late);
        assert_eq!(known.0.lock().len(), 1);
        assert!(!known.is_any_used());
        late.set_used();
        assert!(known.is_any_used());
    }
}
