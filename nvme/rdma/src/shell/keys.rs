//! Memory registered with devices: [`SharedDevice`], the list of these ([`KnownDevices`]), disks registered
//! in advance ([`RegisteredDisks`]), and one core's lookup of the local key of an address (`KeyTable`).

use std::cell::Cell;
use std::fmt::Debug;
use std::sync::{Arc, Weak};

use spindle_rdma::{Access, CmId, Device, DeviceLimits, MemoryRegion, VerbsError};
use spindle_reactor::lock::Lock;
use spindle_reactor::mem::Area;

use super::device_events::DiskArea;
use super::ready::leave_pollers;
use super::used::{DeviceFlags, collapse_area};

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

    /// Registers all of `area`. The drop of the region deregisters it.
    fn register(self: &Arc<Self>, area: Area, access: Access) -> Result<Self::Region, VerbsError>;

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

    fn register(self: &Arc<Self>, area: Area, access: Access) -> Result<MemoryRegion, VerbsError> {
        Device::register(self, area, access)
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

/// A device and its memory registrations. All cores share the registrations, so that shared memory is
/// registered once.
#[derive(Debug)]
pub struct SharedDevice<D: Registers = Device> {
    device: Arc<D>,
    /// Base address and registration of each registered area.
    regions: Lock<Vec<(usize, Weak<D::Region>)>>,
    flags: DeviceFlags,
}

impl<D: Registers> SharedDevice<D> {
    pub(super) fn of(device: Arc<D>) -> Arc<SharedDevice<D>> {
        Arc::new(SharedDevice { device, regions: Lock::new(Vec::new()), flags: DeviceFlags::default() })
    }

    pub(super) fn flags(&self) -> &DeviceFlags {
        &self.flags
    }

    /// Returns the RDMA device, which stays open while a reference to it exists.
    #[must_use]
    pub fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// Returns the registration of an area: the existing one, or a new one.
    ///
    /// # Errors
    /// The error of `ibv_reg_mr`; ENOMEM if the process may not lock so much memory (`ulimit -l`).
    pub fn register(&self, area: &Area) -> Result<Arc<D::Region>, VerbsError> {
        let base = area.base().as_ptr() as usize;
        if let Some(region) = find(&mut self.regions.lock(), base) {
            return Ok(region);
        }
        // Registers without the lock: a large disk takes seconds, and other cores register small areas
        // meanwhile. If two threads register the same area at once, the first registration is kept. Writable
        // memory is registered as a destination of READs, which fetch the data of writes.
        let read_access = self.device.limits().read_access();
        let access = if area.is_writable() { read_access } else { Access::LOCAL_READ };
        let region = Arc::new(self.device.register(area.clone(), access)?);
        let mut regions = self.regions.lock();
        if let Some(known) = find(&mut regions, base) {
            drop(regions);
            return Ok(known);
        }
        regions.push((base, Arc::downgrade(&region)));
        Ok(region)
    }
}

/// Returns the registration of the area at `base`, if any. Removes entries of dropped registrations.
fn find<R>(regions: &mut Vec<(usize, Weak<R>)>, base: usize) -> Option<Arc<R>> {
    regions.retain(|(_, region)| region.strong_count() > 0);
    regions.iter().filter(|(its, _)| *its == base).find_map(|(_, region)| region.upgrade())
}

/// All devices with which memory may be registered: found at the start or later. Shared by the core that
/// opens new devices and the thread that registers the disks of a reload. Contains weak references.
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

    /// Adds a device unless the list contains it. Removes closed devices.
    pub(super) fn add(&self, device: &Arc<SharedDevice<D>>) {
        let mut known = self.0.lock();
        known.retain(|it| it.strong_count() > 0);
        if known.iter().all(|it| it.as_ptr() != Arc::as_ptr(device)) {
            known.push(Arc::downgrade(device));
        }
    }

    /// Returns a device in use that is neither lost nor in `done`; `None` if there is none.
    fn next(&self, done: &[Weak<SharedDevice<D>>]) -> Option<Arc<SharedDevice<D>>> {
        // Upgrades a copy without the lock, as dropping the last reference closes the device.
        let known = self.0.lock().clone();
        let mut others = known.iter().filter(|it| done.iter().all(|done| !done.ptr_eq(it)));
        others.find_map(|it| it.upgrade().filter(|it| it.is_in_use() && !it.device().is_lost()))
    }
}

