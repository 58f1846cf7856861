//! [`Connections`]: the connections of a core, as a shell (sockets, verbs) uses them.

use std::net::SocketAddr;

use spindle_reactor::slab::Slot;

use crate::admission::Admitted;
use crate::{Peer, Transport};

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
    ///
    /// # Errors
    /// The connection, unused.
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

    /// Tell the operator that a host did not follow the rules of the transport: field, value and what is
    /// allowed.
    fn on_violation(&mut self, remote: SocketAddr, text: String);

    /// Tell the operator that a connection was not taken: field, value and what is allowed, or what has run
    /// out.
    fn on_refused(&mut self, remote: SocketAddr, reason: String);
}
