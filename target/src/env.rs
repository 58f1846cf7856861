//! [`Env`]: what all queue pairs of one core work with. Lent to a queue pair for the length of a call.
//!
//! Here are the core's pools, its handles on the disks, the configuration snapshot, and two bounded outboxes:
//! messages for cores ([`Message`]) and notices for the log ([`Notice`]). No queue pair sees another one;
//! what concerns others goes by message, even on the same core.

use std::collections::VecDeque;
use std::sync::Arc;

use spindle_disk::{Disk, Done};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pool, Share};
use spindle_reactor::slab::Slot;
use spindle_transport::CloseReason;

use crate::busy::Busy;
use crate::controller::ErrorRecord;
use crate::notice::{Notice, Notices};
use crate::orphaned_commands::OrphanedCommands;
use crate::qpair::owner;
use crate::shared::{ControllerShared, Registry};
use crate::snapshot::{DiskId, Snapshot};

/// From core to core, in order between any two.
#[derive(Clone)]
pub enum Message {
    /// Close the I/O queues of this controller.
    CloseQueues(Arc<ControllerShared>, CloseReason),
    /// Close the controller's admin connection, and with it the controller.
    CloseController(Arc<ControllerShared>, CloseReason),
    /// Abort a command, if it is on one of your queues.
    Abort {
        /// The controller.
        controller: Arc<ControllerShared>,
        /// Its queue.
        qid: u16,
        /// The command.
        cid: u16,
        /// Whose answer is awaited.
        from: AbortFrom,
    },
    /// Answer to `Abort`.
    Aborted {
        /// Who asked.
        from: AbortFrom,
        /// The command was ended without effect.
        is_aborted: bool,
    },
    /// A command of this controller failed: an entry for its error log.
    Failed(Arc<ControllerShared>, ErrorRecord),
    /// The configuration has changed.
    Snapshot(Arc<Snapshot>),
    /// A core has changed to a configuration.
    SnapshotTaken {
        /// The core.
        core: usize,
        /// Generation of the configuration.
        generation: u64,
    },
    /// No new commands: finish what is in flight, tell the hosts, close.
    Shutdown,
}

/// The Abort command that waits for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AbortFrom {
    /// Its core.
    pub core: usize,
    /// Its queue pair there.
    pub qpair: Slot,
    /// Its request there.
    pub slot: Slot,
}

/// A core's shared state, lent to its queue pairs.
pub struct Env {
    /// Index of this core.
    pub core: usize,
    /// Number of cores.
    pub cores: usize,
    /// Time of this turn.
    pub now: Nanos,
    /// When the core was started, on the same clock.
    pub started: Nanos,
    /// Wall clock at this turn, ms since 1970.
    pub wall_ms: u64,
    /// The configuration as I/O queues have it: the newest that this core has.
    pub snapshot: Arc<Snapshot>,
    /// The configuration that hosts are shown (Identify, log pages, discovery, Connect of admin queues): the
    /// newest that all cores have. A host uses what it is shown on all its queues, at once.
    pub advertised_snapshot: Arc<Snapshot>,
    /// Live controllers of the process.
    pub registry: Arc<Registry>,
    /// Buffers of the data path.
    pub pool: Pool,
    /// Buffers that only admin and Connect commands take, so that I/O cannot starve them.
    pub admin_pool: Pool,
    /// This core's disks, by [`DiskId`].
    pub disks: Vec<Option<Box<dyn Disk>>>,
    /// Messages to cores, own core included; drained by the core and its shell.
    pub outbox: VecDeque<(usize, Message)>,
    /// For the log.
    pub notices: Notices,
    /// The queue pair that is being stepped: its own name, for answers that come back by message.
    pub(crate) current: Slot,
    /// True once shutdown has begun.
    pub is_draining: bool,
    /// Requests of this core wait for memory: who comes now lines up behind them.
    pub(crate) is_crowded: bool,
    /// Whom the reserve's buffers are charged to while their data comes from hosts.
    pub(crate) incoming: Slot,
    /// Connections found none of them since time-outs were looked at last.
    pub(crate) is_reserve_short: bool,
    /// Bytes that the disk with the least memory to give has left, where that is hardly anything; else as
    /// many as there are numbers. As of the last look at time-outs.
    pub(crate) scarce_bytes: u64,
    /// Requests that had to wait for a buffer, ever.
    pub waits: u64,
    /// Commands that arrived, ever.
    pub commands: u64,
    pub(crate) done: Vec<Done>,
    /// What queue pairs that are gone have left at the disks.
    pub(crate) orphaned_commands: OrphanedCommands,
    /// Namespaces that have commands.
    pub(crate) busy: Busy,
}

/// Completions that are collected from a disk at a time.
pub(crate) const DONE_BATCH: usize = 128;

impl Env {
    /// The core's handle on a disk.
    #[inline]
    pub fn disk(&mut self, disk: usize) -> Option<&mut (dyn Disk + 'static)> {
        self.disks.get_mut(disk)?.as_deref_mut()
    }

    /// The same, to look at.
    #[inline]
    pub(crate) fn disk_ref(&self, disk: usize) -> Option<&dyn Disk> {
        self.disks.get(disk)?.as_deref()
    }

    /// A queue pair is gone. How many of its commands the disks still have; it may be asked again.
    #[cold]
    pub(crate) fn cancel_commands_of(&mut self, qpair: Slot) -> usize {
        self.disks.iter_mut().flatten().map(|disk| disk.cancel_owner(owner(qpair))).sum()
    }

    /// The share that the queue pair which is being stepped has of the pool.
    #[inline]
    pub(crate) fn share(&self) -> Share<'_> {
        self.pool.share(self.current)
    }

    /// Its share of the reserve of admin and Connect commands; of the pool for a large one.
    pub(crate) fn admin_share(&self, bytes: u32) -> Share<'_> {
        if bytes <= self.admin_pool.buffer_bytes_max() {
            self.admin_pool.share(self.current)
        } else {
            self.share()
        }
    }

    /// The share of the reserve that all have together whose data is to come from the host: however many
    /// connections keep theirs back, others are served from what is left.
    pub(crate) fn incoming_share(&self) -> Share<'_> {
        self.admin_pool.share(self.incoming)
    }

    /// A buffer for an admin or Connect command whose data comes from the host some time. Who finds none
    /// makes the others hurry.
    pub(crate) fn take_incoming(&mut self, bytes: u32) -> Option<Buf> {
        let buf = self.incoming_share().take_contiguous(bytes);
        self.is_reserve_short |= buf.is_none();
        buf
    }

    /// Whether a disk that gives memory has hardly any left: less than two of the largest commands need.
    pub(crate) fn look_at_scarcity(&mut self) {
        let enough = 2 * u64::from(self.snapshot.limits.transfer_bytes);
        let free = self.disks.iter().flatten().map(|disk| disk.free_bytes());
        self.scarce_bytes = free.filter(|free| *free < enough).min().unwrap_or(u64::MAX);
    }

    /// Send to one core.
    pub fn send(&mut self, core: usize, message: Message) {
        self.outbox.push_back((core, message));
    }

    /// Send to all cores, this one included.
    pub fn broadcast(&mut self, message: &Message) {
        for core in 0..self.cores {
            self.outbox.push_back((core, message.clone()));
        }
    }

    /// Note something for the log.
    pub fn notice(&mut self, notice: Notice) {
        self.notices.push(notice);
    }

    /// Index of a disk in [`Env::disks`].
    #[must_use]
    pub fn disk_index(id: DiskId) -> usize {
        id.0
    }
}
