//! The shared receive queues of one core and device: reservations of connections, and slots that may be lost.
//!
//! A queue pair consumes receives of the shared queue as messages arrive. If the queue pair is destroyed
//! before such a receive has completed, the receive is lost: it has no completion, and on some devices its
//! queue entry is not freed either. So the end of a queue pair reports the maximum count of lost receives
//! (`ending`), and:
//!
//! ```text
//!   reserve:  slots >= reserved + at risk        connections always find as many slots as reserved
//!   release:  reserved - r, at risk + lost, lost <= r                       the same holds without growth
//!   at risk >= 256: the queue is worn ─> new connections use a new queue ─> when its last connection ends,
//!                                                              the worn queue and its memory are freed
//! ```
//! So the newest queue has lost fewer slots than one chunk, regardless of the count of ended connections.
//!
//! Each queue belongs to a completion queue, to which its receives complete (`completions`).

use std::sync::Arc;

use spindle_rdma::{SharedReceiveQueue, VerbsError};

use super::keys::SharedDevice;
pub(super) use super::receives::CHUNK_SLOTS;
use super::receives::{Queue, Receives};
use super::{RECEIVE_BIT, SERIAL_SHIFT};

/// Count of possibly lost slots at which a queue is replaced.
const WORN_AT: u32 = CHUNK_SLOTS;
/// Count of serial numbers: 28 bits of the work request id, between the slot and the flags.
const SERIALS: u32 = 1 << 28;

/// A receive queue that can grow; tests implement it without a device.
pub(super) trait Slots {
    /// Returns the count of slots, including lost ones.
    fn slots(&self) -> u32;

    /// Adds a chunk of [`CHUNK_SLOTS`]. Returns false if the queue is full, there is no memory or the device
    /// refuses.
    fn grow(&mut self) -> bool;
}

/// A connection's reservation in one shared receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    index: usize,
    pub(super) slots: u32,
}

/// A queue and the slots reserved in it.
struct QueueEntry<Q> {
    queue: Q,
    /// Index of the completion queue.
    completions: usize,
    serial: u32,
    reserved: u32,
    /// Count of slots that may be lost, see the module documentation.
    at_risk: u32,
}

impl<Q> QueueEntry<Q> {
    fn is_worn(&self) -> bool {
        self.at_risk >= WORN_AT
    }
}

impl Share {
    #[cfg(test)]
    pub(super) fn is_same_queue(self, other: Share) -> bool {
        self.index == other.index
    }
}

/// All shared receive queues of one core and device.
pub(super) struct Queues<Q> {
    queues: Vec<Option<QueueEntry<Q>>>,
    /// Distinguishes receives of an earlier queue with the same index; wraps after 2^28 queues.
    next_serial: u32,
}

impl<Q: Slots> Queues<Q> {
    pub(super) fn new() -> Queues<Q> {
        Queues { queues: Vec::new(), next_serial: 0 }
    }

    /// Returns the index of the queue of a completion queue that is not worn.
    fn fresh(&self, completions: usize) -> Option<usize> {
        let is_it = |it: &QueueEntry<Q>| it.completions == completions && !it.is_worn();
        self.queues.iter().position(|it| it.as_ref().is_some_and(is_it))
    }

    /// Returns how many slots [`Queues::reserve`] would add.
    pub(super) fn missing(&self, completions: usize, slots: u32) -> u32 {
        let fresh = self.fresh(completions).and_then(|index| self.queues[index].as_ref());
        let (has, used) = fresh.map_or((0, 0), |it| (it.queue.slots(), it.reserved + it.at_risk));
        slots.saturating_add(used).saturating_sub(has).next_multiple_of(CHUNK_SLOTS)
    }

    /// Returns the slots of all queues of a completion queue: the most receives that can complete at once.
    pub(super) fn slots_of(&self, completions: usize) -> u32 {
        let all = self.queues.iter().flatten().filter(|it| it.completions == completions);
        all.map(|it| it.queue.slots()).sum()
    }

