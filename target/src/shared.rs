//! State of controllers that all cores share: atomics on the data path; a registry and connection lists under
//! locks.
//!
//! The admin queue's core owns the `Controller`; each I/O queue, on any core, has an
//! [`Arc<ControllerShared>`]. A command on an I/O queue costs a few relaxed loads (`is_ready`, `has_traffic`,
//! `feature_bits`) and, about once per keep-alive period, one store (`has_traffic`).

mod membership;

use spindle_nvme_transport::ConnectionId;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use nvme_spec::nqn::Nqn;
use nvme_spec::optimistic::Attachment;
use spindle_nvme_transport::Peer;
use spindle_reactor::clock::Nanos;
use spindle_reactor::lock::Lock;
use spindle_reactor::mem::SealedFrames;
pub use spindle_target_card::Wake;

use self::membership::DiskMembership;

/// Most I/O queues of one controller: the number of bits in the bit map of [`ControllerShared`].
pub const IO_QUEUES_MAX: u16 = 128;

/// Connection of one queue of a controller, for operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConnection {
    /// 0: the admin queue.
    pub qid: u16,
    /// Index of the core that serves the queue.
    pub core: usize,
    /// Addresses and transport of the connection.
    pub peer: Peer,
}

/// Groups of disks whose memory is counted together: two disks of one group make a host wait for the
/// memory of one of them earlier, and nothing else.
pub(crate) const MEMORY_GROUPS: usize = 8;

pub(crate) fn memory_group(disk: usize) -> usize {
    disk % MEMORY_GROUPS
}

/// What one host has of the memory of disks, on all cores and connections.
#[derive(Debug, Default)]
pub(crate) struct HostMemory {
    /// Bytes of disk memory for data that the host has not sent yet, and of large replies that it has not
    /// taken, by [`memory_group`] of the disk.
    disk_bytes: [AtomicU64; MEMORY_GROUPS],
    /// The log says that the host keeps memory without progress.
    is_stalled: AtomicBool,
}

impl HostMemory {
    /// Bytes of the disks of a group.
    #[inline]
    pub(crate) fn disk_bytes(&self, group: usize) -> u64 {
        self.disk_bytes[group].load(Ordering::Relaxed)
    }

