//! Hosts beside one that keeps the target's memory: what is left of their rate, and their slowest command.
//! Run by `scripts/compare/neighbours` and `scripts/lab`.
//!
//! ```text
//! neighbours ADDRESS --victims N --depth N --rw read|write --bs BYTES --nsid N --seconds S
//!            --bad silent|slow-read|slow-write|none --bad-bs BYTES --bad-nsid N --bad-queues N [--bad-first]
//! ```
//! The victims are hosts of their own with a queue each, all on this thread. The bad host has 31 commands
//! on each of its queues: it sends no data for its writes (silent), or moves 20 MB/s in all (slow). Prints
//! one line: commands a second before and beside the bad host, the slowest command beside it in ms,
//! victims that are still connected.
#![forbid(unsafe_code)]

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nvme_spec::Sqe;
use nvme_spec::tcp::{Extent, H2cData, LAST_PDU, PduType, R2t};
use nvme_spec::zerocopy::IntoBytes;
use spindle_nvme_initiator::{
    Controller, Host, IoQueue, Namespace, Options, Pages, Pool, QueueSet, Target, TransportKind, ZoneSpec,
};
use spindle_reactor::clock::Nanos;
use spindle_tests::loopback::raw::{RawHost, with_transport_data};
use spindle_tests::loopback::target;

/// Bytes a second of a slow host.
const SLOW_RATE: f64 = 20e6;
/// Commands of each queue of the bad host, one less than its entries.
const BAD_DEPTH: u16 = 31;
/// Most bytes of one H2CData, below every MAXH2CDATA.
const H2C_BYTES: u32 = 64 << 10;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Options of the command line.
struct Job {
    address: SocketAddr,
    victims: u8,
    depth: u16,
    is_write: bool,
    bytes: u32,
    nsid: u32,
    time: Duration,
    bad: String,
    bad_bytes: u32,
    bad_nsid: u32,
    bad_queues: u16,
    is_bad_first: bool,
}

impl Job {
    fn parse() -> Outcome<Job> {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let text = |name: &str, default: &str| -> String {
            let at = arguments.iter().position(|argument| *argument == format!("--{name}"));
            at.and_then(|at| arguments.get(at + 1)).map_or(default.to_owned(), Clone::clone)
        };
        Ok(Job {
            address: arguments.first().ok_or("ADDRESS is missing")?.parse()?,
            victims: text("victims", "4").parse()?,
            depth: text("depth", "1").parse()?,
            is_write: text("rw", "write") == "write",
            bytes: text("bs", "4096").parse()?,
            nsid: text("nsid", "1").parse()?,
            time: Duration::from_secs_f64(text("seconds", "3").parse()?),
            bad: text("bad", "silent"),
            bad_bytes: text("bad-bs", "1048576").parse()?,
            bad_nsid: text("bad-nsid", "1").parse()?,
            bad_queues: text("bad-queues", "8").parse()?,
            is_bad_first: arguments.iter().any(|argument| argument == "--bad-first"),
        })
    }
}

/// A host with one queue.
struct Victim {
    controller: Controller,
    namespace: Namespace,
    /// Begin of each command without an answer, by ticket.
    begun: Vec<Option<Instant>>,
    seed: u64,
}

/// What the victims did in a time.
#[derive(Default)]
struct Measured {
    commands: u64,
    slowest: Duration,
}

struct Victims {
    all: Vec<Victim>,
    queues: QueueSet,
    pool: Pool,
    started: Instant,
}

impl Victims {
    fn connect(job: &Job) -> Outcome<Victims> {
        let mut queues = QueueSet::new(256 << 10)?;
        let mut all = Vec::new();
        for number in 0..job.victims {
            let host = Host::from_uuid([100 + number; 16]);
            let of = Target { transport: TransportKind::Tcp, host, ..target(job.address) };
            let options = Options { depth: job.depth, command_timeout: None, ..Options::default() };
            let mut controller = Controller::connect(&of, &options)?;
            let namespace = controller.namespace(job.nsid)?;
            queues.add(controller.connect_queue(1)?)?;
            let begun = vec![None; 1 << 12];
            all.push(Victim { controller, namespace, begun, seed: u64::from(number) + 1 });
        }
        let count = u32::from(job.victims) * u32::from(job.depth);
        let buffer_bytes = job.bytes.next_multiple_of(4096);
        let pool = Pool::new(&[ZoneSpec { buffer_bytes, count }], Pages::Base)?;
        Ok(Victims { all, queues, pool, started: Instant::now() })
    }

    fn begin(&mut self, job: &Job) {
        for index in 0..self.all.len() {
            for _ in 0..job.depth {
                let queue = self.queues.queue_mut(index);
                self.all[index].submit(job, queue, &self.pool);
            }
        }
    }

    /// Keeps `depth` commands of each victim in flight until `end`; those that are outstanding then count
    /// as their age.
    fn run(&mut self, job: &Job, time: Duration) -> Measured {
        let mut measured = Measured::default();
        let begin = Instant::now();
        let mut next_poll = begin;
        let Victims { all, queues, pool, started } = self;
        while begin.elapsed() < time {
            let now = Nanos::from_us(u64::try_from(started.elapsed().as_micros()).unwrap_or(0));
            queues.poll(now, |index, queue| {
                let victim = &mut all[index];
                while let Some(done) = queue.next_completion() {
                    if done.result.is_err() {
                        continue;
                    }
                    let took =
                        victim.begun[done.ticket.index()].take().map_or(Duration::ZERO, |it| it.elapsed());
                    measured.commands += 1;
                    measured.slowest = measured.slowest.max(took);
                    drop(done);
                    victim.submit(job, queue, pool);
                }
            });
            if Instant::now() >= next_poll {
                next_poll = Instant::now() + Duration::from_millis(100);
                for victim in all.iter_mut() {
                    let _ = victim.controller.poll(now);
                }
            }
        }
        measured
    }

