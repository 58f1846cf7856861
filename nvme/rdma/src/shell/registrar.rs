//! [`Registrar`]: registers memory with the devices in use and searches for devices, on a thread that may
//! block.
//!
//! ```text
//!   Registrar::new     pools of all cores ──> devices with a listener           (start)
//!   set_memory         disks of the next snapshot ─┐
//!   poll, repeatedly   new, lost, failed devices ──┴─> DeviceMessage::Ready, Lost ──> all cores
//! ```
//! A core opens a device with a [`Ready`], which has the registrations of all memory, and replaces its keys
//! by those of a later [`Ready`] of the same device. So a core never registers a pool or a disk. A disk is
//! registered before a core receives the snapshot with the disk, and stays registered until all cores have
//! dropped its registration: deregistration takes as long as registration, so the registrar drops the last
//! reference.
//!
//! What cannot be registered is logged once and retried every [`RETRY_PERIOD`]: a disk is not served over
//! RDMA meanwhile, and a device without a pool is not used.

use std::sync::Arc;
use std::time::{Duration, Instant};

use spindle_rdma::{Device, Found, RegisterPermit, VerbsError};
use spindle_reactor::mem::Area;

use super::device_events::DeviceMessage;
use super::keys::{KnownDevices, Registered, Registers, SharedDevice};
use super::used::collapse_area;

/// Period of attempts after a failed registration, and least time between two searches that open devices.
const RETRY_PERIOD: Duration = Duration::from_secs(1);
/// Longest time between two such searches.
const SEARCH_PERIOD_MAX: Duration = Duration::from_secs(60);

/// A disk whose memory is the source and destination of RDMA transfers, so that these need no pool buffer.
#[derive(Debug, Clone)]
pub struct DiskArea {
    /// Name in the configuration, for the log.
    pub name: String,
    /// Memory of the disk, to be registered with every device in use.
    pub area: Area,
}

/// A registration, shared by the cores and the registrar.
#[derive(Debug)]
pub(super) struct SharedRegion<R> {
    pub(super) region: Arc<R>,
    /// True for the memory of a disk, which a change may remove; false for a pool.
    pub(super) is_disk: bool,
}

impl<R: Registered> SharedRegion<R> {
    pub(super) fn base(&self) -> usize {
        self.region.area().base().addr().get()
    }
}

impl<R> Clone for SharedRegion<R> {
    fn clone(&self) -> Self {
        SharedRegion { region: Arc::clone(&self.region), is_disk: self.is_disk }
    }
}

/// A device with all memory registered; only a [`Registrar`] creates it.
#[derive(Debug)]
pub struct Ready<D: Registers = Device> {
    pub(super) shared: Arc<SharedDevice<D>>,
    pub(super) regions: Vec<SharedRegion<D::Region>>,
}

impl<D: Registers> Ready<D> {
    /// Returns the registrations that a core needs: its own `areas` and all disks.
    pub(super) fn of_core(&self, areas: &[Area]) -> Vec<SharedRegion<D::Region>> {
        let is_own = |it: &SharedRegion<_>| areas.iter().any(|area| area.base().addr().get() == it.base());
        self.regions.iter().filter(|it| it.is_disk || is_own(it)).cloned().collect()
    }
}

/// Changes of devices for the cores.
#[derive(Debug)]
pub(super) struct Changes<D: Registers> {
    /// Serial numbers of the devices that the kernel does not list any more.
    pub(super) lost: Vec<u64>,
    /// New devices, and those with other memory.
    pub(super) ready: Vec<Arc<Ready<D>>>,
}

/// Memory to be registered with each device in use.
#[derive(Debug)]
struct Memory {
    area: Area,
    /// Name of the disk; `None`: a pool or [`Area::zeroes`].
    disk: Option<String>,
    /// The area was collapsed to huge pages before its first registration. Afterwards a device has pinned
    /// the pages, and they cannot be moved.
    is_collapsed: bool,
}