impl KnownDevices<Device> {
    /// Returns the device to which `id` is bound; `None` if no core uses it, or it is lost.
    #[must_use]
    pub fn device_of(&self, id: &CmId) -> Option<Arc<Device>> {
        // Not under the lock: dropping the last reference closes the device.
        let known = self.0.lock().clone();
        let devices = known.iter().filter_map(Weak::upgrade).map(|it| Arc::clone(it.device()));
        devices.into_iter().find(|device| !device.is_lost() && device.is_of(id))
    }
}

/// Registrations of disks. While this exists, cores that register the same disks find them registered.
#[derive(Debug)]
pub struct RegisteredDisks<D: Registers = Device> {
    disks: Vec<DiskArea>,
    regions: Vec<Arc<D::Region>>,
}

impl<D: Registers> RegisteredDisks<D> {
    /// Registers the memory of `disks` with all devices in use. Takes seconds for large disks: never call it
    /// on a reactor core. Failures are ignored; the cores log and retry them.
    #[must_use]
    pub fn register(devices: &KnownDevices<D>, disks: Vec<DiskArea>) -> RegisteredDisks<D> {
        let (mut regions, mut done) = (Vec::new(), Vec::new());
        // A device that is found meanwhile may be opened before its core receives these disks, so the disks
        // are registered with that device too.
        while let Some(device) = devices.next(&done) {
            if done.is_empty() {
                disks.iter().for_each(|disk| collapse_area(&format_args!("disk {}", disk.name), &disk.area));
            }
            regions.extend(disks.iter().filter_map(|disk| device.register(&disk.area).ok()));
            done.push(Arc::downgrade(&device));
        }
        RegisteredDisks { disks, regions }
    }

    /// Returns the disks passed to [`RegisteredDisks::register`].
    #[must_use]
    pub fn disks(&self) -> &[DiskArea] {
        &self.disks
    }

    /// Returns true if memory was registered with a device; false while no device is in use.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        !self.regions.is_empty()
    }

    /// Returns the total size of the disks in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.disks.iter().map(|disk| disk.area.bytes() as u64).sum()
    }
}

#[derive(Debug)]
struct Range<R> {
    start: usize,
    end: usize,
    key: u32,
    /// True for the memory of a disk, which a reload may remove; false for a pool.
    is_disk: bool,
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

impl<R> Default for KeyTable<R> {
    fn default() -> Self {
        KeyTable { ranges: Vec::new(), retired: Vec::new(), last: Cell::new(0) }
    }
}

impl<R: Registered> KeyTable<R> {
    pub(super) fn add(&mut self, region: Arc<R>, is_disk: bool) {
        let start = region.area().base().as_ptr() as usize;
        let end = start + region.area().bytes();
        let range = Range { start, end, key: region.local_key(), is_disk, region };
        if self.ranges.iter().all(|known| known.start != start) {
            self.ranges.push(range);
        }
    }

    /// Retires the memory of disks that are not in `keep`.
    pub(super) fn retain_disks(&mut self, keep: &[DiskArea]) {
        self.last.set(0);
        let is_gone = |range: &mut Range<R>| {
            range.is_disk && keep.iter().all(|disk| disk.area.base().as_ptr() as usize != range.start)
        };
        self.retired.extend(self.ranges.extract_if(.., is_gone));
    }

