//! The shared receive queues of one core and device: who has reserved how much of which, and what of it may
//! be lost.
//!
//! A queue pair takes receives of the shared queue as messages arrive. What it has taken when it is destroyed
//! and has not completed comes never back: neither to us (no completion) nor, on some devices, into the
//! queue's room. So the end of a queue pair says how many that may be (`ending`), and:
//!
//! ```text
//!   reserve:  slots >= reserved + at risk        connections always find as many as they reserved
//!   release:  reserved - r, at risk + lost, lost <= r                       the same holds without growth
//!   at risk >= 256: the queue is worn ─> new connections get a new one ─> its last connection ends: it goes,
//!                                                                         and all its memory comes back
//! ```
//! So however often connections come and go, no more than a chunk's slots are lost at a time.

use std::sync::Arc;

use spindle_rdma_verbs::{SharedReceiveQueue, VerbsError};

use super::keys::SharedDevice;
use super::receives::{CHUNK_SLOTS, Queue, Receives};
use super::{RECEIVE, SERIAL_SHIFT};

/// Slots of a queue that may be lost before it is replaced.
const WORN_AT: u32 = CHUNK_SLOTS;
/// Serial numbers fit into ids between the slot and the marks.
const SERIALS: u32 = 1 << 28;

/// A queue with its slots; in tests another than the device's.
pub(super) trait Slots {
    /// How many there are.
    fn slots(&self) -> u32;

    /// Make some more. False: there is no room, or no memory.
    fn grow(&mut self) -> bool;
}

/// What a connection has reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    place: usize,
    pub(super) slots: u32,
}

/// A queue, and what its connections have of it.
struct QueueEntry<Q> {
    queue: Q,
    serial: u32,
    reserved: u32,
    /// Slots that may be lost.
    at_risk: u32,
}

impl<Q> QueueEntry<Q> {
    fn is_worn(&self) -> bool {
        self.at_risk >= WORN_AT
    }
}

/// See the module.
pub(super) struct Queues<Q> {
    places: Vec<Option<QueueEntry<Q>>>,
    /// No two queues have the same for a long time, so that a completion is never another queue's.
    next_serial: u32,
}

impl<Q: Slots> Queues<Q> {
    pub(super) fn new() -> Queues<Q> {
        Queues { places: Vec::new(), next_serial: 0 }
    }

    /// So many slots for a connection, or none. `make` makes a queue with this serial number; it is asked
    /// where there is none, or only worn ones.
    pub(super) fn reserve(&mut self, slots: u32, make: impl FnOnce(u32) -> Option<Q>) -> Option<Share> {
        let fresh = self.places.iter().position(|it| it.as_ref().is_some_and(|it| !it.is_worn()));
        let place = match fresh {
            Some(place) => place,
            None => self.put(make)?,
        };
        let it = self.places.get_mut(place)?.as_mut()?;
        let wanted = it.reserved + slots + it.at_risk;
        while it.queue.slots() < wanted {
            if !it.queue.grow() {
                return None;
            }
        }
        it.reserved += slots;
        Some(Share { place, slots })
    }

    fn put(&mut self, make: impl FnOnce(u32) -> Option<Q>) -> Option<usize> {
        let serial = self.next_serial;
        let queue = make(serial)?;
        self.next_serial = (serial + 1) % SERIALS;
        let it = QueueEntry { queue, serial, reserved: 0, at_risk: 0 };
        Some(put_first(&mut self.places, it))
    }

    /// A connection's queue pair is destroyed, and took up to `lost` slots along.
    pub(super) fn release(&mut self, share: Share, lost: u32) {
        let Some(place) = self.places.get_mut(share.place) else { return };
        let Some(it) = place else { return };
        it.reserved -= share.slots;
        it.at_risk += lost.min(share.slots);
        if it.is_worn() && it.reserved == 0 {
            *place = None;
        }
    }

    #[inline]
    pub(super) fn of(&self, share: Share) -> Option<&Q> {
        self.places.get(share.place)?.as_ref().map(|it| &it.queue)
    }

    #[inline]
    pub(super) fn of_mut(&mut self, share: Share) -> Option<&mut Q> {
        self.places.get_mut(share.place)?.as_mut().map(|it| &mut it.queue)
    }

