//! Commands of coherent caches: Register, which is part of Read and Register, and Next.
//!
//! ```text
//! Next ─> acknowledges entries ─> waits ── the next turn: renews the lease ── entries, or NEXT_WAIT ──>
//! reply
//! ```
//! The reply to a Next is sent in a later turn than that of its arrival. The time of that turn is later
//! than the arrival, so the lease that the target counts ends later than that of the member.

use std::sync::Arc;

use nvme_spec::Sqe;
use nvme_spec::cluster::{NEXT, NEXT_OUTSTANDING_MAX, NextData, READ_AND_REGISTER, REGISTER};
use nvme_spec::status::Status;
use spindle_nvme_transport::{RequestId, Transport};
use spindle_reactor::clock::Nanos;
use spindle_target_card::{Membership, NEXT_WAIT, UNACKNOWLEDGED_MAX};
use zerocopy::IntoBytes;

use super::request::{IoCommand, RequestState};
use super::{IoRole, Qpair, Role};
use crate::controller::NEXT_DATA_BYTES;
use crate::env::Env;
use crate::refusal::{Refusal, field};

/// After a check that is later than this, a member has until the next check to acknowledge.
const LATE_MAX: Nanos = Nanos(UNACKNOWLEDGED_MAX.0 / 2);

/// A Next that waits for entries.
pub(super) struct PendingNext {
    pub(super) slot: RequestId,
    /// Time of the turn in which it arrived.
    arrived: Nanos,
    is_renewed: bool,
    membership: Arc<Membership>,
}

impl PendingNext {
    /// It may be replied to, and is due.
    fn is_due(&self, now: Nanos) -> bool {
        self.is_renewed && (self.membership.is_answer_due() || now >= self.arrived + NEXT_WAIT)
    }
}

/// Checks that the controller of a Register or Read and Register has joined. Other commands pass.
///
/// # Errors
/// Command Sequence Error; Invalid Opcode where no disk of the subsystem has members.
pub(super) fn check_member(role: &IoRole, sqe: &Sqe) -> Result<(), Refusal> {
    if ![REGISTER, READ_AND_REGISTER].contains(&sqe.io_opcode()) || role.shared.is_member() {
        return Ok(());
    }
    let has_clusters = role.subsystem.has_clusters();
    let status = if has_clusters { Status::COMMAND_SEQUENCE_ERROR } else { Status::INVALID_OPCODE };
    Err(Refusal::at(status, field::OPCODE))
}

/// Registers the range of a command for its member, and sets [`IoCommand::keeps`]. Before the disk reads.
///
/// # Errors
/// Command Sequence Error: the controller is a member of another disk.
#[cold]
pub(super) fn register(role: &IoRole, env: &mut Env, io: &mut IoCommand) -> Result<(), Refusal> {
    let member = role.shared.member(io.disk);
    let member = member.ok_or(Refusal::at(Status::COMMAND_SEQUENCE_ERROR, field::OPCODE))?;
    io.keeps = env.disk(io.disk).is_some_and(|disk| disk.register(io.range, member));
    Ok(())
}

impl<T: Transport> Qpair<T> {
    /// Returns true for a Next on an admin queue: writes in flight may wait for its acknowledgement, also
    /// while the core drains.
    #[cold]
    pub(super) fn is_next(&self, sqe: &Sqe) -> bool {
        matches!(self.role, Role::Admin(_)) && sqe.admin_opcode() == NEXT
    }

    /// Handles the acknowledgement of a Next, and lets it wait for entries.
    pub(super) fn begin_next(&mut self, env: &mut Env, slot: RequestId, acknowledged: u64) {
        let Role::Admin(controller) = &self.role else { return };
        let sequence_error = Refusal::at(Status::COMMAND_SEQUENCE_ERROR, field::OPCODE);
        let Some(membership) = controller.shared.membership() else {
            return self.refuse(env, slot, sequence_error);
        };
        if self.nexts.len() == NEXT_OUTSTANDING_MAX || membership.is_over(env.now) {
            return self.refuse(env, slot, sequence_error);
        }
        if !membership.acknowledge(acknowledged) {
            return self.refuse(env, slot, Refusal::invalid(field::CDW10));
        }
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = RequestState::Next;
        self.nexts.push(PendingNext { slot, arrived: env.now, is_renewed: false, membership });
        env.next_queues.retain(|id| *id != env.current);
        env.next_queues.push(env.current);
    }

    /// Returns true if [`Qpair::step_nexts`] has something to do.
    pub(crate) fn has_due_next(&self, env: &Env) -> bool {
        let Role::Admin(controller) = &self.role else { return false };
        let is_new = |next: &PendingNext| !next.is_renewed && env.now > next.arrived;
        self.nexts.iter().any(|next| is_new(next) || next.is_due(env.now)) || !controller.shared.is_member()
    }

    /// Returns true while a Next waits.
    pub(crate) fn has_nexts(&self) -> bool {
        !self.nexts.is_empty()
    }

    /// Renews the lease for each Next that has arrived in a former turn, and replies to those that are due.
    pub(crate) fn step_nexts(&mut self, env: &mut Env) {
        let Role::Admin(controller) = &self.role else { return };
        if !controller.shared.is_member() {
            return self.refuse_nexts(env);
        }
        for next in self.nexts.iter_mut().filter(|next| env.now > next.arrived && !next.is_renewed) {
            next.is_renewed = true;
            if !next.membership.renew(env.now) {
                return self.refuse_nexts(env);
            }
        }
        let holder = self.admin_holder(env);
        while self.nexts.first().is_some_and(|next| next.is_due(env.now)) {
            let Some(mut buf) = env.admin_share(holder, NEXT_DATA_BYTES).take_contiguous(NEXT_DATA_BYTES)
            else {
                return; // the next turn tries again
            };
            let PendingNext { slot, membership, .. } = self.nexts.remove(0);
            let mut data = NextData::default();
            membership.take(&mut data);
            buf.copy_in(0, data.as_bytes());
            self.finish(slot, Status::SUCCESS, 0, Some(buf));
        }
    }

    /// The member is over, or has left.
    fn refuse_nexts(&mut self, env: &mut Env) {
        for next in std::mem::take(&mut self.nexts) {
            let refusal = Refusal::at(Status::COMMAND_SEQUENCE_ERROR, field::OPCODE);
            self.refuse(env, next.slot, refusal);
        }
    }

    /// Drops the waiting Next commands without a reply, at a reset or a shutdown.
    pub(super) fn drop_nexts(&mut self) {
        for next in std::mem::take(&mut self.nexts) {
            self.requests.remove(next.slot);
            self.transport.end_without_reply(next.slot);
        }
    }

    /// Ends the controller of a member that does not acknowledge. Time in which this core did not run does
    /// not count.
    pub(super) fn check_silence(&mut self, env: &mut Env) {
        let Role::Admin(controller) = &self.role else { return };
        if env.late >= LATE_MAX {
            return;
        }
        let is_silent = |it: Arc<Membership>| it.is_silent(env.now);
        if controller.shared.is_member() && controller.shared.membership().is_some_and(is_silent) {
            self.host_error(env, "a member of a cluster does not acknowledge writes");
        }
    }
}
