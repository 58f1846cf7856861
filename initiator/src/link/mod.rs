//! [`Link`]: one connection, over TCP or RDMA. It knows no command.
//!
//! Both are the host's end of their protocol joined to what moves its bytes, and both are asked in turns:
//! send what is queued, take what came, tell what came of it.

mod rdma;
mod tcp;

use std::time::Duration;

use nvme_spec::identify::IdentifyController;
use nvme_spec::status::Status;
use nvme_spec::{Cqe, Sqe};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_reactor::net::{Socket, Waker};
use spindle_tcp::RxBatch;
use spindle_transport::TransportKind;
use spindle_transport::host::HostData;

use crate::error::{Error, Loss};
use crate::options::{Options, Target};
use crate::qpair::Refusal;

use rdma::{RdmaLink, RdmaOpening};
use tcp::{TcpLink, TcpOpening};

/// Which queue a connection is for. RDMA tells it when it connects.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueName {
    /// QID.
    pub(crate) qid: u16,
    /// CNTLID; of an admin queue 0.
    pub(crate) cntlid: u16,
    /// Commands that may be outstanding.
    pub(crate) depth: u16,
}

/// What happened on a connection.
#[derive(Debug)]
pub(crate) enum LinkEvent {
    /// A command is over. Its CID is free again.
    Completed { cid: u16, cqe: Cqe, buf: Option<Buf>, result: Result<(), Status> },
    /// The connection is gone. Comes once, last.
    Closed(Loss),
}

/// A connection.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a box would be a miss more on the way of every command")]
pub(crate) enum Link {
    Tcp(TcpLink),
    /// What a turn needs of it is elsewhere in any case, and TCP's is not to grow by it.
    Rdma(Box<RdmaLink>),
}

/// A connection that is being made, in steps that do not wait.
pub(crate) enum LinkOpening {
    Tcp(Box<TcpOpening>),
    Rdma(Box<RdmaOpening>),
}

impl LinkOpening {
    /// Begin to connect.
    pub(crate) fn begin(target: &Target, options: &Options, name: QueueName) -> Result<LinkOpening, Error> {
        let address = target.address;
        Ok(match target.transport {
            TransportKind::Tcp => {
                LinkOpening::Tcp(Box::new(TcpOpening::begin(address, options, name.depth)?))
            }
            TransportKind::Rdma => LinkOpening::Rdma(Box::new(RdmaOpening::begin(address, options, name)?)),
        })
    }

    /// What is waited for.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            LinkOpening::Tcp(opening) => opening.name(),
            LinkOpening::Rdma(opening) => opening.name(),
        }
    }

    /// On, as far as it goes at once. The link when commands can be submitted; nothing is left to do then,
    /// nor after an error.
    pub(crate) fn step(&mut self) -> Result<Option<Link>, Error> {
        Ok(match self {
            LinkOpening::Tcp(opening) => opening.step()?.map(Link::Tcp),
            LinkOpening::Rdma(opening) => opening.step()?.map(|link| Link::Rdma(Box::new(link))),
        })
    }

    /// Sleep until the next step may go on, at most `timeout`; it may return early.
    pub(crate) fn wait_io(&self, timeout: Duration) {
        match self {
            LinkOpening::Tcp(opening) => opening.wait_io(timeout),
            LinkOpening::Rdma(opening) => opening.wait_io(timeout),
        }
    }
}

impl Link {
    /// Queue a command; it leaves with the next [`Link::send`] or [`Link::turn`].
    #[inline]
    pub(crate) fn submit(&mut self, sqe: Sqe, data: HostData) -> Result<(), (Refusal, HostData)> {
        match self {
            Link::Tcp(link) => link.submit(sqe, data),
            Link::Rdma(link) => link.submit(sqe, data),
        }
    }

    /// True while commands can be submitted.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        match self {
            Link::Tcp(link) => link.is_open(),
            Link::Rdma(link) => link.is_open(),
        }
    }

    /// True when there is something to send and the kernel takes none of it: wait for room.
    #[inline]
    pub(crate) fn is_blocked(&self) -> bool {
        match self {
            Link::Tcp(link) => link.is_blocked(),
            Link::Rdma(_) => false,
        }
    }

    /// True when [`Link::turn`] receives into the batch.
    #[inline]
    pub(crate) fn wants_batch(&self) -> bool {
        matches!(self, Link::Tcp(_))
    }

    /// What the controller takes of an I/O queue: in-capsule data, up to `in_capsule_max`, and descriptors.
    pub(crate) fn set_offered(&mut self, identify: &IdentifyController, in_capsule_max: u32) {
        let offered = u32::try_from(identify.in_capsule_bytes()).unwrap_or(u32::MAX);
        match self {
            Link::Tcp(link) => link.set_offered(offered.min(in_capsule_max)),
            Link::Rdma(link) => link.set_offered(offered.min(in_capsule_max), identify.msdbd),
        }
    }

    /// Its socket, to be watched. `None`: it is asked in memory, in every turn.
    pub(crate) fn socket(&self) -> Option<&Socket> {
        match self {
            Link::Tcp(link) => Some(link.socket()),
            Link::Rdma(_) => None,
        }
    }

    /// Send what is queued, as far as it is taken.
    #[inline]
    pub(crate) fn send(&mut self) {
        match self {
            Link::Tcp(link) => link.send(),
            Link::Rdma(link) => link.send(),
        }
    }

    /// Send, receive once, and tell what came of it, each with whether the connection was open. True when
    /// anything came.
    #[inline]
    pub(crate) fn turn(
        &mut self,
        batch: &mut RxBatch,
        now: Nanos,
        on_event: impl FnMut(LinkEvent, bool),
    ) -> bool {
        match self {
            Link::Tcp(link) => link.turn(batch, on_event),
            Link::Rdma(link) => link.turn(now, on_event),
        }
    }

    /// End it at once; every command is told in the next turn.
    pub(crate) fn fail(&mut self, loss: Loss) {
        match self {
            Link::Tcp(link) => link.fail(loss),
            Link::Rdma(link) => link.fail(loss),
        }
    }

    /// End it: over TCP what is queued leaves first.
    pub(crate) fn close(&mut self) {
        match self {
            Link::Tcp(link) => link.close(),
            Link::Rdma(link) => link.fail(Loss::Requested),
        }
    }

    /// Sleep until there is something to receive (or room, where that is waited for) or `waker` is raised, at
    /// most `timeout`; it may return early.
    pub(crate) fn wait_io(&mut self, timeout: Duration, waker: Option<&Waker>) {
        match self {
            Link::Tcp(link) => link.wait_io(timeout, waker),
            Link::Rdma(link) => link.wait_io(timeout, waker),
        }
    }
}
