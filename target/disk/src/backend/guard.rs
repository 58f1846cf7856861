//! [`Guard`]: excludes writes of all cores from one block during a compare-and-write.
//!
//! The medium has no atomic compare-and-write, so the cores synchronize. One compare-and-write at a time
//! holds the guard of the disk. The holder proceeds once no write to the guarded block is in flight on any
//! core. Until the holder releases the guard, no write to the block begins.
//!
//! ```text
//!   a write       enter: in_flight + 1, then load the guard ── block in range -> in_flight - 1, wait
//!                                                          └─ otherwise write ... leave: in_flight - 1
//!   the holder    try_hold: publish the guard; is_clear: load every core's counters:
//!                   nothing in flight, or the core has answered this guard -> this core is clear
//!   every core    in poll: guard not answered yet, and no own write in flight has its block -> answer
//! ```
//!
//! Safety: `enter` increments the counter before it loads the guard. The holder publishes the guard before it
//! loads the counters. All four accesses are sequentially consistent, so the holder sees the count of every
//! write that did not see the guard. A core that has answered has seen the guard, and so does each of its
//! later writes. Once clear, a core stays clear. Liveness: the holder waits only for writes in flight that
//! overlap the block, and a core with writes in flight polls.
//!
//! Cost of a write while no guard is published: two atomic additions on the core's own cache line, and a load
//! of an unchanged word.
//!
//! A core that checks the guard in each turn may enter once for all its writes
//! ([`GuardParticipant::enter_all`]). Single writes then cost nothing, and the holder waits until the core
//! has answered.
//!
//! Limits: [`CORES_MAX`] participants for a disk.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::BlockRange;

/// Most participants in the guard of a disk: the most cores that can have the disk open.
pub const CORES_MAX: usize = 256;

/// State of one core, read by the holder of the guard. Aligned to 128 bytes: processors fetch lines in pairs.
#[repr(align(128))]
#[derive(Debug, Default)]
struct CoreSlot {
    is_taken: AtomicBool,
    /// Number of writes that have begun and not ended; `enter_all` counts as one write.
    in_flight: AtomicU32,
    /// Generation of the last guard that this core answered.
    answered: AtomicU64,
}

/// Guard of one disk, shared by all cores.
#[derive(Debug)]
pub struct Guard {
    /// Odd while a guard is published. Incremented at each publication and release.
    generation: AtomicU64,
    /// LBA of the guarded block; valid while the generation is odd.
    lba: AtomicU64,
    is_held: AtomicBool,
    /// By participant.
    slots: Box<[CoreSlot]>,
    /// 1 more than the highest index of a slot ever used.
    slots_used: AtomicUsize,
    /// Ranges of writes that have ended although the medium may still execute them.
    unfinished: Mutex<Vec<BlockRange>>,
    has_unfinished: AtomicBool,
}

/// A published guard: its generation and block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guarded {
    generation: u64,
    lba: u64,
}

impl Guarded {
    /// Returns true if the guarded block is in the range.
    pub fn is_in(self, range: BlockRange) -> bool {
        (range.lba..range.lba + u64::from(range.blocks)).contains(&self.lba)
    }
}

/// Right of the holder of the guard. Must be passed to [`GuardParticipant::release`].
#[derive(Debug)]
pub struct Hold {
    generation: u64,
    /// The slots before this index are clear.
    slot_next: usize,
}

impl Guard {
    /// Creates a guard for at most `slots` cores, usually [`CORES_MAX`].
    pub fn new(slots: usize) -> Arc<Guard> {
        Arc::new(Guard {
            generation: AtomicU64::new(0),
            lba: AtomicU64::new(0),
            is_held: AtomicBool::new(false),
            slots: (0..slots).map(|_| CoreSlot::default()).collect(),
            slots_used: AtomicUsize::new(0),
            unfinished: Mutex::default(),
            has_unfinished: AtomicBool::new(false),
        })
    }

    /// Adds a core; `None` when all slots are taken.
    pub fn join(self: &Arc<Self>) -> Option<GuardParticipant> {
        let take = |slot: &CoreSlot| !slot.is_taken.swap(true, Ordering::AcqRel);
        let slot = self.slots.iter().position(take)?;
        // Precedes this core's first write. A holder that does not see the slot has published its guard
        // earlier, so the write sees the guard.
        self.slots_used.fetch_max(slot + 1, Ordering::SeqCst);
        Some(GuardParticipant { guard: Arc::clone(self), slot })
    }
}

/// One core's participation in a guard. Must not be dropped while a write of the core is in flight.
#[derive(Debug)]
pub struct GuardParticipant {
    guard: Arc<Guard>,
    slot: usize,
}

impl GuardParticipant {
    #[inline]
    fn slot(&self) -> &CoreSlot {
        &self.guard.slots[self.slot]
    }

