//! Methods that add, resize and remove disks and caches, and attach and detach drives and far namespaces.

use serde_json::{Value, json};
use spindle_nvme_transport::TransportKind;
use toml_edit::{Item, Table, value};

use super::Failure;
use super::edit::{Edit, LIST_DISKS, copy_params, integer_item, transport_of, unknown_name};
use super::params::Args;
use crate::config::comments;
use crate::config::{DiskKind, Section, SectionKind};
use crate::size::Bytes;

type MethodResult = Result<Value, Failure>;

const MIB: u64 = 1 << 20;

/// Returns a new `[[disk]]` section, not added yet; an error if there is a disk of this name.
fn disk(edit: &Edit<'_>, args: &Args, name: &str, kind: &str) -> Result<Table, Failure> {
    if edit.plan.disk(name).is_some() {
        return Err(args.refuse("name", format!("there is a disk {name:?}; it must be a new name")));
    }
    let mut table = Table::new();
    table["name"] = value(name);
    table["kind"] = value(kind);
    Ok(table)
}

/// Formats a size with a unit and without a space, like `64MiB`.
fn size_text(bytes: u64) -> Item {
    value(Bytes::new(bytes).to_string().replace(' ', ""))
}

/// Sets `size` and `block_bytes` from `num_blocks` and `block_size`; an error for 2^63 bytes or more.
fn set_size(args: &Args, table: &mut Table) -> Result<(), Failure> {
    let (blocks, block_bytes) =
        (args.whole("num_blocks").unwrap_or(0), args.whole("block_size").unwrap_or(0));
    let Some(bytes) = blocks.checked_mul(block_bytes).filter(|bytes| i64::try_from(*bytes).is_ok()) else {
        let allowed = "must be less than 2^63 bytes in all, num_blocks times block_size";
        return Err(args.refuse("num_blocks", allowed));
    };
    table["size"] = size_text(bytes);
    table["block_bytes"] = integer_item(block_bytes);
    Ok(())
}

/// Adds a disk of `kind`, `ram` or `null`. Without the parameter `name` the disk has the first free name of
/// `Malloc0`, `Malloc1` and so on.
pub fn create(edit: &mut Edit<'_>, args: &Args, kind: &str) -> MethodResult {
    let free = || {
        let names = edit.plan.disks_by_name();
        (0..).map(|at| format!("Malloc{at}")).find(|name| !names.contains_key(name.as_str()))
    };
    let name = args.text("name").map(str::to_owned).or_else(free).unwrap_or_default();
    let mut table = disk(edit, args, &name, kind)?;
    set_size(args, &mut table)?;
    edit.sections.push("disk", table);
    Ok(json!(name))
}

/// Adds a `file` disk.
pub fn create_file(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    let name = args.text("name").unwrap_or_default();
    let mut table = disk(edit, args, name, "file")?;
    table["path"] = value(args.text("filename").unwrap_or_default());
    if let Some(block_bytes) = args.whole("block_size").filter(|bytes| *bytes > 0) {
        table["block_bytes"] = integer_item(block_bytes);
    }
    if args.flag("readonly") {
        table["read_only"] = value(true);
    }
    edit.sections.push("disk", table);
    Ok(json!(name))
}

/// Returns the parameter `name`; an error unless it is the name of a disk of one of `kinds`.
fn disk_of_kind(edit: &Edit<'_>, args: &Args, kinds: &[&str]) -> Result<String, Failure> {
    let name = args.text("name").unwrap_or_default();
    match edit.plan.disk(name) {
        Some(disk) if kinds.contains(&disk.kind.name()) => Ok(name.to_owned()),
        Some(disk) => {
            let kind = disk.kind.name();
            let of = kinds.join(" or ");
            Err(args.refuse("name", format!("is a disk of kind {kind}; this method is for those of {of}")))
        }
        None => {
            let names: Vec<_> = edit.plan.disks.iter().map(|disk| disk.name.clone()).collect();
            Err(unknown_name(args, "name", "disk", &names, LIST_DISKS))
        }
    }
}

fn position(edit: &Edit<'_>, name: &str) -> Option<usize> {
    edit.sections.position("disk", |section| section.text("name") == Some(name))
}

/// Removes disks and their namespaces, as SPDK does.
fn remove(edit: &mut Edit<'_>, names: &[String]) {
    edit.is_revocation = true;
    let is_gone = |section: &Section, key: &str| {
        section.text(key).is_some_and(|name| names.iter().any(|gone| gone == name))
    };
    edit.sections.remove(SectionKind::Element("disk"), |section| is_gone(section, "name"));
    edit.sections.remove(SectionKind::Namespace, |section| is_gone(section, "disk"));
}

