//! Methods that make, grow and remove disks.

use serde_json::{Value, json};
use spindle_transport::TransportKind;
use toml_edit::{Item, Table, value};

use super::Failure;
use super::edit::{Edit, number, refuse_name, sections, set, text, transport_of};
use super::params::Args;
use crate::config::DiskKind;
use crate::size::Bytes;

type Answer = Result<Value, Failure>;

const MIB: u64 = 1 << 20;

/// A section for a disk of a new name.
fn disk(edit: &Edit<'_>, args: &Args, name: &str, kind: &str) -> Result<Table, Failure> {
    if edit.plan.disk(name).is_some() {
        return Err(args.refuse("name", format!("there is a disk {name:?}")));
    }
    let mut table = Table::new();
    table["name"] = value(name);
    table["kind"] = value(kind);
    Ok(table)
}

/// A size as people write it.
fn size_text(bytes: u64) -> Item {
    value(Bytes::new(bytes).to_string().replace(' ', ""))
}

/// `num_blocks` blocks of `block_size` bytes.
fn size(args: &Args, table: &mut Table) -> Result<(), Failure> {
    let (blocks, block_bytes) =
        (args.whole("num_blocks").unwrap_or(0), args.whole("block_size").unwrap_or(0));
    let Some(bytes) = blocks.checked_mul(block_bytes).filter(|bytes| i64::try_from(*bytes).is_ok()) else {
        return Err(args.refuse("num_blocks", "must be less than 2^63 bytes in all"));
    };
    table["size"] = size_text(bytes);
    table["block_bytes"] = number(block_bytes);
    Ok(())
}

pub fn create_malloc(edit: &mut Edit<'_>, args: &Args) -> Answer {
    let free = || (0..).map(|at| format!("Malloc{at}")).find(|name| edit.plan.disk(name).is_none());
    let name = args.text("name").map(str::to_owned).or_else(free).unwrap_or_default();
    let mut table = disk(edit, args, &name, "ram")?;
    size(args, &mut table)?;
    edit.sections("disk").push(table);
    Ok(json!(name))
}

pub fn create_null(edit: &mut Edit<'_>, args: &Args) -> Answer {
    let name = args.text("name").unwrap_or_default();
    let mut table = disk(edit, args, name, "null")?;
    size(args, &mut table)?;
    edit.sections("disk").push(table);
    Ok(json!(name))
}

/// A file or a block device.
pub fn create_file(edit: &mut Edit<'_>, args: &Args) -> Answer {
    let name = args.text("name").unwrap_or_default();
    let mut table = disk(edit, args, name, "file")?;
    table["path"] = value(args.text("filename").unwrap_or_default());
    if let Some(block_bytes) = args.whole("block_size").filter(|bytes| *bytes > 0) {
        table["block_bytes"] = number(block_bytes);
    }
    if args.flag("readonly") {
        table["read_only"] = value(true);
    }
    edit.sections("disk").push(table);
    Ok(json!(name))
}

/// The disk that a call names, if it is of one of these kinds.
fn named(edit: &Edit<'_>, args: &Args, kinds: &[&str]) -> Result<String, Failure> {
    let name = args.text("name").unwrap_or_default();
    match edit.plan.disk(name) {
        Some(disk) if kinds.contains(&disk.kind.name()) => Ok(name.to_owned()),
        Some(disk) => {
            let kind = disk.kind.name();
            Err(args.refuse("name", format!("is a disk of kind {kind}; this method is for others")))
        }
        None => {
            let names: Vec<_> = edit.plan.disks.iter().map(|disk| disk.name.clone()).collect();
            Err(refuse_name(args, "name", "disk", &names))
        }
    }
}

/// Take disks out, and the namespaces that show them, as SPDK does.
fn remove(edit: &mut Edit<'_>, names: &[String]) {
    let is_gone =
        |table: &Table, key: &str| text(table, key).is_some_and(|name| names.iter().any(|gone| gone == name));
    edit.sections("disk").retain(|table| !is_gone(table, "name"));
    for subsystem in edit.sections("subsystem").iter_mut() {
        if subsystem.contains_key("namespace") {
            sections(subsystem, "namespace").retain(|table| !is_gone(table, "disk"));
        }
    }
}

