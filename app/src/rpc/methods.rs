//! What a request asks for: the method, its checked parameters, and whether it looks or changes.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::Failure;
use super::edit::Edit;
use super::params::{Args, Kind, Param};
use super::wire::Request;
use crate::serve::view::{Look, View};
use crate::text::{did_you_mean, quoted};

pub use super::table::METHODS;

/// A method that looks.
pub type Read = fn(&Look<'_>, &Args) -> Result<Value, Failure>;
/// A method that changes the configuration.
pub type Change = fn(&mut Edit<'_>, &Args) -> Result<Value, Failure>;

pub struct Method {
    pub name: &'static str,
    pub params: &'static [Param],
    pub about: &'static str,
    pub(super) act: Act,
}

/// What a method does.
#[derive(Clone, Copy)]
pub(super) enum Act {
    Read(Read),
    Change(Change),
    /// It lists the methods.
    List,
}

/// What came of a request.
pub enum Called {
    Done(Result<Value, Failure>),
    /// It is for the main thread.
    Change(Change, Args),
}

/// Do what a request asks for, as far as it only looks.
pub fn call(view: &View, request: Request) -> Called {
    let (act, args) = match checked(request) {
        Ok(checked) => checked,
        Err(failure) => return Called::Done(Err(failure)),
    };
    match act {
        Act::Read(read) => Called::Done(read(&view.look(), &args)),
        Act::Change(change) => Called::Change(change, args),
        Act::List => {
            let names: Vec<_> = METHODS.iter().map(|method| method.name).collect();
            Called::Done(Ok(json!(names)))
        }
    }
}

/// What the method of a request does, and its parameters.
pub(super) fn checked(request: Request) -> Result<(Act, Args), Failure> {
    let Request { method: name, params, .. } = request;
    let method = METHODS.iter().find(|method| method.name == name).ok_or_else(|| unknown(&name))?;
    Ok((method.act, Args::new(params, method.params)?))
}

/// All methods with their parameters, as `docs/control.md` has them.
pub fn reference() -> String {
    let mut text = "| method | parameters | what it does |\n|---|---|---|\n".to_owned();
    for method in METHODS {
        let params: Vec<String> = method.params.iter().map(|param| described(param, "")).collect();
        let params = if params.is_empty() { "none".to_owned() } else { params.join("; ") };
        let _ = writeln!(text, "| `{}` | {params} | {} |", method.name, method.about);
    }
    text
}

fn described(param: &Param, path: &str) -> String {
    let name = format!("{path}{}", param.name);
    if let Kind::Object(inner) = param.kind {
        let inner: Vec<String> = inner.iter().map(|param| described(param, &format!("{name}."))).collect();
        return inner.join("; ");
    }
    let required = if param.is_required { "**" } else { "" };
    format!("{required}`{name}`{required}: {}. {}", param.kind, param.about)
}

fn unknown(name: &str) -> Failure {
    let names = || METHODS.iter().map(|method| method.name);
    let near = did_you_mean(name, names(), || format!("it may be {}", quoted(names())));
    Failure::method(name, &format!("there is no such method; {near}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_every_method_as_it_is() {
        let document = include_str!("../../../docs/control.md");
        assert!(document.ends_with(&reference()), "spindle ctl prints what docs/control.md is to end with");
        let mut names: Vec<_> = METHODS.iter().map(|method| method.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), METHODS.len(), "each name once");
    }
}
