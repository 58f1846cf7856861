//! While cores cannot work with the drive: requests wait for it, and fail when it takes too long.

use std::sync::Arc;
use std::time::Duration;

use super::queues::QueueSlot;
use super::{Life, Trouble, look, wait};
use crate::bar::Bar;
use crate::core_queue::{CoreQueue, QueueCommand};
use crate::function::Function;

/// A core that has not answered for so long is told of. When it starts, its memory may take seconds.
const ANSWER_MS: u64 = 30_000;
/// How long a drive that is reset waits for a core. One that hangs for longer is left behind: the others go
/// on, and what it had with the drive is not repeated.
pub(super) const STOP_MS: u64 = 5_000;
/// How long a drive is looked for behind registers that read as nothing, and how long the kernel takes to
/// hear of one that was pulled.
const GONE_KNOWN: Duration = Duration::from_secs(2);

/// What cores without a queue are to be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Absence {
    /// Nothing: their queues are being made.
    No,
    /// Requests wait, until then.
    Waiting(u64),
    /// Requests fail, as this order says.
    Over(QueueCommand),
}

impl Life {
    /// What cores are told when the function is closed.
    pub(super) fn order_for(&mut self, end: &Trouble) -> QueueCommand {
        let is_another =
            matches!(end, Trouble::Another { .. } | Trouble::Unfit { .. } | Trouble::Namespace(_));
        let order = if is_another {
            QueueCommand::Gone
        } else if matches!(end, Trouble::Removal) {
            // It was asked for, by somebody who means it.
            QueueCommand::Absent
        } else {
            self.begin_absence();
            match self.absence.get() {
                Absence::Waiting(_) | Absence::No => return QueueCommand::Rewind,
                Absence::Over(order) => order,
            }
        };
        self.absence.set(Absence::Over(order));
        order
    }

    /// Requests wait from now on, unless they have waited for long enough.
    fn begin_absence(&mut self) {
        let since = *self.lost_at.get_or_insert(self.now.get());
        let limit = u64::try_from(self.shared.settings.return_timeout.as_millis()).unwrap_or(u64::MAX);
        let until = since.saturating_add(limit);
        // Tried once more, and in vain: that it is over was said.
        let is_known = matches!(self.absence.get(), Absence::Over(_)) && self.now.get() >= until;
        self.absence.set(if is_known {
            Absence::Over(QueueCommand::Absent)
        } else {
            Absence::Waiting(until)
        });
        self.end_absence();
    }

    /// Requests that have waited for too long fail, and those that come: of cores that have no queue now.
    pub(super) fn end_absence(&self) {
        if let Absence::Waiting(until) = self.absence.get()
            && self.now.get() >= until
        {
            tracing::error!(drive = %self.shared.address, "drive is away for too long: requests fail");
            self.absence.set(Absence::Over(QueueCommand::Absent));
        }
        let Absence::Over(order) = self.absence.get() else { return };
        for core_queue in &self.shared.state().core_queues {
            if matches!(core_queue.word().order(), QueueCommand::Wait | QueueCommand::Rewind) {
                core_queue.order(order);
            }
        }
    }

