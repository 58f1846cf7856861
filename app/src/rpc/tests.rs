//! Each parameter of each method with a wrong value of each kind, by the table of methods.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::methods::{Action, Change, METHODS, validated};
use super::params::{Args, Param};
use super::wire::Request;
use super::{Failure, INVALID_PARAMS, METHOD_NOT_FOUND};
use crate::config::Kind;

type Given = Map<String, Value>;

/// Validates a call and returns its change, which is not applied.
pub fn change(method: &str, params: Value) -> Result<(Change, Args), Failure> {
    let Value::Object(params) = params else { panic!("{params}: an object") };
    match validated(request(method, params))? {
        (Action::Change(change), args) => Ok((change, args)),
        (Action::Read(_) | Action::List, _) => panic!("{method} changes nothing"),
    }
}

/// The methods that change the text.
pub fn changing() -> Vec<&'static str> {
    METHODS.iter().filter(|it| matches!(it.action, Action::Change(_))).map(|method| method.name).collect()
}

fn request(method: &str, params: Given) -> Request {
    Request { id: Some(json!(1)), method: method.to_owned(), params }
}

/// A call with one thing wrong in it, and what is to be said about it.
struct Case {
    given: Given,
    field: String,
    value: Value,
    allowed: String,
}

/// A wrong value, and the part of it that is named: `[1]` of a list.
struct Wrong {
    given: Value,
    part: &'static str,
    value: Value,
    allowed: String,
}

fn long() -> String {
    "x".repeat(5000)
}

fn right(kind: &Kind) -> Value {
    match kind {
        Kind::Flag => json!(true),
        Kind::Integer { max, .. } => json!(max),
        Kind::Number(numbers) => json!(numbers[0]),
        Kind::String => json!("x".repeat(4096)),
        Kind::Word(words) => json!(words[0].to_ascii_uppercase()),
        Kind::List(_) => json!(["a", "b"]),
        Kind::Nqn => json!("n".repeat(223)),
        Kind::Uuid => json!("6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00"),
        Kind::Nguid => json!("6f1b3b7e9d7a5c1e8a550d9f3c2b1a00"),
        Kind::Object(params) => right_of(params, true).into(),
        Kind::Only(only) => serde_json::from_str(only).expect("JSON"),
        Kind::Size { .. }
        | Kind::Text { .. }
        | Kind::Address
        | Kind::Path
        | Kind::SocketOrNone
        | Kind::PciAddress
        | Kind::Section(_)
        | Kind::Sections(_) => panic!("{kind}: no parameter is of this kind"),
    }
}

/// All parameters, or those that must be given.
fn right_of(params: &[Param], with_all: bool) -> Given {
    let wanted = params.iter().filter(|param| with_all || param.is_required);
    wanted.map(|param| (param.name.to_owned(), right(&param.kind))).collect()
}

/// Values of this kind's type that are wrong. What no type has is a value of another type.
fn wrong_of_its_type(kind: &Kind) -> Vec<Value> {
    let beyond = |max: u64| match max.checked_add(1) {
        Some(more) => json!(more),
        None => serde_json::from_str("18446744073709551616").expect("JSON"),
    };
    match kind {
        Kind::Flag | Kind::List(_) | Kind::Object(_) => Vec::new(),
        Kind::Integer { min, max } => {
            let below = min.checked_sub(1).map_or(json!(-1), |less| json!(less));
            vec![below, beyond(*max), json!(-1), json!(0.5), json!(i64::MIN), json!(1e30)]
        }
        Kind::Number(numbers) => {
            let near = numbers.iter().flat_map(|it| [json!(it - 1), json!(it + 1)]);
            near.chain([json!(0), json!(-1), json!(0.5), beyond(u64::MAX)]).collect()
        }
        Kind::String => vec![json!(""), json!(long())],
        Kind::Word(words) => vec![json!(""), json!(long()), json!(format!("{}x", words[0]))],
        Kind::Nqn => vec![json!(""), json!("n".repeat(224)), json!("nqn.a\nb")],
        Kind::Uuid => {
            let (zero, short) =
                ("00000000-0000-0000-0000-000000000000", "6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a0");
            vec![json!(""), json!(long()), json!(zero), json!(short)]
        }
        Kind::Nguid => {
            let digits = |digit: &str, count: usize| json!(digit.repeat(count));
            vec![json!(""), json!(long()), digits("0", 32), digits("1", 31), digits("1", 33), digits("g", 32)]
        }
        Kind::Only(only) => match serde_json::from_str(only).expect("JSON") {
            Value::Bool(flag) => vec![json!(!flag)],
            Value::Number(number) => {
                let number = number.as_u64().expect("a whole number");
                vec![json!(number + 1), json!(-1), json!(0.5)]
            }
            Value::String(text) => vec![json!(""), json!(long()), json!(format!("{text}x"))],
            Value::Null => Vec::new(),
            Value::Array(_) | Value::Object(_) => panic!("{only}: no such parameter is there"),
        },
        Kind::Size { .. }
        | Kind::Text { .. }
        | Kind::Address
        | Kind::Path
        | Kind::SocketOrNone
        | Kind::PciAddress
        | Kind::Section(_)
        | Kind::Sections(_) => panic!("{kind}: no parameter is of this kind"),
    }
}