pub fn delete(edit: &mut Edit<'_>, args: &Args, kind: &str) -> MethodResult {
    let name = disk_of_kind(edit, args, &[kind])?;
    remove(edit, &[name]);
    Ok(json!(true))
}

pub fn resize(edit: &mut Edit<'_>, args: &Args, kind: &str) -> MethodResult {
    let name = disk_of_kind(edit, args, &[kind])?;
    let bytes = args.whole("new_size").unwrap_or(0).saturating_mul(MIB);
    if let Some(at) = position(edit, &name) {
        edit.edit_at(at, |table| comments::set(table, "size", size_text(bytes)))?;
    }
    Ok(json!(true))
}

/// Adds, changes or (size 0) removes the cache of a disk. The values are validated with the new
/// configuration. Parameters that are not set, and `sole_writer = false`, leave their keys unchanged.
pub fn cache(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    let name = disk_of_kind(edit, args, &["file", "ng", "nvme", "remote"])?;
    let bytes = args.whole("size").unwrap_or(0);
    let Some(at) = position(edit, &name) else { return Ok(json!(true)) };
    edit.edit_at(at, |table| set_cache(table, bytes, args))?;
    Ok(json!(true))
}

fn set_cache(disk: &mut Table, bytes: u64, args: &Args) {
    if bytes == 0 {
        comments::remove(disk, "cache");
        return;
    }
    let cache = disk.entry("cache").or_insert_with(|| Item::Table(Table::new()));
    let Some(cache) = cache.as_table_like_mut() else { return };
    comments::set(cache, "size", size_text(bytes));
    for key in ["policy", "mode"] {
        if let Some(word) = args.text(key) {
            comments::set(cache, key, value(word));
        }
    }
    if let Some(bytes) = args.whole("read_ahead") {
        comments::set(cache, "read_ahead", size_text(bytes));
    }
    if args.flag("sole_writer") {
        comments::set(cache, "sole_writer", value(true));
    }
}

/// Adds an `nvme` or `remote` disk for one namespace (1 by default) of a drive or far subsystem.
pub fn attach(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    let (controller, nsid) = (args.text("name").unwrap_or_default(), args.whole("namespace").unwrap_or(1));
    let name = format!("{controller}n{nsid}");
    let mut table = match transport_of(args) {
        None => {
            let foreign = ["trsvcid", "adrfam", "subnqn", "hostnqn"];
            if let Some(foreign) = foreign.into_iter().find(|name| args.text(name).is_some()) {
                return Err(args.refuse(foreign, "must not be given with trtype pcie: a drive has none"));
            }
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
                table["transport"] = value(transport.to_string());
            }
            table["nqn"] = value(subnqn);
            copy_params(args, &mut table, &[("hostnqn", "host_nqn")]);
            table
        }
    };
    if nsid != 1 {
        table["namespace"] = integer_item(nsid);
    }
    edit.sections.push("disk", table);
    Ok(json!([name]))
}

/// Returns `NAME` for a disk `NAMEn1`: the name under which its controller was attached. `None` if `disk`
/// does not end with `n` and digits.
pub fn controller_of(disk: &str) -> Option<&str> {
    let (controller, nsid) = disk.rsplit_once('n')?;
    (!nsid.is_empty() && nsid.bytes().all(|digit| digit.is_ascii_digit())).then_some(controller)
}

pub fn detach(edit: &mut Edit<'_>, args: &Args) -> MethodResult {
    let controller = args.text("name").unwrap_or_default();
    let is_attached = |kind: &DiskKind| matches!(kind, DiskKind::Nvme { .. } | DiskKind::Remote { .. });
    let disks = edit.plan.disks.iter().filter(|disk| is_attached(&disk.kind));
    let names: Vec<_> = disks.filter_map(|disk| Some((controller_of(&disk.name)?, &disk.name))).collect();
    let its = names.iter().filter(|(its, _)| *its == controller);
    let its: Vec<String> = its.map(|(_, disk)| (*disk).clone()).collect();
    if its.is_empty() {
        let all: Vec<_> = names.iter().map(|(its, _)| (*its).to_owned()).collect();
        let listed = "its disks of kind nvme and remote are NAMEn1, and bdev_get_bdevs lists them";
        return Err(unknown_name(args, "name", "controller", &all, listed));
    }
    remove(edit, &its);
    Ok(json!(true))
}
