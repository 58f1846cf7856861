//! Optimistic reads: pages of the target's cache by RDMA READ, without the target's CPU
//! (`docs/extensions.md`).
//!
//! ```text
//!   read of 1 to 16 pages ─┬─ in the directory ─> READ data, READ seals ─┬─ all as expected ─> completion
//!                          │                                             └─ otherwise ──────┐
//!                          └─ not in it ──────────────────────────────> ordinary Read <─────┘
//!     its completion: one page: has a reference ─────────────────> directory
//!                     several:  Get References, sent by the queue ─> directory
//! ```
//!
//! The data of an optimistic read is accepted if and only if the seal of each page is that of its reference,
//! and the CRC of each page is that of the data of the ordinary read, or of the Get References, that brought
//! the reference. Then each page was the newest content at some instant between the READs and their
//! completion.
//!
//! A target that is stopped, or hangs, still serves READs, and another target may have taken over the medium
//! meanwhile. So a read is accepted only if an ordinary command of the queue was answered in the second
//! before. After half a second without such an answer reads are ordinary, until one of them is answered.
//!
//! When fewer than half of 256 optimistic reads were accepted, all reads are ordinary for a second. When 256
//! Get References for reads of several pages have led to fewer than 128 accepted ones, none is sent for 100
//! ms.

mod connect;
mod directory;
mod opening;
mod reader;
mod references;
#[cfg(test)]
mod tests;

use arrayvec::ArrayVec;
use nvme_spec::optimistic::{OPTIMISTIC_PAGE_SHIFT, PageEntry, PageReference, page_checksum};
use nvme_spec::{Cqe, Sqe};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

use directory::{Directory, Known};

pub use opening::{OptimisticGrant, OptimisticOpening};
pub(crate) use reader::RdmaReader;
pub(crate) use references::References;

/// Reads after which the share of accepted ones is judged.
const WINDOW: u32 = 256;
/// Time without optimistic reads after a window with too few accepted ones.
const PAUSE: Nanos = Nanos::from_secs(1);
/// Longest time since the last answer to an ordinary command, for a read to be accepted.
const ANSWER_AGE_MAX: Nanos = Nanos::from_secs(1);
/// Time since that answer from which reads are ordinary, which brings the next answer in time.
const ANSWER_DUE: Nanos = Nanos::from_ms(500);
const PAGE_BYTES: usize = 1 << OPTIMISTIC_PAGE_SHIFT;
/// Most pages of an optimistic read: 64 KiB.
pub const READ_PAGES_MAX: usize = 16;
/// Most ranges that wait for a Get References; others are not asked for.
const WANTED_MAX: usize = 8;
/// Time without Get References after a window of them that was of little use: a host whose reads of several
/// pages never come back would otherwise send one for each.
const ASK_PAUSE: Nanos = Nanos::from_ms(100);

/// Settings of optimistic reads of one queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptimisticOptions {
    /// Most pages in the directory, 24 bytes each.
    pub directory_pages: usize,
    /// Asks for the references of all pages of the namespace once, from its first page on, as many as the
    /// directory has. Otherwise the queue learns only of pages that it reads.
    pub is_eager: bool,
}

impl Default for OptimisticOptions {
    /// 262,144 pages, which are 1 GiB of the target's cache: 6 MiB. Not eager.
    fn default() -> OptimisticOptions {
        OptimisticOptions { directory_pages: 1 << 18, is_eager: false }
    }
}

/// Consecutive pages of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRange {
    /// First page: offset in the namespace / 4096.
    pub first: u64,
    /// Number of pages, at least 1.
    pub count: usize,
}

impl PageRange {
    fn iter(self) -> impl Iterator<Item = u64> {
        (0..self.count).map(move |at| self.first + at as u64)
    }
}

/// Counts of the reads of one queue with optimistic reads, since it was attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OptimisticCounts {
    /// Optimistic reads whose data was accepted.
    pub accepted: u64,
    /// Optimistic reads that were repeated as ordinary reads.
    pub rejected: u64,
    /// References entered in the directory.
    pub learned: u64,
}

/// Reads frames and seals; tests implement it without verbs.
pub trait PageReader {
    /// Queues a read of `frames`, at most [`READ_PAGES_MAX`], and of their seals for slot `slot`. `buf` has a
    /// page for each frame. Sent by the next [`PageReader::send`] or [`PageReader::poll`].
    ///
    /// # Errors
    /// `buf`, if that is not possible now.
    fn post(&mut self, slot: usize, frames: &[u32], buf: Buf) -> Result<(), Buf>;

    /// Sends what is queued, with one doorbell.
    fn send(&mut self);

    /// Sends what is queued. Passes each read that has ended to `each`: slot, seals in the order of the
    /// frames, and buffer. Without seals, the read has failed. Returns true if there was any.
    fn poll(&mut self, now: Nanos, each: impl FnMut(usize, Option<&[u64]>, Buf)) -> bool;

    /// Ends all reads as failed. No read can be posted afterwards.
    fn end(&mut self);

