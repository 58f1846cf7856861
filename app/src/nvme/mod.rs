//! `spindle nvme`: which NVMe drives the machine has, and which of them a process may drive itself.
//!
//! ```text
//!   list ─┐
//!   bind ─┼─ drive (what the kernel says) ── uses (who uses it)
//! unbind ─┘        └─ root (files)               change (steps) ── persist (files in /etc)
//! ```
//!
//! A drive that a process drives is bound to `vfio-pci`, which gives the process its registers and lets it
//! reach only memory that was mapped for it: that needs an IOMMU. The kernel's driver must let go first, and
//! whatever was mounted with it would be lost; so who uses a drive is looked at from all sides, and what
//! cannot be found out is a reason to refuse.
//!
//! What it does not do: it changes no kernel command line, formats nothing, and does not touch the firmware.

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
use spindle_console::say;

/// Where an address is written to, for the driver that fits.
const PROBE: &str = "/sys/bus/pci/drivers_probe";

/// Where lines go.
type Out<'a> = &'a mut dyn FnMut(String);

/// Why a subcommand did not do what it was asked, and the state that is left: for people.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NvmeError(String);

impl NvmeError {
    /// A step has failed.
    fn failed(verb: &str, step: &Step, error: &io::Error, state: &str) -> NvmeError {
        NvmeError(format!("cannot {verb}: `{step}`: {error}; {state}"))
    }
}

/// One thing that must not be. While there is any, nothing is changed.
fn refusal(what: impl Display, field: &str, value: impl Display, allowed: &str) -> String {
    format!("{what}: {field} = {}: {allowed}", printable(&value.to_string()))
}

/// Only root may change drivers.
fn not_root(command: &str) -> String {
    refusal(command, "user", "not root", "must be root")
}

/// Make a step and say so.
fn make(machine: &dyn Machine, step: &Step, out: Out<'_>) -> io::Result<()> {
    out(step.to_string());
    machine.apply(step)
}

/// Steps that are not made.
fn print(steps: &[Step], out: Out<'_>) {
    if steps.is_empty() {
        out("nothing to change".to_owned());
    }
    steps.iter().for_each(|step| out(step.to_string()));
}

/// Make steps that undo others, as far as it goes; returns the state that the drive is in.
fn make_back(machine: &dyn Machine, steps: &[Step], address: &PciAddress, out: Out<'_>) -> String {
    for step in steps {
        if let Err(error) = make(machine, step, out) {
            out(format!("{step}: {error}"));
        }
    }
    state(machine.root(), address)
}

/// The addresses of all drives, for who has named another.
fn addresses(drives: &[Drive]) -> String {
    let drives: Vec<String> = drives.iter().map(|drive| drive.address.to_string()).collect();
    if drives.is_empty() { "none is there".to_owned() } else { drives.join(", ") }
}

/// Run one of them on this machine.
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

/// Each address once, in the order given.
fn unique(addresses: &[PciAddress]) -> Vec<PciAddress> {
    let mut found: Vec<PciAddress> = Vec::new();
    for address in addresses {
        if !found.contains(address) {
            found.push(*address);
        }
    }
    found
}

/// Whose a function is now, in a sentence.
fn state(root: &Root, address: &PciAddress) -> String {
    match drive::driver(root, address) {
        Some(driver) => format!("{address} is bound to {}", printable(&driver)),
        None => format!("{address} is bound to no driver"),
    }
}
