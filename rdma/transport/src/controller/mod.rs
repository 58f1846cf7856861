//! The controller's end of a connection: implements [`Transport`], without verbs.
//!
//! The order of a turn, as a shell calls it:
//!
//! ```text
//!   received(capsule), completed(completion) ; next_event.. (the queue pair)
//!   next_buffer() -> post it again                   before the replies: the host may answer a reply at once
//!   next_work() -> post                              one doorbell for all of them
//!   phase()   Ending: end the queue pair, collect its completions, destroy it, then on_destroyed()
//!   watch()   now and then: asks a silent host whether it is there
//! ```
//!
//! Memory: the buffer with a capsule's in-capsule data is handed in by value and comes back through
//! [`Conn::next_buffer`] when its command has fetched the data or is answered, so a command that waits for
//! memory waits in its receive slot. A chain owns its buffer from `fetch` or `reply` until the last of its
//! work requests has completed; when the connection ends, until the queue pair is destroyed.
//!
//! The completion of a reply's SEND and the host's next capsule come in any order. A command for which the
//! queue pair has no room yet is held until the completion is here.
//!
//! What a host sends is checked in `capsule`, once.

mod capsule;
mod chain;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use arrayvec::ArrayVec;
use nvme_spec::cqe::Cqe;
use nvme_spec::zerocopy::IntoBytes;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::{Slab, Slot};
use spindle_transport::{CloseReason, Event, FAST_PATH, Limits, Reply, Transport};

use crate::work::{Completion, HEAD_BYTES_MAX, Remote};
use chain::{Chain, Kind};

pub use capsule::{CAPSULE_BYTES, Capsule, DESCRIPTORS_MAX, Violation};

/// Most chains of a command at a time: two parts, and the reply behind them. A disconnecting host may leave
/// some behind.
pub(crate) const CHAINS_PER_COMMAND: usize = 4;

/// Silence after which a host is asked whether it is there. 15 s: with the retries of a queue pair a dead
/// host is gone within half a minute, and a live one is asked four times a minute.
pub const PROBE_AFTER: Nanos = Nanos::from_secs(15);

/// A part of the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    remote: Remote,
    bytes: u32,
}

/// The host's memory of one command.
type Blocks = ArrayVec<Block, DESCRIPTORS_MAX>;

/// Constants of a connection: its listener's, its device's, and what its connection request agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnConfig {
    /// Most bytes of in-capsule data.
    pub in_capsule_bytes: u32,
    /// Most entries of a queue that a host is told of.
    pub queue_entries: u16,
    /// Receives that are posted for this queue: as many commands as it may have outstanding.
    pub receives: u16,
    /// Most bytes that one command moves.
    pub transfer_bytes: u32,
    /// Work requests that the send queue holds, at least 2.
    pub send_queue: u32,
    /// Segments that one work request gathers or scatters, at least 1.
    pub segments_max: usize,
    /// RDMA READs that may be outstanding, at least 1.
    pub reads_max: u32,
    /// The device sends with invalidate.
    pub can_invalidate: bool,
    /// Time from the decision to close to the end of the queue pair.
    pub close_timeout: Nanos,
    /// Silence after which the host is asked whether it is there.
    pub probe_after: Nanos,
}

impl Default for ConnConfig {
    /// What a connection has before its device and its request were asked.
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

/// Where a connection is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Accepted; the host has not said that it is there. What it sends is held.
    Connecting,
    /// At work.
    Open,
    /// What was replied leaves; nothing is taken any more.
    Draining,
    /// The queue pair is to be ended and destroyed.
    Ending,
    /// It is destroyed.
    Closed,
}

/// What the connection knows of a command that is not answered yet.
#[derive(Debug, Default)]
struct Pending {
    /// Where its data is at the host.
    blocks: Blocks,
    /// The key to be invalidated with the reply.
    invalidate: Option<u32>,
    /// The capsule, until its data is fetched; and how long that is.
    data: Option<(Buf, u32)>,
}

/// What is known of a host's silence.
#[derive(Debug, Default)]
struct Silence {
    /// Something has completed since the last look.
    is_broken: bool,
    /// Since when nothing has, as far as was looked at.
    since: Option<Nanos>,
}

/// The controller's end of one connection. See the module.
#[derive(Debug)]
pub struct Conn {
    config: ConnConfig,
    phase: Phase,
    /// Received and not looked at.
    inbox: VecDeque<Capsule>,
    /// To be posted again.
    free_buffers: VecDeque<Buf>,
    /// The command whose event came last, until it has a slot or an answer.
    current: Option<Pending>,
    /// By the index of the request's slot.
    pending: Vec<(Slot, Pending)>,
    chains: Slab<Chain>,
    /// Chains with READs, and with a reply, to be posted, oldest first.
    fetches: VecDeque<Slot>,
    replies: VecDeque<Slot>,
    /// Whose turn it is to post, where both have something.
    is_fetch_next: bool,
    send_free: u32,
    reads_free: u32,
    /// Fetched and Sent, to be told.
    events: VecDeque<Event>,
    deadline: Option<Nanos>,
    violation: Option<Violation>,
    is_closed_told: bool,
    /// Commands given out whose reply is not known to have left, and how many the queue pair has room for.
    outstanding: usize,
    /// Replies without a slot that have left and were not asked for yet.
    left: u32,
    room: usize,
    /// Commands given out that have no answer yet. With those not looked at they are what the host has sent
    /// without an answer: no more than it said, whatever it holds of the shared receives.
    unanswered: usize,
    silence: Silence,
}

