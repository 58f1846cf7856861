//! In-capsule data of requests that wait for memory, copied to the heap.
//!
//! TCP delivers bytes in order: unread data in the stream would block all bytes after it, including the
//! H2CData of commands that occupy the memory for which the request waits.
//!
//! ```text
//!   begin ──> Arriving ── end ────> Received ── fetch ──> Fetched
//!                 └────── fetch ──> Requested ── end ───> Fetched       discard: the request was answered
//! ```
//!
//! Limits: one entry per queue entry, each of at most the in-capsule size of the queue (IOCCSZ; at least 8
//! KiB on an admin queue). Used only for requests that wait for memory.

use spindle_nvme_transport::RequestId;
use std::collections::VecDeque;

use nvme_spec::status::Status;
use spindle_nvme_transport::Event;
use spindle_reactor::mem::Buf;

#[derive(Debug)]
enum StashState {
    /// The data is being received; the request has no memory yet.
    Arriving,
    /// The data is complete, or has a wrong digest (`Err`); the request has no memory yet.
    Received(Buf, Result<(), Status>),
    /// The data is being received; it will be copied to this buffer of the request.
    Requested(Buf),
}

#[derive(Debug, Default)]
pub(super) struct CapsuleStash {
    entries: Vec<(RequestId, StashState)>,
    fetched: VecDeque<(RequestId, Buf, Result<(), Status>)>,
}

impl CapsuleStash {
    /// Adds an entry. Returns a heap buffer of `bytes` into which the data is to be received.
    #[cold]
    pub(super) fn begin(&mut self, slot: RequestId, bytes: u32) -> Buf {
        self.entries.push((slot, StashState::Arriving));
        Buf::heap(bytes)
    }

    fn take(&mut self, slot: RequestId) -> Option<StashState> {
        let at = self.entries.iter().position(|(other, _)| *other == slot)?;
        Some(self.entries.swap_remove(at).1)
    }

    /// Handles completely received data, with `result` of its digest: copies the data to the buffer of a
    /// waiting `fetch`, or stores it. Drops it if the request was answered or its `fetch` cancelled.
    pub(super) fn end(&mut self, slot: RequestId, data: Buf, result: Result<(), Status>) {
        match self.take(slot) {
            Some(StashState::Requested(buf)) => self.copy_out(slot, &data, buf, result),
            Some(StashState::Arriving) => self.entries.push((slot, StashState::Received(data, result))),
            Some(StashState::Received(..)) | None => {}
        }
    }

    /// Copies the data of the request into `buf`, now or when the data is complete. `Some`: the stash has no
    /// data for the request, and `buf` is returned.
    #[inline]
    pub(super) fn fetch(&mut self, slot: RequestId, buf: Buf) -> Option<Buf> {
        if self.entries.is_empty() {
            return Some(buf);
        }
        self.fetch_stashed(slot, buf)
    }

    #[cold]
    fn fetch_stashed(&mut self, slot: RequestId, buf: Buf) -> Option<Buf> {
        match self.take(slot) {
            Some(StashState::Received(data, result)) => self.copy_out(slot, &data, buf, result),
            Some(StashState::Arriving) => self.entries.push((slot, StashState::Requested(buf))),
            Some(StashState::Requested(_)) | None => return Some(buf),
        }
        None
    }

    /// Copies the data into `buf` and queues the event. Both have the length of the SGL descriptor, which was
    /// compared with the length of the capsule's data.
    fn copy_out(&mut self, slot: RequestId, data: &Buf, mut buf: Buf, result: Result<(), Status>) {
        let mut at = 0;
        data.visit(0, data.len().min(buf.len()), |piece| {
            buf.copy_in(at, piece);
            at += piece.len();
        });
        self.fetched.push_back((slot, buf, result));
    }

    /// Drops the data of a request that is answered without reading the data.
    #[inline]
    pub(super) fn discard(&mut self, slot: RequestId) {
        if !self.entries.is_empty() {
            self.take(slot);
        }
    }

    /// Drops the data of a request whose `fetch` is cancelled. Returns false if there is none.
    pub(super) fn cancel(&mut self, slot: RequestId) -> bool {
        let before = self.fetched.len();
        self.fetched.retain(|(other, ..)| *other != slot);
        self.fetched.len() < before || self.take(slot).is_some()
    }

    #[inline]
    pub(super) fn has_fetched(&self) -> bool {
        !self.fetched.is_empty()
    }

    /// Returns the next completed `fetch` as an event.
    #[inline]
    pub(super) fn next_fetched(&mut self) -> Option<Event> {
        let (slot, buf, result) = self.fetched.pop_front()?;
        Some(Event::Fetched { slot, buf, result })
    }
}
