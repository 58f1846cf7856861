//! How often each kind of thing happened: a run that never met something has not tested it.

use std::collections::BTreeMap;

/// Counters by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts(BTreeMap<&'static str, u64>);

impl Counts {
    /// Once more.
    pub fn hit(&mut self, name: &'static str) {
        self.add(name, 1);
    }

    /// So many more.
    pub fn add(&mut self, name: &'static str, count: u64) {
        *self.0.entry(name).or_default() += count;
    }

    /// How often.
    #[must_use]
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// All of another run.
    pub fn add_all(&mut self, other: &Counts) {
        other.0.iter().for_each(|(name, count)| self.add(name, *count));
    }

    /// Fails when something happened less often than `least` says.
    ///
    /// # Panics
    /// Then, with all that is missing.
    #[track_caller]
    pub fn assert_least(&self, least: &[(&str, u64)]) {
        let missing: Vec<_> = least.iter().filter(|(name, count)| self.get(name) < *count).collect();
        assert!(missing.is_empty(), "too few of {missing:?} in {:?}", self.0);
    }
}
