//! `spindle bench delivery`: replies sent by the thread that receives the requests, compared with replies
//! sent by a second thread.
//!
//! There is one loopback connection. The requester keeps `qd` requests of 64 bytes in flight; request and
//! reply carry the same tag. The ring contains only tags: the payload of the replies is prepared before the
//! measurement.
//!
//! ```text
//!   event   requester ──▶ serving thread ──▶ requester
//!   spin    requester ──▶ serving thread ──▶ ring ──▶ thread that polls the ring ─────────▶ requester
//!   wake    requester ──▶ serving thread ──▶ ring ──▶ thread that sleeps while it is empty ─▶ requester
//! ```
//!
//! Polling threads call `sched_yield` when they have no work, as there may be fewer cores than threads. There
//! is no disk and no NVMe protocol.

mod ring;

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread::{self, ScopedJoinHandle, Thread};
use std::time::Duration;

use crate::say;
use serde_json::json;
use spindle_reactor::affinity::available_cores;
use spindle_reactor::clock::{Clock, Nanos};

use super::exchange::connect_pair;
use super::{LimitError, WARM_UP, choose_cores, pin};
use crate::args::{CorePair, DeliveryArgs};
use crate::report::json::rounded;
use crate::report::{Latencies, median, per_second};
use crate::size::Bytes;
use ring::Ring;

/// Bytes of a request: those of an NVMe submission queue entry.
const REQUEST_BYTES: usize = 64;
/// Bytes of the tag at the start of each request and reply.
const TAG_BYTES: usize = 8;
/// Largest `--bs`: memory for all replies in flight is allocated.
const REPLY_MAX: Bytes = Bytes::new(1 << 20);

/// Thread that sends the replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Delivery {
    /// The thread that receives the requests.
    Event,
    /// A second thread, which polls the ring.
    Spin,
    /// A second thread, which sleeps while the ring is empty.
    Wake,
}

const DELIVERIES: [Delivery; 3] = [Delivery::Event, Delivery::Spin, Delivery::Wake];

impl Delivery {
    fn name(self) -> &'static str {
        match self {
            Delivery::Event => "event",
            Delivery::Spin => "spin",
            Delivery::Wake => "wake",
        }
    }
}

/// Checked options of a run.
#[derive(Debug, Clone)]
struct Plan {
    reply_bytes: usize,
    depth: usize,
    /// The serving thread's and the requester's core; `None` leaves all threads unpinned (tests).
    cores: Option<CorePair>,
    warm_up: Duration,
    measured: Duration,
}

/// Result of one delivery in one round.
#[derive(Debug, Clone, Copy, Default)]
struct RoundResult {
    iops: f64,
    p50_us: f64,
}

/// Runs `spindle bench delivery` and prints the medians of all rounds.
pub fn run(args: &DeliveryArgs) -> Result<(), LimitError> {
    if args.bs.as_len() < TAG_BYTES || args.bs > REPLY_MAX {
        let rule = format!("a reply is {TAG_BYTES} B to {REPLY_MAX}");
        return Err(LimitError::Size { option: "--bs", value: args.bs.to_string(), rule });
    }
    let cores = choose_cores(args.cores)?;
    let plan = Plan {
        reply_bytes: args.bs.as_len(),
        depth: args.qd.into(),
        cores: Some(cores),
        warm_up: WARM_UP,
        measured: args.seconds,
    };
    let mut rounds = Vec::new();
    for _ in 0..args.rounds {
        let mut round = [RoundResult::default(); DELIVERIES.len()];
        for (delivery, figures) in DELIVERIES.iter().zip(&mut round) {
            *figures = exchange(&plan, *delivery, |stream| request(&plan, &stream))?;
        }
        rounds.push(round);
    }
    show(args, cores, &rounds);
    Ok(())
}

