//! [`Requests`]: a queue pair's requests by slot.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::slab::{Slab, Slot};

use super::request::Request;

/// The requests of one queue pair. A slot that the queue pair itself keeps names a request until that is
/// removed, so one that names none is a fault of this program: it is counted, and the first is logged.
pub(super) struct Requests(Slab<Request>);

/// Slots that named no request, of all queue pairs.
static LOST: AtomicU64 = AtomicU64::new(0);

impl From<Slab<Request>> for Requests {
    fn from(slab: Slab<Request>) -> Requests {
        Requests(slab)
    }
}

/// Not inlined: in the function that has the fast path each look-up would cost it registers.
impl Requests {
    /// The request of a slot in use. `None` is reported: there is nothing to do for it.
    #[inline(never)]
    pub(super) fn get(&self, slot: Slot) -> Option<&Request> {
        self.0.get(slot).or_else(|| on_lost(slot))
    }

    /// The same, to be changed.
    #[inline(never)]
    pub(super) fn get_mut(&mut self, slot: Slot) -> Option<&mut Request> {
        self.0.get_mut(slot).or_else(|| on_lost(slot))
    }

    /// The request of a slot that may have ended meanwhile: that of the other half of a fused pair.
    pub(super) fn find(&self, slot: Slot) -> Option<&Request> {
        self.0.get(slot)
    }

    /// The same, to be changed.
    pub(super) fn find_mut(&mut self, slot: Slot) -> Option<&mut Request> {
        self.0.get_mut(slot)
    }
}

/// Debug builds stop here, so that a test shows it.
#[cold]
#[inline(never)]
fn on_lost<T>(slot: Slot) -> Option<T> {
    debug_assert!(false, "no request in slot {slot:?}");
    if LOST.fetch_add(1, Ordering::Relaxed) == 0 {
        tracing::error!(?slot, "queue pair: a slot names no request, its command gets no answer; report it");
    }
    None
}

impl Deref for Requests {
    type Target = Slab<Request>;

    #[inline]
    fn deref(&self) -> &Slab<Request> {
        &self.0
    }
}

impl DerefMut for Requests {
    #[inline]
    fn deref_mut(&mut self) -> &mut Slab<Request> {
        &mut self.0
    }
}
