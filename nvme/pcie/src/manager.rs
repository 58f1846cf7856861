//! [`Manager`]: control of one drive, off the data path: open, enable, watch, reset, reopen, shut down.
//!
//! ```text
//!   open ─> bring_up ─> serve ── error ───> Stop, disable, Rewind ─> bring_up ...
//!                         │                 └─ not disabled, or too many resets: bus mastering off ─> away
//!                         ├── gone ───────> recover_link, Rewind ─> bring_up ...
//!                         │                 └─ not back ─> away
//!                         └── removal requested ─> away: function closed; each `reopen_interval`: open ...
//! ```
//!
//! While the drive is away, requests wait for `return_timeout` ([`Absence::Waiting`]), then fail
//! ([`Absence::Over`]). After a removal request, or if another drive is found, requests fail at once.
//! `docs/guarantees.md` describes the effect on hosts.
//!
//! The manager is one future. [`Manager::step`] polls the future with the current time, on the drive's thread
//! or in a test. The future waits only between steps: each step checks the awaited condition once. System
//! calls within a step (open, map, reset of the function) may take seconds.

mod away;
mod bring_up;
mod queues;
mod serve;

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use nvme_spec::register;
use nvme_spec::status::Status;

use crate::bar::Bar;
use crate::core_queue::QueueCommand;
use crate::dma::{DmaError, DmaMemory};
use crate::function::{Bus, Function, MapError, OpenFunctionError};
use crate::quirks::Quirks;
use crate::rules::{Namespace, UnfitNamespace};
use crate::shared::{DriveShared, NotOpened, TICK_MS};

use away::Absence;
use bring_up::Controller;
use queues::QueueSlot;
use serve::Background;