fn wrong(kind: &Kind) -> Vec<Wrong> {
    let types = [json!(true), json!(7), json!(1.5), json!("7"), json!(["7"]), json!({ "7": 7 })];
    let its = right(kind);
    let is_other = |value: &Value| std::mem::discriminant(value) != std::mem::discriminant(&its);
    let others = types.into_iter().filter(is_other);
    let whole =
        |value: Value| Wrong { given: value.clone(), part: "", value, allowed: format!("must be {kind:#}") };
    let mut wrong: Vec<_> = others.chain(wrong_of_its_type(kind)).map(whole).collect();
    if matches!(kind, Kind::List(_)) {
        let elements = [json!(7), json!(null), json!(""), json!(long()), json!(["a"])];
        wrong.extend(elements.into_iter().map(|element| {
            let allowed = "must be a string of 1 to 4096 bytes".to_owned();
            Wrong { given: json!(["a", element]), part: "[1]", value: element, allowed }
        }));
    }
    wrong
}

/// All that can be wrong with these parameters, which stand at this path.
fn cases(params: &[Param], path: &str, kinds: &mut HashSet<std::mem::Discriminant<Kind>>) -> Vec<Case> {
    let required = right_of(params, false);
    let mut cases = Vec::new();
    for param in params {
        kinds.insert(std::mem::discriminant(&param.kind));
        let field = format!("{path}{}", param.name);
        let with = |name: &str, value: Value| {
            let mut given = required.clone();
            given.insert(name.to_owned(), value);
            given
        };
        let before = cases.len();
        for wrong in wrong(&param.kind) {
            let (given, field) = (with(param.name, wrong.given), format!("{field}{}", wrong.part));
            cases.push(Case { given, field, value: wrong.value, allowed: wrong.allowed });
        }
        assert!(cases.len() >= before + 5, "{field}: too little was tried");
        if param.is_required {
            let mut without = required.clone();
            without.remove(param.name);
            for given in [without, with(param.name, json!(null))] {
                let allowed = format!("must be given: {:#}", param.kind);
                cases.push(Case { given, field: field.clone(), value: json!(null), allowed });
            }
        }
        let last = param.name.chars().last().expect("a name");
        let (misspelt, allowed) = (
            format!("{}{last}", param.name),
            format!("there is no such parameter; did you mean {:?}?", param.name),
        );
        let given = with(&misspelt, json!("far"));
        cases.push(Case { given, field: format!("{path}{misspelt}"), value: json!("far"), allowed });
        if let Kind::Object(inner) = param.kind {
            for case in self::cases(inner, &format!("{field}."), kinds) {
                cases.push(Case { given: with(param.name, case.given.into()), ..case });
            }
        }
    }
    let (far, value) = ("it is called otherwise".to_owned(), json!([1, 2]));
    let allowed = match params {
        [] => "there are no parameters here".to_owned(),
        [first, ..] => format!("there is no such parameter; it may be {:?}", first.name),
    };
    let mut given = required;
    given.insert(far.clone(), value.clone());
    cases.push(Case { given, field: format!("{path}{far}"), value, allowed });
    cases
}

/// Field, value and what is allowed are in the message, and each in its place beside it.
fn assert_says(failure: &Failure, code: i32, field: &str, value: &Value, allowed: &str, what: &str) {
    let Failure { code: its, message, data } = failure;
    let data = data.as_ref().unwrap_or_else(|| panic!("{what}: no data: {message}"));
    assert_eq!((*its, &data["field"], &data["value"]), (code, &json!(field), value), "{what}: {message}");
    let is_there = data["allowed"].as_str().is_some_and(|it| it.contains(allowed));
    assert!(is_there && message.contains(allowed), "{what}: {message}");
    // What is missing has no value to be shown.
    let begins = |value: &str| message.starts_with(&format!("{field}{value}"));
    let shown: String = value.to_string().chars().take(60).collect();
    let is_named = begins(&format!(" = {shown}")) || (value.is_null() && begins(": must be given: "));
    assert!(is_named, "{what}: {message}");
    assert!(message.len() < 2500, "{what}: a message of {} bytes", message.len());
}

#[test]
fn each_parameter_of_each_method_is_refused_with_field_value_and_what_is_allowed() {
    let (mut params, mut all, mut kinds) = (0, 0, HashSet::new());
    for method in METHODS {
        for with_all in [false, true] {
            let right = right_of(method.params, with_all);
            assert!(
                validated(request(method.name, right)).is_ok(),
                "{}: what is right is taken",
                method.name
            );
        }
        let inner = |param: &Param| if let Kind::Object(inner) = param.kind { inner.len() } else { 0 };
        params += method.params.iter().map(|param| 1 + inner(param)).sum::<usize>();
        for Case { given, field, value, allowed } in cases(method.params, "", &mut kinds) {
            all += 1;
            let what = format!("{} {field}", method.name);
            let Err(failure) = validated(request(method.name, given)) else {
                panic!("{what}: {value} is taken")
            };
            assert_says(&failure, INVALID_PARAMS, &field, &value, &allowed, &what);
        }
    }
    // Those that there were when this was written.
    assert!(METHODS.len() >= 42 && params >= 154 && all >= 1400, "{} {params} {all}", METHODS.len());
    assert_eq!(kinds.len(), 11, "each kind is the kind of some parameter");
}

#[test]
fn a_method_that_is_not_there_is_named_with_the_nearest() {
    for method in METHODS {
        let last = method.name.chars().last().expect("a name");
        let misspelt = format!("{}{last}", method.name);
        let failure = validated(request(&misspelt, Given::new())).err().expect("there is none");
        let allowed = format!("there is no such method; did you mean {:?}?", method.name);
        assert_says(&failure, METHOD_NOT_FOUND, "method", &json!(misspelt), &allowed, method.name);
    }
    for far in ["", "x", &long()] {
        let failure = validated(request(far, Given::new())).err().expect("there is none");
        assert_says(&failure, METHOD_NOT_FOUND, "method", &json!(far), "it may be \"rpc_get_methods\"", far);
    }
}
