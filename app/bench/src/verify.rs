//! Data pattern of `--verify`, and checks of blocks that were read.
//!
//! A block of the pattern, in little-endian words of 64 bits:
//!
//! ```text
//!   word 0      word 1         word 2   word 3 ..
//!   LBA         generation     seed     pseudo-random words derived from the three
//! ```
//! The generation of a block grows with each write; each run has its own seed. So a mismatch shows whether a
//! write was lost or misdirected, and whether the block is stale, torn or from another run.
//!
//! A table contains the expected generation of each block. A *unit* is the blocks of one command. While a
//! unit is written, no other command uses it; while a unit is read, it is not written. So the expected data
//! of a read is unambiguous.
//!
//! Limit: 2^28 blocks. Their generations take 1 GiB.

use spindle_nvme_initiator::Buf;

pub(super) const BLOCKS_MAX: u64 = 1 << 28;
/// Flag in a generation: the block's content is unknown. The other bits: last generation of a write; 0: none.
const UNKNOWN: u32 = 1 << 31;
/// Bytes of a word of the pattern.
const WORD: usize = 8;
/// Value in `users` of a unit that is being written.
const WRITING: u16 = u16::MAX;

/// A block whose content differs from the expected pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mismatch {
    lba: u64,
    /// Expected generation.
    generation: u32,
    /// Byte offset in the block of the first wrong word.
    offset: usize,
    /// First three words of the block that was read: LBA, generation and seed of its last write.
    found: [u64; 3],
    seed: u64,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Mismatch { lba, generation, offset, found: [at, of, seed], seed: ours } = *self;
        write!(f, "LBA {lba}, byte {offset}: generation {generation} expected, found ")?;
        if seed != ours {
            return if self.found == [0; 3] {
                f.write_str("zeroes")
            } else {
                f.write_str("nothing that this run wrote")
            };
        }
        match (at == lba, of == u64::from(generation)) {
            (true, true) => f.write_str("a damaged or torn block"),
            (true, false) => write!(f, "generation {of}"),
            (false, _) => write!(f, "LBA {at} of generation {of}"),
        }
    }
}

/// Generates and checks the blocks of one run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pattern {
    seed: u64,
}

impl Pattern {
    pub(super) fn new(seed: u64) -> Pattern {
        // Not 0, so that a block of zeroes does not match.
        Pattern { seed: seed | 1 }
    }

    fn fill(self, block: &mut [u8], lba: u64, generation: u32) {
        let head = [lba, u64::from(generation), self.seed];
        let stream = Stream::new(head);
        for (index, word) in block.chunks_exact_mut(WORD).enumerate() {
            word.copy_from_slice(&stream.word(index).to_le_bytes());
        }
        for (word, value) in block.chunks_exact_mut(WORD).zip(head) {
            word.copy_from_slice(&value.to_le_bytes());
        }
    }

    fn check(self, block: &[u8], lba: u64, generation: u32) -> Result<(), Mismatch> {
        let head = [lba, u64::from(generation), self.seed];
        let stream = Stream::new(head);
        let expected = |index: usize| head.get(index).copied().unwrap_or_else(|| stream.word(index));
        let words = || block.chunks_exact(WORD).enumerate();
        // Compared first without a branch per word, as nearly all blocks are correct.
        let differs = words().fold(0, |differs, (index, word)| differs | (word_of(word) ^ expected(index)));
        if differs == 0 {
            return Ok(());
        }
        let first = words().find(|(index, word)| word_of(word) != expected(*index));
        let mut found = [0; 3];
        for (found, word) in found.iter_mut().zip(block.chunks_exact(WORD)) {
            *found = word_of(word);
        }
        let offset = first.map_or(0, |(index, _)| index * WORD);
        Err(Mismatch { lba, generation, offset, found, seed: self.seed })
    }
}

