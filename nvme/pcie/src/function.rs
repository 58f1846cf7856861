//! [`Function`]: a PCI function as the driver uses it, and [`Bus`], which opens it.
//!
//! Off the data path. Implemented by VFIO and by the emulator (`tests/emulator`).

use std::fmt;
use std::io;
use std::sync::Arc;

use spindle_reactor::mem::Area;

use crate::bar::Bar;
use crate::dma::Iova;
use crate::quirks::PciId;

/// A DMA mapping of an area, removed on drop.
pub trait Mapping: Send + Sync {
    /// Returns the IOVA of the area's first byte, a multiple of 4 KiB. The area is contiguous from there.
    fn iova(&self) -> Iova;
}

/// Error of [`Function::map`].
#[derive(Debug, thiserror::Error)]
#[error("cannot map {bytes} bytes for {function}: {source}")]
pub struct MapError {
    /// PCI address of the function.
    pub function: String,
    /// Size of the area in bytes.
    pub bytes: usize,
    /// Error of the system.
    #[source]
    pub source: io::Error,
}

/// Error of [`Bus::open`].
#[derive(Debug, thiserror::Error)]
pub enum OpenFunctionError {
    /// No PCI function is present at the address.
    #[error("{address}: no such PCI function")]
    Missing {
        /// PCI address.
        address: String,
    },
    /// The function is present but does not meet a requirement.
    #[error("{address}: {field} is {value}: {allowed}")]
    Unfit {
        /// PCI address.
        address: String,
        /// Property that does not meet the requirement.
        field: &'static str,
        /// Value of the property.
        value: String,
        /// Requirement, and what to do.
        allowed: String,
    },
    /// A system call failed.
    #[error("{address}: cannot {verb}: {source}")]
    System {
        /// PCI address.
        address: String,
        /// Attempted action, to complete "cannot ...".
        verb: String,
        /// Error of the system.
        #[source]
        source: io::Error,
    },
}

/// One open PCI function. Bus mastering is off at first: a controller that was left enabled may use addresses
/// at which other memory is mapped now.
pub trait Function: Send + Sync {
    /// Returns BAR 0. Clones keep BAR 0 mapped. A requested removal ([`Function::is_removal_asked`])
    /// completes only when the function and the last clone are dropped.
    fn bar(&self) -> Bar;

    /// Reads the PCI vendor and device identifiers.
    fn id(&self) -> io::Result<PciId>;

    /// Maps an area for DMA: readable and, if the area is writable, writable by the drive.
    fn map(&self, area: &Area) -> Result<Box<dyn Mapping>, MapError>;

    /// Turns bus mastering on or off. While off, the drive cannot access memory.
    fn set_bus_master(&self, is_on: bool) -> io::Result<()>;

    /// Resets the function (FLR or another reset of the bus). Afterwards the controller is disabled and bus
    /// mastering is on.
    ///
    /// # Errors
    /// The system's error if the function cannot be reset.
    fn reset(&self) -> io::Result<()>;

    /// Returns true once a removal (hot removal, unbinding) was requested. Close the function soon.
    fn is_removal_asked(&self) -> bool;
}

/// A PCI address at which a drive is opened, also again after a removal.
pub trait Bus: Send + Sync + fmt::Debug {
    /// Returns the PCI address for logs, such as `0000:01:00.0`.
    fn address(&self) -> String;

    /// Opens the function that is present now.
    fn open(&self) -> Result<Arc<dyn Function>, OpenFunctionError>;
}
