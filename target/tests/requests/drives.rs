//! Drives of our own behind namespaces: what the target does with commands that a drive has.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme_spec::{Sqe, Status};
use spindle_nvme_pcie::Settings;
use spindle_target::qpair::request::RequestState;
use spindle_target_disk::Disk;
use spindle_tests::drive::threads::Threads;
use spindle_tests::drive::world::World;
use spindle_tests::script::{Answer, Queue, Rig, Setup, Want};
use spindle_tests_emulator::{EmulatorSpec, Faults, Injection, NamespaceSpec};

use crate::assert_ok;

/// Until the drive's threads have done it.
fn until(rig: &mut Rig, what: &str, mut is_so: impl FnMut(&mut Rig) -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_so(rig) {
        assert!(Instant::now() < end, "it did not happen: {what}");
        rig.turn();
        std::thread::yield_now();
    }
}

/// Everything that a queue is owed.
fn answers(rig: &mut Rig, queue: &Queue, count: usize) -> Vec<Answer> {
    let mut answers = Vec::new();
    until(rig, "every command is answered", |rig| {
        answers.extend(rig.answers(queue));
        answers.len() >= count
    });
    answers
}

#[test]
fn a_loaded_drive_that_is_removed_answers_what_it_has_before_it_is_closed() {
    let drive = Threads::new(8 << 20);
    let setup = Setup { zones: vec![(4096, 256)], ..Setup::small(vec![Arc::clone(drive.disk())]) };
    let mut rig = Rig::new(setup);
    let (_admin, cntlid) = rig.admin(0, 0);
    let io = rig.io(0, Want { entries: 128, ..Want::io(cntlid, 1) });
    // Its queue pair is made.
    rig.send(&io, Sqe::read(0x200, 1, 0, 1), 4096);
    answers(&mut rig, &io, 1).iter().for_each(assert_ok);
    drive.pause();
    // No more than its queue takes, and memory for all: nothing waits for anything else.
    (0..60).for_each(|cid| rig.send(&io, Sqe::read(cid, 1, u64::from(cid), 1), 4096));
    rig.turn();
    assert_eq!(rig.states(&io), [(RequestState::Executing, 60)]);
    assert!(!rig.cores[0].is_disk_idle(), "the drive has 60 commands");
    drop(rig.setup.remove(1));
    rig.publish();
    (0..100).for_each(|_| rig.turn());
    drive.go_on();
    answers(&mut rig, &io, 60).iter().for_each(assert_ok);
    assert!(rig.cores[0].is_disk_idle());
    rig.finish();
}

/// Turns of the target and of the drive's manager, and of the drive where it works.
fn turns(rig: &mut Rig, world: &mut World, count: u32, is_working: bool) {
    for _ in 0..count {
        rig.turn();
        world.step_manager(1);
        if is_working {
            world.emulator.step();
        }
    }
}

#[test]
fn a_drive_that_a_reload_takes_out_answers_what_it_has_before_it_is_shut_down() {
    let namespace = NamespaceSpec { block_bytes: 4096, ..NamespaceSpec::default() };
    let spec = EmulatorSpec { namespaces: vec![namespace], ..EmulatorSpec::default() };
    let mut world = World::new(spec, Settings::default(), 0, 64);
    // The configuration alone has the drive: it is not needed any more when no core has the old one.
    let disk: Arc<dyn Disk> = world.disk.take().expect("in service");
    let mut rig = Rig::new(Setup { zones: vec![(4096, 256)], ..Setup::small(vec![disk]) });
    let (_admin, cntlid) = rig.admin(0, 0);
    let io = rig.io(0, Want { entries: 128, ..Want::io(cntlid, 1) });
    rig.send(&io, Sqe::read(0x200, 1, 0, 1), 4096);
    turns(&mut rig, &mut world, 300, true);
    assert_ok(&rig.answer(&io).expect("its queue pair is made"));
    (0..60).for_each(|cid| rig.send(&io, Sqe::read(cid, 1, u64::from(cid), 1), 4096));
    turns(&mut rig, &mut world, 1, false);
    assert_eq!(rig.states(&io), [(RequestState::Executing, 60)]);
    drop(rig.setup.remove(1));
    rig.publish();
    turns(&mut rig, &mut world, 1000, false);
    assert!(rig.answers(&io).is_empty(), "the drive has not done it yet");
    turns(&mut rig, &mut world, 100, true);
    let answers = rig.answers(&io);
    assert_eq!(answers.len(), 60);
    answers.iter().for_each(assert_ok);
    rig.finish();
    world.close();
}

