//! Chains: the READs of a fetch, or the WRITEs and the SEND of a reply, and what they cost.
//!
//! ```text
//!   fetch ──> READ (signalled, a credit each) .. ── all completed ──> Fetched
//!   fetch_part ──> the same READs ──> FetchedPart
//!   send_part ──> WRITE .. ──> WRITE (signalled) ── completed ──> SentPart
//!   reply ──> WRITE .. (not signalled) ──> SEND (signalled) ── completed ──> Sent
//!                └─ the send queue is full: the last is signalled, and the chain goes on after it
//!   probe ──> WRITE of no bytes (signalled)                       whether the host is there
//! ```
//!
//! The send queue completes in order, so a signalled work request gives back the places of all before it in
//! its chain. No chain asks for all of its places or credits at once, so a transfer of more READs than there
//! are credits goes through, one after the other.

use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;
use spindle_transport::{Event, FAST_PATH};

use super::capsule::Violation;
use super::{Block, Blocks, Conn, Phase};
use crate::work::{HEAD_BYTES_MAX, Op, Remote, Span, Work};

/// Bytes of a completion queue entry.
const CQE_BYTES: u8 = 16;
/// Most bytes of one message: what every device and `u32` hold.
const MESSAGE_BYTES_MAX: usize = 1 << 22;

#[derive(Debug)]
pub(super) enum Kind {
    Fetch,
    /// A part of the host's data.
    FetchPart {
        /// Where it begins.
        offset: u32,
    },
    /// A part of the data for the host: WRITEs only. Its reply is a chain behind it.
    SendPart {
        /// Where it begins.
        offset: u32,
    },
    Reply {
        head: [u8; HEAD_BYTES_MAX],
        /// A key to be invalidated with it.
        invalidate: Option<u32>,
    },
    /// Whether the host is there.
    Probe,
}

impl Kind {
    #[inline]
    fn is_fetch(&self) -> bool {
        matches!(self, Kind::Fetch | Kind::FetchPart { .. })
    }
}

/// The part of the host's memory of a command that begins at `offset`; shorter when there is not so much.
pub(super) fn part_of(blocks: &Blocks, offset: u32, bytes: usize) -> Blocks {
    let mut part = Blocks::new();
    let (mut skip, mut left) = (offset, u32::try_from(bytes).unwrap_or(u32::MAX));
    for block in blocks {
        let step = left.min(block.bytes.saturating_sub(skip));
        if step > 0 {
            let address = block.remote.address + u64::from(skip);
            part.push(Block { remote: Remote { address, ..block.remote }, bytes: step });
            left -= step;
        }
        skip = skip.saturating_sub(block.bytes);
    }
    part
}

/// See the module.
#[derive(Debug)]
pub(super) struct Chain {
    /// The request.
    slot: Slot,
    kind: Kind,
    buf: Option<Buf>,
    blocks: Blocks,
    /// The block that is next, and how much of it is posted.
    block: usize,
    block_at: u32,
    /// Bytes of the buffer that are posted.
    at: usize,
    /// Work requests posted and not known to have completed.
    pub(super) in_flight: u32,
    /// A WRITE is signalled because the queue was full; nothing is posted before it has completed.
    is_stopped: bool,
    /// The last work request is posted.
    is_posted: bool,
}

impl Chain {
    pub(super) fn new(slot: Slot, kind: Kind, buf: Option<Buf>, blocks: Blocks) -> Chain {
        let buf = buf.filter(|buf| !buf.is_empty());
        Chain {
            slot,
            kind,
            buf,
            blocks,
            block: 0,
            block_at: 0,
            at: 0,
            in_flight: 0,
            is_stopped: false,
            is_posted: false,
        }
    }

    /// Bytes for the host that it holds.
    pub(super) fn unsent_bytes(&self) -> u64 {
        if self.kind.is_fetch() { 0 } else { self.bytes() as u64 }
    }

    /// All of a request's data is to be fetched, and no device knows of it yet.
    pub(super) fn is_unposted_fetch_of(&self, slot: Slot) -> bool {
        self.slot == slot && matches!(self.kind, Kind::Fetch) && self.at == 0
    }

    /// Bytes to be moved.
    fn bytes(&self) -> usize {
        self.buf.as_ref().map_or(0, Buf::len)
    }

    /// The host's memory is as long as ours.
    fn check(&self) -> Result<(), Violation> {
        let bytes = self.blocks.iter().map(|block| block.bytes).sum();
        let expected = u32::try_from(self.bytes()).unwrap_or(u32::MAX);
        if bytes == expected { Ok(()) } else { Err(Violation::TransferBytes { bytes, expected }) }
    }

    /// The next piece of the transfer: within one block, and within what one work request gathers.
    fn next_piece(&mut self, segments_max: usize) -> Option<(Span, Remote)> {
        let buf = self.buf.as_ref()?;
        let left = buf.len() - self.at;
        let block = self.blocks.get(self.block)?;
        let room = (block.bytes - self.block_at) as usize;
        let bytes = left.min(room).min(buf.span(self.at, segments_max)).min(MESSAGE_BYTES_MAX);
        if bytes == 0 {
            return None;
        }
        let remote =
            Remote { address: block.remote.address + u64::from(self.block_at), key: block.remote.key };
        let bytes = u32::try_from(bytes).ok()?;
        let span = Span { offset: u32::try_from(self.at).ok()?, bytes };
        self.at += bytes as usize;
        self.block_at += bytes;
        if self.block_at == block.bytes {
            self.block += 1;
            self.block_at = 0;
        }
        Some((span, remote))
    }
}

