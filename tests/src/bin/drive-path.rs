//! The user-space NVMe driver's path of a 4 KiB random read or write, over the emulated drive: for counting
//! instructions.
//!
//! `drive-path N [read|write]`: N commands, 32 in flight. Only what is within [`counted_submit`] and
//! [`counted_poll`] is the driver's: `scripts/instructions` has callgrind collect there and nowhere else. The
//! instructions of a run with 2 N less those of one with N, by N, are those of one command.
#![forbid(unsafe_code)]

use spindle_nvme_pcie::Settings;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_target_disk::{BlockRange, DiskChannel, Done, IoRequest, Op, Token};
use spindle_tests::drive::world::World;
use spindle_tests_emulator::EmulatorSpec;

const DEPTH: u64 = 32;
const BLOCKS: u64 = 1024;

#[inline(never)]
fn counted_submit(disk: &mut dyn DiskChannel, token: Token, request: &IoRequest, buf: Option<Buf>) {
    let done = disk.submit(token, request, buf);
    assert!(done.is_none(), "it is given to the drive");
}

#[inline(never)]
fn counted_poll(disk: &mut dyn DiskChannel, done: &mut Vec<Done>) {
    disk.poll(Nanos::ZERO, done);
}

fn main() {
    let mut args = std::env::args().skip(1);
    let total: u64 = args.next().map_or(100_000, |count| count.parse().expect("a number"));
    let is_write = args.next().is_some_and(|kind| kind == "write");
    let mut world = World::new(EmulatorSpec::default(), Settings::default(), 1, 64);
    // The queue is made.
    for _ in 0..100 {
        world.step_manager(1);
        world.emulator.step();
        world.poll(0);
    }
    let World { emulator, cores, .. } = &mut world;
    let core = cores.first_mut().expect("one");
    let (pool, disk) = (core.pool.clone(), core.disk.as_mut().expect("open"));
    let mut done = Vec::with_capacity(64);
    let (mut random, mut ended, mut begun) = (0x2545_f491_4f6c_dd1d_u64, 0, 0);
    let op = if is_write { Op::Write { fua: false } } else { Op::Read };
    while ended < total {
        for _ in 0..DEPTH {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let buf = pool.take(4096).expect("room");
            let request = IoRequest::new(op, BlockRange { lba: random % BLOCKS, blocks: 1 });
            counted_submit(disk.as_mut(), Token(begun), &request, Some(buf));
            begun += 1;
        }
        // Once to send, once to receive.
        counted_poll(disk.as_mut(), &mut done);
        emulator.step();
        counted_poll(disk.as_mut(), &mut done);
        ended += done.len() as u64;
        assert!(done.drain(..).all(|done| done.result.is_ok()), "all of it works");
    }
    assert_eq!((ended, emulator.violations()), (begun, 0));
    println!("{ended} commands");
}
