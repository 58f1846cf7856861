//! The NVMe drives of the machine, read from sysfs, /proc, udev's database and the devices themselves.

use std::fs::File;

use spindle_nvme_pcie::PciAddress;
use spindle_target_disk::signature;

use super::change::{Busy, Machine};
use super::root::Root;
use super::uses::{DeviceUses, Use, UseKind};

/// Mass storage, non-volatile memory, NVM Express I/O controller: PCI Code and ID Assignment 1.9.
pub const NVME_CLASS: &str = "0x010802";

const FUNCTIONS: &str = "/sys/bus/pci/devices";

pub const NVME: &str = "nvme";
/// The driver with which a process controls a PCI function.
pub const VFIO: &str = "vfio-pci";

/// Unit of `/sys/block/*/size`, independent of the device's block size.
const SECTOR_BYTES: u64 = 512;

/// A PCI function that is an NVMe controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drive {
    pub address: PciAddress,
    /// PCI vendor and device identifiers, four hexadecimal digits each, or `????` if unknown.
    pub ids: (String, String),
    /// `None`: bound to no driver.
    pub driver: Option<String>,
    /// `driver_override` of sysfs: the only driver that may bind. `None`: any.
    pub driver_override: Option<String>,
    /// IOMMU group; `None`: the machine has no IOMMU, it is off, or it does not cover the drive.
    pub group: Option<String>,
    /// NUMA node; `None`: the machine does not report one.
    pub node: Option<u64>,
    /// `None` unless the kernel's driver is bound.
    pub model: Option<String>,
    /// `None` unless the kernel's driver is bound.
    pub serial: Option<String>,
    pub disks: Vec<Disk>,
    /// Signatures of file systems, volumes and partition tables, such as `ext4 on nvme0n1p1`.
    pub signatures: Vec<String>,
    /// Sorted in the order of [`UseKind`].
    pub uses: Vec<Use>,
    /// The last check for uses that failed, and why; `None`: all succeeded.
    pub unknown: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Name of the block device, `nvme0n1`.
    pub name: String,
    pub bytes: u64,
}

impl Drive {
    /// Returns the capacity of all disks in bytes; `None` without a disk, such as when vfio-pci is bound.
    pub fn bytes(&self) -> Option<u64> {
        let sum = self.disks.iter().fold(0_u64, |sum, disk| sum.saturating_add(disk.bytes));
        (!self.disks.is_empty()).then_some(sum)
    }

    pub fn is_bound_to(&self, driver: &str) -> bool {
        self.driver.as_deref() == Some(driver)
    }

    /// Returns the path of the VFIO character device of the drive's IOMMU group; `None` without a group.
    pub fn group_path(&self) -> Option<String> {
        self.group.as_ref().map(|group| format!("/dev/vfio/{group}"))
    }

    /// Returns `0000:01:00.0 (Model, serial S1)`, without the parts that are unknown.
    pub fn name(&self) -> String {
        let about: Vec<String> = self
            .model
            .iter()
            .cloned()
            .chain(self.serial.iter().map(|serial| format!("serial {serial}")))
            .collect();
        if about.is_empty() {
            self.address.to_string()
        } else {
            format!("{} ({})", self.address, about.join(", "))
        }
    }
}

/// Returns the sysfs directory of a PCI function.
pub fn folder(address: &PciAddress) -> String {
    format!("{FUNCTIONS}/{address}")
}

/// Returns the PCI class code, such as `0x010802`; `None`: no such function.
pub fn class(root: &Root, address: &PciAddress) -> Option<String> {
    root.value(&format!("{}/class", folder(address)))
}

/// Returns the driver that is bound to a function now; `None`: no driver.
pub fn driver(root: &Root, address: &PciAddress) -> Option<String> {
    root.link_name(&format!("{}/driver", folder(address)))
}

/// Returns all NVMe drives, sorted by address.
pub fn all(machine: &dyn Machine) -> Vec<Drive> {
    let root = machine.root();
    let addresses = root.names(FUNCTIONS).into_iter().filter_map(|name| name.parse().ok());
    let mut addresses: Vec<PciAddress> =
        addresses.filter(|address| class(root, address).as_deref() == Some(NVME_CLASS)).collect();
    addresses.sort_unstable();
    let users = DeviceUses::read(root);
    addresses.into_iter().map(|address| read_drive(machine, &users, address)).collect()
}

