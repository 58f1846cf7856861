//! Which devices are used: those that a listener is on, and what becomes of one that cannot be used.
//!
//! | listener | devices |
//! |---|---|
//! | on an address of a device | that one; without it the start fails |
//! | on all addresses | all; one that cannot be used is named in the log and left out |
//!
//! With the other devices nothing is registered and no queue is made. Core 0 keeps them at hand, as a bond
//! may bring a listener to one of them (`lost`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use spindle_rdma_verbs::{CmChannel, CmId, Device, Found, VerbsError};
use spindle_reactor::mem::{Area, PageSizes};

use super::keys::{Registers, SharedDevice};
use super::lost::Opening;

/// What is known of a device's use. Shared by the cores.
#[derive(Debug, Default)]
pub(super) struct Marks {
    is_used: AtomicBool,
    /// A listener is on it alone.
    is_needed: AtomicBool,
    /// A core could not use it at the start.
    is_left_out: AtomicBool,
}

/// Where a listener is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum On {
    All,
    /// The device in this place.
    Device(usize),
    /// None that there is: the bind of the address tells why.
    Nowhere,
}

impl On {
    fn find(channel: &CmChannel, mut address: SocketAddr, devices: &[Arc<SharedDevice>]) -> On {
        if address.ip().is_unspecified() {
            return On::All;
        }
        // Any port: only for the device.
        address.set_port(0);
        let id = CmId::new(channel).and_then(|id| id.bind(address).map(|()| id));
        let place = id.ok().and_then(|id| devices.iter().position(|it| it.device().is_of(&id)));
        place.map_or(On::Nowhere, On::Device)
    }
}

/// Of a device: whether it is used, and whether a listener is on it alone.
fn use_of(place: usize, listeners: &[On]) -> (bool, bool) {
    let is_needed = listeners.contains(&On::Device(place));
    (is_needed || listeners.contains(&On::All), is_needed)
}

impl SharedDevice {
    /// The machine's devices that can be opened, with marks on those that listeners on these addresses use.
    /// One that cannot be opened is named in the log.
    ///
    /// # Errors
    /// There are devices, but none can be opened; or there is no connection manager.
    pub fn for_listeners(addresses: &[SocketAddr]) -> Result<Vec<Arc<SharedDevice>>, VerbsError> {
        let Found { devices, failed } = Device::find()?;
        for (device, error) in &failed {
            tracing::error!(device, %error, "RDMA device cannot be opened: it is left out");
        }
        let devices: Vec<_> = devices.into_iter().map(SharedDevice::of).collect();
        if devices.is_empty() {
            return failed.first().map_or(Ok(devices), |(_, error)| Err(*error));
        }
        let channel = CmChannel::new()?;
        let listeners: Vec<_> = addresses.iter().map(|it| On::find(&channel, *it, &devices)).collect();
        for (place, shared) in devices.iter().enumerate() {
            let (is_used, is_needed) = use_of(place, &listeners);
            shared.marks().is_needed.store(is_needed, Ordering::Relaxed);
            if is_used {
                shared.set_used();
            }
        }
        Ok(devices)
    }
}

impl<D: Registers> SharedDevice<D> {
    /// It is to be registered with, and to have queues.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.marks().is_used.load(Ordering::Relaxed)
    }

    /// True for the first who says so.
    pub(super) fn set_used(&self) -> bool {
        let is_first = !self.marks().is_used.swap(true, Ordering::Relaxed);
        if is_first && self.device().limits().is_iwarp {
            let device = self.device().name();
            tracing::warn!(
                device,
                "iWARP: hosts that connect over this device are able to write to all data in memory"
            );
        }
        is_first
    }

    /// A core could not use it at the start: connections that come by it are refused.
    pub(super) fn is_left_out(&self) -> bool {
        self.marks().is_left_out.load(Ordering::Relaxed)
    }

    /// It is used, and every core could use it so far.
    pub(super) fn is_in_use(&self) -> bool {
        self.is_used() && !self.is_left_out()
    }
}

/// Take up the devices that are used: `settle` comes before the first of them, `make` makes each.
pub(super) fn open<D: Registers, C>(
    devices: &[Arc<SharedDevice<D>>],
    settle: impl FnOnce(),
    mut make: impl FnMut(&Arc<SharedDevice<D>>) -> Result<C, VerbsError>,
) -> Result<Vec<Option<C>>, String> {
    let is_there = |it: &&Arc<SharedDevice<D>>| it.is_in_use();
    let mut opened = Vec::new();
    if devices.iter().any(|it| is_there(&it)) {
        settle();
    }
    for shared in devices.iter().filter(is_there) {
        let error = match make(shared) {
            Ok(device) => {
                opened.push(Some(device));
                continue;
            }
            Err(error) => error,
        };
        let device = shared.device().name();
        let is_needed = shared.marks().is_needed.load(Ordering::Relaxed);
        let is_known = shared.marks().is_left_out.swap(true, Ordering::Relaxed);
        if is_needed || !devices.iter().any(|it| is_there(&it)) {
            return Err(format!("{device}: {error}"));
        }
        // By the first core that finds out.
        if !is_known {
            tracing::error!(device, %error, "RDMA device cannot be used: it is left out");
        }
    }
    Ok(opened)
}

/// Have the core's memory on huge pages before a device takes it.
pub(super) fn settle(opening: &Opening) {
    for area in &opening.areas {
        settle_one(&format_args!("pool of core {}", opening.core), area);
    }
}

