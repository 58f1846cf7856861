//! Benchmarks: what a target gives, and what the machine's sockets could give at most.
//!
//! [`run`] measures a target, with [`verify`] of what it stores. [`limit`] is the ceiling: the bare exchange
//! of the same bytes between two pinned cores; [`limit::delivery`] compares who sends the replies. [`disk`]
//! is what a disk gives without a network.

mod access;
pub mod disk;
pub mod limit;
mod random;
pub mod run;
mod verify;
mod zipf;

pub use access::Access;
