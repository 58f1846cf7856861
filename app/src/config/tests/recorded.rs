//! What the program answers to every key and section: [`FILE`], one stanza for each. Each value is read at a
//! start, by `spindle check`, and by a target that serves the file without it. What is read back is compared;
//! the table of keys is [`rows`] and [`disk_rows`], that of sections [`cases`]. Only [`adapter`] knows types
//! of the configuration's code.
//!
//! `SPINDLE_RECORD=1 cargo nextest run -p spindle-app recorded` writes the file anew.
//!
//! Beyond the comparison of the plans, a reload opens, resizes and checks disks as `serve` does. It binds no
//! listener, and counts disks that are not there as open. One reload waits 10 s for the lock of a file.

mod adapter;
mod cases;
mod disk_rows;
mod rows;
mod stanza;
mod template;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;

use self::rows::Row;
use self::stanza::{Answers, Files};
use self::template::{KINDS, Template};

const FILE: &str = "src/config/tests/keys-recorded.txt";
const VARIABLE: &str = "SPINDLE_RECORD";
/// A value that no key allows.
const WRONG_TYPE: &str = "1.5";
/// In place of a value: the key is left out.
const LEFT_OUT: &str = "-";

const PREFACE: &str = "\
What the program answers to every key and section. With SPINDLE_RECORD=1 the tests
`recorded` write this file.

  start   of a target with this file. Only notes that the file before does not have.
  check   of `spindle check`, where it says more than the start.
  reload  of a target that serves the file before; none where it finds wrong what the start does.
          `were it there`: had the path of the disk been found.

  {dir}     the directory of the files of disks: f and g have 1 MiB, odd has 1000 bytes, and loop is a link
            to itself
  {medium}  what medium_id calls f
  {xN}      N letters
  of KINDS  the kinds of the disk; `with` other lines of its section, `without` lines that are there else
";

/// Every key as `section.key`, in the order of the schema.
fn schema_keys() -> Vec<String> {
    let sections = adapter::keys().into_iter();
    let of_section = |(heading, keys): (String, Vec<&'static str>)| {
        let section = heading.trim_matches(['[', ']']).to_owned();
        keys.into_iter().map(move |key| format!("{section}.{key}"))
    };
    sections.flat_map(of_section).collect()
}