fn show(args: &DeliveryArgs, cores: CorePair, rounds: &[[RoundResult; DELIVERIES.len()]]) {
    let CorePair(serving, requesting) = cores;
    let seconds = args.seconds.as_secs_f64();
    // Ratios are computed within a round: core frequency and placement may change between rounds.
    let row = |at: usize| {
        let ratio = median(rounds.iter().map(|round| round[at].iops / round[0].iops));
        let figures = |of: fn(&RoundResult) -> f64| median(rounds.iter().map(|round| of(&round[at])));
        (DELIVERIES[at].name(), figures(|it| it.iops), ratio, figures(|it| it.p50_us))
    };
    let rows = [row(0), row(1), row(2)];
    if args.json {
        let run = json!({
            "tool": "bench delivery", "bs": args.bs, "qd": args.qd, "seconds": seconds,
            "rounds": args.rounds, "cores": [serving, requesting],
        });
        let ways = rows.map(|(name, iops, ratio, p50_us)| {
            let (iops, ratio, p50_us) = (rounded(iops, 1), rounded(ratio, 3), rounded(p50_us, 3));
            json!({ "delivery": name, "iops": iops, "ratio": ratio, "latency_us": { "p50": p50_us } })
        });
        say!("{}", json!({ "run": run, "ways": ways }));
        return;
    }
    say!("replies of {}, depth {}, medians of {} rounds of {seconds} s", args.bs, args.qd, args.rounds);
    say!("cores {serving} (serving) and {requesting} (requesting) of {}", available_cores().len());
    say!("{:<9}{:>12}{:>7}{:>10}", "delivery", "replies/s", "ratio", "p50 us");
    for (name, iops, ratio, p50_us) in rows {
        say!("{name:<9}{iops:>12.0}{ratio:>7.2}{p50_us:>10.1}");
    }
}

/// Serves one connection with `delivery`. Passes the other end to `requester`, which closes it on return.
fn exchange<T: Send>(
    plan: &Plan,
    delivery: Delivery,
    requester: impl FnOnce(TcpStream) -> io::Result<T> + Send,
) -> Result<T, LimitError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .map_err(LimitError::socket("cannot listen on 127.0.0.1"))?;
    let (serving, requesting) = connect_pair(&listener, Some("reno"))?;
    let ring = &Ring::new(plan.depth);
    thread::scope(|scope| {
        // Each thread owns its socket, so the connection closes when its threads end. This thread is not
        // pinned and starts all of them: a thread inherits its parent's affinity.
        let deliverer = if delivery == Delivery::Event {
            None
        } else {
            let sending = serving.try_clone().map_err(LimitError::socket("cannot share a socket"))?;
            Some(scope.spawn(move || deliver(plan, delivery, ring, &sending)))
        };
        let sleeper = deliverer.as_ref().map(|it| it.thread().clone()).filter(|_| delivery == Delivery::Wake);
        let server = scope.spawn(move || match delivery {
            Delivery::Event => serve(plan, &serving, sender(plan, &serving)),
            Delivery::Spin | Delivery::Wake => hand_over(plan, &serving, ring, sleeper),
        });
        let requester = scope.spawn(move || {
            plan.cores.iter().for_each(|cores| pin(cores.1));
            requester(requesting)
        });
        let outcome = join_thread("requesting", requester);
        let (served, delivered) =
            (join_thread("serving", server), deliverer.map(|it| join_thread("delivering", it)));
        // The root cause is returned first: the failure of one thread closes the connection or the ring for
        // the others.
        delivered.transpose()?;
        served?;
        outcome
    })
}

fn join_thread<T>(name: &'static str, thread: ScopedJoinHandle<'_, io::Result<T>>) -> Result<T, LimitError> {
    thread.join().map_err(|_| LimitError::Panicked(name))?.map_err(LimitError::socket(name))
}

/// Runs the serving thread: passes the tags of each receive to `forward` until the requester disconnects.
fn serve(
    plan: &Plan,
    stream: &TcpStream,
    mut forward: impl FnMut(&[u64]) -> io::Result<()>,
) -> io::Result<()> {
    plan.cores.iter().for_each(|cores| pin(cores.0));
    let mut inbox = Inbox::new(REQUEST_BYTES, plan.depth);
    let mut tags = Vec::with_capacity(plan.depth);
    while inbox.receive(stream, &mut tags)? {
        forward(&tags)?;
    }
    Ok(())
}

/// Runs the serving thread of `spin` and `wake`: appends the tags to the ring, and waits while it is full.
fn hand_over(plan: &Plan, stream: &TcpStream, ring: &Ring, sleeper: Option<Thread>) -> io::Result<()> {
    let close_on_drop = ring.close_on_drop(sleeper);
    serve(plan, stream, |tags| {
        for tag in tags {
            while !ring.push(*tag) && !ring.is_closed() {
                close_on_drop.wake();
                thread::yield_now();
            }
        }
        // One wake-up per receive, as `event` has one send per receive.
        if !tags.is_empty() {
            close_on_drop.wake();
        }
        // Checked without new tags too: after a failure of the delivering thread, no request follows.
        if ring.is_closed() { Err(ErrorKind::BrokenPipe.into()) } else { Ok(()) }
    })
}