    pub(crate) fn all_disk_bytes(&self) -> u64 {
        self.disk_bytes.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn add(&self, disk: usize, bytes: u64) {
        self.disk_bytes[memory_group(disk)].fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn remove(&self, disk: usize, bytes: u64) {
        self.disk_bytes[memory_group(disk)].fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Returns true for the first queue pair of the host that is found stalled.
    pub(crate) fn note_stalled(&self) -> bool {
        !self.is_stalled.swap(true, Ordering::Relaxed)
    }
}

/// State of a controller that all cores share.
#[derive(Debug)]
pub struct ControllerShared {
    /// CNTLID; unique in the subsystem while the controller exists.
    pub cntlid: u16,
    /// SUBNQN of the admin Connect; may be that of the discovery subsystem. The
    /// [`Subsystem`](crate::snapshot::Subsystem) is not stored, since a reload replaces it.
    pub subsystem_nqn: Nqn,
    /// HOSTNQN of the admin Connect.
    pub host_nqn: Nqn,
    /// HOSTID of the admin Connect.
    pub host_id: [u8; 16],
    /// Client identifier of the host (HOSTNQN and HOSTID), from 1, by which disks distinguish hosts.
    /// Connected hosts have different identifiers. Identifiers up to [`HOSTS_KEPT`] stay assigned to their
    /// host after it disconnects. 0: a discovery controller, or all identifiers were in use.
    pub client: u16,
    /// Memory of disks that the host has, over all its controllers.
    pub(crate) memory: Arc<HostMemory>,
    /// Index of the core that owns the admin queue.
    pub admin_core: usize,
    /// Slot of the admin queue on `admin_core`; 0, which is never valid, before Connect has succeeded.
    admin_queue: AtomicU32,
    /// Enabled, and neither shut down nor ended: I/O commands are accepted.
    is_ready: AtomicBool,
    /// The controller has failed, was removed, or was ended by End Former Associations; never cleared.
    is_gone: AtomicBool,
    /// QIDs in use, bit `qid - 1`: connected I/O queues, and ended I/O queues with commands at a disk for at
    /// most `ORPHAN_MAX`.
    queues: [AtomicU64; 2],
    /// Connections of the queues. Locked at Connect, at the end of an I/O queue, by operators' queries, and
    /// when a host was silent for its keep-alive time-out.
    connections: Lock<Vec<QueueConnection>>,
    /// Number of ended I/O queues with commands at a disk for at most `ORPHAN_MAX`; their QIDs stay in use.
    orphaned_queues: AtomicU32,
    /// Number of ended I/O queues with commands at a disk for longer than `ORPHAN_MAX`; their QIDs are free.
    expired_orphans: AtomicU32,
    /// Token of the latest End Former Associations on this controller; 0: none.
    former_token: AtomicU64,
    /// Set when a command arrives on any queue; cleared by the keep-alive timer (traffic-based keep alive)
    /// and when the controller is enabled.
    has_traffic: AtomicBool,
    /// True once an I/O queue was connected with a HOSTID other than the admin queue's.
    has_other_host_id: AtomicBool,
    /// The host has attached to a namespace: completions of its Reads have page references.
    has_attached: AtomicBool,
    /// Number of resets. A grant for optimistic reads does not outlive one.
    resets: AtomicU32,
    optimistic_connections: AtomicU32,
    /// The disk of the membership, and the number of the member: see [`member_word`]; 0: no member.
    member: AtomicU64,
    membership: Lock<Option<DiskMembership>>,
    /// Features that I/O queues read: bit 0 = volatile write cache enabled.
    pub feature_bits: AtomicU32,
}

impl ControllerShared {
    /// Creates a controller that is not ready and has no queues. `client` is 0; the write cache is enabled.
    #[must_use]
    pub fn new(cntlid: u16, subsystem_nqn: Nqn, host_nqn: Nqn, host_id: [u8; 16], admin_core: usize) -> Self {
        ControllerShared {
            cntlid,
            subsystem_nqn,
            host_nqn,
            host_id,
            client: 0,
            memory: Arc::default(),
            admin_core,
            admin_queue: AtomicU32::new(0),
            is_ready: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            queues: [const { AtomicU64::new(0) }; 2],
            connections: Lock::default(),
            orphaned_queues: AtomicU32::new(0),
            expired_orphans: AtomicU32::new(0),
            former_token: AtomicU64::new(0),
            has_traffic: AtomicBool::new(false),
            has_other_host_id: AtomicBool::new(false),
            has_attached: AtomicBool::new(false),
            resets: AtomicU32::new(0),
            optimistic_connections: AtomicU32::new(0),
            member: AtomicU64::new(0),
            membership: Lock::new(None),
            feature_bits: AtomicU32::new(1),
        }
    }

    /// Returns true if completions of Reads have page references, for optimistic reads.
    #[inline]
    #[must_use]
    pub fn has_attached(&self) -> bool {
        self.has_attached.load(Ordering::Relaxed)
    }

    /// The host has attached to a namespace.
    pub(crate) fn set_attached(&self) {
        self.has_attached.store(true, Ordering::Relaxed);
    }

    /// The controller was reset: its host must attach and join again.
    pub(crate) fn note_reset(&self) {
        self.end_membership();
        self.has_attached.store(false, Ordering::Relaxed);
        self.resets.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of resets.
    #[must_use]
    pub fn resets(&self) -> u32 {
        self.resets.load(Ordering::Relaxed)
    }

    /// True while I/O commands are accepted.
    #[inline]
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::Relaxed)
    }

    /// True unless the host has disabled the volatile write cache (feature 06h).
    #[inline]
    #[must_use]
    pub fn is_write_cache_on(&self) -> bool {
        self.feature_bits.load(Ordering::Relaxed) & 1 != 0
    }

    /// Sets whether I/O commands are accepted. Called at enable, reset, shutdown and end.
    pub fn set_ready(&self, is_ready: bool) {
        self.is_ready.store(is_ready, Ordering::Release);
    }

    /// Sets the slot of the admin queue on the admin core, at Connect.
    pub fn set_admin_queue(&self, queue: ConnectionId) {
        self.admin_queue.store(queue.to_wire(), Ordering::Relaxed);
    }

    /// Slot of the admin queue on [`ControllerShared::admin_core`]; not valid before Connect has succeeded.
    #[must_use]
    pub fn admin_queue(&self) -> ConnectionId {
        ConnectionId::from_wire(self.admin_queue.load(Ordering::Relaxed))
    }

    /// True once the controller has failed, was removed, or was ended by End Former Associations. After
    /// `is_ready` has returned false, a caller checks this flag to distinguish the end of the controller from
    /// a reset or shutdown.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        fence(Ordering::Acquire);
        self.is_gone.load(Ordering::Relaxed)
    }

    /// Marks the controller as ended: from now on I/O commands and new queues are refused.
    pub fn set_gone(&self) {
        self.is_gone.store(true, Ordering::Relaxed);
        self.set_ready(false);
        // Pairs with the fence in `claim_queue`: either the claim reads this flag as set, or a later count
        // includes the claimed queue.
        fence(Ordering::SeqCst);
    }

    /// Records that a command arrived on a queue of the controller.
    #[inline]
    pub fn note_traffic(&self) {
        if !self.has_traffic.load(Ordering::Relaxed) {
            self.has_traffic.store(true, Ordering::Relaxed);
        }
    }

    /// Clears the traffic flag. True when a command arrived since the last call.
    #[must_use]
    pub fn take_traffic(&self) -> bool {
        self.has_traffic.swap(false, Ordering::Relaxed)
    }

    /// Records that an I/O queue has another HOSTID than the admin queue; true the first time.
    #[must_use]
    pub fn note_other_host_id(&self) -> bool {
        !self.has_other_host_id.swap(true, Ordering::Relaxed)
    }

    /// Claims I/O queue `qid` (1 ..= [`IO_QUEUES_MAX`]); false when it is in use or out of range.
    #[must_use]
    pub fn claim_queue(&self, qid: u16) -> bool {
        let Some((word, bit)) = Self::qid_bit(qid) else { return false };
        let is_free = self.queues[word].fetch_or(bit, Ordering::AcqRel) & bit == 0;
        fence(Ordering::SeqCst);
        is_free
    }

    /// Adds the connection of a queue that was claimed, or of the admin queue.
    pub fn add_connection(&self, connection: QueueConnection) {
        self.connections.lock().push(connection);
    }

    /// Indices of the cores with a queue of the controller; a core with several is returned several times.
    pub(crate) fn cores(&self) -> impl Iterator<Item = usize> {
        let cores: Vec<usize> = self.connections.lock().iter().map(|it| it.core).collect();
        cores.into_iter()
    }

    /// Connections of the controller's queues, sorted by QID.
    #[must_use]
    pub fn connections(&self) -> Vec<QueueConnection> {
        let mut connections = self.connections.lock().clone();
        connections.sort_unstable_by_key(|it| it.qid);
        connections
    }

    /// Frees the QID of I/O queue `qid`, which has ended without commands at a disk or whose Connect has
    /// failed. Removes its connection.
    pub fn release_queue(&self, qid: u16) {
        self.connections.lock().retain(|it| it.qid != qid);
        if let Some((word, bit)) = Self::qid_bit(qid) {
            self.queues[word].fetch_and(!bit, Ordering::AcqRel);
        }
        self.drop_membership();
    }

    /// Removes the connection of I/O queue `qid`, ended with commands at a disk. The QID stays in use.
    pub fn queue_orphaned(&self, qid: u16) {
        self.connections.lock().retain(|it| it.qid != qid);
        self.orphaned_queues.fetch_add(1, Ordering::AcqRel);
    }

    /// Frees the QID of ended I/O queue `qid`: the disks have completed its commands.
    pub fn orphan_completed(&self, qid: u16) {
        self.release_queue(qid);
        self.orphaned_queues.fetch_sub(1, Ordering::AcqRel);
    }

    /// Frees the QID of ended I/O queue `qid`, whose commands have been at a disk for longer than
    /// `ORPHAN_MAX`.
    pub fn orphan_expired(&self, qid: u16) {
        // Incremented first, so that a reader of both counters finds the queue in at least one of them.
        self.expired_orphans.fetch_add(1, Ordering::AcqRel);
        self.orphan_completed(qid);
    }

    /// Records that the disks have completed the commands of a queue that had exceeded `ORPHAN_MAX`.
    pub fn expired_orphan_completed(&self) {
        self.expired_orphans.fetch_sub(1, Ordering::AcqRel);
    }

    /// True while a disk may have commands of a queue that exceeded `ORPHAN_MAX`.
    #[must_use]
    pub fn has_expired_orphans(&self) -> bool {
        self.expired_orphans.load(Ordering::Acquire) > 0
    }

    /// True while a new association of the host must wait. Either an ended queue has commands at a disk, for
    /// at most `ORPHAN_MAX`; or the controller has ended and its I/O queues are not closed.
    #[must_use]
    pub fn has_orphans(&self) -> bool {
        self.orphaned_queues.load(Ordering::Acquire) > 0 || (self.is_gone() && self.taken_qids() > 0)
    }

    /// Number of QIDs in use: connected I/O queues, and ended I/O queues with commands at a disk for at most
    /// `ORPHAN_MAX`.
    #[must_use]
    pub fn taken_qids(&self) -> u32 {
        self.queues.iter().map(|word| word.load(Ordering::Acquire).count_ones()).sum()
    }

    /// Number of I/O queues with a connection.
    #[must_use]
    pub fn connected_queues(&self) -> usize {
        self.connections.lock().iter().filter(|it| it.qid != 0).count()
    }

    /// Number of optimistic connections. The service that admits them counts.
    #[must_use]
    pub fn optimistic_connections(&self) -> &AtomicU32 {
        &self.optimistic_connections
    }

    /// Compares SUBNQN and HOSTNQN; for hosts without HOSTNQN also HOSTID.
    fn matches_host_and_subsystem(&self, subsystem_nqn: &Nqn, host_nqn: &Nqn, host_id: &[u8; 16]) -> bool {
        self.host_nqn == *host_nqn
            && (!host_nqn.is_unnamed() || self.host_id == *host_id)
            && self.subsystem_nqn == *subsystem_nqn
    }

    fn qid_bit(qid: u16) -> Option<(usize, u64)> {
        let index = qid.checked_sub(1).filter(|index| *index < IO_QUEUES_MAX)?;
        Some((usize::from(index / 64), 1 << (index % 64)))
    }
}

/// State of a host's former associations with a subsystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FormerState {
    /// No controller is ending, and no disk has commands of an ended queue.
    Over,
    /// The queues of an ended controller are not closed, or a disk has had commands of an ended queue for at
    /// most `ORPHAN_MAX`.
    Ending,
    /// No controller is ending, but a disk has had commands of an ended queue for longer than `ORPHAN_MAX`.
    /// Writes among them may still be executed.
    MayLand,
}