    /// Counts a write to `range` that begins now. Returns false, and counts nothing, if the range contains
    /// the guarded block: the caller retries later.
    #[inline]
    pub fn enter(&self, range: BlockRange) -> bool {
        self.slot().in_flight.fetch_add(1, Ordering::SeqCst);
        if self.guarded().is_some_and(|guarded| guarded.is_in(range)) {
            self.leave();
            return false;
        }
        true
    }

    /// Counts all writes of this core as one write, until a call of [`GuardParticipant::leave`]. The caller
    /// must check [`GuardParticipant::guarded`] after this call and whenever [`GuardParticipant::generation`]
    /// has changed. Until it has answered a published guard, the caller begins no write to the guarded block.
    pub fn enter_all(&self) {
        self.slot().in_flight.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns a number that changes with each publication and release of a guard.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.guard.generation.load(Ordering::SeqCst)
    }

    /// Ends a write that `enter` or `enter_all` has counted.
    #[inline]
    pub fn leave(&self) {
        let before = self.slot().in_flight.fetch_sub(1, Ordering::Release);
        debug_assert!(before > 0, "a write left twice");
    }

    /// Records the range of a write that ends although the medium may still execute it. It is never removed.
    pub fn record_unfinished(&self, range: BlockRange) {
        self.guard.unfinished.lock().unwrap_or_else(PoisonError::into_inner).push(range);
        self.guard.has_unfinished.store(true, Ordering::Release);
    }

    /// Returns true if the range overlaps a write that any core has recorded by
    /// [`GuardParticipant::record_unfinished`].
    #[inline]
    pub fn may_still_write(&self, range: BlockRange) -> bool {
        self.guard.has_unfinished.load(Ordering::Acquire)
            && self.guard.unfinished.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|left| {
                left.lba < range.lba + u64::from(range.blocks)
                    && range.lba < left.lba + u64::from(left.blocks)
            })
    }

    /// Returns the published guard; `None`: no guard is published.
    #[inline]
    pub fn guarded(&self) -> Option<Guarded> {
        loop {
            let generation = self.guard.generation.load(Ordering::SeqCst);
            if generation.is_multiple_of(2) {
                return None;
            }
            let lba = self.guard.lba.load(Ordering::Acquire);
            // If the generation is unchanged, `lba` belongs to this guard.
            if self.guard.generation.load(Ordering::SeqCst) == generation {
                return Some(Guarded { generation, lba });
            }
        }
    }

    /// Returns the published guard; `None`: no guard is published, or this core has answered it.
    #[inline]
    pub fn unanswered(&self) -> Option<Guarded> {
        self.guarded().filter(|guarded| !self.has_answered(*guarded))
    }

    /// Returns true if this core has answered this guard. An answer of a former participant with the same
    /// slot counts too, as this participant's writes began after it and have seen the guard.
    #[inline]
    #[must_use]
    pub fn has_answered(&self, guarded: Guarded) -> bool {
        self.slot().answered.load(Ordering::Relaxed) == guarded.generation
    }

    /// Answers a guard. None of this core's writes in flight overlaps the guarded block.
    pub fn answer(&self, guarded: Guarded) {
        self.slot().answered.store(guarded.generation, Ordering::Release);
    }

    /// Publishes a guard on the block `lba`. `None`: the guard is held already, and the caller retries later.
    pub fn try_hold(&self, lba: u64) -> Option<Hold> {
        if self.guard.is_held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return None;
        }
        self.guard.lba.store(lba, Ordering::Release);
        let before = self.guard.generation.fetch_add(1, Ordering::SeqCst);
        debug_assert!(before.is_multiple_of(2), "a guard was published over another");
        Some(Hold { generation: before + 1, slot_next: 0 })
    }

    /// Returns true if no write to the guarded block is in flight on any core. Then none begins until the
    /// release.
    pub fn is_clear(&self, hold: &mut Hold) -> bool {
        let slots_used = self.guard.slots_used.load(Ordering::SeqCst);
        while hold.slot_next < slots_used {
            let slot = &self.guard.slots[hold.slot_next];
            let is_clear = slot.in_flight.load(Ordering::SeqCst) == 0
                || slot.answered.load(Ordering::Acquire) == hold.generation;
            if !is_clear {
                return false;
            }
            hold.slot_next += 1;
        }
        true
    }

    /// Releases the guard, after the write of the compare-and-write or without a write.
    pub fn release(&self, hold: Hold) {
        let before = self.guard.generation.fetch_add(1, Ordering::SeqCst);
        debug_assert_eq!(before, hold.generation, "another guard was released");
        self.guard.is_held.store(false, Ordering::Release);
    }
}

