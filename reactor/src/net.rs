//! Non-blocking sockets: [`Listener`], [`Socket`], and [`Readiness`] and [`Waker`] for cores that sleep.
//!
//! What it is: the socket calls of the data path, with results that a poller can match on. Accepting,
//! receiving and sending never block, retry `EINTR`, raise no `SIGPIPE` on a closed connection, use the
//! caller's memory and allocate none. [`Readiness::poll`], [`Waker::wait`], [`Socket::connect`] and
//! [`Socket::wait_writable`] wait for at most their timeout (a poll without a timeout: without limit).
//!
//! ```text
//!   Listener::accept -> Accepted { socket, peer, local }
//!   Socket::recv*  -> Received::{ Bytes | Empty | Closed | Failed }
//!   Socket::send*  -> Sent::{ Bytes | Full | Failed }
//!   Readiness::poll -> Ready { key, .. }    Waker::wake (any thread) -> readable in the sleeper's Readiness
//! ```
//!
//! What it does not do: it has no protocol, no buffers and no policy for connections.
//!
//! Limits: IPv4 and IPv6 stream sockets of Linux; at most 1024 pieces in one vectored call (the caller passes
//! the others to the next).

mod listener;
mod readiness;
mod socket;

pub use listener::{Accepted, Listener};
pub use readiness::{Interest, Readiness, Ready, Waker, Watcher};
pub use rustix::io::Errno;
pub use socket::{Received, Sent, Socket};

/// Maximum number of pieces of one vectored receive or send (`IOV_MAX`).
pub const PIECES_MAX: usize = 1024;
