//! `spindle nvme bind`: binds drives to `vfio-pci`; can reserve huge pages and write udev rules.
//!
//! All drives are checked before any is bound. Then each drive is bound separately:
//!
//! ```text
//!   vfio-pci > driver_override      only vfio-pci may bind to the drive
//!   address  > driver/unbind        unbind the kernel's driver, if one is bound
//!   address  > drivers_probe        vfio-pci binds; verified afterwards
//! ```
//!
//! If a step fails, the previous override and driver of that drive are restored. Drives bound before that
//! drive stay bound.

use std::collections::BTreeMap;

use spindle_nvme_pcie::PciAddress;

use super::change::{ExclusiveHandle, Machine, Step};
use super::drive::{self, Drive, NVME, NVME_CLASS, VFIO, folder};
use super::root::Root;
use super::uses::UseKind;
use super::{NvmeError, Out, PROBE, not_root, persist, refusal, run_step, undo, unique};
use crate::cli::NvmeBindArgs;

/// Most polls of the state of each drive, 100 ms apart (10 s in all). A drive that takes longer to become
/// ready (CAP.TO may be longer) is not bound by its rule.
const READY_POLLS_MAX: u32 = 100;

/// Checks the drives and binds them; with `--dry-run` only prints the steps.
///
/// # Errors
/// [`NvmeError`]: a drive or an option is refused, and no drive is bound; a step fails (the text has the
/// state of the drives); or the kernel reserves fewer huge pages than `--huge-pages` asks for.
pub fn run(args: &NvmeBindArgs, machine: &dyn Machine, out: Out<'_>) -> Result<(), NvmeError> {
    let addresses = unique(&args.addresses);
    if args.from_rule {
        wait_until_ready(machine, &addresses, out)?;
    }
    let all = drive::all(machine);
    let mut refusals = Vec::new();
    if !machine.is_privileged() && !args.dry_run {
        refusals.push(not_root("spindle nvme bind"));
    }
    let mut drives = Vec::new();
    for address in &addresses {
        match all.iter().find(|drive| drive.address == *address) {
            Some(drive) => {
                refusals.extend(check_drive(machine.root(), drive, &addresses));
                if args.from_rule {
                    refusals.extend(check_serial(machine.root(), drive));
                } else if !args.force {
                    refusals.extend(check_signatures(drive));
                }
                drives.push(drive);
            }
            None => refusals.push(no_drive(machine.root(), address, &all)),
        }
    }
    let mut plan = BindPlan { pages: BTreeMap::new(), program: None };
    if let Some(wanted) = args.huge_pages {
        match persist::plan_pages(machine.root(), &drives, wanted) {
            Ok(pages) => plan.pages = pages,
            Err(file) => {
                let allowed = format!("must be left out: this kernel has no pages of 2 MiB ({file})");
                refusals.push(refusal("spindle nvme bind", "--huge-pages", wanted, &allowed));
            }
        }
    }
    if args.persist {
        match machine.program() {
            Ok(program) if persist::is_valid_program(&program) => plan.program = Some(program),
            given => {
                let given = given.unwrap_or_else(|error| error.to_string());
                refusals.push(refusal("--persist", "this program", given, persist::PROGRAM_ALLOWED));
            }
        }
    }
    if !refusals.is_empty() {
        return Err(NvmeError(refusals.join("\n")));
    }
    if args.dry_run {
        plan.print(machine.root(), &drives, out);
        return Ok(());
    }
    plan.run(machine, &drives, out)
}

/// Changes of the command besides binding.
struct BindPlan {
    /// Reserved and wanted count of huge pages by sysfs file, from [`persist::plan_pages`].
    pages: BTreeMap<String, (u64, u64)>,
    /// Path of the program that the udev rules run; `None` without `--persist`.
    program: Option<String>,
}

