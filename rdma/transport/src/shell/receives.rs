//! Receive slots of a core's shared receive queue, or of one queue pair's own receive queue.
//!
//! A slot has one buffer, for a submission queue entry and the in-capsule data behind it:
//!
//! ```text
//!   posted ── completion ──> the entry is copied out ┬─ no more bytes ──> posted again at once
//!                                                    └─ data: lent to the connection ─> posted again
//! ```
//! A receive has one scatter/gather entry, not two: soft-RoCE of Linux 6.12 fails a shared receive with
//! several entries ("local operation error"). Slots are added in chunks as connections reserve them, and
//! freed only with the queue.

use nvme_spec::Sqe;
use nvme_spec::zerocopy::FromBytes;
use spindle_rdma_verbs::{Access, MemoryRegion, QueuePair, Sge, SharedReceiveQueue, VerbsError};
use spindle_reactor::mem::{Buf, Pool};

use super::keys::SharedDevice;
use crate::controller::{CAPSULE_BYTES, Capsule};

/// Maximum receives added to a queue at once; they share one memory registration.
pub(super) const CHUNK_SLOTS: u32 = 256;

/// The receive queue that slots are posted to.
pub(super) enum Queue<'a> {
    Shared(&'a SharedReceiveQueue),
    Own(&'a mut QueuePair),
}

impl Queue<'_> {
    fn post(&mut self, id: u64, segments: &[Sge]) -> Result<(), VerbsError> {
        match self {
            Queue::Shared(queue) => queue.post(id, segments),
            Queue::Own(queue_pair) => queue_pair.post_receive(id, segments),
        }
    }
}

/// The slots of one receive queue.
pub(super) struct Receives {
    /// Posted buffers, indexed by slot.
    posted: Vec<Option<Buf>>,
    /// Slots whose buffer a connection uses.
    lent: Vec<u32>,
    /// Slots and buffers whose posting failed; retried by [`Receives::post_again`].
    unposted: Vec<(u32, Buf)>,
    /// Registrations of the chunks. Dropped after the buffers, whose memory they cover.
    chunks: Vec<MemoryRegion>,
    buffer_bytes: u32,
    /// Upper bits of the work request ids of this queue's receives.
    id_bits: u64,
}

impl Receives {
    pub(super) fn new(in_capsule_bytes: u32, id_bits: u64) -> Receives {
        let buffer_bytes = (CAPSULE_BYTES + in_capsule_bytes).next_multiple_of(64);
        Receives {
            posted: Vec::new(),
            lent: Vec::new(),
            unposted: Vec::new(),
            chunks: Vec::new(),
            buffer_bytes,
            id_bits,
        }
    }

    /// Returns the count of slots, posted or not.
    pub(super) fn slots(&self) -> u32 {
        u32::try_from(self.posted.len()).unwrap_or(u32::MAX)
    }

    /// Adds a chunk of `count` slots, at most [`CHUNK_SLOTS`], and posts their receives. On failure, the
    /// slots posted so far stay.
    pub(super) fn grow(
        &mut self,
        count: u32,
        device: &SharedDevice,
        queue: &mut Queue<'_>,
    ) -> Result<(), String> {
        let count = count.min(CHUNK_SLOTS);
        let pool = Pool::of_strides(self.buffer_bytes, count).map_err(|error| error.to_string())?;
        let bytes = self.buffer_bytes as usize * count as usize;
        let region = device.device().register_part(pool.area(), 0, bytes, Access::LOCAL_WRITE);
        self.chunks.push(region.map_err(|error| error.to_string())?);
        for _ in 0..count {
            let Some(buf) = pool.take(self.buffer_bytes) else { break };
            self.posted.push(None);
            if let Err(error) = self.post(self.slots() - 1, buf, queue) {
                // The slot is removed again, as only posted slots may be reserved.
                self.posted.pop();
                self.unposted.pop();
                return Err(error.to_string());
            }
        }
        Ok(())
    }

    /// Posts the receive of a slot. On failure, the slot and buffer are kept in `unposted`.
    fn post(&mut self, slot: u32, buf: Buf, queue: &mut Queue<'_>) -> Result<(), VerbsError> {
        let segment = self.chunks.iter().find_map(|region| {
            let memory = buf.as_slice()?;
            region.sge(memory.as_ptr() as usize, self.buffer_bytes)
        });
        let id = self.id_bits | u64::from(slot);
        match segment.map_or(Ok(()), |segment| queue.post(id, &[segment])) {
            Ok(()) => {
                if let Some(place) = self.posted.get_mut(slot as usize) {
                    *place = Some(buf);
                }
                Ok(())
            }
            Err(error) => {
                self.unposted.push((slot, buf));
                Err(error)
            }
        }
    }

    /// Retries the slots in `unposted` until one fails.
    pub(super) fn post_again(&mut self, queue: &mut Queue<'_>) {
        while let Some((slot, buf)) = self.unposted.pop() {
            if self.post(slot, buf, queue).is_err() {
                return;
            }
        }
    }

    /// Returns the capsule of a completed receive of `bytes`; `None` if no receive is posted in `slot`. If
    /// nothing follows the submission queue entry, the slot is posted again at once; otherwise the capsule
    /// contains the buffer.
    pub(super) fn completed(
        &mut self,
        slot: u32,
        bytes: u32,
        queue: &mut Queue<'_>,
    ) -> Result<Option<Capsule>, VerbsError> {
        let Some(buf) = self.posted.get_mut(slot as usize).and_then(Option::take) else { return Ok(None) };
        let sqe = buf.as_slice().and_then(|all| Sqe::read_from_prefix(all).ok());
        let sqe = sqe.map(|(sqe, _)| sqe).unwrap_or_default();
        if bytes > CAPSULE_BYTES {
            self.lent.push(slot);
            return Ok(Some(Capsule { bytes, sqe, buf: Some(buf) }));
        }
        self.post(slot, buf, queue)?;
        Ok(Some(Capsule { bytes, sqe, buf: None }))
    }

    /// Posts a slot again whose receive was flushed or has failed, or whose connection has ended.
    pub(super) fn flushed(&mut self, slot: u32, queue: &mut Queue<'_>) -> Result<(), VerbsError> {
        match self.posted.get_mut(slot as usize).and_then(Option::take) {
            Some(buf) => self.post(slot, buf, queue),
            None => Ok(()),
        }
    }

    /// Posts a buffer again that a connection has returned, in any slot whose buffer was lent. Drops the
    /// buffer if there is no such slot.
    pub(super) fn give_back(&mut self, buf: Buf, queue: &mut Queue<'_>) -> Result<(), VerbsError> {
        match self.lent.pop() {
            Some(slot) => self.post(slot, buf, queue),
            None => Ok(()),
        }
    }
}
