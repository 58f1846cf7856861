//! [`Far`]: the interface of an association as a core uses it. The initiator and the simulator implement it.
//! [`FarQueue`], [`FarCompletion`]: its I/O queues and their completions.

use std::sync::Arc;

use nvme_spec::Sqe;
use spindle_initiator::{Association, Error, Failure, HostData, IoQueue, Loss, Opening, Refused};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pool};

/// An association that the cores share.
pub trait Far: Send + Sync + Sized + 'static {
    /// State of an I/O queue while it is being connected.
    type Opening;
    /// A connected I/O queue.
    type Queue: FarQueue;

    /// Returns the most outstanding commands of one I/O queue.
    fn depth_max(&self) -> u16;

    /// Begins to connect I/O queue `qid` for `depth` commands. The Connect data is sent from a buffer of
    /// `pool`.
    fn begin(self: &Arc<Self>, pool: &Pool, qid: u16, depth: u16, now: Nanos)
    -> Result<Self::Opening, Error>;

    /// Advances the connection attempt without blocking: see [`Opening::step`].
    fn step(opening: &mut Self::Opening, now: Nanos) -> Result<Option<Self::Queue>, Error>;
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
}

/// An I/O queue; its methods are those of [`IoQueue`].
pub trait FarQueue {
    /// Returns the most data bytes of one command.
    fn transfer_bytes_max(&self) -> u32;
    /// Returns the number of commands that can be submitted now.
    fn room(&self) -> usize;
    /// Returns true while commands can be submitted.
    fn is_up(&self) -> bool;
    /// Queues a command. Returns its index: below the queue's depth, and unique until the command's
    /// completion is taken. An error returns the buffer.
    fn submit(&mut self, sqe: Sqe, data: HostData) -> Result<usize, Refused>;
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
}

impl Far for Association {
    type Opening = Opening;
    type Queue = IoQueue;

    fn depth_max(&self) -> u16 {
        Association::depth_max(self)
    }

    fn begin(self: &Arc<Self>, pool: &Pool, qid: u16, depth: u16, now: Nanos) -> Result<Opening, Error> {
        Opening::begin(self, pool, qid, depth, now)
    }

    fn step(opening: &mut Opening, now: Nanos) -> Result<Option<IoQueue>, Error> {
        opening.step(now)
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
    fn submit(&mut self, sqe: Sqe, data: HostData) -> Result<usize, Refused> {
        IoQueue::submit(self, sqe, data).map(|ticket| ticket.index())
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
        Some(FarCompletion { index, result, buf })
    }

    #[inline]
    fn loss(&self) -> Option<Loss> {
        IoQueue::loss(self)
    }

    fn abandon(&mut self) {
        IoQueue::abandon(self);
    }
}
