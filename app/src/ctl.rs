//! `spindle ctl METHOD`: any method of the control socket, and its result as JSON.

use serde_json::{Map, Value};

use crate::cli::CtlArgs;
use crate::report::say;
use crate::rpc::client::{CallError, call};
use crate::rpc::methods::{METHODS, reference};
use crate::rpc::params::{Kind, Param};

/// Why a method was not called, or has no result.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// A parameter is not one.
    #[error("{0:?}: must be a parameter, as --name VALUE")]
    Parameter(String),
    /// The call.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Call, and print.
///
/// # Errors
/// [`CtlError`].
pub fn run(args: &CtlArgs) -> Result<(), CtlError> {
    let Some(name) = &args.method else {
        say!("{}", reference().trim_end());
        return Ok(());
    };
    let params = METHODS.iter().find(|method| method.name == name).map_or(&[][..], |it| it.params);
    let result = call(&args.socket, name, parse(&args.params, params)?)?;
    match result.as_str() {
        Some(text) => say!("{text}"),
        None => say!("{result:#}"),
    }
    Ok(())
}

/// `--name VALUE`, `--name=VALUE` and, for what is on or off, `--name`. A point leads into an object.
fn parse(words: &[String], params: &'static [Param]) -> Result<Map<String, Value>, CtlError> {
    let mut given = Map::new();
    let mut words = words.iter().map(String::as_str).peekable();
    while let Some(word) = words.next() {
        let name = word.strip_prefix("--").ok_or_else(|| CtlError::Parameter(word.to_owned()))?;
        let (name, value) = match name.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (name, words.next_if(|next| !next.starts_with("--"))),
        };
        let name = name.replace('-', "_");
        let path: Vec<&str> = name.split('.').collect();
        set(&mut given, &path, value, params);
    }
    Ok(given)
}

fn set(given: &mut Map<String, Value>, path: &[&str], value: Option<&str>, params: &'static [Param]) {
    let [name, rest @ ..] = path else { return };
    let kind = params.iter().find(|param| param.name == *name).map(|param| &param.kind);
    if rest.is_empty() {
        given.insert((*name).to_owned(), value_of(value, kind));
        return;
    }
    let inner = if let Some(Kind::Object(params)) = kind { params } else { &[][..] };
    let object = given.entry((*name).to_owned()).or_insert_with(|| Value::Object(Map::new()));
    if let Value::Object(object) = object {
        set(object, rest, value, inner);
    }
}

/// A value as the target takes it; it is the one that says whether it is right.
fn value_of(value: Option<&str>, kind: Option<&Kind>) -> Value {
    let Some(value) = value else { return Value::Bool(true) };
    let text = || Value::String(value.to_owned());
    match kind {
        Some(Kind::Texts) if !value.starts_with('[') => value.split(',').map(Value::from).collect(),
        Some(Kind::Text | Kind::Word(_) | Kind::Nqn | Kind::Uuid | Kind::Nguid) => text(),
        _ => serde_json::from_str(value).unwrap_or_else(|_| text()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::rpc::params::{may, must};

    static PARAMS: &[Param] = &[
        must("nqn", Kind::Nqn, ""),
        may("nsid", Kind::Whole { min: 1, max: 9 }, ""),
        may("names", Kind::Texts, ""),
        may("flag", Kind::Flag, ""),
        may("listen_address", Kind::Object(&[must("trsvcid", Kind::Text, "")]), ""),
    ];

    fn given(words: &[&str]) -> Result<Value, String> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        parse(&words, PARAMS).map(Value::Object).map_err(|error| error.to_string())
    }

    #[test]
    fn each_parameter_gets_the_type_that_the_method_takes() {
        let words =
            ["--nqn", "7", "--nsid=3", "--flag", "--names", "a,b", "--listen-address.trsvcid", "4420"];
        let wanted = json!({
            "nqn": "7", "nsid": 3, "flag": true, "names": ["a", "b"], "listen_address": { "trsvcid": "4420" },
        });
        assert_eq!(given(&words), Ok(wanted));
        assert_eq!(given(&["--other", "[1]", "--nsid", "x"]), Ok(json!({ "other": [1], "nsid": "x" })));
        assert_eq!(given(&["nqn"]), Err("\"nqn\": must be a parameter, as --name VALUE".to_owned()));
    }
}
