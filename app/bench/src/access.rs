//! Access pattern of a benchmark (`--rw`): reads or writes, sequential or random.

use std::fmt;

use clap::ValueEnum;
use serde::{Serialize, Serializer};

/// Access pattern, with the names that fio uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub enum Access {
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
    /// Random reads.
    RandRead,
    /// Random writes.
    RandWrite,
    /// Random reads and writes; `--mix` is the share of reads.
    RandRw,
}

impl Access {
    /// Returns true if the addresses are random.
    #[must_use]
    pub fn is_random(self) -> bool {
        match self {
            Access::RandRead | Access::RandWrite | Access::RandRw => true,
            Access::Read | Access::Write => false,
        }
    }

    /// Returns the share of reads in per cent; `mix` is the share for `randrw`.
    #[must_use]
    pub fn reads_percent(self, mix: u8) -> u8 {
        match self {
            Access::Read | Access::RandRead => 100,
            Access::Write | Access::RandWrite => 0,
            Access::RandRw => mix,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Access::Read => "read",
            Access::Write => "write",
            Access::RandRead => "randread",
            Access::RandWrite => "randwrite",
            Access::RandRw => "randrw",
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Access {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_command_line() {
        for access in Access::value_variants() {
            assert_eq!(Access::from_str(&access.to_string(), false), Ok(*access));
        }
    }

    #[test]
    fn only_a_mix_is_mixed() {
        let shares: Vec<u8> =
            Access::value_variants().iter().map(|access| access.reads_percent(70)).collect();
        assert_eq!(shares, [100, 0, 100, 0, 70]);
    }
}
