//! Selection of the devices to use: those with a listener; and the handling of a device that cannot be used.
//!
//! | listener | devices |
//! |---|---|
//! | on an address of a device | that device; the start fails if it cannot be used |
//! | on an address that no device has yet | none; that of the address once it has come |
//! | on an address, without a connection manager | none; that of the address once both have come |
//! | on all addresses | all; a device that cannot be used is logged and left out |
//!
//! No memory is registered with the other devices and no queue is created. The listening core keeps these
//! devices, as the failover of a bond may move a listener to one of them (`device_events`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use spindle_rdma::{CmChannel, CmId, Device, Found, VerbsError};
use spindle_reactor::mem::{Area, PageSizes};

use super::device_events::Opening;
use super::keys::{Registers, SharedDevice};

/// Flags of a device, shared by all cores.
#[derive(Debug, Default)]
pub(super) struct DeviceFlags {
    is_used: AtomicBool,
    /// A listener is bound to this device, so the start fails if the device cannot be opened.
    is_needed: AtomicBool,
    /// A core failed to open the device at the start.
    is_left_out: AtomicBool,
}

/// Devices that a listener uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ListenerDevices {
    All,
    /// Index of the device.
    Device(usize),
    /// No device; the bind of the address reports the reason, and is tried again.
    Nowhere,
}

impl ListenerDevices {
    /// Without a channel no address is of a device.
    fn find(
        channel: Option<&CmChannel>,
        mut address: SocketAddr,
        devices: &[Arc<SharedDevice>],
    ) -> ListenerDevices {
        if address.ip().is_unspecified() {
            return ListenerDevices::All;
        }
        // Port 0: any free port. The bind only finds the device.
        address.set_port(0);
        let id = channel.map(|it| CmId::new(it).and_then(|id| id.bind(address).map(|()| id)));
        let place =
            id.and_then(Result::ok).and_then(|id| devices.iter().position(|it| it.device().is_of(&id)));
        place.map_or(ListenerDevices::Nowhere, ListenerDevices::Device)
    }
}

/// Returns whether the device at index `place` is used, and whether a listener is bound to it.
fn device_use(place: usize, listeners: &[ListenerDevices]) -> (bool, bool) {
    let is_needed = listeners.contains(&ListenerDevices::Device(place));
    (is_needed || listeners.contains(&ListenerDevices::All), is_needed)
}

impl SharedDevice {
    /// Opens the machine's devices and marks those that listeners on `addresses` use. A device that cannot be
    /// opened is logged and left out. There may be no device, or no connection manager yet.
    ///
    /// # Errors
    /// The devices cannot be listed, there are devices and none can be opened, or the connection manager
    /// cannot be used.
    pub fn for_listeners(addresses: &[SocketAddr]) -> Result<Vec<Arc<SharedDevice>>, VerbsError> {
        let Found { devices, failed } = Device::find()?;
        for (device, error) in &failed {
            tracing::error!(device, %error, "cannot open RDMA device: it is not used");
        }
        let devices: Vec<_> = devices.into_iter().map(SharedDevice::of).collect();
        if devices.is_empty() {
            return failed.first().map_or(Ok(devices), |(_, error)| Err(*error));
        }
        let channel = match CmChannel::new() {
            Err(error) if error.is_no_rdma() => None,
            opened => Some(opened?),
        };
        let listeners: Vec<_> =
            addresses.iter().map(|it| ListenerDevices::find(channel.as_ref(), *it, &devices)).collect();
        for (place, shared) in devices.iter().enumerate() {
            let (is_used, is_needed) = device_use(place, &listeners);
            shared.flags().is_needed.store(is_needed, Ordering::Relaxed);
            if is_used {
                shared.set_used();
            }
        }
        Ok(devices)
    }
}

impl<D: Registers> SharedDevice<D> {
    /// Returns true if memory is registered with the device and cores create queues on it.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.flags().is_used.load(Ordering::Relaxed)
    }

    /// Marks the device as used. Returns true on the first call only, which logs a warning for an iWARP
    /// device.
    pub(super) fn set_used(&self) -> bool {
        let is_first = !self.flags().is_used.swap(true, Ordering::Relaxed);
        if is_first && self.device().limits().is_iwarp {
            let device = self.device().name();
            tracing::warn!(
                device,
                "iWARP: hosts that connect over this device are able to write to all data in memory"
            );
        }
        is_first
    }

    /// Returns true if a core failed to open the device at the start: connections over the device are
    /// rejected.
    pub(super) fn is_left_out(&self) -> bool {
        self.flags().is_left_out.load(Ordering::Relaxed)
    }

    /// Returns true if the device is used and no core failed to open it at the start.
    pub(super) fn is_in_use(&self) -> bool {
        self.is_used() && !self.is_left_out()
    }
}

