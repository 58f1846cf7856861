//! Submission and completion queues as the controller sees them, and their doorbells, shadow ones too.

use nvme_spec::pcie::{cq_head_doorbell, sq_tail_doorbell};
use nvme_spec::register::DOORBELLS;
use nvme_spec::{CQE_BYTES, Cqe, SQE_BYTES, Status};

use crate::controller::{Controller, Outcome};

/// A submission queue.
pub(crate) struct Sq {
    id: u16,
    base: u64,
    pub(crate) entries: u32,
    /// Next entry to read.
    pub(crate) head: u32,
    /// First entry that the host did not give.
    pub(crate) tail: u32,
    pub(crate) cqid: u16,
    /// With shadow doorbells: the shadow is looked at, until the queue is empty; then only a ring wakes it.
    is_awake: bool,
}

impl Sq {
    pub(crate) fn new(id: u16, base: u64, entries: u32, cqid: u16) -> Sq {
        Sq { id, base, entries, head: 0, tail: 0, cqid, is_awake: false }
    }

    pub(crate) fn entry(&self, index: u32) -> u64 {
        self.base.wrapping_add(u64::from(index) * SQE_BYTES as u64)
    }

    pub(crate) fn after(&self, index: u32) -> u32 {
        if index + 1 == self.entries { 0 } else { index + 1 }
    }

    /// The completion of a command of this queue.
    pub(crate) fn completion(&self, cid: u16, outcome: Outcome) -> Cqe {
        let (status, result) = match outcome {
            Ok(result) => (Status::SUCCESS, result),
            Err(status) => (status, 0),
        };
        let mut cqe = Cqe::new(cid, status).with_result(result);
        // Queues have at most 65,536 entries.
        cqe.sq_head = u16::try_from(self.head).unwrap_or_default().into();
        cqe.sq_id = self.id.into();
        cqe
    }

    /// First byte and length of its memory.
    pub(crate) fn memory(&self) -> (u64, u64) {
        (self.base, u64::from(self.entries) * SQE_BYTES as u64)
    }
}

/// A completion queue.
pub(crate) struct Cq {
    base: u64,
    entries: u32,
    /// First entry that the host has not released.
    head: u32,
    /// Next entry to write.
    tail: u32,
    pub(crate) phase: bool,
    /// Submission queues that complete to it.
    pub(crate) users: u32,
    /// With shadow doorbells: it was full at the last look, and the host was told to ring.
    is_waiting: bool,
}

impl Cq {
    pub(crate) fn new(base: u64, entries: u32) -> Cq {
        Cq { base, entries, head: 0, tail: 0, phase: true, users: 0, is_waiting: false }
    }

    pub(crate) fn entry(&self) -> u64 {
        self.base.wrapping_add(u64::from(self.tail) * CQE_BYTES as u64)
    }

    /// The entry was written.
    pub(crate) fn advance(&mut self) {
        self.tail += 1;
        if self.tail == self.entries {
            self.tail = 0;
            self.phase = !self.phase;
        }
    }

    fn is_full(&self) -> bool {
        let after = if self.tail + 1 == self.entries { 0 } else { self.tail + 1 };
        after == self.head
    }

    /// The host has released what is before `head`; false where it cannot have.
    fn release(&mut self, head: u32) -> bool {
        let distance = |to: u32| (to + self.entries - self.head) % self.entries;
        let is_valid = head < self.entries && distance(head) <= distance(self.tail);
        if is_valid {
            self.head = head;
        }
        is_valid
    }

    /// First byte and length of its memory.
    pub(crate) fn memory(&self) -> (u64, u64) {
        (self.base, u64::from(self.entries) * CQE_BYTES as u64)
    }
}

/// Pages of Doorbell Buffer Config.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shadow {
    /// Doorbells as the host keeps them.
    pub(crate) doorbells: u64,
    /// The values at which the controller wants the doorbells themselves to be written.
    pub(crate) event_indexes: u64,
}

impl Controller {
    /// Where a doorbell of an I/O queue lies in the pages of the doorbell buffer, if it has a place there.
    fn shadow(&self, qid: u16, doorbell: u64) -> Option<(u64, u64)> {
        let shadow = self.shadow.filter(|_| qid != 0)?;
        let offset = doorbell - u64::from(DOORBELLS);
        (offset < 4096).then(|| (shadow.doorbells + offset, shadow.event_indexes + offset))
    }