impl Memory {
    fn base(&self) -> usize {
        self.area.base().addr().get()
    }

    fn collapse(&mut self) {
        if !std::mem::replace(&mut self.is_collapsed, true) {
            match &self.disk {
                Some(disk) => collapse_area(&format_args!("disk {disk}"), &self.area),
                None => collapse_area(&"pool", &self.area),
            }
        }
    }
}

/// A device that is not lost, and its registrations.
#[derive(Debug)]
struct Registration<D: Registers> {
    shared: Arc<SharedDevice<D>>,
    /// Empty: the device is not in use, or a pool could not be registered.
    regions: Vec<SharedRegion<D::Region>>,
    /// The cores lack the current `regions`.
    is_changed: bool,
    /// Disks that could not be registered.
    failed_disks: Vec<String>,
    /// A pool could not be registered.
    has_failed: bool,
    /// The log has the device: it was used at the start, or has a line of its own.
    is_logged: bool,
}

impl<D: Registers> Registration<D> {
    fn new(shared: Arc<SharedDevice<D>>) -> Registration<D> {
        Registration {
            shared,
            regions: Vec::new(),
            is_changed: false,
            failed_disks: Vec::new(),
            has_failed: false,
            is_logged: false,
        }
    }

    fn lacks(&self, memory: &Memory) -> bool {
        self.regions.iter().all(|it| it.base() != memory.base())
    }

    fn add(&mut self, region: Arc<D::Region>, disk: Option<&str>) {
        self.regions.push(SharedRegion { region, is_disk: disk.is_some() });
        self.is_changed = true;
        let failed = self.failed_disks.iter().position(|failed| Some(failed.as_str()) == disk);
        if let Some(at) = failed {
            let (disk, device) = (self.failed_disks.swap_remove(at), self.shared.device().name());
            tracing::info!(disk, device, "memory of the disk is registered: the disk is served over RDMA");
        }
    }

    /// Logs the first of several failures.
    fn log_failure(&mut self, disk: Option<&str>, error: &VerbsError) {
        let device = self.shared.device().name();
        let Some(disk) = disk else {
            if !std::mem::replace(&mut self.has_failed, true) {
                tracing::error!(
                    device,
                    %error,
                    "cannot use RDMA device: cannot register a buffer pool, next attempt in 1 s"
                );
            }
            return;
        };
        if self.failed_disks.iter().all(|failed| failed != disk) {
            tracing::error!(
                disk,
                device,
                %error,
                "cannot register memory of the disk: it is not served over RDMA; next attempt in 1 s"
            );
            self.failed_disks.push(disk.to_owned());
        }
    }
}

/// The search for devices that were never opened.
#[derive(Debug, Default)]
struct Search {
    /// Searches in a row after which a device was left that cannot be opened.
    failed: u32,
    /// Earliest time of the next search; `None`: now.
    next: Option<Instant>,
}

impl Search {
    /// Returns all open devices if the kernel lists one that was never opened. Less and less often, up to
    /// once in [`SEARCH_PERIOD_MAX`], while there is one that cannot be opened: librdmacm may open others
    /// again with each call.
    fn find(&mut self, now: Instant) -> Vec<Arc<Device>> {
        if self.next.is_some_and(|next| now < next) || !Device::is_any_new() {
            return Vec::new();
        }
        // An error is ignored, as a device may be appearing or disappearing; the search is repeated.
        let Found { devices, failed } = Device::find().unwrap_or_default();
        for (device, error) in failed.iter().filter(|_| self.failed == 0) {
            tracing::error!(device, %error, "cannot open RDMA device, retrying");
        }
        self.ended(now, Device::is_any_new());
        devices
    }

    fn ended(&mut self, now: Instant, is_any_left: bool) {
        self.failed = if is_any_left { self.failed + 1 } else { 0 };
        let period = RETRY_PERIOD * 2_u32.pow(self.failed.saturating_sub(1).min(6));
        self.next = Some(now + period.min(SEARCH_PERIOD_MAX));
    }
}

