//! Read-ahead: executes the fetches of [`Streams`](super::Streams) when the inner disk is not busy.
//!
//! A fetch is a read without a submitter. A fetch waits while other reads wait, and while the pieces at the
//! inner disk that fill frames exceed a quarter of the core's depth. It is dropped if 16 fetches are queued
//! already, or if 1/16 of the cache or more was read ahead and is unread.

use super::super::ahead::{Fetch, ReadInfo};
use super::super::counts::NO_HOST;
use super::super::plan::ReadPlan;
use super::{CachedChannel, Entry, FETCHES_MAX, FRAME, FRAME_BYTES, FREQUENCY, Read};
use crate::{BlockRange, IoRequest, Op};

/// Access Frequency "speculative read". Linux sets this value for its own read-ahead.
const SPECULATIVE_READ: u8 = 7;
/// Divisor: no fetch begins once 1/16 of the cache was read ahead and is unread. This is less than the small
/// queue of S3-FIFO (1/10), into which such pages are entered.
const UNREAD_SHARE: u64 = 16;

/// Polls after which an inner disk counts as one that executes reads on this core. Polls of a drive end all
/// commands only if each turn takes as long as a command, which does not happen so often in a row.
const INLINE_POLLS: u32 = 64;
/// Fewest pages of a large read: 64 KiB.
const LARGE_PAGES: u64 = 16;

/// Returns the largest window in pages: `read_ahead_bytes`, but at most 1/32 of the cache.
pub(super) fn window_max(read_ahead_bytes: u32, frames: u32) -> u32 {
    (read_ahead_bytes / FRAME_BYTES).min(frames / 32)
}

impl CachedChannel {
    /// Handles the first read of a page that was read ahead: counts the page as useful and reports the read
    /// to the stream detection.
    #[cold]
    #[inline(never)]
    pub(super) fn on_first_read(&mut self, request: &IoRequest, page: u64) {
        self.cache.counts.of(request.client).useful.add(1);
        self.on_read(request, page, 1);
    }

    /// Returns true for a large read of `count` pages beside which others are in flight, or which the inner
    /// disk executes on this core.
    pub(super) fn is_beside(&self, count: u64) -> bool {
        count >= LARGE_PAGES && (self.is_inline() || self.pending() > self.cache.aheads)
    }

    /// Number of commands in flight, also those that wait here.
    pub(super) fn pending(&self) -> usize {
        self.cache.commands.len() + self.cache.passed
    }

    /// Returns true if each of the last [`INLINE_POLLS`] polls with commands has ended all of them: the inner
    /// disk executes them on this core, as a file in the page cache does. A load with commands that wait
    /// here, or with flushes that the kernel gives to a worker, may leave this false.
    pub(super) fn is_inline(&self) -> bool {
        self.inline_polls >= INLINE_POLLS
    }

    /// Records a poll, before which `before` commands were in flight. Called before fetches begin.
    #[inline]
    pub(super) fn on_polled(&mut self, before: usize) {
        if before > 0 {
            self.inline_polls = if self.pending() == 0 { self.inline_polls.saturating_add(1) } else { 0 };
        }
    }

    /// Reports a host's read to the stream detection. Queues the fetch, or drops it if the queue is full.
    pub(super) fn on_read(&mut self, request: &IoRequest, first: u64, count: u64) {
        if self.streams.is_none() {
            return;
        }
        let read = ReadInfo {
            client: request.client,
            first,
            // At most `HIT_PAGES_MAX`.
            pages: u32::try_from(count).unwrap_or(u32::MAX),
            is_beside: self.is_beside(count),
            is_inline: self.is_inline(),
            is_speculative: request.hints & FREQUENCY == SPECULATIVE_READ,
            wasted: self.cache.counts.of(NO_HOST).wasted.get(),
        };
        if let Some(fetch) = self.streams.as_mut().and_then(|streams| streams.on_read(&read))
            && self.fetches.len() < FETCHES_MAX
        {
            self.fetches.push_back((request.client, fetch));
        }
    }

    pub(super) fn step_fetches(&mut self) {
        while self.waiting.is_empty() && self.pieces <= self.depth / 4 {
            let Some((client, fetch)) = self.fetches.pop_front() else { return };
            let words = self.cache.shared.words();
            if words.unread() * UNREAD_SHARE >= u64::from(words.len()) {
                continue;
            }
            self.fetch(client, fetch);
        }
    }

    fn fetch(&mut self, client: u16, fetch: Fetch) {
        if !self.cache.shared.may_answer() {
            return;
        }
        let pages = self.inner.geometry().bytes() / FRAME;
        for piece in 0..i64::from(fetch.count) {
            let first = fetch.step.checked_mul(piece).and_then(|step| fetch.first.checked_add_signed(step));
            let Some(first) = first.filter(|first| *first < pages) else { return };
            let count = u32::try_from(pages - first).unwrap_or(u32::MAX).min(fetch.pages);
            let mut plan = self.cache.plans.pop().unwrap_or_else(ReadPlan::new);
            plan.make_ahead(&self.cache.context(client), first, count);
            if plan.runs.is_empty() {
                self.cache.put_plan(plan);
                continue;
            }
            // `submit_runs` sets the range of each piece.
            let request = IoRequest { client, ..IoRequest::new(Op::Read, BlockRange { lba: 0, blocks: 0 }) };
            let read = Read::new(None, &request, plan, self.now);
            self.cache.aheads += 1;
            let slot = self.cache.commands.insert(Entry::Read(read));
            let ended = self.step_read(slot);
            debug_assert!(ended.is_none(), "a read-ahead has no submitter");
        }
    }
}
