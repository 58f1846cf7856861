//! The host's side of NVMe over TCP and RDMA as a library: connect, queue pairs, one or many on a thread.
//! Polled, from user space, where the kernel has no NVMe.
//!
//! **What it is.** A [`Controller`] is the admin queue of one association; it makes [`IoQueue`]s, each a
//! connection of its own. Commands take their buffer by value and give it back with their completion; the
//! payload of a large read is received straight into it; over RDMA no payload is ever copied. Nothing here
//! starts a thread: a queue lives on the thread that polls it. `initiator/examples/read_block.rs` is a small
//! program that uses it.
//!
//! ```text
//!   discover ──> DiscoveryLog      Controller::connect ──> connect_queue ──> IoQueue ──┐
//!                                      │ poll: keep alive, events                      │
//!                                      └ namespaces, log pages                         └─ QueueSet: many
//!
//!   IoQueue::read(&namespace, lba, buf) -> Ticket     queued; leaves with the next send or poll, in one call
//!   IoQueue::poll(now)                                sends what is queued, receives
//!     any: next_completion() -> Completion
//!     one: wait(ticket, timeout) -> Completion
//! ```
//!
//! **Errors** are of three kinds and never mixed: [`Refused`] (the command was not taken; it has the buffer),
//! [`Failure::Status`] (the target's answer) and [`Failure::Lost`] (the connection ended first). The control
//! path has [`Error`].
//!
//! **What it does not do.** No TLS and no in-band authentication (a target that asks for them is refused by
//! name), no multipath, no caching. It never retries a command and never connects again by itself: who does
//! has [`Backoff`] for the waits between attempts.
//!
//! **Limits.** 65,535 commands of a queue, as many as the controller grants; a transfer is one [`Buf`] and at
//! most MDTS.
#![forbid(unsafe_code)]

mod address;
mod backoff;
mod controller;
mod discover;
mod error;
mod link;
mod namespace;
mod options;
mod qpair;
mod queue;
mod set;

pub use address::{AddressError, DISCOVERY_PORT, NVME_RDMA_PORT, NVME_TCP_PORT, resolve, split_transport};
pub use backoff::Backoff;
pub use controller::{Association, Controller, ControllerEvent, Former, Opening};
pub use discover::{DiscoveryLog, discover};
pub use error::{Error, Loss, RdmaRefusal};
pub use namespace::{BlockRange, Identity, Namespace};
pub use options::{Host, Options, Target};
pub use qpair::{Completion, Failure, Refusal, Refused, Ticket, WaitError};
pub use queue::{IoQueue, RefusedPair};
pub use set::QueueSet;
pub use spindle_transport::TransportKind;

pub use nvme_spec;
pub use spindle_rdma::registration::Limits as RegistrationLimits;
pub use spindle_reactor::clock::{Clock, Nanos};
pub use spindle_reactor::mem::{Buf, Pages, Pool, PoolError, ZoneSpec};
pub use spindle_transport::host::HostData;
