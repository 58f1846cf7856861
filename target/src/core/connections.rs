//! [`Connections`] of a [`TargetCore`]: the interface that the shells call.

use spindle_nvme_transport::ConnectionId;
use std::net::SocketAddr;

use spindle_nvme_transport::admission::Admitted;
use spindle_nvme_transport::{Connections, Peer, Transport, TransportKind};

use super::TargetCore;
use crate::notice::Notice;
use crate::qpair::Qpair;

impl<T: Transport> Connections for TargetCore<T> {
    type Conn = T;

    fn refusal(&self) -> Option<&'static str> {
        if self.env.is_draining {
            return Some("the target is shutting down");
        }
        self.qpairs.is_full().then_some("no room for a connection on this core")
    }

    fn accept(&mut self, conn: T, peer: Peer) -> Result<ConnectionId, T> {
        if self.refusal().is_some() {
            return Err(conn);
        }
        let qpair = Qpair::new(conn, peer, self.env.now);
        let id = ConnectionId(self.qpairs.insert(qpair).map_err(|qpair| qpair.transport)?);
        self.unconnected.push(id, &self.qpairs);
        Ok(id)
    }

    fn set_admitted(&mut self, id: ConnectionId, admitted: Admitted) {
        if let Some(qpair) = self.qpairs.get_mut(id.0) {
            qpair.admitted = Some(admitted);
        }
    }

    #[inline]
    fn transport(&mut self, id: ConnectionId) -> Option<&mut T> {
        self.qpairs.get_mut(id.0).map(|qpair| &mut qpair.transport)
    }

    fn peer(&self, id: ConnectionId) -> Option<&Peer> {
        self.qpairs.get(id.0).map(|qpair| &qpair.peer)
    }

    #[inline]
    fn step_deferred(&mut self, id: ConnectionId) {
        self.with_qpair(id, |qpair, env| qpair.step(id, env));
        self.deliver_own();
    }

    #[inline]
    fn step(&mut self, id: ConnectionId) {
        self.run_qpair(id, false, |qpair, env| qpair.step(id, env));
        self.deliver_own();
    }

    #[inline]
    fn has_submitted(&self, id: ConnectionId) -> bool {
        self.qpairs.get(id.0).is_some_and(|qpair| qpair.has_submitted)
    }

    fn wants_pass(&self, transport: TransportKind) -> bool {
        self.is_pass_left(transport)
    }

    fn passed(&mut self, transport: TransportKind) {
        self.pass_over(transport);
    }

    fn next_closed(&mut self) -> Option<(ConnectionId, T)> {
        self.closed.pop()
    }

    fn on_violation(&mut self, id: ConnectionId, text: String) {
        if let Some(remote) = self.peer(id).map(|peer| peer.remote) {
            self.env.notice(Notice::Violation { remote, text });
        }
    }

    fn on_refused(&mut self, remote: SocketAddr, reason: String) {
        self.env.notice(Notice::ConnectionRefused { remote, reason });
    }
}
