//! A machine that is a folder.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::rc::Rc;

use crate::nvme::change::{Busy, ExclusiveHandle, Machine, Step};
use crate::nvme::root::Root;

/// Two drives of most tests.
pub const A: &str = "0000:01:00.0";
pub const B: &str = "0000:02:00.0";

/// Folder, and a kernel in a few lines.
pub struct Fake {
    folder: PathBuf,
    pub root: Root,
    /// Every change, in order.
    pub steps: RefCell<Vec<Step>>,
    /// The step that fails, from 0.
    pub fails_at: Cell<Option<usize>>,
    /// vfio-pci takes no drive, the kernel's driver none.
    pub refusing: RefCell<BTreeSet<&'static str>>,
    /// Block devices, groups that somebody has open.
    pub busy: RefCell<BTreeSet<String>>,
    /// Somebody takes this device as soon as it was asked for and was free.
    pub is_taken_next: RefCell<Option<String>>,
    /// Devices that are held.
    pub held: Rc<RefCell<BTreeSet<String>>>,
    /// Those that were held at each step.
    pub held_at: RefCell<Vec<Vec<String>>>,
    pub is_root: Cell<bool>,
    /// The most huge pages that a file gives.
    pub pages_max: Cell<u64>,
    pub pauses: Cell<u32>,
    pub program: RefCell<String>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Fake {
    /// A machine without drives.
    pub fn empty() -> Fake {
        let folder = std::env::temp_dir().join(format!("spindle-nvme-{}", uuid::Uuid::new_v4()));
        fs::create_dir(&folder).expect("a fresh directory");
        let fake = Fake {
            root: Root::in_folder(folder.clone()),
            folder,
            steps: RefCell::default(),
            fails_at: Cell::default(),
            refusing: RefCell::default(),
            busy: RefCell::default(),
            is_taken_next: RefCell::default(),
            held: Rc::default(),
            held_at: RefCell::default(),
            is_root: Cell::new(true),
            pages_max: Cell::new(u64::MAX),
            pauses: Cell::default(),
            program: RefCell::new("/usr/local/bin/spindle".to_owned()),
        };
        fake.file("/sys/bus/pci/drivers_probe", "");
        fake.driver("nvme");
        fake.file("/proc/cpuinfo", "vendor_id\t: GenuineIntel\n");
        fake.file("/proc/cmdline", "root=/dev/vda quiet\n");
        fake.file("/proc/swaps", "Filename Type Size Used Priority\n");
        fake.mounts(&["22 1 254:0 / / rw - ext4 /dev/vda rw"]);
        fake
    }

    /// A machine with two unused drives, each in a group of its own, and the module vfio-pci not loaded.
    pub fn new() -> Fake {
        let fake = Fake::empty();
        fake.drive(A, 0);
        fake.drive(B, 1);
        fake
    }

    pub fn file(&self, path: &str, text: impl AsRef<[u8]>) {
        let place = self.root.at(path);
        fs::create_dir_all(place.parent().expect("a parent")).expect("folders");
        fs::write(place, text).expect("a file");
    }

    pub fn link(&self, path: &str, target: &str) {
        let place = self.root.at(path);
        fs::create_dir_all(place.parent().expect("a parent")).expect("folders");
        let _ = fs::remove_file(&place);
        symlink(target, place).expect("a link");
    }

    pub fn remove(&self, path: &str) {
        let place = self.root.at(path);
        let is_folder = fs::symlink_metadata(&place).expect("something").is_dir();
        if is_folder { fs::remove_dir_all(place) } else { fs::remove_file(place) }.expect("removed");
    }

    pub fn text(&self, path: &str) -> Option<String> {
        self.root.text(path)
    }

    pub fn mounts(&self, lines: &[&str]) {
        self.file("/proc/self/mountinfo", lines.join("\n"));
    }

    fn driver(&self, name: &str) {
        self.file(&format!("/sys/bus/pci/drivers/{name}/unbind"), "");
    }

    fn place(address: &str) -> String {
        format!("/sys/devices/pci0000:00/{address}")
    }

    /// A function in a group of its own, without a driver.
    pub fn function(&self, address: &str, class: &str) {
        let place = Fake::place(address);
        for (file, value) in [
            ("class", class),
            ("vendor", "0x144d"),
            ("device", "0xa808"),
            ("numa_node", "-1"),
            ("driver_override", "(null)"),
        ] {
            self.file(&format!("{place}/{file}"), format!("{value}\n"));
        }
        self.link(
            &format!("/sys/bus/pci/devices/{address}"),
            &format!("../../../devices/pci0000:00/{address}"),
        );
        self.group(address, &address[5..7]);
    }

    /// Move a function into a group.
    pub fn group(&self, address: &str, group: &str) {
        if let Some(before) = self.root.link_name(&format!("{}/iommu_group", Fake::place(address))) {
            self.remove(&format!("/sys/kernel/iommu_groups/{before}/devices/{address}"));
        }
        self.link(
            &format!("{}/iommu_group", Fake::place(address)),
            &format!("../../../kernel/iommu_groups/{group}"),
        );
        let member = format!("/sys/kernel/iommu_groups/{group}/devices/{address}");
        self.link(&member, &format!("../../../../devices/pci0000:00/{address}"));
    }

    /// Bind a function to a driver.
    pub fn bind(&self, address: &str, driver: &str) {
        self.driver(driver);
        self.link(&format!("{}/driver", Fake::place(address)), &format!("../../../bus/pci/drivers/{driver}"));
    }

    /// A drive with the kernel, `nvmeNn1` of 1 GiB.
    pub fn drive(&self, address: &str, number: u32) {
        self.function(address, "0x010802");
        self.controller(address, number);
        self.namespace(address, number, "n1");
    }

    fn controller(&self, address: &str, number: u32) {
        self.bind(address, "nvme");
        let controller = format!("{}/nvme/nvme{number}", Fake::place(address));
        self.file(&format!("{controller}/model"), "SAMSUNG MZVL2512HCJQ-00B00              \n");
        self.file(&format!("{controller}/serial"), format!("S{number:04}                \n"));
        self.file(&format!("{controller}/state"), "live\n");
    }

    /// `nvme0` and `n1`: the block device `nvme0n1`.
    pub fn namespace(&self, address: &str, number: u32, suffix: &str) {
        let name = format!("nvme{number}{suffix}");
        let disk = format!("{}/nvme/nvme{number}/{name}", Fake::place(address));
        self.block(&name, &disk, &format!("259:{number}{}", &suffix[1..]));
    }

    /// A block device of 1 GiB.
    pub fn block(&self, name: &str, place: &str, number: &str) {
        self.file(&format!("{place}/size"), "2097152\n");
        self.file(&format!("{place}/dev"), format!("{number}\n"));
        fs::create_dir_all(self.root.at(&format!("{place}/holders"))).expect("a folder");
        self.link(&format!("/sys/class/block/{name}"), &place.replacen("/sys", "../..", 1));
    }

    /// A partition of a disk.
    pub fn partition(&self, disk: &str, name: &str, number: &str) {
        let disk = self.root.link(&format!("/sys/class/block/{disk}")).expect("a disk");
        let place = format!("{}/{name}", disk.replacen("../..", "/sys", 1));
        self.block(name, &place, number);
        self.file(&format!("{place}/partition"), "1\n");
    }

    /// A volume on a device: `dm-0`, `md0`.
    pub fn holder(&self, of: &str, name: &str, number: &str) {
        let place = format!("/sys/devices/virtual/block/{name}");
        self.block(name, &place, number);
        self.link(&format!("/sys/class/block/{of}/holders/{name}"), "../../../..");
        if name.starts_with("md") {
            self.file(&format!("{place}/md/level"), "raid1\n");
        } else {
            self.file(&format!("{place}/dm/name"), "vg-data\n");
            self.file(&format!("{place}/dm/uuid"), "LVM-abc-def\n");
        }
    }

    /// A process with a file open.
    pub fn process(&self, pid: u32, name: &str, path: &str, flags: &str) {
        self.file(&format!("/proc/{pid}/comm"), format!("{name}\n"));
        self.file(&format!("/proc/{pid}/fdinfo/7"), format!("pos:\t0\nflags:\t{flags}\n"));
        self.link(&format!("/proc/{pid}/fd/7"), path);
    }

    /// A drive that is with vfio-pci.
    pub fn give_to_vfio(&self, address: &str) {
        self.bind(address, "vfio-pci");
        self.file(&format!("{}/driver_override", Fake::place(address)), "vfio-pci\n");
        let _ = fs::remove_dir_all(self.root.at(&format!("{}/nvme", Fake::place(address))));
    }

    /// What a driver's bind depends on.
    pub fn state(&self, address: &str) -> (Option<String>, Option<String>) {
        let place = Fake::place(address);
        let only = self.root.value(&format!("{place}/driver_override")).filter(|only| only != "(null)");
        (self.root.link_name(&format!("{place}/driver")), only)
    }

    /// Every file, with what is in it.
    pub fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        fn walk(folder: &std::path::Path, found: &mut Vec<(PathBuf, Vec<u8>)>) {
            for entry in fs::read_dir(folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                let kind = fs::symlink_metadata(&path).expect("there").file_type();
                if kind.is_dir() {
                    walk(&path, found);
                } else if kind.is_symlink() {
                    let target = fs::read_link(&path).expect("a target");
                    found.push((path, target.into_os_string().into_encoded_bytes()));
                } else {
                    let bytes = fs::read(&path).expect("its bytes");
                    found.push((path, bytes));
                }
            }
        }
        let mut found = Vec::new();
        walk(&self.folder, &mut found);
        found.sort();
        found
    }

