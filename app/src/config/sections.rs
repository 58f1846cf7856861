//! [`Sections`]: the text of a configuration, cut at the headings of its sections. A change by the control
//! socket adds, removes or edits sections, and only those are parsed again. A change of a file with a
//! thousand RAM disks takes about three times as long as one of a short file (`scripts/compare/namespaces`).
//!
//! ```text
//!   text ── cut ──> [[disk]] ... │ [[subsystem]] ... │ [[subsystem.namespace]] ... │ [log] ...
//!                        each with its Node, once it was read ── read ──> Node of all ── validate
//! ```
//!
//! The text is the concatenation of the sections. Comments above a heading belong to its section, and so do
//! the sections within it (`[disk.cache]`), but for namespaces.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use toml::Spanned;
use toml::de::{DeTable, DeValue};
use toml_edit::{ArrayOfTables, DocumentMut, Item, Table, TomlError};

use super::comments::{comments_of, comments_of_key};
use super::document::{self, Errors, Node};
use super::plan::{DiskPlan, by_name};
use super::tree::FromValue;

/// What a section is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An element of a list: `[[disk]]`, `[[listener]]`, `[[subsystem]]`, `[[referral]]`.
    Element(&'static str),
    /// `[[subsystem.namespace]]`, of the last subsystem before it.
    Namespace,
    /// Any other section; also the lines before the first heading and after the last value.
    Other,
}

const DISK: &str = "disk";
const SUBSYSTEM: &str = "subsystem";
const NAMESPACE: &str = "namespace";
/// The lists that can have many elements.
const LISTS: [&str; 4] = [DISK, "listener", SUBSYSTEM, "referral"];

#[derive(Debug)]
pub struct Section {
    kind: Kind,
    /// The name in the heading up to the first dot; empty without a heading.
    name: String,
    text: String,
    /// `None`: not valid in itself. Lines in it count from the first of this section.
    node: OnceLock<Option<Arc<Node>>>,
}

/// The first and last are [`Kind::Other`]: what is above the first heading, and the comments at the end.
#[derive(Debug, Clone)]
pub struct Sections(Vec<Arc<Section>>);

struct Heading<'a> {
    offset: usize,
    kind: Kind,
    name: &'a str,
    /// The section belongs to the last one of this name before it, if there is one.
    is_inner: bool,
}

impl Section {
    fn new(kind: Kind, name: &str, text: &str) -> Section {
        Section { kind, name: name.to_owned(), text: text.to_owned(), node: OnceLock::new() }
    }

    fn push_lines(&mut self, lines: &str) {
        self.text.push_str(lines);
        if !lines.ends_with('\n') {
            self.text.push('\n');
        }
    }

    fn path(&self) -> &'static [&'static str] {
        match self.kind {
            Kind::Element(DISK) => &[DISK],
            Kind::Element("listener") => &["listener"],
            Kind::Element("referral") => &["referral"],
            Kind::Element(_) => &[SUBSYSTEM],
            Kind::Namespace => &[SUBSYSTEM, NAMESPACE],
            Kind::Other => &[],
        }
    }

    fn node(&self) -> Option<&Arc<Node>> {
        self.node.get_or_init(|| document::read_section(&self.text, self.path()).map(Arc::new)).as_ref()
    }

    /// Returns the value of a key that the section sets; `None` also for an invalid one.
    pub fn value<T: FromValue>(&self, key: &str) -> Option<T> {
        self.node()?.value(key)
    }

    /// As [`Section::value`], of a text.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.node()?.text(key)
    }

    /// Whether the section sets a key, validly.
    pub fn has(&self, key: &str) -> bool {
        self.node().is_some_and(|node| node.location_of(key).is_some())
    }

    /// Returns the section after `edit` of its table.
    fn edited(&self, edit: impl FnOnce(&mut Table)) -> Result<Section, TomlError> {
        let mut document: DocumentMut = self.text.parse()?;
        let mut table = Some(document.as_table_mut());
        for name in self.path() {
            let list = table.and_then(|table| table.get_mut(name));
            table = match list {
                Some(Item::ArrayOfTables(list)) => list.get_mut(0),
                Some(Item::Table(table)) => Some(table),
                Some(Item::None | Item::Value(_)) | None => None,
            };
        }
        if let Some(table) = table {
            edit(table);
        }
        Ok(Section::new(self.kind, &self.name, &document.to_string()))
    }
}

