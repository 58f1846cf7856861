//! The method calls of each verb.

use serde_json::{Value, json};

use super::{Output, Rpc, disks, show};
use crate::cli::{Endpoint, HostVerb, ListenerVerb, NamespaceVerb, SubsystemVerb, Switch, Verb};
use crate::rpc::client::CallError;

pub fn answer(verb: &Verb, rpc: Rpc<'_>) -> Output {
    match verb {
        Verb::Connections => connections(rpc),
        Verb::Cache { hosts: false } => with_text(rpc("bdev_get_iostat", json!({})), show::caches),
        Verb::Cache { hosts: true } => {
            with_text(rpc("bdev_get_iostat", json!({ "by_host": true })), show::caches_by_host)
        }
        Verb::Subsystem(verb) => subsystem(verb, rpc),
        Verb::Host(verb) => host(verb, rpc),
        Verb::Listener(verb) => listener(verb, rpc),
        Verb::Namespace(verb) => namespace(verb, rpc),
        Verb::Disk(verb) => disks::answer(verb, rpc),
        Verb::Log { level: None } => with_text(rpc("log_get_level", json!({})), |level| {
            level.as_str().unwrap_or_default().to_ascii_lowercase()
        }),
        Verb::Log { level: Some(level) } => {
            let level = level.to_ascii_lowercase();
            confirmed(
                rpc("log_set_level", json!({ "level": level })),
                format!("the level of the log is {level}"),
            )
        }
    }
}

/// Returns a method's result with its text form.
pub fn with_text(result: Result<Value, CallError>, text: impl FnOnce(&Value) -> String) -> Output {
    let result = result?;
    let text = text(&result);
    Ok((result, text))
}

/// Returns the result of a change, with `text` as confirmation.
pub fn confirmed(result: Result<Value, CallError>, text: String) -> Output {
    with_text(result, |_| text)
}

/// Removes the parameters that are null.
pub fn without_nulls(mut params: Value) -> Value {
    if let Value::Object(params) = &mut params {
        params.retain(|_, value| !value.is_null());
    }
    params
}

/// Returns the address parameters (`trtype`, `traddr`, `trsvcid`) of an endpoint.
pub fn address(endpoint: &Endpoint) -> Value {
    json!({
        "trtype": endpoint.transport.to_string(),
        "traddr": endpoint.address.ip().to_string(),
        "trsvcid": endpoint.address.port().to_string(),
    })
}

/// Lists the connected controllers, each with its queue pairs.
fn connections(rpc: Rpc<'_>) -> Output {
    let mut status = rpc("spindle_get_status", json!({}))?;
    let mut controllers = status["controllers"].take();
    // Controllers are sorted by subsystem, so one call per subsystem is enough.
    let mut of_subsystem = (Value::Null, Vec::new());
    for controller in controllers.as_array_mut().into_iter().flatten() {
        if of_subsystem.0 != controller["subsystem"] {
            let nqn = controller["subsystem"].clone();
            let qpairs = match rpc("nvmf_subsystem_get_qpairs", json!({ "nqn": nqn })) {
                Ok(Value::Array(qpairs)) => qpairs,
                // The subsystem was removed meanwhile.
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

fn subsystem(verb: &SubsystemVerb, rpc: Rpc<'_>) -> Output {
    match verb {
        SubsystemVerb::List => with_text(rpc("nvmf_get_subsystems", json!({})), show::subsystems),
        SubsystemVerb::Add { nqn, serial, model, any_host } => {
            let params = without_nulls(json!({
                "nqn": nqn, "serial_number": serial, "model_number": model, "allow_any_host": any_host,
            }));
            confirmed(rpc("nvmf_create_subsystem", params), format!("added subsystem {nqn}"))
        }
        SubsystemVerb::Remove { nqn } => {
            confirmed(rpc("nvmf_delete_subsystem", json!({ "nqn": nqn })), format!("removed subsystem {nqn}"))
        }
    }
}

fn host(verb: &HostVerb, rpc: Rpc<'_>) -> Output {
    match verb {
        HostVerb::List { nqn } => with_text(rpc("nvmf_get_subsystems", json!({ "nqn": nqn })), show::hosts),
        HostVerb::Add { nqn, host } => {
            let params = json!({ "nqn": nqn, "host": host });
            confirmed(rpc("nvmf_subsystem_add_host", params), format!("added host {host} to {nqn}"))
        }
        HostVerb::Remove { nqn, host } => {
            let params = json!({ "nqn": nqn, "host": host });
            confirmed(rpc("nvmf_subsystem_remove_host", params), format!("removed host {host} from {nqn}"))
        }
        HostVerb::Any { nqn, switch, hosts } => {
            let (is_any, who) = match switch {
                Switch::On => (true, "every host"),
                Switch::Off => (false, "only hosts of its list"),
            };
            let mut params = json!({ "nqn": nqn, "allow_any_host": is_any });
            if !hosts.is_empty() {
                params["hosts"] = json!(hosts);
            }
            confirmed(rpc("nvmf_subsystem_allow_any_host", params), format!("{who} may connect to {nqn}"))
        }
    }
}

fn listener(verb: &ListenerVerb, rpc: Rpc<'_>) -> Output {
    match verb {
        ListenerVerb::List { nqn } => {
            with_text(rpc("nvmf_subsystem_get_listeners", json!({ "nqn": nqn })), show::listeners)
        }
        ListenerVerb::Add { nqn, address: at } => {
            let params = json!({ "nqn": nqn, "listen_address": address(at) });
            confirmed(rpc("nvmf_subsystem_add_listener", params), format!("added listener {at} to {nqn}"))
        }
        ListenerVerb::Remove { nqn, address: at } => {
            let params = json!({ "nqn": nqn, "listen_address": address(at) });
            confirmed(
                rpc("nvmf_subsystem_remove_listener", params),
                format!("removed listener {at} from {nqn}"),
            )
        }
    }
}

fn namespace(verb: &NamespaceVerb, rpc: Rpc<'_>) -> Output {
    match verb {
        NamespaceVerb::List { nqn } => {
            with_text(rpc("nvmf_get_subsystems", json!({ "nqn": nqn })), show::namespaces)
        }
        NamespaceVerb::Add { nqn, disk, nsid, uuid } => {
            let namespace = without_nulls(json!({ "bdev_name": disk, "nsid": nsid, "uuid": uuid }));
            let params = json!({ "nqn": nqn, "namespace": namespace });
            with_text(rpc("nvmf_subsystem_add_ns", params), |nsid| {
                format!("added namespace {nsid}, disk {disk}, to {nqn}")
            })
        }
        NamespaceVerb::Remove { nqn, nsid } => {
            let params = json!({ "nqn": nqn, "nsid": nsid });
            confirmed(rpc("nvmf_subsystem_remove_ns", params), format!("removed namespace {nsid} from {nqn}"))
        }
    }
}
