//! [`Qpair`]: the queue pair of one connection, and the state machine of its requests.
//!
//! ```text
//!   Fresh ── Connect, qid 0 ──> Admin (owns the Controller) ──┐
//!     │ └─── Connect, qid n ──> Io (shares the controller) ───┼──> Closing ──> Closed event ──> removed
//!     └───── no successful Connect in time, host error ───────┘
//! ```
//!
//! `target/src/lib.rs` has the paths of a Read and a Write through this file. The `state` of a request
//! changes only in this file and `qpair/`.
//!
//! Files: `request` (the states), `fast_path` (Reads and Writes without a request in the slab), `bulk` (large
//! transfers in pieces), `cluster` (Register and Next), `io` (parse and check), `admin` (Connect,
//! properties, admin commands, Abort), `compound` (commands of several disk steps), `fused` (Compare and
//! Write), `memory` (buffers, and the queue of requests that wait for them), `references` (Get References),
//! `requests` (table of the requests), `fetches` (progress of data and replies), `time` (time-outs),
//! `former` (End Former Associations).

mod admin;
mod bulk;
mod cluster;
mod compound;
pub(crate) mod fast_path;
mod fetches;
mod former;
mod fused;
pub mod io;
pub(crate) mod memory;
mod references;
pub mod request;
mod requests;
mod time;

use spindle_nvme_transport::{ConnectionId, RequestId};
use std::collections::VecDeque;
use std::sync::Arc;

use arrayvec::ArrayVec;
use nvme_spec::cluster::NEXT_OUTSTANDING_MAX;
use nvme_spec::cqe::Cqe;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_nvme_transport::admission::Admitted;
use spindle_nvme_transport::{CloseReason, DataPointer, Event, Peer, Reply, Transport};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slab;
use spindle_target_disk::{DiskError, Done, Op, Owner, Token};

use crate::controller::{Controller, ErrorRecord, limits};
use crate::counters;
use crate::env::{Env, Message};
use crate::notice::Notice;
use crate::refusal::{Refusal, field};
use crate::shared::ControllerShared;
use crate::snapshot::{Snapshot, Subsystem};
use cluster::{PendingNext, register};
pub use fetches::{FETCH_TIMEOUT, REPLY_TIMEOUT, REPLY_TIMEOUT_SHORT, STARVED_TIMEOUT};
use fetches::{Fetches, StallDetector};
use former::ConnectBlocked;
pub use fused::FUSED_TIMEOUT;
pub(crate) use memory::Retried;
use memory::{Bounds, Taken, reads_into_pool, take_buffers};
use request::{Direction, IoCommand, IoOp, Request, RequestState, Work};
use requests::Requests;

/// Longest time from accept to the success of Connect; a Connect that waits for orphaned commands has
/// `ORPHAN_MAX` more from the start of its wait. A host with many queues opens all its connections first and
/// then sends one Connect after another. Meanwhile each connection occupies a slot that other hosts could
/// use.
pub const CONNECT_TIMEOUT: Nanos = Nanos::from_secs(30);
/// Capacity of the slab before Connect sets the size of the queue. A second command before the reply to
/// Connect is a host error, so `reinsert_connect` moves only Connect to the final slab.
const FRESH_ENTRIES: usize = 1;
/// Outbox length, in messages, from which on failed commands of I/O queues are not added to the error log.
/// Bounds the memory that a host can fill with failing commands.
const FAILED_BACKLOG_MAX: usize = 256;

pub(crate) enum Role {
    /// Before Connect has succeeded.
    Fresh,
    /// The admin queue; it owns the controller.
    Admin(Box<Controller>),
    Io(IoRole),
    /// The connection is closing; commands and data are discarded until the transport reports `Closed`.
    Closing,
}

/// An I/O queue: its controller, its QID, and its subsystem in the newest configuration.
pub(crate) struct IoRole {
    pub(crate) shared: Arc<ControllerShared>,
    pub(crate) qid: u16,
    pub(crate) subsystem: Arc<Subsystem>,
}

