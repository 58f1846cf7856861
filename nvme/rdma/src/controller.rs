//! The controller's end of a connection: implements [`Transport`], without verbs.
//!
//! Order of the calls that a shell makes in one turn:
//!
//! ```text
//!   received(capsule), completed(completion), then next_event.. (by the target's queue pair)
//!   next_buffer() -> post it again             before the replies: the host may answer a reply at once
//!   next_work() -> post                      one doorbell for all of them
//!   phase()   Ending: error state, poll the completions, destroy the queue pair, then on_destroyed()
//!   watch()   every 50 ms: probes an idle host; on_time() at deadline()
//! ```
//!
//! Memory: a capsule with in-capsule data contains its receive buffer. [`Conn::next_buffer`] returns the
//! buffer once the data was copied, the command is answered or the connection ends. So a command that waits
//! for memory occupies its receive slot. A chain owns its data buffer from the call that adds it (`fetch`,
//! `fetch_part`, `send_part`, `reply`) until the last of its work requests has completed. When the connection
//! ends, a chain without posted work is dropped at once. A chain with posted work is dropped when that work
//! completes (flushed), at the latest when the queue pair is destroyed.
//!
//! The completion of a reply's SEND and the host's next capsule arrive in either order. A command beyond the
//! queue's entries waits in the inbox until the completion of an earlier reply's SEND frees an entry.
//!
//! The contents of capsules are checked in `capsule` only.

mod blocks;
mod capsule;
mod chain;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;
mod unsignalled;

use spindle_nvme_transport::RequestId;
use std::collections::VecDeque;

use nvme_spec::cqe::Cqe;
use spindle_nvme_transport::{CloseReason, Event, FAST_PATH, Limits, Reply, Transport};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::{Slab, Slot};

use crate::work::Completion;
use blocks::{Blocks, SpareLists};
use chain::{CQE_BYTES, Chain, ChainKind};
use unsignalled::Unsignalled;

pub use capsule::{CAPSULE_BYTES, Capsule, DESCRIPTORS_MAX, Violation};

/// Maximum chains per queue entry: two parts and the reply of one command, and one for chains of earlier
/// commands that a disconnect left behind.
pub(crate) const CHAINS_PER_COMMAND: usize = 4;

/// Time without a completion after which the host is probed. 15 s: with the queue pair's retries a dead host
/// is detected within 30 s, and an idle live host receives four probes a minute.
pub const PROBE_AFTER: Nanos = Nanos::from_secs(15);

/// Constants of a connection, from the listener's settings, the device's limits and the connection request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnConfig {
    /// Maximum in-capsule data in bytes (IOCCSZ without the submission queue entry).
    pub in_capsule_bytes: u32,
    /// Maximum I/O queue entries advertised to hosts (CAP.MQES + 1).
    pub queue_entries: u16,
    /// Receives posted for this queue, which is also the maximum of unanswered capsules (HSQSIZE + 1).
    pub receives: u16,
    /// Maximum data bytes of one command (MDTS).
    pub transfer_bytes: u32,
    /// Capacity of the send queue in work requests, at least 2.
    pub send_queue: u32,
    /// Maximum scatter/gather entries of one work request, at least 1.
    pub segments_max: usize,
    /// Maximum outstanding RDMA READs, at least 1.
    pub reads_max: u32,
    /// The device supports SEND with invalidate.
    pub can_invalidate: bool,
    /// Maximum time that a close waits for posted replies before the queue pair is ended.
    pub close_timeout: Nanos,
    /// Time without a completion after which an idle host is probed; the default is [`PROBE_AFTER`].
    pub probe_after: Nanos,
}

impl Default for ConnConfig {
    /// Returns placeholder values, used until the device and the connection request are known.
    fn default() -> Self {
        ConnConfig {
            in_capsule_bytes: 4096,
            queue_entries: 128,
            receives: 128,
            transfer_bytes: 1 << 20,
            send_queue: 256,
            segments_max: 1,
            reads_max: 1,
            can_invalidate: false,
            close_timeout: Nanos::from_secs(2),
            probe_after: PROBE_AFTER,
        }
    }
}

