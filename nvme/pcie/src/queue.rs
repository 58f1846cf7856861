//! [`QueuePair`]: one submission and one completion queue, as a core or the manager drives them.
//!
//! ```text
//!   push ─> entry at the tail ... ring ─> one doorbell (or a shadow doorbell) for all entries since
//!   pop  <─ completion whose phase is the expected one ... acknowledge ─> the head, seldom
//! ```
//!
//! Order: entries are stored before the doorbell (release fence; registers are uncached, and x86-64 keeps
//! stores in order); the word with the phase is loaded before the rest of a completion (acquire). With shadow
//! doorbells a full fence stands between our store of the tail and our load of the event index, as the
//! controller has one between its store of the index and its load of the tail: one of the two sees the other.
//!
//! The completion queue's head is told when half of its slack is used, not each time: it has twice the
//! entries that commands can be in flight, so the controller never finds it full.
//!
//! What it does not do: it knows no commands. The caller sees to it that at most `entries - 1` are in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use nvme_spec::pcie::{cq_head_doorbell, sq_tail_doorbell};
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use nvme_spec::zerocopy;
use nvme_spec::{CQE_BYTES, sqe::SQE_BYTES};

use crate::bar::Bar;
use crate::dma::{DmaMemory, Iova, PAGE_BYTES};

/// Words of a submission entry.
const SQE_WORDS: usize = SQE_BYTES / 8;
/// A submission entry.
pub(crate) type Words = [u64; SQE_WORDS];
/// Words of a completion.
const CQE_WORDS: usize = CQE_BYTES / 8;

/// A completion as the drive wrote it: nothing of it is trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Completion {
    /// Dword 0 and 1.
    pub(crate) result: u64,
    /// SQID.
    pub(crate) sqid: u16,
    /// CID.
    pub(crate) cid: u16,
    /// Status field.
    pub(crate) status: Status,
}

/// Where the parts of a queue pair lie in its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Entries of the submission queue.
    pub(crate) sq_entries: u16,
    /// Entries of the completion queue, more than those of the submission queue where the controller allows.
    pub(crate) cq_entries: u16,
    /// Pages for list entries: one for each slot, of which there may be more than the queue has entries.
    pub(crate) lists: u16,
}

impl Layout {
    /// For `depth` commands in flight, with queues of at most `entries_max` entries (CAP.MQES). Fewer in
    /// flight where that is less. The queue has `entries_min` where it may, however many are in flight.
    pub(crate) fn new(depth: u32, entries_min: u32, entries_max: u32) -> Layout {
        let entries_max = entries_max.clamp(2, 4096);
        let sq_entries = depth.saturating_add(1).max(entries_min).clamp(2, entries_max);
        let cq_entries = (2 * sq_entries).min(entries_max);
        let short = |entries: u32| u16::try_from(entries).unwrap_or(2);
        let lists = short(depth.clamp(1, 4095));
        Layout { sq_entries: short(sq_entries), cq_entries: short(cq_entries), lists }
    }

    /// Commands that can be in flight.
    pub(crate) fn depth(self) -> u16 {
        (self.sq_entries - 1).min(self.lists)
    }

    fn cq_offset(self) -> usize {
        (usize::from(self.sq_entries) * SQE_BYTES).next_multiple_of(PAGE_BYTES as usize)
    }

    /// Where the drive finds the completion queue of a pair that begins at `begin`.
    pub(crate) fn cq_iova(self, begin: Iova) -> Iova {
        begin.plus(self.cq_offset() as u64)
    }

    /// The entry of the submission queue at `index`, as its reader sees it behind the doorbell.
    pub(crate) fn entry(self, memory: &DmaMemory, index: u16) -> Option<Words> {
        let begin = usize::from(index) * SQE_WORDS;
        let words: &[AtomicU64; SQE_WORDS] = memory.words().get(begin..begin + SQE_WORDS)?.try_into().ok()?;
        Some(std::array::from_fn(|at| words[at].load(Ordering::Relaxed)))
    }

