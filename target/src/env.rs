//! [`Env`]: state that all queue pairs of one core share, passed to a queue pair in each call.
//!
//! [`Env`] has the core's pools, disk handles, configuration snapshots, controller registry, time and
//! counters, and two outboxes: messages for cores ([`Message`]) and notices for the log ([`Notice`]). A queue
//! pair has no access to other queue pairs. It sends them messages, even on the same core.

use spindle_nvme_transport::{ConnectionId, RequestId};
use std::collections::VecDeque;
use std::sync::Arc;

use spindle_nvme_transport::CloseReason;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Holder, Pool, Share};
use spindle_target_disk::{DiskChannel, Done};

use crate::busy::Busy;
use crate::controller::ErrorRecord;
use crate::notice::{Notice, Notices};
use crate::orphaned_commands::OrphanedCommands;
use crate::qpair::fast_path::FAST_PATH_BYTES_MAX;
use crate::qpair::owner;
use crate::shared::{ControllerShared, MEMORY_GROUPS, Registry, memory_group};
use crate::snapshot::{DiskId, Snapshot};

/// A message from core to core. Messages from one core to another arrive in order.
#[derive(Clone)]
pub enum Message {
    /// Close the I/O queues of this controller.
    CloseQueues(Arc<ControllerShared>, CloseReason),
    /// Close the controller's admin connection, which ends the controller.
    CloseController(Arc<ControllerShared>, CloseReason),
    /// Abort a command, if its queue is on the receiving core.
    Abort {
        /// Controller of the Abort and of the command.
        controller: Arc<ControllerShared>,
        /// QID of the command's queue.
        qid: u16,
        /// CID of the command.
        cid: u16,
        /// The Abort, to which `Aborted` is sent.
        from: AbortFrom,
    },
    /// Reply to `Abort`; each core sends one.
    Aborted {
        /// The Abort.
        from: AbortFrom,
        /// The core had the command and ended it without effect.
        is_aborted: bool,
    },
    /// A command on an I/O queue of this controller failed: an entry for the error log.
    Failed(Arc<ControllerShared>, ErrorRecord),
    /// Serve a new configuration.
    Snapshot(Arc<Snapshot>),
    /// A core serves a new configuration.
    SnapshotApplied {
        /// Index of the sender.
        core: usize,
        /// Generation of this configuration.
        generation: u64,
    },
    /// Shutdown: accept no commands, complete those in flight, close the connections.
    Shutdown,
}

/// An Abort command that waits for `Aborted` of all cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AbortFrom {
    /// Core of the admin queue.
    pub core: usize,
    /// Slot of the admin queue on that core.
    pub qpair: ConnectionId,
    /// Slot of the request in the admin queue.
    pub slot: RequestId,
}

