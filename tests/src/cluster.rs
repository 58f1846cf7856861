//! Coherent caches in simulated time: the shipped cluster layer of a target with two cores, and three to six
//! agents, each with the shipped cache, remote disk and session. Messages take time, associations are lost,
//! agents and cores pause, clocks run at other rates, the target restarts. Every read is judged
//! (`history.rs`).
//!
//! Not the shipped code here: the NVMe commands between both, which `target/tests/requests/cluster.rs` and
//! the loopback tests have.

mod agent;
mod disk;
mod history;
mod link;
mod run;
mod wire;
mod world;

pub use run::{Report, run};
