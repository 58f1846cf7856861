//! Devices that go and come back, and what else a device tells outside of completions.
//!
//! ```text
//!   DEVICE_REMOVAL, DEVICE_FATAL, not listed ─> lose ─ its connections end ─> release_device
//!                                                └─ told to the other cores, which do the same
//!   once a second, where listeners are: a device not seen before ─> its memory (`ready`) ─> to all cores
//!                                                                 └─ listen again
//! ```
//!
//! ADDR_CHANGE of a listener (a bond has gone over to its other port): it listens anew. Of a connection: it
//! goes on as long as the network brings its packets, and ends by its own error where that is no more.
//!
//! A failed completion queue or queue pair ends the connections on it and nothing else. Who reads a device's
//! events is the core that listens; what they are about may be another core's.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use spindle_rdma_verbs::{AsyncEvent, CmId, CmToken, Device};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Area;
use spindle_reactor::slab::Slot;
use spindle_transport::{Connections, Holds};

use super::device::DeviceCore;
use super::ending::{End, Tells};
use super::events::{Part, failed, told};
use super::listeners::{BACKLOG, Why};
use super::ready::{Ready, drop_gone, open_again, remove_older};
use super::shared::put_first;
use super::{SharedDevice, Shell, ShellConfig, Source};
use crate::controller::Conn;

/// How often lost devices and listeners, and memory that could not be registered, are tried again.
pub(super) const RETRY_PERIOD: Nanos = Nanos::from_secs(1);

/// What one core tells all others.
#[derive(Debug, Clone)]
pub enum DeviceMessage {
    /// The device of this serial number is gone.
    Lost(u64),
    /// There is a new one, with the memory of all cores registered.
    Found(Arc<Ready>),
    /// The sender's pools, for the core that has them registered with new devices.
    Pools(Arc<[Area]>),
    /// Something of the device of this serial number has failed or ended, maybe not the sender's.
    Failed(u64, AsyncEvent),
}

/// What a device is opened with.
pub(super) struct Opening {
    pub(super) core: usize,
    /// The core's pools, and the zeroes.
    pub(super) areas: Vec<Area>,
    pub(super) in_capsule_bytes: u32,
    pub(super) config: ShellConfig,
}

/// A disk whose memory commands move without a buffer of the pool.
#[derive(Debug, Clone)]
pub struct DiskArea {
    /// The disk's name, for the log.
    pub name: String,
    /// Its memory.
    pub area: Area,
}

/// A core's part of a device that tells something.
struct DevicePart<'a, C> {
    shell: &'a mut Shell,
    core: &'a mut C,
    /// Of the device.
    index: usize,
}

impl<C> DevicePart<'_, C> {
    fn device(&self) -> Option<&DeviceCore> {
        self.shell.devices.get(self.index)?.as_ref()
    }

    fn device_mut(&mut self) -> Option<&mut DeviceCore> {
        self.shell.devices.get_mut(self.index)?.as_mut()
    }
}

impl<C: Connections<Conn: Holds<Conn>>> Part for DevicePart<'_, C> {
    fn name(&self) -> &str {
        self.device().map_or("", |device| device.shared.device().name())
    }

    fn lose(&mut self) {
        self.shell.lose(self.core, self.index);
    }

    fn tell_others(&mut self, event: AsyncEvent) {
        if let Some(serial) = self.device().map(|device| device.shared.device().serial()) {
            self.shell.messages.push_back(DeviceMessage::Failed(serial, event));
        }
    }

    fn end_queue_pair(&mut self, number: u32) {
        let index = self.index;
        self.shell.end_links(self.core, |device, _, queue_pair| device == index && queue_pair == number);
    }

    fn end_completions(&mut self, queue: usize) {
        let index = self.index;
        if let Some(completions) = self.device_mut().and_then(|device| device.set_broken(queue)) {
            self.shell.end_links(self.core, |device, queue, _| device == index && queue == completions);
        }
    }

    fn connection(&self, number: u32) -> Option<Slot> {
        self.device()?.numbers.get(&number).copied()
    }

    fn tells(&mut self) -> Option<&mut Tells> {
        self.device_mut().map(|device| &mut device.tells)
    }

    fn end_of(&mut self, id: Slot) -> Option<&mut End> {
        self.shell.link(id).map(|link| &mut link.end)
    }

    fn pump(&mut self, id: Slot) {
        self.shell.pump(self.core, id);
    }
}