impl Sections {
    /// Cuts a text. Lists that are written inline become sections; their comments go to the top.
    ///
    /// # Errors
    /// It is not TOML.
    pub fn cut(text: &str) -> Result<Sections, TomlError> {
        if let Some(sections) = cut_at_headings(text) {
            return Ok(sections);
        }
        let mut document: DocumentMut = text.parse()?;
        let mut text: String = LISTS.map(|name| make_sections(document.as_table_mut(), name)).concat();
        if let Some(Item::ArrayOfTables(subsystems)) = document.as_table_mut().get_mut(SUBSYSTEM) {
            text.extend(subsystems.iter_mut().map(|subsystem| make_sections(subsystem, NAMESPACE)));
        }
        text.push_str(&document.to_string());
        // What is still no section is refused when the text is validated.
        Ok(cut_at_headings(&text).unwrap_or_else(|| {
            let sections = [text.as_str(), ""].map(|text| Arc::new(Section::new(Kind::Other, "", text)));
            Sections(sections.into())
        }))
    }

    /// Returns the text.
    pub fn text(&self) -> String {
        let mut text = String::with_capacity(self.0.iter().map(|section| section.text.len()).sum());
        self.0.iter().for_each(|section| text.push_str(&section.text));
        text
    }

    /// Whether the sections have the same text as `other`, section by section.
    pub fn is_same(&self, other: &Sections) -> bool {
        let is_same =
            |(own, other): (&Arc<Section>, &Arc<Section>)| Arc::ptr_eq(own, other) || own.text == other.text;
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(is_same)
    }

    fn disks(&self) -> impl Iterator<Item = &Arc<Section>> {
        self.0.iter().filter(|section| section.kind == Kind::Element(DISK))
    }

    /// Takes the valid sections of disks as those of `plans`.
    pub fn set_disk_plans(&self, plans: &[Arc<DiskPlan>]) {
        let plans = by_name(plans);
        for node in self.disks().filter_map(|section| section.node()) {
            let plan = node.text("name").and_then(|name| plans.get(name));
            let _ = plan.map(|plan| node.disk.set(Arc::clone(plan)));
        }
    }

    /// Takes over from `former` the sections of disks that have the same text there.
    pub fn keep_disks(&mut self, former: &Sections) {
        let former: HashMap<_, _> = former.disks().map(|section| (section.text.as_str(), section)).collect();
        for section in self.0.iter_mut().filter(|section| section.kind == Kind::Element(DISK)) {
            if let Some(same) = former.get(section.text.as_str()) {
                *section = Arc::clone(same);
            }
        }
    }

    /// Forgets the validated plan of a disk.
    pub fn forget_disk_plan(&mut self, name: &str) {
        let is_it = |section: &&mut Arc<Section>| {
            section.kind == Kind::Element(DISK) && section.text("name") == Some(name)
        };
        if let Some(section) = self.0.iter_mut().find(is_it) {
            *section = Arc::new(Section::new(section.kind, &section.name, &section.text));
        }
    }

    /// Returns the validated plans of the disks, in their order.
    pub fn disk_plans(&self) -> Vec<Option<Arc<DiskPlan>>> {
        self.disks().map(|section| section.node().and_then(|node| node.disk.get()).cloned()).collect()
    }

