//! The contract of `DiskChannel` (`docs/disk-contract.md`), with a far target that executes commands on
//! memory.

use nvme_spec::io::DsmRange;
use nvme_spec::zerocopy::IntoBytes;
use spindle_tests_conformance::{Rig, check};

use super::*;

const BLOCK: usize = 512;

struct FarRig {
    world: World,
    medium: Vec<u8>,
    is_held: bool,
    fails_reads: bool,
    number: u64,
}

impl FarRig {
    fn make() -> Box<dyn Rig> {
        script(|script| *script = Script::default());
        let world = World::new(0);
        let medium = vec![0; usize::try_from(world.shape.geometry.bytes()).expect("small")];
        Box::new(FarRig { world, medium, is_held: false, fails_reads: false, number: 1 })
    }

    /// Executes a command as the far target.
    fn execute(&mut self, sqe: &Sqe, data: Option<&mut Buf>) -> Result<(), Failure> {
        let lba = usize::try_from(sqe.cdw10.get()).expect("small");
        let blocks = (sqe.cdw12.get() & 0xffff) as usize + 1;
        let span = lba * BLOCK..(lba + blocks) * BLOCK;
        match (sqe.opcode, data) {
            (0x02, Some(_)) if self.fails_reads => return Err(Failure::Status(Status::INTERNAL_ERROR)),
            (0x02, Some(data)) => data.copy_in(0, &self.medium[span]),
            (0x01, Some(data)) => data.copy_out(0, &mut self.medium[span]),
            (0x05, Some(data)) => {
                let mut expected = vec![0; blocks * BLOCK];
                data.copy_out(0, &mut expected);
                if self.medium[span] != expected[..] {
                    return Err(Failure::Status(Status::COMPARE_FAILURE));
                }
            }
            (0x08, None) => self.medium[span].fill(0),
            (0x09, Some(data)) => {
                let mut range = DsmRange::default();
                data.copy_out(0, range.as_mut_bytes());
                let at = usize::try_from(range.slba.get()).expect("small") * BLOCK;
                self.medium[at..at + range.blocks.get() as usize * BLOCK].fill(0);
            }
            (0x00 | 0x0c, None) => {}
            (opcode, data) => panic!("opcode {opcode:#x}, data {}", data.is_some()),
        }
        Ok(())
    }
}

impl Rig for FarRig {
    fn source(&self) -> Arc<dyn Disk> {
        Arc::clone(&self.world.disk) as Arc<dyn Disk>
    }

    fn pass(&mut self, time: Nanos) -> Nanos {
        self.world.now += time;
        while !self.is_held {
            let Some(mut at) = script(|script| {
                let at = script.commands.iter().position(|at| !script.lost.contains(&at.number))?;
                Some(script.commands.remove(at))
            }) else {
                break;
            };
            let result = self.execute(&at.sqe, at.data.as_mut());
            let completion = FarCompletion { index: at.index, result, buf: at.data, keeps: false };
            script(|script| script.answers.push((at.qid, at.number, completion)));
        }
        self.world.now
    }

    fn hold(&mut self, is_held: bool) -> bool {
        self.is_held = is_held;
        true
    }

    fn time_limit(&self) -> Option<Nanos> {
        Some(Nanos::from_secs(25))
    }

    fn fail_reads(&mut self, fails: bool) -> Option<DiskError> {
        self.fails_reads = fails;
        Some(DiskError::Internal)
    }

    fn set_read_only(&mut self, is_read_only: bool) -> bool {
        self.world.shape.geometry.is_read_only = is_read_only;
        self.world.control.hold();
        self.world.control.checked(self.world.shape);
        true
    }

    fn change_while_away(&mut self, lba: u64, byte: u8) -> bool {
        let number = self.number;
        script(|script| script.lost.push(number));
        self.world.control.down();
        let at = usize::try_from(lba).expect("small") * BLOCK;
        self.medium[at..at + BLOCK].fill(byte);
        self.number += 1;
        self.world.control.up(self.number, Arc::new(Fake(self.number)), self.world.shape);
        true
    }
}

#[test]
fn a_remote_disk_keeps_the_contract() {
    let shown = check(FarRig::make);
    let all = ["content", "once", "cancel", "error", "deadline", "buffer", "read-only", "return"];
    assert_eq!(shown, all);
}
