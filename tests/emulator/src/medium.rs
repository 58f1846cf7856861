//! [`EmulatedMedia`]: the blocks of a namespace, including its volatile write cache.
//!
//! The first write to a chunk of 64 KiB allocates the chunk. A chunk contains its newest data and, for blocks
//! written since the last flush, the durable data that a power loss restores.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::faults::Random;

/// Bytes of a chunk, also the largest block size.
const CHUNK_BYTES: usize = 64 << 10;

static ZEROES: [u8; CHUNK_BYTES] = [0; CHUNK_BYTES];
static ONES: [u8; CHUNK_BYTES] = [0xff; CHUNK_BYTES];

struct Chunk {
    now: Box<[u8]>,
    /// Data that a power loss restores, for the blocks in `dirty`.
    before: Option<Box<[u8]>>,
    /// A bit for each block that is only in the volatile write cache.
    dirty: u128,
    is_listed: bool,
}

pub(crate) struct EmulatedMedia {
    pub(crate) blocks: u64,
    pub(crate) block_bytes: u32,
    /// Value of the bytes of unwritten blocks.
    fill: u8,
    chunks: BTreeMap<u64, Chunk>,
    /// Indices of chunks that may have dirty blocks.
    dirty: Vec<u64>,
}

/// A range of blocks within one chunk: index of the chunk, first byte and length in the chunk, and a bit for
/// each block.
struct Part {
    chunk: u64,
    at: usize,
    bytes: usize,
    mask: u128,
}

impl Part {
    /// Returns the part of `blocks` in a chunk; `None` if there is none.
    fn of(chunk: u64, block_bytes: u32, blocks: Range<u64>) -> Option<Part> {
        let first = chunk.saturating_mul(blocks_of_chunk(block_bytes));
        let begin = blocks.start.max(first);
        let end = blocks.end.min(first.saturating_add(blocks_of_chunk(block_bytes)));
        let count = end.checked_sub(begin).filter(|count| *count != 0)?;
        // Both are at most 128, the blocks of a chunk.
        let (at, count) = (u32::try_from(begin - first).ok()?, u32::try_from(count).ok()?);
        let mask = (u128::MAX >> (128 - count)) << at;
        let in_bytes = |blocks| blocks as usize * block_bytes as usize;
        Some(Part { chunk, at: in_bytes(at), bytes: in_bytes(count), mask })
    }
}

fn blocks_of_chunk(block_bytes: u32) -> u64 {
    (CHUNK_BYTES / block_bytes as usize) as u64
}

impl EmulatedMedia {
    pub(crate) fn new(blocks: u64, block_bytes: u32, fill: u8) -> EmulatedMedia {
        EmulatedMedia { blocks, block_bytes, fill, chunks: BTreeMap::new(), dirty: Vec::new() }
    }

    fn parts(&self, lba: u64, blocks: u64) -> impl Iterator<Item = Part> + use<> {
        let (block_bytes, end) = (self.block_bytes, lba.saturating_add(blocks));
        let mut at = lba;
        std::iter::from_fn(move || {
            let part = Part::of(at / blocks_of_chunk(block_bytes), block_bytes, at..end)?;
            at += (part.bytes / block_bytes as usize) as u64;
            Some(part)
        })
    }

    /// Passes the data of blocks to `look`, chunk by chunk, until `look` returns false. Returns true if
    /// `look` returned true for all.
    pub(crate) fn read_blocks(&self, lba: u64, blocks: u64, mut look: impl FnMut(&[u8]) -> bool) -> bool {
        let unwritten = if self.fill == 0 { &ZEROES } else { &ONES };
        self.parts(lba, blocks).all(|part| {
            let data = self.chunks.get(&part.chunk).map_or(&unwritten[..], |chunk| &chunk.now);
            look(data.get(part.at..part.at + part.bytes).unwrap_or_default())
        })
    }

    /// Passes the data of blocks to `change`, chunk by chunk. With `is_cached` the change is only in the
    /// volatile write cache.
    pub(crate) fn change(
        &mut self,
        lba: u64,
        blocks: u64,
        is_cached: bool,
        mut change: impl FnMut(&mut [u8]),
    ) {
        for part in self.parts(lba, blocks) {
            let fill = self.fill;
            let chunk = self.chunks.entry(part.chunk).or_insert_with(|| Chunk {
                now: vec![fill; CHUNK_BYTES].into_boxed_slice(),
                before: None,
                dirty: 0,
                is_listed: false,
            });
            chunk.note(&part, is_cached, self.block_bytes as usize, &mut self.dirty);
            change(chunk.now.get_mut(part.at..part.at + part.bytes).unwrap_or_default());
        }
    }

    /// Fills blocks with `byte`.
    pub(crate) fn set(&mut self, lba: u64, blocks: u64, byte: u8, is_cached: bool) {
        if byte != self.fill {
            return self.change(lba, blocks, is_cached, |data| data.fill(byte));
        }
        // Missing chunks already read as `fill`.
        let a_chunk = blocks_of_chunk(self.block_bytes);
        let (first, end) = (lba / a_chunk, lba.saturating_add(blocks));
        for (number, chunk) in self.chunks.range_mut(first..=end / a_chunk) {
            let Some(part) = Part::of(*number, self.block_bytes, lba..end) else { continue };
            chunk.note(&part, is_cached, self.block_bytes as usize, &mut self.dirty);
            chunk.now.get_mut(part.at..part.at + part.bytes).unwrap_or_default().fill(byte);
        }
    }

