//! Simulation of caches on client hosts: many seeds, and one on demand.
#![forbid(unsafe_code)]

use spindle_tests::cluster::{self, Report};
use spindle_tests::seeds::kept_and_fresh;
use spindle_tests::sim;

/// Commands of one seed.
const COMMANDS: u64 = 700;
const SEEDS: u64 = 1500;

/// What must have happened: what did not was not tested.
const LEAST: [(&str, u64); 11] = [
    ("hits", 60_000),
    ("registered", 60_000),
    ("register refused", 30_000),
    ("doomed fills", 150_000),
    ("written pages that stayed", 300),
    ("cuts", 5000),
    ("restarts", 400),
    ("suspends", 3500),
    ("hung managers", 3500),
    ("hung cores", 7000),
    ("silent members", 1500),
];

fn seeds(seeds: impl Iterator<Item = u64>) -> Report {
    let mut total = Report::default();
    for seed in seeds {
        total.add(&cluster::run(seed, COMMANDS));
    }
    eprintln!("{total:#?}");
    total
}

#[test]
fn every_seed_of_the_cluster_keeps_its_caches_coherent() {
    let count = sim::number("SPINDLE_SIM_SEEDS").unwrap_or(SEEDS).max(1);
    let total = seeds(0..count);
    assert!(total.commands >= count * COMMANDS);
    if count >= SEEDS {
        total.counts.assert_least(&LEAST);
    }
}

#[test]
fn kept_and_fresh_seeds_of_the_cluster_keep_its_caches_coherent() {
    seeds(kept_and_fresh("sim_cluster", "one_seed_of_the_cluster"));
}

/// With SPINDLE_SIM_SEED: that seed.
#[test]
fn one_seed_of_the_cluster() {
    let seed = sim::number("SPINDLE_SIM_SEED").unwrap_or(0);
    let commands = sim::number("SPINDLE_SIM_COMMANDS").unwrap_or(COMMANDS);
    let first = cluster::run(seed, commands);
    assert_eq!(first, cluster::run(seed, commands), "a seed determines its run");
}
