//! In steady state nothing allocates: neither end, for no kind of command, however the stream is cut.

use spindle_nvme_transport::RequestId;
use std::io::IoSlice;

use arrayvec::ArrayVec;
use nvme_spec::status::Status;
use nvme_spec::{Cqe, Sqe};
use spindle_nvme_tcp::RxBatch;
use spindle_nvme_tcp::controller::{self, ConnConfig};
use spindle_nvme_tcp::host::{self, HostConfig, HostData, HostEvent};
use spindle_nvme_transport::{DataPointer, Event, Reply, Transport};
use spindle_reactor::alloc_count::allocations_here;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};

use crate::wire::{READ, Rng, WRITE};

const DEPTH: u16 = 32;

struct Joined {
    host: host::Conn,
    controller: controller::Conn,
    pool: Pool,
    batch: Option<RxBatch>,
    up: Vec<u8>,
    down: Vec<u8>,
    rng: Rng,
}

impl Joined {
    fn new(digests: bool) -> Joined {
        let host_config = HostConfig {
            header_digest: digests,
            data_digest: digests,
            queue_entries: DEPTH,
            in_capsule_bytes: 4096,
            ..HostConfig::default()
        };
        let mut controller = controller::Conn::new(ConnConfig::default(), Nanos::ZERO);
        controller.set_queue_entries(DEPTH);
        let host = host::Conn::new(host_config, Nanos::ZERO);
        Joined {
            host,
            controller,
            pool: Pool::new(&[ZoneSpec { buffer_bytes: 64 << 10, count: 80 }], Pages::Base).unwrap(),
            batch: Some(RxBatch::new(64 << 10)),
            up: Vec::with_capacity(4 << 20),
            down: Vec::with_capacity(4 << 20),
            rng: Rng(99),
        }
    }

    /// One command of a kind for each CID, and all of their answers; how many came.
    fn turn(&mut self) -> usize {
        for cid in 0..DEPTH {
            let (opcode, bytes) =
                [(READ, 4096), (READ, 50_000), (WRITE, 512), (WRITE, 4096), (WRITE, 60_000), (0, 0)]
                    [self.rng.below(6)];
            let data = match opcode {
                READ => HostData::FromController(self.pool.take(bytes).unwrap()),
                WRITE => HostData::ToController(self.pool.take(bytes).unwrap()),
                _ => HostData::None,
            };
            // Refused before the connection is ready.
            if self.host.submit(Sqe::new(opcode, cid, 1), data).is_err() {
                break;
            }
        }
        let mut completed = 0;
        for _ in 0..8 {
            let mut pieces = ArrayVec::<IoSlice, 512>::new();
            self.host.send_pieces(&mut pieces);
            pieces.iter().for_each(|piece| self.up.extend_from_slice(piece));
            drop(pieces);
            self.host.sent(self.up.len());
            self.controller_turn();
            let mut pieces = ArrayVec::<IoSlice, 512>::new();
            self.controller.send_pieces(&mut pieces);
            pieces.iter().for_each(|piece| self.down.extend_from_slice(piece));
            drop(pieces);
            self.controller.sent(self.down.len());
            completed += self.host_turn();
        }
        completed
    }

    fn controller_turn(&mut self) {
        let mut at = 0;
        while at < self.up.len() || at == 0 {
            let end = (at + 1 + self.rng.below(9000)).min(self.up.len());
            let mut batch = self.batch.take().unwrap();
            batch.extend(&self.up[at..end]);
            at = end.max(1);
            self.controller.load(batch);
            while let Some(event) = self.controller.next_event() {
                answer(&mut self.controller, &self.pool, event);
            }
            self.batch = Some(self.controller.unload());
        }
        self.up.clear();
    }

    fn host_turn(&mut self) -> usize {
        let (mut at, mut completed) = (0, 0);
        while at < self.down.len() {
            let end = (at + 1 + self.rng.below(9000)).min(self.down.len());
            let mut batch = self.batch.take().unwrap();
            batch.extend(&self.down[at..end]);
            at = end;
            self.host.load(batch);
            while let Some(event) = self.host.next_event() {
                completed += usize::from(matches!(event, HostEvent::Completed { result: Ok(()), .. }));
            }
            self.batch = Some(self.host.unload());
        }
        self.down.clear();
        completed
    }
}

fn answer(conn: &mut controller::Conn, pool: &Pool, event: Event) {
    let slot = |cid: u16| RequestId::from_wire(1 << 16 | u32::from(cid));
    let reply =
        |cid, data| Reply { slot: slot(cid), cqe: Cqe::new(cid, Status::SUCCESS), data, may_omit_cqe: true };
    match event {
        Event::Command { sqe, data: Ok(data) } => match data {
            DataPointer::None => conn.reply(reply(sqe.cid(), None)),
            DataPointer::Host { bytes } if sqe.opcode == READ => {
                conn.reply(reply(sqe.cid(), pool.take(bytes)))
            }
            DataPointer::Host { bytes } | DataPointer::InCapsule { bytes } => {
                conn.fetch(slot(sqe.cid()), sqe.cid(), pool.take(bytes).unwrap());
            }
        },
        Event::Fetched { slot, result: Ok(()), .. } => {
            conn.reply(reply(u16::try_from(slot.index()).unwrap(), None))
        }
        Event::Sent { .. } => {}
        Event::Command { .. }
        | Event::Fetched { .. }
        | Event::FetchedPart { .. }
        | Event::SentPart { .. }
        | Event::Closed => panic!("{event:?}"),
    }
}

#[test]
fn nothing_allocates_for_a_command_in_steady_state() {
    for digests in [false, true] {
        let mut joined = Joined::new(digests);
        let before = allocations_here();
        joined.turn();
        assert!(allocations_here() > before, "the counter counts");
        for _ in 0..100 {
            joined.turn();
        }
        let before = allocations_here();
        let mut completed = 0;
        for _ in 0..100 {
            completed += joined.turn();
        }
        assert_eq!(completed, 100 * usize::from(DEPTH));
        assert_eq!(allocations_here() - before, 0);
    }
}

#[test]
fn a_connection_is_a_small_thing() {
    // Growth of a hot structure is a reviewed event.
    assert_eq!(size_of::<RxBatch>(), 32);
    assert!(size_of::<controller::Conn>() <= 512, "{}", size_of::<controller::Conn>());
    assert!(size_of::<host::Conn>() <= 512, "{}", size_of::<host::Conn>());
}
