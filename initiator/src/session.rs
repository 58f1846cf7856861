//! [`Session`]: a controller and its queues that come back after a loss.
//!
//! ```text
//!          any connection ends                  it is time             connected
//!   Up ─────────────────────────> Down(retry at) ────────> (attempt) ────────────> Up
//!     all others are ended too        ^                        │
//!                                     └──── failed, back-off ──┤
//!                                                              └── no attempts left, refused ──> GivenUp
//! ```
//! What becomes of outstanding commands is for [`OnLoss`](crate::OnLoss) to say: they come back as lost, or
//! are sent again under their tickets. A namespace that is another disk than before ends the session: what
//! was meant for the one must not reach the other. An attempt waits, up to `connect_timeout` for each step
//! (`connect_answer_timeout` for Connect); everything else does not.

use std::time::Duration;

use nvme_spec::admin::AsyncEvent;
use spindle_reactor::clock::{Clock, Nanos};

use crate::backoff::Backoff;
use crate::controller::{Controller, ControllerEvent};
use crate::error::{Error, Loss};
use crate::options::{Options, Target};
use crate::queue::IoQueue;
use crate::set::QueueSet;

/// How often the controller is looked at: often enough for any keep alive.
const CONTROLLER_PERIOD: Nanos = Nanos::from_ms(50);

/// How a session comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionOptions {
    /// Wait before the first attempt. 100 ms: a target that was restarted is back by then.
    pub wait_first: Duration,
    /// Longest wait between two attempts. 10 s, as Linux' reconnect delay.
    pub wait_longest: Duration,
    /// Attempts before it gives up. 60: ten minutes, as Linux' controller loss time-out.
    pub attempts_max: u32,
    /// For jitter, together with the host's identifier.
    pub seed: u64,
}

impl Default for SessionOptions {
    fn default() -> SessionOptions {
        SessionOptions {
            wait_first: Duration::from_millis(100),
            wait_longest: Duration::from_secs(10),
            attempts_max: 60,
            seed: u64::from(std::process::id()),
        }
    }
}

/// What happened to a session.
#[derive(Debug)]
pub enum SessionEvent {
    /// The connections are gone; commands were told or are held.
    Lost {
        /// Why the first of them ended.
        loss: Loss,
    },
    /// An attempt failed; there will be another.
    AttemptFailed {
        /// Why.
        error: Error,
        /// When the next one is due, from now.
        retry_in: Duration,
    },
    /// It is up again.
    Reconnected {
        /// Attempts that it took.
        attempts: u32,
        /// Commands that were sent again.
        replayed: usize,
    },
    /// There will be no other attempt.
    GaveUp {
        /// What the last one failed of.
        error: Error,
    },
    /// The controller tells of a change.
    Async(AsyncEvent),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Up,
    Down { retry_at: Nanos },
    GivenUp,
}

/// See the module.
#[derive(Debug)]
pub struct Session {
    target: Target,
    options: Options,
    controller: Controller,
    queues: QueueSet,
    backoff: Backoff,
    state: State,
    /// When it came up last; zero for the first time, which counts as long ago.
    up_since: Nanos,
    next_look: Nanos,
}

impl Session {
    /// Connect to a subsystem, with as many I/O queues as `options` ask for. One attempt: who starts wants to
    /// know.
    ///
    /// # Errors
    /// [`Error`], naming the step; [`Error::Range`] when the controller grants fewer queues.
    pub fn connect(target: &Target, options: &Options, session: &SessionOptions) -> Result<Session, Error> {
        let mut controller = Controller::connect(target, options)?;
        let mut queues = QueueSet::new(options.batch_bytes)?;
        for qid in 1..=options.io_queues {
            queues.add(controller.connect_queue(qid)?)?;
        }
        // The processes of two hosts may have one number, as in containers; their identifiers differ.
        let mix = |mixed: u64, byte: &u8| (mixed ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        let seed = target.host.id.iter().fold(session.seed, mix);
        let backoff = Backoff::new(session.wait_first, session.wait_longest, session.attempts_max, seed);
        Ok(Session {
            target: target.clone(),
            options: options.clone(),
            controller,
            queues,
            backoff,
            state: State::Up,
            up_since: Nanos::ZERO,
            next_look: Nanos::ZERO,
        })
    }

    /// The controller, for admin commands. While the session is down it is the one that was lost.
    pub fn controller(&mut self) -> &mut Controller {
        &mut self.controller
    }

    /// A queue, to submit to; while the session is down it refuses.
    ///
    /// # Panics
    /// When there is no such queue: they are numbered from 0.
    pub fn queue_mut(&mut self, index: usize) -> &mut IoQueue {
        self.queues.queue_mut(index)
    }

    /// Commands without a completion, over all queues.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.queues.outstanding()
    }

