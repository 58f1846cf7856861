//! `spindle bench delivery`: replies sent by the thread that took their requests, against replies that it
//! hands over to another thread.
//!
//! One loopback connection. The requester keeps `qd` requests of 64 bytes in flight; each carries a tag, and
//! its reply carries the same one. The ring holds tags only: what is delivered lies ready in all ways.
//!
//! ```text
//!   event   requester ──▶ serving thread ──▶ requester
//!   spin    requester ──▶ serving thread ──▶ ring ──▶ thread that polls the ring ─────────▶ requester
//!   wake    requester ──▶ serving thread ──▶ ring ──▶ thread that sleeps while it is empty ─▶ requester
//! ```
//!
//! All polling threads give their core away when they find nothing: there may be fewer cores than threads.
//!
//! What it does not do: it has no disk and no protocol.

mod ring;

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread::{self, ScopedJoinHandle, Thread};
use std::time::Duration;

use serde_json::json;
use spindle_console::say;
use spindle_reactor::affinity::available_cores;
use spindle_reactor::clock::{Clock, Nanos};

use super::exchange::connect_pair;
use super::{LimitError, WARM_UP, choose_cores, pin};
use crate::args::{CorePair, DeliveryArgs};
use crate::report::json::rounded;
use crate::report::{Latencies, per_second};
use ring::Ring;
use spindle_console::size::Bytes;

/// Bytes of a request: those of an NVMe command.
const REQUEST_BYTES: usize = 64;
/// Bytes of a tag, with which requests and replies begin.
const TAG_BYTES: usize = 8;
/// The largest reply: all replies in flight have room in memory.
const REPLY_MAX: Bytes = Bytes::new(1 << 20);

/// Who sends a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Delivery {
    /// The thread that has taken the request.
    Event,
    /// Another one, which polls for replies.
    Spin,
    /// Another one, which sleeps when there is none, and is woken.
    Wake,
}

const WAYS: [Delivery; 3] = [Delivery::Event, Delivery::Spin, Delivery::Wake];

impl Delivery {
    fn name(self) -> &'static str {
        match self {
            Delivery::Event => "event",
            Delivery::Spin => "spin",
            Delivery::Wake => "wake",
        }
    }
}

/// What is run.
#[derive(Debug, Clone)]
struct Plan {
    reply_bytes: usize,
    depth: usize,
    /// The serving thread's and the requester's core; `None` leaves all threads unpinned (tests).
    cores: Option<CorePair>,
    warm_up: Duration,
    measured: Duration,
}

/// What one way gave in one round.
#[derive(Debug, Clone, Copy, Default)]
struct Figures {
    iops: f64,
    p50_us: f64,
}

/// Measure the three ways in turn and show what they gave.
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
        let mut round = [Figures::default(); WAYS.len()];
        for (way, figures) in WAYS.iter().zip(&mut round) {
            *figures = exchange(&plan, *way, |stream| request(&plan, &stream))?;
        }
        rounds.push(round);
    }
    show(args, cores, &rounds);
    Ok(())
}

fn show(args: &DeliveryArgs, cores: CorePair, rounds: &[[Figures; WAYS.len()]]) {
    let CorePair(serving, requesting) = cores;
    let seconds = args.seconds.as_secs_f64();
    // Of the same round, as the cores may change their state between rounds.
    let row = |at: usize| {
        let ratio = median(rounds.iter().map(|round| round[at].iops / round[0].iops));
        let figures = |of: fn(&Figures) -> f64| median(rounds.iter().map(|round| of(&round[at])));
        (WAYS[at].name(), figures(|it| it.iops), ratio, figures(|it| it.p50_us))
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

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    (values[(values.len() - 1) / 2] + values[values.len() / 2]) / 2.0
}

/// Serve one connection one way. `requester` has its other end, and hangs up when it returns.
fn exchange<T: Send>(
    plan: &Plan,
    way: Delivery,
    requester: impl FnOnce(TcpStream) -> io::Result<T> + Send,
) -> Result<T, LimitError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .map_err(LimitError::socket("cannot listen on 127.0.0.1"))?;
    let (taking, requesting) = connect_pair(&listener, Some("reno"))?;
    let ring = &Ring::new(plan.depth);
    thread::scope(|scope| {
        // Each thread owns its end: a connection ends with the threads that use it. All are started from
        // here, as a thread inherits the core that its starter is pinned to.
        let deliverer = if way == Delivery::Event {
            None
        } else {
            let sending = taking.try_clone().map_err(LimitError::socket("cannot share a socket"))?;
            Some(scope.spawn(move || deliver(plan, way, ring, &sending)))
        };
        let woken = deliverer.as_ref().map(|it| it.thread().clone()).filter(|_| way == Delivery::Wake);
        let server = scope.spawn(move || match way {
            Delivery::Event => serve(plan, &taking, sender(plan, &taking)),
            Delivery::Spin | Delivery::Wake => hand_over(plan, &taking, ring, woken),
        });
        let requester = scope.spawn(move || {
            plan.cores.iter().for_each(|cores| pin(cores.1));
            requester(requesting)
        });
        let outcome = end_of("requesting", requester);
        let (served, delivered) = (end_of("serving", server), deliverer.map(|it| end_of("delivering", it)));
        // The reason of who failed first: the others only saw the connection or the ring close.
        delivered.transpose()?;
        served?;
        outcome
    })
}

