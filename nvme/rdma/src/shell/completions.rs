//! The completion queues of one core and device, and what may be in each of them at once.
//!
//! A completion queue that overruns fails, and all its connections with it. A queue pair bounds its sends,
//! but not its receives: a host may send as many messages as the shared receive queue has receives, whatever
//! its queue pair has reserved. So each shared receive queue belongs to one completion queue, that of its
//! queue pairs, which has room for all its receives:
//!
//! ```text
//!   entries >= send queues and own receive queues of its queue pairs + slots of its shared receive queues
//! ```

use super::shared::{CHUNK_SLOTS, Queues, Share, Slots, insert_in_free};

/// Entries of the first completion queue: ten queue pairs of 128 commands. A device writes its ring from end
/// to end, so a large one occupies more of the cache (a quarter of a MiB, not two).
const COMPLETIONS_FIRST: u32 = 4096;
/// Entries of further completion queues, which the core creates as connections need them. Each is polled in
/// every turn, so these are large. (`ibv_resize_cq` would keep to one queue, but drivers lack it or hardly
/// ever run it.)
const COMPLETIONS_MAX: u32 = 32_000;

/// A completion queue; tests implement it without a device.
pub(super) trait Entries {
    /// Returns the count of completions that fit.
    fn entries(&self) -> u32;

    /// Returns true if the queue has failed.
    fn is_broken(&self) -> bool;
}

/// A completion queue and the count of entries reserved in it, without those for shared receives.
pub(super) struct Completions<C> {
    pub(super) queue: C,
    reserved: u32,
    /// The queue is armed, and its event is not read from the channel yet.
    pub(super) is_armed: bool,
}

/// What a queue pair needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Need {
    /// Receives.
    pub(super) slots: u32,
    /// Work requests of the send queue that may complete.
    pub(super) sends: u32,
    /// Maximum entries of a completion queue of the device.
    pub(super) entries_max: u32,
    /// The device has shared receive queues.
    pub(super) may_share: bool,
}

/// A connection's reservations in a completion queue and a shared receive queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reservation {
    /// Index of the completion queue in [`CompletionQueues`].
    pub(super) completions: usize,
    entries: u32,
    /// Slots of a shared receive queue; `None`: the queue pair has its own receive queue.
    pub(super) share: Option<Share>,
}

/// All completion queues of one core and device.
pub(super) struct CompletionQueues<C> {
    /// `None`: the queue failed and its last connection ended. Indices stay valid.
    queues: Vec<Option<Completions<C>>>,
}

impl<C: Entries> CompletionQueues<C> {
    pub(super) fn new() -> CompletionQueues<C> {
        CompletionQueues { queues: Vec::new() }
    }

    /// Reserves what a queue pair needs, so that no queue overruns whatever the hosts send. `make` creates a
    /// completion queue of as many entries; `make_shared` a shared receive queue with this serial number.
    /// Without a share in the result the queue pair needs its own receive queue.
    pub(super) fn reserve<Q: Slots>(
        &mut self,
        receives: &mut Queues<Q>,
        need: Need,
        make: impl FnOnce(u32) -> Result<C, String>,
        mut make_shared: impl FnMut(u32) -> Option<Q>,
    ) -> Result<Reservation, String> {
        let known = 0..self.queues.len();
        for at in known.clone() {
            if let Some(reservation) = self.reserve_shared(receives, at, need, &mut make_shared) {
                return Ok(reservation);
            }
        }
        if let Some(reservation) = known.clone().find_map(|at| self.reserve_own(receives, at, need)) {
            return Ok(reservation);
        }
        let least = need.slots.saturating_add(need.sends);
        if least > need.entries_max {
            return Err(format!(
                "its queue needs {least} completion queue entries, and the device has {} at most",
                need.entries_max
            ));
        }
        let is_first = self.queues.iter().flatten().next().is_none();
        let wanted = need.slots.next_multiple_of(CHUNK_SLOTS).saturating_add(need.sends);
        let wanted = wanted.max(if is_first { COMPLETIONS_FIRST } else { COMPLETIONS_MAX });
        let queue = make(wanted.min(need.entries_max))?;
        let at = insert_in_free(&mut self.queues, Completions { queue, reserved: 0, is_armed: false });
        self.reserve_shared(receives, at, need, &mut make_shared)
            .or_else(|| self.reserve_own(receives, at, need))
            .ok_or_else(|| "the completion queue has failed".to_owned())
    }

