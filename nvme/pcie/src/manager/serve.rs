//! While the drive works: [`Life::serve`] makes and deletes queues, aborts, reads the health log, takes
//! events, and looks whether the drive is still there.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nvme_spec::admin::{AsyncEvent, AsyncEventType};
use nvme_spec::identify::{Cns, IdentifyNamespace, NamespaceList};
use nvme_spec::log::{LogId, SmartLog};
use nvme_spec::sqe::{NSID_ALL, Sqe};
use nvme_spec::zerocopy::IntoBytes;

use super::queues::QueueSlot;
use super::{Controller, Life, Trouble, look_ready, once, wait};
use crate::admin::{ADMIN_DEPTH, Ticket};
use crate::function::Function;
use crate::rules::Namespace;

/// What goes on beside.
#[derive(Default)]
pub(super) struct Beside {
    event: Option<Ticket>,
    aborts: Vec<Ticket>,
    health_due: u64,
    strays_told: u64,
    namespaces_due: bool,
    /// The log that is read so that the drive tells the next event of its kind.
    log_due: Option<LogId>,
    /// Events that were not logged.
    untold: u64,
    /// Events are logged again from then on.
    tell_from: u64,
}

/// What is to be read from the drive.
#[derive(Default)]
struct Due {
    health: bool,
    namespaces: bool,
    log: Option<LogId>,
}

/// Between lines about events: a drive may have many.
const EVENT_LINES_MS: u64 = 1000;

/// Aborts at once, whatever the drive takes: other commands need slots too.
const ABORTS_MAX: usize = ADMIN_DEPTH as usize / 2;

/// Of a log that is read only for the drive to know it.
const LOG_BYTES: u32 = 64;
/// Time without trouble after which earlier resets do not count any more.
const CALM_MS: u64 = 60_000;

impl Life {
    /// Until there is trouble.
    pub(super) async fn serve(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        resets: &mut u32,
    ) -> Trouble {
        self.forget_queues(controller.queue_pairs);
        self.tell_fronts();
        self.absence.set(super::away::Absence::No);
        let begin = self.now.get();
        *self.beside.borrow_mut() = Some(Beside { health_due: begin, ..Beside::default() });
        loop {
            if let Err(trouble) = self.turn(function, controller).await {
                *self.beside.borrow_mut() = None;
                return trouble;
            }
            if !self.has_served {
                self.has_served = true;
                self.shared.tell_first(Ok(()));
            }
            if !std::mem::take(&mut self.told).is_empty() {
                tracing::info!(drive = %self.shared.address, "drive in service again");
            }
            if self.now.get().saturating_sub(begin) > CALM_MS {
                *resets = 0;
            }
            let is_replaying = self.lost_at.is_some();
            let is_aborting = self.beside.borrow().as_ref().is_some_and(|beside| !beside.aborts.is_empty());
            let is_asking = self.queue_slots.iter().any(QueueSlot::is_asked);
            self.is_busy.set(is_replaying || is_aborting || is_asking);
            wait(once()).await;
        }
    }

    /// While no core can give the drive a command: others may have written to it since it was with us, and
    /// one that was reset may have lost what was in its write cache.
    fn tell_fronts(&self) {
        if self.has_served {
            let fronts = self.shared.state().fronts();
            fronts.iter().for_each(|fronts| fronts.tell());
        }
    }

