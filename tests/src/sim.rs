//! The seeded simulator: the shipped target cores and connections of both ends, NVMe/TCP or NVMe/RDMA, what
//! is between them, disks and time in one thread.
//!
//! ```text
//!   SimHost (queues, model) ── host::Conn ══ Wire (any split) ══ controller::Conn ── TargetCore ── disks
//!                         or: Link of the fabric ([`rdma`])  cores: messages in any interleaving
//! ```
//!
//! A seed draws everything ([`Swarm`]): cores, hosts, queues, queue sizes, namespaces, buffers, block size,
//! digests, in-capsule size, kind of disk, faults, how wires split and stall, when hosts vanish, disconnect,
//! reset or fall silent, reloads, resizes, shutdowns, power cuts. Commands of all queues, hosts and cores
//! overlap as they like; a judge ([`history`]) knows for each block what was done to it and when, and whether
//! one order of it all explains what was seen. Every command is answered in the end, and at the end every
//! buffer must be home. The same seed gives the same run. [`medium::Plant`] has disks that are wrong, to show
//! that the judge sees it.
//!
//! What it does not do: no sockets, no threads, no wall clock; the lab and the loopback tests have those.
//!
//! | file | what |
//! |---|---|
//! | `swarm`, `counts` | what is drawn; what happened |
//! | `world`, `happen` | the target and its hosts; what happens to them besides commands |
//! | `host`, `issue`, `answer` | a queue, its commands, what their answers mean |
//! | `history`, `model`, `place` | the judge; what blocks hold; a namespace |
//! | `optimistic` | reads of a cache or RAM disk without the target |
//! | `medium`, `disk` | a drive in small; memory behind the pool's buffers |
//! | `carrier`, `wire`, `rdma` | what is between hosts and target |

mod answer;
pub mod carrier;
pub mod counts;
pub mod disk;
mod happen;
pub mod history;
pub mod host;
mod issue;
pub mod medium;
pub mod model;
pub mod optimistic;
pub mod place;
pub mod rdma;
pub mod rng;
pub mod swarm;
pub mod wire;
pub mod world;

pub use rng::Rng;
pub use swarm::{Happening, Swarm};
pub use wire::Wire;
pub use world::{Report, World};

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

/// Many seeds of one kind of simulation.
#[derive(Debug, Clone, Copy)]
pub struct Sweep {
    /// Runs a seed for so many commands.
    pub run: fn(u64, u64) -> Report,
    /// Commands of one seed.
    pub commands: u64,
    /// Seeds of each of two halves, so that two cores are busy.
    pub seeds: u64,
    /// What must have happened in each half: what did not was not tested.
    pub least: &'static [(&'static str, u64)],
}

impl Sweep {
    /// Run these seeds, and print what happened in all of them.
    ///
    /// # Panics
    /// As [`run`].
    pub fn seeds(&self, seeds: impl Iterator<Item = u64>) -> Report {
        let mut total = Report::default();
        for seed in seeds {
            total.add(&(self.run)(seed, self.commands));
        }
        eprintln!("{total:?}");
        total
    }

    /// Every second seed from `first` on. `SPINDLE_SIM_SEEDS` says how many: see docs/testing.md.
    ///
    /// # Panics
    /// As [`run`], and when too little has happened.
    #[track_caller]
    pub fn half(&self, first: u64) {
        let count = number("SPINDLE_SIM_SEEDS").unwrap_or(self.seeds).max(1);
        let total = self.seeds((0..count).map(|n| n * 2 + first));
        assert!(total.commands >= count * self.commands, "{total:?}");
        if count >= self.seeds {
            total.counts.assert_least(self.least);
        }
    }
}

/// A number in the environment, if there is one.
#[must_use]
pub fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|number| number.parse().ok())
}

/// The same of any draw.
///
/// # Errors
/// Which promise was broken.
pub fn try_run(swarm: &Swarm, commands: u64) -> Result<Report, String> {
    let swarm = swarm.clone();
    let outcome = std::panic::catch_unwind(|| World::<Wire>::new(swarm).run(commands));
    outcome.map_err(|panic| match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => panic.downcast_ref::<&str>().map_or_else(String::new, |text| (*text).to_owned()),
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
