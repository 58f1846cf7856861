//! `spindle nvme bind`: takes drives from the kernel for `vfio-pci`.
//!
//! All drives are checked before anything is changed. Then each is moved by itself:
//!
//! ```text
//!   vfio-pci > driver_override      no other driver may have it
//!   address  > driver/unbind        the kernel's driver lets go
//!   address  > drivers_probe        vfio-pci takes it; looked at afterwards
//! ```
//!
//! A step that fails takes back those before it: the override as it was, and the kernel's driver.

use std::collections::BTreeMap;

use spindle_nvme_pcie::PciAddress;

use super::change::{Held, Machine, Step};
use super::drive::{self, Drive, NVME, NVME_CLASS, VFIO, folder};
use super::root::Root;
use super::uses::UseKind;
use super::{NvmeError, Out, PROBE, make, make_back, not_root, persist, refusal, unique};
use crate::cli::NvmeBindArgs;

/// How often a drive that appeared is asked whether its driver is done with it, 100 ms apart. A drive may
/// take longer to become ready (CAP.TO), but then it is not left with its rule.
const READY_ASKED_MAX: u32 = 100;

/// Run it.
///
/// # Errors
/// [`NvmeError`]: what is refused, with nothing changed; or what failed, with the state that is left.
pub fn run(args: &NvmeBindArgs, machine: &dyn Machine, out: Out<'_>) -> Result<(), NvmeError> {
    let addresses = unique(&args.addresses);
    if args.from_rule {
        settle(machine, &addresses, out)?;
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
                refusals.extend(wrong_with(machine.root(), drive, &addresses));
                if args.from_rule {
                    refusals.extend(another_drive(machine.root(), drive));
                } else if !args.force {
                    refusals.extend(held_data(drive));
                }
                drives.push(drive);
            }
            None => refusals.push(no_drive(machine.root(), address, &all)),
        }
    }
    let mut plan = Plan { pages: BTreeMap::new(), program: None };
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
            Ok(program) if persist::may_run(&program) => plan.program = Some(program),
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

/// What is to be done besides binding.
struct Plan {
    /// Files of huge pages, with what they have and what they are to have.
    pages: BTreeMap<String, (u64, u64)>,
    /// The program that rules run; `None` without `--persist`.
    program: Option<String>,
}

impl Plan {
    /// Every step, and none made.
    fn print(&self, root: &Root, drives: &[&Drive], out: Out<'_>) {
        let mut steps = modules(root, drives);
        for drive in drives.iter().filter(|drive| !drive.is_bound_to(VFIO)) {
            steps.extend(moves(drive));
        }
        steps.extend(self.page_steps());
        steps.extend(self.kept(root, drives));
        super::print(&steps, out);
    }

    fn run(&self, machine: &dyn Machine, drives: &[&Drive], out: Out<'_>) -> Result<(), NvmeError> {
        let held = hold(machine, drives)?;
        for step in modules(machine.root(), drives) {
            let failed = |error| NvmeError::failed("bind", &step, &error, "no drive was moved");
            make(machine, &step, out).map_err(failed)?;
        }
        for (drive, held) in drives.iter().zip(held) {
            bind(machine, drive, held, out)?;
        }
        let mut short = Vec::new();
        for step in self.page_steps() {
            let failed = |error| NvmeError::failed("reserve huge pages", &step, &error, &bound(drives));
            make(machine, &step, out).map_err(failed)?;
        }
        for (file, (had, wanted)) in &self.pages {
            let got = machine.root().number(file).unwrap_or(0);
            let place = persist::place(file);
            out(format!("{place} has {got} huge pages of 2 MiB (it had {had}; {wanted} are wanted)"));
            if got < *wanted {
                short.push(format!("{place} gave {got} huge pages of {wanted}"));
            }
        }
        for step in self.kept(machine.root(), drives) {
            let failed = |error| NvmeError::failed("keep the bind", &step, &error, &bound(drives));
            make(machine, &step, out).map_err(failed)?;
        }
        if self.program.is_some() {
            out(persisted(machine.root(), drives));
        }
        if short.is_empty() {
            return Ok(());
        }
        let advice = "what is left is in use or in small pieces: reserve them at boot";
        Err(NvmeError(format!("--huge-pages: {}; {advice}. {}", short.join("; "), bound(drives))))
    }

