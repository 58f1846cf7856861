//! Devices that come while the target serves (`lost`): a thread of its own registers memory with them.
//!
//! ```text
//!   begin ──> thread: the pools of all cores, the disks ──> Ready ──> this core opens the device
//!                                                             └ Found ──> the other cores open it
//! ```
//! To register a large disk takes seconds. So a core that serves does not do it: it opens a device only by a
//! [`Ready`], which only that thread makes. While the [`Ready`] is there, what the core registers is known.
//! Where a reload has added disks by the time it is done, a thread registers those before a core opens the
//! device. Only a disk that could not be registered in either way is tried on the cores (`retry_disks`).
//!
//! The first time the thread brings the memory together to huge pages, as the start does: it may lie on small
//! ones still, which can be moved when no other device holds them. A device that is tried again is spared
//! that, as what is left on small pages would be warned of each second.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use spindle_rdma_verbs::Device;
use spindle_reactor::affinity::{available_cores, cores_without_pollers, leave_to_pollers};
use spindle_reactor::mem::Area;

use super::keys::{KnownDevices, Registers, SharedDevice};
use super::lost::DiskArea;
use super::used::settle_one;

/// A device with which all memory is registered; see the module.
#[derive(Debug)]
pub struct Ready<D: Registers = Device> {
    shared: Arc<SharedDevice<D>>,
    regions: Vec<Arc<D::Region>>,
    /// Where the memory of the disks begins that is among them.
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

    /// The same with these disks.
    fn with(mut self, disks: &[DiskArea]) -> Result<Ready<D>, String> {
        for disk in disks {
            if !self.has(disk) {
                let region = self.shared.register(&disk.area);
                self.regions.push(region.map_err(|error| format!("disk {}: {error}", disk.name))?);
                self.disks.push(disk.area.base().addr().get());
            }
        }
        // Here, as to let go of it all takes time as well.
        if self.shared.device().is_lost() { Err("it is gone".to_owned()) } else { Ok(self) }
    }

    /// This disk's memory is registered.
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

/// Try those that are not lost again to open; gives each one that is open now.
pub(super) fn open_again<D: Registers>(
    waiting: &mut Vec<Arc<Ready<D>>>,
    mut open: impl FnMut(&Ready<D>) -> Result<(), String>,
) -> Vec<Arc<Ready<D>>> {
    waiting.retain(|ready| !ready.shared.device().is_lost());
    waiting.extract_if(.., |ready| open(ready).is_ok()).collect()
}

/// A device has come: an older one of its name is not to take its place.
pub(super) fn remove_older<D: Registers>(waiting: &mut Vec<Arc<Ready<D>>>, newer: &Ready<D>) {
    waiting.retain(|ready| ready.shared.device().name() != newer.shared.device().name());
}

/// Of devices that are not used yet: let go of those that are gone. Gives how many.
pub(super) fn drop_gone<D: Registers>(devices: &mut Vec<Arc<SharedDevice<D>>>) -> usize {
    let gone = devices.extract_if(.., |it| !it.device().is_listed());
    gone.inspect(|it| _ = it.device().set_lost()).count()
}

/// Devices whose memory is being registered.
pub(super) struct Preparations<D: Registers = Device> {
    running: Vec<Running<D>>,
    /// Pools of the other cores.
    others: Vec<Area>,
    known: KnownDevices<D>,
}

impl<D: Registers> Preparations<D> {
    pub(super) fn new(known: KnownDevices<D>) -> Preparations<D> {
        Preparations { running: Vec::new(), others: Vec::new(), known }
    }

    /// Memory of another core, which devices that come from now on are to have as well.
    pub(super) fn add_pools(&mut self, areas: &[Area]) {
        self.others.extend_from_slice(areas);
    }

    /// Start a thread that registers the memory of this core, of the others and of the disks. Gives the
    /// device back, with the reason, where there is no thread to be had.
    pub(super) fn begin(
        &mut self,
        shared: Arc<SharedDevice<D>>,
        own: &[Area],
        disks: &[DiskArea],
    ) -> Result<(), (Arc<SharedDevice<D>>, String)> {
        // From now on: disks that a reload brings meanwhile are registered with it too.
        let is_first = shared.set_used();
        self.known.add(&shared);
        let areas: Vec<Area> = own.iter().chain(&self.others).cloned().collect();
        let (its, disks) = (Arc::clone(&shared), disks.to_vec());
        self.spawn(shared, move || {
            if is_first {
                areas.iter().for_each(|area| settle_one(&"pool", area));
                disks.iter().for_each(|disk| settle_one(&format_args!("disk {}", disk.name), &disk.area));
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
            Err(error) => Err((shared, format!("thread of its memory: {error}"))),
        }
    }

    /// A device whose thread has ended, and how; with the memory of all these disks. Not one that is lost.
    /// Does not wait.
    #[expect(clippy::type_complexity, reason = "said once")]
    pub(super) fn next_done(
        &mut self,
        disks: &[DiskArea],
    ) -> Option<(Arc<SharedDevice<D>>, Result<Arc<Ready<D>>, String>)> {
        loop {
            let at = self.running.iter().position(|it| it.thread.is_finished())?;
            let Running { shared, thread } = self.running.swap_remove(at);
            let ended = thread.join().unwrap_or_else(|_| Err("the thread of its memory panicked".to_owned()));
            if shared.device().is_lost() {
                continue;
            }
            let ready = match ended {
                Ok(ready) if disks.iter().any(|disk| !ready.has(disk)) => ready,
                ended => return Some((shared, ended.map(Arc::new))),
            };
            // A reload has added some meanwhile.
            let disks = disks.to_vec();
            if let Err((shared, error)) = self.spawn(shared, move || ready.with(&disks)) {
                return Some((shared, Err(error)));
            }
        }
    }

    /// Those that are gone are lost: what their threads do is dropped. Gives how many.
    pub(super) fn lose_gone(&mut self) -> usize {
        let devices = self.running.iter().map(|it| it.shared.device());
        devices.filter(|device| !device.is_listed() && device.set_lost()).count()
    }

    /// Devices that are not ready yet.
    pub(super) fn devices(&self) -> impl Iterator<Item = &Arc<SharedDevice<D>>> {
        self.running.iter().map(|it| &it.shared)
    }
}

/// A thread that a core's thread starts is pinned where that one polls. It goes to the cores that no thread
/// polls on; where there are none it stays, and the system divides the core between the two.
fn leave_pollers() {
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
        device.device().asked().iter().map(|it| it.base).collect()
    }

    /// A core's devices that come have the memory of `own`, of another core's pool, and of a disk.
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
        let asked = device.device().asked();
        assert!(asked.iter().all(|it| it.thread == "memory"), "{asked:?}");
        // What each core does as it opens the device.
        for area in &all {
            drop(ready.shared().register(area).expect("known"));
        }
        assert_eq!(device.device().asked().len(), all.len(), "nothing is registered by a core");
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
        assert!(device.device().asked().iter().all(|it| (it.cores == here) == is_alone));
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
        assert!(device.device().asked().iter().all(|it| it.thread == "memory"));
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
            let asked = device.device().asked();
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
