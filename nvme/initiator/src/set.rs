//! [`QueueSet`]: polls many queues on one thread.
//!
//! A busy queue (commands outstanding) is `Direct`: each turn receives from it. This has the lowest latency
//! and no cost of epoll. An idle queue is `Watched`: epoll reports its socket, and it has no cost per turn.
//! When more than [`DIRECT_ALWAYS`] queues are busy and more than seven of eight receives are empty, epoll is
//! cheaper: all TCP queues then move to epoll ([`HitRate`]):
//!
//! ```text
//!              submit                                      many are busy, few receives hit
//!   Watched ──────────────────────────> Direct        Direct ──────────────────────────> Watched (all)
//!       ^───── nothing outstanding for WATCH_AFTER ──────┘ ^──────── EPOLL_TIME later ──────────┘
//! ```
//! All queues share one receive batch. RDMA completion queues are polled in every turn.

use std::time::Duration;

use spindle_nvme_tcp::RxBatch;
use spindle_reactor::clock::Nanos;
use spindle_reactor::net::{Interest, Readiness, Ready};

use crate::error::{Error, Loss};
use crate::queue::IoQueue;

/// Most busy queues that are all direct, independent of the hit rate.
const DIRECT_ALWAYS: usize = 4;
/// Most direct receives per receive that finds bytes: an epoll event costs as much as several empty ones.
const RECEIVES_PER_HIT_MAX: u32 = 8;
/// Receives per measurement of the hit rate.
const WINDOW: u32 = 4096;
/// Time in epoll after a low hit rate, before direct receives are tried again.
const EPOLL_TIME: Nanos = Nanos::from_secs(1);
/// Idle time after which a direct queue is watched; longer than a caller's pause between commands.
const WATCH_AFTER: Nanos = Nanos::from_ms(1);
/// Period of polling epoll while no watched queue is busy, to detect ended connections.
const WATCH_PERIOD: Nanos = Nanos::from_ms(1);
/// Period of checking the command timeout.
const TIMEOUT_CHECK_PERIOD: Nanos = Nanos::from_ms(100);
const READY_MAX: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PollMode {
    /// Each turn receives.
    Direct,
    /// RDMA: each turn polls the completion queue.
    Polled,
    /// A turn receives when epoll reports the socket.
    Watched(Interest),
    /// The connection has ended; not polled.
    Down,
}

#[derive(Debug)]
struct QueueEntry {
    queue: IoQueue,
    mode: PollMode,
    /// The queue had commands outstanding at the last `update`.
    is_busy: bool,
    /// [`QueueSet::queue_mut`] has borrowed the queue since the last poll: commands may have been queued.
    is_borrowed: bool,
    /// Last time at which commands were outstanding.
    active: Nanos,
}

/// Hit rate of direct receives while many queues are busy; selects direct receives or epoll.
#[derive(Debug, Default)]
struct HitRate {
    receives: u32,
    hits: u32,
    epoll_until: Nanos,
}

impl HitRate {
    /// Returns false for [`EPOLL_TIME`] after a low hit rate, while busy queues are in epoll.
    fn allows_direct(&self, now: Nanos) -> bool {
        now >= self.epoll_until
    }

    /// Counts `receives`, of which `hits` found bytes, and checks the rate after each [`WINDOW`] receives.
    /// Returns false when the rate is too low: epoll is used for [`EPOLL_TIME`].
    fn count(&mut self, receives: usize, hits: usize, now: Nanos) -> bool {
        let short = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        self.receives = self.receives.saturating_add(short(receives));
        self.hits = self.hits.saturating_add(short(hits));
        if self.receives < WINDOW {
            return true;
        }
        let is_high = self.hits >= self.receives / RECEIVES_PER_HIT_MAX;
        if !is_high {
            self.epoll_until = now + EPOLL_TIME;
        }
        (self.receives, self.hits) = (0, 0);
        is_high
    }
}