/// Reason to refuse, reset or close the controller.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ManagerError {
    #[error("it is gone (its registers read as all ones)")]
    Gone,
    #[error("its removal was requested")]
    Removal,
    #[error("fatal status (CSTS.CFS)")]
    Fatal,
    #[error("it is not enabled any more (CSTS.RDY is 0)")]
    NotReady,
    #[error("{what}: no answer in {limit:?}")]
    Slow { what: &'static str, limit: Duration },
    #[error("{command}: {status}")]
    Refused { command: &'static str, status: Status },
    #[error("a command did not end, not even after Abort")]
    Stuck,
    #[error("commands repeated after a reset did not end in {limit:?}")]
    Replay { limit: Duration },
    #[error("{field} is {value}: {allowed}")]
    Unfit { field: &'static str, value: String, allowed: &'static str },
    #[error(transparent)]
    Namespace(#[from] UnfitNamespace),
    #[error(transparent)]
    Open(#[from] OpenFunctionError),
    #[error(transparent)]
    Memory(#[from] DmaError),
    #[error(transparent)]
    Map(#[from] MapError),
    #[error("it is another drive: {field} is {value}, and was {was}")]
    Another { field: &'static str, value: String, was: String },
    #[error("closing")]
    Closing,
}

impl ManagerError {
    /// Returns true if the drive is missing or does not work. Returns false if the drive works but is not
    /// supported or is another drive, if the machine prevents its use, or if the drive is closing.
    fn is_drive_failure(&self) -> bool {
        match self {
            ManagerError::Gone
            | ManagerError::Removal
            | ManagerError::Fatal
            | ManagerError::NotReady
            | ManagerError::Slow { .. }
            | ManagerError::Refused { .. }
            | ManagerError::Stuck
            | ManagerError::Replay { .. }
            | ManagerError::Open(OpenFunctionError::Missing { .. }) => true,
            ManagerError::Unfit { .. }
            | ManagerError::Namespace(_)
            | ManagerError::Open(_)
            | ManagerError::Memory(_)
            | ManagerError::Map(_)
            | ManagerError::Another { .. }
            | ManagerError::Closing => false,
        }
    }

    /// Returns true if the drive may have lost its volatile write cache.
    fn may_lose_cache(&self) -> bool {
        // This driver does not cause `NotReady`, so the drive may have lost power.
        matches!(
            self,
            ManagerError::Gone | ManagerError::NotReady | ManagerError::Fatal | ManagerError::Slow { .. }
        )
    }

    fn another(namespace: &Namespace) -> ManagerError {
        let was = format!("{} of {} bytes a block", namespace.nsid, 1_u64 << namespace.shift);
        let value = "missing or of another identity or format".to_owned();
        ManagerError::Another { field: "namespace", value, was }
    }
}

/// Maximum number of resets before the function is closed. `serve::STABLE_MS` in service clears the count.
const RESETS_MAX: u32 = 3;

/// Control of one drive: state, queues and recovery of its controller. [`Manager::step`] does the work.
pub struct Manager {
    shared: Arc<DriveShared>,
    now: Rc<Cell<u64>>,
    is_busy: Rc<Cell<bool>>,
    task: Pin<Box<dyn Future<Output = ()>>>,
    has_ended: bool,
}

impl Manager {
    pub(crate) fn new(shared: Arc<DriveShared>, bus: Arc<dyn Bus>) -> Manager {
        let (now, is_busy) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(true)));
        let task = ManagerTask {
            shared: Arc::clone(&shared),
            bus,
            now: Rc::clone(&now),
            is_busy: Rc::clone(&is_busy),
            queue_slots: Vec::new(),
            controller_memory: Vec::new(),
            has_served: false,
            logged_reason: String::new(),
            lost_at: None,
            absence: Cell::new(Absence::No),
            closing_since: Cell::new(None),
            replaying_since: None,
            background: RefCell::new(None),
        };
        Manager { shared, now, is_busy, task: Box::pin(task.run()), has_ended: false }
    }

    /// Runs the manager once. `now_ms` is a monotonic time in milliseconds. Returns true if the next call is
    /// due after 1 ms, false if after 20 ms.
    pub fn step(&mut self, now_ms: u64) -> bool {
        self.now.set(now_ms);
        // The tick may wrap: cores compute differences only.
        let [a, b, c, d, ..] = (now_ms / TICK_MS).to_le_bytes();
        let tick = u32::from_le_bytes([a, b, c, d]);
        for core_queue in &self.shared.state().core_queues {
            if core_queue.word().tick() != tick {
                core_queue.set_tick(tick);
            }
        }
        self.shared.drop_released();
        if !self.has_ended {
            let mut context = Context::from_waker(Waker::noop());
            self.has_ended = self.task.as_mut().poll(&mut context).is_ready();
        }
        self.is_busy.get()
    }

    /// Returns true once the drive is shut down and closed.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }
}

struct ManagerTask {
    shared: Arc<DriveShared>,
    bus: Arc<dyn Bus>,
    now: Rc<Cell<u64>>,
    is_busy: Rc<Cell<bool>>,
    queue_slots: Vec<QueueSlot>,
    /// Memory of the admin queue and the shadow doorbells. Dropped once the controller is disabled or bus
    /// mastering is off. Until then the controller may write there, so the IOVAs must not be reused for
    /// another drive of the container.
    controller_memory: Vec<Arc<DmaMemory>>,
    /// The drive was in service once; from then on another drive is refused.
    has_served: bool,
    /// Last logged reason why the drive is out of service; empty while it is in service.
    logged_reason: String,
    /// Manager time in milliseconds since which cores cannot use the drive; `None` while they can.
    lost_at: Option<u64>,
    absence: Cell<Absence>,
    /// Manager time in milliseconds at which closing began.
    closing_since: Cell<Option<u64>>,
    /// Manager time in milliseconds since which cores repeat commands of before a reset; `None`: none does.
    replaying_since: Option<u64>,
    /// `Some` while the drive is in service.
    background: RefCell<Option<Background>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StopMethod {
    /// CSTS.RDY is 0.
    Disabled,
    /// Stopped by a function reset.
    Reset,
    /// Not known to be stopped: the controller may still access memory, or its registers read as all ones.
    No,
}

impl ManagerTask {
    async fn run(mut self) {
        while !self.may_close() {
            let end = self.open_and_serve().await;
            let was_first = self.shared.state().first_result.is_none();
            if was_first {
                // `Drive::open` fails with this reason.
                self.release_function(QueueCommand::Gone).await;
                let failure = NotOpened { why: end.to_string(), is_absent: end.is_drive_failure() };
                self.shared.set_first_result(Err(failure));
                break;
            }
            if matches!(end, ManagerError::Closing) {
                break;
            }
            self.log_once(&end);
            let queue_command = self.command_for(&end);
            self.release_function(queue_command).await;
            self.pause(self.shared.settings.reopen_interval).await;
        }
        self.release_function(QueueCommand::Gone).await;
        self.shared.offloaded.log(&self.shared.address);
        self.shared.set_first_result(Err(NotOpened { why: "closed".to_owned(), is_absent: false }));
    }

    /// Logs a reason, unless the last logged reason is the same.
    fn log_once(&mut self, why: &ManagerError) {
        let why = why.to_string();
        if why != self.logged_reason {
            tracing::error!(drive = %self.shared.address, "drive out of service, retrying: {why}");
            self.logged_reason = why;
        }
    }

    /// Opens the function and serves until the drive is lost, refused or closing, and returns the reason.
    /// After the return the drive cannot access memory, unless the controller was not disabled and bus
    /// mastering cannot be turned off (logged as a warning).
    async fn open_and_serve(&mut self) -> ManagerError {
        self.is_busy.set(true);
        let function = match self.bus.open() {
            Ok(function) => function,
            Err(error) => return ManagerError::Open(error),
        };
        self.shared.state().function = Some(Arc::clone(&function));
        let mut resets = 0;
        loop {
            self.is_busy.set(true);
            let bar = function.bar();
            let mut is_saved = false;
            let failure = match self.bring_up(&function).await {
                Ok(controller) => {
                    let failure = self.serve(&function, &controller, &mut resets).await;
                    self.lost_at.get_or_insert(self.now.get());
                    self.may_lose_cache(failure.may_lose_cache());
                    self.stop_all().await;
                    let may_close = matches!(failure, ManagerError::Closing | ManagerError::Removal);
                    is_saved = may_close && self.shut_down(&bar, &controller).await;
                    failure
                }
                Err(failure) => failure,
            };
            let off = self.disable(&bar, &function).await;
            let is_off = off != StopMethod::No;
            if is_off {
                self.controller_memory.clear();
            }
            // Without a completed shutdown, closing may lose the volatile write cache.
            self.may_lose_cache(!is_saved);
            let address = &self.shared.address;
            match (&failure, is_off) {
                (ManagerError::Closing, _) => {
                    self.disable_bus_master(&function, is_off);
                    return failure;
                }
                (ManagerError::Gone, _) if self.has_served && resets < RESETS_MAX => {
                    if !self.recover_link(&bar, &function).await {
                        self.disable_bus_master(&function, is_off);
                        return failure;
                    }
                    resets += 1;
                    tracing::warn!(drive = %address, resets, "registers readable again; controller is reset");
                    self.controller_memory.clear();
                    self.rewind_all(true).await;
                }
                (ManagerError::Gone | ManagerError::Removal, _) => {
                    self.wait_removal_request(&function).await;
                    self.disable_bus_master(&function, is_off);
                    return failure;
                }
                // Not in service yet: opening fails with this reason, without a retry.
                _ if !self.has_served => {
                    self.disable_bus_master(&function, is_off);
                    return failure;
                }
                _ if is_off && resets < RESETS_MAX && !matches!(failure, ManagerError::Another { .. }) => {
                    resets += 1;
                    tracing::warn!(drive = %address, resets, "controller is reset: {failure}");
                    self.rewind_all(failure.may_lose_cache() || off == StopMethod::Reset).await;
                }
                _ => {
                    self.disable_bus_master(&function, is_off);
                    return failure;
                }
            }
        }
    }

    /// Turns bus mastering off, so that the drive cannot access memory, and drops the controller's memory.
    /// Logs a failure unless `is_off` (the controller is disabled).
    fn disable_bus_master(&mut self, function: &Arc<dyn Function>, is_off: bool) {
        if let Err(error) = function.set_bus_master(false)
            && !is_off
        {
            tracing::warn!(drive = %self.shared.address, %error, "cannot disable bus mastering");
        }
        self.controller_memory.clear();
    }

    /// Sets whether cores must assume the loss of unflushed writes when they apply the next queue command.
    fn may_lose_cache(&self, may_lose: bool) {
        self.shared.may_lose_cache.store(may_lose, Ordering::Relaxed);
    }

    /// Sends the shutdown notification (Base 2.0 section 3.6.1) and waits for its completion, at most
    /// [`shutdown_limit`]. Returns true if the controller reports completion.
    async fn shut_down(&self, bar: &Bar, controller: &Controller) -> bool {
        use register::{CC, CSTS, Cc, Csts, ShutdownNotification, ShutdownStatus};
        if bar.read32(CSTS.into()) == u32::MAX {
            return false;
        }
        let cc = Cc::from_bits(bar.read32(CC.into())).with_shn(ShutdownNotification::NORMAL.0);
        bar.write32(CC.into(), cc.into_bits());
        let is_complete = || match bar.read32(CSTS.into()) {
            u32::MAX => Some(false),
            csts => (Csts::from_bits(csts).shutdown() == ShutdownStatus::COMPLETE).then_some(true),
        };
        let limit = shutdown_limit(controller.id.rtd3e.get());
        let is_saved = self.within(limit, is_complete).await;
        if is_saved.is_none() {
            tracing::warn!(drive = %self.shared.address, ?limit, "no answer to the shutdown notification");
        }
        is_saved == Some(true)
    }

    /// Clears CC.EN and waits for CSTS.RDY 0, at most CAP.TO + [`TIMEOUT_SLACK`]; resets the function if that
    /// fails. Does nothing if CSTS reads as all ones.
    async fn disable(&self, bar: &Bar, function: &Arc<dyn Function>) -> StopMethod {
        use register::{CAP, CC, CSTS, Cap, Cc, Csts};
        if bar.read32(CSTS.into()) == u32::MAX {
            return StopMethod::No;
        }
        let cc = Cc::from_bits(bar.read32(CC.into())).with_en(false).with_shn(0);
        bar.write32(CC.into(), cc.into_bits());
        self.within(self.quirks(function).ready_delay, || None::<()>).await;
        let timeout = Cap::from_bits(bar.read64(CAP.into())).timeout_ms();
        let limit = Duration::from_millis(u64::from(timeout)) + TIMEOUT_SLACK;
        let is_off = || {
            let csts = bar.read32(CSTS.into());
            if csts == u32::MAX { Some(false) } else { (!Csts::from_bits(csts).rdy()).then_some(true) }
        };
        if self.within(limit, is_off).await == Some(true) {
            return StopMethod::Disabled;
        }
        match function.reset() {
            Ok(()) => StopMethod::Reset,
            Err(error) => {
                tracing::warn!(drive = %self.shared.address, %error, "function reset failed");
                StopMethod::No
            }
        }
    }

    /// Returns the quirks of the PCI identifier; none if the identifier cannot be read.
    fn quirks(&self, function: &Arc<dyn Function>) -> Quirks {
        function.id().map(Quirks::of).unwrap_or_default()
    }

    /// Calls `f` in each step until `f` returns `Some`. Returns `None` after `limit`.
    async fn within<T>(&self, limit: Duration, mut f: impl FnMut() -> Option<T>) -> Option<T> {
        let end = self.now.get().saturating_add(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX));
        wait(|| {
            self.end_absence();
            match f() {
                Some(value) => Some(Some(value)),
                None if self.now.get() >= end => Some(None),
                None => None,
            }
        })
        .await
    }

    /// Waits for `time`, or until the drive may close. Removes closed core queues meanwhile.
    async fn pause(&mut self, time: Duration) {
        self.is_busy.set(false);
        let end = self.now.get().saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        while self.now.get() < end && !self.may_close() {
            self.end_absence();
            self.drop_closed();
            wait(next_step()).await;
        }
        self.is_busy.set(true);
    }
}

/// Tolerance added to CAP.TO.
const TIMEOUT_SLACK: Duration = Duration::from_millis(500);
/// Returns the time limit of the shutdown notification: RTD3E (Base 2.0 section 5.17.2.1, in microseconds),
/// at least 10 s and at most 60 s. Linux: at least its `shutdown_timeout` of 5 s, at most 60 s
/// (`nvme_init_identify`).
fn shutdown_limit(rtd3e_us: u32) -> Duration {
    Duration::from_micros(rtd3e_us.into()).clamp(SHUTDOWN_MIN, SHUTDOWN_MAX)
}

const SHUTDOWN_MIN: Duration = Duration::from_secs(10);
pub(crate) const SHUTDOWN_MAX: Duration = Duration::from_secs(60);

/// Calls `f` once in each step until `f` returns `Some`.
async fn wait<T>(mut f: impl FnMut() -> Option<T>) -> T {
    poll_fn(|_| f().map_or(Poll::Pending, Poll::Ready)).await
}

/// Returns a condition for [`wait`] that is met in the next step.
fn next_step() -> impl FnMut() -> Option<()> {
    let mut has_waited = false;
    move || std::mem::replace(&mut has_waited, true).then_some(())
}

/// Fails if the registers read as absent, a removal was requested, or CSTS.CFS is set.
fn check_status(bar: &Bar, function: &Arc<dyn Function>) -> Result<(), ManagerError> {
    let csts = bar.read32(register::CSTS.into());
    // A missing function reads as all ones, on QEMU as zeroes. VS of a present function has neither value.
    if csts == u32::MAX || matches!(bar.read32(register::VS.into()), 0 | u32::MAX) {
        return Err(ManagerError::Gone);
    }
    if function.is_removal_asked() {
        return Err(ManagerError::Removal);
    }
    if register::Csts::from_bits(csts).cfs() {
        return Err(ManagerError::Fatal);
    }
    Ok(())
}

/// As `check_status`, and fails if CSTS.RDY is 0.
fn check_ready(bar: &Bar, function: &Arc<dyn Function>) -> Result<(), ManagerError> {
    check_status(bar, function)?;
    // RDY is 0 after a reset by another agent, or after a removal if the bus reads as zeroes.
    let is_ready = register::Csts::from_bits(bar.read32(register::CSTS.into())).rdy();
    if is_ready { Ok(()) } else { Err(ManagerError::NotReady) }
}