/// Runs the delivering thread: sends a reply for each tag until the ring is closed and empty.
fn deliver(plan: &Plan, delivery: Delivery, ring: &Ring, stream: &TcpStream) -> io::Result<()> {
    let _close_on_drop = ring.close_on_drop(None);
    if let Some(core) = plan.cores.and_then(|cores| delivering_core(delivery, cores)) {
        pin(core);
    }
    let mut send = sender(plan, stream);
    let mut tags = Vec::with_capacity(plan.depth);
    loop {
        // Read before `take`, so that tags pushed before the close are taken.
        let is_closed = ring.is_closed();
        ring.take(&mut tags);
        match delivery {
            _ if !tags.is_empty() => send(&tags)?,
            _ if is_closed => return Ok(()),
            Delivery::Wake => thread::park(),
            Delivery::Event | Delivery::Spin => thread::yield_now(),
        }
    }
}

/// Returns the core of the delivering thread. For `wake` it is the serving thread's; for `spin`, a core that
/// neither end uses, or `None` (unpinned) without such a core.
fn delivering_core(delivery: Delivery, CorePair(serving, requesting): CorePair) -> Option<usize> {
    match delivery {
        Delivery::Event | Delivery::Wake => Some(serving),
        Delivery::Spin => available_cores().into_iter().find(|core| ![serving, requesting].contains(core)),
    }
}

