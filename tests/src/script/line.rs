//! [`Line`]: a connection of which the test is both the host and the wire.

use spindle_nvme_transport::RequestId;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use nvme_spec::Status;
use spindle_nvme_transport::{CloseReason, Event, FAST_PATH, Limits, Reply, Transport};
use spindle_reactor::mem::Buf;

/// Data that the target has asked for and that has not been brought.
#[derive(Debug)]
pub struct Fetch {
    /// The request.
    pub slot: RequestId,
    /// Its command.
    pub cid: u16,
    /// Where the data goes.
    pub buf: Buf,
}

/// A part of a command's data that is on the wire.
#[derive(Debug)]
pub struct Part {
    /// The request.
    pub slot: RequestId,
    /// Its command.
    pub cid: u16,
    /// Where it belongs in the command's data.
    pub offset: u32,
    /// The target has asked for it; else it is for the host.
    pub is_fetch: bool,
    /// Where the data goes, or the data.
    pub buf: Buf,
}

/// A completion as the host sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The command.
    pub cid: u16,
    /// Its status, without M.
    pub status: Status,
    /// M: the error log has more about it.
    pub has_more: bool,
    /// Dwords 0 and 1.
    pub result: u64,
    /// SQHD.
    pub sq_head: u16,
    /// What came with it.
    pub data: Vec<u8>,
}

#[derive(Default)]
struct Wire {
    events: VecDeque<Event>,
    fetches: Vec<Fetch>,
    parts: VecDeque<Part>,
    replies: VecDeque<Reply>,
    /// Replies that the host has seen and of which the target has not been told that they left.
    unsent: VecDeque<RequestId>,
    closed: Option<CloseReason>,
    entries: u16,
    /// By its place: the name of the request that was told last.
    slots: Vec<RequestId>,
    /// A device has the buffers of fetches: none is cancelled.
    is_at_device: bool,
    /// Requests that get no answer.
    forgotten: Vec<RequestId>,
    /// Replies without a slot that have left.
    left: u32,
    /// In-capsule data of the next command, if it is here already.
    in_capsule: Option<Vec<u8>>,
    /// The lowest address of the stack in a call of the target.
    stack_low: Option<usize>,
}

impl Wire {
    fn mark_stack(&mut self) {
        let address = stack_address();
        self.stack_low = Some(self.stack_low.map_or(address, |low| low.min(address)));
    }
}

/// Where the stack is now.
#[inline(never)]
#[must_use]
pub fn stack_address() -> usize {
    let here = 0_u8;
    std::ptr::from_ref(std::hint::black_box(&here)).addr()
}

/// Both ends of a connection: the target's, as a [`Transport`], and the test's. A clone is another handle.
#[derive(Clone, Default)]
pub struct Line(Rc<RefCell<Wire>>);

/// What every line can carry.
pub const LIMITS: Limits = Limits { in_capsule_bytes: 4096, queue_entries: 128, transfer_bytes: 1 << 20 };

impl Line {
    /// Something happened on it. The core sees it at its next step.
    pub fn push(&self, event: Event) {
        self.0.borrow_mut().events.push_back(event);
    }

    /// The reply to this request, or one without a slot, has left.
    pub fn left(&self, slot: RequestId) {
        if slot == FAST_PATH {
            self.0.borrow_mut().left += 1;
        } else {
            self.push(Event::Sent { slot });
        }
    }

    /// The in-capsule data of the next command is here with it.
    pub fn set_in_capsule(&self, data: &[u8]) {
        self.0.borrow_mut().in_capsule = Some(data.to_vec());
    }

    /// True while that data is not taken.
    #[must_use]
    pub fn has_in_capsule(&self) -> bool {
        self.0.borrow().in_capsule.is_some()
    }

    /// Commands whose data the target has asked for, in the order in which it did.
    #[must_use]
    pub fn fetching(&self) -> Vec<u16> {
        self.0.borrow().fetches.iter().map(|fetch| fetch.cid).collect()
    }

    /// Take the oldest fetch of a command.
    #[must_use]
    pub fn take_fetch(&self, cid: u16) -> Option<Fetch> {
        let mut wire = self.0.borrow_mut();
        let at = wire.fetches.iter().position(|fetch| fetch.cid == cid)?;
        Some(wire.fetches.remove(at))
    }

    /// Parts on the wire, in the order in which the target has handed them over: command, first byte, length.
    #[must_use]
    pub fn parts(&self) -> Vec<(u16, u32, usize)> {
        self.0.borrow().parts.iter().map(|part| (part.cid, part.offset, part.buf.len())).collect()
    }

    /// The oldest part on the wire is the host's data, on its way to the target.
    #[must_use]
    pub fn is_first_part_fetch(&self) -> bool {
        self.0.borrow().parts.front().is_some_and(|part| part.is_fetch)
    }

    /// Take a part of a command off the wire.
    #[must_use]
    pub fn take_part(&self, cid: u16, offset: u32) -> Option<Part> {
        let mut wire = self.0.borrow_mut();
        let at = wire.parts.iter().position(|part| part.cid == cid && part.offset == offset)?;
        wire.parts.remove(at)
    }

    /// The oldest part for the host of a request.
    #[must_use]
    pub fn next_part_of(&self, slot: RequestId) -> Option<(u16, u32)> {
        let wire = self.0.borrow();
        let part = wire.parts.iter().find(|part| part.slot == slot && !part.is_fetch)?;
        Some((part.cid, part.offset))
    }