impl Conn {
    /// Take a chain up. What its command's descriptors have and what is to be moved was compared when the
    /// command was checked; a difference here would leave a chain that never ends.
    #[inline]
    pub(super) fn add_chain(&mut self, chain: Chain) -> Option<Slot> {
        if let Err(violation) = chain.check() {
            self.violate(violation);
            return None;
        }
        let slot = self.chains.insert(chain).ok();
        if slot.is_none() {
            self.end();
        }
        slot
    }

    /// The next work request, if the send queue has room for it. All that comes until `None` is posted with
    /// one doorbell.
    #[inline]
    pub fn next_work(&mut self) -> Option<Work> {
        if self.send_free == 0 || !matches!(self.phase, Phase::Open | Phase::Draining) {
            return None;
        }
        let work = match self.is_fetch_next {
            true => self.next_read().or_else(|| self.next_of_reply()),
            false => self.next_of_reply().or_else(|| self.next_read()),
        };
        if work.is_some_and(|work| work.is_signalled) {
            self.is_fetch_next = !self.is_fetch_next;
        }
        work
    }

    /// The buffer of a chain, whose spans its work requests name.
    #[inline]
    #[must_use]
    pub fn buffer(&self, chain: Slot) -> Option<&Buf> {
        self.chains.get(chain)?.buf.as_ref()
    }

    /// The same, for one who carries out READs by copying.
    pub fn buffer_mut(&mut self, chain: Slot) -> Option<&mut Buf> {
        self.chains.get_mut(chain)?.buf.as_mut()
    }

    fn next_read(&mut self) -> Option<Work> {
        if self.reads_free == 0 {
            return None;
        }
        let slot = *self.fetches.front()?;
        let chain = self.chains.get_mut(slot)?;
        let (local, remote) = chain.next_piece(self.config.segments_max)?;
        chain.in_flight += 1;
        if chain.at == chain.bytes() {
            chain.is_posted = true;
            self.fetches.pop_front();
        }
        self.send_free -= 1;
        self.reads_free -= 1;
        Some(Work { chain: slot, is_signalled: true, op: Op::Read { local, remote } })
    }

    #[inline]
    fn next_of_reply(&mut self) -> Option<Work> {
        let slot = *self.replies.front()?;
        let chain = self.chains.get_mut(slot)?;
        if chain.is_stopped {
            return None;
        }
        let mut is_signalled = false;
        let op = if chain.at < chain.bytes() {
            let (local, remote) = chain.next_piece(self.config.segments_max)?;
            if chain.at == chain.bytes() && matches!(chain.kind, Kind::SendPart { .. }) {
                is_signalled = true;
                chain.is_posted = true;
                self.replies.pop_front();
            } else if self.send_free == 1 {
                is_signalled = true;
                chain.is_stopped = true;
            }
            Op::Write { local, remote }
        } else {
            let local = Span { offset: 0, bytes: 0 };
            let op = match chain.kind {
                Kind::Reply { head, invalidate } => {
                    Op::Send { head, head_bytes: CQE_BYTES, local, invalidate }
                }
                // Without bytes neither address nor key is looked at.
                Kind::Probe => Op::Write { local, remote: Remote { address: 0, key: 0 } },
                Kind::Fetch | Kind::FetchPart { .. } | Kind::SendPart { .. } => return None,
            };
            is_signalled = true;
            chain.is_posted = true;
            self.replies.pop_front();
            op
        };
        if let Some(chain) = self.chains.get_mut(slot) {
            chain.in_flight += 1;
        }
        self.send_free -= 1;
        Some(Work { chain: slot, is_signalled, op })
    }

    /// A signalled work request of a chain has completed.
    #[inline]
    pub(super) fn chain_completed(&mut self, slot: Slot, is_ok: bool) {
        let Some(chain) = self.chains.get_mut(slot) else { return };
        let is_fetch = chain.kind.is_fetch();
        let places = if is_fetch { chain.in_flight.min(1) } else { chain.in_flight };
        chain.in_flight -= places;
        chain.is_stopped = false;
        let is_over = chain.is_posted && chain.in_flight == 0;
        self.send_free += places;
        if is_fetch {
            self.reads_free += places;
        }
        let is_ended = !matches!(self.phase, Phase::Open | Phase::Draining);
        if (is_ended && self.chains.get(slot).is_some_and(|chain| chain.in_flight == 0)) || is_over {
            self.chain_over(slot, is_ok);
        }
        self.end_if_drained();
    }

    #[inline]
    fn chain_over(&mut self, slot: Slot, is_ok: bool) {
        let Some(Chain { slot, kind, buf, .. }) = self.chains.remove(slot) else { return };
        match (kind, buf, self.phase) {
            (Kind::Fetch, Some(buf), Phase::Open) if is_ok => {
                self.events.push_back(Event::Fetched { slot, buf, result: Ok(()) });
            }
            (Kind::FetchPart { offset }, Some(buf), Phase::Open) if is_ok => {
                self.events.push_back(Event::FetchedPart { slot, offset, buf, result: Ok(()) });
            }
            (Kind::SendPart { offset }, Some(buf), Phase::Open) if is_ok => {
                self.events.push_back(Event::SentPart { slot, offset, buf });
            }
            (Kind::Reply { .. }, _, Phase::Open | Phase::Draining) if is_ok && slot == FAST_PATH => {
                self.outstanding -= 1;
                self.left += 1;
            }
            (Kind::Reply { .. }, _, Phase::Open | Phase::Draining) if is_ok => {
                self.events.push_back(Event::Sent { slot });
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
