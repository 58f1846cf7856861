//! `spindle nvme`: lists NVMe drives, and binds them to `vfio-pci` or back to the kernel's driver.
//!
//! ```text
//!   list ─┐
//!   bind ─┼─ drive (what the kernel reports) ── uses (mounts, volumes, processes)
//! unbind ─┤
//!         ├─ persist (files in /etc) ─┐
//!         └───────────────────────────┴─ change (steps, and Machine, which applies them)
//! ```
//!
//! All modules access the files of the machine through `root`.
//!
//! `vfio-pci` maps a drive's registers into a process and restricts the drive's DMA to memory that the
//! process has mapped, which needs an IOMMU. Unbinding the kernel's driver removes its block devices, and a
//! mounted file system on them would lose writes. So `bind` checks for mounts, volumes and processes, and a
//! failed check refuses the bind.
//!
//! `spindle nvme` does not change the kernel command line or the firmware, and formats nothing.

mod bind;
mod change;
mod drive;
mod list;
mod persist;
mod root;
#[cfg(test)]
mod tests;
mod unbind;
mod uses;

use std::fmt::Display;
use std::io;

use spindle_nvme_pcie::PciAddress;

use crate::cli::NvmeCommand;
use crate::text::printable;
use change::{Machine, Step, ThisMachine};
use drive::Drive;
use root::Root;
use spindle_app_bench::say;

/// sysfs file: writing a PCI address binds the function to the driver that matches it.
const PROBE: &str = "/sys/bus/pci/drivers_probe";

type Out<'a> = &'a mut dyn FnMut(String);

/// Text for the user: the refusals; or why a subcommand failed, with the resulting state of the drive.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NvmeError(String);

impl NvmeError {
    fn failed(verb: &str, step: &Step, error: &io::Error, state: &str) -> NvmeError {
        NvmeError(format!("cannot {verb}: `{step}`: {error}; {state}"))
    }
}

/// Formats one refusal. With any refusal no drive is bound or unbound.
fn refusal(what: impl Display, field: &str, value: impl Display, allowed: &str) -> String {
    format!("{what}: {field} = {}: {allowed}", printable(&value.to_string()))
}

fn not_root(command: &str) -> String {
    refusal(command, "user", "not root", "must be root")
}

/// Prints a step and applies it.
fn run_step(machine: &dyn Machine, step: &Step, out: Out<'_>) -> io::Result<()> {
    out(step.to_string());
    machine.apply(step)
}

fn print(steps: &[Step], out: Out<'_>) {
    if steps.is_empty() {
        out("nothing to change".to_owned());
    }
    steps.iter().for_each(|step| out(step.to_string()));
}

/// Runs steps that undo others. Prints a failure and continues. Returns the resulting [`state`] of the drive.
fn undo(machine: &dyn Machine, steps: &[Step], address: &PciAddress, out: Out<'_>) -> String {
    for step in steps {
        if let Err(error) = run_step(machine, step, out) {
            out(format!("{step}: {error}"));
        }
    }
    state(machine.root(), address)
}

/// Returns the addresses of all drives, for the refusal of an unknown address.
fn addresses(drives: &[Drive]) -> String {
    let drives: Vec<String> = drives.iter().map(|drive| drive.address.to_string()).collect();
    if drives.is_empty() { "this machine has none".to_owned() } else { drives.join(", ") }
}

/// Runs a subcommand on this machine.
pub fn run(command: &NvmeCommand) -> Result<(), NvmeError> {
    run_on(command, &ThisMachine::new(), &mut |line| say!("{line}"))
}

fn run_on(command: &NvmeCommand, machine: &dyn Machine, out: Out<'_>) -> Result<(), NvmeError> {
    match command {
        NvmeCommand::List(args) => list::run(args, machine, out),
        NvmeCommand::Bind(args) => bind::run(args, machine, out),
        NvmeCommand::Unbind(args) => unbind::run(args, machine, out),
    }
}

/// Removes duplicates and keeps the order.
fn unique(addresses: &[PciAddress]) -> Vec<PciAddress> {
    let mut found: Vec<PciAddress> = Vec::new();
    for address in addresses {
        if !found.contains(address) {
            found.push(*address);
        }
    }
    found
}

/// Returns `ADDRESS is bound to DRIVER` (or `no driver`) for the present driver.
fn state(root: &Root, address: &PciAddress) -> String {
    match drive::driver(root, address) {
        Some(driver) => format!("{address} is bound to {}", printable(&driver)),
        None => format!("{address} is bound to no driver"),
    }
}
