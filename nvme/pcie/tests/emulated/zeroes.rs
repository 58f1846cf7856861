//! Zeroes and deallocations: how many commands they become, and what is done where the drive refuses them.

use nvme_spec::Status;
use nvme_spec::identify::Oncs;
use spindle_target_disk::{DiskError, Op};
use spindle_tests_emulator::{EmulatorSpec, NamespaceSpec};

use crate::failures::settings;
use crate::world::World;
use crate::{range, small_blocks};

#[test]
fn a_large_trim_is_a_few_commands() {
    // 16 GiB: 512 commands of Write Zeroes.
    let namespace = NamespaceSpec { block_bytes: 512, blocks: 1 << 25, ..NamespaceSpec::default() };
    let spec = EmulatorSpec { namespaces: vec![namespace], ..small_blocks() };
    let mut world = World::with(spec, settings(), 1);
    world.read(0, 1).expect("in service");
    for (blocks, commands) in [(1 << 25, 1), ((64 << 16) + 1, 1), (64 << 16, 64), (9, 1)] {
        let before = world.emulator.counters().commands;
        world.command(Op::Deallocate, range(0, blocks)).expect("deallocated");
        assert_eq!(world.emulator.counters().commands - before, commands, "{blocks} blocks");
    }
    world.end();
    // Where there is nothing else.
    let namespace = NamespaceSpec { block_bytes: 512, blocks: 1 << 25, ..NamespaceSpec::default() };
    let oncs = Oncs::new().with_write_zeroes(true);
    let mut world =
        World::with(EmulatorSpec { oncs, namespaces: vec![namespace], ..small_blocks() }, settings(), 1);
    world.command(Op::Deallocate, range(0, 1 << 25)).expect("deallocated");
    world.end();
}

#[test]
fn what_the_drive_refuses_although_it_says_that_it_has_it_is_done_in_the_next_way() {
    let (opcode, field) = (Status::INVALID_OPCODE.dnr(), Status::INVALID_FIELD.dnr());
    let both = Oncs::new().with_write_zeroes(true).with_dataset_management(true);
    let only_zeroes = Oncs::new().with_write_zeroes(true);
    for (oncs, deac, all, is_deallocated) in [
        (both, Some(field), None, true),
        (both, Some(opcode), None, true),
        (both, None, Some(opcode), true),
        (both, None, Some(field), true),
        (only_zeroes, Some(field), None, false),
        (only_zeroes, None, Some(opcode), false),
    ] {
        let spec = EmulatorSpec { oncs, deac_refusal: deac, zeroes_refusal: all, mdts: 3, ..small_blocks() };
        let mut world = World::with(spec, settings(), 1);
        for turn in 0..2 {
            world.write(0, &vec![9; 2048 * 512], false).expect("written");
            let errors = world.emulator.counters().errors;
            let result = world.command(Op::Deallocate, range(1, 600));
            assert_eq!(result, if is_deallocated { Ok(()) } else { Err(DiskError::NotSupported) });
            let zeroes = |deallocate| Op::WriteZeroes { deallocate, fua: false };
            world.command(zeroes(true), range(700, 500)).expect("zeroes");
            world.command(zeroes(false), range(1300, 300)).expect("zeroes");
            let data = world.emulator.read_medium(1, 0, 2048);
            for (lba, block) in data.chunks(512).enumerate() {
                let is_zero =
                    matches!(lba, 700..1200 | 1300..1600) || is_deallocated && matches!(lba, 1..601);
                assert!(block.iter().all(|byte| *byte == if is_zero { 0 } else { 9 }), "block {lba}");
            }
            let refused = world.emulator.counters().errors - errors;
            assert!(turn == 0 || refused == 0, "{refused}: it is not asked again");
        }
        world.end();
    }
}