    /// The queue that a receive with this id was posted to, if it is still there.
    pub(super) fn posted_to(&mut self, id: u64) -> Option<&mut Q> {
        let serial = u32::try_from(id >> SERIAL_SHIFT & u64::from(SERIALS - 1)).ok()?;
        self.iter_mut().find(|it| it.serial == serial).map(|it| &mut it.queue)
    }

    pub(super) fn all(&mut self) -> impl Iterator<Item = &mut Q> {
        self.iter_mut().map(|it| &mut it.queue)
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = &mut QueueEntry<Q>> {
        self.places.iter_mut().flatten()
    }
}

/// Put something in the first place that is empty, or in a new one; where it is.
pub(super) fn put_first<T>(places: &mut Vec<Option<T>>, it: T) -> usize {
    let place = places.iter().position(Option::is_none).unwrap_or(places.len());
    if place == places.len() {
        places.push(None);
    }
    places[place] = Some(it);
    place
}

/// The device's. Fields are dropped in this order: the queue goes before the memory that it knows.
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
        let id_bits = RECEIVE | u64::from(serial) << SERIAL_SHIFT;
        let receives = Receives::new(in_capsule_bytes, id_bits);
        Ok(SharedReceives { queue, receives, device: Arc::clone(device) })
    }
}

impl Slots for SharedReceives {
    fn slots(&self) -> u32 {
        self.receives.slots()
    }

    fn grow(&mut self) -> bool {
        let SharedReceives { queue, receives, device } = self;
        if receives.slots() + CHUNK_SLOTS > queue.entries() {
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
mod tests {
    use super::*;

    /// A device's queue that loses what it is told to.
    struct Fake {
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

    fn fake(entries: u32) -> Option<Fake> {
        Some(Fake { slots: 0, entries, lost: 0 })
    }

    /// What is left of a queue for its connections, less what they have reserved.
    fn surplus(queues: &mut Queues<Fake>) -> i64 {
        let of = |it: &mut QueueEntry<Fake>| {
            i64::from(it.queue.slots) - i64::from(it.queue.lost) - i64::from(it.reserved)
        };
        queues.iter_mut().map(of).min().unwrap_or(0)
    }

    #[test]
    fn connections_that_take_receives_along_leave_the_others_what_they_have_reserved() {
        let mut queues = Queues::new();
        let stays = queues.reserve(128, |_| fake(1024)).expect("room");
        let mut made = 1;
        for turn in 0..10_000 {
            let share = queues.reserve(64, |_| {
                made += 1;
                fake(1024)
            });
            let share = share.expect("room, however many there were before");
            // Each takes one along.
            queues.of_mut(share).expect("there").lost += 1;
            queues.release(share, 1);
            assert!(surplus(&mut queues) >= 0, "after {turn} connections");
        }
        assert_eq!(made, 1 + 10_000 / WORN_AT, "a queue is used until it is worn");
        let left = queues.places.iter().flatten().count();
        assert_eq!(left, 2, "the one with a connection, and the newest");
        assert!(queues.of(stays).is_some());
        queues.release(stays, 0);
        assert_eq!(queues.places.iter().flatten().count(), 1, "the worn one went with its last connection");
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
            let share = queues.reserve(1024, make).expect("room");
            queues.release(share, 0);
        }
        assert_eq!(made, 1);
        let share = queues.reserve(1000, |_| fake(1024)).expect("room");
        assert_eq!(queues.reserve(25, |_| fake(1024)), None, "it has no room for that: a queue of its own");
        queues.release(share, 0);
    }

    #[test]
    fn a_receive_is_never_taken_for_one_of_a_queue_that_came_in_its_place() {
        let mut queues = Queues::new();
        let serial_of = |queues: &mut Queues<Fake>| queues.iter_mut().map(|it| it.serial).collect::<Vec<_>>();
        let first = queues.reserve(256, |_| fake(1024)).expect("room");
        let id = |serial: u64| RECEIVE | serial << SERIAL_SHIFT | 5;
        assert!(queues.posted_to(id(0)).is_some());
        queues.release(first, u32::MAX);
        assert!(serial_of(&mut queues).is_empty(), "worn at once: all that was reserved may be lost");
        let second = queues.reserve(1, |_| fake(1024)).expect("room");
        assert_eq!(second.place, first.place);
        assert!(queues.posted_to(id(0)).is_none() && queues.posted_to(id(1)).is_some());
    }
}
