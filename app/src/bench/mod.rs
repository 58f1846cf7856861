//! Benchmarks: what a target gives, and what the machine's sockets could give at most.
//!
//! [`limit`] is the ceiling: the bare exchange of the same bytes between two pinned cores.

mod access;
pub mod limit;

pub use access::Access;