fn read_drive(machine: &dyn Machine, users: &DeviceUses, address: PciAddress) -> Drive {
    let root = machine.root();
    let folder = folder(&address);
    let value = |file: &str| root.value(&format!("{folder}/{file}"));
    let id = |file: &str| {
        value(file).map_or_else(|| "????".to_owned(), |id| id.trim_start_matches("0x").to_owned())
    };
    let controller = root.names(&format!("{folder}/nvme")).into_iter().find(|name| name.starts_with("nvme"));
    let about = |file: &str| root.value(&format!("{folder}/nvme/{}/{file}", controller.as_deref()?));
    let disks =
        controller.as_ref().map_or_else(Vec::new, |name| disks(root, &format!("{folder}/nvme/{name}")));
    let driver_override = value("driver_override").filter(|name| name != "(null)");
    let mut drive = Drive {
        ids: (id("vendor"), id("device")),
        driver: driver(root, &address),
        driver_override,
        group: root.link_name(&format!("{folder}/iommu_group")),
        // sysfs contains -1 without a node, which does not parse.
        node: root.number(&format!("{folder}/numa_node")),
        model: about("model"),
        serial: about("serial"),
        signatures: disks.iter().flat_map(|disk| signatures(root, &disk.name)).collect(),
        disks,
        uses: Vec::new(),
        unknown: None,
        address,
    };
    add_disk_uses(machine, users, &mut drive);
    // All namespaces can be reached through the controller's character device.
    if let Some(controller) = &controller {
        let (path, number) = (format!("/dev/{controller}"), about("dev"));
        let device = number.map(|number| format!("c {number}"));
        drive.uses.extend(users.writers(&path, device.as_deref()));
        drive.uses.extend(users.exporters(root, &path, device.as_deref()));
        drive.uses.sort_unstable();
    }
    add_vfio_uses(machine, users, &mut drive);
    drive
}

/// Returns the disks of a controller. With multipath, the controller's directory contains a path, such as
/// `nvme0c1n1`; the disk of that path is `nvme0n1`.
fn disks(root: &Root, controller: &str) -> Vec<Disk> {
    let mut disks: Vec<Disk> = Vec::new();
    for name in root.names(controller).iter().filter_map(|name| disk_name(name)) {
        let sectors = root.number(&format!("/sys/class/block/{name}/size"));
        // No such block device: the disk is being removed.
        let Some(sectors) = sectors else { continue };
        if disks.iter().all(|disk| disk.name != name) {
            disks.push(Disk { name, bytes: sectors.saturating_mul(SECTOR_BYTES) });
        }
    }
    disks
}

/// Returns `nvme0n1` for `nvme0n1` and `nvme0c1n1`; `None` for any other name.
fn disk_name(name: &str) -> Option<String> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|letter| letter.is_ascii_digit());
    let (subsystem, namespace) = name.strip_prefix("nvme")?.rsplit_once('n')?;
    let subsystem = match subsystem.split_once('c') {
        Some((subsystem, controller)) if is_number(controller) => subsystem,
        Some(_) => return None,
        None => subsystem,
    };
    (is_number(subsystem) && is_number(namespace)).then(|| format!("nvme{subsystem}n{namespace}"))
}

/// Returns the signatures of a disk and its partitions, from udev's database and from reading the devices.
fn signatures(root: &Root, disk: &str) -> Vec<String> {
    let folder = format!("/sys/class/block/{disk}");
    let partitions = root.names(&folder).into_iter();
    let partitions = partitions.filter(|name| root.has(&format!("{folder}/{name}/partition")));
    let mut found = Vec::new();
    for name in std::iter::once(disk.to_owned()).chain(partitions) {
        let Some(number) = root.value(&format!("/sys/class/block/{name}/dev")) else { continue };
        let database = root.text(&format!("/run/udev/data/b{number}")).unwrap_or_default();
        for key in ["E:ID_FS_TYPE=", "E:ID_PART_TABLE_TYPE="] {
            // udev also lists the partition table of the disk for each partition.
            let is_repeated = key.contains("TABLE") && name != disk;
            let kind = database.lines().find_map(|line| line.strip_prefix(key)).filter(|_| !is_repeated);
            found.extend(kind.map(|kind| format!("{kind} on {name}")));
        }
        for kind in read_signatures(root, &name) {
            let is_known = |line: &String| {
                let (its, of) = line.split_once(" on ").unwrap_or_default();
                of == name && (its == kind || (its.starts_with("ext") && kind == "ext4"))
            };
            if !found.iter().any(is_known) {
                found.push(format!("{kind} on {name}"));
            }
        }
    }
    found
}

