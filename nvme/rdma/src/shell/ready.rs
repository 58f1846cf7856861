//! Devices that appear while the target runs (`device_events`): a thread registers memory with them.
//!
//! ```text
//!   begin ──> thread: the pools of all cores, the disks ──> Ready ──> this core opens the device
//!                                                             └ Found ──> the other cores open it
//! ```
//! Registering a large disk takes seconds, so cores that serve do not register. A core opens a device only
//! with a [`Ready`], which only that thread creates. While the [`Ready`] exists, the core's own registrations
//! find the memory registered. If a reload has added disks meanwhile, another thread registers these before a
//! core opens the device. Only disks that could not be registered in either way are retried on the cores
//! (`retry_disks`).
//!
//! On the first use of a device the thread collapses memory to huge pages, as at the start: pages can only be
//! moved while no device has pinned them. A retry skips the collapse, as the collapse would log the remaining
//! small pages every second.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use spindle_rdma::Device;
use spindle_reactor::affinity::{available_cores, cores_without_pollers, leave_to_pollers};
use spindle_reactor::mem::Area;

use super::device_events::DiskArea;
use super::keys::{KnownDevices, Registers, SharedDevice};
use super::used::collapse_area;

/// A device with all memory registered; see the module documentation.
#[derive(Debug)]
pub struct Ready<D: Registers = Device> {
    shared: Arc<SharedDevice<D>>,
    regions: Vec<Arc<D::Region>>,
    /// Base addresses of the disks in `regions`.
    disks: Vec<usize>,
}

impl<D: Registers> Ready<D> {
    fn register(
        shared: Arc<SharedDevice<D>>,
        areas: &[Area],
        disks: &[DiskArea],
    ) -> Result<Ready<D>, String> {
        let pools = areas.iter().map(|area| shared.register(area).map_err(|error| error.to_string()));
        let regions = pools.collect::<Result<_, _>>()?;
        Ready { shared, regions, disks: Vec::new() }.with(disks)
    }

    /// Adds the registrations of `disks` that are missing. Fails if a disk cannot be registered, or the
    /// device was lost meanwhile.
    fn with(mut self, disks: &[DiskArea]) -> Result<Ready<D>, String> {
        for disk in disks {
            if !self.has(disk) {
                let region = self.shared.register(&disk.area);
                self.regions.push(region.map_err(|error| format!("disk {}: {error}", disk.name))?);
                self.disks.push(disk.area.base().addr().get());
            }
        }
        // Checked on this thread, so that the memory of a lost device is deregistered here. Deregistration
        // takes as long as registration.
        if self.shared.device().is_lost() { Err("it is gone".to_owned()) } else { Ok(self) }
    }

    /// Returns true if the memory of `disk` is registered.
    fn has(&self, disk: &DiskArea) -> bool {
        self.disks.contains(&disk.area.base().addr().get())
    }

    pub(super) fn shared(&self) -> &Arc<SharedDevice<D>> {
        &self.shared
    }
}

struct Running<D: Registers> {
    shared: Arc<SharedDevice<D>>,
    thread: JoinHandle<Result<Ready<D>, String>>,
}

/// Removes lost devices from `waiting`, retries the others, and removes and returns those that were opened.
pub(super) fn open_again<D: Registers>(
    waiting: &mut Vec<Arc<Ready<D>>>,
    mut open: impl FnMut(&Ready<D>) -> Result<(), String>,
) -> Vec<Arc<Ready<D>>> {
    waiting.retain(|ready| !ready.shared.device().is_lost());
    waiting.extract_if(.., |ready| open(ready).is_ok()).collect()
}

/// Removes from `waiting` the devices with the name of `newer`, which replaces them.
pub(super) fn remove_older<D: Registers>(waiting: &mut Vec<Arc<Ready<D>>>, newer: &Ready<D>) {
    waiting.retain(|ready| ready.shared.device().name() != newer.shared.device().name());
}

/// Removes devices that the kernel does not list any more, and marks them as lost. Returns their count.
pub(super) fn drop_gone<D: Registers>(devices: &mut Vec<Arc<SharedDevice<D>>>) -> usize {
    let gone = devices.extract_if(.., |it| !it.device().is_listed());
    gone.inspect(|it| _ = it.device().set_lost()).count()
}

