//! What goes wrong with commands and with the controller: time-outs, Aborts, resets, giving up.

use spindle_reactor::clock::Nanos;
use std::time::Duration;

use nvme_spec::Status;
use nvme_spec::admin::{AsyncEvent, AsyncEventType};
use nvme_spec::log::{CriticalWarning, LogId};
use spindle_nvme_pcie::Settings;
use spindle_target_disk::{ChannelContext, Disk, DiskChannel, DiskError, Done, IoRequest, Op, Token};
use spindle_tests_emulator::{EmulatorSpec, Faults, Injection};

use crate::world::World;
use crate::{range, small_blocks};

/// Short times.
pub fn settings() -> Settings {
    Settings {
        command_timeout: Duration::from_secs(2),
        abort_timeout: Duration::from_secs(1),
        admin_timeout: Duration::from_secs(2),
        ..Settings::default()
    }
}

fn world() -> World {
    World::with(EmulatorSpec { timeout: 2, ..small_blocks() }, settings(), 1)
}

#[test]
fn a_command_that_takes_too_long_is_aborted_and_given_to_the_drive_again() {
    let mut world = world();
    world.write(3, &[7; 512], false).expect("written");
    world.emulator.inject(Injection::Swallow);
    let begin = world.now();
    assert_eq!(world.read(3, 1).expect("the second time"), [7; 512]);
    let counters = world.emulator.counters();
    assert_eq!((counters.aborted, counters.enables), (1, 1));
    assert!((2000..3000).contains(&(world.now() - begin)), "{} ms", world.now() - begin);
    world.end();
}

#[test]
fn a_command_that_no_abort_ends_costs_a_reset_and_is_repeated() {
    let mut world = world();
    world.write(3, &[7; 512], false).expect("written");
    world.emulator.inject(Injection::Drop);
    let begin = world.now();
    assert_eq!(world.read(3, 1).expect("after the reset"), [7; 512]);
    let counters = world.emulator.counters();
    assert_eq!((counters.aborted, counters.enables, counters.function_resets), (0, 2, 0));
    assert!((3000..5000).contains(&(world.now() - begin)), "{} ms", world.now() - begin);
    world.end();
}

#[test]
fn what_nobody_waits_for_any_more_is_not_given_to_the_drive_again() {
    // After a failure that would have passed, after an Abort, and after a reset.
    for injection in [Injection::Error(Status::NAMESPACE_NOT_READY), Injection::Swallow, Injection::Drop] {
        // One that is a command by itself, and one of several.
        for blocks in [1, 4096] {
            let mut world = world();
            world.tokens = 7 << 32;
            world.emulator.inject(injection);
            let before = world.emulator.counters().commands;
            world.start(0, Op::Write { fua: false }, range(0, blocks));
            world.run_for(5);
            let given = world.emulator.counters().commands - before;
            assert_eq!(world.forget(7), 1, "{injection:?}");
            world.tokens = 8 << 32;
            world.until(|world| world.ended() == 1);
            assert_eq!(world.forget(7), 0);
            assert_eq!(world.emulator.counters().commands - before, given, "{injection:?}");
            // The drive serves the others.
            world.write(3, &[7; 512], false).expect("written");
            assert_eq!(world.read(3, 1).expect("read"), [7; 512]);
            world.end();
        }
    }
}

#[test]
fn what_has_no_room_at_the_drive_is_not_begun_when_its_submitter_is_gone() {
    let mut world = world();
    world.read(0, 1).expect("in service");
    let before = world.emulator.counters().commands;
    world.tokens = 7 << 32;
    // Twice as many as a core has at the drive.
    for lba in 0..128 {
        world.start(0, Op::WriteZeroes { deallocate: false, fua: false }, range(lba, 1));
    }
    assert_eq!(world.forget(7), 128);
    let mut ended = 0;
    for _ in 0..1000 {
        world.turn();
        ended += world.take_ended();
    }
    assert_eq!(ended, 128);
    let given = world.emulator.counters().commands - before;
    assert!((1..=64).contains(&given), "{given}");
    world.end();
}

