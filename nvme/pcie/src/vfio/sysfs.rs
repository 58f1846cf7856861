//! Checks of a function in sysfs before VFIO opens it, so that errors contain the remedy.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::address::PciAddress;
use crate::function::OpenFunctionError;

/// PCI class code: mass storage, non-volatile memory, NVM Express.
const CLASS: u32 = 0x01_08_02;
/// Kernel driver that makes functions available through VFIO.
pub(super) const DRIVER: &str = "vfio-pci";
const NO_IOMMU: &str = "vfio-noiommu";
/// vfio-pci and drivers without DMA, which may share an IOMMU group with VFIO.
const DRIVERS_WITHOUT_DMA: [&str; 4] = [DRIVER, "pci-stub", "pcieport", "shpchp"];

/// Root of sysfs: `/sys`, or a temporary directory in tests.
#[derive(Debug)]
pub(super) struct Sysfs {
    root: PathBuf,
}

impl Sysfs {
    pub(super) fn at(root: impl Into<PathBuf>) -> Sysfs {
        Sysfs { root: root.into() }
    }

    fn function(&self, address: PciAddress) -> PathBuf {
        self.root.join("bus/pci/devices").join(address.to_string())
    }

    /// Returns the IOMMU group of an NVMe drive that is bound to vfio-pci.
    ///
    /// # Errors
    /// The first unmet requirement, with the remedy.
    pub(super) fn group(&self, address: PciAddress) -> Result<u32, OpenFunctionError> {
        let path = self.function(address);
        if !path.exists() {
            return Err(OpenFunctionError::Missing { address: address.to_string() });
        }
        let class = self.read(address, "class")?;
        if class.strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok()) != Some(CLASS) {
            let allowed = format!("allowed is {CLASS:#08x}, an NVMe controller");
            return Err(unfit(address, "class", class, allowed));
        }
        // Checked before the driver: without an IOMMU, binding to vfio-pci does not help.
        let Some(group) = target(&path.join("iommu_group")) else {
            let allowed = "the machine needs an IOMMU that is on: VT-d or AMD-Vi in the firmware's settings, \
                 and intel_iommu=on or amd_iommu=on on the kernel's command line";
            return Err(unfit(address, "iommu_group", "none", allowed));
        };
        // With `enable_unsafe_noiommu_mode` the kernel makes a group without an IOMMU.
        if self.read(address, "iommu_group/name").is_ok_and(|name| name == NO_IOMMU) {
            let allowed = "the machine needs an IOMMU that is on; without one a drive reaches all memory";
            return Err(unfit(address, "iommu_group", format!("{group}, {NO_IOMMU}"), allowed));
        }
        let group =
            group.parse().map_err(|_| unfit(address, "iommu_group", &group, "allowed is a number"))?;
        let driver = target(&path.join("driver")).unwrap_or_else(|| "none".to_owned());
        if driver != DRIVER {
            let allowed = format!("allowed is {DRIVER}: run `spindle nvme bind {address}`");
            return Err(unfit(address, "driver", driver, allowed));
        }
        Ok(group)
    }

    /// Returns the functions of the same group whose drivers make the group unusable, as text "ADDRESS bound
    /// to DRIVER". Empty if sysfs cannot be read.
    pub(super) fn blocking_functions(&self, address: PciAddress) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.function(address).join("iommu_group/devices")) else {
            return Vec::new();
        };
        let mut found: Vec<String> = entries
            .filter_map(|entry| {
                let entry = entry.ok()?;
                let driver = target(&entry.path().join("driver"))?;
                let name = entry.file_name().to_string_lossy().into_owned();
                (!DRIVERS_WITHOUT_DMA.contains(&driver.as_str())).then(|| format!("{name} bound to {driver}"))
            })
            .collect();
        found.sort();
        found
    }

    /// Reads an attribute of a function, without trailing white space.
    fn read(&self, address: PciAddress, name: &str) -> Result<String, OpenFunctionError> {
        match fs::read_to_string(self.function(address).join(name)) {
            Ok(text) => Ok(text.trim_end().to_owned()),
            // The function was removed meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(OpenFunctionError::Missing { address: address.to_string() })
            }
            Err(source) => Err(OpenFunctionError::System {
                address: address.to_string(),
                verb: format!("read its {name}"),
                source,
            }),
        }
    }
}

pub(super) fn unfit(
    address: PciAddress,
    field: &'static str,
    value: impl Into<String>,
    allowed: impl Into<String>,
) -> OpenFunctionError {
    OpenFunctionError::Unfit {
        address: address.to_string(),
        field,
        value: value.into(),
        allowed: allowed.into(),
    }
}

