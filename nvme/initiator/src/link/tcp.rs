//! [`TcpLink`]: a socket with the host side of the NVMe/TCP protocol.
//!
//! A turn sends everything that is queued, receives once, and reports the resulting events:
//!
//! ```text
//!   wants_send ─ send_to (sendmsg)      receive_from (recv or readv) ─ load ─> next_event.. ─ unload
//! ```
//!
//! The socket of a lost connection is closed by a reset, also when the process is killed. Without the reset
//! the kernel keeps sending queued commands after the close. An old write could then reach a target that
//! still has the association, after a newer write of the same blocks over the next association. After an
//! orderly end, or when every command was answered, the socket is closed without a reset.

use std::net::SocketAddr;
use std::time::Duration;

use nvme_spec::Sqe;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_nvme_tcp::host::{CloseCause, Conn, HostConfig, HostEvent};
use spindle_nvme_tcp::{Phase, RxBatch};
use spindle_nvme_transport::host::HostData;
use spindle_reactor::clock::{Clock, Nanos};
use spindle_reactor::net::{Errno, Received, Sent, Socket, Waker};

use super::LinkEvent;
use crate::error::{Error, Loss};
use crate::options::Options;
use crate::qpair::Refusal;

/// Bytes of the batch that receives ICResp.
const FIRST_BATCH_BYTES: usize = 2048;
/// Time limit of an orderly close.
const CLOSE_TIMEOUT: Nanos = Nanos::from_secs(2);
/// TCP_USER_TIMEOUT in ms: the kernel ends the connection when sent bytes are not acknowledged for this time.
const USER_TIMEOUT_MS: u32 = 30_000;
/// Congestion control without packet pacing; pacing (bbr) has a cost even without loss.
const CONGESTION: &str = "cubic";

#[derive(Debug)]
pub(crate) struct TcpLink {
    socket: Socket,
    conn: Conn,
    /// Reason of the end, if this side caused or detected it.
    cause: Option<Loss>,
    /// The socket's send buffer is full.
    is_full: bool,
    is_shut: bool,
}

#[derive(Debug)]
pub(crate) struct TcpOpening {
    address: SocketAddr,
    options: Options,
    depth: u16,
    step: Step,
}

#[derive(Debug)]
enum Step {
    /// TCP connect is in progress.
    Socket(Socket),
    /// ICReq was queued; ICResp (128 bytes) has not arrived.
    IcReq(Box<TcpLink>, RxBatch),
    /// The link was returned, or the attempt has failed.
    Finished,
}

impl TcpOpening {
    pub(super) fn begin(address: SocketAddr, options: &Options, depth: u16) -> Result<TcpOpening, Error> {
        let failed = |source| Error::Connect { address, source };
        let socket = Socket::begin_connect(address).map_err(failed)?;
        Ok(TcpOpening { address, options: options.clone(), depth, step: Step::Socket(socket) })
    }

    pub(super) fn name(&self) -> &'static str {
        match self.step {
            Step::Socket(_) => "TCP",
            Step::IcReq(..) | Step::Finished => "ICReq",
        }
    }

    /// Advances without blocking. Returns the link when commands can be submitted, `None` before.
    pub(super) fn step(&mut self) -> Result<Option<TcpLink>, Error> {
        match std::mem::replace(&mut self.step, Step::Finished) {
            Step::Socket(socket) => {
                let failed = |source| Error::Connect { address: self.address, source };
                if !socket.is_connected().map_err(failed)? {
                    self.step = Step::Socket(socket);
                    return Ok(None);
                }
                configure(&socket);
                let link = TcpLink::new(socket, &self.options, self.depth);
                self.step_icreq(Box::new(link), RxBatch::new(FIRST_BATCH_BYTES))
            }
            Step::IcReq(link, batch) => self.step_icreq(link, batch),
            Step::Finished => Ok(None),
        }
    }

    fn step_icreq(&mut self, mut link: Box<TcpLink>, mut batch: RxBatch) -> Result<Option<TcpLink>, Error> {
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
        self.step = Step::IcReq(link, batch);
        Ok(None)
    }

    pub(super) fn wait_io(&self, timeout: Duration) {
        match &self.step {
            // The next step reports an error of the socket.
            Step::Socket(socket) => drop(socket.wait_writable(timeout)),
            Step::IcReq(link, _) => link.wait_io(timeout, None),
            Step::Finished => {}
        }
    }
}

