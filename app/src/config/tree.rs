//! How values are taken out of a [`Node`]: typed, by the name of their key.
//!
//! The kind of every key is in the schema and was checked, so asking for a key by another type is a bug of
//! ours and panics.

use std::net::SocketAddr;
use std::path::PathBuf;

use nvme_spec::nqn::Nqn;
use spindle_nvme_pcie::PciAddress;

use super::document::{Errors, Leaf, Location, Node, State, Value};

/// A value that is right by itself, and where it stands.
#[derive(Debug, Clone)]
pub struct At<T> {
    pub value: T,
    /// Where it stands, for errors about it.
    pub location: Location,
}

/// What a [`Value`] is taken out as.
pub trait FromValue: Sized {
    /// `None` when the value is of another kind.
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

impl<T: FromValue> FromValue for Vec<At<T>> {
    fn from_value(value: &Value) -> Option<Self> {
        if let Value::List(leaves) = value { Some(leaves.iter().map(At::from_leaf).collect()) } else { None }
    }
}

impl<T> At<T> {
    pub fn refuse(&self, errors: &Errors, allowed: impl Into<String>) {
        self.location.refuse(errors, allowed);
    }
}

impl<T: FromValue> At<T> {
    fn from_leaf(leaf: &Leaf) -> At<T> {
        let value = T::from_value(&leaf.value)
            .unwrap_or_else(|| panic!("{}: asked for by another type", leaf.location.field));
        At { value, location: leaf.location.clone() }
    }
}

impl Node {
    fn state(&self, name: &str) -> &State {
        self.leaves
            .get(name)
            .unwrap_or_else(|| panic!("{}: the schema has no key {name:?}", self.location.field))
    }

    /// The value, given or the default. `None`: it is wrong (which is recorded), or absent and depends on
    /// others.
    pub fn find<T: FromValue>(&self, name: &str) -> Option<At<T>> {
        match self.state(name) {
            State::Given(leaf) | State::Preset(leaf) => Some(At::from_leaf(leaf)),
            State::Wrong | State::Absent => None,
        }
    }

    /// The value; what `T` has as its default stands in for one that is wrong, since then nothing is started
    /// anyway.
    pub fn get<T: FromValue + Default>(&self, name: &str) -> T {
        self.find(name).map(|at| at.value).unwrap_or_default()
    }

    /// The value where the file gives it and it is right.
    pub fn given<T: FromValue>(&self, name: &str) -> Option<At<T>> {
        if let State::Given(leaf) = self.state(name) { Some(At::from_leaf(leaf)) } else { None }
    }

    /// Where the file gives it, and it is right.
    pub fn location_of(&self, name: &str) -> Option<&Location> {
        if let State::Given(leaf) = self.state(name) { Some(&leaf.location) } else { None }
    }

    /// An error about a key that is not given.
    pub fn refuse(&self, name: &str, errors: &Errors, allowed: impl Into<String>) {
        self.location.inside(name).refuse(errors, allowed);
    }

    /// True when the file says nothing about it, right or wrong.
    pub fn is_absent(&self, name: &str) -> bool {
        matches!(self.state(name), State::Absent | State::Preset(_))
    }

    /// The single section of this name, with all its defaults when the file has none.
    pub fn section(&self, name: &str) -> &Node {
        let first = self.sections(name).first();
        first.unwrap_or_else(|| {
            panic!("{}: {name:?} may be there several times or not at all", self.location.field)
        })
    }

    /// All sections of this name.
    pub fn sections(&self, name: &str) -> &[Node] {
        self.children
            .get(name)
            .unwrap_or_else(|| panic!("{}: the schema has no section {name:?}", self.location.field))
    }
}
