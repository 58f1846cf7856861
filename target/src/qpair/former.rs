//! End Former Associations (vendor specific): ends the host's former controllers and waits for their
//! commands.
//!
//! ```text
//!   command ─> Registry::end_former: marks the former controllers ─> CloseController to their cores
//!     ─> ConnectBlocked ── Registry::former_state, now and at each timer period ──> nothing is left: reply
//!                  CloseController ─> admin queue closed ─> CloseQueues ─> I/O queues closed ─> orphans
//! ```
//! From the first step on no I/O queue of a former controller takes a command. Commands that a queue has
//! taken and not begun are dropped when its core closes it. The bit of the QID stays set in the former
//! controller until its core has closed the I/O queue and no disk has commands of it, so the messages need no
//! answers.

use spindle_transport::RequestId;
use std::sync::Arc;

use nvme_spec::status::Status;
use nvme_spec::vendor::FormerAssociations;
use spindle_reactor::clock::Nanos;
use spindle_transport::{CloseReason, Transport};

use super::admin::ConnectBytes;
use super::request::State;
use super::{Qpair, Role};
use crate::env::{Env, Message};
use crate::notice::Notice;
use crate::orphaned_commands::ORPHAN_MAX;
use crate::refusal::{Refusal, field};
use crate::shared::FormerState;

/// The request of a queue pair that waits until the disks have completed the commands of its host's former
/// associations.
pub(super) enum ConnectBlocked {
    /// Connect of an admin queue, with its data.
    Connect(Box<ConnectBytes>),
    EndFormer(PendingEndFormer),
}

/// An End Former Associations that waits, at most until `deadline`. `ended`: number of controllers that it
/// ended.
pub(super) struct PendingEndFormer {
    slot: RequestId,
    ended: u16,
    deadline: Nanos,
}

impl<T: Transport> Qpair<T> {
    /// Marks the former controllers with `token` as ended and tells their cores to close them. Replies as
    /// [`Qpair::poll_end_former`] says.
    pub(super) fn end_former(&mut self, env: &mut Env, slot: RequestId, token: u64) {
        let Role::Admin(controller) = &self.role else { return };
        let own = Arc::clone(&controller.shared);
        if self.connect_blocked.is_some() {
            // One at a time; without DNR, so the host may retry.
            let status = Status::COMMAND_SEQUENCE_ERROR;
            self.refuse(env, slot, Refusal::of(status, Some(field::OPCODE)));
            return;
        }
        let Some(former) = env.registry.end_former(&own, token) else {
            // Another controller has ended this one; the message that closes it is in a mailbox.
            return self.close(env, CloseReason::ControllerGone);
        };
        for controller in &former {
            let (controller, reason) = (Arc::clone(controller), CloseReason::ControllerGone);
            env.send(controller.admin_core, Message::CloseController(controller, reason));
        }
        if !former.is_empty() {
            env.notice(Notice::FormerEnded {
                host: own.host_nqn,
                subsystem: own.subsystem_nqn,
                cntlid: own.cntlid,
                ended: former.len(),
            });
        }
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = State::ConnectBlocked;
        let ended = u16::try_from(former.len()).unwrap_or(u16::MAX);
        let deadline = env.now + ORPHAN_MAX;
        self.connect_blocked = Some(ConnectBlocked::EndFormer(PendingEndFormer { slot, ended, deadline }));
        self.poll_end_former(env);
    }

    /// Replies once the former controllers are closed and have no commands at a disk, except those that are
    /// there for longer than [`ORPHAN_MAX`]; at the latest at the deadline.
    pub(super) fn poll_end_former(&mut self, env: &Env) {
        let (Some(ConnectBlocked::EndFormer(wait)), Role::Admin(controller)) =
            (&self.connect_blocked, &self.role)
        else {
            return;
        };
        let may_land = match env.registry.former_state(&controller.shared) {
            FormerState::Over => false,
            FormerState::MayLand => true,
            FormerState::Ending if env.now >= wait.deadline => true,
            FormerState::Ending => return,
        };
        let slot = wait.slot;
        let result = FormerAssociations::new().with_ended(wait.ended).with_may_land(may_land);
        self.connect_blocked = None;
        self.finish(slot, Status::SUCCESS, u64::from(result.into_bits()), None);
    }

    /// Drops the command that waits without a reply, at a reset or a shutdown.
    pub(super) fn drop_end_former(&mut self) {
        if let Some(ConnectBlocked::EndFormer(PendingEndFormer { slot, .. })) = self.connect_blocked {
            self.connect_blocked = None;
            self.requests.remove(slot);
            self.transport.end_without_reply(slot);
        }
    }
}
