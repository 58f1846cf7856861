//! [`Vfio`]: the container that all drives of the process share, and the groups in it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;
use spindle_reactor::lock::Lock;
use spindle_reactor::mem::Area;
use vfio_bindings::bindings::vfio::VFIO_GROUP_FLAGS_VIABLE;
use vfio_ioctls::VfioContainer;

use super::iova::RANGES_DEFAULT;
use super::sysfs::{Sysfs, unfit};
use super::table::{Iommu, Table};
use super::{info, system};
use crate::address::PciAddress;
use crate::function::OpenFunctionError;

/// The IOMMU container that all drives of the process share. Opened with the first, closed with the last.
///
/// An area is mapped and pinned once for all drives, and counts once against RLIMIT_MEMLOCK. The cost: a
/// drive can access memory that was mapped for another drive, but no other memory of the machine.
pub struct Vfio {
    pub(super) sysfs: Sysfs,
    current: Lock<ContainerState>,
}

#[derive(Default)]
struct ContainerState {
    /// `Some` while there are groups. An empty container is not used again, because the kernel has dropped
    /// its mappings, and remaining [`Mapping`](crate::Mapping) values belong to it.
    container: Option<Arc<Table<Container>>>,
    groups: BTreeMap<u32, Group>,
}

/// A group in the container. The kernel opens a group only once, so drives of the same group share it.
struct Group {
    file: Arc<File>,
    uses: usize,
}

/// Container of the kernel. Its mappings are in [`Table`].
pub(super) struct Container(VfioContainer);

impl Iommu for Container {
    fn map(&self, iova: u64, area: &Area) -> io::Result<()> {
        system::map(&self.0, iova, area).map_err(|error| add_remedy(error, area.bytes(), memory_limit()))
    }

    fn unmap(&self, iova: u64, bytes: usize) -> io::Result<()> {
        self.0.vfio_dma_unmap(iova, bytes).map_err(system::reason)
    }
}

/// Returns the bytes that this process may pin (RLIMIT_MEMLOCK); `None` if unlimited or with CAP_IPC_LOCK.
fn memory_limit() -> Option<u64> {
    let has = rustix::thread::capabilities(None).map(|sets| sets.effective);
    let is_bound = !has.is_ok_and(|has| has.contains(CapabilitySet::IPC_LOCK));
    getrlimit(Resource::Memlock).current.filter(|_| is_bound)
}

/// Adds the remedy to an error that RLIMIT_MEMLOCK may have caused: ENOMEM or EPERM while there is a limit.
fn add_remedy(error: io::Error, bytes: usize, limit: Option<u64>) -> io::Error {
    let is_limit = matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EPERM));
    let Some(limit) = limit.filter(|_| is_limit) else { return error };
    let says = format!(
        "{error}: a drive's memory is pinned, and RLIMIT_MEMLOCK is {} KiB: raise it by at least {} KiB for \
         all drives together (`ulimit -l unlimited`, LimitMEMLOCK=infinity of a service), or give the \
         process CAP_IPC_LOCK",
        limit >> 10,
        bytes.div_ceil(1024),
    );
    io::Error::new(error.kind(), says)
}

/// One use of a group and its container. The drop of the last use closes the group.
pub(super) struct Lease {
    vfio: Arc<Vfio>,
    group: u32,
    /// `None` only during the drop of the lease.
    file: Option<Arc<File>>,
    container: Arc<Table<Container>>,
}

impl Lease {
    pub(super) fn container(&self) -> &Arc<Table<Container>> {
        &self.container
    }

    pub(super) fn open_device(&self, address: PciAddress) -> Result<File, OpenFunctionError> {
        let file = self.file.as_ref().ok_or_else(|| missing(address))?;
        system::open_device(file, &address.to_string()).map_err(|source| match source.raw_os_error() {
            // Removed since sysfs was read.
            Some(libc::ENODEV) => missing(address),
            _ => system_error(address, "open it through its group", source),
        })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut current = self.vfio.current.lock();
        // Under the lock, so that `join` opens the group only after this close: the kernel opens a group only
        // once.
        self.file = None;
        let Some(member) = current.groups.get_mut(&self.group) else { return };
        member.uses -= 1;
        if member.uses > 0 {
            return;
        }
        let member = current.groups.remove(&self.group);
        if current.groups.is_empty() {
            current.container = None;
            self.container.detach(|| drop(member));
        }
    }
}

fn missing(address: PciAddress) -> OpenFunctionError {
    OpenFunctionError::Missing { address: address.to_string() }
}

pub(super) fn system_error(
    address: PciAddress,
    verb: impl Into<String>,
    source: io::Error,
) -> OpenFunctionError {
    OpenFunctionError::System { address: address.to_string(), verb: verb.into(), source }
}

impl Vfio {
    /// Creates the value without opening anything: the container is opened with the first drive.
    #[must_use]
    pub fn new() -> Arc<Vfio> {
        Vfio::with_sysfs(Sysfs::at("/sys"))
    }

    pub(super) fn with_sysfs(sysfs: Sysfs) -> Arc<Vfio> {
        Arc::new(Vfio { sysfs, current: Lock::default() })
    }

