//! [`Quirks`]: by PCI vendor and device, requirements of drives that registers and Identify do not report.
//!
//! From the tables of Linux (`drivers/nvme/host/pci.c`, `nvme_id_table`) and SPDK
//! (`lib/nvme/nvme_quirks.c`), without quirks for features that this driver does not use.

use std::time::Duration;

use nvme_spec::identify::IdentifyController;

use crate::dma::PAGE_BYTES;

/// Identifiers in PCI configuration space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PciId {
    /// PCI vendor ID.
    pub vendor: u16,
    /// PCI device ID.
    pub device: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Quirks {
    /// SGLs must not be used although SGLS reports them.
    pub(crate) has_bad_sgls: bool,
    /// Minimum number of entries of an I/O submission queue.
    pub(crate) queue_entries_min: u32,
    /// Wait after CC.EN was cleared, before CSTS is read.
    pub(crate) ready_delay: Duration,
    /// Commands with data should not cross a stripe, although NOIOB is 0.
    pub(crate) has_stripes: bool,
}

const INTEL: u16 = 0x8086;
const SAMSUNG: u16 = 0x144d;
const HUAWEI: u16 = 0x19e5;
const MEMBLAZE: u16 = 0x1c5f;
const SEAGATE: u16 = 0x1bb1;
const HGST: u16 = 0x1c58;

/// Delay of SPDK; Linux uses 2.3 s (`NVME_QUIRK_DELAY_AMOUNT`).
const READY_DELAY: Duration = Duration::from_millis(2500);

impl Quirks {
    pub(crate) fn of(id: PciId) -> Quirks {
        let none = Quirks::default();
        match (id.vendor, id.device) {
            // SPDK: NVME_QUIRK_NOT_USE_SGL, all devices.
            (HUAWEI, _) => Quirks { has_bad_sgls: true, ..none },
            // Linux: NVME_QUIRK_STRIPE_SIZE. SPDK: NVME_INTEL_QUIRK_STRIPING and
            // NVME_QUIRK_MINIMUM_IO_QUEUE_SIZE, which is 1024 entries.
            (INTEL, 0x0953 | 0x0a53 | 0x0a54 | 0x0a55) => {
                Quirks { queue_entries_min: 1024, has_stripes: true, ..none }
            }
            // SPDK: NVME_QUIRK_MINIMUM_IO_QUEUE_SIZE. Linux's table has no stripes for this device.
            (INTEL, 0x0b60) => Quirks { queue_entries_min: 1024, ..none },
            // Linux and SPDK: NVME_QUIRK_DELAY_BEFORE_CHK_RDY; a826 only SPDK, Seagate and HGST only Linux.
            (SAMSUNG, 0xa821 | 0xa822 | 0xa826)
            | (MEMBLAZE, 0x0540)
            | (SEAGATE, 0x0100)
            | (HGST, 0x0003 | 0x0023) => Quirks { ready_delay: READY_DELAY, ..none },
            _ => none,
        }
    }

    /// Returns the blocks of a stripe, for a namespace without NOIOB; 0 without stripes. Byte 3 of the
    /// vendor-specific part of Identify Controller is the exponent of the stripe size, `1 << exponent` pages
    /// of 4 KiB (SPDK's `nvme_ns_set_identify_data`). If that byte is 0, MDTS is the exponent (Linux).
    pub(crate) fn stripe_blocks(&self, controller: &IdentifyController, shift: u32) -> u32 {
        let [_, _, _, own, ..] = controller.vs;
        let exponent = if own == 0 { controller.mdts } else { own };
        if !self.has_stripes || exponent == 0 {
            return 0;
        }
        let bytes = u64::from(PAGE_BYTES).checked_shl(exponent.into()).unwrap_or(0);
        u32::try_from(bytes >> shift).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_by_vendor_and_device() {
        let of = |vendor, device| Quirks::of(PciId { vendor, device });
        assert_eq!(of(0x1b36, 0x0010), Quirks::default());
        assert_eq!(of(SAMSUNG, 0xa824), Quirks::default());
        assert!(of(HUAWEI, 1).has_bad_sgls && of(HUAWEI, 0x3714).has_bad_sgls);
        assert_eq!((of(INTEL, 0x0b60).queue_entries_min, of(INTEL, 0x0b60).has_stripes), (1024, false));
        for (vendor, device) in [(SAMSUNG, 0xa821), (SAMSUNG, 0xa826), (MEMBLAZE, 0x0540)] {
            assert_eq!(of(vendor, device).ready_delay, READY_DELAY);
        }
    }

    #[test]
    fn a_stripe_is_what_the_drive_says_or_its_largest_transfer() {
        let striped = Quirks::of(PciId { vendor: INTEL, device: 0x0953 });
        let mut id = IdentifyController { mdts: 5, ..IdentifyController::default() };
        assert_eq!(striped.stripe_blocks(&id, 9), 256);
        id.vs[3] = 6;
        assert_eq!((striped.stripe_blocks(&id, 9), striped.stripe_blocks(&id, 12)), (512, 64));
        id.vs[3] = 255;
        assert_eq!(striped.stripe_blocks(&id, 9), 0);
        assert_eq!(Quirks::default().stripe_blocks(&id, 9), 0);
    }
}
