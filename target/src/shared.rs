//! What the cores share about controllers: few words, read by atomics on the data path, registered under a
//! mutex at connect.
//!
//! The admin queue's core owns the `Controller`; each I/O queue, on whatever core, holds an
//! [`Arc<ControllerShared>`]. A command on an I/O queue costs one relaxed load here (is the controller
//! enabled?) and, once per keep-alive period and queue, one store (there was traffic).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use nvme_spec::nqn::Nqn;
use spindle_reactor::lock::Lock;
use spindle_reactor::slab::Slot;
use spindle_transport::Peer;

/// Most I/O queues of one controller; a bit each in [`ControllerShared`]'s map.
pub const IO_QUEUES_MAX: u16 = 128;

/// A queue of a controller, for operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueEnds {
    /// 0: the admin queue.
    pub qid: u16,
    /// The core that has its connection.
    pub core: usize,
    /// The connection.
    pub peer: Peer,
}

/// A controller as all cores see it.
#[derive(Debug)]
pub struct ControllerShared {
    /// Its identifier, unique in its subsystem while it lives.
    pub cntlid: u16,
    /// NQN of its subsystem, also of the discovery subsystem. Not a reference: a reload replaces the
    /// snapshot.
    pub subsystem_nqn: Nqn,
    /// Who connected it.
    pub host_nqn: Nqn,
    /// And that host's identifier.
    pub host_id: [u8; 16],
    /// Its host, as disks tell hosts apart: no other host has this number while it lives, and up to
    /// [`HOSTS_KEPT`] none ever has. From 1.
    pub client: u16,
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
    /// Connections of its queues. Locked at Connect, at the end of a queue, and by operators.
    ends: Lock<Vec<QueueEnds>>,
    /// How many of them are not live any more.
    leaving: AtomicU32,
    /// How many queues that are gone have something at a disk that is not waited for any more.
    strays: AtomicU32,
    /// Token of the last End Former Associations that was begun; 0: none.
    former_token: AtomicU64,
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
            client: 0,
            admin_core,
            admin_queue: AtomicU32::new(0),
            is_ready: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            queues: [const { AtomicU64::new(0) }; 2],
            ends: Lock::default(),
            leaving: AtomicU32::new(0),
            strays: AtomicU32::new(0),
            former_token: AtomicU64::new(0),
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
        // With `claim_queue`: who claims a queue sees this, or who counts the queues sees that one.
        fence(Ordering::SeqCst);
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
        let is_free = self.queues[word].fetch_or(bit, Ordering::AcqRel) & bit == 0;
        fence(Ordering::SeqCst);
        is_free
    }

    /// A queue that was claimed, or the admin queue, has this connection.
    pub fn note_ends(&self, ends: QueueEnds) {
        self.ends.lock().push(ends);
    }

    /// Connections of its queues, by QID.
    #[must_use]
    pub fn ends(&self) -> Vec<QueueEnds> {
        let mut ends = self.ends.lock().clone();
        ends.sort_unstable_by_key(|it| it.qid);
        ends
    }

    /// I/O queue `qid` is gone.
    pub fn release_queue(&self, qid: u16) {
        self.ends.lock().retain(|it| it.qid != qid);
        if let Some((word, bit)) = Self::bit(qid) {
            self.queues[word].fetch_and(!bit, Ordering::AcqRel);
        }
    }

    /// I/O queue `qid` is gone, and has left something at a disk: its identifier stays taken.
    pub fn queue_leaves(&self, qid: u16) {
        self.ends.lock().retain(|it| it.qid != qid);
        self.leaving.fetch_add(1, Ordering::AcqRel);
    }

    /// Nothing of I/O queue `qid` is at a disk any more, or the wait for it has ended.
    pub fn queue_left(&self, qid: u16) {
        self.release_queue(qid);
        self.leaving.fetch_sub(1, Ordering::AcqRel);
    }

    /// The wait for I/O queue `qid` has ended, and something of it is at a disk still.
    pub fn queue_strays(&self, qid: u16) {
        // In this order: who sees that it is not waited for sees that it strays.
        self.strays.fetch_add(1, Ordering::AcqRel);
        self.queue_left(qid);
    }

    /// Nothing is at a disk any more of a queue whose wait had ended.
    pub fn stray_ended(&self) {
        self.strays.fetch_sub(1, Ordering::AcqRel);
    }

    /// Something of a queue whose wait has ended may be at a disk.
    #[must_use]
    pub fn has_strays(&self) -> bool {
        self.strays.load(Ordering::Acquire) > 0
    }

    /// Something that its host submitted, and that the host was not answered, may be at a disk.
    #[must_use]
    pub fn has_orphans(&self) -> bool {
        self.leaving.load(Ordering::Acquire) > 0 || (self.is_gone() && self.live_queues() > 0)
    }

    /// Number of I/O queues that are live or have left something at a disk.
    #[must_use]
    pub fn live_queues(&self) -> u32 {
        self.queues.iter().map(|word| word.load(Ordering::Acquire).count_ones()).sum()
    }

    /// It is of this subsystem and this host. Hosts without a name are told apart by their identifiers.
    fn is_of(&self, subsystem_nqn: &Nqn, host_nqn: &Nqn, host_id: &[u8; 16]) -> bool {
        self.host_nqn == *host_nqn
            && (!host_nqn.is_unnamed() || self.host_id == *host_id)
            && self.subsystem_nqn == *subsystem_nqn
    }

    fn bit(qid: u16) -> Option<(usize, u64)> {
        let index = qid.checked_sub(1).filter(|index| *index < IO_QUEUES_MAX)?;
        Some((usize::from(index / 64), 1 << (index % 64)))
    }
}