/// Number of hosts that keep their client identifier after they disconnect; also the largest such identifier.
pub const HOSTS_KEPT: u16 = 255;

fn client_number(at: usize) -> u16 {
    u16::try_from(at + 1).unwrap_or(0)
}

/// Receive passes of the cores ([`TargetCore`](crate::core::TargetCore)). Not used while hosts send in time.
#[derive(Debug, Default)]
pub struct Passes {
    /// Passes that began before this time do not suffice.
    wanted: AtomicU64,
    /// By core: begin of its last complete pass.
    received: Lock<Vec<Nanos>>,
}

impl Passes {
    /// Time at or after which each core must begin a pass.
    pub(crate) fn wanted(&self) -> Nanos {
        Nanos(self.wanted.load(Ordering::Relaxed))
    }

    /// Asks all cores for a pass that begins at or after `at`.
    pub(crate) fn want(&self, at: Nanos) {
        self.wanted.fetch_max(at.0, Ordering::Relaxed);
    }

    /// Records a complete pass. The lock makes what it received visible to who sees the pass.
    pub(crate) fn complete(&self, core: usize, began: Nanos) {
        let mut received = self.received.lock();
        if received.len() <= core {
            received.resize(core + 1, Nanos::ZERO);
        }
        received[core] = began;
    }