impl BindPlan {
    /// Prints all steps without running them (`--dry-run`).
    fn print(&self, root: &Root, drives: &[&Drive], out: Out<'_>) {
        let mut steps = module_steps(root, drives);
        for drive in drives.iter().filter(|drive| !drive.is_bound_to(VFIO)) {
            steps.extend(bind_steps(drive));
        }
        steps.extend(self.page_steps());
        steps.extend(self.persist_steps(root, drives));
        super::print(&steps, out);
    }

    fn run(&self, machine: &dyn Machine, drives: &[&Drive], out: Out<'_>) -> Result<(), NvmeError> {
        let held = open_disks(machine, drives)?;
        for step in module_steps(machine.root(), drives) {
            let failed = |error| NvmeError::failed("bind", &step, &error, "no drive was bound");
            run_step(machine, &step, out).map_err(failed)?;
        }
        for (drive, held) in drives.iter().zip(held) {
            bind(machine, drive, held, out)?;
        }
        let mut short = Vec::new();
        for step in self.page_steps() {
            let failed = |error| NvmeError::failed("reserve huge pages", &step, &error, &bound(drives));
            run_step(machine, &step, out).map_err(failed)?;
        }
        for (file, (had, wanted)) in &self.pages {
            let got = machine.root().number(file).unwrap_or(0);
            let node = persist::node_name(file);
            out(format!("{node} has {got} huge pages of 2 MiB (it had {had}; {wanted} are wanted)"));
            if got < *wanted {
                short.push(format!("{node} gave {got} huge pages of {wanted}"));
            }
        }
        for step in self.persist_steps(machine.root(), drives) {
            let failed = |error| NvmeError::failed("make the bind persistent", &step, &error, &bound(drives));
            run_step(machine, &step, out).map_err(failed)?;
        }
        if self.program.is_some() {
            out(persist_note(machine.root(), drives));
        }
        if short.is_empty() {
            return Ok(());
        }
        let advice = "free memory is too small or fragmented: reserve the pages at boot";
        Err(NvmeError(format!("--huge-pages: {}; {advice}. {}", short.join("; "), bound(drives))))
    }

    fn page_steps(&self) -> Vec<Step> {
        let more = self.pages.iter().filter(|(_, (has, wanted))| wanted > has);
        more.map(|(file, (_, wanted))| Step::echo(file.clone(), wanted.to_string())).collect()
    }

    /// Returns the steps that write missing or outdated files in /etc; none without `--persist`.
    fn persist_steps(&self, root: &Root, drives: &[&Drive]) -> Vec<Step> {
        let Some(program) = &self.program else { return Vec::new() };
        let mut steps: Vec<Step> = Vec::new();
        for drive in drives {
            for step in persist::rule_steps(root, &drive.address, drive.serial.as_deref(), program) {
                if !steps.contains(&step) {
                    steps.push(step);
                }
            }
        }
        if !self.pages.is_empty() {
            let files: Vec<(String, u64)> =
                self.pages.iter().map(|(file, (_, wanted))| (file.clone(), *wanted)).collect();
            steps.extend(persist::page_step(root, &files));
        }
        steps
    }
}

/// Returns `bound to vfio-pci: A, B`.
fn bound(drives: &[&Drive]) -> String {
    let names: Vec<String> = drives.iter().map(|drive| drive.address.to_string()).collect();
    format!("bound to {VFIO}: {}", names.join(", "))
}

/// Returns the message for `--persist`, with a warning for drives whose rule has no serial number to check.
fn persist_note(root: &Root, drives: &[&Drive]) -> String {
    let blind: Vec<String> = drives
        .iter()
        .filter(|drive| persist::serial(root, &drive.address).is_none())
        .map(|drive| drive.address.to_string())
        .collect();
    let mut text = "from now on at boot and at hot-plug too".to_owned();
    if !blind.is_empty() {
        text.push_str(&format!(
            "; the serial number of a drive that is bound to {VFIO} cannot be read, so the rule of {} binds \
             any unused drive at that address: unbind the drive and bind it again with --persist to have the \
             serial number checked",
            blind.join(", ")
        ));
    }
    text
}

