//! The shell of one core: posts the work of the core's RDMA connections to their queue pairs and passes
//! completions to them. It does not interpret NVMe commands.
//!
//! ```text
//!   poll:   completion queues ──> Conn::received, Conn::completed
//!             ──> per connection: Connections::step ──> pump: one doorbell
//!           the connection manager's channel, once its descriptor is readable (on_ready)
//!   flush:  connections with replies from disks, timers or messages ──> pump
//!   next_request: connection requests, on the listening core; accept: on the core chosen for the connection
//! ```
//!
//! An ending connection is disconnected, and its queue pair is set to the error state. Its chains are dropped
//! as their work completes as flushed. When all work has completed, or after a bounded time (`ending`), the
//! queue pair is destroyed and the remaining buffers of the connection are dropped.

mod completions;
mod device;
mod device_events;
mod ending;
mod events;
#[cfg(test)]
mod fake;
mod keys;
mod link;
mod listeners;
mod manager;
mod receives;
mod registrar;
mod request;
mod shared;
mod used;

use spindle_nvme_transport::ConnectionId;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use nvme_spec::rdma::{CmAccept, CmStatus};
use nvme_spec::zerocopy::IntoBytes;
use spindle_nvme_transport::admission::Admitted;
use spindle_nvme_transport::{Connections, Holds};
use spindle_nvme_transport::{Peer, TransportKind};
use spindle_rdma::{
    CmChannel, CmEvent, CmEventKind, CmId, CmToken, ConnectParams, VerbsError, WorkCompletion,
};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Area;
use spindle_reactor::slab::Slot;

use crate::controller::{Conn, ConnConfig, Phase};
use crate::work::Completion;
use device::DeviceCore;
use device_events::{Opening, RETRY_PERIOD};
use ending::{Ending, SHORT_BOUND};
use link::{Link, Parts, SEGMENTS_MAX, make_queue_pair};
use listeners::Listeners;
use manager::Manager;
use registrar::Ready;

pub use device_events::DeviceMessage;
pub use keys::{KnownDevices, SharedDevice};
pub use listeners::{check_address, is_absent};
pub use registrar::{DiskArea, Registrar};
pub use request::{QueueParams, Request};
use request::{check, reject};

/// Bit of a work request's 64-bit id, whose lower 32 bits are a slot: the request is a receive.
const RECEIVE_BIT: u64 = 1 << 63;
/// Bit of a receive's id: the receive is posted to the queue pair's own receive queue.
const OWN_QUEUE_BIT: u64 = 1 << 62;
/// Bit of a SEND's, READ's or WRITE's id: [`Work::is_signalled`](crate::work::Work::is_signalled).
const SIGNALLED_BIT: u64 = 1 << 61;
/// Position of the lowest bit of the queue's serial number in the id of a receive of a shared queue.
const SERIAL_SHIFT: u32 = 32;

/// Settings of a shell, the same for all cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShellConfig {
    /// Maximum receives of a shared receive queue; a connection that does not fit uses its own receive queue.
    /// The default is 8192: 64 queues of a Linux host, 34 MiB when all are used.
    pub srq_entries: u32,
    /// Maximum scatter/gather entries of one work request. The default is 16: a scattered transfer of 64 KiB.
    /// A longer one needs another work request. Each scatter/gather entry enlarges all entries of all send
    /// queues.
    pub segments: u32,
}

impl Default for ShellConfig {
    fn default() -> Self {
        ShellConfig { srq_entries: 8192, segments: 16 }
    }
}

/// Period of the checks of connections for timeouts.
const TIMER_PERIOD: Nanos = Nanos::from_ms(50);
/// Time after which a connection with posted work and without a completion is ended, as by TCP_USER_TIMEOUT.
const STALLED_FOR: Nanos = Nanos::from_secs(30);
/// Maximum connection manager events per turn, and maximum asynchronous events of each device per turn; each
/// may cost system calls.
const EVENTS_PER_TURN: usize = 16;
/// Maximum polls of each completion queue per turn.
const POLLS_PER_TURN: usize = 4;
/// Maximum turns for which the timers wait for a turn that finds all completion queues empty. In so many
/// turns each entry of the largest queue (32,000) was polled.
const BUSY_TURNS_MAX: u32 = 256;

/// Kinds of file descriptors that [`Shell::take_descriptors`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A device's completion channel.
    Completions,
    /// The connection manager's event channel.
    Manager,
    /// A device's asynchronous events.
    Device,
}