    /// Write the completion at `index` as the controller does: the word with the phase last.
    pub(crate) fn put_completion(self, memory: &DmaMemory, index: u16, result: u64, last: u64) {
        let begin = self.cq_offset() / 8 + usize::from(index) * CQE_WORDS;
        if let Some([first, second]) = memory.words().get(begin..begin + CQE_WORDS) {
            first.store(result.to_le(), Ordering::Relaxed);
            second.store(last.to_le(), Ordering::Release);
        }
    }

    /// Offset of the page of list entries that slot `slot` has to itself.
    pub(crate) fn list_offset(self, slot: usize) -> usize {
        let cq_bytes = (usize::from(self.cq_entries) * CQE_BYTES).next_multiple_of(PAGE_BYTES as usize);
        self.cq_offset() + cq_bytes + slot * PAGE_BYTES as usize
    }

    /// Offset of the page that is never written, behind the lists.
    pub(crate) fn zeroes_offset(self) -> usize {
        self.list_offset(usize::from(self.lists))
    }

    /// Bytes of all of it.
    pub(crate) fn bytes(self) -> usize {
        self.list_offset(usize::from(self.lists) + 1)
    }
}

/// Doorbells in memory (Base 2.0 section 5.8).
#[derive(Debug, Clone)]
pub(crate) struct Shadow {
    /// Two pages: the doorbells, and the values at which the controller wants to be told.
    pub(crate) memory: Arc<DmaMemory>,
}

impl Shadow {
    /// True when the controller asked to be told of a step from `old` to `new`.
    fn is_told(event: u16, old: u16, new: u16) -> bool {
        new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
    }

    /// Tail and head doorbell of a queue are neighbours: one word where they are 4 bytes apart, else one word
    /// each. The word's index and the shift of the value in it.
    fn place(offset: u64) -> (usize, u32) {
        let offset = offset - u64::from(nvme_spec::register::DOORBELLS);
        (usize::try_from(offset / 8).unwrap_or(usize::MAX), if offset.is_multiple_of(8) { 0 } else { 32 })
    }

    /// A queue begins at 0, whatever one of the same number has left there: its doorbell, and the index at
    /// which the controller wants to be told. Before the queue is made.
    fn forget(&self, doorbell: u64) {
        let (word, shift) = Self::place(doorbell);
        let (words, page) = (self.memory.words(), PAGE_BYTES as usize / 8);
        if word < page {
            for word in [words.get(word), words.get(page + word)].into_iter().flatten() {
                word.fetch_and(!(0xffff_ffff << shift), Ordering::Relaxed);
            }
        }
    }

