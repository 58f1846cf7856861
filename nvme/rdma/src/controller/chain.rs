//! Chains: the READs of a fetch, or the WRITEs and the SEND of a reply, and their use of send queue entries
//! and READ credits.
//!
//! ```text
//!   fetch ──> READ (signalled, a credit each) .. ── all completed ──> Fetched
//!   fetch_part ──> the same READs ──> FetchedPart
//!   send_part ──> WRITE .. ──> WRITE (signalled) ── completed ──> SentPart
//!   reply ──> WRITE .. (not signalled) ──> SEND (signalled, or see `unsignalled`) ── completed ──> Sent
//!                └─ the send queue is full: the last is signalled, and the chain continues after it
//!   probe ──> WRITE of zero bytes (signalled)                      detects a dead host
//! ```
//!
//! The send queue completes in order, so a signalled completion frees the entries of all earlier work
//! requests of its chain, and ends the chains before it whose SEND was not signalled. A chain posts its work
//! requests one by one, as entries and credits allow, so a transfer with more READs than credits completes.

use spindle_nvme_transport::RequestId;
use spindle_nvme_transport::{Event, FAST_PATH};
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;

use super::blocks::Blocks;
use super::capsule::Violation;
use super::{Conn, Phase};
use crate::work::{HEAD_BYTES_MAX, Op, Remote, Span, Work};

const CQE_HEAD_BYTES: u8 = 16;
/// Bytes of a completion queue entry.
pub(super) const CQE_BYTES: usize = CQE_HEAD_BYTES as usize;
/// Maximum bytes of one work request: 4 MiB, which every device supports.
const MESSAGE_BYTES_MAX: usize = 1 << 22;

#[derive(Debug)]
pub(super) enum ChainKind {
    Fetch,
    /// READs of a part of the data of a write.
    FetchPart {
        /// Offset in bytes in the command's data.
        offset: u32,
    },
    /// WRITEs of a part of the data of a read. The reply is a later chain.
    SendPart {
        /// Offset in bytes in the command's data.
        offset: u32,
    },
    Reply {
        cqe: [u8; CQE_BYTES],
        /// Remote key that the SEND invalidates.
        invalidate: Option<u32>,
    },
    /// WRITE of zero bytes that detects a dead host.
    Probe,
}

impl ChainKind {
    #[inline]
    fn is_fetch(&self) -> bool {
        matches!(self, ChainKind::Fetch | ChainKind::FetchPart { .. })
    }
}

/// Work requests for one buffer of one command, in order; see the module documentation.
#[derive(Debug)]
pub(super) struct Chain {
    /// Slot of the request; [`FAST_PATH`] without one.
    slot: RequestId,
    kind: ChainKind,
    buf: Option<Buf>,
    blocks: Blocks,
    /// Index of the next block.
    block: usize,
    /// Bytes of the next block already posted.
    block_at: u32,
    /// Bytes of the buffer already posted.
    at: usize,
    /// Posted work requests that are not known to have completed.
    pub(super) in_flight: u32,
    /// Count of chains of [`Unsignalled`](super::unsignalled::Unsignalled) that the completion of the posted
    /// signalled WRITE or SEND ends.
    ends: u32,
    /// The send queue was full: the last WRITE is signalled, and no more is posted until it completes.
    is_stopped: bool,
    /// The chain's last work request is posted.
    is_posted: bool,
}

