//! [`VfioFunction`]: one PCI function, opened through VFIO.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nvme_spec::register::DOORBELLS;
use rustix::event::{EventfdFlags, eventfd};
use spindle_reactor::mem::Area;
use vfio_bindings::bindings::vfio::{VFIO_PCI_BAR0_REGION_INDEX, VFIO_PCI_CONFIG_REGION_INDEX};

use super::container::{Lease, system_error};
use super::info;
use super::sysfs::unfit;
use super::system::{self, Registers};
use crate::address::PciAddress;
use crate::bar::Bar;
use crate::function::{Function, MapError, Mapping, OpenFunctionError};
use crate::quirks::PciId;

/// Offset of the command word in configuration space (PCI Local Bus 3.0 section 6.2.2).
const COMMAND: u64 = 4;
/// Offset of revision and class, which VFIO reads from the function itself.
const CLASS: u64 = 8;
/// Command register: the function responds to accesses of its BARs.
const MEMORY_SPACE: u16 = 1 << 1;
/// Command register: the function may access memory (DMA).
const BUS_MASTER: u16 = 1 << 2;

/// Command register: disables INTx, which VFIO enables. Completions of the admin queue would raise INTx
/// without a handler, and the kernel would disable the interrupt line for all devices on it.
const INTERRUPT_DISABLE: u16 = 1 << 10;

/// Minimum mappable bytes of BAR 0: the registers and a page of doorbells.
const BAR_BYTES_MIN: u64 = DOORBELLS as u64 + 0x1000;

/// Resources of an open function, in the order in which they are closed.
struct OpenDevice {
    registers: Registers,
    device: File,
    lease: Lease,
}

pub(super) struct VfioFunction {
    address: PciAddress,
    bar: Bar,
    held: Arc<OpenDevice>,
    /// Offset of configuration space in the device's file.
    configuration: u64,
    /// Event that the kernel signals when it requests the removal.
    removal: OwnedFd,
    is_removal_asked: AtomicBool,
}

impl VfioFunction {
    /// Opens the function `address` of the leased group and maps BAR 0.
    pub(super) fn open(address: PciAddress, lease: Lease) -> Result<VfioFunction, OpenFunctionError> {
        let device = lease.open_device(address)?;
        let configuration = region(address, &device, VFIO_PCI_CONFIG_REGION_INDEX)?.head.offset;
        let region = region(address, &device, VFIO_PCI_BAR0_REGION_INDEX)?;
        let mappable = info::mappable_bytes(&region, region.head.flags, region.head.size);
        if mappable < BAR_BYTES_MIN {
            let value = format!("{} bytes, {mappable} of them mappable", region.head.size);
            let allowed = format!("at least {BAR_BYTES_MIN} bytes of registers and doorbells");
            return Err(unfit(address, "BAR 0", value, allowed));
        }
        let removal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| system_error(address, "create an eventfd", error.into()))?;
        system::arm_removal(&device, removal.as_fd())
            .map_err(|source| system_error(address, "register for notice of its removal", source))?;
        write_command(&device, configuration, false)
            .map_err(|source| system_error(address, "enable its registers", source))?;
        let bytes = usize::try_from(mappable).unwrap_or(usize::MAX);
        let registers = Registers::map(&device, region.head.offset, bytes)
            .map_err(|source| system_error(address, "map its registers", source))?;
        let held = Arc::new(OpenDevice { registers, device, lease });
        Ok(VfioFunction {
            address,
            bar: Registers::bar(&held, |held| &held.registers),
            held,
            configuration,
            removal,
            is_removal_asked: AtomicBool::new(false),
        })
    }
}

type Region = info::Info<vfio_bindings::bindings::vfio::vfio_region_info>;

fn region(address: PciAddress, device: &File, index: u32) -> Result<Region, OpenFunctionError> {
    system::region_info(device, index).map_err(|source| {
        system_error(address, format!("read the description of its region {index}"), source)
    })
}

/// Returns the new value of the command register. Memory space is turned on whatever was read, to avoid
/// SIGBUS (see `vfio.rs`). INTx is disabled.
fn command_word(now: u16, is_master: bool) -> u16 {
    let master = if is_master { BUS_MASTER } else { 0 };
    now & !BUS_MASTER | MEMORY_SPACE | INTERRUPT_DISABLE | master
}

fn write_command(device: &File, configuration: u64, is_master: bool) -> io::Result<()> {
    let mut word = [0; 2];
    device.read_exact_at(&mut word, configuration + COMMAND)?;
    let word = command_word(u16::from_le_bytes(word), is_master);
    device.write_all_at(&word.to_le_bytes(), configuration + COMMAND)
}

impl Function for VfioFunction {
    fn bar(&self) -> Bar {
        self.bar.clone()
    }

    fn id(&self) -> io::Result<PciId> {
        let mut words = [0; 4];
        self.held.device.read_exact_at(&mut words, self.configuration)?;
        let [a, b, c, d] = words;
        Ok(PciId { vendor: u16::from_le_bytes([a, b]), device: u16::from_le_bytes([c, d]) })
    }

    fn map(&self, area: &Area) -> Result<Box<dyn Mapping>, MapError> {
        match self.held.lease.container().map(area) {
            Ok(mapped) => Ok(Box::new(mapped)),
            Err(source) => Err(MapError { function: self.address.to_string(), bytes: area.bytes(), source }),
        }
    }

    fn set_bus_master(&self, is_on: bool) -> io::Result<()> {
        write_command(&self.held.device, self.configuration, is_on)
    }

    fn reset(&self) -> io::Result<()> {
        // Checked first: the kernel would wait more than a minute for a function that does not respond.
        let mut class = [0; 4];
        self.held.device.read_exact_at(&mut class, self.configuration + CLASS)?;
        if class == [0xff; 4] {
            return Err(io::Error::new(io::ErrorKind::NotFound, "it does not respond: it was removed"));
        }
        system::reset(&self.held.device).map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => io::Error::new(error.kind(), format!("{error}: it has no reset method")),
            Some(libc::EAGAIN) => {
                io::Error::new(error.kind(), format!("{error}: the kernel is using it or removing it"))
            }
            _ => error,
        })?;
        self.set_bus_master(true)
    }

    fn is_removal_asked(&self) -> bool {
        // Non-blocking: fails with EAGAIN until the event was signalled.
        let mut count = [0; 8];
        if rustix::io::read(&self.removal, &mut count).is_ok() {
            self.is_removal_asked.store(true, Ordering::Relaxed);
        }
        self.is_removal_asked.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pci_command_keeps_memory_space_on_intx_off_and_its_other_bits_unchanged() {
        for now in [0, 0x0400, 0x0406, 0xffff] {
            for is_master in [true, false] {
                let word = command_word(now, is_master);
                assert_ne!(word & MEMORY_SPACE, 0, "{now:#x}");
                assert_ne!(word & INTERRUPT_DISABLE, 0, "{now:#x}");
                assert_eq!(word & BUS_MASTER != 0, is_master, "{now:#x}");
                assert_eq!((word ^ now) & !(MEMORY_SPACE | BUS_MASTER | INTERRUPT_DISABLE), 0, "{now:#x}");
            }
        }
    }
}
