//! What is not I/O: Connect, Property Get and Set, Disconnect, the admin commands, asynchronous events,
//! Abort.
//!
//! The controller (`crate::controller`) decides what they mean; here they get their memory and data by the
//! same states as I/O.

use nvme_spec::fabrics::{Connect, ConnectData};
use nvme_spec::opcode::FabricsType;
use nvme_spec::status::Status;
use spindle_reactor::slab::{Slab, Slot};
use spindle_transport::{CloseReason, DataPointer, Transport};
use std::sync::Arc;
use zerocopy::FromBytes;

use super::former::ConnectBlocked;
use super::request::State;
use super::{CONNECT_TIMEOUT, IoRole, Qpair, Role, Work};
use crate::controller::{
    self, ConnectRefusal, Connected, ConnectedQueue, Context, Effect, Need, Outcome, connect,
};
use crate::env::{AbortFrom, Env, Message};
use crate::notice::Notice;
use crate::orphaned_commands::ORPHAN_MAX;
use crate::refusal::{Refusal, field};
use crate::shared::{ControllerShared, QueueEnds};

/// Bytes of Connect's data.
const CONNECT_BYTES: u32 = 1024;
/// Connect's data.
pub(super) type ConnectBytes = [u8; CONNECT_BYTES as usize];

/// The controller's view of the world: what hosts are shown.
fn context<'a>(env: &'a Env, peer: &'a spindle_transport::Peer) -> Context<'a> {
    Context {
        snapshot: &env.advertised_snapshot,
        registry: &env.registry,
        peer,
        now: env.now,
        started: env.started,
        wall_ms: env.wall_ms,
        core: env.core,
        cores: env.cores,
    }
}

