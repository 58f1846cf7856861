//! [`Peer`]: the two ends of a connection, and [`TransportKind`], by what they are connected.

use std::net::SocketAddr;

/// Transports (TRTYPE). Displayed as nvme-cli and the configuration name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum TransportKind {
    /// NVMe/TCP.
    #[default]
    Tcp,
    /// NVMe/RDMA.
    Rdma,
}

impl TransportKind {
    /// All of them, in the order of their discriminants, which begin at 0.
    pub const ALL: [TransportKind; 2] = [TransportKind::Tcp, TransportKind::Rdma];
}

impl std::fmt::Display for TransportKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            TransportKind::Tcp => "tcp",
            TransportKind::Rdma => "rdma",
        })
    }
}

/// The two ends of a connection, for discovery and for logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The transport.
    pub transport: TransportKind,
    /// Index of the listener that accepted it.
    pub listener: usize,
    /// The host's address.
    pub remote: SocketAddr,
    /// Our address, as the host used it.
    pub local: SocketAddr,
}

impl Peer {
    /// `address` as this peer should use it: an unspecified one is replaced by the one that the peer used.
    /// `None`: it is of the other family, of which this connection tells no address.
    #[must_use]
    pub fn reachable(&self, address: SocketAddr) -> Option<SocketAddr> {
        if !address.ip().is_unspecified() {
            return Some(address);
        }
        // An IPv4 host is one of IPv4 on a socket that listens on IPv6 too.
        let local = self.local.ip().to_canonical();
        (address.is_ipv4() == local.is_ipv4()).then(|| SocketAddr::new(local, address.port()))
    }
}