/// Returns the step that loads vfio-pci, if a drive is not bound to vfio-pci and the module is not loaded.
fn module_steps(root: &Root, drives: &[&Drive]) -> Vec<Step> {
    let is_needed = drives.iter().any(|drive| !drive.is_bound_to(VFIO));
    let is_there = root.has(&format!("/sys/bus/pci/drivers/{VFIO}"));
    if is_needed && !is_there { vec![Step::Load(VFIO)] } else { Vec::new() }
}

/// Returns the steps that bind a drive to vfio-pci, which must be loaded.
fn bind_steps(drive: &Drive) -> Vec<Step> {
    let address = drive.address.to_string();
    let mut steps = vec![Step::echo(format!("{}/driver_override", folder(&drive.address)), VFIO)];
    if let Some(driver) = &drive.driver {
        steps.push(Step::echo(format!("/sys/bus/pci/drivers/{driver}/unbind"), address.clone()));
    }
    steps.push(Step::echo(PROBE, address));
    steps
}

/// Opens the disks of each drive exclusively. So no disk can be mounted or become part of a volume until the
/// kernel's driver is unbound. The handles are in the order of `drives`. An error if a disk is in use.
fn open_disks(machine: &dyn Machine, drives: &[&Drive]) -> Result<Vec<Vec<ExclusiveHandle>>, NvmeError> {
    let mut held = Vec::new();
    for drive in drives {
        let disks = drive.disks.iter().map(|disk| {
            machine.open_exclusive(&format!("/dev/{}", disk.name)).map_err(|error| {
                let value = format!("{}: {error}", disk.name);
                NvmeError(refusal(drive.address, "in use", value, UseKind::Exclusive.allowed()))
            })
        });
        held.push(disks.collect::<Result<_, _>>()?);
    }
    Ok(held)
}

/// Binds a drive to vfio-pci. After a failure, restores the previous driver and override and returns the
/// error. `held`: the handles of its exclusively open disks.
fn bind(
    machine: &dyn Machine,
    drive: &Drive,
    mut held: Vec<ExclusiveHandle>,
    out: Out<'_>,
) -> Result<(), NvmeError> {
    let root = machine.root();
    let group = drive.group_path().unwrap_or_default();
    if drive.is_bound_to(VFIO) {
        out(format!("{} is bound to {VFIO} already: {group}", drive.name()));
        return Ok(());
    }
    for step in bind_steps(drive) {
        if matches!(&step, Step::Echo { path, .. } if path == PROBE) {
            // The disks no longer exist: an open handle would keep a disk's number from reuse.
            held.clear();
        }
        if let Err(error) = run_step(machine, &step, out) {
            return Err(NvmeError::failed("bind", &step, &error, &roll_back(machine, drive, out)));
        }
    }
    if drive::driver(root, &drive.address).as_deref() == Some(VFIO) {
        out(format!("{} is bound to {VFIO}: {group}", drive.name()));
        return Ok(());
    }
    let step = Step::echo(PROBE, drive.address.to_string());
    let error = std::io::Error::other(format!("{VFIO} did not bind the drive; see the kernel's log"));
    Err(NvmeError::failed("bind", &step, &error, &roll_back(machine, drive, out)))
}

/// Restores the previous override and driver; returns the drive's [`state`](super::state).
fn roll_back(machine: &dyn Machine, drive: &Drive, out: Out<'_>) -> String {
    let address = drive.address.to_string();
    let before = drive.driver_override.clone().unwrap_or_default();
    let mut steps = vec![Step::echo(format!("{}/driver_override", folder(&drive.address)), before)];
    let now = drive::driver(machine.root(), &drive.address);
    if let Some(driver) = now.as_ref().filter(|_| now != drive.driver) {
        steps.push(Step::echo(format!("/sys/bus/pci/drivers/{driver}/unbind"), address.clone()));
    }
    if now != drive.driver && drive.driver.is_some() {
        steps.push(Step::echo(PROBE, address));
    }
    undo(machine, &steps, &drive.address, out)
}