    /// Reserves `slots` slots in the queue of a completion queue that is not worn, which grows as needed. If
    /// there is no such queue, `make` creates one with the given serial number. `None` if the queue cannot
    /// be created or cannot grow enough.
    pub(super) fn reserve(
        &mut self,
        completions: usize,
        slots: u32,
        make: impl FnOnce(u32) -> Option<Q>,
    ) -> Option<Share> {
        let index = match self.fresh(completions) {
            Some(index) => index,
            None => self.add_queue(completions, make)?,
        };
        let it = self.queues.get_mut(index)?.as_mut()?;
        let wanted = it.reserved + slots + it.at_risk;
        while it.queue.slots() < wanted {
            if !it.queue.grow() {
                return None;
            }
        }
        it.reserved += slots;
        Some(Share { index, slots })
    }

    fn add_queue(&mut self, completions: usize, make: impl FnOnce(u32) -> Option<Q>) -> Option<usize> {
        let serial = self.next_serial;
        let queue = make(serial)?;
        self.next_serial = (serial + 1) % SERIALS;
        let it = QueueEntry { queue, completions, serial, reserved: 0, at_risk: 0 };
        Some(insert_in_free(&mut self.queues, it))
    }

    /// Destroys the queues of a completion queue that is destroyed; they have no reservation.
    pub(super) fn remove_of(&mut self, completions: usize) {
        for entry in &mut self.queues {
            entry.take_if(|it| it.completions == completions);
        }
    }

    /// Releases a reservation, and destroys a worn queue with its last reservation. `lost`: receives that the
    /// destroyed queue pair may have consumed without completing.
    pub(super) fn release(&mut self, share: Share, lost: u32) {
        let Some(entry) = self.queues.get_mut(share.index) else { return };
        let Some(it) = entry else { return };
        it.reserved -= share.slots;
        it.at_risk += lost.min(share.slots);
        if it.is_worn() && it.reserved == 0 {
            *entry = None;
        }
    }

    #[inline]
    pub(super) fn get(&self, share: Share) -> Option<&Q> {
        self.queues.get(share.index)?.as_ref().map(|it| &it.queue)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, share: Share) -> Option<&mut Q> {
        self.queues.get_mut(share.index)?.as_mut().map(|it| &mut it.queue)
    }

    /// Returns the queue to which the receive `id` was posted; `None` if that queue is destroyed.
    pub(super) fn posted_to(&mut self, id: u64) -> Option<&mut Q> {
        let serial = u32::try_from(id >> SERIAL_SHIFT & u64::from(SERIALS - 1)).ok()?;
        self.iter_mut().find(|it| it.serial == serial).map(|it| &mut it.queue)
    }

    pub(super) fn all(&mut self) -> impl Iterator<Item = &mut Q> {
        self.iter_mut().map(|it| &mut it.queue)
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = &mut QueueEntry<Q>> {
        self.queues.iter_mut().flatten()
    }
}

/// Stores `it` in the first empty entry, or in a new one, and returns the index.
pub(super) fn insert_in_free<T>(entries: &mut Vec<Option<T>>, it: T) -> usize {
    let index = entries.iter().position(Option::is_none).unwrap_or(entries.len());
    if index == entries.len() {
        entries.push(None);
    }
    entries[index] = Some(it);
    index
}

/// A shared receive queue of the device. Fields are dropped in the order of their declaration: the queue
/// before the buffers posted to it.
pub(super) struct SharedReceives {
    pub(super) queue: SharedReceiveQueue,
    pub(super) receives: Receives,
    device: Arc<SharedDevice>,
}

impl SharedReceives {
    pub(super) fn new(
        device: &Arc<SharedDevice>,
        entries: u32,
        in_capsule_bytes: u32,
        serial: u32,
    ) -> Result<SharedReceives, VerbsError> {
        let queue = SharedReceiveQueue::new(device.device(), entries, 1)?;
        let id_bits = RECEIVE_BIT | u64::from(serial) << SERIAL_SHIFT;
        let receives = Receives::new(entries, in_capsule_bytes, id_bits);
        Ok(SharedReceives { queue, receives, device: Arc::clone(device) })
    }
}

impl Slots for SharedReceives {
    fn slots(&self) -> u32 {
        self.receives.slots()
    }

