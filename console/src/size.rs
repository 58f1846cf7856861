//! Sizes as people write them: `4k`, `4KiB`, `256MiB`, `1GiB`, `4096`.
//!
//! One type, [`Bytes`], for the command line (`FromStr`) and the configuration file (`Deserialize`). K, M, G
//! and T are always powers of 1024: a disk of `1G` and a disk of `1GiB` are the same disk. A bare number is
//! bytes.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(u64);

/// Why a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Nothing before the unit.
    #[error("`{0}` is not a size: it must begin with a number, as in 4096, 4k, 256MiB or 1GiB")]
    NoNumber(String),
    /// A unit that is none of ours.
    #[error("`{text}` has the unit `{unit}`; allowed are B, K, KiB, M, MiB, G, GiB, T, TiB (powers of 1024)")]
    Unit {
        /// The whole text.
        text: String,
        /// What stands behind the number.
        unit: String,
    },
    /// More than 2^64 - 1 bytes.
    #[error("`{0}` is more bytes than 64 bits can count")]
    TooLarge(String),
}

/// Units by size, largest first, with the name that they are printed with.
const UNITS: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];

impl Bytes {
    /// A size of that many bytes.
    #[must_use]
    pub const fn new(bytes: u64) -> Bytes {
        Bytes(bytes)
    }

    /// The size of something in memory.
    #[must_use]
    pub fn from_len(len: usize) -> Bytes {
        Bytes(u64::try_from(len).unwrap_or(u64::MAX))
    }

    /// The number of bytes.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The number of bytes as a length in memory; the largest length where this machine's addresses are
    /// narrower.
    #[must_use]
    pub fn as_len(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl FromStr for Bytes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Bytes, SizeError> {
        let trimmed = text.trim();
        let digits = trimmed.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = trimmed.split_at(digits);
        if number.is_empty() {
            return Err(SizeError::NoNumber(text.to_owned()));
        }
        let too_large = || SizeError::TooLarge(text.to_owned());
        let number: u64 = number.parse().map_err(|_| too_large())?;
        let unit = unit.trim_start();
        let factor: u64 = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kb" | "kib" => 1 << 10,
            "m" | "mb" | "mib" => 1 << 20,
            "g" | "gb" | "gib" => 1 << 30,
            "t" | "tb" | "tib" => 1 << 40,
            _ => return Err(SizeError::Unit { text: text.to_owned(), unit: unit.to_owned() }),
        };
        number.checked_mul(factor).map(Bytes).ok_or_else(too_large)
    }
}

impl fmt::Display for Bytes {
    /// The largest unit that divides the size, so that what is printed parses back to the same size.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(factor, _)| self.0 > 0 && self.0.is_multiple_of(*factor)) {
            Some((factor, name)) => write!(f, "{} {name}", self.0 / factor),
            None => write!(f, "{} B", self.0),
        }
    }
}

impl Serialize for Bytes {
    /// As a number of bytes: what reads the JSON of a benchmark should not have to know units.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        deserializer.deserialize_any(BytesVisitor)
    }
}

struct BytesVisitor;

impl Visitor<'_> for BytesVisitor {
    type Value = Bytes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size: a number of bytes, or a text such as \"4k\", \"256MiB\", \"1GiB\"")
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Bytes, E> {
        Ok(Bytes(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Bytes, E> {
        u64::try_from(value).map(Bytes).map_err(|_| E::invalid_value(de::Unexpected::Signed(value), &self))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Bytes, E> {
        value.parse().map_err(E::custom)
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

    #[derive(Debug, Deserialize)]
    struct Holder {
        size: Bytes,
    }

    #[test]
    fn a_configuration_gives_sizes_as_text_or_as_numbers() {
        let read = |text: &str| toml::from_str::<Holder>(text).map(|holder| holder.size.get());
        assert_eq!(read("size = \"1GiB\""), Ok(1 << 30));
        assert_eq!(read("size = 4096"), Ok(4096));
        for (text, part) in [
            ("size = \"1 parsec\"", "has the unit `parsec`"),
            ("size = -1", "expected a size"),
            ("size = 1.5", "expected a size"),
            ("size = true", "expected a size"),
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn json_has_the_number_of_bytes() {
        assert_eq!(serde_json::to_string(&Bytes::new(4096)).expect("serialises"), "4096");
    }
}
