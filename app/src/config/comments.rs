//! Edits of TOML that keep all comments. `toml_edit` by itself drops those of a key that is set again or
//! removed, and those of an element that is removed from a list.

use toml_edit::{Array, Decor, DocumentMut, Item, RawString, Table, TableLike, Value};

/// Returns the comments of a text, one per line, with the empty lines between them.
pub fn comments_of(text: &str) -> String {
    let (mut comments, mut line, mut at, mut is_blank) = (String::new(), 0, 0, true);
    while let Some(byte) = text.as_bytes().get(at) {
        match byte {
            b'#' => {
                let end = text[at..].find('\n').map_or(text.len(), |length| at + length);
                comments.push_str(&text[if is_blank { line } else { at }..end]);
                (at, is_blank) = (end, true);
                comments.push('\n');
                (at, line) = (at + 1, at + 1);
            }
            b'\n' => {
                comments.push_str(if is_blank { "\n" } else { "" });
                (at, is_blank) = (at + 1, true);
                line = at;
            }
            b'"' | b'\'' => (at, is_blank) = (string_end(text, at), false),
            byte => (at, is_blank) = (at + 1, is_blank && byte.is_ascii_whitespace()),
        }
    }
    if comments.contains('#') { comments } else { String::new() }
}

/// Returns where the string that begins at `start` ends.
fn string_end(text: &str, start: usize) -> usize {
    let quote = &text[start..=start];
    let is_long = text[start..].starts_with(&quote.repeat(3));
    let mark = quote.repeat(if is_long { 3 } else { 1 });
    let mut at = start + mark.len();
    while at < text.len() && !text.as_bytes()[at..].starts_with(mark.as_bytes()) {
        at += if quote == "\"" && text.as_bytes()[at] == b'\\' { 2 } else { 1 };
    }
    at += mark.len();
    // A long string may end with up to two quotes of its own.
    let own = if is_long { 2 } else { 0 };
    at + text.bytes().skip(at).take(own).take_while(|byte| quote.as_bytes() == [*byte]).count()
}

/// Sets a key, which keeps its comments if it was there.
pub fn set(table: &mut dyn TableLike, key: &str, item: Item) {
    let Some(before) = table.get_mut(key) else {
        table.insert(key, item);
        return;
    };
    let decor = before.as_value().map(Value::decor).cloned();
    *before = item;
    if let (Some(value), Some(decor)) = (before.as_value_mut(), decor) {
        *value.decor_mut() = decor;
    }
}

/// Returns the comments of a key and of its value, as [`comments_of`].
pub fn comments_of_key(table: &Table, key: &str) -> String {
    let mut alone = table.clone();
    alone.retain(|other, _| other == key);
    // Neither the heading nor what stands above it.
    *alone.decor_mut() = Decor::default();
    comments_of(&DocumentMut::from(alone).to_string())
}

/// Removes a key. Its comments go behind the key above it, or behind the heading.
pub fn remove(table: &mut Table, key: &str) {
    let comments = comments_of_key(table, key);
    let above = table.iter().take_while(|(other, _)| *other != key).filter(|(_, item)| item.is_value());
    let above = above.last().map(|(above, _)| above.to_owned());
    table.remove(key);
    let value = above.and_then(|above| table.get_mut(&above)).and_then(Item::as_value_mut);
    let decor = match value {
        Some(value) => value.decor_mut(),
        None => table.decor_mut(),
    };
    if !comments.is_empty() {
        let suffix = format!("{}\n{}", text_of(decor.suffix()), comments.trim_end());
        decor.set_suffix(suffix);
    }
}

/// Removes the elements for which `is_kept` returns false. Their comments go to the element below.
pub fn retain(list: &mut Array, is_kept: impl Fn(&Value) -> bool) {
    let mut carried = String::new();
    for value in list.iter_mut() {
        let is_kept = is_kept(value);
        let decor = value.decor_mut();
        if is_kept {
            if !carried.is_empty() {
                let prefix = format!("{carried}{}", text_of(decor.prefix()));
                decor.set_prefix(prefix);
                carried.clear();
            }
        } else {
            let space = format!("{}{}", text_of(decor.prefix()), text_of(decor.suffix()));
            carried.push_str(if space.contains('#') { space.trim_end_matches([' ', '\t']) } else { "" });
        }
    }
    if !carried.is_empty() {
        let trailing = format!("{}\n{}", carried.trim_end(), text_of(Some(list.trailing())));
        list.set_trailing(trailing);
    }
    list.retain(is_kept);
}

/// Adds an element at the end of a list, in a line of its own if the last one has one.
pub fn push(list: &mut Array, value: impl Into<Value>) {
    let mut value = value.into();
    let trailing = text_of(Some(list.trailing()));
    if let Some(end) = trailing.rfind('\n') {
        let first = list.get(0).map(|first| text_of(first.decor().prefix())).unwrap_or_default();
        let indent = first.rsplit('\n').next().filter(|_| first.contains('\n')).unwrap_or("    ");
        value.decor_mut().set_prefix(format!("{}\n{indent}", &trailing[..end]));
        list.set_trailing(&trailing[end..]);
    }
    list.push(value);
}

fn text_of(space: Option<&RawString>) -> String {
    space.and_then(RawString::as_str).unwrap_or_default().to_owned()
}
