//! `spindle nvme`: which NVMe drives the machine has, and which of them a process may drive itself.
//!
//! ```text
//!   list ─┐
//!   bind ─┼─ drive (what the kernel says) ── uses (who uses it)
//! unbind ─┘        └─ root (files)               change (steps) ── persist (files in /etc), pages
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
mod pages;
mod persist;
mod root;
#[cfg(test)]
mod tests;
mod unbind;
mod uses;

use std::fmt;
use std::io;

use spindle_nvme_pcie::PciAddress;

use crate::cli::NvmeCommand;
use change::{Machine, Step, ThisMachine};
use root::{Root, printable};
use spindle_console::say;

/// Where an address is written to, for the driver that fits.
const PROBE: &str = "/sys/bus/pci/drivers_probe";

/// Where lines go.
type Out<'a> = &'a mut dyn FnMut(String);

/// Why a subcommand did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum NvmeError {
    /// Nothing was changed.
    #[error("{}", lines(.0))]
    Refused(Vec<Refusal>),
    /// A step failed.
    #[error(transparent)]
    Failed(#[from] Box<Failure>),
    /// The machine has less free memory in one piece than was asked for.
    #[error("--huge-pages: {0}; what is left is in use or in small pieces: reserve them at boot. {1}")]
    Pages(String, String),
}

/// One thing that must not be.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    what: String,
    field: &'static str,
    value: String,
    allowed: String,
}

impl Refusal {
    fn new(what: &str, field: &'static str, value: impl ToString, allowed: &str) -> Refusal {
        Refusal {
            what: what.to_owned(),
            field,
            value: printable(&value.to_string()),
            allowed: allowed.to_owned(),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refusal { what, field, value, allowed } = self;
        write!(f, "{what}: {field} = {value}: {allowed}")
    }
}

/// A step that failed, and what is left.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb}: `{step}`: {source}; {state}")]
pub struct Failure {
    verb: &'static str,
    step: Step,
    source: io::Error,
    state: String,
}

impl Failure {
    fn new(verb: &'static str, step: &Step, source: io::Error, state: String) -> Box<Failure> {
        Box::new(Failure { verb, step: step.clone(), source, state })
    }
}

fn lines(refusals: &[Refusal]) -> String {
    refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Run one of them on this machine.
///
/// # Errors
/// [`NvmeError`].
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
