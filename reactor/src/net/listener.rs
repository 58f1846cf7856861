//! [`Listener`]: accepts connections.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with, bind, getsockname, listen, sockopt};

use super::socket::{Socket, stream_socket};

/// A non-blocking listening socket.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    local: SocketAddr,
}

/// An accepted connection.
#[derive(Debug)]
pub struct Accepted {
    /// Non-blocking socket of the connection.
    pub socket: Socket,
    /// Address of the peer.
    pub peer: SocketAddr,
    /// Local address that the peer used, even if the listener is bound to all addresses.
    pub local: SocketAddr,
}

/// Maximum number of attempts of one call of [`Listener::accept`]. Connections that failed while they waited
/// are skipped; those beyond this maximum are left for the next call.
const SKIPS_MAX: usize = 64;

impl Listener {
    /// Listens at `address` (port 0: the kernel chooses one), with a queue of `backlog` connections that wait
    /// to be accepted (at most `net.core.somaxconn`). The address can be bound again immediately after a
    /// restart (SO_REUSEADDR). An IPv6 listener accepts IPv6 only.
    ///
    /// # Errors
    /// The error of the system, for example when the address is in use or not a local one.
    pub fn bind(address: SocketAddr, backlog: u32) -> io::Result<Listener> {
        Listener::bind_beside(address, backlog, &[])
    }

    /// Listens as [`Listener::bind`] does, while the listeners `closing`, which are about to close, are still
    /// bound. `address` may overlap with their addresses: the wildcard address and a specific one at the same
    /// port. Until `closing` are closed, the kernel prefers the listener of the specific address.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn bind_beside(address: SocketAddr, backlog: u32, closing: &[&Listener]) -> io::Result<Listener> {
        let fd = stream_socket(&address)?;
        sockopt::set_socket_reuseaddr(&fd, true)?;
        if address.is_ipv6() {
            sockopt::set_ipv6_v6only(&fd, true)?;
        }
        let overlapping = closing.iter().filter(|listener| overlaps(listener.local, address));
        let shared: Vec<BorrowedFd<'_>> = overlapping.map(|listener| listener.fd.as_fd()).collect();
        if shared.is_empty() {
            bind_and_listen(&fd, address, backlog)?;
        } else {
            // The kernel checks SO_REUSEPORT of both sockets only when the second one is bound. If a listener
            // kept the option, another process of this user could bind the same address. A process that sets
            // SO_REUSEPORT itself still can: the kernel remembers that the port was shared.
            let sockets = || shared.iter().copied().chain([fd.as_fd()]);
            let allowed = sockets().try_for_each(|socket| sockopt::set_socket_reuseport(socket, true));
            let begun =
                allowed.map_err(io::Error::from).and_then(|()| bind_and_listen(&fd, address, backlog));
            let ended = sockets().map(|socket| sockopt::set_socket_reuseport(socket, false));
            let ended = ended.fold(Ok(()), Result::and);
            begun.and(ended.map_err(io::Error::from))?;
        }
        let local = SocketAddr::try_from(getsockname(&fd)?)?;
        Ok(Listener { fd, local })
    }

    /// Accepts a waiting connection; `None` when there is none. Connections that failed meanwhile are
    /// skipped; `None` also after 64 of them.
    ///
    /// # Errors
    /// The error of accept(2). Lack of descriptors (`EMFILE`) or memory is temporary: log it and try again
    /// later.
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
                Err(errno) if is_peer_error(errno) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(None)
    }

    /// Returns the bound address, with the port that the kernel chose.
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

fn bind_and_listen(fd: &OwnedFd, address: SocketAddr, backlog: u32) -> io::Result<()> {
    bind(fd, &address)?;
    listen(fd, i32::try_from(backlog).unwrap_or(i32::MAX))?;
    Ok(())
}

/// Returns true when one is the wildcard address, the other is not, and family and port are equal.
fn overlaps(a: SocketAddr, b: SocketAddr) -> bool {
    a.port() == b.port() && a.is_ipv4() == b.is_ipv4() && a.ip().is_unspecified() != b.ip().is_unspecified()
}

/// Returns true for errors of accept(2) that concern one connection, not the listener.
fn is_peer_error(errno: Errno) -> bool {
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
                spindle_tests_skip::skip(format!("IPv6: cannot listen at {address}"));
                continue;
            };
            assert!(listener.accept().expect("accept").is_none());
            let socket = Socket::connect(listener.local_addr(), Duration::from_secs(5)).expect("connect");
            let accepted = listener.accept().expect("accept").expect("one waits");
            assert_eq!(accepted.peer, socket.local_addr().expect("local"));
            assert_eq!(accepted.local, listener.local_addr());
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
    fn a_listener_takes_over_from_one_that_closes_between_all_addresses_and_one() {
        let any = |port| SocketAddr::from(([0, 0, 0, 0], port));
        let one = |port| SocketAddr::from(([127, 0, 0, 1], port));
        for is_to_all in [false, true] {
            let closing = Listener::bind(if is_to_all { one(0) } else { any(0) }, 16).expect("bind");
            let port = closing.local_addr().port();
            let address = if is_to_all { any(port) } else { one(port) };
            let error = Listener::bind(address, 16).expect_err("not without its leave");
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
            let next = Listener::bind_beside(address, 16, &[&closing]).expect("beside it");
            assert_eq!(next.local_addr(), address);
            for taken in [closing.local_addr(), address] {
                let error = Listener::bind(taken, 16).expect_err("in use");
                assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{taken}");
            }
            for socket in [&closing, &next] {
                assert!(!sockopt::socket_reuseport(socket).expect("told"), "not shared any more");
            }
            drop(closing);
            let here = one(address.port());
            let _socket = Socket::connect(here, Duration::from_secs(5)).expect("up");
            assert_eq!(next.accept().expect("accept").expect("one waits").local, here);
        }
    }

    #[test]
    fn a_listener_that_stays_keeps_its_address() {
        let [stays, other] = ["127.0.0.1:0"; 2].map(|text| text.parse().expect("address"));
        let [stays, other] = [stays, other].map(|address| Listener::bind(address, 16).expect("bind"));
        let taken = stays.local_addr();
        let all = SocketAddr::from(([0, 0, 0, 0], taken.port()));
        for (address, closing) in [(all, &other), (taken, &other), (taken, &stays)] {
            let error = Listener::bind_beside(address, 16, &[closing]).expect_err("in use");
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{address}");
        }
    }

    #[test]
    fn an_address_in_use_is_refused() {
        let listener = Listener::bind("127.0.0.1:0".parse().expect("address"), 16).expect("bind");
        let error = Listener::bind(listener.local_addr(), 16).expect_err("in use");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
