//! [`DriveShared`]: state of one drive that its manager, cores and disks share; [`Settings`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use nvme_spec::log::SmartLog;
use spindle_reactor::lock::Lock;
use spindle_reactor::mem::Area;
use spindle_target_disk::Op;
use spindle_target_disk::guard::{CORES_MAX, Guard};

use crate::core_queue::CoreQueue;
use crate::entry::Task;
use crate::fronts::{Fronts, Released};
use crate::function::{Function, Mapping};
use crate::rules::{Namespace, Rules};

pub(crate) const TICK_MS: u64 = 100;

/// Time limits, intervals and queue pairs of a drive. Defaults are those of Linux, where it has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Time from the submission of an I/O command until its Abort.
    pub command_timeout: Duration,
    /// Time from the Abort until the controller is reset.
    pub abort_timeout: Duration,
    /// Time from the submission of an admin command until it leads to a controller reset.
    pub admin_timeout: Duration,
    /// Maximum number of I/O queue pairs requested of the controller. Each core uses one per namespace; with
    /// too few, cores share.
    pub queue_pairs: u32,
    /// Interval of reading the health log.
    pub health_interval: Duration,
    /// Interval of attempts to open a drive that is away.
    pub reopen_interval: Duration,
    /// Time that requests wait for a drive that was lost or is reset, before they fail. Requests do not wait
    /// for a drive whose removal was requested.
    pub return_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            command_timeout: Duration::from_secs(30),
            abort_timeout: Duration::from_secs(5),
            admin_timeout: Duration::from_secs(60),
            queue_pairs: 128,
            health_interval: Duration::from_secs(60),
            reopen_interval: Duration::from_secs(1),
            return_timeout: Duration::from_secs(10),
        }
    }
}

/// Time limits of I/O commands, in ticks of [`TICK_MS`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct TickLimits {
    pub(crate) command_ticks: u32,
    pub(crate) abort_ticks: u32,
}

/// Identity and limits of a drive, as identified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveFacts {
    /// Serial number (SN), without padding.
    pub serial: String,
    /// Model number (MN), without padding.
    pub model: String,
    /// Firmware revision (FR), without padding.
    pub firmware: String,
    /// Number of I/O queue pairs allocated, with doorbells within BAR 0, at most [`Settings::queue_pairs`].
    pub queue_pairs: u32,
    /// Maximum number of entries of a queue (CAP.MQES + 1).
    pub entries_max: u32,
    /// I/O commands may use SGLs.
    pub has_sgls: bool,
    /// The controller supports Doorbell Buffer Config (OACS).
    pub has_shadow_doorbells: bool,
}

/// Numbers of Compare, Verify and Copy commands submitted to the drive, repeated submissions included. Each
/// replaces reads and writes by the target.
#[derive(Debug, Default)]
pub(crate) struct Offloaded {
    pub(crate) compares: AtomicU64,
    pub(crate) verifies: AtomicU64,
    pub(crate) copies: AtomicU64,
}