/// Kinds of descriptors that became readable.
#[derive(Debug, Clone, Copy, Default)]
struct ReadableSources {
    completions: bool,
    manager: bool,
    device: bool,
}

impl ReadableSources {
    fn is_any(self) -> bool {
        self.completions || self.manager || self.device
    }
}

/// One core's devices, listeners and queue pairs; see the module documentation.
pub struct Shell {
    /// Indexed by the connection's slot. Dropped before the devices, whose memory the queue pairs use.
    links: Vec<Option<Link>>,
    /// `None`: the device was lost or replaced, and nothing uses it any more. Indices stay valid.
    devices: Vec<Option<DeviceCore>>,
    opening: Opening,
    manager: Manager,
    listeners: Listeners,
    /// Devices whose listeners may need them; the registrar opens them.
    known: KnownDevices,
    /// Devices that this core could not open yet; retried.
    waiting: Vec<Arc<Ready>>,
    messages: VecDeque<DeviceMessage>,
    requests: VecDeque<Request>,
    ids: HashMap<CmToken, ConnectionId>,
    active: Vec<ConnectionId>,
    completions: Vec<WorkCompletion>,
    /// Descriptors that became readable since they were last read.
    readable: ReadableSources,
    listens: bool,
    entries_max: u16,
    next_timer: Nanos,
    /// Turns for which the timers have waited for empty completion queues.
    busy_turns: u32,
    next_retry: Nanos,
    now: Nanos,
}

/// Parameters of [`Shell::new`].
pub struct ShellSetup<'a> {
    /// Settings from the configuration file.
    pub config: ShellConfig,
    /// Index of the core; selects the completion vector.
    pub core: usize,
    /// The machine's devices, to which the [`Registrar`] adds those that are found later.
    pub known: &'a KnownDevices,
    /// True on the one core that listens for all cores.
    pub listens: bool,
    /// The core's buffer pools.
    pub areas: &'a [Area],
    /// Maximum connections of this core.
    pub connections: usize,
    /// Maximum in-capsule bytes of all listeners.
    pub in_capsule_bytes: u32,
    /// Maximum entries of a queue; a larger HSQSIZE is rejected.
    pub entries_max: u16,
}

impl Shell {
    /// Creates a shell without devices, which the [`Registrar`] sends, and which does not listen yet. If a
    /// device is used, collapses the core's pools to huge pages, before they are registered.
    ///
    /// # Errors
    /// The connection manager cannot be used. Its absence is no error: the shell waits for it.
    pub fn new(setup: &ShellSetup<'_>) -> Result<Shell, String> {
        if setup.known.is_any_used() {
            used::collapse(setup.core, setup.areas);
        }
        let opening = Opening {
            core: setup.core,
            areas: setup.areas.iter().cloned().chain([Area::zeroes()]).collect(),
            in_capsule_bytes: setup.in_capsule_bytes,
            config: setup.config,
        };
        let (manager, absent) = Manager::new(CmChannel::new()).map_err(|error| error.to_string())?;
        if let Some(error) = absent.filter(|_| setup.listens) {
            tracing::error!(
                %error,
                "no RDMA device or no connection manager (rdma_ucm): RDMA listeners are suspended, next \
                 attempt in 1 s"
            );
        }
        Ok(Shell {
            devices: Vec::new(),
            messages: VecDeque::new(),
            opening,
            manager,
            listeners: Listeners::default(),
            known: setup.known.clone(),
            waiting: Vec::new(),
            requests: VecDeque::new(),
            links: (0..setup.connections).map(|_| None).collect(),
            ids: HashMap::new(),
            active: Vec::with_capacity(setup.connections),
            completions: Vec::with_capacity(1024),
            readable: ReadableSources::default(),
            listens: false,
            entries_max: setup.entries_max,
            next_timer: Nanos::ZERO,
            busy_turns: 0,
            next_retry: Nanos::ZERO,
            now: Nanos::ZERO,
        })
    }

    /// Listens on the bound addresses and returns the result of each. The shell retries failed addresses
    /// every second.
    pub fn start_listening(&mut self) -> Vec<(SocketAddr, Result<(), VerbsError>)> {
        self.listeners.start()
    }

