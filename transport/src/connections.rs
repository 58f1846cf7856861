//! [`Connections`]: the connections of a core, as a shell (sockets, verbs) uses them; [`Peer`]: the two ends
//! of one.

use std::net::SocketAddr;

use spindle_reactor::slab::Slot;

use crate::Transport;
use crate::admission::Admitted;

/// The connections of one core, each joined to its queue pair. The request machine implements it; a shell
/// moves bytes or completions between a connection and its socket or queue pair, and says when to act on
/// them.
pub trait Connections {
    /// A connection, perhaps of several kinds ([`Holds`](crate::Holds)).
    type Conn: Transport;

    /// Why a connection would not be taken over now; `None`: it would.
    #[must_use]
    fn refusal(&self) -> Option<&'static str>;

    /// Take over a connection. `Err` gives it back: there is no room, or the appliance is shutting down.
    fn accept(&mut self, conn: Self::Conn, peer: Peer) -> Result<Slot, Self::Conn>;

    /// Count a connection that was just accepted as one without Connect, until its queue is connected or it
    /// is gone.
    fn set_admitted(&mut self, id: Slot, admitted: Admitted);

    /// The connection's wire state, to be fed and emptied.
    fn transport(&mut self, id: Slot) -> Option<&mut Self::Conn>;

    /// The connection's ends.
    #[must_use]
    fn peer(&self, id: Slot) -> Option<&Peer>;

    /// Act on what the connection has.
    fn step(&mut self, id: Slot);

    /// The shell has sent: act on what the connection has (`Sent`, and what it was holding back). The shell
    /// looks for itself whether there is more to send.
    fn step_sent(&mut self, id: Slot);

    /// The next connection that is gone.
    fn next_closed(&mut self) -> Option<(Slot, Self::Conn)>;

    /// Tell the operator that the host of a connection did not follow the rules of the transport: field,
    /// value and what is allowed.
    fn on_violation(&mut self, id: Slot, text: String);

    /// Tell the operator that a connection was not taken: field, value and what is allowed, or what has run
    /// out.
    fn on_refused(&mut self, remote: SocketAddr, reason: String);
}

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