    fn page_steps(&self) -> Vec<Step> {
        let more = self.pages.iter().filter(|(_, (has, wanted))| wanted > has);
        more.map(|(file, (_, wanted))| Step::echo(file.clone(), wanted.to_string())).collect()
    }

    /// The files in /etc that are missing.
    fn kept(&self, root: &Root, drives: &[&Drive]) -> Vec<Step> {
        let Some(program) = &self.program else { return Vec::new() };
        let mut steps: Vec<Step> = Vec::new();
        for drive in drives {
            for step in persist::keep(root, &drive.address, drive.serial.as_deref(), program) {
                if !steps.contains(&step) {
                    steps.push(step);
                }
            }
        }
        if !self.pages.is_empty() {
            let files: Vec<(String, u64)> =
                self.pages.iter().map(|(file, (_, wanted))| (file.clone(), *wanted)).collect();
            steps.extend(persist::keep_pages(root, &files));
        }
        steps
    }
}

/// `A and B are bound to vfio-pci`.
fn bound(drives: &[&Drive]) -> String {
    let names: Vec<String> = drives.iter().map(|drive| drive.address.to_string()).collect();
    format!("bound to {VFIO}: {}", names.join(", "))
}

/// What a rule does, and what it cannot see.
fn persisted(root: &Root, drives: &[&Drive]) -> String {
    let blind: Vec<String> = drives
        .iter()
        .filter(|drive| persist::serial(root, &drive.address).is_none())
        .map(|drive| drive.address.to_string())
        .collect();
    let mut text = "from now on at boot and at hot-plug too".to_owned();
    if !blind.is_empty() {
        text.push_str(&format!(
            "; a drive that is bound to {VFIO} does not tell its serial number, so the rule of {} will take \
             any unused drive there: unbind it, and bind it again with --persist, to have that checked",
            blind.join(", ")
        ));
    }
    text
}

/// The module that is missing.
fn modules(root: &Root, drives: &[&Drive]) -> Vec<Step> {
    let is_needed = drives.iter().any(|drive| !drive.is_bound_to(VFIO));
    let is_there = root.has(&format!("/sys/bus/pci/drivers/{VFIO}"));
    if is_needed && !is_there { vec![Step::Load(VFIO)] } else { Vec::new() }
}

/// The steps that move a drive.
fn moves(drive: &Drive) -> Vec<Step> {
    let address = drive.address.to_string();
    let mut steps = vec![Step::echo(format!("{}/driver_override", folder(&drive.address)), VFIO)];
    if let Some(driver) = &drive.driver {
        steps.push(Step::echo(format!("/sys/bus/pci/drivers/{driver}/unbind"), address.clone()));
    }
    steps.push(Step::echo(PROBE, address));
    steps
}

/// The disks of each drive, so that what was found unused stays so until the kernel's driver has let go.
fn hold(machine: &dyn Machine, drives: &[&Drive]) -> Result<Vec<Vec<Held>>, NvmeError> {
    let mut held = Vec::new();
    for drive in drives {
        let disks = drive.disks.iter().map(|disk| {
            machine.hold(&format!("/dev/{}", disk.name)).map_err(|error| {
                let value = format!("{}: {error}", disk.name);
                NvmeError(refusal(drive.address, "in use", value, UseKind::Exclusive.allowed()))
            })
        });
        held.push(disks.collect::<Result<_, _>>()?);
    }
    Ok(held)
}

