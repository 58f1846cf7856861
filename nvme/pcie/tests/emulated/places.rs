//! Drives that come and go, cores that open and close, and what drives cannot do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nvme_spec::Status;
use nvme_spec::identify::{Dlfeat, Oncs};
use nvme_spec::register::{CC, CSTS, Cc, Csts, ShutdownNotification};
use spindle_nvme_pcie::{Bus, Drive, Settings, finish_within};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_target_disk::{BlockRange, ChannelContext, Disk, DiskError, IoRequest, Op, Token};
use spindle_tests_emulator::{Emulator, EmulatorSpec, Injection, NamespaceSpec};

use crate::failures::settings;
use crate::world::World;
use crate::{logged, range, small_blocks};

#[test]
fn a_controller_that_is_never_ready_is_an_error_that_says_so() {
    let world =
        World::with(EmulatorSpec { ready_steps: u64::MAX / 2, timeout: 2, ..small_blocks() }, settings(), 0);
    let why = world.drive().failure().expect("not opened");
    assert_eq!(why, "CSTS.RDY to become 1: no answer in 1.5s");
    assert!(!world.emulator.is_open() && world.emulator.mappings() == 0);
}

#[test]
fn another_drive_in_the_place_is_refused_and_the_right_one_goes_on() {
    let mut world = World::with(small_blocks(), settings(), 1);
    world.emulator.plug_other(EmulatorSpec { serial: "OTHER".to_owned(), ..small_blocks() });
    world.run_for(4000);
    assert_eq!(world.read(3, 1), Err(DiskError::Gone));
    assert_eq!(world.drive().facts().expect("known").serial, EmulatorSpec::default().serial);
    let bigger = NamespaceSpec { block_bytes: 4096, ..NamespaceSpec::default() };
    world.emulator.plug_other(EmulatorSpec { namespaces: vec![bigger], ..small_blocks() });
    world.run_for(4000);
    assert_eq!(world.read(3, 1), Err(DiskError::Gone), "of another format");
    // It may take fewer commands now than it did.
    world.emulator.plug_other(EmulatorSpec { queue_entries_max: 4, ..small_blocks() });
    world.run_for(4000);
    assert_eq!(world.read(3, 40).expect("the right one"), vec![0; 40 * 512]);
    world.end();
}

#[test]
fn a_drive_whose_queues_became_shorter_still_writes_zeroes() {
    let spec = EmulatorSpec { oncs: Oncs::new(), mdts: 1, ..small_blocks() };
    let mut world = World::with(spec.clone(), settings(), 1);
    // Every slot is used once: those beyond the shorter queue come back first.
    world.write(0, &vec![5; 2 << 20], false).expect("written");
    world.emulator.plug_other(EmulatorSpec { queue_entries_max: 4, ..spec });
    world.run_for(4000);
    world.write(0, &vec![5; 2 << 20], false).expect("written");
    world.command(Op::WriteZeroes { deallocate: false, fua: false }, range(0, 4096)).expect("zeroes");
    assert!(world.emulator.read_medium(1, 0, 4096).iter().all(|byte| *byte == 0));
    world.end();
}

#[test]
fn a_drive_that_is_wanted_back_is_let_go_and_comes_back() {
    let mut world = World::with(small_blocks(), settings(), 1);
    world.write(3, &[7; 512], false).expect("written");
    world.emulator.inject(Injection::Swallow);
    world.start(0, Op::Flush, range(0, 0));
    world.run_for(10);
    world.emulator.ask_removal();
    world.until(|world| !world.emulator.is_open());
    world.run_for(10);
    assert_eq!((world.ended(), world.emulator.mappings()), (1, 0));
    assert_eq!(world.read(3, 1), Err(DiskError::Internal), "at once, and it may come back");
    world.emulator.power_cut(1);
    world.emulator.plug();
    world.run_for(3000);
    assert_eq!(world.read(3, 1).expect("back"), [7; 512], "it was shut down: nothing is lost");
    world.command(Op::Flush, range(0, 0)).expect("nothing was lost");
    world.end();
}

