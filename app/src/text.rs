//! Text for messages: lists of alternatives, suggestions for mistyped names, shortening, escaping, tables.

use std::fmt::Debug;

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;

/// Longest name, in bytes, for which a similar name is suggested. Bounds the time of the comparison.
const NAME_BYTES_MAX: usize = 256;
/// Most characters of a name or value that a message quotes.
const SHOWN_CHARS_MAX: usize = 80;

/// Joins words as `a, b or c`; returns `nothing` without words.
pub fn alternatives(words: impl Iterator<Item = String>) -> String {
    let words: Vec<String> = words.collect();
    match words.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => "nothing".to_owned(),
    }
}

/// Joins quoted names as `"a", "b" or "c"`.
pub fn quoted<T: Debug>(names: impl IntoIterator<Item = T>) -> String {
    alternatives(names.into_iter().map(|name| format!("{name:?}")))
}

/// Returns the word with the smallest edit distance to `name`, if that is at most 2/5 of the longer length.
/// `None` for a `name` longer than [`NAME_BYTES_MAX`].
pub fn nearest<'a>(name: &str, words: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let most = |word: &str| name.len().max(word.len()) * 2 / 5;
    // The distance is at least the difference of the lengths; skipping those words saves time.
    let is_candidate =
        |word: &&str| name.len() <= NAME_BYTES_MAX && word.len().abs_diff(name.len()) <= most(word);
    let distance = |word: &&str| strsim::damerau_levenshtein(name, word);
    words.filter(is_candidate).min_by_key(distance).filter(|word| distance(word) <= most(word))
}

/// Returns `did you mean "NAME"?` with the most similar name, or `fallback` without a similar name.
pub fn did_you_mean<'a>(
    name: &str,
    names: impl Iterator<Item = &'a str>,
    fallback: impl FnOnce() -> String,
) -> String {
    nearest(name, names).map_or_else(fallback, |near| format!("did you mean {near:?}?"))
}

/// Returns the text. A text of more than [`SHOWN_CHARS_MAX`] characters is cut there and ends with ` ...`.
pub fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{} ...", &text[..end]),
        None => text.to_owned(),
    }
}

/// Replaces control characters by `?`: escape sequences of hosts and devices must not reach the terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

pub fn table<'a>(header: impl IntoIterator<Item = &'a str>) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header(header.into_iter().collect::<Vec<_>>());
    table
}
