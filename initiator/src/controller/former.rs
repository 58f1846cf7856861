//! [`Former`]: the end of what this host has left behind at a target that is a Spindle.
//!
//! A target may hold an association for alive that its host lost long ago, and still execute what had arrived
//! of it. A host that writes the same blocks anew on another association ends the former ones first, by this
//! command (`docs/extensions.md`).

use nvme_spec::Sqe;
use nvme_spec::status::Status;
use nvme_spec::vendor::FormerAssociations;
use spindle_transport::host::HostData;

use super::Controller;
use crate::qpair::{Completion, Failure};

/// What has become of the former associations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Former {
    /// They have ended, and nothing of them reaches a medium any more.
    Over {
        /// How many the target held for alive; `u16::MAX`: or more.
        ended: u16,
    },
    /// They have ended, but the target's disks still have commands of them, for longer than it waits; or the
    /// target did not say.
    MayLand,
    /// The target does not know the command.
    Unsupported,
}

/// `None`: it was lost with its association.
pub(super) fn of_completion(completion: &Completion) -> Option<Former> {
    match completion.result {
        Ok(()) => {
            let result = FormerAssociations::from_bits(completion.cqe.result_u32());
            Some(if result.may_land() { Former::MayLand } else { Former::Over { ended: result.ended() } })
        }
        Err(Failure::Status(status)) if status.code() == Status::INVALID_OPCODE => Some(Former::Unsupported),
        Err(Failure::Status(_)) => Some(Former::MayLand),
        Err(Failure::Lost) => None,
    }
}

impl Controller {
    /// The target knows the command that ends former associations.
    #[must_use]
    pub fn ends_former_associations(&self) -> bool {
        self.identify.spindle_features().end_former_associations()
    }

    /// Say that this association is of `token` (not 0: the same for as long as the host is the same program
    /// with the same purpose), and end all others of this host that have said the same. What came of it is a
    /// [`ControllerEvent::Former`](super::ControllerEvent::Former), within 40 s: when nothing of any former
    /// association is at a disk.
    pub fn begin_end_former_associations(&mut self, token: u64) {
        if !self.ends_former_associations() {
            self.former = Some(Former::Unsupported);
            return;
        }
        let sqe = Sqe::end_former_associations(0, token);
        // Not taken: the association is lost, and that is told.
        self.former_request = self.admin.submit(sqe, HostData::None).ok();
        self.admin.send();
    }
}
