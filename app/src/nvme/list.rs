//! `spindle nvme list`: prints every NVMe drive with its driver, uses and signatures, as a table or as JSON.

use comfy_table::Table;
use serde_json::{Value, json};

use super::change::Machine;
use super::drive::{self, Drive};
use super::root::Root;
use super::{NvmeError, Out, persist};
use crate::cli::NvmeListArgs;
use crate::size::rounded;
use crate::text::{printable, table};

pub fn run(args: &NvmeListArgs, machine: &dyn Machine, out: Out<'_>) -> Result<(), NvmeError> {
    let drives = drive::all(machine);
    if args.json {
        out(to_json(machine.root(), &drives).to_string());
    } else if drives.is_empty() {
        out("no NVMe drive on the PCI bus".to_owned());
    } else {
        out(to_table(machine.root(), &drives).to_string());
    }
    Ok(())
}

fn to_table(root: &Root, drives: &[Drive]) -> Table {
    let header = ["address", "model, serial", "id", "driver", "group", "node", "size", "in use"];
    let mut table = table(header);
    let dash = || "-".to_owned();
    for drive in drives {
        let about: Vec<String> =
            drive.model.iter().chain(&drive.serial).map(|text| printable(text)).collect();
        let mut driver = drive.driver.as_deref().map_or_else(|| "none".to_owned(), printable);
        if persist::is_persistent(root, &drive.address) {
            driver.push_str("\n(persists)");
        }
        table.add_row([
            drive.address.to_string(),
            if about.is_empty() { dash() } else { about.join("\n") },
            printable(&format!("{}:{}", drive.ids.0, drive.ids.1)),
            driver,
            drive.group.as_deref().map_or_else(|| "none".to_owned(), printable),
            drive.node.map_or_else(dash, |node| node.to_string()),
            drive.bytes().map_or_else(dash, rounded),
            in_use(drive),
        ]);
    }
    table
}

/// Returns a line for each use and for a failed check, or `no`; then a line for each signature.
fn in_use(drive: &Drive) -> String {
    let mut lines: Vec<String> = drive.uses.iter().map(ToString::to_string).collect();
    lines.extend(drive.unknown.iter().map(|unknown| format!("not known: {unknown}")));
    if lines.is_empty() {
        lines.push("no".to_owned());
    }
    lines.extend(drive.signatures.iter().map(|found| format!("(holds {found})")));
    lines.iter().map(|line| printable(line)).collect::<Vec<_>>().join("\n")
}

/// Whether a use was found; `None`: no use was found, but a check failed.
fn is_in_use(drive: &Drive) -> Option<bool> {
    let is_used = !drive.uses.is_empty();
    (is_used || drive.unknown.is_none()).then_some(is_used)
}

fn to_json(root: &Root, drives: &[Drive]) -> Value {
    let drives: Vec<Value> = drives
        .iter()
        .map(|drive| {
            let disks = drive.disks.iter().map(|disk| json!({ "device": disk.name, "bytes": disk.bytes }));
            let uses = drive.uses.iter().map(
                |found| json!({ "kind": found.kind.name(), "device": found.device, "what": found.what }),
            );
            json!({
                "address": drive.address.to_string(),
                "model": drive.model,
                "serial": drive.serial,
                "vendor": drive.ids.0,
                "device": drive.ids.1,
                "driver": drive.driver,
                "iommu_group": drive.group,
                "numa_node": drive.node,
                "bytes": drive.bytes(),
                "namespaces": disks.collect::<Vec<_>>(),
                "holds": drive.signatures,
                "in_use": is_in_use(drive),
                "uses": uses.collect::<Vec<_>>(),
                "unknown": drive.unknown,
                "persistent": persist::is_persistent(root, &drive.address),
            })
        })
        .collect();
    json!({ "drives": drives })
}