#[test]
fn the_abort_itself_may_get_no_answer() {
    let mut world = world();
    world.emulator.inject(Injection::Swallow);
    world.emulator.inject_admin(Injection::Swallow);
    world.read(3, 1).expect("after the reset");
    assert_eq!(world.emulator.counters().enables, 2);
    world.end();
}

#[test]
fn a_controller_that_cannot_be_disabled_is_reset_as_a_function() {
    let mut world = world();
    world.emulator.freeze_registers();
    world.emulator.inject(Injection::Drop);
    world.read(3, 1).expect("after the reset");
    let counters = world.emulator.counters();
    assert_eq!((counters.enables, counters.function_resets), (2, 1));
    world.end();
}

#[test]
fn a_drive_that_cannot_be_reset_is_cut_off_and_tried_again_later() {
    let mut world = world();
    world.emulator.freeze_registers();
    world.emulator.fail_resets(1);
    world.emulator.inject(Injection::Drop);
    let buf = world.pool.take(4096).expect("room");
    let (result, buf) = world.submit(Op::Read, range(3, 8), Some(buf));
    assert_eq!(result, Ok(()), "it is opened again within the time that requests wait");
    assert!(!world.holds(&buf.expect("comes back")), "the drive may still write there");
    let counters = world.emulator.counters();
    assert_eq!((counters.enables, counters.function_resets), (2, 0));
    world.read(3, 1).expect("opened again");
    world.end();
}

#[test]
fn a_drive_that_fails_for_a_while_is_tried_four_times() {
    let mut world = world();
    let fail = |world: &World, count: usize, status: Status| {
        (0..count).for_each(|_| world.emulator.inject(Injection::Error(status)));
    };
    fail(&world, 3, Status::NAMESPACE_NOT_READY);
    let begin = world.now();
    world.read(3, 1).expect("the fourth time");
    assert!(world.now() - begin >= 200, "a tick between tries");
    fail(&world, 4, Status::NAMESPACE_NOT_READY);
    let commands = world.emulator.counters().commands;
    assert_eq!(world.read(3, 1), Err(DiskError::Internal));
    assert_eq!(world.emulator.counters().commands - commands, 4);
    assert_eq!(world.drive().faults().1, 1);
    world.end();
}

#[test]
fn what_says_do_not_retry_and_what_would_not_pass_is_not_tried_again() {
    let mut world = world();
    for (status, error) in [
        (Status::NAMESPACE_NOT_READY.dnr(), DiskError::Internal),
        (Status::UNRECOVERED_READ_ERROR, DiskError::Device(Status::UNRECOVERED_READ_ERROR)),
        (Status::INVALID_FIELD, DiskError::Internal),
    ] {
        world.emulator.inject(Injection::Error(status));
        let commands = world.emulator.counters().commands;
        assert_eq!(world.read(3, 1), Err(error), "{status}");
        assert_eq!(world.emulator.counters().commands - commands, 1);
    }
    world.end();
}

#[test]
fn one_part_that_fails_fails_the_request_once() {
    let mut world = world();
    world.emulator.inject(Injection::Delay { steps: 50, is_executed_late: true });
    world.emulator.inject(Injection::Error(Status::WRITE_FAULT.dnr()));
    let buf = world.pool.take(2 << 20).expect("room");
    let (result, buf) = world.submit(Op::Write { fua: false }, range(0, 4096), Some(buf));
    assert_eq!(result, Err(DiskError::Device(Status::WRITE_FAULT.dnr())));
    assert!(!world.holds(&buf.expect("comes back")));
    world.end();
}

#[test]
fn a_fatal_status_costs_a_reset_and_no_command() {
    let mut world = world();
    world.emulator.inject(Injection::Fatal);
    world.read(3, 1).expect("after the reset");
    world.emulator.set_fatal();
    world.read(3, 1).expect("after the reset");
    assert_eq!(world.emulator.counters().enables, 3);
    world.end();
}

