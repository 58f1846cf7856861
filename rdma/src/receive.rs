//! [`SharedReceiveQueue`], and the posting of receives to it and to a queue pair's own receive queue.
//!
//! UNSAFETY: a shared receive queue is destroyed after the queue pairs that receive from it.
#![expect(unsafe_code, reason = "calls libibverbs")]

use std::cell::Cell;
use std::fmt;
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

/// A shared receive queue (SRQ). A completion contains the number of the queue pair that received.
#[derive(Debug)]
pub struct SharedReceiveQueue {
    pub(crate) inner: Arc<SharedInner>,
    entries: u32,
    sge: u32,
    _not_sync: PhantomData<Cell<()>>,
}

/// Maximum receives posted with one call. The requests are on the stack during the call.
pub const RECEIVES_BATCH: usize = 32;

/// Several receives of which not all were posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceivesError {
    /// Count of receives that were posted, the first ones.
    pub posted: usize,
    /// Reason why the next one was not posted.
    pub error: VerbsError,
}

impl fmt::Display for ReceivesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, after {} receives", self.error, self.posted)
    }
}

impl std::error::Error for ReceivesError {}

impl From<ReceivesError> for VerbsError {
    fn from(error: ReceivesError) -> VerbsError {
        error.error
    }
}

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
    /// Nothing was posted: the queue is full, or there are more segments than it was created for (EINVAL).
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

    /// Posts receives of one segment, up to [`RECEIVES_BATCH`] per call. Completions contain their ids.
    ///
    /// # Errors
    /// The queue is full. The receives before the failed one are posted.
    #[inline]
    pub fn post_all(&self, receives: impl IntoIterator<Item = (u64, Sge)>) -> Result<(), ReceivesError> {
        // SAFETY: `inner` keeps the queue alive; the call reads requests and segments before it returns.
        post_lists(receives, VERB_SHARED, |first, bad| unsafe {
            sys::ibv_post_srq_recv(self.inner.raw, first, bad)
        })
    }
}

const VERB_SHARED: &str = "ibv_post_srq_recv";
const VERB_OWN: &str = "ibv_post_recv";

/// Posts a receive to a queue pair's own queue. EINVAL if there are more segments than `segments_max`.
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

/// As [`SharedReceiveQueue::post_all`], to a queue pair's own receive queue.
///
/// # Safety
/// The queue pair exists.
pub(crate) unsafe fn post_own_batch(
    queue_pair: *mut sys::ibv_qp,
    receives: impl IntoIterator<Item = (u64, Sge)>,
) -> Result<(), ReceivesError> {
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

/// Calls `post` with linked lists of up to [`RECEIVES_BATCH`] requests. `post` returns as `ibv_post_recv`
/// does. Stops at the first error.
#[inline]
fn post_lists(
    receives: impl IntoIterator<Item = (u64, Sge)>,
    verb: &'static str,
    mut post: impl FnMut(*mut sys::ibv_recv_wr, *mut *mut sys::ibv_recv_wr) -> libc::c_int,
) -> Result<(), ReceivesError> {
    let mut receives = receives.into_iter();
    let mut posted = 0;
    loop {
        let mut segments = [const { MaybeUninit::<Sge>::uninit() }; RECEIVES_BATCH];
        let mut requests = [const { MaybeUninit::<sys::ibv_recv_wr>::uninit() }; RECEIVES_BATCH];
        let list = segments.as_mut_ptr().cast::<Sge>();
        let first = requests.as_mut_ptr().cast::<sys::ibv_recv_wr>();
        let mut count = 0;
        for (id, segment) in receives.by_ref().take(RECEIVES_BATCH) {
            let (next, sg_list) = (first.wrapping_add(count + 1), list.wrapping_add(count).cast());
            let request = sys::ibv_recv_wr { wr_id: id, next, sg_list, num_sge: 1 };
            // SAFETY: `take` limits `count` to less than RECEIVES_BATCH, so both pointers are within their
            // arrays.
            unsafe {
                list.add(count).write(segment);
                first.add(count).write(request);
            }
            count += 1;
        }
        if count == 0 {
            return Ok(());
        }
        // SAFETY: the loop has written the first `count` requests.
        unsafe { (*first.add(count - 1)).next = ptr::null_mut() };
        // A library that does not set `bad` has posted nothing.
        let mut bad = first;
        if let Err(error) = VerbsError::check(verb, post(first, &raw mut bad)) {
            let index = bad.addr().wrapping_sub(first.addr()) / size_of::<sys::ibv_recv_wr>();
            return Err(ReceivesError { posted: posted + if index < count { index } else { 0 }, error });
        }
        posted += count;
        if count < RECEIVES_BATCH {
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

    /// Posts 100 receives; the call `fails_at` (from 0) returns ENOMEM and names request `bad` of its list.
    fn fail(fails_at: usize, bad: Option<usize>) -> (ReceivesError, usize) {
        let mut calls = 0;
        let receives = (0..100).map(|id| (id, sge(id)));
        let error = post_lists(receives, VERB_SHARED, |first, place| {
            calls += 1;
            if calls <= fails_at {
                return 0;
            }
            if let Some(bad) = bad {
                // SAFETY: `post_lists` passes the place for the failed request.
                unsafe { *place = first.wrapping_add(bad) };
            }
            libc::ENOMEM
        });
        (error.expect_err("a full queue"), calls)
    }

    #[test]
    fn a_batch_ends_with_the_receive_that_does_not_fit_and_says_how_many_did() {
        let error = VerbsError::new(VERB_SHARED, libc::ENOMEM);
        let of = |posted| ReceivesError { posted, error };
        assert_eq!(fail(0, Some(0)), (of(0), 1));
        assert_eq!(fail(0, Some(31)), (of(31), 1));
        assert_eq!(fail(1, Some(7)), (of(39), 2));
        assert_eq!(fail(3, Some(3)), (of(99), 4));
        // A library that names no request, or one that is not of the list.
        assert_eq!(fail(1, None), (of(32), 2));
        assert_eq!(fail(1, Some(32)), (of(32), 2));
        assert_eq!(VerbsError::from(of(0)), error);
    }

    #[test]
    fn nothing_is_posted_without_receives() {
        let posted = post_lists([], VERB_SHARED, |_, _| panic!("nothing to post"));
        assert_eq!(posted, Ok(()));
    }

    #[test]
    fn too_many_segments_are_refused() {
        assert!(receive_request(1, &[sge(0); 3], 3, VERB_OWN).is_ok());
        let error = receive_request(1, &[sge(0); 4], 3, VERB_OWN).map(|_| ()).expect_err("refused");
        assert_eq!(error, VerbsError::new(VERB_OWN, libc::EINVAL));
    }
}