    /// The drive is not needed any more, and every core has closed its handle, which it does once it has
    /// nothing in flight. A core that hangs does not keep the drive: the limit is what a command may take,
    /// its Abort and a core that is to stop.
    pub(super) fn is_over(&self) -> bool {
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

    /// The drive reaches no memory: cores take back what they have, and wait for it.
    pub(super) async fn hold_all(&mut self, may_lose_cache: bool) {
        self.may_lose_cache(may_lose_cache);
        self.tell_all(QueueCommand::Rewind);
        self.begin_absence();
        self.answered_or_left(QueueSlot::leave_absent).await;
    }

    /// The same, and every core lets go of the registers and its queue; then the function is closed. With
    /// [`QueueCommand::Gone`] or [`QueueCommand::Absent`] requests fail instead.
    pub(super) async fn let_go(&mut self, order: QueueCommand) {
        let (prepared, fronts) = {
            let mut state = self.shared.state();
            state.function = None;
            (std::mem::take(&mut state.prepared), state.fronts())
        };
        drop(prepared);
        // The drive is off or cut off, and every core has stopped. Should the system have failed at both, the
        // drive loses the cores' memory here, before the buffers in it are given back.
        self.queue_slots.iter_mut().for_each(QueueSlot::unmap);
        self.shared.let_released_go();
        fronts.iter().flat_map(|fronts| fronts.attached()).for_each(|attached| attached.unmap());
        drop(fronts);
        self.adopt(u32::MAX);
        self.tell_all(order);
        // Also one that was left behind: it has the registers, and with them the function.
        self.all_answered().await;
        for queue_slot in &mut self.queue_slots {
            queue_slot.let_go();
        }
        self.drop_closed();
    }

    /// Only while the drive reaches no memory: each of these orders makes cores give buffers back.
    fn tell_all(&mut self, order: QueueCommand) {
        for queue_slot in &mut self.queue_slots {
            queue_slot.take_late_stop();
            let now = queue_slot.core_queue.word().order();
            queue_slot.core_queue.put_setup(None);
            drop(queue_slot.core_queue.take_sharers());
            let order = match (order, now) {
                // One whose requests fail already is to hear of what was lost since, and no more.
                (QueueCommand::Rewind, QueueCommand::Gone | QueueCommand::Absent) => now,
                // One that was left behind repeats nothing: the others do not wait for it.
                (QueueCommand::Rewind, _) if queue_slot.is_left => QueueCommand::Absent,
                _ => order,
            };
            queue_slot.core_queue.order(order);
        }
    }

    /// Nothing of a core touches its queue any more, but of one that hangs.
    pub(super) async fn stop_all(&mut self) {
        for queue_slot in self.queue_slots.iter().filter(|queue_slot| queue_slot.is_live()) {
            queue_slot.core_queue.order(QueueCommand::Stop);
        }
        self.answered_or_left(QueueSlot::leave).await;
    }

    /// Wait until every core has done it; one that does not for too long is left behind.
    async fn answered_or_left(&mut self, leave: fn(&mut QueueSlot)) {
        let until = self.now.get().saturating_add(STOP_MS);
        for index in 0..self.queue_slots.len() {
            let Some(queue_slot) = self.queue_slots.get(index).filter(|queue_slot| !queue_slot.is_left)
            else {
                continue;
            };
            let core_queue = Arc::clone(&queue_slot.core_queue);
            wait(|| (core_queue.has_answered() || self.now.get() >= until).then_some(())).await;
            if !core_queue.has_answered()
                && let Some(queue_slot) = self.queue_slots.get_mut(index)
            {
                leave(queue_slot);
                self.tell_left(&core_queue);
            }
        }
    }

    /// A core was left behind.
    pub(super) fn tell_left(&self, core_queue: &CoreQueue) {
        let (drive, core) = (&self.shared.address, core_queue.core);
        tracing::error!(%drive, core, "core does not answer: the others go on without it, and what it had \
            with the drive fails when it does");
    }

    /// Wait until every core has done it. Meanwhile requests of the others may have waited for too long.
    async fn all_answered(&self) {
        let mut tell_from = self.answer_limit();
        for queue_slot in &self.queue_slots {
            let core_queue = Arc::clone(&queue_slot.core_queue);
            wait(|| {
                if core_queue.has_answered() {
                    return Some(());
                }
                self.end_absence();
                self.tell_hung(&core_queue, &mut tell_from);
                None
            })
            .await;
        }
    }

    /// From when on a core that does not answer is told of.
    pub(super) fn answer_limit(&self) -> Option<u64> {
        Some(self.now.get().saturating_add(ANSWER_MS))
    }

    /// One line about a core that does not answer.
    pub(super) fn tell_hung(&self, core_queue: &CoreQueue, tell_from: &mut Option<u64>) {
        if tell_from.is_some_and(|from| self.now.get() >= from) {
            *tell_from = None;
            let (drive, core, order) = (&self.shared.address, core_queue.core, core_queue.word().order());
            tracing::error!(%drive, core, ?order, "core does not answer");
        }
    }

    /// Registers that read as nothing read as something again, of a function that could be reset: after a
    /// link that was down. One whose configuration was lost with that reads as nothing until it is opened
    /// again.
    pub(super) async fn comes_back(&self, bar: &Bar, function: &Arc<dyn Function>) -> bool {
        let seen = self.within(GONE_KNOWN, || match look(bar, function) {
            Err(Trouble::Gone) => function.is_removal_asked().then_some(false),
            Err(Trouble::Removal) => Some(false),
            Ok(()) | Err(_) => Some(true),
        });
        if seen.await != Some(true) {
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

    /// A kernel that does not know yet that the drive is gone waits for it when it is closed.
    pub(super) async fn removal_known(&self, function: &Arc<dyn Function>) {
        self.within(GONE_KNOWN, || function.is_removal_asked().then_some(())).await;
    }
}
