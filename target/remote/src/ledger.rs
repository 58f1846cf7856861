//! [`Ledger`]: blocks of writes that the far target may still execute although their association is lost or
//! their deadline has passed. It also records the association of each core's queue.
//!
//! ```text
//!            lost with its association        answered, over the next association
//!   write ─────────────────────────────> entry ───────────────────────────> kept until the lost association
//!     │ not answered in time               ^                                 is over (fenced), then removed
//!     └────────────────────────────────────┘
//! ```
//! A write that overlaps an older entry is not sent. A read that overlaps a write to be repeated waits for
//! the answer to the repetition. Otherwise reads could return data from before and from after the write.
//!
//! An association is over once the far target confirms its end, or [`Ledger::fence_timeout`] after the loss.

use spindle_reactor::clock::Nanos;
use spindle_target_disk::BlockRange;

/// Identifier of an entry; ascends in the order in which entries are added.
pub(crate) type EntryId = u64;

/// Identifier for a command without an entry: newer than all entries.
pub(crate) const NEWEST: EntryId = EntryId::MAX;

#[derive(Debug, Clone, Copy)]
struct Entry {
    id: EntryId,
    range: BlockRange,
    /// The write is outstanding or will be sent again.
    is_live: bool,
    /// The write was lost; while `is_live`, it will be sent again.
    is_repeated: bool,
    /// The newest lost association that had the write, and the time of the loss. `None`: none, or it is over.
    lost: Option<(u64, Nanos)>,
}

/// Ledger of one remote disk. Associations are numbered from 1.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    entries: Vec<Entry>,
    next: EntryId,
    /// Newest association whose end the far target has confirmed; all earlier ones are over too.
    over: u64,
    /// Time from a loss after which the association is over without a confirmation.
    pub(crate) fence_timeout: Nanos,
    /// Association of each core's queue, by handle; 0: no queue. `None`: the handle is closed.
    handles: Vec<Option<u64>>,
}

impl Ledger {
    /// Adds a core without a queue; returns its handle.
    pub(crate) fn open(&mut self) -> usize {
        self.handles.push(Some(0));
        self.handles.len() - 1
    }

    /// Removes a core. Its handle is not reused.
    pub(crate) fn close(&mut self, handle: usize) {
        self.handles[handle] = None;
    }

    /// Records the association of a core's queue; 0: none.
    pub(crate) fn set_queue(&mut self, handle: usize, number: u64) {
        self.handles[handle] = Some(number);
    }

