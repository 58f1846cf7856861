//! Removal and return of devices, and their other asynchronous events. Also the messages between the shells
//! of the cores, the descriptors for epoll, and the registration of disks.
//!
//! ```text
//!   DEVICE_REMOVAL, DEVICE_FATAL, not listed ─> on_device_lost ─ its connections end ─> release_device
//!                                                └─ DeviceMessage::Lost ─> the same on the other cores
//!   once a second, on the listening core:
//!     a new device ─> memory registered (`ready`) ─> DeviceMessage::Found
//!     suspended listeners ─> bind and listen again
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
use spindle_rdma::{AsyncEvent, CmChannel, CmId, CmToken, Device, VerbsError};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Area;

use super::device::DeviceCore;
use super::ending::{DrainReporting, End};
use super::events::{CoreDevice, on_async_event, on_failure};
use super::listeners::{BACKLOG, NO_DEVICE, SuspendReason};
use super::ready::{Ready, drop_gone, open_again, remove_older};
use super::shared::insert_in_free;
use super::{SharedDevice, Shell, ShellConfig, Source};
use crate::controller::Conn;

/// Retry period for lost devices, suspended listeners and failed memory registrations.
pub(super) const RETRY_PERIOD: Nanos = Nanos::from_secs(1);

/// A message of one core's shell to the shells of all others.
#[derive(Debug, Clone)]
pub enum DeviceMessage {
    /// The device with this serial number was removed.
    Lost(u64),
    /// A new device, with the memory of all cores registered.
    Found(Arc<Ready>),
    /// The sender's buffer pools. The listening core registers them with new devices.
    Pools(Arc<[Area]>),
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

/// A disk whose memory is the source and destination of RDMA transfers, so that these need no pool buffer.
#[derive(Debug, Clone)]
pub struct DiskArea {
    /// Name in the configuration, for the log.
    pub name: String,
    /// Memory of the disk, to be registered with every device in use.
    pub area: Area,
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

    /// Handles a message of another core's shell.
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
            DeviceMessage::Pools(areas) => {
                if self.listens {
                    self.preparing.add_pools(&areas);
                }
            }
            DeviceMessage::Found(ready) if ready.shared().device().is_lost() => drop(ready),
            DeviceMessage::Found(ready) => {
                remove_older(&mut self.waiting, &ready);
                if let Err(error) = self.open(&ready) {
                    let (device, core) = (ready.shared().device().name(), self.opening.core);
                    tracing::error!(device, core, error, "cannot use RDMA device, retrying");
                    self.waiting.push(ready);
                }
            }
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

