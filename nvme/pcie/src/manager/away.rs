//! Absence of the drive: requests wait for `return_timeout`, then fail.

use std::sync::Arc;
use std::time::Duration;

use super::queues::QueueSlot;
use super::{ManagerError, ManagerTask, check_status, wait};
use crate::bar::Bar;
use crate::core_queue::{CoreQueue, QueueCommand};
use crate::function::Function;

/// Time after which a core without an answer is logged. A starting core's memory may take seconds.
const ANSWER_MS: u64 = 30_000;
/// Wait for a core during a reset. A core that hangs for longer is left behind: its commands from before the
/// reset fail, unless it stops before the controller is off.
pub(super) const STOP_MS: u64 = 5_000;
/// Wait for a link that is down to return, and for the kernel to report a removal.
const REMOVAL_WAIT: Duration = Duration::from_secs(2);

/// What happens to requests of cores without a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Absence {
    /// They wait for their queues, which are being made.
    No,
    /// They wait until this manager time, in milliseconds.
    Waiting(u64),
    /// They fail, with the error of this queue command.
    Over(QueueCommand),
}

impl ManagerTask {
    /// The queue command for all cores when the function is closed because of `end`. Also sets `absence`.
    pub(super) fn command_for(&mut self, end: &ManagerError) -> QueueCommand {
        let is_another = matches!(
            end,
            ManagerError::Another { .. } | ManagerError::Unfit { .. } | ManagerError::Namespace(_)
        );
        let queue_command = if is_another {
            QueueCommand::Gone
        } else if matches!(end, ManagerError::Removal) {
            // The removal was requested, so requests do not wait for the drive.
            QueueCommand::Absent
        } else {
            self.begin_absence();
            match self.absence.get() {
                Absence::Waiting(_) | Absence::No => return QueueCommand::Rewind,
                Absence::Over(queue_command) => queue_command,
            }
        };
        self.absence.set(Absence::Over(queue_command));
        queue_command
    }

    /// Starts the wait of requests, unless `return_timeout` has passed since the drive was lost.
    fn begin_absence(&mut self) {
        let since = *self.lost_at.get_or_insert(self.now.get());
        let limit = u64::try_from(self.shared.settings.return_timeout.as_millis()).unwrap_or(u64::MAX);
        let until = since.saturating_add(limit);
        // After another failed attempt to open: do not log the time-out again.
        let is_known = matches!(self.absence.get(), Absence::Over(_)) && self.now.get() >= until;
        self.absence.set(if is_known {
            Absence::Over(QueueCommand::Absent)
        } else {
            Absence::Waiting(until)
        });
        self.end_absence();
    }

    /// Once the wait is over, fails the requests of cores without a queue, also later ones.
    pub(super) fn end_absence(&self) {
        if let Absence::Waiting(until) = self.absence.get()
            && self.now.get() >= until
        {
            tracing::error!(drive = %self.shared.address, "drive is away for too long: requests fail");
            self.absence.set(Absence::Over(QueueCommand::Absent));
        }
        let Absence::Over(queue_command) = self.absence.get() else { return };
        for core_queue in &self.shared.state().core_queues {
            if matches!(core_queue.word().queue_command(), QueueCommand::Wait | QueueCommand::Rewind) {
                core_queue.set_queue_command(queue_command);
            }
        }
    }

