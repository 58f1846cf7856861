//! Polling loop of one end of the exchange. Its [`Role`] is the server or the requester.
//!
//! A turn receives once from each open connection, passes the bytes to the role, and sends the connection's
//! outbox. All connections are busy, so a receive from each is faster than epoll.

use std::io::{self, IoSliceMut};
use std::net::TcpStream;

use rustix::io::{Errno, readv};
use rustix::net::{RecvFlags, recv};

use spindle_reactor::mem::{Pages, Region};

use crate::LimitError;
use crate::message::{Cursor, Kind, Piece, UnknownKind};
use crate::outbox::{Outbox, PreparedMessages};

/// Most bytes of one receive of blocks below [`DIRECT_RECEIVE_BYTES_MIN`]. Smaller receives need more system
/// calls; larger ones do not stay in the core's cache.
const RECEIVE_BYTES: usize = 256 << 10;
/// Smallest block that is received into its final memory. It is faster to receive smaller blocks in batches
/// and copy them.
const DIRECT_RECEIVE_BYTES_MIN: usize = 16 << 10;
/// Most bytes received beyond a block that is received into its final memory. These bytes are copied. As they
/// are few, most of the next block is received into its final memory too.
const BEYOND_BLOCK_BYTES: usize = 4 << 10;

/// Message handling of the server or the requester.
pub(super) trait Role {
    /// Whether the role receives on a connection whose send buffer is full. One end must: otherwise both ends
    /// could wait for each other.
    const RECEIVES_WHILE_BLOCKED: bool;

    /// Returns whether the run has ended for this end.
    fn is_over(&self) -> bool;
    /// Handles part of a message with payload, received on connection `link` into memory that the next
    /// receive reuses. Not called for payload that was received into [`Role::payload_memory`].
    fn on_piece(&mut self, link: usize, piece: &Piece<'_>);
    /// Returns the memory for the last `left` bytes of the payload that connection `link` is receiving.
    fn payload_memory(&mut self, link: usize, left: usize) -> &mut [u8];
    /// Handles a complete message on connection `link`.
    fn on_message(&mut self, link: usize, kind: Kind, outbox: &mut Outbox);
    /// Called after all messages of one receive on connection `link` were handled, and once before the first
    /// receive.
    fn on_received(&mut self, link: usize, outbox: &mut Outbox);
    /// Returns the source of all messages and of the heads of replies to reads.
    fn prepared(&self) -> &PreparedMessages;
    /// Returns the memory from which the blocks of replies to reads are sent; empty for the requester.
    fn span(&self) -> &[u8];
}

/// A connection with its receive and send state.
#[derive(Debug)]
struct Link {
    socket: TcpStream,
    cursor: Cursor,
    outbox: Outbox,
    is_open: bool,
    is_blocked: bool,
}

/// The server or the requester with its connections.
pub(super) struct PollLoop<R> {
    role: R,
    links: Vec<Link>,
    /// Whether blocks have at least [`DIRECT_RECEIVE_BYTES_MIN`] bytes.
    receives_directly: bool,
    /// Indices of the connections whose send buffer was full.
    blocked: Vec<usize>,
    open: usize,
    buffer: Region,
}

impl<R: Role> PollLoop<R> {
    /// Creates the loop and its receive buffer. `sockets` must be non-blocking.
    pub(super) fn new(
        role: R,
        sockets: Vec<TcpStream>,
        block_bytes: usize,
    ) -> Result<PollLoop<R>, LimitError> {
        let open = sockets.len();
        let link = |socket| Link {
            socket,
            cursor: Cursor::new(block_bytes),
            outbox: Outbox::default(),
            is_open: true,
            is_blocked: false,
        };
        let links: Vec<Link> = sockets.into_iter().map(link).collect();
        // Written once, so that the pages are mapped before the first receive.
        let mut buffer = Region::map(RECEIVE_BYTES, Pages::Transparent)?;
        buffer.as_mut_slice().fill(0xff);
        let receives_directly = block_bytes >= DIRECT_RECEIVE_BYTES_MIN;
        Ok(PollLoop { role, links, receives_directly, blocked: Vec::new(), open, buffer })
    }

    /// Runs until the role is over or the peer has closed all connections.
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
        let left = if self.receives_directly { link.cursor.payload_remaining() } else { 0 };
        let payload_memory = if left > 0 { self.role.payload_memory(at, left) } else { &mut [] };
        let into = if self.receives_directly { &mut buffer[..BEYOND_BLOCK_BYTES] } else { &mut *buffer };
        let received = if payload_memory.is_empty() {
            recv(&link.socket, into, RecvFlags::empty()).map(|(_, received)| received)
        } else {
            readv(&link.socket, &mut [IoSliceMut::new(payload_memory), IoSliceMut::new(into)])
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
        let direct_bytes = left.min(received);
        if let Some(kind) = link.cursor.skip_payload(direct_bytes) {
            self.role.on_message(at, kind, &mut link.outbox);
        }
        let mut rest = &buffer[..received - direct_bytes];
        while let Some(piece) =
            link.cursor.next(&mut rest).map_err(|UnknownKind(byte)| LimitError::UnknownMessage(byte))?
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
        match link.outbox.flush(&link.socket, self.role.prepared(), self.role.span()) {
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

    /// Closes a connection that the peer has closed: drops the unsent messages.
    #[cold]
    fn close(&mut self, at: usize) {
        let link = &mut self.links[at];
        link.outbox = Outbox::default();
        self.open -= usize::from(std::mem::replace(&mut link.is_open, false));
    }
}
