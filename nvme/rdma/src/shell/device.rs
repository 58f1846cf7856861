//! One core's state of one device: completion queues, shared receive queues and memory keys.

use spindle_nvme_transport::ConnectionId;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use spindle_rdma::{CompletionChannel, CompletionQueue, POLL_BATCH, VerbsError, WorkCompletion};

use super::OWN_QUEUE_BIT;
use super::completions::{CompletionQueues, Entries, Need, Reservation};
use super::device_events::Opening;
use super::ending::DrainReporting;
use super::keys::{KeyTable, SharedDevice};
use super::receives::Queue;
use super::registrar::Ready;
use super::shared::{Queues, SharedReceives};

/// Hashes queue pair numbers without a key: hosts do not choose the numbers.
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
        // Fibonacci hashing: `HashMap` uses the high bits.
        self.0 = u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Entries for CompletionQueue {
    fn entries(&self) -> u32 {
        CompletionQueue::entries(self)
    }

    fn is_broken(&self) -> bool {
        CompletionQueue::is_broken(self)
    }
}

/// One core's queues and keys of one device.
pub(super) struct DeviceCore {
    pub(super) shared: Arc<SharedDevice>,
    pub(super) channel: CompletionChannel,
    completions: CompletionQueues<CompletionQueue>,
    pub(super) receives: Queues<SharedReceives>,
    /// Entries of a shared receive queue; `None` if the device has no such queues or could not create one.
    receives_max: Option<u32>,
    in_capsule_bytes: u32,
    pub(super) drain_reporting: DrainReporting,
    pub(super) keys: KeyTable,
    /// Connections by queue pair number.
    pub(super) ids_by_number: HashMap<u32, ConnectionId, BuildHasherDefault<NumberHasher>>,
    vector: u32,
    /// Completions polled by [`DeviceCore::arm`], not dispatched yet.
    polled: Vec<WorkCompletion>,
    /// The device was removed or failed; nothing more is created on it.
    pub(super) is_lost: bool,
    /// librdmacm has opened the same device again.
    pub(super) is_replaced: bool,
    /// `Shell::take_descriptors` has returned the device's descriptors.
    pub(super) is_watched: bool,
}

impl DeviceCore {
    /// Creates the completion channel. The queues are created on demand.
    pub(super) fn new(ready: &Ready, opening: &Opening) -> Result<DeviceCore, VerbsError> {
        let shared = &ready.shared;
        let device = shared.device();
        let limits = device.limits();
        let entries = opening.config.srq_entries.min(limits.srq_wr);
        let vectors = limits.vectors.max(1);
        Ok(DeviceCore {
            shared: Arc::clone(shared),
            channel: CompletionChannel::new(device)?,
            completions: CompletionQueues::new(),
            receives: Queues::new(),
            receives_max: (limits.has_srq && entries > 0).then_some(entries),
            in_capsule_bytes: opening.in_capsule_bytes,
            drain_reporting: DrainReporting::default(),
            keys: KeyTable::new(ready.of_core(&opening.areas)),
            ids_by_number: HashMap::default(),
            vector: u32::try_from(opening.core).unwrap_or(0) % vectors,
            polled: Vec::with_capacity(64),
            is_lost: false,
            is_replaced: false,
            is_watched: false,
        })
    }

    /// Drops the registrations of removed disks and retries failed receives of the shared queues. To be
    /// called periodically.
    pub(super) fn on_time(&mut self) {
        self.keys.drop_unused();
        self.post_receives();
    }

    /// Posts the receives of the shared queues that are not posted. Those that fail are retried by a later
    /// call.
    pub(super) fn post_receives(&mut self) {
        for SharedReceives { queue, receives, .. } in self.receives.all() {
            let _ = receives.flush(&mut Queue::Shared(queue));
        }
    }

