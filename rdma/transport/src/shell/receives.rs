//! Receive slots: where capsules arrive, of a core's shared receive queue or of one queue pair's own.
//!
//! A slot is a buffer for a submission queue entry and the in-capsule data behind it:
//!
//! ```text
//!   posted ── completion ──> the entry is copied out ┬─ nothing behind it ──> posted again, at once
//!                                                    └─ data: the connection has it ─ back ─> posted again
//! ```
//! One segment, not two: soft-RoCE of Linux 6.12 fails a shared receive of several with "local operation
//! error". Slots are made in chunks, as connections reserve them, and are never given back while the queue
//! lives.

use nvme_spec::Sqe;
use nvme_spec::zerocopy::FromBytes;
use spindle_rdma_verbs::{Access, MemoryRegion, QueuePair, Sge, SharedReceiveQueue, VerbsError};
use spindle_reactor::mem::{Buf, Pool};

use super::keys::SharedDevice;
use crate::controller::{CAPSULE_BYTES, Capsule};

/// Slots of a chunk.
pub(super) const CHUNK_SLOTS: u32 = 256;

/// Where receives are posted.
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

/// The slots of one queue.
pub(super) struct Receives {
    /// Buffers that are posted, by slot.
    posted: Vec<Option<Buf>>,
    /// Slots whose buffer is with a connection.
    free: Vec<u32>,
    /// Slots whose buffer is here as the queue did not take it: see [`Receives::post_again`].
    waiting: Vec<(u32, Buf)>,
    /// Keep the chunks' memory registered. After the buffers, which lie in it.
    chunks: Vec<MemoryRegion>,
    buffer_bytes: u32,
    /// Marks the ids of this queue's receives.
    id_bits: u64,
}

impl Receives {
    pub(super) fn new(in_capsule_bytes: u32, id_bits: u64) -> Receives {
        let buffer_bytes = (CAPSULE_BYTES + in_capsule_bytes).next_multiple_of(64);
        Receives {
            posted: Vec::new(),
            free: Vec::new(),
            waiting: Vec::new(),
            chunks: Vec::new(),
            buffer_bytes,
            id_bits,
        }
    }

    /// How many slots there are.
    pub(super) fn slots(&self) -> u32 {
        u32::try_from(self.posted.len()).unwrap_or(u32::MAX)
    }

    /// Make another chunk with up to `count` slots, and post them.
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
                // Only what is posted is promised to connections.
                self.posted.pop();
                self.waiting.pop();
                return Err(error.to_string());
            }
        }
        Ok(())
    }

    /// A slot that is not taken waits, with its buffer.
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
                self.waiting.push((slot, buf));
                Err(error)
            }
        }
    }

    /// Post the slots that the queue has not taken, until it does not take one again.
    pub(super) fn post_again(&mut self, queue: &mut Queue<'_>) {
        while let Some((slot, buf)) = self.waiting.pop() {
            if self.post(slot, buf, queue).is_err() {
                return;
            }
        }
    }

    /// What a completed receive brought. Its slot is posted again at once where nothing came behind the
    /// entry.
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
            self.free.push(slot);
            return Ok(Some(Capsule { bytes, sqe, buf: Some(buf) }));
        }
        self.post(slot, buf, queue)?;
        Ok(Some(Capsule { bytes, sqe, buf: None }))
    }

    /// A receive that brought nothing, of a queue that goes on: posted again.
    pub(super) fn flushed(&mut self, slot: u32, queue: &mut Queue<'_>) -> Result<(), VerbsError> {
        match self.posted.get_mut(slot as usize).and_then(Option::take) {
            Some(buf) => self.post(slot, buf, queue),
            None => Ok(()),
        }
    }

    /// A buffer comes back from a connection: its slot is posted again.
    pub(super) fn give_back(&mut self, buf: Buf, queue: &mut Queue<'_>) -> Result<(), VerbsError> {
        match self.free.pop() {
            Some(slot) => self.post(slot, buf, queue),
            None => Ok(()),
        }
    }
}
