//! [`RdmaLink`]: a queue pair and the host's end of NVMe/RDMA, joined.
//!
//! A turn posts everything that is queued with one doorbell, takes the completions, posts the receives again,
//! and hands on what came of it:
//!
//! ```text
//!   next_work.. ─ SEND (inline where the device does it) ─ doorbell     poll ─┬ RECV ─> received ─┐
//!   acquire: registration of the caller's buffer, mostly kept                 └ SEND ─> completed ┴─> events
//! ```
//! What comes back from the device is a receive's number, or a command's chain with its generation.
//!
//! The head memory is written again when its entry is: see `spindle_rdma::host` for why that is allowed.
//! Nothing here reads or writes a buffer while its command is outstanding; it is given back when the command
//! is over, or the queue pair is destroyed.

mod connect;
mod memory;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{SQE_BYTES, Sqe};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_rdma::host::{self, CloseCause, Conn, ENTRY_BYTES, HostConfig, HostEvent, Registered};
use spindle_rdma::registration::Limits as RegistrationLimits;
use spindle_rdma::work::{Completion, Op, Work};
use spindle_rdma_verbs::{
    CmChannel, CmEventKind, CmId, CompletionChannel, CompletionQueue, Device, MemoryRegion, Operation,
    POLL_BATCH, QueuePair, SendData, Sge, VerbsError, WcStatus, WorkCompletion,
};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_reactor::net::Waker;
use spindle_reactor::slab::Slot;
use spindle_transport::host::HostData;

use super::LinkEvent;
use crate::error::Loss;
use crate::qpair::Refusal;

pub(super) use connect::RdmaOpening;
use memory::Registrations;

/// Bytes of a completion queue entry, and the distance of two: one to a cache line, so that the device does
/// not write where the core reads.
const REPLY_BYTES: u32 = 16;
const REPLY_STRIDE: usize = 64;
/// Of a work request's number: it is a receive.
const RECEIVE: u64 = 1 << 63;
/// Of a send's number: it was signalled.
const SIGNALLED: u64 = 1 << 32;
/// Batches of completions that one turn takes at most: a queue is not to starve its neighbours.
const POLLS_MAX: usize = 4;
/// How often the connection manager is asked whether the connection has ended: a system call.
const LOOK_PERIOD: Nanos = Nanos::from_ms(1);
/// Pieces of one SEND.
const PIECES_MAX: usize = 16;

/// Memory of a queue pair.
#[derive(Debug)]
struct Memory {
    region: MemoryRegion,
    /// By CID.
    heads: Buf,
    /// By the number of the receive.
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

/// A connection's verbs. The queue pair goes first: what is below it is used by it.
#[derive(Debug)]
struct Verbs {
    queue_pair: QueuePair,
    queue: CompletionQueue,
    completions: CompletionChannel,
    memory: Memory,
    id: CmId,
    channel: CmChannel,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct RdmaLink {
    /// `None`: it has ended, and the queue pair is gone.
    verbs: Option<Verbs>,
    conn: Conn,
    registrations: Rc<Registrations>,
    /// Why it ended, where that was seen here.
    cause: Option<Loss>,
    /// The next completion will be told.
    is_armed: bool,
    next_look: Nanos,
}

impl RdmaLink {
    fn new(verbs: Verbs, device: &Arc<Device>, registration: RegistrationLimits, depth: u16) -> RdmaLink {
        let config = HostConfig {
            entries: depth,
            send_wr: verbs.queue_pair.send_wr(),
            max_sge: u8::try_from(verbs.queue_pair.send_sge()).unwrap_or(u8::MAX),
            ..HostConfig::default()
        };
        RdmaLink {
            verbs: Some(verbs),
            conn: Conn::new(config),
            registrations: Registrations::of(device, registration),
            cause: None,
            is_armed: false,
            next_look: Nanos::ZERO,
        }
    }

    /// Queue a command.
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

    /// True while commands can be submitted.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.conn.is_open()
    }

    /// What the controller takes.
    pub(super) fn set_offered(&mut self, in_capsule_bytes: u32, descriptors: u8) {
        self.conn.set_offered(in_capsule_bytes, descriptors);
    }

