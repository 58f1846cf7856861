//! One core's share of one device: completion queues, the shared receive queue, keys.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use spindle_rdma_verbs::{CompletionChannel, CompletionQueue, POLL_BATCH, VerbsError, WorkCompletion};
use spindle_reactor::clock::Nanos;
use spindle_reactor::slab::Slot;

use super::OWN;
use super::ending::Tells;
use super::keys::{KeyTable, SharedDevice};
use super::lost::{DiskArea, Opening};
use super::receives::Queue;
use super::shared::{Queues, Share, SharedReceives, put_first};

/// Most entries of a completion queue of ours; a core makes another when its connections need it.
const COMPLETIONS_MAX: u32 = 32_000;

/// Numbers of queue pairs are spread well enough by themselves.
#[derive(Debug, Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0 << 8 | u64::from(*byte);
        }
    }

    #[inline]
    fn write_u32(&mut self, number: u32) {
        // The high bits choose, and they are all used: Fibonacci hashing.
        self.0 = u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// A completion queue, and how much of it is promised.
struct Completions {
    queue: CompletionQueue,
    promised: u32,
    /// The channel will be told of the next completion, or was and this core has not looked.
    is_armed: bool,
}

/// What a connection has reserved.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reservation {
    /// Which completion queue, and how many entries of it.
    pub(super) completions: usize,
    entries: u32,
    /// Slots of a shared receive queue; `None`: the queue pair has its own.
    pub(super) share: Option<Share>,
}

/// See the module.
pub(super) struct DeviceCore {
    pub(super) shared: Arc<SharedDevice>,
    pub(super) channel: CompletionChannel,
    /// A place is empty when its queue has failed and its connections are gone.
    completions: Vec<Option<Completions>>,
    pub(super) receives: Queues<SharedReceives>,
    /// Of the shared receive queues; `None`: it has none, or refused one.
    receives_max: Option<u32>,
    in_capsule_bytes: u32,
    pub(super) tells: Tells,
    pub(super) keys: KeyTable,
    /// Connections by the number of their queue pair.
    pub(super) numbers: HashMap<u32, Slot, BuildHasherDefault<NumberHasher>>,
    vector: u32,
    /// Found by a try to sleep, and not dispatched yet.
    found: Vec<WorkCompletion>,
    /// It is gone: nothing more is made on it.
    pub(super) is_lost: bool,
    /// The same device has been opened anew.
    pub(super) is_replaced: bool,
    /// Somebody waits for its descriptors.
    pub(super) is_watched: bool,
}

impl DeviceCore {
    /// With the core's pools registered.
    pub(super) fn new(shared: &Arc<SharedDevice>, opening: &Opening) -> Result<DeviceCore, VerbsError> {
        let device = shared.device();
        let limits = device.limits();
        let mut keys = KeyTable::default();
        for area in &opening.areas {
            keys.add(shared.register(area)?, false);
        }
        let entries = opening.config.srq_entries.min(limits.srq_wr);
        let vectors = limits.vectors.max(1);
        Ok(DeviceCore {
            shared: Arc::clone(shared),
            channel: CompletionChannel::new(device)?,
            completions: Vec::new(),
            receives: Queues::new(),
            receives_max: (limits.has_srq && entries > 0).then_some(entries),
            in_capsule_bytes: opening.in_capsule_bytes,
            tells: Tells::default(),
            keys,
            numbers: HashMap::default(),
            vector: u32::try_from(opening.core).unwrap_or(0) % vectors,
            found: Vec::with_capacity(64),
            is_lost: false,
            is_replaced: false,
            is_watched: false,
        })
    }

    /// Register the memory of a disk, if that is not done.
    pub(super) fn add_disk(&mut self, disk: &DiskArea) -> Result<(), VerbsError> {
        self.keys.add(self.shared.register(&disk.area)?, true);
        Ok(())
    }

    /// What has to be done now and then.
    pub(super) fn on_time(&mut self, now: Nanos) {
        self.keys.purge(now);
        for SharedReceives { queue, receives, .. } in self.receives.all() {
            receives.post_again(&mut Queue::Shared(queue));
        }
    }

    /// Room for a connection's completions and receives, so that neither queue ever overflows.
    pub(super) fn reserve(&mut self, slots: u32, send_queue: u32) -> Result<Reservation, String> {
        // One more: what ends the queue pair may complete too.
        let entries = slots + send_queue + 1;
        let completions = self.completions_for(entries).map_err(|error| error.to_string())?;
        let share = self.reserve_shared(slots);
        if let Some(completions) = self.completions.get_mut(completions).and_then(Option::as_mut) {
            completions.promised += entries;
        }
        Ok(Reservation { completions, entries, share })
    }

