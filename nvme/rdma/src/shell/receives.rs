//! Receive slots of a core's shared receive queue, or of one queue pair's own receive queue.
//!
//! A slot has one buffer, for a submission queue entry and the in-capsule data behind it:
//!
//! ```text
//!   posted ── completion ──> the entry is copied out ┬─ no more bytes ──────────────────────┬─> unposted
//!      ^                                             └─ data: lent to the connection, back ─┘      │
//!      └──────────────────── flush: a list of up to 32, one doorbell ──────────────────────────────┘
//! ```
//! The shell flushes before it posts a reply to any command of the slots: a host may send its next command as
//! soon as it has a reply, and finds a receive. So a queue never lacks a reserved receive, however many slots
//! wait for the flush, and the list needs no bound of its own: one poll has at most as many completions as
//! one list has receives.
//!
//! The buffer of a slot lies at the slot's place in the memory of the queue, and returns there after it was
//! lent. So the address gives the slot, and the slot has the key. A receive has one scatter/gather entry, not
//! two: soft-RoCE of Linux 6.12 fails a shared receive with several entries ("local operation error"). Slots
//! are added in chunks as connections reserve them, and freed only with the queue.

use nvme_spec::Sqe;
use nvme_spec::zerocopy::FromBytes;
use spindle_rdma::{Access, MemoryRegion, QueuePair, ReceivesError, Sge, SharedReceiveQueue, VerbsError};
use spindle_reactor::mem::{Buf, Pool};

use super::keys::SharedDevice;
use crate::controller::{CAPSULE_BYTES, Capsule};

/// Maximum receives added to a queue at once; they share one memory registration.
pub(super) const CHUNK_SLOTS: u32 = 256;
/// Maximum bytes of the memory of a queue: the limit of a pool's zone.
const MEMORY_BYTES_MAX: u32 = 1 << 30;

/// A receive queue; tests implement it without a device.
pub(super) trait PostReceives {
    /// Posts receives of one segment each. After an error, the receives before the failed one are posted.
    fn post(&mut self, receives: impl Iterator<Item = (u64, Sge)>) -> Result<(), ReceivesError>;
}

/// The receive queue that slots are posted to.
pub(super) enum Queue<'a> {
    Shared(&'a SharedReceiveQueue),
    Own(&'a mut QueuePair),
}

impl PostReceives for Queue<'_> {
    #[inline]
    fn post(&mut self, receives: impl Iterator<Item = (u64, Sge)>) -> Result<(), ReceivesError> {
        match self {
            Queue::Shared(queue) => queue.post_all(receives),
            Queue::Own(queue_pair) => queue_pair.post_receives(receives),
        }
    }
}

struct ReceiveSlot {
    /// `None`: a connection uses the buffer.
    buf: Option<Buf>,
    /// The device has the receive.
    is_posted: bool,
    /// Local key of the buffer's memory.
    key: u32,
}

/// The slots of one receive queue.
pub(super) struct Receives {
    slots: Vec<ReceiveSlot>,
    /// Slots that [`Receives::flush`] posts: completed ones, and those whose posting failed.
    unposted: Vec<u32>,
    /// Memory of all slots that the queue can have; `None` before the first slot.
    pool: Option<Pool>,
    /// Address of the buffer of slot 0.
    base: usize,
    /// Registrations of the chunks. Dropped after the buffers, whose memory they cover.
    chunks: Vec<MemoryRegion>,
    slots_max: u32,
    buffer_bytes: u32,
    /// Upper bits of the work request ids of this queue's receives.
    id_bits: u64,
}

impl Receives {
    pub(super) fn new(slots_max: u32, in_capsule_bytes: u32, id_bits: u64) -> Receives {
        let buffer_bytes = (CAPSULE_BYTES + in_capsule_bytes).next_multiple_of(64);
        Receives {
            slots: Vec::new(),
            unposted: Vec::new(),
            pool: None,
            base: 0,
            chunks: Vec::new(),
            slots_max: slots_max.min(MEMORY_BYTES_MAX / buffer_bytes),
            buffer_bytes,
            id_bits,
        }
    }