/// Devices whose memory threads are registering.
pub(super) struct Preparations<D: Registers = Device> {
    running: Vec<Running<D>>,
    /// Buffer pools of the other cores, registered with new devices.
    others: Vec<Area>,
    known: KnownDevices<D>,
}

impl<D: Registers> Preparations<D> {
    pub(super) fn new(known: KnownDevices<D>) -> Preparations<D> {
        Preparations { running: Vec::new(), others: Vec::new(), known }
    }

    /// Adds pools of another core, to be registered with new devices.
    pub(super) fn add_pools(&mut self, areas: &[Area]) {
        self.others.extend_from_slice(areas);
    }

    /// Starts a thread that registers the pools of all cores and `disks` with the device `shared`; `own` are
    /// the pools of this core. Returns the device, with the error, if the thread cannot be created.
    pub(super) fn begin(
        &mut self,
        shared: Arc<SharedDevice<D>>,
        own: &[Area],
        disks: &[DiskArea],
    ) -> Result<(), (Arc<SharedDevice<D>>, String)> {
        // Before the thread starts, so that disks of a reload are registered with this device too.
        let is_first = shared.set_used();
        self.known.add(&shared);
        let areas: Vec<Area> = own.iter().chain(&self.others).cloned().collect();
        let (its, disks) = (Arc::clone(&shared), disks.to_vec());
        self.spawn(shared, move || {
            if is_first {
                areas.iter().for_each(|area| collapse_area(&"pool", area));
                disks.iter().for_each(|disk| collapse_area(&format_args!("disk {}", disk.name), &disk.area));
            }
            Ready::register(its, &areas, &disks)
        })
    }

    fn spawn(
        &mut self,
        shared: Arc<SharedDevice<D>>,
        work: impl FnOnce() -> Result<Ready<D>, String> + Send + 'static,
    ) -> Result<(), (Arc<SharedDevice<D>>, String)> {
        let run = || {
            leave_pollers();
            work()
        };
        match Builder::new().name("memory".to_owned()).spawn(run) {
            Ok(thread) => {
                self.running.push(Running { shared, thread });
                Ok(())
            }
            Err(error) => {
                Err((shared, format!("cannot start the thread that registers its memory: {error}")))
            }
        }
    }

    /// Returns a device whose thread has ended, with the result. If a disk of `disks` is not registered yet,
    /// starts a thread for the missing disks instead. Skips lost devices. `None`: no thread has ended. Does
    /// not block.
    #[expect(clippy::type_complexity, reason = "said once")]
    pub(super) fn next_done(
        &mut self,
        disks: &[DiskArea],
    ) -> Option<(Arc<SharedDevice<D>>, Result<Arc<Ready<D>>, String>)> {
        loop {
            let at = self.running.iter().position(|it| it.thread.is_finished())?;
            let Running { shared, thread } = self.running.swap_remove(at);
            let ended = thread
                .join()
                .unwrap_or_else(|_| Err("the thread that registers its memory panicked".to_owned()));
            if shared.device().is_lost() {
                continue;
            }
            let ready = match ended {
                Ok(ready) if disks.iter().any(|disk| !ready.has(disk)) => ready,
                ended => return Some((shared, ended.map(Arc::new))),
            };
            // A reload has added disks meanwhile.
            let disks = disks.to_vec();
            if let Err((shared, error)) = self.spawn(shared, move || ready.with(&disks)) {
                return Some((shared, Err(error)));
            }
        }
    }

    /// Marks the devices as lost that the kernel does not list any more. Returns the count of those newly
    /// marked. [`Preparations::next_done`] drops the results of their threads.
    pub(super) fn lose_gone(&mut self) -> usize {
        let devices = self.running.iter().map(|it| it.shared.device());
        devices.filter(|device| !device.is_listed() && device.set_lost()).count()
    }

    /// Returns the devices whose registration is not finished.
    pub(super) fn devices(&self) -> impl Iterator<Item = &Arc<SharedDevice<D>>> {
        self.running.iter().map(|it| &it.shared)
    }
}

/// Moves the calling thread to CPUs without a polling core, as a thread inherits the CPU affinity of the core
/// thread that creates it. If there are no such CPUs, the thread keeps the affinity and shares the CPU.
pub(super) fn leave_pollers() {
    let others = cores_without_pollers();
    let polled: Vec<usize> = available_cores().into_iter().filter(|core| !others.contains(core)).collect();
    leave_to_pollers(&polled);
}

