//! Tests all kinds against a vector of bytes: random commands, several in flight; each read must return what
//! was written.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::able::Able;
use super::{Driver, Random, TEST_TIME_MAX, TempPath};
use crate::{
    BlockRange, CacheSpec, CachedDisk, DelayDisk, DelaySpec, Disk, DiskError, Fault, FaultDisk, FileDisk,
    FileSpec, Op, OpKind, PolicyKind, RamDisk, RamSpec, Token,
};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Pages;

/// Bytes of the disks under test.
const BYTES: u64 = 1 << 20;
const BYTES_USIZE: usize = 1 << 20;
/// Most commands in flight.
const BATCH: usize = 8;
/// Most bytes of a command that moves data.
const DATA_BYTES_MAX: u64 = 64 << 10;

struct Model {
    bytes: Vec<u8>,
    block_bytes: usize,
}

impl Model {
    fn at(&mut self, range: BlockRange) -> &mut [u8] {
        let start = usize::try_from(range.lba).expect("small") * self.block_bytes;
        &mut self.bytes[start..start + range.blocks as usize * self.block_bytes]
    }
}

/// A command in flight with the data that it writes.
struct Expectation {
    token: Token,
    op: Op,
    range: BlockRange,
    data: Vec<u8>,
}

fn random_op(random: &mut Random) -> Op {
    // FUA and Flush take milliseconds each on a file, so they are rare.
    let fua = random.below(64) == 0;
    match random.below(16) {
        0 if random.below(16) == 0 => Op::Flush,
        0 | 1 => Op::Deallocate,
        2 => Op::WriteZeroes { deallocate: random.below(2) == 0, fua },
        3..=8 => Op::Write { fua },
        _ => Op::Read,
    }
}

fn random_range(random: &mut Random, block_bytes: u32, op: Op) -> BlockRange {
    let blocks = BYTES / u64::from(block_bytes);
    let moves_data = matches!(op, Op::Read | Op::Write { .. });
    let most = if moves_data { DATA_BYTES_MAX / u64::from(block_bytes) } else { blocks / 4 };
    let lba = random.below(blocks);
    let length = (1 + random.below(most)).min(blocks - lba);
    BlockRange { lba, blocks: u32::try_from(length).expect("small") }
}

fn overlaps(a: BlockRange, b: BlockRange) -> bool {
    a.lba < b.lba + u64::from(b.blocks) && b.lba < a.lba + u64::from(a.blocks)
}

/// Begins a batch of commands that do not overlap.
fn begin(driver: &mut Driver, random: &mut Random) -> Vec<Expectation> {
    let mut batch: Vec<Expectation> = Vec::new();
    for _ in 0..BATCH {
        let op = random_op(random);
        let range = random_range(random, driver.block_bytes, op);
        if batch.iter().any(|other| overlaps(other.range, range)) {
            continue;
        }
        let fill = random.byte();
        let bytes = if matches!(op, Op::Write { .. }) { driver.bytes(range) } else { 0 };
        // Adjacent blocks differ.
        let data: Vec<u8> =
            (0..bytes).map(|at| fill.wrapping_add((at / driver.block_bytes).to_le_bytes()[0])).collect();
        let token = driver.submit(op, range, &data);
        batch.push(Expectation { token, op, range, data });
    }
    batch
}

/// Runs `rounds` batches of random commands. With `may_fail` commands may end with errors; a failed command
/// must change nothing.
pub(crate) fn check(source: &dyn Disk, seed: u64, rounds: u32, may_fail: bool) {
    let mut driver = Driver::new(source);
    let mut model = Model { bytes: vec![0; BYTES_USIZE], block_bytes: driver.block_bytes as usize };
    let mut random = Random(seed);
    for round in 0..rounds {
        let batch = begin(&mut driver, &mut random);
        for Expectation { token, op, range, data } in batch {
            let done = driver.wait(token);
            if may_fail && done.result.is_err() {
                continue;
            }
            assert_eq!(done.result, Ok(()), "seed {seed}, round {round}, {op:?} {range:?}");
            match op {
                Op::Read => {
                    let buf = done.buf.expect("a read has a buffer");
                    assert!(
                        buf.equals_at(0, model.at(range)),
                        "seed {seed}, round {round}, {op:?} {range:?}"
                    );
                    assert_eq!(buf.len(), model.at(range).len());
                }
                Op::Write { .. } => model.at(range).copy_from_slice(&data),
                Op::WriteZeroes { .. } | Op::Deallocate => model.at(range).fill(0),
                Op::Flush => {}
                Op::Compare | Op::Verify => unreachable!("not of a batch"),
            }
        }
        if random.below(4) == 0 {
            check_abilities(&mut driver, &mut model, &mut random, may_fail);
        }
        if random.below(8) == 0 {
            check_swap(&mut driver, &mut model, &mut random, may_fail);
        }
    }
    driver.drain();
    assert_eq!(driver.pool.free_bytes(), super::pool().free_bytes(), "every buffer came home");
}

