//! Compare-and-writes: one step for writes of every core, whatever happens to the drive and to cores.

use nvme_spec::Status;
use spindle_target_disk::{DiskError, Op};
use spindle_tests_emulator::{EmulatorSpec, Injection};

use crate::failures::settings;
use crate::shared_queue::one_pair;
use crate::world::World;
use crate::{range, small_blocks};

/// The block that is compared.
const LBA: u64 = 40;

fn drive() -> EmulatorSpec {
    // 16 blocks a command: longer writes are several.
    EmulatorSpec { mdts: 1, timeout: 2, ..small_blocks() }
}

/// Cores that have worked, and that are idle.
fn world(spec: EmulatorSpec, cores: usize) -> World {
    let mut world = World::with(spec, settings(), cores);
    for core in 0..cores {
        assert_eq!(world.submit_on(core, Op::Flush, range(0, 0), None).0, Ok(()));
    }
    world.write(LBA, &[1; 512], true).expect("written");
    world.run_for(5);
    world
}

fn medium(world: &World) -> u8 {
    world.emulator.read_medium(1, LBA, 1)[0]
}

/// Turns of all cores until it has ended.
fn result_of(world: &mut World, token: u64) -> Result<(), DiskError> {
    for _ in 0..100_000 {
        if let Some(result) = world.take_result(token) {
            return result;
        }
        world.turn();
    }
    panic!("it does not end");
}

fn late(steps: u64) -> Injection {
    Injection::Delay { steps, is_executed_late: true }
}

#[test]
fn a_block_that_is_as_expected_is_written_and_another_is_left_as_it_is() {
    let mut world = world(drive(), 1);
    assert!(world.disk(0).geometry().can_compare_and_write);
    let swap = world.start_compare_and_write(0, LBA, 2, 3);
    assert_eq!((result_of(&mut world, swap), medium(&world)), (Err(DiskError::CompareDiffers), 1));
    let swap = world.start_compare_and_write(0, LBA, 1, 3);
    assert_eq!((result_of(&mut world, swap), medium(&world)), (Ok(()), 3));
    // It is durable.
    world.emulator.power_cut(0);
    assert_eq!(medium(&world), 3);
    // Several at once: one after another.
    let swaps = [(3, 4), (3, 5), (4, 6)].map(|(from, to)| world.start_compare_and_write(0, LBA, from, to));
    let results = swaps.map(|swap| result_of(&mut world, swap));
    assert_eq!(results, [Ok(()), Err(DiskError::CompareDiffers), Ok(())]);
    assert_eq!((medium(&world), world.disk(0).in_flight()), (6, 0));
    world.end();
}

/// A small generator: the same numbers in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }

    fn core(&mut self) -> usize {
        usize::try_from(self.below(3)).expect("small")
    }
}

/// A change of the block by another command than a compare-and-write; what it makes of it.
fn start_change(world: &mut World, random: &mut Random, byte: u8) -> (u64, u8) {
    let core = random.core();
    // Alone, in the midst of a command, or in one of several.
    let (before, blocks) = [(0, 1), (3, 8), (20, 64)][random.core()];
    let range = range(LBA - before, blocks);
    let op = match random.below(4) {
        0 => Op::WriteZeroes { deallocate: random.below(2) == 0, fua: false },
        1 => Op::Deallocate,
        _ => return (world.start_fill(core, range, byte), byte),
    };
    world.start(core, op, range);
    (world.tokens, 0)
}