/// The same with one piece of memory. Not on a reactor core.
pub(super) fn settle_one(memory: &dyn std::fmt::Display, area: &Area) {
    if let Some(says) = warning(area.settle()) {
        tracing::warn!(%memory, bytes = area.bytes(), "{says}");
    }
}

/// What there is to say of pages that a device is about to take.
fn warning(pages: PageSizes) -> Option<String> {
    match pages {
        PageSizes::Huge | PageSizes::Base => None,
        PageSizes::Mixed { small, all } => Some(format!(
            "{small} of {all} pieces of 2 MiB lie on pages of 4 KiB: RDMA devices translate all of this \
             memory by pages of 4 KiB, which costs speed; take pages = \"huge\", or start before memory \
             is in small pieces"
        )),
        PageSizes::Unknown => Some(
            "this kernel does not say on which pages this memory lies (Linux 6.1 does): if any is of 4 KiB, \
             RDMA devices translate all of it by such pages, which costs speed"
                .to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mem::Pages;

    use super::*;
    use crate::shell::fake::{Fake, fake};
    use crate::shell::keys::{KnownDevices, RegisteredDisks};
    use crate::shell::lost::DiskArea;

    #[test]
    fn devices_that_no_listener_is_on_are_not_used() {
        let of = |listeners: &[On]| (0..3).map(|place| use_of(place, listeners)).collect::<Vec<_>>();
        let unused = (false, false);
        assert_eq!(of(&[On::Device(1)]), [unused, (true, true), unused]);
        assert_eq!(of(&[On::All]), [(true, false); 3]);
        assert_eq!(of(&[On::All, On::Device(2)]), [(true, false), (true, false), (true, true)]);
        assert_eq!(of(&[On::Nowhere]), [unused; 3]);
        assert_eq!(of(&[]), [unused; 3]);
    }

    /// Devices with these marks: used, and needed by a listener.
    fn devices(marks: &[(bool, bool)]) -> Vec<Arc<SharedDevice<Fake>>> {
        let of = |(is_used, is_needed): &(bool, bool)| {
            let shared = SharedDevice::of(fake("fake"));
            shared.marks().is_used.store(*is_used, Ordering::Relaxed);
            shared.marks().is_needed.store(*is_needed, Ordering::Relaxed);
            shared
        };
        marks.iter().map(of).collect()
    }

    /// What a core opens of them, where it cannot use those in `broken`.
    fn opened(devices: &[Arc<SharedDevice<Fake>>], broken: &[usize]) -> (Result<Vec<usize>, String>, bool) {
        let place = |shared: &Arc<_>| devices.iter().position(|it| Arc::ptr_eq(it, shared)).expect("one");
        let mut is_settled = false;
        let opened = open(
            devices,
            || is_settled = true,
            |shared| match place(shared) {
                place if broken.contains(&place) => Err(VerbsError { verb: "ibv_reg_mr", errno: 12 }),
                place => Ok(place),
            },
        );
        (opened.map(|it| it.into_iter().flatten().collect()), is_settled)
    }

    #[test]
    fn a_core_opens_the_devices_that_are_used_and_not_those_that_another_core_has_left_out() {
        let all = devices(&[(true, false), (false, false), (true, false)]);
        assert_eq!(opened(&all, &[]), (Ok(vec![0, 2]), true));
        assert_eq!(opened(&all, &[0]).0, Ok(vec![2]));
        assert!(all[0].is_left_out() && !all[0].is_in_use() && all[2].is_in_use());
        assert_eq!(opened(&all, &[]).0, Ok(vec![2]), "until the end of the process");
        let unused = devices(&[(false, false)]);
        assert_eq!(opened(&unused, &[]), (Ok(Vec::new()), false), "no memory is made resident for it");
    }

    #[test]
    fn a_core_that_cannot_open_a_device_fails_where_a_listener_needs_it() {
        assert!(opened(&devices(&[(true, true), (true, false)]), &[0]).0.is_err());
        let alone = devices(&[(true, false)]);
        assert!(opened(&alone, &[0]).0.is_err(), "a listener on all addresses has none left");
    }

    #[test]
    fn memory_of_disks_is_registered_with_the_devices_that_are_in_use() {
        let all = devices(&[(true, false), (false, false), (true, false)]);
        all[2].marks().is_left_out.store(true, Ordering::Relaxed);
        let area = Area::map(1, Pages::Base).expect("memory");
        let disks = vec![DiskArea { name: "d".to_owned(), area }];
        let registered = RegisteredDisks::register(&KnownDevices::new(&all), disks);
        let counts: Vec<_> = all.iter().map(|it| it.device().registered()).collect();
        assert_eq!(counts, [1, 0, 0]);
        drop(registered);
        assert_eq!(all[0].device().registered(), 0);
    }

    #[test]
    fn small_pages_among_huge_ones_are_told_with_their_number_and_size() {
        assert_eq!(warning(PageSizes::Huge), None);
        assert_eq!(warning(PageSizes::Base), None, "as was asked for");
        let says = warning(PageSizes::Mixed { small: 1, all: 512 }).expect("a warning");
        assert!(says.starts_with("1 of 512 pieces of 2 MiB lie on pages of 4 KiB"), "{says}");
        assert!(warning(PageSizes::Unknown).is_some());
    }
}