/// Result of a step of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// The connection exists; the queue pair stays.
    Open,
    /// The transport reported `Closed`; the queue pair is removed.
    Closed,
}

/// The queue pair of one connection. See the module.
pub struct Qpair<T: Transport> {
    pub(crate) transport: T,
    pub(crate) peer: Peer,
    pub(crate) role: Role,
    requests: Requests,
    /// Requests in `NeedBuffer` or `NeedStepBuffer`, in the order in which they began to wait. The second
    /// half of a fused pair is not listed, since it waits for its first half.
    waiting: VecDeque<RequestId>,
    sq_head: u16,
    entries: u16,
    is_sq_flow_off: bool,
    /// Reads and Writes of more bytes than this may be split into pieces of this size; `u32::MAX`: none is.
    bulk_unit: u32,
    fused_first: Option<RequestId>,
    /// First half of a fused pair that the last timer check found without its second half, and its deadline.
    fused_first_deadline: Option<(RequestId, Nanos)>,
    parked_aers: ArrayVec<RequestId, { limits::ASYNC_EVENTS_MAX as usize }>,
    fetches: Fetches,
    /// Bytes of disk memory allocated for data that the host has not sent yet.
    charged: u64,
    /// Total of the replies sent; wraps.
    replies_sent: u32,
    /// Detects a host that does not read its replies.
    reply_stalls: StallDetector,
    connect_deadline: Nanos,
    /// Counts this connection among those whose Connect has not succeeded, or its discovery controller;
    /// dropped when Connect to an I/O controller succeeds.
    pub(crate) admitted: Option<Admitted>,
    /// Requests in state `Next`.
    nexts: ArrayVec<PendingNext, NEXT_OUTSTANDING_MAX>,
    /// Data of the request in state `ConnectBlocked`.
    connect_blocked: Option<ConnectBlocked>,
    /// Number of fast-path replies that are not sent yet. Their commands occupy queue entries, but no slot.
    fast_path_inflight: u32,
    pub(crate) is_send_ready: bool,
    /// The last `step` gave a command or a piece of one to a disk, and no disk has ended one since.
    pub(crate) has_submitted: bool,
    /// True while this queue pair is in `TargetCore::waiting`.
    pub(crate) is_listed: bool,
}

/// Token of a request's disk commands: slot of the queue pair in the high 32 bits, slot of the request in the
/// low 32 bits.
#[inline]
pub(crate) fn token(qpair: ConnectionId, slot: RequestId) -> Token {
    Token(u64::from(qpair.to_wire()) << 32 | u64::from(slot.to_wire()))
}

/// Owner of all tokens of a queue pair, for `DiskChannel::cancel_owner`.
#[inline]
pub(crate) fn owner(qpair: ConnectionId) -> Owner {
    token(qpair, RequestId::from_wire(0)).owner()
}

/// Inverse of [`token`]: returns the slots of the queue pair and of its request.
#[inline]
pub(crate) fn from_token(token: Token) -> (ConnectionId, RequestId) {
    let high = u32::try_from(token.0 >> 32).unwrap_or(0);
    let low = u32::try_from(token.0 & 0xffff_ffff).unwrap_or(0);
    (ConnectionId::from_wire(high), RequestId::from_wire(low))
}

/// Returns the NVMe status for a disk error, with DNR where a retry cannot help. The status of `Device` is
/// returned unchanged.
#[must_use]
pub fn status_of(error: DiskError) -> Status {
    match error {
        DiskError::MediaRead => Status::UNRECOVERED_READ_ERROR.dnr(),
        DiskError::MediaWrite => Status::WRITE_FAULT.dnr(),
        DiskError::NoSpace => Status::CAPACITY_EXCEEDED.dnr(),
        DiskError::WriteProtected => Status::NAMESPACE_IS_WRITE_PROTECTED.dnr(),
        DiskError::NotSupported => Status::INVALID_FIELD.dnr(),
        DiskError::CompareDiffers => Status::COMPARE_FAILURE.dnr(),
        DiskError::Internal => Status::INTERNAL_ERROR,
        DiskError::Gone => Status::INTERNAL_ERROR.dnr(),
        DiskError::Device(status) => status,
        // Not seen by a host: only commands of an ended queue pair are cancelled.
        DiskError::Cancelled => Status::ABORTED_SQ_DELETION,
    }
}

