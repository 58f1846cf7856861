//! [`TcpLink`]: a socket and the host's end of NVMe/TCP, joined.
//!
//! A turn sends everything that is queued in one call, receives once, and hands on what came of it:
//!
//! ```text
//!   wants_send ─ sendmsg ─> sent        direct_target ─ readv ─> received_direct ┐
//!                                       else            recv ─> batch ─ load ────┴─> next_event.. ─ unload
//! ```
//!
//! The socket of a lost connection is closed by a reset, also when the process is killed. Without it the
//! kernel goes on sending complete commands after the close: an old write can then reach a target that still
//! has the association, after the same blocks were written anew over the next one. An orderly end, and a
//! connection on which every command was answered, are closed as usual.

use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::time::Duration;

use arrayvec::ArrayVec;
use nvme_spec::Sqe;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_reactor::clock::{Clock, Nanos};
use spindle_reactor::net::{Errno, PIECES_MAX, Received, Sent, Socket, Waker};
use spindle_tcp::host::{CloseCause, Conn, HostConfig, HostEvent};
use spindle_tcp::{Expectation, Phase, RxBatch};
use spindle_transport::host::HostData;

use super::LinkEvent;
use crate::error::{Error, Loss};
use crate::options::Options;
use crate::qpair::Refusal;

/// Pieces of a buffer that one direct receive fills; a buffer of a pool is one, of a frame store many.
const DIRECT_PIECES_MAX: usize = 64;
/// Bytes of the batch that a direct receive may fill behind its payload: the next header, and little that
/// would be copied.
const BEHIND_DIRECT_BYTES: usize = 2048;
/// Time from closing to the end of the socket.
const CLOSE_TIMEOUT: Nanos = Nanos::from_secs(2);
/// Time that sent bytes may stay without acknowledgement before the kernel gives the connection up, in ms.
const USER_TIMEOUT_MS: u32 = 30_000;
/// Congestion control: it does not pace packets, and pacing (bbr) costs even where nothing is lost.
const CONGESTION: &str = "cubic";

/// A connection.
#[derive(Debug)]
pub(crate) struct TcpLink {
    socket: Socket,
    conn: Conn,
    /// Why it ended, where that was seen here.
    cause: Option<Loss>,
    /// The kernel takes no more for the moment.
    is_full: bool,
    is_shut: bool,
    expects: Expectation,
}

/// A connection that is being made, in steps that do not wait.
#[derive(Debug)]
pub(crate) struct TcpOpening {
    address: SocketAddr,
    options: Options,
    depth: u16,
    step: Step,
}

#[derive(Debug)]
enum Step {
    /// The socket connects.
    Socket(Socket),
    /// ICReq is on its way; 128 bytes come.
    Hello(Box<TcpLink>, RxBatch),
    /// There is no more to do: it was given out, or has failed.
    Over,
}

impl TcpOpening {
    /// Begin to connect the socket.
    pub(super) fn begin(address: SocketAddr, options: &Options, depth: u16) -> Result<TcpOpening, Error> {
        let failed = |source| Error::Connect { address, source };
        let socket = Socket::begin_connect(address).map_err(failed)?;
        Ok(TcpOpening { address, options: options.clone(), depth, step: Step::Socket(socket) })
    }

