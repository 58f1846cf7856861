//! A controller for tests: the real controller's end of NVMe/TCP over real sockets, and behind it one
//! namespace in memory. What it does with each command is for the test's script to say.

mod commands;

use spindle_nvme_transport::RequestId;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use spindle_nvme_initiator::nvme_spec::status::Status;
use spindle_nvme_initiator::nvme_spec::{Nqn, Sqe};
use spindle_nvme_initiator::{
    Buf, Clock, Completion, Host, IoQueue, Nanos, Options, Pages, Pool, Target, TransportKind, ZoneSpec,
};
use spindle_nvme_tcp::controller::{Conn, ConnConfig};
use spindle_nvme_tcp::{Phase, RxBatch};
use spindle_nvme_transport::{DataPointer, Event, Reply, Transport};
use spindle_reactor::net::{Interest, Listener, Readiness, Received, Sent, Socket};
use spindle_reactor::slab::Slab;

pub use commands::{BLOCK, Disk, QUEUES, TRANSFER_BYTES};

/// What becomes of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// It is executed.
    Execute,
    /// It fails.
    Fail(Status),
    /// It is executed, and answered after the next one of its connection.
    Late,
    /// It is never answered.
    Forget,
    /// The connection is closed at once.
    Hangup,
}

/// Asked for each command with the queue's identifier.
pub type Script = Box<dyn FnMut(&Sqe, u16) -> Act + Send>;

/// A running controller; it ends when it is dropped.
pub struct Fake {
    pub address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Fake {
    /// One that executes every command.
    pub fn start() -> Fake {
        Fake::with(Box::new(|_, _| Act::Execute))
    }

    /// One that asks `script`.
    pub fn with(script: Script) -> Fake {
        Fake::at("127.0.0.1:0".parse().expect("an address"), Disk::new(), script)
    }

    /// One at this address, with this disk.
    pub fn at(address: SocketAddr, disk: Disk, script: Script) -> Fake {
        let listener = Listener::bind(address, 64).expect("listens");
        let address = listener.local_addr();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || Server::new(listener, disk, script).run(&stopped));
        Fake { address, stop, thread: Some(thread) }
    }

    /// The subsystem, as a target.
    pub fn target(&self) -> Target {
        Target {
            transport: TransportKind::Tcp,
            address: self.address,
            nqn: nqn(),
            host: Host::from_uuid([7; 16]),
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let result = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            result.expect("a thread").expect("the controller did not panic");
        }
    }
}

/// The subsystem's name.
pub fn nqn() -> Nqn {
    Nqn::new("nqn.2026-01.io.spindle:fake").expect("a name")
}

/// Options with short time-outs.
pub fn options() -> Options {
    let (connect_timeout, connect_answer_timeout) = (LONG, LONG);
    Options { depth: 32, io_queues: QUEUES, connect_timeout, connect_answer_timeout, ..Options::default() }
}

/// A pool for data.
pub fn pool() -> Pool {
    let zones =
        [ZoneSpec { buffer_bytes: 4096, count: 128 }, ZoneSpec { buffer_bytes: 256 << 10, count: 80 }];
    Pool::new(&zones, Pages::Base).expect("pool")
}

/// A buffer of so many bytes, all of this value.
pub fn filled(pool: &Pool, bytes: u32, value: u8) -> Buf {
    let mut buf = pool.take(bytes).expect("buffer");
    buf.segments_mut().for_each(|segment| segment.fill(value));
    buf
}

/// The next completion of the queue, when it has come.
pub fn any(queue: &mut IoQueue) -> Completion {
    let deadline = Clock::now() + Nanos::from(LONG);
    loop {
        if let Some(completion) = queue.next_completion() {
            return completion;
        }
        assert!(Clock::now() < deadline, "no completion");
        queue.poll(Clock::now());
    }
}

/// Long enough for any loaded machine.
pub const LONG: Duration = Duration::from_secs(20);

/// A command whose data is on its way or that waits for its answer.
struct Pending {
    sqe: Sqe,
    bytes: u32,
}

struct Link {
    socket: Socket,
    conn: Conn,
    pending: Slab<Pending>,
    qid: u16,
    /// Answers that wait for another to go first.
    late: Vec<Reply>,
    /// Asynchronous Event Requests without an answer.
    event_requests: Vec<Sqe>,
    is_gone: bool,
}

struct Server {
    listener: Listener,
    readiness: Readiness,
    links: Vec<Link>,
    disk: Disk,
    script: Script,
    pool: Pool,
    batch: RxBatch,
}

impl Server {
    fn new(listener: Listener, disk: Disk, script: Script) -> Server {
        let readiness = Readiness::new().expect("epoll");
        readiness.add(&listener, 0, Interest::READ).expect("watched");
        let zones =
            [ZoneSpec { buffer_bytes: 8192, count: 512 }, ZoneSpec { buffer_bytes: 256 << 10, count: 64 }];
        let pool = Pool::new(&zones, Pages::Base).expect("pool");
        Server { listener, readiness, links: Vec::new(), disk, script, pool, batch: RxBatch::new(64 << 10) }
    }

