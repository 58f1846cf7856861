//! End Former Associations: what the host has left behind is ended and waited for.
//!
//! ```text
//!   command ─> Registry::end_former: formers are gone for every core ─> CloseController to their cores
//!     ─> ConnectBlocked ── Registry::former, now and at each look at the time ──> nothing is left: answered
//!                  CloseController ─> admin queue gone ─> CloseQueues ─> I/O queues gone ─> orphans
//! ```
//! From the first step on no queue of a former controller takes a command; what it has taken and not begun is
//! given up when its core closes it. An I/O queue is in the controller's map until then, and while a disk has
//! something of it: the messages need no answers.

use std::sync::Arc;

use nvme_spec::status::Status;
use nvme_spec::vendor::FormerAssociations;
use spindle_reactor::clock::Nanos;
use spindle_reactor::slab::Slot;
use spindle_transport::{CloseReason, Transport};

use super::admin::ConnectBytes;
use super::request::State;
use super::{Qpair, Role};
use crate::env::{Env, Message};
use crate::notice::Notice;
use crate::orphaned_commands::ORPHAN_MAX;
use crate::refusal::{Refusal, field};
use crate::shared::Former;

/// The request of a queue pair that waits until nothing of its host's former associations is at a disk.
pub(super) enum ConnectBlocked {
    /// Connect of an admin queue; its data.
    Connect(Box<ConnectBytes>),
    /// End Former Associations.
    EndFormer(Wait),
}

/// An End Former Associations that is not answered yet.
pub(super) struct Wait {
    slot: Slot,
    ended: u16,
    until: Nanos,
}

impl<T: Transport> Qpair<T> {
    /// The command: end them, and answer when they are over.
    pub(super) fn end_former(&mut self, env: &mut Env, slot: Slot, token: u64) {
        let Role::Admin(controller) = &self.role else { return };
        let own = Arc::clone(&controller.shared);
        if self.connect_blocked.is_some() {
            // Not for good: one at a time.
            let status = Status::COMMAND_SEQUENCE_ERROR;
            self.refuse(env, slot, Refusal::of(status, Some(field::OPCODE)));
            return;
        }
        let Some(former) = env.registry.end_former(&own, token) else {
            // Another controller has ended this one, and the message that closes it is on its way.
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
        let until = env.now + ORPHAN_MAX;
        self.connect_blocked = Some(ConnectBlocked::EndFormer(Wait { slot, ended, until }));
        self.look_at_former(env);
    }

    /// Answer the command if they are over, or it has waited long enough.
    pub(super) fn look_at_former(&mut self, env: &Env) {
        let (Some(ConnectBlocked::EndFormer(wait)), Role::Admin(controller)) =
            (&self.connect_blocked, &self.role)
        else {
            return;
        };
        let may_land = match env.registry.former(&controller.shared) {
            Former::Over => false,
            Former::MayLand => true,
            Former::Ending if env.now >= wait.until => true,
            Former::Ending => return,
        };
        let slot = wait.slot;
        let result = FormerAssociations::new().with_ended(wait.ended).with_may_land(may_land);
        self.connect_blocked = None;
        self.finish(slot, Status::SUCCESS, u64::from(result.into_bits()), None);
    }

    /// A reset or a shutdown forgets the command, without an answer.
    pub(super) fn drop_end_former(&mut self) {
        if let Some(ConnectBlocked::EndFormer(Wait { slot, .. })) = self.connect_blocked {
            self.connect_blocked = None;
            self.requests.remove(slot);
            self.transport.end_without_reply(slot);
        }
    }
}