    /// Replaces the listeners by `wanted`: address, and index in the configuration. No effect on a core that
    /// does not listen. Addresses that cannot be listened on are retried every second.
    #[cold]
    pub fn set_listeners(&mut self, wanted: &[(SocketAddr, usize)]) {
        if self.listens {
            self.listeners.set(wanted);
            self.next_retry = Nanos::ZERO;
        }
    }

    /// Records that a descriptor of the kind `source` is readable. Descriptors of other kinds are not read,
    /// as each read is a system call.
    pub fn on_ready(&mut self, source: Source) {
        match source {
            Source::Completions => self.readable.completions = true,
            Source::Manager => self.readable.manager = true,
            Source::Device => self.readable.device = true,
        }
    }

    /// Returns true while connections exist, so that completion queues must be polled.
    #[must_use]
    pub fn has_connections(&self) -> bool {
        !self.ids.is_empty()
    }

    /// Returns true if the core uses a soft-RoCE device: kernel threads do its work, so the polling core must
    /// yield to them.
    #[must_use]
    pub fn wants_yield(&self) -> bool {
        self.devices.iter().flatten().any(|device| device.shared.device().is_soft_roce())
    }

    /// Arms the completion queues before a sleep. Returns false if completions, events or requests are
    /// pending: the core must not sleep.
    pub fn prepare_sleep(&mut self) -> bool {
        let mut may_sleep = self.active.is_empty() && !self.readable.is_any() && self.requests.is_empty();
        for device in self.devices.iter_mut().flatten() {
            may_sleep &= device.arm();
        }
        may_sleep
    }

    /// Returns the next valid connection request, to be passed to [`Shell::accept`] of the core chosen for
    /// it. `None`: there is none.
    pub fn next_request(&mut self) -> Option<Request> {
        self.requests.pop_front()
    }

