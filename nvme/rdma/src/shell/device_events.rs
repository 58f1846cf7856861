//! Arrival and removal of devices, and their other asynchronous events. Also the messages to the shells of
//! the cores, and the descriptors for epoll.
//!
//! ```text
//!   DeviceMessage::Ready (registrar) ─> open, or replace the keys
//!   DeviceMessage::Lost (registrar: not listed; another core) ─┐
//!   DEVICE_REMOVAL, DEVICE_FATAL ──────────────────────────────┴> on_device_lost ─> its connections end
//!                                                                 ─> release_device
//!   once a second, on the listening core: suspended listeners ─> bind and listen again
//! ```
//!
//! ADDR_CHANGE of a listener (a bond has failed over to its other port): the listener binds and listens
//! again. ADDR_CHANGE of a connection: the connection continues while the network delivers its packets, and
//! otherwise ends by its retry timeout.
//!
//! A failed completion queue or queue pair ends only the connections on it. The listening core reads the
//! devices' events and forwards those that may concern other cores.

use spindle_nvme_transport::ConnectionId;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use spindle_nvme_transport::{Connections, Holds};
use spindle_rdma::{AsyncEvent, CmChannel, CmId, CmToken, VerbsError};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Area;

use super::device::DeviceCore;
use super::ending::{DrainReporting, End};
use super::events::{CoreDevice, on_async_event, on_failure};
use super::keys::{Registers, SharedDevice};
use super::listeners::{BACKLOG, NO_DEVICE, SuspendReason};
use super::registrar::Ready;
use super::shared::insert_in_free;
use super::{Shell, ShellConfig, Source};
use crate::controller::Conn;

/// Retry period for suspended listeners and for devices that the core could not open.
pub(super) const RETRY_PERIOD: Nanos = Nanos::from_secs(1);

/// A message of the registrar or of one core's shell to the shells of all other cores.
#[derive(Debug, Clone)]
pub enum DeviceMessage {
    /// A new device, or other memory of a device.
    Ready(Arc<Ready>),
    /// The device with this serial number was removed.
    Lost(u64),
    /// A failure event of the device with this serial number, for the core that has the object.
    Failed(u64, AsyncEvent),
}

/// Parameters for opening a device on this core.
pub(super) struct Opening {
    pub(super) core: usize,
    /// The core's buffer pools and [`Area::zeroes`].
    pub(super) areas: Vec<Area>,
    pub(super) in_capsule_bytes: u32,
    pub(super) config: ShellConfig,
}

/// This core's state of a device that has reported an event.
struct ShellDevice<'a, C> {
    shell: &'a mut Shell,
    core: &'a mut C,
    /// Index in `Shell::devices`.
    index: usize,
}

impl<C> ShellDevice<'_, C> {
    fn device(&self) -> Option<&DeviceCore> {
        self.shell.devices.get(self.index)?.as_ref()
    }

    fn device_mut(&mut self) -> Option<&mut DeviceCore> {
        self.shell.devices.get_mut(self.index)?.as_mut()
    }
}

impl<C: Connections<Conn: Holds<Conn>>> CoreDevice for ShellDevice<'_, C> {
    fn name(&self) -> &str {
        self.device().map_or("", |device| device.shared.device().name())
    }

    fn on_device_lost(&mut self) {
        self.shell.on_device_lost(self.core, self.index);
    }

    fn forward(&mut self, event: AsyncEvent) {
        if let Some(serial) = self.device().map(|device| device.shared.device().serial()) {
            self.shell.messages.push_back(DeviceMessage::Failed(serial, event));
        }
    }

    fn end_queue_pair(&mut self, serial: usize) {
        let index = self.index;
        self.shell.end_links(self.core, |device, _, queue_pair| device == index && queue_pair == serial);
    }

    fn end_completions(&mut self, queue: usize) {
        let index = self.index;
        if let Some(completions) = self.device_mut().and_then(|device| device.set_broken(queue)) {
            self.shell.end_links(self.core, |device, queue, _| device == index && queue == completions);
        }
    }

    fn connection(&self, number: u32, serial: usize) -> Option<ConnectionId> {
        let id = *self.device()?.ids_by_number.get(&number)?;
        let link = self.shell.links.get(id.index())?.as_ref()?;
        (link.serial() == serial).then_some(id)
    }

    fn drain_reporting(&mut self) -> Option<&mut DrainReporting> {
        self.device_mut().map(|device| &mut device.drain_reporting)
    }

    fn queue_pair_end(&mut self, id: ConnectionId) -> Option<&mut End> {
        self.shell.link(id).map(|link| &mut link.end)
    }

    fn pump(&mut self, id: ConnectionId) {
        self.shell.pump(self.core, id);
    }
}