/// Where a host's former associations are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Former {
    /// Nothing of them reaches a disk any more.
    Over,
    /// Queues of them are live, or something of them is at a disk.
    Ending,
    /// The rest of them is at a disk for longer than anybody waits.
    MayLand,
}

/// Hosts that keep their number when they leave.
pub const HOSTS_KEPT: u16 = 255;

fn number(at: usize) -> u16 {
    u16::try_from(at + 1).unwrap_or(0)
}

/// All live controllers of the process. Locked at connect, at the end of a controller and while End Former
/// Associations waits.
#[derive(Default)]
pub struct Registry {
    controllers: Lock<Vec<Arc<ControllerShared>>>,
    /// Controllers that have ended before the disks were through with all of their I/O queues.
    leaving: Lock<Vec<Arc<ControllerShared>>>,
    /// Hosts whose numbers are kept: the first has number 1.
    hosts: Lock<Vec<(Nqn, [u8; 16])>>,
    /// Where the search for a free identifier goes on, so that one is not given out again at once.
    next: AtomicU32,
}

impl Registry {
    /// Make a controller with a free identifier out of `range`. `None`: all are taken.
    pub fn create(
        &self,
        subsystem_nqn: Nqn,
        range: (u16, u16),
        host_nqn: Nqn,
        host_id: [u8; 16],
        admin_core: usize,
    ) -> Option<Arc<ControllerShared>> {
        let mut controllers = self.controllers.lock();
        let span = u32::from(range.1.saturating_sub(range.0)) + 1;
        for _ in 0..span {
            let step = self.next.fetch_add(1, Ordering::Relaxed) % span;
            let cntlid = range.0.saturating_add(u16::try_from(step).unwrap_or(0));
            let is_taken = controllers.iter().any(|c| c.cntlid == cntlid && c.subsystem_nqn == subsystem_nqn);
            if !is_taken {
                let client = self.client_of(&controllers, &host_nqn, &host_id);
                let shared = ControllerShared::new(cntlid, subsystem_nqn, host_nqn, host_id, admin_core);
                let shared = Arc::new(ControllerShared { client, ..shared });
                controllers.push(Arc::clone(&shared));
                return Some(shared);
            }
        }
        None
    }

    /// The number of a host: the one that it had before, as long as there are such to keep; or that of its
    /// other controllers, or the lowest that no host has. 0, where as many hosts are connected as there are
    /// numbers.
    fn client_of(&self, controllers: &[Arc<ControllerShared>], host_nqn: &Nqn, host_id: &[u8; 16]) -> u16 {
        let mut hosts = self.hosts.lock();
        if let Some(at) = hosts.iter().position(|(nqn, id)| nqn == host_nqn && id == host_id) {
            return number(at);
        }
        if hosts.len() < usize::from(HOSTS_KEPT) {
            hosts.push((*host_nqn, *host_id));
            return number(hosts.len() - 1);
        }
        let is_of_host = |it: &&Arc<ControllerShared>| it.host_nqn == *host_nqn && it.host_id == *host_id;
        if let Some(other) = controllers.iter().find(is_of_host) {
            return other.client;
        }
        (HOSTS_KEPT + 1..=u16::MAX).find(|own| controllers.iter().all(|it| it.client != *own)).unwrap_or(0)
    }

