//! The method calls of `disk` verbs. Resize and remove first read the disk's kind, which decides the method.

use std::fmt::{Debug, Display};

use serde_json::{Value, json};

use super::verbs::{address, confirmed, with_text, without_nulls};
use super::{CtlError, Output, Rpc, show};
use crate::cli::{DiskVerb, MemoryDisk, NewDisk};
use crate::rpc::client::CallError;
use crate::rpc::controller_of;
use crate::size::Bytes;

const MIB: u64 = 1 << 20;
/// Remedy if no method does what a verb requires.
const EDIT_FILE_HINT: &str = "edit the configuration file and send SIGHUP";

pub fn answer(verb: &DiskVerb, rpc: Rpc<'_>) -> Output {
    match verb {
        DiskVerb::List => with_text(rpc("bdev_get_bdevs", json!({})), show::disks),
        DiskVerb::Add(disk) => add(disk, rpc),
        DiskVerb::Resize { name, size } => resize(name, *size, rpc),
        DiskVerb::Cache { name, size, policy, mode, read_ahead, sole_writer } => {
            let params = json!({
                "name": name, "size": size.get(), "policy": policy, "mode": mode,
                "read_ahead": read_ahead.map(Bytes::get), "sole_writer": sole_writer.then_some(true),
            });
            cache(name, *size, params, rpc)
        }
        DiskVerb::Remove { name } => remove(name, rpc),
    }
}

fn argument_error(field: &str, value: impl Debug, allowed: impl Display) -> CtlError {
    CtlError::Argument(format!("{field} = {value:?}: {allowed}"))
}

fn size_error(size: Bytes, allowed: String) -> CtlError {
    argument_error("SIZE", size.to_string(), allowed)
}

fn add(disk: &NewDisk, rpc: Rpc<'_>) -> Output {
    let (method, params) = match disk {
        NewDisk::Ram(disk) => ("bdev_malloc_create", memory(disk)?),
        NewDisk::Null(disk) => ("bdev_null_create", memory(disk)?),
        NewDisk::File { name, path, block_size, read_only } => {
            // The target may have another working directory.
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            let path = path.to_str().ok_or_else(|| {
                let shown = path.display().to_string();
                argument_error("PATH", shown, "must be UTF-8, as the configuration is".to_owned())
            })?;
            let block_size = block_size.map(Bytes::get);
            let params = json!({
                "name": name, "filename": path, "block_size": block_size, "readonly": read_only,
            });
            ("bdev_aio_create", without_nulls(params))
        }
        NewDisk::Nvme { name, address, namespace } => {
            let params = json!({
                "name": name, "trtype": "pcie", "traddr": address.to_string(), "namespace": namespace,
            });
            ("bdev_nvme_attach_controller", without_nulls(params))
        }
        NewDisk::Remote { name, address: at, nqn, namespace, hostnqn } => {
            let mut params = address(at);
            params["name"] = json!(name);
            params["subnqn"] = json!(nqn);
            params["namespace"] = json!(namespace);
            params["hostnqn"] = json!(hostnqn);
            ("bdev_nvme_attach_controller", without_nulls(params))
        }
        NewDisk::Ng { .. } => {
            return Err(argument_error("kind", "ng", format!("no method adds it; {EDIT_FILE_HINT}")));
        }
    };
    with_text(rpc(method, params), |name| {
        let name = name.get(0).unwrap_or(name).as_str().unwrap_or_default();
        format!("added disk {name}")
    })
}

fn memory(MemoryDisk { name, size, block_size }: &MemoryDisk) -> Result<Value, CtlError> {
    let (bytes, block) = (size.get(), block_size.get());
    if block == 0 {
        return Err(argument_error("--block-size", block_size.to_string(), "must be 512 or 4096"));
    }
    if bytes == 0 || !bytes.is_multiple_of(block) {
        return Err(size_error(
            *size,
            format!("must be a multiple of the block size, {block_size}, and not 0"),
        ));
    }
    Ok(json!({ "name": name, "num_blocks": bytes / block, "block_size": block }))
}