    fn grow(&mut self) -> bool {
        let SharedReceives { queue, receives, device } = self;
        if receives.slots() + CHUNK_SLOTS > receives.slots_max() {
            return false;
        }
        let grown = receives.grow(CHUNK_SLOTS, device, &mut Queue::Shared(queue));
        if let Err(error) = &grown {
            tracing::warn!(device = device.device().name(), %error, "no more shared receives");
        }
        grown.is_ok()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A queue of at most `entries` slots, in which tests mark slots as lost.
    pub(in crate::shell) struct Fake {
        slots: u32,
        entries: u32,
        lost: u32,
    }

    impl Slots for Fake {
        fn slots(&self) -> u32 {
            self.slots
        }
        fn grow(&mut self) -> bool {
            let has_room = self.slots + CHUNK_SLOTS <= self.entries;
            self.slots += if has_room { CHUNK_SLOTS } else { 0 };
            has_room
        }
    }

    pub(in crate::shell) fn fake(entries: u32) -> Option<Fake> {
        Some(Fake { slots: 0, entries, lost: 0 })
    }

    /// Slots neither lost nor reserved, minimum of all queues; negative is a violation.
    fn surplus(queues: &mut Queues<Fake>) -> i64 {
        let of = |it: &mut QueueEntry<Fake>| {
            i64::from(it.queue.slots) - i64::from(it.queue.lost) - i64::from(it.reserved)
        };
        queues.iter_mut().map(of).min().unwrap_or(0)
    }

    #[test]
    fn connections_that_take_receives_along_leave_the_others_what_they_have_reserved() {
        let mut queues = Queues::new();
        let stays = queues.reserve(0, 128, |_| fake(1024)).expect("room");
        let mut made = 1;
        for turn in 0..10_000 {
            let share = queues.reserve(0, 64, |_| {
                made += 1;
                fake(1024)
            });
            let share = share.expect("room, however many there were before");
            // Each queue pair loses one receive.
            queues.get_mut(share).expect("there").lost += 1;
            queues.release(share, 1);
            assert!(surplus(&mut queues) >= 0, "after {turn} connections");
        }
        assert_eq!(made, 1 + 10_000 / WORN_AT, "a queue is used until it is worn");
        let left = queues.queues.iter().flatten().count();
        assert_eq!(left, 2, "the one with a connection, and the newest");
        assert!(queues.get(stays).is_some());
        queues.release(stays, 0);
        assert_eq!(queues.queues.iter().flatten().count(), 1, "the worn one went with its last connection");
    }

    #[test]
    fn connections_that_take_nothing_along_share_one_queue_for_ever() {
        let mut queues = Queues::new();
        let mut made = 0;
        for _ in 0..10_000 {
            let make = |_| {
                made += 1;
                fake(1024)
            };
            let share = queues.reserve(0, 1024, make).expect("room");
            queues.release(share, 0);
        }
        assert_eq!(made, 1);
        let share = queues.reserve(0, 1000, |_| fake(1024)).expect("room");
        assert_eq!(
            queues.reserve(0, 25, |_| fake(1024)),
            None,
            "it has no room for that: a queue of its own"
        );
        queues.release(share, 0);
    }

    #[test]
    fn a_receive_is_never_taken_for_one_of_a_queue_that_came_in_its_place() {
        let mut queues = Queues::new();
        let serial_of = |queues: &mut Queues<Fake>| queues.iter_mut().map(|it| it.serial).collect::<Vec<_>>();
        let first = queues.reserve(0, 256, |_| fake(1024)).expect("room");
        let id = |serial: u64| RECEIVE_BIT | serial << SERIAL_SHIFT | 5;
        assert!(queues.posted_to(id(0)).is_some());
        queues.release(first, u32::MAX);
        assert!(serial_of(&mut queues).is_empty(), "worn at once: all that was reserved may be lost");
        let second = queues.reserve(0, 1, |_| fake(1024)).expect("room");
        assert_eq!(second.index, first.index);
        assert!(queues.posted_to(id(0)).is_none() && queues.posted_to(id(1)).is_some());
    }
}
