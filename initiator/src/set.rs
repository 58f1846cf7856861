//! [`QueueSet`]: many queues on one thread.
//!
//! A busy queue, one with commands outstanding, is received from in every turn (`Direct`). That is the
//! shortest way, and the target's core does not have to wake epoll. An idle queue is in epoll (`Watched`) and
//! costs nothing. When more than [`DIRECT_ALWAYS`] queues are busy and most receives find nothing, epoll is
//! cheaper, and all queues go there ([`HitRate`]):
//!
//! ```text
//!              submit                                      many are busy, few receives hit
//!   Watched ──────────────────────────> Direct        Direct ──────────────────────────> Watched (all)
//!       ^───── nothing outstanding for WATCH_AFTER ──────┘ ^──────── EPOLL_TIME later ──────────┘
//! ```
//! All queues share one receive batch. A queue over RDMA is asked in memory, in every turn (`Polled`); before
//! the set sleeps, its completions are armed, and it is asked once more.

use std::time::Duration;

use spindle_reactor::clock::Nanos;
use spindle_reactor::net::{Interest, Readiness, Ready};
use spindle_tcp::RxBatch;

use crate::error::{Error, Loss};
use crate::queue::IoQueue;

/// Busy queues that are received from directly whatever the hit rate.
const DIRECT_ALWAYS: usize = 4;
/// Direct receives for one that finds bytes, at most: an event of epoll costs about as much as several empty
/// receives.
const RECEIVES_PER_HIT_MAX: u32 = 8;
/// Receives over which the hit rate is taken.
const WINDOW: u32 = 4096;
/// Time in epoll after a low hit rate, before direct receives are tried again.
const EPOLL_TIME: Nanos = Nanos::from_secs(1);
/// Time without commands after which a queue is watched instead: longer than a caller thinks between two of
/// them.
const WATCH_AFTER: Nanos = Nanos::from_ms(1);
/// How often epoll is asked while nothing that it watches has commands outstanding: only for connections that
/// end.
const WATCH_PERIOD: Nanos = Nanos::from_ms(1);
/// How often connections are asked whether they are silent for too long.
const SILENCE_PERIOD: Nanos = Nanos::from_ms(100);
/// Events of epoll that are told at once.
const READY_MAX: usize = 256;

/// How a queue is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// In each turn.
    Direct,
    /// In each turn, whatever its load.
    Polled,
    /// When epoll says so.
    Watched(Interest),
    /// Not at all: its connection has ended.
    Down,
}

#[derive(Debug)]
struct Member {
    queue: IoQueue,
    mode: Mode,
    /// It had commands outstanding when it was last looked at.
    is_busy: bool,
    /// It was lent out, so something may have been submitted.
    is_touched: bool,
    /// When it last had commands outstanding.
    active: Nanos,
}

/// The hit rate of direct receives from many busy queues, and what follows from it.
#[derive(Debug, Default)]
struct HitRate {
    receives: u32,
    hits: u32,
    epoll_until: Nanos,
}

impl HitRate {
    /// True while many busy queues are received from directly, false while they are in epoll.
    fn allows_direct(&self, now: Nanos) -> bool {
        now >= self.epoll_until
    }

    /// Counts a round of `receives`, of which `hits` found bytes. False when the rate has become too low:
    /// epoll is used from `now` on.
    fn count(&mut self, receives: usize, hits: usize, now: Nanos) -> bool {
        let short = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        self.receives = self.receives.saturating_add(short(receives));
        self.hits = self.hits.saturating_add(short(hits));
        if self.receives < WINDOW {
            return true;
        }
        let is_high = self.hits >= self.receives / RECEIVES_PER_HIT_MAX;
        if !is_high {
            self.use_epoll(now);
        }
        (self.receives, self.hits) = (0, 0);
        is_high
    }

    fn use_epoll(&mut self, now: Nanos) {
        self.epoll_until = now + EPOLL_TIME;
    }
}

/// See the module.
#[derive(Debug)]
pub struct QueueSet {
    members: Vec<Member>,
    direct: Vec<usize>,
    touched: Vec<usize>,
    /// Queues with commands outstanding, and those of them that are watched.
    busy: usize,
    busy_watched: usize,
    hit_rate: HitRate,
    readiness: Readiness,
    ready: Vec<Ready>,
    batch: RxBatch,
    next_watch: Nanos,
    next_silence: Nanos,
}

