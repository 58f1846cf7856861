//! Features: current and default values, what can be changed, and how the others are refused.

use nvme_spec::feature::{FeatureId, FeatureSelect, SetFeaturesCdw10};
use nvme_spec::zerocopy::little_endian::U32;

use super::*;

const INVALID: Status = Status::INVALID_FIELD.dnr();
const ALL: u32 = 0xffff_ffff;

fn get(
    world: &World,
    controller: &mut Controller,
    fid: FeatureId,
    select: FeatureSelect,
) -> Result<u64, Refused> {
    get_with(world, controller, fid, select, 0, 0).map(|(value, _)| value)
}

fn get_with(
    world: &World,
    controller: &mut Controller,
    fid: FeatureId,
    select: FeatureSelect,
    nsid: u32,
    argument: u32,
) -> Result<(u64, Vec<u8>), Refused> {
    world.run(controller, &Sqe::get_features(1, fid, select, nsid, argument))
}

fn set(world: &World, controller: &mut Controller, fid: FeatureId, value: u32) -> Result<u64, Refused> {
    world.run(controller, &Sqe::set_features(1, fid, 0, value)).map(|(result, _)| result)
}

#[test]
fn queues_are_granted_up_to_the_subsystems_limit_as_often_as_asked() {
    let world = World::new();
    let mut controller = world.io();
    assert_eq!(
        get(&world, &mut controller, FeatureId::NUMBER_OF_QUEUES, FeatureSelect::CURRENT),
        Ok(0x0003_0003)
    );
    // A host that comes back with other counts: blktests nvme/048.
    let asked = [(0x0001_0001, 0x0001_0001), (0x003f_003f, 0x0003_0003), (0, 0), (0x0002_0000, 0x0002_0000)];
    for (value, granted) in asked {
        assert_eq!(set(&world, &mut controller, FeatureId::NUMBER_OF_QUEUES, value), Ok(granted));
        let current = get(&world, &mut controller, FeatureId::NUMBER_OF_QUEUES, FeatureSelect::CURRENT);
        assert_eq!(current, Ok(granted));
    }
    for value in [0xffff, 0xffff_0000, ALL] {
        let refused = set(&world, &mut controller, FeatureId::NUMBER_OF_QUEUES, value);
        assert_eq!(refused, Err((INVALID, Some(44))));
    }
    // Not while there are I/O queues.
    assert!(controller.shared.claim_queue(1));
    let refused = set(&world, &mut controller, FeatureId::NUMBER_OF_QUEUES, 0x0001_0001);
    assert_eq!(refused, Err((Status::COMMAND_SEQUENCE_ERROR.dnr(), None)));
    controller.shared.release_queue(1);
    assert_eq!(set(&world, &mut controller, FeatureId::NUMBER_OF_QUEUES, 0x0001_0001), Ok(0x0001_0001));
}

#[test]
fn keep_alive_is_set_in_steps_and_within_its_limit() {
    let world = World::new();
    let mut controller = world.io();
    let fid = FeatureId::KEEP_ALIVE_TIMER;
    assert_eq!(get(&world, &mut controller, fid, FeatureSelect::CURRENT), Ok(5000));
    assert_eq!(set(&world, &mut controller, fid, 9001), Ok(0));
    assert_eq!(get(&world, &mut controller, fid, FeatureSelect::CURRENT), Ok(10_000));
    assert_eq!(get(&world, &mut controller, fid, FeatureSelect::DEFAULT), Ok(5000));
    assert_eq!(controller.keep_alive.deadline, Some(world.now + Nanos::from_secs(10)));
    let refused = set(&world, &mut controller, fid, 60_001);
    assert_eq!(refused, Err((Status::KEEP_ALIVE_TIMEOUT_INVALID.dnr(), Some(44))));
    assert_eq!(set(&world, &mut controller, fid, 0), Ok(0));
    assert_eq!(controller.keep_alive.deadline, None);
    // A discovery host is never kept for nothing.
    let mut discovery = world.discovery(30_000);
    assert_eq!(set(&world, &mut discovery, fid, 0), Ok(0));
    assert_eq!(get(&world, &mut discovery, fid, FeatureSelect::CURRENT), Ok(120_000));
}

