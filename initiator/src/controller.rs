//! [`Controller`]: one association with a subsystem. It owns the admin queue; I/O queues are made by it and
//! live on their own.
//!
//! ```text
//!   connect:  ICReq ─ Connect (QID 0) ─ CAP, VS ─ CC.EN ─ CSTS.RDY ─ Identify ─ Set Features ─ event request
//!   poll:     keep alive when it is time, events as they come
//!   shutdown: CC.SHN ─ CSTS.SHST
//! ```
//! The control path waits: each step up to `connect_timeout`, Connect up to `connect_answer_timeout`. Only
//! [`Controller::poll`] never does.

mod admin;
mod bring_up;
mod opening;

use std::collections::VecDeque;
use std::time::Duration;

use nvme_spec::Sqe;
use nvme_spec::admin::AsyncEvent;
use nvme_spec::identify::{IdentifyController, Oaes};
use nvme_spec::register::{Cap, Vs};
use spindle_reactor::clock::{Clock, Nanos};
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_reactor::net::Waker;
use spindle_transport::host::HostData;

use crate::error::{Error, Loss};
use crate::options::{Options, Target};
use crate::qpair::{Qpair, Ticket};

pub use admin::Former;
pub(crate) use admin::parsed;
pub use opening::{Association, Opening};

/// Entries of the admin queue: the least that every controller grants (ASQSZ), and what Linux asks for.
const ADMIN_ENTRIES: u16 = 32;
/// Buffers for admin data: most of it is one page; long logs are read in pieces of the larger kind.
const ADMIN_ZONES: [ZoneSpec; 2] =
    [ZoneSpec { buffer_bytes: 4096, count: 16 }, ZoneSpec { buffer_bytes: ADMIN_BYTES_MAX, count: 4 }];
/// Most data of one admin command.
const ADMIN_BYTES_MAX: u32 = 64 << 10;
/// Events that wait for the caller; the oldest are forgotten beyond it (each only says that a log changed).
const EVENTS_MAX: usize = 64;
/// From an event request that is refused to the next one.
const EVENT_AGAIN: Nanos = Nanos::from_secs(1);

/// What happened to a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControllerEvent {
    /// The controller tells of a change; the log page that it names has more.
    Async(AsyncEvent),
    /// What came of [`Controller::begin_end_former_associations`].
    Former(Former),
    /// The admin queue's connection ended: the association is over.
    Lost(Loss),
}

/// See the module.
pub struct Controller {
    admin: Qpair,
    pool: Pool,
    target: Target,
    options: Options,
    cntlid: u16,
    cap: Cap,
    vs: Vs,
    identify: Box<IdentifyController>,
    queues_granted: u16,
    keep_alive: Option<KeepAlive>,
    event_request: Option<Ticket>,
    /// An event request was refused: not before this is the next one made. `None`: the controller has no
    /// events that are of use.
    event_again: Option<Nanos>,
    events: VecDeque<AsyncEvent>,
    /// The command that ends former associations, and what came of it.
    former_request: Option<Ticket>,
    former: Option<Former>,
    is_loss_told: bool,
}

/// The host's half of keep alive.
#[derive(Debug)]
struct KeepAlive {
    /// KATO: so long an answer is waited for.
    timeout: Nanos,
    period: Nanos,
    /// When the next one is due.
    next: Nanos,
    /// When the last one was sent.
    sent: Nanos,
    ticket: Option<Ticket>,
}

impl Controller {
    /// Connect to a subsystem, enable its controller and ask what it is.
    pub fn connect(target: &Target, options: &Options) -> Result<Controller, Error> {
        bring_up::connect(target, options)
    }

    /// Look for events, send keep alive when it is time. Never waits; call it a few times in each keep-alive
    /// time-out.
    pub fn poll(&mut self, now: Nanos) -> Option<ControllerEvent> {
        self.admin.poll(now);
        self.take_own(now);
        if self.event_request.is_none() && self.event_again.is_some_and(|again| now >= again) {
            self.request_event(now);
        }
        self.keep_alive(now);
        if let Some(event) = self.events.pop_front() {
            return Some(ControllerEvent::Async(event));
        }
        if let Some(former) = self.former.take() {
            return Some(ControllerEvent::Former(former));
        }
        let loss = self.admin.loss()?;
        if std::mem::replace(&mut self.is_loss_told, true) {
            return None;
        }
        Some(ControllerEvent::Lost(loss))
    }

    /// The next event that has come, and nothing else that [`Controller::poll`] tells. Never waits.
    pub fn next_event(&mut self, now: Nanos) -> Option<AsyncEvent> {
        self.admin.poll(now);
        self.take_own(now);
        self.events.pop_front()
    }