    /// Opens a device on this core. Fails if the device is lost or its queues or pools cannot be set up. A
    /// disk whose memory cannot be registered is retried and is no failure.
    fn open(&mut self, ready: &Ready) -> Result<(), String> {
        let shared = ready.shared();
        if shared.device().is_lost() {
            return Err("it is gone".to_owned());
        }
        let mut device = DeviceCore::new(shared, &self.opening).map_err(|error| error.to_string())?;
        for disk in &self.disks {
            let Err(error) = device.add_disk(disk) else { continue };
            if !self.unregistered_disks.contains(&disk.name) {
                let (core, disk) = (self.opening.core, &disk.name);
                tracing::error!(core, disk, %error, "cannot register memory of the disk, retrying");
                self.unregistered_disks.push(disk.clone());
            }
        }
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
        if shared.device().set_lost() {
            let device = shared.device().name();
            tracing::error!(
                device,
                "RDMA device gone: its connections end; it is used again when it returns"
            );
            self.messages.push_back(DeviceMessage::Lost(shared.device().serial()));
        }
        self.missing_devices += 1;
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

    /// Runs every [`RETRY_PERIOD`]: retries failed registrations and openings of devices. On the listening
    /// core also polls the removal of devices, searches for new devices and retries suspended listeners, for
    /// which it opens the connection manager where that was absent.
    pub(super) fn retry<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C) {
        self.retry_disks();
        self.open_waiting();
        if !self.listens {
            return;
        }
        for index in 0..self.devices.len() {
            if self.devices[index].as_ref().is_some_and(|device| !device.shared.device().is_listed()) {
                self.on_device_lost(core, index);
            }
        }
        // No core reads the events of these devices, so their removal is polled. The search does not wait for
        // a removed device that had no listener.
        drop_gone(&mut self.unused);
        self.missing_devices += drop_gone(&mut self.unprepared) + self.preparing.lose_gone();
        if self.missing_devices > 0 || !self.unprepared.is_empty() || self.listeners.has_suspended() {
            self.search();
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

    /// Opens devices that other cores use and this core could not open before.
    fn open_waiting(&mut self) {
        let mut waiting = std::mem::take(&mut self.waiting);
        for ready in open_again(&mut waiting, |ready| self.open(ready)) {
            let (device, core) = (ready.shared().device().name(), self.opening.core);
            tracing::info!(device, core, "RDMA device can be used");
        }
        self.waiting = waiting;
    }

    /// Binds `address` and listens again. ENODEV if the address's device is not open on this core. If that
    /// device was unused so far, starts its preparation.
    fn listen_again(&mut self, address: SocketAddr) -> Result<CmId, VerbsError> {
        let id = CmId::new(self.manager.channel().ok_or(NO_DEVICE)?)?;
        id.bind(address)?;
        id.listen(BACKLOG)?;
        if self.has_device_of(&id) {
            return Ok(id);
        }
        if let Some(at) = self.unused.iter().position(|shared| shared.device().is_of(&id)) {
            let shared = self.unused.swap_remove(at);
            self.prepare(shared);
        }
        Err(NO_DEVICE)
    }

    /// Returns true if the device of the listener `id` is open on this core, or the listener is on all
    /// addresses.
    pub(super) fn has_device_of(&self, id: &CmId) -> bool {
        id.device_name().is_none() || self.device_of(id).is_some()
    }

    /// Returns the open device to which `id` is bound; `None` if the device is lost, left out or not open on
    /// this core.
    pub(super) fn device_of(&self, id: &CmId) -> Option<&DeviceCore> {
        let is_of =
            |it: &&DeviceCore| !it.is_lost && !it.shared.is_left_out() && it.shared.device().is_of(id);
        self.devices.iter().flatten().find(is_of)
    }

    /// Searches for devices that are not known yet. Prepares those that a listener may need, and the
    /// unprepared ones; the others become `unused`.
    fn search(&mut self) {
        let mut found = std::mem::take(&mut self.unprepared);
        if Device::is_any_new() {
            // An error is ignored, as a device may be appearing or disappearing; the search is repeated.
            let all = Device::all().unwrap_or_default();
            let is_known = |it: &Arc<Device>| {
                let serial = it.serial();
                let mut others = self.unused.iter().chain(&found).chain(self.preparing.devices());
                self.index_of(serial).is_some() || others.any(|other| other.device().serial() == serial)
            };
            let new: Vec<_> = all.into_iter().filter(|it| !is_known(it)).map(SharedDevice::of).collect();
            self.missing_devices = self.missing_devices.saturating_sub(new.len());
            found.extend(new);
        }
        let is_on_all = self.listeners.is_on_all();
        for shared in found {
            let name = shared.device().name();
            // librdmacm has opened the same device again; new connections use this context.
            let is_again = self.devices.iter().flatten().any(|known| known.shared.device().name() == name);
            if is_on_all || is_again || shared.is_used() {
                self.prepare(shared);
            } else {
                // Prepared once a listener is on the device.
                self.unused.push(shared);
            }
        }
    }

    /// Starts a thread that registers memory with a device. [`Shell::take_ready`] opens the device
    /// afterwards. If the thread cannot be started, the device is retried.
    pub(super) fn prepare(&mut self, shared: Arc<SharedDevice>) {
        if let Err((shared, error)) = self.preparing.begin(shared, &self.opening.areas, &self.disks) {
            self.refuse(shared, &error);
        }
    }

    /// Opens the devices whose memory is registered, and announces them to the other cores.
    pub(super) fn take_ready(&mut self) {
        while let Some((shared, ended)) = self.preparing.next_done(&self.disks) {
            let device = shared.device().name();
            match ended.and_then(|ready| self.open(&ready).map(|()| ready)) {
                Ok(ready) => {
                    tracing::info!(device, "RDMA device found");
                    self.is_refusal_logged = false;
                    self.messages.push_back(DeviceMessage::Found(ready));
                    // A suspended listener may need this device.
                    self.next_retry = Nanos::ZERO;
                }
                Err(error) => self.refuse(shared, &error),
            }
        }
    }

    /// Logs that a device cannot be used, and queues the device for a retry.
    fn refuse(&mut self, shared: Arc<SharedDevice>, error: &str) {
        // Logged once until a device is found.
        if !std::mem::replace(&mut self.is_refusal_logged, true) {
            tracing::error!(device = shared.device().name(), error, "cannot use RDMA device");
        }
        self.unprepared.push(shared);
    }

    /// Sets the configured disks and registers their memory. Returns the name and error of each failed disk.
    /// Failed disks are retried. Until then a command that uses the memory of such a disk ends its
    /// connection.
    pub fn set_disks(&mut self, disks: Vec<DiskArea>) -> Vec<(String, String)> {
        self.disks = disks;
        for device in self.devices.iter_mut().flatten() {
            device.keys.retain_disks(&self.disks);
        }
        let failed = self.register_disks();
        self.unregistered_disks = failed.iter().map(|(name, _)| name.clone()).collect();
        failed
    }

    fn register_disks(&mut self) -> Vec<(String, String)> {
        let mut failed = Vec::new();
        for disk in &self.disks {
            let mut devices = self.devices.iter_mut().flatten();
            if let Some(error) = devices.find_map(|device| device.add_disk(disk).err()) {
                failed.push((disk.name.clone(), error.to_string()));
            }
        }
        failed
    }

    fn retry_disks(&mut self) {
        if self.unregistered_disks.is_empty() {
            return;
        }
        let failed = self.register_disks();
        let is_done = |name: &mut String| failed.iter().all(|(failed, _)| failed != name);
        for disk in self.unregistered_disks.extract_if(.., is_done) {
            tracing::info!(disk, "memory of the disk is registered: the disk is served over RDMA");
        }
    }

    /// Returns the index of the device with the serial number `serial`; `None` if this core does not have the
    /// device.
    fn index_of(&self, serial: u64) -> Option<usize> {
        let is_it = |device: &DeviceCore| device.shared.device().serial() == serial;
        self.devices.iter().position(|device| device.as_ref().is_some_and(is_it))
    }
}