    /// Begin of the last complete pass of `core`.
    pub(crate) fn received(&self, core: usize) -> Nanos {
        self.received.lock().get(core).copied().unwrap_or(Nanos::ZERO)
    }
}

/// All controllers of the process. Locked at Connect, End Former Associations, Identify (CNS 1Ch) and the end
/// of a controller; in each timer period while a Connect or End Former Associations waits; and by queries.
#[derive(Default)]
pub struct Registry {
    controllers: Lock<Vec<Arc<ControllerShared>>>,
    /// Ended controllers whose I/O queues are not all closed or have commands at a disk. Entries without such
    /// queues are removed when the next controller ends.
    ended: Lock<Vec<Arc<ControllerShared>>>,
    /// HOSTNQN and HOSTID of the hosts with client identifiers 1 to [`HOSTS_KEPT`], in order.
    hosts: Lock<Vec<(Nqn, [u8; 16])>>,
    has_several_hosts: AtomicBool,
    stalled_hosts: AtomicU64,
    passes: Passes,
    /// The service for optimistic reads, if there is one.
    optimistic: OnceLock<Box<dyn OptimisticService>>,
    wake: OnceLock<Wake>,
    /// Start of the next search for a free CNTLID, modulo the length of the range, so that a CNTLID is not
    /// reused at once.
    next: AtomicU32,
}

