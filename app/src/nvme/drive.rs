//! The NVMe drives of the machine, as the kernel shows them.

use std::fs::File;

use spindle_disk::signature;
use spindle_nvme_pcie::PciAddress;

use super::change::{Busy, Machine};
use super::root::Root;
use super::uses::{Use, UseKind, Users};

/// Mass storage, non-volatile memory, NVM Express I/O controller: PCI Code and ID Assignment 1.9.
pub const NVME_CLASS: &str = "0x010802";

/// Where PCI functions are.
const FUNCTIONS: &str = "/sys/bus/pci/devices";

/// The kernel's own driver.
pub const NVME: &str = "nvme";
/// The driver that hands a function to a process.
pub const VFIO: &str = "vfio-pci";

/// Bytes of a sector in `/sys/block/*/size`, whatever the device's blocks.
const SECTOR_BYTES: u64 = 512;

/// A PCI function that is an NVMe controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drive {
    pub address: PciAddress,
    /// PCI vendor and device, four hexadecimal digits each.
    pub ids: (String, String),
    /// The driver that it is bound to.
    pub driver: Option<String>,
    /// The only driver that may have it, where one is set.
    pub driver_override: Option<String>,
    /// Its IOMMU group; none where the machine has no IOMMU, or does not use it.
    pub group: Option<String>,
    /// The NUMA node that it hangs on, where the machine says so.
    pub node: Option<u64>,
    /// What the kernel's driver knows of it.
    pub model: Option<String>,
    /// The same.
    pub serial: Option<String>,
    pub disks: Vec<Disk>,
    /// Signatures on it: file systems, volumes, partition tables.
    pub holds: Vec<String>,
    /// Who uses it, the gravest first.
    pub uses: Vec<Use>,
    /// What could not be found out, and why.
    pub unknown: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// The block device, `nvme0n1`.
    pub name: String,
    pub bytes: u64,
}

impl Drive {
    /// The bytes of all its namespaces; `None` where the kernel knows none.
    pub fn bytes(&self) -> Option<u64> {
        let sum = self.disks.iter().fold(0_u64, |sum, disk| sum.saturating_add(disk.bytes));
        (!self.disks.is_empty()).then_some(sum)
    }

    pub fn is_bound_to(&self, driver: &str) -> bool {
        self.driver.as_deref() == Some(driver)
    }

    /// The character device of its group.
    pub fn group_path(&self) -> Option<String> {
        self.group.as_ref().map(|group| format!("/dev/vfio/{group}"))
    }

    /// `0000:01:00.0 (Model, serial S1)`, as far as it is known.
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

/// The folder of a function in sysfs.
pub fn folder(address: &PciAddress) -> String {
    format!("{FUNCTIONS}/{address}")
}

/// The class of a function; `None` where there is no such function.
pub fn class(root: &Root, address: &PciAddress) -> Option<String> {
    root.value(&format!("{}/class", folder(address)))
}

/// The driver that a function is bound to now.
pub fn driver(root: &Root, address: &PciAddress) -> Option<String> {
    root.link_name(&format!("{}/driver", folder(address)))
}

/// All NVMe drives, by address.
pub fn all(machine: &dyn Machine) -> Vec<Drive> {
    let root = machine.root();
    let addresses = root.names(FUNCTIONS).into_iter().filter_map(|name| name.parse().ok());
    let mut addresses: Vec<PciAddress> =
        addresses.filter(|address| class(root, address).as_deref() == Some(NVME_CLASS)).collect();
    addresses.sort_unstable();
    let users = Users::of(root);
    addresses.into_iter().map(|address| look_at(machine, &users, address)).collect()
}

fn look_at(machine: &dyn Machine, users: &Users, address: PciAddress) -> Drive {
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
        // -1 where there is none.
        node: root.number(&format!("{folder}/numa_node")),
        model: about("model"),
        serial: about("serial"),
        holds: disks.iter().flat_map(|disk| signatures(root, &disk.name)).collect(),
        disks,
        uses: Vec::new(),
        unknown: None,
        address,
    };
    used_as_disks(machine, users, &mut drive);
    // The controller's own device is a way to all of its namespaces.
    if let Some(controller) = &controller {
        let (path, number) = (format!("/dev/{controller}"), about("dev"));
        let device = number.map(|number| format!("c {number}"));
        drive.uses.extend(users.writers(&path, device.as_deref()));
        drive.uses.extend(users.exporters(root, &path, device.as_deref()));
        drive.uses.sort_unstable();
    }
    used_by_vfio(machine, users, &mut drive);
    drive
}