fn delete(edit: &mut Edit<'_>, args: &Args, kinds: &[&str]) -> Answer {
    let name = named(edit, args, kinds)?;
    remove(edit, &[name]);
    Ok(json!(true))
}

pub fn delete_malloc(edit: &mut Edit<'_>, args: &Args) -> Answer {
    delete(edit, args, &["ram"])
}

pub fn delete_null(edit: &mut Edit<'_>, args: &Args) -> Answer {
    delete(edit, args, &["null"])
}

pub fn delete_file(edit: &mut Edit<'_>, args: &Args) -> Answer {
    delete(edit, args, &["file"])
}

fn resize(edit: &mut Edit<'_>, args: &Args, kinds: &[&str]) -> Answer {
    let name = named(edit, args, kinds)?;
    let bytes = args.whole("new_size").unwrap_or(0).saturating_mul(MIB);
    let is_it = |table: &&mut Table| text(table, "name") == Some(&name);
    if let Some(table) = edit.sections("disk").iter_mut().find(is_it) {
        set(table, "size", size_text(bytes));
    }
    Ok(json!(true))
}

pub fn resize_malloc(edit: &mut Edit<'_>, args: &Args) -> Answer {
    resize(edit, args, &["ram"])
}

pub fn resize_null(edit: &mut Edit<'_>, args: &Args) -> Answer {
    resize(edit, args, &["null"])
}

pub fn resize_file(edit: &mut Edit<'_>, args: &Args) -> Answer {
    resize(edit, args, &["file"])
}

/// A drive by its PCI address, or a subsystem of another target: its first namespace, or the one that is
/// asked for.
pub fn attach(edit: &mut Edit<'_>, args: &Args) -> Answer {
    let (controller, nsid) = (args.text("name").unwrap_or_default(), args.whole("namespace").unwrap_or(1));
    let name = format!("{controller}n{nsid}");
    let table = match transport_of(args) {
        None => {
            let mut table = disk(edit, args, &name, "nvme")?;
            table["nvme"] = value(args.text("traddr").unwrap_or_default());
            table
        }
        Some(transport) => {
            let Some(subnqn) = args.text("subnqn") else {
                return Err(args.refuse("subnqn", "must be given: the subsystem of the other target"));
            };
            let mut table = disk(edit, args, &name, "remote")?;
            table["address"] = value(args.address(4420)?.to_string());
            if transport == TransportKind::Rdma {
                table["transport"] = value("rdma");
            }
            table["nqn"] = value(subnqn);
            if let Some(host) = args.text("hostnqn") {
                table["host_nqn"] = value(host);
            }
            table
        }
    };
    let mut table = table;
    if nsid != 1 {
        table["namespace"] = number(nsid);
    }
    edit.sections("disk").push(table);
    Ok(json!([name]))
}

pub fn detach(edit: &mut Edit<'_>, args: &Args) -> Answer {
    let controller = args.text("name").unwrap_or_default();
    let is_its = |name: &str| {
        let nsid = name.strip_prefix(controller).and_then(|rest| rest.strip_prefix('n'));
        nsid.is_some_and(|nsid| !nsid.is_empty() && nsid.bytes().all(|digit| digit.is_ascii_digit()))
    };
    let is_attached = |kind: &DiskKind| matches!(kind, DiskKind::Nvme { .. } | DiskKind::Remote { .. });
    let disks = edit.plan.disks.iter().filter(|disk| is_attached(&disk.kind) && is_its(&disk.name));
    let names: Vec<String> = disks.map(|disk| disk.name.clone()).collect();
    if names.is_empty() {
        return Err(args.refuse("name", "there is no disk NAMEn1 of a drive or of another target"));
    }
    remove(edit, &names);
    Ok(json!(true))
}