    /// Age of the oldest command without an answer.
    fn oldest(&self) -> Duration {
        let begun = self.all.iter().flat_map(|victim| &victim.begun).flatten();
        begun.min().map_or(Duration::ZERO, Instant::elapsed)
    }

    fn connected(&self) -> usize {
        self.all.iter().filter(|victim| victim.controller.is_up()).count()
    }
}

impl Victim {
    fn submit(&mut self, job: &Job, queue: &mut IoQueue, pool: &Pool) {
        let Some(buf) = pool.take(job.bytes) else { return };
        let blocks = u64::from(job.bytes / self.namespace.block_bytes());
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let lba = (self.seed >> 33) % (self.namespace.blocks / blocks) * blocks;
        let sent = match job.is_write {
            true => queue.write(&self.namespace, lba, buf, false),
            false => queue.read(&self.namespace, lba, buf),
        };
        if let Ok(ticket) = sent {
            self.begun[ticket.index()] = Some(Instant::now());
        }
    }
}

/// The bad host; ends when `stop` is set.
struct Bad {
    queues: Vec<RawHost>,
    _admin: RawHost,
}

impl Bad {
    fn connect(job: &Job) -> Bad {
        let (admin, cntlid) = RawHost::admin(job.address);
        let queues = (1..=job.bad_queues).map(|qid| RawHost::io(job.address, qid, cntlid)).collect();
        Bad { queues, _admin: admin }
    }

    fn command(job: &Job, cid: u16) -> Vec<u8> {
        let blocks = job.bad_bytes / 4096;
        let lba = u64::from(cid) * u64::from(blocks);
        let sqe = match job.bad.as_str() {
            "slow-read" => Sqe::read(cid, job.bad_nsid, lba, blocks),
            _ => Sqe::write(cid, job.bad_nsid, lba, blocks, false),
        };
        with_transport_data(sqe, job.bad_bytes)
    }

    fn begin(&mut self, job: &Job) {
        for queue in &mut self.queues {
            (0..BAD_DEPTH).for_each(|cid| queue.send(&Bad::command(job, cid)));
        }
    }

    /// One PDU of each queue in turn, at [`SLOW_RATE`].
    fn run(&mut self, job: &Job, stop: &AtomicBool) {
        let zeroes = vec![0; H2C_BYTES as usize];
        while !stop.load(Ordering::Relaxed) {
            for queue in &mut self.queues {
                let Some(pdu) = queue.receive() else { return };
                let mut moved = pdu.bytes.len();
                match pdu.header.pdu_type {
                    PduType::R2T => moved += send_data(queue, &pdu.r2t(), &zeroes, stop),
                    PduType::CAPSULE_RESP => queue.send(&Bad::command(job, pdu.cqe().cid())),
                    _ => {}
                }
                std::thread::park_timeout(Duration::from_secs_f64(moved as f64 / SLOW_RATE));
            }
        }
    }
}

/// Sends what an R2T asks for, at [`SLOW_RATE`]; returns 0, as the time is over.
fn send_data(queue: &mut RawHost, r2t: &R2t, zeroes: &[u8], stop: &AtomicBool) -> usize {
    let (begin, end) = (r2t.r2to.get(), r2t.r2to.get() + r2t.r2tl.get());
    let mut at = begin;
    while at < end && !stop.load(Ordering::Relaxed) {
        let bytes = H2C_BYTES.min(end - at);
        let flags = if at + bytes == end { LAST_PDU } else { 0 };
        let extent = Extent::new(24, bytes, false, false, 0);
        let pdu = H2cData::new(r2t.cccid.get(), r2t.ttag.get(), at, bytes, flags, extent);
        queue.send(&[pdu.as_bytes(), &zeroes[..bytes as usize]].concat());
        at += bytes;
        std::thread::park_timeout(Duration::from_secs_f64(f64::from(bytes) / SLOW_RATE));
    }
    0
}

fn main() -> Outcome<()> {
    let job = Arc::new(Job::parse()?);
    let stop = Arc::new(AtomicBool::new(false));
    let start_bad = || {
        let (job, stop) = (Arc::clone(&job), Arc::clone(&stop));
        let mut bad = Bad::connect(&job);
        bad.begin(&job);
        std::thread::spawn(move || {
            if job.bad == "silent" {
                while !stop.load(Ordering::Relaxed) {
                    std::thread::park_timeout(Duration::from_millis(10));
                }
            } else {
                bad.run(&job, &stop);
            }
        })
    };
    let is_bad = job.bad != "none";
    let mut bad = (is_bad && job.is_bad_first).then(start_bad);
    std::thread::park_timeout(Duration::from_millis(200));
    let mut victims = Victims::connect(&job)?;
    victims.begin(&job);
    victims.run(&job, Duration::from_millis(300));
    let before = victims.run(&job, job.time);
    if is_bad && bad.is_none() {
        bad = Some(start_bad());
        victims.run(&job, Duration::from_millis(300));
    }
    let beside = victims.run(&job, job.time);
    let slowest = beside.slowest.max(victims.oldest());
    let rate = |measured: &Measured| measured.commands as f64 / job.time.as_secs_f64();
    println!(
        "{:.0} {:.0} {:.1} {}",
        rate(&before),
        rate(&beside),
        slowest.as_secs_f64() * 1000.0,
        victims.connected()
    );
    stop.store(true, Ordering::Relaxed);
    // The process ends with it: a blocked receive is not waited for.
    drop(bad);
    std::process::exit(0)
}