/// What was on the block before a round is settled, so a change of that round comes behind each
/// compare-and-write that finds it: the change is what is left, or it was lost.
fn race(spec: EmulatorSpec, rounds: usize) {
    let mut world = world(spec, 3);
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let mut won = [0_usize; 2];
    for round in 0..rounds {
        if medium(&world) == 0 {
            // Or zeroes would leave it as it is expected.
            world.write(LBA, &[9; 512], true).expect("written");
        }
        let was = medium(&world);
        let bytes: Vec<u8> = (1..=255).filter(|byte| *byte != was).take(3).collect();
        for _ in 0..random.below(5) {
            let (steps, is_executed_late) = (1 + random.below(20), random.below(2) == 0);
            let passing = Injection::Error(Status::NAMESPACE_NOT_READY);
            let is_error = random.below(8) == 0;
            world.emulator.inject(if is_error {
                passing
            } else {
                Injection::Delay { steps, is_executed_late }
            });
        }
        let change_at = random.below(6);
        let (mut swaps, mut change) = (Vec::new(), None);
        for at in 0..4 {
            if at == change_at {
                change = Some(start_change(&mut world, &mut random, bytes[2]));
            }
            if at == 1 || at == 2 {
                let data = bytes[swaps.len()];
                swaps.push((world.start_compare_and_write(random.core(), LBA, was, data), data));
            }
            (0..random.below(6)).for_each(|_| world.turn_of(|_| random.below(3) > 0));
        }
        for _ in 0..100_000 {
            if world.ended() == swaps.len() + usize::from(change.is_some()) {
                break;
            }
            world.turn_of(|_| random.below(3) > 0);
        }
        let results: Vec<_> =
            swaps.iter().map(|(swap, data)| (world.take_result(*swap).expect("ended"), *data)).collect();
        let wins: Vec<u8> = results.iter().filter(|it| it.0.is_ok()).map(|it| it.1).collect();
        let is_known = |result| matches!(result, Ok(()) | Err(DiskError::CompareDiffers));
        assert!(results.iter().all(|it| is_known(it.0)), "round {round}: {results:?}");
        let last = match change {
            Some((change, byte)) => {
                assert_eq!(world.take_result(change), Some(Ok(())), "round {round}");
                assert!(wins.len() <= 1, "round {round}: both found {was}");
                won[0] += wins.len();
                byte
            }
            None => {
                assert_eq!(wins.len(), 1, "round {round}: {results:?}");
                won[1] += 1;
                wins[0]
            }
        };
        assert_eq!(medium(&world), last, "round {round}: it was lost; compare-and-writes: {results:?}");
    }
    // It was no walk-over.
    assert!(won.iter().all(|won| *won > rounds / 20), "{won:?} of {rounds}");
    world.end();
}

#[test]
fn no_write_of_any_core_is_lost_to_a_compare_and_write() {
    race(drive(), 3000);
}

#[test]
fn no_write_of_a_core_without_a_queue_pair_is_lost_to_a_compare_and_write() {
    race(EmulatorSpec { mdts: 1, ..one_pair() }, 1500);
}

#[test]
fn a_write_to_the_block_is_waited_for_and_one_beside_it_is_not() {
    let mut world = world(drive(), 2);
    world.emulator.inject(late(50));
    let write = world.start_fill(1, range(LBA, 1), 2);
    world.turn();
    let swap = world.start_compare_and_write(0, LBA, 1, 3);
    for _ in 0..40 {
        world.turn();
        assert!(world.take_result(swap).is_none(), "the write is in flight");
    }
    assert_eq!(result_of(&mut world, write), Ok(()));
    assert_eq!((result_of(&mut world, swap), medium(&world)), (Err(DiskError::CompareDiffers), 2));
    world.emulator.inject(late(50));
    let write = world.start_fill(1, range(LBA + 1, 8), 4);
    world.turn();
    let swap = world.start_compare_and_write(0, LBA, 2, 3);
    assert_eq!((result_of(&mut world, swap), medium(&world)), (Ok(()), 3));
    assert!(world.take_result(write).is_none(), "it was not waited for");
    world.end();
}

#[test]
fn what_is_not_kept_off_goes_on_beside_a_compare_and_write_and_past_what_is() {
    let mut world = world(drive(), 2);
    // The compare-and-write's read.
    world.emulator.inject(late(100));
    let swap = world.start_compare_and_write(0, LBA, 1, 3);
    world.run_for(5);
    for core in [0, 1] {
        let kept_off = world.start_fill(core, range(LBA - 4, 8), 7);
        let beside = world.start_fill(core, range(LBA + 4, 8), 7);
        assert_eq!(world.submit_on(core, Op::Flush, range(0, 0), None).0, Ok(()));
        world.run_for(5);
        assert_eq!((world.take_result(beside), world.take_result(kept_off)), (Some(Ok(())), None));
    }
    assert_eq!(result_of(&mut world, swap), Ok(()));
    world.until(|world| world.ended() == 2);
    assert_eq!(medium(&world), 7);
    world.end();
}

