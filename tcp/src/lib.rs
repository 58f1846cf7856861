//! NVMe/TCP: the connection of both ends without sockets ([`controller::Conn`], [`host::Conn`]), and the
//! shell that joins it to them.
//!
//! **What it is.** A connection takes received bytes and gives events; takes replies or commands and gives
//! pieces of memory to send. It makes no system call, reads no clock and starts no thread, so the shipped
//! code runs under a seeded simulator, under a fuzzer and byte by byte. NVMe/TCP Transport 1.0 and 1.1;
//! section numbers are those of 1.0.
//!
//! **Flow.**
//! ```text
//!   socket ─ recv ──> RxBatch ─ load ─> Conn ─ next_event ─> queue pair    payload: copied once, by fetch
//!          ─ readv ───────────────────> Conn::direct_target                large payloads: not copied
//!   socket <─ sendmsg <─ send_pieces <─ Conn <─ reply, fetch ─ queue pair  payload: sent from where it lies
//!
//!   inbox      bytes in: one batch a core, a stash a connection
//!   payload    data on its way into a buffer
//!   outbox     bytes out: PDUs and the pieces that they are made of
//!   frame      lengths, flags and digests of a PDU
//!   violation  every rule that a peer can break
//!   lifetime   open, draining, half closed, closed
//!   wire       what both ends share of it
//! ```
//!
//! **What it does not do.** It knows no opcode beyond Connect (whose QID says whether it is an I/O queue), no
//! namespace, no range: the target's `io` and `admin` check those. It has no TLS. It sends one R2T for a
//! whole command and one C2HData for a whole read; hosts and controllers may split theirs.
//!
//! **Limits.** 4096 queue entries ([`controller::QUEUE_ENTRIES_MAX`]); a transfer is one
//! [`Buf`](spindle_reactor::mem::Buf). In steady state nothing allocates.
#![forbid(unsafe_code)]

pub mod controller;
mod digest;
mod frame;
pub mod host;
mod inbox;
mod lifetime;
mod outbox;
mod payload;
pub mod shell;
mod violation;
mod wire;

pub use inbox::{Expectation, RxBatch};
pub use lifetime::Phase;
pub use violation::Violation;
