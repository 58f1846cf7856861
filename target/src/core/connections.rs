//! The connections of a core, as shells use them.

use std::net::SocketAddr;

use spindle_reactor::slab::Slot;
use spindle_transport::admission::Admitted;
use spindle_transport::{Connections, Peer, Transport};

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

    fn accept(&mut self, conn: T, peer: Peer) -> Result<Slot, T> {
        if self.refusal().is_some() {
            return Err(conn);
        }
        let qpair = Qpair::new(conn, peer, self.env.now);
        let id = self.qpairs.insert(qpair).map_err(|qpair| qpair.transport)?;
        self.unconnected.push(id, &self.qpairs);
        Ok(id)
    }

    fn set_admitted(&mut self, id: Slot, admitted: Admitted) {
        if let Some(qpair) = self.qpairs.get_mut(id) {
            qpair.admitted = Some(admitted);
        }
    }

    #[inline]
    fn transport(&mut self, id: Slot) -> Option<&mut T> {
        self.qpairs.get_mut(id).map(|qpair| &mut qpair.transport)
    }

    fn peer(&self, id: Slot) -> Option<&Peer> {
        self.qpairs.get(id).map(|qpair| &qpair.peer)
    }

    #[inline]
    fn step(&mut self, id: Slot) {
        self.with(id, |qpair, env| qpair.step(id, env));
        self.deliver_own();
    }

    #[inline]
    fn step_sent(&mut self, id: Slot) {
        self.run_qpair(id, false, |qpair, env| qpair.step(id, env));
        self.deliver_own();
    }

    fn next_closed(&mut self) -> Option<(Slot, T)> {
        self.closed.pop()
    }

    fn on_violation(&mut self, id: Slot, text: String) {
        if let Some(remote) = self.peer(id).map(|peer| peer.remote) {
            self.env.notice(Notice::Violation { remote, text });
        }
    }

    fn on_refused(&mut self, remote: SocketAddr, reason: String) {
        self.env.notice(Notice::ConnectionRefused { remote, reason });
    }
}
