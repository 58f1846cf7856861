//! [`VfioBus`]: opens drives through VFIO with a type 1 IOMMU.
//!
//! ```text
//!   VfioBus::open ─> sysfs: is it an NVMe drive, is there an IOMMU, is it bound to vfio-pci?
//!                 ─> Vfio::join: its group into the container   (container.rs; made with the first drive)
//!                 ─> the device opened from its group, BAR 0 mapped, the removal event armed
//!   Function::map ─> Table::map: one address for all drives     (table.rs, iova.rs)
//! ```
//!
//! `vfio-ioctls` opens only the container; groups are opened as files, and devices by an ioctl (`system.rs`).
//! The device type of `vfio-ioctls` is not used: its drop reads sysfs, and panics after a hot removal.
//!
//! # Closing
//!
//! Clones of the [`Bar`](crate::Bar) and the [`Function`] share one `OpenDevice`. Its drop unmaps the
//! registers, then closes the device, then releases its use of the group. On closing the device, the kernel
//! resets the function and turns bus mastering off. The last use closes the group, and the last group the
//! container.
//!
//! The kernel requires this order: mapped registers count as an open device. A [`Mapping`](crate::Mapping)
//! keeps the container's table and memory alive, not the device.
//!
//! # Removal of a drive
//!
//! On a request (unbinding, attention button) or when the drive is pulled, the kernel unbinds the function's
//! driver. vfio-pci then waits without limit until the last descriptor and mapping of the function are
//! closed. Meanwhile vfio-pci signals the event that [`Function::is_removal_asked`] reads, at once and every
//! 10 s. So neither registers nor memory are unmapped while the device is open. Registers of a pulled drive
//! read as the bus responds: all ones, on QEMU zeroes.
//!
//! Closing resets the function. A reset of a missing function takes 70 s, unless the kernel has detected the
//! removal. On detection the kernel sends the removal request. So after a drive has vanished, wait up to 2 s
//! for that request before closing. [`Function::reset`] first checks whether the function responds.
//!
//! An access to a register raises SIGBUS if its page is not mapped while the function's memory space is off
//! or the function is in D3. The kernel unmaps the pages in three cases:
//! - The process turns memory space off. This does not happen here: `command_word` always sets that bit.
//! - The process selects D3, which does not happen here either.
//! - This function or one in the same slot is reset. An access waits until the page is mapped again.
//!
//! Source: Linux 6.12 `drivers/vfio/pci/vfio_pci_core.c`, functions `vfio_pci_zap_and_down_write_memory_lock`
//! and its callers, `vfio_pci_mmap_huge_fault`, and `__vfio_pci_memory_enabled`. The last one reads VFIO's
//! copy of the command register, which a missing function does not change. The lab tests both kinds of
//! removal while registers are read (`tests/lab/vfio.sh`).

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

/// A PCI address whose drive is opened through VFIO.
#[derive(Clone)]
pub struct VfioBus {
    vfio: Arc<Vfio>,
    address: PciAddress,
}

impl VfioBus {
    /// Creates the bus of the drive at `address`. [`Bus::open`] attaches its group to `vfio`'s container.
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