    /// Returns the count of slots, posted or not.
    pub(super) fn slots(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(u32::MAX)
    }

    /// Returns the maximum count of slots.
    pub(super) fn slots_max(&self) -> u32 {
        self.slots_max
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
        let pool = self.pool()?;
        let bytes = |slots: u32| slots as usize * self.buffer_bytes as usize;
        let (start, bytes) = (bytes(self.slots()), bytes(count));
        let region = device.device().register_part(pool.area(), start, bytes, Access::LOCAL_WRITE);
        let region = region.map_err(|error| error.to_string())?;
        let key = region.local_key();
        self.chunks.push(region);
        self.add(&pool, count, key, queue)
    }

    /// Returns the memory of the queue, and maps it first if there is none. It becomes resident chunk by
    /// chunk.
    fn pool(&mut self) -> Result<Pool, String> {
        if let Some(pool) = &self.pool {
            return Ok(pool.clone());
        }
        let made = Pool::of_strides(self.buffer_bytes, self.slots_max).map_err(|error| error.to_string())?;
        self.base = made.area().base().addr().get();
        self.pool = Some(made.clone());
        Ok(made)
    }

    /// Adds `count` slots whose memory has the local key `key`, and posts them. Removes those that are not
    /// posted, as only posted slots may be reserved.
    fn add(
        &mut self,
        pool: &Pool,
        count: u32,
        key: u32,
        queue: &mut impl PostReceives,
    ) -> Result<(), String> {
        let before = self.slots();
        self.unposted.reserve((before + count) as usize);
        for slot in before..before + count {
            // A pool's buffers are taken in the order of their addresses.
            let buf = pool.take(self.buffer_bytes).filter(|buf| self.slot_of(buf) == Some(slot));
            let Some(buf) = buf else { break };
            self.slots.push(ReceiveSlot { buf: Some(buf), is_posted: false, key });
            self.unposted.push(slot);
        }
        let posted = self.flush(queue);
        if posted.is_err() {
            self.unposted.retain(|slot| *slot < before);
            // From the last: the next attempt takes the buffers in order again.
            while self.slots() > before && self.slots.pop_if(|slot| !slot.is_posted).is_some() {}
        }
        posted.map_err(|error| error.to_string())?;
        if self.slots() < before + count {
            return Err(format!("no memory for more than {} receives", self.slots()));
        }
        Ok(())
    }

    /// Returns the slot at whose place a buffer lies. `None`: the buffer is not of this queue's memory.
    #[inline]
    fn slot_of(&self, buf: &Buf) -> Option<u32> {
        let offset = buf.as_slice()?.as_ptr().addr().checked_sub(self.base)?;
        u32::try_from(offset / self.buffer_bytes as usize).ok()
    }

    /// Posts the unposted slots. On failure, those from the failed one on stay unposted, for the next flush.
    #[inline]
    pub(super) fn flush(&mut self, queue: &mut impl PostReceives) -> Result<(), VerbsError> {
        if self.unposted.is_empty() {
            return Ok(());
        }
        let Receives { slots, unposted, base, buffer_bytes, id_bits, .. } = self;
        let receives = unposted.iter().filter_map(|slot| {
            let address = *base as u64 + u64::from(*slot) * u64::from(*buffer_bytes);
            let key = slots.get(*slot as usize)?.key;
            Some((*id_bits | u64::from(*slot), Sge { address, bytes: *buffer_bytes, key }))
        });
        let outcome = queue.post(receives);
        let posted = outcome.map_or_else(|error| error.posted, |()| unposted.len()).min(unposted.len());
        for slot in unposted.drain(..posted) {
            if let Some(it) = slots.get_mut(slot as usize) {
                it.is_posted = true;
            }
        }
        outcome.map_err(VerbsError::from)
    }