/// Ends registrations on a thread of their own: that takes as long as to register, and others wait for this
/// thread. Without a thread it is done here, as the closure is dropped.
fn deregister<D: Registers>(regions: Vec<Arc<D::Region>>) {
    if !regions.is_empty() {
        let _ = std::thread::Builder::new().name("deregister".to_owned()).spawn(move || drop(regions));
    }
}

/// Registers memory and searches for devices; see the module documentation.
#[derive(Debug)]
pub struct Registrar<D: Registers = Device> {
    /// The pools of all cores and [`Area::zeroes`], then the disks.
    memory: Vec<Memory>,
    devices: Vec<Registration<D>>,
    known: KnownDevices<D>,
    /// Registrations that are replaced or whose device is lost. Each is dropped once no core has it.
    retired: Vec<Arc<D::Region>>,
    /// A listener is on all addresses, so that each device is used.
    is_on_all: bool,
    next_retry: Instant,
    search: Search,
    permit: RegisterPermit,
}

impl<D: Registers> Registrar<D> {
    /// Registers `pools` with the devices in use. The cores have collapsed their pools if there is such a
    /// device. A device that fails is logged and tried again by [`Registrar::poll`].
    ///
    /// # Errors
    /// A listener is bound to a device that fails, or no device in use can be used.
    pub fn new(
        devices: Vec<Arc<SharedDevice<D>>>,
        known: KnownDevices<D>,
        pools: Vec<Area>,
    ) -> Result<Registrar<D>, String> {
        let is_collapsed = devices.iter().any(|device| device.is_used());
        let memory = pools.into_iter().chain([Area::zeroes()]);
        let now = Instant::now();
        let mut registrar = Registrar {
            memory: memory.map(|area| Memory { area, disk: None, is_collapsed }).collect(),
            devices: devices.into_iter().map(Registration::new).collect(),
            known,
            retired: Vec::new(),
            is_on_all: false,
            next_retry: now + RETRY_PERIOD,
            search: Search::default(),
            permit: RegisterPermit::of_blocking_thread(),
        };
        let mut first_error = None;
        for at in 0..registrar.devices.len() {
            let Err(error) = registrar.register(at, true) else {
                registrar.devices[at].is_logged = registrar.devices[at].shared.is_used();
                continue;
            };
            let shared = &registrar.devices[at].shared;
            let error = format!("{}: {error}", shared.device().name());
            if shared.is_needed() {
                return Err(error);
            }
            first_error.get_or_insert(error);
        }
        let is_any_ready = registrar.devices.iter().any(|it| !it.regions.is_empty());
        first_error.filter(|_| !is_any_ready).map_or(Ok(registrar), Err)
    }

    /// Sets the disks of the next snapshot, and whether it has a listener on all addresses. Registers new
    /// disks. Takes seconds for large disks.
    pub(super) fn change(&mut self, disks: Vec<DiskArea>, is_on_all: bool) -> Changes<D> {
        self.is_on_all = is_on_all;
        let is_in = |base: usize| disks.iter().any(|disk| disk.area.base().addr().get() == base);
        for device in &mut self.devices {
            let removed = device.regions.extract_if(.., |it| it.is_disk && !is_in(it.base()));
            let before = self.retired.len();
            self.retired.extend(removed.map(|it| it.region));
            device.is_changed |= self.retired.len() > before;
            device.failed_disks.retain(|failed| disks.iter().any(|disk| disk.name == *failed));
        }
        self.memory.retain(|memory| memory.disk.is_none() || is_in(memory.base()));
        for DiskArea { name, area } in disks {
            match self.memory.iter_mut().find(|memory| memory.base() == area.base().addr().get()) {
                Some(memory) => memory.disk = Some(name),
                None => self.memory.push(Memory { area, disk: Some(name), is_collapsed: false }),
            }
        }
        Changes { lost: Vec::new(), ready: self.register_all() }
    }

