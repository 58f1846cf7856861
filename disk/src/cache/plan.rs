//! [`Plan`]: the pages of one read and the state of each.

use std::rc::Rc;

use arrayvec::ArrayVec;
use spindle_reactor::mem::{Buf, CacheCore, FRAME_BYTES, Filling, KeptPin, Pin};

use super::counts::HostCounts;
use super::index::{Found, PageBuckets};
use super::policy::InsertReason;
use super::shared::{Admission, Shared};

const FRAME: u64 = FRAME_BYTES as u64;
/// Most pages of one read of the disk, 128 KiB.
const RUN_PAGES_MAX: usize = 32;

/// A page of a read.
#[derive(Debug)]
pub(super) enum Page {
    /// Pinned: found in the cache, or filled by this read.
    Kept(KeptPin),
    /// Filled by this read, in this frame.
    Own(u32),
    /// To be looked up again: another read fills the page, the shard's lock was taken, or a piece failed. In
    /// a read-ahead: not filled by it.
    Waiting,
}

/// Consecutive missing pages that are read from the disk together.
pub(super) struct Run {
    /// First page of the run.
    pub(super) page: u64,
    pub(super) buf: Buf,
}

/// No frame can be entered ([`Admission::Full`]): the read passes around the cache.
#[derive(Debug)]
pub(super) struct NoFrame;

pub(super) struct Plan {
    /// Byte offset of the read on the disk.
    pub(super) offset: u64,
    pub(super) bytes: u32,
    pub(super) pages: Vec<Page>,
    /// Runs that were not submitted yet; the last one is next.
    pub(super) runs: Vec<Run>,
    /// A read-ahead: its pages are published as unread.
    is_ahead: bool,
}

/// A run under construction: its first page and its frames.
struct Open<'a> {
    page: u64,
    frames: ArrayVec<Filling<'a>, RUN_PAGES_MAX>,
}

/// What a plan works with: the cache, the core's frames and the counters.
pub(super) struct PlanContext<'a> {
    pub(super) shared: &'a Shared,
    pub(super) frames: &'a Rc<CacheCore>,
    pub(super) counts: HostCounts<'a>,
}

impl PlanContext<'_> {
    /// Frees the frames of a run that will not be read.
    pub(super) fn give_up(&self, buf: Buf) {
        let taken = self.frames.take_back(buf, |filling| self.end(filling));
        debug_assert!(taken.is_ok(), "a piece is made of frames");
    }

    /// Dooms and frees a frame.
    pub(super) fn end(&self, filling: Filling<'_>) {
        drop(self.unpublished(filling));
    }

    /// Dooms a frame and removes its entry; the pin keeps its bytes for the caller.
    pub(super) fn unpublished<'b>(&self, filling: Filling<'b>) -> Pin<'b> {
        filling.doom();
        let buckets = self.shared.index.buckets(filling.page());
        self.shared.index.remove(self.shared.words(), buckets, filling.frame());
        filling.detach()
    }
}

impl Plan {
    /// An empty plan, with capacity for reads of common size.
    pub(super) fn new() -> Plan {
        Plan {
            offset: 0,
            bytes: 0,
            pages: Vec::with_capacity(128),
            runs: Vec::with_capacity(64),
            is_ahead: false,
        }
    }

    pub(super) fn first_page(&self) -> u64 {
        self.offset / FRAME
    }

    /// Looks up each page and enters the missing ones. `is_once`: a one-time read, which adds no heat.
    ///
    /// # Errors
    /// [`NoFrame`]; the plan is empty again.
    pub(super) fn make(
        &mut self,
        context: &PlanContext<'_>,
        offset: u64,
        bytes: u32,
        is_once: bool,
    ) -> Result<(), NoFrame> {
        (self.offset, self.bytes) = (offset, bytes);
        let end = (offset + u64::from(bytes)).div_ceil(FRAME);
        let mut open = None;
        for page in self.first_page()..end {
            let buckets = context.shared.index.buckets(page);
            let found = look_up(context, buckets, is_once);
            let Ok(found) = found else {
                close(context, &mut self.runs, open.take());
                self.clear(context);
                return Err(NoFrame);
            };
            let state = match found {
                Lookup::Kept { pin, is_first_read } => {
                    context.counts.host.useful.add(u64::from(is_first_read));
                    Page::Kept(pin.keep())
                }
                Lookup::Waiting => Page::Waiting,
                Lookup::Own(filling) => {
                    let frame = filling.frame();
                    add(context, &mut self.runs, &mut open, page, filling);
                    Page::Own(frame)
                }
            };
            self.pages.push(state);
        }
        close(context, &mut self.runs, open);
        // Runs are popped from the end.
        self.runs.reverse();
        Ok(())
    }

