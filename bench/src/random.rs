//! [`Random`]: what a benchmark does next.

/// Addresses and directions: xorshift64, which costs less than what it decides about.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A sequence of its own for each odd seed.
    pub fn new(seed: u64) -> Random {
        Random(seed | 1)
    }

    /// A number below `bound`.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let product = u128::from(self.0) * u128::from(bound);
        // The high half: below `bound`.
        u64::try_from(product >> 64).unwrap_or(0)
    }
}
