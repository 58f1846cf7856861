//! Which method a verb calls, with which parameters.

use serde_json::{Value, json};

use super::{Answer, Ask, disks, show};
use crate::cli::{Endpoint, HostVerb, ListenerVerb, NamespaceVerb, SubsystemVerb, Switch, Verb};
use crate::rpc::client::CallError;

pub fn answer(verb: &Verb, ask: Ask<'_>) -> Answer {
    match verb {
        Verb::Connections => connections(ask),
        Verb::Cache { hosts: false } => shown(ask("bdev_get_iostat", json!({})), show::caches),
        Verb::Cache { hosts: true } => {
            shown(ask("bdev_get_iostat", json!({ "by_host": true })), show::caches_by_host)
        }
        Verb::Subsystem(verb) => subsystem(verb, ask),
        Verb::Host(verb) => host(verb, ask),
        Verb::Listener(verb) => listener(verb, ask),
        Verb::Namespace(verb) => namespace(verb, ask),
        Verb::Disk(verb) => disks::answer(verb, ask),
        Verb::Log { level: None } => shown(ask("log_get_level", json!({})), |level| {
            level.as_str().unwrap_or_default().to_ascii_lowercase()
        }),
        Verb::Log { level: Some(level) } => {
            let level = level.to_ascii_lowercase();
            done(ask("log_set_level", json!({ "level": level })), format!("the level of the log is {level}"))
        }
    }
}

/// A result, and what it is for people.
pub fn shown(result: Result<Value, CallError>, text: impl FnOnce(&Value) -> String) -> Answer {
    let result = result?;
    let text = text(&result);
    Ok((result, text))
}

/// A change that was made.
pub fn done(result: Result<Value, CallError>, text: String) -> Answer {
    shown(result, |_| text)
}

/// `params`, without those that are not given.
pub fn given(mut params: Value) -> Value {
    if let Value::Object(params) = &mut params {
        params.retain(|_, value| !value.is_null());
    }
    params
}

/// Parameters of an address.
pub fn address(endpoint: &Endpoint) -> Value {
    json!({
        "trtype": endpoint.transport.to_string(),
        "traddr": endpoint.address.ip().to_string(),
        "trsvcid": endpoint.address.port().to_string(),
    })
}

/// Controllers, each with its queue pairs.
fn connections(ask: Ask<'_>) -> Answer {
    let mut status = ask("spindle_get_status", json!({}))?;
    let mut controllers = status["controllers"].take();
    // They are in the order of their subsystems, each of which is asked once.
    let mut of_subsystem = (Value::Null, Vec::new());
    for controller in controllers.as_array_mut().into_iter().flatten() {
        if of_subsystem.0 != controller["subsystem"] {
            let nqn = controller["subsystem"].clone();
            let qpairs = match ask("nvmf_subsystem_get_qpairs", json!({ "nqn": nqn })) {
                Ok(Value::Array(qpairs)) => qpairs,
                // The subsystem has gone meanwhile.
                Ok(_) | Err(CallError::Refused(_)) => Vec::new(),
                Err(error) => return Err(error.into()),
            };
            of_subsystem = (nqn, qpairs);
        }
        let own = of_subsystem.1.iter().filter(|qpair| qpair["cntlid"] == controller["controller"]);
        controller["qpairs"] = own.cloned().collect();
    }
    let text = show::connections(&controllers);
    Ok((controllers, text))
}

fn subsystem(verb: &SubsystemVerb, ask: Ask<'_>) -> Answer {
    match verb {
        SubsystemVerb::List => shown(ask("nvmf_get_subsystems", json!({})), show::subsystems),
        SubsystemVerb::Add { nqn, serial, model, any_host } => {
            let params = given(json!({
                "nqn": nqn, "serial_number": serial, "model_number": model, "allow_any_host": any_host,
            }));
            done(ask("nvmf_create_subsystem", params), format!("added subsystem {nqn}"))
        }
        SubsystemVerb::Remove { nqn } => {
            done(ask("nvmf_delete_subsystem", json!({ "nqn": nqn })), format!("removed subsystem {nqn}"))
        }
    }
}

fn host(verb: &HostVerb, ask: Ask<'_>) -> Answer {
    match verb {
        HostVerb::List { nqn } => shown(ask("nvmf_get_subsystems", json!({ "nqn": nqn })), show::hosts),
        HostVerb::Add { nqn, host } => {
            let params = json!({ "nqn": nqn, "host": host });
            done(ask("nvmf_subsystem_add_host", params), format!("added host {host} to {nqn}"))
        }
        HostVerb::Remove { nqn, host } => {
            let params = json!({ "nqn": nqn, "host": host });
            done(ask("nvmf_subsystem_remove_host", params), format!("removed host {host} from {nqn}"))
        }
        HostVerb::Any { nqn, switch } => {
            let (is_any, who) = match switch {
                Switch::On => (true, "every host"),
                Switch::Off => (false, "only hosts of its list"),
            };
            let params = json!({ "nqn": nqn, "allow_any_host": is_any });
            done(ask("nvmf_subsystem_allow_any_host", params), format!("{who} may connect to {nqn}"))
        }
    }
}

fn listener(verb: &ListenerVerb, ask: Ask<'_>) -> Answer {
    match verb {
        ListenerVerb::List { nqn } => {
            shown(ask("nvmf_subsystem_get_listeners", json!({ "nqn": nqn })), show::listeners)
        }
        ListenerVerb::Add { nqn, address: at } => {
            let params = json!({ "nqn": nqn, "listen_address": address(at) });
            done(ask("nvmf_subsystem_add_listener", params), format!("added listener {at} to {nqn}"))
        }
        ListenerVerb::Remove { nqn, address: at } => {
            let params = json!({ "nqn": nqn, "listen_address": address(at) });
            done(ask("nvmf_subsystem_remove_listener", params), format!("removed listener {at} from {nqn}"))
        }
    }
}

fn namespace(verb: &NamespaceVerb, ask: Ask<'_>) -> Answer {
    match verb {
        NamespaceVerb::List { nqn } => {
            shown(ask("nvmf_get_subsystems", json!({ "nqn": nqn })), show::namespaces)
        }
        NamespaceVerb::Add { nqn, disk, nsid, uuid } => {
            let namespace = given(json!({ "bdev_name": disk, "nsid": nsid, "uuid": uuid }));
            let params = json!({ "nqn": nqn, "namespace": namespace });
            shown(ask("nvmf_subsystem_add_ns", params), |nsid| {
                format!("added namespace {nsid}, disk {disk}, to {nqn}")
            })
        }
        NamespaceVerb::Remove { nqn, nsid } => {
            let params = json!({ "nqn": nqn, "nsid": nsid });
            done(ask("nvmf_subsystem_remove_ns", params), format!("removed namespace {nsid} from {nqn}"))
        }
    }
}