    async fn turn(&mut self, function: &Arc<dyn Function>, controller: &Controller) -> Result<(), Trouble> {
        if self.is_over() {
            return Err(Trouble::Closing);
        }
        look_ready(&controller.bar, function)?;
        self.settle(function, controller).await?;
        controller.admin.poll();
        self.attend(controller)?;
        let due = self.take_due(controller);
        if due.health {
            self.read_health(function, controller).await?;
        }
        if due.namespaces {
            self.read_namespaces(function, controller).await?;
        }
        if let Some(log) = due.log {
            let sqe = Sqe::get_log_page(0, log, NSID_ALL, LOG_BYTES, 0, false);
            match self.ask(function, controller, sqe, "Get Log Page").await {
                Ok(_) | Err(Trouble::Refused { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        Ok(())
    }

    /// What does not wait for an admin command that takes its time: Aborts, resets, events.
    pub(super) fn attend(&self, controller: &Controller) -> Result<(), Trouble> {
        let mut beside = self.beside.borrow_mut();
        let Some(beside) = beside.as_mut() else { return Ok(()) };
        self.abort(controller, beside)?;
        self.take_event(controller, beside);
        Ok(())
    }

    /// What is to be read now.
    fn take_due(&self, controller: &Controller) -> Due {
        let mut beside = self.beside.borrow_mut();
        let Some(beside) = beside.as_mut() else { return Due::default() };
        let strays = self.shared.strays.load(Ordering::Relaxed) + controller.admin.strays();
        if strays > beside.strays_told {
            beside.strays_told = strays;
            let drive = &self.shared.address;
            tracing::warn!(%drive, strays, "completions that named no command, ignored");
        }
        let health = self.now.get() >= beside.health_due;
        if health {
            let interval = self.shared.settings.health_interval.as_millis();
            beside.health_due = self.now.get().saturating_add(u64::try_from(interval).unwrap_or(u64::MAX));
        }
        Due { health, namespaces: std::mem::take(&mut beside.namespaces_due), log: beside.log_due.take() }
    }

    /// What cores asked for: Aborts, as many as the drive takes at once, and resets.
    fn abort(&self, controller: &Controller, beside: &mut Beside) -> Result<(), Trouble> {
        let admin = &controller.admin;
        beside.aborts.retain(|ticket| admin.take(*ticket).is_none());
        let aborts_max = usize::try_from(controller.id.aborts_max()).unwrap_or(ABORTS_MAX).min(ABORTS_MAX);
        // What a core asks for whose queue is not made yet is about the one before.
        for queue_slot in self.queue_slots.iter().filter(|queue_slot| queue_slot.has_queues()) {
            if queue_slot.is_sharer {
                // Its host asks for what is with the drive, by the names that the drive knows. A host that
                // hangs asks for nothing, and gives the drive nothing of its sharers: a reset ends that.
                if queue_slot.core_queue.take_reset() && queue_slot.is_host_hung() {
                    return Err(Trouble::Stuck);
                }
                queue_slot.core_queue.forget_asked();
                continue;
            }
            if queue_slot.core_queue.take_reset() {
                return Err(Trouble::Stuck);
            }
            while beside.aborts.len() < aborts_max {
                let Some(cid) = queue_slot.core_queue.next_abort() else { break };
                let (qid, core) = (queue_slot.qid(), queue_slot.core_queue.core);
                let drive = &self.shared.address;
                tracing::warn!(%drive, core, qid, cid, "command takes too long, aborted");
                let Some(ticket) = admin.start(Sqe::abort(0, qid, cid).with_prp(0, 0)) else { break };
                beside.aborts.push(ticket);
            }
        }
        Ok(())
    }

    /// One Asynchronous Event Request is always with the drive.
    fn take_event(&self, controller: &Controller, beside: &mut Beside) {
        let admin = &controller.admin;
        if let Some(ticket) = beside.event {
            let Some(completion) = admin.take(ticket) else { return };
            beside.event = None;
            if !completion.status.is_success() {
                // Not again: a drive that refuses it would be asked for ever.
                let drive = &self.shared.address;
                tracing::warn!(%drive, status = %completion.status, "no events from it");
                beside.event = Some(Ticket::NONE);
                return;
            }
            let [a, b, c, d, ..] = completion.result.to_le_bytes();
            let event = AsyncEvent::from_bits(u32::from_le_bytes([a, b, c, d]));
            let (kind, information, now) = (event.kind(), event.information(), self.now.get());
            if now >= beside.tell_from {
                let untold = std::mem::take(&mut beside.untold);
                let drive = &self.shared.address;
                tracing::info!(%drive, ?kind, information, untold, "event of the drive");
                beside.tell_from = now.saturating_add(EVENT_LINES_MS);
            } else {
                beside.untold += 1;
            }
            match event.log() {
                LogId::SMART => beside.health_due = 0,
                _ if kind == AsyncEventType::NOTICE => beside.namespaces_due = true,
                log => beside.log_due = Some(log),
            }
        }
        beside.event = admin.start(Sqe::async_event_request(0).with_prp(0, 0));
    }

    async fn read_health(
        &self,
        function: &Arc<dyn Function>,
        controller: &Controller,
    ) -> Result<(), Trouble> {
        let bytes = u32::try_from(size_of::<SmartLog>()).unwrap_or(512);
        let sqe = Sqe::get_log_page(0, LogId::SMART, NSID_ALL, bytes, 0, false);
        match self.ask(function, controller, sqe, "Get Log Page (SMART)").await {
            Ok(_) => {}
            Err(Trouble::Refused { .. }) => return Ok(()),
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

    /// Sizes may have changed; the changed-namespace log is read, so that the next change is told.
    async fn read_namespaces(
        &self,
        function: &Arc<dyn Function>,
        controller: &Controller,
    ) -> Result<(), Trouble> {
        let bytes = u32::try_from(size_of::<NamespaceList>()).unwrap_or(4096);
        let sqe = Sqe::get_log_page(0, LogId::CHANGED_NAMESPACES, NSID_ALL, bytes, 0, false);
        match self.ask(function, controller, sqe, "Get Log Page (changed namespaces)").await {
            Ok(_) | Err(Trouble::Refused { .. }) => {}
            Err(other) => return Err(other),
        }
        let known: Vec<_> =
            self.shared.state().namespaces.iter().map(|(known, _)| Arc::clone(known)).collect();
        for known in known {
            let mut id: Box<IdentifyNamespace> = Box::default();
            let sqe = Sqe::identify(0, Cns::NAMESPACE, known.nsid, 0);
            match self.ask(function, controller, sqe, "Identify Namespace").await {
                Ok(_) => controller.admin.data(id.as_mut_bytes()),
                Err(Trouble::Refused { .. }) => continue,
                Err(other) => return Err(other),
            }
            match Namespace::new(known.nsid, &id, &controller.id) {
                Ok(now) if known.is_same(&now) => {
                    let (from, to) = (known.blocks(), now.blocks());
                    if from != to {
                        let drive = &self.shared.address;
                        tracing::info!(%drive, nsid = known.nsid, from, to, "blocks changed");
                        known.set_blocks(to);
                    }
                }
                // Detached: the drive refuses what comes, by its number.
                _ if id.nsze.get() == 0 => {
                    tracing::error!(drive = %self.shared.address, nsid = known.nsid, "namespace is gone");
                }
                // The drive would take the blocks of a command for larger ones, and write behind its buffer.
                Ok(_) | Err(_) if self.is_used(known.nsid) => return Err(Trouble::another(&known)),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(())
    }
}
