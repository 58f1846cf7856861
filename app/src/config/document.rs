//! Parses a configuration file into a tree of values. Checks that each key is in the [`schema`] and that each
//! value has the key's kind. Adds the fixed defaults of keys that the file leaves out.
//!
//! ```text
//!   text ── toml ──> spanned tables ── against the schema ──> Node { leaves, children }, and all errors
//! ```
//!
//! Walks the spanned tables of `toml` instead of deserialising with `serde`, which stops at the first error
//! and does not report its path; here all errors are collected. Rules between values are in `validate`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use nvme_spec::nqn::Nqn;
use spindle_nvme_pcie::PciAddress;
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use super::error::ConfigError;
use super::kind::{Kind, Scalar};
use super::plan::DiskPlan;
use super::schema::{self, Key, Preset};
use crate::text::{nearest, shortened};

/// Position, path and value of a key or section in the file, for errors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Location {
    /// Line, from 1; for a key that the file leaves out, that of its section.
    pub line: usize,
    /// Path of the field, like `subsystem[0].nqn`.
    pub field: String,
    /// The value as written in the file, shortened; for a default, as written in the schema. Empty for
    /// sections and for keys without a value.
    pub text: String,
}

/// A value that passed the checks of its [`Kind`].
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Flag(bool),
    /// [`Kind::Integer`], [`Kind::Number`], [`Kind::Size`].
    Integer(u64),
    /// [`Kind::Word`], [`Kind::Text`].
    Text(String),
    Nqn(Nqn),
    /// [`Kind::Uuid`], [`Kind::Nguid`].
    Identity([u8; 16]),
    Address(SocketAddr),
    /// [`Kind::Path`], [`Kind::SocketOrNone`].
    Path(PathBuf),
    PciAddress(PciAddress),
    List(Vec<Leaf>),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Leaf {
    pub value: Value,
    pub location: Location,
}

/// A section: its values and the sections in it.
#[derive(Debug, Clone)]
pub struct Node {
    /// Location of the section's heading.
    pub location: Location,
    /// False for a section that the file leaves out: all its values are defaults.
    pub is_given: bool,
    /// Keys of the section in the schema, with the defaults of the keys that are not in `leaves`.
    pub(super) keys: &'static [Key],
    /// Keys that the file sets, and required keys that are missing. A file has few keys of each disk and a
    /// disk has many, so a default takes no memory and is read when it is used.
    /// `None`: the value is invalid, or required and missing; the error is recorded.
    pub(super) leaves: BTreeMap<&'static str, Option<Leaf>>,
    pub(super) children: BTreeMap<&'static str, Vec<Arc<Node>>>,
    /// The disk of this section, once it was validated without an error.
    pub(super) disk: OnceLock<Arc<DiskPlan>>,
}

/// Most characters of a line that a TOML syntax error quotes.
const EXCERPT_CHARS: usize = 80;

/// Errors so far, shared by [`read`] and validation.
pub type Errors = RefCell<Vec<ConfigError>>;

/// Reads `text` and checks it against the schema. Errors are added to `errors`. `None`: `text` is not TOML.
pub fn read(text: &str, errors: &Errors) -> Option<Node> {
    let (root, broken) = DeTable::parse_recoverable(text);
    let reader = Reader::new(text, errors);
    for error in &broken {
        let span = error.span().unwrap_or(0..0);
        let line_text = text.lines().nth(reader.line(span.start) - 1);
        let excerpt: String = line_text.unwrap_or_default().trim().chars().take(EXCERPT_CHARS).collect();
        let allowed = format!("not TOML: {} in `{excerpt}`", error.message());
        errors.borrow_mut().push(ConfigError {
            line: reader.line(span.start),
            field: String::new(),
            value: String::new(),
            allowed,
        });
    }
    // A tree recovered from broken TOML would cause spurious errors.
    let is_toml = broken.is_empty();
    is_toml.then(|| reader.section(root.get_ref(), schema::ROOT, Location { line: 1, ..Location::default() }))
}

/// Reads the section at `path`, each of whose names is a list with one element in `text` or has no heading.
/// `None`: it has an error.
pub fn read_section(text: &str, path: &[&str]) -> Option<Node> {
    let (root, errors) = (DeTable::parse(text).ok()?, Errors::default());
    let (mut table, mut keys) = (root.get_ref(), schema::ROOT);
    for name in path {
        let value = table.get(*name)?.get_ref();
        table = match value.as_array() {
            Some(list) => list.first()?.get_ref().as_table()?,
            None => value.as_table()?,
        };
        keys = keys.iter().find(|key| key.name == *name)?.section()?;
    }
    let reader = Reader::new(text, &errors);
    let node = reader.section(table, keys, Location { line: 1, field: path.join("."), text: String::new() });
    errors.borrow().is_empty().then_some(node)
}

