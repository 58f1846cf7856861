//! The requesting end: keeps the depth in flight and measures how long each request took.
//!
//! The clock is read once for all that one receive completed. Replies come in the order of the requests,
//! reads and writes each in their own, so a latency is the distance to the oldest entry of a short queue of
//! (time, count).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::Plan;
use super::end::Role;
use super::message::{Kind, Piece};
use super::outbox::{Outbox, Stock};
use crate::random::Random;
use crate::report::Latencies;

/// Memory that payload lands in at most; beyond it blocks are shared.
const LANDING_BYTES_MAX: usize = 256 << 20;

/// What the requester measured.
#[derive(Debug)]
pub(super) struct Outcome {
    /// The time measured, without the warm-up.
    pub(super) elapsed: Duration,
    /// Requests that ended in it.
    pub(super) operations: u64,
    /// How long each of them took.
    pub(super) latency: Latencies,
    /// Which share of the time the two ends had their cores.
    pub(super) cpu_share: f64,
}

/// The requesting end's role.
#[derive(Debug)]
pub(super) struct Requester<'shared> {
    stock: Stock,
    links: Vec<InFlight>,
    reads_percent: usize,
    write: Kind,
    random: Random,
    started: Instant,
    /// Nanoseconds after `started` at which the measurement begins, and how long it lasts.
    warm_up: u64,
    measured: u64,
    /// Nanoseconds at which it really began and at which its last request ended.
    measured_from: Option<u64>,
    measured_to: u64,
    /// Processor time of both ends at the begin of the measurement, later that within it.
    cpu: Duration,
    is_over: bool,
    operations: u64,
    latency: Latencies,
    /// Where the progress bar reads how far it is.
    done: &'shared AtomicU64,
    landing: Landing,
}

/// Memory of its own for the payload of every read in flight, as any host has it: a ceiling that drops
/// payload would be one that no host can reach.
#[derive(Debug)]
struct Landing {
    bytes: Vec<u8>,
    block_bytes: usize,
    /// Where the next reply's payload goes.
    next: usize,
    /// For each connection where the payload that it is receiving goes.
    targets: Vec<usize>,
}

impl Landing {
    /// Filled, so that the pages are there before the first receive.
    fn new(blocks: usize, block_bytes: usize, connections: usize) -> Landing {
        let blocks = blocks.min(LANDING_BYTES_MAX / block_bytes).max(1);
        Landing {
            bytes: vec![0xff; blocks * block_bytes],
            block_bytes,
            next: 0,
            targets: vec![0; connections],
        }
    }

    /// Put what of a read's reply is payload where it goes.
    #[inline]
    fn put(&mut self, link: usize, piece: &Piece<'_>) {
        if piece.offset == 0 {
            self.targets[link] = self.next;
            self.next += self.block_bytes;
            if self.next == self.bytes.len() {
                self.next = 0;
            }
        }
        let head = piece.kind.head_bytes();
        let payload = &piece.bytes[head.saturating_sub(piece.offset).min(piece.bytes.len())..];
        let at = self.targets[link] + piece.offset.saturating_sub(head);
        self.bytes[at..at + payload.len()].copy_from_slice(payload);
    }

    /// Where the last `left` bytes go.
    #[inline]
    fn rest(&mut self, link: usize, left: usize) -> &mut [u8] {
        let end = self.targets[link] + self.block_bytes;
        &mut self.bytes[end - left..end]
    }
}

/// The requests of a connection that wait for their end.
#[derive(Debug)]
struct InFlight {
    /// Requests that it may start now.
    credits: usize,
    reads: Batches,
    writes: Batches,
}

/// Requests of one direction: when they were started and how many, oldest first; and how many ended in this
/// receive.
#[derive(Debug, Default)]
struct Batches {
    started: VecDeque<(u64, usize)>,
    ended: usize,
}

