//! Commands to the user-space NVMe driver, and a drive that answers whatever it likes: completions and
//! register values of the fuzzer's invention, faults, a place that is empty for a while.
//!
//! The first bytes choose the drive. Then steps. In the end the drive is a good one again, and everything has
//! to end, to be closed, and every buffer to be home.
//!
//! What is not asked of the driver here: that no buffer comes back early. A completion with the right name
//! and a CSTS.RDY that is 0 are what a driver has to believe; behind it there is the IOMMU only. (The
//! simulation, in which drives do not forge those two, does ask it.)

use std::collections::BTreeMap;

use nvme_spec::Cqe;
use nvme_spec::Status;
use nvme_spec::register::{CAP, CSTS, VS};
use spindle_reactor::mem::ZoneSpec;
use spindle_target_disk::{BlockRange, Done, IoRequest, Op, Token};
use spindle_tests_emulator::{EmulatorSpec, Injection, NamespaceSpec};

use super::bytes::Bytes;
use crate::drive::Scenario;
use crate::drive::world::World;

/// Kinds of steps.
pub const STEPS: usize = 12;
/// Steps of a program.
const STEPS_MAX: usize = 400;
/// Turns after which a good drive has ended everything: longer than all time-outs of a drive that said that
/// its registers take 127.5 seconds.
const TURNS_MAX: usize = 40_000;
const CORES: usize = 2;
const BLOCKS: u64 = 512;

struct Scene {
    world: World,
    /// Commands in flight, and their cores.
    in_flight: BTreeMap<u64, usize>,
    next: u64,
    is_gone: bool,
    /// Free bytes that are missing since a core was closed.
    kept: [u64; CORES],
}

/// The body.
///
/// # Panics
/// When a promise is broken.
pub fn run(bytes: &[u8]) {
    let mut bytes = Bytes::new(bytes);
    let namespace = NamespaceSpec {
        blocks: BLOCKS,
        block_bytes: 512,
        mssrl: 16,
        mcl: 50,
        msrc_z: 3,
        ..NamespaceSpec::default()
    };
    let spec = EmulatorSpec {
        namespaces: vec![namespace],
        queue_entries_max: bytes.pick(&[1024, 2, 3, 9]),
        has_doorbell_buffer: bytes.below(2) == 1,
        has_write_cache: true,
        mdts: 1,
        vsl: 2,
        timeout: 1,
        ..EmulatorSpec::default()
    };
    let zones = [ZoneSpec { buffer_bytes: 4096, count: 8 }, ZoneSpec { buffer_bytes: 64 << 10, count: 4 }];
    let world = World::with_pools(spec, Scenario::settings(), CORES, 8, &zones);
    let mut scene = Scene { world, in_flight: BTreeMap::new(), next: 0, is_gone: false, kept: [0; CORES] };
    for _ in 0..STEPS_MAX {
        if bytes.is_empty() {
            break;
        }
        scene.step(&mut bytes);
    }
    scene.finish();
}