impl<T: Transport> Qpair<T> {
    /// Creates the queue pair of a connection accepted at `now`; [`CONNECT_TIMEOUT`] starts now.
    #[must_use]
    pub fn new(transport: T, peer: Peer, now: Nanos) -> Self {
        Qpair {
            transport,
            peer,
            role: Role::Fresh,
            requests: Slab::with_capacity(FRESH_ENTRIES).into(),
            waiting: VecDeque::new(),
            sq_head: 0,
            entries: 0,
            is_sq_flow_off: false,
            bulk_unit: u32::MAX,
            fused_first: None,
            fused_first_deadline: None,
            parked_aers: ArrayVec::new(),
            fetches: Fetches::default(),
            charged: 0,
            replies_sent: 0,
            reply_stalls: StallDetector::default(),
            connect_deadline: now + CONNECT_TIMEOUT,
            admitted: None,
            nexts: ArrayVec::new(),
            connect_blocked: None,
            fast_path_inflight: 0,
            is_send_ready: false,
            has_submitted: false,
            is_listed: false,
        }
    }

    /// Marks that the transport may have output. False if the mark was already set.
    #[inline]
    pub(crate) fn set_send_ready(&mut self) -> bool {
        !std::mem::replace(&mut self.is_send_ready, true)
    }

