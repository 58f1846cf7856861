//! Pseudo-random numbers for addresses and the mix of reads and writes.

/// xorshift64: a few instructions per number. Not for cryptography.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Creates a generator. Its state is `seed` with the lowest bit set, as the state must not be 0. So `2n`
    /// and `2n + 1` give the same sequence.
    pub fn new(seed: u64) -> Random {
        Random(seed | 1)
    }

    /// Returns a number from 0 to `bound` - 1; 0 if `bound` is 0.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let product = u128::from(self.0) * u128::from(bound);
        // The high half of the product scales the state to 0 .. bound, without a division.
        u64::try_from(product >> 64).unwrap_or(0)
    }
}
