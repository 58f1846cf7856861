//! Drives that give fewer queue pairs than there are cores and namespaces.

use nvme_spec::{Cqe, Status};
use spindle_target_disk::{ChannelContext, Disk, DiskError, IoRequest, Op, Token};
use spindle_tests_emulator::{EmulatorSpec, Injection};

use crate::failures::{settings, turns};
use crate::world::World;
use crate::{range, small_blocks};

/// A drive that gives one queue pair.
pub fn one_pair() -> EmulatorSpec {
    EmulatorSpec { queue_pairs: 1, timeout: 2, ..small_blocks() }
}

fn read_on(world: &mut World, core: usize, lba: u64) -> Result<u8, DiskError> {
    let buf = world.pool.take(512).expect("room");
    let (result, buf) = world.submit_on(core, Op::Read, range(lba, 1), Some(buf));
    let mut byte = [0];
    buf.expect("comes back").copy_out(0, &mut byte);
    result.map(|()| byte[0])
}

#[test]
fn cores_without_a_queue_pair_work_with_another_ones() {
    for has_doorbell_buffer in [false, true] {
        // Of one command at a time, of few, and of more than all cores have.
        for queue_entries_max in [2, 9, 1024] {
            let spec = EmulatorSpec { has_doorbell_buffer, queue_entries_max, ..one_pair() };
            let mut world = World::with(spec, settings(), 3);
            for round in 1..=3 {
                for lba in 0..20 {
                    (0..3).for_each(|core| world.start_write(core, core as u64 * 100 + lba, round));
                }
                world.until(|world| world.ended() == 60);
                assert_eq!((world.failed(), world.take_ended()), (0, 60));
                for core in 0..3 {
                    assert_eq!(read_on(&mut world, core, (core as u64 + 1) % 3 * 100 + 19), Ok(round));
                }
            }
            // What is many commands, and one without data.
            let zeroes = Op::WriteZeroes { deallocate: false, fua: true };
            assert_eq!(world.submit_on(2, zeroes, range(0, 400), None).0, Ok(()));
            assert_eq!(world.submit_on(1, Op::Flush, range(0, 0), None).0, Ok(()));
            assert_eq!(read_on(&mut world, 0, 219), Ok(0));
            assert_eq!(world.emulator.counters().enables, 1);
            world.end();
        }
    }
}

#[test]
fn what_a_sharer_has_is_aborted_and_repeated_as_if_the_queue_were_its_own() {
    for (injection, aborted, enables) in [
        (Injection::Error(nvme_spec::Status::NAMESPACE_NOT_READY), 0, 1),
        (Injection::Swallow, 1, 1),
        (Injection::Drop, 0, 2),
    ] {
        let mut world = World::with(one_pair(), settings(), 2);
        assert_eq!(read_on(&mut world, 1, 9), Ok(0));
        world.emulator.inject(injection);
        let begin = world.now();
        world.start_write(1, 9, 7);
        world.until(|world| world.ended() == 1);
        assert_eq!((world.failed(), world.take_ended()), (0, 1), "{injection:?}");
        assert!(world.now() - begin < 6000, "{} ms", world.now() - begin);
        let counters = world.emulator.counters();
        assert_eq!((counters.aborted, counters.enables), (aborted, enables), "{injection:?}");
        assert_eq!((read_on(&mut world, 0, 9), read_on(&mut world, 1, 9)), (Ok(7), Ok(7)));
        world.end();
    }
}

#[test]
fn a_sharer_whose_host_closes_goes_on_with_another_and_repeats_what_it_had() {
    let mut world = World::with(one_pair(), settings(), 3);
    (0..3).for_each(|core| assert_eq!(read_on(&mut world, core, 9), Ok(0)));
    world.emulator.inject(Injection::Swallow);
    world.start_write(2, 9, 7);
    world.run_for(5);
    assert_eq!(world.ended(), 0);
    let begin = world.now();
    world.drop_core(0);
    world.until(|world| world.ended() == 1);
    assert_eq!((world.failed(), world.take_ended()), (0, 1));
    assert!(world.now() - begin < 1000, "{} ms", world.now() - begin);
    assert_eq!((read_on(&mut world, 0, 9), read_on(&mut world, 1, 9)), (Ok(7), Ok(7)));
    // A sharer that closes leaves the others alone, and a new one is served.
    world.drop_core(1);
    world.run_for(500);
    world.open();
    assert_eq!((read_on(&mut world, 0, 9), read_on(&mut world, 1, 9)), (Ok(7), Ok(7)));
    assert_eq!(world.emulator.counters().enables, 1);
    world.end();
}

