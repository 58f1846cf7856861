//! Caches in front of a drive's disks: filled by the drive itself, dropped when it was away or reset.

use std::sync::Arc;
use std::time::{Duration, Instant};

use spindle_reactor::mem::Pages;
use spindle_target_disk::{BlockRange, CacheSpec, CachedDisk, Disk, DiskError, Op, OpenError, PolicyKind};
use spindle_tests_emulator::{EmulatorSpec, Injection, NamespaceSpec, SglSupport};

use crate::failures::settings;
use crate::world::World;
use crate::{range, small_blocks};

/// Blocks of a page.
const PAGE: u32 = 8;

fn drive() -> EmulatorSpec {
    EmulatorSpec { timeout: 2, ..small_blocks() }
}

fn spec(bytes: u64) -> CacheSpec {
    CacheSpec::new(bytes, PolicyKind::S3Fifo, Pages::Base)
}

fn cached(world: &World, nsid: u32, bytes: u64) -> Result<Arc<CachedDisk>, OpenError> {
    CachedDisk::new(world.drive().disk("disk", nsid).expect("a namespace"), Some(&spec(bytes)))
}

/// A drive with a cache of 1 MiB, and so many cores.
fn world(spec: EmulatorSpec, cores: usize) -> World {
    let mut world = World::with(spec, settings(), 0);
    let disk = cached(&world, 1, 1 << 20).expect("a cache");
    (0..cores).for_each(|_| world.open_on(&*disk));
    world
}

fn data(seed: u32, blocks: u32) -> Vec<u8> {
    (0..blocks * 512).map(|at| (at / 512 * 31 + at * 7 + seed).to_le_bytes()[0]).collect()
}

/// Until so many areas are mapped: the memory of a former cache is given up by a thread, in its own time.
fn until_mapped(world: &mut World, maps: usize) {
    let end = Instant::now() + Duration::from_secs(60);
    world.run_for(100);
    while world.emulator.mappings() != maps {
        assert!(Instant::now() < end, "{} areas are mapped, not {maps}", world.emulator.mappings());
        std::thread::yield_now();
        world.run_for(1);
    }
}

fn page(at: u64) -> BlockRange {
    range(at * u64::from(PAGE), PAGE)
}

#[test]
fn a_cache_is_filled_by_the_drive_and_answers_from_there() {
    for sgl in [SglSupport::None, SglSupport::Bytes] {
        let mut world = world(EmulatorSpec { sgl, mdts: 4, ..drive() }, 2);
        world.write(16, &data(1, 1024), false).expect("written");
        for (lba, blocks) in [(16, 8), (17, 1), (23, 2), (100, 64), (16, 1000), (333, 400)] {
            let expected = data(1, 1024)[(lba - 16) * 512..][..blocks * 512].to_vec();
            let (lba, blocks) = (lba as u64, u32::try_from(blocks).expect("small"));
            for (core, is_hit) in [(0, None), (1, Some(true)), (0, Some(true))] {
                let (found, was_hit) = world.read_prepared(core, range(lba, blocks)).expect("read");
                assert!(found == expected, "{lba} {blocks} on {core}");
                assert!(is_hit.is_none_or(|is_hit| is_hit == was_hit), "{lba} {blocks} on {core}");
            }
        }
        world.end();
    }
}

#[test]
fn pages_in_frames_here_and_there_are_read_and_written_right() {
    for sgl in [SglSupport::None, SglSupport::Bytes] {
        let mut world = world(EmulatorSpec { sgl, ..drive() }, 1);
        let pages = 1024;
        let mut all = data(9, pages * PAGE);
        world.emulator.write_medium(1, 0, &all);
        let mut seed = 1_u64;
        let mut next = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        // Four times the cache, so that its frames lie in disorder soon.
        for _ in 0..3000 {
            let blocks = if next(4) == 0 { 1 + next(300) } else { 1 + next(8) };
            let lba = next(u64::from(pages * PAGE) - blocks);
            let at = usize::try_from(lba).expect("small") * 512;
            let blocks = u32::try_from(blocks).expect("small");
            if next(4) == 0 {
                let new = data(u32::try_from(next(256)).expect("small"), blocks);
                world.write(lba, &new, false).expect("written");
                all[at..at + new.len()].copy_from_slice(&new);
            } else {
                let (found, _) = world.read_prepared(0, range(lba, blocks)).expect("read");
                assert!(found == all[at..at + found.len()], "{lba} {blocks}");
            }
        }
        world.command(Op::Flush, range(0, 0)).expect("flushed");
        assert!(world.emulator.read_medium(1, 0, u64::from(pages * PAGE)) == all);
        world.end();
    }
}