#[test]
fn a_drive_that_needs_reset_after_reset_is_given_up_and_fails_what_it_has() {
    let mut world = world();
    world.emulator.set_faults(Faults { fatal: 65_536, ..Faults::default() });
    let result = world.read(3, 1);
    assert!(matches!(result, Err(DiskError::Gone | DiskError::Internal)), "{result:?}");
    assert!(world.emulator.counters().enables >= 4);
    world.emulator.set_faults(Faults::default());
    world.run_for(3000);
    world.read(3, 1).expect("opened again");
    world.end();
}

#[test]
fn completions_that_name_no_command_are_counted_and_ignored() {
    let mut world = world();
    world.write(3, &[7; 512], false).expect("written");
    world.emulator.inject(Injection::Double);
    assert_eq!(world.read(3, 1).expect("once"), [7; 512]);
    world.read(3, 1).expect("read");
    assert_eq!(world.drive().faults().0, 1);
    for injection in [Injection::WrongCid, Injection::WrongSqid] {
        let strays = world.drive().faults().0;
        world.emulator.inject(injection);
        assert_eq!(world.read(3, 1).expect("after a reset"), [7; 512]);
        assert_eq!(world.drive().faults().0 - strays, 1);
    }
    world.emulator.inject(Injection::WrongSqHead(0xfff));
    assert_eq!(world.read(3, 1).expect("read"), [7; 512]);
    world.end();
}

#[test]
fn commands_on_several_cores_that_hang_cost_one_reset() {
    let mut world = World::with(EmulatorSpec { timeout: 2, ..small_blocks() }, settings(), 3);
    for core in 0..3 {
        for _ in 0..3 {
            world.emulator.inject(Injection::Drop);
            world.start(core, Op::WriteZeroes { deallocate: false, fua: false }, range(0, 8));
        }
    }
    world.until(|world| world.ended() == 9);
    world.run_for(5000);
    assert_eq!(world.emulator.counters().enables, 2);
    world.end();
}

#[test]
fn aborts_resets_and_events_do_not_wait_for_a_slow_admin_command() {
    let slow = Settings { admin_timeout: Duration::from_secs(60), ..settings() };
    let mut world = World::with(EmulatorSpec { timeout: 2, ..small_blocks() }, slow, 1);
    world.read(3, 1).expect("in service");
    world.run_for(50);
    // The health log, which an event asks for.
    world.emulator.inject_admin(Injection::Swallow);
    world.emulator.set_health(|health| health.critical_warning = CriticalWarning::new().with_spare(true));
    world.run_for(50);
    assert_eq!(world.emulator.counters().swallowed, 1);
    let begin = world.now();
    world.emulator.inject(Injection::Swallow);
    world.read(3, 1).expect("aborted, and the second time");
    assert!((2000..3000).contains(&(world.now() - begin)), "{} ms", world.now() - begin);
    assert_eq!((world.emulator.counters().aborted, world.emulator.counters().enables), (1, 1));
    let begin = world.now();
    world.emulator.inject(Injection::Drop);
    world.read(3, 1).expect("after the reset");
    assert!((3000..5000).contains(&(world.now() - begin)), "{} ms", world.now() - begin);
    assert_eq!(world.emulator.counters().enables, 2);
    world.end();
}

/// A drive with a core that the caller polls, whose queue is the first, and one of the world's.
fn world_with_one_that_hangs() -> (World, Box<dyn DiskChannel>) {
    world_with_one_that_hangs_of(EmulatorSpec { timeout: 2, ..small_blocks() }, settings())
}

fn world_with_one_that_hangs_of(spec: EmulatorSpec, settings: Settings) -> (World, Box<dyn DiskChannel>) {
    let mut world = World::with(spec, settings, 0);
    let context = ChannelContext { core: 7, pool: world.pool.clone(), depth: 4 };
    let mut hung = world.drive().disk("disk", 1).expect("namespace 1").open(&context).expect("opened");
    turns(&mut world, hung.as_mut(), 200);
    world.open();
    world.read(3, 1).expect("read");
    (world, hung)
}