#[test]
fn nobody_waits_for_a_core_that_is_idle_or_new_or_gone() {
    let mut world = world(drive(), 3);
    // From here on only one core has turns.
    let alone = |world: &mut World, from| {
        let swap = world.start_compare_and_write(0, LBA, from, from + 1);
        (0..50).for_each(|_| world.turn_of(|core| core == 0));
        assert_eq!((world.take_result(swap), medium(world)), (Some(Ok(())), from + 1));
    };
    alone(&mut world, 1);
    world.open();
    alone(&mut world, 2);
    world.drop_core(2);
    alone(&mut world, 3);
    // One that was idle and works again is kept off.
    world.emulator.inject(late(100));
    let swap = world.start_compare_and_write(0, LBA, 4, 5);
    (0..5).for_each(|_| world.turn_of(|core| core == 0));
    let write = world.start_fill(1, range(LBA, 1), 6);
    world.run_for(50);
    assert!(world.take_result(write).is_none(), "it is kept off");
    assert_eq!(result_of(&mut world, swap), Ok(()));
    assert_eq!((result_of(&mut world, write), medium(&world)), (Ok(()), 6));
    world.end();
}

#[test]
fn a_core_that_hangs_with_a_write_is_not_waited_for_without_end() {
    let mut world = world(drive(), 3);
    let hung = world.start_fill(1, range(LBA, 1), 2);
    world.turn();
    let swaps = [2, 0].map(|core| world.start_compare_and_write(core, LBA, 1, 3));
    let write = world.start_fill(2, range(LBA, 1), 4);
    let begin = world.now();
    for _ in 0..5000 {
        world.turn_of(|core| core != 1);
    }
    let results = swaps.map(|swap| world.take_result(swap));
    assert_eq!(results, [Some(Err(DiskError::Internal)); 2], "{} ms", world.now() - begin);
    assert_eq!((world.take_result(write), medium(&world)), (Some(Ok(())), 4));
    // It goes on.
    assert_eq!(result_of(&mut world, hung), Ok(()));
    let swap = world.start_compare_and_write(0, LBA, 4, 5);
    assert_eq!((result_of(&mut world, swap), medium(&world)), (Ok(()), 5));
    world.end();
}

#[test]
fn what_is_repeated_after_a_failure_or_a_reset_is_still_one_step() {
    let passing = Injection::Error(Status::NAMESPACE_NOT_READY);
    for injection in [passing, Injection::Swallow, Injection::Drop, Injection::Fatal] {
        // Its read, its write, and a write that it waits for.
        for at in 0..3 {
            let mut world = world(drive(), 2);
            let first = (at == 2).then(|| {
                world.emulator.inject(injection);
                let first = world.start_fill(1, range(LBA - 20, 64), 2);
                world.turn();
                first
            });
            if at == 1 {
                world.emulator.inject(Injection::Delay { steps: 1, is_executed_late: false });
            }
            if at < 2 {
                world.emulator.inject(injection);
            }
            let swap = world.start_compare_and_write(0, LBA, if at == 2 { 2 } else { 1 }, 3);
            world.run_for(10);
            let last = world.start_fill(1, range(LBA, 1), 4);
            world.until(|world| world.ended() == 2 + usize::from(first.is_some()));
            assert_eq!(world.take_result(swap), Some(Ok(())), "{injection:?} at {at}");
            assert!(first.is_none_or(|first| world.take_result(first) == Some(Ok(()))));
            assert_eq!((world.take_result(last), medium(&world)), (Some(Ok(())), 4), "{injection:?} at {at}");
            world.end();
        }
    }
}

