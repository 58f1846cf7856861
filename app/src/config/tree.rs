//! Typed access to the values of a [`Node`] by key name.
//!
//! Values have the kind that the schema states for their key. Reading a key as another type, or a key that
//! the schema does not have, is a bug and panics.

use std::fmt::{Debug, Display};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nvme_spec::nqn::Nqn;
use spindle_nvme_initiator::Host;
use spindle_nvme_pcie::PciAddress;
use spindle_nvme_transport::TransportKind;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Pages;
use spindle_reactor::run::Idle;
use spindle_target::snapshot::AllowedHosts;
use spindle_target_disk::{CacheMode, PolicyKind};
use tracing::Level;

use super::changes::Hosts;
use super::document::{Errors, Leaf, Location, Node, Value, preset};
use super::kind::Kind;
use super::plan::{DiskPlan, LogFormat, Plan, SubsystemPlan};
use super::schema::{Access, Field, Key, Preset};

/// A value with its location in the file, for errors.
#[derive(Debug, Clone)]
pub struct Located<T> {
    pub value: T,
    pub location: Location,
}

/// Types of fields of the plan, and others that a [`Value`] converts to.
pub trait FromValue: Sized + Debug {
    /// Converts the value; `None` if the value has another kind or is out of range.
    fn from_value(value: &Value) -> Option<Self>;

    /// Returns the value in the syntax of the file.
    fn text(&self) -> String {
        format!("{self:?}")
    }
}

/// Types of which a [`Value`] has a variant; `as_text`: those that are strings in the file, by `Display`.
macro_rules! from_value {
    ($($variant:ident => $kind:ty $(, $as_text:ident)?;)+) => {
        $(impl FromValue for $kind {
            fn from_value(value: &Value) -> Option<Self> {
                if let Value::$variant(value) = value { Some(value.clone()) } else { None }
            }
            $(fn text(&self) -> String {
                $as_text(self)
            })?
        })+
    };
}

fn quoted(value: &impl Display) -> String {
    format!("{:?}", value.to_string())
}

