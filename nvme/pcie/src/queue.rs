//! [`QueuePair`]: one submission and one completion queue, used by a core or the manager.
//!
//! ```text
//!   push ─> entry at the tail ... ring ─> one doorbell (or a shadow doorbell) for all new entries
//!   pop  <─ completion with the expected phase ... acknowledge ─> head doorbell, if due
//! ```
//!
//! Order of accesses: entries are stored before the doorbell (release fence; registers are uncached, and
//! x86-64 keeps stores in order). The phase is loaded before the rest of a completion (acquire).
//!
//! With shadow doorbells, a full fence separates the driver's store of the tail from its load of EventIdx.
//! The controller has such a fence between its store of EventIdx and its load of the tail. So at least one of
//! the two sees the store of the other.
//!
//! The head doorbell is written when more than half of the completion queue's slack is used. The slack is
//! `cq_entries - sq_entries`: `sq_entries` where the limits of [`Layout::new`] allow, otherwise less, down to
//! 0. So there is always room for the completions of the commands in flight.
//!
//! A queue pair does not track commands: the caller must have at most [`Layout::depth`] commands in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use nvme_spec::pcie::{cq_head_doorbell, sq_tail_doorbell};
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use nvme_spec::zerocopy;
use nvme_spec::{CQE_BYTES, sqe::SQE_BYTES};

use crate::bar::Bar;
use crate::dma::{DmaMemory, Iova, PAGE_BYTES};

/// 64-bit words of a submission queue entry.
const SQE_WORDS: usize = SQE_BYTES / 8;
pub(crate) type Words = [u64; SQE_WORDS];
/// 64-bit words of a completion queue entry.
const CQE_WORDS: usize = CQE_BYTES / 8;

/// A completion queue entry as the drive wrote it, not validated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Completion {
    /// Dwords 0 and 1, command-specific.
    pub(crate) result: u64,
    pub(crate) sqid: u16,
    pub(crate) cid: u16,
    pub(crate) status: Status,
}

/// Sizes of the parts of a queue pair's memory, from which their offsets follow: submission queue, completion
/// queue, list pages, zero page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) sq_entries: u16,
    /// Twice `sq_entries`, unless CAP.MQES or the limit of 4096 is smaller. The admin queue has `sq_entries`.
    pub(crate) cq_entries: u16,
    /// Number of pages for PRP lists, SGL segments and ranges, one for each command slot of an I/O queue. May
    /// exceed `sq_entries`. The admin queue has one, for data.
    pub(crate) list_pages: u16,
}

impl Layout {
    /// Creates a layout for `depth` commands in flight, or fewer if `entries_max` (CAP.MQES + 1) is too
    /// small. The submission queue has at least `entries_min` entries, also at a smaller depth. Each queue
    /// has at least 2 entries, and at most `entries_max` and 4096.
    pub(crate) fn new(depth: u32, entries_min: u32, entries_max: u32) -> Layout {
        let entries_max = entries_max.clamp(2, 4096);
        let sq_entries = depth.saturating_add(1).max(entries_min).clamp(2, entries_max);
        let cq_entries = (2 * sq_entries).min(entries_max);
        let short = |entries: u32| u16::try_from(entries).unwrap_or(2);
        let list_pages = short(depth.clamp(1, 4095));
        Layout { sq_entries: short(sq_entries), cq_entries: short(cq_entries), list_pages }
    }

    /// Returns the maximum number of commands in flight.
    pub(crate) fn depth(self) -> u16 {
        (self.sq_entries - 1).min(self.list_pages)
    }

    fn cq_offset(self) -> usize {
        (usize::from(self.sq_entries) * SQE_BYTES).next_multiple_of(PAGE_BYTES as usize)
    }

    /// Returns the IOVA of the completion queue of a pair whose memory begins at `begin`.
    pub(crate) fn cq_iova(self, begin: Iova) -> Iova {
        begin.plus(self.cq_offset() as u64)
    }

    /// Reads the submission queue entry at `index`; `None` if `index` is beyond the memory. The caller has
    /// loaded the tail doorbell before (acquire).
    pub(crate) fn entry(self, memory: &DmaMemory, index: u16) -> Option<Words> {
        let begin = usize::from(index) * SQE_WORDS;
        let words: &[AtomicU64; SQE_WORDS] = memory.words().get(begin..begin + SQE_WORDS)?.try_into().ok()?;
        Some(std::array::from_fn(|at| words[at].load(Ordering::Relaxed)))
    }

