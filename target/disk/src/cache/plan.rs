//! [`ReadPlan`]: the pages of one read, the state of each, and the reads of the disk that fill missing pages.

use std::rc::Rc;

use arrayvec::ArrayVec;
use spindle_reactor::mem::{Buf, CacheCore, FRAME_BYTES, Filling, KeptPin, Pin};

use super::counts::HostCounts;
use super::index::{Found, PageBuckets};
use super::policy::InsertReason;
use super::shared::{Admission, CacheShared};

const FRAME: u64 = FRAME_BYTES as u64;
/// Most pages of one run: 128 KiB.
const RUN_PAGES_MAX: usize = 32;

#[derive(Debug)]
pub(super) enum Page {
    /// Pinned: found in the cache, or already filled by this read.
    Kept(KeptPin),
    /// To be filled by this read: index of the frame.
    Own(u32),
    /// To be looked up again: another command fills the page, the shard's lock was taken, a piece failed, or
    /// the disk kept its buffer. In a read-ahead: a page that the read-ahead does not fill.
    Waiting,
}

/// Consecutive missing pages that one read of the disk fills, at most [`RUN_PAGES_MAX`].
pub(super) struct Run {
    /// First page of the run.
    pub(super) page: u64,
    pub(super) buf: Buf,
}

/// No frame is available for a page ([`Admission::Full`]): the read passes around the cache.
#[derive(Debug)]
pub(super) struct NoFrame;

pub(super) struct ReadPlan {
    /// Byte offset of the read on the disk.
    pub(super) offset: u64,
    pub(super) bytes: u32,
    pub(super) pages: Vec<Page>,
    /// Runs that were not submitted yet. The last element is submitted next.
    pub(super) runs: Vec<Run>,
    /// A read-ahead: its pages are published as unread.
    pub(super) is_ahead: bool,
}

/// A run under construction: its first page and its frames.
struct Open<'a> {
    page: u64,
    frames: ArrayVec<Filling<'a>, RUN_PAGES_MAX>,
}

/// Context of a plan's methods: the cache, the core's frame handle and the counters.
pub(super) struct ReadContext<'a> {
    pub(super) shared: &'a CacheShared,
    pub(super) frames: &'a Rc<CacheCore>,
    pub(super) counts: HostCounts<'a>,
}

impl ReadContext<'_> {
    /// Dooms and frees the frames of a run that will not be read.
    pub(super) fn give_up(&self, buf: Buf) {
        let taken = self.frames.take_back(buf, |filling| self.end(filling));
        debug_assert!(taken.is_ok(), "a piece is made of frames");
    }

    /// Dooms and frees a frame.
    pub(super) fn end(&self, filling: Filling<'_>) {
        drop(self.unpublished(filling));
    }

    /// Dooms a frame and removes its entry. The returned pin keeps the frame's bytes for the caller.
    pub(super) fn unpublished<'b>(&self, filling: Filling<'b>) -> Pin<'b> {
        filling.doom();
        let buckets = self.shared.index.buckets(filling.page());
        self.shared.index.remove(self.shared.words(), buckets, filling.frame());
        filling.detach()
    }
}

