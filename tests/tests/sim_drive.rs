//! Simulation of the user-space NVMe driver over its emulator: many seeds, and one seed on demand.
#![forbid(unsafe_code)]

use spindle_tests::drive::{self, Scenario};
use spindle_tests::seeds::kept_and_fresh;

/// Commands of one seed.
const COMMANDS: u64 = 1000;
const SEEDS: u64 = 150;

#[test]
fn every_seed_of_the_drive_keeps_every_promise() {
    let mut commands = 0;
    for seed in 0..SEEDS {
        eprintln!("seed {seed}");
        commands += drive::run(seed, COMMANDS).commands;
    }
    assert!(commands >= SEEDS * COMMANDS);
}

#[test]
fn kept_and_fresh_seeds_keep_every_promise() {
    for seed in kept_and_fresh("sim_drive", "one_seed_of_the_drive") {
        eprintln!("{:?}", drive::run(seed, COMMANDS));
    }
    for seed in kept_and_fresh("sim_drive_cached", "one_seed_of_the_cached_drive") {
        eprintln!("{:?}", drive::run_cached(seed, COMMANDS));
    }
}

#[test]
fn every_seed_of_the_drive_with_a_cache_keeps_every_promise() {
    let (mut hits, mut evictions) = (0, 0);
    for seed in 0..SEEDS / 2 {
        eprintln!("seed {seed}");
        let cache = drive::run_cached(seed, COMMANDS).cache;
        (hits, evictions) = (hits + cache.hits, evictions + cache.evictions);
    }
    assert!(hits > 1000 && evictions > 500, "{hits} hits, {evictions} evictions");
}

/// `SPINDLE_SIM_SEED=n cargo nextest run -p spindle-tests one_seed_of_the_cached_drive` replays a failure.
#[test]
fn one_seed_of_the_cached_drive() {
    let seed = std::env::var("SPINDLE_SIM_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    eprintln!("{:#?}", Scenario::draw(seed));
    eprintln!("{:?}", drive::run_cached(seed, COMMANDS));
}

/// `SPINDLE_SIM_SEED=n cargo nextest run -p spindle-tests one_seed_of_the_drive` replays a failure.
#[test]
fn one_seed_of_the_drive() {
    let seed = std::env::var("SPINDLE_SIM_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    eprintln!("{:#?}", Scenario::draw(seed));
    eprintln!("{:?}", drive::run(seed, COMMANDS));
}