impl QueueSet {
    /// A set without queues, with a receive batch of `batch_bytes`
    /// ([`Options::batch_bytes`](crate::Options::batch_bytes)).
    ///
    /// # Errors
    /// [`Error::Watch`], when the system gives no epoll.
    pub fn new(batch_bytes: usize) -> Result<QueueSet, Error> {
        Ok(QueueSet {
            members: Vec::new(),
            direct: Vec::new(),
            touched: Vec::new(),
            busy: 0,
            busy_watched: 0,
            hit_rate: HitRate::default(),
            readiness: Readiness::new().map_err(Error::Watch)?,
            ready: Vec::with_capacity(READY_MAX),
            batch: RxBatch::new(batch_bytes.max(4096)),
            next_watch: Nanos::ZERO,
            next_silence: Nanos::ZERO,
        })
    }

    /// Add a queue; its number in the set.
    ///
    /// # Errors
    /// [`Error::Watch`], when the system cannot watch it.
    pub fn add(&mut self, queue: IoQueue) -> Result<usize, Error> {
        let index = self.members.len();
        let link = queue.qpair().link();
        let mode = if link.is_polled() { Mode::Polled } else { Mode::Watched(Interest::READ) };
        link.watch(&self.readiness, index as u64, Interest::READ).map_err(Error::Watch)?;
        self.members.push(Member { queue, mode, is_busy: false, is_touched: false, active: Nanos::ZERO });
        // Room for all, so that a turn allocates nothing.
        self.direct.reserve(self.members.len());
        self.touched.reserve(self.members.len());
        if mode == Mode::Polled {
            self.direct.push(index);
        }
        Ok(index)
    }

    /// How many queues are received from only when epoll reports them.
    #[must_use]
    pub fn watched(&self) -> usize {
        self.members.iter().filter(|member| matches!(member.mode, Mode::Watched(_))).count()
    }

    /// How many queues there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// True when there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// A queue, to look at.
    ///
    /// # Panics
    /// When there is no such queue.
    #[must_use]
    pub fn queue(&self, index: usize) -> &IoQueue {
        &self.members[index].queue
    }

    /// A queue, to submit to. What is submitted leaves with the next poll.
    ///
    /// # Panics
    /// When there is no such queue.
    #[inline]
    pub fn queue_mut(&mut self, index: usize) -> &mut IoQueue {
        let member = &mut self.members[index];
        if !member.is_touched {
            member.is_touched = true;
            self.touched.push(index);
        }
        &mut member.queue
    }

