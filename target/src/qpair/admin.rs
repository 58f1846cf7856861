//! Commands that are not I/O: Connect, Property Get and Set, Disconnect, admin commands, events, Abort.
//!
//! `crate::controller` executes most of them. This file takes their memory, fetches their data, executes
//! Disconnect and Abort, and sends the replies. The request states are those of I/O.

use nvme_spec::fabrics::{Connect, ConnectData};
use nvme_spec::opcode::FabricsType;
use nvme_spec::status::Status;
use spindle_nvme_transport::RequestId;
use spindle_nvme_transport::admission::Admitted;
use spindle_nvme_transport::{CloseReason, DataPointer, Transport};
use spindle_reactor::mem::{Buf, Holder};
use spindle_reactor::slab::Slab;
use std::net::IpAddr;
use std::sync::Arc;
use zerocopy::FromBytes;

use super::former::ConnectBlocked;
use super::request::RequestState;
use super::{CONNECT_TIMEOUT, IoRole, Qpair, Role, Work};
use crate::controller::{
    self, ConnectRefusal, Connected, ConnectedQueue, Context, Effect, Need, Outcome, connect,
};
use crate::env::{AbortFrom, Env, Message};
use crate::notice::Notice;
use crate::orphaned_commands::ORPHAN_MAX;
use crate::refusal::{Refusal, field};
use crate::shared::{ControllerShared, QueueConnection};

/// Bytes of Connect's data (NVMe-oF, Connect data).
const CONNECT_BYTES: u32 = 1024;
pub(super) type ConnectBytes = [u8; CONNECT_BYTES as usize];

/// Builds the input of the controller's functions, with the advertised configuration.
fn context<'a>(env: &'a Env, peer: &'a spindle_nvme_transport::Peer) -> Context<'a> {
    Context {
        snapshot: &env.advertised_snapshot,
        registry: &env.registry,
        peer,
        now: env.now,
        process_started: env.process_started,
        wall_ms: env.wall_ms,
        core: env.core,
        cores: env.cores,
    }
}