/// State of a core, passed to its queue pairs in each call. See the module.
pub struct Env {
    /// Index of this core, from 0.
    pub core: usize,
    /// Number of cores of the process.
    pub cores: usize,
    /// Time of this turn; constant within the turn.
    pub now: Nanos,
    /// Start of this core, used as the start of the process, on the clock of `now`.
    pub process_started: Nanos,
    /// Wall clock at this turn, ms since 1970.
    pub wall_ms: u64,
    /// The newest configuration of this core, which I/O queues use.
    pub snapshot: Arc<Snapshot>,
    /// The newest configuration that all cores serve, since a host uses a namespace on all its queues at
    /// once. Used by Identify, features, log pages, discovery and Connect of admin queues.
    pub advertised_snapshot: Arc<Snapshot>,
    /// Controllers of the process, shared by all cores.
    pub registry: Arc<Registry>,
    /// Buffers of the data path.
    pub pool: Pool,
    /// Buffers that only admin and Connect commands use, so that I/O cannot starve them.
    pub admin_pool: Pool,
    /// This core's disks, by [`DiskId`]; `None`: removed, or could not be opened.
    pub disks: Vec<Option<Box<dyn DiskChannel>>>,
    /// Messages with the index of the receiving core, maybe this one. Drained by this core and its shell.
    pub outbox: VecDeque<(usize, Message)>,
    /// Log entries, drained by the app.
    pub notices: Notices,
    /// Slot of the queue pair that is being called.
    pub(crate) current: ConnectionId,
    /// True after [`Message::Shutdown`].
    pub is_draining: bool,
    /// Most bytes of a command on the fast path: MDTS, but at most [`FAST_PATH_BYTES_MAX`].
    pub(crate) fast_path_bytes: u32,
    /// Disks whose memory requests of this core wait for, a bit each (index modulo 64): new requests must
    /// queue behind them. Two disks with one bit cost a turn, and nothing else.
    pub(crate) disk_claims: u64,
    /// Hosts whose requests have claims.
    pub(crate) claimants: Claimants,
    /// Hosts whose requests had claims at this timer check and at the one before.
    pub(crate) starved: Claimants,
    /// Holder in the admin pool of buffers for data of Connect that is not sent yet; one for all connections.
    pub(crate) unconnected_holder: ConnectionId,
    /// True if an admin or Connect command got no buffer in this timer period: those that keep one have
    /// shorter time-outs.
    pub(crate) is_admin_short: bool,
    /// Queue pairs that waited for memory at this timer check.
    pub(crate) waiting_queues: u32,
    /// Begin of the last complete receive pass of this core: all that had arrived by then was handled.
    pub(crate) received: Nanos,
    /// A time-out has passed that waits for a receive pass.
    pub(crate) wants_pass: bool,
    /// For how long before this check of the time-outs the core did not run; at most some ms if it did.
    pub(crate) late: Nanos,
    /// Free bytes of the disk with the least free memory, by [`memory_group`]; `u64::MAX`: it is not scarce.
    /// Updated by the timer.
    pub(crate) scarce_bytes: [u64; MEMORY_GROUPS],
    /// Requests that waited for memory since the start.
    pub waits: u64,
    /// Commands that arrived since the start.
    pub commands: u64,
    pub(crate) done: Vec<Done>,
    /// Commands at disks whose queue pair has ended.
    pub(crate) orphaned_commands: OrphanedCommands,
    pub(crate) busy: Busy,
    /// Admin queues of this core with a Next that waits for entries.
    pub(crate) next_queues: Vec<ConnectionId>,
}

/// Hosts whose requests wait for memory that they are entitled to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Claimants {
    first: Option<Holder>,
    has_others: bool,
}

impl Claimants {
    pub(crate) fn add(&mut self, holder: Holder) {
        self.has_others |= self.first.is_some_and(|first| first != holder);
        self.first.get_or_insert(holder);
    }

    /// True when a host other than `holder` waits.
    pub(crate) fn has_other_than(self, holder: Holder) -> bool {
        self.has_others || self.first.is_some_and(|first| first != holder)
    }
}

/// Index of no disk, in what named a disk that this core has closed.
pub(crate) const NO_DISK: usize = usize::MAX;

/// Capacity of `Env::done`: most completions of one poll of a disk. It is more than most disks have in
/// flight: replies to further completions would leave a turn later, in batches of their own
/// (docs/lab-notes.md, "A cache in front of a disk").
pub(crate) const DONE_BATCH: usize = 1024;

impl Env {
    /// This core's handle on the disk with this index; `None`: the disk was removed or could not be opened.
    #[inline]
    pub fn disk(&mut self, disk: usize) -> Option<&mut (dyn DiskChannel + 'static)> {
        self.disks.get_mut(disk)?.as_deref_mut()
    }

    /// As [`Env::disk`], by shared reference.
    #[inline]
    pub(crate) fn disk_ref(&self, disk: usize) -> Option<&dyn DiskChannel> {
        self.disks.get(disk)?.as_deref()
    }

    /// Cancels the disk commands of an ended queue pair. Returns the completions to come. May be repeated.
    #[cold]
    pub(crate) fn cancel_commands_of(&mut self, qpair: ConnectionId) -> usize {
        self.disks.iter_mut().flatten().map(|disk| disk.cancel_owner(owner(qpair))).sum()
    }

