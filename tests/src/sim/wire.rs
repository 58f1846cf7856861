//! A TCP connection without sockets: bytes on their way, in any split, with a bounded buffer each way.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};

use arrayvec::ArrayVec;
use spindle_reactor::slab::Slot;
use spindle_target::core::TargetCore;
use spindle_tcp::controller::Conn;
use spindle_tcp::{Phase, RxBatch, host};

use super::rng::Rng;

/// One connection and the host's end of it.
pub struct Wire {
    /// The host's end.
    pub host: host::Conn,
    /// The core that has the other end.
    pub core: usize,
    /// Its name there; `None` once it is gone.
    pub id: Option<Slot>,
    to_target: VecDeque<u8>,
    to_host: VecDeque<u8>,
    capacity: usize,
    target_has_shut: bool,
    host_has_shut: bool,
}

const PIECES: usize = 64;

impl Wire {
    /// A wire whose buffers hold `capacity` bytes each way.
    #[must_use]
    pub fn new(host: host::Conn, core: usize, id: Slot, capacity: usize) -> Wire {
        Wire {
            host,
            core,
            id: Some(id),
            to_target: VecDeque::new(),
            to_host: VecDeque::new(),
            capacity,
            target_has_shut: false,
            host_has_shut: false,
        }
    }

    /// The host's end is gone at once; so is what was on the wire.
    pub fn cut(&mut self, core: &mut TargetCore<Conn>) {
        self.host.on_reset();
        if let Some(id) = self.id.take() {
            if let Some(conn) = core.transport(id) {
                conn.on_reset();
            }
            core.step(id);
        }
    }

    /// Move some bytes, somewhere.
    pub fn shake(&mut self, core: &mut TargetCore<Conn>, rng: &mut Rng, chunk: usize) {
        match rng.below(4) {
            0 => self.host_sends(rng, chunk),
            1 => self.target_receives(core, rng, chunk),
            2 => self.target_sends(core, rng, chunk),
            _ => self.host_receives(rng, chunk),
        }
    }

    fn host_sends(&mut self, rng: &mut Rng, chunk: usize) {
        let room = self.capacity.saturating_sub(self.to_target.len());
        let count = {
            let mut pieces = ArrayVec::<IoSlice<'_>, PIECES>::new();
            let bytes = self.host.send_pieces(&mut pieces);
            let count = rng.size(0, chunk).min(room).min(bytes);
            push(&mut self.to_target, &pieces, count);
            count
        };
        if count > 0 {
            self.host.sent(count);
        }
    }

    fn target_sends(&mut self, core: &mut TargetCore<Conn>, rng: &mut Rng, chunk: usize) {
        let Some(id) = self.id else { return };
        let room = self.capacity.saturating_sub(self.to_host.len());
        if let Some(conn) = core.transport(id) {
            let count = {
                let mut pieces = ArrayVec::<IoSlice<'_>, PIECES>::new();
                let bytes = conn.send_pieces(&mut pieces);
                let count = rng.size(0, chunk).min(room).min(bytes);
                push(&mut self.to_host, &pieces, count);
                count
            };
            if count > 0 {
                conn.sent(count);
            }
        }
        core.step_sent(id);
        let phase = core.transport(id).map(|conn| conn.phase());
        self.target_has_shut |= matches!(phase, None | Some(Phase::HalfClosed | Phase::Closed));
        if phase.is_none() {
            self.id = None;
        }
    }

    fn target_receives(&mut self, core: &mut TargetCore<Conn>, rng: &mut Rng, chunk: usize) {
        let Some(id) = self.id else { return };
        let Some(conn) = core.transport(id) else {
            self.id = None;
            return;
        };
        if !conn.is_paused() {
            let count = rng.size(0, chunk).min(self.to_target.len());
            let direct = if rng.permille(500) {
                let mut pieces = ArrayVec::<IoSliceMut<'_>, PIECES>::new();
                conn.direct_target(&mut pieces);
                pull(&mut self.to_target, &mut pieces, count)
            } else {
                0
            };
            if direct > 0 {
                conn.received_direct(direct);
            }
            let mut batch = RxBatch::new(count.max(1));
            take(&mut self.to_target, &mut batch.space()[..count - direct]);
            batch.filled(count - direct);
            conn.load(batch);
            core.step(id);
            if let Some(conn) = core.transport(id) {
                conn.unload();
                if self.host_has_shut && self.to_target.is_empty() {
                    conn.on_peer_closed();
                    core.step(id);
                }
            }
        } else {
            core.step(id);
        }
        if core.transport(id).is_none() {
            self.id = None;
            self.target_has_shut = true;
        }
    }

    fn host_receives(&mut self, rng: &mut Rng, chunk: usize) {
        let count = rng.size(0, chunk).min(self.to_host.len());
        let direct = if rng.permille(500) {
            let mut pieces = ArrayVec::<IoSliceMut<'_>, PIECES>::new();
            self.host.direct_target(&mut pieces);
            pull(&mut self.to_host, &mut pieces, count)
        } else {
            0
        };
        if direct > 0 {
            self.host.received_direct(direct);
        }
        let mut batch = RxBatch::new(count.max(1));
        take(&mut self.to_host, &mut batch.space()[..count - direct]);
        batch.filled(count - direct);
        self.host.load(batch);
    }

    /// Give the host's batch back, after its events were pulled.
    pub fn host_received(&mut self) {
        self.host.unload();
        if self.target_has_shut && self.to_host.is_empty() {
            self.host.on_peer_closed();
        }
        self.host_has_shut |= self.host.phase() != Phase::Open && !self.host.wants_send();
    }
}

fn push(to: &mut VecDeque<u8>, pieces: &[IoSlice<'_>], count: usize) {
    let mut left = count;
    for piece in pieces {
        let step = left.min(piece.len());
        to.extend(&piece[..step]);
        left -= step;
    }
}

/// Fill the pieces from the wire with at most `count` bytes.
fn pull(from: &mut VecDeque<u8>, pieces: &mut [IoSliceMut<'_>], count: usize) -> usize {
    let mut left = count;
    for piece in pieces {
        let step = left.min(piece.len());
        take(from, &mut piece[..step]);
        left -= step;
    }
    count - left
}

/// The next bytes of the wire.
fn take(from: &mut VecDeque<u8>, to: &mut [u8]) {
    let (first, second) = from.as_slices();
    let split = to.len().min(first.len());
    to[..split].copy_from_slice(&first[..split]);
    let rest = to.len() - split;
    to[split..].copy_from_slice(&second[..rest]);
    from.drain(..to.len());
}