/// Returns the file name of a link's target; `None` if `link` cannot be read as a link.
fn target(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A sysfs tree in a temporary directory, removed on drop.
    struct Tree(PathBuf);

    impl Tree {
        fn new(test: &str) -> Tree {
            // A failed test of an earlier process with this number may have left its own.
            let place = |number| format!("spindle-sysfs-{}-{test}-{number}", std::process::id());
            let mut places = (0..1000).map(|number| std::env::temp_dir().join(place(number)));
            let root = places.find(|place| fs::create_dir(place).is_ok()).expect("a folder");
            fs::create_dir_all(root.join("bus/pci/devices")).expect("a folder");
            Tree(root)
        }

        fn sysfs(&self) -> Sysfs {
            Sysfs::at(&self.0)
        }

        /// A function with what it has of class, group and driver.
        fn with(self, name: &str, class: &str, group: Option<&str>, driver: Option<&str>) -> Tree {
            let path = self.0.join("bus/pci/devices").join(name);
            fs::create_dir_all(&path).expect("a folder");
            fs::write(path.join("class"), format!("{class}\n")).expect("a file");
            if let Some(group) = group {
                let folder = self.0.join("kernel/iommu_groups").join(group);
                fs::create_dir_all(folder.join("devices")).expect("a folder");
                symlink(&folder, path.join("iommu_group")).expect("a link");
                symlink(&path, folder.join("devices").join(name)).expect("a link");
            }
            if let Some(driver) = driver {
                let folder = self.0.join("bus/pci/drivers").join(driver);
                fs::create_dir_all(&folder).expect("a folder");
                symlink(&folder, path.join("driver")).expect("a link");
            }
            self
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).expect("it was there");
        }
    }

    fn address() -> PciAddress {
        "0000:01:00.0".parse().expect("an address")
    }

    fn refusal(tree: &Tree) -> String {
        tree.sysfs().group(address()).expect_err("is refused").to_string()
    }

    #[test]
    fn a_drive_that_is_bound_to_vfio_is_taken_with_its_group() {
        let tree = Tree::new("taken").with("0000:01:00.0", "0x010802", Some("17"), Some("vfio-pci"));
        assert_eq!(tree.sysfs().group(address()).expect("is taken"), 17);
    }

    #[test]
    fn an_absent_function_is_reported_as_missing() {
        let tree = Tree::new("missing").with("0000:01:00.1", "0x010802", Some("17"), Some("vfio-pci"));
        let error = tree.sysfs().group(address()).expect_err("is refused");
        assert!(matches!(&error, OpenFunctionError::Missing { address } if address == "0000:01:00.0"));
    }

    #[test]
    fn what_is_no_drive_is_refused() {
        let tree = Tree::new("class").with("0000:01:00.0", "0x020000", Some("17"), Some("vfio-pci"));
        assert_eq!(
            refusal(&tree),
            "0000:01:00.0: class is 0x020000: allowed is 0x010802, an NVMe controller"
        );
    }

    #[test]
    fn a_drive_of_another_driver_or_of_none_is_refused_with_the_command_that_binds_it() {
        for driver in [Some("nvme"), None] {
            let tree = Tree::new("driver").with("0000:01:00.0", "0x010802", Some("17"), driver);
            assert_eq!(
                refusal(&tree),
                format!(
                    "0000:01:00.0: driver is {}: allowed is vfio-pci: run `spindle nvme bind 0000:01:00.0`",
                    driver.unwrap_or("none")
                )
            );
        }
    }

    #[test]
    fn a_machine_without_an_iommu_is_refused_whatever_the_driver() {
        for driver in [Some("nvme"), Some("vfio-pci"), None] {
            let tree = Tree::new("iommu").with("0000:01:00.0", "0x010802", None, driver);
            let said = refusal(&tree);
            assert!(said.starts_with("0000:01:00.0: iommu_group is none: "), "{said}");
            assert!(said.contains("intel_iommu=on"), "{said}");
        }
    }

    #[test]
    fn a_group_without_an_iommu_behind_it_is_refused() {
        let tree = Tree::new("noiommu").with("0000:01:00.0", "0x010802", Some("0"), Some("vfio-pci"));
        fs::write(tree.0.join("kernel/iommu_groups/0/name"), "vfio-noiommu\n").expect("a file");
        let said = refusal(&tree);
        assert!(
            said.starts_with("0000:01:00.0: iommu_group is 0, vfio-noiommu: the machine needs"),
            "{said}"
        );
    }

    #[test]
    fn neighbours_of_a_group_are_named_when_their_driver_is_in_the_way() {
        let tree = Tree::new("group")
            .with("0000:01:00.0", "0x010802", Some("17"), Some("vfio-pci"))
            .with("0000:01:00.1", "0x010601", Some("17"), Some("ahci"))
            .with("0000:01:00.2", "0x020000", Some("17"), Some("e1000e"))
            .with("0000:01:00.3", "0x020000", Some("17"), None)
            .with("0000:00:01.0", "0x060400", Some("17"), Some("pcieport"))
            .with("0000:02:00.0", "0x010802", Some("18"), Some("nvme"));
        assert_eq!(
            tree.sysfs().blocking_functions(address()),
            ["0000:01:00.1 bound to ahci", "0000:01:00.2 bound to e1000e"]
        );
    }
}