/// Queues, over TCP and RDMA, that one thread polls together.
#[derive(Debug)]
pub struct QueueSet {
    queues: Vec<QueueEntry>,
    direct: Vec<usize>,
    /// Queues borrowed by [`QueueSet::queue_mut`] since the last poll.
    borrowed: Vec<usize>,
    /// Number of busy queues, RDMA queues excluded.
    busy: usize,
    /// Number of busy queues that are in epoll.
    busy_watched: usize,
    hit_rate: HitRate,
    readiness: Readiness,
    ready: Vec<Ready>,
    batch: RxBatch,
    next_watch: Nanos,
    next_timeout_check: Nanos,
}

impl QueueSet {
    /// Creates an empty set with a receive batch of `batch_bytes`, at least 4 KiB
    /// ([`Options::batch_bytes`](crate::Options::batch_bytes)).
    pub fn new(batch_bytes: usize) -> Result<QueueSet, Error> {
        Ok(QueueSet {
            queues: Vec::new(),
            direct: Vec::new(),
            borrowed: Vec::new(),
            busy: 0,
            busy_watched: 0,
            hit_rate: HitRate::default(),
            readiness: Readiness::new().map_err(Error::Watch)?,
            ready: Vec::with_capacity(READY_MAX),
            batch: RxBatch::new(batch_bytes.max(4096)),
            next_watch: Nanos::ZERO,
            next_timeout_check: Nanos::ZERO,
        })
    }

    /// Adds a queue and returns its index in the set. Fails if epoll refuses its socket.
    pub fn add(&mut self, queue: IoQueue) -> Result<usize, Error> {
        let index = self.queues.len();
        let mode = match queue.qpair.link.socket().filter(|_| !queue.qpair.is_polled()) {
            None => PollMode::Polled,
            Some(socket) => {
                self.readiness.add(socket, index as u64, Interest::READ).map_err(Error::Watch)?;
                PollMode::Watched(Interest::READ)
            }
        };
        self.queues.push(QueueEntry { queue, mode, is_busy: false, is_borrowed: false, active: Nanos::ZERO });
        // Reserved for all queues, so that a turn does not allocate.
        self.direct.reserve(self.queues.len());
        self.borrowed.reserve(self.queues.len());
        if mode == PollMode::Polled {
            self.direct.push(index);
        }
        Ok(index)
    }

    /// Returns the number of queues in epoll, busy or idle.
    #[must_use]
    pub fn watched(&self) -> usize {
        self.queues.iter().filter(|entry| matches!(entry.mode, PollMode::Watched(_))).count()
    }

    /// Returns all queues, by index.
    pub fn queues(&self) -> impl Iterator<Item = &IoQueue> {
        self.queues.iter().map(|entry| &entry.queue)
    }

    /// Returns queue `index`, to submit commands. The next poll sends them.
    ///
    /// # Panics
    /// If `index` was not returned by [`QueueSet::add`].
    #[inline]
    pub fn queue_mut(&mut self, index: usize) -> &mut IoQueue {
        let entry = &mut self.queues[index];
        if !entry.is_borrowed {
            entry.is_borrowed = true;
            self.borrowed.push(index);
        }
        &mut entry.queue
    }

