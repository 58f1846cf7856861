//! `spindle nvme unbind`: gives drives back to the kernel's driver, and forgets what `bind --persist` made.

use spindle_nvme_pcie::PciAddress;

use super::change::{Machine, Step};
use super::drive::{self, Drive, NVME, VFIO, folder};
use super::root::Root;
use super::{NvmeError, Out, PROBE, make, make_back, not_root, persist, refusal, unique};
use crate::cli::NvmeUnbindArgs;

/// Run it.
///
/// # Errors
/// [`NvmeError`]: what is refused, with nothing changed; or what failed, with the state that is left.
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
                refusals.extend(wrong_with(drive));
                drives.push(drive);
            }
            // A drive that was pulled out: its rule can still go.
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
    for step in persist::forget(root, &addresses) {
        let failed = |error| {
            let states: Vec<String> = addresses.iter().map(|address| super::state(root, address)).collect();
            NvmeError::failed("forget the bind", &step, &error, &states.join("; "))
        };
        make(machine, &step, out).map_err(failed)?;
    }
    Ok(())
}

/// Every step, and none made.
fn print(root: &Root, drives: &[&Drive], addresses: &[PciAddress], out: Out<'_>) {
    let mut steps: Vec<Step> = Vec::new();
    for step in drives.iter().flat_map(|drive| moves(root, drive)) {
        if !matches!(step, Step::Load(_)) || !steps.contains(&step) {
            steps.push(step);
        }
    }
    steps.extend(persist::forget(root, addresses));
    super::print(&steps, out);
}

fn no_drive(address: &PciAddress, all: &[Drive]) -> String {
    let drives = super::addresses(all);
    let allowed =
        format!("must be the address of an NVMe drive ({drives}), or of one with a rule of bind --persist");
    refusal("spindle nvme unbind", "ADDRESS", address, &allowed)
}

/// What forbids to move a drive. The kernel lets go only when the process that uses it does, and blocks the
/// caller until then.
fn wrong_with(drive: &Drive) -> Vec<String> {
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

/// The steps that move a drive; none where it is with the kernel and free to be so again.
fn moves(root: &Root, drive: &Drive) -> Vec<Step> {
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

/// Move a drive, or leave it as it was.
fn unbind(machine: &dyn Machine, drive: &Drive, out: Out<'_>) -> Result<(), NvmeError> {
    let root = machine.root();
    let steps = moves(root, drive);
    for step in &steps {
        if let Err(error) = make(machine, step, out) {
            return Err(NvmeError::failed("unbind", step, &error, &take_back(machine, drive, out)));
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
    let reason = "the kernel's driver did not take the drive; its log says why. vfio-pci itself takes drives \
                  that its ids= or new_id name";
    let error = std::io::Error::other(reason);
    Err(NvmeError::failed("unbind", &step, &error, &take_back(machine, drive, out)))
}

/// Undo what was done to a drive; returns the state that it is in.
fn take_back(machine: &dyn Machine, drive: &Drive, out: Out<'_>) -> String {
    let root = machine.root();
    let mut steps = Vec::new();
    if let Some(before) = &drive.driver_override {
        steps.push(Step::echo(format!("{}/driver_override", folder(&drive.address)), before.clone()));
    }
    let is_lost = drive.is_bound_to(VFIO) && drive::driver(root, &drive.address).is_none();
    if is_lost && drive.driver_override.is_some() {
        steps.push(Step::echo(PROBE, drive.address.to_string()));
    }
    make_back(machine, &steps, &drive.address, out)
}