/// Runs the requester: keeps `plan.depth` requests in flight for the warm-up and the measured time, longer if
/// no reply arrived in the measured time. Then waits for the outstanding replies.
fn request(plan: &Plan, stream: &TcpStream) -> io::Result<RoundResult> {
    let mut inbox = Inbox::new(plan.reply_bytes, plan.depth);
    let mut requests = vec![0; REQUEST_BYTES * plan.depth];
    let mut tags: Vec<u64> = (0..plan.depth as u64).collect();
    let mut send_times = vec![Nanos::ZERO; plan.depth];
    let mut latency = Latencies::new();
    let (mut in_flight, mut elapsed, mut is_sending) = (0, Nanos::ZERO, true);
    let mut now = Clock::now();
    let begin = now + plan.warm_up.into();
    let end = begin + plan.measured.into();
    loop {
        if is_sending {
            for tag in &tags {
                *send_time_mut(&mut send_times, *tag)? = now;
            }
            in_flight += tags.len();
            send_tags(stream, &mut requests, REQUEST_BYTES, &tags)?;
        }
        if in_flight == 0 {
            let iops = per_second(latency.count(), elapsed.as_duration());
            return Ok(RoundResult { iops, p50_us: latency.percentile_us(50.0) });
        }
        if !inbox.receive(stream, &mut tags)? {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        now = Clock::now();
        let is_counted = is_sending && now > begin;
        for tag in &tags {
            let sent = send_time_mut(&mut send_times, *tag)?;
            if is_counted {
                latency.record((now - *sent).as_u64(), 1);
            }
        }
        in_flight = in_flight.checked_sub(tags.len()).ok_or(ErrorKind::InvalidData)?;
        if is_counted {
            elapsed = now - begin;
            // On a loaded machine the first reply may arrive after the measured time: sending continues until
            // it does.
            is_sending = now < end || latency.count() == 0;
        }
    }
}

fn send_time_mut(send_times: &mut [Nanos], tag: u64) -> io::Result<&mut Nanos> {
    let index = usize::try_from(tag).ok().filter(|index| *index < send_times.len());
    Ok(&mut send_times[index.ok_or(ErrorKind::InvalidData)?])
}

/// Returns a function that sends a reply for each tag, all in one call unless the socket buffer is full.
fn sender(plan: &Plan, stream: &TcpStream) -> impl FnMut(&[u64]) -> io::Result<()> {
    let mut replies = vec![0xa5; plan.reply_bytes * plan.depth];
    move |tags| send_tags(stream, &mut replies, plan.reply_bytes, tags)
}

/// Sends a message of `unit` bytes for each tag. `messages` contains at least one message for each of `tags`.
fn send_tags(mut stream: &TcpStream, messages: &mut [u8], unit: usize, tags: &[u64]) -> io::Result<()> {
    for (message, tag) in messages.chunks_exact_mut(unit).zip(tags) {
        message[..TAG_BYTES].copy_from_slice(&tag.to_le_bytes());
    }
    let mut left = &messages[..unit * tags.len()];
    while !left.is_empty() {
        match stream.write(left) {
            Ok(sent) => left = &left[sent..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::yield_now(),
            Err(error) if error.kind() == ErrorKind::Interrupted => (),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Receive buffer; keeps the incomplete message at the end of a receive.
struct Inbox {
    bytes: Vec<u8>,
    filled: usize,
    unit: usize,
}

impl Inbox {
    fn new(unit: usize, depth: usize) -> Inbox {
        Inbox { bytes: vec![0; unit * depth], filled: 0, unit }
    }

    /// Receives once and replaces `tags` by those of the complete messages, none if no data has arrived.
    /// False: the peer has closed the connection.
    fn receive(&mut self, mut stream: &TcpStream, tags: &mut Vec<u64>) -> io::Result<bool> {
        tags.clear();
        match stream.read(&mut self.bytes[self.filled..]) {
            Ok(0) => return Ok(false),
            Ok(count) => self.filled += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::yield_now(),
            Err(error) if error.kind() == ErrorKind::Interrupted => (),
            Err(error) => return Err(error),
        }
        let whole = self.filled - self.filled % self.unit;
        let messages = self.bytes[..whole].chunks_exact(self.unit);
        tags.extend(messages.filter_map(|it| it.first_chunk().map(|tag| u64::from_le_bytes(*tag))));
        self.bytes.copy_within(whole..self.filled, 0);
        self.filled -= whole;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        let (warm_up, measured) = (Duration::from_millis(2), Duration::from_millis(20));
        Plan { reply_bytes: 4096, depth: 8, cores: None, warm_up, measured }
    }

    #[test]
    fn every_way_measures() {
        for delivery in DELIVERIES {
            for plan in [plan(), Plan { depth: 1, ..plan() }, Plan { depth: 100, reply_bytes: 77, ..plan() }]
            {
                let figures = exchange(&plan, delivery, |stream| request(&plan, &stream)).expect("runs");
                assert!(figures.iops > 0.0 && figures.p50_us > 0.0, "{delivery:?} {plan:?}");
            }
        }
    }

    #[test]
    fn every_way_delivers_the_same_bytes() {
        // More tags than the ring has slots, so that it wraps and is full at times.
        let tags: Vec<u64> = (0..1000).map(|tag| tag * 0x0101_0101_0101).collect();
        let delivered = DELIVERIES.map(|delivery| {
            let requester = |stream: TcpStream| {
                stream.set_nonblocking(false)?;
                send_tags(&stream, &mut vec![0; REQUEST_BYTES * tags.len()], REQUEST_BYTES, &tags)?;
                stream.shutdown(std::net::Shutdown::Write)?;
                let mut bytes = Vec::new();
                (&stream).read_to_end(&mut bytes)?;
                Ok(bytes)
            };
            exchange(&plan(), delivery, requester).expect("delivers")
        });
        let mut expected = vec![0xa5; 4096 * tags.len()];
        for (reply, tag) in expected.chunks_exact_mut(4096).zip(&tags) {
            reply[..TAG_BYTES].copy_from_slice(&tag.to_le_bytes());
        }
        for (delivery, bytes) in DELIVERIES.iter().zip(delivered) {
            assert!(bytes == expected, "{delivery:?}");
        }
    }

    #[test]
    fn all_threads_end_with_a_requester_that_leaves_early() {
        for delivery in DELIVERIES {
            let plan = Plan { reply_bytes: 1 << 20, ..plan() };
            let leave = |stream: TcpStream| {
                send_tags(&stream, &mut [0; REQUEST_BYTES * 8], REQUEST_BYTES, &[0; 8])?;
                // Waits for the first reply, so that the threads are sending when the requester leaves.
                stream.set_nonblocking(false)?;
                (&stream).read_exact(&mut [0; TAG_BYTES])
            };
            let error = exchange(&plan, delivery, leave).expect_err("broken off").to_string();
            assert!(error.contains("reset") || error.contains("pipe"), "{delivery:?}: {error}");
            exchange::<()>(&plan, delivery, |_| Err(ErrorKind::Other.into())).expect_err("it failed");
            exchange::<()>(&plan, delivery, |_| panic!("the test's own")).expect_err("it panicked");
        }
    }

    #[test]
    fn a_tag_that_was_not_sent_is_an_error() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("listens");
        let (serving, requesting) = connect_pair(&listener, None).expect("connects");
        sender(&plan(), &serving)(&[8]).expect("sends");
        assert_eq!(
            request(&plan(), &requesting).expect_err("no such send_time_mut").kind(),
            ErrorKind::InvalidData
        );
    }

    #[test]
    fn the_serving_thread_ends_with_the_deliverer() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("listens");
        let (serving, _requesting) = connect_pair(&listener, None).expect("connects");
        let ring = Ring::new(1);
        drop(ring.close_on_drop(None));
        let error = hand_over(&plan(), &serving, &ring, None).expect_err("the ring is closed");
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    }

    #[test]
    fn the_middle_is_the_median() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(median([3.0, 1.0, 2.0, 10.0].into_iter()), 2.5);
    }
}