impl Location {
    /// Returns the location for key `name` in the section at this location: the section's line, and no text.
    pub fn inside(&self, name: &str) -> Location {
        let field = if self.field.is_empty() { name.to_owned() } else { format!("{}.{name}", self.field) };
        Location { line: self.line, field, text: String::new() }
    }

    /// Records an error at this location; `allowed` is the message.
    pub fn refuse(&self, errors: &Errors, allowed: impl Into<String>) {
        errors.borrow_mut().push(ConfigError {
            line: self.line,
            field: self.field.clone(),
            value: self.text.clone(),
            allowed: allowed.into(),
        });
    }
}

struct Reader<'a> {
    text: &'a str,
    /// Offsets of the line feeds in `text`, since each key and section asks for its line.
    line_ends: Vec<usize>,
    errors: &'a Errors,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str, errors: &'a Errors) -> Reader<'a> {
        let ends = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
        Reader { text, line_ends: ends.map(|(at, _)| at).collect(), errors }
    }

    fn line(&self, offset: usize) -> usize {
        self.line_ends.partition_point(|end| *end < offset) + 1
    }

    /// As [`Reader::location`], without the text: that of a section is all that it contains.
    fn heading(&self, field: String, span: std::ops::Range<usize>) -> Location {
        Location { line: self.line(span.start), field, text: String::new() }
    }

    /// Returns the location of `span`, with the text of `span` on one line and shortened.
    fn location(&self, field: String, span: std::ops::Range<usize>) -> Location {
        let line = self.line(span.start);
        let written =
            self.text.get(span).unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ");
        Location { line, field, text: shortened(&written) }
    }

    fn section(&self, table: &DeTable<'_>, keys: &'static [Key], location: Location) -> Node {
        let (leaves, children) = (BTreeMap::new(), BTreeMap::new());
        let mut node = Node { location, is_given: true, keys, leaves, children, disk: OnceLock::new() };
        for (name, value) in table.iter() {
            if !keys.iter().any(|key| key.name == name.get_ref().as_ref()) {
                let path = node.location.inside(name.get_ref()).field;
                let mut unknown = self.location(path, value.span());
                unknown.line = self.line(name.span().start);
                if matches!(value.get_ref(), DeValue::Table(_) | DeValue::Array(_)) {
                    unknown.text.clear();
                }
                unknown.refuse(self.errors, unknown_key(name.get_ref(), keys));
            }
        }
        for key in keys {
            let found =
                table.iter().find(|(name, _)| name.get_ref().as_ref() == key.name).map(|(_, value)| value);
            match key.section() {
                Some(inner) => {
                    node.children.insert(key.name, self.children(&node.location, key, inner, found));
                }
                None => {
                    if let Some(leaf) = self.leaf(&node.location, key, found) {
                        node.leaves.insert(key.name, leaf);
                    }
                }
            }
        }
        node
    }

    /// Returns the nodes of `key`. For a section that may occur once and that the file leaves out, returns
    /// one node with defaults; for a missing list of sections, returns none. A value of another type counts
    /// as missing, and an error is recorded.
    fn children(
        &self,
        parent: &Location,
        key: &'static Key,
        inner: &'static [Key],
        found: Option<&Spanned<DeValue<'_>>>,
    ) -> Vec<Arc<Node>> {
        let path = parent.inside(key.name);
        let is_list = matches!(key.kind, Kind::Sections(_));
        let all_defaults = |path: Location| {
            vec![Arc::new(Node { is_given: false, ..self.section(&DeTable::new(), inner, path) })]
        };
        let Some(value) = found else {
            return if is_list { Vec::new() } else { all_defaults(path) };
        };
        let heading = || self.heading(path.field.clone(), value.span());
        let at = || self.location(path.field.clone(), value.span());
        let (at, allowed) = match (value.get_ref(), is_list) {
            (DeValue::Table(table), false) => return vec![Arc::new(self.section(table, inner, heading()))],
            (DeValue::Array(array), true) => return self.list_of_sections(array, inner, &path),
            (DeValue::Table(_), true) => {
                let written = without_index(&path.field);
                (heading(), format!("there may be several, so it is written [[{written}]]"))
            }
            (_, false) => {
                (at(), format!("must be a section, written [{}]; there is one of them", path.field))
            }
            (_, true) => (at(), format!("must be sections, each written [[{}]]", without_index(&path.field))),
        };
        at.refuse(self.errors, allowed);
        if is_list { Vec::new() } else { all_defaults(path) }
    }

    fn list_of_sections(
        &self,
        array: &DeArray<'_>,
        inner: &'static [Key],
        path: &Location,
    ) -> Vec<Arc<Node>> {
        let mut nodes = Vec::new();
        for (index, element) in array.iter().enumerate() {
            let field = format!("{}[{index}]", path.field);
            match element.get_ref().as_table() {
                Some(table) => {
                    nodes.push(Arc::new(self.section(table, inner, self.heading(field, element.span()))))
                }
                None => self.location(field, element.span()).refuse(
                    self.errors,
                    format!("must be a section, written [[{}]]", without_index(&path.field)),
                ),
            }
        }
        nodes
    }

    /// Returns the entry in [`Node::leaves`] of a key that the file sets or must set.
    fn leaf(
        &self,
        parent: &Location,
        key: &'static Key,
        found: Option<&Spanned<DeValue<'_>>>,
    ) -> Option<Option<Leaf>> {
        if let Some(value) = found {
            let location = self.location(parent.inside(key.name).field, value.span());
            return Some(self.value(&key.kind, value, location));
        }
        let is_missing = key.preset == Preset::Required;
        is_missing.then(|| {
            parent.inside(key.name).refuse(self.errors, format!("missing; it must be {}", key.kind));
            None
        })
    }

    /// Returns the value if it matches `kind`; otherwise records an error and returns `None`.
    fn value(&self, kind: &Kind, value: &Spanned<DeValue<'_>>, location: Location) -> Option<Leaf> {
        if let (Kind::List(of), Some(array)) = (kind, value.get_ref().as_array()) {
            let mut leaves = Vec::new();
            for (index, element) in array.iter().enumerate() {
                let location = self.location(format!("{}[{index}]", location.field), element.span());
                leaves.push(self.value(of, element, location));
            }
            let value = Value::List(leaves.into_iter().collect::<Option<_>>()?);
            return Some(Leaf { value, location });
        }
        match kind.value(scalar(value.get_ref())) {
            Ok(value) => Some(Leaf { value, location }),
            Err(reason) => {
                let reason = reason.map(|reason| format!("{reason}; ")).unwrap_or_default();
                location.refuse(self.errors, format!("{reason}must be {kind}"));
                None
            }
        }
    }
}