/// The namespaces of a controller: `nvme0n1`; with multipath `nvme0c1n1` is only a path to `nvme0n1`, which
/// is the disk.
fn disks(root: &Root, controller: &str) -> Vec<Disk> {
    let mut disks: Vec<Disk> = Vec::new();
    for name in root.names(controller).iter().filter_map(|name| disk_name(name)) {
        let sectors = root.number(&format!("/sys/class/block/{name}/size"));
        // A name that is no block device is none (a path whose disk is being taken away).
        let Some(sectors) = sectors else { continue };
        if disks.iter().all(|disk| disk.name != name) {
            disks.push(Disk { name, bytes: sectors.saturating_mul(SECTOR_BYTES) });
        }
    }
    disks
}

/// `nvme0n1` of `nvme0n1` and of `nvme0c1n1`; `None` of anything else.
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

/// What udev found at the begin of a disk and of its partitions, and what a look finds.
fn signatures(root: &Root, disk: &str) -> Vec<String> {
    let folder = format!("/sys/class/block/{disk}");
    let partitions = root.names(&folder).into_iter();
    let partitions = partitions.filter(|name| root.has(&format!("{folder}/{name}/partition")));
    let mut found = Vec::new();
    for name in std::iter::once(disk.to_owned()).chain(partitions) {
        let Some(number) = root.value(&format!("/sys/class/block/{name}/dev")) else { continue };
        let database = root.text(&format!("/run/udev/data/b{number}")).unwrap_or_default();
        for key in ["E:ID_FS_TYPE=", "E:ID_PART_TABLE_TYPE="] {
            // Each partition repeats the table that it is in.
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

/// What the magic numbers on a block device say; nothing where it cannot be read, which root can.
fn read_signatures(root: &Root, name: &str) -> Vec<&'static str> {
    let sectors = root.number(&format!("/sys/class/block/{name}/size")).unwrap_or(0);
    let Ok(mut device) = File::open(root.at(&format!("/dev/{name}"))) else { return Vec::new() };
    signature::find(&mut device, sectors.saturating_mul(SECTOR_BYTES)).unwrap_or_default()
}

/// Uses of its block devices and of `/dev/ng0n1`, which is a second way to each.
fn used_as_disks(machine: &dyn Machine, users: &Users, drive: &mut Drive) {
    for disk in &drive.disks {
        let mut uses = users.of_disk(machine.root(), &disk.name);
        let passthrough = disk.name.replacen("nvme", "ng", 1);
        let number = machine.root().value(&format!("/sys/class/nvme-generic/{passthrough}/dev"));
        let device = number.map(|number| format!("c {number}"));
        uses.extend(users.writers(&format!("/dev/{passthrough}"), device.as_deref()));
        match machine.ask_exclusive(&format!("/dev/{}", disk.name)) {
            Busy::No => {}
            // What is known already says more.
            Busy::Yes if uses.iter().any(|found| found.kind < UseKind::Exclusive) => {}
            Busy::Yes => {
                let what = "by somebody else".to_owned();
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

/// A process that has its VFIO group, or the device itself, open.
fn used_by_vfio(machine: &dyn Machine, users: &Users, drive: &mut Drive) {
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
        match machine.ask_group(&group) {
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
