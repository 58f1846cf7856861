//! [`Ledger`]: blocks whose writes the far target may still execute although the association over which they
//! were sent is lost, and which core has left which association.
//!
//! ```text
//!            lost with its association        answered, over the next one
//!   write ─────────────────────────────> entry ───────────────────────────> kept until the lost association
//!     │ not answered in time               ^                                 is over (fenced), then removed
//!     └────────────────────────────────────┘
//! ```
//! A write that overlaps an older entry is not sent. A read that overlaps a write which is to be sent again
//! waits until that is answered: it must not see the blocks before the repetition and after it.
//!
//! An association is over when the far target has said so, or some time after the loss
//! ([`Ledger::fence_timeout`]).

use spindle_disk::BlockRange;
use spindle_reactor::clock::Nanos;

/// The number of an entry. An older one is smaller.
pub(crate) type EntryId = u64;

/// A command without an entry is newer than all entries.
pub(crate) const NEWEST: EntryId = EntryId::MAX;

#[derive(Debug, Clone, Copy)]
struct Entry {
    id: EntryId,
    range: BlockRange,
    /// A core has its command still: it is outstanding, or is sent again.
    is_live: bool,
    /// It was lost: its core sends it again.
    is_repeated: bool,
    /// The newest association with which it was lost, and when. `None`: never, or that is over.
    lost: Option<(u64, Nanos)>,
}

/// See the module. `N` is the number of an association, from 1.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    entries: Vec<Entry>,
    next: EntryId,
    /// Associations up to this one are over: the far target has said so.
    over: u64,
    /// A lost association is over after so long, in any case.
    pub(crate) fence_timeout: Nanos,
    /// By the handle of a core: the association of which it has a queue, 0: none. `None`: it is closed.
    handles: Vec<Option<u64>>,
}

impl Ledger {
    /// A core opens the disk: its handle.
    pub(crate) fn open(&mut self) -> usize {
        self.handles.push(Some(0));
        self.handles.len() - 1
    }

    /// A core's handle is gone.
    pub(crate) fn close(&mut self, handle: usize) {
        self.handles[handle] = None;
    }

    /// The core has a queue of association `number`; 0: none.
    pub(crate) fn set_queue(&mut self, handle: usize, number: u64) {
        self.handles[handle] = Some(number);
    }

    /// No core has a queue of another association than `number`, so that what was lost with it is known.
    pub(crate) fn have_all_left(&self, number: u64) -> bool {
        self.handles.iter().flatten().all(|has| [0, number].contains(has))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// A write that a core has was lost with association `number`.
    pub(crate) fn lose(
        &mut self,
        entry: Option<EntryId>,
        range: BlockRange,
        number: u64,
        now: Nanos,
    ) -> EntryId {
        let id = self.note(entry, range);
        let lost = (number > self.over).then_some((number, now));
        if let Some(entry) = self.find(id) {
            (entry.is_repeated, entry.lost) = (true, lost);
        }
        id
    }

    /// A write is outstanding for so long that its host is told that it failed.
    pub(crate) fn note(&mut self, entry: Option<EntryId>, range: BlockRange) -> EntryId {
        entry.unwrap_or_else(|| {
            self.next += 1;
            self.entries.push(Entry { id: self.next, range, is_live: true, is_repeated: false, lost: None });
            self.next
        })
    }

    /// No core has the command any more: it is answered, or not sent again.
    pub(crate) fn settle(&mut self, id: EntryId) {
        if let Some(entry) = self.find(id) {
            entry.is_live = false;
        }
        self.tidy();
    }

    /// Nothing of the command can be executed any more.
    pub(crate) fn is_over(&self, id: EntryId) -> bool {
        self.entries.iter().all(|entry| entry.id != id)
    }

    /// Associations up to `number` are over.
    pub(crate) fn end(&mut self, number: u64) {
        self.over = self.over.max(number);
        for entry in &mut self.entries {
            entry.lost = entry.lost.filter(|(with, _)| *with > number);
        }
        self.tidy();
    }

    /// What was lost for long enough is over. True when there was any.
    pub(crate) fn expire(&mut self, now: Nanos) -> bool {
        let mut has_any = false;
        for entry in &mut self.entries {
            if entry.lost.is_some_and(|(_, at)| now >= at + self.fence_timeout) {
                entry.lost = None;
                has_any = true;
            }
        }
        self.tidy();
        has_any
    }

    /// A command of these blocks is not to be sent now. `id` is its own entry, or [`NEWEST`].
    pub(crate) fn is_blocked(&self, id: EntryId, range: BlockRange, is_write: bool) -> bool {
        self.entries.iter().any(|entry| {
            let is_to_come = entry.is_live && entry.is_repeated;
            entry.id < id && overlap(entry.range, range) && (is_write || is_to_come)
        })
    }

    fn find(&mut self, id: EntryId) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.id == id)
    }

    fn tidy(&mut self) {
        self.entries.retain(|entry| entry.is_live || entry.lost.is_some());
    }
}

