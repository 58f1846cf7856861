//! A session under load whose connections are taken away from outside: what was written is read back,
//! whatever happened in between.
//!
//! ```text
//! cargo build -p spindle-initiator --example session-check
//! scripts/lab/run -- .../session-check rdma:10.9.1.1 NQN SECONDS RECONNECTS
//! ```
//! Every block carries a number of its own. The exit code is 0 when all blocks were right and the session
//! came back at least as often as was asked for.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::time::Duration;

use spindle_initiator::nvme_spec::Nqn;
use spindle_initiator::{
    Buf, Clock, Host, IoQueue, NVME_TCP_PORT, Namespace, Nanos, OnLoss, Options, Pages, Pool, Session,
    SessionEvent, SessionOptions, Target, ZoneSpec, resolve, split_transport,
};

/// Commands in flight.
const DEPTH: u16 = 16;
/// Of one command.
const BYTES: u32 = 16 << 10;

/// What was written where, and which buffer goes where.
struct Load {
    namespace: Namespace,
    /// By place: the number that lies there.
    written: HashMap<u64, u64>,
    /// By ticket: place, number, whether it is a write.
    flights: HashMap<usize, (u64, u64, bool)>,
    spare: Vec<Buf>,
    next: u64,
    checked: u64,
    wrong: u64,
}

impl Load {
    /// Submit until there is no buffer: a write of a place and a read of another in turn.
    fn submit(&mut self, queue: &mut IoQueue) {
        while let Some(mut buf) = self.spare.pop() {
            let blocks = u64::from(BYTES / self.namespace.block_bytes());
            let place = self.next % 512;
            let is_busy = self.flights.values().any(|flight| flight.0 == place);
            let is_write = self.next % 1024 < 512;
            if is_busy {
                self.next += 1;
                self.spare.push(buf);
                return;
            }
            let outcome = if is_write {
                (0..BYTES as usize / 8).for_each(|at| buf.copy_in(at * 8, &self.next.to_le_bytes()));
                queue.write(&self.namespace, place * blocks, buf, false)
            } else {
                queue.read(&self.namespace, place * blocks, buf)
            };
            match outcome {
                Ok(ticket) => {
                    self.flights.insert(ticket.index(), (place, self.next, is_write));
                    self.next += 1;
                }
                Err(refused) => {
                    self.spare.extend(refused.buf);
                    return;
                }
            }
        }
    }

    fn take(&mut self, queue: &mut IoQueue) {
        while let Some(completion) = queue.next_completion() {
            let (place, number, is_write) =
                self.flights.remove(&completion.ticket.index()).expect("a command of ours");
            let buf = completion.buf.expect("its buffer");
            if completion.result.is_err() {
                println!("a command failed: {:?}", completion.result);
                self.wrong += 1;
            } else if is_write {
                self.written.insert(place, number);
            } else if let Some(number) = self.written.get(&place) {
                self.checked += 1;
                let is_right = (0..BYTES as usize / 8).all(|at| buf.equals_at(at * 8, &number.to_le_bytes()));
                self.wrong += u64::from(!is_right);
            }
            self.spare.push(buf);
        }
    }
}

fn told(event: SessionEvent, reconnects: &mut u64) -> bool {
    match event {
        SessionEvent::Lost { loss } => println!("lost: {loss}"),
        SessionEvent::AttemptFailed { error, retry_in } => println!("again in {retry_in:?}: {error}"),
        SessionEvent::Reconnected { attempts, replayed } => {
            println!("back after {attempts} attempts, {replayed} commands sent again");
            *reconnects += 1;
        }
        SessionEvent::GaveUp { error } => {
            println!("gave up: {error}");
            return false;
        }
        SessionEvent::Async(event) => println!("{event:?}"),
    }
    true
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, nqn, seconds, wanted] = &arguments[..] else { panic!("ADDRESS NQN SECONDS RECONNECTS") };
    let (transport, address) = split_transport(address);
    let address = resolve(address, NVME_TCP_PORT).expect("an address")[0];
    let nqn = Nqn::new(nqn).expect("a name");
    let target = Target { transport, address, nqn, host: Host::of_this_machine() };
    let options = Options {
        depth: 127,
        on_loss: OnLoss::Replay,
        connect_timeout: Duration::from_secs(5),
        ..Options::default()
    };
    let patient = SessionOptions { wait_longest: Duration::from_secs(1), ..SessionOptions::default() };
    let mut session = Session::connect(&target, &options, &patient).expect("connects");
    let namespace = session.controller().namespace(1).expect("a namespace");
    let zone = ZoneSpec { buffer_bytes: BYTES, count: DEPTH.into() };
    let pool = Pool::new(&[zone], Pages::Base).expect("memory");
    let spare = (0..DEPTH).map(|_| pool.take(BYTES).expect("a buffer")).collect();
    let (written, flights) = (HashMap::new(), HashMap::new());
    let mut load = Load { namespace, written, flights, spare, next: 0, checked: 0, wrong: 0 };
    let end = Clock::now() + Nanos::from_secs(seconds.parse().expect("a number"));
    let mut reconnects = 0;
    loop {
        let now = Clock::now();
        if now >= end && session.outstanding() == 0 {
            break;
        }
        assert!(now < end + Nanos::from_secs(30), "{} commands never ended", session.outstanding());
        if now < end && session.is_up() {
            load.submit(session.queue_mut(0));
        }
        if let Some(event) = session.poll(now, |_, queue| load.take(queue))
            && !told(event, &mut reconnects)
        {
            break;
        }
    }
    let (checked, wrong) = (load.checked, load.wrong);
    println!("{} commands, {checked} reads checked, {wrong} wrong, {reconnects} reconnects", load.next);
    let is_good = wrong == 0 && checked > 0 && reconnects >= wanted.parse().expect("a number");
    std::process::exit(i32::from(!is_good));
}