#[cfg(test)]
mod tests {
    use spindle_reactor::affinity::pin_current_thread;
    use spindle_reactor::mem::Pages;

    use super::*;
    use crate::shell::fake::{Fake, fake};

    fn areas(count: usize) -> Vec<Area> {
        (0..count).map(|_| Area::map(1, Pages::Base).expect("memory")).collect()
    }

    fn wait(preparing: &mut Preparations<Fake>) -> Result<Arc<Ready<Fake>>, String> {
        wait_with(preparing, &[])
    }

    fn wait_with(preparing: &mut Preparations<Fake>, disks: &[DiskArea]) -> Result<Arc<Ready<Fake>>, String> {
        loop {
            if let Some((_, ended)) = preparing.next_done(disks) {
                return ended;
            }
            std::thread::yield_now();
        }
    }

    fn disk(name: &str, area: &Area) -> DiskArea {
        DiskArea { name: name.to_owned(), area: area.clone() }
    }

    fn bases(areas: &[Area]) -> Vec<usize> {
        areas.iter().map(|it| it.base().addr().get()).collect()
    }

    fn asked(device: &SharedDevice<Fake>) -> Vec<usize> {
        device.device().registrations().iter().map(|it| it.base).collect()
    }

    /// Starts the registration of `own`, the pool of another core, and a disk.
    fn begin(device: &Arc<SharedDevice<Fake>>) -> (Preparations<Fake>, Vec<Area>) {
        let all = areas(3);
        let mut preparing = Preparations::new(KnownDevices::new(&[]));
        preparing.add_pools(&all[1..2]);
        assert!(preparing.begin(Arc::clone(device), &all[..1], &[disk("d", &all[2])]).is_ok());
        (preparing, all)
    }

    #[test]
    fn a_device_that_comes_gets_all_memory_from_another_thread_and_the_cores_find_it_done() {
        let device = SharedDevice::of(fake("late"));
        let gate = device.device().close();
        let (mut preparing, all) = begin(&device);
        assert!(device.is_used() && preparing.next_done(&[]).is_none(), "the core goes on meanwhile");
        assert_eq!(preparing.devices().count(), 1);
        drop(gate);
        let ready = wait(&mut preparing).expect("registered");
        assert_eq!(preparing.devices().count(), 0);
        assert_eq!(asked(&device), bases(&all));
        let asked = device.device().registrations();
        assert!(asked.iter().all(|it| it.thread == "memory"), "{asked:?}");
        // Each core registers its memory again when it opens the device.
        for area in &all {
            drop(ready.shared().register(area).expect("known"));
        }
        assert_eq!(device.device().registrations().len(), all.len(), "nothing is registered by a core");
    }

    #[test]
    fn a_device_whose_memory_cannot_be_registered_comes_back_with_the_reason_and_keeps_nothing() {
        let device = SharedDevice::of(fake("late"));
        device.device().refuse_after(2);
        let (mut preparing, _all) = begin(&device);
        let error = wait(&mut preparing).expect_err("refused");
        assert!(error.starts_with("disk d: "), "{error}");
        assert_eq!(device.device().registered(), 0);
    }

    #[test]
    fn the_thread_leaves_the_core_of_the_one_that_starts_it() {
        let available = available_cores();
        if available.len() > 1 {
            leave_to_pollers(&available[..1]);
        }
        pin_current_thread(available[0]).expect("pins");
        let device = SharedDevice::of(fake("late"));
        let (mut preparing, _all) = begin(&device);
        wait(&mut preparing).expect("registered");
        let is_alone = available.len() == 1;
        let here = crate::shell::fake::cores_of_this_thread();
        assert!(device.device().registrations().iter().all(|it| (it.cores == here) == is_alone));
    }

    #[test]
    fn a_disk_that_comes_while_memory_is_registered_is_registered_by_a_thread_before_a_core_opens_the_device()
    {
        let device = SharedDevice::of(fake("late"));
        let (mut preparing, mut all) = begin(&device);
        all.extend(areas(1));
        let disks = [disk("d", &all[2]), disk("new", &all[3])];
        let ready = wait_with(&mut preparing, &disks).expect("registered");
        assert!(disks.iter().all(|disk| ready.has(disk)));
        assert_eq!(asked(&device), bases(&all), "each once");
        assert!(device.device().registrations().iter().all(|it| it.thread == "memory"));
        assert_eq!(device.device().registered(), all.len());
    }