    /// Reads all sections, as [`document::read`] reads their text, but with other lines and indexes in the
    /// locations. `None`, or with errors: read the text.
    pub fn read(&self, errors: &Errors) -> Option<Node> {
        let others = self.0.iter().filter(|section| section.kind == Kind::Other);
        let text: String = others.map(|section| section.text.as_str()).collect();
        let mut root = document::read(&text, errors)?;
        // Such a list is written inline.
        if LISTS.iter().any(|name| !root.sections(name).is_empty()) {
            return None;
        }
        for name in LISTS.into_iter().filter(|name| *name != SUBSYSTEM) {
            let of_list = self.0.iter().filter(|section| section.kind == Kind::Element(name));
            root.children
                .insert(name, of_list.map(|section| section.node().cloned()).collect::<Option<_>>()?);
        }
        let mut subsystems = Vec::<Arc<Node>>::new();
        for section in &self.0 {
            match section.kind {
                Kind::Element(SUBSYSTEM) => subsystems.push(Arc::clone(section.node()?)),
                Kind::Namespace => {
                    let subsystem = Arc::make_mut(subsystems.last_mut()?);
                    subsystem.children.entry(NAMESPACE).or_default().push(Arc::clone(section.node()?));
                }
                Kind::Element(_) | Kind::Other => {}
            }
        }
        root.children.insert(SUBSYSTEM, subsystems);
        Some(root)
    }

    /// Adds an element to the list `name`, behind its last one.
    pub fn push(&mut self, name: &'static str, table: Table) {
        let kind = Kind::Element(name);
        let last = self.0.iter().rposition(|section| section.name == name);
        self.insert(last, kind, name, table);
    }

    /// Adds a namespace to the subsystem at `index` ([`Sections::position`]).
    pub fn push_namespace(&mut self, subsystem: usize, table: Table) {
        let own = self.namespaces(subsystem);
        let last = own.rev().find(|at| self.0[*at].kind == Kind::Namespace).unwrap_or(subsystem);
        self.insert(Some(last), Kind::Namespace, SUBSYSTEM, table);
    }

    /// Inserts a section behind the one at `last`, or at the end, above the comments there.
    fn insert(&mut self, last: Option<usize>, kind: Kind, name: &str, table: Table) {
        // The last section is the comments at the end.
        let at = last.map_or(self.0.len() - 1, |last| last + 1);
        let mut section = Section::new(kind, name, "");
        let list = |table| Item::ArrayOfTables(ArrayOfTables::from_iter([table]));
        let mut document = DocumentMut::new();
        if kind == Kind::Namespace {
            let mut subsystem = Table::new();
            subsystem.set_implicit(true);
            subsystem.insert(NAMESPACE, list(table));
            document.insert(SUBSYSTEM, Item::Table(subsystem));
        } else {
            document.insert(name, list(table));
        }
        section.text = self.behind(at, &document);
        self.0.insert(at, Arc::new(section));
    }

    /// Returns the text of a new section at `index`, with an empty line above it.
    fn behind(&self, index: usize, document: &DocumentMut) -> String {
        let above = self.0[..index].iter().rev().find(|section| !section.text.is_empty());
        let space = match above {
            None => "",
            Some(above) if above.text.ends_with('\n') => "\n",
            Some(_) => "\n\n",
        };
        format!("{space}{document}")
    }

    /// Returns the positions of the sections from the one behind `subsystem` to the next subsystem.
    fn namespaces(&self, subsystem: usize) -> Range<usize> {
        let behind = &self.0[subsystem + 1..];
        let count = behind.iter().position(|section| section.kind == Kind::Element(SUBSYSTEM));
        subsystem + 1..subsystem + 1 + count.unwrap_or(behind.len())
    }

    /// Returns the position of the first element of the list `name` for which `is_it` returns true.
    pub fn position(&self, name: &'static str, is_it: impl Fn(&Section) -> bool) -> Option<usize> {
        self.0.iter().position(|section| section.kind == Kind::Element(name) && is_it(section))
    }

    pub fn section(&self, index: usize) -> &Section {
        &self.0[index]
    }

    /// Removes the sections of `kind` for which `is_gone` returns true; with a subsystem its namespaces.
    pub fn remove(&mut self, kind: Kind, is_gone: impl Fn(&Section) -> bool) {
        let mut is_in_removed = false;
        self.retain(|_, section| {
            let is_it = section.kind == kind && is_gone(section);
            if section.kind == Kind::Element(SUBSYSTEM) {
                is_in_removed = is_it;
            }
            !(is_it || is_in_removed && section.kind == Kind::Namespace)
        });
    }

