//! `spindle nvme unbind`: binds drives to the kernel's driver again, and removes the files that
//! `bind --persist` wrote.

use spindle_nvme_pcie::PciAddress;

use super::change::{Machine, Step};
use super::drive::{self, Drive, NVME, VFIO, folder};
use super::root::Root;
use super::{NvmeError, Out, PROBE, not_root, persist, refusal, run_step, undo, unique};
use crate::cli::NvmeUnbindArgs;

/// Checks the drives, unbinds them and removes their rules; with `--dry-run` only prints the steps.
///
/// # Errors
/// [`NvmeError`]: a drive is refused and nothing changed, or a step fails (the text has the drives' state).
pub fn run(args: &NvmeUnbindArgs, machine: &dyn Machine, out: Out<'_>) -> Result<(), NvmeError> {
    let root = machine.root();
    let addresses = unique(&args.addresses);
    let all = drive::all(machine);
    let mut refusals = Vec::new();
    if !machine.is_privileged() && !args.dry_run {
        refusals.push(not_root("spindle nvme unbind"));
    }
    let mut drives = Vec::new();
    for address in &addresses {
        match all.iter().find(|drive| drive.address == *address) {
            Some(drive) => {
                refusals.extend(check_drive(drive));
                drives.push(drive);
            }
            // The drive was removed; its rule can still be removed.
            None if persist::is_persistent(root, address) => {}
            None => refusals.push(no_drive(address, &all)),
        }
    }
    if !refusals.is_empty() {
        return Err(NvmeError(refusals.join("\n")));
    }
    if args.dry_run {
        print(root, &drives, &addresses, out);
        return Ok(());
    }
    for drive in &drives {
        unbind(machine, drive, out)?;
    }
    for step in persist::remove_steps(root, &addresses) {
        let failed = |error| {
            let states: Vec<String> = addresses.iter().map(|address| super::state(root, address)).collect();
            NvmeError::failed("remove the rule of the bind", &step, &error, &states.join("; "))
        };
        run_step(machine, &step, out).map_err(failed)?;
    }
    Ok(())
}

/// Prints all steps without running them (`--dry-run`).
fn print(root: &Root, drives: &[&Drive], addresses: &[PciAddress], out: Out<'_>) {
    let mut steps: Vec<Step> = Vec::new();
    for step in drives.iter().flat_map(|drive| unbind_steps(root, drive)) {
        if !matches!(step, Step::Load(_)) || !steps.contains(&step) {
            steps.push(step);
        }
    }
    steps.extend(persist::remove_steps(root, addresses));
    super::print(&steps, out);
}

fn no_drive(address: &PciAddress, all: &[Drive]) -> String {
    let drives = super::addresses(all);
    let allowed =
        format!("must be the address of an NVMe drive ({drives}), or of one with a rule of bind --persist");
    refusal("spindle nvme unbind", "ADDRESS", address, &allowed)
}

/// Returns the refusals of a drive because of its driver, or with vfio-pci because of its uses. Unbinding
/// vfio-pci blocks until the process that uses the drive has closed the VFIO device.
fn check_drive(drive: &Drive) -> Vec<String> {
    let address = drive.address;
    let mut refusals = Vec::new();
    if let Some(other) = drive.driver.as_ref().filter(|driver| ![NVME, VFIO].contains(&driver.as_str())) {
        refusals.push(refusal(address, "driver", other, "must be vfio-pci, nvme or none"));
    }
    if drive.is_bound_to(VFIO) {
        for found in &drive.uses {
            let allowed = "must not be open by a process: end it first";
            refusals.push(refusal(address, "in use", found, allowed));
        }
        if let Some(unknown) = &drive.unknown {
            let value = format!("not known ({unknown})");
            refusals.push(refusal(address, "in use", value, "must be known to be unused"));
        }
    }
    refusals
}

/// Returns the steps that bind a drive to the kernel's driver; none if bound, with no vfio-pci override.
fn unbind_steps(root: &Root, drive: &Drive) -> Vec<Step> {
    let address = drive.address.to_string();
    let mut steps = Vec::new();
    if drive.driver_override.as_deref() == Some(VFIO) {
        steps.push(Step::echo(format!("{}/driver_override", folder(&drive.address)), ""));
    }
    if drive.is_bound_to(NVME) {
        return steps;
    }
    if drive.is_bound_to(VFIO) {
        steps.push(Step::echo(format!("/sys/bus/pci/drivers/{VFIO}/unbind"), address.clone()));
    }
    if !root.has(&format!("/sys/bus/pci/drivers/{NVME}")) {
        steps.push(Step::Load(NVME));
    }
    steps.push(Step::echo(PROBE, address));
    steps
}

/// Binds a drive to the kernel's driver. After a failure, restores the previous override, and vfio-pci if
/// possible, and returns the error.
fn unbind(machine: &dyn Machine, drive: &Drive, out: Out<'_>) -> Result<(), NvmeError> {
    let root = machine.root();
    let steps = unbind_steps(root, drive);
    for step in &steps {
        if let Err(error) = run_step(machine, step, out) {
            return Err(NvmeError::failed("unbind", step, &error, &roll_back(machine, drive, out)));
        }
    }
    if drive.is_bound_to(NVME) {
        out(format!("{} is bound to {NVME} already", drive.name()));
        return Ok(());
    }
    if drive::driver(root, &drive.address).as_deref() == Some(NVME) {
        out(format!("{} is bound to {NVME}", drive.address));
        return Ok(());
    }
    let step = Step::echo(PROBE, drive.address.to_string());
    let reason = "the kernel's driver did not bind the drive; see the kernel's log. vfio-pci binds drives \
                  that match its ids= or new_id";
    let error = std::io::Error::other(reason);
    Err(NvmeError::failed("unbind", &step, &error, &roll_back(machine, drive, out)))
}

/// Restores the previous override. Binds vfio-pci again if it was bound, an override was set, and the drive
/// has no driver now. Returns the drive's [`state`](super::state).
fn roll_back(machine: &dyn Machine, drive: &Drive, out: Out<'_>) -> String {
    let root = machine.root();
    let mut steps = Vec::new();
    if let Some(before) = &drive.driver_override {
        steps.push(Step::echo(format!("{}/driver_override", folder(&drive.address)), before.clone()));
    }
    let is_lost = drive.is_bound_to(VFIO) && drive::driver(root, &drive.address).is_none();
    if is_lost && drive.driver_override.is_some() {
        steps.push(Step::echo(PROBE, drive.address.to_string()));
    }
    undo(machine, &steps, &drive.address, out)
}
