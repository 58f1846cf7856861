//! [`Plan`]: the pages of one read, and what becomes of each.

use std::rc::Rc;

use arrayvec::ArrayVec;
use spindle_reactor::mem::{Buf, CacheCore, FRAME_BYTES, Filling, KeptPin, Pin};

use super::counts::Whose;
use super::index::{Found, PageBuckets};
use super::policy::Came;
use super::shared::{Admission, Shared};

const FRAME: u64 = FRAME_BYTES as u64;
/// Pages that are read from the disk in one piece, 128 KiB.
const RUN_PAGES_MAX: usize = 32;

/// A page of a read.
#[derive(Debug)]
pub(super) enum Page {
    /// In a frame that is pinned.
    Kept(KeptPin),
    /// Being read into this frame for this read.
    Own(u32),
    /// Somebody else reads it, or the shard's lock was taken.
    Waiting,
}

/// A piece of it that is to be read from the disk.
pub(super) struct Run {
    /// Its first page.
    pub(super) page: u64,
    pub(super) buf: Buf,
}

/// Why a read goes around the cache.
#[derive(Debug)]
pub(super) struct NoFrame;

/// The pages of one read. See the module.
pub(super) struct Plan {
    /// Where the read begins on the disk.
    pub(super) offset: u64,
    pub(super) bytes: u32,
    pub(super) pages: Vec<Page>,
    /// Not submitted yet.
    pub(super) runs: Vec<Run>,
    /// No host has asked for it yet.
    is_ahead: bool,
}

/// Frames that are to be read in one piece.
struct Open<'a> {
    page: u64,
    frames: ArrayVec<Filling<'a>, RUN_PAGES_MAX>,
}

/// What a plan is made with.
pub(super) struct Means<'a> {
    pub(super) shared: &'a Shared,
    pub(super) frames: &'a Rc<CacheCore>,
    pub(super) counts: Whose<'a>,
}

impl Means<'_> {
    /// The frames of a piece that is not read: no request waits for them any more.
    pub(super) fn give_up(&self, buf: Buf) {
        let taken = self.frames.take_back(buf, |filling| self.end(filling));
        debug_assert!(taken.is_ok(), "a piece is made of frames");
    }

    /// The end of a frame that was not filled.
    pub(super) fn end(&self, filling: Filling<'_>) {
        drop(self.unpublished(filling));
    }

    /// A filled frame that is not to be found; the pin keeps its bytes.
    pub(super) fn unpublished<'b>(&self, filling: Filling<'b>) -> Pin<'b> {
        filling.doom();
        let buckets = self.shared.index.buckets(filling.page());
        self.shared.index.remove(self.shared.words(), buckets, filling.frame());
        filling.detach()
    }
}

impl Plan {
    /// An empty one, with room for the pages of a common read.
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

    /// Look each page up, and enter those that are missing. `is_once`: the host does not read them again.
    ///
    /// # Errors
    /// [`NoFrame`] when one cannot be had; the plan is empty again.
    pub(super) fn make(
        &mut self,
        means: &Means<'_>,
        offset: u64,
        bytes: u32,
        is_once: bool,
    ) -> Result<(), NoFrame> {
        (self.offset, self.bytes) = (offset, bytes);
        let end = (offset + u64::from(bytes)).div_ceil(FRAME);
        let mut open = None;
        for page in self.first_page()..end {
            let buckets = means.shared.index.buckets(page);
            let looked = look(means, buckets, is_once);
            let Ok(looked) = looked else {
                close(means, &mut self.runs, open.take());
                self.clear(means);
                return Err(NoFrame);
            };
            let state = match looked {
                Looked::Kept(pin, is_first) => {
                    means.counts.host.useful.add(u64::from(is_first));
                    Page::Kept(pin.keep())
                }
                Looked::Waiting => Page::Waiting,
                Looked::Own(filling) => {
                    let frame = filling.frame();
                    add(means, &mut self.runs, &mut open, page, filling);
                    Page::Own(frame)
                }
            };
            self.pages.push(state);
        }
        close(means, &mut self.runs, open);
        // The last is taken first.
        self.runs.reverse();
        Ok(())
    }

    /// Enter those of so many pages that are missing, before anybody asks for them.
    pub(super) fn make_ahead(&mut self, means: &Means<'_>, first: u64, count: u32) {
        (self.offset, self.bytes, self.is_ahead) = (first * FRAME, count * FRAME_BYTES, true);
        let shared = means.shared;
        let mut open = None;
        for page in first..first + u64::from(count) {
            let buckets = shared.index.buckets(page);
            let is_missing = matches!(shared.index.find(shared.words(), buckets), Found::Missing);
            let state = match is_missing.then(|| shared.admit(buckets, None, Came::Ahead, means.counts)) {
                Some(Admission::Fill(filling)) => {
                    let frame = filling.frame();
                    add(means, &mut self.runs, &mut open, page, filling);
                    means.counts.host.ahead.add(1);
                    Page::Own(frame)
                }
                None | Some(_) => Page::Waiting,
            };
            self.pages.push(state);
        }
        close(means, &mut self.runs, open);
        // The last is taken first.
        self.runs.reverse();
    }

