//! [`References`]: the Get References that a queue sends of its own accord, one at a time.

use nvme_spec::Sqe;
use nvme_spec::optimistic::{OPTIMISTIC_PAGE_SHIFT, PAGE_ENTRY_BYTES, PageEntry, REFERENCE_PAGES_MAX};
use nvme_spec::zerocopy::IntoBytes;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_reactor::slab::Slot;

use super::{Optimistic, OptimisticOptions, PageRange, PageReader};
use crate::error::Error;
use crate::namespace::Namespace;

/// Failed commands in a row after which no further one is sent.
const FAILURES_MAX: u8 = 8;
/// Bytes of the longest answer, which are less than a page of memory.
const BYTES_MAX: u32 = REFERENCE_PAGES_MAX * PAGE_ENTRY_BYTES;

/// Asks for references of pages that were read, and, if eager, of all pages once.
pub(crate) struct References {
    namespace: Namespace,
    /// The outstanding command, and its pages; without pages, it was sent for the former connection.
    request: Option<(Slot, Option<PageRange>)>,
    /// Pages of the eager walk that were not asked for yet.
    walk: std::ops::Range<u64>,
    /// Commands that may fail still in a row. Without one no further command is sent: the target has another
    /// answer to them, as a Spindle without Get References.
    failures_left: u8,
    /// Has one buffer.
    pool: Pool,
}

impl std::fmt::Debug for References {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("References")
            .field("request", &self.request)
            .field("walk", &self.walk)
            .finish_non_exhaustive()
    }
}

impl References {
    /// Allocates the buffer.
    ///
    /// # Errors
    /// There is no memory.
    pub(super) fn new(namespace: Namespace, options: &OptimisticOptions) -> Result<References, Error> {
        let pool =
            Pool::new(&[ZoneSpec { buffer_bytes: BYTES_MAX.next_multiple_of(4096), count: 1 }], Pages::Base)?;
        let pages = (namespace.bytes() >> OPTIMISTIC_PAGE_SHIFT).min(options.directory_pages as u64);
        let walk = if options.is_eager { 0..pages } else { 0..0 };
        Ok(References { namespace, request: None, walk, failures_left: FAILURES_MAX, pool })
    }

    /// Begins anew for another connection. The outstanding command stays: its answer is of no use.
    pub(crate) fn replace(&mut self, mut other: References) {
        other.request = self.request.take().map(|(slot, _)| (slot, None));
        *self = other;
    }

    /// Returns true while a command is outstanding.
    #[inline]
    pub(crate) fn is_outstanding(&self) -> bool {
        self.request.is_some()
    }

    /// Returns the pages to ask for now: those of the walk first, which are more for each command.
    fn next_pages<R: PageReader>(&mut self, optimistic: &mut Optimistic<R>) -> Option<PageRange> {
        let first = self.walk.start;
        let count = (self.walk.end - first).min(REFERENCE_PAGES_MAX.into());
        if count == 0 {
            return optimistic.next_wanted();
        }
        self.walk.start += count;
        Some(PageRange { first, count: usize::try_from(count).unwrap_or(0) })
    }

    /// Returns the next command for `slot`, with its buffer; `None`: one is outstanding, or there is nothing
    /// to ask for.
    #[inline]
    pub(crate) fn begin<R: PageReader>(
        &mut self,
        slot: Slot,
        optimistic: &mut Optimistic<R>,
    ) -> Option<(Sqe, Buf)> {
        if self.is_outstanding() || self.failures_left == 0 {
            return None;
        }
        let pages = self.next_pages(optimistic)?;
        let shift = self.namespace.block_bytes().trailing_zeros();
        // No block is longer than a page at a target with optimistic reads.
        let blocks = (u32::try_from(pages.count).ok()? << OPTIMISTIC_PAGE_SHIFT) >> shift;
        let lba = (pages.first << OPTIMISTIC_PAGE_SHIFT) >> shift;
        if blocks == 0 {
            return None;
        }
        let buf = self.pool.take(u32::try_from(pages.count).ok()? * PAGE_ENTRY_BYTES)?;
        self.request = Some((slot, Some(pages)));
        Some((Sqe::get_references(0, self.namespace.nsid, lba, blocks), buf))
    }

    /// The command was not sent.
    pub(crate) fn on_refused(&mut self) {
        if let Some((_, Some(pages))) = self.request.take()
            && pages.first + pages.count as u64 == self.walk.start
        {
            self.walk.start = pages.first;
        }
    }

    /// The command in `slot` has ended. Learns what it has brought, and returns true, if it is the
    /// outstanding one.
    #[inline]
    pub(crate) fn on_ended<R: PageReader>(
        &mut self,
        slot: Slot,
        is_success: bool,
        buf: Option<&Buf>,
        optimistic: &mut Optimistic<R>,
    ) -> bool {
        let Some((_, pages)) = self.request.take_if(|(own, _)| *own == slot) else { return false };
        let Some(pages) = pages else { return true };
        if let (true, Some(data)) = (is_success, buf) {
            let mut entries = [PageEntry::default(); REFERENCE_PAGES_MAX as usize];
            let entries = &mut entries[..pages.count];
            data.copy_out(0, entries.as_mut_bytes());
            optimistic.on_entries(pages.first, entries);
            self.failures_left = FAILURES_MAX;
        } else {
            // The namespace may have shrunk.
            self.walk = 0..0;
            self.failures_left = self.failures_left.saturating_sub(1);
        }
        true
    }
}