    /// Names and identifiers of the hosts that have the numbers from 1 on, whether they are connected or not.
    #[must_use]
    pub fn hosts(&self) -> Vec<(Nqn, [u8; 16])> {
        self.hosts.lock().clone()
    }

    /// The controller of this subsystem with this identifier.
    #[must_use]
    pub fn find(&self, subsystem_nqn: &Nqn, cntlid: u16) -> Option<Arc<ControllerShared>> {
        self.controllers
            .lock()
            .iter()
            .find(|c| c.cntlid == cntlid && c.subsystem_nqn == *subsystem_nqn)
            .cloned()
    }

    /// Something of a former association of this host may still be at a disk of the subsystem.
    #[must_use]
    pub fn has_orphans(&self, subsystem_nqn: &Nqn, host_nqn: &Nqn, host_id: &[u8; 16]) -> bool {
        let is_one =
            |it: &Arc<ControllerShared>| it.is_of(subsystem_nqn, host_nqn, host_id) && it.has_orphans();
        self.controllers.lock().iter().any(is_one) || self.leaving.lock().iter().any(is_one)
    }

    /// Note the token of this controller. Every other controller of the same subsystem, HOSTNQN and HOSTID
    /// with the same token is gone from here on; the caller closes their queues. `None`: so was this one
    /// before, and nothing happens.
    pub fn end_former(&self, own: &Arc<ControllerShared>, token: u64) -> Option<Vec<Arc<ControllerShared>>> {
        let controllers = self.controllers.lock();
        // Under the lock: of two that end each other, the first is ended and does not end the other.
        if own.is_gone() {
            return None;
        }
        own.former_token.store(token, Ordering::Relaxed);
        let is_former = |it: &&Arc<ControllerShared>| {
            !Arc::ptr_eq(it, own)
                && it.is_of(&own.subsystem_nqn, &own.host_nqn, &own.host_id)
                && it.host_id == own.host_id
                && it.former_token.load(Ordering::Relaxed) == token
                && !it.is_gone()
        };
        let former: Vec<_> = controllers.iter().filter(is_former).cloned().collect();
        former.iter().for_each(|it| it.set_gone());
        Some(former)
    }

    /// Where the former associations of this controller's host with its subsystem are.
    #[must_use]
    pub fn former(&self, own: &Arc<ControllerShared>) -> Former {
        let is_one = |it: &&Arc<ControllerShared>| {
            !Arc::ptr_eq(it, own) && it.is_of(&own.subsystem_nqn, &own.host_nqn, &own.host_id)
        };
        let mut has_strays = false;
        // One that ends meanwhile is in the second list before it leaves the first.
        for it in self.controllers.lock().iter().filter(is_one) {
            // Gone, and still here: its admin queue is not closed.
            if it.is_gone() || it.has_orphans() {
                return Former::Ending;
            }
            has_strays |= it.has_strays();
        }
        for it in self.leaving.lock().iter().filter(is_one) {
            if it.has_orphans() {
                return Former::Ending;
            }
            has_strays |= it.has_strays();
        }
        if has_strays { Former::MayLand } else { Former::Over }
    }

