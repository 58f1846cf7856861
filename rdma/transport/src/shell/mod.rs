//! The shell of one core: joins the core's RDMA connections to their queue pairs. It carries work out and
//! knows no protocol.
//!
//! ```text
//!   poll:   completion queues ──> Conn::received, Conn::completed ──> Connections::step ──> one doorbell
//!           the connection manager's channel, when its descriptor says so (on_ready)
//!   flush:  connections that disks, timers or messages gave something to send
//!   next_request: connection requests, on the core that listens; accept: on the core that takes one over
//! ```
//!
//! A connection that is ending is disconnected, its queue pair set to its error state, its completions
//! collected; then the queue pair is destroyed, and after it the connection's buffers are dropped.

mod device;
mod ending;
mod events;
#[cfg(test)]
mod fake;
mod keys;
mod link;
mod listeners;
mod lost;
mod ready;
mod receives;
mod request;
mod shared;
mod used;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use nvme_spec::rdma::{CmAccept, CmStatus};
use nvme_spec::zerocopy::IntoBytes;
use spindle_rdma_verbs::{
    CmChannel, CmEvent, CmEventKind, CmId, CmToken, ConnectParams, QueuePair, QueuePairConfig, VerbsError,
    WorkCompletion,
};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Area;
use spindle_reactor::slab::Slot;
use spindle_transport::admission::Admitted;
use spindle_transport::{Connections, Holds};
use spindle_transport::{Peer, TransportKind};

use crate::controller::{Conn, ConnConfig, Phase};
use crate::work::Completion;
use device::{DeviceCore, Reservation};
use ending::{Ending, SHORT_BOUND};
use link::{Link, Parts, SEGMENTS_MAX};
use listeners::Listeners;
use lost::{Opening, RETRY_PERIOD};
use ready::Preparations;

pub use keys::{KnownDevices, RegisteredDisks, SharedDevice};
pub use listeners::check_address;
pub use lost::{DeviceMessage, DiskArea};
pub use ready::Ready;
pub use request::{Request, Wanted};
use request::{check, reject};

/// Bits of a work request's 64-bit id, above a slot's 32: a receive,
const RECEIVE: u64 = 1 << 63;
/// of the queue pair's own queue;
const OWN: u64 = 1 << 62;
/// a signalled work request of the send queue.
const SIGNALLED: u64 = 1 << 61;
/// Bits of a receive of a shared queue that come before its queue's serial number.
const SERIAL_SHIFT: u32 = 32;

/// Settings of a shell. Every default says why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShellConfig {
    /// Most receives that a core's connections share; beyond it a connection gets its own. 8192: 64 queues of
    /// a Linux host, 34 MiB when all are used.
    pub srq_entries: u32,
    /// Most segments of one work request. 16: a scattered transfer of 64 KiB, and a longer one takes another
    /// work request; each costs memory in every entry of every send queue.
    pub segments: u32,
}

impl Default for ShellConfig {
    fn default() -> Self {
        ShellConfig { srq_entries: 8192, segments: 16 }
    }
}

/// How often the connections' own time-outs are looked at.
const TIMER_PERIOD: Nanos = Nanos::from_ms(50);
/// Time in which nothing that was posted completes before the connection is given up: as TCP's user time-out.
const STALLED_FOR: Nanos = Nanos::from_secs(30);
/// Events of the connection manager in a turn: each may cost system calls.
const EVENTS_PER_TURN: usize = 16;
/// `ENODEV`.
const NO_DEVICE: i32 = 19;
/// Bytes of a completion queue entry: a SEND carries it inline.
const INLINE_BYTES: u32 = 16;
/// Polls of the completion queues in a turn.
const POLLS_PER_TURN: usize = 4;

/// Descriptors of a kind, which say when there is something of it to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A device's completion channel.
    Completions,
    /// The connection manager's channel.
    Manager,
    /// What a device tells of itself.
    Device,
}