    /// Sleep until [`Controller::poll`] may find something or `waker` is raised, at most `timeout`; it may
    /// return early. The waker is lowered.
    pub fn wait(&mut self, timeout: Duration, waker: &Waker) {
        if self.events.is_empty() && self.former.is_none() {
            self.admin.link.wait_io(timeout, Some(waker));
        }
        waker.drain();
    }

    /// Say goodbye in order: the controller writes what it has and stops, then the connection is closed. I/O
    /// queues should be quiet.
    ///
    /// # Errors
    /// [`Error`], when the controller did not answer; the connection is closed all the same.
    pub fn shutdown(mut self) -> Result<(), Error> {
        let result = bring_up::shut_down(&mut self);
        self.admin.close();
        result
    }

    /// End the association without a word.
    pub fn abandon(&mut self) {
        self.admin.fail(Loss::Requested);
    }

    /// True while the admin queue's connection is.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.admin.is_up()
    }

    /// Identify Controller.
    #[must_use]
    pub fn identify(&self) -> &IdentifyController {
        &self.identify
    }

    /// The controller tells when attributes of its namespaces change.
    #[must_use]
    pub fn tells_of_namespaces(&self) -> bool {
        Oaes::from_bits(self.identify.oaes.get()).namespace_attribute()
    }

    /// I/O queues that the controller granted; 0 of a discovery controller.
    #[must_use]
    pub fn queues_granted(&self) -> u16 {
        self.queues_granted
    }

    /// Most commands that one I/O queue may have outstanding: one less than its entries, of which one stays
    /// empty.
    #[must_use]
    pub fn depth_max(&self) -> u16 {
        self.cap.mqes_z()
    }

    /// Most bytes that one command moves: MDTS, or what one buffer can be.
    #[must_use]
    pub fn transfer_bytes_max(&self) -> u32 {
        let mdts = self.identify.transfer_bytes_max(self.cap.mpsmin()).unwrap_or(u64::MAX);
        u32::try_from(mdts).unwrap_or(u32::MAX)
    }

    /// Take the completions of our own requests: events and keep alive. Those without a waiter (it gave up)
    /// are dropped.
    fn take_own(&mut self, now: Nanos) {
        while let Some(completion) = self.admin.next_completion() {
            if self.event_request == Some(completion.ticket) {
                self.event_request = None;
                if completion.result.is_ok() {
                    if self.events.len() == EVENTS_MAX {
                        self.events.pop_front();
                    }
                    self.events.push_back(AsyncEvent::from_bits(completion.cqe.result_u32()));
                    self.request_event(now);
                }
            } else if self.former_request == Some(completion.ticket) {
                self.former_request = None;
                self.former = admin::former_of(&completion);
            } else if let Some(keep_alive) = &mut self.keep_alive
                && keep_alive.ticket == Some(completion.ticket)
            {
                // A refusal says the same as silence: the controller is about to end this.
                keep_alive.ticket = None;
            }
        }
    }

    /// Ask for the next event. Until a request is taken the events stay with the controller.
    fn request_event(&mut self, now: Nanos) {
        self.event_again = Some(now + EVENT_AGAIN);
        self.event_request = self.admin.submit(Sqe::async_event_request(0), HostData::None).ok();
        self.admin.send();
    }

    fn keep_alive(&mut self, now: Nanos) {
        let Some(keep_alive) = &mut self.keep_alive else { return };
        if !self.admin.is_up() {
            return;
        }
        if keep_alive.ticket.is_some() {
            // One is outstanding at a time, and has the whole time-out, as with Linux.
            if now >= keep_alive.sent + keep_alive.timeout {
                self.admin.fail(Loss::Silent(keep_alive.timeout.as_duration()));
            }
            return;
        }
        if now < keep_alive.next {
            return;
        }
        (keep_alive.sent, keep_alive.next) = (now, now + keep_alive.period);
        keep_alive.ticket = self.admin.submit(Sqe::keep_alive(0), HostData::None).ok();
        self.admin.send();
    }
}

impl std::fmt::Debug for Controller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller")
            .field("target", &self.target)
            .field("cntlid", &self.cntlid)
            .field("is_up", &self.is_up())
            .finish_non_exhaustive()
    }
}

impl KeepAlive {
    /// For this time-out; `None` where it is off.
    fn new(timeout_ms: u32) -> Option<KeepAlive> {
        // Twice in each, as Linux: one that is late does not end the association.
        let period = Nanos::from_ms(u64::from(timeout_ms / 2).max(1));
        let timeout = Nanos::from_ms(timeout_ms.into());
        (timeout_ms > 0).then(|| {
            let sent = Clock::now();
            KeepAlive { timeout, period, next: sent + period, sent, ticket: None }
        })
    }
}

fn admin_pool() -> Result<Pool, Error> {
    Ok(Pool::new(&ADMIN_ZONES, Pages::Base)?)
}
