//! [`Shared`]: what the manager, the cores and the disk's sources of one drive have in common.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use nvme_spec::log::SmartLog;
use spindle_disk::Op;
use spindle_disk::guard::{CORES_MAX, Guard};
use spindle_reactor::lock::Lock;
use spindle_reactor::mem::Area;

use crate::core_queue::CoreQueue;
use crate::entry::Task;
use crate::fronts::{Fronts, Released};
use crate::function::{Function, Mapping};
use crate::rules::{Namespace, Rules};

/// Milliseconds of a tick.
pub(crate) const TICK_MS: u64 = 100;

/// How long things may take. The defaults are Linux's where it has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// A command of the data path, before it is aborted.
    pub command_timeout: Duration,
    /// After the Abort, before the controller is reset.
    pub abort_timeout: Duration,
    /// An admin command, before the controller is reset.
    pub admin_timeout: Duration,
    /// Most queue pairs that are asked for: one a core and namespace.
    pub queue_pairs: u32,
    /// Between looks at the health log.
    pub health_interval: Duration,
    /// Between tries to open a drive that is gone.
    pub reopen_interval: Duration,
    /// How long requests wait for a drive that went without a word, before they fail.
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

/// The times that cores look at, in ticks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TickLimits {
    pub(crate) command_ticks: u32,
    pub(crate) abort_ticks: u32,
}

/// What a drive says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveFacts {
    /// Serial number.
    pub serial: String,
    /// Model number.
    pub model: String,
    /// Firmware revision.
    pub firmware: String,
    /// Queue pairs for I/O that it gave.
    pub queue_pairs: u32,
    /// Commands that a queue takes at most.
    pub entries_max: u32,
    /// It takes SGLs.
    pub has_sgls: bool,
    /// It takes doorbells in memory.
    pub has_shadow_doorbells: bool,
}

/// How many commands drives were given for what their users could have put together from reads and writes.
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
            | Task::Hint
            | Task::CompareAndWrite { .. } => return,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// When the drive is let go.
    pub(crate) fn tell(&self, drive: &str) {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (compares, verifies, copies) =
            (count(&self.compares), count(&self.verifies), count(&self.copies));
        if compares + verifies + copies > 0 {
            tracing::info!(%drive, compares, verifies, copies, "commands of hosts that the drive did itself");
        }
    }
}

/// What changes seldom, behind a lock that the data path does not take.
#[derive(Default)]
pub(crate) struct State {
    /// Held open; `None` when it is gone.
    pub(crate) function: Option<Arc<dyn Function>>,
    pub(crate) facts: Option<DriveFacts>,
    pub(crate) namespaces: Vec<(Arc<Namespace>, Rules)>,
    pub(crate) core_queues: Vec<Arc<CoreQueue>>,
    pub(crate) health: Option<SmartLog>,
    /// Pools that cores are about to open it with, mapped for the function that is open.
    pub(crate) prepared: Vec<(Area, Box<dyn Mapping>)>,
    /// Of each disk: kept by it, and by the cores that have it open.
    fronts: Vec<Weak<Fronts>>,
    /// What came of opening it first.
    pub(crate) first: Option<Result<(), NotOpened>>,
    /// What keeps compare-and-writes of a namespace and other writes apart, by its number: whatever it is
    /// then, as long as the drive is held.
    guards: Vec<(u32, Arc<Guard>)>,
}

impl State {
    /// The guard of a namespace.
    pub(crate) fn guard(&mut self, nsid: u32) -> Arc<Guard> {
        if let Some((_, guard)) = self.guards.iter().find(|(of, _)| *of == nsid) {
            return Arc::clone(guard);
        }
        let guard = Guard::new(CORES_MAX);
        self.guards.push((nsid, Arc::clone(&guard)));
        guard
    }

    /// What stands in front of one more disk.
    pub(crate) fn add_fronts(&mut self, released: &Released) -> Arc<Fronts> {
        let fronts = Fronts::new(released);
        self.fronts.retain(|other| other.strong_count() > 0);
        self.fronts.push(Arc::downgrade(&fronts));
        fronts
    }

    /// What stands in front of all disks.
    pub(crate) fn fronts(&self) -> Vec<Arc<Fronts>> {
        self.fronts.iter().filter_map(Weak::upgrade).collect()
    }

    /// The mapping of a pool that was prepared, once.
    pub(crate) fn take_prepared(&mut self, pool: &Area) -> Option<Box<dyn Mapping>> {
        let place = |area: &Area| (area.base(), area.bytes());
        let index = self.prepared.iter().position(|(area, _)| place(area) == place(pool))?;
        Some(self.prepared.swap_remove(index).1)
    }
}

/// Why a drive could not be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NotOpened {
    pub(crate) why: String,
    /// See [`DriveError::is_absent`](crate::DriveError::is_absent).
    pub(crate) is_absent: bool,
}

/// See the module.
pub(crate) struct Shared {
    pub(crate) address: String,
    pub(crate) settings: Settings,
    state: Lock<State>,
    /// Memory of caches that are gone.
    pub(crate) released: Released,
    changed: Condvar,
    /// The drive is not needed any more.
    pub(crate) is_closing: AtomicBool,
    /// With any order but `Wait`, `Replay` and `Go`: the drive may have lost its power or begun anew, and
    /// with that what was in its volatile write cache.
    pub(crate) may_lose_cache: AtomicBool,
    /// How often what was acknowledged and not flushed may have been lost. The next flush of each core fails:
    /// whose writes they were is not known, and each host is to hear of it.
    pub(crate) losses: AtomicU64,
    /// Those that a flush has told of.
    pub(crate) losses_told: AtomicU64,
    /// Completions that named no command.
    pub(crate) strays: AtomicU64,
    /// Commands that failed for good.
    pub(crate) failures: AtomicU64,
    pub(crate) offloaded: Offloaded,
}

impl Shared {
    pub(crate) fn new(address: String, settings: Settings) -> Arc<Shared> {
        Arc::new(Shared {
            address,
            settings,
            state: Lock::default(),
            released: Released::default(),
            changed: Condvar::new(),
            is_closing: AtomicBool::new(false),
            may_lose_cache: AtomicBool::new(false),
            losses: AtomicU64::new(0),
            losses_told: AtomicU64::new(0),
            strays: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            offloaded: Offloaded::default(),
        })
    }

    /// What changes seldom.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// What came of opening it first; only the first answer counts.
    pub(crate) fn tell_first(&self, result: Result<(), NotOpened>) {
        self.state().first.get_or_insert(result);
        self.changed.notify_all();
    }

    /// Wait for that. Not on a core.
    pub(crate) fn wait_first(&self) -> Result<(), NotOpened> {
        let mut state = self.state();
        loop {
            if let Some(first) = &state.first {
                return first.clone();
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Let go of memory that no core uses any more. Not on a core: it may take seconds.
    pub(crate) fn let_released_go(&self) {
        let released = std::mem::take(&mut *self.released.lock());
        // Not under the lock, which cores take.
        drop(released);
    }

    /// What a namespace allows; `None` when it is not there.
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
