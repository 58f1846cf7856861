//! [`Socket`]: a non-blocking stream socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, readv, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketFlags, SocketType, connect,
    getsockname, ipproto, recv, sendmsg, shutdown, socket_with, sockopt,
};

use super::PIECES_MAX;

/// Result of a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// Count of received bytes, at least 1.
    Bytes(usize),
    /// No bytes now (try again later), or the caller's memory has a length of 0.
    Empty,
    /// The peer has closed its sending direction, and all its bytes were received.
    Closed,
    /// The connection has failed with this error.
    Failed(Errno),
}

/// Result of a send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// Count of bytes queued in the send buffer, possibly fewer than passed. 0 only if none were passed.
    Bytes(usize),
    /// No bytes queued: the send buffer is full, or the kernel is out of memory; try again later.
    Full,
    /// The connection has failed with this error.
    Failed(Errno),
}

/// A connected stream socket. Closed when dropped.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
}

pub(super) fn stream_socket(address: &SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?)
}

impl Socket {
    pub(super) fn from_fd(fd: OwnedFd) -> Socket {
        Socket { fd }
    }

    /// Connects to `address`; waits at most `timeout`. For the control path.
    ///
    /// # Errors
    /// The error of connect(2); `TimedOut` when the peer did not answer in time.
    pub fn connect(address: SocketAddr, timeout: Duration) -> io::Result<Socket> {
        let socket = Socket::begin_connect(address)?;
        socket.wait_writable(timeout)?;
        if socket.is_connected()? { Ok(socket) } else { Err(io::ErrorKind::TimedOut.into()) }
    }