#[test]
fn a_host_does_not_sleep_while_its_sharer_repeats_what_it_had() {
    let mut world = World::with(one_pair(), settings(), 2);
    (0..2).for_each(|core| assert_eq!(read_on(&mut world, core, 9), Ok(0)));
    world.emulator.inject(Injection::Swallow);
    world.start_write(1, 9, 7);
    world.run_for(5);
    world.emulator.set_fatal();
    world.emulator.inject(Injection::Delay { steps: 300, is_executed_late: true });
    world.until(|world| world.emulator.counters().enables == 2);
    let (mut turns, mut idle) = (0, 0);
    while world.ended() == 0 {
        world.turn();
        (turns, idle) = (turns + 1, idle + u32::from(!world.is_busy[0]));
    }
    assert_eq!((world.failed(), world.take_ended()), (0, 1));
    // Until the cores have their queues again the host has nothing to do.
    assert!(turns >= 300 && idle < 50, "idle in {idle} of {turns} turns");
    world.end();
}

#[test]
fn a_late_completion_of_a_sharer_that_is_gone_ends_no_command_of_the_next_one() {
    let mut world = World::with(one_pair(), settings(), 2);
    assert_eq!(read_on(&mut world, 0, 9), Ok(0));
    // The first command of the first sharer. Identifiers of sharers begin behind those of their host.
    assert_eq!(read_on(&mut world, 1, 9), Ok(0));
    // Behind those of its own 959 commands.
    let first = 959;
    world.drop_core(1);
    world.run_for(500);
    world.open();
    world.run_for(500);
    world.emulator.inject(Injection::Delay { steps: 1000, is_executed_late: true });
    world.start_write(1, 9, 7);
    world.run_for(100);
    let mut late = Cqe::new(first, Status::SUCCESS);
    late.sq_id = 1_u16.into();
    world.emulator.post(1, late);
    world.run_for(100);
    assert_eq!((world.ended(), world.drive().faults().0), (0, 1), "the drive has not done it yet");
    world.until(|world| world.ended() == 1);
    assert_eq!((world.failed(), world.take_ended()), (0, 1));
    assert_eq!(read_on(&mut world, 0, 9), Ok(7));
    world.end();
}

#[test]
fn a_drive_that_gives_fewer_queue_pairs_than_before_serves_as_many_cores() {
    let mut world = World::with(small_blocks(), settings(), 2);
    world.emulator.plug_other(one_pair());
    world.run_for(8000);
    let enables = world.emulator.counters().enables;
    world.start_write(0, 3, 1);
    world.start_write(1, 4, 2);
    world.until(|world| world.ended() == 2);
    assert_eq!((world.failed(), world.take_ended()), (0, 2));
    assert_eq!((read_on(&mut world, 1, 3), read_on(&mut world, 0, 4)), (Ok(1), Ok(2)));
    world.run_for(3000);
    assert_eq!(world.emulator.counters().enables, enables, "no reset after reset");
    // And as many as before again.
    world.emulator.plug_other(small_blocks());
    world.run_for(8000);
    assert_eq!((read_on(&mut world, 0, 3), read_on(&mut world, 1, 3)), (Ok(0), Ok(0)), "another medium");
    world.end();
}

#[test]
fn a_namespace_without_a_queue_pair_works_with_that_of_another_one() {
    let namespace = small_blocks().namespaces.remove(0);
    let mut world = World::with(EmulatorSpec { namespaces: vec![namespace; 2], ..one_pair() }, settings(), 1);
    world.write(3, &[1; 512], false).expect("written to namespace 1");
    let context = ChannelContext { core: 0, pool: world.pool.clone(), depth: 64 };
    let mut second = world.drive().disk("second", 2).expect("namespace 2").open(&context).expect("opened");
    let mut buf = world.pool.take(512).expect("room");
    buf.copy_in(0, &[2; 512]);
    let write = Op::Write { fua: false };
    assert!(second.submit(Token(1), &IoRequest::new(write, range(3, 1)), Some(buf)).is_none());
    let done = turns(&mut world, second.as_mut(), 500);
    assert_eq!((done.len(), done[0].result), (1, Ok(())));
    assert_eq!((world.emulator.read_medium(1, 3, 1)[0], world.emulator.read_medium(2, 3, 1)[0]), (1, 2));
    drop(second);
    world.end();
}

