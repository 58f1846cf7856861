//! One end of the exchange: the loop that receives, hands on and sends, the same for both
//! roles.
//!
//! A turn asks every connection once, hands what came to the [`Role`], and sends in one call what the role
//! put into the outbox. All connections of an exchange are busy, so asking each of them is faster than asking
//! epoll which to ask.

use std::io::{self, IoSliceMut};
use std::net::TcpStream;

use rustix::io::{Errno, readv};
use rustix::net::{RecvFlags, recv};

use spindle_reactor::mem::{Pages, Region};

use super::LimitError;
use super::message::{Cursor, Kind, Piece, UnknownKind};
use super::outbox::{Outbox, Stock};

/// Bytes that are received in one call at most. Smaller ones cost calls, larger ones leave the core's cache.
const RECEIVE_BYTES: usize = 256 << 10;
/// Blocks from this size on are received to where they belong; smaller ones are cheaper to copy there out of
/// a batch.
const LANDING_BYTES_MIN: usize = 16 << 10;
/// Bytes that are received at most beyond a block that lands where it belongs, so that most of the next one
/// does too.
const BEYOND_BYTES: usize = 4 << 10;

/// What an end does with what it receives.
pub(super) trait Role {
    /// Whether it goes on receiving while its own messages do not go out. One of the two ends must.
    const RECEIVES_WHILE_BLOCKED: bool;

    /// Whether its work is done.
    fn is_over(&self) -> bool;
    /// A piece of a message with payload came on connection `link`.
    fn on_piece(&mut self, link: usize, piece: &Piece<'_>);
    /// Where the last `left` bytes of the payload that connection `link` is receiving belong.
    fn landing(&mut self, link: usize, left: usize) -> &mut [u8];
    /// A whole message came on connection `link`.
    fn on_message(&mut self, link: usize, kind: Kind, outbox: &mut Outbox);
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
    /// Whether blocks are large enough to be received to where they belong.
    lands: bool,
    /// The connections whose messages did not all go out.
    blocked: Vec<usize>,
    open: usize,
    buffer: Region,
}

impl<R: Role> End<R> {
    /// An end of those connections, which are non-blocking.
    pub(super) fn new(role: R, sockets: Vec<TcpStream>, block_bytes: usize) -> Result<End<R>, LimitError> {
        let open = sockets.len();
        let link = |socket| Link {
            socket,
            cursor: Cursor::new(block_bytes),
            outbox: Outbox::default(),
            is_open: true,
            is_blocked: false,
        };
        let links: Vec<Link> = sockets.into_iter().map(link).collect();
        // Filled, so that the pages are there before the first receive.
        let mut buffer = Region::map(RECEIVE_BYTES, Pages::Transparent)?;
        buffer.as_mut_slice().fill(0xff);
        let lands = block_bytes >= LANDING_BYTES_MIN;
        Ok(End { role, links, lands, blocked: Vec::new(), open, buffer })
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
        for link in 0..self.links.len() {
            if self.links[link].is_open && (!self.links[link].is_blocked || R::RECEIVES_WHILE_BLOCKED) {
                self.receive(link)?;
            }
        }
        Ok(())
    }

    #[inline]
    fn receive(&mut self, at: usize) -> Result<(), LimitError> {
        let link = &mut self.links[at];
        let buffer = &mut self.buffer.as_mut_slice()[..RECEIVE_BYTES];
        let left = if self.lands { link.cursor.payload_left() } else { 0 };
        let landing = if left > 0 { self.role.landing(at, left) } else { &mut [] };
        let into = if self.lands { &mut buffer[..BEYOND_BYTES] } else { &mut *buffer };
        let received = if landing.is_empty() {
            recv(&link.socket, into, RecvFlags::empty()).map(|(_, received)| received)
        } else {
            readv(&link.socket, &mut [IoSliceMut::new(landing), IoSliceMut::new(into)])
        };
        let received = match received {
            Ok(0) | Err(Errno::CONNRESET) => {
                self.close(at);
                return Ok(());
            }
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(error) => return Err(LimitError::socket("cannot receive")(error.into())),
        };
        let landed = left.min(received);
        if let Some(kind) = link.cursor.landed(landed) {
            self.role.on_message(at, kind, &mut link.outbox);
        }
        let mut rest = &buffer[..received - landed];
        while let Some(piece) =
            link.cursor.next(&mut rest).map_err(|UnknownKind(byte)| LimitError::Broken(byte))?
        {
            if piece.kind.has_payload() {
                self.role.on_piece(at, &piece);
            }
            if piece.is_last {
                self.role.on_message(at, piece.kind, &mut link.outbox);
            }
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
            Err(error)
                if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) =>
            {
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
