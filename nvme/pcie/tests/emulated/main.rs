//! The driver over the emulator: manager, cores and controller stepped by one thread.
#![forbid(unsafe_code)]

mod away;
mod caches;
mod conformance;
mod failures;
mod offload;
mod places;
mod quirks;
mod shared_queue;
mod swaps;
mod world;
mod zeroes;

use spindle_target_disk::{BlockRange, Disk, DiskError, Op};
use spindle_tests_emulator::{EmulatorSpec, NamespaceSpec};

use world::World;

/// 512-byte blocks and a write cache.
fn small_blocks() -> EmulatorSpec {
    let namespace = NamespaceSpec { block_bytes: 512, ..NamespaceSpec::default() };
    EmulatorSpec { namespaces: vec![namespace], has_write_cache: true, ..EmulatorSpec::default() }
}

fn range(lba: u64, blocks: u32) -> BlockRange {
    BlockRange { lba, blocks }
}

/// How many lines `act` logs on this thread.
fn logged(act: impl FnOnce()) -> u64 {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use tracing::span;

    struct Lines(Arc<AtomicU64>);
    impl tracing::Subscriber for Lines {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }
        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn enter(&self, _: &span::Id) {}
        fn exit(&self, _: &span::Id) {}
    }
    let lines = Arc::new(AtomicU64::new(0));
    tracing::subscriber::with_default(Lines(Arc::clone(&lines)), act);
    lines.load(Ordering::Relaxed)
}

#[test]
fn a_drive_is_enabled_identified_and_shut_down() {
    let mut world = World::new(small_blocks());
    let facts = world.drive().facts().expect("in service");
    assert_eq!(facts.serial, EmulatorSpec::default().serial);
    assert_eq!(world.disk(0).geometry().block_bytes, 512);
    let ids = world.drive().disk("d", 1).expect("a disk").medium_ids();
    let (of_drive, of_namespace) = ids.split_at(2);
    assert!(of_namespace.len() == 2 && of_namespace.iter().all(|id| id.starts_with("eui.")), "{ids:?}");
    assert_eq!(of_drive, [format!("serial.{}/1", facts.serial), format!("serial.{}", facts.serial)]);
    world.close();
    assert!(!world.emulator.is_open());
    assert_eq!((world.emulator.violations(), world.emulator.first_violation()), (0, None));
}

#[test]
fn what_is_written_is_read_and_on_the_medium() {
    let mut world = World::new(small_blocks());
    for blocks in [1_u32, 7, 8, 9, 16, 17, 64, 256, 2048] {
        let lba = u64::from(blocks) * 3;
        let data: Vec<u8> = (0..blocks * 512).map(|at| (at * 7 + blocks).to_le_bytes()[0]).collect();
        world.write(lba, &data, false).expect("written");
        assert_eq!(world.read(lba, blocks).expect("read"), data, "{blocks}");
        assert_eq!(world.emulator.read_medium(1, lba, u64::from(blocks)), data);
    }
    world.command(Op::Flush, range(0, 0)).expect("flushed");
    world.command(Op::Deallocate, range(3, 1000)).expect("deallocated");
    assert!(world.read(3, 1000).expect("read").iter().all(|byte| *byte == 0));
    world.close();
    assert_eq!((world.emulator.violations(), world.emulator.first_violation()), (0, None));
}

#[test]
fn a_drive_that_vanishes_ends_everything_and_comes_back() {
    let mut world = World::new(small_blocks());
    world.write(5, &[9; 512], true).expect("written");
    world.emulator.vanish();
    assert_eq!(world.read(5, 1), Err(DiskError::Internal), "it may come back");
    assert!(!world.emulator.is_open(), "let go");
    world.emulator.plug();
    world.run_for(5000);
    assert_eq!(world.read(5, 1).expect("the same drive"), [9; 512]);
    world.close();
    assert_eq!((world.emulator.violations(), world.emulator.first_violation()), (0, None));
}
