//! [`SendBatch`]: work requests ([`Operation`], [`SendData`]) for the send queue, posted with one doorbell.
//!
//! UNSAFETY: segments and inline bytes are copied when a work request is added, into the device's queue or
//! the queue pair's list.
#![expect(unsafe_code, reason = "calls libibverbs")]

use std::ptr;

use rdma_sys as sys;
use rdma_sys::ibv_wr_opcode as opcode;

use crate::error::VerbsError;
use crate::memory::Sge;
use crate::queue_pair::{List, Post, QueuePair};

/// Data of a work request.
#[derive(Debug, Clone, Copy)]
pub enum SendData<'a> {
    /// Registered memory. Until the completion it must not be written; for a READ it must not be read either.
    Local(&'a [Sge]),
    /// Bytes copied into the work request; at most [`QueuePair::inline_bytes`]. Not for a READ.
    Inline(&'a [u8]),
}

/// Operation of a work request.
#[derive(Debug, Clone, Copy)]
pub enum Operation {
    /// RDMA READ from the peer's memory into local memory.
    Read {
        /// Virtual address at the peer.
        address: u64,
        /// Key of the peer's memory, with remote read access.
        key: u32,
    },
    /// RDMA WRITE from local memory into the peer's memory.
    Write {
        /// Virtual address at the peer.
        address: u64,
        /// Key of the peer's memory, with remote write access.
        key: u32,
    },
    /// As `Write`; then consumes a receive that the peer has posted, whose completion contains `immediate`
    /// ([`crate::WorkCompletion::immediate`]). The receive's memory is not used.
    WriteWithImmediate {
        /// Virtual address at the peer.
        address: u64,
        /// Key of the peer's memory, with remote write access.
        key: u32,
        /// Value for the peer.
        immediate: u32,
    },
    /// SEND, which consumes a receive that the peer has posted.
    Send,
    /// SEND that invalidates a remote key at the peer.
    SendWithInvalidate {
        /// The key to be invalidated.
        key: u32,
    },
}

/// Work requests that [`SendBatch::submit`] posts. Dropping the batch discards those that are not posted.
///
/// [`SendBatch::add`] refuses a request with too many segments or bytes, and one that exceeds the queue's
/// entries; the requests before it stay. `is_signalled`: the request generates a completion. A failed request
/// always does. Entry and memory of an unsignalled request are free once a later signalled one has completed.
///
/// With [`crate::Posting::List`], a full list of [`crate::LIST_BATCH`] requests is posted with its own
/// doorbell when another request is added. Dropping the batch does not discard the requests of such a list.
#[must_use = "nothing is posted without submit"]
pub struct SendBatch<'a> {
    queue: &'a mut QueuePair,
    /// Requests added to the batch, posted or not.
    count: u32,
    failed: Option<VerbsError>,
}

const VERB_LIST: &str = "ibv_post_send";
const VERB_EXTENDED: &str = "ibv_wr_complete";

impl<'a> SendBatch<'a> {
    pub(crate) fn new(queue: &'a mut QueuePair) -> SendBatch<'a> {
        let mut batch = SendBatch { queue, count: 0, failed: None };
        // Discards the requests of an earlier batch that was leaked by `mem::forget`.
        batch.discard();
        batch
    }

    /// Adds a work request. Its completion contains `id`. Posts the list first if it is full
    /// ([`crate::Posting::List`]).
    #[inline]
    pub fn add(
        &mut self,
        id: u64,
        is_signalled: bool,
        operation: Operation,
        data: SendData<'_>,
    ) -> Result<(), VerbsError> {
        self.check(operation, data)?;
        self.make_room()?;
        match &mut self.queue.post {
            Post::Extended(queue) => {
                let queue = *queue;
                self.open(queue);
                // SAFETY: `self.queue` keeps the queue pair alive, `open` has started a batch, and `check`
                // has compared the data with the limits; `Post::Extended` is only created with all calls
                // present.
                unsafe { add_extended(queue, id, is_signalled, operation, data) };
            }
            Post::List(list) => {
                let (segments_max, inline_max) = (self.queue.send_sge, self.queue.inline_bytes);
                list.add(id, is_signalled, operation, data, segments_max, inline_max);
            }
        }
        self.count += 1;
        Ok(())
    }

    /// Posts the requests that are not posted yet, with one doorbell.
    ///
    /// # Errors
    /// The queue has too few free entries, the device has refused a request, or an earlier post of this batch
    /// failed. Some requests may have been posted; they complete as usual.
    #[inline]
    pub fn submit(mut self) -> Result<(), VerbsError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        match self.queue.post {
            Post::Extended(queue) if self.queue.is_open => {
                self.queue.is_open = false;
                // SAFETY: `self.queue` keeps the queue pair alive; `is_open` means that a batch is started.
                VerbsError::check(VERB_EXTENDED, unsafe { sys::ibv_wr_complete(queue) })
            }
            Post::Extended(_) => Ok(()),
            Post::List(_) => self.flush_list(),
        }
    }

