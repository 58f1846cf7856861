//! The other way of an end: io_uring. A turn is one call: it sends what all connections have to send and
//! looks at what came for any of them.
//!
//! What it does not do: payload is always copied out of the buffers that the kernel fills, so blocks that are
//! received to where they belong ([`super::end::LANDING_BYTES_MIN`]) are better off with sockets.

use std::io::IoSlice;
use std::net::TcpStream;
use std::os::fd::OwnedFd;

use arrayvec::ArrayVec;
use rustix::io::Errno;
use spindle_reactor::uring::sockets::{BUFFERS_MAX, Event, SOCKETS_MAX, SocketRing};

use super::end::{Role, take};
use super::message::Cursor;
use super::outbox::{IOV_MAX, Outbox};
use super::{LimitError, Plan};

/// A buffer holds what one connection may send at once, between these.
const BUFFER_BYTES: (usize, usize) = (8 << 10, 256 << 10);
/// Memory of all buffers, about: what a core's cache holds.
const BUFFERS_BYTES: usize = 4 << 20;

/// A connection of an end.
struct Link {
    cursor: Cursor,
    outbox: Outbox,
    is_open: bool,
    /// Whether it is among those that have something to send.
    is_dirty: bool,
}

/// An end whose connections have one ring.
pub(super) struct RingEnd<R> {
    role: R,
    ring: SocketRing,
    links: Vec<Link>,
    dirty: Vec<usize>,
    open: usize,
}

impl<R: Role> RingEnd<R> {
    /// An end of those connections.
    pub(super) fn new(role: R, sockets: Vec<TcpStream>, plan: &Plan) -> Result<RingEnd<R>, LimitError> {
        let links: Vec<Link> = sockets.iter().map(|_| Link::new(plan.block_bytes)).collect();
        let (buffers, bytes) = buffers(plan);
        let sockets: Vec<OwnedFd> = sockets.into_iter().map(OwnedFd::from).collect();
        let ring = SocketRing::new(sockets, buffers, bytes).map_err(LimitError::Ring)?;
        Ok(RingEnd { role, ring, dirty: Vec::with_capacity(links.len()), open: links.len(), links })
    }

    /// Turn until the role is over or the other end has closed every connection. Gives the role back.
    pub(super) fn run(mut self) -> Result<R, LimitError> {
        for (at, link) in self.links.iter_mut().enumerate() {
            self.role.on_received(at, &mut link.outbox);
            mark(link, at, &mut self.dirty);
        }
        while self.open > 0 && !self.role.is_over() {
            self.send()?;
            self.take()?;
        }
        Ok(self.role)
    }

    fn send(&mut self) -> Result<(), LimitError> {
        let RingEnd { role, ring, links, dirty, .. } = self;
        let mut sends = ring.sends();
        for at in dirty.drain(..) {
            let link = &mut links[at];
            link.is_dirty = false;
            let mut slices: ArrayVec<IoSlice<'_>, IOV_MAX> = ArrayVec::new();
            link.outbox.gather(role.stock(), role.span(), &mut slices);
            sends.push(at, &slices);
        }
        sends.submit().map_err(LimitError::socket("cannot send"))
    }

    fn take(&mut self) -> Result<(), LimitError> {
        let RingEnd { role, ring, links, dirty, open } = self;
        let mut failed = Ok(());
        ring.poll(|at, event| {
            let link = &mut links[at];
            match event {
                Event::Bytes(bytes) => {
                    if let Err(error) = take(role, at, &mut link.cursor, &mut link.outbox, bytes) {
                        failed = Err(error);
                    }
                    role.on_received(at, &mut link.outbox);
                }
                Event::Sent(bytes) => link.outbox.advance(bytes, role.stock()),
                Event::Closed | Event::Failed(Errno::PIPE | Errno::CONNRESET) => {
                    link.outbox = Outbox::default();
                    *open -= usize::from(std::mem::replace(&mut link.is_open, false));
                }
                Event::Failed(error) => {
                    failed = Err(LimitError::socket("cannot receive or send")(error.into()));
                }
            }
            mark(link, at, dirty);
        });
        failed
    }
}

impl Link {
    fn new(block_bytes: usize) -> Link {
        Link { cursor: Cursor::new(block_bytes), outbox: Outbox::default(), is_open: true, is_dirty: false }
    }
}

/// Have it sent in the next turn, if it has something to send.
fn mark(link: &mut Link, at: usize, dirty: &mut Vec<usize>) {
    if link.is_open && !link.is_dirty && !link.outbox.is_empty() {
        link.is_dirty = true;
        dirty.push(at);
    }
}

/// How many buffers of which size: each connection's part of the depth in one, and two for each connection.
fn buffers(plan: &Plan) -> (u16, u32) {
    let part = plan.depth.div_ceil(plan.connections).saturating_mul(plan.block_bytes.saturating_add(128));
    let bytes = part.clamp(BUFFER_BYTES.0, BUFFER_BYTES.1).next_multiple_of(4096);
    let count = (BUFFERS_BYTES / bytes).max(2 * plan.connections.min(SOCKETS_MAX)).next_power_of_two();
    (u16::try_from(count).unwrap_or(BUFFERS_MAX).min(BUFFERS_MAX), u32::try_from(bytes).unwrap_or(u32::MAX))
}
