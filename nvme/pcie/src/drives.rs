//! [`Drives`]: the process's drives that are open through VFIO, by address.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};

use spindle_reactor::lock::Lock;

use crate::address::PciAddress;
use crate::drive::{Drive, DriveError, wait_ended};
use crate::shared::Settings;
use crate::vfio::{Vfio, VfioBus};

/// State of one address. Each address has its own lock, taken while its drive is opened, so that other drives
/// can be opened at the same time.
type DriveSlot = Arc<Lock<Option<OpenDrive>>>;

/// The drive that was last opened at an address.
struct OpenDrive {
    drive: Weak<Drive>,
    /// Set once the drive's manager has ended.
    ended: Arc<AtomicBool>,
}

/// Open drives by address. Namespaces of the same drive share one [`Drive`]. All drives share one IOMMU
/// container, in which memory is mapped once.
pub struct Drives {
    vfio: Arc<Vfio>,
    open: Lock<Vec<(PciAddress, DriveSlot)>>,
}

impl Drives {
    /// Returns the drives of this process.
    #[must_use]
    pub fn here() -> &'static Drives {
        static HERE: OnceLock<Drives> = OnceLock::new();
        HERE.get_or_init(|| Drives { vfio: Vfio::new(), open: Lock::new(Vec::new()) })
    }

    /// Returns the open drive at `address`, whatever its settings, or opens the drive. Blocks until a dropped
    /// drive there is shut down, and the new one ready or failed. Never call it on a core.
    pub fn open(&self, address: PciAddress, settings: Settings) -> Result<Arc<Drive>, DriveError> {
        let slot = self.slot(address);
        let mut open = slot.lock();
        if let Some(held) = &*open {
            if let Some(drive) = held.drive.upgrade() {
                return Ok(drive);
            }
            // Two managers of one drive would disable each other's controller.
            wait_ended(&held.ended);
        }
        let ended = Arc::<AtomicBool>::default();
        let bus = Arc::new(VfioBus::new(Arc::clone(&self.vfio), address));
        let result = Drive::open_until(bus, settings, &ended);
        let drive = result.as_ref().map(Arc::downgrade).unwrap_or_default();
        *open = Some(OpenDrive { drive, ended });
        result
    }

    /// Returns the slot of an address, made if missing. Slots stay: the configured addresses bound them.
    fn slot(&self, address: PciAddress) -> DriveSlot {
        let mut slots = self.open.lock();
        if let Some((_, slot)) = slots.iter().find(|(at, _)| *at == address) {
            return Arc::clone(slot);
        }
        let slot = DriveSlot::default();
        slots.push((address, Arc::clone(&slot)));
        slot
    }
}