/// State of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Accepted, but the connection manager has not reported ESTABLISHED. Received capsules are queued.
    Connecting,
    /// Capsules are executed and replies are sent.
    Open,
    /// Posted and queued replies are still sent; capsules are discarded.
    Draining,
    /// The shell must move the queue pair to the error state and destroy it.
    Ending,
    /// The queue pair is destroyed.
    Closed,
}

#[derive(Debug, Default)]
struct Pending {
    /// Descriptors of the command's data at the host, until a fetch of all of the data or the reply.
    blocks: Blocks,
    /// Remote key that the reply's SEND invalidates.
    invalidate: Option<u32>,
    /// Receive buffer and length in bytes of the in-capsule data, until the data is copied.
    data: Option<(Buf, u32)>,
}

/// State of the idle detection of [`Conn::watch`].
#[derive(Debug, Default)]
struct Silence {
    /// A receive or a work request of the send queue has completed since the last call of [`Conn::watch`].
    is_broken: bool,
    /// Time of the first [`Conn::watch`] that found the connection idle; `None`: not idle, or just probed.
    since: Option<Nanos>,
}

/// The controller's end of one connection; see the module documentation.
#[derive(Debug)]
pub struct Conn {
    config: ConnConfig,
    phase: Phase,
    /// Capsules not parsed yet.
    inbox: VecDeque<Capsule>,
    /// Receive buffers to be posted again.
    free_buffers: VecDeque<Buf>,
    /// State of the command in the last [`Event::Command`], until it has a slot, is answered or ignored.
    current: Option<Pending>,
    /// Unanswered commands with a slot, indexed by the slot's index.
    pending: Vec<(RequestId, Pending)>,
    chains: Slab<Chain>,
    spare_lists: SpareLists,
    /// Chains with READs to post, oldest first.
    fetches: VecDeque<Slot>,
    /// Chains with WRITEs and SENDs to post, oldest first.
    replies: VecDeque<Slot>,
    /// `fetches` and `replies` alternate: the next work request is taken from `fetches` if possible, else
    /// from `replies`. False: the other order.
    is_fetch_next: bool,
    unsignalled: Unsignalled,
    send_free: u32,
    reads_free: u32,
    /// Events of completed chains and copied in-capsule data, not returned by `next_event` yet.
    events: VecDeque<Event>,
    deadline: Option<Nanos>,
    violation: Option<Violation>,
    is_closed_reported: bool,
    /// Commands returned by `next_event` whose reply's SEND has not completed, or whose [`Event::Sent`] is
    /// not returned yet. At most `outstanding_max`.
    outstanding: usize,
    /// Completed fast-path replies not yet counted by [`Transport::take_fast_path_sent`].
    fast_path_sent: u32,
    outstanding_max: usize,
    /// Unanswered commands of `next_event`. With the inbox at most `receives`, else [`Violation::Capsules`].
    unanswered: usize,
    silence: Silence,
}

impl Conn {
    /// Creates a connection in [`Phase::Connecting`]. `config` contains the limits of its queue pair.
    ///
    /// # Panics
    /// If `send_queue` < 2, or `segments_max` or `reads_max` is 0.
    #[must_use]
    pub fn new(config: ConnConfig) -> Conn {
        assert!(config.send_queue >= 2 && config.segments_max >= 1 && config.reads_max >= 1, "{config:?}");
        let entries = usize::from(config.receives);
        Conn {
            config,
            phase: Phase::Connecting,
            inbox: VecDeque::with_capacity(entries),
            free_buffers: VecDeque::with_capacity(entries),
            current: None,
            pending: std::iter::repeat_with(|| (FAST_PATH, Pending::default())).take(entries).collect(),
            // One more for the probe.
            chains: Slab::with_capacity(CHAINS_PER_COMMAND * entries + 1),
            spare_lists: SpareLists::default(),
            fetches: VecDeque::with_capacity(2 * entries),
            replies: VecDeque::with_capacity(CHAINS_PER_COMMAND * entries + 1),
            is_fetch_next: false,
            unsignalled: Unsignalled::new(config.send_queue, entries),
            send_free: config.send_queue,
            reads_free: config.reads_max,
            events: VecDeque::with_capacity(CHAINS_PER_COMMAND * entries),
            deadline: None,
            violation: None,
            is_closed_reported: false,
            outstanding: 0,
            fast_path_sent: 0,
            outstanding_max: 1,
            unanswered: 0,
            silence: Silence::default(),
        }
    }