    /// Returns the capsule of a completed receive of `bytes`; `None` if no receive is posted in `slot`. If
    /// nothing follows the submission queue entry, the next flush posts the slot again; otherwise the capsule
    /// contains the buffer.
    #[inline]
    pub(super) fn completed(&mut self, slot: u32, bytes: u32) -> Option<Capsule> {
        let it = self.slots.get_mut(slot as usize).filter(|it| it.is_posted)?;
        it.is_posted = false;
        let sqe = it.buf.as_ref().and_then(Buf::as_slice).and_then(|all| Sqe::read_from_prefix(all).ok());
        let sqe = sqe.map(|(sqe, _)| sqe).unwrap_or_default();
        if bytes > CAPSULE_BYTES {
            return Some(Capsule { bytes, sqe, buf: it.buf.take() });
        }
        self.unposted.push(slot);
        Some(Capsule { bytes, sqe, buf: None })
    }

    /// Takes back a slot whose receive was flushed or has failed, or whose connection has ended.
    pub(super) fn flushed(&mut self, slot: u32) {
        if let Some(it) = self.slots.get_mut(slot as usize).filter(|it| it.is_posted) {
            it.is_posted = false;
            self.unposted.push(slot);
        }
    }

    /// Takes back a buffer that a connection has returned. Drops a buffer that no slot has lent.
    #[inline]
    pub(super) fn give_back(&mut self, buf: Buf) {
        let Some(slot) = self.slot_of(&buf) else { return };
        if let Some(it) = self.slots.get_mut(slot as usize).filter(|it| it.buf.is_none()) {
            it.buf = Some(buf);
            self.unposted.push(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use nvme_spec::zerocopy::IntoBytes;

    use super::*;
    use crate::shell::RECEIVE_BIT;

    const ENOMEM: i32 = 12;
    const STRIDE: u64 = 4096 + 64;

    /// A receive queue with `room` for that many more receives.
    struct Fake {
        posted: VecDeque<(u64, Sge)>,
        calls: u32,
        room: usize,
    }

    impl PostReceives for Fake {
        fn post(&mut self, receives: impl Iterator<Item = (u64, Sge)>) -> Result<(), ReceivesError> {
            self.calls += 1;
            for (posted, receive) in receives.enumerate() {
                let error = VerbsError { verb: "ibv_post_srq_recv", errno: ENOMEM };
                self.room = self.room.checked_sub(1).ok_or(ReceivesError { posted, error })?;
                self.posted.push_back(receive);
            }
            Ok(())
        }
    }

    impl Fake {
        fn new(room: usize) -> Fake {
            Fake { posted: VecDeque::new(), calls: 0, room }
        }

        /// Slots of the posted receives, oldest first.
        fn slots(&self) -> Vec<u64> {
            self.posted.iter().map(|(id, _)| id & !RECEIVE_BIT).collect()
        }

        fn takes(&mut self) -> u32 {
            let (id, _) = self.posted.pop_front().expect("a posted receive");
            self.room += 1;
            u32::try_from(id & !RECEIVE_BIT).expect("a slot")
        }
    }

    fn receives(slots_max: u32) -> Receives {
        Receives::new(slots_max, 4096, RECEIVE_BIT)
    }

    /// Adds `count` slots as [`Receives::grow`] does, without a registration.
    fn grow(receives: &mut Receives, count: u32, key: u32, queue: &mut Fake) -> Result<(), String> {
        let pool = receives.pool()?;
        receives.add(&pool, count, key, queue)
    }

    fn flush(receives: &mut Receives, queue: &mut Fake) -> Result<(), i32> {
        receives.flush(queue).map_err(|error| error.errno)
    }

    #[test]
    fn completed_receives_are_posted_again_with_one_list() {
        let (mut receives, mut queue) = (receives(8), Fake::new(8));
        grow(&mut receives, 8, 7, &mut queue).expect("posted");
        assert_eq!((queue.slots(), queue.calls), ((0..8).collect(), 1));
        for (at, (_, segment)) in (0..).zip(&queue.posted) {
            let address = receives.base as u64 + at * STRIDE;
            assert_eq!(*segment, Sge { address, bytes: 4160, key: 7 });
        }
        for cid in 0..5 {
            let slot = queue.takes();
            let sqe = Sqe::keep_alive(cid);
            let buf = receives.slots[slot as usize].buf.as_mut().expect("a buffer");
            buf.copy_in(0, sqe.as_bytes());
            let capsule = receives.completed(slot, CAPSULE_BYTES).expect("a capsule");
            assert!(capsule.sqe.cid() == cid && capsule.buf.is_none());
        }
        assert_eq!((queue.slots(), queue.calls), (vec![5, 6, 7], 1));
        flush(&mut receives, &mut queue).expect("posted");
        assert_eq!((queue.slots(), queue.calls), (vec![5, 6, 7, 0, 1, 2, 3, 4], 2));
        flush(&mut receives, &mut queue).expect("nothing to do");
        assert_eq!(queue.calls, 2);
    }

    #[test]
    fn what_a_full_queue_refuses_is_posted_by_the_next_flush_and_nothing_twice() {
        let (mut receives, mut queue) = (receives(8), Fake::new(8));
        grow(&mut receives, 8, 7, &mut queue).expect("posted");
        for _ in 0..6 {
            let slot = queue.takes();
            assert!(receives.completed(slot, CAPSULE_BYTES).is_some());
            assert!(receives.completed(slot, CAPSULE_BYTES).is_none(), "it is not posted");
        }
        queue.room = 2;
        assert_eq!(flush(&mut receives, &mut queue), Err(ENOMEM));
        assert_eq!(queue.slots(), [6, 7, 0, 1]);
        assert!(receives.completed(2, CAPSULE_BYTES).is_none(), "not posted yet");
        receives.flushed(3);
        assert_eq!(flush(&mut receives, &mut queue), Err(ENOMEM));
        queue.room = 4;
        let slot = queue.takes();
        receives.flushed(slot);
        flush(&mut receives, &mut queue).expect("room for all");
        assert_eq!(queue.slots(), [7, 0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn a_lent_buffer_returns_to_its_slot() {
        let (mut receives, mut queue) = (receives(8), Fake::new(8));
        grow(&mut receives, 3, 7, &mut queue).expect("posted");
        grow(&mut receives, 5, 9, &mut queue).expect("posted");
        let mut lent = Vec::new();
        for _ in 0..8 {
            let slot = queue.takes();
            let capsule = receives.completed(slot, CAPSULE_BYTES + 4096).expect("a capsule");
            lent.push(capsule.buf.expect("data"));
        }
        flush(&mut receives, &mut queue).expect("nothing to do");
        assert!(receives.completed(4, CAPSULE_BYTES).is_none() && queue.calls == 2);
        for index in [4, 1, 0] {
            receives.give_back(lent.remove(index));
        }
        // A buffer of other memory, and one of this memory that no slot has lent.
        receives.give_back(Buf::heap(4160));
        receives.slots[2].buf = Some(lent.remove(0));
        receives.give_back(lent.remove(0));
        flush(&mut receives, &mut queue).expect("posted");
        assert_eq!(queue.slots(), [4, 1, 0, 3]);
        let keys: Vec<_> = queue.posted.iter().map(|(_, segment)| segment.key).collect();
        assert_eq!(keys, [9, 7, 7, 9]);
    }

    #[test]
    fn slots_that_cannot_be_posted_when_they_are_added_are_removed_and_added_later() {
        let (mut receives, mut queue) = (receives(8), Fake::new(5));
        grow(&mut receives, 3, 7, &mut queue).expect("posted");
        let slot = queue.takes();
        receives.flushed(slot);
        assert!(grow(&mut receives, 5, 9, &mut queue).is_err());
        assert_eq!((receives.slots(), queue.slots()), (5, vec![1, 2, 0, 3, 4]), "room for three");
        queue.room = 3;
        grow(&mut receives, 3, 9, &mut queue).expect("posted");
        assert_eq!((receives.slots(), queue.slots()), (8, vec![1, 2, 0, 3, 4, 5, 6, 7]));
        let places =
            queue.posted.iter().map(|(_, segment)| (segment.address - receives.base as u64) / STRIDE);
        assert_eq!(places.collect::<Vec<_>>(), queue.slots());
        assert!(grow(&mut receives, 1, 9, &mut queue).is_err() && receives.slots() == 8, "no more memory");
    }

    #[test]
    fn the_memory_of_a_queue_has_a_limit() {
        let receives = Receives::new(8192, 1 << 20, 0);
        assert_eq!(receives.slots_max(), 1023);
    }
}