    /// Removes the sections for which `is_kept` returns false. Their comments go to the section below; the
    /// last section is always kept.
    fn retain(&mut self, mut is_kept: impl FnMut(usize, &Section) -> bool) {
        let mut comments = String::new();
        let sections = std::mem::take(&mut self.0);
        for (at, section) in sections.into_iter().enumerate() {
            if !is_kept(at, &section) {
                comments.push_str(&comments_of(&section.text));
            } else if comments.is_empty() {
                self.0.push(section);
            } else {
                comments.push_str(&section.text);
                let commented = Section::new(section.kind, &section.name, &comments);
                // Its disk is not asked again: only comments have come.
                let disk = section.node().and_then(|node| node.disk.get());
                if let (Some(disk), Some(node)) = (disk, commented.node()) {
                    let _ = node.disk.set(Arc::clone(disk));
                }
                self.0.push(Arc::new(commented));
                comments.clear();
            }
        }
    }

    /// Removes the namespaces of the subsystem at `subsystem` for which `is_gone` returns true.
    pub fn remove_namespaces(&mut self, subsystem: usize, is_gone: impl Fn(&Section) -> bool) {
        let own = self.namespaces(subsystem);
        self.retain(|at, section| {
            !(own.contains(&at) && section.kind == Kind::Namespace && is_gone(section))
        });
    }

    /// Edits the table of the section at `index`.
    ///
    /// # Errors
    /// It is not TOML by itself.
    pub fn edit(&mut self, index: usize, edit: impl FnOnce(&mut Table)) -> Result<(), TomlError> {
        self.0[index] = Arc::new(self.0[index].edited(edit)?);
        Ok(())
    }

    /// Edits the root table of the section `[name]`, which is added at the end if there is none.
    ///
    /// # Errors
    /// As of [`Sections::edit`].
    pub fn edit_other(&mut self, name: &str, edit: impl FnOnce(&mut Table)) -> Result<(), TomlError> {
        // Without a heading: `log.level = "info"` above all sections.
        let has_keys = |section: &Section| {
            section.name.is_empty()
                && section.text.parse::<DocumentMut>().is_ok_and(|it| it.contains_key(name))
        };
        let is_it = |section: &Arc<Section>| {
            section.kind == Kind::Other && (section.name == name || has_keys(section))
        };
        if let Some(index) = self.0.iter().position(is_it) {
            return self.edit(index, edit);
        }
        let mut document = DocumentMut::new();
        edit(document.as_table_mut());
        let end = self.0.len() - 1;
        let text = self.behind(end, &document);
        self.0.insert(end, Arc::new(Section::new(Kind::Other, name, &text)));
        Ok(())
    }
}

/// Makes `[[name]]` sections of a list in `table` that is written inline. Returns its comments.
fn make_sections(table: &mut Table, name: &str) -> String {
    if !table.get(name).is_some_and(|item| item.is_array()) {
        return String::new();
    }
    let comments = comments_of_key(table, name);
    let inline = table.remove(name).and_then(|item| item.into_array_of_tables().ok());
    table.insert(name, Item::ArrayOfTables(inline.unwrap_or_default()));
    comments
}