impl Shell {
    /// Returns the next message for the shells of the other cores; `None` if there is none.
    pub fn next_message(&mut self) -> Option<DeviceMessage> {
        self.messages.pop_front()
    }

    /// Handles a message of the registrar or of another core's shell.
    pub fn on_message<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, message: DeviceMessage) {
        match message {
            DeviceMessage::Lost(serial) => {
                // Removes the device from `waiting`, as it is marked as lost.
                self.open_waiting();
                if let Some(index) = self.index_of(serial) {
                    self.on_device_lost(core, index);
                }
            }
            DeviceMessage::Failed(serial, event) => {
                if let Some(index) = self.index_of(serial) {
                    on_failure(&mut ShellDevice { shell: self, core, index }, event);
                }
            }
            DeviceMessage::Ready(ready) => self.on_device_ready(ready),
        }
    }

    /// Opens the device, or replaces the keys of the open device.
    #[cold]
    fn on_device_ready(&mut self, ready: Arc<Ready>) {
        let device = ready.shared.device();
        if device.is_lost() {
            return;
        }
        if let Some(open) = self.index_of(device.serial()).and_then(|index| self.devices[index].as_mut()) {
            open.keys.set(ready.of_core(&self.opening.areas));
            return;
        }
        let open = self.devices.iter().flatten().map(|it| &*it.shared);
        if is_replaced(&ready.shared, open.chain(self.waiting.iter().map(|it| &*it.shared))) {
            return;
        }
        remove_older(&mut self.waiting, &ready);
        if let Err(error) = self.open(&ready) {
            let (device, core) = (device.name(), self.opening.core);
            tracing::error!(device, core, %error, "cannot use RDMA device, next attempt in 1 s");
            self.waiting.push(ready);
        }
    }

    /// Returns true if [`Shell::take_descriptors`] would return descriptors.
    #[inline]
    #[must_use]
    pub fn has_descriptors(&self) -> bool {
        self.manager.is_new() || self.devices.iter().flatten().any(|device| !device.is_watched)
    }

    /// Returns the descriptors to add to epoll for reading. Each is returned once. The asynchronous events of
    /// devices are included only on the listening core.
    pub fn take_descriptors(&mut self) -> Vec<(Source, BorrowedFd<'_>)> {
        let channel = self.manager.take_new().map(|channel| (Source::Manager, channel.as_fd()));
        let listens = self.listens;
        let devices = self.devices.iter_mut().flatten().filter(|device| !device.is_watched);
        let of_device = devices.flat_map(|device| {
            device.is_watched = true;
            let own = listens.then(|| (Source::Device, device.shared.device().async_fd()));
            own.into_iter().chain([(Source::Completions, device.channel.as_fd())])
        });
        channel.into_iter().chain(of_device).collect()
    }

    /// Opens a device on this core. Fails if its completion channel cannot be created.
    fn open(&mut self, ready: &Ready) -> Result<(), VerbsError> {
        let shared = &ready.shared;
        let device = DeviceCore::new(ready, &self.opening)?;
        // librdmacm may have opened the same device again under a new context. New connections use the new
        // context.
        for index in 0..self.devices.len() {
            if let Some(old) = &mut self.devices[index]
                && old.shared.device().name() == shared.device().name()
            {
                old.is_replaced = true;
                self.release_device(index);
            }
        }
        insert_in_free(&mut self.devices, device);
        // A suspended listener may need this device.
        self.next_retry = Nanos::ZERO;
        Ok(())
    }

    /// Handles the loss of a device: ends its connections, drops its pending connection requests and suspends
    /// its listeners. The first core that calls this reports the loss to the others.
    #[cold]
    pub(super) fn on_device_lost<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, index: usize) {
        let Some(device) = self.devices.get_mut(index).and_then(Option::as_mut) else { return };
        if std::mem::replace(&mut device.is_lost, true) {
            return;
        }
        let shared = Arc::clone(&device.shared);
        if shared.set_lost() {
            self.messages.push_back(DeviceMessage::Lost(shared.device().serial()));
        }
        self.requests.retain(|request| !shared.device().is_of(&request.id));
        self.listeners.suspend_on(shared.device().name());
        self.end_links(core, |link_device, _, _| link_device == index);
        self.release_device(index);
    }

    /// Drops this core's state of a lost or replaced device once no connection of the core uses it.
    pub(super) fn release_device(&mut self, index: usize) {
        let is_used = self.links.iter().flatten().any(|link| link.device == index);
        if let Some(place) = self.devices.get_mut(index)
            && place.as_ref().is_some_and(|device| device.is_lost || device.is_replaced)
            && !is_used
        {
            *place = None;
        }
    }

    /// Disconnects the connections that `which` selects by index of the device, index of the completion queue
    /// in it, and serial of the queue pair.
    fn end_links<C: Connections<Conn: Holds<Conn>>>(
        &mut self,
        core: &mut C,
        which: impl Fn(usize, usize, usize) -> bool,
    ) {
        let picked = self.links.iter().flatten();
        let picked = picked.filter(|link| which(link.device, link.reservation.completions, link.serial()));
        let picked: Vec<ConnectionId> = picked.map(|link| link.id).collect();
        for id in picked {
            self.disconnect(core, id);
        }
    }

    /// Handles RDMA_CM_EVENT_DEVICE_REMOVAL of a connection or listener.
    #[cold]
    pub(super) fn on_removal<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, token: CmToken) {
        let of_link = self.ids.get(&token).and_then(|id| self.links.get(id.index())?.as_ref());
        let of_listener = || self.listeners.find(token).map(|it| &it.id);
        let cm = of_link.map(|link| &link.cm).or_else(of_listener);
        let Some(name) = cm.and_then(CmId::device_name) else { return };
        // Compares names, as librdmacm may have opened the same device twice.
        for index in 0..self.devices.len() {
            let device = self.devices[index].as_ref().map(|device| device.shared.device());
            if device.is_some_and(|device| device.name() == name) {
                self.on_device_lost(core, index);
            }
        }
        self.listeners.suspend_on(&name);
    }

    /// Handles RDMA_CM_EVENT_ADDR_CHANGE: suspends a listener; a connection is only logged.
    #[cold]
    pub(super) fn on_address_change(&mut self, token: CmToken) {
        if let Some(address) = self.listeners.suspend(token) {
            tracing::warn!(%address, "RDMA listener's address has moved: binding it again");
            self.next_retry = Nanos::ZERO;
        } else if let Some(id) = self.ids.get(&token).copied() {
            let remote = self.link(id).and_then(|link| link.cm.peer_address());
            tracing::info!(?remote, "RDMA port of a connection has changed: the connection may end soon");
        }
    }

    /// Handles an asynchronous event of a device, on the listening core.
    pub(super) fn on_device_event<C: Connections<Conn: Holds<Conn>>>(
        &mut self,
        core: &mut C,
        index: usize,
        event: AsyncEvent,
    ) {
        on_async_event(&mut ShellDevice { shell: self, core, index }, event);
    }

    /// Runs every [`RETRY_PERIOD`]: retries devices that could not be opened. On the listening core also
    /// retries suspended listeners, for which it opens the connection manager where that was absent.
    pub(super) fn retry(&mut self) {
        self.open_waiting();
        if !self.listens {
            return;
        }
        let mut listeners = std::mem::take(&mut self.listeners);
        // Once for all listeners.
        let manager = match listeners.has_suspended() {
            true => self.manager.get_or_open(CmChannel::if_listed).map(drop),
            false => Ok(()),
        };
        let listen = |address, reason| {
            let listening = manager.and_then(|()| self.listen_again(address));
            if let Err(error) = &listening
                && reason == SuspendReason::New
            {
                tracing::warn!(%address, %error, "cannot listen over RDMA yet, retrying");
            }
            listening
        };
        for back in listeners.retry(listen) {
            let address = back.address;
            match back.reason {
                SuspendReason::New => tracing::info!(%address, "listening (NVMe/RDMA, discovery included)"),
                SuspendReason::Absent => {
                    tracing::info!(%address, "listening (NVMe/RDMA): the address is available now")
                }
                SuspendReason::Device => tracing::info!(%address, "RDMA device is back: listening again"),
                SuspendReason::Moved | SuspendReason::Refused => {
                    tracing::info!(%address, "listening again over RDMA")
                }
            }
        }
        self.listeners = listeners;
    }

    /// Opens the devices that this core could not open before.
    fn open_waiting(&mut self) {
        let mut waiting = std::mem::take(&mut self.waiting);
        for ready in open_again(&mut waiting, |ready| self.open(ready)) {
            let (device, core) = (ready.shared.device().name(), self.opening.core);
            tracing::info!(device, core, "RDMA device can be used");
        }
        self.waiting = waiting;
    }

    /// Binds `address` and listens again. ENODEV if the address's device is not open on this core; then the
    /// registrar is asked for the device.
    fn listen_again(&mut self, address: SocketAddr) -> Result<CmId, VerbsError> {
        let id = CmId::new(self.manager.channel().ok_or(NO_DEVICE)?)?;
        id.bind(address)?;
        id.listen(BACKLOG)?;
        if self.has_device_of(&id) {
            return Ok(id);
        }
        self.known.use_device_of(&id);
        Err(NO_DEVICE)
    }

    /// Returns true if the device of the listener `id` is open on this core, or the listener is on all
    /// addresses.
    pub(super) fn has_device_of(&self, id: &CmId) -> bool {
        id.device_name().is_none() || self.device_of(id).is_some()
    }

    /// Returns the open device to which `id` is bound; `None` if the device is lost or not open on this core.
    pub(super) fn device_of(&self, id: &CmId) -> Option<&DeviceCore> {
        let is_of = |it: &&DeviceCore| !it.is_lost && it.shared.device().is_of(id);
        self.devices.iter().flatten().find(is_of)
    }

    /// Returns the index of the device with the serial number `serial`; `None` if this core does not have the
    /// device.
    fn index_of(&self, serial: u64) -> Option<usize> {
        let is_it = |device: &DeviceCore| device.shared.device().serial() == serial;
        self.devices.iter().position(|device| device.as_ref().is_some_and(is_it))
    }
}