    /// Opens the connection on the connection manager's ESTABLISHED, so that queued capsules are executed. No
    /// effect unless the phase is [`Phase::Connecting`].
    pub fn on_established(&mut self) {
        if self.phase == Phase::Connecting {
            self.phase = Phase::Open;
        }
    }

    /// Queues the capsule of a completed receive. More than `receives` unanswered capsules end the
    /// connection. A connection that drains or has ended discards the capsule and returns its buffer.
    #[inline]
    pub fn received(&mut self, capsule: Capsule) {
        self.silence.is_broken = true;
        match self.phase {
            Phase::Connecting | Phase::Open
                if self.inbox.len() + self.unanswered >= usize::from(self.config.receives) =>
            {
                self.free_buffers.extend(capsule.buf);
                self.violate(Violation::Capsules { allowed: self.config.receives });
            }
            Phase::Connecting | Phase::Open => self.inbox.push_back(capsule),
            Phase::Draining | Phase::Ending | Phase::Closed => self.free_buffers.extend(capsule.buf),
        }
    }

    /// Handles a completion of the send queue. A failed work request ends the connection.
    #[inline]
    pub fn completed(&mut self, completion: Completion) {
        self.silence.is_broken = true;
        if !completion.is_ok {
            self.end();
        }
        if completion.is_signalled {
            self.chain_completed(completion.chain, completion.is_ok);
        }
    }

    /// Ends the connection without draining, such as on DISCONNECTED, a lost device, a failed receive or
    /// post, or a stall.
    pub fn on_disconnected(&mut self) {
        self.end();
    }

    /// Drops all chains. To be called when the queue pair is destroyed: no device accesses the buffers any
    /// more. [`Event::Closed`] follows.
    pub fn on_destroyed(&mut self) {
        self.phase = Phase::Closed;
        self.drop_unposted();
        self.chains = Slab::with_capacity(0);
        self.events.clear();
        self.deadline = None;
    }

    /// Returns a receive buffer that is no longer used and must be posted again; `None` if there is none.
    #[inline]
    pub fn next_buffer(&mut self) -> Option<Buf> {
        self.free_buffers.pop_front()
    }

    /// Returns the state. The shell ends the queue pair on [`Phase::Ending`].
    #[inline]
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns the count of posted work requests of the send queue that are not known to have completed. A
    /// drain waits until the count is 0.
    #[must_use]
    pub fn posted(&self) -> u32 {
        self.config.send_queue - self.send_free
    }

    /// Returns the count of RDMA READs that may be posted before another READ completes.
    #[must_use]
    pub fn reads_free(&self) -> u32 {
        self.reads_free
    }

    /// Returns the count of receive buffers in this connection: of unparsed capsules, of in-capsule data not
    /// copied yet, and those to be posted again.
    #[must_use]
    pub fn buffers_held(&self) -> usize {
        let is_held = |pending: &Pending| usize::from(pending.data.is_some());
        self.inbox.iter().filter(|capsule| capsule.buf.is_some()).count()
            + self.free_buffers.len()
            + self.current.as_ref().map_or(0, is_held)
            + self.pending.iter().map(|(_, pending)| is_held(pending)).sum::<usize>()
    }

