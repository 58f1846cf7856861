//! `spindle bench ADDRESS --bare`: a minimal host, whose commands cost less than those of the target.
//!
//! The initiator makes the admin queue; the one I/O queue is a TCP connection of this module.
//!
//! ```text
//!   turn     recv ──> Stream ──> Ended ──────> latency, next command with the same CID ──> Outbox ──> send
//!                          └───> Requested ──> H2CData ──────────────────────────────────> Outbox ─┘
//! ```
//! A turn has one `recv` into one buffer, and one `send` or `sendmsg` for all PDUs that follow from it. More
//! sends follow only for more slices than one call takes (512 writes with in-capsule data). Headers are
//! checked. Data of reads is neither looked at nor copied out of the buffer, and all writes send the same
//! payload. Nothing is allocated per command. A wrong header or a failed command ends the run.

mod connect;
mod outbox;
mod stream;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use initiator::nvme_spec::tcp::{CapsuleCmd, Extent, H2cData, LAST_PDU};
use initiator::nvme_spec::zerocopy::IntoBytes;
use initiator::nvme_spec::{Sgl, Sqe};
use initiator::{
    Buf, Clock, Controller, Failure, Loss, Namespace, Nanos, Pages, Pool, TransportKind, Violation, ZoneSpec,
};
use serde_json::{Map, json};
use spindle_nvme_initiator as initiator;
use spindle_reactor::net::{Received, Socket};

use super::engine::{
    CONTROLLER_POLL_PERIOD, Drain, IDLE_TURNS_PER_CLOCK_READ, TurnClock, fill_pseudo_random, poll_controller,
};
use super::job::{Command, Job, Load, Tally, cpu_time};
use super::target::{self, Opened};
use super::{BenchError, DRAIN_MAX, LoadSpec, Outcome, Stage, Total, WARM_UP, add_busy, describe, outcome};
use crate::args::BenchTargetArgs;

use connect::{CAPSULE_HLEN, Connection};
use outbox::Outbox;
use stream::{Commands, Ended, Event, Request, Stream};

/// Most bytes of a receive. A smaller buffer needs more system calls, a larger one leaves the core's cache.
const RECEIVE_BYTES: u32 = 256 << 10;
const H2C_HLEN: u8 = 24;

/// Refuses options that this mode does not have.
fn check(args: &BenchTargetArgs) -> Result<(), BenchError> {
    let address = args.address.as_deref().unwrap_or_default();
    let is_rdma = initiator::split_transport(address).0 == TransportKind::Rdma;
    let given = || "given".to_owned();
    let refusals = [
        (is_rdma, "ADDRESS", address.to_owned(), "uses TCP only: HOST or HOST:PORT is allowed"),
        (args.queues != 1, "--queues", args.queues.to_string(), "has one I/O queue: 1 is allowed"),
        (args.idle_queues != 0, "--idle-queues", args.idle_queues.to_string(), "has none: 0 is allowed"),
        (args.verify, "--verify", given(), "does not look at data: only a run without it is allowed"),
        (args.optimistic, "--optimistic", given(), "uses TCP only: only a run without it is allowed"),
        (args.header_digest, "--header-digest", given(), "has none: only a run without it is allowed"),
        (args.data_digest, "--data-digest", given(), "has none: only a run without it is allowed"),
    ];
    match refusals.into_iter().find(|(is_refused, ..)| *is_refused) {
        Some((_, option, value, rule)) => {
            Err(BenchError::Size { option, value, rule: format!("--bare {rule}") })
        }
        None => Ok(()),
    }
}

pub(super) fn measure(
    args: &BenchTargetArgs,
    stages: &mpsc::Sender<Stage>,
    done: &AtomicU64,
) -> Result<Outcome, BenchError> {
    check(args)?;
    let began = Instant::now();
    let Opened { target, options, mut controller, namespace } = target::open(args, &target::depths(args)?)?;
    let spec = target::spec(args, &namespace, controller.transfer_bytes_max())?;
    let depth = spec.depths.first().copied().unwrap_or(1);
    target::check_depth(args, depth, controller.depth_max())?;
    let connection = connect::connect(&target, controller.cntlid(), depth, &options)?;
    let connected_in = began.elapsed();
    let offered = u32::try_from(controller.identify().in_capsule_bytes()).unwrap_or(u32::MAX);
    let in_capsule_bytes = offered.min(options.in_capsule_bytes_max);
    let mut queue = Queue::new(connection, &spec, namespace, in_capsule_bytes)?;

    // Fails only after a panic of the main thread.
    let title = format!("bench --bare {} {}", args.load.rw, args.load.bs);
    let _ = stages.send(Stage { title, total: Total::Time(WARM_UP + spec.measured) });
    let mut tally = Tally::default();
    let mut load = Load::new(&spec, None, &mut tally);
    let turn_clock = args.busy.then(TurnClock::new);
    queue.run(&mut load, &mut controller, turn_clock.as_ref(), done)?;
    let measured = load.measured();

    let mut extras = Map::new();
    extras.insert("hostnqn".to_owned(), json!(target.host.nqn.as_str()));
    extras.insert("nsid".to_owned(), json!(namespace.nsid));
    extras.insert("in_capsule".to_owned(), json!(in_capsule_bytes));
    extras.insert("connect_ms".to_owned(), json!((connected_in.as_secs_f64() * 1e4).round() / 10.0));
    add_busy(&mut extras, &measured);
    queue.close();
    // The result is complete.
    let _ = controller.shutdown();
    Ok(outcome(describe(args, &target, &spec), measured, tally, extras))
}

