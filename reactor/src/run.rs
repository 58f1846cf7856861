//! [`Reactor`]: the loop of one core. It has the core's descriptors, its mailbox, its time and what it does
//! when there is nothing to do; what there is to do, [`Poller`]s know.
//!
//! ```text
//!   turn:  time ─> Shared::begin_turn
//!          mail ─────────────────────────> Poller::on_message, until one takes it
//!          descriptors that are ready ───> Poller::on_ready of whose they are
//!          each in its order ────────────> Poller::poll, then each ─> Poller::flush
//!   idle:  spin; or, once that has lasted, Poller::prepare_sleep of each, and sleep on the descriptors
//! ```
//!
//! What turns took is in [`Turns`].
//!
//! All pollers of a core share one value, given to each as `&mut`: nothing is locked. A turn allocates
//! nothing and has no wait.
//!
//! What it does not do: it knows neither what the pollers are nor what the messages say.

mod turns;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use self::turns::{DESCRIPTORS, MAIL, POLLERS};
pub use self::turns::{LONG, LongTurn, Parts, Turns};

use crate::clock::{Clock, Nanos, wall_ms};
use crate::mailbox::Mailbox;
use crate::net::{Interest, Readiness, Ready, Watcher};

/// What the pollers of a core share.
pub trait Shared {
    /// A turn begins, at this time (and, in ms since 1970, this time of day).
    fn begin_turn(&mut self, now: Nanos, wall_ms: u64);

    /// There will be nothing to do any more: the loop ends.
    fn is_done(&self) -> bool;

    /// A turn took [`LONG`] or longer.
    fn on_long_turn(&mut self, _turns: &Turns, _turn: LongTurn) {}
}

/// A part of a core's work, looked at in every turn.
pub trait Poller<S, M> {
    /// What it is, in a word: turns that took long are told by the pollers that had work in them.
    fn name(&self) -> &'static str;

    /// One turn of it. True when there was anything to do.
    fn poll(&mut self, shared: &mut S, turn: &mut Turn<'_, M>) -> bool;

    /// A descriptor that it watches by its [`Watcher`] is ready; the key is its own.
    fn on_ready(&mut self, _shared: &mut S, _turn: &mut Turn<'_, M>, _key: u32) {}

    /// A message for this core. One that it does not know it gives back, for the others.
    fn on_message(&mut self, _shared: &mut S, _turn: &mut Turn<'_, M>, message: M) -> Option<M> {
        Some(message)
    }

    /// The last of a turn: send what any poller has given it to send. In the order of the list, too.
    fn flush(&mut self, _shared: &mut S, _turn: &mut Turn<'_, M>) {}

    /// It looks for itself at what has traffic: so descriptors need not be looked at in every turn, which
    /// takes a system call.
    fn is_active(&self) -> bool {
        false
    }

    /// Something waits for a next turn by itself: the core may not sleep.
    fn is_quiet(&self, _shared: &S) -> bool {
        true
    }

    /// The core is about to sleep: from now on its descriptors are to tell all. False: there is something
    /// already.
    fn prepare_sleep(&mut self, _shared: &mut S) -> bool {
        true
    }

    /// What it polls needs this processor too: an idle turn gives it away.
    fn wants_yield(&self) -> bool {
        false
    }
}

/// What a poller has of the turn.
pub struct Turn<'a, M> {
    /// When it began.
    pub now: Nanos,
    mailbox: &'a mut Mailbox<M>,
    backlog: &'a mut VecDeque<(usize, M)>,
}

impl<M: Send> Turn<'_, M> {
    /// This core.
    #[must_use]
    pub fn core(&self) -> usize {
        self.mailbox.core()
    }

    /// How many cores there are.
    #[must_use]
    pub fn cores(&self) -> usize {
        self.mailbox.cores()
    }

    /// Send to core `to`. In order; what finds no room in that core's mailbox is kept.
    ///
    /// # Panics
    /// When there is no core `to`.
    pub fn send(&mut self, to: usize, message: M) {
        if !self.has_room() {
            self.backlog.push_back((to, message));
        } else if let Err(message) = self.mailbox.send(to, message) {
            self.backlog.push_back((to, message));
        }
    }

    /// Send to every core but this one.
    pub fn send_to_others(&mut self, message: &M)
    where
        M: Clone,
    {
        let own = self.core();
        (0..self.cores()).filter(|to| *to != own).for_each(|to| self.send(to, message.clone()));
    }

    /// True while nothing is kept for want of room: who can keep messages himself sends no more until then.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.backlog.is_empty()
    }
}