/// Removes lost devices from `waiting`, retries the others, and removes and returns those that were opened.
fn open_again<D: Registers, E>(
    waiting: &mut Vec<Arc<Ready<D>>>,
    mut open: impl FnMut(&Ready<D>) -> Result<(), E>,
) -> Vec<Arc<Ready<D>>> {
    waiting.retain(|ready| !ready.shared.device().is_lost());
    waiting.extract_if(.., |ready| open(ready).is_ok()).collect()
}

/// Returns true if a device of `known` is a newer context of the same device: librdmacm has opened it again,
/// and this core has released `device`.
fn is_replaced<'a, D: Registers>(
    device: &SharedDevice<D>,
    mut known: impl Iterator<Item = &'a SharedDevice<D>>,
) -> bool {
    let device = device.device();
    known.any(|it| it.device().name() == device.name() && it.device().serial() > device.serial())
}

/// Removes from `waiting` the devices with the name of `newer`, which replaces them.
fn remove_older<D: Registers>(waiting: &mut Vec<Arc<Ready<D>>>, newer: &Ready<D>) {
    waiting.retain(|ready| ready.shared.device().name() != newer.shared.device().name());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shell::fake::{Fake, fake};

    fn ready(name: &'static str) -> Arc<Ready<Fake>> {
        Arc::new(Ready { shared: SharedDevice::of(fake(name)), regions: Vec::new() })
    }

    #[test]
    fn a_device_that_a_core_cannot_open_is_kept_and_tried_until_it_is_open_or_lost() {
        let (a, b) = (ready("a"), ready("b"));
        let mut waiting = vec![Arc::clone(&a), Arc::clone(&b)];
        let mut tries = 0;
        let mut fail = |_: &Ready<Fake>| {
            tries += 1;
            Err("no memory")
        };
        assert!(
            open_again(&mut waiting, &mut fail).is_empty() && open_again(&mut waiting, &mut fail).is_empty()
        );
        assert_eq!(tries, 4);
        b.shared.set_lost();
        let opened = open_again(&mut waiting, |_| Ok::<_, ()>(()));
        assert!(opened.len() == 1 && Arc::ptr_eq(&opened[0], &a));
        assert!(open_again(&mut waiting, |_| -> Result<(), ()> { panic!("nothing is left") }).is_empty());
        assert_eq!(Arc::strong_count(&b), 1, "a lost one is not held");
    }

    #[test]
    fn an_older_context_of_a_device_is_not_opened_again() {
        let (old, new, other) = (ready("a"), ready("a"), ready("b"));
        let known = || [&*new.shared, &*other.shared].into_iter();
        assert!(is_replaced(&old.shared, known()));
        assert!(!is_replaced(&new.shared, [&*old.shared, &*other.shared].into_iter()));
        assert!(!is_replaced(&ready("c").shared, known()));
    }

    #[test]
    fn a_device_that_waits_gives_way_to_one_of_its_name() {
        let mut waiting = vec![ready("a"), ready("b")];
        remove_older(&mut waiting, &ready("a"));
        let opened = open_again(&mut waiting, |_| Ok::<_, ()>(()));
        assert_eq!(opened.iter().map(|it| it.shared.device().name()).collect::<Vec<_>>(), ["b"]);
    }
}
