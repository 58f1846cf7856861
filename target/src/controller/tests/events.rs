//! Asynchronous events, keep alive, snapshots.

use nvme_spec::feature::{AsyncEventConfig, FeatureId};
use nvme_spec::log::{CriticalWarning, LogId};

use super::*;
use crate::controller::{ControllerState, Expired};

const NAMESPACE_CHANGED: u32 = 0x0004_0002;
const DISCOVERY_CHANGED: u32 = 0x0070_f002;

fn hold(world: &World, controller: &mut Controller, count: u8) {
    for _ in 0..count {
        let outcome = controller.execute(&world.cx(), &Sqe::async_event_request(1), &mut []);
        assert_eq!(outcome, Outcome::ParkAsyncEvent);
    }
}

/// Change the first subsystem in a copy of the world.
fn changed(change: impl FnOnce(&mut Subsystem)) -> World {
    let mut world = World::new();
    world.snapshot.generation += 1;
    // The same disks as in the old world.
    change(world.subsystem());
    world
}

fn read_changed(world: &World, controller: &mut Controller, rae: bool) -> Vec<u32> {
    let sqe = Sqe::get_log_page(1, LogId::CHANGED_NAMESPACES, 0xffff_ffff, 4096, 0, rae);
    let (_, data) = world.run(controller, &sqe).unwrap();
    data.chunks(4).map(|entry| u32_at(entry, 0)).take_while(|nsid| *nsid != 0).collect()
}

#[test]
fn the_fifth_request_is_over_the_limit() {
    let world = World::new();
    let mut controller = world.io();
    hold(&world, &mut controller, 4);
    let refused = world.run(&mut controller, &Sqe::async_event_request(5));
    assert_eq!(refused, Err((Status::ASYNC_EVENT_LIMIT_EXCEEDED.dnr(), Some(0))));
    controller.async_event_aborted();
    hold(&world, &mut controller, 1);
    assert_eq!(controller.events.parked_aers, 4);
}

#[test]
fn an_added_a_removed_and_a_resized_namespace_are_listed_and_told() {
    let old = World::new();
    let mut controller = old.io();
    hold(&old, &mut controller, 1);
    let new = changed(|subsystem| {
        let mut grown = THICK_4096;
        grown.block_count += 1;
        *subsystem =
            super::subsystem(SUBSYSTEM, AllowedHosts::Any, &[namespace(2, THIN_512), namespace(3, grown)]);
    });
    assert_eq!(controller.on_snapshot(&old.snapshot, &new.snapshot), Effect::None);
    assert_eq!(controller.take_async_event(), Some(NAMESPACE_CHANGED));
    assert_eq!(read_changed(&new, &mut controller, true), [1, 2, 3]);
    assert_eq!(read_changed(&new, &mut controller, false), [1, 2, 3]);
    assert_eq!(read_changed(&new, &mut controller, false), []);
}

#[test]
fn the_next_notice_waits_until_the_list_was_read_without_rae() {
    let old = World::new();
    let mut controller = old.io();
    hold(&old, &mut controller, 4);
    let new = changed(|subsystem| subsystem.namespaces[0] = None);
    controller.on_snapshot(&old.snapshot, &new.snapshot);
    assert!(controller.take_async_event().is_some());
    controller.on_snapshot(&new.snapshot, &old.snapshot);
    assert_eq!(controller.take_async_event(), None);
    read_changed(&old, &mut controller, true);
    controller.on_snapshot(&old.snapshot, &new.snapshot);
    assert_eq!(controller.take_async_event(), None);
    assert_eq!(read_changed(&new, &mut controller, false), [1]);
    controller.on_snapshot(&new.snapshot, &old.snapshot);
    assert_eq!(controller.take_async_event(), Some(NAMESPACE_CHANGED));
}

#[test]
fn a_snapshot_that_changes_other_things_is_not_told() {
    let old = World::new();
    let mut controller = old.io();
    hold(&old, &mut controller, 1);
    let new = changed(|subsystem| subsystem.hosts = AllowedHosts::Only(vec![nqn(HOST)]));
    assert_eq!(controller.on_snapshot(&old.snapshot, &new.snapshot), Effect::None);
    assert_eq!(controller.take_async_event(), None);
}

#[test]
fn a_masked_notice_is_not_told() {
    let old = World::new();
    let mut controller = old.io();
    hold(&old, &mut controller, 1);
    let sqe = Sqe::set_features(1, FeatureId::ASYNC_EVENT_CONFIG, 0, 0);
    old.run(&mut controller, &sqe).unwrap();
    let new = changed(|subsystem| subsystem.namespaces[0] = None);
    controller.on_snapshot(&old.snapshot, &new.snapshot);
    assert_eq!(controller.take_async_event(), None);
    // The list is kept all the same.
    assert_eq!(read_changed(&new, &mut controller, false), [1]);
}