    /// The tail of queue pair `qid`, with doorbells 4 bytes apart. What its writer stored before is seen.
    pub(crate) fn tail(&self, qid: u16) -> u16 {
        let (word, shift) = Self::place(sq_tail_doorbell(qid, 0));
        let value = self.memory.words().get(word).map_or(0, |word| word.load(Ordering::Acquire));
        let [low, high, ..] = (value >> shift).to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    /// Store a doorbell's value; true when the register must be written as well.
    #[inline]
    fn store(&self, doorbell: u64, old: u16, new: u16) -> bool {
        let (word, shift) = Self::place(doorbell);
        let words = self.memory.words();
        let page = PAGE_BYTES as usize / 8;
        let (Some(value), Some(event)) = (words.get(word).filter(|_| word < page), words.get(page + word))
        else {
            // A queue whose doorbells do not fit the page has none.
            return true;
        };
        // The other half of the word is this core's as well, and has no other writer.
        let kept = value.load(Ordering::Relaxed) & !(0xffff_ffff << shift);
        value.store(kept | u64::from(new) << shift, Ordering::Release);
        fence(Ordering::SeqCst);
        let [low, high, ..] = (event.load(Ordering::Relaxed) >> shift).to_le_bytes();
        Self::is_told(u16::from_le_bytes([low, high]), old, new)
    }
}

/// A queue pair. See the module.
#[derive(Debug)]
pub(crate) struct QueuePair {
    memory: Arc<DmaMemory>,
    bar: Bar,
    layout: Layout,
    /// Word of the memory at which completions begin.
    cq_begin: usize,
    sq_doorbell: u64,
    cq_doorbell: u64,
    shadow: Option<Shadow>,
    sq_tail: u16,
    /// The tail that the controller knows.
    sq_told: u16,
    cq_head: u16,
    /// The head that the controller knows.
    cq_told: u16,
    /// Completions popped since the controller was told.
    untold: u16,
    phase: bool,
    qid: u16,
}

impl QueuePair {
    /// Queue pair `qid` in `memory`, which is [`Layout::bytes`] long and all zeroes where completions lie.
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
            sq_told: 0,
            cq_head: 0,
            cq_told: 0,
            untold: 0,
            phase: true,
            qid,
        }
    }

    /// The same with doorbells in memory.
    pub(crate) fn with_shadow(mut self, shadow: Option<Shadow>) -> QueuePair {
        if let Some(shadow) = &shadow {
            shadow.forget(self.sq_doorbell);
            shadow.forget(self.cq_doorbell);
        }
        self.shadow = shadow;
        self
    }

    /// Its identifier.
    pub(crate) fn qid(&self) -> u16 {
        self.qid
    }

    /// Where the drive finds the submission queue.
    pub(crate) fn sq_iova(&self) -> Iova {
        self.memory.iova()
    }

    /// Where the drive finds the completion queue.
    pub(crate) fn cq_iova(&self) -> Iova {
        self.layout.cq_iova(self.memory.iova())
    }

    /// The memory it lies in.
    pub(crate) fn memory(&self) -> &Arc<DmaMemory> {
        &self.memory
    }

    /// Its shape.
    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// Put an entry at the tail. The caller has fewer than [`Layout::depth`] in flight.
    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    #[inline(always)]
    pub(crate) fn push(&mut self, sqe: Sqe) {
        self.push_words(zerocopy::transmute!(sqe));
    }

    /// The same of an entry as it lies in memory.
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

    /// Tell the controller of all entries since the last call.
    #[inline]
    pub(crate) fn ring(&mut self) {
        if self.sq_tail == self.sq_told {
            return;
        }
        let is_told = match &self.shadow {
            None => true,
            Some(shadow) => shadow.store(self.sq_doorbell, self.sq_told, self.sq_tail),
        };
        if is_told {
            fence(Ordering::Release);
            self.bar.write32(self.sq_doorbell, u32::from(self.sq_tail));
        }
        self.sq_told = self.sq_tail;
    }

    /// The next completion, if there is one.
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
        self.untold += 1;
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

    /// Tell the controller how far completions were read, when it is time.
    #[inline]
    pub(crate) fn acknowledge(&mut self) {
        let slack = self.layout.cq_entries - self.layout.sq_entries;
        if self.untold > slack / 2 {
            self.tell_head();
        }
    }

    #[cold]
    fn tell_head(&mut self) {
        let is_told = match &self.shadow {
            None => true,
            Some(shadow) => shadow.store(self.cq_doorbell, self.cq_told, self.cq_head),
        };
        if is_told {
            self.bar.write32(self.cq_doorbell, u32::from(self.cq_head));
        }
        self.cq_told = self.cq_head;
        self.untold = 0;
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
        assert_eq!((layout.sq_entries, layout.depth(), layout.lists), (1024, 64, 64));
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
        assert!(Shadow::is_told(0, 0, 1) && Shadow::is_told(5, 5, 6) && Shadow::is_told(5, 0, 6));
        assert!(!Shadow::is_told(6, 5, 6) && !Shadow::is_told(4, 5, 6) && !Shadow::is_told(9, 0, 3));
        assert!(Shadow::is_told(u16::MAX, 0xfffe, 0));
    }

    #[test]
    fn shadow_doorbells_lie_as_the_registers_do() {
        assert_eq!(Shadow::place(sq_tail_doorbell(3, 0)), (3, 0));
        assert_eq!(Shadow::place(cq_head_doorbell(3, 0)), (3, 32));
        assert_eq!(Shadow::place(sq_tail_doorbell(3, 1)), (6, 0));
        assert_eq!(Shadow::place(cq_head_doorbell(3, 1)), (7, 0));
    }
}