fn no_drive(root: &Root, address: &PciAddress, all: &[Drive]) -> String {
    let drives = super::addresses(all);
    match drive::class(root, address) {
        Some(class) => {
            let allowed = format!("must be {NVME_CLASS}, an NVMe drive ({drives})");
            refusal(address, "class", class, &allowed)
        }
        None => {
            let allowed = format!("must be the address of an NVMe drive ({drives})");
            refusal("spindle nvme bind", "ADDRESS", address, &allowed)
        }
    }
}

/// Returns the refusals of a drive because of its driver, driver override, IOMMU group or uses; none if
/// vfio-pci is already bound. `together` are the drives of the same command.
fn check_drive(root: &Root, drive: &Drive, together: &[PciAddress]) -> Vec<String> {
    let mut refusals = Vec::new();
    if drive.is_bound_to(VFIO) {
        return refusals;
    }
    let mut refuse = |field: &'static str, value: String, allowed: &str| {
        refusals.push(refusal(drive.address, field, value, allowed));
    };
    if let Some(driver) = drive.driver.as_ref().filter(|driver| *driver != NVME) {
        refuse("driver", driver.clone(), "must be nvme, vfio-pci or none");
    }
    if let Some(other) = drive.driver_override.as_ref().filter(|name| ![NVME, VFIO].contains(&name.as_str()))
    {
        refuse(
            "driver_override",
            other.clone(),
            "must be empty, nvme or vfio-pci: the drive is reserved for another driver",
        );
    }
    if drive.group.is_none() {
        refuse("iommu_group", "none".to_owned(), &iommu_advice(root));
    }
    for found in &drive.uses {
        refuse("in use", found.to_string(), found.kind.allowed());
    }
    if let Some(unknown) = &drive.unknown {
        refuse("in use", format!("not known ({unknown})"), "must be known to be unused");
    }
    for function in kernel_functions(root, drive, together) {
        let allowed = "must have no other function with a driver of the kernel, or the group cannot be given \
                       to a process: unbind that one too, or move the drive to another slot";
        refuse("iommu_group", function, allowed);
    }
    refusals
}

/// Returns a refusal for each signature of a file system, volume or partition table, even if the drive is not
/// in use; none if vfio-pci is already bound. Not called with `--force`. Not called for a udev rule either:
/// the drive was accepted when the rule was made, and hosts may have written to it since.
fn check_signatures(drive: &Drive) -> Vec<String> {
    if drive.is_bound_to(VFIO) {
        return Vec::new();
    }
    let allowed = "must be confirmed with --force: it may be part of a volume or file system that is not in \
                   use now; --force binds the drive and does not change its data";
    drive.signatures.iter().map(|found| refusal(drive.address, "holds", found, allowed)).collect()
}

/// Returns the other functions of the drive's IOMMU group that have a kernel driver, with that driver: VFIO
/// refuses such a group. Leaves out bridges, functions with vfio-pci or pci-stub, and the drives of
/// `together`.
fn kernel_functions(root: &Root, drive: &Drive, together: &[PciAddress]) -> Vec<String> {
    let Some(group) = &drive.group else { return Vec::new() };
    let names = root.names(&format!("{}/iommu_group/devices", folder(&drive.address)));
    let mut found = Vec::new();
    for name in names {
        let Ok(fellow) = name.parse::<PciAddress>() else {
            // Not a PCI function. Its driver is not checked, so it counts as a function with a kernel driver.
            found.push(format!("{group} with {name}"));
            continue;
        };
        if fellow == drive.address {
            continue;
        }
        // VFIO allows bridges with a kernel driver, which does no DMA.
        let is_bridge = drive::class(root, &fellow).is_some_and(|class| class.starts_with("0x0604"));
        let driver = drive::driver(root, &fellow);
        let is_harmless = driver.as_deref().is_none_or(|driver| [VFIO, "pci-stub"].contains(&driver));
        if !is_bridge && !is_harmless && !together.contains(&fellow) {
            found.push(format!("{group} with {fellow} ({})", driver.unwrap_or_default()));
        }
    }
    found
}

