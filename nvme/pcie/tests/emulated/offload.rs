//! Compare, Verify and Copy: what the drive does itself, cut as it wants it.

use nvme_spec::Status;
use nvme_spec::identify::Oncs;
use spindle_target_disk::{Abilities, DiskError, Op};
use spindle_tests_emulator::{EmulatorSpec, Injection, NamespaceSpec};

use crate::failures::settings;
use crate::world::World;
use crate::{range, small_blocks};

const ALL: Abilities = Abilities { compare: true, verify: true, copy: true, reads_in_place: false };

fn pattern(blocks: u32) -> Vec<u8> {
    (0..blocks * 512).map(|at| (at / 512 * 31 + at).to_le_bytes()[0]).collect()
}

/// A drive with this Copy.
fn copying(mssrl: u16, mcl: u32, msrc_z: u8) -> EmulatorSpec {
    let [namespace, ..] = &small_blocks().namespaces[..] else { panic!("one namespace") };
    let namespace = NamespaceSpec { mssrl, mcl, msrc_z, ..namespace.clone() };
    EmulatorSpec { namespaces: vec![namespace], ..small_blocks() }
}

#[test]
fn a_copy_is_cut_to_the_ranges_and_blocks_that_the_drive_takes() {
    for (mssrl, mcl, msrc_z, commands) in [
        (128, 1024, 15, 1),
        (128, 128, 127, 4),
        (1, 65_536, 255, 4), // A page has room for 128 ranges.
        (u16::MAX, u32::MAX, 255, 1),
        (u16::MAX, 7, 255, 72),
        (5, 100, 1, 50),
        (5, 8, 3, 63),
    ] {
        let mut world = World::with(copying(mssrl, mcl, msrc_z), settings(), 1);
        assert_eq!(world.disk(0).abilities(), ALL);
        let data = pattern(500);
        world.write(100, &data, true).expect("written");
        world.copy(range(100, 500), 3000, false).expect("copied");
        assert_eq!(world.emulator.read_medium(1, 3000, 500), data, "{mssrl} {mcl} {msrc_z}");
        let beside = world.emulator.read_medium(1, 2999, 1).into_iter();
        assert!(beside.chain(world.emulator.read_medium(1, 3500, 1)).all(|byte| byte == 0));
        let counters = world.emulator.counters();
        assert_eq!((counters.copies, counters.errors), (commands, 0), "{mssrl} {mcl} {msrc_z}");
        world.end();
    }
}

#[test]
fn a_compare_is_cut_as_a_read_is_and_finds_a_difference_in_any_piece() {
    let mut spec = EmulatorSpec { mdts: 1, ..small_blocks() };
    spec.namespaces[0].noiob = 10;
    let mut world = World::with(spec, settings(), 1);
    let mut data = pattern(50);
    world.write(3, &data, false).expect("written");
    let before = world.emulator.counters().compares;
    world.compare(3, &data).expect("the same");
    assert_eq!(world.emulator.counters().compares - before, 6);
    for at in [0, 511, 512 * 7, 512 * 20 + 5, 512 * 50 - 1] {
        data[at] ^= 1;
        assert_eq!(world.compare(3, &data), Err(DiskError::CompareDiffers), "{at}");
        data[at] ^= 1;
    }
    world.compare(3, &data).expect("nothing has changed");
    world.end();
}

#[test]
fn a_verify_is_cut_at_vsl_and_moves_no_data() {
    let mut world = World::with(EmulatorSpec { vsl: 1, mdts: 1, ..small_blocks() }, settings(), 1);
    let read = world.emulator.health().host_reads;
    world.command(Op::Verify, range(5, 1000)).expect("can be read");
    assert_eq!(world.emulator.counters().verifies, 63);
    assert_eq!(world.emulator.health().host_reads, read);
    world.end();
    let mut spec = small_blocks();
    spec.namespaces[0].blocks = 100_000;
    let mut world = World::with(spec, settings(), 1);
    world.command(Op::Verify, range(0, 100_000)).expect("can be read");
    assert_eq!(world.emulator.counters().verifies, 2, "NLB has 16 bits");
    world.end();
}

#[test]
fn what_the_drive_does_not_have_is_neither_promised_nor_done() {
    let no_format = EmulatorSpec { cdfs: 2, ..small_blocks() };
    let only = |oncs: Oncs| EmulatorSpec { oncs, ..small_blocks() };
    let none = Abilities::default();
    for (spec, abilities) in [
        (only(Oncs::new()), none),
        (only(Oncs::new().with_compare(true)), Abilities { compare: true, ..none }),
        (only(Oncs::new().with_verify(true)), Abilities { verify: true, ..none }),
        (only(Oncs::new().with_copy(true)), Abilities { copy: true, ..none }),
        (no_format, Abilities { copy: false, ..ALL }),
        (copying(0, 100, 0), Abilities { copy: false, ..ALL }),
        (copying(100, 0, 0), Abilities { copy: false, ..ALL }),
    ] {
        let mut world = World::with(spec, settings(), 1);
        world.read(0, 1).expect("in service");
        assert_eq!(world.disk(0).abilities(), abilities);
        let wanted = |has: bool| if has { Ok(()) } else { Err(DiskError::NotSupported) };
        assert_eq!(world.compare(3, &[0; 1024]), wanted(abilities.compare));
        assert_eq!(world.command(Op::Verify, range(0, 9)), wanted(abilities.verify));
        assert_eq!(world.copy(range(0, 9), 20, true), wanted(abilities.copy));
        assert_eq!(world.emulator.counters().errors, 0, "it was not even asked");
        world.end();
    }
}

