//! [`RdmaLink`]: a queue pair with the host side of the NVMe/RDMA protocol.
//!
//! A turn posts all queued work with one doorbell, handles the completions, posts the receives again, and
//! reports the resulting events:
//!
//! ```text
//!   next_work.. ─ SEND (inline where the device does it) ─ doorbell     poll ─┬ RECV ─> received ─┐
//!   acquire: registration of the caller's buffer, mostly kept                 └ SEND ─> completed ┴─> events
//! ```
//! A work request ID contains the index of a receive, or the slot (index and generation) of a command's
//! chain. Two bits mark receives and signalled sends.
//!
//! The memory of a command capsule is reused with its entry: `spindle_nvme_rdma::host` explains why that is
//! allowed. The host does not access a buffer while its command is outstanding. The buffer is returned when
//! the command has completed or the queue pair is destroyed.

mod connect;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{SQE_BYTES, Sqe};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_nvme_rdma::host::{self, CloseCause, Conn, ENTRY_BYTES, HostConfig, HostEvent, Registered};
use spindle_nvme_rdma::registration::{Limits as RegistrationLimits, Registrations};
use spindle_nvme_rdma::work::{Completion, Op, Work};
use spindle_nvme_transport::host::HostData;
use spindle_rdma::{
    CmChannel, CmEventKind, CmId, CompletionChannel, CompletionQueue, Domain, MemoryRegion, Operation,
    POLL_BATCH, QueuePair, SendData, Sge, VerbsError, WcStatus, WorkCompletion,
};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_reactor::net::Waker;
use spindle_reactor::slab::Slot;

use super::LinkEvent;
use crate::error::Loss;
use crate::qpair::Refusal;

pub(super) use connect::RdmaOpening;

/// Bytes of a received completion queue entry.
const REPLY_BYTES: u32 = 16;
/// Distance of two received completion queue entries: one entry per cache line, so that the device does not
/// write to a line that the core reads.
const REPLY_STRIDE: usize = 64;
/// Bit of a work request ID that marks a receive.
const RECEIVE: u64 = 1 << 63;
/// Bit of a work request ID that marks a signalled send.
const SIGNALLED: u64 = 1 << 32;
/// Most batches of completions per turn, so that other queues of the thread are polled too.
const POLLS_MAX: usize = 4;
/// Period of polling the connection manager for a disconnect; each poll is a system call.
const CM_POLL_PERIOD: Nanos = Nanos::from_ms(1);
/// Most scatter/gather elements of one SEND.
const PIECES_MAX: usize = 16;

/// Registered memory of a queue pair: capsules and completion entries.
#[derive(Debug)]
struct Memory {
    region: MemoryRegion,
    /// Command capsules, by CID.
    heads: Buf,
    /// Completion queue entries, by index of the receive.
    replies: Buf,
}

impl Memory {
    fn sge(&self, of: &Buf, offset: usize, bytes: u32) -> Sge {
        let base = of.as_slice().map_or(0, |slice| slice.as_ptr() as u64);
        Sge { address: base + offset as u64, bytes, key: self.region.local_key() }
    }

    fn reply_sge(&self, index: u32) -> Sge {
        self.sge(&self.replies, index as usize * REPLY_STRIDE, REPLY_BYTES)
    }
}

/// Verbs objects of a connection, in drop order: the queue pair uses the objects after it.
#[derive(Debug)]
struct Verbs {
    queue_pair: QueuePair,
    queue: CompletionQueue,
    completions: CompletionChannel,
    memory: Memory,
    id: CmId,
    channel: CmChannel,
}

#[derive(Debug)]
pub(crate) struct RdmaLink {
    /// `None` after the end: the queue pair was destroyed.
    verbs: Option<Verbs>,
    conn: Conn,
    registrations: Rc<Registrations>,
    /// Reason of the end, if this side caused or detected it.
    cause: Option<Loss>,
    /// The completion queue is armed: the next completion raises an event.
    is_armed: bool,
    next_cm_poll: Nanos,
}