    /// What is waited for.
    pub(super) fn name(&self) -> &'static str {
        match self.step {
            Step::Socket(_) => "TCP",
            Step::Hello(..) | Step::Over => "ICReq",
        }
    }

    /// On, as far as it goes at once. The link when commands can be submitted.
    pub(super) fn step(&mut self) -> Result<Option<TcpLink>, Error> {
        match std::mem::replace(&mut self.step, Step::Over) {
            Step::Socket(socket) => {
                let failed = |source| Error::Connect { address: self.address, source };
                if !socket.is_connected().map_err(failed)? {
                    self.step = Step::Socket(socket);
                    return Ok(None);
                }
                configure(&socket);
                let link = TcpLink::new(socket, &self.options, self.depth);
                self.hello(Box::new(link), RxBatch::new(BEHIND_DIRECT_BYTES))
            }
            Step::Hello(link, batch) => self.hello(link, batch),
            Step::Over => Ok(None),
        }
    }

    fn hello(&mut self, mut link: Box<TcpLink>, mut batch: RxBatch) -> Result<Option<TcpLink>, Error> {
        let mut why = None;
        link.turn(&mut batch, |event, _| {
            if let LinkEvent::Closed(loss) = event {
                why = Some(loss);
            }
        });
        if let Some(loss) = why {
            return Err(Error::Lost { step: "ICReq", loss });
        }
        if link.conn.max_h2c_data().is_some() {
            return Ok(Some(*link));
        }
        self.step = Step::Hello(link, batch);
        Ok(None)
    }

    /// Sleep until the next step may go on, at most `timeout`; it may return early.
    pub(super) fn wait_io(&self, timeout: Duration) {
        match &self.step {
            // What is wrong is said by the next step.
            Step::Socket(socket) => drop(socket.wait_writable(timeout)),
            Step::Hello(link, _) => link.wait_io(timeout, None),
            Step::Over => {}
        }
    }
}

impl TcpLink {
    /// On a connected socket, with its first words to be sent.
    fn new(socket: Socket, options: &Options, depth: u16) -> TcpLink {
        let config = HostConfig {
            header_digest: options.header_digest,
            data_digest: options.data_digest,
            queue_entries: depth,
            initialize_timeout: options.connect_timeout.into(),
            close_timeout: CLOSE_TIMEOUT,
            ..HostConfig::default()
        };
        let conn = Conn::new(config, Clock::now());
        let expects = Expectation::default();
        TcpLink { socket, conn, cause: None, is_full: false, is_shut: false, expects }
    }

    /// Queue a command; it leaves with the next [`TcpLink::send`] or [`TcpLink::turn`].
    #[inline]
    pub(super) fn submit(&mut self, sqe: Sqe, data: HostData) -> Result<(), (Refusal, HostData)> {
        self.conn.submit(sqe, data).map_err(|full| (full.kind.into(), full.data))
    }