    /// Starts to connect to `address`. The socket can send once [`Socket::is_connected`] returns true. Fails
    /// with the error of socket(2) or connect(2).
    pub fn begin_connect(address: SocketAddr) -> io::Result<Socket> {
        let fd = stream_socket(&address)?;
        match connect(&fd, &address) {
            // After a signal the connect continues in the background, as after EINPROGRESS.
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(Socket { fd }),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns true once the connect has succeeded, false while it is in progress.
    ///
    /// # Errors
    /// The error of the connect, for example no answer, or refused. Only one call returns the error; do not
    /// call this function again afterwards.
    pub fn is_connected(&self) -> io::Result<bool> {
        if !is_writable(&self.fd, Duration::ZERO)? {
            return Ok(false);
        }
        sockopt::socket_error(&self.fd)??;
        Ok(true)
    }

    /// Waits at most `timeout` until the socket can send or has failed. Returns false on timeout.
    pub fn wait_writable(&self, timeout: Duration) -> io::Result<bool> {
        is_writable(&self.fd, timeout)
    }

    /// Receives at most as many bytes as `to` has. Returns [`Received::Empty`] for an empty `to`.
    #[inline]
    pub fn recv(&self, to: &mut [u8]) -> Received {
        if to.is_empty() {
            return Received::Empty;
        }
        received(retry_on_intr(|| recv(&self.fd, &mut *to, RecvFlags::DONTWAIT).map(|(bytes, _)| bytes)))
    }

    /// Receives into the pieces of `to` in order; pieces after the first 1024 are not used. Returns
    /// [`Received::Empty`] if all used pieces are empty.
    #[inline]
    pub fn recv_vectored(&self, to: &mut [IoSliceMut<'_>]) -> Received {
        let pieces = to.len().min(PIECES_MAX);
        if to[..pieces].iter().all(|piece| piece.is_empty()) {
            return Received::Empty;
        }
        received(retry_on_intr(|| readv(&self.fd, &mut to[..pieces])))
    }

    /// Sends the bytes of `from`, possibly only the first of them.
    #[inline]
    pub fn send(&self, from: &[u8]) -> Sent {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        sent(retry_on_intr(|| rustix::net::send(&self.fd, from, flags)))
    }

    /// Sends the pieces of `from` in order, possibly only their first bytes. Only the first 1024 are used.
    #[inline]
    pub fn send_vectored(&self, from: &[IoSlice<'_>]) -> Sent {
        // Without an io vector the kernel copies less from user space.
        if let [only] = from {
            return self.send(only);
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let from = &from[..from.len().min(PIECES_MAX)];
        sent(retry_on_intr(|| sendmsg(&self.fd, from, &mut SendAncillaryBuffer::default(), flags)))
    }

    /// With `is_on`, small segments do not wait for an acknowledgement (`TCP_NODELAY`).
    pub fn set_nodelay(&self, is_on: bool) -> io::Result<()> {
        Ok(sockopt::set_tcp_nodelay(&self.fd, is_on)?)
    }

    /// Sets the congestion control by the kernel's name for it (`cubic`, `reno`, ...). A congestion control
    /// with packet pacing costs time even on a fabric that never drops packets.
    ///
    /// # Errors
    /// The error of setsockopt(2), for example when the kernel has none of that name.
    pub fn set_congestion(&self, name: &str) -> io::Result<()> {
        Ok(sockopt::set_tcp_congestion(&self.fd, name)?)
    }

    /// Fails the connection when sent bytes were not acknowledged for `ms` milliseconds (`TCP_USER_TIMEOUT`);
    /// 0 is the system's default.
    pub fn set_user_timeout(&self, ms: u32) -> io::Result<()> {
        Ok(sockopt::set_tcp_user_timeout(&self.fd, ms)?)
    }

    /// Probes an idle peer after `idle`, then every `interval`, and fails the connection after `count`
    /// unanswered probes. Times are rounded up to whole seconds.
    pub fn set_keepalive(&self, idle: Duration, interval: Duration, count: u32) -> io::Result<()> {
        sockopt::set_socket_keepalive(&self.fd, true)?;
        sockopt::set_tcp_keepidle(&self.fd, idle)?;
        sockopt::set_tcp_keepintvl(&self.fd, interval)?;
        Ok(sockopt::set_tcp_keepcnt(&self.fd, count)?)
    }

    /// Requests kernel buffers of `send` and `recv` bytes. The kernel doubles these sizes and limits them. A
    /// size of 0 does not change the buffer.
    pub fn set_buffers(&self, send: usize, recv: usize) -> io::Result<()> {
        if send > 0 {
            sockopt::set_socket_send_buffer_size(&self.fd, send)?;
        }
        if recv > 0 {
            sockopt::set_socket_recv_buffer_size(&self.fd, recv)?;
        }
        Ok(())
    }

    /// With `is_on`, a close sends a reset (`SO_LINGER` 0): the kernel drops bytes that the peer has not
    /// acknowledged, instead of sending them after the close. Also when the process is killed.
    pub fn set_reset_on_close(&self, is_on: bool) -> io::Result<()> {
        Ok(sockopt::set_socket_linger(&self.fd, is_on.then_some(Duration::ZERO))?)
    }

    /// Closes the sending direction, after the bytes sent before. Succeeds also if the connection has ended.
    pub fn shutdown_write(&self) -> io::Result<()> {
        match shutdown(&self.fd, Shutdown::Write) {
            Ok(()) | Err(Errno::NOTCONN) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns the local address of the connection.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(SocketAddr::try_from(getsockname(&self.fd)?)?)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[inline]
fn received(result: Result<usize, Errno>) -> Received {
    match result {
        Ok(0) => Received::Closed,
        Ok(bytes) => Received::Bytes(bytes),
        Err(Errno::AGAIN) => Received::Empty,
        Err(errno) => Received::Failed(errno),
    }
}

#[inline]
fn sent(result: Result<usize, Errno>) -> Sent {
    match result {
        Ok(bytes) => Sent::Bytes(bytes),
        // ENOBUFS: out of kernel memory for the moment, not the end of the connection.
        Err(Errno::AGAIN | Errno::NOBUFS) => Sent::Full,
        Err(errno) => Sent::Failed(errno),
    }
}

fn is_writable(fd: &OwnedFd, timeout: Duration) -> io::Result<bool> {
    let start = Instant::now();
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        let left = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: i64::from(i32::MAX), tv_nsec: 0 });
        match poll(&mut [PollFd::new(fd, PollFlags::OUT)], Some(&left)) {
            Ok(count) => return Ok(count > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Interest, Listener, Readiness};
    use super::*;

    fn pair() -> (Socket, Socket) {
        let listener = Listener::bind("127.0.0.1:0".parse().expect("address"), 16).expect("bind");
        let socket = Socket::connect(listener.local_addr(), Duration::from_secs(5)).expect("connect");
        (socket, listener.accept().expect("accept").expect("one waits").socket)
    }

    /// Blocks until the socket is ready, at most 10 s.
    fn wait(socket: &Socket, interest: Interest) {
        let mut readiness = Readiness::new().expect("epoll");
        let mut ready = Vec::with_capacity(1);
        readiness.add(socket, 0, interest).expect("add");
        readiness.poll(Some(Duration::from_secs(10)), &mut ready).expect("poll");
        assert_eq!(ready.len(), 1, "nothing came in 10 s");
    }

    fn recv_all(socket: &Socket, mut to: &mut [u8]) {
        while !to.is_empty() {
            match socket.recv(to) {
                Received::Bytes(bytes) => to = &mut to[bytes..],
                Received::Empty => wait(socket, Interest::READ),
                other @ (Received::Closed | Received::Failed(_)) => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn pieces_arrive_in_order_and_an_end_is_seen() {
        let (a, b) = pair();
        assert_eq!(b.recv(&mut [0; 4]), Received::Empty);
        assert_eq!(
            a.send_vectored(&[IoSlice::new(b"spin"), IoSlice::new(b""), IoSlice::new(b"dle")]),
            Sent::Bytes(7)
        );
        let mut got = [0; 7];
        recv_all(&b, &mut got);
        assert_eq!(&got, b"spindle");
        a.shutdown_write().expect("shutdown");
        wait(&b, Interest::READ);
        assert_eq!(b.recv(&mut got), Received::Closed);
        assert_eq!(b.send(b"still open"), Sent::Bytes(10));
        assert_eq!(b.recv(&mut []), Received::Empty, "no room is not an end");
        assert_eq!(b.recv_vectored(&mut [IoSliceMut::new(&mut [])]), Received::Empty);
    }

    #[test]
    fn a_receive_fills_one_piece_after_the_other() {
        let (a, b) = pair();
        assert_eq!(a.send(b"abcdef"), Sent::Bytes(6));
        wait(&b, Interest::READ);
        let (mut x, mut y) = ([0; 4], [0; 4]);
        assert_eq!(
            b.recv_vectored(&mut [IoSliceMut::new(&mut x), IoSliceMut::new(&mut y)]),
            Received::Bytes(6)
        );
        assert_eq!((&x, &y[..2]), (b"abcd", &b"ef"[..]));
    }

    #[test]
    fn a_peer_that_reads_nothing_makes_it_full_and_then_not() {
        let (a, b) = pair();
        a.set_buffers(4096, 0).expect("buffers");
        b.set_buffers(0, 4096).expect("buffers");
        let block = [7; 65536];
        let mut sent = 0;
        loop {
            match a.send_vectored(&[IoSlice::new(&block)]) {
                Sent::Bytes(bytes) => sent += bytes,
                Sent::Full => break,
                Sent::Failed(errno) => panic!("{errno}"),
            }
        }
        recv_all(&b, &mut vec![0; sent]);
        wait(&a, Interest::WRITE);
        assert!(matches!(a.send(&block), Sent::Bytes(_)));
    }

    #[test]
    fn more_pieces_than_the_kernel_takes_are_sent_in_part() {
        let (a, b) = pair();
        let pieces: Vec<_> = (0..PIECES_MAX + 10).map(|_| IoSlice::new(b"x")).collect();
        assert_eq!(a.send_vectored(&pieces), Sent::Bytes(PIECES_MAX));
        recv_all(&b, &mut [0; PIECES_MAX]);
        let mut bytes = [0; PIECES_MAX + 10];
        let mut into: Vec<_> = bytes.chunks_mut(1).map(IoSliceMut::new).collect();
        assert_eq!(b.recv_vectored(&mut into), Received::Empty);
    }

    #[test]
    fn a_reset_is_a_failure_and_raises_no_signal() {
        let (a, b) = pair();
        assert_eq!(a.send(b"unread"), Sent::Bytes(6));
        wait(&b, Interest::READ);
        drop(b); // unread bytes: the kernel resets the connection
        wait(&a, Interest::READ);
        assert_eq!(a.recv(&mut [0; 4]), Received::Failed(Errno::CONNRESET));
        assert_eq!(a.send(b"x"), Sent::Failed(Errno::PIPE));
        a.shutdown_write().expect("gone is no error");
    }

    #[test]
    fn a_close_by_reset_is_seen_as_one_and_can_be_taken_back() {
        for (is_reset, seen) in [(true, Received::Failed(Errno::CONNRESET)), (false, Received::Closed)] {
            let (a, b) = pair();
            a.set_reset_on_close(true).expect("linger");
            a.set_reset_on_close(is_reset).expect("linger");
            drop(a);
            wait(&b, Interest::READ);
            assert_eq!(b.recv(&mut [0; 4]), seen);
        }
    }

    #[test]
    fn what_was_not_sent_is_not_sent_after_a_close_by_reset() {
        let (a, b) = pair();
        a.set_reset_on_close(true).expect("linger");
        a.set_buffers(1 << 20, 0).expect("buffers");
        b.set_buffers(0, 4096).expect("buffers");
        let block = [7; 65536];
        let mut sent = 0;
        while let Sent::Bytes(bytes) = a.send(&block) {
            sent += bytes;
        }
        drop(a);
        let mut came = 0;
        let mut to = vec![0; 65536];
        loop {
            match b.recv(&mut to) {
                Received::Bytes(bytes) => came += bytes,
                Received::Empty => wait(&b, Interest::READ),
                Received::Failed(Errno::CONNRESET) => break,
                other @ (Received::Closed | Received::Failed(_)) => panic!("{other:?} after {came} bytes"),
            }
        }
        assert!(came < sent, "{came} of {sent} bytes");
    }

    #[test]
    fn a_refused_connect_is_an_error() {
        let listener = Listener::bind("127.0.0.1:0".parse().expect("address"), 1).expect("bind");
        let address = listener.local_addr();
        drop(listener);
        let error = Socket::connect(address, Duration::from_secs(5)).expect_err("refused");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn options_are_taken() {
        let (a, _b) = pair();
        a.set_nodelay(true).expect("nodelay");
        a.set_user_timeout(3000).expect("user timeout");
        a.set_keepalive(Duration::from_secs(5), Duration::from_secs(1), 3).expect("keep-alive");
        a.set_buffers(1 << 20, 1 << 20).expect("buffers");
        a.set_congestion("reno").expect("everybody has it");
        assert!(sockopt::tcp_nodelay(&a).expect("nodelay"));
        assert_eq!(sockopt::tcp_user_timeout(&a).expect("user timeout"), 3000);
        assert!(sockopt::socket_keepalive(&a).expect("keep-alive"));
        assert_eq!(sockopt::tcp_keepidle(&a).expect("idle"), Duration::from_secs(5));
        assert_eq!(sockopt::tcp_keepintvl(&a).expect("interval"), Duration::from_secs(1));
        assert_eq!(sockopt::tcp_keepcnt(&a).expect("count"), 3);
        assert_eq!(sockopt::tcp_congestion(&a).expect("congestion"), "reno");
    }

    #[test]
    fn each_buffer_has_the_size_that_was_asked_for_and_zero_leaves_it() {
        // The kernel doubles what it is asked for.
        let sizes = |socket: &Socket| {
            let send = sockopt::socket_send_buffer_size(socket).expect("send");
            (send, sockopt::socket_recv_buffer_size(socket).expect("recv"))
        };
        let (a, _b) = pair();
        let (_, recv) = sizes(&a);
        a.set_buffers(32 << 10, 0).expect("send only");
        assert_eq!(sizes(&a), (64 << 10, recv));
        a.set_buffers(0, 16 << 10).expect("recv only");
        assert_eq!(sizes(&a), (64 << 10, 32 << 10));
    }

    #[test]
    fn a_socket_goes_to_another_core() {
        fn is_send<T: Send>() {}
        is_send::<Socket>();
        is_send::<Listener>();
    }
}
