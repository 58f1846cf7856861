//! [`Env`]: state that all queue pairs of one core share, lent to a queue pair for the length of a call.
//!
//! It has the core's pools, its handles on the disks, the configuration snapshot, and two outboxes: messages
//! for cores ([`Message`]) and notices for the log ([`Notice`]). A queue pair has no access to another one;
//! it sends messages, even on the same core.

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

/// A message from core to core. Two messages between the same cores arrive in order.
#[derive(Clone)]
pub enum Message {
    /// Close the I/O queues of this controller.
    CloseQueues(Arc<ControllerShared>, CloseReason),
    /// Close the controller's admin connection, and with it the controller.
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
        /// Generation that it serves.
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

/// State of a core, lent to its queue pairs. See the module.
pub struct Env {
    /// Index of this core, from 0.
    pub core: usize,
    /// Number of cores of the process.
    pub cores: usize,
    /// Time of this turn; does not advance within it.
    pub now: Nanos,
    /// Start of this core, which is that of the process, on the clock of `now`.
    pub process_started: Nanos,
    /// Wall clock at this turn, ms since 1970.
    pub wall_ms: u64,
    /// The newest configuration of this core, which I/O queues use.
    pub snapshot: Arc<Snapshot>,
    /// The newest configuration that all cores serve: that of Identify, log pages, discovery and Connect of
    /// admin queues, since a host uses a namespace on all its queues at once.
    pub advertised_snapshot: Arc<Snapshot>,
    /// Controllers of the process, shared by all cores.
    pub registry: Arc<Registry>,
    /// Buffers of the data path.
    pub pool: Pool,
    /// Buffers that only admin and Connect commands take, so that I/O cannot starve them.
    pub admin_pool: Pool,
    /// This core's disks, by [`DiskId`].
    pub disks: Vec<Option<Box<dyn Disk>>>,
    /// Messages with the index of their core, this one included; drained by the core and its shell.
    pub outbox: VecDeque<(usize, Message)>,
    /// Log entries, drained by the app.
    pub notices: Notices,
    /// Slot of the queue pair that is being called.
    pub(crate) current: ConnectionId,
    /// True after [`Message::Shutdown`].
    pub is_draining: bool,
    /// Requests of this core wait for memory, and new ones must queue behind them.
    pub(crate) has_memory_waiters: bool,
    /// Owner in the admin pool of buffers whose data hosts have not sent yet, of all connections together.
    pub(crate) incoming_owner: ConnectionId,
    /// A command got no buffer for `incoming_owner` in this timer period.
    pub(crate) is_reserve_short: bool,
    /// Free bytes of the disk memory that is scarcest; `u64::MAX`: none is scarce. Updated by the timer.
    pub(crate) scarce_bytes: u64,
    /// Requests that waited for memory, ever.
    pub waits: u64,
    /// Commands that arrived, ever.
    pub commands: u64,
    pub(crate) done: Vec<Done>,
    /// Commands at disks whose queue pair has ended.
    pub(crate) orphaned_commands: OrphanedCommands,
    /// Measures the busy time of namespaces.
    pub(crate) busy: Busy,
}

/// Capacity of the list into which a disk is polled: about the most completions of one poll.
pub(crate) const DONE_BATCH: usize = 128;

impl Env {
    /// This core's handle on the disk with this index; `None`: it was removed or could not be opened.
    #[inline]
    pub fn disk(&mut self, disk: usize) -> Option<&mut (dyn Disk + 'static)> {
        self.disks.get_mut(disk)?.as_deref_mut()
    }

    /// [`Env::disk`] by shared reference.
    #[inline]
    pub(crate) fn disk_ref(&self, disk: usize) -> Option<&dyn Disk> {
        self.disks.get(disk)?.as_deref()
    }

    /// Cancels the disk commands of an ended queue pair. Returns the number of completions to come; may be
    /// repeated.
    #[cold]
    pub(crate) fn cancel_commands_of(&mut self, qpair: ConnectionId) -> usize {
        self.disks.iter_mut().flatten().map(|disk| disk.cancel_owner(owner(qpair))).sum()
    }

    /// The current queue pair's share of the pool.
    #[inline]
    pub(crate) fn share(&self) -> Share<'_> {
        self.pool.share(self.current.0)
    }

    /// The current queue pair's share of the admin pool; of the data pool if `bytes` is more than the admin
    /// pool's largest buffer.
    pub(crate) fn admin_share(&self, bytes: u32) -> Share<'_> {
        if bytes <= self.admin_pool.buffer_bytes_max() {
            self.admin_pool.share(self.current.0)
        } else {
            self.share()
        }
    }

    /// The share of the admin pool that all commands share whose data the host has not sent yet: hosts that
    /// send none cannot use up the whole pool.
    pub(crate) fn incoming_share(&self) -> Share<'_> {
        self.admin_pool.share(self.incoming_owner.0)
    }

    /// Takes a buffer for an admin or Connect command whose data the host sends. If there is none, fetches of
    /// Connect and admin commands get a shorter time-out until the next timer period.
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

    /// Queues a message to one core.
    pub fn send(&mut self, core: usize, message: Message) {
        self.outbox.push_back((core, message));
    }

    /// Queues a message to all cores, this one included.
    pub fn broadcast(&mut self, message: &Message) {
        for core in 0..self.cores {
            self.outbox.push_back((core, message.clone()));
        }
    }

    /// Adds a log entry.
    pub fn notice(&mut self, notice: Notice) {
        self.notices.push(notice);
    }

    /// Index of a disk in [`Env::disks`].
    #[must_use]
    pub fn disk_index(id: DiskId) -> usize {
        id.0
    }
}