impl RdmaLink {
    fn new(verbs: Verbs, domain: &Arc<Domain>, registration: RegistrationLimits, depth: u16) -> RdmaLink {
        let config = HostConfig {
            entries: depth,
            send_wr: verbs.queue_pair.send_wr(),
            max_sge: u8::try_from(verbs.queue_pair.send_sge()).unwrap_or(u8::MAX),
            ..HostConfig::default()
        };
        RdmaLink {
            verbs: Some(verbs),
            conn: Conn::new(config),
            registrations: Registrations::of(domain, registration),
            cause: None,
            is_armed: false,
            next_cm_poll: Nanos::ZERO,
        }
    }

    #[inline]
    pub(super) fn submit(&mut self, sqe: Sqe, data: HostData) -> Result<(), (Refusal, HostData)> {
        if !self.conn.is_open() {
            return Err((Refusal::Down, data));
        }
        let registered = match data {
            HostData::None => HostData::None,
            HostData::ToController(buf) => HostData::ToController(
                self.register(buf).map_err(|(why, buf)| (why, HostData::ToController(buf)))?,
            ),
            HostData::FromController(buf) => HostData::FromController(
                self.register(buf).map_err(|(why, buf)| (why, HostData::FromController(buf)))?,
            ),
        };
        self.conn.submit(sqe, registered).map_err(|full| self.give_back(full))
    }

    #[inline]
    fn register(&self, buf: Buf) -> Result<Registered, (Refusal, Buf)> {
        match self.registrations.acquire(&buf) {
            Ok(keys) => Ok(Registered { buf, keys }),
            Err(error) => Err((Refusal::Register { errno: error.errno }, buf)),
        }
    }

