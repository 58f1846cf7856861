//! [`Requests`]: a queue pair's requests by slot.

use std::sync::atomic::{AtomicU64, Ordering};

use spindle_nvme_transport::{RequestId, Transport};
use spindle_reactor::slab::Slab;

use super::Qpair;
use super::request::{Request, Work};
use crate::env::NO_DISK;

/// The requests of one queue pair. The queue pair keeps a slot only while its request exists. So a look-up of
/// a slot without a request is a bug of this program. Debug builds panic; release builds count such look-ups
/// and log the first. [`Requests::find`], [`Requests::find_mut`] and [`Requests::remove`] are exempt.
pub(super) struct Requests(Slab<Request>);

/// Number of look-ups of slots without a request, in all queue pairs.
static MISSING: AtomicU64 = AtomicU64::new(0);

impl From<Slab<Request>> for Requests {
    fn from(slab: Slab<Request>) -> Requests {
        Requests(slab)
    }
}

/// `get` and `get_mut` are not inlined, since inlined look-ups would use registers that the fast path needs.
impl Requests {
    /// Returns the request in `slot`. `None` is a bug (see [`on_missing`]); the caller then does nothing.
    #[inline(never)]
    pub(super) fn get(&self, slot: RequestId) -> Option<&Request> {
        self.0.get(slot.0).or_else(|| on_missing(slot))
    }

    #[inline(never)]
    pub(super) fn get_mut(&mut self, slot: RequestId) -> Option<&mut Request> {
        self.0.get_mut(slot.0).or_else(|| on_missing(slot))
    }

    /// Returns the request in `slot`, half of a fused pair; `None`: the request has been freed.
    pub(super) fn find(&self, slot: RequestId) -> Option<&Request> {
        self.0.get(slot.0)
    }

    pub(super) fn find_mut(&mut self, slot: RequestId) -> Option<&mut Request> {
        self.0.get_mut(slot.0)
    }

    pub(super) fn all_mut(&mut self) -> impl Iterator<Item = &mut Request> {
        self.0.iter_mut().map(|(_, request)| request)
    }

    /// Adds a request. `None`: the slab is full, and `request` is dropped.
    #[inline]
    pub(super) fn insert(&mut self, request: Request) -> Option<RequestId> {
        self.0.insert(request).ok().map(RequestId)
    }

    /// Returns the identifier that the next `insert` will return; `None`: the slab is full.
    #[inline]
    pub(super) fn next_id(&self) -> Option<RequestId> {
        self.0.next_slot().map(RequestId)
    }

    #[inline]
    pub(super) fn remove(&mut self, slot: RequestId) -> Option<Request> {
        self.0.remove(slot.0)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (RequestId, &Request)> {
        self.0.iter().map(|(slot, request)| (RequestId(slot), request))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Most requests at a time: the entries of the queue; 1 before Connect.
    #[inline]
    pub(super) fn capacity(&self) -> usize {
        self.0.capacity()
    }
}

impl<T: Transport> Qpair<T> {
    /// Takes the index of each closed disk out of the requests, so that none of them finds another disk that
    /// gets the index. These requests wait for the host or for memory, and end with
    /// [`DiskError::Gone`](spindle_target_disk::DiskError::Gone).
    pub(crate) fn forget_disks(&mut self, is_closed: impl Fn(usize) -> bool) {
        self.discharge_disks(&is_closed);
        for request in self.requests.all_mut() {
            if let Work::Io(io) = &mut request.work
                && is_closed(io.disk)
            {
                io.disk = NO_DISK;
            }
        }
    }
}

/// Counts a look-up without a request and logs the first; returns `None`. Panics in debug builds, for tests.
#[cold]
#[inline(never)]
fn on_missing<T>(slot: RequestId) -> Option<T> {
    debug_assert!(false, "no request in slot {slot:?}");
    if MISSING.fetch_add(1, Ordering::Relaxed) == 0 {
        tracing::error!(?slot, "queue pair: a slot names no request, its command gets no answer; report it");
    }
    None
}
