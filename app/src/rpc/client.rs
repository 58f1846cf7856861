//! Client of the control socket: one request per connection.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::wire::{self, Parsed};

/// Timeout of each read and write. A response that is incomplete after this time is an error.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The socket cannot be used, or returned no JSON-RPC response; with the path of the socket.
    #[error("{0:?}: {1}")]
    NoResponse(PathBuf, String),
    /// The target's error message.
    #[error("{0}")]
    Refused(String),
}

/// Calls a method of the target whose control socket is at `path`, and waits for its result.
pub fn call(path: &Path, method: &str, params: Map<String, Value>) -> Result<Value, CallError> {
    let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
    let failed = |what: String| CallError::NoResponse(path.to_owned(), what);
    let wrong = |what: &str| failed(format!("not a response of spindle serve: {what}"));
    let answer = exchange(path, &request).map_err(|error| {
        failed(format!(
            "{error} (is `spindle serve` running? control.socket in its configuration says where)"
        ))
    })?;
    let Parsed::Complete(mut answer, _) = answer else { return Err(wrong("not JSON")) };
    if let Some(error) = answer.get("error") {
        let message = error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned);
        return Err(CallError::Refused(message));
    }
    match answer.get_mut("result") {
        Some(result) => Ok(result.take()),
        None => Err(wrong(&format!("{answer}: neither a result nor an error"))),
    }
}

fn exchange(path: &Path, request: &Value) -> std::io::Result<Parsed> {
    let end = Instant::now() + RESPONSE_TIMEOUT;
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    stream.set_write_timeout(Some(RESPONSE_TIMEOUT))?;
    stream.write_all(request.to_string().as_bytes())?;
    let (mut answer, mut piece) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        match stream.read(&mut piece) {
            Ok(0) => {
                return Err(std::io::Error::other("the target closed the connection before its response"));
            }
            Ok(count) => answer.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Err(std::io::Error::other("no response: the target may still be opening its disks"));
            }
            Err(error) => return Err(error),
        }
        match wire::parse_response(&answer) {
            Parsed::Incomplete if Instant::now() < end => {}
            parsed @ (Parsed::Incomplete | Parsed::Complete(..) | Parsed::Invalid(_)) => return Ok(parsed),
        }
    }
}