    /// Drops the devices that are gone and the registrations that no core has, adds the devices of `find`,
    /// and registers what is missing.
    pub(super) fn step(&mut self, find: impl FnOnce() -> Vec<Arc<D>>) -> Changes<D> {
        let gone = self.devices.iter().map(|it| &it.shared).filter(|it| !it.device().is_listed());
        let lost = gone.filter(|it| it.set_lost()).map(|it| it.device().serial()).collect();
        self.remove_lost();
        let unused = self.retired.extract_if(.., |region| Arc::strong_count(region) == 1);
        deregister::<D>(unused.collect());
        // After the loss of others was handled: see `Device::is_any_new`.
        self.add(find());
        Changes { lost, ready: self.register_all() }
    }

    /// Retires the registrations of lost devices, and of older contexts of a device that no core uses.
    fn remove_lost(&mut self) {
        let ready = self.devices.iter().filter(|it| !it.regions.is_empty());
        let ready: Vec<Arc<D>> = ready.map(|it| Arc::clone(it.shared.device())).collect();
        let is_over = |it: &mut Registration<D>| {
            let device = it.shared.device();
            let is_newer = |other: &Arc<D>| other.name() == device.name() && other.serial() > device.serial();
            device.is_lost() || (ready.iter().any(is_newer) && Arc::strong_count(&it.shared) == 1)
        };
        for device in self.devices.extract_if(.., is_over) {
            self.retired.extend(device.regions.into_iter().map(|it| it.region));
        }
    }

    /// Registers what the devices in use lack. Returns those that have changed.
    fn register_all(&mut self) -> Vec<Arc<Ready<D>>> {
        let may_retry = Instant::now() >= self.next_retry;
        let mut ready = Vec::new();
        for at in 0..self.devices.len() {
            // Logged in `register`.
            let _ = self.register(at, may_retry);
            let device = &mut self.devices[at];
            if std::mem::take(&mut device.is_changed) {
                if !std::mem::replace(&mut device.is_logged, true) {
                    tracing::info!(device = device.shared.device().name(), "RDMA device found");
                }
                let (shared, regions) = (Arc::clone(&device.shared), device.regions.clone());
                ready.push(Arc::new(Ready { shared, regions }));
            }
        }
        if may_retry {
            // After the attempts, which may take long.
            self.next_retry = Instant::now() + RETRY_PERIOD;
        }
        ready
    }

    /// Adds devices that are not known yet. Those that no listener needs stay unused until a listener is
    /// bound to them ([`KnownDevices::use_device_of`]).
    fn add(&mut self, found: Vec<Arc<D>>) {
        for device in found.into_iter().filter(|device| !device.is_lost()) {
            if self.devices.iter().any(|known| known.shared.device().serial() == device.serial()) {
                continue;
            }
            // librdmacm has opened the same device again: new connections use this context.
            let is_again = self
                .devices
                .iter()
                .any(|known| known.shared.device().name() == device.name() && known.shared.is_used());
            let shared = SharedDevice::of(device);
            if is_again {
                shared.set_used();
            }
            self.known.add(&shared);
            self.devices.push(Registration::new(shared));
        }
    }

    /// Registers the memory that a device in use lacks. Fails if a pool cannot be registered; then nothing
    /// stays registered. A disk that fails is left out. What has failed before is tried again if `may_retry`.
    fn register(&mut self, at: usize, may_retry: bool) -> Result<(), String> {
        let Registrar { memory, devices, retired, is_on_all, permit, .. } = self;
        let device = &mut devices[at];
        if *is_on_all {
            device.shared.set_used();
        }
        if !device.shared.is_used() || (device.has_failed && !may_retry) {
            return Ok(());
        }
        for memory in memory {
            let has_failed = memory.disk.as_ref().is_some_and(|disk| device.failed_disks.contains(disk));
            if !device.lacks(memory) || (has_failed && !may_retry) {
                continue;
            }
            if device.shared.device().is_lost() {
                return Err("it is gone".to_owned());
            }
            memory.collapse();
            match device.shared.register(permit, &memory.area) {
                Ok(region) => device.add(Arc::new(region), memory.disk.as_deref()),
                Err(error) => {
                    device.log_failure(memory.disk.as_deref(), &error);
                    if memory.disk.is_none() {
                        retired.extend(device.regions.drain(..).map(|it| it.region));
                        device.is_changed = false;
                        return Err(error.to_string());
                    }
                }
            }
        }
        device.has_failed = false;
        Ok(())
    }
}

