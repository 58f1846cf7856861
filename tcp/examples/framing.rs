//! What the protocol costs without sockets: nanoseconds a command at both ends, 4 KiB reads and writes.
//!
//! `cargo run --release -p spindle-tcp --example framing` prints one line for each kind, end and depth: the best of many rounds.
//! A host and a controller are joined by memory; only the end named is timed.

use std::io::IoSlice;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use nvme_spec::status::Status;
use nvme_spec::{Cqe, Sqe};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_reactor::slab::Slot;
use spindle_target::transport::{DataPointer, Event, Reply, Transport};
use spindle_tcp::RxBatch;
use spindle_tcp::controller::{self, ConnConfig};
use spindle_tcp::host::{self, HostConfig, HostData, HostEvent};

const BLOCK: u32 = 4096;
const ROUNDS: usize = 3000;
const BATCH: usize = 1 << 20;

/// Two ends and what lies between them.
struct Pair {
    host: host::Conn,
    controller: controller::Conn,
    pool: Pool,
    to_host: Option<RxBatch>,
    to_controller: Option<RxBatch>,
    host_time: Duration,
    controller_time: Duration,
}

/// Move everything that `$from` has to send into a batch; timed but for the copy, which is the wire's.
macro_rules! transmit {
    ($from:expr, $batch:expr, $time:expr) => {
        let mut batch = $batch.take().expect("one batch each way");
        loop {
            let start = Instant::now();
            let mut pieces = ArrayVec::<IoSlice, 1024>::new();
            let bytes = $from.send_pieces(&mut pieces);
            $time += start.elapsed();
            for piece in &pieces {
                assert_eq!(batch.extend(piece), piece.len(), "the batch is large enough for a turn");
            }
            drop(pieces);
            let start = Instant::now();
            $from.sent(bytes);
            $time += start.elapsed();
            if !$from.wants_send() {
                break;
            }
        }
        $batch = Some(batch);
    };
}

impl Pair {
    fn new(digests: bool) -> Pair {
        let config = HostConfig {
            in_capsule_bytes: BLOCK,
            header_digest: digests,
            data_digest: digests,
            ..HostConfig::default()
        };
        let mut pair = Pair {
            host: host::Conn::new(config, Nanos::ZERO),
            controller: controller::Conn::new(ConnConfig::default(), Nanos::ZERO),
            pool: Pool::new(&[ZoneSpec { buffer_bytes: BLOCK, count: 512 }], Pages::Base).expect("pool"),
            to_host: Some(RxBatch::new(BATCH)),
            to_controller: Some(RxBatch::new(BATCH)),
            host_time: Duration::ZERO,
            controller_time: Duration::ZERO,
        };
        pair.host.connect();
        pair.turn(0);
        pair.turn(0);
        assert!(pair.host.limits().is_some());
        pair
    }

    /// Everything there is, once to the controller and once back; `expected` commands complete.
    fn turn(&mut self, expected: usize) {
        transmit!(self.host, self.to_controller, self.host_time);
        let start = Instant::now();
        self.controller.load(self.to_controller.take().expect("filled"));
        while let Some(event) = self.controller.next_event() {
            answer(&mut self.controller, event, &self.pool);
        }
        self.to_controller = Some(self.controller.unload());
        self.controller_time += start.elapsed();
        transmit!(self.controller, self.to_host, self.controller_time);
        let start = Instant::now();
        while let Some(event) = self.controller.next_event() {
            assert!(matches!(event, Event::Sent { .. }));
        }
        self.controller_time += start.elapsed();
        let start = Instant::now();
        let mut completed = 0;
        self.host.load(self.to_host.take().expect("filled"));
        while let Some(event) = self.host.next_event() {
            if let HostEvent::Completed { result, .. } = event {
                assert!(result.is_ok());
                completed += 1;
            }
        }
        self.to_host = Some(self.host.unload());
        self.host_time += start.elapsed();
        assert_eq!(completed, expected);
    }

    fn submit(&mut self, depth: u16, is_write: bool) {
        let bufs: Vec<Buf> = (0..depth).map(|_| self.pool.take(BLOCK).expect("free")).collect();
        let start = Instant::now();
        for (cid, buf) in (0..depth).zip(bufs) {
            let opcode = if is_write { 1 } else { 2 };
            let data = if is_write { HostData::ToController(buf) } else { HostData::FromController(buf) };
            self.host.submit(Sqe::new(opcode, cid, 1), data).expect("taken");
        }
        self.host_time += start.elapsed();
    }
}

/// The smallest target: every read has a buffer, every write is fetched and forgotten.
#[inline]
fn answer(conn: &mut controller::Conn, event: Event, pool: &Pool) {
    let reply = |slot, cid, data| Reply { slot, cqe: Cqe::new(cid, Status::SUCCESS), data, may_omit_cqe: true };
    match event {
        Event::Command { sqe, data: Ok(DataPointer::InCapsule { bytes }) } => {
            let buf = pool.take(bytes).expect("free");
            conn.fetch(Slot::from_wire(u32::from(sqe.cid())), sqe.cid(), buf);
        }
        Event::Command { sqe, data: Ok(data) } => {
            let buf = pool.take(data.bytes());
            conn.reply(reply(Slot::from_wire(u32::from(sqe.cid())), sqe.cid(), buf));
        }
        Event::Fetched { slot, buf, .. } => {
            drop(buf);
            let cid = u16::try_from(slot.index()).expect("a CID");
            conn.reply(reply(slot, cid, None));
        }
        Event::Command { .. } | Event::Sent { .. } | Event::Closed => {}
    }
}

fn clock_ns() -> f64 {
    let start = Instant::now();
    for _ in 0..100_000 {
        std::hint::black_box(Instant::now());
    }
    start.elapsed().as_nanos() as f64 / 100_000.0
}

fn main() {
    println!("reading the clock: {:.0} ns, of which each turn has about 4 an end (not subtracted)", clock_ns());
    println!("{:<28} {:>5} {:>14} {:>14}", "4 KiB", "depth", "controller ns", "host ns");
    for digests in [false, true] {
        for is_write in [false, true] {
            for depth in [1_u16, 32, 128] {
                let mut pair = Pair::new(digests);
                let (mut best_controller, mut best_host) = (f64::MAX, f64::MAX);
                for _ in 0..10 {
                    pair.host_time = Duration::ZERO;
                    pair.controller_time = Duration::ZERO;
                    let rounds = ROUNDS / usize::from(depth) + 50;
                    for _ in 0..rounds {
                        pair.submit(depth, is_write);
                        pair.turn(usize::from(depth));
                    }
                    let count = (rounds * usize::from(depth)) as f64;
                    best_controller = best_controller.min(pair.controller_time.as_nanos() as f64 / count);
                    best_host = best_host.min(pair.host_time.as_nanos() as f64 / count);
                }
                let kind = if is_write { "write in capsule" } else { "read" };
                let name = format!("{kind}{}", if digests { ", both digests" } else { "" });
                println!("{name:<28} {depth:>5} {best_controller:>14.1} {best_host:>14.1}");
            }
        }
    }
}
