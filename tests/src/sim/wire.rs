//! A TCP connection without sockets: bytes on their way, in any split, with a bounded buffer each way.

use spindle_nvme_transport::ConnectionId;
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};

use arrayvec::ArrayVec;
use nvme_spec::status::Status;
use nvme_spec::{Cqe, Sqe};
use spindle_nvme_tcp::controller::{Conn, ConnConfig};
use spindle_nvme_tcp::host::{self, HostConfig};
use spindle_nvme_tcp::{Phase, RxBatch};
use spindle_nvme_transport::host::{HostData, HostEvent, SubmitError, SubmitErrorKind};
use spindle_nvme_transport::{Connections, Peer, TransportKind};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_target::core::TargetCore;

use super::carrier::{Carrier, Happened};
use super::rng::Rng;
use super::swarm::Swarm;

/// One connection and the host's end of it.
pub struct Wire {
    /// The host's end.
    pub host: host::Conn,
    /// The core that has the other end.
    pub core: usize,
    /// Its name there; `None` once it is gone.
    pub id: Option<ConnectionId>,
    to_target: VecDeque<u8>,
    to_host: VecDeque<u8>,
    capacity: usize,
    target_has_shut: bool,
    host_has_shut: bool,
    is_excused: bool,
    /// Commands for which the connection was gone already.
    refused: Vec<(u16, Option<Buf>)>,
}

const PIECES: usize = 64;

impl Wire {
    /// A wire whose buffers hold `capacity` bytes each way.
    #[must_use]
    pub fn new(host: host::Conn, core: usize, id: ConnectionId, capacity: usize) -> Wire {
        Wire {
            host,
            core,
            id: Some(id),
            to_target: VecDeque::new(),
            to_host: VecDeque::new(),
            capacity,
            target_has_shut: false,
            host_has_shut: false,
            is_excused: false,
            refused: Vec::new(),
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
        core.step(id);
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
                conn.direct_target(&mut pieces, 0);
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
            core.step_deferred(id);
            if let Some(conn) = core.transport(id) {
                conn.unload();
                if self.host_has_shut && self.to_target.is_empty() {
                    conn.on_peer_closed();
                    core.step_deferred(id);
                }
            }
        } else {
            core.step_deferred(id);
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
            self.host.direct_target(&mut pieces, 0);
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
}

impl Carrier for Wire {
    type Conn = Conn;
    const KIND: TransportKind = TransportKind::Tcp;

    fn open(
        swarm: &Swarm,
        qid: u16,
        core: &mut TargetCore<Conn>,
        index: usize,
        now: Nanos,
        _rng: &mut Rng,
    ) -> Wire {
        let config = ConnConfig {
            in_capsule_bytes: swarm.in_capsule_bytes,
            max_h2c_data: swarm.max_h2c_data,
            queue_entries: 64,
            transfer_bytes: swarm.transfer_bytes,
            ..ConnConfig::default()
        };
        let peer = Peer {
            transport: TransportKind::Tcp,
            listener: 0,
            remote: "127.0.0.1:9".parse().expect("an address"),
            local: "127.0.0.1:4420".parse().expect("an address"),
        };
        let id = core.accept(Conn::new(config, now), peer).unwrap_or_else(|_| panic!("room"));
        let host = host::Conn::new(
            HostConfig {
                header_digest: swarm.digests.0,
                data_digest: swarm.digests.1,
                queue_entries: swarm.queue_entries,
                in_capsule_bytes: if qid == 0 { 8192 } else { swarm.in_capsule_bytes },
                ..HostConfig::default()
            },
            now,
        );
        Wire::new(host, index, id, swarm.wire_bytes)
    }

    fn core(&self) -> usize {
        self.core
    }

    fn submit(&mut self, sqe: Sqe, data: HostData) {
        let Err(SubmitError { kind, data }) = self.host.submit(sqe, data) else { return };
        assert_eq!(kind, SubmitErrorKind::Closed, "the host's connection refused a command that fits");
        assert!(self.host.phase() != Phase::Open, "a command before the connection is ready");
        let buf = data.into_buffer();
        self.refused.push((sqe.cid(), buf));
    }

    fn next_event(&mut self) -> Option<Happened> {
        if let Some((cid, buf)) = self.refused.pop() {
            let status = Status::HOST_PATHING_ERROR;
            return Some(Happened::Completed { cid, cqe: Cqe::new(cid, status), buf, result: Err(status) });
        }
        Some(match self.host.next_event()? {
            HostEvent::Ready => Happened::Ready,
            HostEvent::Completed { cid, cqe, buf, result } => Happened::Completed { cid, cqe, buf, result },
            HostEvent::Closed { .. } => Happened::Closed,
        })
    }

    /// Give the host's batch back, after its events were pulled.
    fn received(&mut self) {
        self.host.unload();
        if self.target_has_shut && self.to_host.is_empty() {
            self.host.on_peer_closed();
        }
        self.host_has_shut |= self.host.phase() != Phase::Open && !self.host.wants_send();
    }

    /// Move some bytes, somewhere.
    fn shake(&mut self, core: &mut TargetCore<Conn>, swarm: &Swarm, rng: &mut Rng, _now: Nanos) {
        let chunk = swarm.chunk;
        match rng.below(4) {
            0 => self.host_sends(rng, chunk),
            1 => self.target_receives(core, rng, chunk),
            2 => self.target_sends(core, rng, chunk),
            _ => self.host_receives(rng, chunk),
        }
    }

    fn cut(&mut self, core: &mut TargetCore<Conn>, _rng: &mut Rng) {
        self.host.on_reset();
        if let Some(id) = self.id.take() {
            if let Some(conn) = core.transport(id) {
                conn.on_reset();
            }
            core.step_deferred(id);
        }
    }

    fn is_gone(&self) -> bool {
        self.id.is_none()
    }

    fn excuse(&mut self) {
        self.is_excused = true;
    }

    fn is_excused(&self) -> bool {
        self.is_excused
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
