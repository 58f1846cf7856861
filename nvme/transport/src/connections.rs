//! [`Connections`]: the connections of a core, as a shell (sockets, verbs) uses them. [`Peer`]: transport,
//! listener and addresses of one connection. [`TransportKind`]: TCP or RDMA.

use crate::ConnectionId;
use std::net::SocketAddr;

use crate::Transport;
use crate::admission::Admitted;

/// The connections of one core, each with its NVMe queue pair. The request machine implements this trait. A
/// shell moves bytes or completions between connection and socket or RDMA queue pair, then calls `step`.
pub trait Connections {
    /// The connection type: that of one transport, or an enum over several transports
    /// ([`Holds`](crate::Holds)).
    type Conn: Transport;

    /// Returns the reason for which [`Connections::accept`] would fail now; `None` if it would succeed.
    #[must_use]
    fn refusal(&self) -> Option<&'static str>;

    /// Adds a connection. `Err` returns `conn`: all slots of the core are in use, or the target shuts down.
    fn accept(&mut self, conn: Self::Conn, peer: Peer) -> Result<ConnectionId, Self::Conn>;

    /// Stores the admission of an accepted connection until Connect succeeds or the connection closes.
    fn set_admitted(&mut self, id: ConnectionId, admitted: Admitted);

    /// Returns the connection. The shell passes received data to it and sends its queued data. `None`: the
    /// connection has closed and was removed.
    fn transport(&mut self, id: ConnectionId) -> Option<&mut Self::Conn>;

    /// Returns the connection's transport, listener and addresses. `None`: the connection has closed.
    #[must_use]
    fn peer(&self, id: ConnectionId) -> Option<&Peer>;

    /// Handles the connection's events and adds it to the list of connections that may have replies to send.
    fn step_deferred(&mut self, id: ConnectionId);

    /// Handles the connection's events without adding it to the list of connections that may have replies to
    /// send: the calling shell sends the replies itself.
    fn step(&mut self, id: ConnectionId);

    /// Returns true if the last [`Connections::step_deferred`] gave commands to a disk that have not ended,
    /// and no other command of the connection has ended at a disk since. Replies that became ready since are
    /// then those to commands that ended without a disk.
    fn has_submitted(&self, id: ConnectionId) -> bool;

    /// Returns true while the core waits for a receive pass of this transport, before it judges time-outs.
    /// The shell, which asks at least every 50 ms, receives from each of its connections until nothing
    /// waits, and then calls [`Connections::passed`].
    fn wants_pass(&self, transport: TransportKind) -> bool;

    /// Everything that had arrived on connections of this transport when [`Connections::wants_pass`] became
    /// true has been handled.
    fn passed(&mut self, transport: TransportKind);

    /// Returns a closed connection that was removed from the core, each once; `None`: no more.
    fn next_closed(&mut self) -> Option<(ConnectionId, Self::Conn)>;

    /// Reports to the operator that the host violated the transport's protocol. `text` contains field, value
    /// and allowed values.
    fn on_violation(&mut self, id: ConnectionId, text: String);

    /// Reports to the operator that a connection was refused. `reason` contains field, value and allowed
    /// values, or the exhausted resource.
    fn on_refused(&mut self, remote: SocketAddr, reason: String);
}

/// Transport (TRTYPE). Displayed with the names of nvme-cli and the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum TransportKind {
    /// NVMe/TCP, TRTYPE 3.
    #[default]
    Tcp,
    /// NVMe/RDMA, TRTYPE 1.
    Rdma,
}

impl TransportKind {
    /// All transports, in the order of their discriminants, which begin at 0.
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

/// Transport, listener and addresses of a connection, for discovery and logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Transport over which the host connected.
    pub transport: TransportKind,
    /// Index of the listener that accepted the connection, in the configuration snapshot.
    pub listener: usize,
    /// Address and port of the host.
    pub remote: SocketAddr,
    /// Address and port of the target to which the host connected.
    pub local: SocketAddr,
}

impl Peer {
    /// Returns `address` as the host of this connection can reach it. An unspecified address (0.0.0.0, ::)
    /// becomes the local address of this connection, with the port of `address`. `None`: the unspecified
    /// address is of another family than the local address.
    #[must_use]
    pub fn reachable(&self, address: SocketAddr) -> Option<SocketAddr> {
        if !address.ip().is_unspecified() {
            return Some(address);
        }
        // A dual-stack socket reports an IPv4 address as an IPv4-mapped IPv6 address.
        let local = self.local.ip().to_canonical();
        (address.is_ipv4() == local.is_ipv4()).then(|| SocketAddr::new(local, address.port()))
    }
}