    fn completions_for(&mut self, entries: u32) -> Result<usize, VerbsError> {
        let has_room = |it: &Completions| {
            !it.queue.is_broken() && it.queue.entries() - it.promised.min(it.queue.entries()) >= entries
        };
        if let Some(at) = self.completions.iter().position(|it| it.as_ref().is_some_and(has_room)) {
            return Ok(at);
        }
        let device = self.shared.device();
        let size = device.limits().cqe.min(COMPLETIONS_MAX);
        let queue = CompletionQueue::new(device, size, self.vector, Some(&self.channel))?;
        Ok(put_first(&mut self.completions, Completions { queue, promised: 0, is_armed: false }))
    }

    /// As many slots of a shared queue, or none: then the queue pair has its own, as with a device that has
    /// no shared ones.
    fn reserve_shared(&mut self, slots: u32) -> Option<Share> {
        let DeviceCore { receives, receives_max, in_capsule_bytes, shared, .. } = self;
        let entries = (*receives_max)?;
        receives.reserve(slots, |serial| {
            let made = SharedReceives::new(shared, entries, *in_capsule_bytes, serial);
            made.inspect_err(|error| {
                tracing::warn!(device = shared.device().name(), %error, "no shared receive queue");
                // Not asked for again with each connection.
                *receives_max = None;
            })
            .ok()
        })
    }

    /// A connection's queue pair is destroyed, and took up to `lost` shared receives along.
    pub(super) fn release(&mut self, reservation: Reservation, lost: u32) {
        if let Some(place) = self.completions.get_mut(reservation.completions)
            && let Some(completions) = place
        {
            completions.promised -= reservation.entries;
            if completions.promised == 0 && completions.queue.is_broken() {
                *place = None;
            }
        }
        if let Some(share) = reservation.share {
            self.receives.release(share, lost);
        }
    }

    pub(super) fn completion_queue(&self, reservation: Reservation) -> Option<&CompletionQueue> {
        self.completions.get(reservation.completions)?.as_ref().map(|completions| &completions.queue)
    }

    /// Take what has completed; true when there was anything.
    #[inline]
    pub(super) fn poll(&mut self, into: &mut Vec<WorkCompletion>) -> bool {
        let before = into.len();
        into.append(&mut self.found);
        for completions in self.completions.iter_mut().flatten() {
            completions.queue.poll(|completion| into.push(completion));
        }
        into.len() > before
    }

    /// Take all that has completed.
    pub(super) fn poll_all(&mut self, into: &mut Vec<WorkCompletion>) {
        into.append(&mut self.found);
        for completions in self.completions.iter_mut().flatten() {
            while completions.queue.poll(|completion| into.push(completion)) == POLL_BATCH {}
        }
    }

    /// The completion queue of a connection has failed: nothing on it will complete any more.
    pub(super) fn is_broken(&self, reservation: Reservation) -> bool {
        self.completion_queue(reservation).is_some_and(CompletionQueue::is_broken)
    }

    /// A completion queue has failed, as the device tells. Which one it is, if it is this core's.
    pub(super) fn set_broken(&mut self, identity: usize) -> Option<usize> {
        let is_it = |it: &Option<Completions>| it.as_ref().is_some_and(|it| it.queue.identity() == identity);
        let at = self.completions.iter().position(is_it)?;
        let completions = self.completions[at].as_mut()?;
        completions.queue.set_broken();
        if completions.promised == 0 {
            self.completions[at] = None;
        }
        Some(at)
    }

    /// Have the channel told of the next completion of any queue. False: there is one already.
    pub(super) fn arm(&mut self) -> bool {
        for completions in self.completions.iter_mut().flatten() {
            if !completions.is_armed {
                // A device that cannot is dead: its connections end by themselves.
                completions.is_armed = completions.queue.arm().is_ok();
            }
            completions.queue.poll(|completion| self.found.push(completion));
        }
        self.found.is_empty()
    }

    /// Take what the channel has told: of each armed queue at most one.
    pub(super) fn take_events(&mut self) {
        while self.completions.iter().flatten().any(|completions| completions.is_armed) {
            let Some(told) = self.channel.take_event() else { return };
            let mut all = self.completions.iter_mut().flatten();
            if let Some(completions) = all.find(|completions| completions.queue.identity() == told) {
                completions.is_armed = false;
            }
        }
    }

    /// A receive of the shared queue whose connection is gone.
    pub(super) fn orphaned(&mut self, id: u64) {
        if id & OWN != 0 {
            return;
        }
        if let Some(SharedReceives { queue, receives, .. }) = self.receives.posted_to(id) {
            let slot = u32::try_from(id & u64::from(u32::MAX)).unwrap_or(u32::MAX);
            let _ = receives.flushed(slot, &mut Queue::Shared(queue));
        }
    }
}
