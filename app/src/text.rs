//! Texts for people: lists of words, the name that was meant, what a terminal may show, tables.

use std::fmt::Debug;

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;

/// Longest name for which a near one is looked for.
const NAME_BYTES_MAX: usize = 256;
/// Most characters of a name or a value that a message shows: both may be as long as a file or a request.
const SHOWN_CHARS_MAX: usize = 80;

/// `a, b or c`.
pub fn alternatives(words: impl Iterator<Item = String>) -> String {
    let words: Vec<String> = words.collect();
    match words.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => "nothing".to_owned(),
    }
}

/// `"a", "b" or "c"`.
pub fn quoted<T: Debug>(names: impl IntoIterator<Item = T>) -> String {
    alternatives(names.into_iter().map(|name| format!("{name:?}")))
}

/// The word nearest to `name`, if there is one that is near.
pub fn nearest<'a>(name: &str, words: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let most = |word: &str| name.len().max(word.len()) * 2 / 5;
    // Others are further away than that by their length alone, and take long to compare.
    let may_be = |word: &&str| name.len() <= NAME_BYTES_MAX && word.len().abs_diff(name.len()) <= most(word);
    let distance = |word: &&str| strsim::damerau_levenshtein(name, word);
    words.filter(may_be).min_by_key(distance).filter(|word| distance(word) <= most(word))
}

/// The name that was perhaps meant; where none is near, what there is.
pub fn did_you_mean<'a>(
    name: &str,
    names: impl Iterator<Item = &'a str>,
    what_there_is: impl FnOnce() -> String,
) -> String {
    nearest(name, names).map_or_else(what_there_is, |near| format!("did you mean {near:?}?"))
}

/// A text, or its beginning where it is long.
pub fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{} ...", &text[..end]),
        None => text.to_owned(),
    }
}

/// A text without what a terminal would obey: hosts and devices name themselves.
pub fn printable(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

pub fn table<'a>(header: impl IntoIterator<Item = &'a str>) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header(header.into_iter().collect::<Vec<_>>());
    table
}
