//! [`SharedReceiveQueue`], and the posting of receives to it and to a queue pair's own receive queue.
//!
//! UNSAFETY: a shared receive queue is destroyed after the queue pairs that receive from it.
#![expect(unsafe_code, reason = "calls libibverbs")]

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;

use rdma_sys as sys;

use crate::device::Device;
use crate::error::VerbsError;
use crate::memory::Sge;

#[derive(Debug)]
pub(crate) struct SharedInner {
    pub(crate) raw: *mut sys::ibv_srq,
    pub(crate) device: Arc<Device>,
}

// SAFETY: libibverbs is thread-safe, and the fields are not written after construction.
unsafe impl Send for SharedInner {}
// SAFETY: as for `Send`: shared references only pass the pointer to thread-safe calls.
unsafe impl Sync for SharedInner {}

impl Drop for SharedInner {
    fn drop(&mut self) {
        // SAFETY: destroyed only here. Each queue pair of the queue holds an `Arc` of this struct, so none is
        // left.
        unsafe { sys::ibv_destroy_srq(self.raw) };
    }
}

/// A shared receive queue (SRQ). The completion of a receive contains the number of the queue pair that
/// received the message.
#[derive(Debug)]
pub struct SharedReceiveQueue {
    pub(crate) inner: Arc<SharedInner>,
    entries: u32,
    sge: u32,
    _not_sync: PhantomData<Cell<()>>,
}

/// Maximum receives posted with one call. The requests are on the stack during the call.
const POST_BATCH: usize = 32;

impl SharedReceiveQueue {
    /// Creates a queue of at least `entries` receives of up to `sge` segments.
    ///
    /// # Errors
    /// EOPNOTSUPP: the device has no shared receive queues. EINVAL: `entries` or `sge` is 0 or exceeds the
    /// device's limit. Otherwise the error of `ibv_create_srq`.
    pub fn new(device: &Arc<Device>, entries: u32, sge: u32) -> Result<SharedReceiveQueue, VerbsError> {
        const VERB: &str = "ibv_create_srq";
        let limits = device.limits();
        if !limits.has_srq {
            return Err(VerbsError::new(VERB, libc::EOPNOTSUPP));
        }
        if entries == 0 || entries > limits.srq_wr || sge == 0 || sge > limits.srq_sge {
            return Err(VerbsError::new(VERB, libc::EINVAL));
        }
        let attr = sys::ibv_srq_attr { max_wr: entries, max_sge: sge, srq_limit: 0 };
        let mut attributes = sys::ibv_srq_init_attr { srq_context: ptr::null_mut(), attr };
        // SAFETY: `device` keeps the domain alive, and the queue keeps `device`; the attributes are on the
        // stack.
        let raw = unsafe { sys::ibv_create_srq(device.domain(), &raw mut attributes) };
        let raw = VerbsError::check_pointer(VERB, raw)?;
        let inner = Arc::new(SharedInner { raw, device: Arc::clone(device) });
        Ok(SharedReceiveQueue { inner, entries, sge, _not_sync: PhantomData })
    }

    /// Returns the requested capacity in receives; the device may accept more.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Posts a receive with the segments of its buffer. Its completion contains `id`.
    ///
    /// # Errors
    /// Nothing was posted: the queue is full, or there are more segments than the queue was created for
    /// (EINVAL).
    #[inline]
    pub fn post(&self, id: u64, segments: &[Sge]) -> Result<(), VerbsError> {
        let mut request = receive_request(id, segments, self.sge, VERB_SHARED)?;
        let mut bad = ptr::null_mut();
        // SAFETY: `inner` keeps the queue alive; the call reads the request and its segments before it
        // returns.
        VerbsError::check(VERB_SHARED, unsafe {
            sys::ibv_post_srq_recv(self.inner.raw, &raw mut request, &raw mut bad)
        })
    }
}

const VERB_SHARED: &str = "ibv_post_srq_recv";
const VERB_OWN: &str = "ibv_post_recv";

/// Posts a receive to a queue pair's own receive queue. EINVAL if there are more segments than
/// `segments_max`.
///
/// # Safety
/// The queue pair exists.
#[inline]
pub(crate) unsafe fn post_own(
    queue_pair: *mut sys::ibv_qp,
    id: u64,
    segments: &[Sge],
    segments_max: u32,
) -> Result<(), VerbsError> {
    let mut request = receive_request(id, segments, segments_max, VERB_OWN)?;
    let mut bad = ptr::null_mut();
    // SAFETY: the caller guarantees a live queue pair; the call reads the request and its segments before it
    // returns.
    VerbsError::check(VERB_OWN, unsafe { sys::ibv_post_recv(queue_pair, &raw mut request, &raw mut bad) })
}