    /// The share of a host in the pool: `client` is that of its controllers.
    #[inline]
    pub(crate) fn share(&self, client: u16) -> Share<'_> {
        self.pool.share(Holder::host(client))
    }

    /// The share of `holder` in the admin pool, or in the data pool if `bytes` is more than the admin pool's
    /// largest buffer.
    pub(crate) fn admin_share(&self, holder: Holder, bytes: u32) -> Share<'_> {
        if bytes <= self.admin_pool.buffer_bytes_max() {
            self.admin_pool.share(holder)
        } else {
            self.pool.share(holder)
        }
    }

    /// True when a new write to this disk must queue behind a request that waits for the disk's memory.
    #[inline]
    pub(crate) fn is_disk_claimed(&self, disk: usize) -> bool {
        self.disk_claims >> (disk % 64) & 1 != 0
    }

    /// Makes new writes to this disk queue behind a request of `holder` that waits for the disk's memory.
    pub(crate) fn claim_disk(&mut self, disk: usize, holder: Holder) {
        self.disk_claims |= 1 << (disk % 64);
        self.claimants.add(holder);
    }

    /// Ends all claims, before disks and waiting requests are tried again in their order.
    pub(crate) fn clear_claims(&mut self) {
        self.pool.clear_claims();
        self.disk_claims = 0;
        self.claimants = Claimants::default();
    }

    /// True if `deadline` of a host has passed and all that arrived on this core before it was handled. If
    /// only the first is true, the core makes a receive pass, and the next check finds both true.
    pub(crate) fn has_passed(&mut self, deadline: Nanos) -> bool {
        self.wants_pass |= self.received < deadline && deadline <= self.now;
        deadline <= self.received
    }

    /// As [`Env::has_passed`], for what arrived on any core that has a queue of this controller. The deadline
    /// has passed.
    pub(crate) fn has_passed_on_all(&mut self, controller: &ControllerShared, deadline: Nanos) -> bool {
        let is_received = self.has_passed(deadline);
        let passes = self.registry.passes();
        let own = self.core;
        let are_others = controller.cores().all(|core| core == own || passes.received(core) >= deadline);
        if !are_others {
            passes.want(deadline);
        }
        is_received && are_others
    }

    /// True if what a host owes is late by `limit`: it was owed for `time`, and [`Env::has_passed`].
    pub(crate) fn has_lasted(&mut self, time: Nanos, limit: Nanos) -> bool {
        time >= limit && self.has_passed(self.now - time + limit)
    }

    /// Most bytes of a command on the fast path where a command has at most `transfer_bytes`.
    pub(crate) fn fast_path_bytes_of(transfer_bytes: u32) -> u32 {
        transfer_bytes.min(FAST_PATH_BYTES_MAX)
    }

    /// Tells the pools whether there is one host, which takes nearly all of them.
    pub(crate) fn update_alone(&self) {
        let is_one = self.registry.is_one_host();
        self.pool.set_alone(is_one);
        self.admin_pool.set_alone(is_one);
    }

    /// Updates `scarce_bytes` (a disk's memory is scarce when less is free than two of the largest commands
    /// need) and `starved`, once per timer period. `before`: `claimants` of the last call.
    pub(crate) fn update_scarcity(&mut self, before: Claimants) {
        let is_lasting = before != Claimants::default();
        self.starved = if is_lasting { self.claimants } else { Claimants::default() };
        let enough = 2 * u64::from(self.snapshot.limits.transfer_bytes);
        self.scarce_bytes = [u64::MAX; MEMORY_GROUPS];
        for (index, disk) in
            self.disks.iter().enumerate().filter_map(|(index, it)| Some((index, it.as_ref()?)))
        {
            let (free, scarce) = (disk.free_bytes(), &mut self.scarce_bytes[memory_group(index)]);
            if free < enough {
                *scarce = free.min(*scarce);
            }
        }
    }

    /// Free bytes of the disk with the least free memory; `u64::MAX`: none is scarce.
    pub(crate) fn scarcest_bytes(&self) -> u64 {
        self.scarce_bytes.iter().copied().min().unwrap_or(u64::MAX)
    }

    /// Queues a message to one core, which may be this core.
    pub fn send(&mut self, core: usize, message: Message) {
        self.outbox.push_back((core, message));
    }

    /// Queues a message to all cores, including this core.
    pub fn broadcast(&mut self, message: &Message) {
        for core in 0..self.cores {
            self.outbox.push_back((core, message.clone()));
        }
    }

    /// Queues a log entry; drops and counts it when the queue is full.
    pub fn notice(&mut self, notice: Notice) {
        self.notices.push(notice);
    }

    /// Index of a disk in [`Env::disks`].
    #[must_use]
    pub fn disk_index(id: DiskId) -> usize {
        id.0
    }
}
