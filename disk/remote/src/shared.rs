//! [`Shared`]: what the manager and the cores of a remote disk have in common, and [`Control`], the manager's
//! handle on it.
//!
//! Everything is behind one lock that no core takes while nothing changes: each change counts
//! [`Shared::news`], a core looks at that once a turn, and then takes a [`View`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvme_spec::identify::Oncs;
use spindle_disk::{BlockRange, Geometry};
use spindle_reactor::clock::Nanos;
use spindle_reactor::net::Waker;

use crate::RemoteSpec;
use crate::ledger::{EntryId, Ledger};
use crate::request::Request;

/// What the far target says of the namespace, and may say otherwise later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// As hosts are told. Size and write protection follow the far target.
    pub geometry: Geometry,
    /// The far target has a volatile write cache that hosts were not told of: every write is sent with FUA.
    pub must_fua: bool,
}

/// A copy of what a core needs to know.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    /// The association that is up; 0: none is.
    pub(crate) number: u64,
    /// Commands may be sent over it: it is known that it leads to the same disk, and no core has a queue of
    /// an older one.
    pub(crate) may_send: bool,
    /// The ledger has entries.
    pub(crate) has_entries: bool,
    pub(crate) shape: Shape,
}

struct State<F> {
    number: u64,
    association: Option<Arc<F>>,
    /// It is known that the association leads to the same disk.
    is_checked: bool,
    shape: Shape,
    ledger: Ledger,
}

impl<F> State<F> {
    fn view(&self) -> View {
        View {
            number: self.number,
            may_send: self.is_checked && self.ledger.have_all_left(self.number),
            has_entries: !self.ledger.is_empty(),
            shape: self.shape,
        }
    }
}

/// See the module.
pub(crate) struct Shared<F> {
    pub(crate) name: String,
    pub(crate) spec: RemoteSpec,
    /// That of the spec.
    pub(crate) command_timeout: Nanos,
    /// What the namespace can do of what is optional.
    pub(crate) abilities: Oncs,
    news: AtomicU64,
    state: Mutex<State<F>>,
    /// The newest association of which a core has lost its queue, or could not make it.
    lost: AtomicU64,
    pub(crate) is_stopped: AtomicBool,
    /// Wakes the manager's thread, where there is one.
    waker: Option<Waker>,
    /// Told before anything is sent over another association, or after the namespace was looked at again.
    foreign: Mutex<Vec<Box<dyn Fn() + Send + Sync>>>,
}

impl<F> Shared<F> {
    pub(crate) fn new(
        name: &str,
        spec: &RemoteSpec,
        abilities: Oncs,
        shape: Shape,
        waker: Option<Waker>,
    ) -> Shared<F> {
        let state =
            State { number: 0, association: None, is_checked: false, shape, ledger: Ledger::default() };
        Shared {
            name: name.to_owned(),
            spec: spec.clone(),
            command_timeout: spec.command_timeout.into(),
            abilities,
            news: AtomicU64::new(1),
            state: Mutex::new(state),
            lost: AtomicU64::new(0),
            is_stopped: AtomicBool::new(false),
            waker,
            foreign: Mutex::new(Vec::new()),
        }
    }

    pub(crate) fn on_foreign_change(&self, act: Box<dyn Fn() + Send + Sync>) {
        self.foreign.lock().unwrap_or_else(PoisonError::into_inner).push(act);
    }

    fn tell_of_foreign_change(&self) {
        self.foreign.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(|act| act());
    }

    fn lock(&self) -> MutexGuard<'_, State<F>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A change: all cores look.
    fn change<T>(&self, change: impl FnOnce(&mut State<F>) -> T) -> T {
        let mut state = self.lock();
        let result = change(&mut state);
        self.news.fetch_add(1, Ordering::Release);
        result
    }

    /// Another number after each change.
    #[inline]
    pub(crate) fn news(&self) -> u64 {
        self.news.load(Ordering::Acquire)
    }

    pub(crate) fn view(&self) -> View {
        self.lock().view()
    }

    /// The association that is up, with its number; none that a core has lost.
    pub(crate) fn association(&self) -> Option<(u64, Arc<F>)> {
        let state = self.lock();
        let is_lost = self.lost.load(Ordering::Acquire) >= state.number;
        state.association.as_ref().filter(|_| !is_lost).map(|it| (state.number, Arc::clone(it)))
    }

