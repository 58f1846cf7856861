//! One end of the exchange: the loop that receives, hands on and sends, the same for both roles.
//!
//! A turn receives once on every connection that may have something, hands the pieces to the [`Role`], and sends in one
//! call what the role put into the outbox. A single connection is asked without a pause, which is the shortest way for
//! one request; of several, epoll names those that have something, without ever waiting.

use std::io;
use std::net::TcpStream;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use rustix::time::Timespec;

use spindle_reactor::mem::{Pages, Region};

use super::LimitError;
use super::message::{Cursor, Piece, UnknownKind};
use super::outbox::{Outbox, Stock};

/// Bytes that are received in one call at most. Smaller ones cost calls, larger ones leave the core's cache.
const RECEIVE_BYTES: usize = 256 << 10;
/// Connections up to which every one is asked in every turn.
const ASKED_DIRECTLY_MAX: usize = 1;
/// Connections that one turn asks epoll for.
const EVENTS_MAX: usize = 256;

/// What an end does with what it receives.
pub(super) trait Role {
    /// Whether it goes on receiving while its own messages do not go out. One of the two ends must.
    const RECEIVES_WHILE_BLOCKED: bool;

    /// Whether its work is done.
    fn is_over(&self) -> bool;
    /// A piece of a message came on connection `link`.
    fn on_piece(&mut self, link: usize, piece: &Piece<'_>, outbox: &mut Outbox);
    /// All that one call received on connection `link` is handed over.
    fn on_received(&mut self, link: usize, outbox: &mut Outbox);
    /// What its messages are sent from.
    fn stock(&self) -> &Stock;
    /// What its replies to reads are sent from.
    fn span(&self) -> &[u8];
}

/// A connection of an end.
#[derive(Debug)]
struct Link {
    socket: TcpStream,
    cursor: Cursor,
    outbox: Outbox,
    is_open: bool,
    is_blocked: bool,
}

/// An end with its connections.
pub(super) struct End<R> {
    role: R,
    links: Vec<Link>,
    watch: Watch,
    /// The connections to ask in this turn.
    ready: Vec<usize>,
    /// The connections whose messages did not all go out.
    blocked: Vec<usize>,
    open: usize,
    buffer: Region,
}

impl<R: Role> End<R> {
    /// An end of those connections, which are non-blocking.
    pub(super) fn new(role: R, sockets: Vec<TcpStream>, block_bytes: usize) -> Result<End<R>, LimitError> {
        let watch = Watch::new(&sockets).map_err(LimitError::socket("cannot watch the connections"))?;
        let open = sockets.len();
        let link = |socket| Link {
            socket,
            cursor: Cursor::new(block_bytes),
            outbox: Outbox::default(),
            is_open: true,
            is_blocked: false,
        };
        let links: Vec<Link> = sockets.into_iter().map(link).collect();
        let ready = (0..open).collect();
        // Filled, so that the pages are there before the first receive.
        let mut buffer = Region::map(RECEIVE_BYTES, Pages::Transparent)?;
        buffer.as_mut_slice().fill(0xff);
        Ok(End { role, links, watch, ready, blocked: Vec::new(), open, buffer })
    }

    /// Turn until the role is over or the other end has closed every connection. Gives the role back.
    pub(super) fn run(mut self) -> Result<R, LimitError> {
        for link in 0..self.links.len() {
            self.role.on_received(link, &mut self.links[link].outbox);
            self.flush(link)?;
        }
        while self.open > 0 && !self.role.is_over() {
            self.turn()?;
        }
        Ok(self.role)
    }

    #[inline]
    fn turn(&mut self) -> Result<(), LimitError> {
        if !self.blocked.is_empty() {
            for link in std::mem::take(&mut self.blocked) {
                self.links[link].is_blocked = false;
                self.flush(link)?;
            }
        }
        self.watch.fill(&mut self.ready).map_err(LimitError::socket("cannot watch the connections"))?;
        for at in 0..self.ready.len() {
            let link = self.ready[at];
            if !self.links[link].is_blocked || R::RECEIVES_WHILE_BLOCKED {
                self.receive(link)?;
            }
        }
        Ok(())
    }

    #[inline]
    fn receive(&mut self, at: usize) -> Result<(), LimitError> {
        let link = &mut self.links[at];
        let buffer = &mut self.buffer.as_mut_slice()[..RECEIVE_BYTES];
        let received = match recv(&link.socket, &mut *buffer, RecvFlags::empty()) {
            Ok((_, 0)) | Err(Errno::CONNRESET) => {
                self.close(at);
                return Ok(());
            }
            Ok((_, received)) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(error) => return Err(LimitError::socket("cannot receive")(error.into())),
        };
        let mut bytes = &buffer[..received];
        while let Some(piece) = link.cursor.next(&mut bytes).map_err(|UnknownKind(byte)| LimitError::Broken(byte))? {
            self.role.on_piece(at, &piece, &mut link.outbox);
        }
        self.role.on_received(at, &mut link.outbox);
        self.flush(at)
    }

    #[inline]
    fn flush(&mut self, at: usize) -> Result<(), LimitError> {
        let link = &mut self.links[at];
        if link.is_blocked || link.outbox.is_empty() {
            return Ok(());
        }
        match link.outbox.flush(&link.socket, self.role.stock(), self.role.span()) {
            Ok(()) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                self.close(at);
                return Ok(());
            }
            Err(error) => return Err(LimitError::socket("cannot send")(error)),
        }
        if !link.outbox.is_empty() {
            link.is_blocked = true;
            self.blocked.push(at);
        }
        Ok(())
    }

    /// The other end is over: what waits for it will never be sent.
    #[cold]
    fn close(&mut self, at: usize) {
        let link = &mut self.links[at];
        link.outbox = Outbox::default();
        self.open -= usize::from(std::mem::replace(&mut link.is_open, false));
    }
}

/// How an end learns which connections have something.
enum Watch {
    /// All of them are asked.
    Ask,
    /// Epoll tells.
    Epoll { epoll: OwnedFd, events: Vec<epoll::Event> },
}

impl Watch {
    fn new(sockets: &[TcpStream]) -> io::Result<Watch> {
        if sockets.len() <= ASKED_DIRECTLY_MAX {
            return Ok(Watch::Ask);
        }
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        for (socket, link) in sockets.iter().zip(0u64..) {
            epoll::add(&epoll, socket, EventData::new_u64(link), EventFlags::IN)?;
        }
        Ok(Watch::Epoll { epoll, events: Vec::with_capacity(EVENTS_MAX) })
    }

    /// Put the connections to ask now into `ready`.
    #[inline]
    fn fill(&mut self, ready: &mut Vec<usize>) -> io::Result<()> {
        let Watch::Epoll { epoll, events } = self else { return Ok(()) };
        ready.clear();
        events.clear();
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&*epoll, rustix::buffer::spare_capacity(events), Some(&now)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        ready.extend(events.iter().filter_map(|event| usize::try_from(event.data.u64()).ok()));
        Ok(())
    }
}