    fn run(&mut self, stop: &AtomicBool) {
        let mut ready = Vec::with_capacity(64);
        while !stop.load(Ordering::Relaxed) {
            self.readiness.poll(Some(Duration::from_millis(2)), &mut ready).expect("epoll");
            while let Ok(Some(accepted)) = self.listener.accept() {
                accepted.socket.set_nodelay(true).expect("option");
                self.readiness.add(&accepted.socket, 1, Interest::READ).expect("watched");
                let config = ConnConfig { transfer_bytes: TRANSFER_BYTES, ..ConnConfig::default() };
                self.links.push(Link {
                    socket: accepted.socket,
                    conn: Conn::new(config, Clock::now()),
                    pending: Slab::with_capacity(256),
                    qid: 0,
                    late: Vec::new(),
                    event_requests: Vec::new(),
                    is_gone: false,
                });
            }
            for index in 0..self.links.len() {
                let mut link = self.links.swap_remove(index);
                while self.turn(&mut link) {}
                self.links.push(link);
                let last = self.links.len() - 1;
                self.links.swap(index, last);
            }
            self.links.retain(|link| !link.is_gone);
        }
    }

    /// Receive once and act on it; true when there may be more.
    fn turn(&mut self, link: &mut Link) -> bool {
        let mut has_come = false;
        if !link.conn.is_paused() {
            match link.socket.recv(self.batch.space()) {
                Received::Bytes(count) => {
                    self.batch.filled(count);
                    link.conn.load(std::mem::take(&mut self.batch));
                    has_come = true;
                }
                Received::Empty => {}
                Received::Closed => link.conn.on_peer_closed(),
                Received::Failed(_) => link.conn.on_reset(),
            }
        }
        while let Some(event) = link.conn.next_event() {
            match event {
                Event::Command { sqe, data } => self.on_command(link, sqe, data),
                Event::Fetched { slot, buf, result } => {
                    let pending = link.pending.remove(slot.0).expect("pending");
                    match result {
                        Ok(()) => self.execute(link, &pending.sqe, Some(buf), pending.bytes),
                        Err(status) => link.conn.reply(commands::failed(&pending.sqe, status)),
                    }
                }
                Event::Sent { .. } => {}
                Event::FetchedPart { .. } | Event::SentPart { .. } => unreachable!("parts are RDMA's"),
                Event::Closed => link.is_gone = true,
            }
        }
        if has_come {
            self.batch = link.conn.unload();
        }
        if let Some(sqe) = link.event_requests.first()
            && let Some(event) = self.disk.events.lock().expect("lock").pop()
        {
            link.conn.reply(commands::event(sqe, event));
            link.event_requests.remove(0);
        }
        self.send(link);
        if link.conn.phase() == Phase::HalfClosed || link.conn.phase() == Phase::Closed {
            let _ = link.socket.shutdown_write();
            link.is_gone |= link.conn.phase() == Phase::Closed;
        }
        has_come && !link.is_gone
    }

    fn on_command(&mut self, link: &mut Link, sqe: Sqe, data: Result<DataPointer, Status>) {
        let data = match data {
            Ok(data) => data,
            Err(status) => return link.conn.reply(commands::failed(&sqe, status)),
        };
        let bytes = data.bytes();
        if commands::sends_data(&sqe) && bytes > 0 {
            let slot = link.pending.insert(Pending { sqe, bytes }).ok().expect("room");
            let buf = self.pool.take(bytes).expect("buffer");
            link.conn.fetch(RequestId(slot), sqe.cid(), buf);
        } else {
            self.execute(link, &sqe, None, bytes);
        }
    }

    fn execute(&mut self, link: &mut Link, sqe: &Sqe, data: Option<Buf>, bytes: u32) {
        let act = (self.script)(sqe, link.qid);
        let reply = match act {
            Act::Forget => return,
            Act::Hangup => {
                link.conn.on_reset();
                link.is_gone = true;
                return;
            }
            Act::Fail(status) => commands::failed(sqe, status),
            Act::Execute | Act::Late => {
                match self.disk.execute(sqe, data, bytes, &mut link.qid, &self.pool) {
                    Some(reply) => reply,
                    None => return link.event_requests.push(*sqe),
                }
            }
        };
        if act == Act::Late {
            link.late.push(reply);
            return;
        }
        link.conn.reply(reply);
        for reply in link.late.drain(..) {
            link.conn.reply(reply);
        }
    }

    fn send(&self, link: &mut Link) {
        while link.conn.wants_send() {
            let mut pieces = arrayvec::ArrayVec::<std::io::IoSlice<'_>, 256>::new();
            link.conn.send_pieces(&mut pieces);
            let sent = link.socket.send_vectored(&pieces);
            drop(pieces);
            match sent {
                Sent::Bytes(count) => link.conn.sent(count),
                Sent::Full => return,
                Sent::Failed(_) => return link.conn.on_reset(),
            }
        }
    }
}

/// A slot without an owner: no answer is looked up by it.
pub fn any_slot() -> RequestId {
    RequestId::from_wire(0)
}
