//! What `--verify` writes into each block, and how it finds out what a block holds.
//!
//! A block of the pattern, in little-endian words of 64 bits:
//!
//! ```text
//!   word 0      word 1         word 2   word 3 ..
//!   LBA         generation     seed     a stream that follows from the three
//! ```
//! The generation of a block grows with each write of it, the seed is another in each run: a block that was
//! lost, came to another place, is of an earlier write or an earlier run, or is torn, is told as what it is.
//!
//! What is expected stands in a table of one generation a block. Commands exclude each other by *unit* (the
//! blocks of one command): a unit that is being written is neither read nor written, one that is read is not
//! written, so that what a read must bring is known exactly.
//!
//! Limits: 2^28 blocks, whose table takes 1 GiB.

use spindle_initiator::Buf;

/// The most blocks that are kept in a table.
pub(super) const BLOCKS_MAX: u64 = 1 << 28;
/// Mark of a block with unknown content; the generation beside it is the last that was tried, 0 for none.
const UNKNOWN: u32 = 1 << 31;
/// Bytes of the words that name the block.
const WORD: usize = 8;
/// A unit that is being written.
const WRITING: u16 = u16::MAX;

/// What a block holds instead of what it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mismatch {
    /// The block.
    lba: u64,
    /// What it should hold.
    generation: u32,
    /// Byte of the block at which it begins to differ.
    offset: usize,
    /// The words of its first three places.
    found: [u64; 3],
    /// The seed of this run.
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

/// The pattern of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pattern {
    seed: u64,
}

impl Pattern {
    pub(super) fn new(seed: u64) -> Pattern {
        // A disk full of zeroes must not look like ours.
        Pattern { seed: seed | 1 }
    }

    /// Fill one block.
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

    /// Compare one block with what it should hold.
    fn check(self, block: &[u8], lba: u64, generation: u32) -> Result<(), Mismatch> {
        let head = [lba, u64::from(generation), self.seed];
        let stream = Stream::new(head);
        let expected = |index: usize| head.get(index).copied().unwrap_or_else(|| stream.word(index));
        let words = || block.chunks_exact(WORD).enumerate();
        // Without a branch for each word first: nearly every block is right.
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

/// The words behind the head.
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

/// What every block of the span should hold, and which units are in use.
#[derive(Debug)]
pub(super) struct Table {
    pattern: Pattern,
    generations: Box<[u32]>,
    /// The generation of the first write of a block.
    first: u32,
    /// By unit: how many reads of it are outstanding, or [`WRITING`].
    users: Box<[u16]>,
    unit_blocks: usize,
    block_bytes: usize,
}

impl Table {
    /// For `units` of `unit_blocks` blocks, all with unknown content.
    pub(super) fn new(units: usize, unit_blocks: usize, block_bytes: usize, seed: u64) -> Table {
        let (low, high) = (seed & 0xff_ffff, seed >> 32);
        Table {
            pattern: Pattern::new(seed),
            generations: vec![UNKNOWN; units * unit_blocks].into_boxed_slice(),
            // Anywhere in the lower half, so that it does not come round soon.
            first: u32::try_from((low ^ high) & 0x7fff_ffff).unwrap_or(0).max(1),
            users: vec![0; units].into_boxed_slice(),
            unit_blocks,
            block_bytes,
        }
    }

    /// Units of the span.
    pub(super) fn units(&self) -> usize {
        self.users.len()
    }

    /// True when something is known of the unit.
    pub(super) fn is_known(&self, unit: usize) -> bool {
        self.blocks(unit).iter().any(|generation| generation & UNKNOWN == 0)
    }

    fn blocks(&self, unit: usize) -> &[u32] {
        &self.generations[unit * self.unit_blocks..(unit + 1) * self.unit_blocks]
    }

    /// A read of the unit begins; false: it is being written.
    pub(super) fn begin_read(&mut self, unit: usize) -> bool {
        let users = &mut self.users[unit];
        // One below the mark: so many reads of one unit are never outstanding.
        let is_free = *users < WRITING - 1;
        *users += u16::from(is_free);
        is_free
    }

    /// A write of the unit begins, with this data; false: it is in use.
    pub(super) fn begin_write(&mut self, unit: usize, buf: &mut Buf) -> bool {
        if self.users[unit] != 0 {
            return false;
        }
        self.users[unit] = WRITING;
        let lba = (unit * self.unit_blocks) as u64;
        let Some(bytes) = buf.as_mut_slice() else { return false };
        for (index, block) in (0..).zip(bytes.chunks_exact_mut(self.block_bytes)) {
            let generation = self.next(self.generations[unit * self.unit_blocks + index]);
            self.pattern.fill(block, lba + index as u64, generation);
        }
        true
    }

    /// A read ended. If it succeeded, `data` is what it brought; gives how many blocks could be checked.
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

    /// A write ended. If it failed, the blocks hold the old, the new, or part of each.
    pub(super) fn end_write(&mut self, unit: usize, has_succeeded: bool) {
        self.users[unit] = 0;
        for index in unit * self.unit_blocks..(unit + 1) * self.unit_blocks {
            let next = self.next(self.generations[index]);
            // A generation that failed is not used again: a later block must not look like it.
            self.generations[index] = if has_succeeded { next } else { next | UNKNOWN };
        }
    }

    /// The generation after this one.
    fn next(&self, generation: u32) -> u32 {
        match generation & !UNKNOWN {
            0 => self.first,
            last => ((last + 1) & !UNKNOWN).max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use spindle_initiator::{Pages, Pool, ZoneSpec};

    use super::*;

    const BLOCK: usize = 512;

    fn table() -> Table {
        Table::new(4, 8, BLOCK, 0x1234_5678_9abc_def0)
    }

    fn buf() -> Buf {
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 1 }], Pages::Base).expect("pool");
        pool.take(4096).expect("buffer")
    }

    fn write(table: &mut Table, unit: usize, buf: &mut Buf) {
        assert!(table.begin_write(unit, buf));
        table.end_write(unit, true);
    }

    fn read(table: &mut Table, unit: usize, buf: &Buf) -> Result<u64, String> {
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
        let told = |table: &mut Table, buf: &Buf| read(table, 1, buf).expect_err("wrong");
        let first = table.first;
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
        write(&mut Table::new(4, 8, BLOCK, 99), 1, &mut foreign);
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
        assert_eq!(table.next(!UNKNOWN), 1);
        assert_eq!((table.next(UNKNOWN), table.next(UNKNOWN | 7), table.next(7)), (table.first, 8, 8));
    }
}