#[test]
fn the_guard_goes_when_the_drive_does() {
    for at in 0..2 {
        let mut world = world(drive(), 2);
        if at == 1 {
            world.emulator.inject(Injection::Delay { steps: 1, is_executed_late: false });
        }
        world.emulator.inject(Injection::Vanish);
        let swaps = [0, 0, 1].map(|core| world.start_compare_and_write(core, LBA, 1, 3));
        for swap in swaps {
            assert_eq!(result_of(&mut world, swap), Err(DiskError::Internal), "{at}");
        }
        let swap = world.start_compare_and_write(0, LBA, 1, 3);
        assert_eq!(world.take_result(swap), Some(Err(DiskError::Internal)), "at once");
        world.emulator.plug();
        world.run_for(5000);
        let was = medium(&world);
        let swap = world.start_compare_and_write(1, LBA, was, 5);
        assert_eq!((result_of(&mut world, swap), medium(&world)), (Ok(()), 5));
        let write = world.start_fill(0, range(LBA, 1), 6);
        assert_eq!((result_of(&mut world, write), medium(&world)), (Ok(()), 6));
        world.end();
    }
}

#[test]
fn the_guard_goes_with_the_submitter_and_nothing_more_is_written_for_it() {
    for phase in ["queued", "clearing", "reading", "writing"] {
        let mut world = world(drive(), 2);
        let other = match phase {
            "queued" => {
                world.emulator.inject(late(50));
                let other = world.start_compare_and_write(1, LBA + 1, 0, 2);
                world.run_for(5);
                Some(other)
            }
            "clearing" => {
                world.emulator.inject(late(50));
                let other = world.start_fill(1, range(LBA - 4, 4 + 1), 1);
                world.run_for(5);
                Some(other)
            }
            _ => None,
        };
        if phase == "writing" {
            world.emulator.inject(Injection::Delay { steps: 1, is_executed_late: false });
        }
        world.emulator.inject(late(50));
        world.tokens = 7 << 32;
        let swap = world.start_compare_and_write(0, LBA, 1, 3);
        world.run_for(10);
        assert_eq!(world.forget(7), 1, "{phase}");
        assert_eq!(result_of(&mut world, swap), Err(DiskError::Cancelled), "{phase}");
        assert_eq!(world.forget(7), 0, "{phase}");
        assert!(other.is_none_or(|other| result_of(&mut world, other) == Ok(())), "{phase}");
        world.run_for(60);
        assert_eq!(medium(&world), if phase == "writing" { 3 } else { 1 }, "{phase}");
        world.tokens = 8 << 32;
        let write = world.start_fill(1, range(LBA, 1), 4);
        assert_eq!((result_of(&mut world, write), medium(&world)), (Ok(()), 4), "{phase}");
        world.end();
    }
}

#[test]
fn what_a_core_that_closes_has_left_with_the_drive_is_waited_for() {
    for steps in 1..12 {
        // Its compare-and-write's write.
        let mut world = world(drive(), 3);
        world.emulator.inject(Injection::Delay { steps: 1, is_executed_late: false });
        world.emulator.inject(late(4 + steps));
        world.start_compare_and_write(0, LBA, 1, 3);
        world.run_for(4);
        // Its queue is deleted later than the write is done.
        world.emulator.inject_admin(late(40));
        world.drop_core(0);
        let write = world.start_fill(0, range(LBA, 1), 4);
        assert_eq!(result_of(&mut world, write), Ok(()), "{steps}");
        world.run_for(500);
        assert_eq!(medium(&world), 4, "{steps}");
        // A write of its own.
        world.emulator.inject(late(steps));
        world.start_fill(0, range(LBA, 1), 5);
        world.turn();
        world.emulator.inject_admin(late(40));
        world.drop_core(0);
        let swap = world.start_compare_and_write(0, LBA, 4, 6);
        let result = result_of(&mut world, swap);
        world.run_for(500);
        assert_eq!(medium(&world), if result == Ok(()) { 6 } else { 5 }, "{steps}: {result:?}");
        world.end();
    }
}