    /// Reserves `slots` receives, and completion queue entries for these and for `send_queue` work requests,
    /// so that neither queue overflows. Without a share in the result the queue pair needs its own receive
    /// queue. Fails if a completion queue cannot be created.
    pub(super) fn reserve(&mut self, slots: u32, send_queue: u32) -> Result<Reservation, String> {
        let DeviceCore {
            completions, receives, receives_max, in_capsule_bytes, shared, vector, channel, ..
        } = self;
        let device = shared.device();
        let need = Need {
            slots,
            // One entry more for the last work request of a queue pair that is ended.
            sends: send_queue + 1,
            entries_max: device.limits().cqe,
            may_share: receives_max.is_some(),
        };
        let make = |entries| {
            let made = CompletionQueue::new(device, entries, *vector, Some(&*channel));
            made.map_err(|error| error.to_string())
        };
        let make_shared = |serial| {
            let made = SharedReceives::new(shared, (*receives_max)?, *in_capsule_bytes, serial);
            made.inspect_err(|error| {
                tracing::warn!(device = device.name(), %error, "no shared receive queue");
                // Prevents another attempt for each connection.
                *receives_max = None;
            })
            .ok()
        };
        completions.reserve(receives, need, make, make_shared)
    }

    /// Releases a connection's reservations. `lost`: shared receives that its queue pair may have consumed
    /// without completing.
    pub(super) fn release(&mut self, reservation: Reservation, lost: u32) {
        self.completions.release(&mut self.receives, reservation, lost);
    }

    pub(super) fn completion_queue(&self, reservation: Reservation) -> Option<&CompletionQueue> {
        self.completions.get(reservation.completions).map(|completions| &completions.queue)
    }

    /// Adds to `into` the completions that [`DeviceCore::arm`] has polled, and those of one poll of each
    /// completion queue. Returns true if there were any.
    #[inline]
    pub(super) fn poll(&mut self, into: &mut Vec<WorkCompletion>) -> bool {
        let before = into.len();
        into.append(&mut self.polled);
        for completions in self.completions.iter_mut() {
            completions.queue.poll(|completion| into.push(completion));
        }
        into.len() > before
    }

    /// As [`DeviceCore::poll`], but polls the completion queues until they are empty.
    pub(super) fn poll_all(&mut self, into: &mut Vec<WorkCompletion>) {
        into.append(&mut self.polled);
        for completions in self.completions.iter_mut() {
            while completions.queue.poll(|completion| into.push(completion)) == POLL_BATCH {}
        }
    }

    /// Returns true if the connection's completion queue has failed: the connection's work will not complete.
    pub(super) fn is_broken(&self, reservation: Reservation) -> bool {
        self.completion_queue(reservation).is_some_and(CompletionQueue::is_broken)
    }

    /// Marks a completion queue as failed (IBV_EVENT_CQ_ERR). Returns its index; `None` if this core does not
    /// have the queue.
    pub(super) fn set_broken(&mut self, identity: usize) -> Option<usize> {
        let at = self.completions.position(|queue| queue.identity() == identity)?;
        self.completions.get_mut(at)?.queue.set_broken();
        self.completions.remove_failed(&mut self.receives, at);
        Some(at)
    }

    /// Arms all completion queues. Returns false if there are completions already.
    pub(super) fn arm(&mut self) -> bool {
        for completions in self.completions.iter_mut() {
            if !completions.is_armed {
                // If a device cannot arm a queue, it has failed; its connections time out.
                completions.is_armed = completions.queue.arm().is_ok();
            }
            completions.queue.poll(|completion| self.polled.push(completion));
        }
        self.polled.is_empty()
    }

    /// Reads the events of the completion channel, at most one for each armed queue.
    pub(super) fn take_events(&mut self) {
        while self.completions.iter_mut().any(|completions| completions.is_armed) {
            let Some(identity) = self.channel.take_event() else { return };
            let mut all = self.completions.iter_mut();
            if let Some(completions) = all.find(|completions| completions.queue.identity() == identity) {
                completions.is_armed = false;
            }
        }
    }

    /// Takes back a shared receive that was flushed or whose connection has ended, for
    /// [`DeviceCore::post_receives`]. No effect on a receive of a queue pair's own queue.
    pub(super) fn take_orphaned(&mut self, id: u64) {
        if id & OWN_QUEUE_BIT != 0 {
            return;
        }
        if let Some(SharedReceives { receives, .. }) = self.receives.posted_to(id) {
            receives.flushed(u32::try_from(id & u64::from(u32::MAX)).unwrap_or(u32::MAX));
        }
    }
}
