//! Controllers: Connect, properties, admin commands. No I/O and no clock. No input of a host causes a panic.
//!
//! ```text
//!   Connect ──> connect() ──> ConnectedQueue::Admin(controller) | ConnectedQueue::Io { shared, qid }
//!   Property Get/Set ──> Controller::property ──> reply, Effect (close I/O queues)
//!   admin command ──> Controller::need (bytes, direction) ──> [buffer, data from the host]
//!                 ──> Controller::execute ──> Outcome
//!   snapshot swapped, error on a queue, time ──> on_snapshot, on_error, tick
//!                 ──> take_async_event, Effect, Expired
//! ```
//! A [`Controller`] is owned by its admin queue, on that queue's core; state that other cores need is in
//! [`ControllerShared`].
//!
//! Files: `connect` (checks of Connect), `lifetime` (state table), `property` (registers), `command` (parse
//! and dispatch of admin commands), `identify` and `identify_controller`, `log` (Get Log Page) with its pages
//! `error_log`, `smart` and `changed`, `feature` (Get and Set Features), `event` (asynchronous events),
//! `keep_alive` (timer), `limits` (values that Identify reports).
//!
//! The caller takes buffers, and executes Abort and End Former Associations ([`Outcome::Abort`],
//! [`Outcome::EndFormer`]). Not supported: reservations, ANA, authentication, namespace management, firmware
//! update, directives. Their commands, log pages and features are refused and not advertised.
//!
//! Limits: [`limits`], [`NSID_MAX`](crate::snapshot::NSID_MAX) namespaces,
//! [`IO_QUEUES_MAX`](crate::shared::IO_QUEUES_MAX) I/O queues.

mod changed;
mod command;
pub mod connect;
mod error_log;
pub mod event;
mod feature;
mod identify;
mod identify_controller;
pub mod keep_alive;
pub mod lifetime;
pub mod limits;
mod log;
mod property;
mod smart;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt;
use std::sync::Arc;

use nvme_spec::opcode::FabricsType;
use nvme_spec::register::Cc;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_nvme_transport::{Limits, Peer, TransportKind};
use spindle_reactor::clock::Nanos;

pub use self::connect::{ConnectRefusal, Connected, ConnectedQueue, connect};
pub use self::error_log::ErrorRecord;
pub use self::lifetime::{ControllerState, Effect};
pub(crate) use self::log::Window;
pub use self::log::{DISCOVERY_PAGES, IO_PAGES};

use self::changed::ChangedNamespaces;
pub(crate) use self::command::NEXT_DATA_BYTES;
use self::error_log::ErrorLog;
use self::event::Events;
use self::feature::Features;
use self::keep_alive::KeepAlive;
use self::smart::HealthWatch;
use crate::discovery;
use crate::refusal::{Refusal, field};
use crate::shared::{ControllerShared, Registry};
use crate::snapshot::{Snapshot, Subsystem};

/// Input of a controller's functions besides the command.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The configuration that is advertised to hosts. For Connect of an I/O queue, and for Connect on a
    /// listener that is not advertised yet: the newest configuration of the core.
    pub snapshot: &'a Snapshot,
    /// Controllers of the process.
    pub registry: &'a Registry,
    /// Addresses and transport of the connection.
    pub peer: &'a Peer,
    /// Time of this turn.
    pub now: Nanos,
    /// Start of the process, on the clock of `now`.
    pub process_started: Nanos,
    /// Wall clock, in ms since 1970.
    pub wall_ms: u64,
    /// Index of the core that executes the command.
    pub core: usize,
    /// Number of cores of the process.
    pub cores: usize,
}

/// Data transfer of an admin command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// Length in bytes; 0: no data.
    pub bytes: u32,
    /// Of these, the bytes that need memory; zeroes follow.
    pub memory: u32,
    /// True: from the controller to the host; false: from the host to the controller.
    pub is_to_host: bool,
}

impl Need {
    /// The command transfers no data.
    pub const NONE: Need = Need::to_host(0);

    pub(crate) const fn to_host(bytes: u32) -> Need {
        Need { bytes, memory: bytes, is_to_host: true }
    }

    pub(crate) const fn from_host(bytes: u32) -> Need {
        Need { bytes, memory: bytes, is_to_host: false }
    }
}

/// Result of an admin command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Reply now.
    Reply {
        /// Status of the completion.
        status: Status,
        /// Dwords 0 and 1 of the completion.
        result: u64,
        /// Byte offset of the field at fault, for the error log; `None`: no field is at fault.
        field: Option<u16>,
    },
    /// Park the command until [`Controller::take_async_event`] returns dword 0 of its completion.
    ParkAsyncEvent,
    /// End the former associations of this host that have the same token, then reply.
    EndFormer {
        /// Token of the command; not 0.
        token: u64,
    },
    /// Reply when the member has entries, or after [`NEXT_WAIT`](spindle_target_card::NEXT_WAIT).
    Next {
        /// Sequence of the last entry that the member has executed.
        acknowledged: u64,
    },
    /// Abort the command if it can end without effect, call [`Controller::abort_done`], and reply with bit 0
    /// of dword 0 clear if the command was aborted.
    Abort {
        /// QID of the submission queue of the command to abort.
        sqid: u16,
        /// CID of the command to abort.
        cid: u16,
    },
}