impl Scene {
    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.below(STEPS) {
            0 => self.submit(bytes),
            1 => self.poll(bytes.below(CORES)),
            2 => self.world.emulator.steps(1 + bytes.below(4) as u64),
            3 => self.world.step_manager(1 + u64::from(bytes.byte())),
            4 => {
                // Of a command that there may be.
                let (qid, cid) = (u16::from(bytes.byte() % 4), u16::from(bytes.byte()));
                let cid = cid & 0xf | (cid & 0xf0) << 6;
                let status = Status::from_bits(word(bytes));
                let mut cqe = Cqe::new(cid, status).with_result(u32::from(bytes.byte()));
                cqe.sq_id = u16::from(bytes.byte() % 4).into();
                self.world.emulator.post(qid, cqe);
            }
            5 => {
                let (qid, place) = (u16::from(bytes.byte() % 4), u16::from(bytes.byte()));
                let mut words = [0; 16];
                let given = bytes.take(16);
                words[..given.len()].copy_from_slice(given);
                let (first, second) = words.split_at(8);
                let number = |half: &[u8]| half.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
                self.world.emulator.scribble(qid, place, [number(first), number(second)]);
            }
            6 => {
                let offset = bytes.pick(&[CAP, CAP + 4, VS, CSTS, CSTS, CSTS]);
                let value = u32::from(word(bytes)) | u32::from(word(bytes)) << 16;
                self.world.emulator.set_register(offset, value);
                self.world.step_manager(1);
            }
            7 => self.world.emulator.inject(injection(bytes)),
            8 => self.world.emulator.inject_admin(bytes.pick(&[
                Injection::Swallow,
                Injection::Drop,
                Injection::Double,
                Injection::WrongCid,
                Injection::Error(Status::INTERNAL_ERROR),
                Injection::WrongStatus(Status::INVALID_FIELD),
            ])),
            9 if self.is_gone => self.plug(),
            9 => {
                self.world.emulator.vanish();
                self.is_gone = true;
            }
            10 => match bytes.below(3) {
                0 => self.world.emulator.set_fatal(),
                1 => self.world.emulator.freeze_registers(),
                _ => self.world.emulator.fail_resets(1),
            },
            _ => self.reopen(bytes.below(CORES)),
        }
    }

    fn plug(&mut self) {
        self.world.emulator.plug();
        self.is_gone = false;
    }

    fn submit(&mut self, bytes: &mut Bytes<'_>) {
        let index = bytes.below(CORES);
        // `None`: a copy, to the other half.
        let op = bytes.pick(&[
            Some(Op::Read),
            Some(Op::Write { fua: false }),
            Some(Op::Flush),
            Some(Op::WriteZeroes { deallocate: true, fua: true }),
            Some(Op::Deallocate),
            Some(Op::Compare),
            Some(Op::Verify),
            None,
        ]);
        let range = BlockRange { lba: u64::from(bytes.byte()), blocks: 1 + u32::from(bytes.byte()) % 128 };
        let Some(core) = self.world.cores.get_mut(index) else { return };
        let buf = match op {
            Some(Op::Read | Op::Write { .. } | Op::Compare) => {
                let Some(buf) = core.pool.take(range.blocks * 512) else { return };
                Some(buf)
            }
            Some(Op::Flush | Op::WriteZeroes { .. } | Op::Deallocate | Op::Verify) | None => None,
        };
        let Some(disk) = &mut core.disk else { return };
        self.next += 1;
        let done = match op {
            Some(op) => disk.submit(Token(self.next), &IoRequest::new(op, range), buf),
            // They lie apart: 256 blocks, of which a command takes 128.
            None => {
                disk.copy(Token(self.next), range, (range.lba + 128) % 256, range.blocks.is_multiple_of(2))
            }
        };
        self.in_flight.insert(self.next, index);
        done.into_iter().for_each(|done| self.end(&done));
    }

    fn end(&mut self, done: &Done) {
        assert!(self.in_flight.remove(&done.token.0).is_some(), "{:?} ended twice", done.token);
    }

    fn poll(&mut self, core: usize) {
        let ended: Vec<Done> = self.world.poll(core).collect();
        ended.iter().for_each(|done| self.end(done));
    }

    fn reopen(&mut self, index: usize) {
        self.in_flight.retain(|_, core| *core != index);
        if let (Some(core), Some(kept)) = (self.world.cores.get_mut(index), self.kept.get_mut(index)) {
            core.disk = None;
            *kept = core.pool_bytes - core.pool.free_bytes();
        }
        self.world.open(index);
    }

    fn finish(&mut self) {
        if self.is_gone {
            self.plug();
        }
        for _ in 0..TURNS_MAX {
            if self.in_flight.is_empty() {
                break;
            }
            self.world.emulator.steps(2);
            self.world.step_manager(20);
            (0..CORES).for_each(|core| self.poll(core));
        }
        assert!(self.in_flight.is_empty(), "commands that never end: {:?}", self.in_flight);
        self.world.close();
        for (core, kept) in self.world.cores.iter().zip(self.kept) {
            assert_eq!(core.pool.free_bytes() + kept, core.pool_bytes, "every buffer is home");
        }
    }
}

fn word(bytes: &mut Bytes<'_>) -> u16 {
    u16::from_le_bytes([bytes.byte(), bytes.byte()])
}

fn injection(bytes: &mut Bytes<'_>) -> Injection {
    let steps = 1 + u64::from(bytes.byte());
    bytes.pick(&[
        Injection::Swallow,
        Injection::Drop,
        Injection::Delay { steps, is_executed_late: true },
        Injection::Delay { steps, is_executed_late: false },
        Injection::Double,
        Injection::WrongCid,
        Injection::WrongSqid,
        Injection::WrongStatus(Status::NAMESPACE_NOT_READY),
        Injection::WrongSqHead(9),
        Injection::Error(Status::WRITE_FAULT),
        Injection::Fatal,
    ])
}
