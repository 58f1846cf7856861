//! What the cores share about controllers: few words, read by atomics on the data path, registered under a
//! mutex at connect.
//!
//! The admin queue's core owns the `Controller`; each I/O queue, on whatever core, holds an
//! [`Arc<ControllerShared>`]. A command on an I/O queue costs one relaxed load here (is the controller
//! enabled?) and, once per keep-alive period and queue, one store (there was traffic).

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, MutexGuard};

use nvme_spec::nqn::Nqn;
use spindle_reactor::lock::Lock;
use spindle_reactor::slab::Slot;

use crate::snapshot::Subsystem;

/// Most I/O queues of one controller; a bit each in [`ControllerShared`]'s map.
pub const IO_QUEUES_MAX: u16 = 128;

/// A controller as all cores see it.
#[derive(Debug)]
pub struct ControllerShared {
    /// Its identifier, unique in its subsystem while it lives.
    pub cntlid: u16,
    /// Which subsystem; `None` for a discovery controller. The NQN is what counts: snapshots come and go.
    pub subsystem_nqn: Nqn,
    /// Who connected it.
    pub host_nqn: Nqn,
    /// And that host's identifier.
    pub host_id: [u8; 16],
    /// The core that owns the admin queue.
    pub admin_core: usize,
    /// The admin queue's name there; stale before it is connected.
    admin_queue: AtomicU32,
    /// True while CC.EN = 1 and CSTS.RDY = 1: I/O commands are taken.
    is_ready: AtomicBool,
    /// True once the controller is on its way out; it never comes back.
    is_gone: AtomicBool,
    /// I/O queues that are live, or that have left something at a disk (a bit each, qid - 1).
    queues: [AtomicU64; 2],
    /// How many of them are not live any more.
    leaving: AtomicU32,
    /// Set by queues when they had a command; cleared by the keep-alive timer (traffic-based keep alive).
    has_traffic: AtomicBool,
    /// One of its I/O queues was connected with another HOSTID.
    has_other_host_id: AtomicBool,
    /// Features that I/O queues look at: bit 0 = volatile write cache enabled.
    pub feature_bits: AtomicU32,
}

impl ControllerShared {
    /// A fresh controller: not ready, no queues.
    #[must_use]
    pub fn new(cntlid: u16, subsystem_nqn: Nqn, host_nqn: Nqn, host_id: [u8; 16], admin_core: usize) -> Self {
        ControllerShared {
            cntlid,
            subsystem_nqn,
            host_nqn,
            host_id,
            admin_core,
            admin_queue: AtomicU32::new(0),
            is_ready: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            queues: [const { AtomicU64::new(0) }; 2],
            leaving: AtomicU32::new(0),
            has_traffic: AtomicBool::new(false),
            has_other_host_id: AtomicBool::new(false),
            feature_bits: AtomicU32::new(1),
        }
    }

    /// True while I/O commands are taken.
    #[inline]
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::Relaxed)
    }

    /// The host has left the volatile write cache on (feature 06h).
    #[inline]
    #[must_use]
    pub fn is_write_cache_on(&self) -> bool {
        self.feature_bits.load(Ordering::Relaxed) & 1 != 0
    }

    /// CSTS.RDY has changed.
    pub fn set_ready(&self, is_ready: bool) {
        self.is_ready.store(is_ready, Ordering::Release);
    }

    /// The admin queue is connected: its name on the admin core.
    pub fn set_admin_queue(&self, queue: Slot) {
        self.admin_queue.store(queue.to_wire(), Ordering::Relaxed);
    }

    /// The admin queue's name on the admin core.
    #[must_use]
    pub fn admin_queue(&self) -> Slot {
        Slot::from_wire(self.admin_queue.load(Ordering::Relaxed))
    }

    /// True once it is on its way out. Who saw that it is not ready, and asks then, knows whether that is
    /// why.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        fence(Ordering::Acquire);
        self.is_gone.load(Ordering::Relaxed)
    }

    /// It is on its way out: not ready any more, no queue is added.
    pub fn set_gone(&self) {
        self.is_gone.store(true, Ordering::Relaxed);
        self.set_ready(false);
    }

    /// A command has arrived on one of its queues.
    #[inline]
    pub fn note_traffic(&self) {
        if !self.has_traffic.load(Ordering::Relaxed) {
            self.has_traffic.store(true, Ordering::Relaxed);
        }
    }

    /// Was there traffic since the last call?
    #[must_use]
    pub fn take_traffic(&self) -> bool {
        self.has_traffic.swap(false, Ordering::Relaxed)
    }

    /// An I/O queue gives another HOSTID than the admin queue; true the first time.
    #[must_use]
    pub fn note_other_host_id(&self) -> bool {
        !self.has_other_host_id.swap(true, Ordering::Relaxed)
    }

    /// Claim I/O queue `qid` (1 ..= [`IO_QUEUES_MAX`]); false when it is live already or out of range.
    #[must_use]
    pub fn claim_queue(&self, qid: u16) -> bool {
        let Some((word, bit)) = Self::bit(qid) else { return false };
        self.queues[word].fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    /// I/O queue `qid` is gone.
    pub fn release_queue(&self, qid: u16) {
        if let Some((word, bit)) = Self::bit(qid) {
            self.queues[word].fetch_and(!bit, Ordering::AcqRel);
        }
    }

    /// An I/O queue is gone, and has left something at a disk: its identifier stays taken.
    pub fn queue_leaves(&self) {
        self.leaving.fetch_add(1, Ordering::AcqRel);
    }

    /// Nothing of I/O queue `qid` is at a disk any more, or nobody waits for it.
    pub fn queue_left(&self, qid: u16) {
        self.release_queue(qid);
        self.leaving.fetch_sub(1, Ordering::AcqRel);
    }

    /// Something that its host submitted, and that the host was not answered, may be at a disk.
    #[must_use]
    pub fn has_leftovers(&self) -> bool {
        self.leaving.load(Ordering::Acquire) > 0 || (self.is_gone() && self.live_queues() > 0)
    }

    /// Number of I/O queues that are live or have left something at a disk.
    #[must_use]
    pub fn live_queues(&self) -> u32 {
        self.queues.iter().map(|word| word.load(Ordering::Relaxed).count_ones()).sum()
    }

    fn bit(qid: u16) -> Option<(usize, u64)> {
        let index = qid.checked_sub(1).filter(|index| *index < IO_QUEUES_MAX)?;
        Some((usize::from(index / 64), 1 << (index % 64)))
    }
}