    /// True once Connect has succeeded or the queue pair closes.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        !matches!(self.role, Role::Fresh)
    }

    /// Number of requests in `state`.
    #[must_use]
    pub fn count(&self, state: RequestState) -> usize {
        self.requests.iter().filter(|(_, request)| request.state == state).count()
    }

    /// Number of requests that wait for memory or for their next step.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// True when a drain need not wait: all replies of the fast path are sent, and the only requests left are
    /// parked AERs and a blocked Connect or End Former Associations.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let endless = self.parked_aers.len() + self.nexts.len() + usize::from(self.connect_blocked.is_some());
        self.requests.len() == endless && self.fast_path_inflight == 0
    }

    /// Handles all pending events of the transport. `id`: slot of this queue pair.
    #[inline]
    pub fn step(&mut self, id: ConnectionId, env: &mut Env) -> Liveness {
        self.has_submitted = false;
        let sent = self.transport.take_fast_path_sent();
        self.fast_path_inflight -= sent;
        self.replies_sent = self.replies_sent.wrapping_add(sent);
        while let Some(event) = self.transport.next_event() {
            match event {
                Event::Command { sqe, data } => self.on_command(id, env, sqe, data),
                Event::Fetched { slot, buf, result } => self.on_fetched(id, env, slot, buf, result),
                Event::Sent { slot } => self.on_sent(slot),
                Event::FetchedPart { slot, offset, buf, result } => {
                    self.on_fetched_part(id, env, slot, offset, buf, result);
                }
                Event::SentPart { slot, buf, .. } => self.on_sent_part(id, env, slot, buf),
                Event::Closed => {
                    self.on_closed(env);
                    return Liveness::Closed;
                }
            }
        }
        Liveness::Open
    }

    #[inline]
    fn on_command(&mut self, id: ConnectionId, env: &mut Env, sqe: Sqe, data: Result<DataPointer, Status>) {
        // Commands that arrive while the queue pair closes or the core drains are dropped: the host repeats
        // them on its next connection.
        if matches!(self.role, Role::Closing) || env.is_draining && !self.is_next(&sqe) {
            // The data of earlier commands may follow this command in the stream.
            return self.transport.ignore();
        }
        env.commands += 1;
        self.sq_head += 1;
        if self.sq_head >= self.entries {
            self.sq_head = 0;
        }
        if self.requests.len() + self.fast_path_inflight as usize >= self.requests.capacity() {
            return self.host_error(env, "more commands outstanding than the queue has entries");
        }
        let pointer = data.unwrap_or(DataPointer::None);
        if self.step_fast_path(id, env, &sqe, pointer) {
            return;
        }
        let Some(slot) = self.requests.insert(Request::new(sqe, pointer)) else {
            return; // capacity was checked above
        };
        self.transport.set_slot(slot);
        if let Err(status) = data {
            self.refuse_io(env, slot, Refusal::of(status, Some(field::SGL_IDENTIFIER)));
            return;
        }
        match &self.role {
            Role::Io(_) => self.step_io(id, env, slot),
            Role::Admin(_) => self.step_admin(env, slot),
            Role::Fresh => self.step_fresh(env, slot),
            Role::Closing => {}
        }
    }

    /// Builds a completion queue entry with this queue's SQHD.
    #[inline]
    fn cqe(&self, cid: u16, status: Status) -> Cqe {
        let mut cqe = Cqe::new(cid, status);
        // Base 2.0, 4.2.1: SQHD is reserved when SQ flow control is off; hosts expect FFFFh.
        cqe.sq_head.set(if self.is_sq_flow_off { 0xffff } else { self.sq_head });
        cqe
    }

    #[inline]
    fn step_io(&mut self, id: ConnectionId, env: &mut Env, slot: RequestId) {
        let (Role::Io(role), Some(request)) = (&self.role, self.requests.get_mut(slot)) else { return };
        role.shared.note_traffic();
        if request.sqe.is_fabrics() {
            self.end_first(env, Status::ABORTED_MISSING_FUSED);
            return self.step_fabrics(env, slot);
        }
        if !role.shared.is_ready() {
            if role.shared.is_gone() {
                // `CloseQueues` for this queue is under way. A status with DNR would reach the application,
                // but the host must repeat the command on its next controller.
                return self.close(env, CloseReason::ControllerGone);
            }
            return self.refuse_io(env, slot, Refusal::at(Status::COMMAND_SEQUENCE_ERROR, field::OPCODE));
        }
        match io::check_io(role, env, request) {
            Ok(mut io) => {
                if !role.shared.is_write_cache_on() {
                    io.op = io.op.with_fua();
                }
                if io.registers
                    && let Err(refusal) = register(role, env, &mut io)
                {
                    return self.refuse_io(env, slot, refusal);
                }
                request.work = Work::Io(io);
            }
            Err(refusal) => return self.refuse_io(env, slot, refusal),
        }
        if self.fused_first.is_some() || request.sqe.flags & 3 != 0 {
            return self.step_fused(id, env, slot);
        }
        self.step_buffer(id, env, slot);
    }

    /// Takes the memory that the command needs, then fetches its data or executes it. If memory is short, a
    /// new request is appended to the queue for memory, and a waiting request keeps its position.
    #[inline]
    fn step_buffer(&mut self, id: ConnectionId, env: &mut Env, slot: RequestId) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        assert!(matches!(request.state, RequestState::New | RequestState::NeedBuffer), "{:?}", request.state);
        let Work::Io(io) = request.work else { return };
        let disk_bytes = self.role.disk_bytes(io.disk);
        // A new command does not overtake those of its queue that wait for memory.
        let is_behind = request.state == RequestState::New && !self.waiting.is_empty();
        let bounds = Bounds { is_behind, disk_bytes, bulk_unit: self.bulk_unit };
        match take_buffers(env, request, &io, bounds) {
            Taken::All => {}
            Taken::Ready(data) => {
                if env.disk_ref(io.disk).is_some_and(|disk| disk.free_bytes() != u64::MAX) {
                    request.charged = io.data_bytes;
                    self.charge(io.disk, io.data_bytes);
                }
                self.count_io(env.core, &io);
                let reference = self.read_result(&io, Some(&data));
                return self.finish(slot, Status::SUCCESS, reference, Some(data));
            }
            Taken::Nothing => {
                if request.state == RequestState::New {
                    env.waits += 1;
                    self.wait_for_buffer(slot);
                }
                return;
            }
        }
        let charged = request.charged;
        self.charge(io.disk, charged);
        let Some(request) = self.requests.get_mut(slot) else { return };
        if request.pieces.unit > 0 && request.buf.is_some() {
            return self.begin_bulk(id, env, slot);
        }
        // Without a buffer the disk was removed during the wait, and `step_execute` fails the command.
        if io.op.direction() == Direction::FromHost && request.buf.is_some() {
            self.fetch(slot);
        } else {
            self.step_execute(id, env, slot);
        }
    }

    /// Passes the buffer to the transport, which writes the host's data into it.
    #[inline]
    fn fetch(&mut self, slot: RequestId) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = RequestState::Fetching;
        if let Some(buf) = request.buf.take() {
            let cid = request.cid();
            self.fetches.begin();
            self.transport.fetch(slot, cid, buf);
        }
    }

    #[inline]
    fn on_fetched(
        &mut self,
        id: ConnectionId,
        env: &mut Env,
        slot: RequestId,
        buf: Buf,
        result: Result<(), Status>,
    ) {
        self.fetches.end();
        self.discharge(slot);
        let Some(request) = self.requests.get_mut(slot) else { return };
        assert_eq!(request.state, RequestState::Fetching, "data for a request that did not ask for it");
        if matches!(self.role, Role::Closing) {
            return; // no new step while closing; the buffer is freed
        }
        request.buf = Some(buf);
        let failure = request.abort_status.or(result.err());
        let is_fused = request.partner.is_some() || self.fused_first == Some(slot);
        if is_fused {
            return self.on_fused_fetched(id, env, slot, failure);
        }
        if let Some(status) = failure {
            self.refuse(env, slot, Refusal::of(status, None));
            return;
        }
        match request.work {
            Work::Io(_) => self.step_execute(id, env, slot),
            Work::Connect => self.step_connect(env, slot),
            Work::Admin { .. } => self.step_admin_execute(env, slot),
            Work::None => {}
        }
    }

    /// Submits the command to its disk, or begins the steps of a compound command; completes a [`IoOp::Hint`]
    /// at once. The command has its buffer and data.
    #[inline]
    fn step_execute(&mut self, id: ConnectionId, env: &mut Env, slot: RequestId) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        let Work::Io(io) = request.work else { return };
        request.state = RequestState::Executing;
        let op = match io.op {
            IoOp::Read => Op::Read,
            IoOp::Write { fua } => Op::Write { fua },
            IoOp::Flush => Op::Flush,
            IoOp::WriteZeroes { deallocate, fua } => Op::WriteZeroes { deallocate, fua },
            IoOp::Hint => {
                request.buf = None;
                return self.finish(slot, Status::SUCCESS, 0, None);
            }
            IoOp::References => return self.step_references(env, slot, &io),
            IoOp::Register => return self.finish(slot, Status::SUCCESS, u64::from(io.keeps), None),
            IoOp::FlushAll | IoOp::Deallocate { .. } | IoOp::Compare | IoOp::Verify | IoOp::Copy { .. } => {
                return self.step_compound(id, env, slot, None);
            }
        };
        let buf = request.buf.take();
        let Some(disk) = env.disk(io.disk) else {
            return self.finish(slot, status_of(DiskError::Gone), 0, None);
        };
        match disk.submit(token(id, slot), &io.request(op, io.range), buf) {
            Some(done) => self.on_simple_done(env, slot, &io, done.result, done.buf),
            None => self.has_submitted = true,
        }
    }

    /// Handles the completion of a disk command: a whole command, a step, a piece or a fused pair.
    pub(crate) fn on_done(&mut self, id: ConnectionId, env: &mut Env, slot: RequestId, done: Done) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        if request.state == RequestState::Bulk {
            return self.on_piece_done(id, env, slot, done.result, done.buf);
        }
        assert_eq!(request.state, RequestState::Executing, "a disk completed a request twice");
        let Work::Io(io) = request.work else { return };
        if request.partner.is_some() {
            return self.on_fused_done(env, slot, done.result);
        }
        if compound::is_compound(io.op) {
            self.step_compound(id, env, slot, Some((done.result, done.buf)));
        } else {
            self.on_simple_done(env, slot, &io, done.result, done.buf);
        }
    }

    #[inline]
    fn on_simple_done(
        &mut self,
        env: &mut Env,
        slot: RequestId,
        io: &IoCommand,
        result: Result<(), DiskError>,
        buf: Option<Buf>,
    ) {
        match result {
            Ok(()) => {
                self.count_io(env.core, io);
                let data = if io.op == IoOp::Read { buf } else { None };
                let result = self.read_result(io, data.as_ref());
                self.finish(slot, Status::SUCCESS, result, data);
            }
            Err(error) => self.disk_failed(env, slot, io, error),
        }
    }

    pub(crate) fn disk_failed(&mut self, env: &mut Env, slot: RequestId, io: &IoCommand, error: DiskError) {
        self.note_disk_error(env, io, error);
        self.refuse(env, slot, Refusal::of(status_of(error), None));
    }

    /// Logs a disk error, and counts a media error for the SMART log. Ignores [`DiskError::CompareDiffers`].
    pub(crate) fn note_disk_error(&self, env: &mut Env, io: &IoCommand, error: DiskError) {
        let Role::Io(role) = &self.role else { return };
        if error == DiskError::CompareDiffers {
            return;
        }
        if error.is_media()
            && let Some(namespace) = role.subsystem.namespace(io.nsid)
        {
            counters::add(&namespace.counters.core(env.core).media_errors, 1);
        }
        let (subsystem, status) = (role.shared.subsystem_nqn, status_of(error));
        env.notice(Notice::DiskError { subsystem, nsid: io.nsid, lba: io.range.lba, status });
    }

    #[inline]
    fn count_io(&self, core: usize, io: &IoCommand) {
        let Role::Io(role) = &self.role else { return };
        let Some(namespace) = role.subsystem.namespace(io.nsid) else { return };
        let counters = namespace.counters.core(core);
        let units = (u64::from(io.range.blocks) << io.block_shift) / 512;
        match io.op {
            IoOp::Read | IoOp::Compare | IoOp::Verify => {
                counters::add(&counters.units_read, units);
                counters::add(&counters.reads, 1);
            }
            IoOp::Write { .. } => {
                counters::add(&counters.units_written, units);
                counters::add(&counters.writes, 1);
            }
            IoOp::References
            | IoOp::Register
            | IoOp::Flush
            | IoOp::FlushAll
            | IoOp::WriteZeroes { .. }
            | IoOp::Deallocate { .. }
            | IoOp::Hint
            | IoOp::Copy { .. } => {}
        }
    }

    /// Counts a Deallocate that has deallocated `(ranges, blocks)`.
    pub(crate) fn count_unmap(&self, core: usize, io: &IoCommand, (ranges, blocks): (u32, u64)) {
        let Role::Io(role) = &self.role else { return };
        if !matches!(io.op, IoOp::Deallocate { .. }) || ranges == 0 {
            return;
        }
        let Some(namespace) = role.subsystem.namespace(io.nsid) else { return };
        let counters = namespace.counters.core(core);
        counters::add(&counters.units_unmapped, (blocks << io.block_shift) / 512);
        counters::add(&counters.unmaps, 1);
    }

    /// Frees the request's buffers and passes the completion to the transport, with `data` for a command that
    /// reads. `Event::Sent` frees the request. Panics if the request already has a reply.
    #[inline]
    pub(crate) fn finish(&mut self, slot: RequestId, status: Status, result: u64, data: Option<Buf>) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        assert_ne!(request.state, RequestState::Replying, "answered twice");
        request.state = RequestState::Replying;
        request.buf = None;
        request.aux = None;
        let cid = request.cid();
        let cqe = self.cqe(cid, status).with_result_u64(result);
        self.transport.reply(Reply { slot, cqe, data, may_omit_cqe: self.is_sq_flow_off && result == 0 });
    }

    /// Completes a command with an error and adds an entry to the controller's error log. No entry is added
    /// for an aborted command, before Connect, while closing, for a discovery controller, or beyond
    /// [`FAILED_BACKLOG_MAX`].
    pub(crate) fn refuse(&mut self, env: &mut Env, slot: RequestId, refusal: Refusal) {
        self.refuse_with(env, slot, refusal, 0);
    }

    /// As [`Qpair::refuse`], with `result` in dwords 0 and 1 of the completion.
    pub(crate) fn refuse_with(&mut self, env: &mut Env, slot: RequestId, refusal: Refusal, result: u64) {
        let Some(request) = self.requests.get(slot) else { return };
        let mut status = refusal.status;
        if status.code() != Status::ABORTED_BY_REQUEST {
            let record = ErrorRecord {
                sqid: self.qid(),
                cid: request.cid(),
                status: refusal.status,
                field: refusal.field,
                lba: if matches!(self.role, Role::Io(_)) { request.sqe.slba() } else { 0 },
                nsid: request.sqe.nsid(),
            };
            if self.record_error(env, record) {
                // Base 2.0, figure 93, M (More): the error log has an entry for this command.
                status = status.more();
            }
        }
        self.finish(slot, status, result, None);
    }

    /// Adds a record to the error log, or sends it to the admin core. False: dropped.
    fn record_error(&mut self, env: &mut Env, record: ErrorRecord) -> bool {
        match &mut self.role {
            Role::Admin(controller) => controller.on_error(record),
            // Entries are lost if commands fail faster than the messages of this core are delivered.
            Role::Io(_) if env.outbox.len() >= FAILED_BACKLOG_MAX => false,
            Role::Io(role) => {
                let controller = Arc::clone(&role.shared);
                env.send(controller.admin_core, Message::Failed(controller, record));
                true
            }
            Role::Fresh | Role::Closing => false,
        }
    }

    /// Client identifier of the host of an I/O queue; see [`ControllerShared::client`].
    #[must_use]
    pub fn client(&self) -> Option<u16> {
        match &self.role {
            Role::Io(role) => Some(role.shared.client),
            Role::Admin(_) | Role::Fresh | Role::Closing => None,
        }
    }

    /// QID; 0 for an admin queue, before Connect and while closing.
    #[must_use]
    pub fn qid(&self) -> u16 {
        match &self.role {
            Role::Io(role) => role.qid,
            Role::Admin(_) | Role::Fresh | Role::Closing => 0,
        }
    }

    #[inline]
    fn on_sent(&mut self, slot: RequestId) {
        self.replies_sent = self.replies_sent.wrapping_add(1);
        if self.charged > 0 {
            self.discharge(slot);
        }
        let request = self.requests.remove(slot);
        debug_assert!(
            request.is_none_or(|request| request.state == RequestState::Replying),
            "sent before it was answered"
        );
    }

    /// Retries requests that wait for memory or for their next step, oldest first. Stops at the first request
    /// that gets no memory.
    pub(crate) fn retry_buffers(&mut self, id: ConnectionId, env: &mut Env) -> Retried {
        let mut has_progress = false;
        for _ in 0..self.waiting.len() {
            let Some(slot) = self.waiting.front().copied() else { break };
            match self.requests.get(slot).map(|request| request.state) {
                Some(RequestState::NeedBuffer) => match self.requests.get(slot).map(|request| request.work) {
                    Some(Work::Io(io)) if io.is_fused => self.retry_fused(env, slot),
                    Some(Work::Io(_)) => self.step_buffer(id, env, slot),
                    _ => self.retry_admin_buffer(env, slot),
                },
                Some(RequestState::NeedStepBuffer) => self.resume_step(id, env, slot),
                _ => {}
            }
            if self.waiting.front() != Some(&slot) {
                continue; // the request left the queue: the queue pair was closed
            }
            let state = self.requests.get(slot).map(|request| request.state);
            if state == Some(RequestState::NeedBuffer) {
                break; // no request overtakes the oldest
            }
            has_progress = true;
            self.waiting.pop_front();
            if state == Some(RequestState::NeedStepBuffer) {
                self.waiting.push_back(slot); // its next step follows in the next turn, behind the others
            }
        }
        Retried { has_progress, has_waiting: !self.waiting.is_empty() }
    }

    /// True when requests wait for memory or for their next step.
    #[inline]
    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Logs that the host violated `rule`, and closes the connection.
    pub(crate) fn host_error(&mut self, env: &mut Env, rule: &'static str) {
        env.notice(Notice::HostError { remote: self.peer.remote, rule });
        self.close(env, CloseReason::HostError);
    }

    /// Releases the controller or the queue at once and closes the transport, which reports `Closed` later.
    pub(crate) fn close(&mut self, env: &mut Env, reason: CloseReason) {
        self.release(env, Some(reason));
        self.transport.close(reason);
    }

    /// Shutdown: ends a first half without its second, and closes the connection once no command is in
    /// flight. The admin queue closes last, because its end closes the I/O queues on all cores.
    pub(crate) fn drain(&mut self, env: &mut Env) {
        self.end_first(env, Status::ABORTED_MISSING_FUSED);
        let may_close = match &self.role {
            Role::Admin(controller) => controller.shared.taken_qids() == 0,
            Role::Fresh | Role::Io(_) => true,
            Role::Closing => false,
        };
        if may_close && self.is_idle() {
            self.close(env, CloseReason::Shutdown);
        }
    }

    fn on_closed(&mut self, env: &mut Env) {
        self.release(env, None);
    }

    fn release(&mut self, env: &mut Env, reason: Option<CloseReason>) {
        self.discharge_all();
        match std::mem::replace(&mut self.role, Role::Closing) {
            Role::Admin(mut controller) => {
                let shared = Arc::clone(&controller.shared);
                controller.remove(&env.registry);
                env.notice(Notice::Disconnected {
                    host: shared.host_nqn,
                    subsystem: shared.subsystem_nqn,
                    cntlid: shared.cntlid,
                    reason,
                });
                let reason = reason.unwrap_or(CloseReason::ControllerGone);
                env.broadcast(&Message::CloseQueues(shared, reason));
            }
            Role::Io(role) => {
                let commands = env.cancel_commands_of(env.current);
                if commands == 0 {
                    role.shared.release_queue(role.qid);
                } else {
                    env.orphaned_commands.add(env.current, commands, role.shared, role.qid, env.now);
                }
            }
            Role::Fresh | Role::Closing => {}
        }
        self.connect_blocked = None;
        self.nexts.clear();
        self.waiting.clear();
        self.parked_aers.clear();
        self.fused_first = None;
    }

    /// Applies a changed configuration: stores the new subsystem in an I/O queue, reports events on an admin
    /// queue. Closes the connection if the host has lost its access.
    pub(crate) fn on_snapshot(&mut self, env: &mut Env, old: &Snapshot) {
        let is_allowed = |shared: &ControllerShared| {
            let subsystem = env.snapshot.subsystem(&shared.subsystem_nqn);
            subsystem.filter(|subsystem| subsystem.hosts.allows(&shared.host_nqn)).cloned()
        };
        match &mut self.role {
            Role::Admin(controller) => {
                let effect = controller.on_snapshot(old, &env.advertised_snapshot);
                self.apply_effect(env, effect);
                self.deliver_async_events();
            }
            Role::Io(role) => match is_allowed(&role.shared) {
                Some(subsystem) => role.subsystem = subsystem,
                None => self.close(env, CloseReason::ControllerGone),
            },
            Role::Fresh | Role::Closing => {}
        }
    }
}
