//! Simulation: many seeds, and one seed on demand.
#![forbid(unsafe_code)]

use spindle_tests::seeds::kept_and_fresh;
use spindle_tests::sim::{self, Sweep};

/// Commands of one seed: long enough for queues to wrap many times, short enough for many seeds.
const COMMANDS: u64 = 2000;
/// Seeds of each of the two halves.
const SEEDS: u64 = 250;

/// What must have happened in each half: what did not was not tested.
const LEAST: [(&str, u64); 54] = [
    ("reads in place", 10_000),
    ("cache hits", 10_000),
    ("cache misses", 10_000),
    ("cache evictions", 1000),
    ("doomed fills", 2000),
    ("joined fills", 300),
    ("written pages", 300),
    ("changed caches", 50),
    ("pages read ahead", 200),
    ("optimistic reads", 100_000),
    ("rejected reads", 2000),
    ("optimistic reads of RAM disks", 10_000),
    ("rejected reads of RAM disks", 500),
    ("optimistic reads of several pages", 5000),
    ("references of Get References", 8000),
    ("references", 3000),
    ("frames changed under a read", 300),
    ("ended optimistic connections", 300),
    ("revoked hosts", 100),
    ("lost devices of optimistic reads", 100),
    ("denied attaches", 300),
    ("overlapping reads", 50_000),
    ("overlapping writes", 30_000),
    ("overlapping swaps", 1000),
    ("swapped", 3000),
    ("not swapped", 1500),
    ("compared equal", 1500),
    ("compared other", 1000),
    ("copied", 3000),
    ("flushed", 2000),
    ("durable", 5000),
    ("aborted", 30),
    ("failed", 3000),
    ("lost", 5000),
    ("cuts", 50),
    ("losses", 100),
    ("disconnects", 50),
    ("resets", 50),
    ("reloads", 50),
    ("resizes", 50),
    ("drains", 50),
    ("power cuts", 50),
    ("silences", 20),
    ("stalls", 15),
    ("stalled commands", 200),
    ("silenced commands", 100),
    ("errors", 300),
    ("delays", 1000),
    ("drops", 50),
    ("reorders", 1000),
    ("torn writes", 100),
    ("lost blocks", 100),
    ("judged blocks", 10_000),
    ("waits", 1000),
];

const SWEEP: Sweep = Sweep { run: sim::run, commands: COMMANDS, seeds: SEEDS, least: &LEAST };

#[test]
fn half_a_million_commands_of_even_seeds_keep_every_promise() {
    SWEEP.half(0);
}

#[test]
fn half_a_million_commands_of_odd_seeds_keep_every_promise() {
    SWEEP.half(1);
}

#[test]
fn kept_and_fresh_seeds_keep_every_promise() {
    SWEEP.seeds(kept_and_fresh("sim", "one_seed"));
}

/// `SPINDLE_SIM_SEED=n cargo nextest run -p spindle-tests one_seed` replays a failure; without it, seed 0.
/// With `SPINDLE_SIM_SEEDS=m` so many from there on.
#[test]
fn one_seed() {
    let seed = sim::number("SPINDLE_SIM_SEED").unwrap_or(0);
    eprintln!("{:#?}", sim::Swarm::draw(seed));
    SWEEP.seeds(seed..seed + sim::number("SPINDLE_SIM_SEEDS").unwrap_or(1));
}