/// The I/O queue: its connection, the state of its commands, and their buffers.
struct Queue {
    socket: Socket,
    stream: Stream,
    commands: Commands,
    sender: Sender,
    /// In one piece; each receive begins at its start.
    buffer: Buf,
    depth: u16,
}

#[derive(Default)]
struct Turn {
    has_received: bool,
    has_ended: bool,
}

/// Encodes commands and data into the outbox.
struct Sender {
    outbox: Outbox,
    namespace: Namespace,
    unit_blocks: u32,
    unit_bytes: u32,
    is_in_capsule: bool,
    cpda: u8,
    h2c_bytes_max: u32,
    /// By CID: end of what was queued last for the command, in [`Outbox::appended_total`].
    ends: Box<[u64]>,
}

impl Queue {
    /// Allocates the receive buffer and the payload of writes.
    fn new(
        connection: Connection,
        spec: &LoadSpec,
        namespace: Namespace,
        in_capsule_bytes: u32,
    ) -> Result<Queue, BenchError> {
        let Connection { socket, cpda, h2c_bytes_max } = connection;
        let depth = spec.depths.first().copied().unwrap_or(1);
        let (mut payload, mut buffer) = (take_buf(spec.unit_bytes)?, take_buf(RECEIVE_BYTES)?);
        // Also maps the pages before the measurement.
        fill_pseudo_random(&mut payload, spec.seed);
        fill_pseudo_random(&mut buffer, spec.seed);
        let data_pdus = spec.unit_bytes.div_ceil(h2c_bytes_max) as usize;
        let sender = Sender {
            outbox: Outbox::new(usize::from(depth) * (1 + data_pdus), payload),
            namespace,
            unit_blocks: spec.unit_blocks,
            unit_bytes: spec.unit_bytes,
            is_in_capsule: spec.unit_bytes <= in_capsule_bytes,
            cpda,
            h2c_bytes_max,
            ends: vec![0; depth.into()].into_boxed_slice(),
        };
        let commands = Commands::new(depth, spec.unit_bytes);
        Ok(Queue { socket, stream: Stream::default(), commands, sender, buffer, depth })
    }

    /// Runs the load until it is over and its last command has completed. Fails if a connection is lost, a
    /// command fails, or none completes for [`DRAIN_MAX`].
    fn run(
        &mut self,
        load: &mut Load<'_>,
        controller: &mut Controller,
        turn_clock: Option<&TurnClock>,
        done: &AtomicU64,
    ) -> Result<(), BenchError> {
        let mut now = Clock::now();
        let mut next_controller_poll = now;
        let mut silence = Drain::default();
        let mut turns = 0;
        load.tick(now);
        for cid in 0..self.depth {
            self.sender.submit(cid, &mut self.commands, load, now);
        }
        self.flush(load)?;
        while !load.is_over() || self.commands.outstanding() > 0 {
            let began = turn_clock.map(|_| cpu_time());
            let Turn { has_received, has_ended } = self.turn(load, &mut now)?;
            turns += 1;
            if let (Some(clock), Some(began), true) = (turn_clock, began, has_received) {
                load.on_turn(clock.since(began));
            }
            if !has_received && turns >= IDLE_TURNS_PER_CLOCK_READ {
                turns = 0;
                now = Clock::now();
                load.tick(now);
            }
            if silence.is_stuck(has_ended, now) {
                let outstanding = self.commands.outstanding();
                return Err(BenchError::Stuck { outstanding, after: DRAIN_MAX });
            }
            if now >= next_controller_poll {
                next_controller_poll = now + CONTROLLER_POLL_PERIOD;
                done.store(load.done(), Ordering::Relaxed);
                poll_controller(controller, now)?;
            }
        }
        Ok(())
    }