impl ReadPlan {
    /// Returns an empty plan with capacity for 128 pages and 64 runs, enough for common reads.
    pub(super) fn new() -> ReadPlan {
        ReadPlan {
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

    /// Looks up each page of a read and enters the missing pages.
    ///
    /// # Errors
    /// [`NoFrame`]: no frame is available for a page. The plan is empty again.
    pub(super) fn make(&mut self, context: &ReadContext<'_>, offset: u64, bytes: u32) -> Result<(), NoFrame> {
        (self.offset, self.bytes) = (offset, bytes);
        let end = (offset + u64::from(bytes)).div_ceil(FRAME);
        let mut open = None;
        for page in self.first_page()..end {
            context.shared.prefetch_after(page, end);
            let buckets = context.shared.index.buckets(page);
            let found = look_up(context, buckets);
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

    /// Looks up each page of a read and enters none. Returns false, with an empty plan, if a page is missing.
    /// A page that another command fills is waited for (`joins`), or counts as missing.
    pub(super) fn find(
        &mut self,
        context: &ReadContext<'_>,
        offset: u64,
        bytes: u32,
        is_once: bool,
        joins: bool,
    ) -> bool {
        (self.offset, self.bytes) = (offset, bytes);
        let (shared, end) = (context.shared, (offset + u64::from(bytes)).div_ceil(FRAME));
        let mut first_reads = 0;
        for page in self.first_page()..end {
            let state = match shared.index.find(shared.words(), shared.index.buckets(page)) {
                Found::Present(pin) => {
                    first_reads += u64::from(!is_once && pin.count_hit());
                    Page::Kept(pin.keep())
                }
                Found::Filling if joins => Page::Waiting,
                Found::Filling | Found::Missing => {
                    self.clear(context);
                    return false;
                }
            };
            self.pages.push(state);
            // After the lookup: a read that misses in its first page prefetches nothing.
            shared.prefetch_after(page, end);
        }
        context.counts.host.useful.add(first_reads);
        true
    }

    /// Enters the missing pages of a read-ahead. Pages without an available frame are not read ahead.
    pub(super) fn make_ahead(&mut self, context: &ReadContext<'_>, first: u64, count: u32) {
        (self.offset, self.bytes, self.is_ahead) = (first * FRAME, count * FRAME_BYTES, true);
        let shared = context.shared;
        let mut open = None;
        let end = first + u64::from(count);
        for page in first..end {
            shared.prefetch_after(page, end);
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

    /// Looks up the waiting pages again, and enters the pages that are missing now.
    ///
    /// # Errors
    /// [`NoFrame`]: no frame for a page. The read passes around the cache once its own pieces have completed.
    pub(super) fn retry_waiting(&mut self, context: &ReadContext<'_>) -> Result<(), NoFrame> {
        let first = self.first_page();
        for (page, state) in (first..).zip(&mut self.pages) {
            if !matches!(state, Page::Waiting) {
                continue;
            }
            match look_up(context, context.shared.index.buckets(page))? {
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

    /// Returns true if every page is pinned.
    pub(super) fn is_whole(&self) -> bool {
        self.kept().count() == self.pages.len()
    }

    /// Returns the count of pages that this read fills.
    pub(super) fn own(&self) -> u64 {
        self.pages.iter().filter(|page| matches!(page, Page::Own(_))).count() as u64
    }

    /// Returns the frames of the pinned pages.
    pub(super) fn kept(&self) -> impl Iterator<Item = u32> {
        self.pages.iter().filter_map(|page| match page {
            Page::Kept(kept) => Some(kept.frame()),
            Page::Own(_) | Page::Waiting => None,
        })
    }

    /// Returns the data of the read and leaves the plan empty. Panics unless every page is pinned.
    pub(super) fn data(&mut self, context: &ReadContext<'_>) -> Buf {
        let skip = u32::try_from(self.offset % FRAME).unwrap_or(0);
        let words = context.shared.words();
        let pins = self.pages.drain(..).map(|page| match page {
            Page::Kept(kept) => words.resume(kept),
            Page::Own(_) | Page::Waiting => panic!("a read ends with all of its pages"),
        });
        context.frames.pages_buf(pins, skip, self.bytes)
    }

    /// Handles the end of a run: publishes its frames, unless a write has doomed them, and pins their pages.
    /// After an error (`is_read` is false), frees the frames and marks the pages as waiting.
    pub(super) fn on_read(&mut self, context: &ReadContext<'_>, buf: Buf, is_read: bool) {
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

    /// Handles the loss of buffers: if no piece is at the disk, pages that are still `Own` lie in buffers
    /// that the disk has kept. Dooms their frames, because the disk may still write to them, and marks the
    /// pages as waiting. The drop of the buffers frees the frames.
    pub(super) fn on_lost(&mut self, context: &ReadContext<'_>) {
        self.doom(context, 0..u64::MAX);
        self.pages.iter_mut().filter(|page| matches!(page, Page::Own(_))).for_each(|it| *it = Page::Waiting);
    }

    /// Dooms the frames that this read fills for `pages`, and removes their entries. Only this read may then
    /// use the data.
    pub(super) fn doom(&self, context: &ReadContext<'_>, pages: std::ops::Range<u64>) {
        let words = context.shared.words();
        for (page, state) in (self.first_page()..).zip(&self.pages).filter(|(page, _)| pages.contains(page)) {
            let Page::Own(frame) = *state else { continue };
            // The frame may have been freed since, and reused for the same page or another. An entry of this
            // page for it can be left over in either case. With the pin, the frame is not reused from now on.
            if let Some(pin) = words.pin(frame) {
                if pin.page() == page {
                    pin.invalidate();
                }
                context.shared.index.remove(words, context.shared.index.buckets(page), frame);
            }
        }
    }

    /// Empties the plan: drops the pins and frees the frames of runs that were not submitted.
    pub(super) fn clear(&mut self, context: &ReadContext<'_>) {
        self.is_ahead = false;
        self.runs.drain(..).for_each(|run| context.give_up(run.buf));
        for page in self.pages.drain(..) {
            if let Page::Kept(kept) = page {
                drop(context.shared.words().resume(kept));
            }
        }
    }
}

enum Lookup<'a> {
    Kept {
        pin: Pin<'a>,
        /// The page was read ahead, and this read is its first read that counts as a hit.
        is_first_read: bool,
    },
    Own(Filling<'a>),
    Waiting,
}

/// Looks up a page, and enters a missing page.
fn look_up<'a>(context: &ReadContext<'a>, buckets: PageBuckets) -> Result<Lookup<'a>, NoFrame> {
    let shared = context.shared;
    match shared.index.find(shared.words(), buckets) {
        Found::Present(pin) => {
            let is_first_read = pin.count_hit();
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
    context: &ReadContext<'_>,
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

fn close(context: &ReadContext<'_>, runs: &mut Vec<Run>, open: Option<Open<'_>>) {
    if let Some(Open { page, frames }) = open {
        runs.push(Run { page, buf: context.frames.filling(frames.into_iter()) });
    }
}
