//! Extensions of Spindle: the vendor-specific area of Identify Controller and the admin command End Former
//! Associations. `docs/extensions.md` specifies both.

use bitfield_struct::bitfield;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

use crate::identify::IdentifyController;
use crate::opcode::AdminOpcode;
use crate::sqe::Sqe;

/// SIG of the vendor area: identifies a controller of Spindle.
pub const SPINDLE_SIGNATURE: [u8; 8] = *b"SPINDLE\0";
/// VER of the vendor area. Later versions add fields and feature bits and keep the existing ones.
pub const SPINDLE_VERSION: u32 = 1;
/// Opcode of End Former Associations: vendor specific, no data (bits 1:0 are 00b).
pub const END_FORMER_ASSOCIATIONS: AdminOpcode = AdminOpcode(0xc0);

/// FEAT of the vendor area: supported extensions.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct SpindleFeatures {
    /// EFA: End Former Associations is supported.
    pub end_former_associations: bool,
    /// ORD: optimistic reads ([`crate::optimistic`]) are supported.
    pub optimistic_reads: bool,
    /// CLU: coherent caches ([`crate::cluster`]) are supported.
    pub clusters: bool,
    #[bits(29)]
    __: u32,
}

wire_bits!(SpindleFeatures => U32);

wire! {
    /// First 16 bytes of the vendor-specific area of Identify Controller, which begins at byte 3072.
    pub struct SpindleArea[16] {
        /// SIG: [`SPINDLE_SIGNATURE`].
        signature @ 0: [u8; 8],
        /// VER: version of the area, at least 1; see [`SPINDLE_VERSION`].
        version @ 8: U32,
        /// FEAT; see [`SpindleFeatures`].
        features @ 12: U32,
    }
}

impl SpindleArea {
    /// Creates the vendor area with [`SPINDLE_SIGNATURE`] and [`SPINDLE_VERSION`].
    #[must_use]
    pub fn new(features: SpindleFeatures) -> Self {
        Self { signature: SPINDLE_SIGNATURE, version: U32::new(SPINDLE_VERSION), features: features.into() }
    }
}

impl IdentifyController {
    /// Returns FEAT of the vendor area; no bits are set if the signature is not [`SPINDLE_SIGNATURE`] or VER
    /// is 0.
    #[must_use]
    pub fn spindle_features(&self) -> SpindleFeatures {
        match SpindleArea::read_from_prefix(&self.vs) {
            Ok((area, _)) if area.signature == SPINDLE_SIGNATURE && area.version.get() >= SPINDLE_VERSION => {
                area.features.into()
            }
            Ok(_) | Err(_) => SpindleFeatures::new(),
        }
    }

    /// Writes the first 16 bytes of the vendor area, FEAT set to `features`; the other bytes keep their
    /// value.
    pub fn set_spindle_features(&mut self, features: SpindleFeatures) {
        // The write cannot fail: `vs` has 1024 bytes, the area 16.
        let _ = SpindleArea::new(features).write_to_prefix(&mut self.vs);
    }
}

view! {
    /// End Former Associations: ends former associations of the same host that used the same token.
    pub struct EndFormerAssociations(sqe) {
        /// TOKEN, dwords 10 and 11: identifies one purpose of one host program; not 0.
        token: u64 = u64::from(sqe.cdw11()) << 32 | u64::from(sqe.cdw10()),
    }
}

/// Dword 0 of the completion of End Former Associations.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct FormerAssociations {
    /// ENDED: count of controllers that the command ended; FFFFh is 65,535 or more.
    pub ended: u16,
    #[bits(15)]
    __: u16,
    /// MAY: the wait timed out; commands of former associations may still change data.
    pub may_land: bool,
}

/// Builders for hosts.
impl Sqe {
    /// Builds End Former Associations; `token` is not 0.
    #[must_use]
    pub fn end_former_associations(cid: u16, token: u64) -> Self {
        let [low, high] = [token & 0xffff_ffff, token >> 32].map(|half| u32::try_from(half).unwrap_or(0));
        Self { cdw10: U32::new(low), cdw11: U32::new(high), ..Self::new(END_FORMER_ASSOCIATIONS.0, cid, 0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EFA: SpindleFeatures = SpindleFeatures::new().with_end_former_associations(true);

    #[test]
    fn the_vendor_area_is_these_bytes() {
        let mut id = IdentifyController::default();
        id.set_spindle_features(EFA);
        let bytes = id.as_bytes();
        assert_eq!(bytes[3072..3088], *b"SPINDLE\0\x01\0\0\0\x01\0\0\0");
        assert!(bytes[..3072].iter().chain(&bytes[3088..]).all(|byte| *byte == 0));
        assert_eq!(id.spindle_features(), EFA);
    }

    #[test]
    fn an_area_of_another_vendor_says_nothing() {
        let mut id = IdentifyController::default();
        assert_eq!(id.spindle_features(), SpindleFeatures::new());
        id.vs = [0xff; 1024];
        assert_eq!(id.spindle_features(), SpindleFeatures::new());
        id.set_spindle_features(EFA);
        id.vs[8] = 0;
        assert_eq!(id.spindle_features(), SpindleFeatures::new(), "there is no version 0");
        id.vs[8] = 9;
        assert_eq!(id.spindle_features(), EFA, "later versions keep it");
        id.vs[6] = b'F';
        assert_eq!(id.spindle_features(), SpindleFeatures::new());
    }

    #[test]
    fn end_former_associations_is_these_bytes() {
        let sqe = Sqe::end_former_associations(9, 0x1122_3344_5566_7788);
        assert_eq!(sqe.as_bytes()[..4], [0xc0, 0x40, 9, 0]);
        assert_eq!(sqe.as_bytes()[40..48], [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        assert_eq!(EndFormerAssociations::new(&sqe).token(), 0x1122_3344_5566_7788);
    }

    #[test]
    fn its_result_counts_below_and_warns_above() {
        let result = FormerAssociations::new().with_ended(0x0102).with_may_land(true);
        assert_eq!(result.into_bits(), 0x8000_0102);
    }
}
