//! Sizes in bytes with units: `4k`, `4KiB`, `256MiB`, `1GiB`, `4096`.
//!
//! [`Bytes`] is parsed from the command line and from the configuration file; [`rounded`] formats a size for
//! people. K, M, G and T, in either case, are powers of 1024: `1G`, `1GB` and `1GiB` are equal. A number
//! without a unit is in bytes.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// Size in bytes, printed in the largest unit that divides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(u64);

/// Units larger than a byte, largest first: (bytes, printed name).
const UNITS: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];

impl Bytes {
    /// Creates a size of `bytes` bytes.
    #[must_use]
    pub const fn new(bytes: u64) -> Bytes {
        Bytes(bytes)
    }

    /// Creates a size of `len` bytes; of `u64::MAX` bytes if `len` does not fit.
    #[must_use]
    pub fn from_len(len: usize) -> Bytes {
        Bytes(u64::try_from(len).unwrap_or(u64::MAX))
    }

    /// Returns the size in bytes.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the size as a length in memory; `usize::MAX` if it does not fit.
    #[must_use]
    pub fn as_len(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl FromStr for Bytes {
    /// Message that describes the error in the text.
    type Err = String;

    fn from_str(text: &str) -> Result<Bytes, String> {
        let trimmed = text.trim();
        let digits = trimmed.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = trimmed.split_at(digits);
        if number.is_empty() {
            return Err(format!(
                "`{text}` is not a size: it must begin with a number, as in 4096, 4k, 256MiB or 1GiB"
            ));
        }
        let too_large = || format!("`{text}` is more bytes than 64 bits can count");
        let number: u64 = number.parse().map_err(|_| too_large())?;
        let unit = unit.trim_start();
        let factor: u64 = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kb" | "kib" => 1 << 10,
            "m" | "mb" | "mib" => 1 << 20,
            "g" | "gb" | "gib" => 1 << 30,
            "t" | "tb" | "tib" => 1 << 40,
            _ => {
                return Err(format!(
                    "`{text}` has the unit `{unit}`; allowed are B, K, KiB, M, MiB, G, GiB, T, TiB (powers \
                     of 1024)"
                ));
            }
        };
        number.checked_mul(factor).map(Bytes).ok_or_else(too_large)
    }
}

impl fmt::Display for Bytes {
    /// Prints the size in the largest unit that divides it, so that the text parses back to the same size.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(factor, _)| self.0 > 0 && self.0.is_multiple_of(*factor)) {
            Some((factor, name)) => write!(f, "{} {name}", self.0 / factor),
            None => write!(f, "{} B", self.0),
        }
    }
}

impl Serialize for Bytes {
    /// Serializes the size as a number of bytes: readers of a benchmark's JSON need no units.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

/// Formats a size for people, in the largest unit that does not exceed it. Rounded down: to one decimal below
/// 100 units, to a whole number from there on.
#[must_use]
pub fn rounded(bytes: u64) -> String {
    let Some((unit, name)) = UNITS.into_iter().find(|(unit, _)| bytes >= *unit) else {
        return format!("{bytes} B");
    };
    let tenths = u128::from(bytes) * 10 / u128::from(unit);
    if tenths.is_multiple_of(10) || tenths >= 1000 {
        format!("{} {name}", tenths / 10)
    } else {
        format!("{}.{} {name}", tenths / 10, tenths % 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_write_a_size_is_read() {
        let cases = [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("4k", 4096),
            ("4K", 4096),
            ("4KB", 4096),
            ("4kib", 4096),
            ("4 KiB", 4096),
            (" 4KiB ", 4096),
            ("128k", 131_072),
            ("1M", 1 << 20),
            ("256MiB", 256 << 20),
            ("1GiB", 1 << 30),
            ("2T", 2 << 40),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, bytes) in cases {
            assert_eq!(text.parse(), Ok(Bytes::new(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_says_why() {
        let message = |text: &str| text.parse::<Bytes>().expect_err(text).to_string();
        for text in ["", "k", "-4k", "GiB", " "] {
            assert!(message(text).contains("must begin with a number"), "{text}: {}", message(text));
        }
        for text in ["4x", "4kk", "4 Ki", "1.5G", "4k 4k", "1e9"] {
            assert!(message(text).contains("allowed are B, K, KiB"), "{text}: {}", message(text));
        }
        for text in ["18446744073709551616", "18014398509481984k", "99999999999T"] {
            assert!(message(text).contains("64 bits"), "{text}: {}", message(text));
        }
    }

    #[test]
    fn what_is_printed_is_read_back_as_the_same_size() {
        let cases = [
            (0, "0 B"),
            (1, "1 B"),
            (4096, "4 KiB"),
            (4097, "4097 B"),
            (256 << 20, "256 MiB"),
            (3 << 40, "3 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(Bytes::new(bytes).to_string(), text);
            assert_eq!(text.parse(), Ok(Bytes::new(bytes)));
        }
    }

    #[test]
    fn json_has_the_number_of_bytes() {
        assert_eq!(serde_json::to_string(&Bytes::new(4096)).expect("serialises"), "4096");
    }
}