    /// Look again for the pages that others read.
    ///
    /// # Errors
    /// [`NoFrame`]: the read goes around the cache, once its own pieces are back.
    pub(super) fn look_again(&mut self, means: &Means<'_>) -> Result<(), NoFrame> {
        let first = self.first_page();
        for (page, state) in (first..).zip(&mut self.pages) {
            if !matches!(state, Page::Waiting) {
                continue;
            }
            match look(means, means.shared.index.buckets(page), false)? {
                Looked::Kept(pin, is_first) => {
                    means.counts.host.joined.add(1);
                    means.counts.host.late.add(u64::from(is_first));
                    *state = Page::Kept(pin.keep());
                }
                Looked::Waiting => {}
                Looked::Own(filling) => {
                    *state = Page::Own(filling.frame());
                    let mut open = None;
                    add(means, &mut self.runs, &mut open, page, filling);
                    close(means, &mut self.runs, open);
                }
            }
        }
        Ok(())
    }

    /// True when every page is here.
    pub(super) fn is_whole(&self) -> bool {
        self.kept().count() == self.pages.len()
    }

    /// Frames of the pages that are here.
    pub(super) fn kept(&self) -> impl Iterator<Item = u32> {
        self.pages.iter().filter_map(|page| match page {
            Page::Kept(kept) => Some(kept.frame()),
            Page::Own(_) | Page::Waiting => None,
        })
    }

    /// The data of a read whose pages are all here. The plan is empty afterwards.
    pub(super) fn data(&mut self, means: &Means<'_>) -> Buf {
        let skip = u32::try_from(self.offset % FRAME).unwrap_or(0);
        let words = means.shared.words();
        let pins = self.pages.drain(..).map(|page| match page {
            Page::Kept(kept) => words.resume(kept),
            Page::Own(_) | Page::Waiting => panic!("a read ends with all of its pages"),
        });
        means.frames.several(pins, skip, self.bytes)
    }

    /// A piece has been read, or not.
    pub(super) fn on_read(&mut self, means: &Means<'_>, buf: Buf, is_read: bool) {
        let first = self.first_page();
        let taken = means.frames.take_back(buf, |filling| {
            let at = filling.page().checked_sub(first).and_then(|at| usize::try_from(at).ok());
            let Some(state) = at.and_then(|at| self.pages.get_mut(at)) else { return means.end(filling) };
            if !is_read {
                *state = Page::Waiting;
                return means.end(filling);
            }
            let published = if self.is_ahead { filling.publish_unread() } else { filling.publish() };
            let pin = published.unwrap_or_else(|filling| {
                means.counts.host.doomed.add(1);
                means.unpublished(filling)
            });
            *state = Page::Kept(pin.keep());
        });
        assert!(taken.is_ok(), "the disk gave back a buffer of its own");
    }

    /// The disk has not given buffers back: what is still to be read will not be. It may write to their
    /// frames until it drops the buffers; then they are free.
    pub(super) fn on_lost(&mut self, means: &Means<'_>) {
        self.doom(means, 0..u64::MAX);
        self.pages.iter_mut().filter(|page| matches!(page, Page::Own(_))).for_each(|it| *it = Page::Waiting);
    }

    /// Those of these pages that this read fills are for itself alone.
    pub(super) fn doom(&self, means: &Means<'_>, pages: std::ops::Range<u64>) {
        let words = means.shared.words();
        for (page, state) in (self.first_page()..).zip(&self.pages).filter(|(page, _)| pages.contains(page)) {
            let Page::Own(frame) = *state else { continue };
            // Dropped before, it may be another page's by now.
            if let Some(pin) = words.pin(frame).filter(|pin| pin.page() == page) {
                pin.invalidate();
                means.shared.index.remove(words, means.shared.index.buckets(page), frame);
            }
        }
    }

    /// Give back what it holds: pins, and frames of pieces that were not submitted.
    pub(super) fn clear(&mut self, means: &Means<'_>) {
        self.is_ahead = false;
        self.runs.drain(..).for_each(|run| means.give_up(run.buf));
        for page in self.pages.drain(..) {
            if let Page::Kept(kept) = page {
                drop(means.shared.words().resume(kept));
            }
        }
    }
}

/// What is known of a page.
enum Looked<'a> {
    /// True: it was read ahead, and this is the first who asks for it.
    Kept(Pin<'a>, bool),
    Own(Filling<'a>),
    Waiting,
}

/// `is_once`: that it is found counts for nothing.
fn look<'a>(means: &Means<'a>, buckets: PageBuckets, is_once: bool) -> Result<Looked<'a>, NoFrame> {
    let shared = means.shared;
    match shared.index.find(shared.words(), buckets) {
        Found::Present(pin) => {
            let is_first = !is_once && pin.warm();
            return Ok(Looked::Kept(pin, is_first));
        }
        Found::Filling => return Ok(Looked::Waiting),
        Found::Missing => {}
    }
    Ok(match shared.admit(buckets, None, Came::Read, means.counts) {
        Admission::Present(pin) => Looked::Kept(pin, false),
        Admission::Filling | Admission::Busy => Looked::Waiting,
        Admission::Fill(filling) => Looked::Own(filling),
        Admission::Full => return Err(NoFrame),
    })
}

fn add<'a>(
    means: &Means<'_>,
    runs: &mut Vec<Run>,
    open: &mut Option<Open<'a>>,
    page: u64,
    filling: Filling<'a>,
) {
    let follows = |open: &Open<'_>| open.page + open.frames.len() as u64 == page && !open.frames.is_full();
    if open.as_ref().is_some_and(|open| !follows(open)) {
        close(means, runs, open.take());
    }
    open.get_or_insert_with(|| Open { page, frames: ArrayVec::new() }).frames.push(filling);
}

fn close(means: &Means<'_>, runs: &mut Vec<Run>, open: Option<Open<'_>>) {
    if let Some(Open { page, frames }) = open {
        runs.push(Run { page, buf: means.frames.filling(frames.into_iter()) });
    }
}