#[test]
fn a_core_that_does_not_answer_is_said_once() {
    let mut world = World::with(small_blocks(), settings(), 0);
    let context = ChannelContext { core: 0, pool: world.pool.clone(), depth: 4 };
    let core = world.drive().disk("disk", 1).expect("namespace 1").open(&context).expect("opened");
    assert_eq!(logged(|| world.run_for(29_000)), 0);
    assert_eq!(logged(|| world.run_for(60_000)), 1);
    drop(core);
    world.end();
}

#[test]
fn a_core_that_is_dropped_with_commands_in_flight_keeps_their_buffers() {
    let mut world = World::with(small_blocks(), settings(), 1);
    let free = world.pool.free_bytes();
    world.emulator.inject(Injection::Swallow);
    world.start(0, Op::Read, range(0, 8));
    world.run_for(5);
    world.drop_cores();
    assert_eq!(world.pool.free_bytes(), free - 4096);
    world.run_for(100);
    assert_eq!(world.pool.free_bytes(), free - 4096);
    world.end();
}

#[test]
fn a_core_that_closes_gives_its_queues_back_and_another_takes_them() {
    for has_doorbell_buffer in [false, true] {
        let spec = EmulatorSpec { has_doorbell_buffer, queue_pairs: 2, ..small_blocks() };
        let mut world = World::with(spec, settings(), 1);
        for round in 0..5 {
            (0..=7 * round).for_each(|_| drop(world.read(3, 1).expect("read")));
            let mappings = world.emulator.mappings();
            world.drop_cores();
            world.open();
            world.read(3, 1).expect("read");
            assert_eq!(world.emulator.mappings(), mappings, "the old ones are unmapped");
        }
        let counters = world.emulator.counters();
        assert_eq!((counters.enables, counters.aborted), (1, 0));
        world.end();
    }
}

#[test]
fn a_pool_that_was_prepared_is_not_mapped_by_the_core_that_opens() {
    let mut world = World::with(small_blocks(), settings(), 0);
    let before = world.emulator.mappings();
    let source = world.drive().disk("disk", 1).expect("namespace 1");
    source.prepare(&world.pool.area());
    assert_eq!(world.emulator.mappings(), before + 1);
    world.open();
    assert_eq!(world.emulator.mappings(), before + 1, "the core maps nothing");
    world.read(3, 1).expect("read");
    // For a function that is closed meanwhile it is worth nothing, and goes with it.
    source.prepare(&world.pool.area());
    world.emulator.vanish();
    world.until(|world| !world.emulator.is_open());
    world.run_for(10);
    assert_eq!(world.emulator.mappings(), 0);
    world.emulator.plug();
    world.run_for(5000);
    world.open();
    world.read(3, 1).expect("read");
    drop(source);
    world.end();
}

#[test]
fn queues_whose_doorbells_are_not_in_the_registers_are_not_used() {
    // Doorbells of the admin queue and of two more pairs.
    let spec = EmulatorSpec { bar_bytes: 4096 + 3 * 8, ..small_blocks() };
    let mut world = World::with(spec, settings(), 2);
    assert_eq!(world.drive().facts().expect("in service").queue_pairs, 2);
    world.read(3, 1).expect("read");
    world.end();
    let world = World::with(EmulatorSpec { dstrd: 15, bar_bytes: 16_384, ..small_blocks() }, settings(), 1);
    let why = world.drive().failure().expect("not opened");
    assert!(why.starts_with("CAP.DSTRD is 15, and BAR 0 has 16384 bytes: the doorbells"), "{why}");
}

#[test]
fn a_namespace_that_nobody_uses_may_be_refused() {
    let spec = EmulatorSpec { namespaces: vec![small_blocks().namespaces.remove(0); 2], ..small_blocks() };
    let mut world = World::with(spec, settings(), 1);
    world.emulator.set_fatal();
    // Controller, the same for NVM, queues, the list, namespace 1, and namespace 2.
    for _ in 0..5 {
        world.emulator.inject_admin(Injection::Delay { steps: 1, is_executed_late: true });
    }
    world.emulator.inject_admin(Injection::Error(Status::INVALID_FIELD.dnr()));
    world.read(3, 1).expect("namespace 1");
    assert_eq!(world.emulator.counters().enables, 2);
    assert!(world.drive().disk("second", 2).is_err());
    world.end();
}