    #[test]
    fn a_device_that_comes_gets_the_disks_of_later_reloads() {
        use crate::shell::keys::RegisteredDisks;
        let known = KnownDevices::new(&[]);
        let device = SharedDevice::of(fake("late"));
        let mut preparing = Preparations::new(known.clone());
        assert!(preparing.begin(Arc::clone(&device), &[], &[]).is_ok());
        let _ready = wait(&mut preparing).expect("registered");
        let all = areas(1);
        let _disks = RegisteredDisks::register(&known, vec![disk("new", &all[0])]);
        assert_eq!(asked(&device), bases(&all));
    }

    #[test]
    fn memory_is_made_whole_before_a_device_that_comes_takes_it_and_only_the_first_time() {
        for is_again in [false, true] {
            let device = SharedDevice::of(fake("late"));
            if is_again {
                device.set_used();
            }
            let all = [(); 2].map(|()| Area::map(1, Pages::Transparent).expect("memory"));
            let mut preparing = Preparations::new(KnownDevices::new(&[]));
            assert!(preparing.begin(Arc::clone(&device), &all[..1], &[disk("d", &all[1])]).is_ok());
            wait(&mut preparing).expect("registered");
            let asked = device.device().registrations();
            assert_eq!(asked.len(), 2);
            assert!(asked.iter().all(|it| it.is_resident != is_again), "{asked:?}");
        }
    }

    #[test]
    fn a_device_that_goes_while_its_memory_is_registered_is_dropped_and_counted_once() {
        let device = SharedDevice::of(fake("late"));
        let gate = device.device().close();
        let (mut preparing, _all) = begin(&device);
        assert_eq!(preparing.lose_gone(), 0);
        device.device().take_out();
        assert_eq!((preparing.lose_gone(), preparing.lose_gone()), (1, 0));
        drop(gate);
        while preparing.devices().count() > 0 {
            assert!(preparing.next_done(&[]).is_none());
            std::thread::yield_now();
        }
        assert_eq!(device.device().registered(), 0);
    }

    #[test]
    fn devices_that_are_gone_before_they_are_opened_are_counted() {
        let all = ["a", "b"].map(|name| SharedDevice::of(fake(name)));
        let mut unopened = all.to_vec();
        assert_eq!(drop_gone(&mut unopened), 0);
        all[0].device().take_out();
        assert_eq!((drop_gone(&mut unopened), drop_gone(&mut unopened)), (1, 0));
        assert!(Arc::ptr_eq(&unopened[0], &all[1]));
        assert!(all[0].device().is_lost() && !all[1].device().is_lost());
    }

    fn ready(name: &'static str) -> Arc<Ready<Fake>> {
        let memory = areas(1);
        Arc::new(Ready::register(SharedDevice::of(fake(name)), &memory, &[]).expect("registered"))
    }

    #[test]
    fn a_device_that_a_core_cannot_open_is_kept_and_tried_until_it_is_open_or_lost() {
        let (a, b) = (ready("a"), ready("b"));
        let mut waiting = vec![Arc::clone(&a), Arc::clone(&b)];
        let mut tries = 0;
        let mut fail = |_: &Ready<Fake>| {
            tries += 1;
            Err("no memory".to_owned())
        };
        assert!(
            open_again(&mut waiting, &mut fail).is_empty() && open_again(&mut waiting, &mut fail).is_empty()
        );
        assert_eq!((tries, a.shared.device().registered()), (4, 1));
        b.shared.device().set_lost();
        let opened = open_again(&mut waiting, |_| Ok(()));
        assert!(opened.len() == 1 && Arc::ptr_eq(&opened[0], &a));
        assert!(open_again(&mut waiting, |_| panic!("nothing is left")).is_empty());
        assert_eq!(Arc::strong_count(&b), 1, "a lost one is not held");
    }

    #[test]
    fn a_device_that_waits_gives_way_to_one_of_its_name() {
        let mut waiting = vec![ready("a"), ready("b")];
        remove_older(&mut waiting, &ready("a"));
        let opened = open_again(&mut waiting, |_| Ok(()));
        assert_eq!(opened.iter().map(|it| it.shared.device().name()).collect::<Vec<_>>(), ["b"]);
    }
}
