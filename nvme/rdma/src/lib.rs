//! NVMe over RDMA: the protocol of both ends without verbs, and the shell of the controller's end.
//!
//! ```text
//!   shell / link:  completions ──> Conn::received, Conn::completed ──> next_event
//!                  next_work   ──> work requests, one doorbell for each pump
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`work`] | work requests and completions, for both ends |
//! | [`controller`] | the target's end: capsules, keyed SGLs, RDMA READ within credits, WRITE and SEND |
//! | [`shell`] | one core's devices, queue pairs and connection manager, connected to the target's core |
//! | [`host`] | the initiator's end |
//! | [`registration`] | the initiator's pin-down cache, and the protection domain of each far target |
//!
//! Not supported: authentication, and more than one queue pair per connection.
#![forbid(unsafe_code)]

pub mod controller;
pub mod host;
pub mod registration;
pub mod shell;
pub mod work;