#[test]
fn a_host_that_loses_its_subsystem_or_its_right_loses_its_controller() {
    let old = World::new();
    let mut gone = World::new();
    gone.snapshot.subsystems.remove(0);
    let forbidden = changed(|subsystem| subsystem.hosts = AllowedHosts::Only(vec![nqn(OTHER_HOST)]));
    for new in [gone, forbidden] {
        let mut controller = old.io();
        assert_eq!(controller.on_snapshot(&old.snapshot, &new.snapshot), Effect::CloseAll);
        assert!(controller.shared.is_gone() && controller.state == ControllerState::Failed);
        assert!(controller.need(&new.cx(), &Sqe::keep_alive(1)).is_err());
    }
}

#[test]
fn a_reset_forgets_requests_and_events() {
    let old = World::new();
    let mut controller = old.io();
    hold(&old, &mut controller, 4);
    let new = changed(|subsystem| subsystem.namespaces[0] = None);
    controller.on_snapshot(&old.snapshot, &new.snapshot);
    new.set_cc(&mut controller, enabled().with_en(false)).unwrap();
    assert_eq!((controller.take_async_event(), controller.events.parked_aers), (None, 0));
    new.set_cc(&mut controller, enabled()).unwrap();
    hold(&new, &mut controller, 4);
    assert_eq!(controller.take_async_event(), None);
    assert_eq!(read_changed(&new, &mut controller, false), []);
}

#[test]
fn a_discovery_host_is_told_of_what_it_can_see_only() {
    let old = World::new();
    let mut controller = old.discovery(30_000);
    hold(&old, &mut controller, 2);
    // Another host's subsystem, or a resize: not this host's log.
    let mut new = changed(|subsystem| subsystem.namespaces[0] = None);
    new.snapshot.subsystems.remove(1);
    controller.on_snapshot(&old.snapshot, &new.snapshot);
    assert_eq!(controller.take_async_event(), None);
    let mut fewer = World::new();
    fewer.snapshot.subsystems.remove(0);
    assert_eq!(controller.on_snapshot(&old.snapshot, &fewer.snapshot), Effect::None);
    assert_eq!(controller.take_async_event(), Some(DISCOVERY_CHANGED));
    controller.on_snapshot(&fewer.snapshot, &old.snapshot);
    assert_eq!(controller.take_async_event(), None);
    let sqe = Sqe::get_log_page(1, LogId::DISCOVERY, 0, 1024, 0, false);
    old.run(&mut controller, &sqe).unwrap();
    let mut moved = World::new();
    moved.snapshot.referrals.clear();
    controller.on_snapshot(&old.snapshot, &moved.snapshot);
    assert_eq!(controller.take_async_event(), Some(DISCOVERY_CHANGED));
}

/// A world whose first namespace lies on a drive, and the drive.
fn with_drive() -> (World, Arc<Shape>) {
    let mut world = World::new();
    let drive = Arc::new(Shape::new(THIN_512));
    drive.warn(CriticalWarning::new(), 310);
    let namespaces = [namespace_of(1, THIN_512, Arc::clone(&drive)), namespace(3, THICK_4096)];
    *world.subsystem() = super::subsystem(SUBSYSTEM, AllowedHosts::Any, &namespaces);
    (world, drive)
}

fn let_warnings_through(world: &World, controller: &mut Controller, warnings: u8) {
    let config = AsyncEventConfig::new().with_critical_warnings(warnings).into_bits();
    world.run(controller, &Sqe::set_features(1, FeatureId::ASYNC_EVENT_CONFIG, 0, config)).unwrap();
}

fn read_smart(world: &World, controller: &mut Controller) -> u8 {
    let sqe = Sqe::get_log_page(1, LogId::SMART, 0xffff_ffff, 512, 0, false);
    world.run(controller, &sqe).unwrap().1[0]
}

#[test]
fn a_warning_of_a_drive_is_told_once_until_it_comes_again() {
    let (mut world, drive) = with_drive();
    let mut controller = world.io();
    hold(&world, &mut controller, 4);
    let_warnings_through(&world, &mut controller, 0xff);
    let look = |world: &mut World, controller: &mut Controller| {
        world.now += Nanos::from_secs(1);
        controller.check_health(&world.cx());
        controller.take_async_event()
    };
    assert_eq!(look(&mut world, &mut controller), None);
    drive.warn(CriticalWarning::new().with_spare(true), 310);
    controller.check_health(&world.cx());
    assert_eq!(controller.take_async_event(), None, "not more often than the period");
    assert_eq!(look(&mut world, &mut controller), Some(0x0002_0201));
    assert_eq!(read_smart(&world, &mut controller), 1);
    assert_eq!(look(&mut world, &mut controller), None, "the host knows");
    drive.warn(CriticalWarning::new().with_spare(true).with_read_only(true), 310);
    assert_eq!(look(&mut world, &mut controller), Some(0x0002_0001));
    assert_eq!(read_smart(&world, &mut controller), 9);
    drive.warn(CriticalWarning::new(), 310);
    assert_eq!(look(&mut world, &mut controller), None);
    drive.warn(CriticalWarning::new().with_spare(true), 310);
    assert_eq!(look(&mut world, &mut controller), Some(0x0002_0201), "again");
}