/// What descriptors have told.
#[derive(Debug, Clone, Copy, Default)]
struct Told {
    completions: bool,
    manager: bool,
    device: bool,
}

impl Told {
    fn is_any(self) -> bool {
        self.completions || self.manager || self.device
    }
}

/// One core's queue pairs. See the module.
pub struct Shell {
    /// By the index of the connection's slot. Before the devices, whose memory they use.
    links: Vec<Option<Link>>,
    /// A place is empty when its device is gone.
    devices: Vec<Option<DeviceCore>>,
    opening: Opening,
    channel: CmChannel,
    listeners: Listeners,
    /// Devices that are lost, or unknown ones that a request came by.
    missing: usize,
    /// No listener is on them: nothing is registered with them.
    unused: Vec<Arc<SharedDevice>>,
    /// Their memory is being registered.
    preparing: Preparations,
    /// Of core 0, and this one could not open them so far.
    waiting: Vec<Arc<Ready>>,
    /// Found, and not usable so far.
    unopened: Vec<Arc<SharedDevice>>,
    has_refused: bool,
    messages: VecDeque<DeviceMessage>,
    disks: Vec<DiskArea>,
    /// Names of those whose memory could not be registered.
    refused: Vec<String>,
    is_watched: bool,
    requests: VecDeque<Request>,
    ids: HashMap<CmToken, Slot>,
    active: Vec<Slot>,
    completions: Vec<WorkCompletion>,
    /// Descriptors have said that there is something.
    told: Told,
    listens: bool,
    entries_max: u16,
    next_timer: Nanos,
    next_retry: Nanos,
    now: Nanos,
}

/// What a shell is made of.
pub struct ShellSetup<'a> {
    /// Settings.
    pub config: ShellConfig,
    /// Index of the core.
    pub core: usize,
    /// The machine's devices: [`SharedDevice::for_listeners`].
    pub devices: &'a [Arc<SharedDevice>],
    /// Those that come are added to it.
    pub known: &'a KnownDevices,
    /// This core listens for all.
    pub listens: bool,
    /// Memory of the core: its pools.
    pub areas: &'a [Area],
    /// Most connections.
    pub connections: usize,
    /// Most in-capsule data of any listener.
    pub in_capsule_bytes: u32,
    /// Most entries of a queue.
    pub entries_max: u16,
}

impl Shell {
    /// A shell with its memory registered, which listens nowhere yet.
    ///
    /// # Errors
    /// A device that a listener depends on cannot be used, or there is no connection manager.
    pub fn new(setup: &ShellSetup<'_>) -> Result<Shell, String> {
        let mut areas = setup.areas.to_vec();
        areas.push(Area::zeroes());
        let opening = Opening {
            core: setup.core,
            areas,
            in_capsule_bytes: setup.in_capsule_bytes,
            config: setup.config,
        };
        let unused = setup.devices.iter().filter(|device| setup.listens && !device.is_used());
        let settle = || used::settle(&opening);
        Ok(Shell {
            devices: used::open(setup.devices, settle, |shared| DeviceCore::new(shared, &opening))?,
            unused: unused.cloned().collect(),
            // The core that listens has these registered with devices that come.
            messages: VecDeque::from_iter((!setup.listens).then(|| DeviceMessage::Pools(setup.areas.into()))),
            opening,
            channel: CmChannel::new().map_err(|error| error.to_string())?,
            listeners: Listeners::default(),
            missing: 0,
            preparing: Preparations::new(setup.known.clone()),
            waiting: Vec::new(),
            unopened: Vec::new(),
            has_refused: false,
            disks: Vec::new(),
            refused: Vec::new(),
            is_watched: false,
            requests: VecDeque::new(),
            links: (0..setup.connections).map(|_| None).collect(),
            ids: HashMap::new(),
            active: Vec::with_capacity(setup.connections),
            completions: Vec::with_capacity(1024),
            told: Told::default(),
            listens: false,
            entries_max: setup.entries_max,
            next_timer: Nanos::ZERO,
            next_retry: Nanos::ZERO,
            now: Nanos::ZERO,
        })
    }

