//! Huge pages of 2 MiB for the memory that drives read and write: on the NUMA node of each drive, or of the
//! whole machine where a drive has none.

use std::collections::BTreeMap;

use super::drive::Drive;
use super::root::Root;

const MACHINE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// The file that says how many pages are reserved for a drive's memory.
fn file(root: &Root, node: Option<u64>) -> String {
    let of_node = node
        .map(|node| format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages"));
    of_node.filter(|path| root.has(path)).unwrap_or_else(|| MACHINE.to_owned())
}

/// What people call it.
pub fn place(file: &str) -> String {
    let node = file.split('/').find_map(|part| part.strip_prefix("node").filter(|number| !number.is_empty()));
    node.map_or_else(|| "the machine".to_owned(), |node| format!("NUMA node {node}"))
}

/// The files of these drives, each with the pages that it has and those that it is to have: no fewer than
/// `wanted`, and none is taken away.
///
/// # Errors
/// The path of the file that is missing, where the kernel has no such pages.
pub fn plan(root: &Root, drives: &[&Drive], wanted: u64) -> Result<BTreeMap<String, (u64, u64)>, String> {
    let mut plan = BTreeMap::new();
    for drive in drives {
        let file = file(root, drive.node);
        let Some(has) = root.number(&file) else { return Err(file) };
        plan.insert(file, (has, has.max(wanted)));
    }
    Ok(plan)
}
