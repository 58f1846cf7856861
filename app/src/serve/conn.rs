//! [`Conn`]: a connection of any transport; the type with which the binary instantiates `TargetCore`.

use nvme_spec::sqe::Sqe;
use spindle_nvme_rdma::controller as rdma;
use spindle_nvme_tcp::controller as tcp;
use spindle_nvme_transport::RequestId;
use spindle_nvme_transport::{CloseReason, Event, Holds, Limits, Reply, Transport};
use spindle_reactor::mem::Buf;

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the other one is boxed so that this one is not")]
pub enum Conn {
    /// Not boxed: most connections are TCP.
    Tcp(tcp::Conn),
    Rdma(Box<rdma::Conn>),
}

/// Implements methods of [`Transport`] by calling that of the variant.
macro_rules! forward {
    ($($(#[$at:ident])? fn $name:ident($me:ident: $this:ty $(, $arg:ident: $of:ty)*) $(-> $to:ty)?;)*) => {
        $($(#[$at])? fn $name($me: $this $(, $arg: $of)*) $(-> $to)? {
            match $me {
                Conn::Tcp(conn) => conn.$name($($arg),*),
                Conn::Rdma(conn) => conn.$name($($arg),*),
            }
        })*
    };
}

impl Transport for Conn {
    forward! {
        #[inline] fn next_event(self: &mut Self) -> Option<Event>;
        #[inline] fn take_fast_path_sent(self: &mut Self) -> u32;
        #[inline] fn set_slot(self: &mut Self, slot: RequestId);
        #[inline] fn fetch(self: &mut Self, slot: RequestId, cid: u16, buf: Buf);
        fn cancel(self: &mut Self, slot: RequestId) -> bool;
        fn moves_parts(self: &Self) -> bool;
        fn fetch_part(self: &mut Self, slot: RequestId, cid: u16, offset: u32, buf: Buf);
        fn send_part(self: &mut Self, slot: RequestId, cid: u16, offset: u32, buf: Buf);
        #[inline] fn take_in_capsule(self: &mut Self, buf: &mut Buf) -> bool;
        #[inline] fn peek_command(self: &Self) -> Option<&Sqe>;
        fn stash_capsule(self: &mut Self, slot: RequestId, cid: u16);
        fn end_without_reply(self: &mut Self, slot: RequestId);
        fn ignore(self: &mut Self);
        #[inline] fn reply(self: &mut Self, reply: Reply);
        fn unsent_bytes(self: &Self) -> u64;
        fn close(self: &mut Self, reason: CloseReason);
        fn set_queue_entries(self: &mut Self, entries: u16);
        fn limits(self: &Self) -> Limits;
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
