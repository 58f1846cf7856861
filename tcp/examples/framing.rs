//! What the protocol costs without sockets: nanoseconds a command at both ends, for 4 KiB reads and writes.
//!
//! `cargo run --release -p spindle-tcp --example framing` prints a line for each kind, end and depth: the
//! best of many rounds. An end is fed the bytes that the other end sent once, and what it sends is gathered
//! and dropped, so that only its own work is timed: receive (parse; a write's payload is copied to its
//! buffer, a read's at the host too), answer (reply or submit), gather (the pieces for `sendmsg`), sent
//! (advance, give buffers back, `Sent` events).
#![forbid(unsafe_code)]

use std::io::IoSlice;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use nvme_spec::status::Status;
use nvme_spec::{Cqe, Sqe};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_reactor::slab::Slot;
use spindle_tcp::RxBatch;
use spindle_tcp::controller::{self, ConnConfig};
use spindle_tcp::host::{self, Host, HostConfig, HostData, HostEvent};
use spindle_transport::{DataPointer, Event, Reply, Transport};

const BLOCK: u32 = 4096;
const COMMANDS_PER_ROUND: usize = 4000;
const ROUNDS: usize = 30;
const DEPTH_MAX: usize = 128;

/// Time in receive, answer, gather, sent.
type Times = [Duration; 4];

/// One turn of an end.
type Turn = fn(&mut Bench, &mut Times);

/// What is timed.
#[derive(Clone, Copy)]
struct Kind {
    is_write: bool,
    digests: bool,
    depth: u16,
}

struct Bench {
    kind: Kind,
    pool: Pool,
    batch: Option<RxBatch>,
    host: host::Conn,
    controller: controller::Conn,
    /// What the host sends in a turn, and what the controller does.
    up: Vec<u8>,
    down: Vec<u8>,
    clock: Duration,
}

fn gathered<'a>(gather: impl FnOnce(&mut ArrayVec<IoSlice<'a>, 1024>) -> usize) -> usize {
    let mut pieces = ArrayVec::new();
    let bytes = gather(&mut pieces);
    std::hint::black_box(&pieces);
    bytes
}

fn load(batch: &mut Option<RxBatch>, bytes: &[u8]) -> RxBatch {
    let mut batch = batch.take().expect("unloaded");
    assert_eq!(batch.extend(bytes), bytes.len());
    batch
}

impl Bench {
    fn new(kind: Kind) -> Bench {
        let config = HostConfig {
            in_capsule_bytes: BLOCK,
            header_digest: kind.digests,
            data_digest: kind.digests,
            ..HostConfig::default()
        };
        let mut bench = Bench {
            kind,
            pool: Pool::new(&[ZoneSpec { buffer_bytes: BLOCK, count: 512 }], Pages::Base).expect("pool"),
            batch: Some(RxBatch::new(1 << 20)),
            host: host::Conn::new(config, Nanos::ZERO),
            controller: controller::Conn::new(ConnConfig::default(), Nanos::ZERO),
            up: Vec::new(),
            down: Vec::new(),
            clock: clock(),
        };
        bench.controller.set_queue_entries(128);
        bench.host.connect();
        bench.exchange();
        bench.submit(&mut Times::default());
        bench.exchange();
        assert_eq!(bench.host.outstanding(), 0);
        bench
    }

    /// Everything there is once to the controller and once back; the bytes are remembered.
    fn exchange(&mut self) {
        self.up.clear();
        self.down.clear();
        let mut pieces = ArrayVec::<IoSlice, 1024>::new();
        let bytes = self.host.send_pieces(&mut pieces);
        pieces.iter().for_each(|piece| self.up.extend_from_slice(piece));
        drop(pieces);
        self.host.sent(bytes);
        self.controller.load(load(&mut self.batch, &self.up));
        while let Some(event) = self.controller.next_event() {
            answer(&mut self.controller, event, &self.pool);
        }
        self.batch = Some(self.controller.unload());
        let mut pieces = ArrayVec::<IoSlice, 1024>::new();
        let bytes = self.controller.send_pieces(&mut pieces);
        pieces.iter().for_each(|piece| self.down.extend_from_slice(piece));
        drop(pieces);
        self.controller.sent(bytes);
        while self.controller.next_event().is_some() {}
        self.host.load(load(&mut self.batch, &self.down));
        while self.host.next_event().is_some() {}
        self.batch = Some(self.host.unload());
    }

    fn submit(&mut self, times: &mut Times) {
        let mut bufs: ArrayVec<Buf, DEPTH_MAX> =
            (0..self.kind.depth).map(|_| self.pool.take(BLOCK).expect("free")).collect();
        let start = Instant::now();
        for (cid, buf) in (0..self.kind.depth).zip(bufs.drain(..)) {
            let (opcode, data) = match self.kind.is_write {
                true => (1, HostData::ToController(buf)),
                false => (2, HostData::FromController(buf)),
            };
            self.host.submit(Sqe::new(opcode, cid, 1), data).expect("taken");
        }
        times[1] += start.elapsed().saturating_sub(self.clock);
    }

