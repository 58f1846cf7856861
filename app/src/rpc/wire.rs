//! JSON-RPC 2.0 on a byte stream: JSON texts one after the other, without framing between them.
//!
//! ```text
//!   bytes ── next ──> Text: Value ── Work::new ──> requests, one by one ── answer ──> Work::finish: bytes
//! ```

use serde_json::{Map, Value, json};

use super::{Failure, PARAMS, PARSE, REQUEST, shown};
use crate::text::shortened;

/// Longest text.
pub const TEXT_BYTES_MAX: usize = 1 << 20;

/// Most requests of a batch, whose answers are held until the last.
const BATCH_MAX: usize = 64;

/// What is at the beginning of the bytes that came.
#[derive(Debug, PartialEq)]
pub enum Text {
    /// A whole text, and how many bytes it takes.
    Whole(Value, usize),
    /// The beginning of one, or nothing.
    Part,
    /// It is not JSON: what follows has no meaning either.
    Broken(Failure),
}

/// Look for a request.
pub fn next(bytes: &[u8]) -> Text {
    text(bytes, TEXT_BYTES_MAX)
}

/// Look for an answer, which may be as long as it likes.
pub fn answer(bytes: &[u8]) -> Text {
    text(bytes, usize::MAX)
}

fn text(bytes: &[u8], bytes_max: usize) -> Text {
    let mut texts = serde_json::Deserializer::from_slice(bytes).into_iter::<Value>();
    match texts.next() {
        Some(Ok(value)) => Text::Whole(value, texts.byte_offset()),
        Some(Err(error)) if error.is_eof() && bytes.len() < bytes_max => Text::Part,
        Some(Err(error)) if error.is_eof() => Text::Broken(Failure::new(
            PARSE,
            format!("a request of {} bytes and more: must have less than {bytes_max}", bytes.len()),
        )),
        Some(Err(error)) => Text::Broken(Failure::new(PARSE, format!("not JSON: {error}"))),
        None => Text::Part,
    }
}

#[derive(Debug, PartialEq)]
pub struct Request {
    /// `None`: it is not answered.
    pub id: Option<Value>,
    pub method: String,
    pub params: Map<String, Value>,
}

impl Request {
    /// Take a text apart.
    ///
    /// # Errors
    /// What is wrong with it, with the identifier to answer.
    fn new(value: Value) -> Result<Request, (Value, Failure)> {
        let Value::Object(mut object) = value else {
            return Err((
                Value::Null,
                Failure::new(REQUEST, format!("{}: must be an object", shown(&value))),
            ));
        };
        let id = object.remove("id");
        let answer_to = id.clone().filter(is_id).unwrap_or(Value::Null);
        let refuse = |what: String| Err((answer_to.clone(), Failure::new(REQUEST, what)));
        if let Some(id) = id.as_ref().filter(|id| !is_id(id)) {
            return refuse(format!("id = {}: must be a string, a number or null", shown(id)));
        }
        match object.remove("jsonrpc") {
            Some(Value::String(version)) if version == "2.0" => {}
            Some(other) => return refuse(format!("jsonrpc = {}: must be \"2.0\"", shown(&other))),
            None => return refuse("jsonrpc: must be given, as \"2.0\"".to_owned()),
        }
        let method = match object.remove("method") {
            Some(Value::String(method)) => method,
            Some(other) => return refuse(format!("method = {}: must be a string", shown(&other))),
            None => return refuse("method: must be given".to_owned()),
        };
        let params = match object.remove("params") {
            Some(Value::Object(params)) => params,
            Some(Value::Null) | None => Map::new(),
            Some(other) => {
                let other = shown(&other);
                let what = format!("params = {other}: must be an object, with each parameter by its name");
                return Err((answer_to, Failure::new(PARAMS, what)));
            }
        };
        if let Some((name, value)) = object.iter().next() {
            let (name, value) = (shortened(name), shown(value));
            return refuse(format!("{name} = {value}: must be none but jsonrpc, id, method and params"));
        }
        Ok(Request { id, method, params })
    }
}

fn is_id(value: &Value) -> bool {
    matches!(value, Value::String(_) | Value::Number(_) | Value::Null)
}

/// A text with one request or a batch of them, and the answers so far.
#[derive(Debug)]
pub struct Work {
    /// What is left, the next at the end.
    left: Vec<Value>,
    answers: Vec<Value>,
    is_batch: bool,
}

impl Work {
    pub fn new(value: Value) -> Work {
        let answers = Vec::new();
        let Value::Array(mut left) = value else {
            return Work { left: vec![value], answers, is_batch: false };
        };
        if left.is_empty() || left.len() > BATCH_MAX {
            let what = format!("a batch of {} requests: must have 1 to {BATCH_MAX}", left.len());
            let failure = Failure::new(REQUEST, what);
            left.clear();
            return Work { left, answers: vec![failure.answer(Value::Null)], is_batch: false };
        }
        left.reverse();
        Work { left, answers, is_batch: true }
    }

    /// The next request; those that are none are answered. `None`: there is no other.
    pub fn next(&mut self) -> Option<Request> {
        loop {
            match Request::new(self.left.pop()?) {
                Ok(request) => return Some(request),
                Err((id, failure)) => self.answers.push(failure.answer(id)),
            }
        }
    }

    /// What came of a request with this identifier.
    pub fn answer(&mut self, id: Option<Value>, result: Result<Value, Failure>) {
        let Some(id) = id else { return };
        self.answers.push(match result {
            Ok(result) => json!({ "jsonrpc": "2.0", "id": id, "result": result }),
            Err(failure) => failure.answer(id),
        });
    }

    /// All answers as one text; empty where nothing is to be answered.
    pub fn finish(self) -> Vec<u8> {
        let mut answers = self.answers;
        let text = match (self.is_batch, answers.pop()) {
            (_, None) => return Vec::new(),
            (false, Some(answer)) => answer.to_string(),
            (true, Some(last)) => {
                answers.push(last);
                Value::Array(answers).to_string()
            }
        };
        (text + "\n").into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All answers to `bytes`, which name the method and the parameters of each request.
    fn run(bytes: &[u8]) -> (Vec<Value>, usize) {
        let (mut answers, mut at) = (Vec::new(), 0);
        while let Text::Whole(value, bytes_taken) = next(&bytes[at..]) {
            at += bytes_taken;
            let mut work = Work::new(value);
            while let Some(Request { id, method, params }) = work.next() {
                work.answer(id, Ok(json!([method, params])));
            }
            let answer = work.finish();
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
            assert_eq!(next(&one[..end]), Text::Part, "{end}");
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
            assert!(matches!(next(text.as_bytes()), Text::Broken(_)), "{text}");
        }
        let endless = format!("{{\"a\": \"{}", "x".repeat(TEXT_BYTES_MAX));
        assert!(matches!(next(endless.as_bytes()), Text::Broken(_)));
        assert_eq!(next(&endless.as_bytes()[..1000]), Text::Part);
    }
}
