//! The interface between the request machine and a connection of any transport: neither knows the other.
//!
//! ```text
//!   target    TargetCore: Connections      Qpair ─ uses ─> Transport
//!                  ^                                           ^
//!                  │ uses                                      │ is
//!   tcp, rdma    Shell: sockets, verbs ── feeds, empties ──>  Conn
//! ```
//!
//! | file | what |
//! |---|---|
//! | `conn` | [`Transport`], a connection as the request machine uses it, its events and replies |
//! | `connections` | [`Connections`], those of a core as a shell uses them; [`Peer`], the two ends of one |
//! | [`host`] | the host's end of a connection, as what issues commands uses it |
//! | [`admission`] | how many connections of one address may be there that have not sent Connect |
//!
//! What it does not do: no bytes of a wire, no command is known here; nothing here decides anything but
//! [`admission`].
#![forbid(unsafe_code)]

pub mod admission;
mod conn;
mod connections;
pub mod host;

pub use conn::{CloseReason, DataPointer, Event, FAST_PATH, Holds, Limits, Reply, Transport};
pub use connections::{Connections, Peer, TransportKind};

/// Most SGL descriptors of a command over RDMA (MSDBD): 16 pieces of memory cover what hosts gather, in a
/// list of 256 bytes. The controller says it, and the connection holds to it.
pub const RDMA_DESCRIPTORS_MAX: u8 = 16;
