//! [`Far`]: what a core needs of an association with the far target. The initiator has one; the simulator has
//! another.

use std::sync::Arc;

use nvme_spec::Sqe;
use spindle_initiator::{Association, Error, Failure, HostData, IoQueue, Loss, Opening, Refused};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pool};

/// An association, as cores share it.
pub trait Far: Send + Sync + Sized + 'static {
    /// An I/O queue that is being connected.
    type Opening;
    /// An I/O queue.
    type Queue: FarQueue;

    /// Most commands that one I/O queue may have outstanding.
    fn depth_max(&self) -> u16;

    /// Begin to connect I/O queue `qid` for `depth` commands, with a buffer of `pool`.
    fn begin(self: &Arc<Self>, pool: &Pool, qid: u16, depth: u16, now: Nanos)
    -> Result<Self::Opening, Error>;

    /// On with it, as far as it goes at once: see [`Opening::step`].
    fn step(opening: &mut Self::Opening, now: Nanos) -> Result<Option<Self::Queue>, Error>;
}

/// How a command ended.
#[derive(Debug)]
pub struct FarCompletion {
    /// What [`FarQueue::submit`] has returned.
    pub index: usize,
    /// Whether it succeeded.
    pub result: Result<(), Failure>,
    /// Its data.
    pub buf: Option<Buf>,
}

/// An I/O queue. The methods are those of [`IoQueue`].
pub trait FarQueue {
    /// Most bytes of one command.
    fn transfer_bytes_max(&self) -> u32;
    /// How many more commands can be queued now.
    fn room(&self) -> usize;
    /// True while commands can be submitted.
    fn is_up(&self) -> bool;
    /// Queue a command; its index is below the queue's depth, and its own until it is completed.
    fn submit(&mut self, sqe: Sqe, data: HostData) -> Result<usize, Refused>;
    /// Send what is queued.
    fn send(&mut self);
    /// Send, receive once, note completions. True when anything came.
    fn poll(&mut self, now: Nanos) -> bool;
    /// The next completion.
    fn next_completion(&mut self) -> Option<FarCompletion>;
    /// Why the connection ended, once every command has come back.
    fn loss(&self) -> Option<Loss>;
    /// End the connection at once; commands come back as lost.
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
