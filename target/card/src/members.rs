//! [`Member`]: number, lease and queue of one member at the target.
//!
//! ```text
//! free ── join ──> joined ── lease not renewed, left, or named as former ──> over ── queues gone, cleared
//! ──> free
//! ```
//! The lease is one word: the time at which the member is over, or [`OVER`]. Who finds that the time has
//! passed sets [`OVER`], and after that no Next renews it. So all cores agree whether a member is over.
//!
//! Sequences of a queue go on over its members: an entry for a former one counts as acknowledged.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nvme_spec::Nqn;
use nvme_spec::cluster::{NEXT_ENTRIES_MAX, NextData, NextEntry, Notice, OPEN_WRITES_MAX};
use spindle_reactor::clock::Nanos;
use spindle_reactor::lock::Lock;

/// A member is over this long after the arrival of its newest Next. Its own lease ends 1.5 s after it sent
/// that Next; the clocks of both may differ by 10 % in their rates.
pub(crate) const LEASE: Nanos = Nanos::from_secs(2);
/// Longest wait of a Next for an entry.
pub const NEXT_WAIT: Nanos = Nanos::from_ms(200);
/// Longest time that an entry may be unacknowledged: then the member's controller is ended.
pub const UNACKNOWLEDGED_MAX: Nanos = Nanos::from_secs(1);
/// Most entries of a queue, those that a write in flight still needs included. So no more writes are open.
const QUEUE_ENTRIES: usize = OPEN_WRITES_MAX;
/// [`Member::over_at`] of a number without a member that may have pages.
const OVER: u64 = 0;

/// The entries for a member.
pub(crate) struct Queue {
    /// Entries that were not sent yet, with the times at which they were entered.
    entries: VecDeque<(Notice, Nanos)>,
    /// Answers that were not acknowledged: the sequence of the last entry, and the time of the first.
    unacknowledged: VecDeque<(u64, Nanos)>,
    /// Writes whose Invalidate was entered and whose Done was not.
    open: usize,
    /// What wakes the core that sends the entries, and its index. `None`: nobody has had the place.
    wake: Option<(Wake, usize)>,
}

/// Wakes the core with this index, if it sleeps.
pub type Wake = Arc<dyn Fn(usize) + Send + Sync>;

/// A place for a member.
pub(crate) struct Member {
    over_at: AtomicU64,
    /// Number of members that had this place. Raised by each join.
    epoch: AtomicU64,
    /// Sequences of the newest entry, and of the newest that was sent. Changed under the lock of the queue.
    queued: AtomicU64,
    sent: AtomicU64,
    /// Sequence of the newest entry that the member has executed.
    acknowledged: AtomicU64,
    pub(crate) queue: Lock<Queue>,
    /// Who has the place; `None`: nobody, and no registration of a former member is left.
    pub(crate) owner: Lock<Option<Owner>>,
}

/// Who has joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) host: Nqn,
    pub(crate) incarnation: u64,
}

/// An entry that a write waits for.
#[derive(Debug, Clone, Copy)]
pub struct Told {
    pub(crate) member: u8,
    epoch: u64,
    sequence: u64,
}

impl Member {
    pub(crate) fn new() -> Member {
        let queue = Queue { entries: VecDeque::new(), unacknowledged: VecDeque::new(), open: 0, wake: None };
        Member {
            over_at: AtomicU64::new(OVER),
            epoch: AtomicU64::new(0),
            queued: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            queue: Lock::new(queue),
            owner: Lock::new(None),
        }
    }

    /// Begins the lease of a new member. Its place is free.
    pub(crate) fn begin(&self, now: Nanos, wake: (Wake, usize)) {
        let mut queue = self.queue.lock();
        queue.wake = Some(wake);
        queue.entries.clear();
        queue.entries.reserve(QUEUE_ENTRIES);
        queue.unacknowledged.clear();
        queue.open = 0;
        let newest = self.queued.load(Ordering::Relaxed);
        self.sent.store(newest, Ordering::Release);
        self.acknowledged.store(newest, Ordering::Release);
        self.epoch.fetch_add(1, Ordering::AcqRel);
        self.over_at.store((now + LEASE).0, Ordering::Release);
    }

