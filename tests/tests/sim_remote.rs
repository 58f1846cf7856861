//! Simulation of the remote disk over a far target that fails in every way: many seeds, and one on demand.
#![forbid(unsafe_code)]

use spindle_tests::remote::{self, Plan, Report};
use spindle_tests::sim;

/// Commands of one seed.
const COMMANDS: u64 = 600;
const SEEDS: u64 = 200;

/// What must have happened: what did not was not tested.
const LEAST: [(&str, u64); 34] = [
    ("losses", 3000),
    ("lost writes", 1500),
    ("lost again", 60),
    ("replays", 1500),
    ("left over and executed", 1500),
    ("blocked reads", 1000),
    ("blocked writes", 3000),
    ("fences", 700),
    ("fenced writes", 700),
    ("waited out", 700),
    ("may land", 80),
    ("orphans", 200),
    ("late writes", 50),
    ("time-outs", 800),
    ("slow", 700),
    ("stalls", 600),
    ("cuts", 100),
    ("restarts", 120),
    ("moves", 200),
    ("holds", 200),
    ("hangs", 100),
    ("forgets", 1000),
    ("reopens", 250),
    ("bounces", 2500),
    ("pieces", 15_000),
    ("zeroes as data", 2000),
    ("must have FUA", 10_000),
    ("errors", 300),
    ("compared equal", 2000),
    ("compared other", 350),
    ("overlapping reads", 50_000),
    ("overlapping writes", 30_000),
    ("flushes", 1000),
    ("deallocated", 1000),
];

fn seeds(seeds: impl Iterator<Item = u64>) -> Report {
    let mut total = Report::default();
    for seed in seeds {
        total.add(&remote::run(seed, COMMANDS));
    }
    eprintln!("{total:#?}");
    total
}

#[test]
fn every_seed_of_the_remote_disk_keeps_every_promise() {
    let count = sim::number("SPINDLE_SIM_SEEDS").unwrap_or(SEEDS).max(1);
    let total = seeds(0..count);
    assert!(total.commands >= count * COMMANDS);
    if count >= SEEDS {
        total.counts.assert_least(&LEAST);
    }
}

/// `SPINDLE_SIM_SEED=n cargo nextest run one_seed_of_the_remote_disk` replays a failure; without it, seed 0.
/// With `SPINDLE_SIM_SEEDS=m` so many from there on.
#[test]
fn one_seed_of_the_remote_disk() {
    let seed = sim::number("SPINDLE_SIM_SEED").unwrap_or(0);
    eprintln!("{:#?}", Plan::draw(seed));
    seeds(seed..seed + sim::number("SPINDLE_SIM_SEEDS").unwrap_or(1));
}