fn word_of(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Pseudo-random words after the first three. Each depends only on the first three and on its index.
#[derive(Clone, Copy)]
struct Stream(u64);

impl Stream {
    fn new(head: [u64; 3]) -> Stream {
        let mix = |value: u64| {
            let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            value ^ (value >> 31)
        };
        Stream(head.into_iter().fold(0x9e37_79b9_7f4a_7c15, |state: u64, word| mix(state ^ word)))
    }

    #[inline]
    fn word(self, index: usize) -> u64 {
        let step = self.0 ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        step.wrapping_mul(0xd6e8_feb8_6659_fd93)
    }
}

/// Expected generation of each block of the span, and the units in use.
#[derive(Debug)]
pub(super) struct GenerationTable {
    pattern: Pattern,
    generations: Box<[u32]>,
    /// Generation of the first write of each block.
    first_generation: u32,
    /// By unit: number of outstanding reads, or [`WRITING`].
    users: Box<[u16]>,
    unit_blocks: usize,
    block_bytes: usize,
}

impl GenerationTable {
    /// Creates a table in which the content of all blocks is unknown.
    pub(super) fn new(units: usize, unit_blocks: usize, block_bytes: usize, seed: u64) -> GenerationTable {
        let (low, high) = (seed & 0xff_ffff, seed >> 32);
        GenerationTable {
            pattern: Pattern::new(seed),
            generations: vec![UNKNOWN; units * unit_blocks].into_boxed_slice(),
            // Derived from the seed, so that runs differ. Below 2^31, as that bit is the flag `UNKNOWN`.
            first_generation: u32::try_from((low ^ high) & 0x7fff_ffff).unwrap_or(0).max(1),
            users: vec![0; units].into_boxed_slice(),
            unit_blocks,
            block_bytes,
        }
    }

    pub(super) fn units(&self) -> usize {
        self.users.len()
    }

    /// Returns whether the content of at least one block of the unit is known.
    pub(super) fn is_known(&self, unit: usize) -> bool {
        self.blocks(unit).iter().any(|generation| generation & UNKNOWN == 0)
    }

    fn blocks(&self, unit: usize) -> &[u32] {
        &self.generations[unit * self.unit_blocks..(unit + 1) * self.unit_blocks]
    }

    /// Begins a read of the unit. False: a write of the unit is outstanding, or 65,534 reads are.
    pub(super) fn begin_read(&mut self, unit: usize) -> bool {
        let users = &mut self.users[unit];
        // Also false at 65,534 reads, as the next value is `WRITING`.
        let is_free = *users < WRITING - 1;
        *users += u16::from(is_free);
        is_free
    }

    /// Begins a write of the unit and fills `buf` with the next generation of each block. `buf` must have one
    /// segment. False: the unit is in use.
    pub(super) fn begin_write(&mut self, unit: usize, buf: &mut Buf) -> bool {
        if self.users[unit] != 0 {
            return false;
        }
        self.users[unit] = WRITING;
        let lba = (unit * self.unit_blocks) as u64;
        let Some(bytes) = buf.as_mut_slice() else { return false };
        for (index, block) in (0..).zip(bytes.chunks_exact_mut(self.block_bytes)) {
            let generation = self.next_generation(self.generations[unit * self.unit_blocks + index]);
            self.pattern.fill(block, lba + index as u64, generation);
        }
        true
    }

    /// Ends a read and checks the blocks with known content. `data` is `None` if the read failed. Returns the
    /// number of blocks checked, or the first mismatch.
    pub(super) fn end_read(&mut self, unit: usize, data: Option<&Buf>) -> Result<u64, Mismatch> {
        self.users[unit] -= 1;
        let Some(bytes) = data.and_then(Buf::as_slice) else { return Ok(0) };
        let mut checked = 0;
        let lba = (unit * self.unit_blocks) as u64;
        for ((index, block), generation) in
            (0u64..).zip(bytes.chunks_exact(self.block_bytes)).zip(self.blocks(unit))
        {
            if generation & UNKNOWN == 0 {
                self.pattern.check(block, lba + index, *generation)?;
                checked += 1;
            }
        }
        Ok(checked)
    }

    /// Ends a write. After a failed write the content of the blocks is unknown: old, new or part of each.
    pub(super) fn end_write(&mut self, unit: usize, has_succeeded: bool) {
        self.users[unit] = 0;
        for index in unit * self.unit_blocks..(unit + 1) * self.unit_blocks {
            let next = self.next_generation(self.generations[index]);
            // A failed write's generation is not reused: its data could be mistaken for a later write's.
            self.generations[index] = if has_succeeded { next } else { next | UNKNOWN };
        }
    }

    /// Returns the generation after `generation`; after none, the first. Wraps from 2^31 - 1 to 1.
    fn next_generation(&self, generation: u32) -> u32 {
        match generation & !UNKNOWN {
            0 => self.first_generation,
            last => ((last + 1) & !UNKNOWN).max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use spindle_nvme_initiator::{Pages, Pool, ZoneSpec};

    use super::*;

    const BLOCK: usize = 512;

    fn table() -> GenerationTable {
        GenerationTable::new(4, 8, BLOCK, 0x1234_5678_9abc_def0)
    }

    fn buf() -> Buf {
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 1 }], Pages::Base).expect("pool");
        pool.take(4096).expect("buffer")
    }

    fn write(table: &mut GenerationTable, unit: usize, buf: &mut Buf) {
        assert!(table.begin_write(unit, buf));
        table.end_write(unit, true);
    }

    fn read(table: &mut GenerationTable, unit: usize, buf: &Buf) -> Result<u64, String> {
        assert!(table.begin_read(unit));
        table.end_read(unit, Some(buf)).map_err(|mismatch| mismatch.to_string())
    }

    #[test]
    fn what_was_written_is_what_must_be_read() {
        let (mut table, mut data) = (table(), buf());
        assert!(!table.is_known(2));
        assert_eq!(read(&mut table, 2, &data), Ok(0), "nothing is known of it");
        write(&mut table, 2, &mut data);
        assert!(table.is_known(2) && !table.is_known(1));
        assert_eq!(read(&mut table, 2, &data), Ok(8));
    }

    #[test]
    fn every_wrong_block_is_told_as_what_it_is() {
        let (mut table, mut old, mut new, mut other) = (table(), buf(), buf(), buf());
        write(&mut table, 1, &mut old);
        write(&mut table, 1, &mut new);
        write(&mut table, 3, &mut other);
        let told = |table: &mut GenerationTable, buf: &Buf| read(table, 1, buf).expect_err("wrong");
        let first = table.first_generation;
        assert!(
            told(&mut table, &old).contains(&format!("LBA 8, byte 8: generation {} expected", first + 1))
        );
        assert!(told(&mut table, &old).ends_with(&format!("found generation {first}")));
        assert!(told(&mut table, &other).contains("found LBA 24 of"));
        assert!(told(&mut table, &buf()).ends_with("found zeroes"));
        let mut torn = buf();
        new.visit(0, 4096, |bytes| torn.copy_in(0, bytes));
        torn.copy_in(3 * BLOCK + 100, &[0xff; 8]);
        assert!(told(&mut table, &torn).starts_with("LBA 11, byte 96:"));
        assert!(told(&mut table, &torn).contains("torn"));
        let mut foreign = buf();
        write(&mut GenerationTable::new(4, 8, BLOCK, 99), 1, &mut foreign);
        assert!(told(&mut table, &foreign).contains("nothing that this run wrote"));
        assert_eq!(read(&mut table, 1, &new), Ok(8));
    }

    #[test]
    fn any_single_wrong_bit_is_found() {
        let (mut table, mut data) = (table(), buf());
        write(&mut table, 0, &mut data);
        for byte in 0..4096 {
            let mut wrong = [0];
            data.copy_out(byte, &mut wrong);
            data.copy_in(byte, &[wrong[0] ^ 1 << (byte % 8)]);
            assert!(read(&mut table, 0, &data).is_err(), "byte {byte}");
            data.copy_in(byte, &wrong);
        }
        assert_eq!(read(&mut table, 0, &data), Ok(8));
    }

    #[test]
    fn readers_and_writers_of_a_unit_exclude_each_other() {
        let (mut table, mut data) = (table(), buf());
        assert!(table.begin_read(0) && table.begin_read(0));
        assert!(!table.begin_write(0, &mut data));
        assert!(table.begin_write(1, &mut data));
        assert!(!table.begin_read(1) && !table.begin_write(1, &mut data));
        assert_eq!(table.end_read(0, None), Ok(0));
        assert_eq!(table.end_read(0, None), Ok(0));
        assert!(table.begin_write(0, &mut data));
    }

    #[test]
    fn after_a_failed_write_nothing_is_known() {
        let (mut table, mut data) = (table(), buf());
        write(&mut table, 0, &mut data);
        assert!(table.begin_write(0, &mut buf()));
        table.end_write(0, false);
        assert!(!table.is_known(0));
        assert_eq!(read(&mut table, 0, &buf()), Ok(0));
        let mut old = buf();
        data.visit(0, 4096, |bytes| old.copy_in(0, bytes));
        write(&mut table, 0, &mut data);
        assert_eq!(read(&mut table, 0, &data), Ok(8));
        assert!(read(&mut table, 0, &old).is_err(), "generations are not used again");
    }

    #[test]
    fn a_generation_comes_round_without_the_unknown_one() {
        let table = table();
        assert_eq!(table.next_generation(!UNKNOWN), 1);
        assert_eq!(
            (table.next_generation(UNKNOWN), table.next_generation(UNKNOWN | 7), table.next_generation(7)),
            (table.first_generation, 8, 8)
        );
    }
}