from_value! {
    Flag => bool;
    Integer => u64;
    Text => String;
    Nqn => Nqn, quoted;
    Identity => [u8; 16];
    Address => SocketAddr, quoted;
    Path => PathBuf;
    PciAddress => PciAddress, quoted;
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

/// Types whose values are words in the file, with the kind of their keys.
macro_rules! words {
    ($($name:ident: $kind:ty = $($word:literal => $value:expr),+;)+) => {
        $(
            pub const $name: Kind = Kind::Word(&[$($word),+]);

            impl FromValue for $kind {
                fn from_value(value: &Value) -> Option<Self> {
                    let Value::Text(text) = value else { return None };
                    [$(($word, $value)),+].into_iter().find(|(word, _)| word == text).map(|(_, value)| value)
                }

                fn text(&self) -> String {
                    let words = [$(($word, $value)),+];
                    let own = words.iter().find(|(_, value)| value == self);
                    own.map_or_else(String::new, |(word, _)| quoted(word))
                }
            }
        )+
    };
}

words! {
    TRANSPORT: TransportKind = "tcp" => TransportKind::Tcp, "rdma" => TransportKind::Rdma;
    PAGES: Pages = "base" => Pages::Base, "transparent" => Pages::Transparent, "huge" => Pages::Huge;
    CACHE_POLICY: PolicyKind = "s3-fifo" => PolicyKind::S3Fifo, "lru" => PolicyKind::Lru;
    CACHE_MODE: CacheMode = "shared" => CacheMode::Shared, "exclusive" => CacheMode::Exclusive;
    LOG_FORMAT: LogFormat = "text" => LogFormat::Text, "json" => LogFormat::Json;
    LOG_LEVEL: Level = "error" => Level::ERROR, "warn" => Level::WARN, "info" => Level::INFO,
        "debug" => Level::DEBUG, "trace" => Level::TRACE;
}

/// Types that are made of another one, and how they are shown.
macro_rules! converted {
    ($($kind:ty: $from:ty, $convert:expr, $text:expr;)+) => {
        $(impl FromValue for $kind {
            fn from_value(value: &Value) -> Option<Self> {
                <$from>::from_value(value).map($convert)
            }

            fn text(&self) -> String {
                let text: fn(&$kind) -> String = $text;
                text(self)
            }
        })+
    };
}

converted! {
    // Milliseconds.
    Nanos: u64, Nanos::from_ms, |it| it.as_ms().text();
    Duration: u64, Duration::from_millis, |it| it.as_millis().to_string();
    // The key `adaptive_spin_us` has the time.
    Idle: String, |it| if it == "spin" { Idle::Spin } else { Idle::SleepAfter(Nanos::ZERO) }, |it| match it {
        Idle::Spin => quoted(&"spin"),
        Idle::SleepAfter(time) => quoted(&format!("adaptive, adaptive_spin_us = {}", time.as_us())),
    };
    Host: Nqn, Host::from_nqn, |it| {
        quoted(&format!("{} (HOSTID {:032x})", it.nqn, u128::from_be_bytes(it.id)))
    };
    AllowedHosts: Vec<Nqn>, AllowedHosts::Only, |it| Hosts(it).to_string();
}

impl<T: FromValue> FromValue for Option<T> {
    fn from_value(value: &Value) -> Option<Self> {
        T::from_value(value).map(Some)
    }

    fn text(&self) -> String {
        self.as_ref().map_or_else(|| "unset".to_owned(), T::text)
    }
}

impl<T: FromValue> FromValue for Vec<T> {
    fn from_value(value: &Value) -> Option<Self> {
        let Value::List(leaves) = value else { return None };
        leaves.iter().map(|leaf| T::from_value(&leaf.value)).collect()
    }
}

impl<T: FromValue> FromValue for Vec<Located<T>> {
    fn from_value(value: &Value) -> Option<Self> {
        let Value::List(leaves) = value else { return None };
        Some(leaves.iter().map(Located::from_leaf).collect())
    }
}

/// A part of the plan that has fields of rows.
pub trait Owner: Sized + 'static {
    /// Returns how to reach the field; `None`: it is one of another part.
    fn access(field: &'static Field) -> Option<&'static Access<Self>>;

    /// Whether a key is one of this part: of a disk, by its kind.
    fn has(&self, _key: &Key) -> bool {
        true
    }
}

impl Owner for Plan {
    fn access(field: &'static Field) -> Option<&'static Access<Plan>> {
        if let Field::Plan(access) = field { Some(access) } else { None }
    }
}

impl Owner for DiskPlan {
    fn access(field: &'static Field) -> Option<&'static Access<DiskPlan>> {
        if let Field::Disk(_, access) | Field::Variant(_, access) = field { Some(access) } else { None }
    }

    fn has(&self, key: &Key) -> bool {
        key.is_of(self.kind.name())
    }
}

impl Owner for SubsystemPlan {
    fn access(field: &'static Field) -> Option<&'static Access<SubsystemPlan>> {
        if let Field::Subsystem(access) = field { Some(access) } else { None }
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

    /// Writes the values of the keys to their fields of `owner`, and the defaults of those that are not set.
    pub fn fill<T: Owner>(&self, owner: &mut T) {
        for key in self.keys.iter().filter(|key| owner.has(key)).collect::<Vec<_>>() {
            let Some(access) = T::access(&key.field) else { continue };
            match (self.leaves.get(key.name), key.preset) {
                (Some(leaf), _) => leaf.iter().for_each(|leaf| (access.write)(owner, &leaf.value)),
                (None, Preset::Fixed(text)) => {
                    preset(&key.kind, text).iter().for_each(|value| (access.write)(owner, value));
                }
                (None, _) => {}
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
