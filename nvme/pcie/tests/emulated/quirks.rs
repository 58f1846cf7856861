//! Drives that need what they do not say.

use spindle_nvme_pcie::PciId;
use spindle_target_disk::Op;
use spindle_tests_emulator::EmulatorSpec;

use crate::failures::settings;
use crate::world::World;
use crate::{range, small_blocks};

fn drive(vendor: u16, device: u16) -> EmulatorSpec {
    EmulatorSpec { id: PciId { vendor, device }, timeout: 2, ..small_blocks() }
}

#[test]
fn a_drive_whose_sgls_are_bad_is_given_lists_of_pages() {
    for (spec, has_sgls) in [(drive(0x19e5, 0x3714), false), (small_blocks(), true)] {
        let mut world = World::with(spec, settings(), 1);
        assert_eq!(world.drive().facts().expect("in service").has_sgls, has_sgls);
        world.write(0, &vec![7; 1 << 20], false).expect("written");
        assert_eq!(world.read(0, 2048).expect("read"), vec![7; 1 << 20]);
        assert_eq!(world.emulator.counters().sgls > 0, has_sgls);
        world.end();
    }
}

#[test]
fn a_drive_that_wants_long_queues_has_them_and_no_more_commands() {
    for (id, entries) in [((0x8086, 0x0b60), 1024), ((0x8086, 0x0953), 1024), ((0x1b36, 0x10), 65)] {
        let mut world = World::with(drive(id.0, id.1), settings(), 1);
        world.read(0, 1).expect("in service");
        assert_eq!(world.emulator.queue_entries(1), Some(entries));
        // Twice what a core has at the drive.
        for lba in 0..128 {
            world.start(0, Op::WriteZeroes { deallocate: false, fua: false }, range(lba, 1));
        }
        world.run_for(50);
        assert!(world.ended() >= 64);
        world.end();
    }
}

#[test]
fn a_drive_that_must_not_be_looked_at_too_early_is_left_alone_for_a_while() {
    for (vendor, device) in [(0x144d, 0xa821), (0x144d, 0xa822), (0x144d, 0xa826), (0x1c5f, 0x0540)] {
        let spec = EmulatorSpec { csts_ones_steps: 2400, timeout: 10, ..drive(vendor, device) };
        let mut world = World::with(spec, settings(), 1);
        world.write(3, &[7; 512], false).expect("written");
        world.emulator.set_fatal();
        assert_eq!(world.read(3, 1).expect("after the reset"), [7; 512]);
        let counters = world.emulator.counters();
        assert_eq!((counters.enables, counters.function_resets), (2, 0), "it was not taken for gone");
        world.end();
    }
}

#[test]
fn no_command_crosses_a_stripe() {
    // 32 KiB in its own byte, else MDTS.
    for (vendor_stripe, mdts, commands) in [(3, 5, 4), (0, 3, 4), (0, 5, 1)] {
        let spec = EmulatorSpec { vendor_stripe, mdts, ..drive(0x8086, 0x0a54) };
        let mut world = World::with(spec, settings(), 1);
        world.read(0, 1).expect("in service");
        let before = world.emulator.counters().commands;
        world.write(32, &vec![5; 192 * 512], false).expect("written");
        assert_eq!(world.emulator.counters().commands - before, commands, "{vendor_stripe}, {mdts}");
        world.end();
    }
}
