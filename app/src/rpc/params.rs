//! Parameters of methods, typed as configuration keys ([`Kind`]), and a call's checked values ([`Args`]).
//!
//! Type and range of all parameters are checked before the method runs. Errors contain the parameter, its
//! value and the allowed values. Words are taken in any case, and an NGUID with hyphens.

use std::net::{IpAddr, SocketAddr};

use nvme_spec::nqn::Nqn;
use serde_json::{Map, Value};

use super::Failure;
use crate::config::{Kind, Scalar};
use crate::text::{did_you_mean, quoted};

#[derive(Debug)]
pub struct Param {
    pub name: &'static str,
    pub kind: Kind,
    pub is_required: bool,
    pub about: &'static str,
}

pub const fn optional(name: &'static str, kind: Kind, about: &'static str) -> Param {
    Param { name, kind, is_required: false, about }
}

pub const fn required(name: &'static str, kind: Kind, about: &'static str) -> Param {
    Param { name, kind, is_required: true, about }
}

/// Parameters of a call, checked against those of the method.
#[derive(Debug, Default, PartialEq)]
pub struct Args {
    values: Map<String, Value>,
    /// Prefix of field names in errors: the path of an object parameter with a trailing dot, or empty.
    path: String,
}

impl Args {
    /// Checks `given` against `params`.
    ///
    /// # Errors
    /// The first parameter that is unknown, missing or invalid.
    pub fn new(given: Map<String, Value>, params: &'static [Param]) -> Result<Args, Failure> {
        check(&given, params, "")?;
        // As in SPDK, null means that the parameter is not set.
        let values = given.into_iter().filter(|(_, value)| !value.is_null()).collect();
        Ok(Args { values, path: String::new() })
    }

    /// False if not set.
    pub fn flag(&self, name: &str) -> bool {
        self.values.get(name).and_then(Value::as_bool).unwrap_or(false)
    }

    pub fn whole(&self, name: &str) -> Option<u64> {
        self.values.get(name).and_then(Value::as_u64)
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        self.values.get(name).and_then(Value::as_str)
    }

    pub fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// Empty if not set.
    pub fn texts(&self, name: &str) -> impl Iterator<Item = &str> {
        self.values.get(name).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
    }

    pub fn nqn(&self, name: &str) -> Option<Nqn> {
        Nqn::new(self.text(name)?).ok()
    }

    /// Returns the members of an object parameter; empty if not set.
    pub fn object(&self, name: &str) -> Args {
        let values = self.values.get(name).and_then(Value::as_object).cloned().unwrap_or_default();
        let values = values.into_iter().filter(|(_, value)| !value.is_null()).collect();
        Args { values, path: format!("{}{name}.", self.path) }
    }

    /// Returns the error for the parameter `name`, which may be unset.
    pub fn refuse(&self, name: &str, allowed: impl Into<String>) -> Failure {
        Failure::parameter(&format!("{}{name}", self.path), self.values.get(name), allowed)
    }

    /// Returns the address in `traddr` and `trsvcid`; the port is `default_port` if `trsvcid` is not set.
    ///
    /// # Errors
    /// `traddr` is no IP address, `adrfam` is another family, or `trsvcid` is not a port from 1 to 65535.
    pub fn address(&self, default_port: u16) -> Result<SocketAddr, Failure> {
        let text = self.text("traddr").unwrap_or_default();
        let wrong = || self.refuse("traddr", "must be an IP address, like \"192.0.2.1\" or \"2001:db8::1\"");
        let ip: IpAddr = text.parse().map_err(|_| wrong())?;
        let family = if ip.is_ipv4() { "ipv4" } else { "ipv6" };
        if self.text("adrfam").is_some_and(|given| !given.eq_ignore_ascii_case(family)) {
            return Err(self.refuse("adrfam", format!("must be {family:?}, the family of traddr = {text:?}")));
        }
        // Requires digits, since `parse` also accepts a leading `+`.
        let number = |port: &str| port.bytes().all(|it| it.is_ascii_digit()).then(|| port.parse().ok())?;
        let port = match self.text("trsvcid") {
            None => default_port,
            Some(port) => number(port).filter(|port| *port != 0).ok_or_else(|| {
                self.refuse("trsvcid", "must be a port from 1 to 65535 in decimal digits, like \"4420\"")
            })?,
        };
        Ok(SocketAddr::new(ip, port))
    }
}

