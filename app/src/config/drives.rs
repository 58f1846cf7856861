//! [`DriveSource`]: where the drives of a plan come from, so that what is made of absent ones, and of those
//! that come back, can be tested without any.

use std::sync::Arc;

use spindle_nvme_pcie::{Drive, DriveError, Drives, PciAddress, Settings};

use super::machine::look_at_function;

/// Drives by their addresses.
pub trait DriveSource: Send + Sync {
    /// There is a drive at the address that could be a disk.
    fn is_there(&self, address: PciAddress) -> bool;

    /// The drive, opened unless it is open already. Takes as long as the drive says that it takes (CAP.TO,
    /// up to minutes) where it does not become ready.
    ///
    /// # Errors
    /// [`DriveError`], with the reason.
    fn open(&self, address: PciAddress) -> Result<Arc<Drive>, DriveError>;
}

/// The drives of this machine that are bound to vfio-pci.
pub struct DrivesHere;

impl DriveSource for DrivesHere {
    fn is_there(&self, address: PciAddress) -> bool {
        look_at_function(address) == Ok(true)
    }

    fn open(&self, address: PciAddress) -> Result<Arc<Drive>, DriveError> {
        Drives::here().open(address, Settings::default())
    }
}
