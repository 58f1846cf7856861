//! NVMe/RDMA in the simulator: both ends over the fabric ([`crate::fabric`]).

use nvme_spec::Sqe;
use nvme_spec::status::Status;
use spindle_nvme_rdma::controller::{Conn, ConnConfig};
use spindle_nvme_rdma::host::HostConfig;
use spindle_nvme_transport::ConnectionId;
use spindle_nvme_transport::host::{HostData, HostEvent};
use spindle_nvme_transport::{Connections, TransportKind};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_target::core::TargetCore;

use super::carrier::{Carrier, Happened};
use super::rng::Rng;
use super::swarm::Swarm;
use crate::fabric::{Link, Setting, Weather};

/// What a seed draws besides.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fabric {
    /// Work requests of the target's send queue, and of the host's.
    pub send_queue: (u32, u32),
    /// Segments that one work request gathers.
    pub segments_max: usize,
    /// READs at a time.
    pub reads_max: u32,
    /// The target's device sends with invalidate.
    pub can_invalidate: bool,
    /// Descriptors of a command.
    pub descriptors: u8,
    /// Pieces that the host's device gathers.
    pub host_segments: u8,
    /// Time from the decision to close to the end.
    pub close_timeout: Nanos,
    /// Silence after which the target asks whether the host is there.
    pub probe_after: Nanos,
    /// Most steps of a kind at once.
    pub burst: usize,
    /// More shakes in a turn.
    pub haste: usize,
    /// Chance.
    pub weather: Weather,
}

/// Everything from the seed.
#[must_use]
pub fn draw(seed: u64) -> Swarm {
    let mut swarm = Swarm::draw(seed);
    let mut rng = Rng::new(seed ^ 0x5eed_0000);
    let rng = &mut rng;
    let is_rough = rng.permille(500);
    let pick = |rng: &mut Rng, of: &[u64]| if is_rough { rng.pick(of) } else { 0 };
    swarm.leaves_permille = pick(rng, &[0, 1, 4]);
    swarm.fabric = Fabric {
        send_queue: (rng.pick(&[2, 3, 4, 8, 64, 256]), rng.pick(&[1, 2, 4, 128])),
        segments_max: rng.pick(&[1, 2, 16]),
        reads_max: rng.pick(&[1, 2, 16]),
        can_invalidate: rng.permille(700),
        descriptors: rng.pick(&[1, 2, 16]),
        host_segments: rng.pick(&[2, 3, 16]),
        close_timeout: rng.pick(&[Nanos(1), Nanos::from_ms(1), Nanos::from_secs(2)]),
        probe_after: rng.pick(&[Nanos(1), Nanos::from_us(100), Nanos::from_ms(5)]),
        burst: rng.pick(&[1, 4, 32, 32]),
        haste: 20,
        weather: Weather {
            loss: pick(rng, &[0, 20, 200]),
            failure: pick(rng, &[0, 50, 500]),
            invalidate: rng.pick(&[0, 300, 1000]),
            pieces: rng.pick(&[1, 3, 16]),
            looks: 50,
        },
    };
    if rng.permille(150) {
        swarm.transfer_bytes = 1 << 20;
        swarm.blocks_max = (1 << 20) / swarm.block_bytes as usize;
        swarm.blocks = 2 * swarm.blocks_max + 100;
    }
    swarm
}

/// A connection of the simulator.
pub struct Wire {
    link: Link,
    rng: Rng,
    is_ready_told: bool,
    /// Commands for which the connection was gone already.
    refused: Vec<(u16, Option<Buf>)>,
}

impl Carrier for Wire {
    type Conn = Conn;
    const KIND: TransportKind = TransportKind::Rdma;

    fn open(
        swarm: &Swarm,
        qid: u16,
        core: &mut TargetCore<Conn>,
        index: usize,
        _now: Nanos,
        rng: &mut Rng,
    ) -> Wire {
        let fabric = &swarm.fabric;
        let is_admin = qid == 0;
        let setting = Setting {
            target: ConnConfig {
                in_capsule_bytes: if is_admin { 0 } else { swarm.in_capsule_bytes },
                queue_entries: 64,
                receives: swarm.queue_entries,
                transfer_bytes: swarm.transfer_bytes,
                send_queue: fabric.send_queue.0,
                segments_max: fabric.segments_max,
                reads_max: fabric.reads_max,
                can_invalidate: fabric.can_invalidate,
                close_timeout: fabric.close_timeout,
                probe_after: fabric.probe_after,
            },
            host: HostConfig {
                entries: swarm.queue_entries,
                send_wr: fabric.send_queue.1,
                max_sge: fabric.host_segments,
                in_capsule_bytes: if is_admin { 0 } else { swarm.in_capsule_bytes },
                descriptors: fabric.descriptors,
            },
            // One entry of a queue always stays free.
            receives: swarm.queue_entries - 1,
            weather: fabric.weather,
            is_honest: true,
        };
        let rng = Rng::new(rng.draw());
        Wire { link: Link::new(setting, core, index), rng, is_ready_told: false, refused: Vec::new() }
    }

    fn core(&self) -> usize {
        self.link.core
    }

    fn submit(&mut self, sqe: Sqe, data: HostData) {
        if let Err(data) = self.link.submit(sqe, data, &mut self.rng) {
            self.refused.push((sqe.cid(), data.into_buffer()));
        }
    }

    fn next_event(&mut self) -> Option<Happened> {
        if !std::mem::replace(&mut self.is_ready_told, true) {
            return Some(Happened::Ready);
        }
        if let Some((cid, buf)) = self.refused.pop() {
            let status = Status::HOST_PATHING_ERROR;
            let cqe = nvme_spec::Cqe::new(cid, status);
            return Some(Happened::Completed { cid, cqe, buf, result: Err(status) });
        }
        Some(match self.link.next_event()? {
            HostEvent::Ready => Happened::Ready,
            HostEvent::Completed { cid, cqe, buf, result } => {
                Happened::Completed { cid, cqe, buf: buf.map(|data| data.buf), result }
            }
            HostEvent::Closed { .. } => Happened::Closed,
        })
    }

    fn shake(&mut self, core: &mut TargetCore<Conn>, swarm: &Swarm, rng: &mut Rng, now: Nanos) {
        if let Some(conn) = self.link.id.and_then(|id| core.transport(id)) {
            if conn.deadline().is_some_and(|deadline| deadline <= now) {
                conn.on_time(now);
                self.link.touch();
            }
            if conn.watch(now) {
                self.link.touch();
            }
        }
        self.link.shake(core, rng, swarm.fabric.burst);
    }

    fn cut(&mut self, core: &mut TargetCore<Conn>, rng: &mut Rng) {
        self.link.cut(core, rng);
    }

    fn touch(&mut self, id: ConnectionId) {
        if self.link.id == Some(id) {
            self.link.touch();
        }
    }

    fn is_gone(&self) -> bool {
        self.link.id.is_none()
    }

    fn is_over(&self) -> bool {
        self.link.is_over()
    }

    fn excuse(&mut self) {
        self.link.excuse();
    }

    fn is_excused(&self) -> bool {
        self.link.is_excused()
    }
}
