//! [`Attach`]: a core's optimistic connection (`docs/extensions.md`), made beside its live queue.
//!
//! ```text
//!   Idle ── time is up ──> Wanted ── the manager's grant ──> Opening ── connected ──> Attached
//!    ^                        │ refused                         │ failed                 │ ended
//!    └────────────────────────┴──── next attempt after a back-off ───────────────────────┘
//! ```
//! Reads are ordinary until `Attached`, and after the end of the connection. The loss of the queue ends the
//! connection; the next queue gets one of its own, with an empty directory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use spindle_nvme_initiator::{Backoff, Error, OptimisticCounts};
use spindle_reactor::clock::Nanos;

use crate::far::{Far, FarQueue};
use crate::shared::RemoteShared;

/// First and longest wait between attempts. A cache that was removed may be added again at any time; an
/// attempt costs the far target one admin command.
const BACKOFF_WAITS: (Duration, Duration) = (Duration::from_secs(1), LONGEST_WAIT);
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// Period of the steps of an attempt, and of the check whether the connection has ended.
const STEP_PERIOD: Nanos = Nanos::from_ms(1);

/// Counts of one core, which alone changes them. A cache line of its own, so that cores do not share one.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct CoreCounts {
    accepted: AtomicU64,
    rejected: AtomicU64,
    is_attached: AtomicBool,
}

impl CoreCounts {
    pub(crate) fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    pub(crate) fn rejected(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.is_attached.load(Ordering::Relaxed)
    }
}

enum AttachState<F: Far> {
    Idle,
    /// The manager was asked for a grant.
    Wanted,
    Opening(Box<F::Attaching>),
    /// Since this time.
    Attached(Nanos),
}

pub(crate) struct Attach<F: Far> {
    state: AttachState<F>,
    backoff: Backoff,
    /// Earliest time of the next attach step.
    next: Nanos,
    /// The failure of this core's attempt was logged, and no attempt has succeeded since.
    is_failure_logged: bool,
    counts: Arc<CoreCounts>,
    /// Counts of former queues: accepted, rejected.
    former: (u64, u64),
}

impl<F: Far> Attach<F> {
    pub(crate) fn new(counts: Arc<CoreCounts>, seed: u64) -> Attach<F> {
        let (first, longest) = BACKOFF_WAITS;
        Attach {
            state: AttachState::Idle,
            backoff: Backoff::new(first, longest, seed),
            next: Nanos::ZERO,
            is_failure_logged: false,
            counts,
            former: (0, 0),
        }
    }

    #[inline]
    pub(crate) fn next(&self) -> Nanos {
        self.next
    }

    /// Advances without blocking. `queue` is the queue of core `handle`, of association `number`.
    #[cold]
    pub(crate) fn step(
        &mut self,
        queue: &mut F::Queue,
        (shared, handle): (&RemoteShared<F>, usize),
        number: u64,
        now: Nanos,
    ) {
        self.next = now + STEP_PERIOD;
        let result = match &mut self.state {
            AttachState::Idle => {
                shared.want_grant(handle, number);
                self.state = AttachState::Wanted;
                Ok(())
            }
            AttachState::Wanted => match shared.take_grant(handle, number) {
                None => Ok(()),
                Some(Ok(grant)) => F::begin_attach(grant, queue, now)
                    .map(|attaching| self.state = AttachState::Opening(Box::new(attaching))),
                Some(Err(error)) => Err(error),
            },
            AttachState::Opening(attaching) => match F::step_attach(attaching, queue, now) {
                Ok(false) => Ok(()),
                Ok(true) => {
                    self.on_attached(shared, now);
                    Ok(())
                }
                Err(error) => Err(error),
            },
            AttachState::Attached(since) => {
                if !queue.has_optimistic_connection() {
                    let since = *since;
                    tracing::debug!(disk = shared.name, handle, "an optimistic connection has ended");
                    self.on_ended(since, now);
                }
                Ok(())
            }
        };
        if let Err(error) = result {
            self.on_failed(shared, &error, now);
        }
    }

    fn on_attached(&mut self, shared: &RemoteShared<F>, now: Nanos) {
        self.state = AttachState::Attached(now);
        self.counts.is_attached.store(true, Ordering::Relaxed);
        shared.on_attached(std::mem::take(&mut self.is_failure_logged));
    }

    fn on_failed(&mut self, shared: &RemoteShared<F>, error: &Error, now: Nanos) {
        self.is_failure_logged |= shared.on_attach_failed(error);
        self.wait(now);
    }

    fn on_ended(&mut self, since: Nanos, now: Nanos) {
        self.counts.is_attached.store(false, Ordering::Relaxed);
        self.backoff.lasted((now - since).as_duration());
        self.wait(now);
    }

    fn wait(&mut self, now: Nanos) {
        self.state = AttachState::Idle;
        self.next = now + self.backoff.next_wait().into();
    }

    /// Publishes the counts of the queue.
    #[inline]
    pub(crate) fn count(&self, queue: &F::Queue) {
        if let Some(OptimisticCounts { accepted, rejected, .. }) = queue.optimistic_counts() {
            self.counts.accepted.store(self.former.0 + accepted, Ordering::Relaxed);
            self.counts.rejected.store(self.former.1 + rejected, Ordering::Relaxed);
        }
    }

    /// The queue is lost, and its optimistic connection with it.
    pub(crate) fn on_queue_lost(&mut self, now: Nanos) {
        self.former = (self.counts.accepted(), self.counts.rejected());
        match std::mem::replace(&mut self.state, AttachState::Idle) {
            // What is left of the wait after a failure still applies.
            AttachState::Idle => {}
            AttachState::Wanted | AttachState::Opening(_) => self.wait(now),
            AttachState::Attached(since) => self.on_ended(since, now),
        }
    }
}

impl<F: Far> Drop for Attach<F> {
    fn drop(&mut self) {
        self.counts.is_attached.store(false, Ordering::Relaxed);
    }
}
