//! [`Function`]: what the driver needs of a PCI function, and [`Bus`]: where it is found.
//!
//! All of it is off the data path. Two kinds implement it: VFIO and the emulator (`nvme/emulator`).

use std::fmt;
use std::io;
use std::sync::Arc;

use spindle_reactor::mem::Area;

use crate::bar::Bar;
use crate::dma::Iova;
use crate::quirks::PciId;

/// Memory that a drive can reach, until this is dropped.
pub trait Mapping: Send + Sync {
    /// Where the drive sees the area's first byte; the rest follows without a gap. A multiple of 4 KiB.
    fn iova(&self) -> Iova;
}

/// Why memory could not be mapped for a drive.
#[derive(Debug, thiserror::Error)]
#[error("cannot map {bytes} bytes for {function}: {source}")]
pub struct MapError {
    /// The drive.
    pub function: String,
    /// How much.
    pub bytes: usize,
    /// Why not.
    #[source]
    pub source: io::Error,
}

/// Why a drive cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenFunctionError {
    /// There is no such function now.
    #[error("{address}: no such PCI function")]
    Missing {
        /// Its address.
        address: String,
    },
    /// It is there, and not as it must be.
    #[error("{address}: {field} is {value}: {allowed}")]
    Unfit {
        /// Its address.
        address: String,
        /// What is wrong.
        field: &'static str,
        /// What it is.
        value: String,
        /// What is allowed, and what to do about it.
        allowed: String,
    },
    /// The system refused.
    #[error("{address}: cannot {verb}: {source}")]
    System {
        /// Its address.
        address: String,
        /// What was tried.
        verb: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// One PCI function, held open. Bus mastering is off until it is turned on: a controller that somebody left
/// enabled knows addresses at which other memory may be mapped now.
pub trait Function: Send + Sync {
    /// Its registers: BAR 0. A clone keeps them mapped, and a function that was asked to go
    /// ([`Function::is_removal_asked`]) goes when the last one is dropped.
    fn bar(&self) -> Bar;

    /// Who made it, and what it is.
    fn id(&self) -> io::Result<PciId>;

    /// Let the drive reach all of an area, to read and, where the area is writable, to write.
    fn map(&self, area: &Area) -> Result<Box<dyn Mapping>, MapError>;

    /// Bus mastering on or off. Off: the drive reaches no memory from now on, whatever it does.
    fn set_bus_master(&self, is_on: bool) -> io::Result<()>;

    /// Function level reset, or what the bus has for it. Afterwards the registers are those of a controller
    /// that was never enabled, and bus mastering is on.
    ///
    /// # Errors
    /// The system's: the function cannot be reset.
    fn reset(&self) -> io::Result<()>;

    /// Somebody wants the drive back (hot removal, unbinding): it is to be closed soon.
    fn is_removal_asked(&self) -> bool;
}

/// The place of a drive, at which it is opened, and opened again after it went and came.
pub trait Bus: Send + Sync + fmt::Debug {
    /// The name of the place, for messages: `0000:01:00.0`.
    fn address(&self) -> String;

    /// Open what is there now.
    fn open(&self) -> Result<Arc<dyn Function>, OpenFunctionError>;
}