    /// Runs one turn: polls completions, steps connections and posts their work; handles events, timers and
    /// retries. Returns true if there were completions or events.
    #[inline]
    pub fn poll<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, now: Nanos) -> bool {
        self.now = now;
        let (mut has_worked, mut is_empty) = (false, false);
        for _ in 0..POLLS_PER_TURN {
            let has_come = self.poll_completions(core);
            has_worked |= has_come;
            if !has_come {
                is_empty = true;
                break;
            }
        }
        if self.readable.is_any() {
            has_worked = true;
            self.poll_events(core);
        }
        if now >= self.next_timer {
            self.on_timer(core, is_empty);
        }
        if now >= self.next_retry {
            self.next_retry = now + RETRY_PERIOD;
            self.retry();
        }
        has_worked
    }

    /// Checks the time-outs. Not before a turn that leaves the completion queues empty: time is judged after
    /// what arrived, and after a stop of this process more has arrived than a turn polls.
    #[cold]
    fn on_timer<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, is_empty: bool) {
        self.busy_turns += 1;
        if !is_empty && self.busy_turns < BUSY_TURNS_MAX {
            return;
        }
        self.busy_turns = 0;
        self.next_timer = self.now + TIMER_PERIOD;
        if core.wants_pass(TransportKind::Rdma) {
            core.passed(TransportKind::Rdma);
        }
        self.on_time(core);
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
            core.step(id);
            self.pump(core, id);
        }
        if has_come {
            // Those whose connection has ended.
            self.devices.iter_mut().flatten().for_each(DeviceCore::post_receives);
        }
        has_come
    }

    #[inline]
    fn link(&mut self, id: ConnectionId) -> Option<&mut Link> {
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
        let found = device.ids_by_number.get(&completion.queue_pair).copied();
        let link = found.and_then(|id| link_of(links, id));
        let is_receive = completion.id & RECEIVE_BIT != 0;
        let Some(link) = link else {
            if is_receive {
                device.take_orphaned(completion.id);
            }
            return;
        };
        let Some(conn) = core.transport(link.id).and_then(Holds::held) else { return };
        link.progress = *now;
        let low = u32::try_from(completion.id & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        if is_receive {
            if completion.is_ok {
                match link.received(device, low, completion.bytes) {
                    Some(capsule) => conn.received(capsule),
                    None => conn.on_disconnected(),
                }
            } else {
                device.take_orphaned(completion.id);
                conn.on_disconnected();
            }
        } else {
            let is_signalled = completion.id & SIGNALLED_BIT != 0;
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

    /// Posts a connection's receives and work. An error ends the connection. Ends the queue pair of an ending
    /// connection.
    #[inline]
    fn pump<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: ConnectionId) {
        let Shell { devices, links, .. } = self;
        let Some(link) = link_of(links, id) else { return };
        let Some(conn) = core.transport(id).and_then(Holds::held) else { return };
        let Some(device) = &mut devices[link.device] else { return };
        let posted = link.post_receives(conn, device).map_err(|error| error.to_string());
        let posted = posted.and_then(|()| link.post_work(conn, &device.keys));
        if let Err(error) = posted {
            if matches!(conn.phase(), Phase::Open | Phase::Draining) {
                tracing::warn!(%error, "connection failed, it is closed");
            }
            conn.on_disconnected();
        }
        if matches!(conn.phase(), Phase::Ending | Phase::Closed) {
            self.end(core, id);
        }
    }

    /// Starts or continues the end of a queue pair. Destroys the queue pair once it is drained or its
    /// deadline has passed.
    #[cold]
    fn end<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: ConnectionId) {
        let now = self.now;
        let Shell { devices, links, .. } = self;
        let Some(link) = link_of(links, id) else { return };
        let Some(device) = devices.get_mut(link.device).and_then(Option::as_mut) else { return };
        let posted = core.transport(id).and_then(Holds::held).map_or(0, |conn| conn.posted());
        let state = link.end_state(device, posted);
        // The queue pair is not destroyed in the turn that starts its end, so that receives already consumed
        // by the device can complete.
        let is_over = link.end.ending.is_some_and(|ending| ending.is_over(&state, now));
        if link.end.ending.is_none() {
            link.begin_end(Ending::begin(now, device.drain_reporting));
        }
        if is_over && state.awaits_report() && device.drain_reporting.on_timeout() {
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

    fn destroy<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: ConnectionId) {
        // The completions are polled first: destroying a queue pair removes its completions, and with them
        // receives of the shared queue. Its number may be reused.
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
            device.ids_by_number.remove(&link.number());
            // Receives of the shared queue are posted again; those of the queue pair's own queue end with the
            // queue pair.
            if let Some(conn) = core.transport(id).and_then(Holds::held) {
                let _ = link.post_receives(conn, device);
            }
            device.post_receives();
            lost = link.end_state(device, 0).lost_receives();
        }
        drop(link);
        if let Some(device) = &mut devices[index] {
            // Released after the queue pair was dropped, as the release may destroy its shared receive queue.
            device.release(reservation, lost);
        }
        self.release_device(index);
        if let Some(conn) = core.transport(id).and_then(Holds::held) {
            conn.on_destroyed();
        }
        core.step(id);
        while core.next_closed().is_some() {}
    }

    /// Steps a connection with replies from a disk, timer or message, and posts its work. Returns false if
    /// this shell does not have the connection.
    #[inline]
    pub fn flush<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: ConnectionId) -> bool {
        if self.link(id).is_none() {
            return false;
        }
        let Some(conn) = core.transport(id).and_then(Holds::held) else { return true };
        if conn.has_events() {
            core.step(id);
        }
        self.pump(core, id);
        true
    }

    /// Ends a connection without draining. Its slot becomes free when the queue pair is destroyed. Returns
    /// false if this shell does not have the connection.
    #[cold]
    pub fn evict<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: ConnectionId) -> bool {
        if self.link(id).is_none() {
            return false;
        }
        self.disconnect(core, id);
        true
    }

    /// Ends a connection without draining.
    fn disconnect<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: ConnectionId) {
        if let Some(conn) = core.transport(id).and_then(Holds::held) {
            conn.on_disconnected();
        }
        core.step(id);
        self.pump(core, id);
    }

    fn on_time<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C) {
        let now = self.now;
        for device in self.devices.iter_mut().flatten() {
            device.on_time();
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
            // The host acknowledges nothing, or the completion queue has failed: posted work does not
            // complete and occupies buffers.
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
        let readable = std::mem::take(&mut self.readable);
        if readable.completions {
            self.devices.iter_mut().flatten().for_each(DeviceCore::take_events);
        }
        if readable.device {
            self.poll_devices(core);
        }
        if !readable.manager {
            return;
        }
        for _ in 0..EVENTS_PER_TURN {
            let Some(channel) = self.manager.channel() else { return };
            match channel.next_event() {
                Ok(Some(event)) => self.on_event(core, event),
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "cannot read events of the RDMA connection manager");
                    return;
                }
            }
        }
        // EVENTS_PER_TURN was reached; the remaining events are read in the next turn.
        self.readable.manager = true;
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
        core.step(id);
        self.pump(core, id);
    }

    fn on_request<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, event: &CmEvent, id: CmId) {
        let listener = event.listener.and_then(|token| self.listeners.find(token));
        let Some(listener) = listener.map(|it| it.index) else { return };
        // Without the device: it is new and was reached through a listener on all addresses. Dropping the id
        // rejects the request; hosts retry.
        let Some(device) = self.device_of(&id) else { return };
        match check(event, device.shared.device().limits(), self.entries_max) {
            Ok(params) => self.requests.push_back(Request { id, listener, params }),
            Err((status, reason)) => {
                if let Some(remote) = id.peer_address() {
                    core.on_refused(remote, reason);
                }
                reject(&id, status);
            }
        }
    }

    /// Accepts a connection request that was admitted. Returns false if the request was rejected instead: no
    /// capacity, or its device or an address is not known here.
    pub fn accept<C: Connections<Conn: Holds<Conn>>>(
        &mut self,
        core: &mut C,
        (request, admitted): (Request, Admitted),
        mut config: ConnConfig,
        now: Nanos,
    ) -> bool {
        self.now = now;
        let Request { id: cm, listener, params } = request;
        let (Some(remote), Some(local)) = (cm.peer_address(), cm.local_address()) else { return false };
        if let Some(reason) = core.refusal() {
            let reason = reason.to_owned();
            core.on_refused(remote, reason);
            reject(&cm, CmStatus::NO_RESOURCES);
            return false;
        }
        let mut link = match self.make_link(cm, params, &mut config) {
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
                // The queue pair was never connected, so it has consumed no shared receive.
                device.release(reservation, 0);
            }
            return false;
        };
        core.set_admitted(id, admitted);
        link.id = id;
        if let Some(device) = &mut self.devices[link.device] {
            device.ids_by_number.insert(link.number(), id);
        }
        self.ids.insert(link.cm.token(), id);
        let answer = CmAccept::new(params.entries);
        let accepted = link.cm.accept(&ConnectParams {
            private_data: answer.as_bytes(),
            responder_resources: 0,
            initiator_depth: params.responder_resources,
        });
        if accepted.is_ok() {
            // Shortens the host's retry delay after RNR NAK. If the device refuses, the delay stays 655 ms,
            // without other effects.
            let _ = link.set_min_rnr_timer();
        }
        if let Some(place) = self.links.get_mut(id.index()) {
            *place = Some(link);
        }
        if accepted.is_err() {
            // The host has cancelled its request meanwhile, or the device refuses.
            self.disconnect(core, id);
        }
        true
    }

    /// Creates a connection's queue pair and reserves or posts its receives. Sets the limits in `config` to
    /// those granted. An error contains the identifier, for the rejection, and the reason.
    fn make_link(
        &mut self,
        cm: CmId,
        params: QueueParams,
        config: &mut ConnConfig,
    ) -> Result<Link, (CmId, String)> {
        // A core that had no channel at the start opens it for its first connection.
        let channel = self.manager.get_or_open(CmChannel::new);
        if let Err(error) = channel.and_then(|channel| cm.migrate(channel)) {
            return Err((cm, error.to_string()));
        }
        let is_of = |device: &DeviceCore| !device.is_lost && device.shared.device().is_of(&cm);
        let index = self.devices.iter().position(|device| device.as_ref().is_some_and(is_of));
        let found = index.and_then(|index| Some((index, self.devices[index].as_mut()?)));
        let Some((index, device)) = found else {
            return Err((cm, "it came over an RDMA device that this core has not opened".to_owned()));
        };
        let limits = device.shared.device().limits().clone();
        let entries = u32::from(params.entries);
        // One SEND, and one READ or WRITE, for each command.
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
        config.receives = params.entries;
        config.send_queue = queue_pair.send_wr().min(send_wr);
        config.segments_max = (queue_pair.send_sge() as usize).min(segments as usize).min(SEGMENTS_MAX);
        config.reads_max = u32::from(params.responder_resources);
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
fn link_of(links: &mut [Option<Link>], id: ConnectionId) -> Option<&mut Link> {
    links.get_mut(id.index())?.as_mut().filter(|link| link.id == id)
}
