//! The membership of a controller in the cluster of a disk (`docs/extensions.md`, "Coherent caches").

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use spindle_target_card::Membership;
use spindle_target_disk::{Disk, Sender};

use super::{ControllerShared, Registry, Wake};
use crate::snapshot::{Namespace, Subsystem};

/// The membership of a controller, and its disk. While this exists, no other disk gets the index of the
/// disk, and no other member the number: writes that the I/O queues have not submitted yet name both. It
/// goes when it has ended and the controller has no I/O queue.
pub(super) struct DiskMembership {
    membership: Arc<Membership>,
    source: Arc<dyn Disk>,
    has_ended: bool,
}

impl fmt::Debug for DiskMembership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DiskMembership({}, {})", self.source.name(), self.membership.number())
    }
}

fn member_word(disk: usize, number: u8) -> u64 {
    ((disk as u64) << 8 | u64::from(number)) + 1
}

impl Registry {
    /// Sets how a core is woken for an entry of a member and for its answer. Without it, both wait until the
    /// core wakes by itself. Called on reactor cores.
    pub fn set_wake(&self, wake: Wake) {
        let _ = self.wake.set(wake);
    }

    /// Returns what wakes a core.
    pub(crate) fn waker(&self) -> Wake {
        self.wake.get().cloned().unwrap_or_else(|| Arc::new(|_| ()))
    }
}

impl ControllerShared {
    /// Returns the sender of a write to the disk with this index.
    #[inline]
    pub(crate) fn sender(&self, disk: usize) -> Sender {
        if self.is_member() { self.member_sender(disk) } else { Sender::HOST }
    }

    #[cold]
    fn member_sender(&self, disk: usize) -> Sender {
        self.member(disk).map_or(Sender::HOST, Sender::of_member)
    }

    /// Returns the number of the member that the controller is for the disk with this index.
    #[inline]
    pub(crate) fn member(&self, disk: usize) -> Option<u8> {
        let word = self.member.load(Ordering::Relaxed).checked_sub(1)?;
        (word >> 8 == disk as u64).then_some(word.to_le_bytes()[0])
    }

    /// Returns true if the controller has a membership, also one that has ended.
    pub(crate) fn has_membership(&self) -> bool {
        self.membership.lock().is_some()
    }

    /// Returns true if the controller has joined, also if the member is over.
    #[inline]
    pub(crate) fn is_member(&self) -> bool {
        self.member.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn membership(&self) -> Option<Arc<Membership>> {
        self.membership.lock().as_ref().map(|it| Arc::clone(&it.membership))
    }

    pub(crate) fn set_membership(&self, membership: Membership, namespace: &Namespace) {
        let word = member_word(namespace.disk.0, membership.number());
        let (membership, source) = (Arc::new(membership), Arc::clone(&namespace.source));
        *self.membership.lock() = Some(DiskMembership { membership, source, has_ended: false });
        self.member.store(word, Ordering::Release);
    }

    /// The host has dropped all pages.
    pub(crate) fn leave(&self) {
        if let Some(membership) = self.membership() {
            membership.leave();
        }
        self.end_membership();
    }

    /// Ends the membership. Its member is over when its lease has ended.
    pub(crate) fn end_membership(&self) {
        self.member.store(0, Ordering::Release);
        if let Some(it) = &mut *self.membership.lock() {
            it.has_ended = true;
        }
        self.drop_membership();
    }

    /// Drops a membership that has ended, unless the controller has an I/O queue.
    pub(super) fn drop_membership(&self) {
        if self.taken_qids() == 0 {
            let ended = self.membership.lock().take_if(|it| it.has_ended);
            drop(ended);
        }
    }

    /// Ends the membership if its disk is no namespace of the subsystem any more.
    pub(crate) fn check_membership(&self, subsystem: &Subsystem) {
        let is_left = |it: &DiskMembership| {
            subsystem.active().any(|namespace| Arc::ptr_eq(&namespace.source, &it.source))
        };
        let is_over = self.membership.lock().as_ref().is_some_and(|it| !it.has_ended && !is_left(it));
        if is_over {
            self.end_membership();
        }
    }
}
