//! End Former Associations (vendor specific): ends the host's former controllers and waits for their
//! commands.
//!
//! ```text
//!   command ─> Registry::end_former: marks the former controllers ─> CloseController to their cores
//!     ─> ConnectBlocked ── Registry::former_state, now and at each timer period ──> nothing is left: reply
//!                  CloseController ─> admin queue closed ─> CloseQueues ─> I/O queues closed ─> orphans
//! ```
//! From the first step on, no I/O queue of a former controller accepts a command. Commands that were accepted
//! but not submitted to a disk are dropped when the queue closes. The messages need no answers: a QID stays
//! in use in the former controller until its I/O queue is closed and no disk has commands of the queue. After
//! `ORPHAN_MAX` the QID is free in any case.

use spindle_nvme_transport::RequestId;
use std::sync::Arc;

use nvme_spec::status::Status;
use nvme_spec::vendor::FormerAssociations;
use spindle_nvme_transport::{CloseReason, Transport};
use spindle_reactor::clock::Nanos;

use super::admin::ConnectBytes;
use super::request::RequestState;
use super::{Qpair, Role};
use crate::env::{Env, Message};
use crate::notice::Notice;
use crate::orphaned_commands::ORPHAN_MAX;
use crate::refusal::{Refusal, field};
use crate::shared::FormerState;

/// The request of a queue pair that waits for the disk commands of its host's former associations.
pub(super) enum ConnectBlocked {
    /// Connect of an admin queue, with its data.
    Connect(Box<ConnectBytes>),
    EndFormer(PendingEndFormer),
}

/// An End Former Associations that waits, at most until `deadline`. `ended`: number of ended controllers.
pub(super) struct PendingEndFormer {
    slot: RequestId,
    ended: u16,
    deadline: Nanos,
}

impl<T: Transport> Qpair<T> {
    /// Marks the former controllers with `token` as ended and sends [`Message::CloseController`] to their
    /// cores. [`Qpair::poll_end_former`] sends the reply. Refuses the command while another one waits; closes
    /// the connection if this controller has ended.
    pub(super) fn end_former(&mut self, env: &mut Env, slot: RequestId, token: u64) {
        let Role::Admin(controller) = &self.role else { return };
        let own = Arc::clone(&controller.shared);
        if self.connect_blocked.is_some() {
            // One command at a time; without DNR, so the host may retry.
            let status = Status::COMMAND_SEQUENCE_ERROR;
            self.refuse(env, slot, Refusal::of(status, Some(field::OPCODE)));
            return;
        }
        let Some(former) = env.registry.end_former(&own, token) else {
            // Another controller has ended this controller; the message that closes it is under way.
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
        request.state = RequestState::ConnectBlocked;
        let ended = u16::try_from(former.len()).unwrap_or(u16::MAX);
        let deadline = env.now + ORPHAN_MAX;
        self.connect_blocked = Some(ConnectBlocked::EndFormer(PendingEndFormer { slot, ended, deadline }));
        self.poll_end_former(env);
    }

    /// Replies once the former controllers are closed and no commands of them are at a disk, or at the
    /// deadline. Does not wait for commands that are at a disk for longer than [`ORPHAN_MAX`]. The reply
    /// reports whether writes may still be executed.
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

    /// Drops a waiting End Former Associations without a reply, at a reset or a shutdown.
    pub(super) fn drop_end_former(&mut self) {
        if let Some(ConnectBlocked::EndFormer(PendingEndFormer { slot, .. })) = self.connect_blocked {
            self.connect_blocked = None;
            self.requests.remove(slot);
            self.transport.end_without_reply(slot);
        }
    }
}
