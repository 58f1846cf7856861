//! Controllers: Connect, properties, admin commands. Pure: no I/O, no clock, nothing that a host sends can
//! make it panic.
//!
//! ```text
//!   Connect ──> connect() ──> ConnectedQueue::Admin(controller) | ConnectedQueue::Io { shared, qid }
//!   Property Get/Set ──> Controller::property ──> reply, Effect (close I/O queues)
//!   admin command ──> Controller::need (bytes, which way) ──> [buffer, data from the host]
//!                 ──> Controller::execute ──> Outcome
//!   snapshot swapped, error on a queue, time ──> on_snapshot, on_error, tick
//!                 ──> take_async_event, Effect, Expired
//! ```
//! A [`Controller`] belongs to its admin queue and lives on that queue's core; what other cores need of it is
//! in [`ControllerShared`]. `lifetime` has its states as a table; `property` the registers; `identify`,
//! `log`, `feature` the three big commands; `event` the asynchronous events; `keep_alive` the timer; `limits`
//! every number that is promised to hosts.
//!
//! What it does not do: it takes no buffer, waits for nothing, aborts and ends nothing itself
//! ([`Outcome::Abort`], [`Outcome::EndFormer`]), and has neither reservations, asymmetric access,
//! authentication, namespace management, firmware update nor directives: those commands, log pages and
//! features are refused and not advertised.
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
use spindle_reactor::clock::Nanos;
use spindle_transport::{Limits, Peer, TransportKind};

pub use self::connect::{ConnectRefusal, Connected, ConnectedQueue, connect};
pub use self::error_log::ErrorRecord;
pub use self::lifetime::{Effect, State};
pub(crate) use self::log::Window;

use self::changed::ChangedNamespaces;
use self::error_log::ErrorLog;
use self::event::Events;
use self::feature::Features;
use self::keep_alive::KeepAlive;
use self::smart::HealthWatch;
use crate::discovery;
use crate::refusal::{Refusal, field};
use crate::shared::{ControllerShared, Registry};
use crate::snapshot::{Snapshot, Subsystem};

/// What a controller looks at while it answers a command.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The configuration.
    pub snapshot: &'a Snapshot,
    /// All live controllers.
    pub registry: &'a Registry,
    /// The two ends of the connection.
    pub peer: &'a Peer,
    /// Time of this turn.
    pub now: Nanos,
    /// When the process started, on the same clock.
    pub started: Nanos,
    /// Wall clock, in ms since 1970.
    pub wall_ms: u64,
    /// The core.
    pub core: usize,
    /// How many cores there are.
    pub cores: usize,
}

/// Data that an admin command moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// Length in bytes; 0: it moves none.
    pub bytes: u32,
    /// From the controller to the host.
    pub is_to_host: bool,
}

impl Need {
    /// No data.
    pub const NONE: Need = Need::to_host(0);

    pub(crate) const fn to_host(bytes: u32) -> Need {
        Need { bytes, is_to_host: true }
    }

    pub(crate) const fn from_host(bytes: u32) -> Need {
        Need { bytes, is_to_host: false }
    }
}

/// How an admin command ends, or goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Reply now.
    Reply {
        /// Status.
        status: Status,
        /// Dwords 0 and 1.
        result: u64,
        /// Byte offset of the field to blame.
        field: Option<u16>,
    },
    /// Hold the command until [`Controller::take_async_event`] gives its result.
    HoldAsyncEvent,
    /// End the former associations of this host that have noted this token, and reply when that is over.
    EndFormer {
        /// The token; not 0.
        token: u64,
    },
    /// Look for this command and abort it if it has not begun; reply with bit 0 of dword 0 clear if it was
    /// aborted; then call [`Controller::abort_done`].
    Abort {
        /// Its queue.
        sqid: u16,
        /// Its identifier.
        cid: u16,
    },
}

impl Outcome {
    /// Success with this result.
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

/// Why a controller is given up by [`Controller::tick`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expired {
    /// No command came within the keep-alive time-out.
    KeepAlive {
        /// The time-out, in ms.
        timeout_ms: u32,
    },
    /// The controller was not enabled for [`limits::ASSOCIATION_TIMEOUT`].
    NeverEnabled,
}

/// What a controller is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Namespaces of a subsystem.
    Io,
    /// The discovery log.
    Discovery,
}