    /// Writes the completion queue entry at `index`, the word with the phase (`last`) last (release).
    pub(crate) fn put_completion(self, memory: &DmaMemory, index: u16, result: u64, last: u64) {
        let begin = self.cq_offset() / 8 + usize::from(index) * CQE_WORDS;
        if let Some([first, second]) = memory.words().get(begin..begin + CQE_WORDS) {
            first.store(result.to_le(), Ordering::Relaxed);
            second.store(last.to_le(), Ordering::Release);
        }
    }

    /// Returns the offset in bytes of the list page of command slot `slot`.
    pub(crate) fn list_offset(self, slot: usize) -> usize {
        let cq_bytes = (usize::from(self.cq_entries) * CQE_BYTES).next_multiple_of(PAGE_BYTES as usize);
        self.cq_offset() + cq_bytes + slot * PAGE_BYTES as usize
    }

    /// Returns the offset in bytes of the zero page, which stays zero.
    pub(crate) fn zeroes_offset(self) -> usize {
        self.list_offset(usize::from(self.list_pages))
    }

    pub(crate) fn bytes(self) -> usize {
        self.list_offset(usize::from(self.list_pages) + 1)
    }
}

/// Shadow doorbells (Doorbell Buffer Config, Base 2.0 section 5.8).
#[derive(Debug, Clone)]
pub(crate) struct Shadow {
    /// Two pages: shadow doorbells and EventIdx values.
    pub(crate) memory: Arc<DmaMemory>,
}

impl Shadow {
    /// Returns true if the change from `old` to `new` passes EventIdx (`event`), so that the register must be
    /// written.
    fn must_ring(event: u16, old: u16, new: u16) -> bool {
        new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
    }

    /// Returns the word index and bit shift of the shadow of the doorbell register at `offset`. With DSTRD 0,
    /// the tail and head doorbells of a queue pair share a 64-bit word.
    fn position(offset: u64) -> (usize, u32) {
        let offset = offset - u64::from(nvme_spec::register::DOORBELLS);
        (usize::try_from(offset / 8).unwrap_or(usize::MAX), if offset.is_multiple_of(8) { 0 } else { 32 })
    }

    /// Zeroes the shadow doorbell and EventIdx of a queue that is about to be created: an earlier queue with
    /// the same identifier may have left values.
    fn reset(&self, doorbell: u64) {
        let (word, shift) = Self::position(doorbell);
        let (words, page) = (self.memory.words(), PAGE_BYTES as usize / 8);
        if word < page {
            for word in [words.get(word), words.get(page + word)].into_iter().flatten() {
                word.fetch_and(!(0xffff_ffff << shift), Ordering::Relaxed);
            }
        }
    }