fn check_swap(driver: &mut Driver, model: &mut Model, random: &mut Random, may_fail: bool) {
    let range = BlockRange { lba: random.below(BYTES / model.block_bytes as u64), blocks: 1 };
    let mut expected = model.at(range).to_vec();
    let is_right = random.below(2) == 0;
    if !is_right {
        *expected.last_mut().expect("a block") ^= 1;
    }
    let data = vec![random.byte(); model.block_bytes];
    match driver.swap(range.lba, &expected, &data) {
        Ok(()) => {
            assert!(is_right);
            model.at(range).copy_from_slice(&data);
        }
        Err(DiskError::CompareDiffers) => assert!(!is_right),
        Err(error) => assert!(may_fail, "{error}"),
    }
}

/// Optional operations must have the result of the equivalent reads and writes, or be refused.
fn check_abilities(driver: &mut Driver, model: &mut Model, random: &mut Random, may_fail: bool) {
    let abilities = driver.disk.abilities();
    let range = random_range(random, driver.block_bytes, Op::Read);
    let mut expected = model.at(range).to_vec();
    let is_right = random.below(2) == 0;
    if !is_right {
        let at = random.below(expected.len() as u64);
        expected[usize::try_from(at).expect("small")] ^= 1;
    }
    let judge = |result: Result<(), DiskError>, wanted, is_able: bool| match result {
        Err(DiskError::NotSupported) if !is_able => {}
        Err(error) if may_fail && Err(error) != wanted => assert_ne!(error, DiskError::CompareDiffers),
        result => assert_eq!((result, is_able), (wanted, true)),
    };
    let token = driver.submit(Op::Compare, range, &expected);
    let done = driver.wait(token);
    assert!(done.buf.is_some_and(|buf| buf.equals_at(0, &expected)), "what was expected comes back");
    let wanted = if is_right { Ok(()) } else { Err(DiskError::CompareDiffers) };
    judge(done.result, wanted, abilities.compare);
    judge(driver.run(Op::Verify, range.lba, range.blocks), Ok(()), abilities.verify);
    let blocks = BYTES / u64::from(driver.block_bytes);
    let to = random.below(blocks - u64::from(range.blocks) + 1);
    if to < range.lba + u64::from(range.blocks) && range.lba < to + u64::from(range.blocks) {
        return;
    }
    let result = driver.copy(range, to, random.below(8) == 0);
    judge(result, Ok(()), abilities.copy);
    if result.is_ok() {
        let bytes = model.at(range).to_vec();
        model.at(BlockRange { lba: to, ..range }).copy_from_slice(&bytes);
    }
}

fn ram(block_bytes: u32) -> Arc<dyn Disk> {
    RamDisk::new("ram", RamSpec { bytes: BYTES, block_bytes, pages: Pages::Base, has_seals: false })
        .expect("ram disk")
}

fn file(at: &TempPath, block_bytes: u32, is_direct: bool) -> Arc<FileDisk> {
    let spec = FileSpec { create_bytes: Some(BYTES), is_direct, ..FileSpec::new(at.path(), block_bytes) };
    FileDisk::new("file", &spec).expect("file disk")
}

#[test]
fn a_ram_disk_reads_what_was_written() {
    for (seed, block_bytes) in [(1, 512), (2, 4096), (3, 512), (4, 4096)] {
        check(&*ram(block_bytes), seed, 300, false);
    }
}

#[test]
fn what_a_disk_does_itself_is_what_reads_and_writes_would_have_done() {
    for (seed, block_bytes) in [(1, 512), (2, 4096)] {
        check(&Able(ram(block_bytes)), seed, 300, false);
    }
}

#[test]
fn a_file_disk_reads_what_was_written() {
    for (seed, block_bytes, is_direct) in [(1, 512, true), (2, 4096, true), (3, 512, false)] {
        let at = TempPath::new();
        check(&*file(&at, block_bytes, is_direct), seed, 60, false);
    }
}

#[test]
fn a_file_disk_in_memory_reads_what_was_written_although_it_knows_no_zero_range() {
    let folder = Path::new("/dev/shm");
    if !folder.is_dir() {
        return spindle_tests_skip::skip("there is no /dev/shm");
    }
    let at = TempPath::in_folder(folder);
    check(&*file(&at, 512, true), 5, 100, false);
}