    /// True while commands can be submitted.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.state == State::Up
    }

    /// When the next attempt is due, while the session is down.
    #[must_use]
    pub fn retry_at(&self) -> Option<Nanos> {
        match self.state {
            State::Down { retry_at } => Some(retry_at),
            State::Up | State::GivenUp => None,
        }
    }

    /// One turn, as [`QueueSet::poll`]; and whatever happened to the session. Call it again while it tells
    /// something.
    pub fn poll(
        &mut self,
        now: Nanos,
        mut on_ready: impl FnMut(usize, &mut IoQueue),
    ) -> Option<SessionEvent> {
        match self.state {
            State::Up => self.poll_up(now, &mut on_ready),
            State::Down { retry_at } if now >= retry_at => Some(self.attempt(now, &mut on_ready)),
            State::Down { .. } | State::GivenUp => None,
        }
    }

    fn poll_up(
        &mut self,
        now: Nanos,
        on_ready: &mut impl FnMut(usize, &mut IoQueue),
    ) -> Option<SessionEvent> {
        let mut loss = None;
        self.queues.poll(now, |index, queue| {
            loss = loss.or(queue.loss());
            on_ready(index, queue);
        });
        if loss.is_none() && now >= self.next_look {
            match self.controller.poll(now) {
                Some(ControllerEvent::Async(event)) => return Some(SessionEvent::Async(event)),
                Some(ControllerEvent::Lost(why)) => loss = Some(why),
                Some(ControllerEvent::Former(_)) | None => self.next_look = now + CONTROLLER_PERIOD,
            }
        }
        let loss = loss?;
        self.end_all(now, on_ready);
        self.backoff.lasted((now - self.up_since).as_duration());
        // The first attempt always has its wait; zero attempts allowed is a loss for good, told by the first
        // failure.
        let wait = self.backoff.next_wait().unwrap_or_default();
        self.state = State::Down { retry_at: now + wait.into() };
        Some(SessionEvent::Lost { loss })
    }

    /// An association is one: what is left of it is ended too.
    fn end_all(&mut self, now: Nanos, on_ready: &mut impl FnMut(usize, &mut IoQueue)) {
        self.controller.abandon();
        self.queues.abandon(now, on_ready);
    }

    fn attempt(&mut self, now: Nanos, on_ready: &mut impl FnMut(usize, &mut IoQueue)) -> SessionEvent {
        let began = Clock::now();
        let result = self.reconnect();
        // An attempt takes up to some time-outs: the wait is for after it.
        let now = now + (Clock::now() - began);
        let error = match result {
            Ok(replayed) => {
                let attempts = self.backoff.attempts();
                self.backoff.reset();
                self.state = State::Up;
                self.up_since = now;
                return SessionEvent::Reconnected { attempts, replayed };
            }
            Err(error) => error,
        };
        self.end_all(now, on_ready);
        match self.backoff.next_wait().filter(|_| error.may_pass()) {
            Some(retry_in) => {
                self.state = State::Down { retry_at: now + retry_in.into() };
                SessionEvent::AttemptFailed { error, retry_in }
            }
            None => {
                self.state = State::GivenUp;
                self.queues.give_up(on_ready);
                SessionEvent::GaveUp { error }
            }
        }
    }

    /// The controller and all queues anew; how many commands were sent again.
    fn reconnect(&mut self) -> Result<usize, Error> {
        // Of the association that was up last: one that came no further than this gave out nothing.
        let known = self.controller.known().to_vec();
        let mut controller = Controller::connect(&self.target, &self.options)?;
        controller.find_again(&known)?;
        self.controller = controller;
        let mut replayed = 0;
        for index in 0..self.queues.len() {
            let controller = &mut self.controller;
            replayed += self.queues.revive(index, |queue| controller.reconnect_queue(queue))?;
        }
        Ok(replayed)
    }
}