/// Returns the kind of an open disk; an error for a disk that is not open.
fn kind_of(name: &str, rpc: Rpc<'_>) -> Result<String, CallError> {
    let disks = rpc("bdev_get_bdevs", json!({ "name": name }))?;
    let kind = disks[0]["driver_specific"]["spindle"]["kind"].as_str();
    Ok(kind.unwrap_or("unknown").to_owned())
}

fn resize(name: &str, size: Bytes, rpc: Rpc<'_>) -> Output {
    if size.get() == 0 || !size.get().is_multiple_of(MIB) {
        return Err(size_error(size, "must be whole MiB, and not 0".to_owned()));
    }
    let kind = kind_of(name, rpc)?;
    let method = match kind.as_str() {
        "ram" => "bdev_malloc_resize",
        "null" => "bdev_null_resize",
        "file" => "spindle_file_resize",
        kind => {
            return Err(argument_error("NAME", name, format!("no method resizes a disk of kind {kind}")));
        }
    };
    let params = json!({ "name": name, "new_size": size.get() / MIB });
    confirmed(rpc(method, params), format!("resized disk {name} to {size}"))
}

fn cache(name: &str, size: Bytes, params: Value, rpc: Rpc<'_>) -> Output {
    let said = match size.get() {
        0 => format!("disk {name} has no cache"),
        _ => format!("disk {name} has a cache of {size}"),
    };
    confirmed(rpc("spindle_disk_cache", without_nulls(params)), said)
}

fn remove(name: &str, rpc: Rpc<'_>) -> Output {
    const DETACH: &str = "bdev_nvme_detach_controller";
    let (method, own) = match kind_of(name, rpc) {
        Ok(kind) => match kind.as_str() {
            "ram" => ("bdev_malloc_delete", name),
            "null" => ("bdev_null_delete", name),
            "file" => ("bdev_aio_delete", name),
            "nvme" | "remote" => (DETACH, controller(name, &attached_disks(rpc)?)?),
            kind => {
                let allowed = format!("no method removes a disk of kind {kind}; {EDIT_FILE_HINT}");
                return Err(argument_error("NAME", name, allowed));
            }
        },
        // A disk whose drive or far target is absent is not open, so `bdev_get_bdevs` does not list it.
        Err(CallError::Refused(reason)) => {
            let attached = attached_disks(rpc)?;
            if !attached.iter().any(|it| it == name) {
                return Err(CallError::Refused(reason).into());
            }
            (DETACH, controller(name, &attached)?)
        }
        Err(error) => return Err(error.into()),
    };
    confirmed(rpc(method, json!({ "name": own })), format!("removed disk {name}"))
}

/// Returns the names of `nvme` and `remote` disks, open or not.
fn attached_disks(rpc: Rpc<'_>) -> Result<Vec<String>, CallError> {
    let status = rpc("spindle_get_status", json!({}))?;
    let disks = status["disks"].as_array().map(Vec::as_slice).unwrap_or_default().iter();
    let attached = disks.filter(|disk| disk["kind"] == "nvme" || disk["kind"] == "remote");
    Ok(attached.filter_map(|disk| disk["name"].as_str().map(str::to_owned)).collect())
}

/// Returns the controller name for `bdev_nvme_detach_controller`. An error if `name` is not like `NAMEn1`, or
/// if the call would also remove another disk.
fn controller<'a>(name: &'a str, attached: &[String]) -> Result<&'a str, CtlError> {
    let Some(controller) = controller_of(name) else {
        let allowed = format!("no method removes a drive that is not named like NAMEn1; {EDIT_FILE_HINT}");
        return Err(argument_error("NAME", name, allowed));
    };
    match attached.iter().find(|other| *other != name && controller_of(other) == Some(controller)) {
        Some(other) => {
            let allowed =
                format!("bdev_nvme_detach_controller --name {controller} removes it together with {other}");
            Err(argument_error("NAME", name, allowed))
        }
        None => Ok(controller),
    }
}