#[test]
fn a_media_error_of_a_drive_reaches_the_host_as_the_drive_says_it() {
    let drive = Threads::new(8 << 20);
    let mut rig = Rig::new(Setup::small(vec![Arc::clone(drive.disk())]));
    let host = rig.host();
    rig.send(&host.io, Sqe::read(1, 1, 0, 1), 4096);
    answers(&mut rig, &host.io, 1).iter().for_each(assert_ok);
    for status in [Status::UNRECOVERED_READ_ERROR, Status::GUARD_CHECK_ERROR] {
        for status in [status, status.dnr()] {
            drive.emulator.inject(Injection::Error(status));
            rig.send(&host.io, Sqe::read(2, 1, 0, 1), 4096);
            assert_eq!(answers(&mut rig, &host.io, 1)[0].status, status);
        }
    }
    rig.finish();
}

#[test]
fn a_drive_that_tells_every_completion_twice_ends_each_command_once() {
    let drive = Threads::new(8 << 20);
    let setup = Setup { zones: vec![(4096, 256)], ..Setup::small(vec![Arc::clone(drive.disk())]) };
    let mut rig = Rig::new(setup);
    let host = rig.host();
    drive.emulator.set_faults(Faults { double: 65_536, ..Faults::default() });
    for round in 0..40_u16 {
        // Of several steps, of which none may end with the second completion of the one before.
        rig.send(&host.io, Sqe::verify(1, 1, 0, 256), 0);
        rig.send(&host.io, Sqe::compare(2, 1, 512, 1), 4096);
        rig.bring(&host.io, 2, &[0; 4096]);
        (3..12).for_each(|cid| rig.send(&host.io, Sqe::read(cid, 1, u64::from(round), 1), 4096));
        answers(&mut rig, &host.io, 11).iter().for_each(assert_ok);
    }
    assert!(rig.answers(&host.io).is_empty(), "an answer to nothing");
    assert!(drive.emulator.counters().doubled > 400);
    rig.finish();
}

/// Write a block, all of this byte.
fn write(rig: &mut Rig, queue: &Queue, lba: u64, byte: u8, fua: bool) {
    rig.send(queue, Sqe::write(7, 1, lba, 1, fua), 4096);
    if queue.line.fetching().contains(&7) {
        rig.bring(queue, 7, &[byte; 4096]);
    }
    answers(rig, queue, 1).iter().for_each(assert_ok);
}

fn first_byte(rig: &mut Rig, queue: &Queue, lba: u64) -> u8 {
    rig.send(queue, Sqe::read(8, 1, lba, 1), 4096);
    let read = answers(rig, queue, 1);
    assert_ok(&read[0]);
    read[0].data[0]
}

#[test]
fn what_was_flushed_or_had_fua_is_on_the_drive_when_its_power_goes() {
    let drive = Threads::new(8 << 20);
    let mut rig = Rig::new(Setup::small(vec![Arc::clone(drive.disk())]));
    let host = rig.host();
    // The cache is emptied behind the driver's back, so that it repeats nothing.
    (0..3).for_each(|lba| write(&mut rig, &host.io, lba, 1, false));
    rig.send(&host.io, Sqe::flush(9, 1), 0);
    answers(&mut rig, &host.io, 1).iter().for_each(assert_ok);
    drive.emulator.lose_write_cache();
    write(&mut rig, &host.io, 1, 2, true);
    write(&mut rig, &host.io, 2, 2, false);
    write(&mut rig, &host.io, 3, 2, true);
    drive.emulator.lose_write_cache();
    let found: Vec<u8> = (0..5).map(|lba| first_byte(&mut rig, &host.io, lba)).collect();
    assert_eq!(found, [1, 2, 1, 2, 0], "flushed, FUA, neither, FUA, nothing");
    rig.finish();
}