impl Registrar<Device> {
    /// Sets the disks of the next snapshot, and whether it has a listener on all addresses. Registers new
    /// disks with the devices in use. Takes seconds for large disks. Returns messages for all cores, to be
    /// sent before the snapshot.
    pub fn set_memory(&mut self, disks: Vec<DiskArea>, is_on_all: bool) -> Vec<DeviceMessage> {
        self.change(disks, is_on_all).into()
    }

    /// Searches for new and lost devices, and retries what has failed. To be called about ten times a second.
    /// Returns messages for all cores.
    pub fn poll(&mut self) -> Vec<DeviceMessage> {
        let mut search = std::mem::take(&mut self.search);
        let changes = self.step(|| search.find(Instant::now()));
        self.search = search;
        changes.into()
    }
}

impl From<Changes<Device>> for Vec<DeviceMessage> {
    fn from(changes: Changes<Device>) -> Vec<DeviceMessage> {
        let lost = changes.lost.into_iter().map(DeviceMessage::Lost);
        lost.chain(changes.ready.into_iter().map(DeviceMessage::Ready)).collect()
    }
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mem::{FrameStore, Pages, SealedFrames};

    use super::*;
    use crate::shell::fake::{Fake, fake};

    fn areas<const N: usize>() -> [Area; N] {
        [(); N].map(|()| Area::map(1, Pages::Base).expect("memory"))
    }

    fn disk(name: &str, area: &Area) -> DiskArea {
        DiskArea { name: name.to_owned(), area: area.clone() }
    }

    /// Devices that are used, or needed by a listener.
    fn devices(marks: &[(bool, bool)]) -> Vec<Arc<SharedDevice<Fake>>> {
        let of = |(is_used, is_needed): &(bool, bool)| {
            let shared = SharedDevice::of(fake("fake"));
            is_used.then(|| shared.set_used());
            is_needed.then(|| shared.set_needed());
            shared
        };
        marks.iter().map(of).collect()
    }

    fn start(devices: &[Arc<SharedDevice<Fake>>], pools: &[Area]) -> Result<Registrar<Fake>, String> {
        Registrar::new(devices.to_vec(), KnownDevices::new(devices), pools.to_vec())
    }

    fn bases(areas: &[Area]) -> Vec<usize> {
        areas.iter().map(|it| it.base().addr().get()).collect()
    }

    fn asked(device: &Fake) -> Vec<usize> {
        device.registrations().iter().map(|it| it.base).collect()
    }

    /// Base addresses of the memory that the cores receive with the only device of `changes`.
    fn sent(changes: &Changes<Fake>) -> Vec<usize> {
        let [ready] = &changes.ready[..] else { panic!("{changes:?}") };
        ready.regions.iter().map(SharedRegion::base).collect()
    }

    /// Waits until the device has `count` registrations: another thread ends the others.
    fn settle(registrar: &mut Registrar<Fake>, device: &Arc<Fake>, count: usize) {
        while device.registered() > count {
            registrar.step(Vec::new);
            std::thread::yield_now();
        }
        assert_eq!(device.registered(), count);
    }

    fn retry_now(registrar: &mut Registrar<Fake>) -> Changes<Fake> {
        registrar.next_retry = Instant::now();
        registrar.step(Vec::new)
    }

