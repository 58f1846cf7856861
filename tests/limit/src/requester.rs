//! The requesting end: keeps the queue depth in flight and measures latencies.
//!
//! The clock is read once for all requests that one receive completes. On a connection, reads complete in
//! order, and so do writes. So each direction has a queue of (start time, count), whose oldest entry is that
//! of the next completion.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::LoadSpec;
use crate::message::{Kind, Piece};
use crate::outbox::{Outbox, PreparedMessages};
use crate::poll_loop::Role;
use spindle_app_bench::random::Random;
use spindle_app_bench::report::Latencies;

/// Most bytes of memory for received payload. If the depth needs more, reads in flight share blocks.
const READ_BUFFER_BYTES_MAX: usize = 256 << 20;

/// Result of a run.
#[derive(Debug)]
pub(super) struct Outcome {
    /// Measured time, without the warm-up.
    pub(super) elapsed: Duration,
    /// Requests that ended in the measured time.
    pub(super) operations: u64,
    pub(super) latency: Latencies,
    /// Processor time of the process over twice the measured time. 1.0: both threads ran without a pause.
    pub(super) cpu_share: f64,
}

/// [`Role`] of the requesting end. Times are in nanoseconds since `started`.
#[derive(Debug)]
pub(super) struct Requester<'shared> {
    prepared: PreparedMessages,
    links: Vec<InFlight>,
    reads_percent: usize,
    write: Kind,
    random: Random,
    started: Instant,
    /// Planned start (end of the warm-up) and length of the measured time.
    warm_up: u64,
    measured: u64,
    /// Actual start of the measured time, and time of the last receive that counts.
    measured_from: Option<u64>,
    measured_to: u64,
    /// Processor time of the process: at the start of the measured time, and after its end the time used
    /// within it.
    cpu: Duration,
    is_over: bool,
    operations: u64,
    latency: Latencies,
    /// Copy of `operations`, for the progress bar; starts again at 0 after the warm-up.
    done: &'shared AtomicU64,
    read_buffers: ReadBuffers,
}

/// Payload memory for each read in flight, as in a real host. A requester that dropped payload would be
/// faster than any host can be.
#[derive(Debug)]
struct ReadBuffers {
    bytes: Vec<u8>,
    block_bytes: usize,
    /// Offset in `bytes` for the payload of the next reply.
    next: usize,
    /// By connection: offset in `bytes` of the payload that is being received.
    offsets: Vec<usize>,
}

impl ReadBuffers {
    /// Allocates the memory and writes it once, so that its pages are mapped before the first receive.
    fn new(blocks: usize, block_bytes: usize, connections: usize) -> ReadBuffers {
        let blocks = blocks.min(READ_BUFFER_BYTES_MAX / block_bytes).max(1);
        ReadBuffers {
            bytes: vec![0xff; blocks * block_bytes],
            block_bytes,
            next: 0,
            offsets: vec![0; connections],
        }
    }

    /// Copies the payload bytes of `piece`, a part of a read reply. The first part of a reply selects the
    /// memory.
    #[inline]
    fn put(&mut self, link: usize, piece: &Piece<'_>) {
        if piece.offset == 0 {
            self.offsets[link] = self.next;
            self.next += self.block_bytes;
            if self.next == self.bytes.len() {
                self.next = 0;
            }
        }
        let head = piece.kind.head_bytes();
        let payload = &piece.bytes[head.saturating_sub(piece.offset).min(piece.bytes.len())..];
        let at = self.offsets[link] + piece.offset.saturating_sub(head);
        self.bytes[at..at + payload.len()].copy_from_slice(payload);
    }

    /// Returns the memory for the last `left` bytes of the payload that `link` is receiving.
    #[inline]
    fn remaining(&mut self, link: usize, left: usize) -> &mut [u8] {
        let end = self.offsets[link] + self.block_bytes;
        &mut self.bytes[end - left..end]
    }
}

/// Requests in flight on a connection.
#[derive(Debug)]
struct InFlight {
    /// Number of requests that may be started now.
    credits: usize,
    reads: Batches,
    writes: Batches,
}

/// Requests in flight of one direction, oldest first, as (start time, count). `ended` counts the completions
/// of the current receive.
#[derive(Debug, Default)]
struct Batches {
    started: VecDeque<(u64, usize)>,
    ended: usize,
}

