//! [`RemoteShared`]: state that the manager and the cores of a remote disk share. [`Control`]: the manager's
//! handle on it. [`Shape`] and [`View`]: the parts that cores copy.
//!
//! The state is under one lock. A core locks it only to make a change, after a change, or while the ledger
//! has entries. Each change increments [`RemoteShared::version`], which a core loads once per turn. If the
//! version has changed, the core copies a [`View`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvme_spec::identify::Oncs;
use spindle_nvme_initiator::Error;
use spindle_reactor::clock::Nanos;
use spindle_reactor::net::Waker;
use spindle_target_card::Agent;
use spindle_target_disk::{BlockRange, Geometry, OptimisticReads};

use crate::RemoteSpec;
use crate::attach::CoreCounts;
use crate::far::Far;
use crate::ledger::{EntryId, Ledger};
use crate::request::Request;

/// Properties of the far namespace that may change while the disk is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Geometry reported to hosts. Size and write protection follow the far target.
    pub geometry: Geometry,
    /// The far target has a volatile write cache unknown to hosts: every write is sent with FUA.
    pub must_fua: bool,
}

/// A core's copy of the shared state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    /// Number of the current association; 0: none.
    pub(crate) number: u64,
    /// Commands may be sent over the association: the identity of the namespace was verified, and no core has
    /// a queue of an older association.
    pub(crate) may_send: bool,
    /// The ledger has entries.
    pub(crate) has_entries: bool,
    pub(crate) shape: Shape,
    /// Cores attach their queues: the far target has optimistic reads, and they are configured.
    pub(crate) may_attach: bool,
}

/// A core's request for a grant of an optimistic connection.
enum GrantRequest<G> {
    None,
    /// For a queue of this association.
    Wanted(u64),
    Answered(u64, Result<G, Error>),
}

struct RemoteState<F: Far> {
    number: u64,
    association: Option<Arc<F>>,
    /// The identity of the namespace was verified on this association.
    is_checked: bool,
    shape: Shape,
    ledger: Ledger,
    /// By handle.
    grants: Vec<GrantRequest<F::Grant>>,
}

impl<F: Far> RemoteState<F> {
    fn view(&self, is_optimistic: bool) -> View {
        let association = self.association.as_ref().filter(|_| is_optimistic);
        View {
            may_attach: association.is_some_and(|it| it.has_optimistic_reads()),
            number: self.number,
            may_send: self.is_checked && self.ledger.have_all_left(self.number),
            has_entries: !self.ledger.is_empty(),
            shape: self.shape,
        }
    }

    fn set_grant(&mut self, handle: usize, request: GrantRequest<F::Grant>) {
        if let Some(own) = self.grants.get_mut(handle) {
            *own = request;
        }
    }
}

pub(crate) struct RemoteShared<F: Far> {
    pub(crate) name: String,
    pub(crate) spec: RemoteSpec,
    /// [`RemoteSpec::command_timeout`] in the unit of the clock.
    pub(crate) command_timeout: Nanos,
    /// Optional NVM commands of the far controller.
    pub(crate) abilities: Oncs,
    version: AtomicU64,
    state: Mutex<RemoteState<F>>,
    /// Newest association on which a core has lost its queue or failed to connect it; 0: none.
    lost: AtomicU64,
    pub(crate) is_stopped: AtomicBool,
    /// Wakes the manager thread; `None`: the caller makes the associations.
    waker: Option<Waker>,
    /// Called before the first command over a new association, and before the first command after each
    /// further check of the namespace.
    foreign_change_callbacks: Mutex<Vec<Box<dyn Fn() + Send + Sync>>>,
    /// State of the membership in the far target's cluster; `None`: not configured.
    pub(crate) agent: Option<Arc<Agent>>,
    /// Counts of optimistic reads, by handle; empty where they are not configured.
    counts: Mutex<Vec<Arc<CoreCounts>>>,
    /// An attempt to attach has failed, was logged, and the core of that attempt is not attached since.
    is_attach_failure_logged: AtomicBool,
    /// The first attached queue was logged.
    is_attached_logged: AtomicBool,
}

impl<F: Far> RemoteShared<F> {
    pub(crate) fn new(
        name: &str,
        spec: &RemoteSpec,
        abilities: Oncs,
        shape: Shape,
        (waker, agent): (Option<Waker>, Option<Arc<Agent>>),
    ) -> RemoteShared<F> {
        let state = RemoteState {
            number: 0,
            association: None,
            is_checked: false,
            shape,
            ledger: Ledger::default(),
            grants: Vec::new(),
        };
        RemoteShared {
            name: name.to_owned(),
            spec: spec.clone(),
            command_timeout: spec.command_timeout.into(),
            abilities,
            version: AtomicU64::new(1),
            state: Mutex::new(state),
            lost: AtomicU64::new(0),
            is_stopped: AtomicBool::new(false),
            waker,
            foreign_change_callbacks: Mutex::new(Vec::new()),
            agent,
            counts: Mutex::new(Vec::new()),
            is_attach_failure_logged: AtomicBool::new(false),
            is_attached_logged: AtomicBool::new(false),
        }
    }

