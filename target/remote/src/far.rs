//! [`Far`]: the interface of an association as a core uses it. The initiator and the simulator implement it.
//! [`FarQueue`], [`FarCompletion`]: its I/O queues and their completions.

use std::sync::Arc;

use nvme_spec::Sqe;
use nvme_spec::cluster::Registered;
use spindle_nvme_initiator::{
    Association, Error, Failure, HostData, IoQueue, Loss, Opening, OptimisticCounts, OptimisticGrant,
    OptimisticOpening, Refused,
};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pool};

/// An association that the cores share.
pub trait Far: Send + Sync + Sized + 'static {
    /// State of an I/O queue while it is being connected.
    type Opening;
    /// A connected I/O queue.
    type Queue: FarQueue;
    /// What one optimistic connection of a queue needs; from the manager.
    type Grant: Send;
    /// State of an optimistic connection while it is being made.
    type Attaching;

    /// Returns the most outstanding commands of one I/O queue.
    fn depth_max(&self) -> u16;

    /// Begins to connect I/O queue `qid` for `depth` commands. Connect data is sent from `pool`.
    fn begin(self: &Arc<Self>, pool: &Pool, qid: u16, depth: u16, now: Nanos)
    -> Result<Self::Opening, Error>;

    /// Advances the connection attempt without blocking: see [`Opening::step`].
    fn step(opening: &mut Self::Opening, now: Nanos) -> Result<Option<Self::Queue>, Error>;

    /// Returns true if the far target has optimistic reads.
    fn has_optimistic_reads(&self) -> bool;

    /// Begins to attach a queue of this core: see [`OptimisticOpening`].
    fn begin_attach(grant: Self::Grant, queue: &Self::Queue, now: Nanos) -> Result<Self::Attaching, Error>;

    /// Advances the attempt without blocking. Returns true once the queue is attached.
    fn step_attach(
        attaching: &mut Self::Attaching,
        queue: &mut Self::Queue,
        now: Nanos,
    ) -> Result<bool, Error>;
}

/// Completion of a command.
#[derive(Debug)]
pub struct FarCompletion {
    /// Index returned by [`FarQueue::submit`].
    pub index: usize,
    /// `Err`: the far target's status, or the loss of the connection.
    pub result: Result<(), Failure>,
    /// The buffer submitted with the command; `None`: the command has no data.
    pub buf: Option<Buf>,
    /// KEEP of a Read and Register that has succeeded.
    pub keeps: bool,
}

/// An I/O queue; its methods are those of [`IoQueue`].
pub trait FarQueue {
    /// Returns the most data bytes of one command.
    fn transfer_bytes_max(&self) -> u32;
    /// Returns the number of commands that can be submitted now.
    fn room(&self) -> usize;
    /// Returns true while commands can be submitted.
    fn is_up(&self) -> bool;
    /// Queues a command, whose first byte in the namespace is at `offset`. Returns its index: below the
    /// queue's depth, and unique until the command's completion is taken. An error returns the buffer.
    fn submit(&mut self, sqe: Sqe, offset: u64, data: HostData) -> Result<usize, Refused>;
    /// Sends the queued commands.
    fn send(&mut self);
    /// Sends, receives once and collects completions. Returns true when data arrived or the connection ended;
    /// an abort by this host may not count.
    fn poll(&mut self, now: Nanos) -> bool;
    /// Takes the next collected completion; `None`: no completion.
    fn next_completion(&mut self) -> Option<FarCompletion>;
    /// Returns the reason of the end of the connection, once every command has completed; `None` before.
    fn loss(&self) -> Option<Loss>;
    /// Aborts the connection; outstanding commands complete with [`Failure::Lost`].
    fn abandon(&mut self);
    /// Returns true while the queue is attached and its optimistic connection has not ended.
    fn has_optimistic_connection(&self) -> bool;
    /// Returns the counts of optimistic reads of this queue; `None`: the queue was never attached.
    fn optimistic_counts(&self) -> Option<OptimisticCounts>;
}

impl Far for Association {
    type Opening = Opening;
    type Queue = IoQueue;
    type Grant = OptimisticGrant;
    type Attaching = OptimisticOpening;

    fn depth_max(&self) -> u16 {
        Association::depth_max(self)
    }

    fn begin(self: &Arc<Self>, pool: &Pool, qid: u16, depth: u16, now: Nanos) -> Result<Opening, Error> {
        Opening::begin(self, pool, qid, depth, now)
    }

    fn step(opening: &mut Opening, now: Nanos) -> Result<Option<IoQueue>, Error> {
        opening.step(now)
    }

    fn has_optimistic_reads(&self) -> bool {
        Association::has_optimistic_reads(self)
    }

    fn begin_attach(grant: OptimisticGrant, queue: &IoQueue, now: Nanos) -> Result<OptimisticOpening, Error> {
        Ok(OptimisticOpening::begin(grant, queue.depth(), now)?)
    }

    fn step_attach(
        attaching: &mut OptimisticOpening,
        queue: &mut IoQueue,
        now: Nanos,
    ) -> Result<bool, Error> {
        queue.step_attach(attaching, now)
    }
}

impl FarQueue for IoQueue {
    fn transfer_bytes_max(&self) -> u32 {
        IoQueue::transfer_bytes_max(self)
    }

    #[inline]
    fn room(&self) -> usize {
        IoQueue::room(self)
    }

    #[inline]
    fn is_up(&self) -> bool {
        IoQueue::is_up(self)
    }

    #[inline]
    fn submit(&mut self, sqe: Sqe, offset: u64, data: HostData) -> Result<usize, Refused> {
        IoQueue::submit_at(self, sqe, offset, data).map(|ticket| ticket.index())
    }

    #[inline]
    fn send(&mut self) {
        IoQueue::send(self);
    }

    #[inline]
    fn poll(&mut self, now: Nanos) -> bool {
        IoQueue::poll(self, now)
    }

    #[inline]
    fn next_completion(&mut self) -> Option<FarCompletion> {
        let completion = IoQueue::next_completion(self)?;
        let (index, result, buf) = (completion.ticket.index(), completion.result, completion.buf);
        let keeps = Registered::from_bits(completion.cqe.result_u32()).keep();
        Some(FarCompletion { index, result, buf, keeps })
    }

    #[inline]
    fn loss(&self) -> Option<Loss> {
        IoQueue::loss(self)
    }

    fn abandon(&mut self) {
        IoQueue::abandon(self);
    }

    #[inline]
    fn has_optimistic_connection(&self) -> bool {
        IoQueue::has_optimistic_connection(self)
    }

    #[inline]
    fn optimistic_counts(&self) -> Option<OptimisticCounts> {
        IoQueue::optimistic_counts(self)
    }
}
