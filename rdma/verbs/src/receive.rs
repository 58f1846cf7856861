//! [`SharedReceiveQueue`], and the posting of receives to it and to a queue pair's own queue.
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

// SAFETY: libibverbs is thread-safe.
unsafe impl Send for SharedInner {}
// SAFETY: as above.
unsafe impl Sync for SharedInner {}

impl Drop for SharedInner {
    fn drop(&mut self) {
        // SAFETY: ours, and its queue pairs held it.
        unsafe { sys::ibv_destroy_srq(self.raw) };
    }
}

/// Receives for many queue pairs. Which of them takes one is told by its completion.
#[derive(Debug)]
pub struct SharedReceiveQueue {
    pub(crate) inner: Arc<SharedInner>,
    entries: u32,
    sge: u32,
    _not_sync: PhantomData<Cell<()>>,
}

/// Receives that are posted at once: they lie on the stack until the device has them.
const POST_BATCH: usize = 32;

impl SharedReceiveQueue {
    /// Make one with room for at least `entries` receives of up to `sge` segments.
    ///
    /// # Errors
    /// More than the device has.
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
        // SAFETY: our domain; the attributes are read and written.
        let raw = unsafe { sys::ibv_create_srq(device.domain(), &raw mut attributes) };
        let raw = VerbsError::made(VERB, raw)?;
        let inner = Arc::new(SharedInner { raw, device: Arc::clone(device) });
        Ok(SharedReceiveQueue { inner, entries, sge, _not_sync: PhantomData })
    }

    /// How many receives it was made for.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Post a receive.
    ///
    /// # Errors
    /// No room, or more segments than the queue was made for: nothing was posted.
    #[inline]
    pub fn post(&self, id: u64, segments: &[Sge]) -> Result<(), VerbsError> {
        let mut request = one(id, segments, self.sge, VERB_SHARED)?;
        let mut bad = ptr::null_mut();
        // SAFETY: our queue; the request and its segments are read before this returns.
        VerbsError::check(VERB_SHARED, unsafe {
            sys::ibv_post_srq_recv(self.inner.raw, &raw mut request, &raw mut bad)
        })
    }
}

const VERB_SHARED: &str = "ibv_post_srq_recv";
const VERB_OWN: &str = "ibv_post_recv";

/// Post a receive to a queue pair's own queue.
///
/// # Safety
/// The queue pair is alive.
#[inline]
pub(crate) unsafe fn post_own(
    queue_pair: *mut sys::ibv_qp,
    id: u64,
    segments: &[Sge],
    segments_max: u32,
) -> Result<(), VerbsError> {
    let mut request = one(id, segments, segments_max, VERB_OWN)?;
    let mut bad = ptr::null_mut();
    // SAFETY: alive by contract; the request and its segments are read before this returns.
    VerbsError::check(VERB_OWN, unsafe { sys::ibv_post_recv(queue_pair, &raw mut request, &raw mut bad) })
}

/// Post receives of one segment each to a queue pair's own queue.
///
/// # Safety
/// The queue pair is alive.
pub(crate) unsafe fn post_own_batch(
    queue_pair: *mut sys::ibv_qp,
    receives: impl IntoIterator<Item = (u64, Sge)>,
) -> Result<(), VerbsError> {
    // SAFETY: alive by contract; requests and segments are read before this returns.
    batch(receives, VERB_OWN, |first, bad| unsafe { sys::ibv_post_recv(queue_pair, first, bad) })
}

/// A request that points to `segments`, for as long as they are lent.
#[inline]
fn one(id: u64, segments: &[Sge], max: u32, verb: &'static str) -> Result<sys::ibv_recv_wr, VerbsError> {
    match i32::try_from(segments.len()) {
        Ok(count) if segments.len() <= max as usize => {
            let list = segments.as_ptr().cast::<sys::ibv_sge>().cast_mut();
            Ok(sys::ibv_recv_wr { wr_id: id, next: ptr::null_mut(), sg_list: list, num_sge: count })
        }
        _ => Err(VerbsError::new(verb, libc::EINVAL)),
    }
}

/// Chains of up to [`POST_BATCH`] requests, each given to `post`, which returns as `ibv_post_recv` does.
fn batch(
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
            // SAFETY: within the array.
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

    /// Ids and addresses of a chain.
    fn walk(mut place: *mut sys::ibv_recv_wr) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        while !place.is_null() {
            // SAFETY: a chain of `batch`.
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
        batch(receives, VERB_OWN, |first, _| {
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
        let error = batch(receives, VERB_OWN, |_, _| {
            chains += 1;
            if chains == 2 { libc::ENOMEM } else { 0 }
        });
        assert_eq!((error, chains), (Err(VerbsError::new(VERB_OWN, libc::ENOMEM)), 2));
    }

    #[test]
    fn too_many_segments_are_refused() {
        assert!(one(1, &[sge(0); 3], 3, VERB_OWN).is_ok());
        let error = one(1, &[sge(0); 4], 3, VERB_OWN).map(|_| ()).expect_err("refused");
        assert_eq!(error, VerbsError::new(VERB_OWN, libc::EINVAL));
    }
}
