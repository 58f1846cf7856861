//! NVMe over RDMA without verbs for both ends, and the shell that joins the controller's end to verbs.
//!
//! ```text
//!   shell / link:  completions ──> Conn::received, Conn::completed ──> next_event
//!                  next_work   ──> work requests, one doorbell a turn
//! ```
#![forbid(unsafe_code)]

pub mod host;
pub mod registration;
pub mod work;
