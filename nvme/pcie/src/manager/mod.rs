//! [`Manager`]: the life of one drive, off the data path: opened, enabled, watched, reset, lost, opened
//! again, shut down.
//!
//! ```text
//!   open ─> bring_up ─> serve ── trouble ─> halt ─> bring_up ...            (halt: Stop, disable, Rewind)
//!                         │                  └─ cannot: cut off ─> away
//!                         └── gone, or to be removed ─> away: closed ── once a second: open ...
//! ```
//!
//! While the drive is away requests wait ([`Absence::Waiting`]) for as long as `return_timeout` says; then
//! they fail ([`Absence::Over`]). `docs/guarantees.md` says what hosts see of it.
//!
//! It is one future, written as one goes about it, and polled by [`Manager::step`] with the time: by the
//! drive's thread, or by a test. Nothing in it blocks; what it waits for it looks at in each step.

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
use crate::shared::{NotOpened, Shared, TICK_MS};

use away::Absence;
use bring_up::Controller;
use queues::QueueSlot;
use serve::Beside;

/// Why a drive does not go on as it did.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Trouble {
    #[error("it is gone (its registers read as nothing)")]
    Gone,
    #[error("its removal was asked for")]
    Removal,
    #[error("fatal status (CSTS.CFS)")]
    Fatal,
    #[error("it is not enabled any more (CSTS.RDY is 0)")]
    NotReady,
    #[error("{what}: no answer in {limit:?}")]
    Slow { what: &'static str, limit: Duration },
    #[error("{command}: {status}")]
    Refused { command: &'static str, status: Status },
    #[error("a command did not end, aborted neither")]
    Stuck,
    #[error("what was repeated after a reset did not end in {limit:?}")]
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

impl Trouble {
    /// The drive is not there or does not work, as opposed to one that does not fit or cannot be had here.
    fn is_the_drives(&self) -> bool {
        match self {
            Trouble::Gone
            | Trouble::Removal
            | Trouble::Fatal
            | Trouble::NotReady
            | Trouble::Slow { .. }
            | Trouble::Refused { .. }
            | Trouble::Stuck
            | Trouble::Replay { .. }
            | Trouble::Open(OpenFunctionError::Missing { .. }) => true,
            Trouble::Unfit { .. }
            | Trouble::Namespace(_)
            | Trouble::Open(_)
            | Trouble::Memory(_)
            | Trouble::Map(_)
            | Trouble::Another { .. }
            | Trouble::Closing => false,
        }
    }

    /// A drive that had to be reset for this may have begun anew, without what was in its write cache.
    fn may_lose_cache(&self) -> bool {
        // Not ready, and not by us: it may have been without power for a while.
        matches!(self, Trouble::Gone | Trouble::NotReady | Trouble::Fatal | Trouble::Slow { .. })
    }

    /// A namespace that is used is another now.
    fn another(namespace: &Namespace) -> Trouble {
        let was = format!("{} of {} bytes a block", namespace.nsid, 1_u64 << namespace.shift);
        let value = "missing or of another identity or format".to_owned();
        Trouble::Another { field: "namespace", value, was }
    }
}

/// Function resets before a drive is given up.
const RESETS_MAX: u32 = 3;

/// See the module.
pub struct Manager {
    shared: Arc<Shared>,
    now: Rc<Cell<u64>>,
    is_busy: Rc<Cell<bool>>,
    life: Pin<Box<dyn Future<Output = ()>>>,
    has_ended: bool,
}

impl Manager {
    pub(crate) fn new(shared: Arc<Shared>, bus: Arc<dyn Bus>) -> Manager {
        let (now, is_busy) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(true)));
        let life = Life {
            shared: Arc::clone(&shared),
            bus,
            now: Rc::clone(&now),
            is_busy: Rc::clone(&is_busy),
            queue_slots: Vec::new(),
            told_of: Vec::new(),
            has_served: false,
            told: String::new(),
            lost_at: None,
            absence: Cell::new(Absence::No),
            closing_since: Cell::new(None),
            replaying_since: None,
            beside: RefCell::new(None),
        };
        Manager { shared, now, is_busy, life: Box::pin(life.live()), has_ended: false }
    }

    /// Go on. `now_ms` is a time that only goes forward. True when it is soon to be called again (a
    /// millisecond), false when 20 are soon enough.
    pub fn step(&mut self, now_ms: u64) -> bool {
        self.now.set(now_ms);
        // Cores measure only how long something takes: the 32 bits may come round.
        let [a, b, c, d, ..] = (now_ms / TICK_MS).to_le_bytes();
        let tick = u32::from_le_bytes([a, b, c, d]);
        for core_queue in &self.shared.state().core_queues {
            if core_queue.word().tick() != tick {
                core_queue.set_tick(tick);
            }
        }
        self.shared.let_released_go();
        if !self.has_ended {
            let mut context = Context::from_waker(Waker::noop());
            self.has_ended = self.life.as_mut().poll(&mut context).is_ready();
        }
        self.is_busy.get()
    }

    /// The drive is shut down and closed.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }
}

