//! Connecting the admin queue and I/O queues, enabling the controller, and its shutdown.

use std::collections::VecDeque;
use std::time::Duration;

use nvme_spec::feature::{AsyncEventConfig, FeatureId, NumberOfQueues};
use nvme_spec::identify::{IdentifyController, Oaes};
use nvme_spec::register::{self, Cap, Cc, Csts, ShutdownNotification, ShutdownStatus, Vs};
use spindle_reactor::clock::{Clock, Nanos};

use super::opening::{Connecting, Opening};
use super::{ADMIN_ENTRIES, Controller, KeepAlive, admin_pool};
use crate::error::Error;
use crate::link::QueueName;
use crate::options::{Options, Target};
use crate::queue::IoQueue;

/// CC as set by Linux: queue entries of 64 and 16 bytes, NVM command set, 4 KiB pages.
const ENABLED: Cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
/// Smallest timeout of CSTS.RDY, used if the controller reports less in CAP.TO.
const READY_MIN: Duration = Duration::from_secs(1);
/// First and longest time between two reads of CSTS.
const CSTS_POLL_PERIODS: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(20));

pub(super) fn connect(target: &Target, options: &Options) -> Result<Controller, Error> {
    let pool = admin_pool()?;
    let depth = ADMIN_ENTRIES - 1;
    // Keep Alive supervises the admin queue. No command timeout: the event request has no limit.
    let admin_options = Options { command_timeout: None, batch_bytes: 16 << 10, ..options.clone() };
    let name = QueueName { qid: 0, cntlid: 0, depth };
    let (admin, cntlid) = Connecting::begin(target, &admin_options, &pool, name, Clock::now())?.finish()?;
    let mut controller = Controller {
        admin,
        pool,
        target: target.clone(),
        options: options.clone(),
        cntlid,
        cap: Cap::new(),
        vs: Vs::new(),
        identify: Box::new(IdentifyController::default()),
        queues_granted: 0,
        keep_alive: None,
        event_request: None,
        next_event_request: None,
        events: VecDeque::new(),
        former_request: None,
        former: None,
        attach_request: None,
        attached: None,
        commands: Vec::new(),
        answers: VecDeque::new(),
        is_loss_told: false,
    };
    enable(&mut controller)?;
    configure(&mut controller)?;
    Ok(controller)
}

fn enable(controller: &mut Controller) -> Result<(), Error> {
    controller.cap = Cap::from_bits(controller.property(register::CAP, true)?);
    let low = |value: u64| u32::try_from(value & u64::from(u32::MAX)).unwrap_or(0);
    controller.vs = Vs::from_bits(low(controller.property(register::VS, false)?));
    controller.set_property(register::CC, ENABLED.into_bits())?;
    let timeout = Duration::from_millis(u64::from(controller.cap.timeout_ms())).max(READY_MIN);
    wait_for_status(controller, "CSTS.RDY", timeout, |csts| csts.rdy())
}

/// Polls CSTS until `is_reached` returns true. Fails after `timeout`, or on CSTS.CFS.
fn wait_for_status(
    controller: &mut Controller,
    step: &'static str,
    timeout: Duration,
    is_reached: impl Fn(Csts) -> bool,
) -> Result<(), Error> {
    let deadline = Clock::now() + Nanos::from(timeout);
    let (mut period, period_max) = CSTS_POLL_PERIODS;
    loop {
        let value = controller.property(register::CSTS, false)?;
        let csts = Csts::from_bits(u32::try_from(value).unwrap_or(u32::MAX));
        if csts.cfs() {
            return Err(Error::Answer { step, what: "the controller reports a fatal status (CSTS.CFS)" });
        }
        if is_reached(csts) {
            return Ok(());
        }
        if Clock::now() >= deadline {
            return Err(Error::TimedOut { step, after: timeout });
        }
        std::thread::sleep(period);
        period = (period * 2).min(period_max);
    }
}

/// Identifies an enabled controller and requests I/O queues (not of a discovery controller). Then enables
/// Keep Alive and the supported events.
fn configure(controller: &mut Controller) -> Result<(), Error> {
    controller.refresh_identify()?;
    if controller.identify.cntlid.get() != controller.cntlid {
        return Err(Error::Answer { step: "Identify Controller", what: "CNTLID is not that of Connect" });
    }
    if !controller.target.nqn.is_discovery() {
        let wanted = controller.options.io_queues.max(1);
        let value = NumberOfQueues::both(u32::from(wanted)).into_bits();
        let granted = controller.set_feature(FeatureId::NUMBER_OF_QUEUES, value)?;
        let granted = NumberOfQueues::from_bits(granted).pairs();
        controller.queues_granted = u16::try_from(granted).unwrap_or(u16::MAX).min(wanted);
    }
    controller.keep_alive = KeepAlive::new(controller.options.keep_alive_ms);
    // Only notices that the controller supports and whose log pages this host reads. Events of errors and of
    // health are not enabled.
    let offered = Oaes::from_bits(controller.identify.oaes.get());
    let wanted = AsyncEventConfig::new()
        .with_namespace_attribute(controller.tells_of_namespaces())
        .with_discovery_log(offered.discovery_log());
    if wanted != AsyncEventConfig::new() {
        controller.set_feature(FeatureId::ASYNC_EVENT_CONFIG, wanted.into_bits())?;
        controller.request_event(Clock::now());
    }
    Ok(())
}

pub(super) fn shut_down(controller: &mut Controller) -> Result<(), Error> {
    let value = ENABLED.with_shn(ShutdownNotification::NORMAL.0);
    controller.set_property(register::CC, value.into_bits())?;
    let timeout = controller.options.connect_timeout;
    wait_for_status(controller, "CSTS.SHST", timeout, |csts| csts.shutdown() == ShutdownStatus::COMPLETE)
}

impl Controller {
    /// Connects queue `qid` (1 to [`Controller::queues_granted`]) for [`Options::depth`] commands; blocks.
    pub fn connect_queue(&mut self, qid: u16) -> Result<IoQueue, Error> {
        self.connect_queue_of(qid, self.options.depth)
    }

    /// Connects I/O queue `qid` for `depth` commands, 1 to [`Controller::depth_max`]. Blocks.
    pub fn connect_queue_of(&mut self, qid: u16, depth: u16) -> Result<IoQueue, Error> {
        Opening::begin(&self.association(), &self.pool, qid, depth, Clock::now())?.finish()
    }
}