impl TcpLink {
    /// Creates a link on a connected socket and queues ICReq.
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
        TcpLink { socket, conn, cause: None, is_full: false, is_shut: false }
    }

    #[inline]
    pub(super) fn submit(&mut self, sqe: Sqe, data: HostData) -> Result<(), (Refusal, HostData)> {
        self.conn.submit(sqe, data).map_err(|full| (full.kind.into(), full.data))
    }

    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.conn.phase() == Phase::Open
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.is_full && self.conn.wants_send()
    }

    /// Sets the most bytes of in-capsule data of a command.
    pub(super) fn set_offered(&mut self, in_capsule_bytes: u32) {
        self.conn.set_in_capsule_bytes(in_capsule_bytes);
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    #[inline]
    pub(super) fn send(&mut self) {
        while self.conn.wants_send() {
            let (sent, is_full) = self.conn.send_to(&self.socket);
            self.is_full = is_full;
            if let Sent::Failed(errno) = sent {
                return self.fail(Loss::Socket(errno));
            }
            if is_full {
                return;
            }
        }
    }

    /// Sends, receives once, and reports each event with a flag: whether the connection was open. Returns
    /// true when bytes arrived, the peer closed the connection or the socket failed.
    #[inline]
    pub(super) fn turn(&mut self, batch: &mut RxBatch, mut on_event: impl FnMut(LinkEvent, bool)) -> bool {
        let has_sent = self.conn.wants_send();
        self.send();
        let (received, _) = self.conn.receive_from(&self.socket, batch);
        match received {
            Received::Bytes(_) => {
                self.conn.load(std::mem::take(batch));
                while let Some(event) = self.conn.next_event() {
                    self.emit(event, &mut on_event);
                }
                *batch = self.conn.unload();
            }
            // After a send, a completion that waited for this send may be ready.
            Received::Empty if !has_sent && self.is_open() => return false,
            Received::Empty => {}
            Received::Closed => self.conn.on_peer_closed(),
            Received::Failed(errno) => self.fail(Loss::Socket(errno)),
        }
        if !matches!(received, Received::Bytes(_)) || !self.is_open() {
            self.advance_close();
            while let Some(event) = self.conn.next_event() {
                self.emit(event, &mut on_event);
            }
        }
        received != Received::Empty
    }

    #[inline]
    fn emit(&self, event: HostEvent, on_event: &mut impl FnMut(LinkEvent, bool)) {
        let event = match event {
            HostEvent::Completed { cid, cqe, buf, result } => LinkEvent::Completed { cid, cqe, buf, result },
            HostEvent::Closed { why } => LinkEvent::Closed(self.loss(why)),
            HostEvent::Ready => return,
        };
        on_event(event, self.is_open());
    }

    /// Closes or resets the socket according to the phase, after its close timeout was checked.
    #[cold]
    fn advance_close(&mut self) {
        match self.conn.phase() {
            Phase::Open => {}
            Phase::Draining | Phase::HalfClosed | Phase::Closed => {
                self.send();
                let is_ending = self.conn.phase() != Phase::Closed;
                self.conn.on_time(Clock::now());
                let phase = self.conn.phase();
                // The peer did not close within `CLOSE_TIMEOUT`.
                let is_late = is_ending && phase == Phase::Closed;
                if phase == Phase::HalfClosed && !self.is_shut {
                    self.is_shut = true;
                    // Orderly end: the peer receives all queued bytes.
                    let _ = self.socket.set_reset_on_close(false);
                    let _ = self.socket.shutdown_write();
                } else if is_late {
                    let _ = self.socket.set_reset_on_close(true);
                }
            }
        }
    }

    #[cold]
    pub(super) fn fail(&mut self, loss: Loss) {
        self.cause.get_or_insert(loss);
        self.conn.on_reset();
        // Best effort: on a failed socket there is nothing to reset.
        let _ = self.socket.set_reset_on_close(true);
    }

    /// Closes the connection after sending queued commands, within [`CLOSE_TIMEOUT`].
    pub(super) fn close(&mut self) {
        self.conn.close();
        self.advance_close();
    }

    /// Returns the [`Loss`] to report: the reason that this side recorded takes precedence over `cause`.
    fn loss(&self, cause: CloseCause) -> Loss {
        match (self.cause, cause) {
            (Some(loss), _) => loss,
            (None, CloseCause::Requested) => Loss::Requested,
            (None, CloseCause::ByPeer) => Loss::ByPeer,
            (None, CloseCause::Failed | CloseCause::Device) => Loss::Socket(Errno::CONNRESET),
            (None, CloseCause::Violation(violation)) => Loss::Violation(violation),
        }
    }

    /// Sleeps until the socket is readable, or writable if the link is blocked, or `waker` is woken; at most
    /// `timeout`. May return early.
    pub(super) fn wait_io(&self, timeout: Duration, waker: Option<&Waker>) {
        let flags = if self.is_blocked() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let timeout = Timespec::try_from(timeout).ok();
        let own = PollFd::new(&self.socket, flags);
        // A signal or an error ends the wait early; the next turn handles it.
        let _ = match waker {
            Some(waker) => poll(&mut [own, PollFd::new(waker, PollFlags::IN)], timeout.as_ref()),
            None => poll(&mut [own], timeout.as_ref()),
        };
    }
}

impl Drop for TcpLink {
    /// Closes without a reset if no command is outstanding: queued bytes cannot contain a write.
    fn drop(&mut self) {
        let is_idle = self.conn.outstanding() == 0 && !self.conn.wants_send();
        if self.conn.phase() == Phase::Open && is_idle {
            let _ = self.socket.set_reset_on_close(false);
        }
    }
}

/// Sets socket options. Errors are ignored: they cost only latency or loss detection.
fn configure(socket: &Socket) {
    let _ = socket.set_nodelay(true);
    let _ = socket.set_reset_on_close(true);
    let _ = socket.set_user_timeout(USER_TIMEOUT_MS);
    let _ = socket.set_keepalive(Duration::from_secs(10), Duration::from_secs(5), 3);
    if socket.set_congestion(CONGESTION).is_err() {
        // `reno` is always available and needs no privilege.
        let _ = socket.set_congestion("reno");
    }
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

    /// Result of the peer's next read; 0 bytes: the connection was closed without a reset.
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