    pub(crate) fn on_foreign_change(&self, act: Box<dyn Fn() + Send + Sync>) {
        self.foreign_change_callbacks.lock().unwrap_or_else(PoisonError::into_inner).push(act);
    }

    fn report_foreign_change(&self) {
        self.foreign_change_callbacks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .for_each(|act| act());
    }

    fn lock(&self) -> MutexGuard<'_, RemoteState<F>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and increments `version`, by which the cores detect the change.
    fn change<T>(&self, change: impl FnOnce(&mut RemoteState<F>) -> T) -> T {
        let mut state = self.lock();
        let result = change(&mut state);
        self.version.fetch_add(1, Ordering::Release);
        result
    }

    /// Returns the version, which each change of the state increments.
    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    pub(crate) fn view(&self) -> View {
        self.lock().view(self.spec.optimistic.is_some())
    }

    /// Returns the current association and its number. `None`: no association is up, or a core has lost its
    /// queue or failed to connect it.
    pub(crate) fn association(&self) -> Option<(u64, Arc<F>)> {
        let state = self.lock();
        let is_lost = self.lost.load(Ordering::Acquire) >= state.number;
        state.association.as_ref().filter(|_| !is_lost).map(|it| (state.number, Arc::clone(it)))
    }

    pub(crate) fn open(&self) -> usize {
        self.change(|state| {
            state.grants.push(GrantRequest::None);
            state.ledger.open()
        })
    }

    /// Closes the ledger handle of a dropped core. Records `sent`, the writes outstanding over association
    /// `number`, as lost, and resolves `live`, the entries of the core's other commands.
    pub(crate) fn close(
        &self,
        handle: usize,
        number: u64,
        now: Nanos,
        sent: impl Iterator<Item = (Option<EntryId>, BlockRange)>,
        live: impl Iterator<Item = EntryId>,
    ) {
        self.change(|state| {
            for (entry, range) in sent {
                let entry = state.ledger.record_lost(entry, range, number, now);
                state.ledger.resolve(entry);
            }
            live.for_each(|entry| state.ledger.resolve(entry));
            state.ledger.close(handle);
            state.set_grant(handle, GrantRequest::None);
        });
    }

    /// Records that a core has connected its queue of association `number`.
    pub(crate) fn on_up(&self, handle: usize, number: u64) {
        self.change(|state| state.ledger.set_queue(handle, number));
    }

    /// Records that a core has lost its queue of association `number`, and with it the writes `requests`.
    /// Wakes the manager for the first such loss.
    pub(crate) fn on_down<'a>(
        &self,
        handle: usize,
        number: u64,
        now: Nanos,
        requests: impl Iterator<Item = &'a mut Request>,
    ) {
        self.change(|state| {
            for request in requests {
                let entry = state.ledger.record_lost(request.entry, request.range, number, now);
                request.entry = Some(entry);
                if request.is_cancelled || request.is_answered {
                    state.ledger.resolve(entry);
                }
            }
            state.ledger.set_queue(handle, 0);
        });
        self.on_lost(number);
    }

    /// Adds an overdue write to the ledger: the far target may still execute it.
    pub(crate) fn record_overdue(&self, request: &mut Request) {
        let entry = self.change(|state| state.ledger.add_entry(request.entry, request.range));
        request.entry = Some(entry);
    }

    /// Records that the command of an entry was answered or will not be sent again.
    pub(crate) fn resolve(&self, entry: EntryId) {
        self.change(|state| state.ledger.resolve(entry));
    }

    /// Passes the ledger to `look`, after entries were expired by `now`.
    pub(crate) fn with_ledger<T>(&self, now: Nanos, look: impl FnOnce(&Ledger) -> T) -> T {
        let mut state = self.lock();
        if state.ledger.expire(now) {
            self.version.fetch_add(1, Ordering::Release);
        }
        look(&state.ledger)
    }

    /// Returns the time at which all entries of the ledger are over, for a disk that no core has open.
    /// `None`: the ledger is empty.
    pub(crate) fn over_at(&self, now: Nanos) -> Option<Nanos> {
        // Counted from now, not from the loss: a core not polled recently has recorded an earlier time.
        let ledger = &self.lock().ledger;
        (!ledger.is_empty()).then(|| now + ledger.fence_timeout)
    }

    /// Records that a core has lost its queue of association `number` or failed to connect it. Wakes the
    /// manager for the first such loss.
    pub(crate) fn on_lost(&self, number: u64) {
        if self.lost.fetch_max(number, Ordering::AcqRel) < number {
            self.wake_manager();
        }
    }

    /// Asks the manager for a grant for a core's queue of association `number`.
    pub(crate) fn want_grant(&self, handle: usize, number: u64) {
        self.lock().set_grant(handle, GrantRequest::Wanted(number));
        self.wake_manager();
    }

    /// Returns the manager's answer to [`RemoteShared::want_grant`]; `None`: no answer yet.
    pub(crate) fn take_grant(&self, handle: usize, number: u64) -> Option<Result<F::Grant, Error>> {
        let mut state = self.lock();
        let request = state.grants.get_mut(handle)?;
        if !matches!(request, GrantRequest::Answered(of, _) if *of == number) {
            return None;
        }
        match std::mem::replace(request, GrantRequest::None) {
            GrantRequest::Answered(_, answer) => Some(answer),
            GrantRequest::None | GrantRequest::Wanted(_) => None,
        }
    }

    pub(crate) fn add_counts(&self) -> Arc<CoreCounts> {
        let counts = Arc::new(CoreCounts::default());
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&counts));
        counts
    }

    /// Returns the totals of all cores; `None`: optimistic reads are not configured.
    pub(crate) fn optimistic_reads(&self) -> Option<OptimisticReads> {
        self.spec.optimistic.as_ref()?;
        let mut reads = OptimisticReads::default();
        for counts in self.counts.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            reads.accepted += counts.accepted();
            reads.rejected += counts.rejected();
            reads.attached += u64::from(counts.is_attached());
        }
        Some(reads)
    }

    /// Logs a failed attempt to attach a queue, unless one is logged already. Returns true if it was logged.
    pub(crate) fn on_attach_failed(&self, error: &Error) -> bool {
        let is_first = !self.is_attach_failure_logged.swap(true, Ordering::Relaxed);
        if is_first {
            tracing::warn!(
                disk = self.name,
                "cannot connect for optimistic reads, ordinary reads continue; next attempt in at most 60 s: \
                 {error}"
            );
        }
        is_first
    }

    /// Logs the first queue that is attached. `was_logged`: this core's failure was logged; the next will be.
    pub(crate) fn on_attached(&self, was_logged: bool) {
        if was_logged {
            self.is_attach_failure_logged.store(false, Ordering::Relaxed);
        }
        if !self.is_attached_logged.swap(true, Ordering::Relaxed) || was_logged {
            tracing::info!(disk = self.name, "reads pages of the far target's cache by RDMA READ");
        }
    }

    pub(crate) fn wake_manager(&self) {
        if let Some(waker) = &self.waker {
            waker.wake();
        }
    }
}