/// One controller, with all that is not shared between cores.
pub struct Controller {
    /// What is.
    pub shared: Arc<ControllerShared>,
    kind: Kind,
    state: State,
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
    /// A reset or a shutdown is not complete: I/O queues are not closed yet, or have left something at a
    /// disk.
    is_settling: bool,
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
    /// Bytes of a controller with a full error log.
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
            state: State::Disabled,
            cc: Cc::new(),
            transport: cx.peer.transport,
            in_capsule_bytes: limits.in_capsule_bytes,
            queue_entries_max: connect::queue_entries_max(cx, limits),
            transfer_bytes: limits.transfer_bytes.min(configured.transfer_bytes).max(limits::PAGE_BYTES),
            keep_alive_ms_max: configured.keep_alive_ms_max,
            keep_alive_ms_default: timeout_ms,
            keep_alive: KeepAlive::new(timeout_ms, cx.now),
            events: Events::new(feature::async_events_default(kind)),
            features: Features::new(queues, cx.now),
            health: HealthWatch::default(),
            changed: ChangedNamespaces::default(),
            errors: ErrorLog::new(kind),
            aborts: 0,
            is_settling: false,
        }
    }

    /// How many data bytes an admin command (not a Fabrics command) moves, and which way.
    ///
    /// # Errors
    /// The command is refused, before any data moves.
    pub fn need(&self, cx: &Context<'_>, sqe: &Sqe) -> Result<Need, Refusal> {
        let command = self.parse(cx, sqe)?;
        self.need_of(&command)
    }

    /// Execute an admin command. `data` is as long as [`Controller::need`] said: zeroed where it goes to the
    /// host, filled where it came from the host.
    pub fn execute(&mut self, cx: &Context<'_>, sqe: &Sqe, data: &mut [u8]) -> Outcome {
        self.shared.note_traffic();
        self.parse(cx, sqe).and_then(|command| self.run(cx, &command, data)).unwrap_or_else(Outcome::from)
    }

    /// Property Get or Set.
    pub fn property(&mut self, cx: &Context<'_>, sqe: &Sqe) -> (Outcome, Effect) {
        self.shared.note_traffic();
        self.is_settling = self.is_settling && self.shared.live_queues() > 0;
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

    /// An event to tell the host, if an Asynchronous Event Request is held for it: dword 0 of that command's
    /// completion.
    pub fn take_async_event(&mut self) -> Option<u32> {
        self.events.take()
    }

    /// A held Asynchronous Event Request was aborted.
    pub fn async_event_aborted(&mut self) {
        self.events.unhold();
    }

    /// An Abort command was answered.
    pub fn abort_done(&mut self) {
        self.aborts = self.aborts.saturating_sub(1);
    }

    /// The configuration has changed. [`Effect::CloseAll`] where the host has lost its subsystem or its right
    /// to it.
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
                    return self.step(Nanos::ZERO, lifetime::Event::Lose);
                };
                if self.changed.compare(old.subsystem(nqn).map(Arc::as_ref), after) {
                    self.events.raise(event::Kind::NamespaceChanged);
                }
                Effect::None
            }
        }
    }

    /// A command on one of the controller's queues failed: an entry for the error log. False: this kind of
    /// controller keeps none.
    pub fn on_error(&mut self, entry: ErrorRecord) -> bool {
        self.errors.push(entry)
    }

    /// Look at the time. `Some`: the host has fallen silent, the controller has failed (CSTS.CFS), close all
    /// its queues.
    pub fn tick(&mut self, now: Nanos) -> Option<Expired> {
        let shared = &self.shared;
        let expired = self.keep_alive.tick(now, || shared.take_traffic())?;
        self.step(now, lifetime::Event::Expire);
        Some(expired)
    }

    /// The admin connection has ended: the identifier is free again, and no queue is added any more.
    pub fn remove(&mut self, registry: &Registry) {
        self.step(Nanos::ZERO, lifetime::Event::Remove);
        registry.remove(&self.shared);
    }

    /// The only place where the state changes.
    fn step(&mut self, now: Nanos, event: lifetime::Event) -> Effect {
        let lifetime::Step { state, effect } = lifetime::step(self.state, event);
        if state == self.state {
            return effect;
        }
        self.state = state;
        match state {
            State::Enabled => {
                // What came before counts as no sign of life: the time runs from here.
                let _ = self.shared.take_traffic();
                self.keep_alive.start(now);
                self.shared.set_ready(true);
            }
            State::Disabled => {
                self.shared.set_ready(false);
                self.keep_alive.stop(now);
                self.reset(now);
            }
            State::ShutDown => {
                self.shared.set_ready(false);
                self.keep_alive.stop(now);
                self.events.reset(self.events.enabled);
                self.aborts = 0;
            }
            State::Failed | State::Gone => self.shared.set_gone(),
        }
        self.is_settling = effect == Effect::CloseIoQueues && self.shared.live_queues() > 0;
        effect
    }

    /// Controller Reset: features have their defaults, no event is pending. KATO stays what Connect made it.
    fn reset(&mut self, now: Nanos) {
        self.events.reset(feature::async_events_default(self.kind));
        self.features.reset(now);
        self.health = self.health.anew();
        self.changed = ChangedNamespaces::default();
        self.aborts = 0;
        feature::set_write_cache(&self.shared, true);
    }
}