    /// Post what is queued, with one doorbell.
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
            // A host only sends.
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
                // The connection knows how many a SEND may have.
                pieces.extend(keys.iter().map(sge).take(PIECES_MAX - 1));
            }
            batch.add(id, is_signalled, Operation::Send, SendData::Local(&pieces))?;
        }
        batch.submit()
    }

    /// Send, take completions, and tell what came of it, each with whether the connection was open. True when
    /// anything came.
    #[inline]
    pub(super) fn turn(&mut self, now: Nanos, mut on_event: impl FnMut(LinkEvent, bool)) -> bool {
        self.send();
        let mut has_come = self.take_completions();
        if now >= self.next_look {
            self.next_look = now + LOOK_PERIOD;
            self.look();
        }
        if has_come || !self.conn.is_open() {
            while let Some(event) = self.conn.next_event() {
                self.tell(event, &mut on_event);
            }
            // What waited for room in the send queue may have it now.
            self.send();
        }
        if !self.conn.is_open() && self.verbs.is_some() {
            has_come = true;
            self.tear_down();
            while let Some(event) = self.conn.next_event() {
                self.tell(event, &mut on_event);
            }
        }
        self.registrations.tidy();
        has_come
    }

    #[inline]
    fn tell(&self, event: HostEvent, on_event: &mut impl FnMut(LinkEvent, bool)) {
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

    /// True when there were any.
    #[inline]
    fn take_completions(&mut self) -> bool {
        let RdmaLink { verbs: Some(verbs), conn, cause, .. } = self else { return false };
        let Verbs { queue_pair, queue, memory, .. } = verbs;
        let mut has_come = false;
        for _ in 0..POLLS_MAX {
            let mut again = ArrayVec::<(u64, Sge), POLL_BATCH>::new();
            let count = queue.poll(|completion| {
                if let Some(index) = take(conn, memory, completion, cause) {
                    again.push((completion.id, memory.reply_sge(index)));
                }
            });
            has_come |= count > 0;
            if !again.is_empty()
                && conn.is_open()
                && let Err(error) = queue_pair.post_receives(again)
            {
                cause.get_or_insert(Loss::Verb(error));
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

    /// What the connection manager has to tell.
    #[cold]
    fn look(&mut self) {
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

    /// End it at once; every command is told in the next turn.
    #[cold]
    pub(super) fn fail(&mut self, loss: Loss) {
        if self.conn.is_open() {
            self.cause.get_or_insert(loss);
            self.conn.end(CloseCause::Requested);
        }
    }

    /// Say goodbye, and destroy the queue pair. The device touches no buffer afterwards.
    #[cold]
    fn tear_down(&mut self) {
        if let Some(verbs) = self.verbs.take() {
            // Fails where the other side was first.
            let _ = verbs.id.disconnect();
        }
        self.is_armed = false;
        self.conn.on_gone();
    }

    fn loss(&self, cause: CloseCause) -> Loss {
        match (self.cause, cause) {
            (_, CloseCause::Violation(violation)) => Loss::RdmaViolation(violation),
            // What is flushed says that the queue pair was in its error state, not why.
            (Some(Loss::Work(WcStatus::FLUSHED)), _) | (None, CloseCause::ByPeer) => Loss::ByPeer,
            (Some(loss), _) => loss,
            (None, CloseCause::Requested) => Loss::Requested,
            (None, CloseCause::Failed | CloseCause::Device) => Loss::Device,
        }
    }

    /// Have the next completion told.
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

    /// Sleep until something comes or `waker` is raised. The first call only arms: what came before is to be
    /// looked for.
    pub(super) fn wait_io(&mut self, timeout: Duration, waker: Option<&Waker>) {
        if !self.is_armed {
            return self.arm();
        }
        let Some(verbs) = &self.verbs else { return };
        let timeout = Timespec::try_from(timeout).ok();
        let completions = PollFd::new(&verbs.completions, PollFlags::IN);
        let channel = PollFd::new(&verbs.channel, PollFlags::IN);
        // A signal or an error ends the wait early; the next turn sees what there is.
        let _ = match waker {
            Some(waker) => {
                poll(&mut [completions, channel, PollFd::new(waker, PollFlags::IN)], timeout.as_ref())
            }
            None => poll(&mut [completions, channel], timeout.as_ref()),
        };
        if verbs.completions.take_events(&verbs.queue) > 0 {
            self.is_armed = false;
        }
        // The connection manager may have something to tell as well.
        self.next_look = Nanos::ZERO;
    }
}

impl Drop for RdmaLink {
    /// Buffers that are outstanding go after the queue pair, and their registrations are given back.
    fn drop(&mut self) {
        self.fail(Loss::Requested);
        if self.verbs.is_some() {
            self.tear_down();
        }
        while let Some(event) = self.conn.next_event() {
            self.tell(event, &mut |_, _| {});
        }
    }
}

/// One completion; the number of the receive that is to be posted again.
#[inline]
fn take(conn: &mut Conn, memory: &Memory, it: WorkCompletion, cause: &mut Option<Loss>) -> Option<u32> {
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
    // The device has written its part of the memory, and goes on with others: only this part is read.
    let mut reply = [0; REPLY_BYTES as usize];
    memory.replies.copy_out(low as usize * REPLY_STRIDE, &mut reply);
    conn.received(reply.get(..it.bytes as usize).unwrap_or_default());
    Some(low)
}