impl<'shared> Requester<'shared> {
    /// A requester of `plan`, whose clock starts now.
    pub(super) fn new(plan: &Plan, done: &'shared AtomicU64) -> Requester<'shared> {
        let write =
            if plan.block_bytes <= plan.inline_bytes_max { Kind::WriteInline } else { Kind::WriteAnnounced };
        let mut kinds = Vec::new();
        if plan.reads_percent > 0 {
            kinds.push(Kind::Read);
        }
        if plan.reads_percent < 100 {
            kinds.push(write);
        }
        if kinds.contains(&Kind::WriteAnnounced) {
            kinds.push(Kind::WriteData);
        }
        let in_flight = |link| InFlight {
            credits: plan.depth_of(link),
            reads: Batches::default(),
            writes: Batches::default(),
        };
        Requester {
            stock: Stock::new(&kinds, plan.depth, plan.block_bytes),
            links: (0..plan.connections).map(in_flight).collect(),
            reads_percent: usize::from(plan.reads_percent),
            write,
            random: Random::new(1),
            started: Instant::now(),
            warm_up: nanoseconds(plan.warm_up),
            measured: nanoseconds(plan.measured),
            measured_from: None,
            measured_to: 0,
            cpu: Duration::ZERO,
            is_over: false,
            operations: 0,
            latency: Latencies::new(),
            done,
            landing: Landing::new(
                if plan.reads_percent > 0 { plan.depth } else { 1 },
                plan.block_bytes,
                plan.connections,
            ),
        }
    }

    /// What was measured; `None` if the server went away before the end.
    pub(super) fn outcome(self) -> Option<Outcome> {
        let from = self.measured_from.filter(|_| self.is_over)?;
        let elapsed = Duration::from_nanos(self.measured_to - from);
        Some(Outcome {
            elapsed,
            cpu_share: self.cpu.as_secs_f64() / (2.0 * elapsed.as_secs_f64()),
            operations: self.operations,
            latency: self.latency,
        })
    }

    /// Start as many requests on `link` as it may, at least one, at `now`.
    #[inline]
    fn start(&mut self, link: usize, now: u64, outbox: &mut Outbox) {
        let in_flight = &mut self.links[link];
        let credits = std::mem::take(&mut in_flight.credits);
        let mut reads = 0;
        match self.reads_percent {
            100 => {
                reads = credits;
                outbox.push(Kind::Read, credits, &self.stock);
            }
            0 => outbox.push(self.write, credits, &self.stock),
            percent => {
                for _ in 0..credits {
                    let is_read = self.random.below(100) < percent as u64;
                    reads += usize::from(is_read);
                    outbox.push(if is_read { Kind::Read } else { self.write }, 1, &self.stock);
                }
            }
        }
        in_flight.reads.begin(now, reads);
        in_flight.writes.begin(now, credits - reads);
    }

    /// Move on from warming up to measuring to the end.
    #[inline]
    fn advance(&mut self, now: u64) {
        match self.measured_from {
            None if now >= self.warm_up => {
                self.latency.clear();
                self.operations = 0;
                self.cpu = cpu_time();
                self.measured_from = Some(now);
            }
            None => {}
            Some(from) => {
                self.measured_to = now;
                self.is_over = now - from >= self.measured;
                if self.is_over {
                    self.cpu = cpu_time().saturating_sub(self.cpu);
                }
            }
        }
    }
}

impl Role for Requester<'_> {
    const RECEIVES_WHILE_BLOCKED: bool = true;

    #[inline]
    fn is_over(&self) -> bool {
        self.is_over
    }

    /// Only replies to reads have payload.
    #[inline]
    fn on_piece(&mut self, link: usize, piece: &Piece<'_>) {
        self.landing.put(link, piece);
    }

    #[inline]
    fn landing(&mut self, link: usize, left: usize) -> &mut [u8] {
        self.landing.rest(link, left)
    }

    #[inline]
    fn on_message(&mut self, link: usize, kind: Kind, outbox: &mut Outbox) {
        match kind {
            Kind::ReadReply => self.links[link].reads.ended += 1,
            Kind::Done => self.links[link].writes.ended += 1,
            Kind::ReadyToTransfer => outbox.push(Kind::WriteData, 1, &self.stock),
            // A requester's own messages do not come back to it; a server would not send them.
            Kind::Read | Kind::WriteInline | Kind::WriteAnnounced | Kind::WriteData => {}
        }
    }

    #[inline]
    fn on_received(&mut self, link: usize, outbox: &mut Outbox) {
        let in_flight = &mut self.links[link];
        let ended = in_flight.reads.ended + in_flight.writes.ended;
        if ended + in_flight.credits == 0 {
            return;
        }
        let now = nanoseconds(self.started.elapsed());
        in_flight.credits += ended;
        in_flight.reads.end(now, &mut self.latency);
        in_flight.writes.end(now, &mut self.latency);
        self.operations += ended as u64;
        self.done.store(self.operations, Ordering::Relaxed);
        self.advance(now);
        self.start(link, now, outbox);
    }

    #[inline]
    fn stock(&self) -> &Stock {
        &self.stock
    }

    #[inline]
    fn span(&self) -> &[u8] {
        &[]
    }
}

impl Batches {
    #[inline]
    fn begin(&mut self, now: u64, count: usize) {
        if count > 0 {
            self.started.push_back((now, count));
        }
    }

    /// Record the latency of the oldest `ended` requests.
    #[inline]
    fn end(&mut self, now: u64, latency: &mut Latencies) {
        while self.ended > 0 {
            let Some((started, count)) = self.started.front_mut() else { break };
            let part = self.ended.min(*count);
            latency.record(now - *started, part as u64);
            self.ended -= part;
            *count -= part;
            if *count == 0 {
                self.started.pop_front();
            }
        }
    }
}

/// Processor time of the whole process, which is that of the two ends.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

#[inline]
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_lands_whole_and_each_reply_in_memory_of_its_own() {
        let mut landing = Landing::new(2, 10, 1);
        let head = Kind::ReadReply.head_bytes();
        let reply = |value: u8| [vec![0; head], vec![value; 10]].concat();
        for value in 1..=3 {
            let bytes = reply(value);
            let (first, second) = bytes.split_at(head + 4);
            let kind = Kind::ReadReply;
            landing.put(0, &Piece { kind, offset: 0, bytes: first, is_last: false });
            if value == 2 {
                landing.rest(0, 6).copy_from_slice(second);
            } else {
                landing.put(0, &Piece { kind, offset: head + 4, bytes: second, is_last: true });
            }
        }
        assert_eq!(landing.bytes, [[3; 10], [2; 10]].concat());
    }

    #[test]
    fn a_reply_ends_the_oldest_request() {
        let mut batches = Batches::default();
        let mut latency = Latencies::new();
        batches.begin(100, 2);
        batches.begin(150, 0);
        batches.begin(200, 3);
        batches.ended = 3;
        batches.end(1000, &mut latency);
        assert_eq!((latency.count(), batches.ended), (3, 0));
        assert!((latency.max_us() - 0.9).abs() < 1e-3 && (latency.percentile_us(0.0) - 0.8).abs() < 1e-3);
        assert_eq!(batches.started, [(200, 2)]);
    }
}