    /// Removes and returns the registrations of retired memory that nothing uses any more. A transfer in
    /// flight keeps the buffer that it names, on whichever core, until its last work request has completed
    /// or its queue pair is destroyed, and the buffer keeps the disk's memory in use. So no time-out is
    /// needed.
    pub(super) fn take_unused(&mut self) -> Vec<Arc<R>> {
        let is_unused = |range: &mut Range<R>| !range.region.area().is_in_use();
        self.retired.extract_if(.., is_unused).map(|range| range.region).collect()
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

/// Ends the registrations whose last user this core was, on a thread of its own: that unpins as much memory
/// as registering pins, and then unmaps it.
pub(super) fn deregister<R: Registered>(regions: Vec<Arc<R>>) {
    let last: Vec<R> = regions.into_iter().filter_map(Arc::into_inner).collect();
    if last.is_empty() {
        return;
    }
    let run = || {
        leave_pollers();
        drop(last);
    };
    // Without a thread it is done here, as the closure is dropped.
    let _ = std::thread::Builder::new().name("deregister".to_owned()).spawn(run);
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mem::{FrameStore, Pages, SealedFrames};

    use super::*;
    use crate::shell::fake::{Fake, fake, fake_iwarp};

    #[test]
    fn memory_is_registered_with_the_access_that_the_device_needs_for_reads() {
        let own = Area::map(1, Pages::Base).expect("memory");
        let remote = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        for (device, expected) in [(fake("ib"), Access::LOCAL_WRITE), (fake_iwarp("iw"), remote)] {
            let shared = SharedDevice::of(device);
            for area in [&own, &Area::zeroes()] {
                shared.register(area).expect("registered");
            }
            let asked: Vec<_> = shared.device().registrations().iter().map(|it| it.access).collect();
            assert_eq!(asked, [expected, Access::LOCAL_READ], "the zeroes are only read");
        }
    }

    #[test]
    fn memory_is_registered_once_for_all_cores_and_anew_when_all_have_let_it_go() {
        let shared = SharedDevice::of(fake("ib"));
        let areas = [(); 2].map(|()| Area::map(1, Pages::Base).expect("memory"));
        let held = shared.register(&areas[0]).expect("registered");
        assert!(Arc::ptr_eq(&held, &shared.register(&areas[0]).expect("known")));
        assert!(!Arc::ptr_eq(&held, &shared.register(&areas[1]).expect("registered")));
        assert_eq!(shared.device().registrations().len(), 2);
        drop(held);
        assert_eq!(shared.device().registered(), 0);
        shared.register(&areas[0]).expect("registered");
        assert_eq!(shared.device().registrations().len(), 3);
    }

    /// The memory of a RAM disk, and its registration in the tables of two cores.
    #[test]
    fn a_removed_disk_is_deregistered_once_no_transfer_names_it() {
        let shared = SharedDevice::of(fake("ib"));
        let store = FrameStore::new(1 << 20, 1 << 20, Pages::Base, false).expect("memory");
        let disk = DiskArea { name: "d".to_owned(), area: store.area() };
        let mut tables = [(); 2].map(|()| KeyTable::default());
        for table in &mut tables {
            table.add(shared.register(&disk.area).expect("registered"), true);
        }
        drop(disk);
        let watch = store.memory_watch();
        // What a chain has of a read whose WRITE is posted; the core has closed the disk.
        let core = store.core();
        let in_flight = core.take(0, 4096).expect("a frame");
        tables.iter_mut().for_each(|table| table.retain_disks(&[]));
        drop((store, core));
        for table in &mut tables {
            assert!(table.take_unused().is_empty(), "a transfer names it");
            assert!(table.key(in_flight.as_slice().expect("one segment")).is_some(), "and finds its key");
        }
        drop(in_flight);
        let [first, second] = tables.each_mut().map(KeyTable::take_unused);
        assert_eq!((first.len(), second.len()), (1, 1));
        deregister(first);
        assert_eq!(shared.device().registered(), 1, "the other core has it");
        deregister(second);
        while shared.device().registered() > 0 || watch.resident().is_some() {
            std::thread::yield_now();
        }
        assert!(tables.iter_mut().all(|table| table.take_unused().is_empty()));
    }

    fn used(name: &'static str) -> Arc<SharedDevice<Fake>> {
        let device = SharedDevice::of(fake(name));
        device.set_used();
        device
    }

    fn disk() -> Vec<DiskArea> {
        vec![DiskArea { name: "d".to_owned(), area: Area::map(1, Pages::Base).expect("memory") }]
    }

    #[test]
    fn a_disk_that_a_reload_adds_is_registered_with_a_device_that_has_come_and_not_with_one_that_is_gone() {
        let (first, late) = (used("first"), used("late"));
        let known = KnownDevices::new(std::slice::from_ref(&first));
        first.device().set_lost();
        let shells = known.clone();
        shells.add(&late);
        shells.add(&late);
        let registered = RegisteredDisks::register(&known, disk());
        assert_eq!((first.device().registered(), late.device().registrations().len()), (0, 1));
        // As a core does on the reload, or when it opens the device.
        drop(late.register(&registered.disks()[0].area).expect("known"));
        assert_eq!(late.device().registrations().len(), 1);
    }

    #[test]
    fn a_device_that_comes_while_disks_are_registered_gets_them_too() {
        let (first, late) = (used("first"), used("late"));
        let known = KnownDevices::new(std::slice::from_ref(&first));
        let gate = first.device().close();
        let its = known.clone();
        let thread = std::thread::spawn(move || RegisteredDisks::register(&its, disk()));
        while !first.device().is_waited_at() {
            std::thread::yield_now();
        }
        known.add(&late);
        drop(gate);
        let _registered = thread.join().expect("no panic");
        assert_eq!((first.device().registered(), late.device().registered()), (1, 1));
    }

    #[test]
    fn the_list_keeps_no_device_and_forgets_those_that_are_gone() {
        let (first, late) = (used("first"), used("late"));
        let known = KnownDevices::new(std::slice::from_ref(&first));
        drop(first);
        assert!(known.next(&[]).is_none());
        known.add(&late);
        assert_eq!(known.0.lock().len(), 1);
    }
}