    /// True while commands can be submitted.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.conn.phase() == Phase::Open
    }

    /// True when there is something to send and the kernel takes none of it: wait for room.
    pub(super) fn is_blocked(&self) -> bool {
        self.is_full && self.conn.wants_send()
    }

    /// What the controller takes.
    pub(super) fn set_offered(&mut self, in_capsule_bytes: u32) {
        self.conn.set_in_capsule_bytes(in_capsule_bytes);
    }

    /// The socket, to be watched.
    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Send what is queued, as far as the kernel takes it.
    #[inline]
    pub(super) fn send(&mut self) {
        if self.conn.wants_send() {
            self.send_queued();
        }
    }

    /// Not inlined: its list of pieces is 16 KiB of stack, which a turn that sends nothing should not set up.
    #[inline(never)]
    fn send_queued(&mut self) {
        while self.conn.wants_send() {
            let (sent, bytes) = send_from(&self.socket, &self.conn);
            match sent {
                Sent::Bytes(count) => {
                    self.conn.sent(count);
                    self.is_full = count < bytes;
                }
                Sent::Full => self.is_full = true,
                Sent::Failed(errno) => return self.fail(Loss::Socket(errno)),
            }
            if self.is_full {
                return;
            }
        }
    }

    /// Send, receive once, and tell what came of it, each with whether the connection was open. True when
    /// anything came.
    #[inline]
    pub(super) fn turn(&mut self, batch: &mut RxBatch, mut on_event: impl FnMut(LinkEvent, bool)) -> bool {
        let has_sent = self.conn.wants_send();
        if has_sent {
            self.send_queued();
        }
        let (received, direct) = receive_into(&self.socket, &mut self.conn, batch, &mut self.expects);
        match received {
            Received::Bytes(count) => {
                let in_place = count.min(direct);
                if in_place > 0 {
                    self.conn.received_direct(in_place);
                }
                batch.filled(count - in_place);
                self.conn.load(std::mem::take(batch));
                while let Some(event) = self.conn.next_event() {
                    self.tell(event, &mut on_event);
                }
                *batch = self.conn.unload();
            }
            // A completion may have waited for data to leave.
            Received::Empty if !has_sent && self.is_open() => return false,
            Received::Empty => {}
            Received::Closed => self.conn.on_peer_closed(),
            Received::Failed(errno) => self.fail(Loss::Socket(errno)),
        }
        if !matches!(received, Received::Bytes(_)) || !self.is_open() {
            self.settle();
            while let Some(event) = self.conn.next_event() {
                self.tell(event, &mut on_event);
            }
        }
        received != Received::Empty
    }

    #[inline]
    fn tell(&self, event: HostEvent, on_event: &mut impl FnMut(LinkEvent, bool)) {
        let event = match event {
            HostEvent::Completed { cid, cqe, buf, result } => LinkEvent::Completed { cid, cqe, buf, result },
            HostEvent::Closed { why } => LinkEvent::Closed(self.loss(why)),
            HostEvent::Ready => return,
        };
        on_event(event, self.is_open());
    }

    /// What the state of a connection that ends asks of its socket.
    #[cold]
    fn settle(&mut self) {
        match self.conn.phase() {
            Phase::Open => {}
            Phase::Draining | Phase::HalfClosed | Phase::Closed => {
                self.send();
                let is_ending = self.conn.phase() != Phase::Closed;
                self.conn.on_time(Clock::now());
                let phase = self.conn.phase();
                // The peer did not close in time.
                let is_late = is_ending && phase == Phase::Closed;
                if phase == Phase::HalfClosed && !self.is_shut {
                    self.is_shut = true;
                    // An orderly end: the peer reads to the end of what was sent.
                    let _ = self.socket.set_reset_on_close(false);
                    let _ = self.socket.shutdown_write();
                } else if is_late {
                    let _ = self.socket.set_reset_on_close(true);
                }
            }
        }
    }

    /// End it at once; every command is told in the next turn.
    #[cold]
    pub(super) fn fail(&mut self, loss: Loss) {
        self.cause.get_or_insert(loss);
        self.conn.on_reset();
        // Best effort, as with all options: on a socket that has failed there is nothing to reset.
        let _ = self.socket.set_reset_on_close(true);
    }

    /// End it: what is queued leaves first.
    pub(super) fn close(&mut self) {
        self.conn.close();
        self.settle();
    }

    /// Why it ended, as seen from here.
    fn loss(&self, cause: CloseCause) -> Loss {
        match (self.cause, cause) {
            (Some(loss), _) => loss,
            (None, CloseCause::Requested) => Loss::Requested,
            (None, CloseCause::ByPeer) => Loss::ByPeer,
            (None, CloseCause::Failed | CloseCause::Device) => Loss::Socket(Errno::CONNRESET),
            (None, CloseCause::Violation(violation)) => Loss::Violation(violation),
        }
    }

    /// Sleep until there is something to receive (or room, where that is waited for) or `waker` is raised, at
    /// most `timeout`.
    pub(super) fn wait_io(&self, timeout: Duration, waker: Option<&Waker>) {
        let flags = if self.is_blocked() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let timeout = Timespec::try_from(timeout).ok();
        let own = PollFd::new(&self.socket, flags);
        // A signal or an error ends the wait early; the next turn sees what there is.
        let _ = match waker {
            Some(waker) => poll(&mut [own, PollFd::new(waker, PollFlags::IN)], timeout.as_ref()),
            None => poll(&mut [own], timeout.as_ref()),
        };
    }
}

impl Drop for TcpLink {
    /// Where every command was answered, nothing that the system still sends can do anything.
    fn drop(&mut self) {
        let is_idle = self.conn.outstanding() == 0 && !self.conn.wants_send();
        if self.conn.phase() == Phase::Open && is_idle {
            let _ = self.socket.set_reset_on_close(false);
        }
    }
}

/// Options of the socket. Best effort: a refusal costs latency or time to notice a loss, not truth.
fn configure(socket: &Socket) {
    let _ = socket.set_nodelay(true);
    let _ = socket.set_reset_on_close(true);
    let _ = socket.set_user_timeout(USER_TIMEOUT_MS);
    let _ = socket.set_keepalive(Duration::from_secs(10), Duration::from_secs(5), 3);
    if socket.set_congestion(CONGESTION).is_err() {
        // Always there, and allowed to everybody.
        let _ = socket.set_congestion("reno");
    }
}

