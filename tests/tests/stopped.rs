//! A target that was stopped, with the shell and sockets that it has in the binary and a clock of the test's:
//! what hosts sent meanwhile counts, also when it is more than a turn receives.
#![forbid(unsafe_code)]

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nvme_spec::Sqe;
use nvme_spec::fabrics::ConnectResult;
use nvme_spec::register::{CC, Cc};
use nvme_spec::tcp::{CapsuleResp, DigestBits, IcReq};
use nvme_spec::zerocopy::{FromBytes, IntoBytes};
use spindle_nvme_tcp::controller::{Conn, ConnConfig};
use spindle_nvme_tcp::shell::{Incoming, Shell, ShellConfig};
use spindle_nvme_transport::admission::Admission;
use spindle_nvme_transport::{Peer, TransportKind};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_reactor::net::{Listener, Readiness, Ready};
use spindle_target::core::{CoreSettings, TargetCore};
use spindle_target_disk::{NullDisk, NullSpec};
use spindle_tests::loopback::raw::{capsule, connect_capsule_to};
use spindle_tests::loopback::{SUBSYSTEM, target};
use spindle_tests::snapshot::SnapshotBuilder;

/// Each has an admin queue and an I/O queue, and a turn receives from 64 connections.
const HOSTS: usize = 90;
const KATO_MS: u64 = 2000;
/// Many more than the answers to all need.
const TURNS_MAX: u32 = 10_000;
const CAPSULE_RESP_BYTES: usize = 24;
const ICRESP_BYTES: usize = 128;
const CNTLID_ANY: u16 = 0xffff;

/// A connection, both ends of it.
struct Line {
    host: TcpStream,
    /// The target's socket, to see what waits in it.
    other: OwnedFd,
    answered: Vec<u8>,
}

impl Line {
    fn send(&mut self, bytes: &[u8]) {
        self.host.write_all(bytes).expect("sent");
        // Acknowledged is not the same as sent, also on one machine.
        while rustix::io::ioctl_fionread(&self.other).expect("its count") == 0 {
            std::thread::yield_now();
        }
    }

    /// Reads what has come; false when the target has closed the connection.
    fn read(&mut self) -> bool {
        let mut bytes = [0; 512];
        match self.host.read(&mut bytes) {
            Ok(0) => false,
            Ok(count) => {
                self.answered.extend_from_slice(&bytes[..count]);
                true
            }
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        }
    }
}

struct World {
    core: TargetCore<Conn>,
    shell: Shell,
    readiness: Readiness,
    ready: Vec<Ready>,
    listener: Listener,
    admission: Arc<Admission>,
    now: Nanos,
    /// Of each host the admin queue, then those of I/O.
    lines: Vec<Line>,
}

impl World {
    fn new() -> World {
        let spec = NullSpec { bytes: 1 << 20, block_bytes: 4096 };
        let zone = |buffer_bytes, count| ZoneSpec { buffer_bytes, count };
        let pool = |zones: &[ZoneSpec]| Pool::new(zones, Pages::Base).expect("a pool");
        let core = TargetCore::new(CoreSettings {
            core: 0,
            cores: 1,
            connections: 2 * HOSTS,
            disk_depth: 64,
            pool: pool(&[zone(4096, 16)]),
            admin_pool: pool(&[zone(8192, 4)]),
            snapshot: SnapshotBuilder::new(SUBSYSTEM, &[NullDisk::new("null", spec).expect("a disk")])
                .build(),
            registry: Arc::default(),
            now: Nanos::ZERO,
            wall_ms: 0,
        });
        let readiness = Readiness::new().expect("epoll");
        let shell = Shell::new(ShellConfig::default(), 2 * HOSTS, readiness.watcher(0));
        let listener = Listener::bind("127.0.0.1:0".parse().expect("an address"), 16).expect("listens");
        let mut world = World {
            core,
            shell,
            readiness,
            ready: Vec::with_capacity(1024),
            listener,
            admission: Admission::new(0),
            now: Nanos::ZERO,
            lines: Vec::new(),
        };
        (0..2 * HOSTS).for_each(|_| world.open());
        world.connect();
        world
    }

    fn open(&mut self) {
        let host = TcpStream::connect(self.listener.local_addr()).expect("connects");
        host.set_nonblocking(true).expect("set");
        host.set_nodelay(true).expect("set");
        let accepted = loop {
            if let Some(accepted) = self.listener.accept().expect("accepts") {
                break accepted;
            }
        };
        let other = rustix::io::dup(accepted.socket.as_fd()).expect("a descriptor");
        let (remote, local) = (accepted.peer, accepted.local);
        let peer = Peer { transport: TransportKind::Tcp, listener: 0, remote, local };
        let admitted = self.admission.admit(remote.ip()).expect("no limit");
        let config = ConnConfig { queue_entries: 128, ..ConnConfig::default() };
        let incoming = Incoming { socket: accepted.socket, peer, config, admitted };
        assert!(self.shell.accept(&mut self.core, incoming, self.now));
        self.lines.push(Line { host, other, answered: Vec::new() });
    }

    /// A turn of the core, as the binary's pollers have it.
    fn turn(&mut self) {
        let World { core, shell, readiness, ready, now, .. } = self;
        core.set_time(*now, now.as_ms());
        readiness.poll(Some(Duration::ZERO), ready).expect("polled");
        for event in ready.drain(..) {
            shell.on_ready(*now, u32::try_from(event.key).expect("a connection"));
        }
        shell.poll(core, *now);
        core.poll();
        while let Some(id) = core.next_send_ready() {
            shell.flush(core, id);
        }
        while core.notices().pop().is_some() {}
    }

