//! Reading ahead: what [`Streams`](super::Streams) asks for is read from the inner disk when it has time.
//!
//! A fetch is a read without a submitter. It waits while demand reads wait, and while the inner disk has more
//! than a quarter of what it takes; it is left out while a sixteenth of the cache is unread already.

use super::super::ahead::{Fetch, Seen};
use super::super::counts::NOBODY;
use super::super::plan::Plan;
use super::{CachedCore, Entry, FETCHES_MAX, FRAME, FRAME_BYTES, FREQUENCY, Read};
use crate::{BlockRange, IoRequest, Op};

/// Access Frequency of what Linux reads into its page cache.
const SPECULATIVE_READ: u8 = 7;
/// Share of the cache that may be unread: less than the small queue of S3-FIFO, in which such pages begin.
const UNREAD_SHARE: u64 = 16;

/// Pages of the longest window in a cache of so many frames.
pub(super) fn window_max(read_ahead_bytes: u32, frames: u32) -> u32 {
    (read_ahead_bytes / FRAME_BYTES).min(frames / 32)
}

impl CachedCore {
    /// A page that was read ahead is asked for.
    #[cold]
    #[inline(never)]
    pub(super) fn on_first_read(&mut self, request: &IoRequest, page: u64) {
        self.side.counts.of(request.client).useful.add(1);
        self.on_read(request, page, 1);
    }

    /// These pages are asked for.
    pub(super) fn on_read(&mut self, request: &IoRequest, first: u64, count: u64) {
        let Some(streams) = &mut self.streams else { return };
        let seen = Seen {
            client: request.client,
            first,
            // A read has less than 2^20 pages.
            pages: u32::try_from(count).unwrap_or(u32::MAX),
            is_speculative: request.hints & FREQUENCY == SPECULATIVE_READ,
            wasted: self.side.counts.of(NOBODY).wasted.get(),
        };
        if let Some(fetch) = streams.on_read(&seen)
            && self.fetches.len() < FETCHES_MAX
        {
            self.fetches.push_back((request.client, fetch));
        }
    }

    pub(super) fn step_fetches(&mut self) {
        while self.waiting.is_empty() && self.pieces <= self.depth / 4 {
            let Some((client, fetch)) = self.fetches.pop_front() else { return };
            let words = self.side.shared.words();
            if words.unread() * UNREAD_SHARE >= u64::from(words.len()) {
                continue;
            }
            self.fetch(client, fetch);
        }
    }

    fn fetch(&mut self, client: u16, fetch: Fetch) {
        let pages = self.inner.geometry().bytes() / FRAME;
        for piece in 0..i64::from(fetch.count) {
            let first = fetch.step.checked_mul(piece).and_then(|step| fetch.first.checked_add_signed(step));
            let Some(first) = first.filter(|first| *first < pages) else { return };
            let count = u32::try_from(pages - first).unwrap_or(u32::MAX).min(fetch.pages);
            let mut plan = self.side.plans.pop().unwrap_or_else(Plan::new);
            plan.make_ahead(&self.side.means(client), first, count);
            if plan.runs.is_empty() {
                self.side.put_plan(plan);
                continue;
            }
            // Pieces take their own ranges.
            let request = IoRequest { client, ..IoRequest::new(Op::Read, BlockRange { lba: 0, blocks: 0 }) };
            let read = Read { token: None, request, plan, at_disk: 0, passes: false };
            let slot = self.side.commands.insert(Entry::Read(read));
            self.step_read(slot);
        }
    }
}