#[test]
fn a_namespace_that_is_formatted_behind_us_is_not_touched_again() {
    let mut world = World::with(small_blocks(), settings(), 1);
    world.read(3, 1).expect("read");
    let commands = world.emulator.counters().commands;
    world.emulator.format_namespace(1, 4096);
    world.run_for(100);
    // Told of so many blocks of 4096 bytes, the drive would write behind the end of the buffer.
    assert_eq!(world.read(3, 8), Err(DiskError::Gone));
    assert_eq!(world.emulator.counters().commands, commands);
    world.end();
}

#[test]
fn a_namespace_with_metadata_is_not_served_and_the_others_are() {
    let plain = NamespaceSpec { block_bytes: 512, ..NamespaceSpec::default() };
    let odd = NamespaceSpec { metadata_bytes: 8, ..plain.clone() };
    let mut world =
        World::with(EmulatorSpec { namespaces: vec![plain, odd], ..small_blocks() }, settings(), 1);
    let text = world.drive().disk("odd", 2).err().expect("refused").to_string();
    assert!(text.contains("[1]"), "{text}");
    world.read(3, 1).expect("namespace 1");
    world.end();
}

#[test]
fn zeroes_and_space_by_what_the_drive_has() {
    let reads_zeroes = Dlfeat::new().with_read_behavior(Dlfeat::READS_ZEROES);
    let deac = reads_zeroes.with_deallocate_in_write_zeroes(true);
    let (dsm, zeroes) = (Oncs::new().with_dataset_management(true), Oncs::new().with_write_zeroes(true));
    let both = dsm.with_write_zeroes(true);
    for (oncs, dlfeat, can_deallocate, is_zero) in [
        (both, deac, true, true),
        (both, reads_zeroes, true, false),
        (dsm, reads_zeroes, true, false),
        (zeroes, reads_zeroes, false, false),
        (dsm, Dlfeat::new(), true, false),
        (Oncs::new(), deac, false, false),
    ] {
        let namespace = NamespaceSpec { block_bytes: 512, dlfeat, ..NamespaceSpec::default() };
        let spec = EmulatorSpec { oncs, namespaces: vec![namespace], ..small_blocks() };
        let mut world = World::with(spec, settings(), 1);
        world.write(0, &vec![9; 700 * 512], false).expect("written");
        assert_eq!(world.disk(0).geometry().can_deallocate, can_deallocate);
        assert_eq!(
            world.drive().disk("d", 1).expect("namespace 1").deallocated_is_zero(),
            is_zero,
            "for certain"
        );
        let result = world.command(Op::Deallocate, range(1, 300));
        assert_eq!(result, if can_deallocate { Ok(()) } else { Err(DiskError::NotSupported) });
        world.command(Op::WriteZeroes { deallocate: true, fua: true }, range(301, 300)).expect("zeroes");
        world.command(Op::WriteZeroes { deallocate: false, fua: false }, range(650, 1)).expect("zeroes");
        let data = world.emulator.read_medium(1, 0, 700);
        for (lba, block) in data.chunks(512).enumerate() {
            let gone = can_deallocate && dlfeat != Dlfeat::new();
            let is_zero = matches!(lba, 301..601 | 650) || (gone && matches!(lba, 1..301));
            assert!(block.iter().all(|byte| *byte == if is_zero { 0 } else { 9 }), "{oncs:?} block {lba}");
        }
        world.end();
    }
}

#[test]
fn a_drive_that_is_closed_is_told_to_save_what_it_has() {
    let mut world = World::with(small_blocks(), settings(), 1);
    world.write(3, &[7; 512], false).expect("written, to the cache");
    world.drop_cores();
    world.drop_drive();
    let normal = ShutdownNotification::NORMAL;
    world.until(|world| Cc::from_bits(world.emulator.register(CC)).shutdown() == normal);
    assert!(Csts::from_bits(world.emulator.register(CSTS)).rdy(), "before it is disabled");
    world.end();
    world.emulator.power_cut(1);
    assert_eq!(world.emulator.read_medium(1, 3, 1), [7; 512]);
}

#[test]
fn a_drive_that_is_not_needed_any_more_ends_what_its_cores_have_first() {
    let mut world = World::with(small_blocks(), settings(), 1);
    world.read(3, 1).expect("in service");
    // A delayed one, one that is aborted and repeated, and one after a reset.
    for injection in
        [Injection::Delay { steps: 1500, is_executed_late: true }, Injection::Swallow, Injection::Drop]
    {
        world.emulator.inject(injection);
        world.start_write(0, 3, 7);
    }
    world.run_for(5);
    world.drop_drive();
    world.until(|world| world.ended() == 3);
    assert_eq!((world.failed(), world.emulator.is_open()), (0, true));
    world.end();
    assert_eq!(world.emulator.read_medium(1, 3, 1), [7; 512]);
}