    /// Enters the missing pages of a read-ahead.
    pub(super) fn make_ahead(&mut self, context: &PlanContext<'_>, first: u64, count: u32) {
        (self.offset, self.bytes, self.is_ahead) = (first * FRAME, count * FRAME_BYTES, true);
        let shared = context.shared;
        let mut open = None;
        for page in first..first + u64::from(count) {
            let buckets = shared.index.buckets(page);
            let is_missing = matches!(shared.index.find(shared.words(), buckets), Found::Missing);
            let state =
                match is_missing.then(|| shared.admit(buckets, None, InsertReason::Ahead, context.counts)) {
                    Some(Admission::Fill(filling)) => {
                        let frame = filling.frame();
                        add(context, &mut self.runs, &mut open, page, filling);
                        context.counts.host.ahead.add(1);
                        Page::Own(frame)
                    }
                    None | Some(_) => Page::Waiting,
                };
            self.pages.push(state);
        }
        close(context, &mut self.runs, open);
        // Runs are popped from the end.
        self.runs.reverse();
    }

    /// Looks up the waiting pages again.
    ///
    /// # Errors
    /// [`NoFrame`]: the read passes around the cache once its own pieces have completed.
    pub(super) fn retry_waiting(&mut self, context: &PlanContext<'_>) -> Result<(), NoFrame> {
        let first = self.first_page();
        for (page, state) in (first..).zip(&mut self.pages) {
            if !matches!(state, Page::Waiting) {
                continue;
            }
            match look_up(context, context.shared.index.buckets(page), false)? {
                Lookup::Kept { pin, is_first_read } => {
                    context.counts.host.joined.add(1);
                    context.counts.host.late.add(u64::from(is_first_read));
                    *state = Page::Kept(pin.keep());
                }
                Lookup::Waiting => {}
                Lookup::Own(filling) => {
                    *state = Page::Own(filling.frame());
                    let mut open = None;
                    add(context, &mut self.runs, &mut open, page, filling);
                    close(context, &mut self.runs, open);
                }
            }
        }
        Ok(())
    }

    /// True when every page is pinned.
    pub(super) fn is_whole(&self) -> bool {
        self.kept().count() == self.pages.len()
    }

    /// Frames of the pinned pages.
    pub(super) fn kept(&self) -> impl Iterator<Item = u32> {
        self.pages.iter().filter_map(|page| match page {
            Page::Kept(kept) => Some(kept.frame()),
            Page::Own(_) | Page::Waiting => None,
        })
    }

    /// The data of a read whose pages are all pinned. The plan is empty afterwards.
    pub(super) fn data(&mut self, context: &PlanContext<'_>) -> Buf {
        let skip = u32::try_from(self.offset % FRAME).unwrap_or(0);
        let words = context.shared.words();
        let pins = self.pages.drain(..).map(|page| match page {
            Page::Kept(kept) => words.resume(kept),
            Page::Own(_) | Page::Waiting => panic!("a read ends with all of its pages"),
        });
        context.frames.pages_buf(pins, skip, self.bytes)
    }