    /// Returns true if [`Transport::next_event`] has an event or capsule, without further completions.
    #[inline]
    #[must_use]
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
            || (self.phase == Phase::Open
                && !self.inbox.is_empty()
                && self.outstanding < self.outstanding_max)
            || (self.phase == Phase::Closed && !self.is_closed_reported)
    }

    /// Returns the violation that ended the connection, for the log. `None`: none, or returned before.
    pub fn take_violation(&mut self) -> Option<Violation> {
        self.violation.take()
    }

    /// Returns when [`Conn::on_time`] must be called. Zero: in the next turn; `None`: no call is needed.
    #[must_use]
    pub fn deadline(&self) -> Option<Nanos> {
        self.deadline
    }

    /// Starts the close timer of a drain. Its expiry ends the connection: replies not sent by then are lost.
    pub fn on_time(&mut self, now: Nanos) {
        match self.deadline {
            Some(Nanos::ZERO) => self.deadline = Some(now + self.config.close_timeout),
            Some(deadline) if now >= deadline => {
                self.deadline = None;
                self.end();
            }
            Some(_) | None => {}
        }
    }

    /// Probes the host if the connection has been idle for `probe_after`. To be called much more often than
    /// that. Returns true if a probe was queued and must be posted.
    ///
    /// At most one probe is outstanding: posted work shows by its completion whether the host responds.
    ///
    /// Keep Alive detects a dead host, but not if KATO is 0, and not for an I/O queue whose admin queue is
    /// closed. An idle queue pair does not detect a dead peer either. So an idle connection posts an RDMA
    /// WRITE of zero bytes. Such a WRITE accesses no memory and needs no key (InfiniBand Architecture 1.4,
    /// C9-88), and the host's software does not see it. The queue pair of a dead host exceeds its retries.
    pub fn watch(&mut self, now: Nanos) -> bool {
        let is_busy = std::mem::take(&mut self.silence.is_broken) || self.posted() > 0;
        if self.phase != Phase::Open || is_busy || !self.replies.is_empty() {
            self.silence.since = None;
            return false;
        }
        let since = *self.silence.since.get_or_insert(now);
        if now < since + self.config.probe_after {
            return false;
        }
        self.silence.since = None;
        let probe = self.add_chain(Chain::new(FAST_PATH, ChainKind::Probe, None, Blocks::Empty));
        self.replies.extend(probe);
        probe.is_some()
    }
    #[cold]
    fn end(&mut self) {
        if matches!(self.phase, Phase::Ending | Phase::Closed) {
            return;
        }
        self.phase = Phase::Ending;
        self.deadline = None;
        self.drop_unposted();
    }

    #[cold]
    fn drain(&mut self) {
        if self.phase != Phase::Open {
            self.end();
            return;
        }
        self.phase = Phase::Draining;
        self.deadline = Some(Nanos::ZERO);
        self.drop_unanswered();
        self.end_if_drained();
    }

    fn end_if_drained(&mut self) {
        if self.phase == Phase::Draining && self.replies.is_empty() && self.posted() == 0 {
            self.end();
        }
    }

    /// Drops all work that is not posted. Chains with work in flight stay until their completions.
    fn drop_unposted(&mut self) {
        self.drop_unanswered();
        self.replies.clear();
        let is_over = |chain: &Chain| chain.in_flight == 0;
        let over: Vec<Slot> =
            self.chains.iter().filter(|(_, chain)| is_over(chain)).map(|(slot, _)| slot).collect();
        for slot in over {
            self.chains.remove(slot);
        }
    }

    fn drop_unanswered(&mut self) {
        let Conn { inbox, free_buffers, pending, .. } = self;
        free_buffers.extend(inbox.drain(..).filter_map(|capsule| capsule.buf));
        if let Some(current) = self.current.take() {
            free_buffers.extend(current.data.map(|(data, _)| data));
        }
        for (slot, pending) in pending {
            *slot = FAST_PATH;
            free_buffers.extend(pending.data.take().map(|(data, _)| data));
        }
        for slot in std::mem::take(&mut self.fetches) {
            if self.chains.get(slot).is_some_and(|chain| chain.in_flight == 0) {
                self.chains.remove(slot);
            }
        }
        self.events.retain(|event| matches!(event, Event::Sent { .. }));
    }

    #[cold]
    fn violate(&mut self, violation: Violation) {
        self.violation.get_or_insert(violation);
        self.end();
    }

    /// Returns the state of the request in `slot`; with [`FAST_PATH`] that of the current command. `None` if
    /// `slot` belongs to another request.
    #[inline]
    fn pending_mut(&mut self, slot: RequestId) -> Option<&mut Pending> {
        if slot == FAST_PATH {
            return self.current.as_mut();
        }
        self.pending.get_mut(slot.index()).filter(|(owner, _)| *owner == slot).map(|(_, pending)| pending)
    }

    /// Parses the next capsule if the connection is open and an entry is free. A violation in the capsule
    /// ends the connection.
    #[inline]
    fn next_command(&mut self) -> Option<Event> {
        while self.phase == Phase::Open {
            self.release_current();
            if self.outstanding >= self.outstanding_max {
                return None;
            }
            let mut capsule = self.inbox.pop_front()?;
            match capsule::parse(&capsule, self.config.in_capsule_bytes, &mut self.spare_lists) {
                Ok(parsed) => {
                    let mut pending = Pending {
                        blocks: parsed.blocks,
                        invalidate: parsed.invalidate.filter(|_| self.config.can_invalidate),
                        data: None,
                    };
                    match (parsed.in_capsule_bytes, capsule.buf.take()) {
                        (0, Some(unused)) => self.free_buffers.push_back(unused),
                        (bytes, data) => pending.data = data.map(|data| (data, bytes)),
                    }
                    self.current = Some(pending);
                    self.outstanding += 1;
                    self.unanswered += 1;
                    return Some(Event::Command { sqe: capsule.sqe, data: parsed.data });
                }
                Err(violation) => {
                    self.free_buffers.extend(capsule.buf);
                    self.violate(violation);
                }
            }
        }
        None
    }

    /// Adds a chain for `buf.len()` bytes of a command's data at `offset`. The command keeps its SGL
    /// descriptors until the reply, for further parts. `None`: the connection is not open, or was ended by an
    /// unknown `slot` or an invalid part.
    fn add_part(&mut self, slot: RequestId, kind: ChainKind, offset: u32, buf: Buf) -> Option<Slot> {
        if self.phase != Phase::Open {
            return None;
        }
        let mut spare = std::mem::take(&mut self.spare_lists);
        let pending = self.pending_mut(slot);
        let blocks = pending.map(|pending| pending.blocks.part(offset, buf.len(), &mut spare));
        self.spare_lists = spare;
        let Some(blocks) = blocks else {
            self.end();
            return None;
        };
        self.add_chain(Chain::new(slot, kind, Some(buf), blocks))
    }

    /// Drops the state of the current command if it has neither a slot nor a reply; frees its receive buffer.
    #[inline]
    fn release_current(&mut self) {
        if let Some(Pending { data, blocks, .. }) = self.current.take() {
            if let Some((data, _)) = data {
                self.free_buffers.push_back(data);
            }
            self.spare_lists.put(blocks);
        }
    }
}