/// Move a drive, or leave it as it was.
fn bind(machine: &dyn Machine, drive: &Drive, mut held: Vec<Held>, out: Out<'_>) -> Result<(), NvmeError> {
    let root = machine.root();
    let group = drive.group_path().unwrap_or_default();
    if drive.is_bound_to(VFIO) {
        out(format!("{} is bound to {VFIO} already: {group}", drive.name()));
        return Ok(());
    }
    for step in moves(drive) {
        if matches!(&step, Step::Echo { path, .. } if path == PROBE) {
            // The disks are gone; an open handle keeps the number of its disk from the next one.
            held.clear();
        }
        if let Err(error) = make(machine, &step, out) {
            return Err(NvmeError::failed("bind", &step, &error, &take_back(machine, drive, out)));
        }
    }
    if drive::driver(root, &drive.address).as_deref() == Some(VFIO) {
        out(format!("{} is bound to {VFIO}: {group}", drive.name()));
        return Ok(());
    }
    let step = Step::echo(PROBE, drive.address.to_string());
    let error = std::io::Error::other(format!("{VFIO} did not take the drive; the kernel's log says why"));
    Err(NvmeError::failed("bind", &step, &error, &take_back(machine, drive, out)))
}

/// Undo what was done to a drive; returns the state that it is in.
fn take_back(machine: &dyn Machine, drive: &Drive, out: Out<'_>) -> String {
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
    make_back(machine, &steps, &drive.address, out)
}

/// There is no such drive: what is at the address instead.
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

/// Everything that forbids to move a drive.
fn wrong_with(root: &Root, drive: &Drive, together: &[PciAddress]) -> Vec<String> {
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
            "must be empty, nvme or vfio-pci: somebody keeps it for another driver",
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
    for fellow in fellows(root, drive, together) {
        let allowed = "must have no other function with a driver of the kernel, or the group cannot be given \
                       to a process: unbind that one too, or move the drive to another slot";
        refuse("iommu_group", fellow, allowed);
    }
    refusals
}

/// Refuse a drive with signatures of a file system, volume or partition table, even when it is not in use.
/// Not for the boot rule: its drive was accepted when the rule was made, and hosts have written to it since.
fn held_data(drive: &Drive) -> Vec<String> {
    if drive.is_bound_to(VFIO) {
        return Vec::new();
    }
    let allowed = "must be meant: it may be a part of a volume or a file system that is not in use now; \
                   --force takes the drive with what is on it, which stays as it is";
    drive.holds.iter().map(|holds| refusal(drive.address, "holds", holds, allowed)).collect()
}

/// The other functions of its group that have a driver of the kernel's, each with it.
fn fellows(root: &Root, drive: &Drive, together: &[PciAddress]) -> Vec<String> {
    let Some(group) = &drive.group else { return Vec::new() };
    let names = root.names(&format!("{}/iommu_group/devices", folder(&drive.address)));
    let mut found = Vec::new();
    for name in names {
        let Ok(fellow) = name.parse::<PciAddress>() else {
            // Not on the PCI bus: we know nothing of it.
            found.push(format!("{group} with {name}"));
            continue;
        };
        if fellow == drive.address {
            continue;
        }
        // Bridges stay with the kernel, whose driver for them leaves DMA alone.
        let is_bridge = drive::class(root, &fellow).is_some_and(|class| class.starts_with("0x0604"));
        let driver = drive::driver(root, &fellow);
        let is_harmless = driver.as_deref().is_none_or(|driver| [VFIO, "pci-stub"].contains(&driver));
        if !is_bridge && !is_harmless && !together.contains(&fellow) {
            found.push(format!("{group} with {fellow} ({})", driver.unwrap_or_default()));
        }
    }
    found
}

/// What is missing for an IOMMU, in the words of this machine's processor.
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

/// A drive that its rule was not made for.
fn another_drive(root: &Root, drive: &Drive) -> Option<String> {
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

/// A rule runs when a drive appears, which may be before its driver has it or has asked it for its serial
/// number. Without a number in the rule nothing is waited for.
fn settle(machine: &dyn Machine, addresses: &[PciAddress], out: Out<'_>) -> Result<(), NvmeError> {
    let root = machine.root();
    for address in addresses.iter().filter(|address| persist::serial(root, address).is_some()) {
        if drive::driver(root, address).is_none()
            && drive::class(root, address).as_deref() == Some(NVME_CLASS)
        {
            for step in [Step::Load(NVME), Step::echo(PROBE, address.to_string())] {
                let failed = |error| NvmeError::failed("bind", &step, &error, &super::state(root, address));
                make(machine, &step, out).map_err(failed)?;
            }
        }
        let folder = format!("{}/nvme", folder(address));
        for _ in 0..READY_ASKED_MAX {
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
