//! Optimistic reads: RDMA READs of the target's cache, without its CPU (`docs/extensions.md`).
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
//! the reference. Then each page was the newest content at some instant during the READs.
//!
//! A target that is stopped, or hangs, still serves READs, and another target may have taken over the medium
//! meanwhile. So a read is accepted only if an ordinary command of the queue was answered in the second
//! before. After half a second without such an answer reads are ordinary, until one of them is answered.
//!
//! When fewer than half of 256 optimistic reads were accepted, all reads are ordinary for a second. When 256
//! Get References for several pages have led to fewer than 128 accepted ones, none is sent for 100 ms.

mod attached;
mod directory;
mod opening;
mod reader;
#[cfg(test)]
mod tests;

use nvme_spec::optimistic::OPTIMISTIC_PAGE_SHIFT;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

use directory::Directory;
use reader::seal_bytes;

pub use attached::{Attached, NamespacePages, Outcome};
pub use opening::{Error, Opening, OptimisticGrant};
pub use reader::RdmaReader;

const PAGE_BYTES: usize = 1 << OPTIMISTIC_PAGE_SHIFT;
/// Most pages of an optimistic read: 64 KiB.
pub const READ_PAGES_MAX: usize = 16;

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

impl OptimisticOptions {
    /// Returns the bytes of memory of one attached queue of `depth` commands: directory, seals, and what is
    /// expected of the pages in flight.
    #[must_use]
    pub fn queue_bytes(&self, depth: u16) -> usize {
        let slots = usize::from(depth);
        Directory::bytes(self.directory_pages) + seal_bytes(slots) + slots * READ_PAGES_MAX * 16
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

    /// Returns true until the connection has ended.
    fn is_connected(&self) -> bool;

    /// EPOCH of the connection.
    fn epoch(&self) -> u8;

    /// Reads that were queued and not passed to `each` yet.
    fn in_flight(&self) -> usize;
}