    /// Returns the number of commands without a completion, of all queues.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.queues.iter().map(|entry| entry.queue.outstanding()).sum()
    }

    /// Sends queued commands and receives, without blocking, from the direct queues and those that epoll
    /// reports. Calls `on_ready` for each queue that has completions or has ended. `on_ready` may take
    /// completions and submit commands, which are sent at once. Returns true when data arrived or a
    /// connection ended; an abort by this host, such as the command timeout, may not count.
    #[inline]
    pub fn poll(&mut self, now: Nanos, mut on_ready: impl FnMut(usize, &mut IoQueue)) -> bool {
        if !self.borrowed.is_empty() {
            self.send_borrowed(now);
        }
        let mut hits = 0;
        let mut at = 0;
        while at < self.direct.len() {
            let index = self.direct[at];
            hits += usize::from(self.turn(index, now, &mut on_ready));
            // If the queue has moved to epoll, another queue is at this position now.
            if self.direct.get(at) == Some(&index) {
                at += 1;
            }
        }
        if self.busy > DIRECT_ALWAYS {
            self.choose_poll_mode(hits, now);
        }
        let mut has_come = hits > 0;
        if self.busy_watched > 0 || now >= self.next_watch {
            self.next_watch = now + WATCH_PERIOD;
            has_come |= self.poll_watched(now, &mut on_ready);
        }
        if now >= self.next_timeout_check {
            self.next_timeout_check = now + TIMEOUT_CHECK_PERIOD;
            has_come |= self.check_timeout(now, &mut on_ready);
        }
        has_come
    }

    /// Chooses between direct receives and epoll for many busy queues, after a turn with `hits` receives that
    /// found bytes.
    fn choose_poll_mode(&mut self, hits: usize, now: Nanos) {
        if !self.hit_rate.allows_direct(now) {
            return;
        }
        if !self.direct.is_empty() && !self.hit_rate.count(self.direct.len(), hits, now) {
            return self.watch_all();
        }
        if self.busy_watched > 0 {
            for index in 0..self.queues.len() {
                if self.queues[index].is_busy {
                    self.set_direct(index);
                }
            }
        }
    }

    /// Sends the commands of borrowed queues, and updates the poll mode of those queues.
    fn send_borrowed(&mut self, now: Nanos) {
        while let Some(index) = self.borrowed.pop() {
            let entry = &mut self.queues[index];
            entry.is_borrowed = false;
            if entry.mode == PollMode::Down {
                continue;
            }
            if entry.queue.qpair.is_polled() && entry.mode != PollMode::Polled {
                self.set_polled(index);
            }
            let entry = &mut self.queues[index];
            entry.queue.send();
            self.update(index, now);
        }
    }

    /// Polls one queue. Returns as [`Qpair::turn`](crate::qpair::Qpair::turn).
    #[inline]
    fn turn(&mut self, index: usize, now: Nanos, on_ready: &mut impl FnMut(usize, &mut IoQueue)) -> bool {
        let QueueEntry { queue, .. } = &mut self.queues[index];
        let has_come = queue.qpair.turn(&mut self.batch, now);
        if queue.loss().is_some() {
            self.on_end(index, on_ready);
        } else {
            if queue.qpair.has_ready() {
                on_ready(index, queue);
            }
            // A received PDU may need an answer (R2T). For a watched queue, the next turn follows only when
            // the target sends again, and the target waits for the answer.
            queue.send();
        }
        self.update(index, now);
        has_come
    }

    /// Reports an ended connection once, with its remaining completions, and stops polling it.
    #[cold]
    fn on_end(&mut self, index: usize, on_ready: &mut impl FnMut(usize, &mut IoQueue)) {
        let entry = &mut self.queues[index];
        match std::mem::replace(&mut entry.mode, PollMode::Down) {
            PollMode::Direct | PollMode::Polled => self.direct.retain(|other| *other != index),
            PollMode::Watched(_) => unwatch(&self.readiness, &entry.queue),
            PollMode::Down => return,
        }
        on_ready(index, &mut entry.queue);
    }

    /// Updates the counts of busy queues, and the queue's poll mode and epoll interest.
    #[inline]
    fn update(&mut self, index: usize, now: Nanos) {
        let entry = &mut self.queues[index];
        let is_busy = entry.queue.outstanding() > 0 && entry.mode != PollMode::Down;
        if is_busy {
            entry.active = now;
        }
        let has_changed = is_busy != entry.is_busy;
        if has_changed || (!is_busy && entry.mode == PollMode::Direct) {
            self.update_load(index, is_busy, now);
        }
        let entry = &self.queues[index];
        if let PollMode::Watched(interest) = entry.mode
            && interest.write != entry.queue.qpair.link.is_blocked()
        {
            self.change_interest(index);
        }
    }

    fn update_load(&mut self, index: usize, is_busy: bool, now: Nanos) {
        let entry = &mut self.queues[index];
        let was_busy = std::mem::replace(&mut entry.is_busy, is_busy);
        let (mode, active) = (entry.mode, entry.active);
        match mode {
            PollMode::Polled => return,
            // All commands of the ended queue have completed: it is removed from the counts.
            PollMode::Down => return self.recount(),
            PollMode::Direct | PollMode::Watched(_) => {}
        }
        self.busy = self.busy + usize::from(is_busy) - usize::from(was_busy);
        if let PollMode::Watched(_) = mode {
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
        let is_counted = |entry: &&QueueEntry| entry.is_busy && entry.mode != PollMode::Polled;
        self.busy = self.queues.iter().filter(is_counted).count();
        let is_watched = |entry: &&QueueEntry| entry.is_busy && matches!(entry.mode, PollMode::Watched(_));
        self.busy_watched = self.queues.iter().filter(is_watched).count();
    }

    /// A queue that was attached for optimistic reads while it was in the set: epoll does not report these.
    #[cold]
    fn set_polled(&mut self, index: usize) {
        let entry = &mut self.queues[index];
        if matches!(entry.mode, PollMode::Watched(_)) {
            unwatch(&self.readiness, &entry.queue);
            self.direct.push(index);
        }
        entry.mode = PollMode::Polled;
        self.recount();
    }

    fn set_direct(&mut self, index: usize) {
        let entry = &mut self.queues[index];
        if matches!(entry.mode, PollMode::Watched(_)) {
            unwatch(&self.readiness, &entry.queue);
            self.busy_watched -= usize::from(entry.is_busy);
            entry.mode = PollMode::Direct;
            self.direct.push(index);
        }
    }

    /// Moves all direct queues to epoll, in reverse order. A queue that epoll refuses is pushed to the end,
    /// and `swap_remove` moves elements from the end; the loop has passed both.
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
        let entry = &mut self.queues[index];
        let link = &entry.queue.qpair.link;
        let socket = link.socket().filter(|_| !entry.queue.qpair.is_polled());
        let Some(socket) = socket else { return self.direct.push(index) };
        let interest = Interest { read: true, write: link.is_blocked() };
        if self.readiness.add(socket, index as u64, interest).is_ok() {
            entry.mode = PollMode::Watched(interest);
            self.busy_watched += usize::from(entry.is_busy);
        } else {
            // epoll refuses the socket: the connection is given up.
            entry.queue.qpair.fail(Loss::Requested);
            self.direct.push(index);
        }
    }

    fn change_interest(&mut self, index: usize) {
        let entry = &mut self.queues[index];
        let link = &entry.queue.qpair.link;
        let Some(socket) = link.socket() else { return };
        let interest = Interest { read: true, write: link.is_blocked() };
        if self.readiness.change(socket, index as u64, interest).is_ok() {
            entry.mode = PollMode::Watched(interest);
        }
    }

    fn poll_watched(&mut self, now: Nanos, on_ready: &mut impl FnMut(usize, &mut IoQueue)) -> bool {
        let mut ready = std::mem::take(&mut self.ready);
        if self.readiness.poll(Some(Duration::ZERO), &mut ready).is_err() {
            ready.clear();
        }
        let mut has_come = false;
        for event in ready.drain(..) {
            let Ok(index) = usize::try_from(event.key) else { continue };
            if index < self.queues.len() && self.queues[index].mode != PollMode::Down {
                has_come |= self.turn(index, now, on_ready);
            }
        }
        self.ready = ready;
        has_come
    }

    fn check_timeout(&mut self, now: Nanos, on_ready: &mut impl FnMut(usize, &mut IoQueue)) -> bool {
        let mut has_come = false;
        for index in 0..self.queues.len() {
            let entry = &mut self.queues[index];
            if !entry.is_busy || entry.mode == PollMode::Down {
                continue;
            }
            entry.queue.qpair.check_timeout(now);
            if !entry.queue.is_up() {
                has_come |= self.turn(index, now, on_ready);
            }
        }
        has_come
    }
}

fn unwatch(readiness: &Readiness, queue: &IoQueue) {
    if let Some(socket) = queue.qpair.link.socket() {
        let _ = readiness.remove(socket);
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