    #[cold]
    fn give_back(&self, full: host::SubmitError) -> (Refusal, HostData) {
        let data = full.data.map(|Registered { buf, keys }| {
            self.registrations.release(&keys);
            buf
        });
        (full.kind.into(), data)
    }

    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.conn.is_open()
    }

    /// Sets the controller's limits: bytes of in-capsule data and number of SGL descriptors of a command.
    pub(super) fn set_offered(&mut self, in_capsule_bytes: u32, descriptors: u8) {
        self.conn.set_offered(in_capsule_bytes, descriptors);
    }

    /// Posts queued work with one doorbell; an error aborts the connection.
    #[inline]
    pub(super) fn send(&mut self) {
        if self.conn.has_queued()
            && let Err(error) = self.post()
        {
            self.fail(Loss::Verb(error));
        }
    }

    fn post(&mut self) -> Result<(), VerbsError> {
        let RdmaLink { verbs: Some(Verbs { queue_pair, memory, .. }), conn, .. } = self else {
            return Ok(());
        };
        let inline_bytes = queue_pair.inline_bytes() as usize;
        let mut batch = queue_pair.batch();
        while let Some(Work { chain, is_signalled, op }) = conn.next_work() {
            // The host side posts only SENDs.
            let Op::Send { head, head_bytes, local, .. } = op else { continue };
            let signalled = if is_signalled { SIGNALLED } else { 0 };
            let id = u64::from(chain.to_wire()) | signalled;
            let head = &head[..usize::from(head_bytes)];
            let mut list = conn.descriptors(chain).peekable();
            if local.bytes == 0 && list.peek().is_none() && head.len() <= inline_bytes {
                batch.add(id, is_signalled, Operation::Send, SendData::Inline(head))?;
                continue;
            }
            let begin = chain.index() * ENTRY_BYTES;
            let mut end = begin + SQE_BYTES;
            memory.heads.copy_in(begin, head);
            for descriptor in list {
                memory.heads.copy_in(end, descriptor.as_bytes());
                end += descriptor.as_bytes().len();
            }
            let head = memory.sge(&memory.heads, begin, u32::try_from(end - begin).unwrap_or(0));
            let mut pieces = ArrayVec::<Sge, PIECES_MAX>::from_iter([head]);
            if local.bytes > 0 {
                let keys = conn.keys(chain).map_or(&[][..], host::Keys::pieces);
                let sge = |piece: &host::Piece| Sge {
                    address: piece.address,
                    bytes: piece.bytes,
                    key: piece.local_key,
                };
                // `conn` limits the segments to `max_sge`.
                pieces.extend(keys.iter().map(sge).take(PIECES_MAX - 1));
            }
            batch.add(id, is_signalled, Operation::Send, SendData::Local(&pieces))?;
        }
        batch.submit()
    }

    /// Sends, handles completions, and reports each event with a flag: whether the connection was open.
    /// Returns true when there was any completion, or the connection ended.
    #[inline]
    pub(super) fn turn(&mut self, now: Nanos, mut on_event: impl FnMut(LinkEvent, bool)) -> bool {
        self.send();
        let mut has_come = self.take_completions();
        if now >= self.next_cm_poll {
            self.next_cm_poll = now + CM_POLL_PERIOD;
            self.poll_cm();
        }
        if has_come || !self.conn.is_open() {
            while let Some(event) = self.conn.next_event() {
                self.emit(event, &mut on_event);
            }
            // Completions may have freed send queue entries for waiting work.
            self.send();
        }
        if !self.conn.is_open() && self.verbs.is_some() {
            has_come = true;
            self.tear_down();
            while let Some(event) = self.conn.next_event() {
                self.emit(event, &mut on_event);
            }
        }
        self.registrations.tidy();
        has_come
    }

    #[inline]
    fn emit(&self, event: HostEvent, on_event: &mut impl FnMut(LinkEvent, bool)) {
        let event = match event {
            HostEvent::Completed { cid, cqe, buf, result } => {
                let buf = buf.map(|Registered { buf, keys }| {
                    self.registrations.release(&keys);
                    buf
                });
                LinkEvent::Completed { cid, cqe, buf, result }
            }
            HostEvent::Ready => return,
            HostEvent::Closed { why } => LinkEvent::Closed(self.loss(why)),
        };
        on_event(event, self.conn.is_open());
    }

    /// Handles at most [`POLLS_MAX`] batches of completions, and posts receives again. True: there were any.
    #[inline]
    fn take_completions(&mut self) -> bool {
        let RdmaLink { verbs: Some(verbs), conn, cause, .. } = self else { return false };
        let Verbs { queue_pair, queue, memory, .. } = verbs;
        let mut has_come = false;
        for _ in 0..POLLS_MAX {
            let mut again = ArrayVec::<(u64, Sge), POLL_BATCH>::new();
            let count = queue.poll(|completion| {
                if let Some(index) = on_work_completion(conn, memory, completion, cause) {
                    again.push((completion.id, memory.reply_sge(index)));
                }
            });
            has_come |= count > 0;
            if !again.is_empty()
                && conn.is_open()
                && let Err(error) = queue_pair.post_receives(again)
            {
                cause.get_or_insert(Loss::Verb(error.into()));
                conn.end(CloseCause::Device);
            }
            if count < POLL_BATCH {
                break;
            }
        }
        if queue.is_broken() {
            conn.end(CloseCause::Device);
        }
        has_come
    }

    /// Handles a connection manager event. Every event of this connection except Established ends it.
    #[cold]
    fn poll_cm(&mut self) {
        let Some(verbs) = &self.verbs else { return };
        let event = match verbs.channel.next_event() {
            Ok(None) => return,
            Ok(Some(event)) => event,
            Err(error) => return self.fail(Loss::Verb(error)),
        };
        if event.id != verbs.id.token() {
            return;
        }
        if event.kind == CmEventKind::DeviceRemoval {
            self.fail(Loss::Device);
        } else if event.kind != CmEventKind::Established {
            self.fail(Loss::ByPeer);
        }
    }

    #[cold]
    pub(super) fn fail(&mut self, loss: Loss) {
        if self.conn.is_open() {
            self.cause.get_or_insert(loss);
            self.conn.end(CloseCause::Requested);
        }
    }

    /// Disconnects and destroys the queue pair. The device accesses no buffer afterwards.
    #[cold]
    fn tear_down(&mut self) {
        if let Some(verbs) = self.verbs.take() {
            // Fails if the target has disconnected already.
            let _ = verbs.id.disconnect();
        }
        self.is_armed = false;
        self.conn.on_gone();
    }

    fn loss(&self, cause: CloseCause) -> Loss {
        match (self.cause, cause) {
            (_, CloseCause::Violation(violation)) => Loss::RdmaViolation(violation),
            // A flushed completion shows the error state of the queue pair, not its cause.
            (Some(Loss::Work(WcStatus::FLUSHED)), _) | (None, CloseCause::ByPeer) => Loss::ByPeer,
            (Some(loss), _) => loss,
            (None, CloseCause::Requested) => Loss::Requested,
            (None, CloseCause::Failed | CloseCause::Device) => Loss::Device,
        }
    }

    /// Arms the completion queue: the next completion raises an event. An error aborts the connection.
    fn arm(&mut self) {
        let Some(verbs) = &mut self.verbs else { return };
        if self.is_armed {
            return;
        }
        match verbs.queue.arm() {
            Ok(()) => self.is_armed = true,
            Err(error) => self.fail(Loss::Verb(error)),
        }
    }

    /// Sleeps until a work completion or an event of the connection manager arrives, or `waker` is woken; at
    /// most `timeout`. If the completion queue is not armed, this call only arms it and returns, as
    /// completions may have arrived before.
    pub(super) fn wait_io(&mut self, timeout: Duration, waker: Option<&Waker>) {
        if !self.is_armed {
            return self.arm();
        }
        let Some(verbs) = &self.verbs else { return };
        let timeout = Timespec::try_from(timeout).ok();
        let completions = PollFd::new(&verbs.completions, PollFlags::IN);
        let channel = PollFd::new(&verbs.channel, PollFlags::IN);
        // A signal or an error ends the wait early; the next turn handles it.
        let _ = match waker {
            Some(waker) => {
                poll(&mut [completions, channel, PollFd::new(waker, PollFlags::IN)], timeout.as_ref())
            }
            None => poll(&mut [completions, channel], timeout.as_ref()),
        };
        if verbs.completions.take_events(&verbs.queue) > 0 {
            self.is_armed = false;
        }
        // An event of the connection manager may have ended the wait: the next turn polls it.
        self.next_cm_poll = Nanos::ZERO;
    }
}