    /// EPOCH of the connection.
    fn epoch(&self) -> u8;

    /// Reads that were queued and not passed to `each` yet.
    fn in_flight(&self) -> usize;
}

/// An optimistic read in flight.
#[derive(Debug, Clone, Copy)]
struct Expected {
    pages: PageRange,
    /// The ordinary read of the same blocks.
    sqe: Sqe,
}

/// What one page of an optimistic read must be.
#[derive(Debug, Clone, Copy, Default)]
struct Content {
    seal: u64,
    crc: u64,
}

/// Result of an optimistic read.
pub enum Outcome {
    /// The buffer has the newest content.
    Accepted(Buf),
    /// The command must be sent as an ordinary read.
    Repeat(Sqe, Buf),
}

/// Optimistic reads of one queue and namespace.
#[derive(Debug)]
pub struct Optimistic<R> {
    reader: R,
    nsid: u32,
    directory: Directory,
    /// By slot: pages of an ordinary read; `None` for other commands.
    noted: Box<[Option<PageRange>]>,
    /// By slot.
    expected: Box<[Option<Expected>]>,
    /// By slot, [`READ_PAGES_MAX`] for each.
    contents: Box<[Content]>,
    /// Pages of which references are to be asked for.
    wanted: ArrayVec<PageRange, WANTED_MAX>,
    /// Ranges that were asked for, and accepted reads of several pages, of the current window.
    ask_window: (u32, u32),
    asks_paused_until: Nanos,
    counts: OptimisticCounts,
    /// Reads and accepted reads of the current window.
    window: (u32, u32),
    paused_until: Nanos,
    /// Time of the last answer to an ordinary command.
    answered: Nanos,
    /// Time of the last poll.
    now: Nanos,
}

/// Returns true if the pages in `buf` have these contents.
#[inline]
fn is_valid(contents: &[Content], seals: Option<&[u64]>, buf: &Buf) -> bool {
    let (Some(seals), Some(data)) = (seals, buf.as_slice()) else { return false };
    let is_whole = seals.len() == contents.len() && data.len() == contents.len() * PAGE_BYTES;
    let pages = data.chunks_exact(PAGE_BYTES);
    let are_sealed = || contents.iter().zip(seals).all(|(content, seal)| content.seal == *seal);
    is_whole
        && are_sealed()
        && contents.iter().zip(pages).all(|(content, page)| content.crc == page_checksum(page))
}

impl<R: PageReader> Optimistic<R> {
    /// Makes an empty directory for namespace `nsid`. Slots of commands are below `slots`.
    pub fn new(reader: R, nsid: u32, slots: usize, options: &OptimisticOptions) -> Optimistic<R> {
        Optimistic::with_directory(reader, nsid, slots, Directory::new(options.directory_pages))
    }

    fn with_directory(reader: R, nsid: u32, slots: usize, directory: Directory) -> Optimistic<R> {
        Optimistic {
            reader,
            nsid,
            directory,
            noted: vec![None; slots].into(),
            expected: vec![None; slots].into(),
            contents: vec![Content::default(); slots * READ_PAGES_MAX].into(),
            wanted: ArrayVec::new(),
            ask_window: (0, 0),
            asks_paused_until: Nanos::ZERO,
            counts: OptimisticCounts::default(),
            window: (0, 0),
            paused_until: Nanos::ZERO,
            answered: Nanos::ZERO,
            now: Nanos::ZERO,
        }
    }

    /// Returns the counts since the queue was attached.
    #[must_use]
    pub fn counts(&self) -> OptimisticCounts {
        self.counts
    }

