//! Finds the method of a request, checks its parameters, and runs it if it only reads. Formats the reference.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::Failure;
use super::edit::Edit;
use super::params::{Args, Param};
use super::wire::Request;
use crate::config::Kind;
use crate::serve::view::{Look, View};
use crate::text::{did_you_mean, quoted};

pub use super::table::METHODS;

/// A method that reads the state of the target.
pub type Read = fn(&Look<'_>, &Args) -> Result<Value, Failure>;
/// A method that edits the configuration.
pub type Change = fn(&mut Edit<'_>, &Args) -> Result<Value, Failure>;

pub struct Method {
    pub name: &'static str,
    pub params: &'static [Param],
    pub about: &'static str,
    pub(super) action: Action,
}

#[derive(Clone, Copy)]
pub(super) enum Action {
    Read(Read),
    Change(Change),
    /// Returns the names of all methods.
    List,
}

/// Outcome of [`call`].
pub enum CallOutcome {
    Done(Result<Value, Failure>),
    /// A change that the main thread must apply.
    Change(Change, Args),
}

/// Runs the method of a request if it only reads. Returns a change to the caller without running it.
pub fn call(view: &View, request: Request) -> CallOutcome {
    let (action, args) = match validated(request) {
        Ok(validated) => validated,
        Err(failure) => return CallOutcome::Done(Err(failure)),
    };
    match action {
        Action::Read(read) => CallOutcome::Done(read(&view.look(), &args)),
        Action::Change(change) => CallOutcome::Change(change, args),
        Action::List => {
            let names: Vec<_> = METHODS.iter().map(|method| method.name).collect();
            CallOutcome::Done(Ok(json!(names)))
        }
    }
}

/// Finds the method of a request and checks the parameters. Returns the method's action and the parameters.
pub(super) fn validated(request: Request) -> Result<(Action, Args), Failure> {
    let Request { method: name, params, .. } = request;
    let method = METHODS.iter().find(|method| method.name == name).ok_or_else(|| unknown_method(&name))?;
    Ok((method.action, Args::new(params, method.params)?))
}

/// Returns all methods with their parameters as Markdown: the end of `docs/control.md`.
pub fn reference() -> String {
    let mut text = "| method | parameters | what it does |\n|---|---|---|\n".to_owned();
    for method in METHODS {
        let params: Vec<String> = method.params.iter().map(|param| param_text(param, "")).collect();
        let params = if params.is_empty() { "none".to_owned() } else { params.join("; ") };
        let _ = writeln!(text, "| `{}` | {params} | {} |", method.name, method.about);
    }
    text
}

fn param_text(param: &Param, path: &str) -> String {
    let name = format!("{path}{}", param.name);
    if let Kind::Object(inner) = param.kind {
        let inner: Vec<String> = inner.iter().map(|param| param_text(param, &format!("{name}."))).collect();
        return inner.join("; ");
    }
    let required = if param.is_required { "**" } else { "" };
    format!("{required}`{name}`{required}: {:#}. {}", param.kind, param.about)
}

fn unknown_method(name: &str) -> Failure {
    let names = || METHODS.iter().map(|method| method.name);
    let near = did_you_mean(name, names(), || format!("it may be {}", quoted(names())));
    Failure::unknown_method(name, &format!("there is no such method; {near}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_every_method_as_it_is() {
        let document = include_str!("../../../docs/control.md");
        let command = "cargo run -p spindle-app -- ctl";
        assert!(document.ends_with(&reference()), "docs/control.md must end with the output of `{command}`");
        let mut names: Vec<_> = METHODS.iter().map(|method| method.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), METHODS.len(), "each name once");
    }
}