/// What the future has.
struct Life {
    shared: Arc<Shared>,
    bus: Arc<dyn Bus>,
    now: Rc<Cell<u64>>,
    is_busy: Rc<Cell<bool>>,
    queue_slots: Vec<QueueSlot>,
    /// What the controller was told of besides: the admin queue, doorbells. Let go when it is off or cut off:
    /// until then it may write there, and another drive of the container would get the same addresses.
    told_of: Vec<Arc<DmaMemory>>,
    /// It was in service once: afterwards it is the same drive or none.
    has_served: bool,
    /// Why it is not in service, as it was logged; empty while it is.
    told: String,
    /// Since when cores cannot work with it; `None` while they do.
    lost_at: Option<u64>,
    absence: Cell<Absence>,
    /// Since when the drive is not needed any more.
    closing_since: Cell<Option<u64>>,
    /// Since when cores repeat what the drive had before a reset; `None` while none does.
    replaying_since: Option<u64>,
    /// While it is in service.
    beside: RefCell<Option<Beside>>,
}

/// How the controller was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Off {
    /// CSTS.RDY is 0.
    Disabled,
    /// By a function level reset.
    Reset,
    /// Not at all: it may still reach memory.
    No,
}

impl Life {
    async fn live(mut self) {
        while !self.is_over() {
            let end = self.open_and_serve().await;
            let was_first = self.shared.state().first.is_none();
            if was_first {
                // The opener hears of it, and there is no drive.
                self.let_go(QueueCommand::Gone).await;
                let failure = NotOpened { why: end.to_string(), is_absent: end.is_the_drives() };
                self.shared.tell_first(Err(failure));
                break;
            }
            if matches!(end, Trouble::Closing) {
                break;
            }
            self.tell_once(&end);
            let order = self.order_for(&end);
            self.let_go(order).await;
            self.pause(self.shared.settings.reopen_interval).await;
        }
        self.let_go(QueueCommand::Gone).await;
        self.shared.offloaded.tell(&self.shared.address);
        self.shared.tell_first(Err(NotOpened { why: "closed".to_owned(), is_absent: false }));
    }

    /// One line for each reason, however often the drive is tried.
    fn tell_once(&mut self, why: &Trouble) {
        let why = why.to_string();
        if why != self.told {
            tracing::error!(drive = %self.shared.address, "drive out of service, and tried again: {why}");
            self.told = why;
        }
    }

    /// Until the drive is lost, or not needed any more; it reaches no memory then.
    async fn open_and_serve(&mut self) -> Trouble {
        self.is_busy.set(true);
        let function = match self.bus.open() {
            Ok(function) => function,
            Err(error) => return Trouble::Open(error),
        };
        self.shared.state().function = Some(Arc::clone(&function));
        let mut resets = 0;
        loop {
            self.is_busy.set(true);
            let bar = function.bar();
            let mut is_saved = false;
            let trouble = match self.bring_up(&function).await {
                Ok(controller) => {
                    let trouble = self.serve(&function, &controller, &mut resets).await;
                    self.lost_at.get_or_insert(self.now.get());
                    self.may_lose_cache(trouble.may_lose_cache());
                    self.stop_all().await;
                    let is_over = matches!(trouble, Trouble::Closing | Trouble::Removal);
                    is_saved = is_over && self.shut_down(&bar, &controller).await;
                    trouble
                }
                Err(trouble) => trouble,
            };
            let off = self.disable(&bar, &function).await;
            let is_off = off != Off::No;
            if is_off {
                self.told_of.clear();
            }
            // Closed now, it would lose what it was not told to save.
            self.may_lose_cache(!is_saved);
            let address = &self.shared.address;
            match (&trouble, is_off) {
                (Trouble::Closing, _) => {
                    self.cut_off(&function, is_off);
                    return trouble;
                }
                (Trouble::Gone, _) if self.has_served && resets < RESETS_MAX => {
                    if !self.comes_back(&bar, &function).await {
                        self.cut_off(&function, is_off);
                        return trouble;
                    }
                    resets += 1;
                    tracing::warn!(drive = %address, resets, "its registers are back; it is reset");
                    self.told_of.clear();
                    self.hold_all(true).await;
                }
                (Trouble::Gone | Trouble::Removal, _) => {
                    self.removal_known(&function).await;
                    self.cut_off(&function, is_off);
                    return trouble;
                }
                // It was never in service: the opener decides.
                _ if !self.has_served => {
                    self.cut_off(&function, is_off);
                    return trouble;
                }
                _ if is_off && resets < RESETS_MAX && !matches!(trouble, Trouble::Another { .. }) => {
                    resets += 1;
                    tracing::warn!(drive = %address, resets, "controller is reset: {trouble}");
                    self.hold_all(trouble.may_lose_cache() || off == Off::Reset).await;
                }
                _ => {
                    self.cut_off(&function, is_off);
                    return trouble;
                }
            }
        }
    }