impl Chain {
    pub(super) fn new(slot: RequestId, kind: ChainKind, buf: Option<Buf>, blocks: Blocks) -> Chain {
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
            ends: 0,
            is_stopped: false,
            is_posted: false,
        }
    }

    /// Returns the bytes of the buffer that are sent to the host, including posted ones; 0 for a fetch.
    pub(super) fn unsent_bytes(&self) -> u64 {
        if self.kind.is_fetch() { 0 } else { self.bytes() as u64 }
    }

    /// Returns true for a fetch of all data of the request in `slot`, without a posted READ.
    pub(super) fn is_unposted_fetch_of(&self, slot: RequestId) -> bool {
        self.slot == slot && matches!(self.kind, ChainKind::Fetch) && self.at == 0
    }

    fn bytes(&self) -> usize {
        self.buf.as_ref().map_or(0, Buf::len)
    }

    /// Compares the total length of the descriptors with the length of the buffer; an error if they differ.
    fn check(&self) -> Result<(), Violation> {
        let bytes = self.blocks.as_slice().iter().map(|block| block.bytes).sum();
        let expected = u32::try_from(self.bytes()).unwrap_or(u32::MAX);
        if bytes == expected { Ok(()) } else { Err(Violation::TransferBytes { bytes, expected }) }
    }

    /// Returns the next piece of the transfer: within one block, at most `segments_max` scatter/gather
    /// entries, at most 4 MiB. `None`: nothing is left.
    fn next_piece(&mut self, segments_max: usize) -> Option<(Span, Remote)> {
        let buf = self.buf.as_ref()?;
        let left = buf.len() - self.at;
        let block = self.blocks.as_slice().get(self.block)?;
        let room = (block.bytes - self.block_at) as usize;
        let bytes = left.min(room).min(buf.span(self.at, segments_max)).min(MESSAGE_BYTES_MAX);
        if bytes == 0 {
            return None;
        }
        let remote = block.remote(self.block_at);
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
    /// Inserts a chain. `None`: the connection was ended, as the table is full, or the descriptors and the
    /// buffer differ in length. The target has compared these: otherwise a chain would never complete.
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

    /// Returns the next work request. `None`: there is none, the send queue is full, no READ credit is free,
    /// or the connection is neither open nor draining. All work requests until `None` share one doorbell.
    #[inline]
    pub fn next_work(&mut self) -> Option<Work> {
        if self.send_free == 0 || !matches!(self.phase, Phase::Open | Phase::Draining) {
            return None;
        }
        let work = match self.is_fetch_next {
            true => self.next_read().or_else(|| self.next_write_or_send()),
            false => self.next_write_or_send().or_else(|| self.next_read()),
        };
        if work.as_ref().is_some_and(|work| work.is_signalled) {
            self.is_fetch_next = !self.is_fetch_next;
        }
        work
    }

    /// Returns the buffer of a chain, to which the spans of its work requests refer. `None`: the chain has no
    /// buffer or has ended.
    #[inline]
    #[must_use]
    pub fn buffer(&self, chain: Slot) -> Option<&Buf> {
        self.chains.get(chain)?.buf.as_ref()
    }

    /// As [`Conn::buffer`], for a simulated device that executes READs by copying.
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
    fn next_write_or_send(&mut self) -> Option<Work> {
        let slot = *self.replies.front()?;
        // READs take entries of the send queue too. Without any to post, and with an entry left, the next
        // chain's first WRITE or SEND follows in this batch, and its last one is signalled.
        let is_followed = self.replies.len() > 1 && self.fetches.is_empty() && self.send_free > 1;
        let chain = self.chains.get_mut(slot)?;
        if chain.is_stopped {
            return None;
        }
        let mut is_signalled = true;
        let mut is_posted = true;
        let op = if chain.at < chain.bytes() {
            let (local, remote) = chain.next_piece(self.config.segments_max)?;
            is_posted = chain.at == chain.bytes() && matches!(chain.kind, ChainKind::SendPart { .. });
            chain.is_stopped = !is_posted && self.send_free == 1;
            is_signalled = is_posted || chain.is_stopped;
            Op::Write { local, remote }
        } else {
            let local = Span { offset: 0, bytes: 0 };
            match chain.kind {
                ChainKind::Reply { cqe, invalidate } => {
                    let is_unsignalled =
                        is_followed && self.unsignalled.add(slot, chain.in_flight + 1, chain.bytes());
                    is_signalled = !is_unsignalled;
                    let mut head = [0; HEAD_BYTES_MAX];
                    head[..CQE_BYTES].copy_from_slice(&cqe);
                    Op::Send { head, head_bytes: CQE_HEAD_BYTES, local, invalidate }
                }
                // A WRITE of zero bytes does not use the address and key.
                ChainKind::Probe => Op::Write { local, remote: Remote { address: 0, key: 0 } },
                ChainKind::Fetch | ChainKind::FetchPart { .. } | ChainKind::SendPart { .. } => return None,
            }
        };
        chain.is_posted = is_posted;
        chain.in_flight += 1;
        if is_signalled {
            chain.ends = self.unsignalled.end_run();
        }
        if is_posted {
            self.replies.pop_front();
        }
        self.send_free -= 1;
        Some(Work { chain: slot, is_signalled, op })
    }

    /// Handles the completion of a signalled work request. Frees its send queue entry and, for a READ, its
    /// credit; for a WRITE or SEND also the entries of earlier unsignalled requests of the chain. Ends the
    /// chain after its last request. Ends also the earlier chains whose SEND was unsignalled.
    #[inline]
    pub(super) fn chain_completed(&mut self, id: Slot, is_ok: bool) {
        let Some(chain) = self.chains.get_mut(id) else { return };
        for _ in 0..std::mem::take(&mut chain.ends) {
            self.unsignalled_completed(is_ok);
        }
        let Some(chain) = self.chains.get_mut(id) else { return };
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
        if (is_ended && self.chains.get(id).is_some_and(|chain| chain.in_flight == 0)) || is_over {
            self.chain_done(id, is_ok);
        }
        self.end_if_drained();
    }

    /// Ends the oldest chain whose SEND was unsignalled. With `is_ok` false it is not known whether that SEND
    /// has failed; the connection has ended.
    #[inline]
    fn unsignalled_completed(&mut self, is_ok: bool) {
        let Some(slot) = self.unsignalled.take() else { return };
        let Some(chain) = self.chains.get_mut(slot) else { return };
        self.send_free += std::mem::take(&mut chain.in_flight);
        self.chain_done(slot, is_ok);
    }

    #[inline]
    fn chain_done(&mut self, id: Slot, is_ok: bool) {
        let Some(Chain { slot, kind, buf, blocks, .. }) = self.chains.remove(id) else { return };
        self.spare_lists.put(blocks);
        match (kind, buf, self.phase) {
            (ChainKind::Fetch, Some(buf), Phase::Open) if is_ok => {
                self.events.push_back(Event::Fetched { slot, buf, result: Ok(()) });
            }
            (ChainKind::FetchPart { offset }, Some(buf), Phase::Open) if is_ok => {
                self.events.push_back(Event::FetchedPart { slot, offset, buf, result: Ok(()) });
            }
            (ChainKind::SendPart { offset }, Some(buf), Phase::Open) if is_ok => {
                self.events.push_back(Event::SentPart { slot, offset, buf });
            }
            (ChainKind::Reply { .. }, _, Phase::Open | Phase::Draining) if is_ok && slot == FAST_PATH => {
                self.outstanding -= 1;
                self.fast_path_sent += 1;
            }
            (ChainKind::Reply { .. }, _, Phase::Open | Phase::Draining) if is_ok => {
                self.events.push_back(Event::Sent { slot });
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