impl Transport for Conn {
    #[inline]
    fn next_event(&mut self) -> Option<Event> {
        if let Some(event) = self.events.pop_front() {
            if matches!(event, Event::Sent { .. }) {
                self.outstanding -= 1;
            }
            return Some(event);
        }
        if self.phase == Phase::Closed && !self.is_closed_reported {
            self.is_closed_reported = true;
            return Some(Event::Closed);
        }
        self.next_command()
    }

    #[inline]
    fn take_fast_path_sent(&mut self) -> u32 {
        std::mem::take(&mut self.fast_path_sent)
    }

    #[inline]
    fn set_slot(&mut self, slot: RequestId) {
        let Some(current) = self.current.take() else { return };
        let old = match self.pending.get_mut(slot.index()) {
            Some(place) => std::mem::replace(place, (slot, current)).1,
            // The slot's index exceeds `receives`: the target accepted more requests than there are receives.
            None => {
                self.end();
                current
            }
        };
        self.free_buffers.extend(old.data.map(|(data, _)| data));
    }

    fn fetch(&mut self, slot: RequestId, _cid: u16, mut buf: Buf) {
        if self.phase != Phase::Open {
            return;
        }
        let Some(pending) = self.pending_mut(slot) else {
            self.end();
            return;
        };
        if let Some((data, bytes)) = pending.data.take() {
            capsule::copy_data(&data, bytes, &mut buf);
            self.free_buffers.push_back(data);
            self.events.push_back(Event::Fetched { slot, buf, result: Ok(()) });
            return;
        }
        let blocks = std::mem::take(&mut pending.blocks);
        if let Some(chain) = self.add_chain(Chain::new(slot, ChainKind::Fetch, Some(buf), blocks)) {
            self.fetches.push_back(chain);
        }
    }

