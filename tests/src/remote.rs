//! The remote disk over a simulated far target: cores and the manager's handle stepped by one thread in
//! simulated time ([`run`](mod@run)), a far target that loses links, restarts and is slow ([`far`]), and
//! what must hold ([`book`], and the judge of [`sim::history`](crate::sim::history)).
//!
//! | module | contents |
//! |---|---|
//! | [`scenario`] | what a seed draws |
//! | [`seam`] | association, queue and connecting queue, as a core sees them |
//! | [`far`] | commands on their way, at the far disk, and left over from lost queues |
//! | [`manager`] | what the manager thread does: up, down, hold, checked, over |
//! | [`cache`] | the far target's cache, and optimistic reads of it |
//! | [`book`] | each command of a host: when it was lost, when it was settled, what it may have done |
//! | [`run`](mod@run) | hosts, cores and faults |
//!
//! What must hold, at any seed: every command ends once and in time; one order explains what each block
//! held; what is newer than a lost write takes effect after it; nothing of a gone host reaches the far disk;
//! nothing reaches another disk under the same NSID; in the end everything is home and every block takes a
//! write at once. The same seed gives the same run.
//!
//! What it does not model: sizes and write protection that change, power cuts of the far target (a Flush is
//! only passed on).

pub mod book;
pub mod cache;
pub mod far;
pub mod manager;
pub mod run;
pub mod scenario;
pub mod seam;

pub use run::{Report, run, run_cached, run_optimistic};
pub use scenario::Scenario;
