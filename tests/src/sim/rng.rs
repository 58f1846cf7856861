//! The one source of chance in a run.

/// xorshift64*: small, fast, and the same on every machine.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Any seed will do.
    #[must_use]
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0xd1b5_4a32_d192_ed03 | 1)
    }

    /// The next 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Uniform below `end`, which is at least 1.
    pub fn below(&mut self, end: u64) -> u64 {
        (self.draw() >> 11) % end.max(1)
    }

    /// Uniform in `low ..= high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// The same, for sizes.
    pub fn size(&mut self, low: usize, high: usize) -> usize {
        usize::try_from(self.between(low as u64, high as u64)).unwrap_or(low)
    }

    /// True `n` times in a thousand.
    pub fn permille(&mut self, n: u64) -> bool {
        self.below(1000) < n
    }

    /// One of them.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.size(0, of.len() - 1)]
    }
}