#[test]
fn a_cache_is_mapped_once_for_all_cores_and_not_longer_than_it_is_used() {
    let mut world = World::with(drive(), settings(), 1);
    world.read(0, 1).expect("in service");
    let (maps, bytes) = (world.emulator.mappings(), world.emulator.mapped_bytes());
    let disk = cached(&world, 1, 4 << 20).expect("a cache");
    assert_eq!(world.emulator.mappings(), maps + 1, "before a core needs it");
    assert!(world.emulator.mapped_bytes() - bytes >= 4 << 20);
    (0..2).for_each(|_| world.open_on(&*disk));
    for core in 1..3 {
        world.read_prepared(core, page(core as u64)).expect("read");
    }
    let served = world.emulator.mapped_bytes();
    // The cores have it as long as they live.
    drop(disk);
    assert_eq!(world.emulator.mapped_bytes(), served);
    world.read_prepared(1, page(5)).expect("read");
    world.drop_core(2);
    world.drop_core(1);
    // A core does not unmap it, which may take long: the manager does, when a thread has given up the cache.
    assert_eq!(world.emulator.mapped_bytes(), served);
    until_mapped(&mut world, maps);
    assert_eq!((world.emulator.mappings(), world.emulator.mapped_bytes()), (maps, bytes));
    world.end();
}

#[test]
fn a_cache_that_comes_or_goes_while_the_drive_works_is_mapped_or_let_go() {
    let mut world = World::with(drive(), settings(), 0);
    world.emulator.write_medium(1, 0, &data(1, 64));
    let disk = cached(&world, 1, 1 << 20).expect("a cache");
    (0..2).for_each(|_| world.open_on(&*disk));
    for core in 0..2 {
        world.read_prepared(core, range(0, 64)).expect("read");
    }
    let (maps, bytes) = (world.emulator.mappings(), world.emulator.mapped_bytes());
    for (next, mapped) in
        [(Some(8 << 20), 8 << 20), (None, 0), (Some(16 << 20), 16 << 20), (Some(1 << 20), 2 << 20)]
    {
        let next: Option<CacheSpec> = next.map(spec);
        let change = disk.prepare_cache(next.as_ref()).expect("made").expect("another");
        disk.set_cache(change);
        world.reconfigure();
        until_mapped(&mut world, maps - usize::from(next.is_none()));
        // Regions are whole huge pages; the first had one.
        let now = world.emulator.mapped_bytes() + (2 << 20);
        assert!(now.abs_diff(bytes + mapped) <= 2 << 20, "{now} {bytes} {mapped}");
        for (core, is_hit) in [(0, false), (1, next.is_some()), (0, next.is_some())] {
            let (found, was_hit) = world.read_prepared(core, range(0, 64)).expect("read");
            assert!(found == data(1, 64) && was_hit == is_hit, "{next:?} on {core}");
        }
    }
    // One that does not fit changes nothing.
    world.emulator.limit_maps(4 << 20);
    assert!(disk.prepare_cache(Some(&spec(64 << 20))).is_err());
    assert!(world.read_prepared(0, range(0, 64)).expect("read").1);
    // It has the drive too.
    drop(disk);
    world.end();
}

#[test]
fn a_cache_that_cannot_be_mapped_is_said_with_its_size() {
    let mut world = World::with(drive(), settings(), 1);
    world.read(0, 1).expect("in service");
    let maps = world.emulator.mappings();
    world.emulator.limit_maps(4 << 20);
    let error = cached(&world, 1, 16 << 20).err().expect("refused").to_string();
    let begin = "disk \"disk\": cannot map the memory of its cache (16777216 bytes): ";
    assert!(error.starts_with(begin), "{error}");
    assert_eq!(world.emulator.mappings(), maps);
    cached(&world, 1, 2 << 20).expect("a smaller one");
    world.end();
}

