//! Room for newcomers on a core that is full: a newcomer takes the place of the oldest connection that has
//! not sent Connect, whatever the transport of either. One whose Connect waits for the commands that its host
//! left at the disks has sent it, and keeps its place.
//!
//! Over TCP a place is free at once. Over RDMA it is free when the queue pair is destroyed, some turns later.

use std::collections::VecDeque;

use spindle_reactor::slab::{Slab, Slot};
use spindle_transport::{Connections, Transport};

use super::TargetCore;
use crate::notice::Notice;
use crate::qpair::Qpair;

/// Connections that have not sent Connect.
#[derive(Debug, Default)]
pub(super) struct Unconnected {
    /// In the order in which they were accepted. Some are connected or gone by now.
    line: VecDeque<Slot>,
    /// Those that end for newcomers. Some are gone by now, or sent Connect before they could be ended.
    leaving: Vec<Slot>,
}

impl Unconnected {
    /// `id` was accepted.
    pub(super) fn push<T: Transport>(&mut self, id: Slot, qpairs: &Slab<Qpair<T>>) {
        if self.line.len() >= qpairs.capacity() {
            self.line.retain(|id| is_unconnected(qpairs, *id));
        }
        self.line.push_back(id);
    }

    fn pop_oldest<T: Transport>(&mut self, qpairs: &Slab<Qpair<T>>) -> Option<Slot> {
        let mut at = 0;
        while let Some(id) = self.line.get(at).copied() {
            // A Connect that waits may be refused in the end: its connection keeps its place in the line.
            if qpairs.get(id).is_some_and(Qpair::is_connect_waiting) {
                at += 1;
                continue;
            }
            self.line.remove(at);
            if may_end(qpairs, id) {
                return Some(id);
            }
        }
        None
    }
}

fn is_unconnected<T: Transport>(qpairs: &Slab<Qpair<T>>, id: Slot) -> bool {
    qpairs.get(id).is_some_and(|qpair| !qpair.is_connected())
}

fn may_end<T: Transport>(qpairs: &Slab<Qpair<T>>, id: Slot) -> bool {
    qpairs.get(id).is_some_and(Qpair::may_end_for_newcomer)
}

impl<T: Transport> TargetCore<T> {
    /// Before [`Connections::accept`], for the first of so many newcomers. Where the core is full, `end` is
    /// to end the oldest connection that has not sent Connect: a host sends it within a few round trips, so
    /// the oldest is the least likely to be one.
    ///
    /// True: `accept` decides. False: a place will be free, in a later turn.
    ///
    /// One connection ends in each call, since each may cost system calls. It goes on while fewer end than
    /// newcomers wait, so that a newcomer does not wait for those before it.
    pub fn make_room(&mut self, newcomers: usize, end: impl FnOnce(&mut Self, Slot)) -> bool {
        if self.env.is_draining || !self.qpairs.is_full() {
            return true;
        }
        let TargetCore { unconnected, qpairs, .. } = &mut *self;
        unconnected.leaving.retain(|id| may_end(qpairs, *id));
        if unconnected.leaving.len() < newcomers
            && let Some(id) = unconnected.pop_oldest(qpairs)
        {
            if let Some(remote) = self.peer(id).map(|peer| peer.remote) {
                let reason = "it has not sent Connect, and a newer one needs its place".to_owned();
                self.env.notice(Notice::ConnectionRefused { remote, reason });
            }
            end(self, id);
            if self.qpairs.contains(id) {
                self.unconnected.leaving.push(id);
            }
        }
        !self.qpairs.is_full() || self.unconnected.leaving.is_empty()
    }
}