fn end_of<T>(name: &'static str, thread: ScopedJoinHandle<'_, io::Result<T>>) -> Result<T, LimitError> {
    thread.join().map_err(|_| LimitError::Panicked(name))?.map_err(LimitError::socket(name))
}

/// The serving thread: gives the tags of the requests of a turn to `hand`, until the requester hangs up.
fn serve(plan: &Plan, stream: &TcpStream, mut hand: impl FnMut(&[u64]) -> io::Result<()>) -> io::Result<()> {
    plan.cores.iter().for_each(|cores| pin(cores.0));
    let mut inbox = Inbox::new(REQUEST_BYTES, plan.depth);
    let mut tags = Vec::with_capacity(plan.depth);
    while inbox.receive(stream, &mut tags)? {
        hand(&tags)?;
    }
    Ok(())
}

/// The serving thread where another one sends.
fn hand_over(plan: &Plan, stream: &TcpStream, ring: &Ring, woken: Option<Thread>) -> io::Result<()> {
    let closing = ring.closing(woken);
    serve(plan, stream, |tags| {
        for tag in tags {
            while !ring.push(*tag) && !ring.is_closed() {
                closing.wake();
                thread::yield_now();
            }
        }
        // Once a turn, as the serving thread would send once a turn.
        if !tags.is_empty() {
            closing.wake();
        }
        // Also without a tag: a deliverer that has failed sends nothing that the requester could answer.
        if ring.is_closed() { Err(ErrorKind::BrokenPipe.into()) } else { Ok(()) }
    })
}

/// The delivering thread, until the ring is empty and closed.
fn deliver(plan: &Plan, way: Delivery, ring: &Ring, stream: &TcpStream) -> io::Result<()> {
    let _closing = ring.closing(None);
    if let Some(core) = plan.cores.and_then(|cores| delivering_core(way, cores)) {
        pin(core);
    }
    let mut send = sender(plan, stream);
    let mut tags = Vec::with_capacity(plan.depth);
    loop {
        // Asked before the ring is emptied: what was put there before it was closed is then seen.
        let is_closed = ring.is_closed();
        ring.take(&mut tags);
        match way {
            _ if !tags.is_empty() => send(&tags)?,
            _ if is_closed => return Ok(()),
            Delivery::Wake => thread::park(),
            Delivery::Event | Delivery::Spin => thread::yield_now(),
        }
    }
}

/// The sleeper shares the serving thread's core; who polls gets one that neither end has, or any.
fn delivering_core(way: Delivery, CorePair(serving, requesting): CorePair) -> Option<usize> {
    match way {
        Delivery::Event | Delivery::Wake => Some(serving),
        Delivery::Spin => available_cores().into_iter().find(|core| ![serving, requesting].contains(core)),
    }
}