impl<'shared> Requester<'shared> {
    /// Creates the requesting end. The warm-up starts with this call.
    pub(super) fn new(spec: &LoadSpec, done: &'shared AtomicU64) -> Requester<'shared> {
        let write =
            if spec.block_bytes <= spec.inline_bytes_max { Kind::WriteInline } else { Kind::WriteAnnounced };
        let mut kinds = Vec::new();
        if spec.reads_percent > 0 {
            kinds.push(Kind::Read);
        }
        if spec.reads_percent < 100 {
            kinds.push(write);
        }
        if kinds.contains(&Kind::WriteAnnounced) {
            kinds.push(Kind::WriteData);
        }
        let in_flight = |link| InFlight {
            credits: spec.depth_of(link),
            reads: Batches::default(),
            writes: Batches::default(),
        };
        Requester {
            prepared: PreparedMessages::new(&kinds, spec.depth, spec.block_bytes),
            links: (0..spec.connections).map(in_flight).collect(),
            reads_percent: usize::from(spec.reads_percent),
            write,
            random: Random::new(1),
            started: Instant::now(),
            warm_up: nanoseconds(spec.warm_up),
            measured: nanoseconds(spec.measured),
            measured_from: None,
            measured_to: 0,
            cpu: Duration::ZERO,
            is_over: false,
            operations: 0,
            latency: Latencies::new(),
            done,
            read_buffers: ReadBuffers::new(
                if spec.reads_percent > 0 { spec.depth } else { 1 },
                spec.block_bytes,
                spec.connections,
            ),
        }
    }

    /// Returns the result; `None` if the connections closed before the end of the measured time.
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

    /// Starts as many requests on `link` as it has credits, which are at least one.
    #[inline]
    fn start(&mut self, link: usize, now: u64, outbox: &mut Outbox) {
        let in_flight = &mut self.links[link];
        let credits = std::mem::take(&mut in_flight.credits);
        let mut reads = 0;
        match self.reads_percent {
            100 => {
                reads = credits;
                outbox.push(Kind::Read, credits, &self.prepared);
            }
            0 => outbox.push(self.write, credits, &self.prepared),
            percent => {
                for _ in 0..credits {
                    let is_read = self.random.below(100) < percent as u64;
                    reads += usize::from(is_read);
                    outbox.push(if is_read { Kind::Read } else { self.write }, 1, &self.prepared);
                }
            }
        }
        in_flight.reads.begin(now, reads);
        in_flight.writes.begin(now, credits - reads);
    }

    /// Begins the measured time after the warm-up, and ends the run after the measured time.
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

    /// Copies payload: only replies to reads have payload.
    #[inline]
    fn on_piece(&mut self, link: usize, piece: &Piece<'_>) {
        self.read_buffers.put(link, piece);
    }

    #[inline]
    fn payload_memory(&mut self, link: usize, left: usize) -> &mut [u8] {
        self.read_buffers.remaining(link, left)
    }

    #[inline]
    fn on_message(&mut self, link: usize, kind: Kind, outbox: &mut Outbox) {
        match kind {
            Kind::ReadReply => self.links[link].reads.ended += 1,
            Kind::Done => self.links[link].writes.ended += 1,
            Kind::ReadyToTransfer => outbox.push(Kind::WriteData, 1, &self.prepared),
            // Only a requester sends these messages.
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
    fn prepared(&self) -> &PreparedMessages {
        &self.prepared
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

    /// Removes the oldest `ended` requests and records their latencies.
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

/// Returns the processor time of the process. It includes the main thread, which mostly sleeps.
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
        let mut read_buffers = ReadBuffers::new(2, 10, 1);
        let head = Kind::ReadReply.head_bytes();
        let reply = |value: u8| [vec![0; head], vec![value; 10]].concat();
        for value in 1..=3 {
            let bytes = reply(value);
            let (first, second) = bytes.split_at(head + 4);
            let kind = Kind::ReadReply;
            read_buffers.put(0, &Piece { kind, offset: 0, bytes: first, is_last: false });
            if value == 2 {
                read_buffers.remaining(0, 6).copy_from_slice(second);
            } else {
                read_buffers.put(0, &Piece { kind, offset: head + 4, bytes: second, is_last: true });
            }
        }
        assert_eq!(read_buffers.bytes, [[3; 10], [2; 10]].concat());
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