/// All live controllers of the process. Locked at connect and at the end of a controller only.
#[derive(Default)]
pub struct Registry {
    controllers: Lock<Vec<Arc<ControllerShared>>>,
    /// Controllers that have ended before all of their I/O queues were through with the disks.
    leaving: Lock<Vec<Arc<ControllerShared>>>,
    /// Where the search for a free identifier goes on, so that one is not given out again at once.
    next: AtomicU32,
}

/// The limit on controllers was reached: all identifiers of the subsystem's range are taken.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("no controller identifier is free in {0}..={1}")]
pub struct NoIdentifier(pub u16, pub u16);

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<ControllerShared>>> {
        // The list is whole at every step, so a panic elsewhere has not spoiled it.
        self.controllers.lock()
    }

    /// Make a controller with a free identifier out of `range`.
    ///
    /// # Errors
    /// [`NoIdentifier`] when all are taken.
    pub fn create(
        &self,
        subsystem_nqn: Nqn,
        range: (u16, u16),
        host_nqn: Nqn,
        host_id: [u8; 16],
        admin_core: usize,
    ) -> Result<Arc<ControllerShared>, NoIdentifier> {
        let mut controllers = self.lock();
        let span = u32::from(range.1.saturating_sub(range.0)) + 1;
        for _ in 0..span {
            let step = self.next.fetch_add(1, Ordering::Relaxed) % span;
            let cntlid = range.0.saturating_add(u16::try_from(step).unwrap_or(0));
            let is_taken = controllers.iter().any(|c| c.cntlid == cntlid && c.subsystem_nqn == subsystem_nqn);
            if !is_taken {
                let shared = ControllerShared::new(cntlid, subsystem_nqn, host_nqn, host_id, admin_core);
                let shared = Arc::new(shared);
                controllers.push(Arc::clone(&shared));
                return Ok(shared);
            }
        }
        Err(NoIdentifier(range.0, range.1))
    }

    /// The controller of this subsystem with this identifier.
    #[must_use]
    pub fn find(&self, subsystem_nqn: &Nqn, cntlid: u16) -> Option<Arc<ControllerShared>> {
        self.lock().iter().find(|c| c.cntlid == cntlid && c.subsystem_nqn == *subsystem_nqn).cloned()
    }

    /// All live controllers of a subsystem, in the order of their identifiers.
    #[must_use]
    pub fn of(&self, subsystem: &Subsystem) -> Vec<u16> {
        let mut ids: Vec<u16> =
            self.lock().iter().filter(|c| c.subsystem_nqn == subsystem.nqn).map(|c| c.cntlid).collect();
        ids.sort_unstable();
        ids
    }

    /// Something of a former association of this host may still be at a disk of the subsystem. Hosts without
    /// a name are told apart by their identifiers.
    #[must_use]
    pub fn has_leftovers(&self, subsystem_nqn: &Nqn, host_nqn: &Nqn, host_id: &[u8; 16]) -> bool {
        let is_one = |it: &Arc<ControllerShared>| {
            it.host_nqn == *host_nqn
                && (!host_nqn.is_unnamed() || it.host_id == *host_id)
                && it.subsystem_nqn == *subsystem_nqn
                && it.has_leftovers()
        };
        self.lock().iter().any(is_one) || self.leaving.lock().iter().any(is_one)
    }

    /// All live controllers.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<ControllerShared>> {
        self.lock().clone()
    }

    /// Number of live controllers.
    #[must_use]
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// The controller has ended: its identifier is free.
    pub fn remove(&self, controller: &Arc<ControllerShared>) {
        controller.set_gone();
        let mut leaving = self.leaving.lock();
        leaving.retain(|other| other.live_queues() > 0);
        if controller.live_queues() > 0 {
            leaving.push(Arc::clone(controller));
        }
        drop(leaving);
        self.lock().retain(|other| !Arc::ptr_eq(other, controller));
    }
}
