//! The host side of NVMe over TCP and RDMA as a library: controllers and queue pairs, one or many per thread.
//! It polls in user space and needs no NVMe driver in the kernel.
//!
//! **Objects.** A [`Controller`] contains the admin queue of one association. It connects [`IoQueue`]s, each
//! with a connection of its own. A command takes its buffer by value; the completion returns the buffer. Over
//! TCP most of the payload of a large read is received directly into the buffer; over RDMA no payload is
//! copied. The crate starts no thread: a queue is used on the thread that polls it. Example:
//! `nvme/initiator/examples/read_block.rs`.
//!
//! ```text
//!   discover ──> DiscoveryLog      Controller::connect ──> connect_queue ──> IoQueue ──┐
//!                                      │ poll: keep alive, events                      │
//!                                      └ namespaces, log pages                         └─ QueueSet: many
//!
//!   IoQueue::read(&namespace, lba, buf) -> Ticket     queued; sent by the next send or poll, in one call
//!   IoQueue::poll(now)                                sends queued commands, receives
//!     any: next_completion() -> Completion
//!     one: wait(ticket, timeout) -> Completion
//! ```
//!
//! **Errors** of a command: [`Refused`] (not queued; contains the buffer), [`Failure::Status`] (the target's
//! status) and [`Failure::Lost`] (the connection ended first). The control path returns [`Error`].
//!
//! **Not supported.** TLS and in-band authentication ([`Error::Authentication`] if the target requires them),
//! multipath, caching. Commands are not retried and connections are not re-established; [`Backoff`] computes
//! waits for callers that reconnect.
//!
//! **Limits.** 65,535 commands per queue, and no more than the controller grants. A transfer is one [`Buf`]
//! of at most MDTS.
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
pub use controller::{Association, CommandData, Controller, ControllerEvent, Former, Opening};
pub use discover::{DiscoveryLog, discover};
pub use error::{Error, Loss};
pub use namespace::{BlockRange, Identity, Namespace};
pub use options::{Host, Options, Target};
pub use qpair::{Completion, Failure, Refusal, Refused, Ticket, WaitError};
pub use queue::{IoQueue, RefusedPair};
pub use set::QueueSet;
pub use spindle_nvme_tcp::Violation;
pub use spindle_nvme_transport::TransportKind;

pub use nvme_spec;
pub use spindle_nvme_optimistic::client::{
    Opening as OptimisticOpening, OptimisticCounts, OptimisticGrant, OptimisticOptions,
};
pub use spindle_nvme_rdma::registration::Limits as RegistrationLimits;
pub use spindle_nvme_transport::host::HostData;
pub use spindle_rdma::ConnectError;
pub use spindle_reactor::clock::{Clock, Nanos};
pub use spindle_reactor::mem::{Buf, Pages, Pool, PoolError, ZoneSpec};
