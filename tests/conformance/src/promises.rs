//! Promises of a disk that works.

use spindle_target_disk::{BlockRange, DiskError, Op};

use crate::Bench;
use crate::bench::{BLOCK, CORES};

/// Blocks in which the commands of these checks are: more than the cache of a stack has.
const BLOCKS: u64 = 512;

/// Numbers that look random, the same in each run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    fn range(&mut self) -> BlockRange {
        let blocks = 1 + self.below(24);
        BlockRange { lba: self.below(BLOCKS - blocks), blocks: u32::try_from(blocks).expect("small") }
    }

    pub(crate) fn core(&mut self) -> usize {
        usize::try_from(self.below(CORES as u64)).expect("small")
    }

    pub(crate) fn byte(&mut self) -> u8 {
        u8::try_from(self.below(255) + 1).expect("a byte")
    }
}

fn span(range: BlockRange) -> std::ops::Range<usize> {
    let at = usize::try_from(range.lba).expect("small") * BLOCK;
    at..at + range.blocks as usize * BLOCK
}

/// A read returns what the last acknowledged command of any core has left: Write, with FUA or without, Write
/// Zeroes and Deallocate. Flush, Compare and Verify change nothing.
pub(crate) fn reads_return_the_last_write(bench: &mut Bench) -> bool {
    if !bench.rig.keeps_data() {
        return false;
    }
    let mut random = Random(7);
    let mut model = vec![0_u8; span(BlockRange { lba: 0, blocks: 512 }).end];
    let is_zero = bench.source().deallocated_is_zero();
    for _ in 0..600 {
        let (range, core, byte) = (random.range(), random.core(), random.byte());
        let data = vec![byte; range.blocks as usize * BLOCK];
        let label = bench.label();
        let fua = random.below(3) == 0;
        let (op, left) = match random.below(10) {
            0..5 => {
                bench.assert_reads(core, range, &model[span(range)], &format!("{range:?}"));
                continue;
            }
            5..7 => (Op::Write { fua }, byte),
            7 => (Op::WriteZeroes { deallocate: fua, fua: !fua }, 0),
            8 if is_zero && bench.source().geometry().can_deallocate => (Op::Deallocate, 0),
            _ => {
                assert_eq!(bench.run(core, Op::Flush, range, &[]).0, Ok(()), "{label}");
                let (has, mut data) = (bench.disk(core).abilities(), model[span(range)].to_vec());
                if has.verify {
                    assert_eq!(bench.run(core, Op::Verify, range, &[]).0, Ok(()), "{label}");
                }
                if has.compare {
                    assert_eq!(bench.run(core, Op::Compare, range, &data).0, Ok(()), "{label}");
                    data[BLOCK / 2] ^= 1;
                    let differs = bench.run(core, Op::Compare, range, &data).0;
                    assert_eq!(differs, Err(DiskError::CompareDiffers), "{label}");
                }
                continue;
            }
        };
        assert_eq!(bench.run(core, op, range, &data).0, Ok(()), "{label}: {op:?} {range:?}");
        model[span(range)].fill(left);
    }
    for lba in (0..BLOCKS).step_by(64) {
        let range = BlockRange { lba, blocks: 64 };
        bench.assert_reads(1, range, &model[span(range)], "at the end");
    }
    true
}

/// Of many commands at a time each has one end, on its core.
pub(crate) fn every_command_ends_once(bench: &mut Bench) -> bool {
    let mut random = Random(11);
    for _ in 0..30 {
        let mut tokens = Vec::new();
        for _ in 0..12 {
            let (range, core) = (random.range(), random.core());
            let data = vec![random.byte(); range.blocks as usize * BLOCK];
            let op = match random.below(6) {
                0..3 => Op::Read,
                3..5 => Op::Write { fua: false },
                _ => Op::Flush,
            };
            tokens.push(bench.submit(core, 1, op, range, &data));
        }
        for token in tokens {
            let (result, _) = bench.wait(token);
            assert_eq!(result, Ok(()), "{}: {token:?}", bench.label());
        }
        assert!(!bench.has_open(), "{}", bench.label());
    }
    true
}

/// Copies, and writes of a block that is as expected, where the disk has them.
pub(crate) fn copy_and_compare_and_write(bench: &mut Bench) -> bool {
    let (can_copy, geometry) = (bench.disk(0).abilities().copy, bench.source().geometry());
    if !bench.rig.keeps_data() || !(can_copy || geometry.can_compare_and_write) {
        return false;
    }
    let (ones, twos, from) = ([1; 8 * BLOCK], [2; 8 * BLOCK], BlockRange { lba: 8, blocks: 8 });
    let label = bench.label();
    for core in 0..CORES {
        assert_eq!(bench.run(core, Op::Write { fua: false }, from, &ones).0, Ok(()), "{label}");
        // In the cache, if there is one.
        let to = BlockRange { lba: 100, blocks: 8 };
        assert_eq!(bench.run(core, Op::Write { fua: false }, to, &twos).0, Ok(()), "{label}");
        bench.assert_reads(1 - core, to, &twos, "a write");
        if can_copy {
            let token = bench.submit_copy(core, from, to.lba);
            assert_eq!(bench.wait(token).0, Ok(()), "{label}");
            bench.assert_reads(1 - core, to, &ones, "a copy");
        }
        if geometry.can_compare_and_write {
            let (old, new) = (&bench.read(core, BlockRange { lba: to.lba, blocks: 1 }), [3; BLOCK]);
            let token = bench.submit_compare_and_write(core, to.lba, [old, &new]);
            assert_eq!(bench.wait(token).0, Ok(()), "{label}");
            let token = bench.submit_compare_and_write(core, to.lba, [old, &twos[..BLOCK]]);
            assert_eq!(bench.wait(token).0, Err(DiskError::CompareDiffers), "{label}");
            let block = BlockRange { lba: to.lba, blocks: 1 };
            bench.assert_reads(1 - core, block, &new, "a compare-and-write");
        }
    }
    true
}

/// A new size is seen by the disk and by its handles; blocks that were lost and come again are zero.
pub(crate) fn a_new_size_is_seen_and_new_blocks_are_zero(bench: &mut Bench) -> bool {
    let bytes = bench.source().geometry().bytes();
    if bench.source().resize(bytes / 2).is_err() {
        return false;
    }
    bench.source().resize(bytes).expect("as before");
    let label = bench.label();
    let last = BlockRange { lba: bytes / BLOCK as u64 - 8, blocks: 8 };
    let data = [7; 8 * BLOCK];
    assert_eq!(bench.run(0, Op::Write { fua: false }, last, &data).0, Ok(()), "{label}");
    if bench.rig.keeps_data() {
        bench.assert_reads(1, last, &data, "before");
        bench.assert_reads(0, last, &data, "before");
    }
    for size in [bytes / 2, bytes] {
        bench.source().resize(size).expect("a size");
        for core in 0..CORES {
            bench.disk(core).reconfigure();
        }
        (0..10).for_each(|_| bench.turn());
        assert_eq!(bench.blocks(), size / BLOCK as u64, "{label}");
        for core in 0..CORES {
            assert_eq!(bench.disk(core).geometry().bytes(), size, "{label}: core {core}");
        }
    }
    if bench.rig.keeps_data() {
        for core in [1, 0] {
            bench.assert_reads(core, last, &[0; 8 * BLOCK], "what was cut off");
        }
    }
    true
}
