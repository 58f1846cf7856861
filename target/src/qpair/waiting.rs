//! The line for memory: who gets into it.
//!
//! What a command that waits has in its capsule must not stand in the way of what is behind it in the
//! connection: that may be the data of the very commands that hold the memory.

use spindle_reactor::slab::Slot;
use spindle_transport::{DataPointer, Transport};

use super::Qpair;
use super::request::State;

/// What another try for requests that wait has brought.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Retried {
    /// Some got what they waited for, or are over.
    pub(crate) has_moved: bool,
    /// Some still wait.
    pub(crate) has_waiting: bool,
}

impl<T: Transport> Qpair<T> {
    /// A request gets to the end of the line for memory. Its in-capsule data gets out of the way.
    #[cold]
    pub(super) fn wait_for_buffer(&mut self, slot: Slot) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = State::NeedBuffer;
        self.waiting.push_back(slot);
        self.stash_capsule(slot);
    }

    /// The in-capsule data of a request that is not fetched yet lets by what is behind it.
    pub(super) fn stash_capsule(&mut self, slot: Slot) {
        let Some(request) = self.requests.get(slot) else { return };
        if let DataPointer::InCapsule { .. } = request.pointer {
            self.transport.stash_capsule(slot, request.cid());
        }
    }
}
