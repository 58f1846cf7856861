//! Optimistic reads: one page of the target's cache by RDMA READ, without the target's CPU
//! (`docs/extensions.md`).
//!
//! ```text
//!   read of one page ─┬─ in the directory ─> READ data, READ seal ─┬─ both as expected ─> completion
//!                     │                                            └─ otherwise ─────────┐
//!                     └─ not in it ────────────────────────────────────────> ordinary Read <┘
//!                                              its completion has a reference ─> directory
//! ```
//!
//! The data of an optimistic read is accepted if and only if the seal is that of the reference and the CRC of
//! the data is that of the data of the ordinary read that brought the reference. Then it was the newest
//! content of the page at some instant between the READ and its completion.
//!
//! When fewer than half of 256 optimistic reads were accepted, all reads are ordinary for a second.

mod connect;
mod directory;
mod opening;
mod reader;
#[cfg(test)]
mod tests;

use crc_fast::CrcAlgorithm;
use nvme_spec::optimistic::{OPTIMISTIC_PAGE_SHIFT, PageReference};
use nvme_spec::{Cqe, Sqe};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

use directory::{Directory, Known};

pub use opening::{OptimisticGrant, OptimisticOpening};
pub(crate) use reader::RdmaReader;

/// Reads after which the share of accepted ones is judged.
const WINDOW: u32 = 256;
/// Time without optimistic reads after a window with too few accepted ones.
const PAUSE: Nanos = Nanos::from_secs(1);
const PAGE_BYTES: usize = 1 << OPTIMISTIC_PAGE_SHIFT;

/// Settings of optimistic reads of one queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptimisticOptions {
    /// Most pages in the directory, 24 bytes each.
    pub directory_pages: usize,
}

impl Default for OptimisticOptions {
    /// 262,144 pages, which are 1 GiB of the target's cache: 6 MiB.
    fn default() -> OptimisticOptions {
        OptimisticOptions { directory_pages: 1 << 18 }
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
    /// Queues a read of the frame and the seal of `reference` for slot `slot`. Sent by the next
    /// [`PageReader::send`] or [`PageReader::poll`].
    ///
    /// # Errors
    /// `buf`, if that is not possible now.
    fn post(&mut self, slot: usize, reference: PageReference, buf: Buf) -> Result<(), Buf>;

    /// Sends what is queued, with one doorbell.
    fn send(&mut self);

    /// Sends what is queued. Passes each read that has ended to `each`: slot, seal and buffer. Without a
    /// seal, the read has failed. Returns true if there was any.
    fn poll(&mut self, now: Nanos, each: impl FnMut(usize, Option<u64>, Buf)) -> bool;

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
    page: u64,
    seal: u64,
    crc: u64,
    /// The ordinary read of the same blocks.
    sqe: Sqe,
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
    /// By slot: page of an ordinary read of one page; `None` for other commands.
    pages: Box<[Option<u64>]>,
    /// By slot.
    expected: Box<[Option<Expected>]>,
    counts: OptimisticCounts,
    /// Reads and accepted reads of the current window.
    window: (u32, u32),
    paused_until: Nanos,
    /// Time of the last poll.
    now: Nanos,
}

#[inline]
fn checksum(buf: &Buf) -> Option<u64> {
    buf.as_slice().map(|data| crc_fast::checksum(CrcAlgorithm::Crc64Nvme, data))
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
            pages: vec![None; slots].into(),
            expected: vec![None; slots].into(),
            counts: OptimisticCounts::default(),
            window: (0, 0),
            paused_until: Nanos::ZERO,
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

    /// Returns the page that a read or write of `bytes` at `offset` covers; `None`: not exactly one page.
    #[inline]
    #[must_use]
    pub fn page(&self, nsid: u32, offset: u64, bytes: usize) -> Option<u64> {
        let is_page = nsid == self.nsid && bytes == PAGE_BYTES && offset.is_multiple_of(PAGE_BYTES as u64);
        is_page.then_some(offset >> OPTIMISTIC_PAGE_SHIFT)
    }

    /// Begins an optimistic read of `page` in slot `slot`. `sqe`: the ordinary read.
    ///
    /// # Errors
    /// `buf`: the page is not in the directory, or no optimistic read is possible now. The caller sends
    /// `sqe`.
    #[inline]
    pub fn try_read(&mut self, slot: usize, page: u64, sqe: Sqe, buf: Buf) -> Result<(), Buf> {
        if self.now < self.paused_until {
            return Err(buf);
        }
        let Some(Known { frame, generation, crc }) = self.directory.find(page) else { return Err(buf) };
        let reference = PageReference { frame, generation, epoch: self.reader.epoch() };
        self.reader.post(slot, reference, buf)?;
        if let Some(expected) = self.expected.get_mut(slot) {
            *expected = Some(Expected { page, seal: reference.seal(page), crc, sqe });
        }
        Ok(())
    }

    /// Sends the optimistic reads that are queued.
    #[inline]
    pub fn send(&mut self) {
        self.reader.send();
    }

    /// Notes that the ordinary command in `slot` reads `page`, or does not read exactly one page.
    #[inline]
    pub fn note(&mut self, slot: usize, page: Option<u64>) {
        if let Some(noted) = self.pages.get_mut(slot) {
            *noted = page;
        }
    }

    /// An ordinary command has ended with success: learns its reference, if it has one.
    #[inline]
    pub fn on_read(&mut self, slot: usize, cqe: &Cqe, buf: Option<&Buf>) {
        let Some(page) = self.pages.get_mut(slot).and_then(Option::take) else { return };
        let reference = cqe.page_reference().filter(|it| it.epoch == self.reader.epoch());
        let (Some(reference), Some(crc)) = (reference, buf.and_then(checksum)) else { return };
        self.counts.learned += 1;
        self.directory.insert(page, reference, crc);
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
        let Optimistic { reader, pages, expected, directory, counts, window, .. } = self;
        let has_come = reader.poll(now, |slot, seal, buf| {
            // The reader passes only slots that were posted.
            let Some(read) = expected.get_mut(slot).and_then(Option::take) else { return };
            let is_valid = seal == Some(read.seal) && checksum(&buf) == Some(read.crc);
            window.0 += 1;
            if is_valid {
                window.1 += 1;
                counts.accepted += 1;
                return each(slot, Outcome::Accepted(buf));
            }
            counts.rejected += 1;
            directory.remove(read.page);
            // The ordinary read brings a new reference.
            if let Some(noted) = pages.get_mut(slot) {
                *noted = Some(read.page);
            }
            each(slot, Outcome::Repeat(read.sqe, buf));
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
