//! [`Link`]: one connection, over TCP or RDMA. A link does not interpret commands.
//!
//! A link combines the host side of a transport's protocol with its I/O. It is polled in turns: send queued
//! commands, receive, report events.

mod rdma;
mod tcp;

use std::time::Duration;

use nvme_spec::identify::IdentifyController;
use nvme_spec::status::Status;
use nvme_spec::{Cqe, Sqe};
use spindle_nvme_tcp::RxBatch;
use spindle_nvme_transport::TransportKind;
use spindle_nvme_transport::host::HostData;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_reactor::net::{Socket, Waker};

use crate::error::{Error, Loss};
use crate::options::{Options, Target};
use crate::qpair::Refusal;

use rdma::{RdmaLink, RdmaOpening};
use tcp::{TcpLink, TcpOpening};

/// Identifiers and depth of a connection's queue. RDMA sends them in the private data of the request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueName {
    /// Queue ID; 0 for an admin queue.
    pub(crate) qid: u16,
    /// Controller ID; 0 for an admin queue.
    pub(crate) cntlid: u16,
    pub(crate) depth: u16,
}

#[derive(Debug)]
pub(crate) enum LinkEvent {
    /// A command has completed or was lost. Its CID is free for reuse.
    Completed { cid: u16, cqe: Cqe, buf: Option<Buf>, result: Result<(), Status> },
    /// The connection has ended. Reported once, as the last event.
    Closed(Loss),
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a box would be a miss more on the way of every command")]
pub(crate) enum Link {
    Tcp(TcpLink),
    /// Boxed, so that it does not enlarge the TCP variant. A turn of RDMA accesses other memory in any case.
    Rdma(Box<RdmaLink>),
}

/// A connection attempt, in steps that do not block.
pub(crate) enum LinkOpening {
    Tcp(Box<TcpOpening>),
    Rdma(Box<RdmaOpening>),
}

impl LinkOpening {
    pub(crate) fn begin(target: &Target, options: &Options, name: QueueName) -> Result<LinkOpening, Error> {
        let address = target.address;
        Ok(match target.transport {
            TransportKind::Tcp => {
                LinkOpening::Tcp(Box::new(TcpOpening::begin(address, options, name.depth)?))
            }
            TransportKind::Rdma => LinkOpening::Rdma(Box::new(RdmaOpening::begin(address, options, name)?)),
        })
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            LinkOpening::Tcp(opening) => opening.name(),
            LinkOpening::Rdma(opening) => opening.name(),
        }
    }

    /// Advances without blocking. Returns the link when commands can be submitted, `None` before. Must not be
    /// called afterwards or after an error.
    pub(crate) fn step(&mut self) -> Result<Option<Link>, Error> {
        Ok(match self {
            LinkOpening::Tcp(opening) => opening.step()?.map(Link::Tcp),
            LinkOpening::Rdma(opening) => opening.step()?.map(|link| Link::Rdma(Box::new(link))),
        })
    }

    /// Sleeps until the next step may make progress, at most `timeout`; may return early.
    pub(crate) fn wait_io(&self, timeout: Duration) {
        match self {
            LinkOpening::Tcp(opening) => opening.wait_io(timeout),
            LinkOpening::Rdma(opening) => opening.wait_io(timeout),
        }
    }
}

impl Link {
    /// Queues a command. The next [`Link::send`] or [`Link::turn`] sends it. An error returns the data.
    #[inline]
    pub(crate) fn submit(&mut self, sqe: Sqe, data: HostData) -> Result<(), (Refusal, HostData)> {
        match self {
            Link::Tcp(link) => link.submit(sqe, data),
            Link::Rdma(link) => link.submit(sqe, data),
        }
    }

    /// Returns true while commands can be submitted.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        match self {
            Link::Tcp(link) => link.is_open(),
            Link::Rdma(link) => link.is_open(),
        }
    }

    /// Returns true when bytes are queued and the socket's send buffer is full; false for RDMA.
    #[inline]
    pub(crate) fn is_blocked(&self) -> bool {
        match self {
            Link::Tcp(link) => link.is_blocked(),
            Link::Rdma(_) => false,
        }
    }

    /// Returns true when [`Link::turn`] receives into the batch (TCP).
    #[inline]
    pub(crate) fn wants_batch(&self) -> bool {
        matches!(self, Link::Tcp(_))
    }

    /// Sets the controller's limits for commands of an I/O queue: bytes of in-capsule data, at most
    /// `in_capsule_max`, and for RDMA the number of SGL descriptors.
    pub(crate) fn set_offered(&mut self, identify: &IdentifyController, in_capsule_max: u32) {
        let offered = u32::try_from(identify.in_capsule_bytes()).unwrap_or(u32::MAX);
        match self {
            Link::Tcp(link) => link.set_offered(offered.min(in_capsule_max)),
            Link::Rdma(link) => link.set_offered(offered.min(in_capsule_max), identify.msdbd),
        }
    }

    /// Returns the socket, for epoll. `None`: RDMA, which is polled in every turn.
    pub(crate) fn socket(&self) -> Option<&Socket> {
        match self {
            Link::Tcp(link) => Some(link.socket()),
            Link::Rdma(_) => None,
        }
    }

    /// Sends queued commands, as far as the transport accepts them.
    #[inline]
    pub(crate) fn send(&mut self) {
        match self {
            Link::Tcp(link) => link.send(),
            Link::Rdma(link) => link.send(),
        }
    }

    /// Sends, receives once, and reports each event with a flag: whether the connection was open. Returns
    /// true when data or a work completion arrived, or the connection ended (over TCP not by this host).
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

    /// Aborts the connection. The next turn completes all commands as lost.
    pub(crate) fn fail(&mut self, loss: Loss) {
        match self {
            Link::Tcp(link) => link.fail(loss),
            Link::Rdma(link) => link.fail(loss),
        }
    }

    /// Closes the connection: over TCP after sending queued commands, over RDMA at once.
    pub(crate) fn close(&mut self) {
        match self {
            Link::Tcp(link) => link.close(),
            Link::Rdma(link) => link.fail(Loss::Requested),
        }
    }

    /// Sleeps until data or a work completion arrives, a full send buffer has space, or `waker` is woken; at
    /// most `timeout`. May return early.
    pub(crate) fn wait_io(&mut self, timeout: Duration, waker: Option<&Waker>) {
        match self {
            Link::Tcp(link) => link.wait_io(timeout, waker),
            Link::Rdma(link) => link.wait_io(timeout, waker),
        }
    }
}
