//! The control socket: JSON-RPC 2.0, with the names, parameters and results that SPDK's clients know.
//!
//! ```text
//!   client ── server (one thread) ── wire ── params ──┬── reads: answered at once from the View
//!                                                     └── edits: to the main thread, one at a time
//!                                                           text of the file ── edit ──> new text ── serve
//! ```
//!
//! | file | what |
//! |---|---|
//! | `wire` | JSON texts without framing; requests, batches, answers |
//! | `params` | what each parameter may be, and the errors |
//! | `methods`, `table` | what a request asks for; the table of methods |
//! | `edit`, `edit_disks` | methods that change the text of the configuration |
//! | `reads`, `config` | methods that only look |
//! | `server` | the socket and its clients |
//! | `client` | the other end, for `spindle ctl` and `spindle status` |
//!
//! The data path knows nothing of it: cores are looked at by their counters.
//!
//! Limits: 128 clients, requests of 1 MiB; a client that does not read its answers gets no others.

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

pub use server::answer;

pub use edit::Edit;
pub use edit_disks::controller_of;

use std::sync::mpsc::Sender;

use serde_json::{Map, Value, json};
use spindle_reactor::net::Waker;

use crate::text::shortened;

/// A change that a client asks the main thread for.
pub struct Change {
    /// What it does to the text.
    pub edit: methods::Change,
    /// By what.
    pub args: params::Args,
    reply: Reply,
}

/// The way back to the client.
pub struct Reply {
    client: u64,
    send: Sender<(u64, Result<Value, Failure>)>,
    waker: Waker,
}

impl Change {
    /// What came of it.
    pub fn answer(self, result: Result<Value, Failure>) {
        // It fails when the thread of the socket has ended: there is no client to tell.
        let _ = self.reply.send.send((self.reply.client, result));
        self.reply.waker.wake();
    }
}

/// A value as a message shows it.
fn shown(value: &Value) -> String {
    shortened(&value.to_string())
}

/// Why a call has no result.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    /// As JSON-RPC 2.0 section 5.1 has them.
    code: i32,
    /// What is wrong: field, value, and what is allowed.
    pub message: String,
    /// The same in parts, where there is a field.
    data: Option<Value>,
}

const PARSE: i32 = -32700;
const REQUEST: i32 = -32600;
const METHOD: i32 = -32601;
const PARAMS: i32 = -32602;
const SYSTEM: i32 = -32603;

impl Failure {
    fn new(code: i32, message: String) -> Failure {
        Failure { code, message, data: None }
    }

    /// There is no such method.
    fn method(name: &str, allowed: &str) -> Failure {
        Failure { code: METHOD, ..Failure::field("method", Some(&name.into()), allowed) }
    }

    /// The configuration that would follow is refused.
    pub fn refused(message: String) -> Failure {
        Failure::new(PARAMS, message)
    }

    /// The system, or the state of the target, does not let it be done.
    pub fn system(message: String) -> Failure {
        Failure::new(SYSTEM, message)
    }

    /// A parameter is wrong.
    fn field(field: &str, value: Option<&Value>, allowed: impl Into<String>) -> Failure {
        let (field, allowed) = (shortened(field), allowed.into());
        let message = match value {
            Some(value) => format!("{field} = {}: {allowed}", shown(value)),
            None => format!("{field}: {allowed}"),
        };
        let data = json!({ "field": field, "value": value, "allowed": allowed });
        Failure { code: PARAMS, message, data: Some(data) }
    }

    /// As an answer to the request with this identifier.
    fn answer(&self, id: Value) -> Value {
        let mut error = Map::new();
        error.insert("code".to_owned(), self.code.into());
        error.insert("message".to_owned(), self.message.clone().into());
        if let Some(data) = &self.data {
            error.insert("data".to_owned(), data.clone());
        }
        json!({ "jsonrpc": "2.0", "id": id, "error": error })
    }
}
