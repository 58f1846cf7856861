//! [`Listener`]: where connections come in.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with, bind, getsockname, listen, sockopt};

use super::socket::{Socket, stream_socket};

/// A listening socket that never waits.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    local: SocketAddr,
}

/// A connection that came in.
#[derive(Debug)]
pub struct Accepted {
    /// Its socket, non-blocking.
    pub socket: Socket,
    /// Who it is.
    pub peer: SocketAddr,
    /// The address of ours that the peer used, also where the listener is bound to all.
    pub local: SocketAddr,
}

/// Peers that go away while they wait, skipped in one call of [`Listener::accept`]; more are left for the
/// next turn.
const SKIPS_MAX: usize = 64;

impl Listener {
    /// Listen at `address` (port 0: the kernel picks one), with room for `backlog` peers that wait to be
    /// accepted. The address may be reused at once after a restart; an IPv6 listener takes IPv6 only.
    ///
    /// # Errors
    /// The system's, as when the address is in use or not ours.
    pub fn bind(address: SocketAddr, backlog: u32) -> io::Result<Listener> {
        let fd = stream_socket(&address)?;
        sockopt::set_socket_reuseaddr(&fd, true)?;
        if address.is_ipv6() {
            sockopt::set_ipv6_v6only(&fd, true)?;
        }
        bind(&fd, &address)?;
        listen(&fd, i32::try_from(backlog).unwrap_or(i32::MAX))?;
        let local = SocketAddr::try_from(getsockname(&fd)?)?;
        Ok(Listener { fd, local })
    }

    /// Take a connection if one waits. Peers that went away meanwhile are skipped.
    ///
    /// # Errors
    /// The system's; out of descriptors (`EMFILE`) or memory is one that passes: log it and ask again later.
    pub fn accept(&self) -> io::Result<Option<Accepted>> {
        for _ in 0..SKIPS_MAX {
            match acceptfrom_with(&self.fd, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok((fd, peer)) => {
                    let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
                    let local = getsockname(&fd).and_then(SocketAddr::try_from);
                    if let (Some(peer), Ok(local)) = (peer, local) {
                        return Ok(Some(Accepted { socket: Socket::from_fd(fd), peer, local }));
                    }
                }
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) if is_of_one_peer(errno) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(None)
    }

    /// Where it listens, with the port that the kernel picked.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Errors of accept(2) that say something about the connection, not about us.
fn is_of_one_peer(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::INTR
            | Errno::CONNABORTED
            | Errno::PROTO
            | Errno::NETDOWN
            | Errno::NOPROTOOPT
            | Errno::HOSTDOWN
            | Errno::NONET
            | Errno::HOSTUNREACH
            | Errno::NETUNREACH
            | Errno::OPNOTSUPP
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    pub(crate) fn addresses() -> impl Iterator<Item = SocketAddr> {
        ["127.0.0.1:0", "[::1]:0"].into_iter().map(|text| text.parse().expect("address"))
    }

    #[test]
    fn a_connection_knows_both_addresses() {
        for address in addresses() {
            let Ok(listener) = Listener::bind(address, 16) else {
                assert!(address.is_ipv6(), "IPv4 is everywhere");
                spindle_skip::skip(format!("IPv6: cannot listen at {address}"));
                continue;
            };
            assert!(listener.accept().expect("accept").is_none());
            let socket = Socket::connect(listener.local_addr(), Duration::from_secs(5)).expect("connect");
            let accepted = listener.accept().expect("accept").expect("one waits");
            assert_eq!(accepted.peer, socket.local_addr().expect("local"));
            assert_eq!(accepted.local, listener.local_addr());
            assert_eq!(socket.peer_addr().expect("peer"), listener.local_addr());
        }
    }

    #[test]
    fn a_listener_on_all_addresses_tells_which_one_was_used() {
        let listener = Listener::bind("0.0.0.0:0".parse().expect("address"), 16).expect("bind");
        let port = listener.local_addr().port();
        let _socket =
            Socket::connect(SocketAddr::from(([127, 0, 0, 1], port)), Duration::from_secs(5)).expect("up");
        let accepted = listener.accept().expect("accept").expect("one waits");
        assert_eq!(accepted.local, SocketAddr::from(([127, 0, 0, 1], port)));
    }

    #[test]
    fn an_address_in_use_is_refused() {
        let listener = Listener::bind("127.0.0.1:0".parse().expect("address"), 16).expect("bind");
        let error = Listener::bind(listener.local_addr(), 16).expect_err("in use");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
