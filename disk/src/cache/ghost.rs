//! [`Ghost`]: which pages were evicted last, by hash.
//!
//! A table of fingerprints, each with the number of its eviction. An entry is forgotten when as many pages
//! as the ghost is long were evicted after it, without being taken out: it is too old to count.

/// Entries that a hash can be in: one line of the processor's cache.
const WAYS: usize = 8;

/// The pages evicted last. See the module.
pub struct Ghost {
    /// fingerprint (32) | number of the eviction (32); 0: empty.
    entries: Box<[[u64; WAYS]]>,
    /// Evictions that it remembers.
    most: u32,
    /// Evictions so far, from 1.
    now: u32,
}

impl Ghost {
    /// One that remembers `most` evictions.
    #[must_use]
    pub fn new(most: u32) -> Ghost {
        Ghost { entries: vec![[0; WAYS]; Self::sets_for(most)].into(), most, now: 1 }
    }

    /// Twice the entries that are remembered: then few are displaced before their time.
    fn sets_for(most: u32) -> usize {
        (most as usize / 4).max(1)
    }

    /// Bytes that one takes.
    #[must_use]
    pub fn bytes_for(most: u32) -> u64 {
        (Self::sets_for(most) * WAYS * 8) as u64
    }

    fn set(&mut self, hash: u64) -> (&mut [u64; WAYS], u64) {
        let at = ((hash >> 32) * self.entries.len() as u64) >> 32;
        let at = usize::try_from(at).unwrap_or(0);
        (&mut self.entries[at], (hash & 0xffff_ffff) << 32)
    }

    fn age(entry: u64, now: u32) -> u32 {
        // The lower half.
        now.wrapping_sub(u32::try_from(entry & 0xffff_ffff).unwrap_or(0))
    }

    /// A page is evicted.
    pub fn insert(&mut self, hash: u64) {
        let now = self.now;
        let (set, fingerprint) = self.set(hash);
        let age = |entry: &u64| if *entry == 0 { u32::MAX } else { Self::age(*entry, now) };
        let same = set.iter().position(|entry| *entry != 0 && *entry >> 32 == fingerprint >> 32);
        let oldest = same.or_else(|| (0..WAYS).max_by_key(|at| age(&set[*at])));
        set[oldest.unwrap_or(0)] = fingerprint | u64::from(now);
        self.now = now.wrapping_add(1).max(1);
    }

    /// True when the page was evicted not long ago; it is forgotten.
    pub fn take(&mut self, hash: u64) -> bool {
        let (now, most) = (self.now, self.most);
        let (set, fingerprint) = self.set(hash);
        let same = set.iter_mut().find(|entry| **entry != 0 && **entry >> 32 == fingerprint >> 32);
        let Some(entry) = same else { return false };
        let is_young = Self::age(*entry, now) <= most;
        *entry = 0;
        is_young
    }
}