    /// Renews the lease: a Next arrived at `now` or before. Returns false if the member is over.
    pub(crate) fn renew(&self, now: Nanos) -> bool {
        let mut over_at = self.over_at.load(Ordering::Acquire);
        let until = (now + LEASE).0;
        loop {
            if over_at == OVER || over_at >= until {
                return over_at != OVER;
            }
            let exchanged =
                self.over_at.compare_exchange(over_at, until, Ordering::AcqRel, Ordering::Acquire);
            match exchanged {
                Ok(_) => return true,
                Err(found) => over_at = found,
            }
        }
    }

    /// Returns true if the member is over at `now`. From then on it is.
    pub(crate) fn is_over(&self, now: Nanos) -> bool {
        let mut over_at = self.over_at.load(Ordering::Acquire);
        while over_at != OVER && over_at <= now.0 {
            let exchanged = self.over_at.compare_exchange(over_at, OVER, Ordering::AcqRel, Ordering::Acquire);
            over_at = exchanged.map_or_else(|found| found, |_| OVER);
        }
        over_at == OVER
    }

    /// The member has dropped all pages: it is over.
    pub(crate) fn end(&self) {
        self.over_at.store(OVER, Ordering::Release);
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Enters an Invalidate, and keeps room for its Done. `None`: there is no room now.
    pub(crate) fn tell(&self, number: u8, notice: Notice, now: Nanos) -> Option<Told> {
        let mut queue = self.queue.lock();
        if queue.entries.len() + queue.open + 2 > QUEUE_ENTRIES {
            return None;
        }
        queue.open += 1;
        let sequence = self.enter(&mut queue, notice, now);
        Some(Told { member: number, epoch: self.epoch(), sequence })
    }

    fn enter(&self, queue: &mut Queue, notice: Notice, now: Nanos) -> u64 {
        if let (true, Some((wake, core))) = (queue.entries.is_empty(), &queue.wake) {
            wake(*core);
        }
        queue.entries.push_back((notice, now));
        self.queued.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Returns true if the member has acknowledged the entry, or is over.
    pub(crate) fn has_answered(&self, told: &Told, now: Nanos) -> bool {
        self.acknowledged.load(Ordering::Acquire) >= told.sequence
            || self.epoch() != told.epoch
            || self.is_over(now)
    }

    /// Enters the Done of a write that the member was told of.
    pub(crate) fn tell_done(&self, told: &Told, notice: Notice, now: Nanos) {
        let mut queue = self.queue.lock();
        if self.epoch() != told.epoch {
            return;
        }
        queue.open -= 1;
        self.enter(&mut queue, notice, now);
    }

    /// Returns true if there are entries that were not sent.
    #[inline]
    pub(crate) fn has_entries(&self) -> bool {
        self.queued.load(Ordering::Acquire) != self.sent.load(Ordering::Acquire)
    }

    /// Handles the acknowledgement in a Next. Returns false if it names an entry that was not sent.
    pub(crate) fn acknowledge(&self, sequence: u64) -> bool {
        let mut queue = self.queue.lock();
        if sequence > self.sent.load(Ordering::Relaxed) {
            return false;
        }
        while queue.unacknowledged.front().is_some_and(|(last, _)| *last <= sequence) {
            queue.unacknowledged.pop_front();
        }
        self.acknowledged.fetch_max(sequence, Ordering::AcqRel);
        true
    }

    /// Moves entries into the data of a Next.
    pub(crate) fn take(&self, data: &mut NextData) {
        let mut queue = self.queue.lock();
        let count = queue.entries.len().min(NEXT_ENTRIES_MAX);
        let oldest = queue.entries.front().map(|(_, since)| *since);
        for (entry, (notice, _)) in data.entries.iter_mut().zip(queue.entries.drain(..count)) {
            *entry = NextEntry::new(notice);
        }
        let sent = self.sent.fetch_add(count as u64, Ordering::AcqRel) + count as u64;
        queue.unacknowledged.extend(oldest.map(|since| (sent, since)));
        data.sequence.set(sent);
        data.count.set(u32::try_from(count).unwrap_or(0));
    }

    /// Returns true if an entry was not acknowledged for longer than [`UNACKNOWLEDGED_MAX`].
    pub(crate) fn is_silent(&self, now: Nanos) -> bool {
        let queue = self.queue.lock();
        let sent = queue.unacknowledged.front().map(|(_, since)| *since);
        let oldest = sent.or_else(|| queue.entries.front().map(|(_, since)| *since));
        oldest.is_some_and(|since| now - since > UNACKNOWLEDGED_MAX)
    }
}