    /// Loads the shadow tail of queue pair `qid` (DSTRD 0). Acquire: the entries before the tail are visible.
    pub(crate) fn tail(&self, qid: u16) -> u16 {
        let (word, shift) = Self::position(sq_tail_doorbell(qid, 0));
        let value = self.memory.words().get(word).map_or(0, |word| word.load(Ordering::Acquire));
        let [low, high, ..] = (value >> shift).to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    /// Stores a shadow doorbell. Returns true if the register must be written as well.
    #[inline]
    fn store(&self, doorbell: u64, old: u16, new: u16) -> bool {
        let (word, shift) = Self::position(doorbell);
        let words = self.memory.words();
        let page = PAGE_BYTES as usize / 8;
        let (Some(value), Some(event)) = (words.get(word).filter(|_| word < page), words.get(page + word))
        else {
            // A doorbell beyond the page has no shadow.
            return true;
        };
        // The other half of the word is unused, or of the same queue pair, which only this core writes.
        let kept = value.load(Ordering::Relaxed) & !(0xffff_ffff << shift);
        value.store(kept | u64::from(new) << shift, Ordering::Release);
        fence(Ordering::SeqCst);
        let [low, high, ..] = (event.load(Ordering::Relaxed) >> shift).to_le_bytes();
        Self::must_ring(u16::from_le_bytes([low, high]), old, new)
    }
}

#[derive(Debug)]
pub(crate) struct QueuePair {
    memory: Arc<DmaMemory>,
    bar: Bar,
    layout: Layout,
    /// Index of the first completion queue word in `memory`.
    cq_begin: usize,
    sq_doorbell: u64,
    cq_doorbell: u64,
    shadow: Option<Shadow>,
    sq_tail: u16,
    /// Last tail written to the doorbell or its shadow.
    sq_tail_written: u16,
    cq_head: u16,
    /// Last head written to the doorbell or its shadow.
    cq_head_written: u16,
    /// Completions popped since the last write of the head doorbell.
    unacknowledged: u16,
    phase: bool,
    qid: u16,
}

impl QueuePair {
    /// Creates a queue pair in `memory`: at least [`Layout::bytes`], with a zeroed completion queue.
    pub(crate) fn new(qid: u16, layout: Layout, memory: Arc<DmaMemory>, bar: Bar, dstrd: u8) -> QueuePair {
        QueuePair {
            memory,
            bar,
            layout,
            cq_begin: layout.cq_offset() / 8,
            sq_doorbell: sq_tail_doorbell(qid, dstrd),
            cq_doorbell: cq_head_doorbell(qid, dstrd),
            shadow: None,
            sq_tail: 0,
            sq_tail_written: 0,
            cq_head: 0,
            cq_head_written: 0,
            unacknowledged: 0,
            phase: true,
            qid,
        }
    }

    /// Sets the shadow doorbells, if any, and zeroes their values for this queue.
    pub(crate) fn with_shadow(mut self, shadow: Option<Shadow>) -> QueuePair {
        if let Some(shadow) = &shadow {
            shadow.reset(self.sq_doorbell);
            shadow.reset(self.cq_doorbell);
        }
        self.shadow = shadow;
        self
    }

    pub(crate) fn qid(&self) -> u16 {
        self.qid
    }

    pub(crate) fn sq_iova(&self) -> Iova {
        self.memory.iova()
    }

    pub(crate) fn cq_iova(&self) -> Iova {
        self.layout.cq_iova(self.memory.iova())
    }

