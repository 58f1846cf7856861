//! [`Conn`]: a connection of any transport, as a core of the appliance has it.

use nvme_spec::sqe::Sqe;
use spindle_rdma::controller as rdma;
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;
use spindle_tcp::controller as tcp;
use spindle_transport::{CloseReason, Event, Holds, Limits, Reply, Transport};

/// A connection.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the other one is boxed so that this one is not")]
pub enum Conn {
    /// Over TCP. In place: most are.
    Tcp(tcp::Conn),
    /// Over RDMA.
    Rdma(Box<rdma::Conn>),
}

/// The same on whatever it is.
macro_rules! on_both {
    ($self:expr, $conn:ident => $what:expr) => {
        match $self {
            Conn::Tcp($conn) => $what,
            Conn::Rdma($conn) => $what,
        }
    };
}

impl Transport for Conn {
    #[inline]
    fn next_event(&mut self) -> Option<Event> {
        on_both!(self, conn => conn.next_event())
    }

    #[inline]
    fn take_left(&mut self) -> u32 {
        on_both!(self, conn => conn.take_left())
    }

    #[inline]
    fn set_slot(&mut self, slot: Slot) {
        on_both!(self, conn => conn.set_slot(slot));
    }

    #[inline]
    fn fetch(&mut self, slot: Slot, cid: u16, buf: Buf) {
        on_both!(self, conn => conn.fetch(slot, cid, buf));
    }

    fn cancel(&mut self, slot: Slot) -> bool {
        on_both!(self, conn => conn.cancel(slot))
    }

    fn moves_parts(&self) -> bool {
        on_both!(self, conn => conn.moves_parts())
    }

    fn fetch_part(&mut self, slot: Slot, cid: u16, offset: u32, buf: Buf) {
        on_both!(self, conn => conn.fetch_part(slot, cid, offset, buf));
    }

    fn send_part(&mut self, slot: Slot, cid: u16, offset: u32, buf: Buf) {
        on_both!(self, conn => conn.send_part(slot, cid, offset, buf));
    }

    #[inline]
    fn take_in_capsule(&mut self, buf: &mut Buf) -> bool {
        on_both!(self, conn => conn.take_in_capsule(buf))
    }

    #[inline]
    fn peek_command(&self) -> Option<&Sqe> {
        on_both!(self, conn => conn.peek_command())
    }

    fn stash_capsule(&mut self, slot: Slot, cid: u16) {
        on_both!(self, conn => conn.stash_capsule(slot, cid));
    }

    fn forget(&mut self, slot: Slot) {
        on_both!(self, conn => conn.forget(slot));
    }

    fn ignore(&mut self) {
        on_both!(self, conn => conn.ignore());
    }

    #[inline]
    fn reply(&mut self, reply: Reply) {
        on_both!(self, conn => conn.reply(reply));
    }

    fn unsent_bytes(&self) -> u64 {
        on_both!(self, conn => conn.unsent_bytes())
    }

    fn close(&mut self, reason: CloseReason) {
        on_both!(self, conn => conn.close(reason));
    }

    fn set_queue_entries(&mut self, entries: u16) {
        on_both!(self, conn => conn.set_queue_entries(entries));
    }

    fn limits(&self) -> Limits {
        on_both!(self, conn => conn.limits())
    }
}

impl Holds<tcp::Conn> for Conn {
    fn wrap(conn: tcp::Conn) -> Conn {
        Conn::Tcp(conn)
    }

    #[inline]
    fn held(&mut self) -> Option<&mut tcp::Conn> {
        match self {
            Conn::Tcp(conn) => Some(conn),
            Conn::Rdma(_) => None,
        }
    }
}

impl Holds<rdma::Conn> for Conn {
    fn wrap(conn: rdma::Conn) -> Conn {
        Conn::Rdma(Box::new(conn))
    }

    #[inline]
    fn held(&mut self) -> Option<&mut rdma::Conn> {
        match self {
            Conn::Rdma(conn) => Some(conn),
            Conn::Tcp(_) => None,
        }
    }
}
