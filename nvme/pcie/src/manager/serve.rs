//! A drive in service: [`ManagerTask::serve`] makes and deletes queues, aborts commands, reads health and
//! namespaces, handles events, and detects a loss of the drive.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nvme_spec::admin::{AsyncEvent, AsyncEventType};
use nvme_spec::identify::{Cns, IdentifyNamespace, NamespaceList};
use nvme_spec::log::{LogId, SmartLog};
use nvme_spec::sqe::{NSID_ALL, Sqe};
use nvme_spec::zerocopy::IntoBytes;

use super::queues::QueueSlot;
use super::{Controller, ManagerError, ManagerTask, check_ready, next_step, wait};
use crate::admin::{ADMIN_DEPTH, Ticket};
use crate::function::Function;
use crate::rules::Namespace;

/// State of the work besides queues: events, Aborts, health log, namespace changes.
#[derive(Default)]
pub(super) struct Background {
    event: Option<Ticket>,
    aborts: Vec<Ticket>,
    health_due: u64,
    strays_logged: u64,
    namespaces_due: bool,
    /// Log page to read. Reading the page lets the controller send the next event of that type.
    log_due: Option<LogId>,
    /// Number of events since the last logged one.
    untold: u64,
    /// Manager time in milliseconds from which events are logged again.
    log_from: u64,
}

/// Data to read from the controller in the current step.
#[derive(Default)]
struct DueReads {
    health: bool,
    namespaces: bool,
    log: Option<LogId>,
}

/// Minimum time in milliseconds between logged events.
const EVENT_LINES_MS: u64 = 1000;

/// Maximum number of Aborts in flight, even if ACL allows more: other admin commands need slots.
const ABORTS_MAX: usize = ADMIN_DEPTH as usize / 2;

/// Bytes to read of a log page that is read only to enable the next event.
const LOG_BYTES: u32 = 64;
/// Time in service in milliseconds after which earlier resets are not counted.
const STABLE_MS: u64 = 60_000;

impl ManagerTask {
    /// Serves the drive until an error, and returns the error. Sets `resets` to 0 after `STABLE_MS`.
    pub(super) async fn serve(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        resets: &mut u32,
    ) -> ManagerError {
        self.reset_queues(controller.queue_pairs);
        self.notify_caches();
        self.absence.set(super::away::Absence::No);
        let begin = self.now.get();
        *self.background.borrow_mut() = Some(Background { health_due: begin, ..Background::default() });
        loop {
            if let Err(failure) = self.turn(function, controller).await {
                *self.background.borrow_mut() = None;
                return failure;
            }
            if !self.has_served {
                self.has_served = true;
                self.shared.set_first_result(Ok(()));
            }
            if !std::mem::take(&mut self.logged_reason).is_empty() {
                tracing::info!(drive = %self.shared.address, "drive in service again");
            }
            if self.now.get().saturating_sub(begin) > STABLE_MS {
                *resets = 0;
            }
            let is_replaying = self.lost_at.is_some();
            let is_aborting =
                self.background.borrow().as_ref().is_some_and(|background| !background.aborts.is_empty());
            let is_asking = self.queue_slots.iter().any(QueueSlot::is_offered);
            self.is_busy.set(is_replaying || is_aborting || is_asking);
            wait(next_step()).await;
        }
    }

    /// Calls the caches' callbacks before any core can submit, if the drive was in service before. Others may
    /// have written to the drive while it was away, or a reset may have lost its write cache.
    fn notify_caches(&self) {
        if self.has_served {
            self.notify_caches_of(|_| true);
        }
    }

    /// Calls the caches' callbacks for the namespaces that `is_changed` selects.
    fn notify_caches_of(&self, is_changed: impl Fn(u32) -> bool) {
        let fronts = self.shared.state().fronts();
        fronts.iter().filter(|fronts| is_changed(fronts.nsid())).for_each(|fronts| fronts.notify());
    }