    /// Time passes, without a gap.
    fn pass(&mut self, ms: u64) {
        for _ in 0..ms * 2 {
            self.now += Nanos::from_us(500);
            self.turn();
        }
    }

    /// Turns in no time, until these have an answer of so many bytes each; which is returned.
    fn answers(&mut self, lines: &[usize], bytes: usize) -> Vec<Vec<u8>> {
        let is_answered = |line: &mut Line| {
            assert!(line.read(), "a controller has ended");
            line.answered.len() >= bytes
        };
        let mut turns = 0;
        while !lines.iter().all(|line| is_answered(&mut self.lines[*line])) {
            self.turn();
            // `Line::other` keeps the socket open when the target has closed it.
            turns += 1;
            assert!(turns < TURNS_MAX, "an answer is missing; connections that have ended: {}", self.ended());
        }
        lines.iter().map(|line| std::mem::take(&mut self.lines[*line].answered)).collect()
    }

    fn run(&mut self, lines: &[usize], bytes: impl Fn(usize) -> Vec<u8>) -> Vec<u64> {
        lines.iter().for_each(|line| self.lines[*line].send(&bytes(*line)));
        let answers = self.answers(lines, CAPSULE_RESP_BYTES);
        let result = |answer: &Vec<u8>| {
            let cqe = CapsuleResp::read_from_bytes(answer).expect("one completion").cqe;
            assert!(cqe.status().is_success(), "{}", cqe.status());
            u64::from(cqe.result_u32())
        };
        answers.iter().map(result).collect()
    }

    /// Connects all queues and enables the controllers, all at the same time.
    fn connect(&mut self) {
        let (admin, io): (Vec<usize>, Vec<usize>) = ((0..HOSTS).collect(), (HOSTS..2 * HOSTS).collect());
        for line in &mut self.lines {
            line.send(IcReq::new(0, DigestBits::new(), 0).as_bytes());
        }
        let all: Vec<usize> = (0..2 * HOSTS).collect();
        self.answers(&all, ICRESP_BYTES);
        let cntlids = self.run(&admin, |_| connect_capsule(0, CNTLID_ANY));
        let enabled = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
        let enable = Sqe::property_set(1, false, CC, u64::from(enabled.into_bits()));
        self.run(&admin, |_| capsule(enable, &[]));
        let cntlid = |at: usize| {
            let result = u32::try_from(cntlids[at - HOSTS]).expect("32 bits");
            ConnectResult::from_bits(result).cntlid()
        };
        self.run(&io, |at| connect_capsule(1, cntlid(at)));
    }

    fn ended(&self) -> usize {
        2 * HOSTS - self.core.usage().connections
    }
}

fn connect_capsule(qid: u16, cntlid: u16) -> Vec<u8> {
    let kato_ms = if qid == 0 { u32::try_from(KATO_MS).expect("small") } else { 0 };
    connect_capsule_to(&target(([127, 0, 0, 1], 0).into()).nqn, qid, cntlid, kato_ms)
}

/// The sign of life of a host: by Keep Alive, or by a command of an I/O queue.
fn sign(host: usize) -> (usize, Vec<u8>) {
    if host.is_multiple_of(2) {
        (host, capsule(Sqe::keep_alive(9), &[]))
    } else {
        (HOSTS + host, capsule(Sqe::flush(9, 1), &[]))
    }
}

/// All hosts that are not `silent` give a sign of life, and have its answer.
fn live(world: &mut World, silent: usize) {
    let signs: Vec<_> = (0..HOSTS).filter(|host| *host != silent).map(sign).collect();
    let lines: Vec<usize> = signs.iter().map(|(line, _)| *line).collect();
    world.run(&lines, |line| sign(line % HOSTS).1);
}

#[test]
fn no_host_is_ended_for_the_time_in_which_the_target_was_stopped() {
    // Thousandths of the time-out. The first is so short that it does not count as a stop.
    for stop in [200, 700, 900, 1500, 10_000] {
        let mut world = World::new();
        // Just before the time-out is checked, so that this does not count for the next one.
        world.pass(KATO_MS - 10);
        live(&mut world, HOSTS);
        world.pass(KATO_MS - 100);
        // The next signs, less than a time-out later, wait in sockets when the time-out is checked.
        for host in 0..HOSTS {
            let (line, bytes) = sign(host);
            world.lines[line].send(&bytes);
        }
        world.now += Nanos::from_ms(KATO_MS * stop / 1000);
        let lines: Vec<usize> = (0..HOSTS).map(|host| sign(host).0).collect();
        world.answers(&lines, CAPSULE_RESP_BYTES);
        world.pass(200);
        assert_eq!(world.ended(), 0, "stopped for {stop} thousandths of the time-out");
        for _ in 0..3 {
            live(&mut world, HOSTS);
            world.pass(KATO_MS - 100);
        }
        assert_eq!(world.ended(), 0, "stopped for {stop} thousandths of the time-out");
    }
}

#[test]
fn a_host_that_is_silent_is_given_up_within_two_timeouts_and_a_quarter_of_a_second() {
    let mut world = World::new();
    // In the middle between two checks of the time-out.
    world.pass(KATO_MS / 2);
    live(&mut world, HOSTS);
    let mut silent_ms = 0;
    while world.ended() == 0 {
        world.pass(50);
        silent_ms += 50;
        if silent_ms % 400 == 0 {
            live(&mut world, 7);
        }
        assert!(silent_ms <= 2 * KATO_MS + 250, "it is not given up");
    }
    assert!(silent_ms >= KATO_MS, "{silent_ms} ms");
    world.pass(KATO_MS / 4);
    assert_eq!(world.ended(), 2, "its two queues, and nobody else's");
}