/// The values of a row. Every key is also tried with a wrong type, and left out where it was not.
fn values(row: &'static Row) -> Vec<&'static str> {
    let own = row.values.split('|').map(str::trim);
    let is_first = row.from.is_empty() && row.with.is_empty() && row.without.is_empty();
    let has_base = row.kinds.iter().any(|kind| Template::of(row, kind).base.is_some());
    own.chain(is_first.then_some(WRONG_TYPE)).chain(has_base.then_some(LEFT_OUT)).collect()
}

/// `key = value`, or that the key is left out.
fn shown(key: &str, value: &str) -> String {
    if value == LEFT_OUT { format!("{key} left out") } else { format!("{key} = {value}") }
}

/// How many values of a key are accepted, and how many are refused.
type Counts = (usize, usize);

/// What is said of the values of a row. Kinds of disks of which the same is said share their lines.
fn answers_of_row(files: &Files, row: &'static Row, counts: &mut BTreeMap<&str, Counts>) -> String {
    let (key, mut text, mut heading) = (row.name(), String::new(), String::new());
    let with = [("with", row.with), ("without", row.without)];
    let with = with.iter().filter(|(_, lines)| !lines.is_empty());
    let with: String = with.map(|(word, lines)| format!("{word} {}; ", lines.replace('\n', ", "))).collect();
    for value in values(row) {
        let mut said: Vec<(String, String, Vec<&str>)> = Vec::new();
        for kind in row.kinds {
            let template = Template::of(row, kind);
            let base = template.base.as_deref().unwrap_or(LEFT_OUT);
            let answers = Answers::of(files, &template.text(base), &template.text(value));
            let (accepted, refused) = counts.entry(kind).or_default();
            if answers.is_accepted() {
                *accepted += 1
            } else {
                *refused += 1
            }
            let (base, answers) = (shown(key, base), answers.to_string());
            match said.iter_mut().find(|(of, known, _)| *of == base && *known == answers) {
                Some((_, _, kinds)) => kinds.push(kind),
                None => said.push((base, answers, vec![kind])),
            }
        }
        for (base, answers, kinds) in said {
            let of = if row.is_of_disk() { format!("of {}; ", kinds.join(", ")) } else { String::new() };
            let next = format!("{of}{with}while {base}\n");
            if next != heading {
                text.push_str(&next);
                heading = next;
            }
            let _ = write!(text, "  {}\n{answers}", shown(key, value));
        }
    }
    text
}

/// What disks of the kinds that no row of the key has say of its first value.
fn answers_of_other_kinds(files: &Files, rows: &[&'static Row]) -> String {
    let mut text = String::new();
    let is_other = |kind: &&&str| !rows.iter().any(|row| row.kinds.contains(*kind));
    for kind in KINDS.iter().filter(is_other) {
        let row = Row { with: "", without: "", from: "", ..*rows[0] };
        let template = Template::of(&row, kind);
        let value = rows[0].values.split('|').next().unwrap_or_default().trim();
        let is_of_disk = row.section() == "disk";
        let from = if is_of_disk { template.text(LEFT_OUT) } else { template::served_disk(kind) };
        let answers = Answers::of(files, &from, &template.text(value));
        let _ = write!(text, "of another kind: {kind}\n  {}\n{answers}", shown(row.name(), value));
    }
    text
}

fn stanza_of_key(files: &Files, key: &str) -> String {
    let rows: Vec<&'static Row> = rows::all().filter(|row| row.key == key).collect();
    assert!(!rows.is_empty(), "{key}: no row of the table has this key");
    let (mut text, mut counts) = (format!("== {key}\n"), BTreeMap::new());
    for row in &rows {
        text.push_str(&answers_of_row(files, row, &mut counts));
    }
    for (kind, (accepted, refused)) in counts {
        assert!(
            accepted > 0 && refused > 0,
            "{key} of {kind}: {accepted} accepted, {refused} refused\n{text}"
        );
    }
    if key.starts_with("disk.") {
        text.push_str(&answers_of_other_kinds(files, &rows));
    }
    text
}

/// The text without the lines by which all kinds of disks have as many.
fn without_padding(text: &str) -> String {
    text.lines().filter(|line| *line != "#").map(|line| format!("{line}\n")).collect()
}

fn record() -> String {
    let files = Files::new();
    let of_keys = schema_keys().into_iter().map(|key| stanza_of_key(&files, &key));
    let of_sections = cases::all().into_iter().map(|(name, cases)| {
        let mut text = format!("== {name}\n");
        for (what, from, to) in cases {
            let changed = stanza::difference(&without_padding(&from), &without_padding(&to));
            let _ = write!(text, "{what}\n{changed}{}", Answers::of(&files, &from, &to));
        }
        text
    });
    let preface = std::iter::once(PREFACE.to_owned());
    preface.chain(of_keys).chain(of_sections).collect::<Vec<_>>().join("\n")
}

/// The stanzas of a record by their first lines.
fn stanzas(record: &str) -> BTreeMap<&str, &str> {
    let begins = record.match_indices("== ").map(|(at, _)| at);
    let begins: Vec<usize> = begins.filter(|at| *at == 0 || record[..*at].ends_with('\n')).collect();
    let ends = begins.iter().skip(1).copied().chain([record.len()]);
    let stanzas = begins.iter().zip(ends).map(|(begin, end)| record[*begin..end].trim_end());
    stanzas.map(|stanza| (stanza.lines().next().unwrap_or_default(), stanza)).collect()
}

#[test]
fn every_key_and_section_is_answered_as_recorded() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(FILE);
    let now = record();
    if std::env::var_os(VARIABLE).is_some_and(|value| value == "1") {
        std::fs::write(&path, &now).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        return;
    }
    let recorded = std::fs::read_to_string(&path).unwrap_or_default();
    let (before, after) = (stanzas(&recorded), stanzas(&now));
    let headings: BTreeSet<&str> = before.keys().chain(after.keys()).copied().collect();
    let differences: Vec<String> = headings
        .into_iter()
        .map(|heading| (heading, before.get(heading).unwrap_or(&""), after.get(heading).unwrap_or(&"")))
        .filter(|(_, before, after)| before != after)
        .map(|(heading, before, after)| format!("{heading}\n{}", stanza::difference(before, after)))
        .collect();
    assert!(
        differences.is_empty(),
        "app/{FILE} has other answers (-) than there are now (+); {VARIABLE}=1 writes it anew\n{}",
        differences.join("\n")
    );
    assert_eq!(recorded, now, "the stanzas are the same, in another order");
}

#[test]
fn the_table_of_rows_has_every_key_of_the_schema_and_no_other() {
    let of_schema: BTreeSet<String> = schema_keys().into_iter().collect();
    let of_rows: BTreeSet<String> = rows::all().map(|row| row.key.to_owned()).collect();
    let missing: Vec<_> = of_schema.difference(&of_rows).collect();
    let unknown: Vec<_> = of_rows.difference(&of_schema).collect();
    assert!(missing.is_empty(), "in the schema and in no row: {missing:?}");
    assert!(unknown.is_empty(), "in a row and not in the schema: {unknown:?}");
    let headings = adapter::keys().into_iter().map(|(heading, _)| heading);
    let of_schema: BTreeSet<String> = headings.collect();
    let of_cases: BTreeSet<String> = cases::headings().iter().map(|heading| (*heading).to_owned()).collect();
    assert_eq!(of_cases, of_schema, "the sections with cases, and those of the schema");
}