/// Admits hosts to caches that they read by RDMA. Called on reactor cores.
pub trait OptimisticService: Send + Sync {
    /// Returns the answer to Attach of namespace `nsid` of `controller`, whose cache has `frames`. `None`:
    /// too many tokens are unused.
    fn attach(
        &self,
        controller: &Arc<ControllerShared>,
        nsid: u32,
        frames: Arc<dyn SealedFrames>,
    ) -> Option<Attachment>;
}

impl Registry {
    pub(crate) fn passes(&self) -> &Passes {
        &self.passes
    }

    /// Sets the service for optimistic reads. No effect if there is one already.
    pub fn set_optimistic(&self, service: Box<dyn OptimisticService>) {
        let _ = self.optimistic.set(service);
    }

    /// Returns the service for optimistic reads; `None`: hosts cannot attach.
    #[must_use]
    pub fn optimistic(&self) -> Option<&dyn OptimisticService> {
        self.optimistic.get().map(|service| &**service)
    }

    /// Creates and registers a controller with a free CNTLID of `range` (inclusive). `None`: all are in use.
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
                // A discovery controller reads and writes nothing, and any host may have one.
                let client = match subsystem_nqn.is_discovery() {
                    true => 0,
                    false => self.client_of(&controllers, &host_nqn, &host_id),
                };
                let memory = match controllers.iter().find(|other| other.client == client) {
                    Some(other) => Arc::clone(&other.memory),
                    None => Arc::default(),
                };
                let shared = ControllerShared::new(cntlid, subsystem_nqn, host_nqn, host_id, admin_core);
                let shared = Arc::new(ControllerShared { client, memory, ..shared });
                controllers.push(Arc::clone(&shared));
                self.count_hosts(&controllers);
                return Some(shared);
            }
        }
        None
    }

    /// Returns the client identifier of a host and assigns one if the host has none. The first [`HOSTS_KEPT`]
    /// hosts keep their identifier. Any other host uses the identifier of its other controllers, or the
    /// lowest free one. 0: none is free.
    fn client_of(&self, controllers: &[Arc<ControllerShared>], host_nqn: &Nqn, host_id: &[u8; 16]) -> u16 {
        let mut hosts = self.hosts.lock();
        if let Some(at) = hosts.iter().position(|(nqn, id)| nqn == host_nqn && id == host_id) {
            return client_number(at);
        }
        if hosts.len() < usize::from(HOSTS_KEPT) {
            hosts.push((*host_nqn, *host_id));
            return client_number(hosts.len() - 1);
        }
        let is_of_host = |it: &&Arc<ControllerShared>| it.host_nqn == *host_nqn && it.host_id == *host_id;
        if let Some(other) = controllers.iter().find(is_of_host) {
            return other.client;
        }
        (HOSTS_KEPT + 1..=u16::MAX).find(|own| controllers.iter().all(|it| it.client != *own)).unwrap_or(0)
    }

    /// HOSTNQN and HOSTID of hosts with client identifiers 1 to [`HOSTS_KEPT`], in order, connected or not.
    #[must_use]
    pub fn hosts(&self) -> Vec<(Nqn, [u8; 16])> {
        self.hosts.lock().clone()
    }

    pub(crate) fn count_stalled_host(&self) {
        self.stalled_hosts.fetch_add(1, Ordering::Relaxed);
    }

    /// Hosts that kept memory without progress since the start, each once.
    #[must_use]
    pub fn stalled_hosts(&self) -> u64 {
        self.stalled_hosts.load(Ordering::Relaxed)
    }

    /// Returns the controller `cntlid` of this subsystem; `None`: there is none, or it was removed.
    #[must_use]
    pub fn find(&self, subsystem_nqn: &Nqn, cntlid: u16) -> Option<Arc<ControllerShared>> {
        self.controllers
            .lock()
            .iter()
            .find(|c| c.cntlid == cntlid && c.subsystem_nqn == *subsystem_nqn)
            .cloned()
    }

    /// True while a new association of this host with the subsystem must wait for queues or commands of a
    /// former association.
    #[must_use]
    pub fn has_orphans(&self, subsystem_nqn: &Nqn, host_nqn: &Nqn, host_id: &[u8; 16]) -> bool {
        let is_one = |it: &Arc<ControllerShared>| {
            it.matches_host_and_subsystem(subsystem_nqn, host_nqn, host_id) && it.has_orphans()
        };
        self.controllers.lock().iter().any(is_one) || self.ended.lock().iter().any(is_one)
    }

    /// Sets the token of `own`, and marks every other controller of the same subsystem, HOSTNQN, HOSTID and
    /// token as ended. Returns the marked controllers; the caller closes their queues. `None`: `own` has
    /// already ended, and nothing changes.
    pub fn end_former(&self, own: &Arc<ControllerShared>, token: u64) -> Option<Vec<Arc<ControllerShared>>> {
        let controllers = self.controllers.lock();
        // Checked under the lock, so that two controllers cannot end each other.
        if own.is_gone() {
            return None;
        }
        own.former_token.store(token, Ordering::Relaxed);
        let is_former = |it: &&Arc<ControllerShared>| {
            !Arc::ptr_eq(it, own)
                && it.matches_host_and_subsystem(&own.subsystem_nqn, &own.host_nqn, &own.host_id)
                && it.host_id == own.host_id
                && it.former_token.load(Ordering::Relaxed) == token
                && !it.is_gone()
        };
        let former: Vec<_> = controllers.iter().filter(is_former).cloned().collect();
        former.iter().for_each(|it| it.set_gone());
        Some(former)
    }

    /// Returns the state of the former associations of this controller's host with its subsystem.
    #[must_use]
    pub fn former_state(&self, own: &Arc<ControllerShared>) -> FormerState {
        let is_one = |it: &&Arc<ControllerShared>| {
            !Arc::ptr_eq(it, own)
                && it.matches_host_and_subsystem(&own.subsystem_nqn, &own.host_nqn, &own.host_id)
        };
        let mut has_expired_orphans = false;
        // `controllers` is read first: `remove` adds an ending controller to `ended` before it removes the
        // controller from `controllers`.
        for it in self.controllers.lock().iter().filter(is_one) {
            // Ended but still registered: its admin queue is not closed.
            if it.is_gone() || it.has_orphans() {
                return FormerState::Ending;
            }
            has_expired_orphans |= it.has_expired_orphans();
        }
        for it in self.ended.lock().iter().filter(is_one) {
            if it.has_orphans() {
                return FormerState::Ending;
            }
            has_expired_orphans |= it.has_expired_orphans();
        }
        if has_expired_orphans { FormerState::MayLand } else { FormerState::Over }
    }

    /// Returns the controllers whose admin queue is not closed, including failed controllers.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<ControllerShared>> {
        self.controllers.lock().clone()
    }

    /// Removes a controller whose admin queue has closed, and marks it as ended: its CNTLID is free. Keeps
    /// the controller in `ended` while an I/O queue is open or has commands at a disk.
    pub fn remove(&self, controller: &Arc<ControllerShared>) {
        controller.set_gone();
        let is_left = |it: &Arc<ControllerShared>| it.taken_qids() > 0 || it.has_expired_orphans();
        let mut ended = self.ended.lock();
        ended.retain(is_left);
        if is_left(controller) {
            ended.push(Arc::clone(controller));
        }
        drop(ended);
        let mut controllers = self.controllers.lock();
        controllers.retain(|other| !Arc::ptr_eq(other, controller));
        self.count_hosts(&controllers);
    }

    /// Sets `has_several_hosts`.
    fn count_hosts(&self, controllers: &[Arc<ControllerShared>]) {
        let mut hosts = controllers.iter().filter(|it| !it.subsystem_nqn.is_discovery());
        let first = hosts.next().map(|it| it.client);
        self.has_several_hosts.store(hosts.any(|it| Some(it.client) != first), Ordering::Relaxed);
    }

    /// True when no more than one host (HOSTNQN and HOSTID) has controllers of subsystems.
    #[must_use]
    pub fn is_one_host(&self) -> bool {
        !self.has_several_hosts.load(Ordering::Relaxed)
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
        // The state stays `Ending` until the core of `old` has removed it.
        assert_eq!(
            (registry.former_state(&new), registry.former_state(&others[0])),
            (FormerState::Ending, FormerState::Over)
        );
        registry.remove(&old);
        assert_eq!(registry.former_state(&new), FormerState::Over);
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
        assert_eq!(
            (registry.former_state(&new), registry.former_state(&other)),
            (FormerState::Ending, FormerState::Over)
        );
    }

    #[test]
    fn what_is_left_of_a_queue_is_waited_for_and_may_land_when_nobody_waits_any_more() {
        let registry = Registry::default();
        let host = nqn("nqn.2026-01.test:host");
        let [old, new] = [1, 1].map(|id| of(&registry, "nqn.2026-01.test:a", host, id));
        for qid in [1, 2] {
            assert!(old.claim_queue(qid));
            assert_eq!(registry.former_state(&new), FormerState::Over, "it is alive");
        }
        registry.remove(&old);
        assert_eq!(registry.former_state(&new), FormerState::Ending, "two live queues");
        old.release_queue(1);
        old.queue_orphaned(2);
        assert_eq!(registry.former_state(&new), FormerState::Ending);
        old.orphan_expired(2);
        assert_eq!((registry.former_state(&new), old.taken_qids()), (FormerState::MayLand, 0));
        // The end of another controller does not remove `old` from the ended ones.
        registry.remove(&of(&registry, "nqn.2026-01.test:a", host, 1));
        assert_eq!(registry.former_state(&new), FormerState::MayLand);
        old.expired_orphan_completed();
        assert_eq!(registry.former_state(&new), FormerState::Over);
    }

    #[test]
    fn one_host_with_several_controllers_is_alone_until_another_comes() {
        let registry = Registry::default();
        let host = |name: &str| nqn(&format!("nqn.2026-01.test:{name}"));
        assert!(registry.is_one_host());
        let first = of(&registry, "nqn.2026-01.test:a", host("x"), 1);
        let second = of(&registry, "nqn.2026-01.test:b", host("x"), 1);
        assert!(registry.is_one_host() && Arc::ptr_eq(&first.memory, &second.memory));
        let discovery = of(&registry, "nqn.2014-08.org.nvmexpress.discovery", host("y"), 1);
        assert!(registry.is_one_host(), "discovery takes no memory from hosts");
        let other = of(&registry, "nqn.2026-01.test:a", host("x"), 2);
        assert!(!registry.is_one_host() && !Arc::ptr_eq(&first.memory, &other.memory));
        registry.remove(&other);
        assert!(registry.is_one_host());
        registry.remove(&discovery);
    }

    #[test]
    fn a_discovery_controller_takes_no_number_of_a_host() {
        let registry = Registry::default();
        let discover = |name: String| {
            registry.create(Nqn::discovery(), (1, 1000), nqn(&name), [1; 16], 0).expect("an identifier")
        };
        for at in 0..2 * HOSTS_KEPT {
            assert_eq!(discover(format!("nqn.2026-01.test:d{at}")).client, 0);
        }
        assert_eq!(registry.hosts(), []);
        assert_eq!(of(&registry, "nqn.2026-01.test:a", nqn("nqn.2026-01.test:d7"), 1).client, 1);
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
        // Numbers above `HOSTS_KEPT` are used again.
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