impl Outcome {
    /// Reply with success and this result in dwords 0 and 1.
    #[must_use]
    pub const fn success(result: u64) -> Outcome {
        Outcome::Reply { status: Status::SUCCESS, result, field: None }
    }
}

impl From<Refusal> for Outcome {
    fn from(failure: Refusal) -> Outcome {
        Outcome::Reply { status: failure.status, result: 0, field: failure.field }
    }
}

/// Reason for which [`Controller::tick`] ends a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expired {
    /// No command arrived within the keep-alive time-out.
    KeepAlive {
        /// The time-out, in ms.
        timeout_ms: u32,
    },
    /// The controller was not enabled for [`limits::ASSOCIATION_TIMEOUT`].
    NeverEnabled,
}

/// Controller type, from SUBNQN of Connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Of an NVM subsystem, with I/O queues.
    Io,
    /// Of the discovery subsystem, with an admin queue only.
    Discovery,
}

/// One controller: the state that only the core of its admin queue uses.
pub struct Controller {
    /// The state that all cores use.
    pub shared: Arc<ControllerShared>,
    kind: Kind,
    state: ControllerState,
    cc: Cc,
    transport: TransportKind,
    in_capsule_bytes: u32,
    queue_entries_max: u16,
    transfer_bytes: u32,
    keep_alive_ms_max: u32,
    keep_alive_ms_default: u32,
    keep_alive: KeepAlive,
    events: Events,
    features: Features,
    health: HealthWatch,
    changed: ChangedNamespaces,
    errors: ErrorLog,
    aborts: u8,
    /// A reset or a shutdown is not complete: I/O queues are not closed, or disks have had their commands for
    /// at most `ORPHAN_MAX`.
    is_quiescing: bool,
}

impl fmt::Debug for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controller")
            .field("cntlid", &self.shared.cntlid)
            .field("kind", &self.kind)
            .field("state", &self.state)
            .field("cc", &self.cc)
            .finish_non_exhaustive()
    }
}

impl Controller {
    /// Bytes of a controller with a full error log, without the Error Recovery values of namespaces.
    pub(crate) fn bytes() -> usize {
        size_of::<Controller>() + size_of::<ControllerShared>() + error_log::memory_bytes()
    }

    fn new(
        cx: &Context<'_>,
        shared: Arc<ControllerShared>,
        kind: Kind,
        kato_ms: u32,
        limits: &Limits,
        queues: u16,
    ) -> Controller {
        let configured = &cx.snapshot.limits;
        let timeout_ms = keep_alive::granted_ms(kato_ms);
        Controller {
            shared,
            kind,
            state: ControllerState::Disabled,
            cc: Cc::new(),
            transport: cx.peer.transport,
            in_capsule_bytes: limits.in_capsule_bytes,
            queue_entries_max: connect::queue_entries_max(cx, limits),
            transfer_bytes: limits.transfer_bytes.min(configured.transfer_bytes).max(limits::PAGE_BYTES),
            keep_alive_ms_max: connect::keep_alive_ms_max(configured, kind),
            keep_alive_ms_default: timeout_ms,
            keep_alive: KeepAlive::new(timeout_ms, cx.now),
            events: Events::new(feature::async_events_default(kind)),
            features: Features::new(queues, cx.now),
            health: HealthWatch::default(),
            changed: ChangedNamespaces::default(),
            errors: ErrorLog::new(kind),
            aborts: 0,
            is_quiescing: false,
        }
    }

    /// Returns the length and direction of the data of an admin command (not a Fabrics command).
    ///
    /// # Errors
    /// The command is invalid and is refused before its data is transferred.
    pub fn need(&self, cx: &Context<'_>, sqe: &Sqe) -> Result<Need, Refusal> {
        let command = self.parse(cx, sqe)?;
        self.need_of(cx, &command)
    }

    /// Executes an admin command. `data` has the length that [`Need::memory`] says: zeroed for a transfer to
    /// the host, else filled with the host's data. Internal Error if `data` is shorter, except for a log
    /// page: one that has grown since is cut.
    pub fn execute(&mut self, cx: &Context<'_>, sqe: &Sqe, data: &mut [u8]) -> Outcome {
        self.shared.note_traffic();
        self.parse(cx, sqe).and_then(|command| self.run(cx, &command, data)).unwrap_or_else(Outcome::from)
    }

    /// Executes Property Get or Set; any other Fabrics command gets Invalid Opcode. The caller applies the
    /// [`Effect`] after the reply.
    pub fn property(&mut self, cx: &Context<'_>, sqe: &Sqe) -> (Outcome, Effect) {
        self.shared.note_traffic();
        self.is_quiescing = self.is_quiescing && self.shared.taken_qids() > 0;
        let done = match sqe.fctype() {
            FabricsType::PROPERTY_GET => self.property_get(sqe).map(|value| (value, Effect::None)),
            FabricsType::PROPERTY_SET => self.property_set(cx, sqe).map(|effect| (0, effect)),
            _ => Err(Refusal::at(Status::INVALID_OPCODE, field::NSID)),
        };
        match done {
            Ok((value, effect)) => (Outcome::success(value), effect),
            Err(failure) => (Outcome::from(failure), Effect::None),
        }
    }

