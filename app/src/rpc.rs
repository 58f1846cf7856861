//! The control socket: JSON-RPC 2.0 with the names, parameters and results of SPDK.
//!
//! ```text
//!   client ── server (one thread) ── wire ── params ──┬── reads: run at once, on the View
//!                                                     └── edits: to the main thread, one at a time
//!                                                           sections of the file ── edit ──> text ── serve
//! ```
//!
//! | file | content |
//! |---|---|
//! | `wire` | JSON texts without framing; requests, batches, responses |
//! | `params` | types and checks of parameters |
//! | `methods`, `table` | dispatch of requests; the table of methods |
//! | `edit`, `edit_disks` | methods that change the text of the configuration |
//! | `reads`, `config` | methods that only read |
//! | `server` | the socket and its clients |
//! | `client` | client for `spindle ctl` and `spindle status` |
//!
//! Reads send no message to a core: they use counters that the cores update.
//!
//! Limits: 128 clients, about 1 MiB per request. The server does not receive from a client with unsent
//! responses or a pending change.

pub mod client;
mod config;
mod edit;
mod edit_disks;
pub mod methods;
pub mod params;
mod reads;
mod server;
mod table;
#[cfg(test)]
pub mod tests;
mod wire;

pub use server::serve_clients;

pub use edit::{Edit, unusable};
pub use edit_disks::controller_of;

use std::sync::mpsc::Sender;

use serde_json::{Map, Value, json};
use spindle_reactor::net::Waker;

use crate::text::shortened;

/// A method call that changes the configuration, for the main thread.
pub struct Change {
    pub edit: methods::Change,
    pub args: params::Args,
    reply: Reply,
}

/// Returns the result of a change to the thread of the control socket.
pub struct Reply {
    /// Identifier of the client that sent the request (`Client::number` of `server`).
    client: u64,
    send: Sender<(u64, Result<Value, Failure>)>,
    waker: Waker,
}

impl Change {
    /// Sends the result to the thread of the control socket, which responds to the client.
    pub fn respond(self, result: Result<Value, Failure>) {
        // Fails if the thread of the control socket has ended and closed its clients.
        let _ = self.reply.send.send((self.reply.client, result));
        self.reply.waker.wake();
    }
}

/// Formats a value as JSON, shortened for a message.
fn excerpt(value: &Value) -> String {
    shortened(&value.to_string())
}

/// The error of a method call.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    /// Error code of JSON-RPC 2.0 section 5.1, [`NOT_SAVED`] or [`NOT_IN_FORCE`].
    code: i32,
    /// For a parameter: field, value and the allowed values.
    pub message: String,
    /// An object: `field`, `value` and `allowed` of a parameter or the method's name; `in_force` and `kept`
    /// of a change that is not both.
    data: Option<Value>,
}

const PARSE_ERROR: i32 = -32700;
const INVALID_REQUEST: i32 = -32600;
const METHOD_NOT_FOUND: i32 = -32601;
const INVALID_PARAMS: i32 = -32602;
const INTERNAL_ERROR: i32 = -32603;
/// A revocation is in force, and the file does not have it.
const NOT_SAVED: i32 = -32001;
/// A change is made, and not in force on all cores.
const NOT_IN_FORCE: i32 = -32002;

impl Failure {
    fn new(code: i32, message: String) -> Failure {
        Failure { code, message, data: None }
    }

    fn unknown_method(name: &str, allowed: &str) -> Failure {
        Failure { code: METHOD_NOT_FOUND, ..Failure::parameter("method", Some(&name.into()), allowed) }
    }

    /// Returns the error for a changed configuration that is invalid or cannot be applied.
    pub fn refused(message: String) -> Failure {
        Failure::new(INVALID_PARAMS, message)
    }

    /// The error for a failed system call, or a state of the target that does not allow the change.
    pub fn system(message: String) -> Failure {
        Failure::new(INTERNAL_ERROR, message)
    }

    /// Returns the error for a revocation that is in force and could not be written to the file.
    pub fn not_saved(why: &str) -> Failure {
        let message = format!(
            "the change is in force and not saved, a restart before the file can be written undoes it: {why}"
        );
        let data = json!({ "in_force": true, "kept": false, "why": why });
        Failure { data: Some(data), ..Failure::new(NOT_SAVED, message) }
    }

    /// Returns the error for a change that is made, and not in force on all cores. `cores`: those that have
    /// failed, each with the reason. `unsaved`: why the file does not have it.
    pub fn not_in_force(why: &str, cores: &[(usize, &str)], unsaved: Option<&str>) -> Failure {
        let kept = match unsaved {
            None => "the change is saved".to_owned(),
            Some(unsaved) => format!("the change is not saved ({unsaved})"),
        };
        let message = format!("{kept} and not in force on all cores yet: {why}");
        let cores: Vec<_> = cores.iter().map(|(core, why)| json!({ "core": core, "why": why })).collect();
        let data = json!({ "in_force": false, "kept": unsaved.is_none(), "why": why, "cores": cores });
        Failure { data: Some(data), ..Failure::new(NOT_IN_FORCE, message) }
    }

    /// Returns the error for a missing or invalid parameter.
    fn parameter(field: &str, value: Option<&Value>, allowed: impl Into<String>) -> Failure {
        let (field, allowed) = (shortened(field), allowed.into());
        let message = match value {
            Some(value) => format!("{field} = {}: {allowed}", excerpt(value)),
            None => format!("{field}: {allowed}"),
        };
        let data = json!({ "field": field, "value": value, "allowed": allowed });
        Failure { code: INVALID_PARAMS, message, data: Some(data) }
    }

    fn response(&self, id: Value) -> Value {
        let mut error = Map::new();
        error.insert("code".to_owned(), self.code.into());
        error.insert("message".to_owned(), self.message.clone().into());
        if let Some(data) = &self.data {
            error.insert("data".to_owned(), data.clone());
        }
        json!({ "jsonrpc": "2.0", "id": id, "error": error })
    }
}