    /// Checks a request against the limits before anything is written: EINVAL for too much data or an inline
    /// READ, ENOMEM for too many requests. Returns the error of an earlier post of this batch, if it failed.
    #[inline]
    fn check(&self, operation: Operation, data: SendData<'_>) -> Result<(), VerbsError> {
        let (length, max) = match data {
            SendData::Local(segments) => (segments.len(), self.queue.send_sge),
            SendData::Inline(bytes) => (bytes.len(), self.queue.inline_bytes),
        };
        let is_read = matches!(operation, Operation::Read { .. });
        if length > max as usize || is_read && matches!(data, SendData::Inline(_)) {
            return Err(VerbsError::new(VERB_LIST, libc::EINVAL));
        }
        if self.count >= self.queue.send_wr {
            return Err(VerbsError::new(VERB_LIST, libc::ENOMEM));
        }
        self.failed.map_or(Ok(()), Err)
    }

    #[inline]
    fn open(&mut self, queue: *mut sys::ibv_qp_ex) {
        if !self.queue.is_open {
            self.queue.is_open = true;
            // SAFETY: `self.queue` keeps the queue pair alive; no batch is started, as `is_open` was false.
            unsafe { sys::ibv_wr_start(queue) };
        }
    }

    /// Posts the list if it is full. No effect with [`crate::Posting::Extended`].
    #[inline]
    fn make_room(&mut self) -> Result<(), VerbsError> {
        match &self.queue.post {
            Post::List(list) if list.count == list.requests.len() => self.flush_list(),
            Post::List(_) | Post::Extended(_) => Ok(()),
        }
    }

    /// Posts the requests of the list with one doorbell, and records an error in `failed`.
    fn flush_list(&mut self) -> Result<(), VerbsError> {
        let raw = self.queue.raw;
        let Post::List(list) = &mut self.queue.post else { return Ok(()) };
        let count = std::mem::take(&mut list.count);
        if count == 0 {
            return Ok(());
        }
        let first = list.link(count, self.queue.send_sge);
        let mut bad = ptr::null_mut();
        // SAFETY: `self.queue` keeps the queue pair and its list alive; the call reads it before it returns.
        let returned = unsafe { sys::ibv_post_send(raw, first, &raw mut bad) };
        let outcome = VerbsError::check(VERB_LIST, returned);
        self.failed = outcome.err();
        outcome
    }

    fn discard(&mut self) {
        let is_open = std::mem::take(&mut self.queue.is_open);
        match &mut self.queue.post {
            // SAFETY: `self.queue` keeps the queue pair alive; `is_open` means that a batch is started.
            Post::Extended(queue) if is_open => unsafe { sys::ibv_wr_abort(*queue) },
            Post::Extended(_) => {}
            Post::List(list) => list.count = 0,
        }
    }
}

impl Drop for SendBatch<'_> {
    #[inline]
    fn drop(&mut self) {
        self.discard();
    }
}

const SIGNALLED: u32 = sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
const INLINE: u32 = sys::ibv_send_flags::IBV_SEND_INLINE.0;