#[test]
fn a_present_warning_is_reported_once_the_host_enables_it_and_a_masked_one_is_not() {
    let (world, drive) = with_drive();
    let mut controller = world.io();
    hold(&world, &mut controller, 1);
    drive.warn(CriticalWarning::new().with_reliability(true), 310);
    let_warnings_through(&world, &mut controller, 0b11);
    assert_eq!(controller.take_async_event(), None);
    let_warnings_through(&world, &mut controller, 0b111);
    assert_eq!(controller.take_async_event(), Some(0x0002_0001));
}

#[test]
fn a_drive_that_passes_the_hosts_threshold_is_told() {
    let (mut world, drive) = with_drive();
    let mut controller = world.io();
    hold(&world, &mut controller, 1);
    let_warnings_through(&world, &mut controller, 2);
    let threshold = Sqe::set_features(1, FeatureId::TEMPERATURE_THRESHOLD, 0, 330);
    world.run(&mut controller, &threshold).unwrap();
    assert_eq!(controller.take_async_event(), None);
    drive.warn(CriticalWarning::new(), 330);
    world.now += Nanos::from_secs(1);
    controller.check_health(&world.cx());
    assert_eq!(controller.take_async_event(), Some(0x0002_0101));
    assert_eq!(read_smart(&world, &mut controller), 2);
}

#[test]
fn a_temperature_beyond_the_hosts_threshold_is_told_where_it_was_asked_for() {
    let world = World::new();
    let mut controller = world.io();
    hold(&world, &mut controller, 1);
    let threshold = Sqe::set_features(1, FeatureId::TEMPERATURE_THRESHOLD, 0, 290);
    world.run(&mut controller, &threshold).unwrap();
    assert_eq!(controller.take_async_event(), None);
    let config = AsyncEventConfig::new().with_critical_warnings(2).into_bits();
    world.run(&mut controller, &Sqe::set_features(1, FeatureId::ASYNC_EVENT_CONFIG, 0, config)).unwrap();
    assert_eq!(controller.take_async_event(), Some(0x0002_0101));
    let sqe = Sqe::get_log_page(1, LogId::SMART, 0xffff_ffff, 512, 0, false);
    let (_, log) = world.run(&mut controller, &sqe).unwrap();
    assert_eq!(log[0], 2);
}

#[test]
fn a_silent_host_expires_after_its_timeout_and_any_command_is_a_sign_of_life() {
    let mut world = World::new();
    let mut controller = world.io();
    let start = world.now;
    let at = |ms| start + Nanos::from_ms(ms);
    assert_eq!(controller.keep_alive.deadline, Some(at(5000)));
    let _ = controller.shared.take_traffic();
    // A command on an I/O queue, on whatever core.
    controller.shared.note_traffic();
    assert_eq!(tick(&mut controller, at(5000)), None);
    // Keep Alive itself.
    world.run(&mut controller, &Sqe::keep_alive(1)).unwrap();
    assert_eq!(tick(&mut controller, at(10_000)), None);
    assert_eq!(tick(&mut controller, at(14_999)), None);
    assert_eq!(tick(&mut controller, at(15_000)), Some(Expired::KeepAlive { timeout_ms: 5000 }));
    assert_eq!((tick(&mut controller, at(99_000)), controller.keep_alive.deadline), (None, None));
    world.now = at(99_000);
    assert_eq!(
        world.run(&mut controller, &Sqe::keep_alive(1)).unwrap_err().0,
        Status::COMMAND_SEQUENCE_ERROR.dnr()
    );
}

#[test]
fn keep_alive_stops_with_a_shutdown_but_the_association_ends_in_the_end() {
    let world = World::new();
    let mut controller = world.io();
    world.set_cc(&mut controller, enabled().with_shn(1)).unwrap();
    assert_eq!(tick(&mut controller, world.now + Nanos::from_secs(119)), None);
    assert_eq!(tick(&mut controller, world.now + Nanos::from_secs(120)), Some(Expired::NeverEnabled));
}

#[test]
fn a_controller_that_is_never_enabled_is_given_up_also_without_keep_alive() {
    let world = World::new();
    let mut controller = world.connect(SUBSYSTEM, 0);
    assert_eq!(tick(&mut controller, world.now + Nanos::from_secs(120)), Some(Expired::NeverEnabled));
    let mut controller = world.connect(SUBSYSTEM, 0);
    world.set_cc(&mut controller, enabled()).unwrap();
    assert_eq!(controller.keep_alive.deadline, None);
}
