//! Typed access to the values of a [`Node`] by key name.
//!
//! Values have the kind that the schema states for their key. Reading a key as another type, or a key that
//! the schema does not have, is a bug and panics.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use nvme_spec::nqn::Nqn;
use spindle_nvme_pcie::PciAddress;

use super::document::{Errors, Leaf, Location, Node, Value, preset};
use super::schema::{Key, Preset};

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
        Located { value: Self::value_of(leaf), location: leaf.location.clone() }
    }

    fn value_of(leaf: &Leaf) -> T {
        T::from_value(&leaf.value)
            .unwrap_or_else(|| panic!("{}: asked for by another type", leaf.location.field))
    }
}

impl Node {
    fn key(&self, name: &str) -> &'static Key {
        let found = self.keys.iter().find(|key| key.name == name && key.section().is_none());
        found.unwrap_or_else(|| panic!("{}: the schema has no key {name:?}", self.location.field))
    }

    /// Returns the entry of a key that the file sets or must set.
    fn set(&self, name: &str) -> Option<&Option<Leaf>> {
        let leaf = self.leaves.get(name);
        debug_assert!(leaf.is_some() || self.key(name).name == name);
        leaf
    }

    /// Returns the value or its default. `None`: the value is invalid or a required key is missing (the error
    /// is recorded), or the key is not set and has no fixed default.
    pub fn find<T: FromValue>(&self, name: &str) -> Option<Located<T>> {
        match self.set(name) {
            Some(leaf) => leaf.as_ref().map(Located::from_leaf),
            None => {
                let Key { kind, preset: Preset::Fixed(text), .. } = self.key(name) else { return None };
                let location = Location { text: (*text).to_owned(), ..self.location.inside(name) };
                Some(Located::from_leaf(&Leaf { value: preset(kind, text)?, location }))
            }
        }
    }

    /// As [`Node::find`], with `T::default()` instead of `None`. For a key with a fixed default, `None`
    /// occurs only after an error, and then the plan is not used.
    pub fn get<T: FromValue + Default>(&self, name: &str) -> T {
        // Without the location, which is two strings.
        match self.leaves.get(name) {
            Some(Some(leaf)) => Located::<T>::value_of(leaf),
            Some(None) | None => self.find(name).map(|at| at.value).unwrap_or_default(),
        }
    }

    /// Returns the value if the file sets the key and the value is valid.
    pub fn given<T: FromValue>(&self, name: &str) -> Option<Located<T>> {
        self.set(name)?.as_ref().map(Located::from_leaf)
    }

    /// As [`Node::given`], without the location, which takes memory.
    pub fn value<T: FromValue>(&self, name: &str) -> Option<T> {
        self.set(name)?.as_ref().map(Located::value_of)
    }

    /// As [`Node::value`], of a text.
    pub fn text(&self, name: &str) -> Option<&str> {
        let Value::Text(text) = &self.set(name)?.as_ref()?.value else { return None };
        Some(text)
    }

    /// Returns the location of the value if the file sets the key and the value is valid.
    pub fn location_of(&self, name: &str) -> Option<&Location> {
        self.set(name)?.as_ref().map(|leaf| &leaf.location)
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
        self.set(name).is_none()
    }

    /// Returns the section of a name that may occur once, with defaults if the file leaves it out.
    pub fn section(&self, name: &str) -> &Node {
        let first = self.sections(name).first();
        first.unwrap_or_else(|| {
            panic!("{}: {name:?} may be there several times or not at all", self.location.field)
        })
    }

    pub fn sections(&self, name: &str) -> &[Arc<Node>] {
        self.children
            .get(name)
            .unwrap_or_else(|| panic!("{}: the schema has no section {name:?}", self.location.field))
    }
}