/// Opens the used devices with `make`. Calls `collapse` once before, if there are any. A device that fails is
/// left out. Returns an error if a listener is bound to the failed device, or no used device is left.
pub(super) fn open<D: Registers, C>(
    devices: &[Arc<SharedDevice<D>>],
    collapse: impl FnOnce(),
    mut make: impl FnMut(&Arc<SharedDevice<D>>) -> Result<C, VerbsError>,
) -> Result<Vec<Option<C>>, String> {
    let is_there = |it: &&Arc<SharedDevice<D>>| it.is_in_use();
    let mut opened = Vec::new();
    if devices.iter().any(|it| is_there(&it)) {
        collapse();
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
        let is_needed = shared.flags().is_needed.load(Ordering::Relaxed);
        let is_known = shared.flags().is_left_out.swap(true, Ordering::Relaxed);
        if is_needed || !devices.iter().any(|it| is_there(&it)) {
            return Err(format!("{device}: {error}"));
        }
        // Only the first core that fails logs the error.
        if !is_known {
            tracing::error!(device, %error, "cannot use RDMA device: it is not used");
        }
    }
    Ok(opened)
}

/// Collapses the core's pools to huge pages before a device pins them. Blocks: never call it on a reactor
/// core that serves.
pub(super) fn collapse(opening: &Opening) {
    for area in &opening.areas {
        collapse_area(&format_args!("pool of core {}", opening.core), area);
    }
}

/// Collapses `area` to huge pages; logs pages that stay small or are unknown. `memory` names the area in the
/// log. Takes seconds for a large area: never call it on a reactor core that serves.
pub(super) fn collapse_area(memory: &dyn std::fmt::Display, area: &Area) {
    if let Some(says) = warning(area.collapse_to_huge()) {
        tracing::warn!(%memory, bytes = area.bytes(), "{says}");
    }
}

/// Returns the warning for memory with small or unknown pages; `None` if the pages are as configured.
fn warning(pages: PageSizes) -> Option<String> {
    match pages {
        PageSizes::Huge | PageSizes::Base => None,
        PageSizes::Mixed { small, all } => Some(format!(
            "{small} of {all} areas of 2 MiB are on pages of 4 KiB: RDMA devices translate all of this \
             memory by pages of 4 KiB, which is slower; set pages = \"huge\", or start before memory is \
             fragmented"
        )),
        PageSizes::Unknown => Some(
            "this kernel does not report the page size of this memory (Linux 6.1 does): if any page has 4 \
             KiB, RDMA devices translate all of the memory by pages of 4 KiB, which is slower"
                .to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mem::Pages;

    use super::*;
    use crate::shell::device_events::DiskArea;
    use crate::shell::fake::{Fake, fake};
    use crate::shell::keys::{KnownDevices, RegisteredDisks};

    #[test]
    fn devices_that_no_listener_is_on_are_not_used() {
        let of = |listeners: &[ListenerDevices]| {
            (0..3).map(|place| device_use(place, listeners)).collect::<Vec<_>>()
        };
        let unused = (false, false);
        assert_eq!(of(&[ListenerDevices::Device(1)]), [unused, (true, true), unused]);
        assert_eq!(of(&[ListenerDevices::All]), [(true, false); 3]);
        assert_eq!(
            of(&[ListenerDevices::All, ListenerDevices::Device(2)]),
            [(true, false), (true, false), (true, true)]
        );
        assert_eq!(of(&[ListenerDevices::Nowhere]), [unused; 3]);
        assert_eq!(of(&[]), [unused; 3]);
    }

    /// Devices with these flags: used, needed by a listener.
    fn devices(marks: &[(bool, bool)]) -> Vec<Arc<SharedDevice<Fake>>> {
        let of = |(is_used, is_needed): &(bool, bool)| {
            let shared = SharedDevice::of(fake("fake"));
            shared.flags().is_used.store(*is_used, Ordering::Relaxed);
            shared.flags().is_needed.store(*is_needed, Ordering::Relaxed);
            shared
        };
        marks.iter().map(of).collect()
    }

    /// Indices of the devices that a core opens if those in `broken` fail, and whether memory was collapsed.
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
        all[2].flags().is_left_out.store(true, Ordering::Relaxed);
        let area = Area::map(1, Pages::Base).expect("memory");
        let disks = vec![DiskArea { name: "d".to_owned(), area }];
        let registered = RegisteredDisks::register(&KnownDevices::new(&all), disks);
        let counts: Vec<_> = all.iter().map(|it| it.device().registered()).collect();
        assert!(counts == [1, 0, 0] && registered.is_registered());
        drop(registered);
        assert_eq!(all[0].device().registered(), 0);
    }

    #[test]
    fn small_pages_among_huge_ones_are_told_with_their_number_and_size() {
        assert_eq!(warning(PageSizes::Huge), None);
        assert_eq!(warning(PageSizes::Base), None, "as was asked for");
        let says = warning(PageSizes::Mixed { small: 1, all: 512 }).expect("a warning");
        assert!(says.starts_with("1 of 512 areas of 2 MiB are on pages of 4 KiB"), "{says}");
        assert!(warning(PageSizes::Unknown).is_some());
    }
}