#[test]
fn events_that_are_not_offered_cannot_be_asked_for() {
    let world = World::new();
    let fid = FeatureId::ASYNC_EVENT_CONFIG;
    let mut controller = world.io();
    assert_eq!(get(&world, &mut controller, fid, FeatureSelect::CURRENT), Ok(1 << 8));
    assert_eq!(set(&world, &mut controller, fid, 0x11f), Ok(0));
    assert_eq!(get(&world, &mut controller, fid, FeatureSelect::CURRENT), Ok(0x11f));
    for bit in [9, 10, 11, 31] {
        assert_eq!(set(&world, &mut controller, fid, 1 << bit), Err((INVALID, Some(44))), "{bit}");
    }
    let mut discovery = world.discovery(0);
    assert_eq!(get(&world, &mut discovery, fid, FeatureSelect::CURRENT), Ok(1 << 31));
    assert_eq!(set(&world, &mut discovery, fid, 1 << 31), Ok(0));
    assert_eq!(set(&world, &mut discovery, fid, 1 << 8), Err((INVALID, Some(44))));
}

#[test]
fn the_write_cache_is_a_feature_where_there_is_one() {
    let mut world = World::new();
    let fid = FeatureId::VOLATILE_WRITE_CACHE;
    let mut controller = world.io();
    assert_eq!(get(&world, &mut controller, fid, FeatureSelect::CURRENT), Ok(1));
    assert_eq!(set(&world, &mut controller, fid, 0), Ok(0));
    assert_eq!(get(&world, &mut controller, fid, FeatureSelect::CURRENT), Ok(0));
    assert_eq!(controller.shared.feature_bits.load(Ordering::Relaxed) & 1, 0);
    world.set_cc(&mut controller, Cc::new()).unwrap();
    assert_eq!(controller.shared.feature_bits.load(Ordering::Relaxed) & 1, 1);
    *world.subsystem() = subsystem(SUBSYSTEM, AllowedHosts::Any, &[namespace(1, THIN_512)]);
    let mut controller = world.io();
    assert_eq!(get(&world, &mut controller, fid, FeatureSelect::CURRENT), Err((INVALID, Some(40))));
    assert_eq!(set(&world, &mut controller, fid, 1), Err((INVALID, Some(40))));
}

#[test]
fn temperature_thresholds_are_kept_for_over_and_under() {
    let world = World::new();
    let fid = FeatureId::TEMPERATURE_THRESHOLD;
    let mut controller = world.io();
    let read = |controller: &mut Controller, argument| {
        get_with(&world, controller, fid, FeatureSelect::CURRENT, 0, argument).map(|(value, _)| value)
    };
    assert_eq!((read(&mut controller, 0), read(&mut controller, 1 << 20)), (Ok(343), Ok(0)));
    assert_eq!(set(&world, &mut controller, fid, 350), Ok(0));
    assert_eq!(set(&world, &mut controller, fid, 1 << 20 | 0xf << 16 | 280), Ok(0));
    assert_eq!((read(&mut controller, 0), read(&mut controller, 1 << 20)), (Ok(350), Ok(280)));
    // Sensors 1 to 8 are not there; THSEL 2 is reserved.
    for argument in [1 << 16, 8 << 16, 2 << 20] {
        assert_eq!(read(&mut controller, argument), Err((INVALID, Some(44))));
        assert_eq!(set(&world, &mut controller, fid, argument | 300), Err((INVALID, Some(44))));
    }
}

#[test]
fn error_recovery_is_of_a_namespace() {
    let world = World::new();
    let fid = FeatureId::ERROR_RECOVERY;
    let mut controller = world.io();
    let mut write =
        |nsid, value| world.run(&mut controller, &Sqe::set_features(1, fid, nsid, value)).map(|_| ());
    assert_eq!(write(3, 50), Ok(()));
    let no_namespace = Err((Status::INVALID_NAMESPACE_OR_FORMAT.dnr(), Some(4)));
    assert_eq!((write(0, 1), write(2, 1)), (no_namespace, no_namespace));
    assert_eq!(write(1, 1 << 16), Err((INVALID, Some(44))), "DULBE");
    let read = |controller: &mut Controller, nsid| {
        get_with(&world, controller, fid, FeatureSelect::CURRENT, nsid, 0).map(|(value, _)| value)
    };
    assert_eq!(
        (read(&mut controller, 1), read(&mut controller, 3), read(&mut controller, ALL)),
        (Ok(0), Ok(50), Ok(0))
    );
    world.run(&mut controller, &Sqe::set_features(1, fid, ALL, 7)).unwrap();
    assert_eq!((read(&mut controller, 1), read(&mut controller, 3)), (Ok(7), Ok(7)));
    let default = get_with(&world, &mut controller, fid, FeatureSelect::DEFAULT, 3, 0);
    assert_eq!(default.unwrap().0, 0);
}

