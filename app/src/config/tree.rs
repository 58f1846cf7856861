//! Typed access to the values of a [`Node`] by key name.
//!
//! Values have the kind that the schema states for their key. Reading a key as another type, or a key that
//! the schema does not have, is a bug and panics.

use std::net::SocketAddr;
use std::path::PathBuf;

use nvme_spec::nqn::Nqn;
use spindle_nvme_pcie::PciAddress;

use super::document::{Errors, Leaf, Location, Node, State, Value};

/// A value with its location in the file, for errors.
#[derive(Debug, Clone)]
pub struct Located<T> {
    pub value: T,
    pub location: Location,
}

/// Types that a [`Value`] converts to.
pub trait FromValue: Sized {
    /// Converts the value; `None` if the value has another kind or is out of range.
    fn from_value(value: &Value) -> Option<Self>;
}

macro_rules! from_value {
    ($($variant:ident => $kind:ty),+ $(,)?) => {
        $(impl FromValue for $kind {
            fn from_value(value: &Value) -> Option<Self> {
                if let Value::$variant(value) = value { Some(value.clone()) } else { None }
            }
        })+
    };
}

from_value! {
    Flag => bool,
    Integer => u64,
    Text => String,
    Nqn => Nqn,
    Identity => [u8; 16],
    Address => SocketAddr,
    Path => PathBuf,
    PciAddress => PciAddress,
}

macro_rules! from_integer {
    ($($kind:ty),+) => {
        $(impl FromValue for $kind {
            fn from_value(value: &Value) -> Option<Self> {
                u64::from_value(value)?.try_into().ok()
            }
        })+
    };
}

from_integer!(u16, u32, usize);

impl<T: FromValue> FromValue for Vec<Located<T>> {
    fn from_value(value: &Value) -> Option<Self> {
        if let Value::List(leaves) = value {
            Some(leaves.iter().map(Located::from_leaf).collect())
        } else {
            None
        }
    }
}

impl<T> Located<T> {
    pub fn refuse(&self, errors: &Errors, allowed: impl Into<String>) {
        self.location.refuse(errors, allowed);
    }
}

impl<T: FromValue> Located<T> {
    fn from_leaf(leaf: &Leaf) -> Located<T> {
        let value = T::from_value(&leaf.value)
            .unwrap_or_else(|| panic!("{}: asked for by another type", leaf.location.field));
        Located { value, location: leaf.location.clone() }
    }
}

impl Node {
    fn state(&self, name: &str) -> &State {
        self.leaves
            .get(name)
            .unwrap_or_else(|| panic!("{}: the schema has no key {name:?}", self.location.field))
    }

    /// Returns the value or its default. `None`: the value is invalid or a required key is missing (the error
    /// is recorded), or the key is not set and has no fixed default.
    pub fn find<T: FromValue>(&self, name: &str) -> Option<Located<T>> {
        match self.state(name) {
            State::Given(leaf) | State::Preset(leaf) => Some(Located::from_leaf(leaf)),
            State::Wrong | State::Absent => None,
        }
    }

    /// As [`Node::find`], with `T::default()` instead of `None`. For a key with a fixed default, `None`
    /// occurs only after an error, and then the plan is not used.
    pub fn get<T: FromValue + Default>(&self, name: &str) -> T {
        self.find(name).map(|at| at.value).unwrap_or_default()
    }

    /// Returns the value if the file sets the key and the value is valid.
    pub fn given<T: FromValue>(&self, name: &str) -> Option<Located<T>> {
        if let State::Given(leaf) = self.state(name) { Some(Located::from_leaf(leaf)) } else { None }
    }

    /// Returns the location of the value if the file sets the key and the value is valid.
    pub fn location_of(&self, name: &str) -> Option<&Location> {
        if let State::Given(leaf) = self.state(name) { Some(&leaf.location) } else { None }
    }

    /// Records an error for a key: at its value if the file sets it, else at the section.
    pub fn refuse(&self, name: &str, errors: &Errors, allowed: impl Into<String>) {
        match self.location_of(name) {
            Some(location) => location.refuse(errors, allowed),
            None => self.location.inside(name).refuse(errors, allowed),
        }
    }

    /// True if the file does not set the key. False if the value is invalid or a required key is missing, for
    /// which an error is recorded.
    pub fn is_absent(&self, name: &str) -> bool {
        matches!(self.state(name), State::Absent | State::Preset(_))
    }

    /// Returns the section of a name that may occur once, with defaults if the file leaves it out.
    pub fn section(&self, name: &str) -> &Node {
        let first = self.sections(name).first();
        first.unwrap_or_else(|| {
            panic!("{}: {name:?} may be there several times or not at all", self.location.field)
        })
    }

    pub fn sections(&self, name: &str) -> &[Node] {
        self.children
            .get(name)
            .unwrap_or_else(|| panic!("{}: the schema has no section {name:?}", self.location.field))
    }
}