    /// Returns the free entries of the queue `at`; 0 if it has failed.
    fn free<Q: Slots>(&self, receives: &Queues<Q>, at: usize) -> u32 {
        let it = self.get(at).filter(|it| !it.queue.is_broken());
        let free = it.map_or(0, |it| it.queue.entries().saturating_sub(it.reserved));
        free.saturating_sub(receives.slots_of(at))
    }

    fn reserve_shared<Q: Slots>(
        &mut self,
        receives: &mut Queues<Q>,
        at: usize,
        need: Need,
        make_shared: impl FnOnce(u32) -> Option<Q>,
    ) -> Option<Reservation> {
        let wanted = need.sends.saturating_add(receives.missing(at, need.slots));
        if !need.may_share || wanted > self.free(receives, at) {
            return None;
        }
        let share = receives.reserve(at, need.slots, make_shared)?;
        self.add(at, need.sends, Some(share))
    }

    fn reserve_own<Q: Slots>(&mut self, receives: &Queues<Q>, at: usize, need: Need) -> Option<Reservation> {
        let entries = need.sends.saturating_add(need.slots);
        if entries > self.free(receives, at) {
            return None;
        }
        self.add(at, entries, None)
    }

    fn add(&mut self, at: usize, entries: u32, share: Option<Share>) -> Option<Reservation> {
        self.get_mut(at)?.reserved += entries;
        Some(Reservation { completions: at, entries, share })
    }

    /// Releases a connection's reservations. `lost`: shared receives that its queue pair may have consumed
    /// without completing. A failed queue is destroyed with its last reservation.
    pub(super) fn release<Q: Slots>(
        &mut self,
        receives: &mut Queues<Q>,
        reservation: Reservation,
        lost: u32,
    ) {
        if let Some(share) = reservation.share {
            receives.release(share, lost);
        }
        let Some(it) = self.get_mut(reservation.completions) else { return };
        it.reserved -= reservation.entries;
        self.remove_failed(receives, reservation.completions);
    }

    /// Destroys the queue `at`, with its shared receive queues, if it has failed and has no reservation.
    pub(super) fn remove_failed<Q: Slots>(&mut self, receives: &mut Queues<Q>, at: usize) {
        if self.get(at).is_some_and(|it| it.reserved == 0 && it.queue.is_broken()) {
            self.queues[at] = None;
            receives.remove_of(at);
        }
    }