impl Conn {
    /// A connection whose queue pair was just made.
    ///
    /// # Panics
    /// When the configuration is out of range: a bug of the shell, which has asked the device.
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
            // One more: whether the host is there is asked beside all commands.
            chains: Slab::with_capacity(CHAINS_PER_COMMAND * entries + 1),
            fetches: VecDeque::with_capacity(2 * entries),
            replies: VecDeque::with_capacity(CHAINS_PER_COMMAND * entries + 1),
            is_fetch_next: false,
            send_free: config.send_queue,
            reads_free: config.reads_max,
            events: VecDeque::with_capacity(CHAINS_PER_COMMAND * entries),
            deadline: None,
            violation: None,
            is_closed_told: false,
            outstanding: 0,
            left: 0,
            room: 1,
            unanswered: 0,
            silence: Silence::default(),
        }
    }

    /// The host is there (the connection manager's ESTABLISHED): commands that were held are looked at.
    pub fn on_established(&mut self) {
        if self.phase == Phase::Connecting {
            self.phase = Phase::Open;
        }
    }

    /// A receive has completed.
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

    /// A work request of the send queue has completed.
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

    /// The connection is lost, or the host has ended it.
    pub fn on_disconnected(&mut self) {
        self.end();
    }

    /// The queue pair is destroyed: no device knows a buffer of this connection any more.
    pub fn on_destroyed(&mut self) {
        self.phase = Phase::Closed;
        self.drop_unposted();
        self.chains = Slab::with_capacity(0);
        self.events.clear();
        self.deadline = None;
    }

    /// The buffer of a capsule that is to be posted again.
    #[inline]
    pub fn next_buffer(&mut self) -> Option<Buf> {
        self.free_buffers.pop_front()
    }

    /// Where it is in its life.
    #[inline]
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Work requests that were posted and have not completed: those that a drain waits for.
    #[must_use]
    pub fn posted(&self) -> u32 {
        self.config.send_queue - self.send_free
    }

    /// RDMA READs that may be posted now.
    #[must_use]
    pub fn reads_free(&self) -> u32 {
        self.reads_free
    }

    /// Buffers of capsules that are here: not looked at, with data that is not fetched, or to be given back.
    #[must_use]
    pub fn buffers_held(&self) -> usize {
        let is_held = |pending: &Pending| usize::from(pending.data.is_some());
        self.inbox.iter().filter(|capsule| capsule.buf.is_some()).count()
            + self.free_buffers.len()
            + self.current.as_ref().map_or(0, is_held)
            + self.pending.iter().map(|(_, pending)| is_held(pending)).sum::<usize>()
    }

    /// True when [`Transport::next_event`] has something without new completions.
    #[inline]
    #[must_use]
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
            || (self.phase == Phase::Open && !self.inbox.is_empty() && self.outstanding < self.room)
            || (self.phase == Phase::Closed && !self.is_closed_told)
    }

    /// The rule that the host broke, once, for the log.
    pub fn take_violation(&mut self) -> Option<Violation> {
        self.violation.take()
    }

    /// When [`Conn::on_time`] is to be called at the latest; time zero means at once.
    #[must_use]
    pub fn deadline(&self) -> Option<Nanos> {
        self.deadline
    }

    /// The time. A host that takes its replies too slowly loses them.
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

    /// To be called from time to time, much more often than the time to a probe. True: the host has been
    /// silent for so long that it is asked whether it is there; there is work to be posted.
    ///
    /// At most one probe is under way: while anything is posted, its completion will tell.
    ///
    /// Keep alive ends the controller of a host that has gone without a word, but not one with KATO 0, nor an
    /// I/O queue whose admin queue is gone. Without anything posted no device notices either. So a silent
    /// connection posts an RDMA WRITE of no bytes: it touches no memory and needs no key (InfiniBand
    /// Architecture 1.4, C9-88), the host's software sees nothing of it, and a host that is not there lets
    /// the queue pair run out of retries.
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
        let probe = self.add_chain(Chain::new(FAST_PATH, Kind::Probe, None, Blocks::new()));
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

    /// Nothing more is begun; what a device may still touch stays.
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

    /// What is known of a request; `None` when it is not the one that its place has.
    #[inline]
    fn pending_mut(&mut self, slot: Slot) -> Option<&mut Pending> {
        if slot == FAST_PATH {
            return self.current.as_mut();
        }
        self.pending.get_mut(slot.index()).filter(|(owner, _)| *owner == slot).map(|(_, pending)| pending)
    }

    /// The next command, if the connection is open.
    #[inline]
    fn next_command(&mut self) -> Option<Event> {
        while self.phase == Phase::Open {
            self.release_current();
            if self.outstanding >= self.room {
                return None;
            }
            let mut capsule = self.inbox.pop_front()?;
            match capsule::parse(&capsule, self.config.in_capsule_bytes) {
                Ok(parsed) => {
                    let mut pending = Pending {
                        blocks: parsed.blocks,
                        invalidate: parsed.invalidate.filter(|_| self.config.can_invalidate),
                        data: None,
                    };
                    match (parsed.in_capsule_bytes, capsule.buf.take()) {
                        (0, unused) => self.free_buffers.extend(unused),
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

    /// A part of a command's data; its descriptors stay until the reply.
    fn add_part(&mut self, slot: Slot, kind: Kind, offset: u32, buf: Buf) -> Option<Slot> {
        if self.phase != Phase::Open {
            return None;
        }
        let Some(pending) = self.pending_mut(slot) else {
            self.end();
            return None;
        };
        let blocks = chain::part_of(&pending.blocks, offset, buf.len());
        self.add_chain(Chain::new(slot, kind, Some(buf), blocks))
    }

    /// The command whose event came last is not taken.
    #[inline]
    fn release_current(&mut self) {
        if let Some(Pending { data: Some((data, _)), .. }) = self.current.take() {
            self.free_buffers.push_back(data);
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
        if self.phase == Phase::Closed && !self.is_closed_told {
            self.is_closed_told = true;
            return Some(Event::Closed);
        }
        self.next_command()
    }

    #[inline]
    fn take_left(&mut self) -> u32 {
        std::mem::take(&mut self.left)
    }

    #[inline]
    fn set_slot(&mut self, slot: Slot) {
        let Some(current) = self.current.take() else { return };
        let old = match self.pending.get_mut(slot.index()) {
            Some(place) => std::mem::replace(place, (slot, current)).1,
            // More requests than receives: what the shell agreed to is not what the queue pair has.
            None => {
                self.end();
                current
            }
        };
        self.free_buffers.extend(old.data.map(|(data, _)| data));
    }

    fn fetch(&mut self, slot: Slot, _cid: u16, mut buf: Buf) {
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
        if let Some(chain) = self.add_chain(Chain::new(slot, Kind::Fetch, Some(buf), blocks)) {
            self.fetches.push_back(chain);
        }
    }

    /// A READ that was posted needs the host's adapter only, and not the host: it completes soon. What was
    /// not posted never is.
    fn cancel(&mut self, slot: Slot) -> bool {
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

    fn fetch_part(&mut self, slot: Slot, _cid: u16, offset: u32, buf: Buf) {
        if let Some(chain) = self.add_part(slot, Kind::FetchPart { offset }, offset, buf) {
            self.fetches.push_back(chain);
        }
    }

    fn send_part(&mut self, slot: Slot, _cid: u16, offset: u32, buf: Buf) {
        if let Some(chain) = self.add_part(slot, Kind::SendPart { offset }, offset, buf) {
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

    fn end_without_reply(&mut self, slot: Slot) {
        if self.phase != Phase::Open {
            return;
        }
        let Some(pending) = self.pending_mut(slot).map(std::mem::take) else { return };
        self.free_buffers.extend(pending.data.map(|(data, _)| data));
        // Its place has no owner until the next command has it.
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
        // From now on the host may send another: it has its answer before we know that it left.
        self.unanswered -= 1;
        let Reply { slot, cqe, data, may_omit_cqe: _ } = reply;
        let mut pending = self.pending_mut(slot).map(std::mem::take).unwrap_or_default();
        if let Some((data, _)) = pending.data.take() {
            self.free_buffers.push_back(data);
        }
        let kind = Kind::Reply { head: head_of(&cqe), invalidate: pending.invalidate };
        let blocks = if data.is_some() { pending.blocks } else { Blocks::new() };
        if let Some(chain) = self.add_chain(Chain::new(slot, kind, data, blocks)) {
            self.replies.push_back(chain);
        }
    }

    fn unsent_bytes(&self) -> u64 {
        self.chains.iter().map(|(_, chain)| chain.unsent_bytes()).sum()
    }

    fn close(&mut self, reason: CloseReason) {
        match reason {
            // Something is to reach the host first.
            CloseReason::Disconnect
            | CloseReason::ControllerGone
            | CloseReason::HostError
            | CloseReason::Shutdown => self.drain(),
            CloseReason::KeepAliveExpired | CloseReason::ConnectTimeout => self.end(),
        }
    }

    fn set_queue_entries(&mut self, entries: u16) {
        self.room = usize::from(entries);
    }

    fn limits(&self) -> Limits {
        Limits {
            in_capsule_bytes: self.config.in_capsule_bytes,
            queue_entries: self.config.queue_entries,
            transfer_bytes: self.config.transfer_bytes,
        }
    }
}

/// A completion queue entry as the head of a SEND.
#[inline]
fn head_of(cqe: &Cqe) -> [u8; HEAD_BYTES_MAX] {
    let mut head = [0; HEAD_BYTES_MAX];
    head[..size_of::<Cqe>()].copy_from_slice(cqe.as_bytes());
    head
}