    async fn turn(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
    ) -> Result<(), ManagerError> {
        if self.may_close() {
            return Err(ManagerError::Closing);
        }
        check_ready(&controller.bar, function)?;
        self.update_queues(function, controller).await?;
        controller.admin.poll();
        self.step_background(controller)?;
        let due = self.take_due(controller);
        if due.health {
            self.read_health(function, controller).await?;
        }
        if due.namespaces {
            self.read_namespaces(function, controller).await?;
        }
        if let Some(log) = due.log {
            let sqe = Sqe::get_log_page(0, log, NSID_ALL, LOG_BYTES, 0, false);
            match self.command_with_data(function, controller, sqe, "Get Log Page").await {
                Ok(_) | Err(ManagerError::Refused { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        Ok(())
    }

    /// Handles requested Aborts and resets, and events, also while another admin command is in flight.
    pub(super) fn step_background(&self, controller: &Controller) -> Result<(), ManagerError> {
        let mut background = self.background.borrow_mut();
        let Some(background) = background.as_mut() else { return Ok(()) };
        self.abort(controller, background)?;
        self.take_event(controller, background);
        Ok(())
    }

    fn take_due(&self, controller: &Controller) -> DueReads {
        let mut background = self.background.borrow_mut();
        let Some(background) = background.as_mut() else { return DueReads::default() };
        let strays = self.shared.strays.load(Ordering::Relaxed) + controller.admin.strays();
        if strays > background.strays_logged {
            background.strays_logged = strays;
            let drive = &self.shared.address;
            tracing::warn!(%drive, strays, "completions without an outstanding command ignored");
        }
        let health = self.now.get() >= background.health_due;
        if health {
            let interval = self.shared.settings.health_interval.as_millis();
            background.health_due =
                self.now.get().saturating_add(u64::try_from(interval).unwrap_or(u64::MAX));
        }
        DueReads {
            health,
            namespaces: std::mem::take(&mut background.namespaces_due),
            log: background.log_due.take(),
        }
    }

    /// Submits requested Aborts, at most `ABORTS_MAX` and as many as the controller accepts at once (ACL).
    /// Fails if a core requested a reset. A sharer's request counts only if its host hangs.
    fn abort(&self, controller: &Controller, background: &mut Background) -> Result<(), ManagerError> {
        let admin = &controller.admin;
        background.aborts.retain(|ticket| admin.take(*ticket).is_none());
        let aborts_max = usize::try_from(controller.id.aborts_max()).unwrap_or(ABORTS_MAX).min(ABORTS_MAX);
        // Requests of a core without queues concern its previous queue.
        for queue_slot in self.queue_slots.iter().filter(|queue_slot| queue_slot.has_queues()) {
            if queue_slot.is_sharer {
                // A sharer's host requests Aborts, with the CIDs of the drive's queue. A host that hangs
                // requests no Abort and submits nothing for its sharers, so a reset is needed.
                if queue_slot.core_queue.take_reset_request() && queue_slot.is_host_hung() {
                    return Err(ManagerError::Stuck);
                }
                queue_slot.core_queue.clear_requests();
                continue;
            }
            if queue_slot.core_queue.take_reset_request() {
                return Err(ManagerError::Stuck);
            }
            while background.aborts.len() < aborts_max {
                let Some(cid) = queue_slot.core_queue.next_abort() else { break };
                let (qid, core) = (queue_slot.qid(), queue_slot.core_queue.core);
                let Some(ticket) = admin.start(Sqe::abort(0, qid, cid).with_prp(0, 0)) else {
                    // No slot is free: later.
                    queue_slot.core_queue.request_abort(cid);
                    break;
                };
                background.aborts.push(ticket);
                let drive = &self.shared.address;
                tracing::warn!(%drive, core, qid, cid, "command timed out, sending Abort");
            }
        }
        Ok(())
    }

    /// Handles a completed Asynchronous Event Request and submits the next one.
    fn take_event(&self, controller: &Controller, background: &mut Background) {
        let admin = &controller.admin;
        if let Some(ticket) = background.event {
            let Some(completion) = admin.take(ticket) else { return };
            background.event = None;
            if !completion.status.is_success() {
                // Not submitted again: the drive would refuse each one.
                let drive = &self.shared.address;
                tracing::warn!(
                    %drive,
                    status = %completion.status,
                    "drive refused Asynchronous Event Request: no events from it"
                );
                background.event = Some(Ticket::NONE);
                return;
            }
            let [a, b, c, d, ..] = completion.result.to_le_bytes();
            let event = AsyncEvent::from_bits(u32::from_le_bytes([a, b, c, d]));
            let (kind, information, now) = (event.kind(), event.information(), self.now.get());
            if now >= background.log_from {
                let untold = std::mem::take(&mut background.untold);
                let drive = &self.shared.address;
                tracing::info!(%drive, ?kind, information, untold, "asynchronous event of the drive");
                background.log_from = now.saturating_add(EVENT_LINES_MS);
            } else {
                background.untold += 1;
            }
            match event.log() {
                LogId::SMART => background.health_due = 0,
                _ if kind == AsyncEventType::NOTICE => background.namespaces_due = true,
                log => background.log_due = Some(log),
            }
        }
        background.event = admin.start(Sqe::async_event_request(0).with_prp(0, 0));
    }

    async fn read_health(
        &self,
        function: &Arc<dyn Function>,
        controller: &Controller,
    ) -> Result<(), ManagerError> {
        let bytes = u32::try_from(size_of::<SmartLog>()).unwrap_or(512);
        let sqe = Sqe::get_log_page(0, LogId::SMART, NSID_ALL, bytes, 0, false);
        match self.command_with_data(function, controller, sqe, "Get Log Page (SMART)").await {
            Ok(_) => {}
            Err(ManagerError::Refused { .. }) => return Ok(()),
            Err(other) => return Err(other),
        }
        let mut log = SmartLog::default();
        controller.admin.data(log.as_mut_bytes());
        let before = self.shared.state().health.replace(log);
        let warning = log.critical_warning;
        if warning != before.map_or(0, |before| before.critical_warning) {
            tracing::warn!(drive = %self.shared.address, warning = format_args!("{warning:#04x}"),
                "critical warnings of the drive changed");
        }
        Ok(())
    }

    /// Reads the changed-namespace log, which enables the next event. Empties the caches of the namespaces in
    /// it: a namespace that was detached and attached again, or was made smaller and larger, has other
    /// contents and looks the same. Identifies all known namespaces again and stores new sizes. Fails if a
    /// namespace in use has another identity or format.
    async fn read_namespaces(
        &self,
        function: &Arc<dyn Function>,
        controller: &Controller,
    ) -> Result<(), ManagerError> {
        let bytes = u32::try_from(size_of::<NamespaceList>()).unwrap_or(4096);
        let sqe = Sqe::get_log_page(0, LogId::CHANGED_NAMESPACES, NSID_ALL, bytes, 0, false);
        let mut changed: Box<NamespaceList> = Box::default();
        match self.command_with_data(function, controller, sqe, "Get Log Page (changed namespaces)").await {
            Ok(_) => controller.admin.data(changed.as_mut_bytes()),
            Err(ManagerError::Refused { .. }) => changed.nsid[0] = NSID_ALL.into(),
            Err(other) => return Err(other),
        }
        // NSID_ALL: more than the log has room for.
        let has_changed = |nsid| changed.iter().any(|it| it == nsid || it == NSID_ALL);
        self.notify_caches_of(has_changed);
        let known: Vec<_> =
            self.shared.state().namespaces.iter().map(|(known, _)| Arc::clone(known)).collect();
        for known in known {
            let mut id: Box<IdentifyNamespace> = Box::default();
            let sqe = Sqe::identify(0, Cns::NAMESPACE, known.nsid, 0);
            match self.command_with_data(function, controller, sqe, "Identify Namespace").await {
                Ok(_) => controller.admin.data(id.as_mut_bytes()),
                Err(ManagerError::Refused { .. }) => continue,
                Err(other) => return Err(other),
            }
            match Namespace::new(known.nsid, &id, &controller.id) {
                Ok(now) if known.is_same(&now) => {
                    let (from, to) = (known.blocks(), now.blocks());
                    if from != to {
                        let drive = &self.shared.address;
                        tracing::info!(%drive, nsid = known.nsid, from, to, "blocks changed");
                        if !has_changed(known.nsid) {
                            self.notify_caches_of(|nsid| nsid == known.nsid);
                        }
                        known.set_blocks(to);
                    }
                }
                // Detached: the drive refuses commands for this NSID.
                _ if id.nsze.get() == 0 => {
                    tracing::error!(drive = %self.shared.address, nsid = known.nsid, "namespace is gone");
                }
                // Commands with the old block size would transfer more bytes than their buffers have.
                Ok(_) | Err(_) if self.is_used(known.nsid) => return Err(ManagerError::another(&known)),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(())
    }
}