/// Returns the refusal's text for a drive without an IOMMU group: how to turn on the IOMMU, unless it is on
/// and does not cover the drive.
fn iommu_advice(root: &Root) -> String {
    if !root.names("/sys/kernel/iommu_groups").is_empty() {
        return "must be one: the machine's IOMMU does not cover this drive's slot".to_owned();
    }
    let processor = root.text("/proc/cpuinfo").unwrap_or_default();
    let line = root.value("/proc/cmdline").unwrap_or_default();
    let (firmware, word) = if processor.contains("GenuineIntel") {
        ("VT-d", "intel_iommu=on")
    } else if processor.contains("AuthenticAMD") || processor.contains("HygonGenuine") {
        ("AMD-Vi (IOMMU)", "amd_iommu=on")
    } else {
        return "must be one: the machine has no IOMMU in use; turn it on in the firmware and in the kernel"
            .to_owned();
    };
    if line.split_whitespace().any(|part| part == word) {
        return format!(
            "must be one: the kernel has {word} and found no IOMMU; turn {firmware} on in the firmware"
        );
    }
    format!(
        "must be one: the machine has no IOMMU in use; turn {firmware} on in the firmware, and boot with \
         {word} on the kernel's command line"
    )
}

/// Returns a refusal if the drive's serial number is not that of its rule. `None` also for a rule without a
/// serial number and for a drive that is bound to vfio-pci.
fn check_serial(root: &Root, drive: &Drive) -> Option<String> {
    if drive.is_bound_to(VFIO) {
        return None;
    }
    let wanted = persist::serial(root, &drive.address)?;
    let found = drive.serial.as_deref().map(crate::text::printable);
    let is_wanted = found.as_ref() == Some(&wanted);
    let allowed =
        format!("must be {wanted}, for which the rule was made: unbind and bind the drive to change it");
    let found = found.unwrap_or_else(|| "not known".to_owned());
    (!is_wanted).then(|| refusal(drive.address, "serial", found, &allowed))
}

/// Waits until each drive with a serial number in its rule is `live` with the kernel's driver, which has then
/// read the serial number. The rule may run earlier. Binds the kernel's driver to a drive without one. Stops
/// waiting for a drive after [`READY_POLLS_MAX`] polls, or if it has another driver.
fn wait_until_ready(machine: &dyn Machine, addresses: &[PciAddress], out: Out<'_>) -> Result<(), NvmeError> {
    let root = machine.root();
    for address in addresses.iter().filter(|address| persist::serial(root, address).is_some()) {
        if drive::driver(root, address).is_none()
            && drive::class(root, address).as_deref() == Some(NVME_CLASS)
        {
            for step in [Step::Load(NVME), Step::echo(PROBE, address.to_string())] {
                let failed = |error| NvmeError::failed("bind", &step, &error, &super::state(root, address));
                run_step(machine, &step, out).map_err(failed)?;
            }
        }
        let folder = format!("{}/nvme", folder(address));
        for _ in 0..READY_POLLS_MAX {
            let is_ready =
                |name: String| root.value(&format!("{folder}/{name}/state")).as_deref() == Some("live");
            let is_with_nvme = drive::driver(root, address).as_deref() == Some(NVME);
            if !is_with_nvme || root.names(&folder).into_iter().any(is_ready) {
                break;
            }
            machine.pause();
        }
    }
    Ok(())
}