    /// Take an address, which is number `index` in the configuration, to listen on it by
    /// [`Shell::start_listening`].
    ///
    /// # Errors
    /// [`VerbsError`]: the address is in use, or no RDMA device that can be used has it.
    pub fn bind(&mut self, address: SocketAddr, index: usize) -> Result<(), VerbsError> {
        let id = CmId::new(&self.channel)?;
        id.bind(address)?;
        if !self.has_device_of(&id) {
            return Err(VerbsError { verb: "rdma_bind_addr", errno: NO_DEVICE });
        }
        self.listeners.add(id, address, index);
        self.listens = true;
        Ok(())
    }

    /// Listen on the addresses that were taken. Gives what came of each; one that failed is tried again.
    pub fn start_listening(&mut self) -> Vec<(SocketAddr, Result<(), VerbsError>)> {
        self.listeners.start()
    }

    /// Listen on these addresses, with their index in the configuration, and on no others: on the core that
    /// listens. One that cannot be listened on is tried again.
    #[cold]
    pub fn set_listeners(&mut self, wanted: &[(SocketAddr, usize)]) {
        if self.listens {
            self.listeners.keep(wanted);
            self.next_retry = Nanos::ZERO;
            // A listener on all addresses is on all devices.
            let taken_up =
                if self.listeners.is_on_all() { std::mem::take(&mut self.unused) } else { Vec::new() };
            taken_up.into_iter().for_each(|shared| self.prepare(shared));
        }
    }

    /// A descriptor of this kind is readable. Only those are read: each look in vain is a system call.
    pub fn on_ready(&mut self, source: Source) {
        match source {
            Source::Completions => self.told.completions = true,
            Source::Manager => self.told.manager = true,
            Source::Device => self.told.device = true,
        }
    }

    /// True while there are connections: their completion queues are to be polled.
    #[must_use]
    pub fn has_connections(&self) -> bool {
        !self.ids.is_empty()
    }

    /// A device's work is done by the kernel's threads, which need processors: the core that polls it lets
    /// them run.
    #[must_use]
    pub fn wants_yield(&self) -> bool {
        self.devices.iter().flatten().any(|device| device.shared.device().is_soft_roce())
    }

    /// About to sleep: have the descriptors tell of completions from now on. False: there is something
    /// already.
    pub fn prepare_sleep(&mut self) -> bool {
        let mut may_sleep = self.active.is_empty() && !self.told.is_any() && self.requests.is_empty();
        for device in self.devices.iter_mut().flatten() {
            may_sleep &= device.arm();
        }
        may_sleep
    }

    /// A connection request that a core is to take over.
    pub fn next_request(&mut self) -> Option<Request> {
        self.requests.pop_front()
    }