    fn take(&self, address: &str) {
        let (bound, only) = self.state(address);
        let driver = only.unwrap_or_else(|| "nvme".to_owned());
        if bound.is_some() || self.refusing.borrow().contains(driver.as_str()) {
            return;
        }
        match driver.as_str() {
            "nvme" => self.controller(address, u32::from(address == B)),
            other => self.bind(address, other),
        }
    }

    /// What the kernel does when this is written.
    fn react(&self, path: &str, value: &str) {
        if path.ends_with("/drivers_probe") {
            self.take(value);
        } else if path.ends_with("/unbind") {
            let place = Fake::place(value);
            self.remove(&format!("{place}/driver"));
            let _ = fs::remove_dir_all(self.root.at(&format!("{place}/nvme")));
        } else if path.ends_with("/nr_hugepages") {
            let pages = value.parse::<u64>().expect("a number").min(self.pages_max.get());
            self.file(path, format!("{pages}\n"));
        }
    }

    fn ask(&self, path: &str) -> Busy {
        match self.busy.borrow().contains(path) {
            true => Busy::Yes,
            false if self.is_root.get() => Busy::No,
            false => Busy::Unknown(format!("open {path}: Permission denied (os error 13)")),
        }
    }
}

/// A device that is held.
struct HeldDevice {
    path: String,
    all: Rc<RefCell<BTreeSet<String>>>,
}

