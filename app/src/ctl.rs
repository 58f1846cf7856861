//! `spindle ctl`: runs a verb, or calls any method of the control socket by name. Prints text for a verb
//! (JSON with `--json`) and JSON for a method. Without arguments prints all methods.
//!
//! | file | content |
//! |---|---|
//! | `verbs`, `disks` | the methods and parameters of each verb |
//! | `show` | results as text |

mod disks;
mod show;
#[cfg(test)]
mod tests;
mod verbs;

use clap::CommandFactory;
use serde_json::{Map, Value};

use crate::cli::{Cli, CtlArgs, CtlCommand, StatusArgs};
use crate::config::Kind;
use crate::rpc::client::{CallError, call};
use crate::rpc::methods::{METHODS, reference};
use crate::rpc::params::Param;
use crate::status;
use crate::text::did_you_mean;
use spindle_app_bench::say;

#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// Invalid argument: argument, value and the allowed values.
    #[error("{0}")]
    Argument(String),
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Calls a method with an object of parameters; tests replace it.
type Rpc<'a> = &'a dyn Fn(&str, Value) -> Result<Value, CallError>;
/// Result of a method as JSON, and the same as text.
type Output = Result<(Value, String), CtlError>;

pub fn run(mut args: CtlArgs) -> Result<(), CtlError> {
    take_options(&mut args);
    let rpc = |name: &str, params: Value| {
        let Value::Object(params) = params else { return call(&args.socket, name, Map::new()) };
        call(&args.socket, name, params)
    };
    let (result, text) = match &args.command {
        None => {
            say!("{}", reference().trim_end());
            return Ok(());
        }
        Some(CtlCommand::Status) => {
            return Ok(status::run(&StatusArgs { socket: args.socket, json: args.json })?);
        }
        Some(CtlCommand::Verb(verb)) => verbs::answer(verb, &rpc)?,
        Some(CtlCommand::Method(words)) => method(words, &rpc)?,
    };
    if args.json {
        say!("{result:#}");
    } else {
        say!("{text}");
    }
    Ok(())
}

/// Removes `--socket` and `--json` from the words after a method and sets them in `args`. No method has
/// parameters of these names.
fn take_options(args: &mut CtlArgs) {
    let Some(CtlCommand::Method(words)) = &mut args.command else { return };
    let mut rest = Vec::new();
    let mut given = std::mem::take(words).into_iter();
    while let Some(word) = given.next() {
        match word.split_once('=') {
            Some(("--socket", value)) => args.socket = value.into(),
            None if word == "--socket" => args.socket = given.next().unwrap_or_default().into(),
            None if word == "--json" => args.json = true,
            Some(_) | None => rest.push(word),
        }
    }
    *words = rest;
}

fn method(words: &[String], rpc: Rpc<'_>) -> Output {
    let (name, words) = words.split_first().map_or(("", words), |(name, words)| (name.as_str(), words));
    let known = METHODS.iter().find(|method| method.name == name);
    // A target of another version may have other methods; all method names contain an underscore.
    if known.is_none() && !name.contains('_') {
        return Err(unknown(name));
    }
    if known.is_some() && words.iter().any(|word| word == "--help") {
        let start = format!("| `{name}` |");
        let row = reference().lines().find(|line| line.starts_with(&start)).unwrap_or_default().to_owned();
        return Ok((Value::from(row.as_str()), row));
    }
    let result = rpc(name, Value::Object(parse(words, known.map_or(&[][..], |it| it.params))?))?;
    let text = result.as_str().map_or_else(|| format!("{result:#}"), str::to_owned);
    Ok((result, text))
}

fn unknown(name: &str) -> CtlError {
    let cli = Cli::command();
    let verbs = cli.find_subcommand("ctl").into_iter().flat_map(clap::Command::get_subcommands);
    let verbs: Vec<_> = verbs.map(clap::Command::get_name).collect();
    let names = verbs.iter().copied().chain(METHODS.iter().map(|method| method.name));
    let allowed = did_you_mean(name, names, || {
        format!("verbs are {}; `spindle ctl` prints the methods", verbs.join(", "))
    });
    CtlError::Argument(format!("{name:?}: there is no such verb or method; {allowed}"))
}

/// Parses `--name VALUE`, `--name=VALUE` and `--name` (a flag). `--a.b` is member `b` of object `a`.
fn parse(words: &[String], params: &'static [Param]) -> Result<Map<String, Value>, CtlError> {
    let mut given = Map::new();
    let mut words = words.iter().map(String::as_str).peekable();
    while let Some(word) = words.next() {
        let name = word
            .strip_prefix("--")
            .ok_or_else(|| CtlError::Argument(format!("{word:?}: must be a parameter, as --name VALUE")))?;
        let (name, value) = match name.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (name, words.next_if(|next| !next.starts_with("--"))),
        };
        let name = name.replace('-', "_");
        let path: Vec<&str> = name.split('.').collect();
        insert(&mut given, &path, value, params);
    }
    Ok(given)
}

fn insert(given: &mut Map<String, Value>, path: &[&str], value: Option<&str>, params: &'static [Param]) {
    let [name, rest @ ..] = path else { return };
    let kind = params.iter().find(|param| param.name == *name).map(|param| &param.kind);
    if rest.is_empty() {
        given.insert((*name).to_owned(), value_of(value, kind));
        return;
    }
    let inner = if let Some(Kind::Object(params)) = kind { params } else { &[][..] };
    let object = given.entry((*name).to_owned()).or_insert_with(|| Value::Object(Map::new()));
    if let Value::Object(object) = object {
        insert(object, rest, value, inner);
    }
}

/// Returns the JSON value of an argument: `true` without a value. The target validates the value.
fn value_of(value: Option<&str>, kind: Option<&Kind>) -> Value {
    let Some(value) = value else { return Value::Bool(true) };
    let text = || Value::String(value.to_owned());
    match kind {
        Some(Kind::List(_)) if !value.starts_with('[') => value.split(',').map(Value::from).collect(),
        Some(Kind::String | Kind::Word(_) | Kind::Nqn | Kind::Uuid | Kind::Nguid) => text(),
        _ => serde_json::from_str(value).unwrap_or_else(|_| text()),
    }
}
