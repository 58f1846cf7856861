//! [`Drives`]: the drives that a process has open through VFIO, by address.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};

use spindle_reactor::lock::Lock;

use crate::address::PciAddress;
use crate::drive::{Drive, DriveError, wait_ended};
use crate::shared::Settings;
use crate::vfio::{Vfio, VfioBus};

/// One drive's. Locked while the drive is opened, so that the others need not wait for that.
type DriveSlot = Arc<Lock<Option<OpenDrive>>>;

/// The drive that was last opened.
struct OpenDrive {
    drive: Weak<Drive>,
    /// Its manager has.
    ended: Arc<AtomicBool>,
}

/// Drives that are open, so that several namespaces of one are disks of one [`Drive`], in one container, so
/// that memory is mapped once for all.
pub struct Drives {
    vfio: Arc<Vfio>,
    open: Lock<Vec<(PciAddress, DriveSlot)>>,
}

impl Drives {
    /// Those of this process.
    #[must_use]
    pub fn here() -> &'static Drives {
        static HERE: OnceLock<Drives> = OnceLock::new();
        HERE.get_or_init(|| Drives { vfio: Vfio::new(), open: Lock::new(Vec::new()) })
    }

    /// The drive at an address: the one that is open, or else it is opened, which takes as long as the drive
    /// takes to become ready, and before as long as one that was dropped takes to be shut down. Not on a
    /// core.
    pub fn open(&self, address: PciAddress, settings: Settings) -> Result<Arc<Drive>, DriveError> {
        let slot = self.slot(address);
        let mut open = slot.lock();
        if let Some(held) = &*open {
            if let Some(drive) = held.drive.upgrade() {
                return Ok(drive);
            }
            // Two managers would turn each other's controller off.
            wait_ended(&held.ended);
        }
        let ended = Arc::<AtomicBool>::default();
        let bus = Arc::new(VfioBus::new(Arc::clone(&self.vfio), address));
        let result = Drive::open_until(bus, settings, &ended);
        let drive = result.as_ref().map(Arc::downgrade).unwrap_or_default();
        *open = Some(OpenDrive { drive, ended });
        result
    }

    /// As many as there were addresses: those of a configuration file.
    fn slot(&self, address: PciAddress) -> DriveSlot {
        let mut places = self.open.lock();
        if let Some((_, slot)) = places.iter().find(|(at, _)| *at == address) {
            return Arc::clone(slot);
        }
        let slot = DriveSlot::default();
        places.push((address, Arc::clone(&slot)));
        slot
    }
}
