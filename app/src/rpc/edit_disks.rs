//! Methods that make, grow and remove disks.

use serde_json::{Value, json};
use spindle_transport::TransportKind;
use toml_edit::{Item, Table, value};

use super::Failure;
use super::edit::{DISKS, Edit, copy, number, refuse_name, sections, set, text, transport_of};
use super::params::Args;
use crate::config::DiskKind;
use crate::size::Bytes;

type Answer = Result<Value, Failure>;

const MIB: u64 = 1 << 20;

/// A section for a disk of a new name.
fn disk(edit: &Edit<'_>, args: &Args, name: &str, kind: &str) -> Result<Table, Failure> {
    if edit.plan.disk(name).is_some() {
        return Err(args.refuse("name", format!("there is a disk {name:?}; it must be a new name")));
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
        let allowed = "must be less than 2^63 bytes in all, num_blocks times block_size";
        return Err(args.refuse("num_blocks", allowed));
    };
    table["size"] = size_text(bytes);
    table["block_bytes"] = number(block_bytes);
    Ok(())
}

/// A disk without a medium, of kind `ram` or `null`.
pub fn create(edit: &mut Edit<'_>, args: &Args, kind: &str) -> Answer {
    let free = || (0..).map(|at| format!("Malloc{at}")).find(|name| edit.plan.disk(name).is_none());
    let name = args.text("name").map(str::to_owned).or_else(free).unwrap_or_default();
    let mut table = disk(edit, args, &name, kind)?;
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
            let of = kinds.join(" or ");
            Err(args.refuse("name", format!("is a disk of kind {kind}; this method is for those of {of}")))
        }
        None => {
            let names: Vec<_> = edit.plan.disks.iter().map(|disk| disk.name.clone()).collect();
            Err(refuse_name(args, "name", "disk", &names, DISKS))
        }
    }
}

fn section<'a>(edit: &'a mut Edit<'_>, name: &str) -> Option<&'a mut Table> {
    edit.sections("disk").iter_mut().find(|table| text(table, "name") == Some(name))
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

pub fn delete(edit: &mut Edit<'_>, args: &Args, kind: &str) -> Answer {
    let name = named(edit, args, &[kind])?;
    remove(edit, &[name]);
    Ok(json!(true))
}

pub fn resize(edit: &mut Edit<'_>, args: &Args, kind: &str) -> Answer {
    let name = named(edit, args, &[kind])?;
    let bytes = args.whole("new_size").unwrap_or(0).saturating_mul(MIB);
    if let Some(table) = section(edit, &name) {
        set(table, "size", size_text(bytes));
    }
    Ok(json!(true))
}

/// The cache in front of a disk; what it may be is checked with the whole configuration.
pub fn cache(edit: &mut Edit<'_>, args: &Args) -> Answer {
    let name = named(edit, args, &["file", "ng", "nvme", "remote"])?;
    let bytes = args.whole("size").unwrap_or(0);
    let Some(table) = section(edit, &name) else { return Ok(json!(true)) };
    if bytes == 0 {
        table.remove("cache");
        return Ok(json!(true));
    }
    let cache = table.entry("cache").or_insert_with(|| Item::Table(Table::new()));
    if let Some(cache) = cache.as_table_like_mut() {
        cache.insert("size", size_text(bytes));
        for key in ["policy", "mode"] {
            if let Some(word) = args.text(key) {
                cache.insert(key, value(word));
            }
        }
        if let Some(bytes) = args.whole("read_ahead") {
            cache.insert("read_ahead", size_text(bytes));
        }
        if args.flag("sole_writer") {
            cache.insert("sole_writer", value(true));
        }
    }
    Ok(json!(true))
}

/// A drive by its PCI address, or a subsystem of another target: its first namespace, or the one that is
/// asked for.
pub fn attach(edit: &mut Edit<'_>, args: &Args) -> Answer {
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
            copy(args, &mut table, &[("hostnqn", "host_nqn")]);
            table
        }
    };
    if nsid != 1 {
        table["namespace"] = number(nsid);
    }
    edit.sections("disk").push(table);
    Ok(json!([name]))
}

/// What stands before n and the number of the namespace.
pub fn controller_of(disk: &str) -> Option<&str> {
    let (controller, nsid) = disk.rsplit_once('n')?;
    (!nsid.is_empty() && nsid.bytes().all(|digit| digit.is_ascii_digit())).then_some(controller)
}

pub fn detach(edit: &mut Edit<'_>, args: &Args) -> Answer {
    let controller = args.text("name").unwrap_or_default();
    let is_attached = |kind: &DiskKind| matches!(kind, DiskKind::Nvme { .. } | DiskKind::Remote { .. });
    let disks = edit.plan.disks.iter().filter(|disk| is_attached(&disk.kind));
    // NAMEn1 is of NAME.
    let names: Vec<_> = disks.filter_map(|disk| Some((controller_of(&disk.name)?, &disk.name))).collect();
    let its = names.iter().filter(|(its, _)| *its == controller);
    let its: Vec<String> = its.map(|(_, disk)| (*disk).clone()).collect();
    if its.is_empty() {
        let all: Vec<_> = names.iter().map(|(its, _)| (*its).to_owned()).collect();
        let listed = "its disks of kind nvme and remote are NAMEn1, and bdev_get_bdevs lists them";
        return Err(refuse_name(args, "name", "controller", &all, listed));
    }
    remove(edit, &its);
    Ok(json!(true))
}