/// Cuts a text; `None` if it is not TOML or a list is written inline.
fn cut_at_headings(text: &str) -> Option<Sections> {
    let root = DeTable::parse(text).ok()?;
    let mut headings = Vec::new();
    for (name, value) in root.get_ref() {
        let list = LISTS.into_iter().find(|list| *list == name.get_ref().as_ref());
        find_headings(text, name.get_ref(), value, list, &mut headings)?;
    }
    headings.sort_by_key(|heading: &Heading<'_>| heading.offset);
    let starts: Vec<_> = headings.iter().map(|heading| with_comments(text, heading.offset)).collect();
    let first = starts.first().copied().unwrap_or(text.len());
    let last_line = line_start(text, text.len());
    let tail =
        if is_comment(&text[last_line..]) { with_comments(text, last_line).max(first) } else { text.len() };
    let mut sections = vec![Section::new(Kind::Other, "", &text[..first])];
    for (index, (heading, start)) in headings.iter().zip(&starts).enumerate() {
        let own = &text[*start..starts.get(index + 1).copied().unwrap_or(tail)];
        let owner = sections.iter_mut().rev().find(|section| section.name == heading.name);
        match owner.filter(|_| heading.is_inner) {
            Some(owner) => owner.push_lines(own),
            None => sections.push(Section::new(heading.kind, heading.name, own)),
        }
    }
    sections.push(Section::new(Kind::Other, "", &text[tail..]));
    Some(Sections(sections.into_iter().map(Arc::new).collect()))
}

/// Adds the headings of `value`, a key of the root. `list`: the element of [`LISTS`] that it is. `None`: that
/// is written inline.
fn find_headings<'a>(
    text: &str,
    name: &'a str,
    value: &Spanned<DeValue<'_>>,
    list: Option<&'static str>,
    headings: &mut Vec<Heading<'a>>,
) -> Option<()> {
    let Some(list) = list.filter(|_| value.get_ref().is_array()) else {
        add_inner(text, name, value, headings);
        return Some(());
    };
    for element in elements(text, value)? {
        headings.push(Heading {
            offset: element.span().start,
            kind: Kind::Element(list),
            name,
            is_inner: false,
        });
        for (key, value) in element.get_ref().as_table()? {
            if list == SUBSYSTEM && key.get_ref().as_ref() == NAMESPACE && value.get_ref().is_array() {
                let namespaces = elements(text, value)?.iter().map(|it| it.span().start);
                headings.extend(namespaces.map(|offset| Heading {
                    offset,
                    kind: Kind::Namespace,
                    name,
                    is_inner: false,
                }));
            } else {
                add_inner(text, name, value, headings);
            }
        }
    }
    Some(())
}

/// Returns the elements of a list of sections; `None` if it is written inline.
fn elements<'a, 'b>(text: &str, list: &'a Spanned<DeValue<'b>>) -> Option<&'a [Spanned<DeValue<'b>>]> {
    let elements: &[_] = list.get_ref().as_array()?;
    (!elements.is_empty() && elements.iter().all(|element| has_heading(text, element))).then_some(elements)
}

/// Whether a value is a table with a heading of its own.
fn has_heading(text: &str, value: &Spanned<DeValue<'_>>) -> bool {
    value.get_ref().is_table() && text[value.span().start..].starts_with('[')
}

/// Adds the headings of `value` and of the tables in it.
fn add_inner<'a>(text: &str, name: &'a str, value: &Spanned<DeValue<'_>>, headings: &mut Vec<Heading<'a>>) {
    if has_heading(text, value) {
        headings.push(Heading { offset: value.span().start, kind: Kind::Other, name, is_inner: true });
    }
    match value.get_ref() {
        DeValue::Table(table) => table.iter().for_each(|(_, inner)| add_inner(text, name, inner, headings)),
        DeValue::Array(array) => array.iter().for_each(|inner| add_inner(text, name, inner, headings)),
        DeValue::String(_)
        | DeValue::Integer(_)
        | DeValue::Float(_)
        | DeValue::Boolean(_)
        | DeValue::Datetime(_) => {}
    }
}

fn line_start(text: &str, offset: usize) -> usize {
    text[..offset].rfind('\n').map_or(0, |at| at + 1)
}

fn is_comment(line: &str) -> bool {
    let line = line.trim();
    line.is_empty() || line.starts_with('#')
}

/// Returns where the comments and empty lines above the line of `offset` begin. No string and no array ends
/// with such a line, so they are none of a value above.
fn with_comments(text: &str, offset: usize) -> usize {
    let mut start = line_start(text, offset);
    while start > 0 {
        let above = line_start(text, start - 1);
        if !is_comment(&text[above..start]) {
            break;
        }
        start = above;
    }
    start
}