    /// Receives once, and sends what follows. Updates `now` if data arrived.
    #[inline]
    fn turn(&mut self, load: &mut Load<'_>, now: &mut Nanos) -> Result<Turn, BenchError> {
        let buffer = self.buffer.as_mut_slice().unwrap_or_default();
        let received = match self.socket.recv(buffer) {
            Received::Bytes(received) => received,
            Received::Empty => {
                self.flush(load)?;
                return Ok(Turn::default());
            }
            Received::Closed => return Err(lost(load, Loss::ByPeer)),
            Received::Failed(errno) => return Err(lost(load, Loss::Socket(errno))),
        };
        *now = Clock::now();
        load.tick(*now);
        let mut bytes = &buffer[..received];
        let mut has_ended = false;
        loop {
            match self.stream.next(&mut bytes, &mut self.commands) {
                Ok(None) => break,
                Ok(Some(Event::Requested(request))) => self
                    .sender
                    .send_data(&request)
                    .map_err(|violation| lost(load, Loss::Violation(violation)))?,
                Ok(Some(Event::Ended(ended))) => {
                    has_ended = true;
                    on_ended(load, &ended, *now)?;
                    let sent = self.sender.check_sent(ended.cid);
                    sent.map_err(|violation| lost(load, Loss::Violation(violation)))?;
                    self.sender.submit(ended.cid, &mut self.commands, load, *now);
                }
                Err(violation) => return Err(lost(load, Loss::Violation(violation))),
            }
        }
        self.flush(load)?;
        Ok(Turn { has_received: true, has_ended })
    }

    /// Closes the connection of a queue without outstanding commands, in order.
    fn close(self) {
        let _ = self.socket.set_reset_on_close(false);
    }

    #[inline]
    fn flush(&mut self, load: &Load<'_>) -> Result<(), BenchError> {
        if self.sender.outbox.is_empty() {
            return Ok(());
        }
        self.sender.outbox.flush(&self.socket).map_err(|errno| lost(load, Loss::Socket(errno)))
    }
}

fn take_buf(bytes: u32) -> Result<Buf, BenchError> {
    let zone = ZoneSpec { buffer_bytes: bytes.next_multiple_of(4096), count: 1 };
    let buf = Pool::new(&[zone], Pages::Transparent)?.take(bytes);
    buf.ok_or(BenchError::Thread("has no memory"))
}

#[inline]
fn on_ended(load: &mut Load<'_>, ended: &Ended, now: Nanos) -> Result<(), BenchError> {
    if !ended.status.is_success() {
        return Err(load.fatal(ended.command, Failure::Status(ended.status)));
    }
    load.succeeded((ended.sent, now));
    Ok(())
}

#[cold]
fn lost(load: &Load<'_>, loss: Loss) -> BenchError {
    BenchError::Lost { queue: 0, operations: load.done(), loss }
}

impl Sender {
    /// Queues the load's next command under a free CID; nothing if the load is over.
    #[inline]
    fn submit(&mut self, cid: u16, commands: &mut Commands, load: &mut Load<'_>, now: Nanos) {
        let Some(command) = load.next_untracked() else { return };
        let (nsid, blocks, bytes) = (self.namespace.nsid, self.unit_blocks, self.unit_bytes);
        let Command { unit, is_read } = command;
        let lba = unit * u64::from(blocks);
        let is_in_capsule = !is_read && self.is_in_capsule;
        commands.begin(cid, command, is_in_capsule, now);
        let sqe = match is_read {
            true => Sqe::read(cid, nsid, lba, blocks),
            false => Sqe::write(cid, nsid, lba, blocks, false),
        };
        if is_in_capsule {
            let extent = Extent::new(CAPSULE_HLEN, bytes, false, false, self.cpda);
            let capsule = CapsuleCmd::new(sqe.with_sgl(Sgl::in_capsule(bytes)), 0, extent);
            self.outbox.push_with_data(capsule.as_bytes(), extent.pdo, 0, bytes as usize);
        } else {
            let extent = Extent { pdo: 0, plen: CAPSULE_HLEN.into() };
            let capsule = CapsuleCmd::new(sqe.with_sgl(Sgl::transport(bytes)), 0, extent);
            self.outbox.push(capsule.as_bytes());
        }
        if let Some(end) = self.ends.get_mut(usize::from(cid)) {
            *end = self.outbox.appended_total();
        }
    }

    /// Fails if a command ends before all of it was sent. Without this check a target that reads nothing
    /// could make the outbox grow.
    #[inline]
    fn check_sent(&self, cid: u16) -> Result<(), Violation> {
        match self.ends.get(usize::from(cid)) {
            Some(end) if *end > self.outbox.sent_total() => Err(Violation::CompletionCid(cid)),
            Some(_) | None => Ok(()),
        }
    }

