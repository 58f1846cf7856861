//! In-capsule data of requests that wait for memory.
//!
//! A byte stream has an order: were such data left where it is, everything behind it would wait too, and
//! with it the H2CData of commands that hold the memory which is waited for. So it is taken in, to the heap:
//!
//! ```text
//!   begin ──> arriving ── end ──> here ── fetch ──> Fetched
//!                 └────── fetch ──> wanted ── end ──> Fetched       discard: the request was answered
//! ```
//!
//! Limits: a queue's entries, each of IOCCSZ (8 KiB on an admin queue); taken only while the pool is empty.

use std::collections::VecDeque;

use nvme_spec::status::Status;
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;
use spindle_transport::Event;

#[derive(Debug)]
enum State {
    Arriving,
    Here(Buf, Result<(), Status>),
    Wanted(Buf),
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct CapsuleStash {
    entries: Vec<(Slot, State)>,
    fetched: VecDeque<(Slot, Buf, Result<(), Status>)>,
}

impl CapsuleStash {
    /// The data of this request will be received into the buffer that comes back.
    #[cold]
    pub(super) fn begin(&mut self, slot: Slot, bytes: u32) -> Buf {
        self.entries.push((slot, State::Arriving));
        Buf::heap(bytes)
    }

    fn take(&mut self, slot: Slot) -> Option<State> {
        let at = self.entries.iter().position(|(other, _)| *other == slot)?;
        Some(self.entries.swap_remove(at).1)
    }

    /// All of it is here. That of a request which was answered meanwhile is dropped.
    pub(super) fn end(&mut self, slot: Slot, data: Buf, result: Result<(), Status>) {
        match self.take(slot) {
            Some(State::Wanted(buf)) => self.give(slot, &data, buf, result),
            Some(State::Arriving) => self.entries.push((slot, State::Here(data, result))),
            Some(State::Here(..)) | None => {}
        }
    }

    /// The request has memory now. `Some`: its data is not here, and the buffer comes back.
    #[inline]
    pub(super) fn fetch(&mut self, slot: Slot, buf: Buf) -> Option<Buf> {
        if self.entries.is_empty() {
            return Some(buf);
        }
        self.fetch_stashed(slot, buf)
    }

    #[cold]
    fn fetch_stashed(&mut self, slot: Slot, buf: Buf) -> Option<Buf> {
        match self.take(slot) {
            Some(State::Here(data, result)) => self.give(slot, &data, buf, result),
            Some(State::Arriving) => self.entries.push((slot, State::Wanted(buf))),
            Some(State::Wanted(_)) | None => return Some(buf),
        }
        None
    }

    /// The lengths are equal: what the request has memory for is what its descriptor says, and that is what
    /// its capsule had.
    fn give(&mut self, slot: Slot, data: &Buf, mut buf: Buf, result: Result<(), Status>) {
        let mut at = 0;
        data.visit(0, data.len().min(buf.len()), |piece| {
            buf.copy_in(at, piece);
            at += piece.len();
        });
        self.fetched.push_back((slot, buf, result));
    }

    /// The request is answered without it.
    #[inline]
    pub(super) fn discard(&mut self, slot: Slot) {
        if !self.entries.is_empty() {
            self.take(slot);
        }
    }

    /// The request has memory and does not want the data any more; false: none of its data is here or to
    /// come.
    pub(super) fn cancel(&mut self, slot: Slot) -> bool {
        let before = self.fetched.len();
        self.fetched.retain(|(other, ..)| *other != slot);
        self.fetched.len() < before || self.take(slot).is_some()
    }

    /// True when [`CapsuleStash::next_fetched`] has something.
    #[inline]
    pub(super) fn has_fetched(&self) -> bool {
        !self.fetched.is_empty()
    }

    /// Data that is where it was wanted.
    #[inline]
    pub(super) fn next_fetched(&mut self) -> Option<Event> {
        let (slot, buf, result) = self.fetched.pop_front()?;
        Some(Event::Fetched { slot, buf, result })
    }
}