    /// Makes cached data of these blocks durable (FUA).
    pub(crate) fn flush_blocks(&mut self, lba: u64, blocks: u64) {
        if self.dirty.is_empty() {
            return;
        }
        for part in self.parts(lba, blocks) {
            if let Some(chunk) = self.chunks.get_mut(&part.chunk) {
                chunk.dirty &= !part.mask;
            }
        }
    }

    /// Makes all cached data durable.
    pub(crate) fn flush(&mut self) {
        for number in self.dirty.drain(..) {
            if let Some(chunk) = self.chunks.get_mut(&number) {
                chunk.dirty = 0;
                chunk.is_listed = false;
            }
        }
    }

    /// Keeps or loses each cached block at random.
    pub(crate) fn lose(&mut self, random: &mut Random) {
        self.lose_where(|| random.below(2) == 0);
    }

    /// Discards all cached data.
    pub(crate) fn lose_all(&mut self) {
        self.lose_where(|| true);
    }

    fn lose_where(&mut self, mut is_lost: impl FnMut() -> bool) {
        let block_bytes = self.block_bytes as usize;
        self.dirty.sort_unstable();
        for number in self.dirty.drain(..) {
            let Some(chunk) = self.chunks.get_mut(&number) else { continue };
            let dirty = std::mem::take(&mut chunk.dirty);
            chunk.is_listed = false;
            let Some(before) = &chunk.before else { continue };
            let blocks = chunk.now.chunks_exact_mut(block_bytes).zip(before.chunks_exact(block_bytes));
            for (index, (now, before)) in blocks.enumerate() {
                if dirty >> index & 1 == 1 && is_lost() {
                    now.copy_from_slice(before);
                }
            }
        }
    }

    /// Changes the size to `blocks`. Blocks beyond the new end are lost; new ones read as `fill`.
    pub(crate) fn resize(&mut self, blocks: u64) {
        if blocks < self.blocks {
            self.set(blocks, self.blocks - blocks, self.fill, false);
        }
        self.blocks = blocks;
    }
}

impl Chunk {
    /// Prepares a write. If the write is cached, saves the durable data of its blocks; otherwise marks the
    /// blocks as durable.
    fn note(&mut self, part: &Part, is_cached: bool, block_bytes: usize, dirty: &mut Vec<u64>) {
        if !is_cached {
            self.dirty &= !part.mask;
            return;
        }
        let mut fresh = part.mask & !self.dirty;
        let before = self.before.get_or_insert_with(|| vec![0; CHUNK_BYTES].into_boxed_slice());
        while fresh != 0 {
            let at = fresh.trailing_zeros() as usize * block_bytes;
            let range = at..at + block_bytes;
            if let (Some(to), Some(from)) = (before.get_mut(range.clone()), self.now.get(range)) {
                to.copy_from_slice(from);
            }
            fresh &= fresh - 1;
        }
        self.dirty |= part.mask;
        if !self.is_listed {
            self.is_listed = true;
            dirty.push(part.chunk);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(medium: &EmulatedMedia, lba: u64, blocks: u64) -> Vec<u8> {
        let mut found = Vec::new();
        medium.read_blocks(lba, blocks, |data| {
            found.extend_from_slice(data);
            true
        });
        found
    }

    #[test]
    fn what_was_written_is_read_also_across_chunks() {
        let mut medium = EmulatedMedia::new(1000, 512, 0xff);
        assert_eq!(bytes(&medium, 120, 20), vec![0xff; 20 * 512]);
        let mut count = 0;
        medium.change(120, 20, false, |data| {
            data.fill(7);
            count += data.len();
        });
        assert_eq!(count, 20 * 512);
        assert_eq!(bytes(&medium, 119, 22)[..512], [0xff; 512]);
        assert_eq!(bytes(&medium, 120, 20), vec![7; 20 * 512]);
        assert_eq!(bytes(&medium, 140, 1), vec![0xff; 512]);
        medium.set(127, 2, 0, false);
        assert_eq!(bytes(&medium, 126, 4), [vec![7; 512], vec![0; 1024], vec![7; 512]].concat());
        medium.set(0, 1000, 0xff, false);
        assert_eq!(bytes(&medium, 0, 1000), vec![0xff; 512_000]);
    }

    #[test]
    fn a_loss_of_power_brings_back_what_was_flushed_and_never_anything_older() {
        let mut random = Random::new(5);
        let (mut kept, mut lost) = (0, 0);
        for round in 0..50 {
            let mut medium = EmulatedMedia::new(64, 4096, 0);
            medium.change(0, 64, true, |data| data.fill(1));
            medium.flush();
            medium.change(0, 40, true, |data| data.fill(2));
            medium.change(0, 40, true, |data| data.fill(3));
            medium.change(8, 4, false, |data| data.fill(4));
            medium.flush_blocks(16, 2);
            medium.lose(&mut random);
            let found = bytes(&medium, 0, 64);
            for (block, data) in found.chunks(4096).enumerate() {
                let allowed: &[u8] = match block {
                    8..12 => &[4],
                    16..18 => &[3],
                    0..40 => &[1, 3],
                    _ => &[1],
                };
                assert!(allowed.contains(&data[0]), "round {round}, block {block}: {}", data[0]);
                assert!(data.iter().all(|byte| *byte == data[0]), "a torn block");
                if allowed.len() == 2 {
                    *(if data[0] == 1 { &mut lost } else { &mut kept }) += 1;
                }
            }
            medium.lose(&mut random);
            assert_eq!(bytes(&medium, 0, 64), found, "the second loss finds nothing to lose");
        }
        assert!(kept > 100 && lost > 100, "{kept} kept, {lost} lost");
    }
}