impl Drop for GuardParticipant {
    fn drop(&mut self) {
        self.slot().in_flight.store(0, Ordering::SeqCst);
        self.slot().is_taken.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: BlockRange = BlockRange { lba: 5, blocks: 1 };
    const AROUND: BlockRange = BlockRange { lba: 0, blocks: 8 };
    const BESIDE: BlockRange = BlockRange { lba: 6, blocks: 8 };

    #[test]
    fn the_holder_waits_for_writes_in_flight_and_new_ones_wait_for_the_holder() {
        let guard = Guard::new(4);
        let other = guard.join().expect("a line");
        let holder = guard.join().expect("a line");
        assert!(other.enter(AROUND));
        let mut hold = holder.try_hold(5).expect("the block is free");
        assert!(!holder.is_clear(&mut hold), "a write to the block is in flight");
        assert!(!other.enter(BLOCK) && !holder.enter(AROUND), "the block is guarded");
        assert!(other.enter(BESIDE), "another block is not");
        assert!(!holder.is_clear(&mut hold));
        other.leave();
        // Now `other` has only a write beside the block, and says so.
        let seen = other.unanswered().expect("a guard");
        assert!(!seen.is_in(BESIDE) && seen.is_in(AROUND));
        other.answer(seen);
        assert_eq!(other.unanswered(), None);
        assert!(holder.is_clear(&mut hold));
        assert!(other.enter(BESIDE));
        assert!(holder.is_clear(&mut hold), "clear stays clear");
        holder.release(hold);
        assert!(other.enter(BLOCK) && holder.enter(AROUND));
    }

    #[test]
    fn one_holds_at_a_time_and_an_answer_counts_for_one_guard() {
        let guard = Guard::new(4);
        let (first, second) = (guard.join().expect("a line"), guard.join().expect("a line"));
        assert!(first.enter(BESIDE));
        let mut hold = second.try_hold(5).expect("free");
        assert!(first.try_hold(9).is_none() && second.try_hold(5).is_none());
        first.answer(first.unanswered().expect("a guard"));
        assert!(second.is_clear(&mut hold));
        second.release(hold);
        assert_eq!((first.guarded(), first.unanswered()), (None, None));
        let mut hold = second.try_hold(5).expect("free again");
        assert!(!second.is_clear(&mut hold), "the answer was to the guard before");
        first.leave();
        assert!(second.is_clear(&mut hold));
        second.release(hold);
    }

    #[test]
    fn a_core_that_enters_with_all_its_writes_is_waited_for_until_it_answers_or_leaves() {
        let guard = Guard::new(4);
        let (other, holder) = (guard.join().expect("a line"), guard.join().expect("a line"));
        for leaves in [false, true] {
            other.enter_all();
            let before = other.generation();
            let mut hold = holder.try_hold(5).expect("the block is free");
            assert!(!holder.is_clear(&mut hold) && other.generation() != before);
            if leaves {
                other.leave();
            } else {
                let guarded = other.guarded().expect("a guard");
                assert!(!other.has_answered(guarded));
                other.answer(guarded);
                assert!(other.has_answered(guarded));
            }
            assert!(holder.is_clear(&mut hold));
            holder.release(hold);
            if !leaves {
                other.leave();
            }
        }
    }

    #[test]
    fn lines_are_used_again_and_run_out() {
        let guard = Guard::new(4);
        let members: Vec<GuardParticipant> = std::iter::from_fn(|| guard.join()).collect();
        assert_eq!(members.len(), 4);
        assert!(members[3].enter(BLOCK));
        drop(members);
        let participant = guard.join().expect("a line again");
        let mut hold = participant.try_hold(5).expect("free");
        assert!(participant.is_clear(&mut hold), "a participant that left has nothing in flight");
        participant.release(hold);
    }

    /// Every order in which two writers and two holders can take their steps, each step a call of the guard:
    /// while a holder is past `is_clear`, no overlapping write is between `enter` and `leave`; and some
    /// player can always proceed.
    #[test]
    fn no_order_of_steps_lets_a_write_into_a_compare_and_write() {
        let mut orders = 0;
        let mut order = vec![];
        loop {
            let choices = play(&order);
            orders += 1;
            // Odometer: the next order in depth-first sequence.
            order = choices;
            while let Some((choice, of)) = order.pop() {
                if choice + 1 < of {
                    order.push((choice + 1, of));
                    break;
                }
            }
            if order.is_empty() {
                break;
            }
        }
        assert!(orders > 1000, "{orders}");
    }

    /// Steps of which every order is played.
    const STEPS_ENUMERATED: usize = 8;

    /// A core that writes some ranges and once compares and writes.
    struct Player {
        participant: GuardParticipant,
        /// Ranges still to be written; the last one is next.
        writes: Vec<BlockRange>,
        inside: Option<BlockRange>,
        /// The hold, and whether it is clear.
        hold: Option<(Hold, bool)>,
        has_compared: bool,
    }

    impl Player {
        fn new(guard: &Arc<Guard>, writes: Vec<BlockRange>) -> Player {
            let participant = guard.join().expect("a line");
            Player { participant, writes, inside: None, hold: None, has_compared: false }
        }

        /// Answers the guard, as every poll does.
        fn answer(&mut self) {
            let guarded = self.participant.unanswered();
            if let Some(guarded) = guarded.filter(|it| !self.inside.is_some_and(|range| it.is_in(range))) {
                self.participant.answer(guarded);
            }
        }

        fn step_write(&mut self) {
            if self.inside.take().is_some() {
                return self.participant.leave();
            }
            if self.writes.last().is_some_and(|range| self.participant.enter(*range)) {
                self.inside = self.writes.pop();
            }
        }

        fn step_compare(&mut self) {
            self.hold = match self.hold.take() {
                None => self.participant.try_hold(BLOCK.lba).map(|hold| (hold, false)),
                Some((mut hold, false)) => {
                    let is_clear = self.participant.is_clear(&mut hold);
                    Some((hold, is_clear))
                }
                Some((hold, true)) => {
                    self.participant.release(hold);
                    self.has_compared = true;
                    None
                }
            };
        }

        fn is_comparing(&self) -> bool {
            self.hold.as_ref().is_some_and(|(_, is_clear)| *is_clear)
        }

        fn is_writing_the_block(&self) -> bool {
            self.inside.is_some_and(|range| range == BLOCK || range == AROUND)
        }
    }

    /// Plays one order: the choices of `prefix`, then choice 0 up to [`STEPS_ENUMERATED`], then round-robin.
    /// Returns each enumerated choice with the number of alternatives.
    fn play(prefix: &[(usize, usize)]) -> Vec<(usize, usize)> {
        let guard = Guard::new(4);
        // A write to the block, then one beside it; and on the other core a write around it.
        let mut players = [Player::new(&guard, vec![BESIDE, BLOCK]), Player::new(&guard, vec![AROUND])];
        let mut choices = Vec::new();
        for step in 0.. {
            assert!(step < 200, "no progress");
            let can = |core: usize, player: &Player| {
                let writes = (player.inside.is_some() || !player.writes.is_empty()).then_some((core, true));
                writes.into_iter().chain((!player.has_compared).then_some((core, false)))
            };
            let able: Vec<_> =
                players.iter().enumerate().flat_map(|(core, player)| can(core, player)).collect();
            if able.is_empty() {
                break;
            }
            let choice = prefix.get(step).map(|(choice, _)| *choice);
            // After the enumerated steps, round-robin.
            let choice = choice.unwrap_or(if step < STEPS_ENUMERATED { 0 } else { step % able.len() });
            if step < STEPS_ENUMERATED {
                choices.push((choice, able.len()));
            }
            let (core, is_write) = able[choice];
            players[core].answer();
            if is_write {
                players[core].step_write()
            } else {
                players[core].step_compare()
            }
            let is_comparing = players.iter().any(Player::is_comparing);
            let is_writing = players.iter().any(Player::is_writing_the_block);
            assert!(!(is_comparing && is_writing), "order {prefix:?}, step {step}");
        }
        choices
    }

    #[test]
    fn threads_that_write_and_compare_never_meet_at_the_block() {
        let guard = Guard::new(4);
        let (inside, value) = (AtomicU32::new(0), AtomicU64::new(0));
        let swaps_each = 3000u64;
        std::thread::scope(|scope| {
            for thread in 0..3u64 {
                let (guard, inside, value) = (&guard, &inside, &value);
                scope.spawn(move || {
                    let participant = guard.join().expect("a line");
                    let (mut pairs, mut hold) = (0, None);
                    while pairs < swaps_each || hold.is_some() {
                        if let Some(guarded) = participant.unanswered() {
                            participant.answer(guarded);
                        }
                        if participant.enter(if pairs % 3 == thread { BLOCK } else { BESIDE }) {
                            if pairs % 3 == thread {
                                inside.fetch_add(1, Ordering::Relaxed);
                                std::hint::spin_loop();
                                inside.fetch_sub(1, Ordering::Relaxed);
                            }
                            participant.leave();
                        }
                        let Some(mut held) = hold.take().or_else(|| participant.try_hold(5)) else {
                            std::thread::yield_now();
                            continue;
                        };
                        if !participant.is_clear(&mut held) {
                            hold = Some(held);
                            std::thread::yield_now();
                            continue;
                        }
                        let before = value.load(Ordering::Relaxed);
                        assert_eq!(inside.load(Ordering::Relaxed), 0, "a write is inside");
                        value.store(before + 1, Ordering::Relaxed);
                        participant.release(held);
                        pairs += 1;
                    }
                });
            }
        });
        assert_eq!(value.load(Ordering::Relaxed), 3 * swaps_each);
    }
}