/// The requester: keeps the depth in flight for the time of the plan, then waits for the rest.
fn request(plan: &Plan, stream: &TcpStream) -> io::Result<Figures> {
    let mut inbox = Inbox::new(plan.reply_bytes, plan.depth);
    let mut requests = vec![0; REQUEST_BYTES * plan.depth];
    let mut tags: Vec<u64> = (0..plan.depth as u64).collect();
    let mut begun = vec![Nanos::ZERO; plan.depth];
    let mut latency = Latencies::new();
    let (mut in_flight, mut elapsed, mut is_on) = (0, Nanos::ZERO, true);
    let mut now = Clock::now();
    let begin = now + plan.warm_up.into();
    let end = begin + plan.measured.into();
    loop {
        if is_on {
            for tag in &tags {
                *slot(&mut begun, *tag)? = now;
            }
            in_flight += tags.len();
            send_tags(stream, &mut requests, REQUEST_BYTES, &tags)?;
        }
        if in_flight == 0 {
            let iops = per_second(latency.count(), elapsed.as_duration());
            return Ok(Figures { iops, p50_us: latency.percentile_us(50.0) });
        }
        if !inbox.receive(stream, &mut tags)? {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        now = Clock::now();
        let is_counted = is_on && now > begin;
        for tag in &tags {
            let begun = slot(&mut begun, *tag)?;
            if is_counted {
                latency.record((now - *begun).as_u64(), 1);
            }
        }
        in_flight = in_flight.checked_sub(tags.len()).ok_or(ErrorKind::InvalidData)?;
        if is_counted {
            elapsed = now - begin;
            // A machine that is busy with others may take longer for the first one.
            is_on = now < end || latency.count() == 0;
        }
    }
}

fn slot(begun: &mut [Nanos], tag: u64) -> io::Result<&mut Nanos> {
    let index = usize::try_from(tag).ok().filter(|index| *index < begun.len());
    Ok(&mut begun[index.ok_or(ErrorKind::InvalidData)?])
}

/// Sends the replies with the tags that it is given, all in one call where the socket takes them.
fn sender(plan: &Plan, stream: &TcpStream) -> impl FnMut(&[u64]) -> io::Result<()> {
    let mut replies = vec![0xa5; plan.reply_bytes * plan.depth];
    move |tags| send_tags(stream, &mut replies, plan.reply_bytes, tags)
}

/// Send a message for each tag out of `messages`, which has room for as many as are ever sent at once.
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

/// What was received and is not yet a whole message.
struct Inbox {
    bytes: Vec<u8>,
    filled: usize,
    unit: usize,
}

impl Inbox {
    fn new(unit: usize, depth: usize) -> Inbox {
        Inbox { bytes: vec![0; unit * depth], filled: 0, unit }
    }

    /// Receive once, and put the tags of the whole messages into `tags`. False: the peer has hung up.
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
        for way in WAYS {
            for plan in [plan(), Plan { depth: 1, ..plan() }, Plan { depth: 100, reply_bytes: 77, ..plan() }]
            {
                let figures = exchange(&plan, way, |stream| request(&plan, &stream)).expect("runs");
                assert!(figures.iops > 0.0 && figures.p50_us > 0.0, "{way:?} {plan:?}");
            }
        }
    }

    #[test]
    fn every_way_delivers_the_same_bytes() {
        // More tags than the depth, so that the ring goes round and is full at times.
        let tags: Vec<u64> = (0..1000).map(|tag| tag * 0x0101_0101_0101).collect();
        let delivered = WAYS.map(|way| {
            let requester = |stream: TcpStream| {
                stream.set_nonblocking(false)?;
                send_tags(&stream, &mut vec![0; REQUEST_BYTES * tags.len()], REQUEST_BYTES, &tags)?;
                stream.shutdown(std::net::Shutdown::Write)?;
                let mut bytes = Vec::new();
                (&stream).read_to_end(&mut bytes)?;
                Ok(bytes)
            };
            exchange(&plan(), way, requester).expect("delivers")
        });
        let mut expected = vec![0xa5; 4096 * tags.len()];
        for (reply, tag) in expected.chunks_exact_mut(4096).zip(&tags) {
            reply[..TAG_BYTES].copy_from_slice(&tag.to_le_bytes());
        }
        for (way, bytes) in WAYS.iter().zip(delivered) {
            assert!(bytes == expected, "{way:?}");
        }
    }

    #[test]
    fn all_threads_end_with_a_requester_that_leaves_early() {
        for way in WAYS {
            let plan = Plan { reply_bytes: 1 << 20, ..plan() };
            let leave = |stream: TcpStream| {
                send_tags(&stream, &mut [0; REQUEST_BYTES * 8], REQUEST_BYTES, &[0; 8])?;
                // So that the ends are about to send when it leaves.
                stream.set_nonblocking(false)?;
                (&stream).read_exact(&mut [0; TAG_BYTES])
            };
            let error = exchange(&plan, way, leave).expect_err("broken off").to_string();
            assert!(error.contains("reset") || error.contains("pipe"), "{way:?}: {error}");
            exchange::<()>(&plan, way, |_| Err(ErrorKind::Other.into())).expect_err("it failed");
            exchange::<()>(&plan, way, |_| panic!("the test's own")).expect_err("it panicked");
        }
    }

    #[test]
    fn a_tag_that_was_not_sent_is_an_error() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("listens");
        let (serving, requesting) = connect_pair(&listener, None).expect("connects");
        sender(&plan(), &serving)(&[8]).expect("sends");
        assert_eq!(request(&plan(), &requesting).expect_err("no such slot").kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn the_serving_thread_ends_with_the_deliverer() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("listens");
        let (serving, _requesting) = connect_pair(&listener, None).expect("connects");
        let ring = Ring::new(1);
        drop(ring.closing(None));
        let error = hand_over(&plan(), &serving, &ring, None).expect_err("the ring is closed");
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    }

    #[test]
    fn the_middle_is_the_median() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(median([3.0, 1.0, 2.0, 10.0].into_iter()), 2.5);
    }
}
