//! Drives that are reset, that go and that come back: what becomes of requests and of the write cache.

use nvme_spec::log::CriticalWarning;
use spindle_target_disk::{DiskError, Op};
use spindle_tests_emulator::{EmulatorSpec, Injection};

use crate::failures::settings;
use crate::world::World;
use crate::{range, small_blocks};

const WRITE: Op = Op::Write { fua: false };

fn world(cores: usize) -> World {
    World::with(EmulatorSpec { timeout: 2, ..small_blocks() }, settings(), cores)
}

#[test]
fn requests_wait_for_a_drive_whose_link_was_down() {
    let mut world = world(2);
    world.write(3, &[7; 512], true).expect("written");
    world.read(3, 1).expect("both have their queues");
    world.start(1, Op::Read, range(3, 1));
    world.until(|world| world.ended() == 1);
    world.emulator.inject(Injection::Swallow);
    world.start(0, Op::Read, range(3, 1));
    world.run_for(5);
    world.emulator.link_down();
    world.start(1, Op::Read, range(3, 1));
    world.run_for(1500);
    assert_eq!(world.ended(), 1, "they wait");
    world.emulator.link_up();
    world.until(|world| world.ended() == 3);
    assert_eq!(world.failed(), 0);
    assert_eq!(world.emulator.counters().function_resets, 1, "without being opened anew");
    assert_eq!(world.read(3, 1).expect("goes on"), [7; 512]);
    world.end();
}

#[test]
fn requests_wait_for_a_drive_that_has_to_be_opened_again() {
    let mut world = world(1);
    world.write(3, &[7; 512], true).expect("written");
    for _ in 0..3 {
        world.emulator.inject(Injection::Swallow);
        world.start(0, Op::Read, range(3, 1));
        world.run_for(5);
        world.emulator.vanish();
        world.run_for(6000);
        assert!(!world.emulator.is_open(), "let go");
        let ended = world.ended();
        world.start(0, WRITE, range(4, 1));
        world.run_for(2500);
        assert_eq!(world.ended(), ended);
        world.emulator.plug();
        let begin = world.now();
        world.until(|world| world.ended() == ended + 2);
        assert!(world.now() - begin < 2500, "{} ms", world.now() - begin);
    }
    assert_eq!(world.failed(), 0);
    world.end();
}

#[test]
fn requests_fail_when_the_drive_is_away_for_too_long_and_may_be_retried() {
    let mut world = world(1);
    world.emulator.inject(Injection::Swallow);
    world.start(0, WRITE, range(3, 1));
    world.run_for(5);
    world.emulator.vanish();
    let begin = world.now();
    assert_eq!(world.read(3, 1), Err(DiskError::Internal));
    let waited = world.now() - begin;
    assert!((10_000..10_100).contains(&waited), "{waited} ms");
    assert_eq!((world.ended(), world.failed()), (1, 1));
    let begin = world.now();
    assert_eq!(world.read(3, 1), Err(DiskError::Internal));
    assert!(world.now() - begin < 10, "at once");
    world.emulator.plug();
    world.run_for(3000);
    world.read(3, 1).expect("back");
    world.emulator.vanish();
    world.start(0, Op::Read, range(3, 1));
    world.run_for(9000);
    assert_eq!(world.ended(), 1, "the next time they wait again");
    world.emulator.plug();
    world.until(|world| world.ended() == 2);
    world.end();
}

#[test]
fn a_drive_that_never_becomes_ready_again_does_not_keep_requests() {
    let spec = EmulatorSpec { timeout: 40, ..small_blocks() };
    let mut world = World::with(spec, settings(), 1);
    world.read(3, 1).expect("in service");
    // It follows no more once it is disabled: CAP.TO is 20 s.
    world.emulator.set_fatal();
    world.until(|world| world.emulator.counters().enables == 1 && world.is_off());
    world.emulator.freeze_registers();
    let begin = world.now();
    assert_eq!(world.read(3, 1), Err(DiskError::Internal));
    let waited = world.now() - begin;
    assert!((9_000..10_100).contains(&waited), "{waited} ms");
    world.run_for(60_000);
    world.read(3, 1).expect("after a function reset");
    world.end();
}

#[test]
fn what_was_with_a_drive_is_repeated_before_what_came_after_its_reset() {
    let mut world = world(2);
    for core in 0..2 {
        let buf = world.pool.take(512).expect("room");
        world.submit_on(core, Op::Read, range(3, 1), Some(buf)).0.expect("it has its queue");
    }
    world.emulator.inject(Injection::Swallow);
    world.start_write(0, 3, 1);
    world.run_for(5);
    world.emulator.set_fatal();
    world.run_for(2);
    // The next to come, on a core that has nothing to repeat.
    world.start_write(1, 3, 2);
    world.until(|world| world.ended() == 2);
    assert_eq!(world.failed(), 0);
    assert_eq!(world.emulator.read_medium(1, 3, 1), [2; 512], "the newer one");
    world.end();
}

#[test]
fn a_drive_that_begins_anew_has_lost_what_was_in_its_cache_and_flushes_say_so() {
    type Break = fn(&mut World);
    let ways: [(&str, Break); 3] = [
        ("fatal status", |world| world.emulator.set_fatal()),
        ("function reset", |world| {
            world.emulator.freeze_registers();
            world.emulator.inject(Injection::Drop);
            world.start(0, Op::Read, range(9, 1));
        }),
        ("admin time-out", |world| {
            world.emulator.inject_admin(Injection::Swallow);
            world.emulator.set_health(|health| {
                health.critical_warning = CriticalWarning::new().with_spare(true);
            });
        }),
    ];
    for (what, break_it) in ways {
        let spec = EmulatorSpec { timeout: 2, loses_cache_at_reset: true, ..small_blocks() };
        let mut world = World::with(spec, settings(), 2);
        world.write(3, &[1; 512], false).expect("written");
        world.command(Op::Flush, range(0, 0)).expect("flushed");
        world.write(3, &[2; 512], false).expect("written");
        break_it(&mut world);
        world.run_for(20_000);
        world.read(3, 1).expect("in service again");
        assert_eq!(world.command(Op::Flush, range(0, 0)), Err(DiskError::MediaWrite), "{what}");
        world.command(Op::Flush, range(0, 0)).expect("told once");
        world.end();
    }
}

#[test]
fn a_reset_that_the_drive_survives_loses_nothing() {
    let mut world = world(1);
    world.write(3, &[2; 512], false).expect("written");
    world.emulator.inject(Injection::Drop);
    world.read(3, 1).expect("after a controller reset");
    assert_eq!(world.emulator.counters().enables, 2);
    world.command(Op::Flush, range(0, 0)).expect("nothing was lost");
    world.end();
}

#[test]
fn a_drive_is_given_the_time_that_it_says_it_needs_to_save_what_it_has() {
    for (seconds, is_saved) in [(0, true), (9, true), (12, true), (40, true), (70, false)] {
        let spec = EmulatorSpec {
            rtd3e_us: if seconds == 0 { 0 } else { (seconds + 1) * 1_000_000 },
            shutdown_steps: u64::from(seconds) * 1000,
            ..small_blocks()
        };
        let mut world = World::with(spec, settings(), 1);
        world.write(3, &[7; 512], false).expect("written, to the cache");
        let begin = world.now();
        world.end();
        let waited = world.now() - begin;
        assert!(waited < 61_000, "{waited} ms");
        world.emulator.lose_write_cache();
        assert_eq!(world.emulator.read_medium(1, 3, 1) == [7; 512], is_saved, "{seconds} s");
    }
}
