//! JSON-RPC 2.0 on a byte stream of JSON texts without framing.
//!
//! ```text
//!   bytes ── parse_request ──> Value ── RequestBatch::new, next ──> Request ── respond, finish ──> bytes
//! ```

use serde_json::{Map, Value, json};

use super::{Failure, INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR, excerpt};
use crate::text::shortened;

/// A request or batch that is incomplete with this many bytes is refused.
pub const TEXT_BYTES_MAX: usize = 1 << 20;

/// Most requests of a batch. Bounds the memory for its responses, which are sent together.
const BATCH_MAX: usize = 64;

/// Result of parsing the first JSON text of a buffer.
#[derive(Debug, PartialEq)]
pub enum Parsed {
    /// A JSON value and its length in bytes.
    Complete(Value, usize),
    /// More bytes are needed.
    Incomplete,
    /// Not JSON, or too long. The rest of the stream cannot be parsed.
    Invalid(Failure),
}

/// Parses the first request or batch in `bytes`. An incomplete request of [`TEXT_BYTES_MAX`] bytes or more is
/// [`Parsed::Invalid`].
pub fn parse_request(bytes: &[u8]) -> Parsed {
    parse(bytes, TEXT_BYTES_MAX)
}

/// Parses a response, whose length is not limited.
pub fn parse_response(bytes: &[u8]) -> Parsed {
    parse(bytes, usize::MAX)
}

fn parse(bytes: &[u8], bytes_max: usize) -> Parsed {
    let mut texts = serde_json::Deserializer::from_slice(bytes).into_iter::<Value>();
    match texts.next() {
        Some(Ok(value)) => Parsed::Complete(value, texts.byte_offset()),
        Some(Err(error)) if error.is_eof() && bytes.len() < bytes_max => Parsed::Incomplete,
        Some(Err(error)) if error.is_eof() => Parsed::Invalid(Failure::new(
            PARSE_ERROR,
            format!("a request of {} bytes and more: must have less than {bytes_max}", bytes.len()),
        )),
        Some(Err(error)) => Parsed::Invalid(Failure::new(PARSE_ERROR, format!("not JSON: {error}"))),
        None => Parsed::Incomplete,
    }
}

#[derive(Debug, PartialEq)]
pub struct Request {
    /// `None`: a notification, which gets no response.
    pub id: Option<Value>,
    pub method: String,
    pub params: Map<String, Value>,
}

impl Request {
    /// Checks the members of a request object.
    ///
    /// # Errors
    /// The identifier for the error response (null if the request's is invalid or missing), and the failure.
    fn new(value: Value) -> Result<Request, (Value, Failure)> {
        let Value::Object(mut object) = value else {
            return Err((
                Value::Null,
                Failure::new(INVALID_REQUEST, format!("{}: must be an object", excerpt(&value))),
            ));
        };
        let id = object.remove("id");
        let answer_to = id.clone().filter(is_id).unwrap_or(Value::Null);
        let refuse = |what: String| Err((answer_to.clone(), Failure::new(INVALID_REQUEST, what)));
        if let Some(id) = id.as_ref().filter(|id| !is_id(id)) {
            return refuse(format!("id = {}: must be a string, a number or null", excerpt(id)));
        }
        match object.remove("jsonrpc") {
            Some(Value::String(version)) if version == "2.0" => {}
            Some(other) => return refuse(format!("jsonrpc = {}: must be \"2.0\"", excerpt(&other))),
            None => return refuse("jsonrpc: must be given, as \"2.0\"".to_owned()),
        }
        let method = match object.remove("method") {
            Some(Value::String(method)) => method,
            Some(other) => return refuse(format!("method = {}: must be a string", excerpt(&other))),
            None => return refuse("method: must be given".to_owned()),
        };
        let params = match object.remove("params") {
            Some(Value::Object(params)) => params,
            Some(Value::Null) | None => Map::new(),
            Some(other) => {
                let other = excerpt(&other);
                let what = format!("params = {other}: must be an object, with each parameter by its name");
                return Err((answer_to, Failure::new(INVALID_PARAMS, what)));
            }
        };
        if let Some((name, value)) = object.iter().next() {
            let (name, value) = (shortened(name), excerpt(value));
            return refuse(format!("{name} = {value}: must be none but jsonrpc, id, method and params"));
        }
        Ok(Request { id, method, params })
    }
}

fn is_id(value: &Value) -> bool {
    matches!(value, Value::String(_) | Value::Number(_) | Value::Null)
}

/// A single request or a batch, and the responses so far.
#[derive(Debug)]
pub struct RequestBatch {
    /// Requests that [`RequestBatch::next`] has not returned yet, the next one last.
    remaining: Vec<Value>,
    responses: Vec<Value>,
    is_batch: bool,
}

impl RequestBatch {
    pub fn new(value: Value) -> RequestBatch {
        let responses = Vec::new();
        let Value::Array(mut remaining) = value else {
            return RequestBatch { remaining: vec![value], responses, is_batch: false };
        };
        if remaining.is_empty() || remaining.len() > BATCH_MAX {
            let what = format!("a batch of {} requests: must have 1 to {BATCH_MAX}", remaining.len());
            let failure = Failure::new(INVALID_REQUEST, what);
            remaining.clear();
            return RequestBatch {
                remaining,
                responses: vec![failure.response(Value::Null)],
                is_batch: false,
            };
        }
        remaining.reverse();
        RequestBatch { remaining, responses, is_batch: true }
    }