/// Returns a hash of an IP address (FNV-1a): of the first 64 bits for IPv6, since a machine has as many as it
/// likes of the others.
fn hash_of(address: IpAddr) -> u32 {
    let mut hash = 0x811c_9dc5_u32;
    let mut add = |bytes: &[u8]| {
        bytes.iter().for_each(|byte| hash = (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    };
    match address {
        IpAddr::V4(address) => add(&address.octets()),
        IpAddr::V6(address) => add(&address.octets()[..8]),
    }
    hash
}

impl<T: Transport> Qpair<T> {
    /// Handles a command before Connect has succeeded. Others than Connect are refused; the connection stays.
    pub(super) fn step_fresh(&mut self, env: &mut Env, slot: RequestId) {
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

    /// Who is charged for the memory of admin commands: the host. Of a discovery controller, which anybody
    /// may connect, the address.
    pub(super) fn admin_holder(&self, env: &Env) -> Holder {
        match &self.role {
            Role::Admin(controller) if !controller.shared.subsystem_nqn.is_discovery() => {
                Holder::host(controller.shared.client)
            }
            Role::Admin(_) => Holder::stranger(hash_of(self.peer.remote.ip())),
            Role::Io(_) | Role::Fresh | Role::Closing => Holder::connection(env.current.0),
        }
    }

    /// As [`Qpair::admin_holder`], for data that the host has not sent yet: of all connections that have not
    /// sent Connect the same, so that they cannot use up the pool.
    pub(super) fn incoming_holder(&self, env: &Env) -> Holder {
        match &self.role {
            Role::Admin(_) => self.admin_holder(env),
            Role::Io(_) | Role::Fresh | Role::Closing => Holder::connection(env.unconnected_holder.0),
        }
    }

    /// Takes a buffer of the admin pool and continues, or queues the request for memory. Data to the host
    /// that is too large for the admin pool gets a buffer of the data pool.
    fn take_admin_buffer(&mut self, env: &mut Env, slot: RequestId, bytes: u32) {
        let (holder, incoming) = (self.admin_holder(env), self.incoming_holder(env));
        let Some(request) = self.requests.get_mut(slot) else { return };
        assert!(matches!(request.state, RequestState::New | RequestState::NeedBuffer), "{:?}", request.state);
        let is_to_host = matches!(request.work, Work::Admin { is_to_host: true, .. });
        if is_to_host {
            request.buf = env.admin_share(holder, bytes).take_contiguous(bytes);
        } else if self.connect_from_capsule(env, slot, bytes) {
            return;
        }
        let Some(request) = self.requests.get_mut(slot) else { return };
        if !is_to_host {
            request.buf = env.admin_pool.share(incoming).take_contiguous(bytes);
        }
        if request.buf.is_none() {
            env.is_admin_short = true;
            if request.state == RequestState::New {
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

    /// Executes a Connect with in-capsule data. Such a Connect does not use the share of commands whose data
    /// has not arrived. So hosts that send no data cannot block it. False: nothing has changed, and the
    /// caller fetches the data.
    fn connect_from_capsule(&mut self, env: &mut Env, slot: RequestId, bytes: u32) -> bool {
        let Some(request) = self.requests.get_mut(slot) else { return false };
        // A fresh queue has one command, so the pending capsule is this command's.
        if request.work != Work::Connect || !matches!(request.pointer, DataPointer::InCapsule { .. }) {
            return false;
        }
        let share = env.admin_share(Holder::connection(env.current.0), bytes);
        let Some(mut buf) = share.take_contiguous(bytes) else { return false };
        if !self.transport.take_in_capsule(&mut buf) {
            return false;
        }
        request.buf = Some(buf);
        self.step_connect(env, slot);
        true
    }

    pub(super) fn retry_admin_buffer(&mut self, env: &mut Env, slot: RequestId) {
        let bytes = match self.requests.get(slot).map(|request| request.work) {
            Some(Work::Connect) => CONNECT_BYTES,
            Some(Work::Admin { bytes, .. }) => bytes,
            Some(Work::Io(_) | Work::None) | None => return,
        };
        self.take_admin_buffer(env, slot, bytes);
    }

    /// Executes Connect, whose data was fetched.
    pub(super) fn step_connect(&mut self, env: &mut Env, slot: RequestId) {
        let mut bytes = [0; CONNECT_BYTES as usize];
        if let Some(buf) = self.requests.get(slot).and_then(|request| request.buf.as_ref()) {
            buf.copy_out(0, &mut bytes);
        }
        self.try_connect(env, slot, &bytes);
    }

    /// Retries a Connect that waits for orphaned commands of its host.
    pub(super) fn retry_connect(&mut self, env: &mut Env) {
        // On a fresh queue `connect_blocked` is never an End Former Associations.
        let Some(ConnectBlocked::Connect(bytes)) = self.connect_blocked.take() else { return };
        let connect_blocked =
            self.requests.iter().find(|(_, request)| request.state == RequestState::ConnectBlocked);
        if let Some(slot) = connect_blocked.map(|(slot, _)| slot) {
            self.try_connect(env, slot, &bytes);
        }
    }

    /// True while Connect waits for orphaned commands of its host.
    pub(crate) fn is_connect_waiting(&self) -> bool {
        matches!(self.connect_blocked, Some(ConnectBlocked::Connect(_)))
    }

    /// True before Connect has succeeded, unless Connect waits for orphaned commands; and for a discovery
    /// controller. A full core may close such a queue pair to accept a new connection.
    #[must_use]
    pub fn may_be_evicted(&self) -> bool {
        !self.is_connect_waiting() && !self.has_place()
    }

    /// True once Connect to an I/O controller has succeeded: the connection's place is its own. Every host
    /// may have discovery controllers, so their connections give way to others.
    pub(crate) fn has_place(&self) -> bool {
        self.is_connected() && !self.is_discovery()
    }

    pub(crate) fn is_discovery(&self) -> bool {
        matches!(&self.role, Role::Admin(controller) if controller.is_discovery())
    }

    /// Counts a discovery controller for the host's address, if Connect is for one, else `None`.
    fn discovery_place(
        &self,
        is_admin: bool,
        data: &ConnectData,
    ) -> Result<Option<Admitted>, ConnectRefusal> {
        if !is_admin || !data.subnqn().is_ok_and(|nqn| nqn.is_discovery()) {
            return Ok(None);
        }
        let place = self.admitted.as_ref().map(Admitted::discovery).transpose();
        place.map_err(ConnectRefusal::discovery_controllers)
    }

    /// Blocks a Connect that must wait for orphaned commands, and sets its deadline. Copies its data to the
    /// heap and frees its buffer, since the admin pool is small.
    fn block_connect(&mut self, env: &Env, slot: RequestId, bytes: &ConnectBytes) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        if request.state != RequestState::ConnectBlocked {
            request.state = RequestState::ConnectBlocked;
            request.buf = None;
            self.connect_deadline = env.now + ORPHAN_MAX + CONNECT_TIMEOUT;
        }
        self.connect_blocked = Some(ConnectBlocked::Connect(Box::new(*bytes)));
    }

    fn try_connect(&mut self, env: &mut Env, slot: RequestId, bytes: &ConnectBytes) {
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
            // I/O queues use the newest configuration. An admin Connect uses this configuration if its
            // listener is not advertised yet: another core has accepted on the listener, because the core
            // learned earlier that all cores serve the configuration.
            context.snapshot = &env.snapshot;
        }
        let connected = self.discovery_place(is_admin, data).and_then(|place| {
            let (connected, result) = controller::connect(&context, &request.sqe, data, &limits)?;
            Ok((place, connected, result))
        });
        match connected {
            Ok((place, connected, result)) => {
                // The former is dropped before the reply is sent, since the host may open its next connection
                // after the reply.
                self.admitted = place;
                self.set_role(env, connected);
                // A new slab of the queue's size replaces the old; Connect is its first entry.
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
                    reason: refusal.log_text(data),
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

    fn set_role(&mut self, env: &mut Env, connected: Connected) {
        let Connected { queue, entries, is_sq_flow_off } = connected;
        match queue {
            ConnectedQueue::Admin(controller) => {
                env.admin_pool.add_host(controller.shared.client);
                env.pool.add_host(controller.shared.client);
                env.update_alone();
                controller.shared.set_admin_queue(env.current);
                controller.shared.add_connection(QueueConnection { qid: 0, core: env.core, peer: self.peer });
                self.role = Role::Admin(controller);
            }
            ConnectedQueue::Io { shared, qid, has_other_id } => {
                if has_other_id {
                    env.notice(Notice::OtherHostId { host: shared.host_nqn, cntlid: shared.cntlid, qid });
                }
                let Some(subsystem) = env.snapshot.subsystem(&shared.subsystem_nqn).cloned() else { return };
                shared.note_traffic();
                shared.add_connection(QueueConnection { qid, core: env.core, peer: self.peer });
                env.pool.add_host(shared.client);
                env.update_alone();
                self.role = Role::Io(IoRole { shared, qid, subsystem });
            }
        }
        self.entries = entries;
        self.is_sq_flow_off = is_sq_flow_off;
        // Connect used the queue's first entry.
        self.sq_head = if entries > 1 { 1 } else { 0 };
        self.transport.set_queue_entries(entries);
        if self.transport.moves_parts() && env.snapshot.limits.bulk_unit > 0 {
            self.bulk_unit = env.snapshot.limits.bulk_unit;
        }
    }

    /// Replaces the slab by one of the queue's size that contains Connect in the same slot: RDMA keeps
    /// Connect's descriptors, and the key that the reply invalidates, by that slot.
    fn reinsert_connect(&mut self, connect: RequestId) -> Option<()> {
        let request = self.requests.remove(connect)?;
        debug_assert!(self.requests.is_empty(), "a fresh queue has one entry");
        self.requests = Slab::with_first(usize::from(self.entries), connect.0, request)?.into();
        Some(())
    }

    /// Handles a Fabrics command after Connect: Property Get and Set on the admin queue, Disconnect on an I/O
    /// queue. All others are refused; authentication is not supported.
    pub(super) fn step_fabrics(&mut self, env: &mut Env, slot: RequestId) {
        let Some(request) = self.requests.get(slot) else { return };
        let sqe = request.sqe;
        let status = match (sqe.fctype(), &mut self.role) {
            (FabricsType::PROPERTY_GET | FabricsType::PROPERTY_SET, Role::Admin(controller)) => {
                let (outcome, effect) = controller.property(&context(env, &self.peer), &sqe);
                self.end_admin(env, slot, outcome);
                return self.apply_effect(env, effect);
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

    pub(super) fn step_admin(&mut self, env: &mut Env, slot: RequestId) {
        let (Role::Admin(controller), Some(request)) = (&mut self.role, self.requests.get_mut(slot)) else {
            return;
        };
        controller.shared.note_traffic();
        let sqe = request.sqe;
        if sqe.is_fabrics() {
            return self.step_fabrics(env, slot);
        }
        let need = controller.need(&context(env, &self.peer), &sqe);
        let Need { bytes, memory, is_to_host } = match need {
            Err(refusal) => return self.refuse(env, slot, refusal),
            Ok(need) => need,
        };
        request.work = Work::Admin { bytes: memory, zeroes: bytes - memory, is_to_host };
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
        if memory == 0 {
            return self.step_admin_execute(env, slot);
        }
        self.take_admin_buffer(env, slot, memory);
    }

    /// Executes an admin command that has its memory and data.
    pub(super) fn step_admin_execute(&mut self, env: &mut Env, slot: RequestId) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        let Work::Admin { zeroes, is_to_host, .. } = request.work else { return };
        request.state = RequestState::Executing;
        let Role::Admin(controller) = &mut self.role else { return };
        let mut buf = request.buf.take();
        if let (Some(buf), true) = (&mut buf, is_to_host) {
            buf.clear();
        }
        let sqe = request.sqe;
        let data = buf.as_mut().and_then(|buf| buf.as_mut_slice()).unwrap_or_default();
        let outcome = controller.execute(&context(env, &self.peer), &sqe, data);
        if zeroes > 0 {
            buf.get_or_insert_with(|| Buf::zeroes(0)).append_zeroes(zeroes);
        }
        if let (Outcome::Reply { status, result, .. }, Some(buf), true) = (&outcome, buf, is_to_host)
            && status.is_success()
        {
            self.finish(slot, *status, *result, Some(buf));
        } else {
            self.end_admin(env, slot, outcome);
        }
        self.deliver_async_events();
    }

    fn end_admin(&mut self, env: &mut Env, slot: RequestId, outcome: Outcome) {
        match outcome {
            Outcome::Reply { status, result, field } if !status.is_success() && result == 0 => {
                self.refuse(env, slot, Refusal { status, field });
            }
            Outcome::Reply { status, result, .. } => self.finish(slot, status, result, None),
            Outcome::ParkAsyncEvent => {
                if let Some(request) = self.requests.get_mut(slot) {
                    request.state = RequestState::Parked;
                }
                let is_held = self.parked_aers.try_push(slot).is_ok();
                debug_assert!(is_held, "the controller holds no more than AERL + 1");
            }
            Outcome::EndFormer { token } => self.end_former(env, slot, token),
            Outcome::Next { acknowledged } => self.begin_next(env, slot, acknowledged),
            Outcome::Abort { sqid, cid } => self.begin_abort(env, slot, sqid, cid),
        }
    }

    pub(super) fn apply_effect(&mut self, env: &mut Env, effect: Effect) {
        let Role::Admin(controller) = &self.role else { return };
        match effect {
            Effect::None => {}
            Effect::CloseIoQueues => {
                let controller = Arc::clone(&controller.shared);
                env.broadcast(&Message::CloseQueues(controller, CloseReason::ControllerGone));
                self.drop_parked_aers();
                self.drop_end_former();
                self.drop_nexts();
            }
            Effect::CloseAll => self.close(env, CloseReason::ControllerGone),
        }
    }

    /// Drops the parked AERs without a reply, at a reset or a shutdown. SPDK's initiator has already dropped
    /// them, and treats a reply to a dropped AER as a protocol error.
    fn drop_parked_aers(&mut self) {
        for slot in std::mem::take(&mut self.parked_aers) {
            self.requests.remove(slot);
            self.transport.end_without_reply(slot);
        }
    }

    /// Polls End Former Associations and the health of drives. Called by the timer of an admin queue whose
    /// controller has not expired.
    pub(super) fn on_admin_time(&mut self, env: &mut Env) {
        self.poll_end_former(env);
        self.check_health(env);
        self.check_silence(env);
    }

    /// Reports new critical warnings of drives as asynchronous events, if an AER is parked.
    fn check_health(&mut self, env: &mut Env) {
        if self.parked_aers.is_empty() {
            return;
        }
        let Role::Admin(controller) = &mut self.role else { return };
        controller.check_health(&context(env, &self.peer));
        self.deliver_async_events();
    }

    /// Completes parked AERs with pending events that the host has enabled.
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

    /// Executes an Abort: of a command of this queue at once, of a command of an I/O queue by
    /// `Message::Abort` to all cores.
    fn begin_abort(&mut self, env: &mut Env, slot: RequestId, sqid: u16, cid: u16) {
        if sqid == 0 {
            let is_aborted = self.abort(env, cid, Some(slot));
            return self.end_abort(slot, is_aborted);
        }
        let Role::Admin(controller) = &self.role else { return };
        let controller = Arc::clone(&controller.shared);
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = RequestState::Aborting;
        request.progress.index = 0;
        let from = AbortFrom { core: env.core, qpair: env.current, slot };
        env.broadcast(&Message::Abort { controller, qid: sqid, cid, from });
    }

    /// Counts the answer of one core to an Abort, and completes the Abort after the last answer.
    pub(crate) fn on_abort_answer(&mut self, env: &mut Env, slot: RequestId, is_aborted: bool) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        assert_eq!(request.state, RequestState::Aborting, "an answer that was not asked for");
        request.progress.index += 1;
        request.progress.is_writing |= is_aborted;
        if usize::try_from(request.progress.index).is_ok_and(|answers| answers >= env.cores) {
            let is_aborted = request.progress.is_writing;
            self.end_abort(slot, is_aborted);
        }
    }

    /// Completes an Abort. Dword 0 bit 0 set: the command was *not* aborted (Base 2.0, 5.1).
    fn end_abort(&mut self, slot: RequestId, is_aborted: bool) {
        if let Role::Admin(controller) = &mut self.role {
            controller.abort_done();
        }
        self.finish(slot, Status::SUCCESS, u64::from(!is_aborted), None);
    }

    /// True for the I/O queue `qid` of `controller`; `qid` `None`: for any of its I/O queues.
    pub(crate) fn is_io_queue_of(&self, controller: &Arc<ControllerShared>, qid: Option<u16>) -> bool {
        match &self.role {
            Role::Io(role) => Arc::ptr_eq(&role.shared, controller) && qid.is_none_or(|qid| qid == role.qid),
            Role::Admin(_) | Role::Fresh | Role::Closing => false,
        }
    }

    pub(crate) fn is_admin_queue(&self) -> bool {
        matches!(self.role, Role::Admin(_))
    }

    pub(crate) fn is_admin_queue_of(&self, controller: &Arc<ControllerShared>) -> bool {
        matches!(&self.role, Role::Admin(own) if Arc::ptr_eq(&own.shared, controller))
    }

    /// Aborts the command with CID `cid` in a request other than `except`. True: the command was found and
    /// ends without effect.
    pub(crate) fn abort(&mut self, env: &mut Env, cid: u16, except: Option<RequestId>) -> bool {
        let found = self.requests.iter().find(|(slot, request)| {
            request.cid() == cid && Some(*slot) != except && request.state != RequestState::Replying
        });
        let Some((slot, state)) = found.map(|(slot, request)| (slot, request.state)) else { return false };
        match state {
            RequestState::Parked => {
                self.parked_aers.retain(|held| *held != slot);
                if let Role::Admin(controller) = &mut self.role {
                    controller.async_event_aborted();
                }
                self.refuse(env, slot, Refusal::of(Status::ABORTED_BY_REQUEST, None));
                true
            }
            RequestState::Next => {
                self.nexts.retain(|next| next.slot != slot);
                self.refuse(env, slot, Refusal::of(Status::ABORTED_BY_REQUEST, None));
                true
            }
            RequestState::NeedBuffer if self.fused_first != Some(slot) && !self.is_paired(slot) => {
                self.waiting.retain(|waiting| *waiting != slot);
                self.refuse(env, slot, Refusal::of(Status::ABORTED_BY_REQUEST, None));
                true
            }
            RequestState::Fetching => {
                self.abort_fetch(env, slot);
                true
            }
            RequestState::Bulk => self.abort_bulk(slot),
            RequestState::New
            | RequestState::NeedBuffer
            | RequestState::Executing
            | RequestState::NeedStepBuffer
            | RequestState::Fused
            | RequestState::Aborting
            | RequestState::ConnectBlocked
            | RequestState::Replying => false,
        }
    }

    /// Aborts a command in `Fetching`, which ends at once or when the transport returns its buffer. If the
    /// command is half of a fused pair, the other half ends too.
    fn abort_fetch(&mut self, env: &mut Env, slot: RequestId) {
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

    fn is_paired(&self, slot: RequestId) -> bool {
        self.requests.get(slot).is_some_and(|request| request.partner.is_some())
    }

    /// Adds the record of an I/O queue's failed command to the error log.
    pub(crate) fn on_failed(&mut self, record: controller::ErrorRecord) {
        if let Role::Admin(controller) = &mut self.role {
            controller.on_error(record);
        }
    }
}
