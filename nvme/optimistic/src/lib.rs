//! The target's service for optimistic reads: a client reads pages of a disk's cache by RDMA READ, without
//! the target's CPU. `docs/extensions.md` specifies the protocol.
//!
//! ```text
//!   reactor core: Attach ──> Grants::issue ──> token ──> host
//!   host: RDMA connect with the token ──> service thread: Grants::redeem
//!                                            ├─ Domains: frames and seals of the cache, registered in a
//!                                            │  protection domain of their own on the host's device
//!                                            └─ queue pair in that domain, accepted with addresses and keys
//!   each 100 ms, and at Service::check: queue pairs whose grant is not valid any more are ended
//!   each 100 ms: queue pairs whose client is gone, or that have failed, are ended
//! ```
//!
//! **Isolation.** There is one protection domain for each cache and device. A key is valid only on queue
//! pairs of its domain, so a client cannot read another cache with it. The memory is registered for remote
//! reads only.
//!
//! **What it does not do.** The service posts nothing but probes (`probes`): the device answers the client's
//! READs. It does not touch the queue pairs of NVMe.
//!
//! **Limits.** [`CONNECTIONS_MAX`] queue pairs, 128 of a controller; [`TOKENS_MAX`] unused tokens,
//! [`CONTROLLER_TOKENS_MAX`] of a controller; [`TOKEN_TTL`].
#![forbid(unsafe_code)]

mod admission;
mod domains;
mod grants;
mod probes;
mod service;

pub use admission::{CONNECTIONS_MAX, IsValid};
pub use grants::{CONTROLLER_TOKENS_MAX, Grants, Owner, TOKEN_TTL, TOKENS_MAX};
pub use service::{DeviceOf, Hooks, Service};