/// # Safety
/// The queue pair exists and has all calls that `queue_pair::extended` checks. A batch is started. The data
/// is within the limits of the queue pair.
#[inline]
unsafe fn add_extended(
    queue: *mut sys::ibv_qp_ex,
    id: u64,
    is_signalled: bool,
    operation: Operation,
    data: SendData<'_>,
) {
    // SAFETY: the caller guarantees a started batch and data within the limits; the calls copy segments and
    // bytes.
    unsafe {
        (*queue).wr_id = id;
        (*queue).wr_flags = if is_signalled { SIGNALLED } else { 0 };
        if let SendData::Inline(_) = data {
            // Implied by `ibv_wr_set_inline_data` below; soft-RoCE needs the flag too.
            (*queue).wr_flags |= INLINE;
        }
        match operation {
            Operation::Read { address, key } => sys::ibv_wr_rdma_read(queue, key, address),
            Operation::Write { address, key } => sys::ibv_wr_rdma_write(queue, key, address),
            Operation::WriteWithImmediate { address, key, immediate } => {
                sys::ibv_wr_rdma_write_imm(queue, key, address, immediate.to_be());
            }
            Operation::Send => sys::ibv_wr_send(queue),
            Operation::SendWithInvalidate { key } => sys::ibv_wr_send_inv(queue, key),
        }
        match data {
            SendData::Local([one]) => sys::ibv_wr_set_sge(queue, one.key, one.address, one.bytes),
            SendData::Local(segments) => {
                sys::ibv_wr_set_sge_list(queue, segments.len(), segments.as_ptr().cast());
            }
            SendData::Inline(bytes) => {
                sys::ibv_wr_set_inline_data(queue, bytes.as_ptr().cast_mut().cast(), bytes.len());
            }
        }
    }
}

impl List {
    /// Initializes the next request without data and without appending it. The list must not be full.
    #[inline]
    fn next(&mut self, id: u64, is_signalled: bool, opcode: opcode::Type) -> &mut sys::ibv_send_wr {
        let request = &mut self.requests[self.count];
        request.wr_id = id;
        request.opcode = opcode;
        request.send_flags = if is_signalled { SIGNALLED } else { 0 };
        request.num_sge = 0;
        request
    }

    /// Appends a request. The list must not be full, and the data must be within the limits.
    #[inline]
    fn add(
        &mut self,
        id: u64,
        is_signalled: bool,
        operation: Operation,
        data: SendData<'_>,
        segments_max: u32,
        inline_max: u32,
    ) {
        let rdma = |remote_addr, rkey| sys::wr_t { rdma: sys::rdma_t { remote_addr, rkey } };
        let index = self.count;
        match operation {
            Operation::Read { address, key } => {
                self.next(id, is_signalled, opcode::IBV_WR_RDMA_READ).wr = rdma(address, key);
            }
            Operation::Write { address, key } => {
                self.next(id, is_signalled, opcode::IBV_WR_RDMA_WRITE).wr = rdma(address, key);
            }
            Operation::WriteWithImmediate { address, key, immediate } => {
                let request = self.next(id, is_signalled, opcode::IBV_WR_RDMA_WRITE_WITH_IMM);
                request.wr = rdma(address, key);
                request.imm_data_invalidated_rkey_union.imm_data = immediate.to_be();
            }
            Operation::Send => {
                self.next(id, is_signalled, opcode::IBV_WR_SEND);
            }
            Operation::SendWithInvalidate { key } => {
                let request = self.next(id, is_signalled, opcode::IBV_WR_SEND_WITH_INV);
                request.imm_data_invalidated_rkey_union.invalidated_rkey = key;
            }
        }
        match data {
            SendData::Local(segments) => {
                let start = index * segments_max as usize;
                self.segments[start..start + segments.len()].copy_from_slice(segments);
                self.requests[index].num_sge = i32::try_from(segments.len()).unwrap_or(0);
            }
            SendData::Inline(bytes) => {
                let start = index * inline_max as usize;
                self.inline[start..start + bytes.len()].copy_from_slice(bytes);
                let address = self.inline[start..].as_ptr() as u64;
                let bytes = u32::try_from(bytes.len()).unwrap_or(0);
                self.segments[index * segments_max as usize] = Sge { address, bytes, key: 0 };
                self.requests[index].num_sge = 1;
                self.requests[index].send_flags |= INLINE;
            }
        }
        self.count += 1;
    }