    #[test]
    fn the_pools_of_all_cores_are_registered_once_with_the_devices_in_use() {
        let (all, pools) = (devices(&[(true, false), (false, false)]), areas::<3>());
        let mut registrar = start(&all, &pools).expect("registered");
        let changes = registrar.change(Vec::new(), false);
        let mut expected = bases(&pools);
        expected.extend(bases(&[Area::zeroes()]));
        assert_eq!((sent(&changes), asked(all[0].device())), (expected.clone(), expected));
        assert_eq!(all[1].device().registrations().len(), 0, "no listener is on it");
        assert!(registrar.step(Vec::new).ready.is_empty(), "nothing has changed");
    }

    #[test]
    fn the_start_fails_without_a_device_that_a_listener_needs_or_without_any() {
        let pools = areas::<1>();
        for (marks, is_error) in [
            (&[(true, true), (true, false)][..], true),
            (&[(true, false), (true, false)], false),
            (&[(true, false)], true),
        ] {
            let all = devices(marks);
            all[0].device().refuse_after(0);
            assert_eq!(start(&all, &pools).is_err(), is_error, "{marks:?}");
        }
        assert!(start(&[], &pools).is_ok(), "a device may come later");
    }

    #[test]
    fn a_device_whose_pool_cannot_be_registered_keeps_nothing_and_is_sent_once_it_can() {
        let (all, pools) = (devices(&[(true, false), (true, false)]), areas::<2>());
        all[1].device().refuse_after(1);
        let mut registrar = start(&all, &pools).expect("the other device can");
        assert_eq!(registrar.change(Vec::new(), false).ready.len(), 1);
        assert!(registrar.step(Vec::new).ready.is_empty());
        settle(&mut registrar, all[1].device(), 0);
        all[1].device().refuse_after(usize::MAX);
        assert!(registrar.step(Vec::new).ready.is_empty(), "not before the period is over");
        let changes = retry_now(&mut registrar);
        assert!(Arc::ptr_eq(&changes.ready[0].shared, &all[1]));
        assert_eq!(sent(&changes).len(), 3);
    }

    #[test]
    fn a_disk_is_registered_with_the_next_snapshot_and_stays_until_the_cores_drop_it() {
        let (all, pools, disks) = (devices(&[(true, false)]), areas::<1>(), areas::<2>());
        let mut registrar = start(&all, &pools).expect("registered");
        let first = registrar.change(vec![disk("a", &disks[0])], false);
        assert_eq!(sent(&first)[2..], bases(&disks[..1]));
        let next = registrar.change(vec![disk("b", &disks[1])], false);
        assert_eq!(sent(&next)[2..], bases(&disks[1..]));
        assert_eq!(asked(all[0].device()).len(), 4, "each once");
        registrar.step(Vec::new);
        assert_eq!(all[0].device().registered(), 4, "a core has the first disk's");
        assert_eq!(registrar.retired.len(), 1, "and does not drop the last reference");
        drop(first);
        settle(&mut registrar, all[0].device(), 3);
        let renamed = registrar.change(vec![disk("c", &disks[1])], false);
        assert!(renamed.ready.is_empty(), "the memory is the same");
    }

    #[test]
    fn a_disk_that_cannot_be_registered_is_sent_once_it_can_and_others_are_served() {
        let (all, pools, disks) = (devices(&[(true, false)]), areas::<1>(), areas::<2>());
        let mut registrar = start(&all, &pools).expect("registered");
        all[0].device().refuse_after(1);
        let both = vec![disk("a", &disks[0]), disk("b", &disks[1])];
        assert_eq!(sent(&registrar.change(both, false))[2..], bases(&disks[..1]));
        let tries = all[0].device().registrations().len();
        assert!(registrar.step(Vec::new).ready.is_empty(), "not before the period is over");
        assert_eq!(all[0].device().registrations().len(), tries);
        assert!(retry_now(&mut registrar).ready.is_empty());
        assert_eq!(all[0].device().registrations().len(), tries + 1);
        all[0].device().refuse_after(usize::MAX);
        assert_eq!(sent(&retry_now(&mut registrar))[2..], bases(&disks));
        assert!(registrar.devices[0].failed_disks.is_empty());
    }

