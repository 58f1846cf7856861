//! Simulation over NVMe/RDMA: many seeds, and one seed on demand.
#![forbid(unsafe_code)]

use spindle_tests::seeds::kept_and_fresh;
use spindle_tests::sim::{self, Sweep};

/// Commands of one seed.
const COMMANDS: u64 = 1000;
/// Seeds of each of the two halves: together 400 thousand commands.
const SEEDS: u64 = 200;

/// What must have happened in each half: what did not was not tested.
const LEAST: [(&str, u64); 39] = [
    ("reads in place", 2000),
    ("cache hits", 5000),
    ("cache misses", 7000),
    ("cache evictions", 1000),
    ("doomed fills", 2000),
    ("joined fills", 200),
    ("written pages", 3000),
    ("changed caches", 20),
    ("pages read ahead", 500),
    ("optimistic reads", 30_000),
    ("rejected reads", 5000),
    ("optimistic reads of RAM disks", 8000),
    ("rejected reads of RAM disks", 1500),
    ("optimistic reads of several pages", 3000),
    ("references of Get References", 8000),
    ("references", 10_000),
    ("frames changed under a read", 1000),
    ("ended optimistic connections", 400),
    ("revoked hosts", 40),
    ("lost devices of optimistic reads", 40),
    ("denied attaches", 150),
    ("stalls", 2),
    ("stalled commands", 60),
    ("overlapping reads", 10_000),
    ("overlapping writes", 5000),
    ("overlapping swaps", 200),
    ("swapped", 500),
    ("copied", 500),
    ("flushed", 500),
    ("lost", 2000),
    ("cuts", 5),
    ("losses", 200),
    ("disconnects", 20),
    ("reloads", 10),
    ("resizes", 10),
    ("drains", 10),
    ("power cuts", 10),
    ("silences", 3),
    ("waits", 1000),
];

const SWEEP: Sweep = Sweep { run: sim::run_rdma, commands: COMMANDS, seeds: SEEDS, least: &LEAST };

#[test]
fn two_hundred_thousand_commands_of_even_seeds_keep_every_promise() {
    SWEEP.half(0);
}

#[test]
fn two_hundred_thousand_commands_of_odd_seeds_keep_every_promise() {
    SWEEP.half(1);
}

#[test]
fn kept_and_fresh_seeds_keep_every_promise() {
    SWEEP.seeds(kept_and_fresh("sim_rdma", "one_rdma_seed"));
}

/// `SPINDLE_SIM_SEED=n cargo nextest run -p spindle-tests one_rdma_seed` replays a failure; without it, seed
/// 0. With `SPINDLE_SIM_SEEDS=m` so many from there on.
#[test]
fn one_rdma_seed() {
    let seed = sim::number("SPINDLE_SIM_SEED").unwrap_or(0);
    eprintln!("{:#?}", sim::rdma::draw(seed));
    SWEEP.seeds(seed..seed + sim::number("SPINDLE_SIM_SEEDS").unwrap_or(1));
}
