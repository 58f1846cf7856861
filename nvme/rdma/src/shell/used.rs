//! Selection of the devices to use: those with a listener.
//!
//! | listener | devices |
//! |---|---|
//! | on an address of a device | that device; the start fails if no pool can be registered with it |
//! | on an address that no device has yet | none; that of the address once it has come |
//! | on an address, without a connection manager | none; that of the address once both have come |
//! | on all addresses | all; one that cannot be used is logged and tried again |
//!
//! No memory is registered with the other devices and no queue is created. The registrar keeps these devices,
//! as the failover of a bond may move a listener to one of them.

use std::net::SocketAddr;
use std::sync::Arc;

use spindle_rdma::{CmChannel, CmId, Device, Found, VerbsError};
use spindle_reactor::mem::{Area, PageSizes};

use super::keys::SharedDevice;

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
            if is_needed {
                shared.set_needed();
            }
            if is_used {
                shared.set_used();
            }
        }
        Ok(devices)
    }
}

/// Collapses the core's pools to huge pages before a device pins them. Called by the thread of the core, so
/// that the pages are of its NUMA node, and before the core serves, as it blocks.
pub(super) fn collapse(core: usize, pools: &[Area]) {
    for area in pools {
        collapse_area(&format_args!("pool of core {core}"), area);
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
    use super::*;

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

    #[test]
    fn small_pages_among_huge_ones_are_told_with_their_number_and_size() {
        assert_eq!(warning(PageSizes::Huge), None);
        assert_eq!(warning(PageSizes::Base), None, "as was asked for");
        let says = warning(PageSizes::Mixed { small: 1, all: 512 }).expect("a warning");
        assert!(says.starts_with("1 of 512 areas of 2 MiB are on pages of 4 KiB"), "{says}");
        assert!(warning(PageSizes::Unknown).is_some());
    }
}