    pub(crate) fn open(&self) -> usize {
        self.change(|state| state.ledger.open())
    }

    /// A core's handle is gone, with what `sent` has outstanding over association `number` and with the
    /// entries `live`.
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
                let entry = state.ledger.lose(entry, range, number, now);
                state.ledger.settle(entry);
            }
            live.for_each(|entry| state.ledger.settle(entry));
            state.ledger.close(handle);
        });
    }

    /// A core has a queue of association `number`.
    pub(crate) fn on_up(&self, handle: usize, number: u64) {
        self.change(|state| state.ledger.set_queue(handle, number));
    }

    /// A core has lost its queue of association `number`, and with it writes of `requests`.
    pub(crate) fn on_down<'a>(
        &self,
        handle: usize,
        number: u64,
        now: Nanos,
        requests: impl Iterator<Item = &'a mut Request>,
    ) {
        self.change(|state| {
            for request in requests {
                let entry = state.ledger.lose(request.entry, request.range, number, now);
                request.entry = Some(entry);
                if request.is_forgotten || request.is_answered {
                    state.ledger.settle(entry);
                }
            }
            state.ledger.set_queue(handle, 0);
        });
        self.on_lost(number);
    }

    /// A write was not answered in time; it is outstanding still.
    pub(crate) fn note(&self, request: &mut Request) {
        let entry = self.change(|state| state.ledger.note(request.entry, request.range));
        request.entry = Some(entry);
    }

    /// The command of an entry is answered, or not sent again.
    pub(crate) fn settle(&self, entry: EntryId) {
        self.change(|state| state.ledger.settle(entry));
    }

    /// Look at the ledger, which knows the time then.
    pub(crate) fn with_ledger<T>(&self, now: Nanos, look: impl FnOnce(&Ledger) -> T) -> T {
        let mut state = self.lock();
        if state.ledger.expire(now) {
            self.news.fetch_add(1, Ordering::Release);
        }
        look(&state.ledger)
    }

    /// When all that is in the ledger is over, of a disk that no core has open any more. `None`: all is.
    pub(crate) fn over_at(&self, now: Nanos) -> Option<Nanos> {
        // From now on: a core that was not polled for long has noted an earlier time than that of the loss.
        let ledger = &self.lock().ledger;
        (!ledger.is_empty()).then(|| now + ledger.fence_timeout)
    }

    /// A core's queue of this association is gone, or could not be made.
    pub(crate) fn on_lost(&self, number: u64) {
        if self.lost.fetch_max(number, Ordering::AcqRel) < number {
            self.wake_manager();
        }
    }

    pub(crate) fn wake_manager(&self) {
        if let Some(waker) = &self.waker {
            waker.wake();
        }
    }
}

/// The manager's handle: it tells the cores of associations.
pub struct Control<F>(pub(crate) Arc<Shared<F>>);

impl<F> Control<F> {
    /// Association `number` (from 1, ascending) is up and leads to the disk, which is as `shape` says.
    pub fn up(&self, number: u64, association: Arc<F>, shape: Shape) {
        self.0.tell_of_foreign_change();
        self.0.change(|state| {
            (state.number, state.association) = (number, Some(association));
            (state.is_checked, state.shape) = (true, shape);
        });
    }

    /// No association is up.
    pub fn down(&self) {
        self.0.change(|state| (state.number, state.association, state.is_checked) = (0, None, false));
    }

    /// It is no longer known that the association leads to the same disk: nothing is sent.
    pub fn hold(&self) {
        self.0.change(|state| state.is_checked = false);
    }

    /// It does, and the disk is as `shape` says.
    pub fn checked(&self, shape: Shape) {
        self.0.tell_of_foreign_change();
        self.0.change(|state| (state.is_checked, state.shape) = (true, shape));
    }

    /// The far target executes nothing any more of the associations up to `number`.
    pub fn over(&self, number: u64) {
        self.0.change(|state| state.ledger.end(number));
    }

    /// A lost association is over after so long, if nothing is said of it before.
    pub fn set_fence_timeout(&self, fence_timeout: Nanos) {
        self.0.change(|state| state.ledger.fence_timeout = fence_timeout);
    }

    /// What was told of the disk last.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.0.view().shape
    }

    /// The newest association of which a core has lost its queue; 0: none.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.0.lost.load(Ordering::Acquire)
    }

    /// The disk and all handles of it are gone.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.is_stopped.load(Ordering::Acquire)
    }
}
