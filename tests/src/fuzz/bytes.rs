//! [`Bytes`]: a program's bytes as numbers; [`mutate`]: what becomes of a seed.

use crate::sim::Rng;

/// Reads numbers from bytes; zeroes when there are no more.
pub struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    /// From the first byte on.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Bytes<'a> {
        Bytes(bytes)
    }

    /// True when there are no more.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// A number below `end`, which is at least 1 and at most 256.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end
    }

    /// One of them.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// The next `count` bytes, or all that are left.
    pub fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// What is left.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }
}

/// Bytes that often matter: ends of ranges, lengths of PDUs and blocks.
const INTERESTING: [u32; 16] =
    [0, 1, 7, 8, 23, 24, 71, 72, 73, 128, 512, 4096, 8192, 0x7fff_ffff, 0xffff_fffe, 0xffff_ffff];

/// A seed with some changes, up to `max` bytes.
pub fn mutate(rng: &mut Rng, seed: &[u8], other: &[u8], max: usize) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..rng.size(1, 6) {
        let at = rng.size(0, bytes.len());
        match rng.below(7) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, rng.draw().to_le_bytes()[0]),
            2 if at < bytes.len() => bytes[at] ^= 1 << rng.below(8),
            3 if at < bytes.len() => bytes[at] = rng.draw().to_le_bytes()[0],
            4 if at + 4 <= bytes.len() => {
                bytes[at..at + 4].copy_from_slice(&rng.pick(&INTERESTING).to_le_bytes())
            }
            5 => {
                // Something twice.
                let end = rng.size(at, bytes.len().min(at + 200));
                let piece = bytes[at..end].to_vec();
                let to = rng.size(0, bytes.len());
                bytes.splice(to..to, piece);
            }
            _ => {
                let from = rng.size(0, other.len());
                bytes.truncate(at);
                bytes.extend(&other[from..]);
            }
        }
    }
    bytes.truncate(max);
    bytes
}