    /// True once the drive is closing and every core has closed its handle, which it does when nothing is in
    /// flight. A core that hangs delays this by at most `command_timeout` + `abort_timeout` + `STOP_MS`.
    pub(super) fn may_close(&self) -> bool {
        if !self.shared.is_closing() {
            return false;
        }
        let now = self.now.get();
        let since = self.closing_since.get().unwrap_or(now);
        self.closing_since.set(Some(since));
        let settings = &self.shared.settings;
        let limit = settings.command_timeout.saturating_add(settings.abort_timeout);
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX).saturating_add(STOP_MS);
        now.saturating_sub(since) >= limit_ms
            || self.shared.state().core_queues.iter().all(|core_queue| core_queue.is_closed())
    }

    /// Makes cores queue their commands for another submission and wait. Called only while the drive reaches
    /// no memory.
    pub(super) async fn rewind_all(&mut self, may_lose_cache: bool) {
        self.may_lose_cache(may_lose_cache);
        self.command_all(QueueCommand::Rewind);
        self.begin_absence();
        self.wait_answered_or_leave(QueueSlot::leave_behind_absent).await;
    }

    /// Releases queues and registers on every core, so that the function closes. With [`QueueCommand::Gone`]
    /// or [`QueueCommand::Absent`] requests fail, with [`QueueCommand::Rewind`] they wait.
    pub(super) async fn release_function(&mut self, queue_command: QueueCommand) {
        let (prepared, fronts) = {
            let mut state = self.shared.state();
            state.function = None;
            (std::mem::take(&mut state.prepared), state.fronts())
        };
        drop(prepared);
        // The controller is off or cut off, and every core has stopped or was left behind. If the controller
        // could be neither disabled nor cut off, unmapping here ends its access before buffers are reused,
        // except to memory that other drives of the container have mapped.
        self.queue_slots.iter_mut().for_each(QueueSlot::unmap);
        self.shared.drop_released();
        fronts.iter().flat_map(|fronts| fronts.attached()).for_each(|attached| attached.unmap());
        drop(fronts);
        self.add_slots(u32::MAX);
        self.command_all(queue_command);
        // Including a core that was left behind: it keeps the registers mapped, and with them the function
        // open.
        self.wait_all_answered().await;
        for queue_slot in &mut self.queue_slots {
            queue_slot.release();
        }
        self.drop_closed();
    }

    /// Only while the drive reaches no memory: these commands make cores release their buffers.
    fn command_all(&mut self, queue_command: QueueCommand) {
        for queue_slot in &mut self.queue_slots {
            queue_slot.take_late_stop();
            let now = queue_slot.core_queue.word().queue_command();
            queue_slot.core_queue.put_setup(None);
            drop(queue_slot.core_queue.take_sharers());
            let queue_command = match (queue_command, now) {
                // A core whose requests fail keeps its command. Publishing it again reports a cache loss.
                (QueueCommand::Rewind, QueueCommand::Gone | QueueCommand::Absent) => now,
                // A core that was left behind must not repeat commands: other cores do not wait for it.
                (QueueCommand::Rewind, _) if queue_slot.is_left_behind => QueueCommand::Absent,
                _ => queue_command,
            };
            queue_slot.core_queue.set_queue_command(queue_command);
        }
    }

    /// Stops every core's access to its queue, except for cores that hang.
    pub(super) async fn stop_all(&mut self) {
        for queue_slot in self.queue_slots.iter().filter(|queue_slot| queue_slot.is_live()) {
            queue_slot.core_queue.set_queue_command(QueueCommand::Stop);
        }
        self.wait_answered_or_leave(QueueSlot::leave_behind).await;
    }

    /// Waits until every core has applied its command. Leaves a core behind after `STOP_MS`.
    async fn wait_answered_or_leave(&mut self, leave_behind: fn(&mut QueueSlot)) {
        let until = self.now.get().saturating_add(STOP_MS);
        for index in 0..self.queue_slots.len() {
            let Some(queue_slot) =
                self.queue_slots.get(index).filter(|queue_slot| !queue_slot.is_left_behind)
            else {
                continue;
            };
            let core_queue = Arc::clone(&queue_slot.core_queue);
            wait(|| (core_queue.has_answered() || self.now.get() >= until).then_some(())).await;
            if !core_queue.has_answered()
                && let Some(queue_slot) = self.queue_slots.get_mut(index)
            {
                leave_behind(queue_slot);
                self.log_left_behind(&core_queue);
            }
        }
    }

    pub(super) fn log_left_behind(&self, core_queue: &CoreQueue) {
        let (drive, core) = (&self.shared.address, core_queue.core);
        tracing::error!(%drive, core, "core does not answer: the others go on without it, and what it had \
            with the drive fails when it does");
    }

    /// Waits without a limit until every core has applied its command. Requests may time out meanwhile.
    async fn wait_all_answered(&self) {
        let mut log_from = self.answer_limit();
        for queue_slot in &self.queue_slots {
            let core_queue = Arc::clone(&queue_slot.core_queue);
            wait(|| {
                if core_queue.has_answered() {
                    return Some(());
                }
                self.end_absence();
                self.log_hung(&core_queue, &mut log_from);
                None
            })
            .await;
        }
    }

    /// Manager time in milliseconds from which a core without an answer is logged.
    pub(super) fn answer_limit(&self) -> Option<u64> {
        Some(self.now.get().saturating_add(ANSWER_MS))
    }

    /// Logs a core without an answer once.
    pub(super) fn log_hung(&self, core_queue: &CoreQueue, log_from: &mut Option<u64>) {
        if log_from.is_some_and(|from| self.now.get() >= from) {
            *log_from = None;
            let (drive, core, order) =
                (&self.shared.address, core_queue.core, core_queue.word().queue_command());
            tracing::error!(%drive, core, ?order, "core does not answer");
        }
    }

    /// Waits for registers that read as all ones to return, as after a link that was down, then resets the
    /// function. False if they do not return, the removal was asked for, or the reset failed. A function that
    /// lost its configuration reads as all ones until it is opened again.
    pub(super) async fn recover_link(&self, bar: &Bar, function: &Arc<dyn Function>) -> bool {
        let is_back = self.within(REMOVAL_WAIT, || match check_status(bar, function) {
            Err(ManagerError::Gone) => function.is_removal_asked().then_some(false),
            Err(ManagerError::Removal) => Some(false),
            Ok(()) | Err(_) => Some(true),
        });
        if is_back.await != Some(true) {
            return false;
        }
        match function.reset() {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(drive = %self.shared.address, %error, "function reset failed");
                false
            }
        }
    }

    /// Waits up to `REMOVAL_WAIT` for the kernel's removal request: before it, closing a missing drive is
    /// slow.
    pub(super) async fn wait_removal_request(&self, function: &Arc<dyn Function>) {
        self.within(REMOVAL_WAIT, || function.is_removal_asked().then_some(())).await;
    }
}