fn check(given: &Map<String, Value>, params: &'static [Param], path: &str) -> Result<(), Failure> {
    for (name, value) in given {
        let field = format!("{path}{name}");
        let Some(param) = params.iter().find(|param| param.name == name) else {
            return Err(Failure::parameter(&field, Some(value), unknown_param(name, params)));
        };
        if !value.is_null() {
            check_value(&param.kind, &field, value)?;
        }
    }
    let is_given = |param: &Param| given.get(param.name).is_some_and(|value| !value.is_null());
    match params.iter().find(|param| param.is_required && !is_given(param)) {
        Some(missing) => {
            let allowed = format!("must be given: {:#}", missing.kind);
            Err(Failure::parameter(&format!("{path}{}", missing.name), None, allowed))
        }
        None => Ok(()),
    }
}

fn unknown_param(name: &str, params: &'static [Param]) -> String {
    if params.is_empty() {
        return "there are no parameters here".to_owned();
    }
    let names = || params.iter().map(|param| param.name);
    let meant = did_you_mean(name, names(), || format!("it may be {}", quoted(names())));
    format!("there is no such parameter; {meant}")
}

fn check_value(kind: &Kind, field: &str, value: &Value) -> Result<(), Failure> {
    let is_right = match (kind, value) {
        (Kind::Object(params), Value::Object(object)) => return check(object, params, &format!("{field}.")),
        (Kind::List(of), Value::Array(list)) => {
            let mut indexed = list.iter().enumerate();
            return indexed.try_for_each(|(at, element)| check_value(of, &format!("{field}[{at}]"), element));
        }
        (Kind::Only(only), _) => serde_json::from_str(only).is_ok_and(|only: Value| only == *value),
        (Kind::Word(words), Value::String(text)) => words.iter().any(|word| word.eq_ignore_ascii_case(text)),
        (Kind::Nguid, Value::String(text)) => nguid(text).is_some(),
        _ => match kind.value(scalar(value)) {
            Ok(_) => true,
            Err(None) => false,
            Err(Some(reason)) => {
                return Err(Failure::parameter(field, Some(value), format!("{reason}; must be {kind:#}")));
            }
        },
    };
    if is_right { Ok(()) } else { Err(Failure::parameter(field, Some(value), format!("must be {kind:#}"))) }
}

fn scalar(value: &Value) -> Scalar<'_> {
    match value {
        Value::Bool(flag) => Scalar::Flag(*flag),
        Value::Number(number) => number.as_u64().map_or(Scalar::Other, Scalar::Integer),
        Value::String(text) => Scalar::Text(text),
        Value::Null | Value::Array(_) | Value::Object(_) => Scalar::Other,
    }
}