    #[test]
    fn a_device_that_comes_is_sent_with_all_memory_if_a_listener_needs_it() {
        let (pools, disks) = (areas::<2>(), areas::<1>());
        for is_on_all in [false, true] {
            let mut registrar = start(&[], &pools).expect("no device yet");
            assert!(registrar.change(vec![disk("d", &disks[0])], is_on_all).ready.is_empty());
            let device = fake("late");
            let mut changes = registrar.step(|| vec![Arc::clone(&device)]);
            if !is_on_all {
                assert!(changes.ready.is_empty());
                // As the core that listens does, when a listener is bound to the device.
                registrar.known.use_all();
                changes = registrar.step(|| vec![Arc::clone(&device)]);
            }
            let sent = sent(&changes);
            assert_eq!((sent.len(), &sent[..2], sent[3]), (4, &bases(&pools)[..], bases(&disks)[0]));
            assert_eq!(asked(&device), sent, "nothing twice");
            let later = areas::<1>();
            let next = registrar.change(vec![disk("later", &later[0])], is_on_all);
            assert_eq!(self::sent(&next).last(), bases(&later).last());
        }
    }

    #[test]
    fn a_device_that_librdmacm_opens_again_is_used_as_the_former_one_was() {
        let (all, pools) = (devices(&[(true, false), (false, false)]), areas::<1>());
        let mut registrar = start(&all[..1], &pools).expect("registered");
        registrar.change(Vec::new(), false);
        assert_eq!(registrar.step(|| vec![fake("fake")]).ready.len(), 1);
        let mut registrar = start(&all[1..], &pools).expect("none is used");
        assert!(registrar.step(|| vec![fake("fake")]).ready.is_empty());
    }

    #[test]
    fn an_older_context_of_a_device_has_the_changes_until_no_core_uses_it() {
        let (mut all, pools, disks) = (devices(&[(true, false)]), areas::<1>(), areas::<1>());
        let old = Arc::clone(all[0].device());
        let mut registrar = start(&all, &pools).expect("registered");
        all.clear();
        let of_core = registrar.change(Vec::new(), false).ready;
        let new = fake("fake");
        let _of_core = registrar.step(|| vec![Arc::clone(&new)]).ready;
        let both = registrar.change(vec![disk("d", &disks[0])], false);
        assert_eq!((both.ready.len(), old.registered(), new.registered()), (2, 3, 3));
        drop((of_core, both));
        settle(&mut registrar, &old, 0);
        assert_eq!((registrar.devices.len(), new.registered()), (1, 3));
        assert_eq!(Arc::strong_count(&old), 1, "it is closed");
    }

    #[test]
    fn a_device_that_is_lost_when_it_is_found_is_no_new_one() {
        let (all, pools) = (devices(&[(true, false), (false, false)]), areas::<1>());
        let mut registrar = start(&all, &pools).expect("registered");
        all[1].device().take_out();
        let device = Arc::clone(all[0].device());
        let changes = registrar.step(|| {
            device.set_lost();
            vec![Arc::clone(&device)]
        });
        assert_eq!(changes.lost, [all[1].device().serial()], "also an unused one");
        assert_eq!(registrar.devices.len(), 1, "until the next step");
        registrar.step(|| vec![device]);
        assert!(registrar.devices.is_empty());
    }

    #[test]
    fn a_device_that_cannot_be_opened_is_searched_for_less_and_less_often() {
        let (mut search, now) = (Search::default(), Instant::now());
        let seconds = [1, 2, 4, 8, 16, 32, 60, 60].map(Duration::from_secs);
        for period in seconds {
            search.ended(now, true);
            assert_eq!(search.next, Some(now + period));
        }
        search.ended(now, false);
        assert_eq!((search.failed, search.next), (0, Some(now + RETRY_PERIOD)));
    }

