//! The interface between request machine and connections of a transport. Neither depends on the other.
//!
//! ```text
//!   target    TargetCore: Connections      Qpair ─ uses ─> Transport
//!                  ^                                           ^
//!                  │ uses                                      │ is
//!   tcp, rdma    Shell: sockets, verbs ── receives, sends ──> Conn
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `conn` | [`Transport`], a connection as the request machine uses it; its events, replies and limits |
//! | `connections` | [`Connections`] of a core as a shell uses them; [`Peer`], [`TransportKind`] |
//! | `ids` | [`ConnectionId`], [`RequestId`] |
//! | [`host`] | types of the host's end of a connection |
//! | [`admission`] | limit of connections per host address before Connect has succeeded |
//!
//! This crate parses no wire format and executes no command; only [`admission`] has state.
#![forbid(unsafe_code)]

pub mod admission;
mod conn;
mod connections;
pub mod host;
mod ids;

pub use conn::{CloseReason, DataPointer, Event, FAST_PATH, Holds, Limits, Reply, Transport};
pub use connections::{Connections, Peer, TransportKind};
pub use ids::{ConnectionId, RequestId};

/// Most SGL descriptors of a command over RDMA. 16 descriptors, a list of 256 bytes, suffice for the memory
/// segments that hosts combine in one command. MSDBD is at most this; a longer list is refused.
pub const RDMA_DESCRIPTORS_MAX: u8 = 16;