    /// Queues the data of an R2T. Fails if data of an earlier R2T of the command is not sent (MAXR2T).
    fn send_data(&mut self, request: &Request) -> Result<(), Violation> {
        let Request { cid, ttag, mut offset, bytes: mut left } = *request;
        let Some(end) = self.ends.get_mut(usize::from(cid)) else { return Ok(()) };
        if *end > self.outbox.sent_total() {
            return Err(Violation::R2tLimit(cid));
        }
        while left > 0 {
            let bytes = left.min(self.h2c_bytes_max);
            left -= bytes;
            let flags = if left == 0 { LAST_PDU } else { 0 };
            let extent = Extent::new(H2C_HLEN, bytes, false, false, self.cpda);
            let header = H2cData::new(cid, ttag, offset, bytes, flags, extent);
            self.outbox.push_with_data(header.as_bytes(), extent.pdo, offset as usize, bytes as usize);
            offset += bytes;
        }
        *end = self.outbox.appended_total();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;
    use std::time::Duration;

    use initiator::Identity;
    use initiator::nvme_spec::identify::IdentifyNamespace;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn sender(unit_bytes: u32) -> Sender {
        let mut identify = IdentifyNamespace::default();
        identify.lbaf[0].lbads = 12;
        let mut payload = take_buf(unit_bytes).expect("memory");
        fill_pseudo_random(&mut payload, 3);
        Sender {
            outbox: Outbox::new(4, payload),
            namespace: Namespace::new(1, &identify, Identity::default()).expect("4 KiB blocks"),
            unit_blocks: unit_bytes / 4096,
            unit_bytes,
            is_in_capsule: false,
            cpda: 0,
            h2c_bytes_max: 4096,
            ends: vec![0; 2].into_boxed_slice(),
        }
    }

    #[test]
    fn an_r2t_is_answered_in_pdus_that_the_target_takes_and_one_at_a_time() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listens");
        let address = listener.local_addr().expect("an address");
        let socket = Socket::connect(address, LONG).expect("connects");
        let (mut peer, _) = listener.accept().expect("a host");
        peer.set_read_timeout(Some(LONG)).expect("an option");
        let mut sender = sender(16 << 10);
        let payload = payload_of(sender.unit_bytes);
        let first = Request { cid: 1, ttag: 7, offset: 4096, bytes: 10_000 };
        sender.send_data(&first).expect("the first");
        assert_eq!(sender.send_data(&first), Err(Violation::R2tLimit(1)));
        assert_eq!(sender.check_sent(1), Err(Violation::CompletionCid(1)), "its data is not sent");
        sender.send_data(&Request { cid: 0, ttag: 8, offset: 0, bytes: 4 }).expect("of another command");
        sender.outbox.flush(&socket).expect("sends");
        assert!(sender.outbox.is_empty());
        assert_eq!(sender.check_sent(1), Ok(()));
        sender.send_data(&first).expect("the data of the one before is sent");
        for (cid, ttag, offset, bytes, flags) in [
            (1, 7, 4096, 4096, 0),
            (1, 7, 8192, 4096, 0),
            (1, 7, 12_288, 1808, LAST_PDU),
            (0, 8, 0, 4, LAST_PDU),
        ] {
            let mut pdu = vec![0; 24 + bytes as usize];
            peer.read_exact(&mut pdu).expect("H2CData");
            let extent = Extent { pdo: 24, plen: 24 + bytes };
            assert_eq!(pdu[..24], *H2cData::new(cid, ttag, offset, bytes, flags, extent).as_bytes());
            assert_eq!(pdu[24..], payload[offset as usize..][..bytes as usize]);
        }
    }

    /// The payload of every sender with this size.
    fn payload_of(unit_bytes: u32) -> Vec<u8> {
        let mut payload = take_buf(unit_bytes).expect("memory");
        fill_pseudo_random(&mut payload, 3);
        payload.as_slice().expect("one piece").to_vec()
    }

    #[test]
    fn every_refusal_names_the_option_the_value_and_what_is_allowed() {
        for (line, parts) in [
            ("bench rdma:10.9.1.1 --bare", ["ADDRESS", "rdma:10.9.1.1", "HOST:PORT"]),
            ("bench a --bare --queues 2", ["--queues", "2", "1 is allowed"]),
            ("bench a --bare --idle-queues 3", ["--idle-queues", "3", "0 is allowed"]),
            ("bench a --bare --verify", ["--verify", "given", "without it"]),
            ("bench a --bare --optimistic", ["--optimistic", "given", "without it"]),
            ("bench a --bare --header-digest", ["--header-digest", "given", "without it"]),
            ("bench a --bare --data-digest", ["--data-digest", "given", "without it"]),
        ] {
            let args = crate::args::parse(line).expect("a command").target;
            let message = check(&args).expect_err(line).to_string();
            for part in ["--bare"].into_iter().chain(parts) {
                assert!(message.contains(part), "{part} in: {message}");
            }
        }
        assert!(check(&crate::args::parse("bench a --bare").expect("a command").target).is_ok());
    }
}
