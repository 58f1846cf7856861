//! [`Requests`]: a queue pair's requests by slot.

use spindle_transport::RequestId;
use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::slab::Slab;

use super::request::Request;

/// The requests of one queue pair. A slot that the queue pair keeps is valid until its request is removed, so
/// a look-up of a slot without a request is a bug in this program: it is counted, and the first is logged.
/// [`Requests::find`] is the exception.
pub(super) struct Requests(Slab<Request>);

/// Look-ups of slots without a request, in all queue pairs.
static MISSING: AtomicU64 = AtomicU64::new(0);

impl From<Slab<Request>> for Requests {
    fn from(slab: Slab<Request>) -> Requests {
        Requests(slab)
    }
}

/// `get` and `get_mut` are not inlined: each look-up would cost the fast path registers.
impl Requests {
    /// The request in `slot`. `None` is a bug of this program; the caller does nothing.
    #[inline(never)]
    pub(super) fn get(&self, slot: RequestId) -> Option<&Request> {
        self.0.get(slot.0).or_else(|| on_missing(slot))
    }

    /// As [`Requests::get`].
    #[inline(never)]
    pub(super) fn get_mut(&mut self, slot: RequestId) -> Option<&mut Request> {
        self.0.get_mut(slot.0).or_else(|| on_missing(slot))
    }

    /// The request in `slot`, half of a fused pair; `None`: it has been freed.
    pub(super) fn find(&self, slot: RequestId) -> Option<&Request> {
        self.0.get(slot.0)
    }

    /// As [`Requests::find`].
    pub(super) fn find_mut(&mut self, slot: RequestId) -> Option<&mut Request> {
        self.0.get_mut(slot.0)
    }

    /// `None` if there are as many requests as the queue has entries; `request` is dropped.
    #[inline]
    pub(super) fn insert(&mut self, request: Request) -> Option<RequestId> {
        self.0.insert(request).ok().map(RequestId)
    }

    /// The identifier that the next `insert` gives; `None` if it will fail.
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

    /// Most requests: the entries of the queue; 1 before Connect.
    #[inline]
    pub(super) fn capacity(&self) -> usize {
        self.0.capacity()
    }
}

/// Panics in debug builds, so that tests find the bug.
#[cold]
#[inline(never)]
fn on_missing<T>(slot: RequestId) -> Option<T> {
    debug_assert!(false, "no request in slot {slot:?}");
    if MISSING.fetch_add(1, Ordering::Relaxed) == 0 {
        tracing::error!(?slot, "queue pair: a slot names no request, its command gets no answer; report it");
    }
    None
}