    /// The drive reaches no memory from here on.
    fn cut_off(&mut self, function: &Arc<dyn Function>, is_off: bool) {
        if let Err(error) = function.set_bus_master(false)
            && !is_off
        {
            tracing::warn!(drive = %self.shared.address, %error, "bus mastering cannot be turned off");
        }
        self.told_of.clear();
    }

    /// Whether a core that is told to stop, or that the drive is gone, must fear for what was not flushed.
    fn may_lose_cache(&self, may_it: bool) {
        self.shared.may_lose_cache.store(may_it, Ordering::Relaxed);
    }

    /// Tell the controller that power may go (Base 2.0 section 3.6.1), and wait for it. True when the drive
    /// says that everything is on the medium.
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

    /// CC.EN 0 and CSTS.RDY 0, or a function reset.
    async fn disable(&self, bar: &Bar, function: &Arc<dyn Function>) -> Off {
        use register::{CAP, CC, CSTS, Cap, Cc, Csts};
        if bar.read32(CSTS.into()) == u32::MAX {
            return Off::No;
        }
        let cc = Cc::from_bits(bar.read32(CC.into())).with_en(false).with_shn(0);
        bar.write32(CC.into(), cc.into_bits());
        self.within(self.quirks(function).ready_delay, || None::<()>).await;
        let timeout = Cap::from_bits(bar.read64(CAP.into())).timeout_ms();
        let limit = Duration::from_millis(u64::from(timeout)) + SLACK;
        let is_off = || {
            let csts = bar.read32(CSTS.into());
            if csts == u32::MAX { Some(false) } else { (!Csts::from_bits(csts).rdy()).then_some(true) }
        };
        if self.within(limit, is_off).await == Some(true) {
            return Off::Disabled;
        }
        match function.reset() {
            Ok(()) => Off::Reset,
            Err(error) => {
                tracing::warn!(drive = %self.shared.address, %error, "function reset failed");
                Off::No
            }
        }
    }

    /// What this drive needs. Of one that cannot be asked, nothing.
    fn quirks(&self, function: &Arc<dyn Function>) -> Quirks {
        function.id().map(Quirks::of).unwrap_or_default()
    }

    /// What `f` gives, or nothing when `limit` is over.
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

    /// Let time pass, unless the drive is not needed any more.
    async fn pause(&mut self, time: Duration) {
        self.is_busy.set(false);
        let end = self.now.get().saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        while self.now.get() < end && !self.is_over() {
            self.end_absence();
            self.drop_closed();
            wait(once()).await;
        }
        self.is_busy.set(true);
    }
}

/// More than CAP.TO says.
const SLACK: Duration = Duration::from_millis(500);
/// How long a controller may take to save what it has: what it says itself (RTD3E, Base 2.0 section 5.17.2.1,
/// in microseconds), from 10 to 60 seconds. Linux bounds it so as well (`nvme_init_identify`: at least its
/// `shutdown_timeout` of 5 s, at most 60).
fn shutdown_limit(rtd3e_us: u32) -> Duration {
    Duration::from_micros(rtd3e_us.into()).clamp(SHUTDOWN_MIN, SHUTDOWN_MAX)
}

const SHUTDOWN_MIN: Duration = Duration::from_secs(10);
/// See [`shutdown_limit`].
pub(crate) const SHUTDOWN_MAX: Duration = Duration::from_secs(60);

/// Poll `f` once a step until it gives something.
async fn wait<T>(mut f: impl FnMut() -> Option<T>) -> T {
    poll_fn(|_| f().map_or(Poll::Pending, Poll::Ready)).await
}

/// Pending once, then done.
fn once() -> impl FnMut() -> Option<()> {
    let mut has_waited = false;
    move || std::mem::replace(&mut has_waited, true).then_some(())
}

/// What a look at the registers tells.
fn look(bar: &Bar, function: &Arc<dyn Function>) -> Result<(), Trouble> {
    let csts = bar.read32(register::CSTS.into());
    // A bus answers ones where nothing is, an emulated one zeroes; no version is either.
    if csts == u32::MAX || matches!(bar.read32(register::VS.into()), 0 | u32::MAX) {
        return Err(Trouble::Gone);
    }
    if function.is_removal_asked() {
        return Err(Trouble::Removal);
    }
    if register::Csts::from_bits(csts).cfs() {
        return Err(Trouble::Fatal);
    }
    Ok(())
}

/// The same of a controller that was ready.
fn look_ready(bar: &Bar, function: &Arc<dyn Function>) -> Result<(), Trouble> {
    look(bar, function)?;
    // Somebody reset it behind us, or it was pulled where the bus answers zeroes.
    let is_ready = register::Csts::from_bits(bar.read32(register::CSTS.into())).rdy();
    if is_ready { Ok(()) } else { Err(Trouble::NotReady) }
}
