//! [`Reactor`]: the loop of one core: descriptors, mailbox, time and idle behaviour. [`Poller`]s do the work.
//!
//! ```text
//!   turn:  time ─> CoreShared::begin_turn
//!          mail ─────────────────────────> Poller::on_message, until one takes it
//!          descriptors that are ready ───> Poller::on_ready of the poller that watches them
//!          each in its order ────────────> Poller::poll, then each ─> Poller::flush
//!   idle:  spin; or, after the time of Idle::SleepAfter, Poller::prepare_sleep of each, and sleep on the
//!          descriptors
//! ```
//!
//! [`Turns`] records how long turns took.
//!
//! All pollers of a core share one value, which is passed to each as `&mut`: there are no locks. The loop
//! itself does not block in a turn, and allocates only when the backlog of messages grows. A message that all
//! pollers return is dropped.
//!
//! What it does not do: it does not interpret messages.

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

/// State that the pollers of a core share.
pub trait CoreShared {
    /// Called when a turn begins. `wall_ms`: milliseconds since 1970-01-01 UTC, from the wall clock at the
    /// reactor's creation and the monotonic time since; later steps of the wall clock do not change it.
    fn begin_turn(&mut self, now: Nanos, wall_ms: u64);

    /// Returns true when no work is left and none will arrive: the loop ends.
    fn is_done(&self) -> bool;

    /// Called after a turn with work that took [`LONG`] or longer.
    fn on_long_turn(&mut self, _turns: &Turns, _turn: LongTurn) {}
}

/// A part of a core's work, called in every turn.
pub trait Poller<S, M> {
    /// Returns the name for reports of long turns, which list the pollers that had work.
    fn name(&self) -> &'static str;

    /// Does the work of this turn. Returns true when there was any.
    fn poll(&mut self, shared: &mut S, turn: &mut Turn<'_, M>) -> bool;

    /// Called when a descriptor that the poller watches by its [`Watcher`] is ready. `key` is the one passed
    /// to [`Watcher::add`].
    fn on_ready(&mut self, _shared: &mut S, _turn: &mut Turn<'_, M>, _key: u32) {}

    /// Handles a message for this core. Returns a message that is for another poller; the next poller in the
    /// list then gets the message.
    fn on_message(&mut self, _shared: &mut S, _turn: &mut Turn<'_, M>, message: M) -> Option<M> {
        Some(message)
    }

    /// Sends the data that the pollers of this turn have queued. The last step of a turn, in the order of the
    /// list. Called once more when the loop ends.
    fn flush(&mut self, _shared: &mut S, _turn: &mut Turn<'_, M>) {}

    /// Returns true when the poller polls its busy connections itself. Descriptors, whose poll is a system
    /// call, are then polled every 20 us instead of in every turn.
    fn is_active(&self) -> bool {
        false
    }

    /// Returns true when the core may sleep: a descriptor or a message wakes it for all work of the poller.
    fn is_quiet(&self, _shared: &S) -> bool {
        true
    }

    /// Called before the core sleeps: from now on the poller's descriptors must report all work. Returns
    /// false when there is work already: the core does not sleep. After true, the core may still stay awake
    /// because of another poller.
    fn prepare_sleep(&mut self, _shared: &mut S) -> bool {
        true
    }

    /// Returns true when kernel threads do the work of the device that the poller polls: an idle turn then
    /// yields the CPU to them.
    fn wants_yield(&self) -> bool {
        false
    }
}

/// The time of a turn, and access to other cores.
pub struct Turn<'a, M> {
    /// Time at which the turn began.
    pub now: Nanos,
    mailbox: &'a mut Mailbox<M>,
    backlog: &'a mut VecDeque<(usize, M)>,
}

impl<M: Send> Turn<'_, M> {
    /// Returns the index of this core.
    #[must_use]
    pub fn core(&self) -> usize {
        self.mailbox.core()
    }

    /// Returns the count of cores.
    #[must_use]
    pub fn cores(&self) -> usize {
        self.mailbox.cores()
    }

    /// Sends `message` to core `to`; messages of this core arrive in order. A message that does not fit in
    /// the mailbox of `to` is queued in the backlog and sent in a later turn. All later messages of this
    /// core, to any core, are queued behind it.
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

    /// Sends a message to every core but this one.
    pub fn send_to_others(&mut self, message: impl Fn() -> M) {
        let own = self.core();
        (0..self.cores()).filter(|to| *to != own).for_each(|to| self.send(to, message()));
    }

    /// Returns true while the backlog is empty. Otherwise a poller that can keep messages sends none.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.backlog.is_empty()
    }
}

/// Behaviour of a core without work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Idle {
    /// Keeps polling.
    #[default]
    Spin,
    /// Keeps polling for this time without work, then sleeps until a descriptor is ready.
    SleepAfter(Nanos),
}