#[test]
fn sharers_of_a_core_that_hangs_go_on_when_it_does() {
    let mut world = World::with(one_pair(), settings(), 0);
    let context = ChannelContext { core: 7, pool: world.pool.clone(), depth: 64 };
    let mut host = world.drive().disk("disk", 1).expect("namespace 1").open(&context).expect("opened");
    turns(&mut world, host.as_mut(), 200);
    world.open();
    turns(&mut world, host.as_mut(), 500);
    world.start_write(0, 9, 7);
    turns(&mut world, host.as_mut(), 10);
    assert_eq!((world.failed(), world.take_ended()), (0, 1));
    world.start_write(0, 9, 8);
    world.emulator.set_fatal();
    world.run_for(9000);
    assert_eq!(world.ended(), 0);
    turns(&mut world, host.as_mut(), 2000);
    assert_eq!((world.failed(), world.take_ended()), (0, 1));
    assert_eq!(world.emulator.read_medium(1, 9, 1)[0], 8);
    drop(host);
    world.end();
}

/// A write on `core` ends within `limit_ms`, while core 0 hangs; how.
fn write_without_host(world: &mut World, core: usize, lba: u64, byte: u8, limit_ms: u64) -> usize {
    let begin = world.now();
    world.start_write(core, lba, byte);
    while world.ended() == 0 {
        world.turn_of(|index| index != 0);
        assert!(world.now() - begin < limit_ms, "core {core} waits for longer than {limit_ms} ms");
    }
    let failed = world.failed();
    assert_eq!(world.take_ended(), 1);
    failed
}

#[test]
fn a_sharer_fails_in_time_when_its_host_hangs_over_a_reset_and_goes_on_when_it_does() {
    let mut world = World::with(one_pair(), settings(), 3);
    (0..3).for_each(|core| assert_eq!(read_on(&mut world, core, 9), Ok(0)));
    world.emulator.set_fatal();
    // The limits of docs/guarantees.md: 10 s, and what a core that hangs costs.
    assert_eq!(write_without_host(&mut world, 1, 9, 7, 15_000), 1);
    // The other sharer, and one that comes now, do not wait for ever either.
    assert_eq!(write_without_host(&mut world, 2, 9, 7, 15_000), 1);
    world.open();
    assert_eq!(write_without_host(&mut world, 3, 9, 7, 11_000), 1);
    assert_eq!(write_without_host(&mut world, 1, 9, 7, 10), 1);
    assert_eq!(world.emulator.counters().enables, 2, "one reset");
    // The host goes on.
    world.run_for(2000);
    for core in 0..4 {
        assert_eq!(read_on(&mut world, core, 9), Ok(0), "nothing that failed was done");
        world.start_write(core, 20 + core as u64, 8);
        world.until(|world| world.ended() == 1);
        assert_eq!((world.failed(), world.take_ended()), (0, 1), "core {core}");
    }
    world.end();
}

#[test]
fn a_sharer_fails_in_time_when_its_host_hangs_without_a_reset_and_resumes_with_it() {
    let mut world = World::with(one_pair(), settings(), 2);
    (0..2).for_each(|core| assert_eq!(read_on(&mut world, core, 9), Ok(0)));
    assert_eq!(write_without_host(&mut world, 1, 9, 7, 20_000), 1);
    world.run_for(2000);
    (0..2).for_each(|core| assert_eq!(read_on(&mut world, core, 9), Ok(0)));
    world.start_write(1, 9, 8);
    world.until(|world| world.ended() == 1);
    assert_eq!((world.failed(), world.take_ended()), (0, 1));
    world.end();
}

#[test]
fn a_sharer_that_takes_too_long_costs_no_reset_while_its_host_works() {
    let mut world = World::with(one_pair(), settings(), 2);
    (0..2).for_each(|core| assert_eq!(read_on(&mut world, core, 9), Ok(0)));
    // The host hangs for less than it takes to be left behind, but longer than the sharer's command may take.
    world.start_write(1, 9, 7);
    for _ in 0..4500 {
        world.turn_of(|core| core != 0);
    }
    world.until(|world| world.ended() == 1);
    assert_eq!((world.failed(), world.take_ended()), (0, 1));
    assert_eq!((read_on(&mut world, 0, 9), world.emulator.counters().enables), (Ok(7), 1));
    world.end();
}