/// Reads the signatures of a block device; empty if the device cannot be read, as by a user other than root.
fn read_signatures(root: &Root, name: &str) -> Vec<&'static str> {
    let sectors = root.number(&format!("/sys/class/block/{name}/size")).unwrap_or(0);
    let Ok(mut device) = File::open(root.at(&format!("/dev/{name}"))) else { return Vec::new() };
    signature::find(&mut device, sectors.saturating_mul(SECTOR_BYTES)).unwrap_or_default()
}

/// Adds uses of the drive's block devices, and of the generic character devices (`/dev/ng0n1`) for the same
/// namespaces. Sets `unknown` if a check fails.
fn add_disk_uses(machine: &dyn Machine, users: &DeviceUses, drive: &mut Drive) {
    for disk in &drive.disks {
        let mut uses = users.of_disk(machine.root(), &disk.name);
        let passthrough = disk.name.replacen("nvme", "ng", 1);
        let number = machine.root().value(&format!("/sys/class/nvme-generic/{passthrough}/dev"));
        let device = number.map(|number| format!("c {number}"));
        uses.extend(users.writers(&format!("/dev/{passthrough}"), device.as_deref()));
        match machine.probe_exclusive(&format!("/dev/{}", disk.name)) {
            Busy::No => {}
            // A use that was found already explains why the disk is open exclusively.
            Busy::Yes if uses.iter().any(|found| found.kind < UseKind::Exclusive) => {}
            Busy::Yes => {
                let what = "by another user of the device".to_owned();
                uses.push(Use { kind: UseKind::Exclusive, device: disk.name.clone(), what });
            }
            Busy::Unknown(reason) => {
                drive.unknown = Some(format!("whether {} is in use: {reason}", disk.name))
            }
        }
        drive.uses.extend(uses);
    }
    drive.uses.sort_unstable();
}

/// Adds processes with the drive's VFIO group or device open. Sets `unknown` if the check fails.
fn add_vfio_uses(machine: &dyn Machine, users: &DeviceUses, drive: &mut Drive) {
    let Some(group) = drive.group_path().filter(|_| drive.is_bound_to(VFIO)) else { return };
    let devices = machine.root().names(&format!("{}/vfio-dev", folder(&drive.address)));
    let mut paths: Vec<String> = devices.iter().map(|name| format!("/dev/vfio/devices/{name}")).collect();
    paths.push(group.clone());
    let mut uses: Vec<Use> = users
        .of_files(&paths)
        .map(|(path, process)| {
            let by = if process.contains("(spindle") { "served by" } else { "by" };
            Use { kind: UseKind::Vfio, device: path.to_owned(), what: format!("{by} {process}") }
        })
        .collect();
    if uses.is_empty() {
        match machine.probe_group(&group) {
            Busy::No => {}
            Busy::Yes => {
                let what = "by a process that /proc does not show".to_owned();
                uses.push(Use { kind: UseKind::Vfio, device: group, what });
            }
            Busy::Unknown(reason) => drive.unknown = Some(format!("whether {group} is in use: {reason}")),
        }
    }
    uses.sort_unstable();
    uses.dedup();
    drive.uses.extend(uses);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_a_multipath_disk_names_the_disk() {
        assert_eq!(disk_name("nvme0n1").as_deref(), Some("nvme0n1"));
        assert_eq!(disk_name("nvme2c13n40").as_deref(), Some("nvme2n40"));
        for name in
            ["nvme0", "nvmen1", "nvme0cn1", "nvme0c1", "ng0n1", "nvme0n", "nvmexn1", "hwmon1", "n1", ""]
        {
            assert_eq!(disk_name(name), None, "{name}");
        }
    }
}