    /// Look at the tail doorbell; whether there is something to read in the queue.
    pub(crate) fn find_tail(&mut self, qid: u16) -> bool {
        let Some(Some(sq)) = self.sqs.get(usize::from(qid)) else { return false };
        let (entries, is_awake) = (sq.entries, sq.is_awake);
        let doorbell = sq_tail_doorbell(qid, self.spec.dstrd);
        let rung = self.registers.take_doorbell(doorbell);
        self.counters.doorbells += u64::from(rung.is_some());
        let shadow = self.shadow(qid, doorbell);
        let tail = match shadow {
            Some((shadow, _)) if rung.is_some() || is_awake => self.host.load32(shadow),
            Some(_) => None,
            None => rung,
        };
        if let Some(tail) = tail.filter(|tail| *tail >= entries) {
            self.host.violate(|| format!("tail {tail} of queue {qid}, which has {entries} entries"));
            self.raise_doorbell_error(true);
            return false;
        }
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else { return false };
        if let Some(tail) = tail {
            sq.tail = tail;
            sq.is_awake = shadow.is_some();
        }
        sq.head != sq.tail
    }

    /// A queue that was there before the doorbell buffer: what it is to be rung at.
    pub(crate) fn announce(&mut self, qid: u16) {
        let Some(Some(sq)) = self.sqs.get(usize::from(qid)) else { return };
        let tail = sq.tail;
        if let Some((_, event)) = self.shadow(qid, sq_tail_doorbell(qid, self.spec.dstrd)) {
            self.host.store32(event, tail);
        }
    }

    /// An empty queue with a shadow doorbell: ask to be rung at the next entry.
    pub(crate) fn fall_asleep(&mut self, qid: u16) {
        let Some(Some(sq)) = self.sqs.get(usize::from(qid)) else { return };
        let tail = sq.tail;
        if !sq.is_awake || sq.head != tail {
            return;
        }
        let Some((shadow, event)) = self.shadow(qid, sq_tail_doorbell(qid, self.spec.dstrd)) else { return };
        self.host.store32(event, tail);
        // What was added before the host could see the event index is found here.
        let is_same = self.host.load32(shadow).is_none_or(|now| now == tail);
        if let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) {
            sq.is_awake = !is_same;
        }
    }

    /// Look at the head doorbell.
    pub(crate) fn find_head(&mut self, cqid: u16) {
        let Some(Some(cq)) = self.cqs.get(usize::from(cqid)) else { return };
        let (entries, is_looking) = (cq.entries, cq.is_full() && !cq.is_waiting);
        let doorbell = cq_head_doorbell(cqid, self.spec.dstrd);
        let rung = self.registers.take_doorbell(doorbell);
        self.counters.doorbells += u64::from(rung.is_some());
        let head = match self.shadow(cqid, doorbell) {
            Some((shadow, _)) if rung.is_some() || is_looking => self.host.load32(shadow),
            Some(_) => None,
            None => rung,
        };
        if let Some(head) = head {
            self.release(cqid, head, entries);
        }
        if is_looking && self.is_full(cqid) {
            self.ask_for_ring(cqid, doorbell, entries);
        }
    }

    /// Whether a completion can be written to a queue.
    pub(crate) fn has_room(&mut self, cqid: u16) -> bool {
        if self.is_full(cqid) {
            self.find_head(cqid);
        }
        !self.is_full(cqid)
    }

    /// Set an entry of a completion queue, whatever it is.
    pub(crate) fn scribble(&mut self, cqid: u16, place: u16, words: [u64; 2]) {
        let Some(Some(cq)) = self.cqs.get(usize::from(cqid)) else { return };
        let iova = cq.base.wrapping_add(u64::from(u32::from(place) % cq.entries) * CQE_BYTES as u64);
        let cqe: Cqe = nvme_spec::zerocopy::transmute!(words);
        let _ = self.host.post(iova, &cqe);
    }

    fn is_full(&self, cqid: u16) -> bool {
        matches!(self.cqs.get(usize::from(cqid)), Some(Some(cq)) if cq.is_full())
    }

    fn release(&mut self, cqid: u16, head: u32, entries: u32) {
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(cqid)) else { return };
        if cq.release(head) {
            cq.is_waiting &= cq.is_full();
        } else {
            let (from, to) = (cq.head, cq.tail);
            self.host.violate(|| {
                format!("head {head} of queue {cqid} of {entries} entries, where {from} to {to} are given")
            });
            self.raise_doorbell_error(true);
        }
    }

    /// A full queue with a shadow doorbell: ask to be rung when the next entry is released.
    fn ask_for_ring(&mut self, cqid: u16, doorbell: u64, entries: u32) {
        let Some((shadow, event)) = self.shadow(cqid, doorbell) else { return };
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(cqid)) else { return };
        if std::mem::replace(&mut cq.is_waiting, true) {
            return;
        }
        let head = cq.head;
        self.host.store32(event, head);
        // What was released before the host could see the event index is found here.
        if let Some(now) = self.host.load32(shadow).filter(|now| *now != head) {
            self.release(cqid, now, entries);
        }
    }
}