#[test]
fn a_drive_that_has_no_such_command_after_all_is_not_asked_again() {
    let mut world = World::with(small_blocks(), settings(), 1);
    world.emulator.inject(Injection::Error(Status::INVALID_OPCODE.dnr()));
    assert_eq!(world.copy(range(0, 9), 20, true), Err(DiskError::NotSupported));
    assert_eq!(world.disk(0).abilities(), Abilities { copy: false, ..ALL });
    world.emulator.inject(Injection::Error(Status::INVALID_OPCODE.dnr()));
    assert_eq!(world.command(Op::Verify, range(0, 9)), Err(DiskError::NotSupported));
    world.emulator.inject(Injection::Error(Status::INVALID_OPCODE.dnr()));
    assert_eq!(world.compare(0, &[0; 512]), Err(DiskError::NotSupported));
    assert_eq!(world.disk(0).abilities(), Abilities::default());
    // After its next start it may.
    world.emulator.set_fatal();
    world.run_for(2000);
    world.read(0, 1).expect("in service");
    assert_eq!(world.disk(0).abilities(), ALL);
    world.copy(range(0, 9), 20, true).expect("copied");
    world.end();
}

#[test]
fn failures_are_as_the_drive_says_them() {
    let mut world = World::with(small_blocks(), settings(), 1);
    let fails = |world: &mut World, status: Status, what: &str| {
        world.emulator.inject(Injection::Error(status));
        match what {
            "copy" => world.copy(range(0, 9), 20, false),
            "verify" => world.command(Op::Verify, range(0, 9)),
            _ => world.compare(0, &[0; 512]),
        }
    };
    let unread = Status::UNRECOVERED_READ_ERROR.dnr();
    for what in ["copy", "verify", "compare"] {
        assert_eq!(fails(&mut world, unread, what), Err(DiskError::Device(unread)), "{what}");
        assert_eq!(fails(&mut world, Status::ABORTED_BY_REQUEST, what), Ok(()), "{what}: once more");
        assert_eq!(fails(&mut world, Status::INVALID_FIELD.dnr(), what), Err(DiskError::Internal), "{what}");
    }
    let unwritten = Status::WRITE_FAULT;
    assert_eq!(fails(&mut world, unwritten, "copy"), Err(DiskError::Device(unwritten)));
    let protected = Status::NAMESPACE_IS_WRITE_PROTECTED.dnr();
    assert_eq!(fails(&mut world, protected, "copy"), Err(DiskError::WriteProtected));
    assert_eq!(world.disk(0).abilities(), ALL);
    world.end();
}

#[test]
fn a_copy_may_be_lost_with_the_power_unless_it_was_flushed_or_had_fua() {
    for (fua, flushed) in [(false, Err(DiskError::MediaWrite)), (true, Ok(()))] {
        let mut world = World::with(small_blocks(), settings(), 1);
        let data = pattern(40);
        world.write(0, &data, true).expect("written");
        world.command(Op::Flush, range(0, 0)).expect("flushed");
        world.copy(range(0, 40), 100, fua).expect("copied");
        world.emulator.vanish();
        world.emulator.power_cut(7);
        world.run_for(2000);
        world.emulator.plug();
        world.run_for(3000);
        assert_eq!(world.command(Op::Flush, range(0, 0)), flushed, "FUA {fua}");
        assert_eq!(world.emulator.read_medium(1, 100, 40) == data, fua);
        world.end();
    }
}

#[test]
fn a_copy_that_the_drive_forgot_is_given_to_it_again() {
    let mut world = World::with(copying(4, 8, 1), settings(), 1);
    let data = pattern(40);
    world.write(0, &data, false).expect("written");
    world.emulator.inject(Injection::Swallow);
    world.copy(range(0, 40), 100, false).expect("the second time");
    assert_eq!(world.emulator.read_medium(1, 100, 40), data);
    assert_eq!((world.emulator.counters().aborted, world.emulator.counters().copies), (1, 5));
    world.end();
}

#[test]
fn what_the_drive_did_itself_is_told_when_it_is_let_go() {
    for (copies, lines) in [(0, 0), (2, 1)] {
        let mut world = World::with(small_blocks(), settings(), 1);
        (0..copies).for_each(|_| world.copy(range(0, 9), 20, false).expect("copied"));
        assert_eq!(crate::logged(|| world.close()), lines);
    }
}
