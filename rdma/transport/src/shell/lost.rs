//! Devices that go and come back, and what else a device tells outside of completions.
//!
//! ```text
//!   DEVICE_REMOVAL, DEVICE_FATAL, not listed ─> lose ─ its connections end ─> forget: its last holder closes
//!                                                └─ told to the other cores, which do the same
//!   once a second, where listeners are: a device not seen before ─> to all cores ─> listen again
//! ```
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
use super::{Listening, SharedDevice, Shell, ShellConfig, Source};
use crate::controller::Conn;

/// How often lost devices and listeners, and memory that could not be registered, are tried again.
pub(super) const RETRY_PERIOD: Nanos = Nanos::from_secs(1);

/// What one core tells all others.
#[derive(Debug, Clone)]
pub enum DeviceMessage {
    /// The device of this serial number is gone.
    Lost(u64),
    /// There is a new one.
    Found(Arc<SharedDevice>),
    /// Something of the device of this serial number has failed, maybe not the sender's.
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

/// An address that is not listened on, as its device is gone.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deaf {
    pub(super) address: SocketAddr,
    pub(super) index: usize,
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
                if let Some(index) = self.place_of(serial) {
                    self.lose(core, index);
                }
            }
            DeviceMessage::Failed(serial, event) => self.on_failed(core, serial, event),
            DeviceMessage::Found(shared) => {
                if let Err(error) = self.open(&shared) {
                    let device = shared.device().name();
                    tracing::error!(device, core = self.opening.core, %error, "RDMA device cannot be used");
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

    /// Descriptors that nobody watches yet. They are taken to be watched from now on, for reading.
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

    /// Take up a device, with the memory of this core.
    pub(super) fn open(&mut self, shared: &Arc<SharedDevice>) -> Result<(), String> {
        let mut device = DeviceCore::new(shared, &self.opening).map_err(|error| error.to_string())?;
        for disk in &self.disks {
            device.add_disk(disk).map_err(|error| format!("disk {}: {error}", disk.name))?;
        }
        // librdmacm, having looked for devices at a bad time, opens those that it has anew, and all that
        // comes from then on is of the new one.
        for index in 0..self.devices.len() {
            if let Some(old) = &mut self.devices[index]
                && old.shared.device().name() == shared.device().name()
            {
                old.is_replaced = true;
                self.forget(index);
            }
        }
        match self.devices.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = Some(device),
            None => self.devices.push(Some(device)),
        }
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
        self.deafen(shared.device().name());
        self.end_links(core, |link_device, _, _| link_device == index);
        self.forget(index);
    }

    /// Let go of a device that is lost or replaced, once nothing of it is in use.
    pub(super) fn forget(&mut self, index: usize) {
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
            if let Some(conn) = core.transport(id).and_then(Holds::held) {
                conn.on_disconnected();
            }
            core.step_sent(id);
            self.pump(core, id);
        }
    }

    /// DEVICE_REMOVAL of an identifier.
    #[cold]
    pub(super) fn on_removal<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, token: CmToken) {
        let of_link = self.ids.get(&token).and_then(|id| self.links.get(id.index())?.as_ref());
        let of_listener = || self.listening.iter().find(|it| it.id.token() == token).map(|it| &it.id);
        let cm = of_link.map(|link| &link.cm).or_else(of_listener);
        let Some(name) = cm.and_then(CmId::device_name) else { return };
        // By name, as librdmacm may have opened the same device twice.
        for index in 0..self.devices.len() {
            let device = self.devices[index].as_ref().map(|device| device.shared.device());
            if device.is_some_and(|device| device.name() == name) {
                self.lose(core, index);
            }
        }
        self.deafen(&name);
    }

    /// Listeners on a device that is gone hear nothing any more.
    fn deafen(&mut self, device: &str) {
        let is_on = |it: &mut Listening| it.id.device_name().is_some_and(|name| name == device);
        for listening in self.listening.extract_if(.., is_on) {
            self.deaf.push(Deaf { address: listening.address, index: listening.index });
        }
    }

    /// What a device tells of itself, on the core that listens.
    pub(super) fn on_device_event<C: Connections<Conn: Holds<Conn>>>(
        &mut self,
        core: &mut C,
        index: usize,
        event: AsyncEvent,
    ) {
        let Some(device) = self.devices.get(index).and_then(Option::as_ref) else { return };
        let (name, serial) = (device.shared.device().name(), device.shared.device().serial());
        match event {
            AsyncEvent::PortDown { port } => tracing::warn!(
                device = name,
                port,
                "RDMA port down: its connections end unless it comes back soon"
            ),
            AsyncEvent::PortUp { port } => tracing::info!(device = name, port, "RDMA port up"),
            AsyncEvent::DeviceFatal => self.lose(core, index),
            AsyncEvent::CompletionQueueError { .. } => {
                tracing::error!(device = name, "RDMA completion queue failed: its connections end");
                self.messages.push_back(DeviceMessage::Failed(serial, event));
                self.on_failed(core, serial, event);
            }
            AsyncEvent::QueuePairFatal { number } => {
                // A host can bring it about as often as it likes.
                tracing::debug!(device = name, number, "RDMA queue pair failed");
                self.messages.push_back(DeviceMessage::Failed(serial, event));
                self.on_failed(core, serial, event);
            }
            // Among them that a queue pair in its error state takes no more shared receives: of one that is
            // ended here nothing depends on it, of another the failure itself is told.
            AsyncEvent::Other(_) => {}
        }
    }

    fn on_failed<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, serial: u64, event: AsyncEvent) {
        let Some(index) = self.place_of(serial) else { return };
        match event {
            AsyncEvent::CompletionQueueError { queue } => {
                let device = self.devices.get_mut(index).and_then(Option::as_mut);
                if let Some(completions) = device.and_then(|device| device.set_broken(queue)) {
                    self.end_links(core, |device, queue, _| device == index && queue == completions);
                }
            }
            AsyncEvent::QueuePairFatal { number } => {
                self.end_links(core, |device, _, queue_pair| device == index && queue_pair == number);
            }
            AsyncEvent::PortDown { .. }
            | AsyncEvent::PortUp { .. }
            | AsyncEvent::DeviceFatal
            | AsyncEvent::Other(_) => {}
        }
    }

    /// Once in a while: what was lost or failed is tried again.
    pub(super) fn retry<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C) {
        self.retry_disks();
        if !self.listens {
            return;
        }
        for index in 0..self.devices.len() {
            if self.devices[index].as_ref().is_some_and(|device| !device.shared.device().is_listed()) {
                self.lose(core, index);
            }
        }
        if self.missing > 0 || !self.unopened.is_empty() {
            self.search();
        }
        for deaf in std::mem::take(&mut self.deaf) {
            if self.listen(deaf.address, deaf.index).is_ok() && self.is_heard() {
                tracing::info!(address = %deaf.address, "RDMA device is back: listening again");
            } else {
                self.deaf.push(deaf);
            }
        }
    }

    /// The listener that was made last is on a device that there is; without, it is taken back.
    fn is_heard(&mut self) -> bool {
        let Some(Listening { id, .. }) = self.listening.last() else { return false };
        let is_of = |device: &DeviceCore| !device.is_lost && device.shared.device().is_of(id);
        let is_heard = self.devices.iter().flatten().any(is_of);
        if !is_heard {
            self.listening.pop();
        }
        is_heard
    }

    /// Look for devices that are not known yet, and tell the other cores of them.
    fn search(&mut self) {
        if Device::is_any_new() {
            // One may be on its way in or out: there is another time.
            let all = SharedDevice::all().unwrap_or_default();
            let is_new = |it: &Arc<SharedDevice>| self.place_of(it.device().serial()).is_none();
            self.unopened = all.into_iter().filter(is_new).collect();
        }
        for shared in std::mem::take(&mut self.unopened) {
            let device = shared.device().name();
            match self.open(&shared) {
                Ok(()) => {
                    tracing::info!(device, "RDMA device found");
                    self.missing = self.missing.saturating_sub(1);
                    self.has_refused = false;
                    self.messages.push_back(DeviceMessage::Found(shared));
                }
                Err(error) => {
                    // Said once; it is tried again.
                    if !std::mem::replace(&mut self.has_refused, true) {
                        tracing::error!(device, %error, "RDMA device cannot be used");
                    }
                    self.unopened.push(shared);
                }
            }
        }
    }

    /// Register the memory of the disks that there are now. Gives those for which that failed, and why: they
    /// are tried again, and meanwhile commands to them end their connection.
    pub fn set_disks(&mut self, disks: Vec<DiskArea>) -> Vec<(String, String)> {
        self.disks = disks;
        for device in self.devices.iter_mut().flatten() {
            device.keep_disks(&self.disks);
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