    /// Returns the next valid request; `None` at the end. Records an error response for each invalid request.
    pub fn next(&mut self) -> Option<Request> {
        loop {
            match Request::new(self.remaining.pop()?) {
                Ok(request) => return Some(request),
                Err((id, failure)) => self.responses.push(failure.response(id)),
            }
        }
    }

    /// Records the result of the request with identifier `id`. No effect without one (a notification).
    pub fn respond(&mut self, id: Option<Value>, result: Result<Value, Failure>) {
        let Some(id) = id else { return };
        self.responses.push(match result {
            Ok(result) => json!({ "jsonrpc": "2.0", "id": id, "result": result }),
            Err(failure) => failure.response(id),
        });
    }

    /// Returns all responses as one JSON text with a newline; empty if all requests were notifications.
    pub fn finish(self) -> Vec<u8> {
        let mut responses = self.responses;
        let text = match (self.is_batch, responses.pop()) {
            (_, None) => return Vec::new(),
            (false, Some(response)) => response.to_string(),
            (true, Some(last)) => {
                responses.push(last);
                Value::Array(responses).to_string()
            }
        };
        (text + "\n").into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers the requests in `bytes` with method and parameters. Returns the answers and the bytes parsed.
    fn run(bytes: &[u8]) -> (Vec<Value>, usize) {
        let (mut answers, mut at) = (Vec::new(), 0);
        while let Parsed::Complete(value, bytes_taken) = parse_request(&bytes[at..]) {
            at += bytes_taken;
            let mut batch = RequestBatch::new(value);
            while let Some(Request { id, method, params }) = batch.next() {
                batch.respond(id, Ok(json!([method, params])));
            }
            let answer = batch.finish();
            if !answer.is_empty() {
                answers.push(serde_json::from_slice(&answer).expect("JSON"));
            }
        }
        (answers, at)
    }

    fn code(answer: &Value) -> i64 {
        answer["error"]["code"].as_i64().expect("an error")
    }

    #[test]
    fn requests_follow_each_other_without_framing_and_a_part_waits_for_the_rest() {
        let one = br#"{"jsonrpc":"2.0","id":1,"method":"a","params":{"x":[1,{"y":"}"}]}}"#;
        let other = br#" {"jsonrpc": "2.0", "method": "b", "id": "z"}"#;
        let both = [&one[..], &other[..]].concat();
        let (answers, taken) = run(&both);
        assert_eq!((answers.len(), taken), (2, both.len()));
        assert_eq!(answers[0]["result"], json!(["a", { "x": [1, { "y": "}" }] }]));
        assert_eq!(answers[1], json!({ "jsonrpc": "2.0", "id": "z", "result": ["b", {}] }));
        for end in 0..one.len() {
            assert_eq!(parse_request(&one[..end]), Parsed::Incomplete, "{end}");
        }
    }

    #[test]
    fn a_request_that_is_none_is_answered_with_its_identifier_where_it_has_one() {
        let request = |text: &str| {
            let (answers, _) = run(text.as_bytes());
            assert_eq!(answers.len(), 1, "{text}");
            (code(&answers[0]), answers[0]["id"].clone())
        };
        assert_eq!(request("[]"), (-32600, Value::Null));
        assert_eq!(request("17 "), (-32600, Value::Null));
        assert_eq!(request(r#"{"id":4,"method":"a"}"#), (-32600, json!(4)));
        assert_eq!(request(r#"{"jsonrpc":"1.0","id":4,"method":"a"}"#), (-32600, json!(4)));
        assert_eq!(request(r#"{"jsonrpc":"2.0","id":4}"#), (-32600, json!(4)));
        assert_eq!(request(r#"{"jsonrpc":"2.0","id":4,"method":"a","parms":{}}"#), (-32600, json!(4)));
        assert_eq!(request(r#"{"jsonrpc":"2.0","id":4,"method":5}"#), (-32600, json!(4)));
        assert_eq!(request(r#"{"jsonrpc":"2.0","id":{},"method":"a"}"#), (-32600, Value::Null));
        assert_eq!(request(r#"{"jsonrpc":"2.0","id":4,"method":"a","params":[1]}"#), (-32602, json!(4)));
    }

    #[test]
    fn a_batch_is_answered_as_one_and_notifications_are_not_answered() {
        let text = r#"[{"jsonrpc":"2.0","id":1,"method":"a"}, 3, {"jsonrpc":"2.0","method":"b"}]"#;
        let (answers, _) = run(text.as_bytes());
        assert_eq!(answers[0][0]["result"][0], "a");
        assert_eq!((code(&answers[0][1]), answers[0].as_array().map(Vec::len)), (-32600, Some(2)));
        assert_eq!(run(br#"{"jsonrpc":"2.0","method":"b"}"#).0, Vec::<Value>::new());
    }

    #[test]
    fn what_is_not_json_and_what_never_ends_is_broken() {
        for text in ["}", "{\"a\" 1}", &"[".repeat(1000)] {
            assert!(matches!(parse_request(text.as_bytes()), Parsed::Invalid(_)), "{text}");
        }
        let endless = format!("{{\"a\": \"{}", "x".repeat(TEXT_BYTES_MAX));
        assert!(matches!(parse_request(endless.as_bytes()), Parsed::Invalid(_)));
        assert_eq!(parse_request(&endless.as_bytes()[..1000]), Parsed::Incomplete);
    }
}