#[test]
fn the_timestamp_counts_on_from_what_the_host_set() {
    let mut world = World::new();
    let fid = FeatureId::TIMESTAMP;
    let mut controller = world.io();
    let read = |world: &World, controller: &mut Controller| {
        let (_, data) = get_with(world, controller, fid, FeatureSelect::CURRENT, 0, 0).unwrap();
        assert_eq!(data.len(), 8);
        (u64_at(&data, 0) & 0xffff_ffff_ffff, data[6])
    };
    world.now += Nanos::from_ms(5);
    assert_eq!(read(&world, &mut controller), (5, 0), "since the controller was made");
    let time = 1_800_000_000_000_u64.to_le_bytes();
    world.run_with(&mut controller, &Sqe::set_features(1, fid, 0, 0), &time).unwrap();
    world.now += Nanos::from_ms(40);
    assert_eq!(read(&world, &mut controller), (1_800_000_000_040, 0b10), "set by the host");
    let most = 0xffff_ffff_ffff_u64.to_le_bytes();
    world.run_with(&mut controller, &Sqe::set_features(1, fid, 0, 0), &most).unwrap();
    world.now += Nanos::from_ms(2);
    assert_eq!(read(&world, &mut controller).0, 1);
}

#[test]
fn host_behavior_takes_advanced_retry_only() {
    let world = World::new();
    let fid = FeatureId::HOST_BEHAVIOR;
    let mut controller = world.io();
    let sqe = Sqe::set_features(1, fid, 0, 0);
    world.run_with(&mut controller, &sqe, &[1]).unwrap();
    let (_, data) = get_with(&world, &mut controller, fid, FeatureSelect::CURRENT, 0, 0).unwrap();
    assert_eq!((data.len(), data[0]), (512, 1));
    for data in [&[2][..], &[0, 1], &[0, 0, 1], &[0, 0, 0, 1], &[0, 0, 0, 0, 1]] {
        assert_eq!(world.run_with(&mut controller, &sqe, data), Err((INVALID, None)));
    }
    let (_, data) = get_with(&world, &mut controller, fid, FeatureSelect::DEFAULT, 0, 0).unwrap();
    assert_eq!(data[0], 0);
}

#[test]
fn the_host_identifier_is_that_of_connect_and_stays() {
    let world = World::new();
    let fid = FeatureId::HOST_IDENTIFIER;
    let mut controller = world.io();
    let (_, data) = get_with(&world, &mut controller, fid, FeatureSelect::CURRENT, 0, 1).unwrap();
    assert_eq!(data, HOST_ID);
    let short = get(&world, &mut controller, fid, FeatureSelect::CURRENT);
    assert_eq!(short, Err((Status::HOST_ID_INCONSISTENT_FORMAT.dnr(), Some(44))));
    let refused = set(&world, &mut controller, fid, 1);
    assert_eq!(refused, Err((Status::COMMAND_SEQUENCE_ERROR.dnr(), Some(40))));
}

#[test]
fn small_features_are_kept_and_reset_with_the_controller() {
    let world = World::new();
    let mut controller = world.io();
    let values = [
        (FeatureId::ARBITRATION, 6, 0x0102_0307),
        (FeatureId::POWER_MANAGEMENT, 0, 0x40),
        (FeatureId::WRITE_ATOMICITY, 0, 1),
        (FeatureId::IO_COMMAND_SET_PROFILE, 0, 0),
    ];
    for (fid, default, value) in values {
        assert_eq!(get(&world, &mut controller, fid, FeatureSelect::CURRENT), Ok(default));
        assert_eq!(set(&world, &mut controller, fid, value), Ok(0));
        assert_eq!(get(&world, &mut controller, fid, FeatureSelect::CURRENT), Ok(u64::from(value)));
        assert_eq!(get(&world, &mut controller, fid, FeatureSelect::DEFAULT), Ok(default));
        assert_eq!(get(&world, &mut controller, fid, FeatureSelect::SAVED), Ok(default));
    }
    world.set_cc(&mut controller, Cc::new()).unwrap();
    world.set_cc(&mut controller, enabled()).unwrap();
    for (fid, default, _) in values {
        assert_eq!(get(&world, &mut controller, fid, FeatureSelect::CURRENT), Ok(default));
    }
}

