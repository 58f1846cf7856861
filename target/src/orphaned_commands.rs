//! `OrphanedCommands`: commands at disks whose I/O queue has ended.
//!
//! ```text
//!   a queue pair ends ─> DiskChannel::cancel_owner of each ─┬─ no commands left ──> its QID is free
//!                                                    └─ n commands: orphan ─┬─> n completed ─> free
//!                                                                           └─> ORPHAN_MAX ──> free, logged
//! ```
//!
//! After [`ORPHAN_MAX`] the orphan is expired: the target no longer waits for its commands, but End Former
//! Associations reports them to the host until they complete.
//!
//! While the QID is not free, the controller's reset and shutdown are not complete, and the host's next admin
//! Connect to the subsystem waits. The reason: a write that has begun at a disk cannot be cancelled, and may
//! overwrite later writes of the host.

use spindle_nvme_transport::ConnectionId;
use std::sync::Arc;

use spindle_reactor::clock::Nanos;

use crate::shared::ControllerShared;

/// Longest time for which a host waits for its orphaned commands. Longer than a drive's time-outs for a
/// command (30 s), its abort (5 s) and the reset that follows (a few seconds) together. So this time is
/// exceeded only if abort and reset have failed too.
pub const ORPHAN_MAX: Nanos = Nanos::from_secs(40);

/// Commands of one I/O queue that has ended.
pub(crate) struct Orphan {
    /// Slot that the queue pair had on this core.
    owner: ConnectionId,
    /// Number of commands that the disks have not completed: their last report less the completions since.
    pub(crate) commands: usize,
    pub(crate) controller: Arc<ControllerShared>,
    qid: u16,
    /// End of the queue pair plus [`ORPHAN_MAX`].
    deadline: Nanos,
    /// `deadline` has passed.
    is_expired: bool,
}

impl Orphan {
    /// Records in the controller that the disks have completed all commands of this orphan.
    fn complete(&self) {
        if self.is_expired {
            self.controller.expired_orphan_completed();
        } else {
            self.controller.orphan_completed(self.qid);
        }
    }
}

#[derive(Default)]
pub(crate) struct OrphanedCommands(Vec<Orphan>);

impl OrphanedCommands {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the orphan of I/O queue `qid` of a controller (queue pair `owner`), which has ended with
    /// `commands` commands at the disks. The QID stays in use.
    pub(crate) fn add(
        &mut self,
        owner: ConnectionId,
        commands: usize,
        controller: Arc<ControllerShared>,
        qid: u16,
        now: Nanos,
    ) {
        controller.queue_orphaned(qid);
        let deadline = now + ORPHAN_MAX;
        self.0.push(Orphan { owner, commands, controller, qid, deadline, is_expired: false });
    }

    /// Counts a command of `owner` that a disk has completed. True: it was an orphan's last known one.
    pub(crate) fn on_done(&mut self, owner: ConnectionId) -> bool {
        let Some(orphan) = self.0.iter_mut().find(|orphan| orphan.owner == owner) else { return false };
        orphan.commands = orphan.commands.saturating_sub(1);
        orphan.commands == 0
    }

    /// Sets the number of commands of `owner` that the disks have left. With 0 the orphan is over.
    pub(crate) fn set_commands(&mut self, owner: ConnectionId, commands: usize) {
        let Some(index) = self.0.iter().position(|orphan| orphan.owner == owner) else { return };
        if commands == 0 {
            self.0.swap_remove(index).complete();
        } else if let Some(orphan) = self.0.get_mut(index) {
            orphan.commands = commands;
        }
    }

    /// Marks the next orphan whose deadline has passed as expired, frees its QID, and returns the orphan;
    /// `None`: there is no more.
    pub(crate) fn next_expired(&mut self, now: Nanos) -> Option<&Orphan> {
        let orphan = self.0.iter_mut().find(|orphan| now >= orphan.deadline && !orphan.is_expired)?;
        orphan.is_expired = true;
        orphan.controller.orphan_expired(orphan.qid);
        Some(orphan)
    }
}
