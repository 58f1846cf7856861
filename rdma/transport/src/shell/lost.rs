//! Devices that go and come back, and what else a device tells outside of completions.
//!
//! ```text
//!   DEVICE_REMOVAL, DEVICE_FATAL, not listed ─> lose ─ its connections end ─> forget: its last holder closes
//!                                                └─ told to the other cores, which do the same
//!   once a second, where listeners are: a device not seen before ─> to all cores ─> listen again
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

/// Why an address is not listened on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// Its device is gone.
    Device,
    /// It is on another port or device now.
    Moved,
    /// That failed.
    Refused,
}

/// An address that is not listened on for now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deaf {
    pub(super) address: SocketAddr,
    pub(super) index: usize,
    why: Why,
}

impl Deaf {
    pub(super) fn of(listening: &Listening, why: Why) -> Deaf {
        Deaf { address: listening.address, index: listening.index, why }
    }
}

/// Whose address has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Changed {
    /// That of a listener, which is taken out of this place and listens anew.
    Listener(usize),
    /// That of a connection: it is noted.
    Connection(Slot),
    /// Of nobody any more.
    Nobody,
}

impl Changed {
    fn of<T: PartialEq>(
        token: &T,
        mut listening: impl Iterator<Item = T>,
        connection: Option<Slot>,
    ) -> Changed {
        match (listening.position(|it| it == *token), connection) {
            (Some(place), _) => Changed::Listener(place),
            (None, Some(id)) => Changed::Connection(id),
            (None, None) => Changed::Nobody,
        }
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
        shared.set_used();
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
            self.deaf.push(Deaf::of(&listening, Why::Device));
        }
    }

    /// ADDR_CHANGE of an identifier.
    #[cold]
    pub(super) fn on_address_change(&mut self, token: CmToken) {
        let listening = self.listening.iter().map(|it| it.id.token());
        match Changed::of(&token, listening, self.ids.get(&token).copied()) {
            Changed::Listener(place) => {
                // Dropped at the end, before it is tried again: the address is to be free by then.
                let listening = self.listening.swap_remove(place);
                let address = listening.address;
                tracing::warn!(%address, "the RDMA listener's address has moved: it listens anew");
                self.deaf.push(Deaf::of(&listening, Why::Moved));
                self.next_retry = Nanos::ZERO;
            }
            Changed::Connection(id) => {
                let remote = self.link(id).and_then(|link| link.cm.peer_address());
                tracing::info!(?remote, "a connection's RDMA port has changed: it may end soon");
            }
            Changed::Nobody => {}
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
            AsyncEvent::QueuePairDrained { number } => {
                if !device.numbers.contains_key(&number) {
                    self.messages.push_back(DeviceMessage::Failed(serial, event));
                }
                self.on_failed(core, serial, event);
            }
            AsyncEvent::Other(_) => {}
        }
    }

    /// A queue pair has taken its last shared receive. It may have come to its error state by itself, and its
    /// connection end later.
    fn on_drained<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, index: usize, number: u32) {
        let Some(device) = self.devices.get_mut(index).and_then(Option::as_mut) else { return };
        device.tells.on_told();
        let Some(id) = device.numbers.get(&number).copied() else { return };
        let Some(link) = self.link(id) else { return };
        link.is_drained = true;
        if link.ending.is_some() {
            self.pump(core, id);
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
            AsyncEvent::QueuePairDrained { number } => self.on_drained(core, index, number),
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
        // Nobody hears what they tell: looked at.
        let is_gone = |shared: &mut Arc<SharedDevice>| !shared.device().is_listed();
        let unused = self.unused.extract_if(.., is_gone);
        for gone in unused.chain(self.unopened.extract_if(.., is_gone)) {
            gone.device().set_lost();
        }
        if self.missing > 0 || !self.unopened.is_empty() || !self.deaf.is_empty() {
            self.search();
        }
        for deaf in std::mem::take(&mut self.deaf) {
            let address = deaf.address;
            if self.listen(address, deaf.index).is_err() || !self.is_heard() {
                self.deaf.push(deaf);
                continue;
            }
            match deaf.why {
                Why::Device => tracing::info!(%address, "RDMA device is back: listening again"),
                Why::Moved | Why::Refused => tracing::info!(%address, "listening again over RDMA"),
            }
        }
    }

    /// The listener that was made last is on a device that there is; without, it is taken back.
    fn is_heard(&mut self) -> bool {
        let Some(Listening { id, .. }) = self.listening.last() else { return false };
        let mut is_heard = self.has_device_of(id);
        if let Some(at) = self.unused.iter().position(|shared| !is_heard && shared.device().is_of(id)) {
            let shared = self.unused.swap_remove(at);
            is_heard = self.take_up(shared);
        }
        if !is_heard {
            self.listening.pop();
        }
        is_heard
    }

    /// There is the device of this listener; one on all addresses is on none.
    pub(super) fn has_device_of(&self, id: &CmId) -> bool {
        let is_of = |it: &DeviceCore| !it.is_lost && !it.shared.is_left_out() && it.shared.device().is_of(id);
        id.device_name().is_none() || self.devices.iter().flatten().any(is_of)
    }

    /// Look for devices that are not known yet.
    fn search(&mut self) {
        let mut found = std::mem::take(&mut self.unopened);
        if Device::is_any_new() {
            // One may be on its way in or out: there is another time.
            let all = SharedDevice::all().unwrap_or_default();
            let is_known = |it: &Arc<SharedDevice>| {
                let serial = it.device().serial();
                let mut others = self.unused.iter().chain(&found);
                self.place_of(serial).is_some() || others.any(|other| other.device().serial() == serial)
            };
            let new: Vec<_> = all.into_iter().filter(|it| !is_known(it)).collect();
            self.missing = self.missing.saturating_sub(new.len());
            found.extend(new);
        }
        let deaf = self.deaf.iter().map(|it| it.address);
        let is_on_all =
            self.listening.iter().map(|it| it.address).chain(deaf).any(|it| it.ip().is_unspecified());
        for shared in found {
            let name = shared.device().name();
            // The same device opened anew: all that comes from now on is of the new one.
            let is_again = self.devices.iter().flatten().any(|known| known.shared.device().name() == name);
            if is_on_all || is_again || shared.is_used() {
                self.take_up(shared);
            } else {
                // A listener that is on it takes it up.
                self.unused.push(shared);
            }
        }
    }

    /// Use a device, and have the other cores do so. False: that fails, and is tried again.
    fn take_up(&mut self, shared: Arc<SharedDevice>) -> bool {
        let device = shared.device().name();
        match self.open(&shared) {
            Ok(()) => {
                tracing::info!(device, "RDMA device found");
                self.has_refused = false;
                self.messages.push_back(DeviceMessage::Found(shared));
                true
            }
            Err(error) => {
                // Said once; it is tried again.
                if !std::mem::replace(&mut self.has_refused, true) {
                    tracing::error!(device, %error, "RDMA device cannot be used");
                }
                self.unopened.push(shared);
                false
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

#[cfg(test)]
mod tests {
    use spindle_reactor::slab::Slab;

    use super::*;

    #[test]
    fn a_listener_whose_address_has_changed_listens_anew_and_a_connection_goes_on() {
        let id = Slab::with_capacity(1).insert(()).expect("a slot");
        let of = |token, connection| Changed::of(&token, [7, 8, 9].into_iter(), connection);
        assert_eq!(of(8, None), Changed::Listener(1));
        assert_eq!(of(5, Some(id)), Changed::Connection(id));
        assert_eq!(of(5, None), Changed::Nobody);
    }
}