    pub(crate) fn memory(&self) -> &Arc<DmaMemory> {
        &self.memory
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// Stores an entry at the tail, without a doorbell. Fewer than [`Layout::depth`] commands are in flight.
    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    #[inline(always)]
    pub(crate) fn push(&mut self, sqe: Sqe) {
        self.push_words(zerocopy::transmute!(sqe));
    }

    /// As [`QueuePair::push`], for an entry in wire format.
    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    #[inline(always)]
    pub(crate) fn push_words(&mut self, entry: Words) {
        let begin = usize::from(self.sq_tail) * SQE_WORDS;
        if let Some(words) = self.memory.words().get(begin..begin + SQE_WORDS) {
            for (word, value) in words.iter().zip(entry) {
                word.store(value, Ordering::Relaxed);
            }
        }
        let next = self.sq_tail + 1;
        self.sq_tail = if next == self.layout.sq_entries { 0 } else { next };
    }

    /// Writes the tail doorbell once for all entries since the last call. With shadow doorbells, writes the
    /// register only if EventIdx requires the write.
    #[inline]
    pub(crate) fn ring(&mut self) {
        if self.sq_tail == self.sq_tail_written {
            return;
        }
        let must_ring = match &self.shadow {
            None => true,
            Some(shadow) => shadow.store(self.sq_doorbell, self.sq_tail_written, self.sq_tail),
        };
        if must_ring {
            fence(Ordering::Release);
            self.bar.write32(self.sq_doorbell, u32::from(self.sq_tail));
        }
        self.sq_tail_written = self.sq_tail;
    }

    /// Removes and returns the next completion; `None` if its phase is not the expected one.
    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    #[inline(always)]
    pub(crate) fn pop(&mut self) -> Option<Completion> {
        let begin = self.cq_begin + usize::from(self.cq_head) * CQE_WORDS;
        let [first, second] = self.memory.words().get(begin..begin + CQE_WORDS)? else { return None };
        let now = u64::from_le(second.load(Ordering::Acquire));
        if (now >> 48 & 1 == 1) != self.phase {
            return None;
        }
        let next = self.cq_head + 1;
        self.unacknowledged += 1;
        if next == self.layout.cq_entries {
            self.cq_head = 0;
            self.phase = !self.phase;
        } else {
            self.cq_head = next;
        }
        let [_, _, s0, s1, c0, c1, f0, f1] = now.to_le_bytes();
        Some(Completion {
            result: u64::from_le(first.load(Ordering::Relaxed)),
            sqid: u16::from_le_bytes([s0, s1]),
            cid: u16::from_le_bytes([c0, c1]),
            status: Status::from_wire(u16::from_le_bytes([f0, f1])),
        })
    }

    /// Writes the head doorbell if more than half of the completion queue's slack is used.
    #[inline]
    pub(crate) fn acknowledge(&mut self) {
        let slack = self.layout.cq_entries - self.layout.sq_entries;
        if self.unacknowledged > slack / 2 {
            self.write_cq_head();
        }
    }

    #[cold]
    fn write_cq_head(&mut self) {
        let must_ring = match &self.shadow {
            None => true,
            Some(shadow) => shadow.store(self.cq_doorbell, self.cq_head_written, self.cq_head),
        };
        if must_ring {
            self.bar.write32(self.cq_doorbell, u32::from(self.cq_head));
        }
        self.cq_head_written = self.cq_head;
        self.unacknowledged = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_queue_has_twice_the_entries_where_it_may() {
        let layout = Layout::new(128, 0, 2048);
        assert_eq!((layout.sq_entries, layout.cq_entries, layout.depth()), (129, 258, 128));
        let layout = Layout::new(128, 0, 64);
        assert_eq!((layout.sq_entries, layout.cq_entries, layout.depth()), (64, 64, 63));
        let layout = Layout::new(64, 1024, 65_536);
        assert_eq!((layout.sq_entries, layout.depth(), layout.list_pages), (1024, 64, 64));
        assert_eq!(Layout::new(64, 1024, 256).sq_entries, 256);
        let layout = Layout::new(0, 0, 0);
        assert_eq!((layout.sq_entries, layout.cq_entries), (2, 2));
        let layout = Layout::new(u32::MAX, 0, u32::MAX);
        assert_eq!((layout.sq_entries, layout.cq_entries), (4096, 4096));
    }

    #[test]
    fn the_parts_of_a_queue_are_pages_that_do_not_overlap() {
        for (depth, entries_max) in [(1, 2), (63, 64), (64, 4096), (128, 2048), (1023, 65536)] {
            let layout = Layout::new(depth, 0, entries_max);
            let (sq_end, cq_end) = (
                usize::from(layout.sq_entries) * SQE_BYTES,
                layout.cq_offset() + usize::from(layout.cq_entries) * CQE_BYTES,
            );
            assert!(sq_end <= layout.cq_offset() && cq_end <= layout.list_offset(0), "{layout:?}");
            assert!([layout.cq_offset(), layout.list_offset(0)].iter().all(|at| at.is_multiple_of(4096)));
            assert_eq!(layout.list_offset(1) - layout.list_offset(0), 4096);
            assert_eq!(layout.bytes(), layout.zeroes_offset() + 4096);
            assert!(layout.zeroes_offset() >= layout.list_offset(usize::from(layout.depth())));
        }
    }

    #[test]
    fn the_controller_is_told_when_its_event_index_is_passed() {
        // Base 2.0 section B.5: told when the value steps over the index.
        assert!(Shadow::must_ring(0, 0, 1) && Shadow::must_ring(5, 5, 6) && Shadow::must_ring(5, 0, 6));
        assert!(!Shadow::must_ring(6, 5, 6) && !Shadow::must_ring(4, 5, 6) && !Shadow::must_ring(9, 0, 3));
        assert!(Shadow::must_ring(u16::MAX, 0xfffe, 0));
    }

    #[test]
    fn shadow_doorbells_lie_as_the_registers_do() {
        assert_eq!(Shadow::position(sq_tail_doorbell(3, 0)), (3, 0));
        assert_eq!(Shadow::position(cq_head_doorbell(3, 0)), (3, 32));
        assert_eq!(Shadow::position(sq_tail_doorbell(3, 1)), (6, 0));
        assert_eq!(Shadow::position(cq_head_doorbell(3, 1)), (7, 0));
    }
}
