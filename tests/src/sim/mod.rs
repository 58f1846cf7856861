//! The seeded simulator: the shipped target cores and connections of both ends, NVMe/TCP or NVMe/RDMA, what
//! is between them, disks and time in one thread.
//!
//! ```text
//!   SimHost (queues, model) ── host::Conn ══ Wire (any split) ══ controller::Conn ── TargetCore ── disks
//!                         or: Link of the fabric ([`rdma`])  cores: messages in any interleaving
//! ```
//!
//! A seed draws everything ([`Swarm`]): cores, hosts, queues, queue sizes, buffers, block size, digests,
//! in-capsule size, kind of disk, faults, how wires split and stall, when hosts vanish. A model
//! ([`model::Model`]) knows for each block which contents are possible and judges every read; at the end
//! every buffer must be home. The same seed gives the same run.
//!
//! What it does not do: no sockets, no threads, no wall clock; the lab and the loopback tests have those.

pub mod carrier;
pub mod disk;
pub mod host;
pub mod model;
pub mod rdma;
pub mod rng;
pub mod wire;
pub mod world;

pub use carrier::Data;
pub use rng::Rng;
pub use wire::Wire;
pub use world::{Report, Swarm, World};

/// Run one seed for `commands` commands.
///
/// # Panics
/// When the target breaks a promise; the message names the seed and the command that replays it.
pub fn run(seed: u64, commands: u64) -> Report {
    let outcome = std::panic::catch_unwind(|| World::<Wire>::new(Swarm::draw(seed)).run(commands));
    outcome.unwrap_or_else(|panic| {
        eprintln!(
            "SEED={seed} failed; replay: SPINDLE_SIM_SEED={seed} cargo nextest run -p spindle-tests one_seed"
        );
        std::panic::resume_unwind(panic)
    })
}

/// The same over NVMe/RDMA.
///
/// # Panics
/// As [`run`].
pub fn run_rdma(seed: u64, commands: u64) -> Report {
    let outcome = std::panic::catch_unwind(|| World::<rdma::Wire>::new(rdma::draw(seed)).run(commands));
    outcome.unwrap_or_else(|panic| {
        eprintln!("SEED={seed} failed; replay: SPINDLE_SIM_SEED={seed} cargo nextest run one_rdma_seed");
        std::panic::resume_unwind(panic)
    })
}
