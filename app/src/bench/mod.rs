//! Benchmarks: what a target gives, and what the machine's sockets could give at most.
//!
//! [`run`] measures a target, with [`verify`] of what it stores. [`limit`] is the ceiling: the bare exchange
//! of the same bytes between two pinned cores.

mod access;
pub mod limit;
pub mod run;
mod verify;

pub use access::Access;