#[test]
fn what_a_faulty_disk_acknowledges_is_as_it_says() {
    for seed in 0..4 {
        let at = TempPath::new();
        let below: Arc<dyn Disk> = match seed {
            0 | 3 => file(&at, 4096, true),
            1 => Arc::new(Able(ram(512))),
            _ => ram(512),
        };
        let (source, control) = FaultDisk::new(below, seed);
        control.set_all(Fault::Error, 50_000);
        control.set_all(Fault::Delay, 300_000);
        control.set_all(Fault::Reorder, 300_000);
        control.set_error(OpKind::Read, DiskError::Internal);
        check(&*source, seed, 60, true);
        assert!(control.injected(Fault::Error) > 0 && control.injected(Fault::Delay) > 0);
    }
}

/// A delay layer with all three settings, scaled to the driver's clock.
fn slow(below: Arc<dyn Disk>) -> Arc<dyn Disk> {
    let (latency, seek) = (Nanos::from_us(7), Nanos::from_us(20));
    DelayDisk::new(below, &DelaySpec { latency, seek, bandwidth: Some(1 << 30) }).expect("slow")
}

#[test]
fn a_slow_disk_reads_what_was_written() {
    for seed in 0..6 {
        let at = TempPath::new();
        let below: Arc<dyn Disk> = match seed {
            0 => file(&at, 4096, true),
            1 => Arc::new(Able(ram(512))),
            2 => slow(ram(512)),
            _ => ram(if seed == 3 { 512 } else { 4096 }),
        };
        check(&*slow(below), seed, 60, false);
    }
    let at = TempPath::new();
    let cache = CacheSpec::new(BYTES / 4, PolicyKind::S3Fifo, Pages::Base);
    check(&*CachedDisk::new(slow(file(&at, 512, true)), Some(&cache)).expect("a cache"), 6, 60, false);
}

/// One core of [`count_up`].
struct Counter {
    driver: Driver,
    swap: Option<Token>,
    beside: Option<Token>,
}

impl Counter {
    /// Polls once, and begins a compare-and-write of block 3 from `guess` to `guess + 1` and a write beside
    /// it, unless they are in flight. Returns the result of a compare-and-write that ended.
    fn turn(&mut self, guess: Option<u64>, random: &mut Random) -> Option<Result<(), DiskError>> {
        let driver = &mut self.driver;
        let block_bytes = driver.block_bytes as usize;
        let block = |count: u64| count.to_le_bytes().repeat(block_bytes / 8);
        driver.poll();
        if let Some(guess) = guess {
            if self.swap.is_none() {
                self.swap = Some(driver.submit_swap(3, &block(guess), &block(guess + 1)));
            }
            if self.beside.is_none() {
                let range = BlockRange { lba: [2, 4][usize::from(random.below(2) == 0)], blocks: 1 };
                self.beside =
                    Some(driver.submit(Op::Write { fua: false }, range, &block(random.below(1000))));
            }
        }
        self.beside = self.beside.filter(|token| driver.try_end(*token).is_none());
        let done = self.swap.and_then(|token| driver.try_end(token))?;
        self.swap = None;
        Some(done.result)
    }
}

/// Two cores on one thread, polled in random order: their compare-and-writes count up one block, among writes
/// beside it.
fn count_up(source: &dyn Disk, count: u64) {
    let counter = |core| Counter { driver: Driver::with_depth(source, core, 4), swap: None, beside: None };
    let mut cores = [counter(0), counter(1)];
    let mut random = Random(11);
    let (mut swapped, mut refused) = (0u64, 0u64);
    let start = Instant::now();
    while swapped < count || cores.iter().any(|core| core.swap.is_some()) {
        assert!(start.elapsed() < TEST_TIME_MAX, "{swapped} swapped, {refused} refused");
        // The current count, or sometimes the one before, so that some compares fail.
        let guess = (swapped < count).then(|| swapped.saturating_sub(random.below(2)));
        let core = &mut cores[usize::from(random.below(2) == 0)];
        match core.turn(guess, &mut random) {
            Some(Ok(())) => swapped += 1,
            Some(Err(DiskError::CompareDiffers)) => refused += 1,
            Some(Err(error)) => panic!("{error}"),
            None => {}
        }
    }
    assert!(refused > 0, "{swapped} swapped and none refused");
    let now = cores[0].driver.read(3, 1).expect("read");
    assert_eq!(now[..8], swapped.to_le_bytes(), "each success is one more");
}

#[test]
fn no_count_is_lost_between_two_cores_that_compare_and_write() {
    count_up(&*ram(512), 500);
    let (source, control) = FaultDisk::new(ram(4096), 9);
    control.set_all(Fault::Delay, 300_000);
    count_up(&*source, 500);
    count_up(&*slow(ram(512)), 500);
    let at = TempPath::new();
    count_up(&*file(&at, 512, true), 8);
    let folder = Path::new("/dev/shm");
    if folder.is_dir() {
        let at = TempPath::in_folder(folder);
        count_up(&*file(&at, 512, true), 500);
    } else {
        spindle_tests_skip::skip("a file in memory: there is no /dev/shm");
    }
}
