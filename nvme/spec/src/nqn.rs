//! NVMe Qualified Names (Base 2.0 section 4.5) and the space-padded strings of Identify (section 4.6).

use core::fmt;
use core::hash::{Hash, Hasher};
use core::str::FromStr;

/// Well-known NQN of discovery services.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// Maximum length of an NQN in bytes, without the terminating NUL (Base 2.0 section 4.5).
pub const NQN_BYTES_MAX: usize = 223;

/// Size in bytes of a wire field that contains an NQN, padded with NULs.
pub const NQN_FIELD_BYTES: usize = 256;

/// Size of the array in [`Nqn`] in bytes: the longest NQN and a NUL.
const STORED_BYTES: usize = NQN_BYTES_MAX + 1;

/// A validated NQN: UTF-8, 1 to 223 bytes, no control or invisible characters. [`Nqn::unnamed`] is the
/// exception with 0 bytes.
///
/// The prefix `nqn.`, which the specification requires, is not checked (see [`Nqn::has_prefix`]): NQNs
/// without the prefix are in use and other targets accept them.
#[derive(Clone, Copy)]
pub struct Nqn {
    /// The NQN, padded with NULs.
    stored: [u8; STORED_BYTES],
    /// Length of the NQN in bytes, 0 to 223.
    length: u8,
}

/// Error of the validation of an NQN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NqnError {
    /// The NQN has no bytes.
    Empty,
    /// The NQN has more than 223 bytes, or its wire field has no NUL.
    TooLong,
    /// The NQN is not UTF-8, or has a control or invisible character or NUL.
    Characters,
}

impl fmt::Display for NqnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "an NQN has at least one byte",
            Self::TooLong => "an NQN has at most 223 bytes",
            Self::Characters => "an NQN is UTF-8 without control or invisible characters",
        })
    }
}

impl core::error::Error for NqnError {}

impl Nqn {
    /// Returns [`DISCOVERY_NQN`] as an [`Nqn`].
    #[must_use]
    pub fn discovery() -> Self {
        Self::new(DISCOVERY_NQN).expect("the well-known name is well formed")
    }

    /// Returns the empty NQN, for hosts that send an empty HOSTNQN. [`Nqn::new`] rejects the empty string.
    #[must_use]
    pub const fn unnamed() -> Self {
        Self { stored: [0; STORED_BYTES], length: 0 }
    }

    /// Returns true if the NQN has no bytes, as [`Nqn::unnamed`].
    #[must_use]
    pub const fn is_unnamed(&self) -> bool {
        self.length == 0
    }

    /// Returns true if the NQN begins with `nqn.`, as Base 2.0 section 4.5 requires.
    #[must_use]
    pub fn has_prefix(&self) -> bool {
        self.as_bytes().starts_with(b"nqn.")
    }

    /// Validates and copies `name`.
    ///
    /// # Errors
    /// [`NqnError`] when `name` is empty, has more than 223 bytes, or has a control or invisible character.
    pub fn new(name: &str) -> Result<Self, NqnError> {
        if name.is_empty() {
            return Err(NqnError::Empty);
        }
        if name.len() > NQN_BYTES_MAX {
            return Err(NqnError::TooLong);
        }
        if name.chars().any(|it| it.is_control() || is_invisible(it)) {
            return Err(NqnError::Characters);
        }
        let mut stored = [0; STORED_BYTES];
        for (to, from) in stored.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        let length = u8::try_from(name.len()).map_err(|_| NqnError::TooLong)?;
        Ok(Self { stored, length })
    }

    /// Validates and copies the NQN in a NUL-terminated field of Connect, Identify or the discovery log.
    /// Bytes after the first NUL are ignored.
    ///
    /// # Errors
    /// [`NqnError`] when the field has no NUL, or the bytes before the first NUL are not a valid NQN.
    pub fn from_field(field: &[u8; NQN_FIELD_BYTES]) -> Result<Self, NqnError> {
        let mut parts = field.splitn(2, |&byte| byte == 0);
        let (Some(name), Some(_)) = (parts.next(), parts.next()) else {
            return Err(NqnError::TooLong);
        };
        if name.len() > NQN_BYTES_MAX {
            return Err(NqnError::TooLong);
        }
        Self::new(core::str::from_utf8(name).map_err(|_| NqnError::Characters)?)
    }

    /// Returns the NQN as a 256-byte wire field, padded with NULs.
    #[must_use]
    pub fn to_field(&self) -> [u8; NQN_FIELD_BYTES] {
        let mut field = [0; NQN_FIELD_BYTES];
        for (to, from) in field.iter_mut().zip(self.stored) {
            *to = from;
        }
        field
    }

    /// Returns the NQN; empty for [`Nqn::unnamed`].
    #[must_use]
    pub fn as_str(&self) -> &str {
        // `stored` is UTF-8 by construction; `unwrap_or_default` avoids a panic path.
        core::str::from_utf8(self.as_bytes()).unwrap_or_default()
    }