/// What a core does without work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// Polls on.
    Spin,
    /// Polls for so long, then sleeps until a descriptor is ready.
    SleepAfter(Nanos),
}

/// Longest sleep: pollers look at their time-outs after it.
const SLEEP_MAX: Duration = Duration::from_millis(50);
/// How often descriptors are looked at while a poller is active: seldom enough to cost it little.
const LOOK_PERIOD: Nanos = Nanos::from_us(20);
/// Descriptors that are told in one look.
const READY_MAX: usize = 256;
/// Bits of a key that are the poller's own; above them is the poller's place.
const KEY_BITS: u32 = 32;
/// The place of the mailbox's waker.
const MAILBOX: u64 = (u32::MAX as u64) << KEY_BITS;

/// See the module.
pub struct Reactor<M> {
    readiness: Readiness,
    ready: Vec<Ready>,
    next_look: Nanos,
    mailbox: Mailbox<M>,
    /// The mailbox's waker is raised.
    is_woken: bool,
    /// Messages for which a mailbox had no room.
    backlog: VecDeque<(usize, M)>,
    idle: Idle,
    last_work: Nanos,
    /// When the turn began, and what it has done.
    began: Nanos,
    parts: Parts,
    turns: Arc<Turns>,
    wall_base: u64,
    time_base: Nanos,
}

impl<M: Send> Reactor<M> {
    /// Of the core that has this mailbox.
    ///
    /// # Errors
    /// The system's: there is no epoll to be had.
    pub fn new(mailbox: Mailbox<M>, idle: Idle) -> io::Result<Reactor<M>> {
        let readiness = Readiness::new()?;
        readiness.add(mailbox.waker(), MAILBOX, Interest::READ)?;
        let now = Clock::now();
        Ok(Reactor {
            readiness,
            ready: Vec::with_capacity(READY_MAX),
            next_look: Nanos::ZERO,
            mailbox,
            is_woken: false,
            backlog: VecDeque::new(),
            idle,
            last_work: now,
            began: now,
            parts: Parts::default(),
            turns: Arc::new(Turns::new()),
            wall_base: wall_ms(),
            time_base: now,
        })
    }

    /// What the poller at `place` of the list watches its descriptors with.
    #[must_use]
    pub fn watcher(&self, place: u32) -> Watcher {
        self.readiness.watcher(u64::from(place) << KEY_BITS)
    }

    /// What the turns of [`Reactor::run`] take.
    #[must_use]
    pub fn turns(&self) -> &Arc<Turns> {
        &self.turns
    }

    /// Turn after turn, until all is done or `stop` is raised.
    pub fn run<S: Shared>(
        &mut self,
        shared: &mut S,
        pollers: &mut [Box<dyn Poller<S, M>>],
        stop: &AtomicBool,
    ) {
        self.turns.set_names(pollers.iter().map(|poller| poller.name()));
        while !stop.load(Ordering::Relaxed) {
            let has_worked = self.turn(shared, pollers);
            if shared.is_done() {
                break;
            }
            if has_worked {
                self.last_work = Clock::now();
                if let Some(long) = self.turns.ended(self.parts, self.began, self.last_work) {
                    shared.on_long_turn(&self.turns, long);
                }
            } else {
                self.idle(shared, pollers);
            }
        }
        // What the last look has brought.
        let now = self.begin(shared);
        self.flush(shared, pollers, now);
    }

