//! Devices that come while the target serves (`lost`): a thread of its own registers memory with them.
//!
//! ```text
//!   begin ──> thread: the pools of all cores, the disks ──> Ready ──> this core opens the device
//!                                                             └ Found ──> the other cores open it
//! ```
//! To register a large disk takes seconds. So a core that serves never does it: it opens a device only by a
//! [`Ready`], which only that thread makes. While the [`Ready`] is there, what the core registers is known.
//!
//! It does not ask for huge pages as the start does: that was done when the memory was made known.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use spindle_rdma_verbs::Device;
use spindle_reactor::affinity::{available_cores, cores_without_pollers, leave_to_pollers};
use spindle_reactor::mem::Area;

use super::keys::{Registers, SharedDevice};
use super::lost::DiskArea;

/// A device with which all memory is registered; see the module.
#[derive(Debug)]
pub struct Ready<D: Registers = Device> {
    shared: Arc<SharedDevice<D>>,
    _regions: Vec<Arc<D::Region>>,
}

impl<D: Registers> Ready<D> {
    fn register(
        shared: Arc<SharedDevice<D>>,
        areas: &[Area],
        disks: &[DiskArea],
    ) -> Result<Ready<D>, String> {
        let pools = areas.iter().map(|area| shared.register(area).map_err(|error| error.to_string()));
        let disks = disks.iter().map(|disk| {
            let region = shared.register(&disk.area);
            region.map_err(|error| format!("disk {}: {error}", disk.name))
        });
        let regions = pools.chain(disks).collect::<Result<_, _>>()?;
        Ok(Ready { shared, _regions: regions })
    }

    pub(super) fn shared(&self) -> &Arc<SharedDevice<D>> {
        &self.shared
    }
}

struct Running<D: Registers> {
    shared: Arc<SharedDevice<D>>,
    thread: JoinHandle<Result<Ready<D>, String>>,
}

/// Devices whose memory is being registered.
pub(super) struct Preparations<D: Registers = Device> {
    running: Vec<Running<D>>,
    /// Pools of the other cores.
    others: Vec<Area>,
}

impl<D: Registers> Preparations<D> {
    pub(super) fn new() -> Preparations<D> {
        Preparations { running: Vec::new(), others: Vec::new() }
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
        shared.set_used();
        let areas: Vec<Area> = own.iter().chain(&self.others).cloned().collect();
        let (its, disks) = (Arc::clone(&shared), disks.to_vec());
        let run = move || {
            leave_pollers();
            Ready::register(its, &areas, &disks)
        };
        match Builder::new().name("memory".to_owned()).spawn(run) {
            Ok(thread) => {
                self.running.push(Running { shared, thread });
                Ok(())
            }
            Err(error) => Err((shared, format!("thread of its memory: {error}"))),
        }
    }

    /// A device whose thread has ended, and how. Does not wait.
    #[expect(clippy::type_complexity, reason = "said once")]
    pub(super) fn next_done(&mut self) -> Option<(Arc<SharedDevice<D>>, Result<Arc<Ready<D>>, String>)> {
        let at = self.running.iter().position(|it| it.thread.is_finished())?;
        let Running { shared, thread } = self.running.swap_remove(at);
        let ended = thread.join().unwrap_or_else(|_| Err("the thread of its memory panicked".to_owned()));
        Some((shared, ended.map(Arc::new)))
    }

    /// Devices that are not ready yet.
    pub(super) fn devices(&self) -> impl Iterator<Item = &Arc<SharedDevice<D>>> {
        self.running.iter().map(|it| &it.shared)
    }
}

/// A thread that a core's thread starts is pinned where that one polls. It goes to the cores on which nobody
/// polls; where there are none it stays, and the system divides the core between the two.
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
        loop {
            if let Some((_, ended)) = preparing.next_done() {
                return ended;
            }
            std::thread::yield_now();
        }
    }

    /// A core's devices that come have the memory of `own`, of another core's pool, and of a disk.
    fn begin(device: &Arc<SharedDevice<Fake>>) -> (Preparations<Fake>, Vec<Area>) {
        let all = areas(3);
        let mut preparing = Preparations::new();
        preparing.add_pools(&all[1..2]);
        let disks = [DiskArea { name: "d".to_owned(), area: all[2].clone() }];
        assert!(preparing.begin(Arc::clone(device), &all[..1], &disks).is_ok());
        (preparing, all)
    }

    #[test]
    fn a_device_that_comes_gets_all_memory_from_another_thread_and_the_cores_find_it_done() {
        let device = SharedDevice::of(fake("late"));
        let gate = device.device().close();
        let (mut preparing, all) = begin(&device);
        assert!(device.is_used() && preparing.next_done().is_none(), "the core goes on meanwhile");
        assert_eq!(preparing.devices().count(), 1);
        drop(gate);
        let ready = wait(&mut preparing).expect("registered");
        assert_eq!(preparing.devices().count(), 0);
        let asked = device.device().asked();
        let bases = |areas: &[Area]| areas.iter().map(|it| it.base().addr().get()).collect::<Vec<_>>();
        assert_eq!(asked.iter().map(|it| it.base).collect::<Vec<_>>(), bases(&all));
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
}
