//! `framework_get_config`: the method calls that create the current disks (`bdev`), or the current
//! transports, subsystems and referrals (`nvmf`), without settings that these methods lack. No method of
//! Spindle creates `ng` disks: they are listed with SPDK's method for such a device.

use serde_json::{Value, json};
use spindle_target::snapshot::AllowedHosts;
use uuid::Uuid;

use super::Failure;
use super::params::Args;
use super::reads::{address, trtype};
use crate::config::{DiskKind, DiskPlan, Plan, SubsystemPlan};
use crate::serve::view::Look;

pub fn config(look: &Look<'_>, args: &Args) -> Result<Value, Failure> {
    let calls = match args.text("name").map(str::to_ascii_lowercase).as_deref() {
        Some("bdev") => look.plan.disks.iter().map(|it| disk(it)).collect(),
        _ => nvmf(look),
    };
    Ok(Value::Array(calls))
}

fn call(method: &str, params: Value) -> Value {
    json!({ "method": method, "params": params })
}

/// Returns the controller name of a disk: its name without the suffix `nNSID` that
/// `bdev_nvme_attach_controller` appends. Returns the whole name without that suffix.
fn controller(disk: &DiskPlan, namespace: u32) -> &str {
    disk.name.strip_suffix(&format!("n{namespace}")).unwrap_or(&disk.name)
}

fn disk(disk: &DiskPlan) -> Value {
    let (name, block_bytes) = (&disk.name, disk.block_bytes);
    let blocks = disk.bytes / u64::from(block_bytes.max(1));
    let sized = || json!({ "name": name, "num_blocks": blocks, "block_size": block_bytes });
    match &disk.kind {
        DiskKind::Ram { .. } => call("bdev_malloc_create", sized()),
        DiskKind::Null => call("bdev_null_create", sized()),
        DiskKind::File { path, is_read_only, .. } => call(
            "bdev_aio_create",
            json!({ "name": name, "filename": path, "block_size": block_bytes, "readonly": is_read_only }),
        ),
        DiskKind::Ng { path, .. } => {
            let mechanism = "io_uring_cmd";
            call("bdev_xnvme_create", json!({ "name": name, "filename": path, "io_mechanism": mechanism }))
        }
        DiskKind::Nvme { address, namespace } => call(
            "bdev_nvme_attach_controller",
            json!({
                "name": controller(disk, *namespace), "trtype": "pcie",
                "traddr": address.to_string(), "namespace": namespace,
            }),
        ),
        DiskKind::Remote { target, namespace, .. } => {
            let mut params = address(target.transport, target.address);
            params["name"] = json!(controller(disk, *namespace));
            params["subnqn"] = json!(target.nqn.to_string());
            params["hostnqn"] = json!(target.host.nqn.to_string());
            params["namespace"] = json!(namespace);
            call("bdev_nvme_attach_controller", params)
        }
    }
}

fn nvmf(look: &Look<'_>) -> Vec<Value> {
    let (plan, transports) = (&look.plan, look.view.transports());
    let mut calls: Vec<_> =
        transports.map(|kind| call("nvmf_create_transport", json!({ "trtype": trtype(kind) }))).collect();
    plan.subsystems.iter().for_each(|subsystem| subsystem_calls(plan, subsystem, &mut calls));
    let referrals = plan.referrals.iter().map(|referral| address(referral.transport, referral.address));
    calls.extend(referrals.map(|it| call("nvmf_discovery_add_referral", json!({ "address": it }))));
    calls
}

fn subsystem_calls(plan: &Plan, subsystem: &SubsystemPlan, calls: &mut Vec<Value>) {
    let nqn = subsystem.nqn.to_string();
    calls.push(call(
        "nvmf_create_subsystem",
        json!({
            "nqn": nqn,
            "serial_number": subsystem.serial,
            "model_number": subsystem.model,
            "allow_any_host": subsystem.hosts == AllowedHosts::Any,
            "min_cntlid": subsystem.cntlid_range.0,
            "max_cntlid": subsystem.cntlid_range.1,
        }),
    ));
    if let AllowedHosts::Only(hosts) = &subsystem.hosts {
        let hosts = hosts.iter().map(|host| json!({ "nqn": nqn, "host": host.to_string() }));
        calls.extend(hosts.map(|params| call("nvmf_subsystem_add_host", params)));
    }
    for namespace in &subsystem.namespaces {
        let uuid = namespace.uuid.map(|it| Uuid::from_bytes(it).to_string());
        let nguid = namespace.nguid.map(|it| Uuid::from_bytes(it).simple().to_string());
        let mut inner = json!({ "bdev_name": namespace.disk, "nsid": namespace.nsid });
        for (name, identity) in [("uuid", uuid), ("nguid", nguid)] {
            if let Some(identity) = identity {
                inner[name] = identity.into();
            }
        }
        calls.push(call("nvmf_subsystem_add_ns", json!({ "nqn": nqn, "namespace": inner })));
    }
    for listener in plan.listeners_of(subsystem) {
        let at = address(listener.transport, listener.address);
        calls.push(call("nvmf_subsystem_add_listener", json!({ "nqn": nqn, "listen_address": at })));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DiskMedium;

    /// `bdev_aio_create` would make a disk of another kind of it.
    #[test]
    fn an_ng_disk_is_listed_as_the_device_that_it_is() {
        let plan = DiskPlan {
            name: "drive0".to_owned(),
            block_bytes: 0,
            bytes: 0,
            kind: DiskKind::Ng { path: "/dev/ng0n1".into(), is_read_only: false },
            medium: DiskMedium::default(),
            medium_id: None,
            cache: None,
            delay: None,
            cluster: None,
        };
        let params = json!({ "name": "drive0", "filename": "/dev/ng0n1", "io_mechanism": "io_uring_cmd" });
        assert_eq!(disk(&plan), json!({ "method": "bdev_xnvme_create", "params": params }));
    }
}