#[test]
fn a_disk_that_was_opened_without_a_cache_says_what_it_takes_to_have_one() {
    let mut world = World::with(drive(), settings(), 1);
    let disk = world.drive().disk("disk", 1).expect("a namespace");
    assert!(disk.prepare_cache(None).expect("as it is").is_none());
    let error = disk.prepare_cache(Some(&spec(1 << 20))).err().expect("refused").to_string();
    assert!(error.contains("restart to add one"), "{error}");
    drop(disk);
    world.end();
}

#[test]
fn two_namespaces_of_a_drive_have_a_cache_each() {
    let namespace = NamespaceSpec { block_bytes: 512, ..NamespaceSpec::default() };
    let spec = EmulatorSpec { namespaces: vec![namespace.clone(), namespace], ..drive() };
    let mut world = World::with(spec, settings(), 0);
    for nsid in 1..=2 {
        let disk = cached(&world, nsid, 1 << 20).expect("a cache");
        world.open_on(&*disk);
        world.emulator.write_medium(nsid, 0, &data(nsid, 64));
    }
    for (core, nsid) in [(0, 1), (1, 2), (0, 1), (1, 2)] {
        assert!(world.read_prepared(core, range(0, 64)).expect("read").0 == data(nsid, 64));
    }
    world.end();
}

#[test]
fn a_core_without_a_queue_pair_of_the_drive_fills_a_cache_too() {
    let mut world = world(EmulatorSpec { queue_pairs: 1, ..drive() }, 2);
    world.emulator.write_medium(1, 0, &data(1, 256));
    for core in [1, 0] {
        for lba in [0, 128] {
            let (found, is_hit) = world.read_prepared(core, range(lba, 128)).expect("read");
            let at = usize::try_from(lba).expect("small") * 512;
            assert!(found == data(1, 256)[at..at + 128 * 512] && is_hit == (core == 0));
        }
    }
    world.end();
}

type Act = fn(&World);

/// Ways in which a drive is not with us for a while: what happens, whether it is closed then, how it is back.
const WAYS: [(&str, Act, bool, Act); 4] = [
    ("fatal status", |world| world.emulator.set_fatal(), false, |_| {}),
    ("link", |world| world.emulator.link_down(), false, |world| world.emulator.link_up()),
    ("pulled", |world| world.emulator.vanish(), true, |world| world.emulator.plug()),
    ("removed", |world| world.emulator.ask_removal(), true, |world| world.emulator.plug()),
];

#[test]
fn what_others_wrote_while_the_drive_was_away_is_read_by_all_cores() {
    for (way, take, is_closed, give) in WAYS {
        let mut world = world(drive(), 2);
        world.write(u64::from(PAGE) * 3, &data(1, PAGE), true).expect("written");
        for (core, is_hit) in [(0, false), (0, true), (1, true)] {
            assert!(world.read_prepared(core, page(3)) == Ok((data(1, PAGE), is_hit)), "{way}");
        }
        // The other one has its queue pair too.
        world.read_prepared(1, page(9)).expect("read");
        take(&world);
        // No core has heard of it.
        assert!(world.read_prepared(1, page(3)) == Ok((data(1, PAGE), true)), "{way}");
        world.until(|world| !is_closed || !world.emulator.is_open());
        for at in 3..5 {
            world.emulator.write_medium(1, at * u64::from(PAGE), &data(2, PAGE));
        }
        give(&world);
        // What comes from the drive is new, so nothing that is answered afterwards may be older.
        let read = loop {
            match world.read_prepared(0, page(4)) {
                Ok(read) => break read,
                Err(error) => assert_eq!(error, DiskError::Internal, "{way}"),
            }
            world.turn();
        };
        assert!(read == (data(2, PAGE), false), "{way}");
        for (core, is_hit) in [(1, false), (0, true)] {
            assert!(world.read_prepared(core, page(3)) == Ok((data(2, PAGE), is_hit)), "{way} {core}");
        }
        world.end();
    }
}

