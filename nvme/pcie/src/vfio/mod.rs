//! [`VfioBus`]: opens drives through VFIO with a type 1 IOMMU.
//!
//! ```text
//!   VfioBus::open ─> sysfs: is it an NVMe drive, is there an IOMMU, is it bound to vfio-pci?
//!                 ─> Vfio::join: its group into the container   (container.rs; made with the first drive)
//!                 ─> the device out of its group: BAR 0 mapped, the removal request armed
//!   Function::map ─> Table::map: one address for all drives     (table.rs, iova.rs)
//! ```
//!
//! Groups and devices are opened by ioctls in `system.rs`, the container by `vfio-ioctls`: that crate's
//! device reads sysfs when it is dropped, and panics if the function was removed meanwhile, as in a hot
//! removal.
//!
//! # Closing
//!
//! Clones of the [`Bar`](crate::Bar) and the [`Function`] share one `OpenDevice`. When the last of them is
//! dropped, the registers are unmapped, then the device is closed (the kernel resets it and turns bus
//! mastering off), then its group, and with the last group the container. The kernel requires this order:
//! mapped registers count as an open device. A [`Mapping`](crate::Mapping) keeps the container's table and
//! memory, not the device.
//!
//! # Removal of a drive
//!
//! On a request (unbinding, attention button) or when the drive is pulled, the kernel unbinds the function's
//! driver. vfio-pci then waits without limit until the last descriptor and mapping of the function are
//! closed. Meanwhile it signals the event that [`Function::is_removal_asked`] reads, at once and every 10 s.
//! So neither registers nor memory are unmapped while the device is open, and registers of a pulled drive
//! read as the bus responds: all ones, on QEMU zeroes.
//!
//! Closing resets the function. A reset of a missing function takes 70 s unless the kernel has detected the
//! removal, which then sends the removal request. So after a drive has vanished, wait a second or two for
//! that request before closing it. ([`Function::reset`] checks first.)
//!
//! An access to a register raises SIGBUS if its page is not mapped while the function's memory space is off
//! or the function is in D3. The kernel unmaps pages in three cases: the process turns memory space off or
//! selects D3, neither of which is done here (`command_word` always sets that bit, whatever was read); or a
//! reset, of this function or of one in the same slot, during which an access waits until the page is mapped
//! again. (Linux 6.12 `drivers/vfio/pci/vfio_pci_core.c`: `vfio_pci_zap_and_down_write_memory_lock` and its
//! callers, `vfio_pci_mmap_huge_fault`, `__vfio_pci_memory_enabled`, which reads VFIO's copy of the command
//! register; a missing function does not change that copy.) The lab tests both kinds of removal while
//! registers are read (`tests/lab/vfio.sh`).

mod container;
mod device;
mod info;
mod iova;
mod sysfs;
mod system;
mod table;

use std::fmt;
use std::sync::Arc;

pub use container::Vfio;

use crate::address::PciAddress;
use crate::function::{Bus, Function, OpenFunctionError};

/// Opens the drive at a PCI address through VFIO.
#[derive(Clone)]
pub struct VfioBus {
    vfio: Arc<Vfio>,
    address: PciAddress,
}

impl VfioBus {
    /// The drive at `address` joins the container of `vfio`.
    #[must_use]
    pub fn new(vfio: Arc<Vfio>, address: PciAddress) -> VfioBus {
        VfioBus { vfio, address }
    }
}

impl Bus for VfioBus {
    fn address(&self) -> String {
        self.address.to_string()
    }

    fn open(&self) -> Result<Arc<dyn Function>, OpenFunctionError> {
        let group = self.vfio.sysfs.group(self.address)?;
        let lease = self.vfio.join(self.address, group)?;
        Ok(Arc::new(device::VfioFunction::open(self.address, lease)?))
    }
}

impl fmt::Debug for VfioBus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VfioBus({})", self.address)
    }
}
