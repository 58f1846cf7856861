//! The user-space NVMe driver over the emulated drive: manager, cores and controller stepped by one thread in
//! virtual time ([`world`]), random work and faults of a seed ([`run`](mod@run)), and what must hold
//! ([`model`]).
//!
//! What must hold, at any seed: every command ends once; reads see what the model allows; nothing that was
//! flushed is lost with the power, and no flush hides a loss; no buffer comes back that the drive may still
//! access; the drive is never made to access what is not mapped; in the end everything is home, unmapped and
//! closed. The same seed gives the same run.

#[cfg(feature = "simulator")]
pub mod model;
#[cfg(feature = "simulator")]
pub mod run;
#[cfg(feature = "simulator")]
pub mod scenario;
pub mod threads;
pub mod world;

#[cfg(feature = "simulator")]
pub use run::{Report, run, run_cached};
#[cfg(feature = "simulator")]
pub use scenario::Scenario;
