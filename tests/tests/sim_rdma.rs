//! Simulation over NVMe/RDMA: many seeds, and one seed on demand.
#![forbid(unsafe_code)]

use spindle_tests::sim::{self, Report};

/// Commands of one seed.
const COMMANDS: u64 = 1000;
/// Seeds of each of the two halves: together 400 thousand commands.
const SEEDS: u64 = 200;

fn seeds(seeds: impl Iterator<Item = u64>) -> Report {
    let mut total = Report::default();
    for seed in seeds {
        let report = sim::run_rdma(seed, COMMANDS);
        total.commands += report.commands;
        total.cuts += report.cuts;
        total.waits += report.waits;
        total.losses += report.losses;
    }
    eprintln!("{total:?}");
    total
}

#[track_caller]
fn assert_busy(total: &Report) {
    assert!(total.commands >= SEEDS * COMMANDS && total.cuts > SEEDS && total.waits > 1000, "{total:?}");
    assert!(total.losses > SEEDS, "{total:?}");
}

#[test]
fn two_hundred_thousand_commands_of_even_seeds_keep_every_promise() {
    assert_busy(&seeds((0..SEEDS).map(|n| n * 2)));
}

#[test]
fn two_hundred_thousand_commands_of_odd_seeds_keep_every_promise() {
    assert_busy(&seeds((0..SEEDS).map(|n| n * 2 + 1)));
}

/// `SPINDLE_SIM_SEED=n cargo nextest run -p spindle-tests one_rdma_seed` replays a failure; without it, seed
/// 0. With `SPINDLE_SIM_SEEDS=m` so many from there on.
#[test]
fn one_rdma_seed() {
    let number = |name: &str| std::env::var(name).ok().and_then(|number| number.parse().ok());
    let seed = number("SPINDLE_SIM_SEED").unwrap_or(0);
    eprintln!("{:#?}", sim::rdma::draw(seed));
    seeds(seed..seed + number("SPINDLE_SIM_SEEDS").unwrap_or(1));
}