    /// True for a controller of the discovery subsystem.
    #[must_use]
    pub fn is_discovery(&self) -> bool {
        self.kind == Kind::Discovery
    }

    /// Takes a pending event if an Asynchronous Event Request is parked. Returns dword 0 of its completion;
    /// `None`: no request is parked, or no unmasked event is pending.
    pub fn take_async_event(&mut self) -> Option<u32> {
        self.events.take()
    }

    /// Removes a parked Asynchronous Event Request that was aborted from the count.
    pub fn async_event_aborted(&mut self) {
        self.events.unpark();
    }

    /// Removes an Abort command that has ended from the count of outstanding Aborts.
    pub fn abort_done(&mut self) {
        self.aborts = self.aborts.saturating_sub(1);
    }

    /// Raises events for changes of the advertised configuration. Returns [`Effect::CloseAll`] when the
    /// subsystem was removed or the host is not allowed any more.
    pub fn on_snapshot(&mut self, old: &Snapshot, new: &Snapshot) -> Effect {
        match self.kind {
            Kind::Discovery => {
                if discovery::differs(old, new, &self.shared.host_nqn) {
                    self.events.raise(event::Kind::DiscoveryChanged);
                }
                Effect::None
            }
            Kind::Io => {
                let nqn = &self.shared.subsystem_nqn;
                let allowed = |subsystem: &&Arc<Subsystem>| subsystem.hosts.allows(&self.shared.host_nqn);
                let Some(after) = new.subsystem(nqn).filter(allowed) else {
                    return self.step(Nanos::ZERO, lifetime::Event::Revoke);
                };
                self.shared.check_membership(after);
                if self.changed.compare(old.subsystem(nqn).map(Arc::as_ref), after) {
                    self.events.raise(event::Kind::NamespaceChanged);
                }
                Effect::None
            }
        }
    }

    /// Adds a failed command of one of the controller's queues to the error log. False for a discovery
    /// controller, which has no error log.
    pub fn on_error(&mut self, entry: ErrorRecord) -> bool {
        self.errors.push(entry)
    }

    /// Checks the timers. `late`: time before `now` in which there was no check. `has_received` returns true
    /// if all that arrived on the controller's queues before a time was handled. `Some`: the controller has
    /// failed (CSTS.CFS), and the caller closes all queues of the controller.
    pub fn tick(
        &mut self,
        now: Nanos,
        late: Nanos,
        has_received: impl FnOnce(&ControllerShared, Nanos) -> bool,
    ) -> Option<Expired> {
        let shared = &self.shared;
        let has_received = |at| has_received(shared, at);
        let expired = self.keep_alive.tick(now, late, || shared.take_traffic(), has_received)?;
        self.step(now, lifetime::Event::Expire);
        Some(expired)
    }

    /// Removes the controller after its admin queue has ended: frees the CNTLID, and refuses further queues.
    pub fn remove(&mut self, registry: &Registry) {
        self.step(Nanos::ZERO, lifetime::Event::Remove);
        self.shared.end_membership();
        registry.remove(&self.shared);
    }

    /// Executes a transition of [`lifetime`] and its effects on keep alive, events and features. No other
    /// function changes the state.
    fn step(&mut self, now: Nanos, event: lifetime::Event) -> Effect {
        let lifetime::Step { state, effect } = lifetime::step(self.state, event);
        if state == self.state {
            return effect;
        }
        self.state = state;
        match state {
            ControllerState::Enabled => {
                // Traffic before the enable does not count: keep alive starts now.
                let _ = self.shared.take_traffic();
                self.keep_alive.start(now);
                self.shared.set_ready(true);
            }
            ControllerState::Disabled => {
                self.shared.set_ready(false);
                self.shared.note_reset();
                self.keep_alive.stop(now);
                self.reset(now);
            }
            ControllerState::ShutDown => {
                self.shared.set_ready(false);
                self.keep_alive.stop(now);
                self.events.reset(self.events.enabled);
                self.aborts = 0;
            }
            ControllerState::Failed | ControllerState::Removed => self.shared.set_gone(),
        }
        self.is_quiescing = effect == Effect::CloseIoQueues && self.shared.taken_qids() > 0;
        effect
    }

    /// Controller Reset: sets the features to their defaults, except KATO. Clears the events, the parked
    /// AERs, the changed namespaces and the count of Aborts. Enables the write cache.
    fn reset(&mut self, now: Nanos) {
        self.events.reset(feature::async_events_default(self.kind));
        self.features.reset(now);
        self.health = self.health.restarted();
        self.changed = ChangedNamespaces::default();
        self.aborts = 0;
        feature::set_write_cache(&self.shared, true);
    }
}
