//! Receive slots: where capsules arrive, of a core's shared receive queue or of one queue pair's own.
//!
//! A slot is 64 bytes for the entry, and a buffer for in-capsule data behind it:
//!
//! ```text
//!   posted ── completion ──> the entry is copied out ┬─ nothing behind it ──> posted again, at once
//!                                                    └─ data ──> the buffer goes to the connection ── back ──> posted
//! ```
//! Slots are made in chunks, as connections reserve them, and are never given back while the queue lives.

use nvme_spec::Sqe;
use nvme_spec::zerocopy::FromBytes;
use spindle_rdma_verbs::{QueuePair, Sge, SharedReceiveQueue, VerbsError};
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};

use super::keys::SharedDevice;
use crate::controller::{CAPSULE_BYTES, Capsule};

/// Slots of a chunk.
pub(super) const CHUNK_SLOTS: u32 = 256;
/// Bytes of all entries of a chunk.
const ENTRIES_BYTES: u32 = CHUNK_SLOTS * CAPSULE_BYTES;

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

struct Chunk {
    entries: Buf,
    key: u32,
    /// Keeps the chunk's memory registered. After the buffers, which lie in it.
    _region: std::sync::Arc<spindle_rdma_verbs::MemoryRegion>,
}

/// The slots of one queue.
pub(super) struct Receives {
    /// Data buffers that are posted, by slot.
    posted: Vec<Option<Buf>>,
    /// Slots whose buffer is with a connection.
    free: Vec<u32>,
    chunks: Vec<Chunk>,
    data_bytes: u32,
    /// Marks the ids of this queue's receives.
    id_bits: u64,
}

impl Receives {
    pub(super) fn new(in_capsule_bytes: u32, id_bits: u64) -> Receives {
        let data_bytes = in_capsule_bytes.max(1).next_multiple_of(4096);
        Receives { posted: Vec::new(), free: Vec::new(), chunks: Vec::new(), data_bytes, id_bits }
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
        let data = ZoneSpec { buffer_bytes: self.data_bytes, count };
        let entries = ZoneSpec { buffer_bytes: ENTRIES_BYTES, count: 1 };
        let zones = match self.data_bytes.cmp(&ENTRIES_BYTES) {
            std::cmp::Ordering::Less => vec![data, entries],
            std::cmp::Ordering::Equal => vec![ZoneSpec { count: count + 1, ..data }],
            std::cmp::Ordering::Greater => vec![entries, data],
        };
        let pool = Pool::new(&zones, Pages::Base).map_err(|error| error.to_string())?;
        let region = device.register(&pool.area()).map_err(|error| error.to_string())?;
        let Some(entries) = pool.take(ENTRIES_BYTES) else { return Err("no memory for capsules".to_owned()) };
        let key = region.local_key();
        self.chunks.push(Chunk { entries, key, _region: region });
        // All chunks but the last are whole, so a slot's number says where it is.
        self.posted.resize_with((self.chunks.len() - 1) * CHUNK_SLOTS as usize, || None);
        for _ in 0..count {
            let Some(buf) = pool.take(self.data_bytes) else { break };
            self.posted.push(None);
            self.post(self.slots() - 1, buf, queue).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn post(&mut self, slot: u32, data: Buf, queue: &mut Queue<'_>) -> Result<(), VerbsError> {
        let (chunk, at) = (slot / CHUNK_SLOTS, (slot % CHUNK_SLOTS * CAPSULE_BYTES) as usize);
        let Some(chunk) = self.chunks.get(chunk as usize) else { return Ok(()) };
        let Some(entry) = chunk.entries.as_slice().and_then(|all| all.get(at..at + CAPSULE_BYTES as usize))
        else {
            return Ok(());
        };
        let Some(memory) = data.as_slice() else { return Ok(()) };
        let bytes = u32::try_from(memory.len()).unwrap_or(0);
        let segments = [
            Sge { address: entry.as_ptr() as u64, bytes: CAPSULE_BYTES, key: chunk.key },
            Sge { address: memory.as_ptr() as u64, bytes, key: chunk.key },
        ];
        queue.post(self.id_bits | u64::from(slot), &segments)?;
        if let Some(place) = self.posted.get_mut(slot as usize) {
            *place = Some(data);
        }
        Ok(())
    }

    /// What a completed receive brought. Its slot is posted again at once where nothing came behind the entry.
    pub(super) fn completed(
        &mut self,
        slot: u32,
        bytes: u32,
        queue: &mut Queue<'_>,
    ) -> Result<Option<Capsule>, VerbsError> {
        let Some(data) = self.posted.get_mut(slot as usize).and_then(Option::take) else { return Ok(None) };
        let at = (slot % CHUNK_SLOTS * CAPSULE_BYTES) as usize;
        let entries =
            self.chunks.get((slot / CHUNK_SLOTS) as usize).and_then(|chunk| chunk.entries.as_slice());
        let sqe = entries.and_then(|all| Sqe::read_from_prefix(all.get(at..)?).ok()).map(|(sqe, _)| sqe);
        let mut capsule = Capsule { bytes, sqe: sqe.unwrap_or_default(), data: None };
        if bytes > CAPSULE_BYTES {
            capsule.data = Some(data);
            self.free.push(slot);
        } else {
            self.post(slot, data, queue)?;
        }
        Ok(Some(capsule))
    }

    /// A receive that brought nothing, of a queue that goes on: posted again.
    pub(super) fn flushed(&mut self, slot: u32, queue: &mut Queue<'_>) -> Result<(), VerbsError> {
        match self.posted.get_mut(slot as usize).and_then(Option::take) {
            Some(data) => self.post(slot, data, queue),
            None => Ok(()),
        }
    }

    /// A buffer comes back from a connection: its slot is posted again.
    pub(super) fn give_back(&mut self, data: Buf, queue: &mut Queue<'_>) -> Result<(), VerbsError> {
        match self.free.pop() {
            Some(slot) => self.post(slot, data, queue),
            None => Ok(()),
        }
    }
}