#[test]
fn values_that_a_feature_cannot_have_are_refused() {
    let world = World::new();
    let mut controller = world.io();
    let bad = [
        (FeatureId::ARBITRATION, 1 << 3),
        (FeatureId::POWER_MANAGEMENT, 1),
        (FeatureId::POWER_MANAGEMENT, 1 << 8),
        (FeatureId::WRITE_ATOMICITY, 2),
        (FeatureId::VOLATILE_WRITE_CACHE, 2),
        (FeatureId::TEMPERATURE_THRESHOLD, 1 << 31),
    ];
    for (fid, value) in bad {
        assert_eq!(set(&world, &mut controller, fid, value), Err((INVALID, Some(44))), "{fid} = {value:#x}");
    }
    let refused = set(&world, &mut controller, FeatureId::IO_COMMAND_SET_PROFILE, 1);
    assert_eq!(refused, Err((Status::IO_COMMAND_SET_COMBINATION_REJECTED.dnr(), Some(44))));
}

#[test]
fn capabilities_say_what_is_changeable_and_of_a_namespace_and_nothing_is_saveable() {
    let world = World::new();
    let mut controller = world.io();
    let mut capabilities = |fid| get(&world, &mut controller, fid, FeatureSelect::SUPPORTED);
    assert_eq!(capabilities(FeatureId::NUMBER_OF_QUEUES), Ok(0b100));
    assert_eq!(capabilities(FeatureId::ERROR_RECOVERY), Ok(0b110));
    assert_eq!(capabilities(FeatureId::HOST_IDENTIFIER), Ok(0));
    // No data goes with it.
    assert_eq!(capabilities(FeatureId::HOST_BEHAVIOR), Ok(0b100));
    let mut sqe = Sqe::set_features(1, FeatureId::NUMBER_OF_QUEUES, 0, 0);
    sqe.cdw10 = SetFeaturesCdw10::new().with_fid(7).with_sv(true).into();
    assert_eq!(world.run(&mut controller, &sqe), Err((Status::FEATURE_NOT_SAVEABLE.dnr(), Some(40))));
    for select in 4..8 {
        let refused = get(&world, &mut controller, FeatureId::NUMBER_OF_QUEUES, FeatureSelect(select));
        assert_eq!(refused, Err((INVALID, Some(40))));
    }
}

#[test]
fn a_feature_of_the_controller_is_not_set_for_a_namespace() {
    let world = World::new();
    let mut controller = world.io();
    let set = |nsid| Sqe::set_features(1, FeatureId::NUMBER_OF_QUEUES, nsid, 0);
    let refused = world.run(&mut controller, &set(1));
    assert_eq!(refused, Err((Status::FEATURE_NOT_NAMESPACE_SPECIFIC.dnr(), Some(4))));
    assert!(world.run(&mut controller, &set(ALL)).is_ok());
}

#[test]
fn features_that_are_not_there_are_an_invalid_field() {
    let world = World::new();
    let io = [1, 2, 4, 5, 6, 7, 0x0a, 0x0b, 0x0e, 0x0f, 0x16, 0x19, 0x81];
    for (mut controller, known) in [(world.io(), &io[..]), (world.discovery(0), &[0x0b, 0x0f])] {
        for fid in (0..=u8::MAX).filter(|fid| !known.contains(fid)) {
            for select in 0..4 {
                let refused = get(&world, &mut controller, FeatureId(fid), FeatureSelect(select));
                assert_eq!(refused, Err((INVALID, Some(40))), "{fid:#x}");
            }
            assert_eq!(set(&world, &mut controller, FeatureId(fid), 0), Err((INVALID, Some(40))), "{fid:#x}");
        }
    }
}

#[test]
fn values_that_do_not_fit_are_not_cut() {
    let world = World::new();
    let mut controller = world.io();
    let mut sqe = Sqe::set_features(1, FeatureId::KEEP_ALIVE_TIMER, 0, 0);
    sqe.cdw11 = U32::new(u32::MAX);
    assert_eq!(world.run(&mut controller, &sqe).unwrap_err().0, Status::KEEP_ALIVE_TIMEOUT_INVALID.dnr());
}