    #[inline(never)]
    fn host_turn(&mut self, times: &mut Times) {
        self.submit(times);
        let start = Instant::now();
        let bytes = gathered(|pieces| self.host.send_pieces(pieces));
        let gathered = Instant::now();
        self.host.sent(bytes);
        let sent = Instant::now();
        let batch = load(&mut self.batch, &self.down);
        let mut done = ArrayVec::<HostEvent, DEPTH_MAX>::new();
        let loaded = Instant::now();
        self.host.load(batch);
        while let Some(event) = self.host.next_event() {
            done.push(event);
        }
        self.batch = Some(self.host.unload());
        let received = Instant::now();
        assert_eq!(done.len(), usize::from(self.kind.depth));
        times[0] += (received - loaded).saturating_sub(self.clock);
        times[2] += (gathered - start).saturating_sub(self.clock);
        times[3] += (sent - gathered).saturating_sub(self.clock);
    }

    #[inline(never)]
    fn controller_turn(&mut self, times: &mut Times) {
        let mut bufs: ArrayVec<Buf, DEPTH_MAX> =
            (0..self.kind.depth).map(|_| self.pool.take(BLOCK).expect("free")).collect();
        let batch = load(&mut self.batch, &self.up);
        let mut cids = ArrayVec::<u16, DEPTH_MAX>::new();
        let start = Instant::now();
        self.controller.load(batch);
        while let Some(event) = self.controller.next_event() {
            match event {
                Event::Command { sqe, data: Ok(DataPointer::InCapsule { .. }) } => {
                    let buf = bufs.pop().expect("one for each");
                    self.controller.fetch(slot(sqe.cid()), sqe.cid(), buf);
                }
                Event::Command { sqe, .. } => cids.push(sqe.cid()),
                Event::Fetched { slot, .. } => cids.push(u16::try_from(slot.index()).expect("a CID")),
                Event::Sent { .. } | Event::FetchedPart { .. } | Event::SentPart { .. } | Event::Closed => {}
            }
        }
        self.batch = Some(self.controller.unload());
        let received = Instant::now();
        for cid in cids {
            let data = if self.kind.is_write { None } else { bufs.pop() };
            self.controller.reply(success(cid, data));
        }
        let replied = Instant::now();
        let bytes = gathered(|pieces| self.controller.send_pieces(pieces));
        let gathered = Instant::now();
        self.controller.sent(bytes);
        while self.controller.next_event().is_some() {}
        let sent = Instant::now();
        times[0] += (received - start).saturating_sub(self.clock);
        times[1] += (replied - received).saturating_sub(self.clock);
        times[2] += (gathered - replied).saturating_sub(self.clock);
        times[3] += (sent - gathered).saturating_sub(self.clock);
    }

    /// Nanoseconds a command: the best round, part by part.
    fn run(&mut self, turn: Turn) -> [f64; 4] {
        let mut best = [f64::MAX; 4];
        let turns = COMMANDS_PER_ROUND.div_ceil(usize::from(self.kind.depth));
        for _ in 0..ROUNDS {
            let mut times = Times::default();
            for _ in 0..turns {
                turn(self, &mut times);
            }
            let count = (turns * usize::from(self.kind.depth)) as f64;
            for (best, time) in best.iter_mut().zip(times) {
                *best = best.min(time.as_nanos() as f64 / count);
            }
        }
        best
    }
}

fn slot(cid: u16) -> Slot {
    Slot::from_wire(1 << 16 | u32::from(cid))
}

fn success(cid: u16, data: Option<Buf>) -> Reply {
    Reply { slot: slot(cid), cqe: Cqe::new(cid, Status::SUCCESS), data, may_omit_cqe: true }
}

/// The smallest target: every read has a buffer, every write is fetched and forgotten.
fn answer(conn: &mut controller::Conn, event: Event, pool: &Pool) {
    match event {
        Event::Command { sqe, data: Ok(DataPointer::InCapsule { bytes }) } => {
            conn.fetch(slot(sqe.cid()), sqe.cid(), pool.take(bytes).expect("free"));
        }
        Event::Command { sqe, data: Ok(data) } => conn.reply(success(sqe.cid(), pool.take(data.bytes()))),
        Event::Fetched { slot, .. } => conn.reply(success(u16::try_from(slot.index()).expect("a CID"), None)),
        Event::Command { .. }
        | Event::Sent { .. }
        | Event::FetchedPart { .. }
        | Event::SentPart { .. }
        | Event::Closed => {}
    }
}

/// What reading the clock adds to each part.
fn clock() -> Duration {
    let mut best = Duration::MAX;
    for _ in 0..1000 {
        let start = Instant::now();
        best = best.min(Instant::now() - start);
    }
    best
}

fn main() {
    // With an argument: only the lines that contain it.
    let only = std::env::args().nth(1).unwrap_or_default();
    let columns = ["receive", "answer", "gather", "sent", "all"].map(|name| format!("{name:>8}")).concat();
    println!("{:<34}{:>6}{columns}   ns a command", "4 KiB", "depth");
    for digests in [false, true] {
        for is_write in [false, true] {
            for depth in [1, 32, 128] {
                let mut bench = Bench::new(Kind { is_write, digests, depth });
                let turns: [(&str, Turn); 2] =
                    [("controller", Bench::controller_turn), ("host", Bench::host_turn)];
                for (end, turn) in turns {
                    let what = if is_write { "write in capsule" } else { "read" };
                    let name = format!("{what}{}, {end}", if digests { ", digests" } else { "" });
                    if !name.contains(&only) {
                        continue;
                    }
                    let best = bench.run(turn);
                    let all: f64 = best.iter().sum();
                    let parts = best.map(|part| format!("{part:>8.1}")).concat();
                    println!("{name:<34}{depth:>6}{parts}{all:>8.1}");
                }
            }
        }
    }
}