    /// One turn of completions, steps and posting. True when there was anything to do.
    #[inline]
    pub fn poll<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, now: Nanos) -> bool {
        self.now = now;
        let mut has_worked = false;
        for _ in 0..POLLS_PER_TURN {
            let has_come = self.poll_completions(core);
            has_worked |= has_come;
            if !has_come {
                break;
            }
        }
        if self.told.is_any() {
            has_worked = true;
            self.poll_events(core);
        }
        if now >= self.next_timer {
            self.next_timer = now + TIMER_PERIOD;
            self.take_ready();
            self.on_time(core);
        }
        if now >= self.next_retry {
            self.next_retry = now + RETRY_PERIOD;
            self.retry(core);
        }
        has_worked
    }

    #[inline]
    fn poll_completions<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        let mut has_come = false;
        for index in 0..self.devices.len() {
            let Some(device) = &mut self.devices[index] else { continue };
            has_come |= device.poll(&mut completions);
            for completion in completions.drain(..) {
                self.dispatch(core, index, &completion);
            }
        }
        self.completions = completions;
        while let Some(id) = self.active.pop() {
            if let Some(link) = self.link(id) {
                link.is_active = false;
            }
            core.step_sent(id);
            self.pump(core, id);
        }
        has_come
    }

    #[inline]
    fn link(&mut self, id: Slot) -> Option<&mut Link> {
        link_of(&mut self.links, id)
    }

    #[inline]
    fn dispatch<C: Connections<Conn: Holds<Conn>>>(
        &mut self,
        core: &mut C,
        device: usize,
        completion: &WorkCompletion,
    ) {
        let Shell { devices, links, active, now, .. } = self;
        let Some(device) = &mut devices[device] else { return };
        let found = device.numbers.get(&completion.queue_pair).copied();
        let link = found.and_then(|id| link_of(links, id));
        let is_receive = completion.id & RECEIVE != 0;
        let Some(link) = link else {
            if is_receive {
                device.orphaned(completion.id);
            }
            return;
        };
        let Some(conn) = core.transport(link.id).and_then(Holds::held) else { return };
        link.progress = *now;
        let low = u32::try_from(completion.id & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        if is_receive {
            if completion.is_ok {
                match link.received(device, low, completion.bytes) {
                    Ok(Some(capsule)) => conn.received(capsule),
                    Ok(None) | Err(_) => conn.on_disconnected(),
                }
            } else {
                device.orphaned(completion.id);
                conn.on_disconnected();
            }
        } else {
            let is_signalled = completion.id & SIGNALLED != 0;
            let chain = Slot::from_wire(low);
            if !completion.is_ok && conn.phase() == Phase::Open {
                tracing::debug!(status = %completion.status, "a work request has failed");
            }
            conn.completed(Completion { chain, is_signalled, is_ok: completion.is_ok });
        }
        if !std::mem::replace(&mut link.is_active, true) {
            active.push(link.id);
        }
    }

    /// Post what a connection asks for, and see to its end.
    #[inline]
    fn pump<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: Slot) {
        let Shell { devices, links, .. } = self;
        let Some(link) = link_of(links, id) else { return };
        let Some(conn) = core.transport(id).and_then(Holds::held) else { return };
        let Some(device) = &mut devices[link.device] else { return };
        let posted = link.post_receives(conn, device).map_err(|error| error.to_string());
        let posted = posted.and_then(|()| link.post_work(conn, &device.keys));
        if let Err(error) = posted {
            if matches!(conn.phase(), Phase::Open | Phase::Draining) {
                tracing::warn!(%error, "a connection cannot go on");
            }
            conn.on_disconnected();
        }
        if matches!(conn.phase(), Phase::Ending | Phase::Closed) {
            self.end(core, id);
        }
    }

    /// A connection that is ending: begin, go on, or be done with it.
    #[cold]
    fn end<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: Slot) {
        let now = self.now;
        let Shell { devices, links, .. } = self;
        let Some(link) = link_of(links, id) else { return };
        let Some(device) = devices.get_mut(link.device).and_then(Option::as_mut) else { return };
        let posted = core.transport(id).and_then(Holds::held).map_or(0, |conn| conn.posted());
        let seen = link.seen(device, posted);
        // Not destroyed in the turn that ends it: what the device was about to receive is to come first.
        let is_over = link.end.ending.is_some_and(|ending| ending.is_over(&seen, now));
        if link.end.ending.is_none() {
            link.begin_end(Ending::begin(now, device.tells));
        }
        if is_over && seen.waits() && device.tells.on_vain() {
            let device = device.shared.device().name();
            tracing::info!(
                device,
                "RDMA device does not report IBV_EVENT_QP_LAST_WQE_REACHED: ended queue pairs wait {} ms \
                 for it",
                SHORT_BOUND.as_ms()
            );
        }
        let Some(conn) = core.transport(id).and_then(Holds::held) else { return };
        if let Some(violation) = conn.take_violation() {
            core.on_violation(id, violation.to_string());
        }
        if is_over {
            self.destroy(core, id);
        }
    }

    fn destroy<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: Slot) {
        // A device forgets the completions of a queue pair that is destroyed, and with them receives of the
        // shared queue; and its number may come again.
        let Some(index) = self.link(id).map(|link| link.device) else { return };
        if let Some(device) = &mut self.devices[index] {
            let mut found = std::mem::take(&mut self.completions);
            device.poll_all(&mut found);
            for completion in found.drain(..) {
                self.dispatch(core, index, &completion);
            }
            self.completions = found;
        }
        let Shell { devices, links, ids, .. } = self;
        let Some(mut link) = links.get_mut(id.index()).and_then(Option::take) else { return };
        ids.remove(&link.cm.token());
        let (reservation, mut lost) = (link.reservation, 0);
        if let Some(device) = &mut devices[index] {
            device.numbers.remove(&link.number());
            // Receives of the shared queue go back to it; those of its own queue go with it.
            if let Some(conn) = core.transport(id).and_then(Holds::held) {
                let _ = link.post_receives(conn, device);
            }
            lost = link.seen(device, 0).lost();
        }
        drop(link);
        if let Some(device) = &mut devices[index] {
            // After the queue pair: the shared queue that it was on may go with it.
            device.release(reservation, lost);
        }
        self.release_device(index);
        if let Some(conn) = core.transport(id).and_then(Holds::held) {
            conn.on_destroyed();
        }
        core.step_sent(id);
        while core.next_closed().is_some() {}
    }

    /// Post for a connection that something else than its own input gave something to send. False: it is none
    /// of ours.
    #[inline]
    pub fn flush<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: Slot) -> bool {
        if self.link(id).is_none() {
            return false;
        }
        let Some(conn) = core.transport(id).and_then(Holds::held) else { return true };
        if conn.has_events() {
            core.step_sent(id);
        }
        self.pump(core, id);
        true
    }

    /// End a connection whose place another needs. It is free when the queue pair is destroyed. False: it is
    /// none of ours.
    #[cold]
    pub fn evict<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: Slot) -> bool {
        if self.link(id).is_none() {
            return false;
        }
        self.disconnect(core, id);
        true
    }

    /// A connection ends now.
    fn disconnect<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: Slot) {
        if let Some(conn) = core.transport(id).and_then(Holds::held) {
            conn.on_disconnected();
        }
        core.step_sent(id);
        self.pump(core, id);
    }

    fn on_time<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C) {
        let now = self.now;
        for device in self.devices.iter_mut().flatten() {
            device.on_time(now);
        }
        for index in 0..self.links.len() {
            let Some(link) = self.links.get_mut(index).and_then(Option::as_mut) else { continue };
            let (id, is_ending) = (link.id, link.end.ending.is_some());
            let device = self.devices[link.device].as_ref();
            let is_broken = device.is_some_and(|device| device.is_broken(link.reservation));
            let Some(conn) = core.transport(id).and_then(Holds::held) else { continue };
            if conn.posted() == 0 {
                link.progress = now;
            }
            // A host that takes no replies: nothing of what was posted completes, and it holds buffers.
            if is_broken || now >= link.progress + STALLED_FOR {
                conn.on_disconnected();
            }
            if conn.deadline().is_some_and(|deadline| deadline <= now) {
                conn.on_time(now);
            }
            let is_silent = conn.watch(now);
            if is_silent || is_ending || matches!(conn.phase(), Phase::Ending | Phase::Closed) {
                self.pump(core, id);
            }
        }
    }

    fn poll_events<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C) {
        let told = std::mem::take(&mut self.told);
        if told.completions {
            self.devices.iter_mut().flatten().for_each(DeviceCore::take_events);
        }
        if told.device {
            self.poll_devices(core);
        }
        if !told.manager {
            return;
        }
        for _ in 0..EVENTS_PER_TURN {
            match self.channel.next_event() {
                Ok(Some(event)) => self.on_event(core, event),
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "the RDMA connection manager fails");
                    return;
                }
            }
        }
        // There may be more.
        self.told.manager = true;
    }

    #[cold]
    fn poll_devices<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C) {
        for index in 0..self.devices.len() {
            for _ in 0..EVENTS_PER_TURN {
                let Some(device) = &self.devices[index] else { break };
                let Some(event) = device.shared.device().next_async_event() else { break };
                self.on_device_event(core, index, event);
            }
        }
    }

    fn on_event<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, mut event: CmEvent) {
        let act = match event.kind {
            CmEventKind::ConnectRequest => {
                if let Some(id) = event.new_id.take() {
                    self.on_request(core, &event, id);
                }
                return;
            }
            CmEventKind::DeviceRemoval => return self.on_removal(core, event.id),
            CmEventKind::AddressChange => return self.on_address_change(event.id),
            CmEventKind::Established => Conn::on_established,
            CmEventKind::Disconnected
            | CmEventKind::ConnectError
            | CmEventKind::Unreachable
            | CmEventKind::Rejected => Conn::on_disconnected,
            CmEventKind::AddressResolved
            | CmEventKind::AddressError
            | CmEventKind::RouteResolved
            | CmEventKind::RouteError
            | CmEventKind::Other(_) => return,
        };
        let Some(id) = self.ids.get(&event.id).copied() else { return };
        let Some(conn) = core.transport(id).and_then(Holds::held) else { return };
        act(conn);
        core.step_sent(id);
        self.pump(core, id);
    }

    fn on_request<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, event: &CmEvent, id: CmId) {
        let listener = event.listener.and_then(|token| self.listeners.of(token));
        let Some(listener) = listener.map(|it| it.index) else { return };
        let Some(device) = self.device_of(&id) else {
            // A new one, of a listener on all addresses. Refused; the host comes again.
            if !self.preparing.devices().any(|it| it.device().is_of(&id)) {
                self.missing = self.missing.max(1);
            }
            return;
        };
        match check(event, device.shared.device().limits(), self.entries_max) {
            Ok(wanted) => self.requests.push_back(Request { id, listener, wanted }),
            Err((status, reason)) => {
                if let Some(remote) = id.peer_address() {
                    core.on_refused(remote, reason);
                }
                reject(&id, status);
            }
        }
    }

    /// Take over a connection request, which has its place among those without Connect. False: there is no
    /// room, and the host is told.
    pub fn accept<C: Connections<Conn: Holds<Conn>>>(
        &mut self,
        core: &mut C,
        (request, admitted): (Request, Admitted),
        mut config: ConnConfig,
        now: Nanos,
    ) -> bool {
        self.now = now;
        let Request { id: cm, listener, wanted } = request;
        let (Some(remote), Some(local)) = (cm.peer_address(), cm.local_address()) else { return false };
        if let Some(reason) = core.refusal() {
            let reason = reason.to_owned();
            core.on_refused(remote, reason);
            reject(&cm, CmStatus::NO_RESOURCES);
            return false;
        }
        let mut link = match self.make_link(cm, wanted, &mut config) {
            Ok(link) => link,
            Err((cm, reason)) => {
                core.on_refused(remote, reason);
                reject(&cm, CmStatus::NO_RESOURCES);
                return false;
            }
        };
        let peer = Peer { transport: TransportKind::Rdma, listener, remote, local };
        let Ok(id) = core.accept(Holds::wrap(Conn::new(config)), peer) else {
            reject(&link.cm, CmStatus::NO_RESOURCES);
            let (index, reservation) = (link.device, link.reservation);
            drop(link);
            if let Some(device) = &mut self.devices[index] {
                // It was never connected: nothing has come.
                device.release(reservation, 0);
            }
            return false;
        };
        core.set_admitted(id, admitted);
        link.id = id;
        if let Some(device) = &mut self.devices[link.device] {
            device.numbers.insert(link.number(), id);
        }
        self.ids.insert(link.cm.token(), id);
        let answer = CmAccept::new(wanted.entries);
        let accepted = link.cm.accept(&ConnectParams {
            private_data: answer.as_bytes(),
            responder_resources: 0,
            initiator_depth: wanted.responder_resources,
        });
        if accepted.is_ok() {
            // While another host has all shared receives this one asks again soon. A device that does not
            // change it leaves it at 655 ms; nothing else depends on it.
            let _ = link.set_min_rnr_timer();
        }
        if let Some(place) = self.links.get_mut(id.index()) {
            *place = Some(link);
        }
        if accepted.is_err() {
            // The host has gone meanwhile.
            self.disconnect(core, id);
        }
        true
    }

    /// The queue pair of a connection, with its receives posted; completes `config` with what it got.
    fn make_link(
        &mut self,
        cm: CmId,
        wanted: Wanted,
        config: &mut ConnConfig,
    ) -> Result<Link, (CmId, String)> {
        if let Err(error) = cm.migrate(&self.channel) {
            return Err((cm, error.to_string()));
        }
        let is_of = |device: &DeviceCore| !device.is_lost && device.shared.device().is_of(&cm);
        let index = self.devices.iter().position(|device| device.as_ref().is_some_and(is_of));
        let found = index.and_then(|index| Some((index, self.devices[index].as_mut()?)));
        let Some((index, device)) = found else {
            return Err((cm, "it came by a device that this core does not have".to_owned()));
        };
        let limits = device.shared.device().limits().clone();
        let entries = u32::from(wanted.entries);
        // A SEND, and a READ or WRITE, for each command.
        let send_wr = (2 * entries).min(limits.send_wr);
        let segments = self.opening.config.segments.min(limits.sge).min(limits.sge_read.max(1));
        let reservation = match device.reserve(entries, send_wr) {
            Ok(reservation) => reservation,
            Err(error) => return Err((cm, error)),
        };
        let made = make_queue_pair(&cm, device, reservation, (entries, send_wr, segments));
        let queue_pair = match made {
            Ok(queue_pair) => queue_pair,
            Err(error) => {
                device.release(reservation, 0);
                return Err((cm, error));
            }
        };
        config.receives = wanted.entries;
        config.send_queue = queue_pair.send_wr().min(send_wr);
        config.segments_max = (queue_pair.send_sge() as usize).min(segments as usize).min(SEGMENTS_MAX);
        config.reads_max = u32::from(wanted.responder_resources);
        config.can_invalidate = limits.can_invalidate;
        let shared = Arc::clone(&device.shared);
        let parts = Parts { device: index, queue_pair, cm, reservation };
        Link::new(parts, &shared, entries, config.in_capsule_bytes).map_err(|(cm, error)| {
            if let Some(device) = &mut self.devices[index] {
                device.release(reservation, 0);
            }
            (cm, error)
        })
    }
}

#[inline]
fn link_of(links: &mut [Option<Link>], id: Slot) -> Option<&mut Link> {
    links.get_mut(id.index())?.as_mut().filter(|link| link.id == id)
}

fn make_queue_pair(
    cm: &CmId,
    device: &DeviceCore,
    reservation: Reservation,
    (entries, send_wr, segments): (u32, u32, u32),
) -> Result<QueuePair, String> {
    let queue = device.completion_queue(reservation).ok_or("no completion queue")?;
    let srq = reservation.share.and_then(|share| device.receives.of(share)).map(|it| &it.queue);
    let config = QueuePairConfig {
        cq: queue,
        srq,
        send_wr,
        recv_wr: entries,
        send_sge: segments,
        recv_sge: 1,
        inline_bytes: INLINE_BYTES,
        posting: None,
    };
    cm.create_queue_pair(device.shared.device(), &config).map_err(|error| error.to_string())
}