/// Maximum sleep time. Afterwards pollers check their timeouts.
const SLEEP_MAX: Duration = Duration::from_millis(50);
/// Interval of descriptor polls while a poller is active, so that the system calls take little of its time.
const DESCRIPTOR_POLL_PERIOD: Nanos = Nanos::from_us(20);
const READY_MAX: usize = 256;
/// Width of the poller's own key, the low bits of an epoll key. The bits above are the index of the poller.
const KEY_BITS: u32 = 32;
/// Key of the mailbox's waker: an index that no poller has.
const MAILBOX: u64 = (u32::MAX as u64) << KEY_BITS;

/// The loop of one core. See the module.
pub struct Reactor<M> {
    readiness: Readiness,
    ready: Vec<Ready>,
    next_descriptor_poll: Nanos,
    mailbox: Mailbox<M>,
    /// True when the mailbox's waker was seen raised and is not lowered yet.
    is_woken: bool,
    /// Messages that did not fit in a mailbox, with their destination core.
    backlog: VecDeque<(usize, M)>,
    idle: Idle,
    last_work: Nanos,
    began: Nanos,
    /// Parts of the current turn that had work.
    parts: Parts,
    turns: Arc<Turns>,
    wall_base: u64,
    time_base: Nanos,
}

impl<M: Send> Reactor<M> {
    /// Creates a reactor for the core of `mailbox`.
    ///
    /// # Errors
    /// The error of [`Readiness::new`] or [`Readiness::add`].
    pub fn new(mailbox: Mailbox<M>, idle: Idle) -> io::Result<Reactor<M>> {
        let readiness = Readiness::new()?;
        readiness.add(mailbox.waker(), MAILBOX, Interest::READ)?;
        let now = Clock::now();
        Ok(Reactor {
            readiness,
            ready: Vec::with_capacity(READY_MAX),
            next_descriptor_poll: Nanos::ZERO,
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

    /// Returns a handle that watches descriptors for the poller at index `place` of the list.
    #[must_use]
    pub fn watcher(&self, place: u32) -> Watcher {
        self.readiness.watcher(u64::from(place) << KEY_BITS)
    }

    /// Returns the durations of the turns of [`Reactor::run`].
    #[must_use]
    pub fn turns(&self) -> &Arc<Turns> {
        &self.turns
    }

    /// Runs turns until [`CoreShared::is_done`] or `stop`, then calls [`Poller::flush`] of each poller.
    pub fn run<S: CoreShared>(
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
        // Ready descriptors that were dispatched after the last turn may have queued sends.
        let now = self.begin_turn(shared);
        self.flush(shared, pollers, now);
    }

    /// Runs one turn. Returns true when there was mail, a ready descriptor, or work of a poller.
    pub fn turn<S: CoreShared>(&mut self, shared: &mut S, pollers: &mut [Box<dyn Poller<S, M>>]) -> bool {
        let now = self.begin_turn(shared);
        (self.began, self.parts) = (now, Parts::default());
        self.send_backlog();
        if self.deliver(shared, pollers, now) {
            self.parts.add(MAIL);
        }
        if now >= self.next_descriptor_poll || !pollers.iter().any(|poller| poller.is_active()) {
            self.next_descriptor_poll = now + DESCRIPTOR_POLL_PERIOD;
            if self.poll_descriptors(Duration::ZERO) {
                self.dispatch_ready(shared, pollers, now);
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

    fn begin_turn<S: CoreShared>(&self, shared: &mut S) -> Nanos {
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
        let mut has_received = false;
        while let Some((_, message)) = self.mailbox.receive() {
            has_received = true;
            let Reactor { mailbox, backlog, .. } = &mut *self;
            let mut turn = Turn { now, mailbox, backlog };
            let mut left = Some(message);
            for poller in &mut *pollers {
                let Some(message) = left else { break };
                left = poller.on_message(shared, &mut turn, message);
            }
        }
        has_received
    }

    /// Waits at most `timeout` for ready descriptors. Returns true when there are any.
    fn poll_descriptors(&mut self, timeout: Duration) -> bool {
        // An error would be a fault of this process, and the next poll would return it again.
        if self.readiness.poll(Some(timeout), &mut self.ready).is_err() {
            self.ready.clear();
        }
        !self.ready.is_empty()
    }

    /// Calls [`Poller::on_ready`] for each ready descriptor; for the mailbox's waker only sets `is_woken`.
    fn dispatch_ready<S>(&mut self, shared: &mut S, pollers: &mut [Box<dyn Poller<S, M>>], now: Nanos) {
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

    /// Spins or sleeps after a turn without work. Sleeps when there was no work for the time of
    /// [`Idle::SleepAfter`], the backlog is empty, and all pollers are quiet. Yields the CPU first if
    /// [`Poller::wants_yield`] of a poller returns true.
    fn idle<S: CoreShared>(&mut self, shared: &mut S, pollers: &mut [Box<dyn Poller<S, M>>]) {
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
            return; // mail has arrived meanwhile
        }
        let may_sleep = pollers.iter_mut().all(|poller| poller.prepare_sleep(shared));
        if may_sleep && self.poll_descriptors(SLEEP_MAX) {
            let now = self.begin_turn(shared);
            self.dispatch_ready(shared, pollers, now);
            self.last_work = now;
        }
        self.mailbox.end_sleep();
    }
}

#[cfg(test)]
mod tests;