impl Shell {
    /// What another core is to be told.
    pub fn next_message(&mut self) -> Option<DeviceMessage> {
        self.messages.pop_front()
    }

    /// What another core tells.
    pub fn on_message<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, message: DeviceMessage) {
        match message {
            DeviceMessage::Lost(serial) => {
                // It is marked: one that waits here is not opened any more, but let go of.
                self.open_waiting();
                if let Some(index) = self.place_of(serial) {
                    self.lose(core, index);
                }
            }
            DeviceMessage::Failed(serial, event) => {
                if let Some(index) = self.place_of(serial) {
                    failed(&mut DevicePart { shell: self, core, index }, event);
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
                    tracing::error!(device, core, error, "RDMA device cannot be used: it is tried again");
                    self.waiting.push(ready);
                }
            }
        }
    }

    /// [`Shell::take_descriptors`] has some.
    #[inline]
    #[must_use]
    pub fn has_descriptors(&self) -> bool {
        !self.is_watched || self.devices.iter().flatten().any(|device| !device.is_watched)
    }

    /// Descriptors that are not watched yet. They are taken to be watched from now on, for reading.
    pub fn take_descriptors(&mut self) -> Vec<(Source, BorrowedFd<'_>)> {
        let is_new = !std::mem::replace(&mut self.is_watched, true);
        let channel = is_new.then(|| (Source::Manager, self.channel.as_fd()));
        let listens = self.listens;
        let devices = self.devices.iter_mut().flatten().filter(|device| !device.is_watched);
        let of_device = devices.flat_map(|device| {
            device.is_watched = true;
            let own = listens.then(|| (Source::Device, device.shared.device().async_fd()));
            own.into_iter().chain([(Source::Completions, device.channel.as_fd())])
        });
        channel.into_iter().chain(of_device).collect()
    }

    /// Take up a device, with the memory of this core, which is registered. A disk whose memory cannot be
    /// registered is tried again by itself.
    fn open(&mut self, ready: &Ready) -> Result<(), String> {
        let shared = ready.shared();
        if shared.device().is_lost() {
            return Err("it is gone".to_owned());
        }
        let mut device = DeviceCore::new(shared, &self.opening).map_err(|error| error.to_string())?;
        for disk in &self.disks {
            let Err(error) = device.add_disk(disk) else { continue };
            if !self.refused.contains(&disk.name) {
                let (core, disk) = (self.opening.core, &disk.name);
                tracing::error!(core, disk, %error, "memory of the disk cannot be registered: tried again");
                self.refused.push(disk.clone());
            }
        }
        // librdmacm, having looked for devices at a bad time, opens those that it has anew, and all that
        // comes from then on is of the new one.
        for index in 0..self.devices.len() {
            if let Some(old) = &mut self.devices[index]
                && old.shared.device().name() == shared.device().name()
            {
                old.is_replaced = true;
                self.release_device(index);
            }
        }
        put_first(&mut self.devices, device);
        Ok(())
    }

    /// A device is gone: its connections end, and what is waiting for it is refused.
    #[cold]
    pub(super) fn lose<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, index: usize) {
        let Some(device) = self.devices.get_mut(index).and_then(Option::as_mut) else { return };
        if std::mem::replace(&mut device.is_lost, true) {
            return;
        }
        let shared = Arc::clone(&device.shared);
        if shared.device().set_lost() {
            let device = shared.device().name();
            tracing::error!(device, "RDMA device gone: its connections end; it is taken up when it is back");
            self.messages.push_back(DeviceMessage::Lost(shared.device().serial()));
        }
        self.missing += 1;
        self.requests.retain(|request| !shared.device().is_of(&request.id));
        self.listeners.suspend_on(shared.device().name());
        self.end_links(core, |link_device, _, _| link_device == index);
        self.release_device(index);
    }

    /// Let go of a device that is lost or replaced, once nothing of it is in use.
    pub(super) fn release_device(&mut self, index: usize) {
        let is_used = self.links.iter().flatten().any(|link| link.device == index);
        if let Some(place) = self.devices.get_mut(index)
            && place.as_ref().is_some_and(|device| device.is_lost || device.is_replaced)
            && !is_used
        {
            *place = None;
        }
    }

    /// Disconnect the connections that `which` picks by device, completion queue and number.
    fn end_links<C: Connections<Conn: Holds<Conn>>>(
        &mut self,
        core: &mut C,
        which: impl Fn(usize, usize, u32) -> bool,
    ) {
        let picked = self.links.iter().flatten();
        let picked = picked.filter(|link| which(link.device, link.reservation.completions, link.number()));
        let picked: Vec<Slot> = picked.map(|link| link.id).collect();
        for id in picked {
            self.disconnect(core, id);
        }
    }

    /// DEVICE_REMOVAL of an identifier.
    #[cold]
    pub(super) fn on_removal<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, token: CmToken) {
        let of_link = self.ids.get(&token).and_then(|id| self.links.get(id.index())?.as_ref());
        let of_listener = || self.listeners.of(token).map(|it| &it.id);
        let cm = of_link.map(|link| &link.cm).or_else(of_listener);
        let Some(name) = cm.and_then(CmId::device_name) else { return };
        // By name, as librdmacm may have opened the same device twice.
        for index in 0..self.devices.len() {
            let device = self.devices[index].as_ref().map(|device| device.shared.device());
            if device.is_some_and(|device| device.name() == name) {
                self.lose(core, index);
            }
        }
        self.listeners.suspend_on(&name);
    }

    /// ADDR_CHANGE of an identifier.
    #[cold]
    pub(super) fn on_address_change(&mut self, token: CmToken) {
        if let Some(address) = self.listeners.moved(token) {
            tracing::warn!(%address, "the RDMA listener's address has moved: it listens anew");
            self.next_retry = Nanos::ZERO;
        } else if let Some(id) = self.ids.get(&token).copied() {
            let remote = self.link(id).and_then(|link| link.cm.peer_address());
            tracing::info!(?remote, "a connection's RDMA port has changed: it may end soon");
        }
    }

    /// What a device tells of itself, on the core that listens.
    pub(super) fn on_device_event<C: Connections<Conn: Holds<Conn>>>(
        &mut self,
        core: &mut C,
        index: usize,
        event: AsyncEvent,
    ) {
        told(&mut DevicePart { shell: self, core, index }, event);
    }

    /// Once in a while: what was lost or failed is tried again.
    pub(super) fn retry<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C) {
        self.retry_disks();
        self.open_waiting();
        if !self.listens {
            return;
        }
        for index in 0..self.devices.len() {
            if self.devices[index].as_ref().is_some_and(|device| !device.shared.device().is_listed()) {
                self.lose(core, index);
            }
        }
        // No core hears their events, so they are looked at. One without a listener is not missing.
        drop_gone(&mut self.unused);
        self.missing += drop_gone(&mut self.unopened) + self.preparing.lose_gone();
        if self.missing > 0 || !self.unopened.is_empty() || self.listeners.has_suspended() {
            self.search();
        }
        let mut listeners = std::mem::take(&mut self.listeners);
        let listen = |address, why| {
            let listening = self.listen_again(address);
            if listening.is_none() && why == Why::New {
                tracing::warn!(%address, "not listened on over RDMA yet: it is tried again");
            }
            listening
        };
        for back in listeners.again(listen) {
            let address = back.address;
            match back.why {
                Why::New => tracing::info!(%address, "listening (NVMe/RDMA, discovery included)"),
                Why::Device => tracing::info!(%address, "RDMA device is back: listening again"),
                Why::Moved | Why::Refused => tracing::info!(%address, "listening again over RDMA"),
            }
        }
        self.listeners = listeners;
    }

    /// Devices that the others have, and this core could not open.
    fn open_waiting(&mut self) {
        let mut waiting = std::mem::take(&mut self.waiting);
        for ready in open_again(&mut waiting, |ready| self.open(ready)) {
            let (device, core) = (ready.shared().device().name(), self.opening.core);
            tracing::info!(device, core, "RDMA device can be used");
        }
        self.waiting = waiting;
    }

    /// Listen on an address again. `None`: it cannot be had, or its device is not there or not ready.
    fn listen_again(&mut self, address: SocketAddr) -> Option<CmId> {
        let id = CmId::new(&self.channel).ok()?;
        id.bind(address).and_then(|()| id.listen(BACKLOG)).ok()?;
        if self.has_device_of(&id) {
            return Some(id);
        }
        if let Some(at) = self.unused.iter().position(|shared| shared.device().is_of(&id)) {
            let shared = self.unused.swap_remove(at);
            self.prepare(shared);
        }
        None
    }

    /// There is the device of this listener; one on all addresses is on none.
    pub(super) fn has_device_of(&self, id: &CmId) -> bool {
        id.device_name().is_none() || self.device_of(id).is_some()
    }

    /// The device of an identifier, where it is served.
    pub(super) fn device_of(&self, id: &CmId) -> Option<&DeviceCore> {
        let is_of =
            |it: &&DeviceCore| !it.is_lost && !it.shared.is_left_out() && it.shared.device().is_of(id);
        self.devices.iter().flatten().find(is_of)
    }

    /// Look for devices that are not known yet.
    fn search(&mut self) {
        let mut found = std::mem::take(&mut self.unopened);
        if Device::is_any_new() {
            // One may be on its way in or out: there is another time.
            let all = Device::all().unwrap_or_default();
            let is_known = |it: &Arc<Device>| {
                let serial = it.serial();
                let mut others = self.unused.iter().chain(&found).chain(self.preparing.devices());
                self.place_of(serial).is_some() || others.any(|other| other.device().serial() == serial)
            };
            let new: Vec<_> = all.into_iter().filter(|it| !is_known(it)).map(SharedDevice::of).collect();
            self.missing = self.missing.saturating_sub(new.len());
            found.extend(new);
        }
        let is_on_all = self.listeners.is_on_all();
        for shared in found {
            let name = shared.device().name();
            // The same device opened anew: all that comes from now on is of the new one.
            let is_again = self.devices.iter().flatten().any(|known| known.shared.device().name() == name);
            if is_on_all || is_again || shared.is_used() {
                self.prepare(shared);
            } else {
                // A listener that is on it takes it up.
                self.unused.push(shared);
            }
        }
    }

    /// Have a device taken up as soon as its memory is registered, which another thread does.
    pub(super) fn prepare(&mut self, shared: Arc<SharedDevice>) {
        if let Err((shared, error)) = self.preparing.begin(shared, &self.opening.areas, &self.disks) {
            self.refuse(shared, &error);
        }
    }

    /// Use the devices that are ready by now, and have the other cores do so.
    pub(super) fn take_ready(&mut self) {
        while let Some((shared, ended)) = self.preparing.next_done(&self.disks) {
            let device = shared.device().name();
            match ended.and_then(|ready| self.open(&ready).map(|()| ready)) {
                Ok(ready) => {
                    tracing::info!(device, "RDMA device found");
                    self.has_refused = false;
                    self.messages.push_back(DeviceMessage::Found(ready));
                    // A listener may wait for it.
                    self.next_retry = Nanos::ZERO;
                }
                Err(error) => self.refuse(shared, &error),
            }
        }
    }

    /// A device cannot be taken up. It is tried again.
    fn refuse(&mut self, shared: Arc<SharedDevice>, error: &str) {
        // Said once.
        if !std::mem::replace(&mut self.has_refused, true) {
            tracing::error!(device = shared.device().name(), error, "RDMA device cannot be used");
        }
        self.unopened.push(shared);
    }

    /// Register the memory of the disks that there are now. Gives those for which that failed, and why: they
    /// are tried again, and meanwhile commands to them end their connection.
    pub fn set_disks(&mut self, disks: Vec<DiskArea>) -> Vec<(String, String)> {
        self.disks = disks;
        for device in self.devices.iter_mut().flatten() {
            device.keys.retain_disks(&self.disks);
        }
        let failed = self.register_disks();
        self.refused = failed.iter().map(|(name, _)| name.clone()).collect();
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
        if self.refused.is_empty() {
            return;
        }
        let failed = self.register_disks();
        let is_done = |name: &mut String| failed.iter().all(|(failed, _)| failed != name);
        for disk in self.refused.extract_if(.., is_done) {
            tracing::info!(disk, "memory of the disk is registered: served over RDMA");
        }
    }

    /// Where the device of this serial number is.
    fn place_of(&self, serial: u64) -> Option<usize> {
        let is_it = |device: &DeviceCore| device.shared.device().serial() == serial;
        self.devices.iter().position(|device| device.as_ref().is_some_and(is_it))
    }
}
