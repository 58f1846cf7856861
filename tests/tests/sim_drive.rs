//! Simulation of the user-space NVMe driver over its emulator: many seeds, and one seed on demand.
#![forbid(unsafe_code)]

use spindle_tests::drive::{self, Plan};

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

/// `SPINDLE_SIM_SEED=n cargo nextest run -p spindle-tests one_seed_of_the_drive` replays a failure.
#[test]
fn one_seed_of_the_drive() {
    let seed = std::env::var("SPINDLE_SIM_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    eprintln!("{:#?}", Plan::draw(seed));
    eprintln!("{:?}", drive::run(seed, COMMANDS));
}