    /// All live controllers.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<ControllerShared>> {
        self.controllers.lock().clone()
    }

    /// The controller has ended: its identifier is free.
    pub fn remove(&self, controller: &Arc<ControllerShared>) {
        controller.set_gone();
        let is_left = |it: &Arc<ControllerShared>| it.live_queues() > 0 || it.has_strays();
        let mut leaving = self.leaving.lock();
        leaving.retain(is_left);
        if is_left(controller) {
            leaving.push(Arc::clone(controller));
        }
        drop(leaving);
        self.controllers.lock().retain(|other| !Arc::ptr_eq(other, controller));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: u64 = 5;

    fn nqn(text: &str) -> Nqn {
        Nqn::new(text).expect("a name")
    }

    /// A controller of this subsystem, this host and this HOSTID.
    fn of(registry: &Registry, subsystem: &str, host: Nqn, id: u8) -> Arc<ControllerShared> {
        registry.create(nqn(subsystem), (1, 100), host, [id; 16], 0).expect("an identifier")
    }

    fn ended(registry: &Registry, own: &Arc<ControllerShared>, token: u64) -> Vec<u16> {
        let former = registry.end_former(own, token).expect("it is not ended itself");
        former.iter().map(|it| it.cntlid).collect()
    }

    #[test]
    fn only_controllers_of_the_same_subsystem_host_and_token_are_ended() {
        let registry = Registry::default();
        let host = nqn("nqn.2026-01.test:host");
        let old = of(&registry, "nqn.2026-01.test:a", host, 1);
        let others = [
            of(&registry, "nqn.2026-01.test:b", host, 1),
            of(&registry, "nqn.2026-01.test:a", nqn("nqn.2026-01.test:other"), 1),
            of(&registry, "nqn.2026-01.test:a", host, 2),
        ];
        for it in others.iter().chain([&old]) {
            assert_eq!(ended(&registry, it, TOKEN), []);
        }
        let silent = of(&registry, "nqn.2026-01.test:a", host, 1);
        let new = of(&registry, "nqn.2026-01.test:a", host, 1);
        assert_eq!(ended(&registry, &new, TOKEN + 1), []);
        assert_eq!(ended(&registry, &new, TOKEN), [old.cntlid]);
        assert!(old.is_gone() && !others.iter().chain([&silent, &new]).any(|it| it.is_gone()));
        assert!(registry.end_former(&old, TOKEN).is_none() && !new.is_gone(), "it ends no other any more");
        // Until its owner has closed it.
        assert_eq!((registry.former(&new), registry.former(&others[0])), (Former::Ending, Former::Over));
        registry.remove(&old);
        assert_eq!(registry.former(&new), Former::Over);
    }

    #[test]
    fn hosts_without_a_name_are_told_apart_by_their_identifiers() {
        let registry = Registry::default();
        let make = |id| of(&registry, "nqn.2026-01.test:a", Nqn::unnamed(), id);
        let (old, other, new) = (make(1), make(2), make(1));
        for it in [&old, &other] {
            assert_eq!(ended(&registry, it, TOKEN), []);
        }
        assert_eq!(ended(&registry, &new, TOKEN), [old.cntlid]);
        assert_eq!((registry.former(&new), registry.former(&other)), (Former::Ending, Former::Over));
    }

    #[test]
    fn what_is_left_of_a_queue_is_waited_for_and_may_land_when_nobody_waits_any_more() {
        let registry = Registry::default();
        let host = nqn("nqn.2026-01.test:host");
        let [old, new] = [1, 1].map(|id| of(&registry, "nqn.2026-01.test:a", host, id));
        for qid in [1, 2] {
            assert!(old.claim_queue(qid));
            assert_eq!(registry.former(&new), Former::Over, "it is alive");
        }
        registry.remove(&old);
        assert_eq!(registry.former(&new), Former::Ending, "two live queues");
        old.release_queue(1);
        old.queue_leaves(2);
        assert_eq!(registry.former(&new), Former::Ending);
        old.queue_strays(2);
        assert_eq!((registry.former(&new), old.live_queues()), (Former::MayLand, 0));
        // Controllers that come and go do not make it forgotten.
        registry.remove(&of(&registry, "nqn.2026-01.test:a", host, 1));
        assert_eq!(registry.former(&new), Former::MayLand);
        old.stray_ended();
        assert_eq!(registry.former(&new), Former::Over);
    }

    #[test]
    fn a_host_has_one_number_for_all_its_controllers_and_no_other_has_it() {
        let registry = Registry::default();
        let host = |name: &str| nqn(&format!("nqn.2026-01.test:{name}"));
        let make = |name: &str, id| of(&registry, "nqn.2026-01.test:a", host(name), id);
        let first = make("x", 1);
        let again = of(&registry, "nqn.2026-01.test:b", host("x"), 1);
        let (second, third) = (make("y", 1), make("x", 2));
        assert_eq!([&first, &again, &second, &third].map(|it| it.client), [1, 1, 2, 3]);
        registry.remove(&second);
        assert_eq!([make("z", 9), make("z", 9), make("y", 1)].map(|it| it.client), [4, 4, 2]);
        assert_eq!(registry.hosts()[1], (host("y"), [1; 16]));
        // Beyond those that are kept, numbers are used again.
        for at in 5..=HOSTS_KEPT {
            let controller = make(&format!("k{at}"), 9);
            assert_eq!(controller.client, at);
            registry.remove(&controller);
        }
        let [first, second] = ["m", "n"].map(|name| make(name, 9));
        assert_eq!([&first, &second].map(|it| it.client), [256, 257]);
        registry.remove(&first);
        assert_eq!(["o", "n", "z"].map(|name| make(name, 9).client), [256, 257, 4]);
    }
}