    /// One turn. True when there was anything to do.
    pub fn turn<S: Shared>(&mut self, shared: &mut S, pollers: &mut [Box<dyn Poller<S, M>>]) -> bool {
        let now = self.begin(shared);
        (self.began, self.parts) = (now, Parts::default());
        self.send_backlog();
        if self.deliver(shared, pollers, now) {
            self.parts.add(MAIL);
        }
        if now >= self.next_look || !pollers.iter().any(|poller| poller.is_active()) {
            self.next_look = now + LOOK_PERIOD;
            if self.look(Duration::ZERO) {
                self.tell(shared, pollers, now);
                self.parts.add(DESCRIPTORS);
            }
        }
        let Reactor { mailbox, backlog, parts, .. } = self;
        let mut turn = Turn { now, mailbox, backlog };
        for (place, poller) in (POLLERS..).zip(&mut *pollers) {
            if poller.poll(shared, &mut turn) {
                parts.add(place);
            }
        }
        let has_worked = *parts != Parts::default();
        self.flush(shared, pollers, now);
        has_worked
    }

    fn flush<S>(&mut self, shared: &mut S, pollers: &mut [Box<dyn Poller<S, M>>], now: Nanos) {
        let Reactor { mailbox, backlog, .. } = self;
        let mut turn = Turn { now, mailbox, backlog };
        for poller in pollers {
            poller.flush(shared, &mut turn);
        }
    }

    fn begin<S: Shared>(&self, shared: &mut S) -> Nanos {
        let now = Clock::now();
        shared.begin_turn(now, self.wall_base + (now - self.time_base).as_ms());
        now
    }

    fn send_backlog(&mut self) {
        while let Some((to, message)) = self.backlog.pop_front() {
            if let Err(message) = self.mailbox.send(to, message) {
                self.backlog.push_front((to, message));
                return;
            }
        }
    }

    fn deliver<S>(&mut self, shared: &mut S, pollers: &mut [Box<dyn Poller<S, M>>], now: Nanos) -> bool {
        if std::mem::take(&mut self.is_woken) {
            self.mailbox.drain();
        }
        let mut has_come = false;
        while let Some((_, message)) = self.mailbox.receive() {
            has_come = true;
            let Reactor { mailbox, backlog, .. } = &mut *self;
            let mut turn = Turn { now, mailbox, backlog };
            let mut left = Some(message);
            for poller in &mut *pollers {
                let Some(message) = left else { break };
                left = poller.on_message(shared, &mut turn, message);
            }
        }
        has_come
    }

    /// Look for descriptors that are ready, or become it within `timeout`. True when there is any.
    fn look(&mut self, timeout: Duration) -> bool {
        // A failure would be one of ours; the next look tells the same again.
        if self.readiness.poll(Some(timeout), &mut self.ready).is_err() {
            self.ready.clear();
        }
        !self.ready.is_empty()
    }

    /// Tell the pollers what the look has found.
    fn tell<S>(&mut self, shared: &mut S, pollers: &mut [Box<dyn Poller<S, M>>], now: Nanos) {
        let Reactor { mailbox, backlog, ready, is_woken, .. } = self;
        let mut turn = Turn { now, mailbox, backlog };
        for event in ready.drain(..) {
            if event.key == MAILBOX {
                *is_woken = true;
                continue;
            }
            let place = usize::try_from(event.key >> KEY_BITS).unwrap_or(usize::MAX);
            if let Some(poller) = pollers.get_mut(place) {
                #[expect(clippy::cast_possible_truncation, reason = "the high half is the place")]
                poller.on_ready(shared, &mut turn, event.key as u32);
            }
        }
    }

    /// Nothing to do: spin, or sleep once it has lasted.
    fn idle<S: Shared>(&mut self, shared: &mut S, pollers: &mut [Box<dyn Poller<S, M>>]) {
        if pollers.iter().any(|poller| poller.wants_yield()) {
            std::thread::yield_now();
        }
        let is_quiet = match self.idle {
            Idle::Spin => false,
            Idle::SleepAfter(time) => {
                Clock::now() - self.last_work >= time
                    && self.backlog.is_empty()
                    && pollers.iter().all(|poller| poller.is_quiet(shared))
            }
        };
        if !is_quiet {
            std::hint::spin_loop();
            return;
        }
        if !self.mailbox.prepare_sleep() {
            return; // something has come meanwhile
        }
        let may_sleep = pollers.iter_mut().all(|poller| poller.prepare_sleep(shared));
        if may_sleep && self.look(SLEEP_MAX) {
            let now = self.begin(shared);
            self.tell(shared, pollers, now);
            self.last_work = now;
        }
        self.mailbox.rise();
    }
}

#[cfg(test)]
mod tests;
