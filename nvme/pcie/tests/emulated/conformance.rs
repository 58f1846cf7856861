//! The contract of `DiskChannel` (`docs/disk-contract.md`) for a drive, emulated.

use std::sync::Arc;

use nvme_spec::status::Status;
use spindle_reactor::clock::Nanos;
use spindle_target_disk::{Disk, DiskError};
use spindle_tests_conformance::{Rig, check};
use spindle_tests_emulator::{EmulatorSpec, Injection};

use crate::failures::settings;
use crate::small_blocks;
use crate::world::World;

/// Commands that fail: more than one read is made of.
const FAILING: usize = 64;

struct DriveRig {
    source: Arc<dyn Disk>,
    world: World,
    is_held: bool,
}

impl DriveRig {
    fn make() -> Box<dyn Rig> {
        let world = World::with(EmulatorSpec { timeout: 2, ..small_blocks() }, settings(), 0);
        let source = world.drive().disk("disk", 1).expect("namespace 1");
        Box::new(DriveRig { source, world, is_held: false })
    }
}

impl Drop for DriveRig {
    fn drop(&mut self) {
        assert_eq!((self.world.emulator.violations(), self.world.emulator.first_violation()), (0, None));
    }
}

impl Rig for DriveRig {
    fn source(&self) -> Arc<dyn Disk> {
        Arc::clone(&self.source)
    }

    fn pass(&mut self, time: Nanos) -> Nanos {
        for _ in 0..time.0 / Nanos::from_ms(1).0 {
            self.world.step(!self.is_held);
        }
        Nanos::from_ms(self.world.now())
    }

    fn hold(&mut self, is_held: bool) -> bool {
        self.is_held = is_held;
        true
    }

    fn fail_reads(&mut self, fails: bool) -> Option<DiskError> {
        self.world.emulator.clear_injections();
        for _ in 0..if fails { FAILING } else { 0 } {
            self.world.emulator.inject(Injection::Error(Status::INTERNAL_ERROR.dnr()));
        }
        Some(DiskError::Internal)
    }

    fn change_while_away(&mut self, lba: u64, byte: u8) -> bool {
        self.world.emulator.link_down();
        for _ in 0..50 {
            self.world.step(true);
        }
        self.world.emulator.write_medium(1, lba, &[byte; 512]);
        self.world.emulator.link_up();
        true
    }
}

#[test]
fn a_drive_keeps_the_contract() {
    let shown = check(DriveRig::make);
    assert_eq!(shown, ["content", "once", "compose", "cancel", "error", "return"]);
}