    /// Returns the NQN as bytes, without padding.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.stored.get(..usize::from(self.length)).unwrap_or_default()
    }

    /// Returns true if the NQN is [`DISCOVERY_NQN`].
    #[must_use]
    pub fn is_discovery(&self) -> bool {
        self.as_str() == DISCOVERY_NQN
    }
}

impl PartialEq for Nqn {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for Nqn {}

impl PartialOrd for Nqn {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Nqn {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl Hash for Nqn {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl FromStr for Nqn {
    type Err = NqnError;

    fn from_str(name: &str) -> Result<Self, NqnError> {
        Self::new(name)
    }
}

impl TryFrom<&str> for Nqn {
    type Error = NqnError;

    fn try_from(name: &str) -> Result<Self, NqnError> {
        Self::new(name)
    }
}

/// Whether a character has no width or changes the direction of the text around it, so that two different
/// NQNs look the same. Those that Unicode calls default ignorable, and the separators of lines.
const fn is_invisible(character: char) -> bool {
    matches!(
        character,
        '\u{ad}'
            | '\u{34f}'
            | '\u{61c}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{feff}'
            | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}'
    )
}

/// Returns `text` left-justified and padded with spaces, the format of SN, MN and FR of Identify (Base 2.0
/// section 4.6). Truncates `text` to `N` bytes; replaces each byte that is not printable ASCII with `?`.
#[must_use]
pub fn padded_ascii<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [b' '; N];
    for (to, from) in field.iter_mut().zip(text.bytes()) {
        *to = if (b' '..=b'~').contains(&from) { from } else { b'?' };
    }
    field
}

/// Returns the text of a field without trailing spaces and NULs; empty if the field is not UTF-8.
#[must_use]
pub fn trimmed_ascii(field: &[u8]) -> &str {
    core::str::from_utf8(field).unwrap_or_default().trim_end_matches(['\0', ' '])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::String;

    fn long(bytes: usize) -> String {
        let mut name = String::from("nqn.");
        name.extend(core::iter::repeat_n('x', bytes - 4));
        name
    }

    #[test]
    fn a_name_has_between_one_and_223_bytes() {
        assert_eq!(Nqn::new(""), Err(NqnError::Empty));
        assert_eq!(Nqn::new(&long(223)).unwrap().as_str(), long(223));
        assert_eq!(Nqn::new(&long(224)), Err(NqnError::TooLong));
        assert_eq!(Nqn::new(&long(5000)), Err(NqnError::TooLong));
        assert!(Nqn::new("nqn.2014-08.org").unwrap().has_prefix());
        assert!(!Nqn::new("blktests-subsystem-1").unwrap().has_prefix());
        assert!(Nqn::unnamed().is_unnamed() && Nqn::unnamed().to_field() == [0; NQN_FIELD_BYTES]);
        assert_eq!(Nqn::new("nqn.a\0b"), Err(NqnError::Characters));
    }

    #[test]
    fn a_name_has_no_character_that_nobody_sees() {
        // Zero width space, joiners, marks and overrides of the direction, byte order mark, tags.
        for hidden in
            ['\u{200b}', '\u{200d}', '\u{200f}', '\u{202e}', '\u{2067}', '\u{feff}', '\u{e0061}', '\u{ad}']
        {
            let mut name = String::from("nqn.a");
            name.push(hidden);
            assert_eq!(Nqn::new(&name), Err(NqnError::Characters), "{hidden:?}");
        }
        for seen in ["nqn.\u{e4}", "nqn.\u{5d0}\u{5d1}", "nqn.\u{65e5}\u{672c}"] {
            assert!(Nqn::new(seen).is_ok(), "{seen}");
        }
    }

    #[test]
    fn a_field_ends_at_its_nul_and_must_have_one() {
        let field = Nqn::discovery().to_field();
        assert_eq!(&field[..36], DISCOVERY_NQN.as_bytes());
        assert!(field[36..].iter().all(|&byte| byte == 0));
        let mut dirty = field;
        dirty[40] = 0xff;
        assert!(Nqn::from_field(&dirty).unwrap().is_discovery());
        let mut full = [b'a'; NQN_FIELD_BYTES];
        full[..4].copy_from_slice(b"nqn.");
        assert_eq!(Nqn::from_field(&full), Err(NqnError::TooLong));
        full[223] = 0;
        assert_eq!(Nqn::from_field(&full).unwrap().as_bytes().len(), 223);
        full[223] = b'a';
        full[224] = 0;
        assert_eq!(Nqn::from_field(&full), Err(NqnError::TooLong));
        full[5] = 0xff;
        full[6] = 0;
        assert_eq!(Nqn::from_field(&full), Err(NqnError::Characters));
        assert_eq!(Nqn::from_field(&[0; NQN_FIELD_BYTES]), Err(NqnError::Empty));
    }

    #[test]
    fn strings_of_identify_are_padded_with_spaces() {
        assert_eq!(&padded_ascii::<8>("abc"), b"abc     ");
        assert_eq!(&padded_ascii::<4>("abcdef"), b"abcd");
        assert_eq!(&padded_ascii::<4>("a\u{7f}\n"), b"a?? ");
        assert_eq!(trimmed_ascii(b"abc     "), "abc");
    }
}