/// Returns an NGUID, which may have hyphens, as 32 lower-case digits; `None` if `text` is none.
pub fn nguid(text: &str) -> Option<String> {
    let digits = text.replace('-', "").to_ascii_lowercase();
    Kind::Nguid.value(Scalar::Text(&digits)).ok().map(|_| digits)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    static PARAMS: &[Param] = &[
        required("nqn", Kind::Nqn, ""),
        optional("nsid", Kind::Integer { min: 1, max: 9 }, ""),
        optional("trtype", Kind::Word(&["tcp", "rdma"]), ""),
        optional("ana_reporting", Kind::Only("false"), ""),
        optional(
            "address",
            Kind::Object(&[required("traddr", Kind::String, ""), optional("trsvcid", Kind::String, "")]),
            "",
        ),
        optional("uuid", Kind::Uuid, ""),
        optional("nguid", Kind::Nguid, ""),
        optional("names", Kind::List(&Kind::String), ""),
        optional("flag", Kind::Flag, ""),
    ];

    fn args(value: Value) -> Result<Args, String> {
        let Value::Object(given) = value else { panic!("an object") };
        Args::new(given, PARAMS).map_err(|failure| failure.message)
    }

    #[test]
    fn each_wrong_parameter_is_named_with_its_value_and_what_is_allowed() {
        let cases = [
            (json!({}), "nqn: must be given: an NQN"),
            (json!({"nqn": null}), "nqn: must be given"),
            (json!({"nqn": "a\u{1}"}), "nqn = \"a\\u0001\": "),
            (json!({"nqn": 5}), "nqn = 5: must be an NQN"),
            (
                json!({"nqn": "nqn.a", "nsib": 1}),
                "nsib = 1: there is no such parameter; did you mean \"nsid\"?",
            ),
            (
                json!({"nqn": "nqn.a", "something": 1}),
                "something = 1: there is no such parameter; it may be \"nqn\"",
            ),
            (json!({"nqn": "nqn.a", "nsid": 0}), "nsid = 0: must be a whole number from 1 to 9"),
            (json!({"nqn": "nqn.a", "nsid": -1}), "nsid = -1: must be"),
            (json!({"nqn": "nqn.a", "nsid": "1"}), "nsid = \"1\": must be"),
            (json!({"nqn": "nqn.a", "nsid": 1.5}), "nsid = 1.5: must be"),
            (json!({"nqn": "nqn.a", "trtype": "fc"}), "trtype = \"fc\": must be \"tcp\" or \"rdma\""),
            (json!({"nqn": "nqn.a", "ana_reporting": true}), "ana_reporting = true: must be false, the only"),
            (json!({"nqn": "nqn.a", "address": 1}), "address = 1: must be an object with traddr, trsvcid"),
            (json!({"nqn": "nqn.a", "address": {}}), "address.traddr: must be given"),
            (json!({"nqn": "nqn.a", "address": {"traddr": ""}}), "address.traddr = \"\": must be a string"),
            (json!({"nqn": "nqn.a", "uuid": "1"}), "uuid = \"1\": must be a UUID"),
            (json!({"nqn": "nqn.a", "nguid": "0".repeat(32)}), "must be 32 hexadecimal digits, not all"),
            (json!({"nqn": "nqn.a", "names": ["a", 1]}), "names[1] = 1: must be a string"),
            (json!({"nqn": "nqn.a", "flag": 1}), "flag = 1: must be true or false"),
        ];
        for (given, wanted) in cases {
            let error = args(given.clone()).expect_err(wanted);
            assert!(error.contains(wanted), "{given}: {error}");
        }
    }

    #[test]
    fn what_is_right_is_there_in_its_type_and_null_is_not_given() {
        let given = json!({
            "nqn": "nqn.a", "nsid": 9, "trtype": "TCP", "ana_reporting": false, "flag": true, "uuid": null,
            "address": {"traddr": "192.0.2.7", "trsvcid": "4421"}, "names": ["a", "b"],
        });
        let args = args(given).expect("right");
        assert_eq!(
            (args.whole("nsid"), args.text("trtype"), args.flag("flag")),
            (Some(9), Some("TCP"), true)
        );
        assert!(args.text("uuid").is_none() && !args.flag("nothing"));
        assert_eq!(args.texts("names").collect::<Vec<_>>(), ["a", "b"]);
        let address = args.object("address").address(4420).expect("an address");
        assert_eq!(address.to_string(), "192.0.2.7:4421");
    }

    #[test]
    fn an_address_that_is_none_is_refused_by_its_part() {
        let of = |value: Value| {
            let Value::Object(values) = value else { panic!("an object") };
            let args = Args { values, path: "a.".to_owned() };
            args.address(4420).map(|it| it.to_string()).map_err(|failure| failure.message)
        };
        assert_eq!(of(json!({"traddr": "::1"})), Ok("[::1]:4420".to_owned()));
        assert_eq!(of(json!({"traddr": "::1", "adrfam": "IPv6"})), Ok("[::1]:4420".to_owned()));
        for (value, wanted) in [
            (json!({"traddr": "host"}), "a.traddr = \"host\""),
            (json!({"traddr": "::1", "adrfam": "IPv4"}), "a.adrfam = \"IPv4\""),
            (json!({"traddr": "::1", "trsvcid": "+1"}), "a.trsvcid = \"+1\""),
            (json!({"traddr": "::1", "trsvcid": "0"}), "a.trsvcid = \"0\""),
            (json!({"traddr": "::1", "trsvcid": "99999"}), "a.trsvcid"),
        ] {
            let error = of(value).expect_err(wanted);
            assert!(error.contains(wanted), "{error}");
        }
    }
}