/// Turns in which a core works that is not one of the world's; what it has done.
pub fn turns(world: &mut World, core: &mut dyn DiskChannel, count: u64) -> Vec<Done> {
    let mut done = Vec::with_capacity(16);
    for _ in 0..count {
        world.turn();
        core.poll(Nanos::ZERO, &mut done);
    }
    done
}

#[test]
fn a_core_that_hangs_does_not_hold_up_the_reset_of_its_drive() {
    let (mut world, mut hung) = world_with_one_that_hangs();
    let write = |world: &World, byte: u8| {
        let mut buf = world.pool.take(512).expect("room");
        buf.copy_in(0, &[byte; 512]);
        Some(buf)
    };
    world.emulator.inject(Injection::Drop);
    let op = Op::Write { fua: false };
    assert!(hung.submit(Token(1), &IoRequest::new(op, range(9, 1)), write(&world, 1)).is_none());
    assert!(turns(&mut world, hung.as_mut(), 3).is_empty());
    world.emulator.set_fatal();
    world.run_for(100);
    let begin = world.now();
    assert_eq!(crate::logged(|| world.run_for(4000)), 0, "it may yet answer");
    world.write(9, &[2; 512], false).expect("after the reset");
    assert!(world.now() - begin < 8000, "{} ms", world.now() - begin);
    assert_eq!(world.emulator.counters().enables, 2);
    world.run_for(1000);

    // It goes on: what it had is not repeated over what came later.
    let done = turns(&mut world, hung.as_mut(), 1000);
    assert_eq!(
        done.iter().map(|done| (done.token, done.result)).collect::<Vec<_>>(),
        [(Token(1), Err(DiskError::Internal))]
    );
    assert_eq!(world.read(9, 1).expect("read"), [2; 512]);
    assert!(hung.submit(Token(2), &IoRequest::new(op, range(9, 1)), write(&world, 3)).is_none());
    let done = turns(&mut world, hung.as_mut(), 100);
    assert_eq!((done.len(), done[0].result), (1, Ok(())));
    assert_eq!(world.read(9, 1).expect("read"), [3; 512]);
    drop(hung);
    world.end();
}

/// A read of the core that hangs, which the drive executes after `steps`.
fn slow_read(world: &mut World, hung: &mut dyn DiskChannel, steps: u64) {
    world.emulator.inject(Injection::Delay { steps, is_executed_late: true });
    let buf = world.pool.take(512).expect("room");
    assert!(hung.submit(Token(1), &IoRequest::new(Op::Read, range(9, 1)), Some(buf)).is_none());
    assert!(turns(world, hung, 3).is_empty());
}

#[test]
fn a_core_that_did_not_stop_in_time_gives_no_buffer_back_before_the_drive_is_off() {
    // 4 s from CC.EN = 0 to CSTS.RDY = 0. Requests wait longer than the two resets take.
    let spec = EmulatorSpec { timeout: 20, ready_steps: 4000, ..small_blocks() };
    let slow = Settings { return_timeout: Duration::from_secs(60), ..settings() };
    let (mut world, mut hung) = world_with_one_that_hangs_of(spec, slow);
    slow_read(&mut world, hung.as_mut(), 8000);
    world.emulator.set_fatal();
    // The core has 5 s. Then the drive is told to stop, and still transfers.
    world.run_for(6000);
    assert!(!world.is_off());
    let early = turns(&mut world, hung.as_mut(), 2500);
    assert!(early.is_empty(), "the drive may still write to its buffer: {early:?}");
    // It has stopped before the drive was off, so that its read is repeated.
    let done = turns(&mut world, hung.as_mut(), 10_000);
    assert_eq!(done.iter().map(|done| done.result).collect::<Vec<_>>(), [Ok(())]);
    assert!(!world.holds(done[0].buf.as_ref().expect("comes back")));
    world.read(3, 1).expect("after the reset");
    drop((done, hung));
    world.end();
}

