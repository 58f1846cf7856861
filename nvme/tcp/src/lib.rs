//! NVMe/TCP: the protocol of both ends ([`controller::Conn`], [`host::Conn`]), and the [`shell`] that has the
//! controller's sockets.
//!
//! **Protocol.** A `Conn` turns received bytes into events, and replies or commands into pieces of memory to
//! send. It owns no socket, reads no clock and starts no thread; only `send_to` and `receive_from` use the
//! caller's socket. So the same code runs in a seeded simulator, in a fuzzer and in tests that pass single
//! bytes. Implements NVMe/TCP Transport 1.0 and 1.1; section numbers are those of 1.0.
//!
//! **Flow.**
//! ```text
//!   socket ─ recv ──> RxBatch ─ load ─> Conn ─ next_event ─> queue pair    payload: copied to its buffer
//!          ─ readv ───────────────────> Conn::direct_target                rest of a large payload: in place
//!   socket <─ sendmsg <─ send_pieces <─ Conn <─ reply, fetch ─ queue pair  payload: sent from its buffer
//!
//!   inbox      received bytes: one batch per core, a carry per connection
//!   payload    data being received into a buffer
//!   outbox     queued PDUs and the pieces that they consist of
//!   frame      lengths, flags and digests of a PDU
//!   digest     CRC32C of headers and data
//!   violation  each protocol rule that a peer can violate
//!   lifetime   open, draining, half closed, closed
//!   wire       state common to both ends
//! ```
//!
//! **Scope.** Of a command this crate reads only the opcode (is it a Fabrics command), CID, PSDT and SGL. Of
//! a Fabrics command it also reads FCTYPE, and of Connect the QID (admin or I/O queue). The target's `io` and
//! `admin` check opcodes, namespaces and ranges. There is no TLS. The controller sends one R2T for a whole
//! command and one C2HData for a whole read; peers may split the data of a command into several PDUs.
//!
//! **Limits.** 4096 queue entries ([`controller::QUEUE_ENTRIES_MAX`]); a transfer is one
//! [`Buf`](spindle_reactor::mem::Buf). In steady state nothing is allocated, unless commands wait for memory
//! (the capsule stash).
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

pub use inbox::RxBatch;
pub use lifetime::Phase;
pub use violation::Violation;
