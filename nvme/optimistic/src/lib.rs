//! Optimistic reads: a client reads pages of a target's cache or RAM disk by RDMA READ, without the target's
//! CPU. `docs/extensions.md` specifies the protocol; its bytes are in `nvme_spec::optimistic`.
//!
//! | module | content |
//! |---|---|
//! | [`service`] | the target's end: tokens, connections, and the memory that clients read |
//! | [`client`] | the host's end: what a queue knows of pages, the connection, what is accepted |
//!
//! Neither end knows queues or disks: a queue pair of the initiator has one [`client::Attached`], the target
//! issues tokens by [`service::Grants`].
#![forbid(unsafe_code)]

pub mod client;
pub mod service;
