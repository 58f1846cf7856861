//! Absence of the drive: stops cores, closes the function, and fails requests after `return_timeout`.

use std::sync::Arc;
use std::time::Duration;

use super::queues::QueueSlot;
use super::{ManagerError, ManagerTask, check_status, wait};
use crate::bar::Bar;
use crate::core_queue::{CoreQueue, QueueCommand};
use crate::function::Function;

/// Time in milliseconds after which a core without an answer is logged. A starting core may take seconds.
const ANSWER_MS: u64 = 30_000;
/// Time in milliseconds that a reset waits for a core. A core that hangs for longer is left behind: its
/// commands from before the reset fail, unless the core applies `Stop` before the controller is off.
pub(super) const STOP_MS: u64 = 5_000;
/// Time limit for a link that is down to return, and for the kernel to report a removal.
const REMOVAL_WAIT: Duration = Duration::from_secs(2);

/// State of requests of cores without a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Absence {
    /// Requests wait for the queues, which are being made.
    No,
    /// Requests wait until this manager time, in milliseconds.
    Waiting(u64),
    /// Requests fail, with the error of this queue command.
    Over(QueueCommand),
}

impl ManagerTask {
    /// Returns all cores' queue command when the function is closed because of `end`. Sets `absence`.
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

    /// Starts the wait of requests, which lasts until `return_timeout` after the loss of the drive. Fails the
    /// requests at once if that time has passed.
    fn begin_absence(&mut self) {
        let since = *self.lost_at.get_or_insert(self.now.get());
        let limit = u64::try_from(self.shared.settings.return_timeout.as_millis()).unwrap_or(u64::MAX);
        let until = since.saturating_add(limit);
        // After another failed attempt to open, the time-out is not logged again.
        let is_known = matches!(self.absence.get(), Absence::Over(_)) && self.now.get() >= until;
        self.absence.set(if is_known {
            Absence::Over(QueueCommand::Absent)
        } else {
            Absence::Waiting(until)
        });
        self.end_absence();
    }

    /// Fails the requests of cores without a queue once the wait is over, and also their later requests.
    pub(super) fn end_absence(&self) {
        if let Absence::Waiting(until) = self.absence.get()
            && self.now.get() >= until
        {
            tracing::error!(drive = %self.shared.address, "drive absent for too long: requests fail");
            self.absence.set(Absence::Over(QueueCommand::Absent));
        }
        let Absence::Over(queue_command) = self.absence.get() else { return };
        for core_queue in &self.shared.state().core_queues {
            if matches!(core_queue.word().queue_command(), QueueCommand::Wait | QueueCommand::Rewind) {
                core_queue.set_queue_command(queue_command);
            }
        }
    }

    /// Returns true once the drive is closing and every core has closed its handle, which happens when
    /// nothing is in flight. If a core hangs, returns true `command_timeout` + `abort_timeout` + `STOP_MS`
    /// after closing began.
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

    /// Sends `Rewind`, so that cores queue their commands for another submission, and starts the wait of
    /// requests. Leaves behind cores that do not answer. Called only while the drive cannot access memory.
    pub(super) async fn rewind_all(&mut self, may_lose_cache: bool) {
        self.may_lose_cache(may_lose_cache);
        self.command_all(QueueCommand::Rewind);
        self.begin_absence();
        self.wait_answered_or_leave(QueueSlot::leave_behind_absent).await;
    }

    /// Releases queues and registers on every core, so that the function closes. With [`QueueCommand::Gone`]
    /// or [`QueueCommand::Absent`] requests fail; with [`QueueCommand::Rewind`] requests wait.
    pub(super) async fn release_function(&mut self, queue_command: QueueCommand) {
        let (prepared, fronts) = {
            let mut state = self.shared.state();
            state.function = None;
            (std::mem::take(&mut state.prepared), state.fronts())
        };
        drop(prepared);
        // The controller is disabled or bus mastering is off, and every core has stopped or was left behind.
        // If neither step succeeded, unmapping here ends the controller's access before buffers are reused.
        // Memory that other drives of the container have mapped stays accessible.
        self.queue_slots.iter_mut().for_each(QueueSlot::unmap);
        self.shared.drop_released();
        fronts.iter().flat_map(|fronts| fronts.attached()).for_each(|attached| attached.unmap());
        drop(fronts);
        self.add_slots(u32::MAX);
        self.command_all(queue_command);
        // Waits also for a core that was left behind: its queue keeps registers and function open.
        self.wait_all_answered().await;
        for queue_slot in &mut self.queue_slots {
            queue_slot.release();
        }
        self.drop_closed();
    }

    /// Sends a queue command to all cores, and withdraws offered queues and assigned sharers. Called only
    /// while the drive cannot access memory, because cores may then release their buffers.
    fn command_all(&mut self, queue_command: QueueCommand) {
        for queue_slot in &mut self.queue_slots {
            queue_slot.take_late_stop();
            let now = queue_slot.core_queue.word().queue_command();
            queue_slot.core_queue.put_setup(None);
            drop(queue_slot.core_queue.take_sharers());
            let queue_command = match (queue_command, now) {
                // A core whose requests fail keeps its command. The same one again would report a cache loss.
                (QueueCommand::Rewind, QueueCommand::Gone | QueueCommand::Absent) => now,
                // A core that was left behind must not repeat commands: other cores do not wait for it.
                (QueueCommand::Rewind, _) if queue_slot.is_left_behind => QueueCommand::Absent,
                _ => queue_command,
            };
            queue_slot.core_queue.set_queue_command(queue_command);
        }
    }

    /// Stops every core's access to its queue. Leaves behind cores that hang.
    pub(super) async fn stop_all(&mut self) {
        for queue_slot in self.queue_slots.iter().filter(|queue_slot| queue_slot.is_live()) {
            queue_slot.core_queue.set_queue_command(QueueCommand::Stop);
        }
        self.wait_answered_or_leave(QueueSlot::leave_behind).await;
    }

    /// Waits until every core has applied its command. Calls `leave_behind` for a core without an answer
    /// after `STOP_MS`.
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
        tracing::error!(%drive, core, "core does not respond: other cores continue, its own requests fail \
            once it responds");
    }

    /// Waits without a time limit until every core has applied its command. Fails waiting requests once
    /// `return_timeout` is over.
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

    /// Returns the manager time in milliseconds from which a core without an answer is logged.
    pub(super) fn answer_limit(&self) -> Option<u64> {
        Some(self.now.get().saturating_add(ANSWER_MS))
    }

    /// Logs a core without an answer once the manager time reaches `log_from`, and clears `log_from`.
    pub(super) fn log_hung(&self, core_queue: &CoreQueue, log_from: &mut Option<u64>) {
        if log_from.is_some_and(|from| self.now.get() >= from) {
            *log_from = None;
            let (drive, core, order) =
                (&self.shared.address, core_queue.core, core_queue.word().queue_command());
            tracing::error!(%drive, core, ?order, "core does not respond");
        }
    }

    /// Waits up to `REMOVAL_WAIT` for absent registers to return, as after a link that was down, then resets
    /// the function. Returns false if the registers do not return, the removal was requested, or the reset
    /// failed. A function that lost its configuration reads as all ones until it is opened again.
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

    /// Waits up to `REMOVAL_WAIT` for the kernel's removal request. Closing a missing drive earlier is slow.
    pub(super) async fn wait_removal_request(&self, function: &Arc<dyn Function>) {
        self.within(REMOVAL_WAIT, || function.is_removal_asked().then_some(())).await;
    }
}