    /// Handles the end of a run; `is_read` is false after an error.
    pub(super) fn on_read(&mut self, context: &PlanContext<'_>, buf: Buf, is_read: bool) {
        let first = self.first_page();
        let taken = context.frames.take_back(buf, |filling| {
            let at = filling.page().checked_sub(first).and_then(|at| usize::try_from(at).ok());
            let Some(state) = at.and_then(|at| self.pages.get_mut(at)) else { return context.end(filling) };
            if !is_read {
                *state = Page::Waiting;
                return context.end(filling);
            }
            let published = if self.is_ahead { filling.publish_unread() } else { filling.publish() };
            let pin = published.unwrap_or_else(|filling| {
                context.counts.host.doomed.add(1);
                context.unpublished(filling)
            });
            *state = Page::Kept(pin.keep());
        });
        assert!(taken.is_ok(), "the disk gave back a buffer of its own");
    }

    /// Called when no piece is at the disk: pages that are still `Own` lie in buffers that the disk has kept.
    /// Dooms their frames, which the disk may still write to; they are free once it drops the buffers.
    pub(super) fn on_lost(&mut self, context: &PlanContext<'_>) {
        self.doom(context, 0..u64::MAX);
        self.pages.iter_mut().filter(|page| matches!(page, Page::Own(_))).for_each(|it| *it = Page::Waiting);
    }

    /// Dooms the frames that this read fills for `pages`: only this read uses their data.
    pub(super) fn doom(&self, context: &PlanContext<'_>, pages: std::ops::Range<u64>) {
        let words = context.shared.words();
        for (page, state) in (self.first_page()..).zip(&self.pages).filter(|(page, _)| pages.contains(page)) {
            let Page::Own(frame) = *state else { continue };
            // The frame may have been freed and reused for another page.
            if let Some(pin) = words.pin(frame).filter(|pin| pin.page() == page) {
                pin.invalidate();
                context.shared.index.remove(words, context.shared.index.buckets(page), frame);
            }
        }
    }

    /// Releases the pins, and the frames of runs that were not submitted.
    pub(super) fn clear(&mut self, context: &PlanContext<'_>) {
        self.is_ahead = false;
        self.runs.drain(..).for_each(|run| context.give_up(run.buf));
        for page in self.pages.drain(..) {
            if let Page::Kept(kept) = page {
                drop(context.shared.words().resume(kept));
            }
        }
    }
}

/// Result of [`look_up`].
enum Lookup<'a> {
    Kept {
        pin: Pin<'a>,
        /// The page was read ahead, and this read is the first of it that counts as a hit.
        is_first_read: bool,
    },
    Own(Filling<'a>),
    Waiting,
}

/// Looks up a page and enters it if it is missing. `is_once`: a hit adds no heat.
fn look_up<'a>(
    context: &PlanContext<'a>,
    buckets: PageBuckets,
    is_once: bool,
) -> Result<Lookup<'a>, NoFrame> {
    let shared = context.shared;
    match shared.index.find(shared.words(), buckets) {
        Found::Present(pin) => {
            let is_first_read = !is_once && pin.count_hit();
            return Ok(Lookup::Kept { pin, is_first_read });
        }
        Found::Filling => return Ok(Lookup::Waiting),
        Found::Missing => {}
    }
    Ok(match shared.admit(buckets, None, InsertReason::Read, context.counts) {
        Admission::Present(pin) => Lookup::Kept { pin, is_first_read: false },
        Admission::Filling | Admission::Busy => Lookup::Waiting,
        Admission::Fill(filling) => Lookup::Own(filling),
        Admission::Full => return Err(NoFrame),
    })
}

fn add<'a>(
    context: &PlanContext<'_>,
    runs: &mut Vec<Run>,
    open: &mut Option<Open<'a>>,
    page: u64,
    filling: Filling<'a>,
) {
    let follows = |open: &Open<'_>| open.page + open.frames.len() as u64 == page && !open.frames.is_full();
    if open.as_ref().is_some_and(|open| !follows(open)) {
        close(context, runs, open.take());
    }
    open.get_or_insert_with(|| Open { page, frames: ArrayVec::new() }).frames.push(filling);
}

fn close(context: &PlanContext<'_>, runs: &mut Vec<Run>, open: Option<Open<'_>>) {
    if let Some(Open { page, frames }) = open {
        runs.push(Run { page, buf: context.frames.filling(frames.into_iter()) });
    }
}
