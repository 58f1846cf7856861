//! [`Env`]: state that all queue pairs of one core share, passed to a queue pair in each call.
//!
//! [`Env`] has the core's pools, disk handles, configuration snapshots, controller registry, time and
//! counters, and two outboxes: messages for cores ([`Message`]) and notices for the log ([`Notice`]). A queue
//! pair has no access to other queue pairs. It sends them messages, even on the same core.

use spindle_transport::{ConnectionId, RequestId};
use std::collections::VecDeque;
use std::sync::Arc;

use spindle_disk::{Disk, Done};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pool, Share};
use spindle_transport::CloseReason;

use crate::busy::Busy;
use crate::controller::ErrorRecord;
use crate::notice::{Notice, Notices};
use crate::orphaned_commands::OrphanedCommands;
use crate::qpair::owner;
use crate::shared::{ControllerShared, Registry};
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
    pub disks: Vec<Option<Box<dyn Disk>>>,
    /// Messages with the index of the receiving core, which may be this core. Drained by this core and its
    /// shell.
    pub outbox: VecDeque<(usize, Message)>,
    /// Log entries, drained by the app.
    pub notices: Notices,
    /// Slot of the queue pair that is being called.
    pub(crate) current: ConnectionId,
    /// True after [`Message::Shutdown`].
    pub is_draining: bool,
    /// True while requests of this core wait for memory and new requests must queue behind them.
    pub(crate) has_memory_waiters: bool,
    /// Owner in the admin pool of the buffers whose data hosts have not sent yet; the same for all
    /// connections.
    pub(crate) incoming_owner: ConnectionId,
    /// True if a command got no buffer for `incoming_owner` in this timer period.
    pub(crate) is_reserve_short: bool,
    /// Free bytes of the disk with the least free memory; `u64::MAX`: no disk memory is scarce. Updated by
    /// the timer.
    pub(crate) scarce_bytes: u64,
    /// Requests that waited for memory since the start.
    pub waits: u64,
    /// Commands that arrived since the start.
    pub commands: u64,
    pub(crate) done: Vec<Done>,
    /// Commands at disks whose queue pair has ended.
    pub(crate) orphaned_commands: OrphanedCommands,
    /// Measures the busy time of namespaces.
    pub(crate) busy: Busy,
}

/// Initial capacity of `Env::done`: about the most completions of one poll of a disk.
pub(crate) const DONE_BATCH: usize = 128;

impl Env {
    /// This core's handle on the disk with this index; `None`: the disk was removed or could not be opened.
    #[inline]
    pub fn disk(&mut self, disk: usize) -> Option<&mut (dyn Disk + 'static)> {
        self.disks.get_mut(disk)?.as_deref_mut()
    }

    /// As [`Env::disk`], by shared reference.
    #[inline]
    pub(crate) fn disk_ref(&self, disk: usize) -> Option<&dyn Disk> {
        self.disks.get(disk)?.as_deref()
    }

    /// Cancels the disk commands of an ended queue pair. Returns the number of completions to come. May be
    /// called again.
    #[cold]
    pub(crate) fn cancel_commands_of(&mut self, qpair: ConnectionId) -> usize {
        self.disks.iter_mut().flatten().map(|disk| disk.cancel_owner(owner(qpair))).sum()
    }

    /// The current queue pair's share of the pool.
    #[inline]
    pub(crate) fn share(&self) -> Share<'_> {
        self.pool.share(self.current.0)
    }

    /// The current queue pair's share of the admin pool, or of the data pool if `bytes` is more than the
    /// admin pool's largest buffer.
    pub(crate) fn admin_share(&self, bytes: u32) -> Share<'_> {
        if bytes <= self.admin_pool.buffer_bytes_max() {
            self.admin_pool.share(self.current.0)
        } else {
            self.share()
        }
    }

    /// The share of the admin pool for commands whose data the host has not sent yet. All connections use the
    /// same share, so hosts that send no data cannot use up the pool.
    pub(crate) fn incoming_share(&self) -> Share<'_> {
        self.admin_pool.share(self.incoming_owner.0)
    }

    /// Takes a buffer for an admin or Connect command whose data the host sends. `None`: none is free, and
    /// fetches of Connect and admin commands have a shorter time-out at the next timer check.
    pub(crate) fn take_incoming(&mut self, bytes: u32) -> Option<Buf> {
        let buf = self.incoming_share().take_contiguous(bytes);
        self.is_reserve_short |= buf.is_none();
        buf
    }

    /// Updates `scarce_bytes`: a disk's memory is scarce when less is free than two of the largest commands
    /// need.
    pub(crate) fn update_scarcity(&mut self) {
        let enough = 2 * u64::from(self.snapshot.limits.transfer_bytes);
        let free = self.disks.iter().flatten().map(|disk| disk.free_bytes());
        self.scarce_bytes = free.filter(|free| *free < enough).min().unwrap_or(u64::MAX);
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