#[test]
fn a_core_that_keeps_its_handle_does_not_keep_a_drive_that_is_not_needed_any_more() {
    let mut world = World::with(small_blocks(), settings(), 1);
    world.read(3, 1).expect("in service");
    world.drop_drive();
    // 2 s for a command, 1 s for its Abort, 5 s for a core that is to stop.
    world.run_for(7900);
    world.read(3, 1).expect("still in service");
    world.run_for(500);
    assert!(!world.emulator.is_open());
    assert_eq!(world.read(3, 1), Err(DiskError::Gone));
    world.end();
}

#[test]
fn a_namespace_that_grows_is_larger_for_every_core() {
    let mut world = World::with(small_blocks(), settings(), 1);
    let blocks = world.disk(0).geometry().block_count;
    world.emulator.set_namespace_blocks(1, blocks + 100);
    world.run_for(100);
    assert_eq!(world.disk(0).geometry().block_count, blocks + 100);
    world.write(blocks + 99, &[1; 512], false).expect("the last block");
    world.end();
}

#[test]
fn the_place_of_a_drive_can_be_opened_again_when_it_is_closed() {
    let mut world = World::with(small_blocks(), settings(), 1);
    assert!(world.emulator.open().is_err(), "busy");
    world.end();
    assert!(world.emulator.open().is_ok());
}

#[test]
fn a_queue_pair_takes_the_pages_that_it_needs_and_no_huge_ones() {
    let mut world = World::with(small_blocks(), settings(), 0);
    let before = world.emulator.mapped_bytes();
    world.open();
    world.read(0, 1).expect("read");
    let taken = world.emulator.mapped_bytes() - before - world.pool.area().bytes();
    // A page for the list of each of 64 commands, and queues.
    assert!((64 * 4096..72 * 4096).contains(&taken), "{taken}");
    world.end();
}

/// Steps the emulator beside the managers.
fn step_beside(emulator: &Emulator) -> impl Drop {
    struct Beside(Arc<AtomicBool>, Option<JoinHandle<()>>);
    impl Drop for Beside {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
            self.1.take().map(JoinHandle::join);
        }
    }
    let stop = Arc::new(AtomicBool::new(false));
    let (its, emulator) = (Arc::clone(&stop), emulator.clone());
    let thread = std::thread::spawn(move || {
        while !its.load(Ordering::Relaxed) {
            emulator.step();
            std::thread::yield_now();
        }
    });
    Beside(stop, Some(thread))
}

#[test]
fn a_core_that_hangs_keeps_the_process_no_longer_than_is_allowed() {
    let emulator = Emulator::new(EmulatorSpec::default());
    let _beside = step_beside(&emulator);
    let drive = Drive::open(Arc::new(emulator.clone()), Settings::default()).expect("opens");
    let disk = drive.disk("disk", 1).expect("namespace 1");
    let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 4 }], Pages::Base).expect("a pool");
    let (buf, blocks) = (pool.take(4096), 4096 / disk.geometry().block_bytes);
    let mut core = disk.open(&ChannelContext { core: 0, pool, depth: 4 }).expect("opens");
    // It has its queue pair when a command has ended.
    let mut done = Vec::with_capacity(4);
    let end = Instant::now() + Duration::from_secs(20);
    done.extend(core.submit(Token(1), &IoRequest::new(Op::Read, BlockRange { lba: 0, blocks }), buf));
    while done.is_empty() {
        assert!(Instant::now() < end, "it was not served");
        core.poll(Nanos::ZERO, &mut done);
        std::thread::yield_now();
    }
    done.clear();
    drop((disk, drive));
    // It does not answer any more.
    assert!(!finish_within(Duration::from_millis(100)));
    assert!(emulator.is_open());
    drop(core);
    let end = Instant::now() + Duration::from_secs(20);
    while emulator.is_open() {
        assert!(Instant::now() < end, "its manager goes on when the core is gone");
        std::thread::yield_now();
    }
}