    /// Links the first `count` requests and sets their segment pointers. Returns the first request.
    fn link(&mut self, count: usize, segments_max: u32) -> *mut sys::ibv_send_wr {
        let first = self.requests.as_mut_ptr();
        let segments = self.segments.as_mut_ptr().cast::<sys::ibv_sge>();
        for index in 0..count.min(self.requests.len()) {
            let is_last = index + 1 == count;
            // SAFETY: `index` is within `requests`, which `self` borrows exclusively.
            let request = unsafe { &mut *first.add(index) };
            request.next = if is_last { ptr::null_mut() } else { first.wrapping_add(index + 1) };
            request.sg_list = segments.wrapping_add(index * segments_max as usize);
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REMOTE: Operation = Operation::Write { address: 0x1000, key: 7 };

    fn sge(address: u64) -> Sge {
        Sge { address, bytes: 512, key: 9 }
    }

    #[test]
    fn a_list_is_a_chain_of_requests_with_their_segments() {
        let mut list = List::new(1000, 3, 16);
        assert_eq!(list.requests.len(), 64);
        list.add(1, false, REMOTE, SendData::Local(&[sge(1), sge(2), sge(3)]), 3, 16);
        list.add(2, true, Operation::SendWithInvalidate { key: 5 }, SendData::Inline(b"abc"), 3, 16);
        list.add(3, true, Operation::Send, SendData::Local(&[]), 3, 16);
        let count = list.count;
        let first = list.link(count, 3);
        // SAFETY: `link` has linked three requests; they and their segments and bytes are in `list`, which
        // lives on.
        unsafe {
            assert_eq!(
                ((*first).wr_id, (*first).opcode, (*first).num_sge),
                (1, opcode::IBV_WR_RDMA_WRITE, 3)
            );
            assert_eq!(((*first).send_flags, (*first).wr.rdma.remote_addr), (0, 0x1000));
            assert_eq!((*(*first).sg_list.add(2)).addr, 3);
            let second = (*first).next;
            assert_eq!(((*second).wr_id, (*second).send_flags), (2, SIGNALLED | INLINE));
            assert_eq!((*second).imm_data_invalidated_rkey_union.invalidated_rkey, 5);
            let bytes = *(*second).sg_list;
            assert_eq!(std::slice::from_raw_parts(bytes.addr as *const u8, 3), b"abc");
            let third = (*second).next;
            assert_eq!(((*third).wr_id, (*third).num_sge, (*third).next), (3, 0, ptr::null_mut()));
        }
    }

    #[test]
    fn the_immediate_value_is_in_network_byte_order() {
        let mut list = List::new(1, 1, 0);
        let operation = Operation::WriteWithImmediate { address: 0x1000, key: 7, immediate: 0x0102_0304 };
        list.add(1, true, operation, SendData::Local(&[]), 1, 0);
        let request = &list.requests[0];
        assert_eq!(request.opcode, opcode::IBV_WR_RDMA_WRITE_WITH_IMM);
        // SAFETY: `add` has written both fields of the unions; they are integers.
        let (immediate, rdma) =
            unsafe { (request.imm_data_invalidated_rkey_union.imm_data, request.wr.rdma) };
        assert_eq!(immediate.to_ne_bytes(), [1, 2, 3, 4]);
        assert_eq!((rdma.remote_addr, rdma.rkey), (0x1000, 7));
    }

    #[test]
    fn a_request_shows_nothing_of_the_one_before_it() {
        let mut list = List::new(1, 2, 0);
        list.add(1, true, REMOTE, SendData::Local(&[sge(1), sge(2)]), 2, 0);
        list.count = 0;
        list.add(2, false, Operation::Send, SendData::Inline(&[]), 2, 0);
        let request = &list.requests[0];
        assert_eq!((request.wr_id, request.num_sge, request.send_flags), (2, 1, INLINE));
        assert_eq!(list.segments[0].bytes, 0);
    }
}