#[test]
fn a_core_that_hangs_in_a_removal_returns_no_buffer_until_the_drive_is_off() {
    let spec = EmulatorSpec { timeout: 2, rtd3e_us: 21_000_000, shutdown_steps: 20_000, ..small_blocks() };
    let (mut world, mut hung) = world_with_one_that_hangs_of(spec, settings());
    slow_read(&mut world, hung.as_mut(), 100_000);
    world.emulator.ask_removal();
    world.run_for(6000);
    assert!(!world.is_off(), "it saves what it has");
    let early = turns(&mut world, hung.as_mut(), 1000);
    assert!(early.is_empty(), "the drive may still write to its buffer: {early:?}");
    let done = turns(&mut world, hung.as_mut(), 30_000);
    assert_eq!(done.iter().map(|done| done.result).collect::<Vec<_>>(), [Err(DiskError::Internal)]);
    drop((done, hung));
    world.end();
}

#[test]
fn a_repeated_command_that_the_drive_swallows_does_not_keep_the_others_waiting() {
    let slow = Settings { command_timeout: Duration::from_secs(60), ..settings() };
    let mut world = World::with(EmulatorSpec { timeout: 2, ..small_blocks() }, slow, 2);
    for core in 0..2 {
        let buf = world.pool.take(512).expect("room");
        world.submit_on(core, Op::Read, range(3, 1), Some(buf)).0.expect("it has its queue");
    }
    // Once before the reset, and once when it is repeated.
    (0..2).for_each(|_| world.emulator.inject(Injection::Swallow));
    world.start_write(0, 3, 1);
    world.run_for(5);
    world.emulator.set_fatal();
    world.run_for(2);
    world.start_write(1, 3, 2);
    let begin = world.now();
    world.until(|world| world.ended() == 2);
    assert!((9_000..11_000).contains(&(world.now() - begin)), "{} ms", world.now() - begin);
    assert_eq!(world.failed(), 2);
    world.run_for(100);
    world.read(3, 1).expect("in service again");
    assert_eq!(world.emulator.counters().enables, 3);
    world.end();
}

#[test]
fn a_core_that_hangs_while_it_repeats_does_not_keep_the_others_waiting() {
    let slow = Settings { command_timeout: Duration::from_secs(60), ..settings() };
    let spec = EmulatorSpec { timeout: 2, ..small_blocks() };
    let (mut world, mut hung) = world_with_one_that_hangs_of(spec, slow);
    slow_read(&mut world, hung.as_mut(), 100_000);
    world.emulator.inject(Injection::Swallow);
    world.emulator.set_fatal();
    // It has taken its new queue and repeats.
    assert!(turns(&mut world, hung.as_mut(), 100).is_empty());
    let begin = world.now();
    assert_eq!(world.read(3, 1), Err(DiskError::Internal));
    assert!((9_000..17_000).contains(&(world.now() - begin)), "{} ms", world.now() - begin);
    world.run_for(1000);
    world.read(3, 1).expect("without the core that hangs");
    let done = turns(&mut world, hung.as_mut(), 1000);
    assert_eq!(done.iter().map(|done| done.result).collect::<Vec<_>>(), [Err(DiskError::Internal)]);
    drop((done, hung));
    world.end();
}

#[test]
fn a_core_that_hangs_does_not_keep_the_others_waiting_for_a_drive_that_is_gone() {
    let (mut world, mut hung) = world_with_one_that_hangs();
    world.emulator.vanish();
    let begin = world.now();
    assert_eq!(world.read(3, 1), Err(DiskError::Internal));
    assert!(world.now() - begin < 12_000, "{} ms", world.now() - begin);
    world.emulator.plug();
    world.run_for(3000);
    assert_eq!(world.read(3, 1), Err(DiskError::Internal), "the function cannot be closed yet");
    assert!(turns(&mut world, hung.as_mut(), 3000).is_empty());
    world.read(3, 1).expect("it is back");
    drop(hung);
    world.end();
}