/// The manager's handle, by which it reports associations to the cores.
pub struct Control<F: Far>(pub(crate) Arc<RemoteShared<F>>);

impl<F: Far> Control<F> {
    /// Reports that association `number` (from 1, ascending) is up and its namespace was verified; `shape` is
    /// its current shape.
    pub fn up(&self, number: u64, association: Arc<F>, shape: Shape) {
        self.0.report_foreign_change();
        self.0.change(|state| {
            (state.number, state.association) = (number, Some(association));
            (state.is_checked, state.shape) = (true, shape);
        });
    }

    /// Reports that no association is up.
    pub fn down(&self) {
        self.0.change(|state| (state.number, state.association, state.is_checked) = (0, None, false));
    }

    /// Stops commands until [`Control::checked`]: the namespace must be verified again.
    pub fn hold(&self) {
        self.0.change(|state| state.is_checked = false);
    }

    /// Reports that the namespace was verified again; `shape` is its current shape.
    pub fn checked(&self, shape: Shape) {
        self.0.report_foreign_change();
        self.0.change(|state| (state.is_checked, state.shape) = (true, shape));
    }

    /// Reports that the far target executes no further command of the associations up to `number`.
    pub fn over(&self, number: u64) {
        self.0.change(|state| state.ledger.end(number));
    }

    /// Sets the time after which a lost association is over without a confirmation.
    pub fn set_fence_timeout(&self, fence_timeout: Nanos) {
        self.0.change(|state| state.ledger.fence_timeout = fence_timeout);
    }

    /// Returns the handle of a core that waits for a grant for its queue of association `number`; `None`: no
    /// core waits. The answer is [`Control::grant`].
    #[must_use]
    pub fn next_grant(&self, number: u64) -> Option<usize> {
        let state = self.0.lock();
        let is_wanted = |it: &GrantRequest<F::Grant>| matches!(it, GrantRequest::Wanted(of) if *of == number);
        state.grants.iter().position(is_wanted)
    }

    /// Answers a core, unless its queue was lost meanwhile.
    pub fn grant(&self, handle: usize, number: u64, answer: Result<F::Grant, Error>) {
        let mut state = self.0.lock();
        if let Some(request) = state.grants.get_mut(handle)
            && matches!(request, GrantRequest::Wanted(of) if *of == number)
        {
            *request = GrantRequest::Answered(number, answer);
        }
    }

    /// Returns the last reported shape.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.0.view().shape
    }

    /// Returns the newest association on which a core has lost its queue or failed to connect it; 0: none.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.0.lost.load(Ordering::Acquire)
    }

    /// Returns true when the disk and all its handles were dropped.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.is_stopped.load(Ordering::Acquire)
    }
}
