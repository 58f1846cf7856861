//! Which method a verb of disks calls: it depends on the kind of the disk, which is asked for first.

use std::fmt::{Debug, Display};

use serde_json::{Value, json};

use super::verbs::{address, done, given, shown};
use super::{Answer, Ask, CtlError, show};
use crate::cli::{DiskVerb, MemoryDisk, NewDisk};
use crate::rpc::client::CallError;
use crate::rpc::controller_of;
use crate::size::Bytes;

const MIB: u64 = 1 << 20;
/// What can be done where no method can.
const BY_FILE: &str = "change the configuration file and have it read again by SIGHUP";

pub fn answer(verb: &DiskVerb, ask: Ask<'_>) -> Answer {
    match verb {
        DiskVerb::List => shown(ask("bdev_get_bdevs", json!({})), show::disks),
        DiskVerb::Add(disk) => add(disk, ask),
        DiskVerb::Resize { name, size } => resize(name, *size, ask),
        DiskVerb::Cache { name, size, policy, mode, read_ahead, sole_writer } => {
            let params = json!({
                "name": name, "size": size.get(), "policy": policy, "mode": mode,
                "read_ahead": read_ahead.map(Bytes::get), "sole_writer": sole_writer.then_some(true),
            });
            cache(name, *size, params, ask)
        }
        DiskVerb::Remove { name } => remove(name, ask),
    }
}

fn wrong(field: &str, value: impl Debug, allowed: impl Display) -> CtlError {
    CtlError::Given(format!("{field} = {value:?}: {allowed}"))
}

/// A size that is no multiple of what it must be.
fn odd(size: Bytes, allowed: String) -> CtlError {
    wrong("SIZE", size.to_string(), allowed)
}

fn add(disk: &NewDisk, ask: Ask<'_>) -> Answer {
    let (method, params) = match disk {
        NewDisk::Ram(disk) => ("bdev_malloc_create", memory(disk)?),
        NewDisk::Null(disk) => ("bdev_null_create", memory(disk)?),
        NewDisk::File { name, path, block_size, read_only } => {
            // The target has another working directory.
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            let path = path.to_str().ok_or_else(|| {
                let shown = path.display().to_string();
                wrong("PATH", shown, "must be UTF-8, as the configuration is".to_owned())
            })?;
            let block_size = block_size.map(Bytes::get);
            let params = json!({
                "name": name, "filename": path, "block_size": block_size, "readonly": read_only,
            });
            ("bdev_aio_create", given(params))
        }
        NewDisk::Nvme { name, address, namespace } => {
            let params = json!({
                "name": name, "trtype": "pcie", "traddr": address.to_string(), "namespace": namespace,
            });
            ("bdev_nvme_attach_controller", given(params))
        }
        NewDisk::Remote { name, address: at, nqn, namespace, hostnqn } => {
            let mut params = address(at);
            params["name"] = json!(name);
            params["subnqn"] = json!(nqn);
            params["namespace"] = json!(namespace);
            params["hostnqn"] = json!(hostnqn);
            ("bdev_nvme_attach_controller", given(params))
        }
        NewDisk::Ng { .. } => return Err(wrong("kind", "ng", format!("no method adds it; {BY_FILE}"))),
    };
    shown(ask(method, params), |name| {
        let name = name.get(0).unwrap_or(name).as_str().unwrap_or_default();
        format!("added disk {name}")
    })
}

fn memory(MemoryDisk { name, size, block_size }: &MemoryDisk) -> Result<Value, CtlError> {
    let (bytes, block) = (size.get(), block_size.get());
    if block == 0 {
        return Err(wrong("--block-size", block_size.to_string(), "must be 512 or 4096"));
    }
    if bytes == 0 || !bytes.is_multiple_of(block) {
        return Err(odd(*size, format!("must be a multiple of the block size, {block_size}, and not 0")));
    }
    Ok(json!({ "name": name, "num_blocks": bytes / block, "block_size": block }))
}

/// The kind of a disk that is open.
fn kind_of(name: &str, ask: Ask<'_>) -> Result<String, CallError> {
    let disks = ask("bdev_get_bdevs", json!({ "name": name }))?;
    let kind = disks[0]["driver_specific"]["spindle"]["kind"].as_str();
    Ok(kind.unwrap_or("unknown").to_owned())
}

fn resize(name: &str, size: Bytes, ask: Ask<'_>) -> Answer {
    if size.get() == 0 || !size.get().is_multiple_of(MIB) {
        return Err(odd(size, "must be whole MiB, and not 0".to_owned()));
    }
    let kind = kind_of(name, ask)?;
    let method = match kind.as_str() {
        "ram" => "bdev_malloc_resize",
        "null" => "bdev_null_resize",
        "file" => "spindle_file_resize",
        kind => {
            return Err(wrong("NAME", name, format!("no method resizes a disk of kind {kind}")));
        }
    };
    let params = json!({ "name": name, "new_size": size.get() / MIB });
    done(ask(method, params), format!("resized disk {name} to {size}"))
}

fn cache(name: &str, size: Bytes, params: Value, ask: Ask<'_>) -> Answer {
    let said = match size.get() {
        0 => format!("disk {name} has no cache"),
        _ => format!("disk {name} has a cache of {size}"),
    };
    done(ask("spindle_disk_cache", given(params)), said)
}

fn remove(name: &str, ask: Ask<'_>) -> Answer {
    const DETACH: &str = "bdev_nvme_detach_controller";
    let (method, own) = match kind_of(name, ask) {
        Ok(kind) => match kind.as_str() {
            "ram" => ("bdev_malloc_delete", name),
            "null" => ("bdev_null_delete", name),
            "file" => ("bdev_aio_delete", name),
            "nvme" | "remote" => (DETACH, controller(name, &attached(ask)?)?),
            kind => {
                let allowed = format!("no method removes a disk of kind {kind}; {BY_FILE}");
                return Err(wrong("NAME", name, allowed));
            }
        },
        // The drive or the other target may be absent: then the disk is not open.
        Err(CallError::Refused(reason)) => {
            let attached = attached(ask)?;
            if !attached.iter().any(|it| it == name) {
                return Err(CallError::Refused(reason).into());
            }
            (DETACH, controller(name, &attached)?)
        }
        Err(error) => return Err(error.into()),
    };
    done(ask(method, json!({ "name": own })), format!("removed disk {name}"))
}

/// Names of disks of drives and other targets, open or not.
fn attached(ask: Ask<'_>) -> Result<Vec<String>, CallError> {
    let status = ask("spindle_get_status", json!({}))?;
    let disks = status["disks"].as_array().map(Vec::as_slice).unwrap_or_default().iter();
    let attached = disks.filter(|disk| disk["kind"] == "nvme" || disk["kind"] == "remote");
    Ok(attached.filter_map(|disk| disk["name"].as_str().map(str::to_owned)).collect())
}

/// What is detached to remove a disk, if no other disk goes with it.
fn controller<'a>(name: &'a str, attached: &[String]) -> Result<&'a str, CtlError> {
    let Some(controller) = controller_of(name) else {
        let allowed = format!("no method removes a drive that is not named like NAMEn1; {BY_FILE}");
        return Err(wrong("NAME", name, allowed));
    };
    match attached.iter().find(|other| *other != name && controller_of(other) == Some(controller)) {
        Some(other) => {
            let allowed = format!("{other} goes with it by bdev_nvme_detach_controller --name {controller}");
            Err(wrong("NAME", name, allowed))
        }
        None => Ok(controller),
    }
}
