//! [`VfioBus`]: drives that the kernel lends to this process, through VFIO with an IOMMU of type 1.
//!
//! ```text
//!   VfioBus::open ─> sysfs: is it an NVMe drive, is there an IOMMU, is it bound to vfio-pci?
//!                 ─> Vfio::join: its group into the container   (container.rs; made with the first drive)
//!                 ─> the device out of its group: BAR 0 mapped, the removal request armed
//!   Function::map ─> Table::map: one address for all drives     (table.rs, iova.rs)
//! ```
//!
//! Groups and devices are opened by ioctls of our own (`system.rs`), the container by `vfio-ioctls`: that
//! crate's device reads sysfs when it is dropped and panics where the function has gone meanwhile, as it does
//! in a hot removal.
//!
//! # Closing
//!
//! Clones of the [`Bar`](crate::Bar) and the [`Function`] share one `Held`. With the last of them the
//! registers are unmapped, then the device is closed (the kernel resets it and turns bus mastering off), then
//! its group, and with the last group the container. That is the order the kernel wants: registers that are
//! mapped count as an open device. A [`Mapping`](crate::Mapping) keeps the container's table and its memory,
//! no device.
//!
//! # A drive that goes
//!
//! Asked (unbinding, an attention button) or pulled, the kernel takes a function away by unbinding its
//! driver, and vfio-pci then waits, without limit, until the last descriptor and the last mapping of it are
//! gone. Meanwhile it counts up the event that [`Function::is_removal_asked`] reads, at once and every 10 s.
//! So neither the registers nor the memory vanish under us: while we hold the device its mapping stays, and
//! registers of a drive that was pulled read as the bus answers: all ones, on QEMU zeroes.
//!
//! Closing resets the function, and a reset of one that is gone waits 70 s for it, unless the kernel knows
//! that it is gone. Who sees a drive vanish does well to wait a second or two for the removal request, which
//! comes when the kernel knows, before he closes it. ([`Function::reset`] looks first.)
//!
//! What would raise SIGBUS is to touch a register whose page is not mapped in yet, or not any more, while the
//! function's memory space is off or it sleeps in D3. The kernel takes pages away in three cases: we switch
//! memory space off, which nothing here does (`command_word` always has that bit, whatever was read); we put
//! it to sleep, the same; or a reset, our own or of a function in the same slot, during which a touch waits
//! and then finds the page again. (Linux 6.12 `drivers/vfio/pci/vfio_pci_core.c`:
//! `vfio_pci_zap_and_down_write_memory_lock` and who calls it, `vfio_pci_mmap_huge_fault`,
//! `__vfio_pci_memory_enabled`. What the last one looks at is VFIO's own copy of the command word, which a
//! function that has gone does not change.) The lab tests both ways of going while registers are read
//! (`tests/lab/vfio.sh`).

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

/// A drive's place on the PCI bus, whose drive is opened through VFIO.
#[derive(Clone)]
pub struct VfioBus {
    vfio: Arc<Vfio>,
    address: PciAddress,
}

impl VfioBus {
    /// The place `address`; its drive shares a container with the others of `vfio`.
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