impl Drop for HeldDevice {
    fn drop(&mut self) {
        self.all.borrow_mut().remove(&self.path);
    }
}

impl Machine for Fake {
    fn root(&self) -> &Root {
        &self.root
    }

    fn is_privileged(&self) -> bool {
        self.is_root.get()
    }

    fn program(&self) -> io::Result<String> {
        Ok(self.program.borrow().clone())
    }

    fn probe_exclusive(&self, path: &str) -> Busy {
        let found = self.ask(path);
        if self.is_taken_next.borrow().as_deref() == Some(path) {
            self.busy.borrow_mut().extend(self.is_taken_next.take());
        }
        found
    }

    fn open_exclusive(&self, path: &str) -> io::Result<ExclusiveHandle> {
        if self.ask(path) != Busy::No || !self.held.borrow_mut().insert(path.to_owned()) {
            return Err(io::Error::from_raw_os_error(16));
        }
        Ok(Box::new(HeldDevice { path: path.to_owned(), all: Rc::clone(&self.held) }))
    }

    fn probe_group(&self, path: &str) -> Busy {
        self.ask(path)
    }

    fn pause(&self) {
        self.pauses.set(self.pauses.get() + 1);
    }

    fn apply(&self, step: &Step) -> io::Result<()> {
        let at = self.steps.borrow().len();
        self.held_at.borrow_mut().push(self.held.borrow().iter().cloned().collect());
        self.steps.borrow_mut().push(step.clone());
        if self.fails_at.get() == Some(at) {
            return Err(io::Error::from_raw_os_error(22));
        }
        match step {
            Step::Load(module) => self.driver(module),
            Step::Echo { path, value } => {
                self.root.echo(path, value)?;
                self.react(path, value);
            }
            Step::Make { path, text } => self.root.make(path, text)?,
            Step::Remove { path } => self.root.remove(path)?,
        }
        Ok(())
    }
}