/// A namespace that another host has made smaller and larger again has the same size, and zeroes.
#[test]
fn a_namespace_that_was_changed_and_looks_the_same_has_an_empty_cache() {
    let namespace = NamespaceSpec { block_bytes: 512, ..NamespaceSpec::default() };
    let spec = EmulatorSpec { namespaces: vec![namespace.clone(), namespace], ..drive() };
    let mut world = World::with(spec, settings(), 0);
    for nsid in [1, 1, 2] {
        world.emulator.write_medium(nsid, 24, &data(nsid, PAGE));
    }
    let disks = [cached(&world, 1, 1 << 20).expect("a cache"), cached(&world, 2, 1 << 20).expect("a cache")];
    [0, 0, 1].iter().for_each(|of| world.open_on(&*disks[*of]));
    for (core, nsid) in [(0, 1), (1, 1), (2, 2)] {
        assert!(world.read_prepared(core, page(3)).expect("read").0 == data(nsid, PAGE));
    }
    let blocks = disks[0].geometry().block_count;
    world.emulator.set_namespace_blocks(1, 8);
    world.emulator.set_namespace_blocks(1, blocks);
    world.run_for(100);
    for core in [1, 0] {
        let (found, _) = world.read_prepared(core, page(3)).expect("read");
        assert!(found.iter().all(|byte| *byte == 0), "a page of before on core {core}");
    }
    assert!(world.read_prepared(2, page(3)) == Ok((data(2, PAGE), true)), "the other one is as it was");
    drop(disks);
    world.end();
}

#[test]
fn a_fill_that_was_with_the_drive_before_a_reset_is_not_kept() {
    let mut world = world(drive(), 2);
    world.emulator.write_medium(1, 24, &data(1, PAGE));
    // Both have their queues.
    for (core, at) in [(0, 9), (1, 10)] {
        world.read_prepared(core, page(at)).expect("read");
    }
    // It is done by the drive, which does not say so.
    world.emulator.inject(Injection::Drop);
    world.start_prepared(0, page(3));
    world.run_for(5);
    world.emulator.set_fatal();
    world.emulator.write_medium(1, 24, &data(2, PAGE));
    world.until(|world| world.ended() == 1);
    assert_eq!(world.failed(), 0);
    for core in 0..2 {
        assert!(world.read_prepared(core, page(3)).expect("read").0 == data(2, PAGE));
    }
    world.end();
}

#[test]
fn a_cache_that_was_made_while_the_drive_was_away_is_mapped_when_it_is_back() {
    let mut world = World::with(drive(), settings(), 1);
    world.emulator.write_medium(1, 24, &data(1, PAGE));
    world.read(0, 1).expect("in service");
    world.emulator.vanish();
    world.until(|world| !world.emulator.is_open());
    world.run_for(100);
    let disk = cached(&world, 1, 1 << 20).expect("a cache");
    world.open_on(&*disk);
    world.emulator.plug();
    // The first waits for the drive: it was begun before that was back, so its page is not kept.
    for is_hit in [false, false, true] {
        assert!(world.read_prepared(1, page(3)) == Ok((data(1, PAGE), is_hit)), "{is_hit}");
    }
    drop(disk);
    world.end();
}

#[test]
fn a_core_that_is_dropped_with_fills_in_flight_leaves_them_their_memory() {
    let mut world = world(drive(), 1);
    world.read_prepared(0, page(9)).expect("in service");
    world.emulator.inject(Injection::Swallow);
    world.start_prepared(0, page(3));
    world.run_for(5);
    world.drop_cores();
    world.run_for(100);
    world.end();
}

#[test]
fn a_core_that_goes_with_fills_in_flight_does_not_take_the_memory_from_the_others() {
    let mut world = world(drive(), 2);
    for core in 0..2 {
        world.read_prepared(core, page(9 + core as u64)).expect("in service");
    }
    world.emulator.write_medium(1, 0, &data(1, 8 * PAGE));
    world.emulator.inject(Injection::Swallow);
    world.start_prepared(0, page(3));
    world.run_for(5);
    world.drop_core(0);
    // Its queue pair is deleted, and with that the drive lets go of what it had; the other core goes on.
    world.run_for(1000);
    let found = world.read_prepared(0, page(4)).expect("filled by the drive");
    assert!(found.0 == data(1, 8 * PAGE)[4 * 4096..5 * 4096] && !found.1);
    world.end();
}