#[test]
fn memory_of_an_admin_command_is_kept_until_the_controller_is_off() {
    let spec = EmulatorSpec { timeout: 2, ready_steps: 100, ..small_blocks() };
    let mut world = World::with(spec, settings(), 1);
    world.read(3, 1).expect("the queues are made");
    world.run_for(50);
    // The health log, written when that has timed out and CC.EN is 0 already, but CSTS.RDY not yet.
    world.emulator.inject_admin(Injection::Delay { steps: 2050, is_executed_late: true });
    world.emulator.set_health(|health| health.critical_warning = CriticalWarning::new().with_spare(true));
    world.run_for(4000);
    assert_eq!((world.emulator.counters().delayed, world.emulator.counters().enables), (1, 2));
    world.read(3, 1).expect("after the reset");
    world.end();
}

#[test]
fn health_is_read_and_a_warning_is_seen_when_it_comes() {
    let mut world = world();
    world.run_for(100);
    assert_eq!(world.health().expect("read").temperature_kelvin, 313);
    world.emulator.set_health(|health| {
        health.critical_warning = CriticalWarning::new().with_spare(true);
        health.available_spare = 3;
        health.media_errors = 77;
    });
    world.run_for(100);
    let health = world.health().expect("read");
    assert_eq!((health.critical_warning, health.spare_percent, health.media_errors), (1, 3, 77));
    world.end();
}

#[test]
fn a_storm_of_events_costs_no_command_and_one_line_a_second() {
    let mut world = world();
    let lines = crate::logged(|| {
        for turn in 0..2000 {
            world.emulator.raise_event(AsyncEvent::of(AsyncEventType::HEALTH, 1, LogId::SMART));
            world.turn();
            if turn % 500 == 0 {
                world.read(3, 1).expect("read");
            }
        }
    });
    let admin = world.emulator.counters().admin_commands;
    assert!(admin > 500, "events were taken: {admin}");
    assert!(lines <= 6, "{lines} lines");
    world.end();
}

#[test]
fn a_loss_of_power_is_told_to_each_core_that_flushes() {
    let mut world = World::with(small_blocks(), settings(), 3);
    world.write(3, &[1; 512], false).expect("written");
    let buf = world.pool.take(512).expect("room");
    world.submit_on(1, Op::Write { fua: false }, range(4, 1), Some(buf)).0.expect("written");
    world.emulator.vanish();
    world.emulator.power_cut(1);
    world.run_for(100);
    world.emulator.plug();
    world.run_for(3000);
    for core in 0..3 {
        let (first, _) = world.submit_on(core, Op::Flush, range(0, 0), None);
        assert_eq!(first, Err(DiskError::MediaWrite), "core {core}");
    }
    for core in 0..3 {
        world.submit_on(core, Op::Flush, range(0, 0), None).0.expect("told once");
    }
    world.end();
}

#[test]
fn a_loss_of_power_is_told_by_the_next_flush_and_only_by_that() {
    let mut world = world();
    world.write(3, &[1; 512], false).expect("written");
    world.command(Op::Flush, range(0, 0)).expect("flushed");
    for is_lost in [false, true] {
        if is_lost {
            world.write(3, &[2; 512], false).expect("written");
        }
        world.emulator.vanish();
        world.emulator.power_cut(1);
        world.run_for(100);
        world.emulator.plug();
        world.run_for(3000);
        let first = world.command(Op::Flush, range(0, 0));
        assert_eq!(first, if is_lost { Err(DiskError::MediaWrite) } else { Ok(()) });
        world.command(Op::Flush, range(0, 0)).expect("told once");
    }
    world.end();
}

#[test]
fn a_controller_that_cannot_be_disabled_keeps_its_dma_mappings_until_bus_master_off() {
    let mut world = world();
    world.read(3, 1).expect("in service");
    let mappings = world.emulator.mappings();
    world.emulator.freeze_registers();
    world.emulator.fail_resets(1);
    world.emulator.set_fatal();
    // CAP.TO is a second.
    world.run_for(1000);
    assert_eq!(world.emulator.mappings(), mappings, "it is told to be disabled, and may read its queues");
    world.run_for(1000);
    assert_eq!(world.emulator.mappings(), 0, "it is cut off, and closed");
    world.run_for(5000);
    world.end();
}