impl<T: Transport> Qpair<T> {
    /// The first command of a connection must be Connect.
    pub(super) fn step_fresh(&mut self, env: &mut Env, slot: Slot) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        let sqe = &request.sqe;
        if !sqe.is_fabrics() || sqe.fctype() != FabricsType::CONNECT {
            return self.refuse(env, slot, Refusal::at(Status::COMMAND_SEQUENCE_ERROR, field::OPCODE));
        }
        if request.pointer.bytes() != CONNECT_BYTES {
            return self.refuse(env, slot, Refusal::at(Status::DATA_SGL_LENGTH_INVALID, field::SGL_LENGTH));
        }
        request.work = Work::Connect;
        self.take_admin_buffer(env, slot, CONNECT_BYTES);
    }

    /// Take a buffer of the reserve and go on, or wait for one.
    fn take_admin_buffer(&mut self, env: &mut Env, slot: Slot, bytes: u32) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        assert!(matches!(request.state, State::New | State::NeedBuffer), "{:?}", request.state);
        let is_to_host = matches!(request.work, Work::Admin { is_to_host: true, .. });
        if is_to_host {
            request.buf = env.admin_share(bytes).take_contiguous(bytes);
        } else if self.connect_at_once(env, slot, bytes) {
            return;
        }
        let Some(request) = self.requests.get_mut(slot) else { return };
        if !is_to_host {
            request.buf = env.take_incoming(bytes);
        }
        if request.buf.is_none() {
            if request.state == State::New {
                env.waits += 1;
                self.wait_for_buffer(slot);
            }
            return;
        }
        if is_to_host {
            self.step_admin_execute(env, slot);
        } else {
            self.fetch(slot);
        }
    }

    /// A Connect with all of its data in its capsule waits for nothing, so it needs no place among those
    /// whose data is to come, however many keep theirs back.
    fn connect_at_once(&mut self, env: &mut Env, slot: Slot, bytes: u32) -> bool {
        let Some(request) = self.requests.get_mut(slot) else { return false };
        // A fresh queue has one command: it is the one that came last.
        if request.work != Work::Connect || !matches!(request.pointer, DataPointer::InCapsule { .. }) {
            return false;
        }
        let Some(mut buf) = env.admin_share(bytes).take_contiguous(bytes) else { return false };
        if !self.transport.take_in_capsule(&mut buf) {
            return false;
        }
        request.buf = Some(buf);
        self.step_connect(env, slot);
        true
    }

    pub(super) fn retry_admin_buffer(&mut self, env: &mut Env, slot: Slot) {
        let bytes = match self.requests.get(slot).map(|request| request.work) {
            Some(Work::Connect) => CONNECT_BYTES,
            Some(Work::Admin { bytes, .. }) => bytes,
            Some(Work::Io(_) | Work::None) | None => return,
        };
        self.take_admin_buffer(env, slot, bytes);
    }

    /// Connect's data is here.
    pub(super) fn step_connect(&mut self, env: &mut Env, slot: Slot) {
        let mut bytes = [0; CONNECT_BYTES as usize];
        if let Some(buf) = self.requests.get(slot).and_then(|request| request.buf.as_ref()) {
            buf.copy_out(0, &mut bytes);
        }
        self.try_connect(env, slot, &bytes);
    }

    /// Once more for a Connect that waits for what its host has left at the disks.
    pub(super) fn retry_connect(&mut self, env: &mut Env) {
        // A fresh queue has no other.
        let Some(ConnectBlocked::Connect(bytes)) = self.connect_blocked.take() else { return };
        let connect_blocked =
            self.requests.iter().find(|(_, request)| request.state == State::ConnectBlocked);
        if let Some(slot) = connect_blocked.map(|(slot, _)| slot) {
            self.try_connect(env, slot, &bytes);
        }
    }

    /// Its Connect waits for what its host has left at the disks.
    pub(crate) fn is_connect_waiting(&self) -> bool {
        matches!(self.connect_blocked, Some(ConnectBlocked::Connect(_)))
    }

    /// It has not sent Connect: on a full core a newcomer may have its place.
    #[must_use]
    pub fn may_end_for_newcomer(&self) -> bool {
        !self.is_connected() && !self.is_connect_waiting()
    }

    /// It waits, without the buffer that its data came in: there are few of those.
    fn block_connect(&mut self, env: &Env, slot: Slot, bytes: &ConnectBytes) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        if request.state != State::ConnectBlocked {
            request.state = State::ConnectBlocked;
            request.buf = None;
            self.connect_deadline = env.now + ORPHAN_MAX + CONNECT_TIMEOUT;
        }
        self.connect_blocked = Some(ConnectBlocked::Connect(Box::new(*bytes)));
    }

    fn try_connect(&mut self, env: &mut Env, slot: Slot, bytes: &ConnectBytes) {
        let limits = self.transport.limits();
        let Some(request) = self.requests.get(slot) else { return };
        let Ok(data) = ConnectData::ref_from_bytes(bytes) else { return };
        let is_admin = Connect::new(&request.sqe).qid() == 0;
        let mut context = context(env, &self.peer);
        let is_known = env
            .advertised_snapshot
            .listeners
            .get(self.peer.listener)
            .is_some_and(|listener| listener.is_open);
        if !is_admin || !is_known {
            // Another core may know before this one that all have the newest, and accept by a listener that
            // is new in it: it is here, whatever is shown.
            context.snapshot = &env.snapshot;
        }
        match controller::connect(&context, &request.sqe, data, &limits) {
            Ok((connected, result)) => {
                self.take_role(env, connected);
                // The slab is made anew for the queue's size; Connect is its first entry.
                if self.reinsert_connect(slot).is_none() {
                    return;
                }
                self.finish(slot, Status::SUCCESS, u64::from(result), None);
                if is_admin {
                    self.notice_connected(env);
                }
            }
            Err(ConnectRefusal { reason: connect::Reason::OrphanedCommands, .. }) => {
                self.block_connect(env, slot, bytes)
            }
            Err(refusal) => {
                let notice = Notice::Refused {
                    remote: self.peer.remote,
                    status: refusal.status,
                    reason: refusal.about(data),
                };
                env.notice(notice);
                self.finish(slot, refusal.status, u64::from(refusal.result), None);
            }
        }
    }

    fn notice_connected(&mut self, env: &mut Env) {
        if let Role::Admin(controller) = &self.role {
            let shared = &controller.shared;
            env.notice(Notice::Connected {
                host: shared.host_nqn,
                subsystem: shared.subsystem_nqn,
                cntlid: shared.cntlid,
                remote: self.peer.remote,
            });
        }
    }

    fn take_role(&mut self, env: &mut Env, connected: Connected) {
        let Connected { queue, entries, is_sq_flow_off } = connected;
        match queue {
            ConnectedQueue::Admin(controller) => {
                controller.shared.set_admin_queue(env.current);
                controller.shared.note_ends(QueueEnds { qid: 0, core: env.core, peer: self.peer });
                self.role = Role::Admin(controller);
            }
            ConnectedQueue::Io { shared, qid, has_other_id } => {
                if has_other_id {
                    env.notice(Notice::OtherHostId { host: shared.host_nqn, cntlid: shared.cntlid, qid });
                }
                let Some(subsystem) = env.snapshot.subsystem(&shared.subsystem_nqn).cloned() else { return };
                shared.note_ends(QueueEnds { qid, core: env.core, peer: self.peer });
                self.role = Role::Io(IoRole { shared, qid, subsystem });
            }
        }
        // Before the answer leaves: a host that has it may open its next connection.
        self.admitted = None;
        self.entries = entries;
        self.is_sq_flow_off = is_sq_flow_off;
        // Connect took the queue's first entry.
        self.sq_head = if entries > 1 { 1 } else { 0 };
        self.transport.set_queue_entries(entries);
        if self.transport.moves_parts() && env.snapshot.limits.bulk_unit > 0 {
            self.bulk_unit = env.snapshot.limits.bulk_unit;
        }
    }

    /// A slab for the queue's size, with the Connect that is about to be answered in it. By its name the
    /// transport knows its descriptors, and the key that its answer is to invalidate: it keeps that.
    fn reinsert_connect(&mut self, connect: Slot) -> Option<()> {
        let request = self.requests.remove(connect)?;
        debug_assert!(self.requests.is_empty(), "a fresh queue has one entry");
        self.requests = Slab::with_first(usize::from(self.entries), connect, request)?.into();
        Some(())
    }

    /// A Fabrics command on a queue that is connected. Authentication is not offered.
    pub(super) fn step_fabrics(&mut self, env: &mut Env, slot: Slot) {
        let Some(request) = self.requests.get(slot) else { return };
        let sqe = request.sqe;
        let status = match (sqe.fctype(), &mut self.role) {
            (FabricsType::PROPERTY_GET | FabricsType::PROPERTY_SET, Role::Admin(controller)) => {
                let (outcome, effect) = controller.property(&context(env, &self.peer), &sqe);
                self.end_admin(env, slot, outcome);
                return self.apply(env, effect);
            }
            (FabricsType::DISCONNECT, Role::Io(_)) => {
                self.finish(slot, Status::SUCCESS, 0, None);
                return self.close(env, CloseReason::Disconnect);
            }
            (FabricsType::DISCONNECT, _) => Status::INVALID_QUEUE_TYPE,
            (FabricsType::CONNECT, _) => Status::COMMAND_SEQUENCE_ERROR,
            _ => Status::INVALID_OPCODE,
        };
        self.refuse(env, slot, Refusal::at(status, field::FCTYPE));
    }

    /// A command on the admin queue.
    pub(super) fn step_admin(&mut self, env: &mut Env, slot: Slot) {
        let (Role::Admin(controller), Some(request)) = (&mut self.role, self.requests.get_mut(slot)) else {
            return;
        };
        controller.shared.note_traffic();
        let sqe = request.sqe;
        if sqe.is_fabrics() {
            return self.step_fabrics(env, slot);
        }
        let need = controller.need(&context(env, &self.peer), &sqe);
        let Need { bytes, is_to_host } = match need {
            Err(refusal) => return self.refuse(env, slot, refusal),
            Ok(need) => need,
        };
        request.work = Work::Admin { bytes, is_to_host };
        if bytes == 0 {
            return self.step_admin_execute(env, slot);
        }
        let is_right = match request.pointer {
            DataPointer::Host { bytes: given } => given == bytes,
            DataPointer::InCapsule { bytes: given } => given == bytes && !is_to_host,
            DataPointer::None => false,
        };
        if !is_right {
            return self.refuse(env, slot, Refusal::at(Status::DATA_SGL_LENGTH_INVALID, field::SGL_LENGTH));
        }
        self.take_admin_buffer(env, slot, bytes);
    }

    /// Memory and data are there.
    pub(super) fn step_admin_execute(&mut self, env: &mut Env, slot: Slot) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        let Work::Admin { is_to_host, .. } = request.work else { return };
        request.state = State::Executing;
        let Role::Admin(controller) = &mut self.role else { return };
        let mut buf = request.buf.take();
        if let (Some(buf), true) = (&mut buf, is_to_host) {
            buf.clear();
        }
        let sqe = request.sqe;
        let data = buf.as_mut().and_then(|buf| buf.as_mut_slice()).unwrap_or_default();
        let outcome = controller.execute(&context(env, &self.peer), &sqe, data);
        if let (Outcome::Reply { status, result, .. }, Some(buf), true) = (&outcome, buf, is_to_host)
            && status.is_success()
        {
            self.finish(slot, *status, *result, Some(buf));
        } else {
            self.end_admin(env, slot, outcome);
        }
        self.deliver_async_events();
    }

    fn end_admin(&mut self, env: &mut Env, slot: Slot, outcome: Outcome) {
        match outcome {
            Outcome::Reply { status, result, field } if !status.is_success() && result == 0 => {
                self.refuse(env, slot, Refusal { status, field });
            }
            Outcome::Reply { status, result, .. } => self.finish(slot, status, result, None),
            Outcome::HoldAsyncEvent => {
                if let Some(request) = self.requests.get_mut(slot) {
                    request.state = State::Held;
                }
                let is_held = self.parked_aers.try_push(slot).is_ok();
                debug_assert!(is_held, "the controller holds no more than AERL + 1");
            }
            Outcome::EndFormer { token } => self.end_former(env, slot, token),
            Outcome::Abort { sqid, cid } => self.begin_abort(env, slot, sqid, cid),
        }
    }

    pub(super) fn apply(&mut self, env: &mut Env, effect: Effect) {
        let Role::Admin(controller) = &self.role else { return };
        match effect {
            Effect::None => {}
            Effect::CloseIoQueues => {
                let controller = Arc::clone(&controller.shared);
                env.broadcast(&Message::CloseQueues(controller, CloseReason::ControllerGone));
                self.drop_parked_aers();
                self.drop_end_former();
            }
            Effect::CloseAll => self.close(env, CloseReason::ControllerGone),
        }
    }

    /// A reset or a shutdown forgets the outstanding event requests, without an answer: an initiator may have
    /// forgotten them before (SPDK's has, and takes an answer to one for a broken target).
    fn drop_parked_aers(&mut self) {
        for slot in std::mem::take(&mut self.parked_aers) {
            self.requests.remove(slot);
            self.transport.end_without_reply(slot);
        }
    }

    /// Time has passed on the admin queue of a controller that lives.
    pub(super) fn on_admin_time(&mut self, env: &mut Env) {
        self.look_at_former(env);
        self.look_at_health(env);
    }

    /// Tell of drives that warn.
    fn look_at_health(&mut self, env: &mut Env) {
        if self.parked_aers.is_empty() {
            return;
        }
        let Role::Admin(controller) = &mut self.role else { return };
        controller.look_at_health(&context(env, &self.peer));
        self.deliver_async_events();
    }

    /// Complete held event requests for events that are pending and wanted.
    pub(super) fn deliver_async_events(&mut self) {
        loop {
            let Role::Admin(controller) = &mut self.role else { return };
            if self.parked_aers.is_empty() {
                return;
            }
            let Some(result) = controller.take_async_event() else { return };
            let slot = self.parked_aers.remove(0);
            self.finish(slot, Status::SUCCESS, u64::from(result), None);
        }
    }

    /// Abort: on this queue at once, on an I/O queue by asking all cores.
    fn begin_abort(&mut self, env: &mut Env, slot: Slot, sqid: u16, cid: u16) {
        if sqid == 0 {
            let is_aborted = self.abort(env, cid, Some(slot));
            return self.end_abort(slot, is_aborted);
        }
        let Role::Admin(controller) = &self.role else { return };
        let controller = Arc::clone(&controller.shared);
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = State::Aborting;
        request.progress.index = 0;
        let from = AbortFrom { core: env.core, qpair: env.current, slot };
        env.broadcast(&Message::Abort { controller, qid: sqid, cid, from });
    }

    /// One core has answered.
    pub(crate) fn on_abort_answer(&mut self, env: &mut Env, slot: Slot, is_aborted: bool) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        assert_eq!(request.state, State::Aborting, "an answer that was not asked for");
        request.progress.index += 1;
        request.progress.is_writing |= is_aborted;
        if usize::try_from(request.progress.index).is_ok_and(|answers| answers >= env.cores) {
            let is_aborted = request.progress.is_writing;
            self.end_abort(slot, is_aborted);
        }
    }

    /// Dword 0 bit 0: the command was *not* aborted (Base 2.0, 5.1).
    fn end_abort(&mut self, slot: Slot, is_aborted: bool) {
        if let Role::Admin(controller) = &mut self.role {
            controller.abort_done();
        }
        self.finish(slot, Status::SUCCESS, u64::from(!is_aborted), None);
    }

    /// True when this is the I/O queue `qid` of `controller`.
    pub(crate) fn is_io_queue_of(&self, controller: &Arc<ControllerShared>, qid: Option<u16>) -> bool {
        match &self.role {
            Role::Io(role) => Arc::ptr_eq(&role.shared, controller) && qid.is_none_or(|qid| qid == role.qid),
            Role::Admin(_) | Role::Fresh | Role::Closing => false,
        }
    }

    /// True when this is the admin queue of any controller.
    pub(crate) fn is_admin_queue(&self) -> bool {
        matches!(self.role, Role::Admin(_))
    }

    /// True when this is the admin queue of `controller`.
    pub(crate) fn is_admin_queue_of(&self, controller: &Arc<ControllerShared>) -> bool {
        matches!(&self.role, Role::Admin(own) if Arc::ptr_eq(&own.shared, controller))
    }

    /// End command `cid` if it has not started: true when it will have no effect.
    pub(crate) fn abort(&mut self, env: &mut Env, cid: u16, except: Option<Slot>) -> bool {
        let found = self.requests.iter().find(|(slot, request)| {
            request.cid() == cid && Some(*slot) != except && request.state != State::Replying
        });
        let Some((slot, state)) = found.map(|(slot, request)| (slot, request.state)) else { return false };
        match state {
            State::Held => {
                self.parked_aers.retain(|held| *held != slot);
                if let Role::Admin(controller) = &mut self.role {
                    controller.async_event_aborted();
                }
                self.refuse(env, slot, Refusal::of(Status::ABORTED_BY_REQUEST, None));
                true
            }
            State::NeedBuffer if self.fused_first != Some(slot) && !self.is_paired(slot) => {
                self.waiting.retain(|waiting| *waiting != slot);
                self.refuse(env, slot, Refusal::of(Status::ABORTED_BY_REQUEST, None));
                true
            }
            State::Fetching => {
                self.abort_fetch(env, slot);
                true
            }
            State::Moving => self.abort_bulk(slot),
            State::New
            | State::NeedBuffer
            | State::Executing
            | State::NeedStepBuffer
            | State::Fused
            | State::Aborting
            | State::ConnectBlocked
            | State::Replying => false,
        }
    }

    /// The command ends at once, whenever its host sends the data, if ever; a fused one with its other half.
    /// Where a device has the buffer, it ends when that is through.
    fn abort_fetch(&mut self, env: &mut Env, slot: Slot) {
        let status = Status::ABORTED_BY_REQUEST;
        if !self.stop_fetch(slot, status) {
            return;
        }
        if self.fused_first == Some(slot) || self.is_paired(slot) {
            self.on_fused_fetched(env.current, env, slot, Some(status));
        } else {
            self.refuse(env, slot, Refusal::of(status, None));
        }
    }

    fn is_paired(&self, slot: Slot) -> bool {
        self.requests.get(slot).is_some_and(|request| request.partner.is_some())
    }

    /// An I/O queue's command failed: into the error log.
    pub(crate) fn on_failed(&mut self, record: controller::ErrorRecord) {
        if let Role::Admin(controller) = &mut self.role {
            controller.on_error(record);
        }
    }
}