impl Drop for RdmaLink {
    /// Destroys the queue pair, then releases outstanding buffers and their registrations.
    fn drop(&mut self) {
        self.fail(Loss::Requested);
        if self.verbs.is_some() {
            self.tear_down();
        }
        while let Some(event) = self.conn.next_event() {
            self.emit(event, &mut |_, _| {});
        }
    }
}

/// Handles a work completion. Returns the receive to post again; `None` for a send or a failed receive.
#[inline]
fn on_work_completion(
    conn: &mut Conn,
    memory: &Memory,
    it: WorkCompletion,
    cause: &mut Option<Loss>,
) -> Option<u32> {
    if !it.is_ok && conn.is_open() && (cause.is_none() || *cause == Some(Loss::Work(WcStatus::FLUSHED))) {
        *cause = Some(Loss::Work(it.status));
    }
    let [a, b, c, d, ..] = it.id.to_le_bytes();
    let low = u32::from_le_bytes([a, b, c, d]);
    if it.id & RECEIVE == 0 {
        let is_signalled = it.id & SIGNALLED != 0;
        conn.completed(Completion { chain: Slot::from_wire(low), is_signalled, is_ok: it.is_ok });
        return None;
    }
    if !it.is_ok {
        conn.end(CloseCause::Failed);
        return None;
    }
    // The device may be writing other entries, so only this entry is read.
    let mut reply = [0; REPLY_BYTES as usize];
    memory.replies.copy_out(low as usize * REPLY_STRIDE, &mut reply);
    conn.received(reply.get(..it.bytes as usize).unwrap_or_default());
    Some(low)
}
