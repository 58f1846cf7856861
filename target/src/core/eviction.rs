//! Eviction on a full core: a new connection replaces the oldest connection without a place of its own, of
//! any transport: its Connect has not succeeded, or it is of a discovery controller. A connection whose
//! Connect waits for orphaned commands is not evicted.
//!
//! Over TCP the capacity is free at once; over RDMA when the queue pair is destroyed, some turns later.

use spindle_nvme_transport::ConnectionId;
use std::collections::VecDeque;

use spindle_nvme_transport::Transport;
use spindle_reactor::slab::Slab;

use super::TargetCore;
use crate::notice::Notice;
use crate::qpair::Qpair;

/// Connections whose Connect has not succeeded, and those of discovery controllers.
#[derive(Debug, Default)]
pub(super) struct Unconnected {
    /// In the order of acceptance. An entry may have connected or closed meanwhile.
    accepted: VecDeque<ConnectionId>,
    /// Evicted connections that may not have closed yet. An entry may have connected before it was closed.
    evicted: Vec<ConnectionId>,
}

impl Unconnected {
    /// Adds an accepted connection. Removes entries that have connected or closed once there are as many
    /// entries as the core may have connections.
    pub(super) fn push<T: Transport>(&mut self, id: ConnectionId, qpairs: &Slab<Qpair<T>>) {
        if self.accepted.len() >= qpairs.capacity() {
            self.accepted.retain(|id| is_without_place(qpairs, *id));
        }
        self.accepted.push_back(id);
    }

    fn pop_oldest<T: Transport>(&mut self, qpairs: &Slab<Qpair<T>>) -> Option<ConnectionId> {
        let mut at = 0;
        while let Some(id) = self.accepted.get(at).copied() {
            // A Connect that waits may be refused in the end, so its connection stays in the list.
            if qpairs.get(id.0).is_some_and(Qpair::is_connect_waiting) {
                at += 1;
                continue;
            }
            self.accepted.remove(at);
            if may_be_evicted(qpairs, id) {
                return Some(id);
            }
        }
        None
    }
}

fn is_without_place<T: Transport>(qpairs: &Slab<Qpair<T>>, id: ConnectionId) -> bool {
    qpairs.get(id.0).is_some_and(|qpair| !qpair.has_place())
}

fn may_be_evicted<T: Transport>(qpairs: &Slab<Qpair<T>>, id: ConnectionId) -> bool {
    qpairs.get(id.0).is_some_and(Qpair::may_be_evicted)
}

impl<T: Transport> TargetCore<T> {
    /// Evicts a connection from a full core before
    /// [`Connections::accept`](spindle_nvme_transport::Connections::accept). `newcomers`: number of
    /// connections that wait to be accepted. `end` closes the oldest connection without a place of its own. A
    /// host sends Connect within a few round trips, so the oldest is the least likely to be a host's.
    ///
    /// True: the caller calls `accept`, which fails if the core is still full or drains. False: the caller
    /// waits, since capacity will be free in a later turn.
    ///
    /// A call evicts at most one connection, since closing may cost system calls. It evicts none while at
    /// least `newcomers` evicted connections are still closing.
    pub fn make_room(&mut self, newcomers: usize, end: impl FnOnce(&mut Self, ConnectionId)) -> bool {
        if self.env.is_draining || !self.qpairs.is_full() {
            return true;
        }
        let TargetCore { unconnected, qpairs, .. } = &mut *self;
        unconnected.evicted.retain(|id| may_be_evicted(qpairs, *id));
        if unconnected.evicted.len() < newcomers
            && let Some(id) = unconnected.pop_oldest(qpairs)
        {
            if let Some(qpair) = self.qpairs.get(id.0) {
                let what = if qpair.is_discovery() {
                    "is of a discovery controller"
                } else {
                    "has not sent Connect"
                };
                let reason = format!("it {what}, and its slot is needed for a newer connection");
                self.env.notice(Notice::ConnectionRefused { remote: qpair.peer.remote, reason });
            }
            end(self, id);
            if self.qpairs.contains(id.0) {
                self.unconnected.evicted.push(id);
            }
        }
        !self.qpairs.is_full() || self.unconnected.evicted.is_empty()
    }
}