    #[test]
    fn a_core_has_the_keys_of_its_own_pools_and_of_all_disks() {
        let (all, pools, disks) = (devices(&[(true, false)]), areas::<3>(), areas::<1>());
        let mut registrar = start(&all, &pools).expect("registered");
        let changes = registrar.change(vec![disk("d", &disks[0])], false);
        let of_core = changes.ready[0].of_core(&[pools[1].clone(), Area::zeroes()]);
        let expected = bases(&[pools[1].clone(), Area::zeroes(), disks[0].clone()]);
        assert_eq!(of_core.iter().map(SharedRegion::base).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_memory_of_a_removed_disk_is_unmapped_once_nothing_uses_it() {
        let (all, pools) = (devices(&[(true, false)]), areas::<1>());
        let mut registrar = start(&all, &pools).expect("registered");
        let store = FrameStore::new(1 << 20, 1 << 20, Pages::Base, false).expect("memory");
        let watch = store.memory_watch();
        let ready = registrar.change(vec![disk("d", &store.area())], false);
        drop(store);
        drop((ready, registrar.change(Vec::new(), false)));
        while watch.resident().is_some() {
            registrar.step(Vec::new);
            std::thread::yield_now();
        }
        assert_eq!(all[0].device().registered(), 2);
    }

    #[test]
    fn a_device_that_goes_is_reported_once_and_closed_when_no_core_has_it() {
        let (mut all, pools) = (devices(&[(true, false)]), areas::<1>());
        let device = Arc::clone(all[0].device());
        let mut registrar = start(&all, &pools).expect("registered");
        all.clear();
        let ready = registrar.change(Vec::new(), false).ready;
        device.take_out();
        assert_eq!(registrar.step(Vec::new).lost, [device.serial()]);
        assert_eq!(registrar.step(Vec::new).lost, [0; 0]);
        assert_eq!(device.registered(), 2, "a core has it");
        drop(ready);
        settle(&mut registrar, &device, 0);
    }

    #[test]
    fn a_device_whose_loss_a_core_has_seen_is_dropped_without_a_message() {
        let (all, pools) = (devices(&[(true, false)]), areas::<1>());
        let mut registrar = start(&all, &pools).expect("registered");
        assert!(all[0].set_lost());
        let changes = registrar.step(Vec::new);
        assert!(changes.lost.is_empty() && changes.ready.is_empty() && registrar.devices.is_empty());
        settle(&mut registrar, all[0].device(), 0);
    }

    #[test]
    fn memory_is_collapsed_before_the_first_registration_only() {
        let transparent = || Area::map(1, Pages::Transparent).expect("memory");
        let is_resident =
            |device: &Fake| device.registrations().iter().map(|it| it.is_resident).collect::<Vec<_>>();
        // With a device at the start, the cores collapse their pools.
        let all = devices(&[(true, false)]);
        let mut registrar = start(&all, &[transparent()]).expect("registered");
        registrar.change(vec![disk("d", &transparent())], false);
        let resident = is_resident(all[0].device());
        assert_eq!((resident[0], resident[2]), (false, true), "the pool, the disk");
        // A device that comes later: the registrar collapses all memory, for the first device only.
        let mut registrar = start(&[], &[transparent()]).expect("no device yet");
        registrar.change(vec![disk("d", &transparent())], true);
        let [first, second] = [fake("first"), fake("second")];
        registrar.step(|| vec![Arc::clone(&first)]);
        let resident = is_resident(&first);
        assert_eq!((resident[0], resident[2]), (true, true));
        assert!(registrar.memory.iter().all(|memory| memory.is_collapsed));
        registrar.step(|| vec![Arc::clone(&second)]);
        assert_eq!(second.registrations().len(), 3);
    }
}