/// Returns the value of a default, `text` in the schema.
pub(super) fn preset(kind: &Kind, text: &str) -> Option<Value> {
    kind.value(scalar(DeValue::parse(text).ok()?.get_ref())).ok()
}

fn scalar<'a>(value: &'a DeValue<'_>) -> Scalar<'a> {
    let integer = value.as_integer().and_then(|it| u64::from_str_radix(it.as_str(), it.radix()).ok());
    let flag = value.as_bool().map(Scalar::Flag);
    flag.or(integer.map(Scalar::Integer)).or(value.as_str().map(Scalar::Text)).unwrap_or(Scalar::Other)
}

/// Returns `subsystem.namespace` for `subsystem[0].namespace`, the form of headings.
fn without_index(field: &str) -> String {
    field.split('.').map(|part| part.split('[').next().unwrap_or(part)).collect::<Vec<_>>().join(".")
}

/// The message for an unknown key: a similar key, the section that has this key, or all keys of this section.
fn unknown_key(name: &str, keys: &'static [Key]) -> String {
    if let Some(key) = nearest(name, keys.iter().map(|key| key.name)) {
        return format!("unknown key; did you mean {key:?}?");
    }
    let elsewhere =
        schema::sections().into_iter().find(|(_, _, inner)| inner.iter().any(|key| key.name == name));
    if let Some((heading, ..)) = elsewhere {
        return format!("unknown key here; {name:?} belongs to {heading}");
    }
    let all: Vec<&str> = keys.iter().map(|key| key.name).collect();
    format!("unknown key; allowed: {}", all.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_is_a_value_of_its_kind() {
        for (heading, _, keys) in schema::sections() {
            for key in keys {
                if let Preset::Fixed(text) = key.preset {
                    assert!(
                        preset(&key.kind, text).is_some(),
                        "{heading} {} = {text}: {}",
                        key.name,
                        key.kind
                    );
                }
            }
        }
    }
}