impl Offloaded {
    #[inline]
    pub(crate) fn count(&self, task: Task) {
        let count = match task {
            Task::Op(Op::Compare) => &self.compares,
            Task::Op(Op::Verify) => &self.verifies,
            Task::Copy { .. } => &self.copies,
            Task::Op(Op::Read | Op::Write { .. } | Op::Flush | Op::WriteZeroes { .. } | Op::Deallocate)
            | Task::DeallocateHint
            | Task::CompareAndWrite { .. } => return,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Logs the counts, unless all are 0. Called once, when the drive is closed.
    pub(crate) fn log(&self, drive: &str) {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (compares, verifies, copies) =
            (count(&self.compares), count(&self.verifies), count(&self.copies));
        if compares + verifies + copies > 0 {
            tracing::info!(%drive, compares, verifies, copies, "host commands executed by the drive itself");
        }
    }
}

/// State that rarely changes, behind a lock that the data path does not take.
#[derive(Default)]
pub(crate) struct DriveState {
    /// The open function; `None` while the drive is away.
    pub(crate) function: Option<Arc<dyn Function>>,
    pub(crate) facts: Option<DriveFacts>,
    pub(crate) namespaces: Vec<(Arc<Namespace>, Rules)>,
    pub(crate) core_queues: Vec<Arc<CoreQueue>>,
    pub(crate) health: Option<SmartLog>,
    /// Pools mapped by [`Disk::prepare`](spindle_target_disk::Disk::prepare) until a core opens it.
    pub(crate) prepared: Vec<(Area, Box<dyn Mapping>)>,
    /// Cache memory of each disk, owned by the disk and the cores that have it open.
    fronts: Vec<Weak<Fronts>>,
    /// Result of the first start; `None` until it is known.
    pub(crate) first_result: Option<Result<(), NotOpened>>,
    /// Guards by NSID. A guard is kept while the drive is open, also if another namespace has the NSID later.
    guards: Vec<(u32, Arc<Guard>)>,
}

impl DriveState {
    pub(crate) fn guard(&mut self, nsid: u32) -> Arc<Guard> {
        if let Some((_, guard)) = self.guards.iter().find(|(of, _)| *of == nsid) {
            return Arc::clone(guard);
        }
        let guard = Guard::new(CORES_MAX);
        self.guards.push((nsid, Arc::clone(&guard)));
        guard
    }

    pub(crate) fn add_fronts(&mut self, nsid: u32, released: &Released) -> Arc<Fronts> {
        let fronts = Fronts::new(nsid, released);
        self.fronts.retain(|other| other.strong_count() > 0);
        self.fronts.push(Arc::downgrade(&fronts));
        fronts
    }

    pub(crate) fn fronts(&self) -> Vec<Arc<Fronts>> {
        self.fronts.iter().filter_map(Weak::upgrade).collect()
    }

    /// Removes and returns the prepared mapping of a pool, if there is one.
    pub(crate) fn take_prepared(&mut self, pool: &Area) -> Option<Box<dyn Mapping>> {
        let place = |area: &Area| (area.base(), area.bytes());
        let index = self.prepared.iter().position(|(area, _)| place(area) == place(pool))?;
        Some(self.prepared.swap_remove(index).1)
    }
}

/// Reason why the first start of a drive failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NotOpened {
    pub(crate) why: String,
    /// As [`DriveError::is_absent`](crate::DriveError::is_absent).
    pub(crate) is_absent: bool,
}

pub(crate) struct DriveShared {
    pub(crate) address: String,
    pub(crate) settings: Settings,
    state: Lock<DriveState>,
    /// Cache memory for the manager to unmap.
    pub(crate) released: Released,
    changed: Condvar,
    /// True once the manager is to shut the drive down.
    pub(crate) is_closing: AtomicBool,
    /// Whether the drive may have lost its volatile write cache. Cores load this value when they apply
    /// `Stop`, `Rewind`, `Gone` or `Absent`.
    pub(crate) may_lose_cache: AtomicBool,
    /// Number of recorded losses of acknowledged, unflushed writes. After a loss, the next flush of each core
    /// fails: the hosts that wrote are not known, so every host must receive an error.
    pub(crate) losses: AtomicU64,
    /// Value of `losses` at the last flush that reported a loss.
    pub(crate) losses_reported: AtomicU64,
    /// Number of completions on I/O queues that matched no command.
    pub(crate) strays: AtomicU64,
    /// Number of I/O commands that failed after all retries, or with a status that is not retried.
    pub(crate) failures: AtomicU64,
    pub(crate) offloaded: Offloaded,
}

impl DriveShared {
    pub(crate) fn new(address: String, settings: Settings) -> Arc<DriveShared> {
        Arc::new(DriveShared {
            address,
            settings,
            state: Lock::default(),
            released: Released::default(),
            changed: Condvar::new(),
            is_closing: AtomicBool::new(false),
            may_lose_cache: AtomicBool::new(false),
            losses: AtomicU64::new(0),
            losses_reported: AtomicU64::new(0),
            strays: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            offloaded: Offloaded::default(),
        })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, DriveState> {
        self.state.lock()
    }

    /// Sets the result of the first start; later results are ignored.
    pub(crate) fn set_first_result(&self, result: Result<(), NotOpened>) {
        self.state().first_result.get_or_insert(result);
        self.changed.notify_all();
    }

    /// Blocks until the first start has a result, and returns the result. Never call this on a core.
    pub(crate) fn wait_first_result(&self) -> Result<(), NotOpened> {
        let mut state = self.state();
        loop {
            if let Some(first) = &state.first_result {
                return first.clone();
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Unmaps released cache memory. May take seconds; never call this on a core.
    pub(crate) fn drop_released(&self) {
        let released = std::mem::take(&mut *self.released.lock());
        // Dropped outside the lock, because cores take the lock.
        drop(released);
    }

    /// Returns the rules of a namespace; `None` if the drive does not have the namespace.
    pub(crate) fn rules(&self, nsid: u32) -> Option<Rules> {
        let state = self.state();
        state.namespaces.iter().find(|(namespace, _)| namespace.nsid == nsid).map(|(_, rules)| *rules)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    pub(crate) fn limits(&self) -> TickLimits {
        let ticks =
            |time: Duration| u32::try_from(time.as_millis() / u128::from(TICK_MS)).unwrap_or(u32::MAX / 4);
        TickLimits {
            command_ticks: ticks(self.settings.command_timeout),
            abort_ticks: ticks(self.settings.abort_timeout),
        }
    }
}