    /// Opens the group of a function and attaches the group to the container, if not done yet.
    pub(super) fn join(
        self: &Arc<Self>,
        address: PciAddress,
        group: u32,
    ) -> Result<Lease, OpenFunctionError> {
        let mut current = self.current.lock();
        let container = match &current.container {
            Some(container) => Arc::clone(container),
            None => Table::new(Container(open_container(address)?)),
        };
        let file = match current.groups.get_mut(&group) {
            Some(member) => {
                member.uses += 1;
                Arc::clone(&member.file)
            }
            None => {
                let file = Arc::new(self.open_group(address, group)?);
                self.attach(address, group, &file, &container, current.groups.is_empty())?;
                current.groups.insert(group, Group { file: Arc::clone(&file), uses: 1 });
                current.container = Some(Arc::clone(&container));
                file
            }
        };
        Ok(Lease { vfio: Arc::clone(self), group, file: Some(file), container })
    }

    fn open_group(&self, address: PciAddress, group: u32) -> Result<File, OpenFunctionError> {
        let path = PathBuf::from(format!("/dev/vfio/{group}"));
        let file = File::options().read(true).write(true).open(&path).map_err(|source| {
            match source.raw_os_error() {
                Some(libc::EBUSY) => unfit(
                    address,
                    "IOMMU group",
                    format!("{group}, busy"),
                    "another process has it open: only one process can open a group",
                ),
                Some(libc::EACCES | libc::EPERM) => unfit(
                    address,
                    "permission",
                    format!("none for {}", path.display()),
                    format!("run as root, or let the user open the file: `chown USER {}`", path.display()),
                ),
                _ => system_error(address, format!("open {}", path.display()), source),
            }
        })?;
        let flags = system::group_flags(&file)
            .map_err(|source| system_error(address, "read the state of its group", source))?;
        if flags & VFIO_GROUP_FLAGS_VIABLE == 0 {
            return Err(self.not_viable(address, group));
        }
        Ok(file)
    }

    fn not_viable(&self, address: PciAddress, group: u32) -> OpenFunctionError {
        let others = self.sysfs.blocking_functions(address);
        let value = if others.is_empty() {
            format!("{group}, not viable")
        } else {
            format!("{group}, with {}", others.join(" and "))
        };
        let allowed = "every function of a group must be bound to vfio-pci or to no driver: bind the others \
             as well, or put the drive into another slot";
        unfit(address, "IOMMU group", value, allowed)
    }

    fn attach(
        &self,
        address: PciAddress,
        group: u32,
        file: &File,
        container: &Table<Container>,
        is_first: bool,
    ) -> Result<(), OpenFunctionError> {
        let vfio = &container.iommu().0;
        system::set_container(file, vfio).map_err(|source| match source.raw_os_error() {
            // Another driver was bound since the group's state was read.
            Some(libc::EBUSY) => self.not_viable(address, group),
            _ => no_remapping(address, source, "add its group to the container of the other drives"),
        })?;
        if is_first {
            system::set_iommu(vfio)
                .map_err(|source| no_remapping(address, source, "set up the IOMMU for it"))?;
        }
        let info = system::iommu_info(vfio)
            .map_err(|source| system_error(address, "read the address ranges of its IOMMU", source))?;
        container.set_ranges(info::iova_ranges(&info).unwrap_or_else(|| RANGES_DEFAULT.to_vec()));
        Ok(())
    }
}

/// Returns the error of attaching a group. EPERM means that interrupt remapping is off.
fn no_remapping(address: PciAddress, source: io::Error, verb: &str) -> OpenFunctionError {
    if source.raw_os_error() != Some(libc::EPERM) {
        return system_error(address, verb, source);
    }
    unfit(
        address,
        "interrupt remapping",
        "off",
        "the IOMMU must restrict the interrupts of drives: enable it in the firmware's settings and remove \
         `intremap=off` from the kernel's command line",
    )
}

fn open_container(address: PciAddress) -> Result<VfioContainer, OpenFunctionError> {
    VfioContainer::new(None).map_err(system::reason).map_err(|source| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV) => {
            unfit(address, "/dev/vfio/vfio", "not there", "load the modules: `modprobe vfio-pci`")
        }
        Some(libc::EACCES | libc::EPERM) => unfit(
            address,
            "permission",
            "none for /dev/vfio/vfio",
            "run as root, or let users open the file: `chmod 0666 /dev/vfio/vfio`; no drive becomes \
             accessible by that alone",
        ),
        _ => system_error(address, "open /dev/vfio/vfio", source),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_for_want_of_memory_names_the_limit_and_what_to_set() {
        let refused = || io::Error::from_raw_os_error(libc::ENOMEM);
        let said = add_remedy(refused(), 4 << 20, Some(8 << 20)).to_string();
        assert!(said.contains("RLIMIT_MEMLOCK is 8192 KiB") && said.contains("at least 4096 KiB"), "{said}");
        assert!(said.contains("LimitMEMLOCK=infinity") && said.contains("CAP_IPC_LOCK"), "{said}");
    }

    #[test]
    fn other_refusals_and_those_of_a_process_without_a_limit_are_left_as_they_are() {
        let refused = |number| io::Error::from_raw_os_error(number);
        assert_eq!(add_remedy(refused(libc::EINVAL), 1, Some(1)).raw_os_error(), Some(libc::EINVAL));
        assert_eq!(add_remedy(refused(libc::ENOMEM), 1, None).raw_os_error(), Some(libc::ENOMEM));
    }

    #[test]
    fn without_interrupt_remapping_the_refusal_says_so() {
        let address = "0000:01:00.0".parse().expect("an address");
        let said = no_remapping(address, io::Error::from_raw_os_error(libc::EPERM), "try").to_string();
        assert!(said.starts_with("0000:01:00.0: interrupt remapping is off: "), "{said}");
        let said = no_remapping(address, io::Error::from_raw_os_error(libc::EINVAL), "try").to_string();
        assert_eq!(said, "0000:01:00.0: cannot try: Invalid argument (os error 22)");
    }
}