    /// Commands without a completion, over all queues.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.members.iter().map(|member| member.queue.outstanding()).sum()
    }

    /// One turn: send what was submitted, receive where there is something. `on_ready` gets each queue that
    /// has completions (or has ended), to take them and to submit more, which is sent at once. Never waits.
    /// True when anything came.
    #[inline]
    pub fn poll(&mut self, now: Nanos, mut on_ready: impl FnMut(usize, &mut IoQueue)) -> bool {
        if !self.touched.is_empty() {
            self.send_touched(now);
        }
        let mut hits = 0;
        let mut at = 0;
        while at < self.direct.len() {
            let index = self.direct[at];
            hits += usize::from(self.turn(index, now, &mut on_ready));
            // One that is watched from now on was swapped out of the list.
            if self.direct.get(at) == Some(&index) {
                at += 1;
            }
        }
        if self.busy > DIRECT_ALWAYS {
            self.choose(hits, now);
        }
        let mut has_come = hits > 0;
        if self.busy_watched > 0 || now >= self.next_watch {
            self.next_watch = now + WATCH_PERIOD;
            has_come |= self.poll_watched(now, Duration::ZERO, &mut on_ready);
        }
        if now >= self.next_silence {
            self.next_silence = now + SILENCE_PERIOD;
            self.check_silence(now, &mut on_ready);
        }
        has_come
    }

    /// As [`QueueSet::poll`], but sleeps until something comes, at most `timeout`.
    pub fn wait(
        &mut self,
        now: Nanos,
        timeout: Duration,
        mut on_ready: impl FnMut(usize, &mut IoQueue),
    ) -> bool {
        if self.poll(now, &mut on_ready) || self.arm_polled(now, &mut on_ready) {
            return true;
        }
        self.hit_rate.use_epoll(now);
        self.watch_all();
        self.poll_watched(now, timeout, &mut on_ready)
    }

    /// Chooses between direct receives and epoll for many busy queues, after a round with `hits`.
    fn choose(&mut self, hits: usize, now: Nanos) {
        if !self.hit_rate.allows_direct(now) {
            return;
        }
        if !self.direct.is_empty() && !self.hit_rate.count(self.direct.len(), hits, now) {
            return self.watch_all();
        }
        if self.busy_watched > 0 {
            for index in 0..self.members.len() {
                if self.members[index].is_busy {
                    self.set_direct(index);
                }
            }
        }
    }

    /// Have the polled queues told of what comes from now on, and take what came before. True when anything
    /// had.
    fn arm_polled(&mut self, now: Nanos, on_ready: &mut impl FnMut(usize, &mut IoQueue)) -> bool {
        let mut has_come = false;
        for index in 0..self.members.len() {
            if self.members[index].mode == Mode::Polled {
                self.members[index].queue.qpair_mut().link_mut().arm();
                has_come |= self.turn(index, now, on_ready);
            }
        }
        has_come
    }

    /// Send what was submitted to queues that were lent out, and ask them directly where that pays.
    fn send_touched(&mut self, now: Nanos) {
        while let Some(index) = self.touched.pop() {
            let member = &mut self.members[index];
            member.is_touched = false;
            if member.mode == Mode::Down {
                continue;
            }
            member.queue.send();
            self.note(index, now);
        }
    }

    /// One turn of one queue.
    #[inline]
    fn turn(&mut self, index: usize, now: Nanos, on_ready: &mut impl FnMut(usize, &mut IoQueue)) -> bool {
        let Member { queue, .. } = &mut self.members[index];
        let has_come = queue.qpair_mut().turn(&mut self.batch, now);
        if queue.loss().is_some() {
            self.note_end(index, on_ready);
        } else {
            if queue.qpair().has_ready() {
                on_ready(index, queue);
            }
            // What was received may ask for an answer of its own (R2T): a queue that is watched has no next
            // turn before the target has sent again, and the target waits for it.
            queue.send();
        }
        self.note(index, now);
        has_come
    }

    /// A connection that ended is told once, with what is left of its completions, and not asked any more.
    #[cold]
    fn note_end(&mut self, index: usize, on_ready: &mut impl FnMut(usize, &mut IoQueue)) {
        let member = &mut self.members[index];
        match std::mem::replace(&mut member.mode, Mode::Down) {
            Mode::Direct | Mode::Polled => self.direct.retain(|other| *other != index),
            Mode::Watched(_) => member.queue.qpair().link().unwatch(&self.readiness),
            Mode::Down => return,
        }
        on_ready(index, &mut member.queue);
    }

    /// Keep the counts, and change how the queue is asked where its load has changed.
    #[inline]
    fn note(&mut self, index: usize, now: Nanos) {
        let member = &mut self.members[index];
        let is_busy = member.queue.outstanding() > 0 && member.mode != Mode::Down;
        if is_busy {
            member.active = now;
        }
        let has_changed = is_busy != member.is_busy;
        if has_changed || (!is_busy && member.mode == Mode::Direct) {
            self.note_load(index, is_busy, now);
        }
        let member = &self.members[index];
        if let Mode::Watched(interest) = member.mode
            && interest.write != member.queue.qpair().link().is_blocked()
        {
            self.change_interest(index);
        }
    }

    fn note_load(&mut self, index: usize, is_busy: bool, now: Nanos) {
        let member = &mut self.members[index];
        let was_busy = std::mem::replace(&mut member.is_busy, is_busy);
        let (mode, active) = (member.mode, member.active);
        match mode {
            Mode::Polled => return,
            // Its commands were told; what was counted of it is no more.
            Mode::Down => return self.recount(),
            Mode::Direct | Mode::Watched(_) => {}
        }
        self.busy = self.busy + usize::from(is_busy) - usize::from(was_busy);
        if let Mode::Watched(_) = mode {
            self.busy_watched = self.busy_watched + usize::from(is_busy) - usize::from(was_busy);
            if is_busy && (self.busy <= DIRECT_ALWAYS || self.hit_rate.allows_direct(now)) {
                self.set_direct(index);
            } else if is_busy {
                self.watch_all();
            }
        } else if !is_busy && now - active >= WATCH_AFTER {
            self.set_watched(index);
        }
    }

    fn recount(&mut self) {
        let is_counted = |member: &&Member| member.is_busy && member.mode != Mode::Polled;
        self.busy = self.members.iter().filter(is_counted).count();
        let is_watched = |member: &&Member| member.is_busy && matches!(member.mode, Mode::Watched(_));
        self.busy_watched = self.members.iter().filter(is_watched).count();
    }

    fn set_direct(&mut self, index: usize) {
        let member = &mut self.members[index];
        if matches!(member.mode, Mode::Watched(_)) {
            member.queue.qpair().link().unwatch(&self.readiness);
            self.busy_watched -= usize::from(member.is_busy);
            member.mode = Mode::Direct;
            self.direct.push(index);
        }
    }

    /// Moves all direct queues to epoll. Backwards: a queue that epoll does not take is pushed to the end
    /// again, and `swap_remove` moves one from the end, which this loop has passed.
    fn watch_all(&mut self) {
        for at in (0..self.direct.len()).rev() {
            let index = self.direct[at];
            self.set_watched(index);
        }
    }

    fn set_watched(&mut self, index: usize) {
        if let Some(at) = self.direct.iter().position(|other| *other == index) {
            self.direct.swap_remove(at);
        }
        if self.members[index].mode == Mode::Polled {
            return self.direct.push(index);
        }
        let link = self.members[index].queue.qpair().link();
        let interest = Interest { read: true, write: link.is_blocked() };
        if link.watch(&self.readiness, index as u64, interest).is_ok() {
            self.members[index].mode = Mode::Watched(interest);
            self.busy_watched += usize::from(self.members[index].is_busy);
        } else {
            // Cannot be watched: the connection is as good as gone.
            let member = &mut self.members[index];
            member.queue.qpair_mut().fail(Loss::Requested);
            member.mode = Mode::Direct;
            self.direct.push(index);
        }
    }

    fn change_interest(&mut self, index: usize) {
        let member = &mut self.members[index];
        let link = member.queue.qpair().link();
        let interest = Interest { read: true, write: link.is_blocked() };
        if link.rewatch(&self.readiness, index as u64, interest).is_ok() {
            member.mode = Mode::Watched(interest);
        }
    }

    fn poll_watched(
        &mut self,
        now: Nanos,
        timeout: Duration,
        on_ready: &mut impl FnMut(usize, &mut IoQueue),
    ) -> bool {
        let mut ready = std::mem::take(&mut self.ready);
        if self.readiness.poll(Some(timeout), &mut ready).is_err() {
            ready.clear();
        }
        let mut has_come = false;
        for event in ready.drain(..) {
            let Ok(index) = usize::try_from(event.key) else { continue };
            if index < self.members.len() && self.members[index].mode != Mode::Down {
                self.members[index].queue.qpair_mut().link_mut().on_told();
                has_come |= self.turn(index, now, on_ready);
            }
        }
        self.ready = ready;
        has_come
    }

    fn check_silence(&mut self, now: Nanos, on_ready: &mut impl FnMut(usize, &mut IoQueue)) {
        for index in 0..self.members.len() {
            let member = &mut self.members[index];
            if !member.is_busy || member.mode == Mode::Down {
                continue;
            }
            member.queue.qpair_mut().check_silence(now);
            if !member.queue.is_up() {
                self.turn(index, now, on_ready);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epoll_is_used_for_a_second_after_a_window_with_too_few_hits() {
        let now = Nanos::from_secs(5);
        let mut rate = HitRate::default();
        for _ in 0..3 * WINDOW / 64 {
            assert!(rate.allows_direct(now) && rate.count(64, 8, now), "one in eight is enough");
        }
        let mut rate = HitRate::default();
        let low = (0..WINDOW / 64).map(|_| rate.count(64, 7, now)).filter(|is_high| !is_high).count();
        assert_eq!(low, 1, "one verdict a window");
        assert!(!rate.allows_direct(now + EPOLL_TIME - Nanos(1)));
        assert!(rate.allows_direct(now + EPOLL_TIME));
        assert!(rate.count(64, 0, now + EPOLL_TIME), "one round is no window");
    }
}