/// One send of all that the connection has, as far as it fits in one call; and how much that was.
#[inline]
fn send_from(socket: &Socket, conn: &Conn) -> (Sent, usize) {
    let mut pieces = ArrayVec::<IoSlice<'_>, PIECES_MAX>::new();
    let bytes = conn.send_pieces(&mut pieces);
    (socket.send_vectored(&pieces), bytes)
}

/// One receive: into the payload that the connection waits for and a little of the batch behind it, or into
/// the batch; and how many bytes belong to the payload at most.
#[inline]
fn receive_into(
    socket: &Socket,
    conn: &mut Conn,
    batch: &mut RxBatch,
    expects: &mut Expectation,
) -> (Received, usize) {
    let mut pieces = ArrayVec::<IoSliceMut<'_>, DIRECT_PIECES_MAX>::new();
    let direct = conn.direct_target(&mut pieces);
    let space = batch.space();
    if direct == 0 {
        let asked = space.len().min(expects.batch_bytes());
        let received = socket.recv(&mut space[..asked]);
        expects.on_batch(matches!(received, Received::Bytes(count) if count == asked));
        return (received, 0);
    }
    expects.on_direct();
    let behind = space.len().min(BEHIND_DIRECT_BYTES);
    // Full when the payload alone takes all pieces: then this receive does not reach its end.
    let _ = pieces.try_push(IoSliceMut::new(&mut space[..behind]));
    (socket.recv_vectored(&mut pieces), direct)
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};

    use nvme_spec::tcp::{DigestBits, IcResp};
    use nvme_spec::zerocopy::IntoBytes;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    /// A link on which commands can be submitted, and its peer.
    fn pair() -> (TcpLink, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listens");
        let address = listener.local_addr().expect("an address");
        let socket = Socket::connect(address, LONG).expect("connects");
        configure(&socket);
        let mut link = TcpLink::new(socket, &Options::default(), 8);
        link.send();
        let (mut peer, _) = listener.accept().expect("a host");
        peer.set_read_timeout(Some(LONG)).expect("an option");
        peer.read_exact(&mut [0; 128]).expect("ICReq");
        peer.write_all(IcResp::new(0, DigestBits::new(), 4096).as_bytes()).expect("sends");
        let mut batch = RxBatch::new(4096);
        while link.conn.max_h2c_data().is_none() {
            link.wait_io(LONG, None);
            assert!(link.turn(&mut batch, |event, _| panic!("{event:?}")), "no ICResp");
        }
        (link, peer)
    }

    fn submit(link: &mut TcpLink, peer: &mut TcpStream) {
        link.submit(Sqe::flush(0, 1), HostData::None).expect("taken");
        link.send();
        peer.read_exact(&mut [0; 72]).expect("CapsuleCmd");
    }

    /// What the peer reads next: 0 bytes are an end in order.
    fn end(mut peer: TcpStream) -> Result<usize, ErrorKind> {
        peer.read(&mut [0; 1]).map_err(|error| error.kind())
    }

    #[test]
    fn a_lost_connection_is_closed_by_a_reset() {
        let (mut link, peer) = pair();
        link.fail(Loss::Requested);
        drop(link);
        assert_eq!(end(peer), Err(ErrorKind::ConnectionReset));
    }

    #[test]
    fn a_connection_that_is_dropped_with_commands_outstanding_is_closed_by_a_reset() {
        let (mut link, mut peer) = pair();
        submit(&mut link, &mut peer);
        drop(link);
        assert_eq!(end(peer), Err(ErrorKind::ConnectionReset));
    }

    #[test]
    fn a_connection_that_was_closed_or_has_nothing_outstanding_ends_in_order() {
        let (mut link, mut peer) = pair();
        submit(&mut link, &mut peer);
        link.close();
        drop(link);
        assert_eq!(end(peer), Ok(0));
        let (link, peer) = pair();
        drop(link);
        assert_eq!(end(peer), Ok(0));
    }
}
