//! The controller's submission and completion queues, and their doorbells and shadow doorbells.

use nvme_spec::pcie::{cq_head_doorbell, sq_tail_doorbell};
use nvme_spec::register::DOORBELLS;
use nvme_spec::{CQE_BYTES, Cqe, SQE_BYTES, Status};

use crate::controller::{Controller, Outcome};

pub(crate) struct Sq {
    id: u16,
    base: u64,
    pub(crate) entries: u32,
    /// Next entry to fetch.
    pub(crate) head: u32,
    /// Last tail doorbell value: the first entry that is not submitted.
    pub(crate) tail: u32,
    pub(crate) cqid: u16,
    /// With shadow doorbells: true while the shadow tail is read in each step. False once the queue is empty,
    /// until the register is written.
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

    pub(crate) fn completion(&self, cid: u16, outcome: Outcome) -> Cqe {
        let (status, result) = match outcome {
            Ok(result) => (Status::SUCCESS, result),
            Err(status) => (status, 0),
        };
        let mut cqe = Cqe::new(cid, status).with_result(result);
        // Fits: `head` is below `entries`, which is at most 65,536.
        cqe.sq_head = u16::try_from(self.head).unwrap_or_default().into();
        cqe.sq_id = self.id.into();
        cqe
    }

    /// Returns the IOVA and length in bytes of the queue.
    pub(crate) fn memory(&self) -> (u64, u64) {
        (self.base, u64::from(self.entries) * SQE_BYTES as u64)
    }
}

pub(crate) struct Cq {
    base: u64,
    entries: u32,
    /// Last head doorbell value: the first entry that the host has not consumed.
    head: u32,
    /// Next entry to post.
    tail: u32,
    pub(crate) phase: bool,
    /// Count of submission queues that complete to this queue.
    pub(crate) users: u32,
    /// With shadow doorbells: the queue was full, and EventIdx requests a write of the head register.
    is_waiting: bool,
}

impl Cq {
    pub(crate) fn new(base: u64, entries: u32) -> Cq {
        Cq { base, entries, head: 0, tail: 0, phase: true, users: 0, is_waiting: false }
    }

    pub(crate) fn entry(&self) -> u64 {
        self.base.wrapping_add(u64::from(self.tail) * CQE_BYTES as u64)
    }

    /// Moves the tail past a posted entry.
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

    /// Sets a new head. Returns false, without effect, if `head` is not between the old head and the tail.
    fn release(&mut self, head: u32) -> bool {
        let distance = |to: u32| (to + self.entries - self.head) % self.entries;
        let is_valid = head < self.entries && distance(head) <= distance(self.tail);
        if is_valid {
            self.head = head;
        }
        is_valid
    }

    /// Returns the IOVA and length in bytes of the queue.
    pub(crate) fn memory(&self) -> (u64, u64) {
        (self.base, u64::from(self.entries) * CQE_BYTES as u64)
    }
}

/// IOVAs of the pages of Doorbell Buffer Config.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shadow {
    /// Shadow doorbells, written by the host.
    pub(crate) doorbells: u64,
    /// EventIdx values, written by the controller.
    pub(crate) event_indexes: u64,
}

impl Controller {
    /// Returns the IOVAs of the shadow doorbell and EventIdx of an I/O queue; `None` without doorbell buffer,
    /// or for a doorbell beyond the page.
    fn shadow(&self, qid: u16, doorbell: u64) -> Option<(u64, u64)> {
        let shadow = self.shadow.filter(|_| qid != 0)?;
        let offset = doorbell - u64::from(DOORBELLS);
        (offset < 4096).then(|| (shadow.doorbells + offset, shadow.event_indexes + offset))
    }

    /// Reads the tail doorbell, or its shadow. Returns true if the queue has entries to fetch; false for an
    /// invalid tail, which is a violation.
    pub(crate) fn read_tail(&mut self, qid: u16) -> bool {
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
            self.host.record_violation(|| format!("tail {tail} of queue {qid}, which has {entries} entries"));
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

    /// Sets EventIdx of the tail doorbell of a queue that was created before the doorbell buffer.
    pub(crate) fn set_event_index(&mut self, qid: u16) {
        let Some(Some(sq)) = self.sqs.get(usize::from(qid)) else { return };
        let tail = sq.tail;
        if let Some((_, event)) = self.shadow(qid, sq_tail_doorbell(qid, self.spec.dstrd)) {
            self.host.store32(event, tail);
        }
    }

    /// Stops reading the shadow tail of an empty queue: EventIdx requests a register write for the next
    /// entry.
    pub(crate) fn sleep_until_doorbell(&mut self, qid: u16) {
        let Some(Some(sq)) = self.sqs.get(usize::from(qid)) else { return };
        let tail = sq.tail;
        if !sq.is_awake || sq.head != tail {
            return;
        }
        let Some((shadow, event)) = self.shadow(qid, sq_tail_doorbell(qid, self.spec.dstrd)) else { return };
        self.host.store32(event, tail);
        // Reads the tail again: the host writes no register for entries that it added before it read
        // EventIdx.
        let is_same = self.host.load32(shadow).is_none_or(|now| now == tail);
        if let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) {
            sq.is_awake = !is_same;
        }
    }

    /// Reads the head doorbell and releases entries; an invalid head is a violation. A shadow doorbell is
    /// read if the register was written or the queue has become full.
    pub(crate) fn read_head(&mut self, cqid: u16) {
        let Some(Some(cq)) = self.cqs.get(usize::from(cqid)) else { return };
        let (entries, is_checked) = (cq.entries, cq.is_full() && !cq.is_waiting);
        let doorbell = cq_head_doorbell(cqid, self.spec.dstrd);
        let rung = self.registers.take_doorbell(doorbell);
        self.counters.doorbells += u64::from(rung.is_some());
        let head = match self.shadow(cqid, doorbell) {
            Some((shadow, _)) if rung.is_some() || is_checked => self.host.load32(shadow),
            Some(_) => None,
            None => rung,
        };
        if let Some(head) = head {
            self.release(cqid, head, entries);
        }
        if is_checked && self.is_full(cqid) {
            self.request_doorbell(cqid, doorbell, entries);
        }
    }

    /// Returns true if a completion queue has a free entry, or does not exist. Reads the head doorbell of a
    /// full queue.
    pub(crate) fn has_room(&mut self, cqid: u16) -> bool {
        if self.is_full(cqid) {
            self.read_head(cqid);
        }
        !self.is_full(cqid)
    }

    /// Overwrites entry `place`, modulo the queue size, of a completion queue.
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
            self.host.record_violation(|| {
                format!("head {head} of queue {cqid} of {entries} entries, where {from} to {to} are given")
            });
            self.raise_doorbell_error(true);
        }
    }

    /// Requests a register write for the next entry that the host consumes of a full queue with a shadow
    /// doorbell.
    fn request_doorbell(&mut self, cqid: u16, doorbell: u64, entries: u32) {
        let Some((shadow, event)) = self.shadow(cqid, doorbell) else { return };
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(cqid)) else { return };
        if std::mem::replace(&mut cq.is_waiting, true) {
            return;
        }
        let head = cq.head;
        self.host.store32(event, head);
        // Reads the head again: the host writes no register for a head that it set before it read EventIdx.
        if let Some(now) = self.host.load32(shadow).filter(|now| *now != head) {
            self.release(cqid, now, entries);
        }
    }
}
