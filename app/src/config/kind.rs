//! [`Kind`]: types and ranges of the values of keys, and of parameters of the control socket.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use nvme_spec::nqn::{NQN_BYTES_MAX, Nqn};
use spindle_nvme_pcie::PciAddress;
use uuid::Uuid;

use super::document::Value;
use super::schema::Key;
use crate::rpc::params::Param;
use crate::size::Bytes;
use crate::text::{alternatives, quoted};

/// Longest path of a Unix socket: `sun_path` has 108 bytes with the terminating NUL.
const SOCKET_BYTES_MAX: usize = 107;
/// Longest string parameter: PATH_MAX of Linux.
const STRING_BYTES_MAX: usize = 4096;

/// Type and range of a value.
#[derive(Debug)]
pub enum Kind {
    Flag,
    Integer {
        min: u64,
        max: u64,
    },
    /// A count of bytes, as `"256MiB"` or a whole number.
    Size {
        min: u64,
        max: u64,
        /// The value is a multiple of this many bytes.
        multiple: u64,
    },
    /// One of these strings.
    Word(&'static [&'static str]),
    /// One of these numbers.
    Number(&'static [u64]),
    /// Printable ASCII, at least one character, without a space at either end.
    Text {
        chars_max: usize,
    },
    Nqn,
    /// A UUID in a form that `Uuid::try_parse` accepts, not all zeroes.
    Uuid,
    /// 16 bytes as 32 hexadecimal digits, not all zeroes.
    Nguid,
    /// An IP address and a port that is not 0.
    Address,
    Path,
    /// The absolute path of a Unix socket; empty: no socket.
    SocketOrNone,
    PciAddress,
    List(&'static Kind),
    /// `[name]`.
    Section(&'static [Key]),
    /// `[[name]]`, any number of times.
    Sections(&'static [Key]),
    /// Of a parameter: a string of 1 to [`STRING_BYTES_MAX`] bytes.
    String,
    /// Of a parameter: an object with these members.
    Object(&'static [Param]),
    /// Of a parameter: this JSON value, because others select behavior of SPDK that Spindle does not have.
    Only(&'static str),
}

/// A value without a list or section in it, as it is written.
#[derive(Clone, Copy)]
pub enum Scalar<'a> {
    Flag(bool),
    Integer(u64),
    Text(&'a str),
    /// A value that no kind has.
    Other,
}

impl Kind {
    /// Returns the value if it is of this kind. `Err(Some)` contains a reason besides "must be ..." of the
    /// kind. Refuses a UUID or NGUID of zeroes, and the kinds that are not scalars.
    pub fn value(&self, scalar: Scalar<'_>) -> Result<Value, Option<String>> {
        let found = match (self, scalar) {
            (Kind::Flag, Scalar::Flag(flag)) => Some(Value::Flag(flag)),
            (Kind::Integer { min, max }, Scalar::Integer(number)) => {
                (min..=max).contains(&&number).then_some(Value::Integer(number))
            }
            (Kind::Number(allowed), Scalar::Integer(number)) => {
                allowed.contains(&number).then_some(Value::Integer(number))
            }
            (Kind::Size { .. }, Scalar::Integer(bytes)) => self.size(bytes),
            (Kind::Size { .. }, Scalar::Text(text)) => self.size(text.parse::<Bytes>().map_err(Some)?.get()),
            (_, Scalar::Text(text)) => self.value_of_text(text)?,
            _ => None,
        };
        found.filter(|found| *found != Value::Identity([0; 16])).ok_or(None)
    }

    fn size(&self, bytes: u64) -> Option<Value> {
        let Kind::Size { min, max, multiple } = self else { return None };
        let is_allowed = (min..=max).contains(&&bytes) && bytes.is_multiple_of(*multiple);
        is_allowed.then_some(Value::Integer(bytes))
    }

    fn value_of_text(&self, text: &str) -> Result<Option<Value>, Option<String>> {
        Ok(match self {
            Kind::Word(words) => words.contains(&text).then(|| Value::Text(text.to_owned())),
            Kind::Text { chars_max } => is_plain(text, *chars_max).then(|| Value::Text(text.to_owned())),
            Kind::Nqn => Some(Value::Nqn(Nqn::new(text).map_err(|error| Some(error.to_string()))?)),
            Kind::Uuid => Uuid::try_parse(text).ok().map(|uuid| Value::Identity(uuid.into_bytes())),
            Kind::Nguid => nguid(text).map(Value::Identity),
            Kind::Address => {
                let address = text.parse::<SocketAddr>().ok();
                address.filter(|address| address.port() != 0).map(Value::Address)
            }
            Kind::PciAddress => {
                let address = text.parse::<PciAddress>().map_err(|error| Some(error.to_string()))?;
                Some(Value::PciAddress(address))
            }
            Kind::SocketOrNone => {
                let is_one = text.starts_with('/') && text.len() <= SOCKET_BYTES_MAX && !text.contains('\0');
                (text.is_empty() || is_one).then(|| Value::Path(text.into()))
            }
            Kind::String => {
                (1..=STRING_BYTES_MAX).contains(&text.len()).then(|| Value::Text(text.to_owned()))
            }
            Kind::Path => Some(PathBuf::from(text)).filter(|path| path.is_absolute()).map(Value::Path),
            Kind::Flag
            | Kind::Integer { .. }
            | Kind::Size { .. }
            | Kind::Number(_)
            | Kind::List(_)
            | Kind::Section(_)
            | Kind::Sections(_)
            | Kind::Object(_)
            | Kind::Only(_) => None,
        })
    }
}

/// With `#`, the words for parameters, which are shorter.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Flag => f.write_str("true or false"),
            Kind::Integer { min, max: u64::MAX } => write!(f, "a whole number from {min}"),
            Kind::Integer { min, max } => write!(f, "a whole number from {min} to {max}"),
            Kind::Size { min, max, multiple } => {
                let (min, max) = (Bytes::new(*min), Bytes::new(*max));
                write!(f, "a size from {min} to {max}, a multiple of {multiple}, like \"64KiB\" or 65536")
            }
            Kind::Word(words) => f.write_str(&quoted(*words)),
            Kind::Number(numbers) => f.write_str(&alternatives(numbers.iter().map(u64::to_string))),
            Kind::Text { chars_max } => {
                write!(f, "1 to {chars_max} printable ASCII characters without a space at either end")
            }
            Kind::Nqn if f.alternate() => f.write_str("an NQN, like \"nqn.2026-01.io.spindle:a\""),
            Kind::Nqn => {
                let like = "like \"nqn.2026-01.io.spindle:a\"";
                write!(f, "an NQN, {like}: at most {NQN_BYTES_MAX} bytes, no control or invisible characters")
            }
            Kind::Uuid if f.alternate() => f.write_str("a UUID, not all zeroes"),
            Kind::Uuid => f.write_str("a UUID like \"6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00\", not all zeroes"),
            Kind::Nguid => f.write_str("32 hexadecimal digits, not all zeroes"),
            Kind::Address => f.write_str("an IP address and a port, like \"0.0.0.0:4420\" or \"[::]:4420\""),
            Kind::Path => f.write_str("an absolute path, like \"/var/lib/spindle/disk0.img\""),
            Kind::SocketOrNone => {
                let like = "like \"/run/spindle/spindle.sock\", or \"\"";
                write!(f, "an absolute path of at most {SOCKET_BYTES_MAX} bytes, {like}")
            }
            Kind::PciAddress => f.write_str("a PCI address, like \"0000:01:00.0\""),
            Kind::List(Kind::String) => f.write_str("a list of strings"),
            Kind::List(of) => write!(f, "a list, each {of}"),
            Kind::Section(_) => f.write_str("a section"),
            Kind::Sections(_) => f.write_str("a list of sections"),
            Kind::String => write!(f, "a string of 1 to {STRING_BYTES_MAX} bytes"),
            Kind::Object(params) => {
                let names: Vec<_> = params.iter().map(|param| param.name).collect();
                write!(f, "an object with {}", names.join(", "))
            }
            Kind::Only(only) => write!(f, "{only}, the only allowed value"),
        }
    }
}

fn is_plain(text: &str, chars_max: usize) -> bool {
    let is_printable = text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    is_printable && (1..=chars_max).contains(&text.len()) && text.trim() == text
}

fn nguid(text: &str) -> Option<[u8; 16]> {
    let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u128::from_str_radix(text, 16).ok().map(u128::to_be_bytes)).flatten()
}