    /// Returns true when no core has a queue of an association other than `number`. Then all losses with
    /// earlier associations are recorded.
    pub(crate) fn have_all_left(&self, number: u64) -> bool {
        self.handles.iter().flatten().all(|has| [0, number].contains(has))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Records that a write was lost with association `number`. `entry`: the write's entry, if it has one.
    /// Returns the write's entry.
    pub(crate) fn record_lost(
        &mut self,
        entry: Option<EntryId>,
        range: BlockRange,
        number: u64,
        now: Nanos,
    ) -> EntryId {
        let id = self.add_entry(entry, range);
        let lost = (number > self.over).then_some((number, now));
        if let Some(entry) = self.find(id) {
            (entry.is_repeated, entry.lost) = (true, lost);
        }
        id
    }

    /// Returns `entry`, the write's entry. Without one, adds an entry for a write to `range`.
    pub(crate) fn add_entry(&mut self, entry: Option<EntryId>, range: BlockRange) -> EntryId {
        entry.unwrap_or_else(|| {
            self.next += 1;
            self.entries.push(Entry { id: self.next, range, is_live: true, is_repeated: false, lost: None });
            self.next
        })
    }

    /// Records that the write was answered or will not be sent again. Removes its entry unless a lost
    /// association may still execute the write.
    pub(crate) fn resolve(&mut self, id: EntryId) {
        if let Some(entry) = self.find(id) {
            entry.is_live = false;
        }
        self.remove_finished();
    }

    /// Returns true when the write's entry was removed: the write can no longer be executed.
    pub(crate) fn is_over(&self, id: EntryId) -> bool {
        self.entries.iter().all(|entry| entry.id != id)
    }

    /// Records that associations up to `number` are over, and removes the finished entries.
    pub(crate) fn end(&mut self, number: u64) {
        self.over = self.over.max(number);
        for entry in &mut self.entries {
            entry.lost = entry.lost.filter(|(with, _)| *with > number);
        }
        self.remove_finished();
    }

    /// Treats associations whose loss was recorded at least the fence timeout ago as over. Returns true when
    /// an entry has changed.
    pub(crate) fn expire(&mut self, now: Nanos) -> bool {
        let mut has_any = false;
        for entry in &mut self.entries {
            if entry.lost.is_some_and(|(_, at)| now >= at + self.fence_timeout) {
                entry.lost = None;
                has_any = true;
            }
        }
        self.remove_finished();
        has_any
    }

    /// Returns true when an older entry blocks a command to `range`. A write is blocked by every such entry
    /// that overlaps; another command only by that of a write to be repeated. `id`: the command's own entry,
    /// or [`NEWEST`].
    pub(crate) fn is_blocked(&self, id: EntryId, range: BlockRange, is_write: bool) -> bool {
        self.entries.iter().any(|entry| {
            let is_to_come = entry.is_live && entry.is_repeated;
            entry.id < id && overlap(entry.range, range) && (is_write || is_to_come)
        })
    }

    /// Returns true if a lost association may still execute the write of this entry.
    pub(crate) fn may_land(&self, id: EntryId) -> bool {
        self.entries.iter().any(|entry| entry.id == id && entry.lost.is_some())
    }

    fn find(&mut self, id: EntryId) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.id == id)
    }

    fn remove_finished(&mut self) {
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
        let id = ledger.record_lost(None, range(8, 8), 1, AT);
        for (blocks, is_blocked) in [(range(0, 8), false), (range(15, 1), true), (range(16, 8), false)] {
            assert_eq!(ledger.is_blocked(NEWEST, blocks, true), is_blocked, "{blocks:?}");
        }
        assert!(!ledger.is_blocked(id, range(8, 8), true), "it is sent again at once");
        assert!(ledger.may_land(id) && !ledger.may_land(NEWEST));
        ledger.resolve(id);
        assert!(ledger.is_blocked(NEWEST, range(8, 8), true), "the first try may still land");
        assert!(!ledger.is_blocked(NEWEST, range(8, 8), false), "a read sees the same before and after that");
        ledger.end(1);
        assert!(!ledger.is_blocked(NEWEST, range(8, 8), true) && ledger.is_empty());
    }

    #[test]
    fn while_it_is_not_answered_reads_and_writes_wait_also_when_the_association_is_over() {
        let mut ledger = ledger();
        let id = ledger.record_lost(None, range(8, 8), 1, AT);
        assert!(ledger.is_blocked(NEWEST, range(8, 1), false));
        ledger.end(1);
        assert!(
            ledger.is_blocked(NEWEST, range(8, 1), true) && ledger.is_blocked(NEWEST, range(8, 1), false)
        );
        ledger.resolve(id);
        assert!(ledger.is_empty());
    }

    #[test]
    fn without_a_word_of_the_far_target_an_association_is_over_after_a_time() {
        let mut ledger = ledger();
        let id = ledger.record_lost(None, range(0, 1), 1, AT);
        ledger.resolve(id);
        assert!(!ledger.expire(AT + Nanos::from_ms(9999)));
        assert!(!ledger.is_over(id));
        assert!(ledger.expire(AT + Nanos::from_secs(10)));
        assert!(ledger.is_over(id));
    }

    #[test]
    fn one_that_is_lost_again_waits_for_the_newer_association() {
        let mut ledger = ledger();
        let id = ledger.record_lost(None, range(0, 1), 1, AT);
        assert_eq!(ledger.record_lost(Some(id), range(0, 1), 2, AT + Nanos::from_secs(5)), id);
        ledger.resolve(id);
        ledger.end(1);
        ledger.expire(AT + Nanos::from_secs(12));
        assert!(!ledger.is_over(id));
        ledger.end(2);
        assert!(ledger.is_over(id));
    }

    #[test]
    fn of_two_that_were_lost_together_the_newer_waits_for_the_older() {
        let mut ledger = ledger();
        let older = ledger.record_lost(None, range(0, 4), 1, AT);
        let newer = ledger.record_lost(None, range(3, 4), 1, AT);
        assert!(!ledger.is_blocked(older, range(0, 4), true));
        assert!(ledger.is_blocked(newer, range(3, 4), true));
        ledger.resolve(older);
        assert!(ledger.is_blocked(newer, range(3, 4), true), "the older may still land");
        ledger.end(1);
        assert!(!ledger.is_blocked(newer, range(3, 4), true));
    }

    #[test]
    fn a_write_lost_with_an_association_already_over_is_over_once_resolved() {
        let mut ledger = ledger();
        ledger.end(3);
        let id = ledger.record_lost(None, range(0, 1), 3, AT);
        ledger.resolve(id);
        assert!(ledger.is_over(id));
    }

    #[test]
    fn one_that_was_not_answered_in_time_keeps_its_blocks_until_its_completion_comes() {
        let mut ledger = ledger();
        let id = ledger.add_entry(None, range(0, 1));
        assert!(ledger.is_blocked(NEWEST, range(0, 1), true));
        assert!(!ledger.is_blocked(NEWEST, range(0, 1), false), "its host knows that it may have failed");
        ledger.expire(AT);
        assert!(!ledger.is_over(id));
        ledger.resolve(id);
        assert!(ledger.is_empty());
    }

    #[test]
    fn all_cores_have_left_only_when_none_has_a_queue_of_the_lost_association() {
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
