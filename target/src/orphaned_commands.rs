//! `OrphanedCommands`: commands that disks still have of queue pairs that ended.
//!
//! ```text
//!   a queue pair ends ─> Disk::cancel_owner of each ─┬─ nothing is left ──────────> its identifier is free
//!                                                    └─ n commands: an orphan ─┬─> n came back ─> free
//!                                                                              └─> too long ────> free, told
//! ```
//!
//! One that took too long is a stray until it came back: the target does not wait for it, but a host that
//! asks (End Former Associations) is told.
//!
//! While its identifier is not free, the controller's reset and shutdown are not complete, and its host gets
//! no new controller: what is at a disk cannot be called back, and would land over what the host writes next.

use std::sync::Arc;

use spindle_reactor::clock::Nanos;
use spindle_reactor::slab::Slot;

use crate::shared::ControllerShared;

/// How long a host waits at most for what it left at the disks. Longer than a drive has for a command, for
/// its abort and for the reset that follows (30 s, 5 s, a few), so that it ends only where nothing does.
pub const ORPHAN_MAX: Nanos = Nanos::from_secs(40);

/// Commands of one queue pair that is gone.
pub(crate) struct Orphan {
    /// The queue pair, on this core.
    owner: Slot,
    /// Commands that disks have not given back.
    pub(crate) commands: usize,
    /// Its controller.
    pub(crate) controller: Arc<ControllerShared>,
    qid: u16,
    /// When the wait for it ends.
    until: Nanos,
    /// The wait has ended.
    is_stray: bool,
}

impl Orphan {
    /// Nothing of it is at a disk any more.
    fn end(&self) {
        if self.is_stray {
            self.controller.stray_ended();
        } else {
            self.controller.queue_left(self.qid);
        }
    }
}

/// Those of one core.
#[derive(Default)]
pub(crate) struct OrphanedCommands(Vec<Orphan>);

impl OrphanedCommands {
    /// True where every queue pair has ended with nothing left.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// I/O queue `qid` of a controller has ended, as `owner`, with so many commands at the disks.
    pub(crate) fn add(
        &mut self,
        owner: Slot,
        commands: usize,
        controller: Arc<ControllerShared>,
        qid: u16,
        now: Nanos,
    ) {
        controller.queue_leaves(qid);
        let until = now + ORPHAN_MAX;
        self.0.push(Orphan { owner, commands, controller, qid, until, is_stray: false });
    }

    /// A disk has given a command back. True: it was the last that `owner` is known to have.
    pub(crate) fn on_done(&mut self, owner: Slot) -> bool {
        let Some(orphan) = self.0.iter_mut().find(|orphan| orphan.owner == owner) else { return false };
        orphan.commands = orphan.commands.saturating_sub(1);
        orphan.commands == 0
    }

    /// So many are left of `owner`; it is over when that is none.
    pub(crate) fn set(&mut self, owner: Slot, commands: usize) {
        let Some(index) = self.0.iter().position(|orphan| orphan.owner == owner) else { return };
        if commands == 0 {
            self.0.swap_remove(index).end();
        } else if let Some(orphan) = self.0.get_mut(index) {
            orphan.commands = commands;
        }
    }

    /// One that has been waited for too long, and is a stray from now on.
    pub(crate) fn expired(&mut self, now: Nanos) -> Option<&Orphan> {
        let orphan = self.0.iter_mut().find(|orphan| now >= orphan.until && !orphan.is_stray)?;
        orphan.is_stray = true;
        orphan.controller.queue_strays(orphan.qid);
        Some(orphan)
    }
}