    /// Returns the number of optimistic reads in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.reader.in_flight()
    }

    /// Returns the pages that a read of `bytes` at `offset` covers; `None`: it is not 1 to
    /// [`READ_PAGES_MAX`] whole pages of the namespace.
    #[inline]
    #[must_use]
    pub fn pages(&self, nsid: u32, offset: u64, bytes: usize) -> Option<PageRange> {
        let is_whole = offset.is_multiple_of(PAGE_BYTES as u64) && bytes.is_multiple_of(PAGE_BYTES);
        let count = bytes / PAGE_BYTES;
        let is_readable = nsid == self.nsid && is_whole && (1..=READ_PAGES_MAX).contains(&count);
        is_readable.then_some(PageRange { first: offset >> OPTIMISTIC_PAGE_SHIFT, count })
    }

    /// Begins an optimistic read of `pages` in slot `slot`. `sqe`: the ordinary read.
    ///
    /// # Errors
    /// `buf`: a page is not in the directory, or no optimistic read is possible now. The caller sends `sqe`.
    #[inline]
    pub fn try_read(&mut self, slot: usize, pages: PageRange, sqe: Sqe, buf: Buf) -> Result<(), Buf> {
        if self.now < self.paused_until || self.now > self.answered + ANSWER_DUE {
            return Err(buf);
        }
        let first = slot * READ_PAGES_MAX;
        let Some(contents) = self.contents.get_mut(first..first + pages.count) else { return Err(buf) };
        let (epoch, mut frames) = (self.reader.epoch(), [0; READ_PAGES_MAX]);
        for ((page, content), at) in pages.iter().zip(contents).zip(&mut frames) {
            let Some(Known { frame, generation, crc }) = self.directory.find(page) else { return Err(buf) };
            *content = Content { seal: PageReference { frame, generation, epoch }.seal(page), crc };
            *at = frame;
        }
        self.reader.post(slot, &frames[..pages.count], buf)?;
        self.expected[slot] = Some(Expected { pages, sqe });
        Ok(())
    }

    /// Sends the optimistic reads that are queued.
    #[inline]
    pub fn send(&mut self) {
        self.reader.send();
    }

    /// Notes that the ordinary command in `slot` reads `pages`, or is none that could be optimistic.
    #[inline]
    pub fn note(&mut self, slot: usize, pages: Option<PageRange>) {
        if let Some(noted) = self.noted.get_mut(slot) {
            *noted = pages;
        }
    }

    /// An ordinary command has ended with success: learns its reference, if it has one.
    #[inline]
    pub fn on_read(&mut self, slot: usize, cqe: &Cqe, buf: Option<&Buf>) {
        self.answered = self.now;
        let Some(pages) = self.noted.get_mut(slot).and_then(Option::take) else { return };
        if pages.count > 1 {
            return self.want(pages);
        }
        let (Some(reference), Some(data)) = (cqe.page_reference(), buf.and_then(Buf::as_slice)) else {
            return;
        };
        if reference.epoch == self.reader.epoch() {
            self.learn(pages.first, reference, page_checksum(data));
        }
    }

    fn want(&mut self, pages: PageRange) {
        if self.now < self.asks_paused_until {
            return;
        }
        // The oldest were read longest ago.
        if self.wanted.is_full() {
            self.wanted.remove(0);
        }
        self.wanted.push(pages);
    }

    fn learn(&mut self, page: u64, reference: PageReference, crc: u64) {
        self.counts.learned += 1;
        self.directory.insert(page, reference, crc);
    }

    /// Takes pages whose references are to be asked for.
    pub fn next_wanted(&mut self) -> Option<PageRange> {
        let pages = self.wanted.pop()?;
        self.ask_window.0 += 1;
        if self.ask_window.0 >= WINDOW {
            if self.ask_window.1 < WINDOW / 2 {
                self.asks_paused_until = self.now + ASK_PAUSE;
                self.wanted.clear();
            }
            self.ask_window = (0, 0);
        }
        Some(pages)
    }

    /// Learns the entries of Get References, for the pages from `first` on.
    pub fn on_entries(&mut self, first: u64, entries: &[PageEntry]) {
        self.answered = self.now;
        for (at, entry) in entries.iter().enumerate() {
            if let Some((reference, crc)) = entry.get().filter(|(it, _)| it.epoch == self.reader.epoch()) {
                self.learn(first + at as u64, reference, crc);
            }
        }
    }

    /// The caller writes pages: their entries are not valid any more.
    pub fn on_write(&mut self, nsid: u32, offset: u64, bytes: usize) {
        if nsid == self.nsid && bytes > 0 {
            let last = offset.saturating_add(bytes as u64 - 1) >> OPTIMISTIC_PAGE_SHIFT;
            (offset >> OPTIMISTIC_PAGE_SHIFT..=last).for_each(|page| self.directory.remove(page));
        }
    }

    /// Passes each optimistic read that has ended to `each`. Returns true if there was any.
    #[inline]
    pub fn poll(&mut self, now: Nanos, mut each: impl FnMut(usize, Outcome)) -> bool {
        self.now = now;
        let has_answer = now <= self.answered + ANSWER_AGE_MAX;
        let Optimistic { reader, noted, expected, contents, directory, counts, window, ask_window, .. } =
            self;
        let has_come = reader.poll(now, |slot, seals, buf| {
            // The reader passes only slots that were posted.
            let Some(Expected { pages, sqe }) = expected.get_mut(slot).and_then(Option::take) else { return };
            let contents = &contents[slot * READ_PAGES_MAX..][..pages.count];
            window.0 += 1;
            if has_answer && is_valid(contents, seals, &buf) {
                window.1 += 1;
                ask_window.1 += u32::from(pages.count > 1);
                counts.accepted += 1;
                return each(slot, Outcome::Accepted(buf));
            }
            counts.rejected += 1;
            pages.iter().for_each(|page| directory.remove(page));
            // The ordinary read brings new references.
            noted[slot] = Some(pages);
            each(slot, Outcome::Repeat(sqe, buf));
        });
        if self.window.0 >= WINDOW {
            if self.window.1 < self.window.0 / 2 {
                self.paused_until = now + PAUSE;
            }
            self.window = (0, 0);
        }
        has_come
    }

    /// Ends the reader; the next poll passes all reads in flight as ones to be repeated.
    pub fn end(&mut self) {
        self.reader.end();
    }
}
