//! [`Controller`]: one association with a subsystem. The controller owns the admin queue and connects I/O
//! queues, which the caller owns.
//!
//! ```text
//!   connect:  ICReq ─ Connect (QID 0) ─ CAP, VS ─ CC.EN ─ CSTS.RDY ─ Identify ─ Set Features ─ event request
//!   poll:     Keep Alive when due, events on arrival, result of End Former Associations, loss
//!   shutdown: CC.SHN ─ CSTS.SHST
//! ```
//! The control path blocks: each step up to `connect_timeout`, Connect up to `connect_answer_timeout`, the
//! wait for CSTS.RDY up to CAP.TO (at least 1 s). [`Controller::poll`] does not block.

mod admin;
mod bring_up;
mod opening;

use std::collections::VecDeque;
use std::time::Duration;

use nvme_spec::Sqe;
use nvme_spec::admin::AsyncEvent;
use nvme_spec::identify::{IdentifyController, Oaes};
use nvme_spec::register::{Cap, Vs};
use spindle_nvme_optimistic::client::OptimisticGrant;
use spindle_nvme_transport::host::HostData;
use spindle_reactor::clock::{Clock, Nanos};
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_reactor::net::Waker;

use crate::error::{Error, Loss};
use crate::options::{Options, Target};
use crate::qpair::{Completion, Qpair, Ticket};

use admin::AttachRequest;
pub(crate) use admin::parsed;
pub use admin::{CommandData, Former};
pub use opening::{Association, Opening};

/// Entries of the admin queue: the smallest size that every controller supports, also used by Linux.
const ADMIN_ENTRIES: u16 = 32;
/// Buffers for admin data. Most data is one page; parts of long logs need the larger size.
const ADMIN_ZONES: [ZoneSpec; 2] =
    [ZoneSpec { buffer_bytes: 4096, count: 16 }, ZoneSpec { buffer_bytes: ADMIN_BYTES_MAX, count: 4 }];
/// Most data bytes of one admin command.
const ADMIN_BYTES_MAX: u32 = 64 << 10;
/// Most queued events; a further one replaces the oldest. An event only says that a log page has changed.
const EVENTS_MAX: usize = 64;
/// Least time between an Asynchronous Event Request that fails and the next request.
const EVENT_AGAIN: Nanos = Nanos::from_secs(1);

/// Event of a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControllerEvent {
    /// An asynchronous event; the event's log page contains the details.
    Async(AsyncEvent),
    /// Result of [`Controller::begin_end_former_associations`].
    Former(Former),
    /// The admin queue's connection ended: the association is over.
    Lost(Loss),
}

/// A controller and its admin queue. Connected until dropped, shut down or lost.
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
    /// Earliest time of the next event request after a failed request. `None`: no events are used.
    next_event_request: Option<Nanos>,
    events: VecDeque<AsyncEvent>,
    /// The outstanding End Former Associations command.
    former_request: Option<Ticket>,
    /// Result of that command, until `poll` returns it.
    former: Option<Former>,
    /// The outstanding Attach command.
    attach_request: Option<AttachRequest>,
    /// Result of that command, until [`Controller::take_grant`] returns it.
    attached: Option<Result<OptimisticGrant, Error>>,
    /// Outstanding commands of [`Controller::begin_command`], and the completions of former ones.
    commands: Vec<Ticket>,
    answers: VecDeque<Completion>,
    is_loss_told: bool,
}

#[derive(Debug)]
struct KeepAlive {
    /// KATO; also the timeout of the answer.
    timeout: Nanos,
    period: Nanos,
    next: Nanos,
    sent: Nanos,
    ticket: Option<Ticket>,
}

impl Controller {
    /// Connects to a subsystem, enables its controller, identifies it and requests I/O queues. Blocks.
    pub fn connect(target: &Target, options: &Options) -> Result<Controller, Error> {
        bring_up::connect(target, options)
    }