fn overlap(one: BlockRange, other: BlockRange) -> bool {
    let end = |range: BlockRange| range.lba.saturating_add(range.blocks.into());
    one.lba < end(other) && other.lba < end(one)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(lba: u64, blocks: u32) -> BlockRange {
        BlockRange { lba, blocks }
    }

    fn ledger() -> Ledger {
        Ledger { fence_timeout: Nanos::from_secs(10), ..Ledger::default() }
    }

    const AT: Nanos = Nanos::from_secs(100);

    #[test]
    fn a_newer_write_waits_until_the_lost_one_is_answered_and_its_association_over() {
        let mut ledger = ledger();
        let id = ledger.lose(None, range(8, 8), 1, AT);
        for (blocks, is_blocked) in [(range(0, 8), false), (range(15, 1), true), (range(16, 8), false)] {
            assert_eq!(ledger.is_blocked(NEWEST, blocks, true), is_blocked, "{blocks:?}");
        }
        assert!(!ledger.is_blocked(id, range(8, 8), true), "it is sent again at once");
        ledger.settle(id);
        assert!(ledger.is_blocked(NEWEST, range(8, 8), true), "the first try may still land");
        assert!(!ledger.is_blocked(NEWEST, range(8, 8), false), "a read sees the same before and after that");
        ledger.end(1);
        assert!(!ledger.is_blocked(NEWEST, range(8, 8), true) && ledger.is_empty());
    }

    #[test]
    fn while_it_is_not_answered_reads_and_writes_wait_also_when_the_association_is_over() {
        let mut ledger = ledger();
        let id = ledger.lose(None, range(8, 8), 1, AT);
        assert!(ledger.is_blocked(NEWEST, range(8, 1), false));
        ledger.end(1);
        assert!(
            ledger.is_blocked(NEWEST, range(8, 1), true) && ledger.is_blocked(NEWEST, range(8, 1), false)
        );
        ledger.settle(id);
        assert!(ledger.is_empty());
    }

    #[test]
    fn without_a_word_of_the_far_target_an_association_is_over_after_a_time() {
        let mut ledger = ledger();
        let id = ledger.lose(None, range(0, 1), 1, AT);
        ledger.settle(id);
        assert!(!ledger.expire(AT + Nanos::from_ms(9999)));
        assert!(!ledger.is_over(id));
        assert!(ledger.expire(AT + Nanos::from_secs(10)));
        assert!(ledger.is_over(id));
    }

    #[test]
    fn one_that_is_lost_again_waits_for_the_newer_association() {
        let mut ledger = ledger();
        let id = ledger.lose(None, range(0, 1), 1, AT);
        assert_eq!(ledger.lose(Some(id), range(0, 1), 2, AT + Nanos::from_secs(5)), id);
        ledger.settle(id);
        ledger.end(1);
        ledger.expire(AT + Nanos::from_secs(12));
        assert!(!ledger.is_over(id));
        ledger.end(2);
        assert!(ledger.is_over(id));
    }

    #[test]
    fn of_two_that_were_lost_together_the_newer_waits_for_the_older() {
        let mut ledger = ledger();
        let older = ledger.lose(None, range(0, 4), 1, AT);
        let newer = ledger.lose(None, range(3, 4), 1, AT);
        assert!(!ledger.is_blocked(older, range(0, 4), true));
        assert!(ledger.is_blocked(newer, range(3, 4), true));
        ledger.settle(older);
        assert!(ledger.is_blocked(newer, range(3, 4), true), "the older may still land");
        ledger.end(1);
        assert!(!ledger.is_blocked(newer, range(3, 4), true));
    }

    #[test]
    fn what_is_lost_with_an_association_that_is_known_to_be_over_was_executed_or_never_is() {
        let mut ledger = ledger();
        ledger.end(3);
        let id = ledger.lose(None, range(0, 1), 3, AT);
        ledger.settle(id);
        assert!(ledger.is_over(id));
    }

    #[test]
    fn one_that_was_not_answered_in_time_keeps_its_blocks_until_its_completion_comes() {
        let mut ledger = ledger();
        let id = ledger.note(None, range(0, 1));
        assert!(ledger.is_blocked(NEWEST, range(0, 1), true));
        assert!(!ledger.is_blocked(NEWEST, range(0, 1), false), "its host knows that it may have failed");
        ledger.expire(AT);
        assert!(!ledger.is_over(id));
        ledger.settle(id);
        assert!(ledger.is_empty());
    }

    #[test]
    fn a_core_that_has_a_queue_of_the_lost_association_keeps_all_waiting_until_it_has_left() {
        let mut ledger = Ledger::default();
        let (one, other) = (ledger.open(), ledger.open());
        ledger.set_queue(one, 1);
        ledger.set_queue(other, 1);
        assert!(ledger.have_all_left(1) && !ledger.have_all_left(2));
        ledger.set_queue(one, 0);
        assert!(!ledger.have_all_left(2));
        ledger.close(other);
        assert!(ledger.have_all_left(2));
        ledger.set_queue(one, 2);
        assert!(ledger.have_all_left(2));
    }

    #[test]
    fn ranges_that_end_where_another_begins_do_not_overlap() {
        assert!(!overlap(range(0, 4), range(4, 4)) && !overlap(range(4, 4), range(0, 4)));
        assert!(overlap(range(0, 5), range(4, 1)) && overlap(range(u64::MAX - 1, 1), range(u64::MAX - 2, 9)));
    }
}