/// Posts receives of one segment each to a queue pair's own receive queue, up to [`POST_BATCH`] with each
/// call. After an error, receives of earlier calls stay posted.
///
/// # Safety
/// The queue pair exists.
pub(crate) unsafe fn post_own_batch(
    queue_pair: *mut sys::ibv_qp,
    receives: impl IntoIterator<Item = (u64, Sge)>,
) -> Result<(), VerbsError> {
    // SAFETY: the caller guarantees a live queue pair; the call reads requests and segments before it
    // returns.
    post_lists(receives, VERB_OWN, |first, bad| unsafe { sys::ibv_post_recv(queue_pair, first, bad) })
}

/// Returns a request that points to `segments` and is valid as long as their borrow. Fails with EINVAL of
/// `verb` if there are more than `max`.
#[inline]
fn receive_request(
    id: u64,
    segments: &[Sge],
    max: u32,
    verb: &'static str,
) -> Result<sys::ibv_recv_wr, VerbsError> {
    match i32::try_from(segments.len()) {
        Ok(count) if segments.len() <= max as usize => {
            let list = segments.as_ptr().cast::<sys::ibv_sge>().cast_mut();
            Ok(sys::ibv_recv_wr { wr_id: id, next: ptr::null_mut(), sg_list: list, num_sge: count })
        }
        _ => Err(VerbsError::new(verb, libc::EINVAL)),
    }
}

/// Calls `post` with linked lists of up to [`POST_BATCH`] requests. `post` returns as `ibv_post_recv` does.
/// Stops at the first error; earlier lists stay posted.
fn post_lists(
    receives: impl IntoIterator<Item = (u64, Sge)>,
    verb: &'static str,
    mut post: impl FnMut(*mut sys::ibv_recv_wr, *mut *mut sys::ibv_recv_wr) -> libc::c_int,
) -> Result<(), VerbsError> {
    let mut receives = receives.into_iter();
    loop {
        let mut segments = [Sge { address: 0, bytes: 0, key: 0 }; POST_BATCH];
        let mut ids = [0_u64; POST_BATCH];
        let mut count = 0;
        for ((id, segment), receive) in ids.iter_mut().zip(&mut segments).zip(receives.by_ref()) {
            (*id, *segment) = receive;
            count += 1;
        }
        if count == 0 {
            return Ok(());
        }
        let mut requests = [const { MaybeUninit::<sys::ibv_recv_wr>::uninit() }; POST_BATCH];
        let first = requests.as_mut_ptr().cast::<sys::ibv_recv_wr>();
        let list = segments.as_mut_ptr().cast::<sys::ibv_sge>();
        for (index, id) in ids.iter().enumerate().take(count) {
            let is_last = index + 1 == count;
            let next = if is_last { ptr::null_mut() } else { first.wrapping_add(index + 1) };
            let sg_list = list.wrapping_add(index);
            // SAFETY: `index` < `count` <= POST_BATCH, so the pointer is within `requests`.
            unsafe { first.add(index).write(sys::ibv_recv_wr { wr_id: *id, next, sg_list, num_sge: 1 }) };
        }
        let mut bad = ptr::null_mut();
        VerbsError::check(verb, post(first, &raw mut bad))?;
        if count < POST_BATCH {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sge(address: u64) -> Sge {
        Sge { address, bytes: 64, key: 9 }
    }

    /// Ids and segment addresses of a linked list of receives.
    fn walk(mut place: *mut sys::ibv_recv_wr) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        while !place.is_null() {
            // SAFETY: `post_lists` has linked the list, which exists while its closure runs.
            let (request, segment) = unsafe { (&*place, &*(*place).sg_list) };
            found.push((request.wr_id, segment.addr));
            place = request.next;
        }
        found
    }

    #[test]
    fn a_batch_is_chains_of_up_to_32() {
        let mut chains = Vec::new();
        let receives = (0..70).map(|id| (id, sge(id * 4096)));
        post_lists(receives, VERB_OWN, |first, _| {
            chains.push(walk(first));
            0
        })
        .expect("posted");
        assert_eq!(chains.iter().map(Vec::len).collect::<Vec<_>>(), [32, 32, 6]);
        let all: Vec<_> = chains.concat();
        assert_eq!(all, (0..70).map(|id| (id, id * 4096)).collect::<Vec<_>>());
    }

    #[test]
    fn a_batch_ends_with_the_chain_that_does_not_fit() {
        let mut chains = 0;
        let receives = (0..100).map(|id| (id, sge(id)));
        let error = post_lists(receives, VERB_OWN, |_, _| {
            chains += 1;
            if chains == 2 { libc::ENOMEM } else { 0 }
        });
        assert_eq!((error, chains), (Err(VerbsError::new(VERB_OWN, libc::ENOMEM)), 2));
    }

    #[test]
    fn too_many_segments_are_refused() {
        assert!(receive_request(1, &[sge(0); 3], 3, VERB_OWN).is_ok());
        let error = receive_request(1, &[sge(0); 4], 3, VERB_OWN).map(|_| ()).expect_err("refused");
        assert_eq!(error, VerbsError::new(VERB_OWN, libc::EINVAL));
    }
}