    pub(super) fn get(&self, at: usize) -> Option<&Completions<C>> {
        self.queues.get(at)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Completions<C>> {
        self.queues.get_mut(at)?.as_mut()
    }

    pub(super) fn position(&self, is_it: impl Fn(&C) -> bool) -> Option<usize> {
        self.queues.iter().position(|it| it.as_ref().is_some_and(|it| is_it(&it.queue)))
    }

    #[inline]
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Completions<C>> {
        self.queues.iter_mut().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::super::shared::tests::{Fake, fake};
    use super::*;

    struct FakeQueue {
        entries: u32,
        is_broken: bool,
    }

    impl Entries for FakeQueue {
        fn entries(&self) -> u32 {
            self.entries
        }

        fn is_broken(&self) -> bool {
            self.is_broken
        }
    }

    /// A device with queue pairs, and what it may write to its completion queues.
    struct FakeDevice {
        completions: CompletionQueues<FakeQueue>,
        receives: Queues<Fake>,
        entries_max: u32,
        srq_entries: u32,
        links: Vec<(Need, Reservation)>,
    }

    impl FakeDevice {
        fn new(entries_max: u32, srq_entries: u32) -> FakeDevice {
            let (completions, receives) = (CompletionQueues::new(), Queues::new());
            FakeDevice { completions, receives, entries_max, srq_entries, links: Vec::new() }
        }

        fn connect(&mut self, slots: u32) -> Result<Reservation, String> {
            let may_share = self.srq_entries > 0;
            let need = Need { slots, sends: 2 * slots + 1, entries_max: self.entries_max, may_share };
            let entries = self.srq_entries;
            let make = |entries| {
                assert!(entries <= self.entries_max);
                Ok(FakeQueue { entries, is_broken: false })
            };
            let make_shared = |_| fake(entries);
            let made = self.completions.reserve(&mut self.receives, need, make, make_shared);
            self.links.extend(made.iter().map(|reservation| (need, *reservation)));
            made
        }

        fn disconnect(&mut self, index: usize, lost: u32) {
            let (_, reservation) = self.links.swap_remove(index);
            self.completions.release(&mut self.receives, reservation, lost);
        }

        /// The most completions that come to the queue of `of` before the core polls it: its host takes all
        /// receives of the shared queue, all hosts of the queue all of theirs, and all sends complete.
        fn burst_of(&self, of: Reservation) -> u32 {
            let on_it = self.links.iter().filter(|(_, it)| it.completions == of.completions);
            let (mut own, mut shared) = (0, Vec::<(Share, u32)>::new());
            for (need, it) in on_it {
                own += need.sends;
                match it.share {
                    None => own += need.slots,
                    Some(share) if shared.iter().any(|(known, _)| known.is_same_queue(share)) => {}
                    Some(share) => shared.push((share, self.receives.get(share).expect("there").slots())),
                }
            }
            own + shared.iter().map(|(_, slots)| slots).sum::<u32>()
        }

        fn check(&self) {
            for (_, reservation) in &self.links {
                let entries = self.completions.get(reservation.completions).expect("there").queue.entries;
                let burst = self.burst_of(*reservation);
                assert!(burst <= entries, "{burst} completions for {entries} entries: {reservation:?}");
            }
        }
    }

    #[test]
    fn one_host_that_takes_all_shared_receives_overruns_no_completion_queue() {
        let mut device = FakeDevice::new(1 << 20, 8192);
        let shares = (0..100).filter(|_| device.connect(128).expect("room").share.is_some()).count();
        device.check();
        assert!(shares >= 64, "{shares} queue pairs share receives");
        let places: Vec<_> = device.links.iter().map(|(_, it)| it.completions).collect();
        assert_eq!(places.iter().filter(|at| **at == 0).count(), 10, "of 128 commands");
        assert_eq!(places.iter().max(), Some(&2), "then 83 a queue");
        // Those that come later find the room of those that have gone.
        for _ in 0..50 {
            device.disconnect(0, 0);
            device.connect(128).expect("room");
        }
        device.check();
        assert!(device.links.iter().all(|(_, it)| it.completions <= 2));
    }

    #[test]
    fn no_queue_overruns_whatever_comes_and_goes_with_what_it_takes_along() {
        for (entries_max, srq_entries) in [(1 << 20, 8192), (4095, 8192), (1000, 300), (700, 0)] {
            let mut device = FakeDevice::new(entries_max, srq_entries);
            let mut state = 0x9e37_79b9_u32;
            let mut random = |below: u32| {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                state % below
            };
            for _ in 0..3000 {
                let is_over = device.links.len() > 200 || random(5) < 2;
                if is_over && !device.links.is_empty() {
                    let index = random(u32::try_from(device.links.len()).expect("few")) as usize;
                    device.disconnect(index, random(4));
                } else {
                    let slots = 1 + random(200);
                    device.connect(slots).expect("it fits a queue");
                }
                device.check();
            }
        }
    }

    #[test]
    fn a_queue_pair_that_the_device_has_no_queue_for_is_refused_with_the_numbers() {
        let mut device = FakeDevice::new(1000, 8192);
        let error = device.connect(512).expect_err("too many");
        assert!(error.contains("1537 completion queue entries") && error.contains("1000 at most"), "{error}");
        device.connect(100).expect("room");
        assert_eq!(device.completions.get(0).expect("there").queue.entries, 1000);
        device.check();
    }

    #[test]
    fn a_failed_queue_takes_its_shared_receives_along_and_its_place_is_used_again() {
        let mut device = FakeDevice::new(1 << 20, 8192);
        let first = device.connect(128).expect("room");
        device.completions.get_mut(0).expect("there").queue.is_broken = true;
        let other = device.connect(128).expect("another queue");
        assert_eq!((first.completions, other.completions), (0, 1));
        device.disconnect(0, 1);
        assert!(device.completions.get(0).is_none());
        assert_eq!((device.receives.slots_of(0), device.receives.slots_of(1)), (0, 256));
    }
}