    /// Receives events, sends Keep Alive when due, and returns the next event; `None`: no event now. Does not
    /// block. Call it several times per keep-alive timeout.
    pub fn poll(&mut self, now: Nanos) -> Option<ControllerEvent> {
        self.admin.poll(now);
        self.handle_completions(now);
        if self.event_request.is_none() && self.next_event_request.is_some_and(|again| now >= again) {
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

    /// Receives, and returns the next asynchronous event; other events stay queued. Does not block.
    pub fn next_event(&mut self, now: Nanos) -> Option<AsyncEvent> {
        self.admin.poll(now);
        self.handle_completions(now);
        self.events.pop_front()
    }

    /// Sleeps until [`Controller::poll`] may have an event or `waker` is woken, at most `timeout`; may return
    /// early. Drains `waker`.
    pub fn wait(&mut self, timeout: Duration, waker: &Waker) {
        let is_idle = self.events.is_empty() && self.former.is_none() && self.attached.is_none();
        if is_idle && self.answers.is_empty() {
            self.admin.link.wait_io(timeout, Some(waker));
        }
        waker.drain();
    }

    /// Shuts the controller down (CC.SHN), waits for that, and disconnects. I/O queues should be idle.
    ///
    /// # Errors
    /// [`Error`] when the controller does not complete the shutdown; the connection is closed in any case.
    pub fn shutdown(mut self) -> Result<(), Error> {
        let result = bring_up::shut_down(&mut self);
        self.admin.close();
        result
    }

    /// Aborts the admin queue's connection, without a shutdown of the controller.
    pub fn abandon(&mut self) {
        self.admin.fail(Loss::Requested);
    }

    /// Returns true while the admin queue is connected.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.admin.is_up()
    }

    /// Returns the controller ID (CNTLID), which Connect of an I/O queue names.
    #[must_use]
    pub fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// Returns the Identify Controller data of the last read.
    #[must_use]
    pub fn identify(&self) -> &IdentifyController {
        &self.identify
    }

    /// Returns true if the controller supports Namespace Attribute Changed events.
    #[must_use]
    pub fn tells_of_namespaces(&self) -> bool {
        Oaes::from_bits(self.identify.oaes.get()).namespace_attribute()
    }

    /// Returns the number of granted I/O queues, at most as many as requested; 0 for a discovery controller.
    #[must_use]
    pub fn queues_granted(&self) -> u16 {
        self.queues_granted
    }

    /// Returns the most outstanding commands of one I/O queue: its entries (MQES) less an empty one.
    #[must_use]
    pub fn depth_max(&self) -> u16 {
        self.cap.mqes_z()
    }

    /// Returns the most data bytes of one command: MDTS; `u32::MAX` if the controller reports no limit.
    #[must_use]
    pub fn transfer_bytes_max(&self) -> u32 {
        let mdts = self.identify.transfer_bytes_max(self.cap.mpsmin()).unwrap_or(u64::MAX);
        u32::try_from(mdts).unwrap_or(u32::MAX)
    }

    /// Handles completions of event request, End Former Associations and Keep Alive. Drops completions of
    /// other commands: their caller has stopped waiting after a timeout.
    fn handle_completions(&mut self, now: Nanos) {
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
            } else if let Some(request) = self.attach_request.take_if(|it| it.ticket == completion.ticket) {
                self.attached = Some(self.grant_of(&request, &completion));
            } else if let Some(at) = self.commands.iter().position(|ticket| *ticket == completion.ticket) {
                self.commands.remove(at);
                self.answers.push_back(completion);
            } else if let Some(keep_alive) = &mut self.keep_alive
                && keep_alive.ticket == Some(completion.ticket)
            {
                // An error status is ignored: the controller itself ends an expired association.
                keep_alive.ticket = None;
            }
        }
    }

    /// Submits an Asynchronous Event Request. Without a request the controller queues its events.
    fn request_event(&mut self, now: Nanos) {
        self.next_event_request = Some(now + EVENT_AGAIN);
        self.event_request = self.admin.submit(Sqe::async_event_request(0), HostData::None).ok();
        self.admin.send();
    }

    fn keep_alive(&mut self, now: Nanos) {
        let Some(keep_alive) = &mut self.keep_alive else { return };
        if !self.admin.is_up() {
            return;
        }
        if keep_alive.ticket.is_some() {
            // One Keep Alive is outstanding at a time, with the full KATO as its timeout, as in Linux.
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
    /// Starts the timer; `None` for timeout 0: Keep Alive is off.
    fn new(timeout_ms: u32) -> Option<KeepAlive> {
        // Twice per timeout, as Linux: one late Keep Alive does not end the association.
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