    /// Cancels a fetch of all data without a posted READ; others cannot be cancelled. A posted READ is served
    /// by the host's adapter, without the host's software, and completes soon.
    fn cancel(&mut self, slot: RequestId) -> bool {
        let chains = &self.chains;
        let is_it = |chain: &Slot| chains.get(*chain).is_some_and(|chain| chain.is_unposted_fetch_of(slot));
        let Some(at) = self.fetches.iter().position(is_it) else { return false };
        if let Some(chain) = self.fetches.remove(at) {
            self.chains.remove(chain);
        }
        true
    }

    fn moves_parts(&self) -> bool {
        true
    }

    fn fetch_part(&mut self, slot: RequestId, _cid: u16, offset: u32, buf: Buf) {
        if let Some(chain) = self.add_part(slot, ChainKind::FetchPart { offset }, offset, buf) {
            self.fetches.push_back(chain);
        }
    }

    fn send_part(&mut self, slot: RequestId, _cid: u16, offset: u32, buf: Buf) {
        if let Some(chain) = self.add_part(slot, ChainKind::SendPart { offset }, offset, buf) {
            self.replies.push_back(chain);
        }
    }

    #[inline]
    fn take_in_capsule(&mut self, buf: &mut Buf) -> bool {
        let Some(current) = &mut self.current else { return false };
        let Some((data, bytes)) = current.data.take_if(|(_, bytes)| *bytes as usize == buf.len()) else {
            return false;
        };
        capsule::copy_data(&data, bytes, buf);
        self.free_buffers.push_back(data);
        true
    }

    fn end_without_reply(&mut self, slot: RequestId) {
        if self.phase != Phase::Open {
            return;
        }
        let Some(pending) = self.pending_mut(slot).map(std::mem::take) else { return };
        self.free_buffers.extend(pending.data.map(|(data, _)| data));
        self.spare_lists.put(pending.blocks);
        // The entry belongs to no request until `set_slot`.
        if let Some((owner, _)) = self.pending.get_mut(slot.index()) {
            *owner = FAST_PATH;
        }
        self.outstanding -= 1;
        self.unanswered -= 1;
    }

    fn ignore(&mut self) {
        self.outstanding -= 1;
        self.unanswered -= 1;
        self.release_current();
    }

    #[inline]
    fn reply(&mut self, reply: Reply) {
        if self.phase != Phase::Open {
            return;
        }
        // The host may send its next command once it has the reply, maybe before the SEND's completion.
        self.unanswered -= 1;
        let Reply { slot, cqe, data, may_omit_cqe: _ } = reply;
        let mut pending = self.pending_mut(slot).map(std::mem::take).unwrap_or_default();
        if let Some((data, _)) = pending.data.take() {
            self.free_buffers.push_back(data);
        }
        let kind = ChainKind::Reply { cqe: bytes_of(&cqe), invalidate: pending.invalidate };
        let mut blocks = pending.blocks;
        if data.is_none() {
            self.spare_lists.put(std::mem::take(&mut blocks));
        }
        if let Some(chain) = self.add_chain(Chain::new(slot, kind, data, blocks)) {
            self.replies.push_back(chain);
        }
    }

    fn unsent_bytes(&self) -> u64 {
        self.chains.iter().map(|(_, chain)| chain.unsent_bytes()).sum()
    }

    fn close(&mut self, reason: CloseReason) {
        match reason {
            // Queued replies are sent first.
            CloseReason::Disconnect
            | CloseReason::ControllerGone
            | CloseReason::HostError
            | CloseReason::Shutdown => self.drain(),
            CloseReason::KeepAliveExpired | CloseReason::ConnectTimeout => self.end(),
        }
    }

    fn set_queue_entries(&mut self, entries: u16) {
        self.outstanding_max = usize::from(entries);
    }

    fn limits(&self) -> Limits {
        Limits {
            in_capsule_bytes: self.config.in_capsule_bytes,
            queue_entries: self.config.queue_entries,
            transfer_bytes: self.config.transfer_bytes,
        }
    }
}

#[inline]
fn bytes_of(cqe: &Cqe) -> [u8; CQE_BYTES] {
    nvme_spec::zerocopy::transmute!(*cqe)
}
