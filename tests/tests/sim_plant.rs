//! The judge of the simulator sees what it is for: disks that are wrong in one way each, and the complaint.
#![forbid(unsafe_code)]

use spindle_tests::sim::medium::Plant;
use spindle_tests::sim::{self, Happening, Swarm};

const COMMANDS: u64 = 2000;
/// Seeds within which a planted fault must be noticed.
const SEEDS: u64 = 12;

/// A small and busy target, the same but for the seed, on drives with this fault.
fn swarm(seed: u64, plant: Option<Plant>, happenings: &[Happening]) -> Swarm {
    Swarm {
        hosts: 2,
        namespaces: 1,
        block_bytes: 512,
        blocks: 40,
        blocks_max: 4,
        hot_permille: 500,
        slack_bytes: None,
        cache_bytes: None,
        is_volatile: true,
        slow_permille: 700,
        stuck_permille: 0,
        plant,
        chunk: 5000,
        wire_bytes: 200_000,
        faults: [u32::from(plant == Some(Plant::LateWrite)), 0, 0, 0],
        cuts_ppm: 0,
        leaves_permille: 0,
        kato_ms: 0,
        happenings: happenings.to_vec(),
        patience: 10_000,
        ..Swarm::draw(seed)
    }
}

/// The fault is noticed, with one of these complaints; without it the same seeds pass.
#[track_caller]
fn assert_noticed(plant: Plant, happenings: &[Happening], complaints: &[&str]) {
    assert_noticed_with(plant, happenings, complaints, |swarm| swarm);
}

/// The same where the target is changed in some way.
#[track_caller]
fn assert_noticed_with(
    plant: Plant,
    happenings: &[Happening],
    complaints: &[&str],
    change: impl Fn(Swarm) -> Swarm,
) {
    let swarm = |seed, plant| change(swarm(seed, plant, happenings));
    let mut noticed = 0;
    for seed in 0..SEEDS {
        let report = sim::try_run(&swarm(seed, None), COMMANDS);
        report.unwrap_or_else(|complaint| panic!("seed {seed} without a fault: {complaint}"));
        if let Err(complaint) = sim::try_run(&swarm(seed, Some(plant)), COMMANDS) {
            let is_known = complaints.iter().any(|part| complaint.contains(part));
            assert!(is_known, "seed {seed}: {plant:?} was noticed by another rule: {complaint}");
            noticed += 1;
        }
    }
    eprintln!("{plant:?}: noticed under {noticed} of {SEEDS} seeds");
    assert!(noticed > 0, "{plant:?} was noticed under none of {SEEDS} seeds");
}

/// What the judge says when no order explains what was seen.
const NO_ORDER: [&str; 7] = [
    "overwritten before",
    "written later",
    "at the same time",
    "when it held",
    "swapped for two values",
    "after it was swapped",
    "no command wrote it",
];

#[test]
fn a_flush_that_does_nothing_is_noticed() {
    assert_noticed(Plant::LostFlush, &[Happening::PowerCut], &["overwritten before", "when it held"]);
}

#[test]
fn a_write_with_fua_that_is_lost_is_noticed() {
    assert_noticed(Plant::LostFua, &[Happening::PowerCut], &["older than FUA"]);
}

#[test]
fn a_write_that_is_not_done_is_noticed() {
    let complaints = [NO_ORDER.as_slice(), &["was not seen"]].concat();
    assert_noticed(Plant::LostWrite, &[], &complaints);
}

#[test]
fn a_write_that_lands_after_its_end_is_noticed() {
    let complaints = [NO_ORDER.as_slice(), &["was not seen"]].concat();
    let few_blocks = |swarm| Swarm { blocks: 10, blocks_max: 2, ..swarm };
    assert_noticed_with(Plant::LateWrite, &[], &complaints, few_blocks);
}

#[test]
fn a_stale_read_is_noticed() {
    assert_noticed(Plant::StaleRead, &[], &NO_ORDER);
}

#[test]
fn another_block_is_noticed() {
    let complaints = [NO_ORDER.as_slice(), &["was not seen"]].concat();
    assert_noticed(Plant::WrongBlock, &[], &complaints);
}

#[test]
fn a_torn_block_is_noticed() {
    let complaints = [NO_ORDER.as_slice(), &["a torn block", "is torn", "was not seen"]].concat();
    assert_noticed(Plant::TornBlock, &[], &complaints);
}

#[test]
fn a_compare_and_write_that_is_not_one_step_is_noticed() {
    // Another write has to come between the two steps: few blocks.
    assert_noticed_with(Plant::SplitSwap, &[], &NO_ORDER, |swarm| Swarm {
        blocks: 8,
        blocks_max: 2,
        hot_permille: 900,
        ..swarm
    });
}

#[test]
fn requests_that_are_dropped_with_a_disk_that_is_removed_are_noticed() {
    // The disk says that nothing is in flight, so a reload closes it over its commands.
    let complaints = ["never answered", "not given back"];
    let impatient = |swarm| Swarm { patience: 500, ..swarm };
    assert_noticed_with(Plant::Uncounted, &[Happening::Reload], &complaints, impatient);
}

#[test]
fn a_completion_that_is_told_twice_is_noticed() {
    // No device can cause it: drivers give each command a name of its own and let go of it with its first
    // completion. The core stops where it can tell. The second end of one step of a Compare, a Copy or a
    // Verify looks like the end of the next step, which then has no data.
    let complaints = ["twice", "internal error", "no request in slot"];
    assert_noticed(Plant::Doubled, &[], &[NO_ORDER.as_slice(), &complaints].concat());
}

#[test]
fn writes_of_a_host_that_is_gone_are_noticed_when_they_land_after_its_reconnect() {
    // A disk whose `DiskChannel::cancel_owner` does nothing.
    let (leaves_permille, stuck_permille) = (5, 200);
    let busy = |swarm| Swarm { leaves_permille, stuck_permille, cuts_ppm: 500, ..swarm };
    assert_noticed_with(Plant::Unforgotten, &[], &NO_ORDER, busy);
}