    /// Read the next completion; the target is not told that it has left.
    #[must_use]
    pub fn read(&self) -> Option<Answer> {
        let mut wire = self.0.borrow_mut();
        let Reply { slot, cqe, data, .. } = wire.replies.pop_front()?;
        wire.unsent.push_back(slot);
        Some(Answer {
            cid: cqe.cid(),
            status: cqe.status().without_more(),
            has_more: cqe.status().is_more(),
            result: cqe.result_u64(),
            sq_head: cqe.sq_head(),
            data: data.iter().flat_map(|buf| buf.segments().flatten().copied()).collect(),
        })
    }

    /// The name of the next completion that was read and has not left.
    #[must_use]
    pub fn next_unsent(&self) -> Option<RequestId> {
        self.0.borrow_mut().unsent.pop_front()
    }

    /// Why the target has closed it, if it has.
    #[must_use]
    pub fn closed(&self) -> Option<CloseReason> {
        self.0.borrow().closed
    }

    /// Entries of the queue, as the target has told them.
    #[must_use]
    pub fn entries(&self) -> u16 {
        self.0.borrow().entries
    }

    /// From now on a device has the buffers of fetches, as with an RDMA READ that is posted: what was asked
    /// for comes, even if it is not wanted any more.
    pub fn keep_fetches(&self) {
        self.0.borrow_mut().is_at_device = true;
    }

    /// How many requests the target has said to forget.
    #[must_use]
    pub fn forgotten(&self) -> usize {
        self.0.borrow().forgotten.len()
    }

    /// The lowest address of the stack at which the target has looked at it or closed it since the last call.
    #[must_use]
    pub fn take_stack_low(&self) -> Option<usize> {
        self.0.borrow_mut().stack_low.take()
    }

    fn add(&self, part: Part) {
        let mut wire = self.0.borrow_mut();
        if wire.closed.is_none() {
            wire.parts.push_back(part);
        }
    }

    /// It is gone: everything that it holds is dropped, `Closed` follows.
    pub fn hang_up(&self) {
        let mut wire = self.0.borrow_mut();
        wire.fetches.clear();
        wire.parts.clear();
        wire.replies.clear();
        wire.events.clear();
        wire.events.push_back(Event::Closed);
    }
}

impl Transport for Line {
    fn next_event(&mut self) -> Option<Event> {
        let mut wire = self.0.borrow_mut();
        wire.mark_stack();
        wire.events.pop_front()
    }

    fn take_fast_path_sent(&mut self) -> u32 {
        std::mem::take(&mut self.0.borrow_mut().left)
    }

    fn set_slot(&mut self, slot: RequestId) {
        let slots = &mut self.0.borrow_mut().slots;
        let count = slots.len().max(slot.index() + 1);
        slots.resize(count, FAST_PATH);
        slots[slot.index()] = slot;
    }

    fn fetch(&mut self, slot: RequestId, cid: u16, buf: Buf) {
        let mut wire = self.0.borrow_mut();
        if wire.closed.is_none() {
            wire.fetches.push(Fetch { slot, cid, buf });
        }
    }

    fn cancel(&mut self, slot: RequestId) -> bool {
        let mut wire = self.0.borrow_mut();
        let at = wire.fetches.iter().position(|fetch| fetch.slot == slot);
        let at = at.filter(|_| !wire.is_at_device);
        at.map(|at| wire.fetches.remove(at)).is_some()
    }

    fn moves_parts(&self) -> bool {
        true
    }

    fn fetch_part(&mut self, slot: RequestId, cid: u16, offset: u32, buf: Buf) {
        self.add(Part { slot, cid, offset, is_fetch: true, buf });
    }

    fn send_part(&mut self, slot: RequestId, cid: u16, offset: u32, buf: Buf) {
        self.add(Part { slot, cid, offset, is_fetch: false, buf });
    }

    fn take_in_capsule(&mut self, buf: &mut Buf) -> bool {
        let Some(data) = self.0.borrow_mut().in_capsule.take() else { return false };
        assert_eq!(data.len(), buf.len(), "a buffer of another length");
        buf.copy_in(0, &data);
        true
    }

    fn end_without_reply(&mut self, slot: RequestId) {
        let mut wire = self.0.borrow_mut();
        assert_eq!(wire.slots.get(slot.index()), Some(&slot), "it has another name");
        wire.slots[slot.index()] = FAST_PATH;
        wire.forgotten.push(slot);
    }

    fn reply(&mut self, reply: Reply) {
        let mut wire = self.0.borrow_mut();
        let is_failure_with_data = !reply.cqe.status().is_success() && reply.data.is_some();
        assert!(!is_failure_with_data, "data with a failure: {:?}", reply.cqe);
        let slot = reply.slot;
        let is_known = slot == FAST_PATH || wire.slots.get(slot.index()) == Some(&slot);
        assert!(is_known, "an answer in a name that its command does not have: {slot:?}");
        if wire.closed.is_none() {
            wire.replies.push_back(reply);
        }
    }

    fn unsent_bytes(&self) -> u64 {
        let wire = self.0.borrow();
        wire.replies.iter().filter_map(|reply| reply.data.as_ref()).map(|data| data.len() as u64).sum()
    }

    /// What was asked for does not come any more; what was answered may still be read.
    fn close(&mut self, reason: CloseReason) {
        let mut wire = self.0.borrow_mut();
        wire.mark_stack();
        wire.closed.get_or_insert(reason);
        wire.fetches.clear();
        wire.parts.retain(|part| !part.is_fetch);
    }

    fn set_queue_entries(&mut self, entries: u16) {
        self.0.borrow_mut().entries = entries;
    }

    fn limits(&self) -> Limits {
        LIMITS
    }
}
