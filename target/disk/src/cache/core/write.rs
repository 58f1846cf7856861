//! Commands that change blocks.

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, FRAME_BYTES};

use super::super::counts::NO_HOST;
use super::super::policy::InsertReason;
use super::super::shared::{ANNOUNCED_PAGES_MAX, Admission, CacheShared, Stay};
use super::{CachedChannel, CoreCache, Entry, FRAME};
use crate::layer::Call;
use crate::{BlockRange, Done, IoRequest, Op, Token};

/// Most pages of one write that are entered again after the write: 128 KiB. The core copies each of them.
const STAYS_MAX: usize = 32;

impl CoreCache {
    pub(super) fn end_write(&mut self, pages: std::ops::Range<u64>, mut stays: Vec<Stay>) {
        let index = &self.shared.index;
        pages.for_each(|page| index.end_write(index.buckets(page)));
        if stays.capacity() > 0 {
            stays.clear();
            self.stays.push(stays);
        }
    }

    /// Enters the pages in `stays` again with the new data, after a successful write of whole pages. A page
    /// without a frame, or with a conflicting write, is not entered. Nor is one beyond the budget.
    pub(super) fn keep_written(
        &mut self,
        pages: &std::ops::Range<u64>,
        stays: &[Stay],
        data: &Buf,
        now: Nanos,
    ) {
        for stay in stays {
            if !self.stays_budget.is_open(now) {
                return;
            }
            self.stays_budget.spend(1, now);
            let context = self.context(NO_HOST);
            let buckets = self.shared.index.buckets(stay.page);
            // All frames of a page are in one shard.
            let reason = InsertReason::Written { from: stay.was.frame % self.shared.words().shard_frames() };
            let admission = self.shared.admit(buckets, Some(stay), reason, context.counts);
            let Admission::Fill(filling) = admission else { continue };
            let mut frame = self.frames.filling(std::iter::once(filling));
            let mut at = 0;
            // `write` collects stays only for writes that begin at a page boundary.
            let offset = usize::try_from((stay.page - pages.start) * FRAME).unwrap_or(usize::MAX);
            data.visit(offset, FRAME_BYTES as usize, |piece| {
                frame.copy_in(at, piece);
                at += piece.len();
            });
            let taken = self.frames.take_back(frame, |filling| match filling.publish() {
                Ok(pin) => {
                    self.shared.words().set_heat(pin.frame(), stay.was.heat);
                    context.counts.no_host.written.add(1);
                }
                Err(filling) => drop(context.unpublished(filling)),
            });
            debug_assert!(taken.is_ok(), "it is a frame");
        }
    }
}

impl CachedChannel {
    /// Begins a command that changes blocks: announces its pages and submits it to the inner disk. A command
    /// of more than [`ANNOUNCED_PAGES_MAX`] pages waits for a sweep first.
    pub(super) fn write(&mut self, token: Token, range: BlockRange, call: Call) -> Option<Done> {
        let pages = self.pages(range);
        if pages.end - pages.start > ANNOUNCED_PAGES_MAX {
            let since = self.now;
            let slot = self.cache.commands.insert(Entry::Sweeping { token, pages, sweep: None, call, since });
            self.sweeping.push_back(slot);
            return None;
        }
        let is_whole =
            range.offset(self.shift).is_multiple_of(FRAME) && range.bytes(self.shift).is_multiple_of(FRAME);
        let has_data = matches!(call, Call::Op(IoRequest { op: Op::Write { .. }, .. }, Some(_)));
        let mut stays = Vec::new();
        for page in pages.clone() {
            self.cache.shared.prefetch_after(page, pages.end);
            let stay = self.cache.shared.begin_write(page);
            if let Some(stay) = stay.filter(|_| is_whole && has_data && stays.len() < STAYS_MAX) {
                if stays.capacity() == 0 {
                    stays = self.cache.stays.pop().unwrap_or_else(|| Vec::with_capacity(STAYS_MAX));
                }
                stays.push(stay);
            }
        }
        let slot = self.cache.commands.insert(Entry::Write { token, pages, stays });
        self.call(token, slot, call)
    }

    pub(super) fn step_sweeps(&mut self) {
        let Some(slot) = self.sweeping.pop_front() else { return };
        let Some(entry) = self.cache.commands.get_mut(slot) else { return };
        let Entry::Sweeping { token, pages, sweep, .. } = entry else { return };
        let CacheShared { sweeps, index, frames, .. } = &*self.cache.shared;
        if sweep.is_none() {
            *sweep = sweeps.begin(pages.clone());
        }
        let Some(ended) = sweep.take_if(|sweep| sweeps.step(sweep, index, frames.words())) else {
            return self.sweeping.push_front(slot);
        };
        let token = *token;
        let swept = std::mem::replace(entry, Entry::Swept(token, ended));
        let Entry::Sweeping { mut call, since, .. } = swept else { return };
        call.add_wait(since, self.now);
        if let Some(done) = self.call(token, slot, call) {
            self.ready.push_back(done);
        }
    }
}
